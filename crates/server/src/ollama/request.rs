//! What Ollama's clients ask to be answered.

use serde::Deserialize;
use serde_json::{Map, Value, json};
use sluice_engine::GrammarFormat;
use utoipa::ToSchema;

use super::options::{OllamaOptions, common};
use crate::context::ignore;
use crate::error::ApiError;
use crate::openai::SamplingFields;
use crate::openapi::written;
use crate::output_spec::{Format, OutputSpec, ToolChoice};
use crate::request::{ChatRequest, Thinking, tool_call};

/// A conversation to be answered.
#[derive(Deserialize, ToSchema)]
#[schema(as = OllamaChatRequest)]
pub struct Chat {
    /// Without any the model is loaded, and that is all.
    #[serde(default)]
    #[schema(value_type = Option<Vec<OllamaMessage>>)]
    messages: Option<Vec<Map<String, Value>>>,
    #[serde(default)]
    #[schema(value_type = Option<Vec<OllamaTool>>)]
    tools: Option<Vec<Value>>,
    #[serde(flatten)]
    shared: Shared,
}

/// A prompt to be answered.
#[derive(Deserialize, ToSchema)]
#[schema(as = OllamaGenerateRequest)]
pub struct Generate {
    /// Without one the model is loaded, and that is all.
    #[serde(default)]
    prompt: Option<String>,
    #[serde(default)]
    system: Option<String>,
    /// The prompt is gone on with as it is, without the model's template.
    #[serde(default)]
    raw: Option<bool>,
    #[serde(flatten)]
    shared: Shared,
}

#[derive(Deserialize, ToSchema)]
#[schema(as = OllamaShared)]
struct Shared {
    /// Any name.
    #[serde(default)]
    model: Option<String>,
    /// Lines as they come: unless this says no.
    #[serde(default)]
    stream: Option<bool>,
    /// `json`, or a schema.
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

written! {
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

written! {
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

written! {
    /// What the text of the answer is: `json`, or a JSON schema.
    OllamaFormat, uses [], {"anyOf": [{"type": "string", "enum": ["json", ""]}, {"type": ["object", "null"]}]}
}

written! {
    /// Whether the model thinks before it answers.
    OllamaThink, uses [], {"anyOf": [{"type": ["boolean", "null"]}, {"type": "string", "enum": ["low", "medium", "high", "max", ""]}]}
}

/// Fields that would change the answer and are not obeyed.
const REFUSED: [&str; 6] = ["template", "suffix", "images", "context", "logprobs", "top_logprobs"];

/// What is asked of a prompt.
pub enum Prompted {
    Conversation(Box<ChatRequest>),
    /// To be gone on with as it is.
    Text(String, Box<SamplingFields>),
}

impl Chat {
    pub fn model(&self) -> Option<&str> {
        self.shared.model.as_deref()
    }

    pub fn asks_nothing(&self) -> bool {
        self.messages.as_ref().is_none_or(Vec::is_empty)
    }

    pub fn is_streamed(&self) -> bool {
        self.shared.stream.unwrap_or(true)
    }

    /// `thinks`: the model can.
    ///
    /// # Errors
    /// What cannot be what it is, and what cannot be obeyed, by name.
    pub fn asked(self, thinks: bool) -> Result<ChatRequest, ApiError> {
        let messages = self.messages.unwrap_or_default();
        let messages = messages.into_iter().enumerate().map(|(i, m)| message(i, m)).collect::<Result<_, _>>()?;
        self.shared.asked(messages, self.tools.unwrap_or_default(), thinks)
    }
}

impl Generate {
    pub fn model(&self) -> Option<&str> {
        self.shared.model.as_deref()
    }

    pub fn asks_nothing(&self) -> bool {
        self.prompt.as_ref().is_none_or(String::is_empty)
    }

    pub fn is_streamed(&self) -> bool {
        self.shared.stream.unwrap_or(true)
    }

    /// `has_template`, `thinks`: of the model.
    ///
    /// # Errors
    /// What cannot be what it is, and what cannot be obeyed, by name.
    pub fn asked(self, has_template: bool, thinks: bool) -> Result<Prompted, ApiError> {
        let (prompt, system) = (self.prompt.unwrap_or_default(), self.system.unwrap_or_default());
        let is_raw = self.raw.unwrap_or(false);
        if is_raw || !has_template {
            let asked = self.shared.asked(Vec::new(), Vec::new(), thinks)?;
            if asked.demanded.demand.form != GrammarFormat::Text {
                return Err(ApiError::invalid("format", "format needs the model's chat template: leave out raw"));
            }
            if is_raw && !system.is_empty() {
                return Err(ApiError::invalid("system", "system has no place in a raw prompt"));
            }
            let text = if system.is_empty() { prompt } else { format!("{system}\n\n{prompt}") };
            return Ok(Prompted::Text(text, Box::new(asked.common)));
        }
        let system = (!system.is_empty()).then(|| json!({"role": "system", "content": system}));
        let messages = system.into_iter().chain([json!({"role": "user", "content": prompt})]).collect();
        Ok(Prompted::Conversation(Box::new(self.shared.asked(messages, Vec::new(), thinks)?)))
    }
}

impl Shared {
    fn asked(self, messages: Vec<Value>, tools: Vec<Value>, thinks: bool) -> Result<ChatRequest, ApiError> {
        check_others(&self.others)?;
        let mut common = common(self.options.unwrap_or_default())?;
        common.stream = self.stream.unwrap_or(true);
        let (thinking, effort) = thinking(&self.think.unwrap_or_default(), thinks)?;
        let mut extra = Map::new();
        extra.extend(effort.map(|effort| ("reasoning_effort".to_owned(), effort.into())));
        let format = format(self.format.unwrap_or_default())?;
        let demanded = OutputSpec::new(Some(json!(tools)), &ToolChoice::Auto, true, format, None)?;
        Ok(ChatRequest { messages, demanded, thinking, extra, common, ..ChatRequest::default() })
    }
}

fn check_others(others: &Map<String, Value>) -> Result<(), ApiError> {
    for (field, value) in others {
        let asks_nothing = match value {
            Value::Null | Value::Bool(false) => true,
            Value::String(text) => text.is_empty(),
            Value::Array(all) => all.is_empty(),
            Value::Number(n) => n.as_f64() == Some(0.0),
            _ => false,
        };
        match REFUSED.contains(&field.as_str()) {
            true if !asks_nothing => return Err(ApiError::invalid(field, format!("{field} is not supported"))),
            true => {}
            false if value.is_null() => {}
            false => ignore(field),
        }
    }
    Ok(())
}

/// A message as templates want it.
fn message(i: usize, message: Map<String, Value>) -> Result<Value, ApiError> {
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
                return Err(wrong(&field, "must be a text"));
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
                        _ => return Err(wrong("tool_calls", "has arguments that are no object")),
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
            ("images", _) => return Err(wrong("images", "cannot be had: pictures are not supported")),
            ("thinking" | "tool_name", _) => {}
            _ => ignore(&format!("messages[].{field}")),
        }
    }
    if made["role"].is_null() {
        return Err(wrong("role", "is missing"));
    }
    Ok(made)
}

/// Whether the model is to think, and how hard.
fn thinking(think: &Value, thinks: bool) -> Result<(Thinking, Option<String>), ApiError> {
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
    if thinking == Thinking::On && !thinks {
        return Err(ApiError::invalid("think", "this model does not support thinking"));
    }
    Ok((thinking, effort))
}

fn format(format: Value) -> Result<Option<Format>, ApiError> {
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
    Ok(Some(Format { field: "format", form }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chat(body: Value) -> Result<ChatRequest, ApiError> {
        serde_json::from_value::<Chat>(body).unwrap().asked(true)
    }

    #[test]
    fn a_conversation_becomes_what_templates_take() {
        let asked = chat(json!({
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
            json!(asked.messages),
            json!([
                {"role": "user", "content": "How warm is it?"},
                {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [
                    {"id": "call_0", "type": "function", "function": {"name": "warmth", "arguments": {"b": 1, "a": 2}}},
                ]},
                {"role": "tool", "content": "20", "name": "warmth"},
            ])
        );
        assert_eq!((asked.thinking, &asked.extra["reasoning_effort"]), (Thinking::On, &json!("low")));
        assert!(asked.demanded.reads_calls && asked.common.stream);
        assert_eq!(
            (asked.demanded.demand.form, asked.common.max_tokens),
            (GrammarFormat::Schema(json!({"type": "object"})), Some(5))
        );
        assert_eq!(
            chat(json!({"messages": [], "format": "json"})).unwrap().demanded.demand.form,
            GrammarFormat::Object
        );
    }

    #[test]
    fn what_cannot_be_done_is_named() {
        let said = json!([{"role": "user", "content": "Hi"}]);
        for (body, part) in [
            (json!({"messages": [{"role": "user", "content": "Hi", "images": ["aGk="]}]}), "messages[0].images"),
            (json!({"messages": [{"content": "Hi"}]}), "messages[0].role is missing"),
            (json!({"messages": [{"role": "user", "content": [1]}]}), "messages[0].content must be a text"),
            (json!({"messages": [{"role": "assistant", "tool_calls": [{}]}]}), "messages[0].tool_calls"),
            (json!({"messages": said, "think": "much"}), "invalid think value"),
            (json!({"messages": said, "format": "xml"}), "invalid format"),
            (json!({"messages": said, "logprobs": true}), "logprobs is not supported"),
        ] {
            let error = chat(body).unwrap_err();
            assert!(error.message.contains(part), "{}", error.message);
        }
        let thinks = json!({"messages": said, "think": true});
        let error = serde_json::from_value::<Chat>(thinks).unwrap().asked(false).unwrap_err();
        assert!(error.message.contains("does not support thinking"), "{}", error.message);
    }

    #[test]
    fn a_prompt_goes_through_the_template_or_as_it_is() {
        let read =
            |body: Value, has_template| serde_json::from_value::<Generate>(body).unwrap().asked(has_template, false);
        let body = json!({"prompt": "Hi", "system": "Be kind.", "stream": false, "template": ""});
        let Ok(Prompted::Conversation(asked)) = read(body.clone(), true) else { panic!("no conversation") };
        let said = json!([{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]);
        assert_eq!((json!(asked.messages), asked.common.stream), (said, false));
        let Ok(Prompted::Text(text, _)) = read(body, false) else { panic!("no text") };
        assert_eq!(text, "Be kind.\n\nHi");
        let Ok(Prompted::Text(text, _)) = read(json!({"prompt": "Hi", "raw": true}), true) else { panic!("no text") };
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
