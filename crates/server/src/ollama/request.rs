//! Requests of `/api/chat` and `/api/generate`.

use serde::Deserialize;
use serde_json::{Map, Value, json};
use sluice_engine::GrammarFormat;
use utoipa::ToSchema;

use crate::api::chat::{ChatRequest, Thinking};
use crate::api::messages::tool_call;
use crate::api::output_spec::{OutputSpec, TextFormat, ToolChoice};
use crate::api::sampling::SamplingFields;
use crate::http::context::note_ignored;
use crate::http::error::ApiError;
use crate::http::openapi::json_schema;
use crate::ollama::options::{OllamaOptions, sampling_fields};

/// A conversation to be answered.
#[derive(Deserialize, ToSchema)]
#[schema(as = OllamaChatRequest)]
pub struct OllamaChat {
    /// Without messages, the request only loads the model.
    #[serde(default)]
    #[schema(value_type = Option<Vec<OllamaMessage>>)]
    messages: Option<Vec<Map<String, Value>>>,
    #[serde(default)]
    #[schema(value_type = Option<Vec<OllamaTool>>)]
    tools: Option<Vec<Value>>,
    #[serde(flatten)]
    pub shared: SharedFields,
}

/// A prompt to be answered.
#[derive(Deserialize, ToSchema)]
#[schema(as = OllamaGenerateRequest)]
pub struct OllamaGenerate {
    /// Without a prompt, the request only loads the model.
    #[serde(default)]
    prompt: Option<String>,
    #[serde(default)]
    system: Option<String>,
    /// Continue the prompt as it is, without the chat template.
    #[serde(default)]
    raw: Option<bool>,
    #[serde(flatten)]
    pub shared: SharedFields,
}

/// Fields of both requests.
#[derive(Deserialize, ToSchema)]
#[schema(as = OllamaShared)]
pub struct SharedFields {
    /// Ignored unless it names one of several models that the server offers.
    #[serde(default)]
    model: Option<String>,
    /// Whether to stream lines of JSON; the default is true.
    #[serde(default)]
    stream: Option<bool>,
    /// `json`, or a JSON schema.
    #[serde(default)]
    #[schema(value_type = Option<OllamaFormat>)]
    format: Option<Value>,
    #[serde(default)]
    #[schema(value_type = Option<OllamaThink>)]
    think: Option<Value>,
    #[serde(default)]
    #[schema(value_type = Option<OllamaOptions>)]
    options: Option<Map<String, Value>>,
    #[serde(flatten)]
    others: Map<String, Value>,
}

json_schema! {
    /// A message.
    OllamaMessage, uses [], {
        "type": "object",
        "required": ["role"],
        "properties": {
            "role": {"type": "string", "description": "system, user, assistant or tool"},
            "content": {"type": ["string", "null"]},
            "thinking": {"type": ["string", "null"]},
            "tool_calls": {"type": ["array", "null"], "items": {
                "type": "object",
                "required": ["function"],
                "properties": {
                    "function": {
                        "type": "object",
                        "required": ["name"],
                        "properties": {"name": {"type": "string"}, "arguments": {"type": ["object", "null"]}},
                    },
                },
            }},
            "tool_name": {"type": ["string", "null"]},
        },
    }
}

json_schema! {
    /// A function that may be called.
    OllamaTool, uses [], {
        "type": "object",
        "required": ["function"],
        "properties": {
            "type": {"type": "string", "enum": ["function"]},
            "function": {
                "type": "object",
                "required": ["name"],
                "properties": {
                    "name": {"type": "string", "minLength": 1, "maxLength": 128},
                    "description": {"type": "string"},
                    "parameters": {"type": "object", "description": "A JSON schema."},
                },
            },
        },
    }
}

json_schema! {
    /// The format of the answer's text: `json`, or a JSON schema.
    OllamaFormat, uses [], {"anyOf": [{"type": "string", "enum": ["json", ""]}, {"type": ["object", "null"]}]}
}

json_schema! {
    /// Whether the model thinks before it answers.
    OllamaThink, uses [], {"anyOf": [{"type": ["boolean", "null"]}, {"type": "string", "enum": ["low", "medium", "high", "max", ""]}]}
}

/// Fields that would change the answer but are not supported.
const REFUSED: [&str; 6] = ["template", "suffix", "images", "context", "logprobs", "top_logprobs"];

/// How a prompt is answered.
pub enum OllamaPrompt {
    /// As a conversation, through the chat template.
    Conversation(Box<ChatRequest>),
    /// As a text to continue.
    Text(String, Box<SamplingFields>),
}

impl OllamaChat {
    /// Whether the request only loads the model.
    pub fn is_empty(&self) -> bool {
        self.messages.as_ref().is_none_or(Vec::is_empty)
    }

    /// Converts it. `can_think`: whether the model has thoughts.
    ///
    /// # Errors
    /// A field that is invalid or not supported, by name.
    pub fn into_chat(self, can_think: bool) -> Result<ChatRequest, ApiError> {
        let messages = self.messages.unwrap_or_default();
        let messages = messages.into_iter().enumerate().map(|(i, m)| chat_message(i, m)).collect::<Result<_, _>>()?;
        self.shared.into_chat(messages, self.tools.unwrap_or_default(), can_think)
    }
}

impl OllamaGenerate {
    /// Whether the request only loads the model.
    pub fn is_empty(&self) -> bool {
        self.prompt.as_ref().is_none_or(String::is_empty)
    }

    /// Converts it. `has_template`, `can_think`: whether the model has a chat template and thoughts.
    ///
    /// # Errors
    /// A field that is invalid or not supported, by name.
    pub fn into_prompt(self, has_template: bool, can_think: bool) -> Result<OllamaPrompt, ApiError> {
        let (prompt, system) = (self.prompt.unwrap_or_default(), self.system.unwrap_or_default());
        let is_raw = self.raw.unwrap_or(false);
        if is_raw || !has_template {
            let chat = self.shared.into_chat(Vec::new(), Vec::new(), can_think)?;
            if chat.output.constraint.format != GrammarFormat::Text {
                return Err(ApiError::invalid("format", "format needs the chat template: leave out raw"));
            }
            if is_raw && !system.is_empty() {
                return Err(ApiError::invalid("system", "system is not possible with raw"));
            }
            let text = if system.is_empty() { prompt } else { format!("{system}\n\n{prompt}") };
            return Ok(OllamaPrompt::Text(text, Box::new(chat.sampling)));
        }
        let system = (!system.is_empty()).then(|| json!({"role": "system", "content": system}));
        let messages = system.into_iter().chain([json!({"role": "user", "content": prompt})]).collect();
        Ok(OllamaPrompt::Conversation(Box::new(self.shared.into_chat(messages, Vec::new(), can_think)?)))
    }
}

impl SharedFields {
    /// The model that the request names.
    pub fn model(&self) -> Option<&str> {
        self.model.as_deref()
    }

    /// Whether the answer is streamed.
    pub fn is_streamed(&self) -> bool {
        self.stream.unwrap_or(true)
    }

    fn into_chat(self, messages: Vec<Value>, tools: Vec<Value>, can_think: bool) -> Result<ChatRequest, ApiError> {
        check_unknown_fields(&self.others)?;
        let mut sampling = sampling_fields(self.options.unwrap_or_default())?;
        sampling.stream = self.stream.unwrap_or(true);
        let (thinking, effort) = parse_thinking(&self.think.unwrap_or_default(), can_think)?;
        let mut extra = Map::new();
        extra.extend(effort.map(|effort| ("reasoning_effort".to_owned(), effort.into())));
        let format = parse_format(self.format.unwrap_or_default())?;
        let output = OutputSpec::new(Some(json!(tools)), &ToolChoice::Auto, true, format, None)?;
        Ok(ChatRequest { messages, output, thinking, extra, sampling, ..ChatRequest::default() })
    }
}

fn check_unknown_fields(others: &Map<String, Value>) -> Result<(), ApiError> {
    for (field, value) in others {
        let is_harmless = match value {
            Value::Null | Value::Bool(false) => true,
            Value::String(text) => text.is_empty(),
            Value::Array(all) => all.is_empty(),
            Value::Number(n) => n.as_f64() == Some(0.0),
            _ => false,
        };
        match REFUSED.contains(&field.as_str()) {
            true if !is_harmless => return Err(ApiError::invalid(field, format!("{field} is not supported"))),
            true => {}
            false if value.is_null() => {}
            false => note_ignored(field),
        }
    }
    Ok(())
}

/// A message as chat templates take it.
fn chat_message(i: usize, message: Map<String, Value>) -> Result<Value, ApiError> {
    let wrong = |field: &str, what: &str| {
        let field = format!("messages[{i}].{field}");
        ApiError::invalid(&field, format!("{field} {what}"))
    };
    let mut made = json!({"content": ""});
    for (field, value) in message {
        match (field.as_str(), value) {
            (_, Value::Null) => {}
            ("role" | "content", value @ Value::String(_)) => made[field] = value,
            ("role" | "content" | "thinking" | "tool_name", value) if !value.is_string() => {
                return Err(wrong(&field, "must be a string"));
            }
            ("thinking", value) if value != "" => made["reasoning_content"] = value,
            ("tool_name", value) if value != "" => made["name"] = value,
            ("tool_call_id", value @ Value::String(_)) => made[field] = value,
            ("tool_calls", Value::Array(calls)) => {
                let call = |(n, call): (usize, Value)| {
                    let (name, arguments) = (&call["function"]["name"], &call["function"]["arguments"]);
                    let name = name.as_str().ok_or_else(|| wrong("tool_calls", "has a call without function.name"))?;
                    let arguments = match arguments {
                        Value::Null => json!({}),
                        Value::Object(_) | Value::String(_) => arguments.clone(),
                        _ => return Err(wrong("tool_calls", "has arguments that are not an object")),
                    };
                    let id = call["id"].as_str().map_or_else(|| format!("call_{n}"), str::to_owned);
                    Ok(tool_call(&id, name, arguments))
                };
                let calls = calls.into_iter().enumerate().map(call).collect::<Result<Vec<_>, _>>()?;
                if !calls.is_empty() {
                    made["tool_calls"] = calls.into();
                }
            }
            ("tool_calls", _) => return Err(wrong("tool_calls", "must be a list")),
            ("images", Value::Array(all)) if all.is_empty() => {}
            ("images", _) => return Err(wrong("images", "is not supported")),
            ("thinking" | "tool_name", _) => {}
            _ => note_ignored(&format!("messages[].{field}")),
        }
    }
    if made["role"].is_null() {
        return Err(wrong("role", "is missing"));
    }
    Ok(made)
}

/// Whether to think, and with which effort.
fn parse_thinking(think: &Value, can_think: bool) -> Result<(Thinking, Option<String>), ApiError> {
    let (thinking, effort) = match think {
        Value::Null => (Thinking::Default, None),
        Value::Bool(false) => (Thinking::Off, None),
        Value::Bool(true) => (Thinking::On, None),
        Value::String(level) if level.is_empty() => (Thinking::Default, None),
        Value::String(level) if ["low", "medium", "high", "max"].contains(&level.as_str()) => {
            (Thinking::On, Some(level.clone()))
        }
        _ => {
            let message =
                format!("invalid think value: {think} (must be \"high\", \"medium\", \"low\", true, or false)");
            return Err(ApiError::invalid("think", message));
        }
    };
    if thinking == Thinking::On && !can_think {
        return Err(ApiError::invalid("think", "this model does not support thinking"));
    }
    Ok((thinking, effort))
}

fn parse_format(format: Value) -> Result<Option<TextFormat>, ApiError> {
    let form = match format {
        Value::Null => return Ok(None),
        Value::String(text) if text.is_empty() => return Ok(None),
        Value::String(text) if text == "json" => GrammarFormat::Object,
        Value::Object(_) => GrammarFormat::Schema(format),
        _ => {
            let message = format!("invalid format: {format}; expected \"json\" or a valid JSON Schema object");
            return Err(ApiError::invalid("format", message));
        }
    };
    Ok(Some(TextFormat { field: "format", form }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse_chat(body: Value) -> Result<ChatRequest, ApiError> {
        serde_json::from_value::<OllamaChat>(body).unwrap().into_chat(true)
    }

    #[test]
    fn a_conversation_becomes_what_templates_take() {
        let chat = parse_chat(json!({
            "model": "any", "think": "low", "format": {"type": "object"}, "keep_alive": -1, "options": {"num_predict": 5},
            "messages": [
                {"role": "user", "content": "How warm is it?", "images": []},
                {"role": "assistant", "content": "", "thinking": "hm", "tool_calls": [{"function": {"name": "warmth", "arguments": {"b": 1, "a": 2}}}]},
                {"role": "tool", "content": "20", "tool_name": "warmth"},
            ],
            "tools": [{"type": "function", "function": {"name": "warmth", "parameters": {"type": "object"}}}],
        }))
        .unwrap();
        assert_eq!(
            json!(chat.messages),
            json!([
                {"role": "user", "content": "How warm is it?"},
                {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [
                    {"id": "call_0", "type": "function", "function": {"name": "warmth", "arguments": {"b": 1, "a": 2}}},
                ]},
                {"role": "tool", "content": "20", "name": "warmth"},
            ])
        );
        assert_eq!((chat.thinking, &chat.extra["reasoning_effort"]), (Thinking::On, &json!("low")));
        assert!(chat.output.parses_calls && chat.sampling.stream);
        assert_eq!(
            (chat.output.constraint.format, chat.sampling.max_tokens),
            (GrammarFormat::Schema(json!({"type": "object"})), Some(5))
        );
        assert_eq!(
            parse_chat(json!({"messages": [], "format": "json"})).unwrap().output.constraint.format,
            GrammarFormat::Object
        );
    }

    #[test]
    fn what_cannot_be_done_is_named() {
        let said = json!([{"role": "user", "content": "Hi"}]);
        for (body, part) in [
            (json!({"messages": [{"role": "user", "content": "Hi", "images": ["aGk="]}]}), "messages[0].images"),
            (json!({"messages": [{"content": "Hi"}]}), "messages[0].role is missing"),
            (json!({"messages": [{"role": "user", "content": [1]}]}), "messages[0].content must be a string"),
            (json!({"messages": [{"role": "assistant", "tool_calls": [{}]}]}), "messages[0].tool_calls"),
            (json!({"messages": said, "think": "much"}), "invalid think value"),
            (json!({"messages": said, "format": "xml"}), "invalid format"),
            (json!({"messages": said, "logprobs": true}), "logprobs is not supported"),
        ] {
            let error = parse_chat(body).unwrap_err();
            assert!(error.message.contains(part), "{}", error.message);
        }
        let thinks = json!({"messages": said, "think": true});
        let error = serde_json::from_value::<OllamaChat>(thinks).unwrap().into_chat(false).unwrap_err();
        assert!(error.message.contains("does not support thinking"), "{}", error.message);
    }

    #[test]
    fn a_prompt_goes_through_the_template_or_as_it_is() {
        let read = |body: Value, has_template| {
            serde_json::from_value::<OllamaGenerate>(body).unwrap().into_prompt(has_template, false)
        };
        let body = json!({"prompt": "Hi", "system": "Be kind.", "stream": false, "template": ""});
        let Ok(OllamaPrompt::Conversation(chat)) = read(body.clone(), true) else { panic!("no conversation") };
        let said = json!([{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]);
        assert_eq!((json!(chat.messages), chat.sampling.stream), (said, false));
        let Ok(OllamaPrompt::Text(text, _)) = read(body, false) else { panic!("no text") };
        assert_eq!(text, "Be kind.\n\nHi");
        let Ok(OllamaPrompt::Text(text, _)) = read(json!({"prompt": "Hi", "raw": true}), true) else {
            panic!("no text")
        };
        assert_eq!(text, "Hi");
        for (body, field) in [
            (json!({"prompt": "a", "suffix": "b"}), "suffix"),
            (json!({"prompt": "a", "template": "{{ .Prompt }}"}), "template"),
            (json!({"prompt": "a", "images": ["aGk="]}), "images"),
            (json!({"prompt": "a", "context": [1]}), "context"),
            (json!({"prompt": "a", "raw": true, "format": "json"}), "format"),
            (json!({"prompt": "a", "raw": true, "system": "b"}), "system"),
        ] {
            let Err(error) = read(body, true) else { panic!("{field} was taken") };
            assert_eq!(error.param.as_deref(), Some(field));
        }
    }
}
