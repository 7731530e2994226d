//! The request of `/v1/messages`.

use serde::Deserialize;
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

use crate::anthropic::content::{append_message, is_marked, message, text_blocks};
use crate::anthropic::error::NO_THREADS;
use crate::anthropic::system::with_constant_value;
use crate::anthropic::tools::OfferedTools;
use crate::api::chat::{ChatRequest, Thinking};
use crate::api::fields;
use crate::api::messages::AssistantTurn;
use crate::api::output_spec::{OutputSpec, ToolChoice, parse_format, strict_names};
use crate::api::sampling::{SamplingFields, Stop};
use crate::http::context::note_ignored;
use crate::http::error::ApiError;
use crate::http::openapi::json_schema;

/// The request.
#[derive(Deserialize, ToSchema)]
#[schema(as = MessageRequest)]
pub struct MessagesRequest {
    #[serde(default, deserialize_with = "fields::objects")]
    #[schema(value_type = Vec<MessageParam>, required)]
    messages: Option<Vec<Map<String, Value>>>,
    #[serde(default)]
    #[schema(value_type = Option<Content>)]
    system: Option<Value>,
    #[serde(default, deserialize_with = "fields::limit")]
    max_tokens: Option<usize>,
    #[serde(default, deserialize_with = "fields::strings")]
    stop_sequences: Option<Vec<String>>,
    #[serde(default, deserialize_with = "fields::boolean")]
    stream: Option<bool>,
    #[serde(default, deserialize_with = "fields::number")]
    temperature: Option<f32>,
    #[serde(default, deserialize_with = "fields::number")]
    top_p: Option<f32>,
    #[serde(default, deserialize_with = "fields::integer")]
    top_k: Option<i64>,
    #[serde(default, deserialize_with = "fields::list")]
    #[schema(value_type = Option<Vec<MessageTool>>)]
    tools: Option<Vec<Value>>,
    #[serde(default, deserialize_with = "fields::nested")]
    tool_choice: Option<ToolChoiceParam>,
    #[serde(default, deserialize_with = "fields::nested")]
    thinking: Option<ThinkingParam>,
    /// Cache the whole prompt.
    #[serde(default)]
    #[schema(value_type = Option<Object>)]
    cache_control: Option<Value>,
    // Extensions.
    /// Only requests with equal salts share cached prompts.
    #[serde(default, deserialize_with = "fields::string")]
    cache_salt: Option<String>,
    #[serde(default, deserialize_with = "fields::seed")]
    seed: Option<i64>,
    /// More variables for the chat template.
    #[serde(default, deserialize_with = "fields::object")]
    #[schema(value_type = Option<Object>)]
    chat_template_kwargs: Map<String, Value>,
    #[serde(flatten)]
    others: Map<String, Value>,
}

json_schema! {
    MessageParam, uses [Content], {
        "type": "object",
        "required": ["role", "content"],
        "properties": {
            "role": {"type": "string", "description": "user, assistant or system"},
            "content": {"$ref": "#/components/schemas/Content"},
        },
    }
}

/// Which tools may be called.
#[derive(Deserialize, ToSchema)]
#[schema(as = MessageToolChoice)]
struct ToolChoiceParam {
    /// auto, any, tool or none
    #[serde(default, rename = "type", deserialize_with = "fields::string")]
    #[schema(value_type = String, required)]
    kind: Option<String>,
    #[serde(default, deserialize_with = "fields::string")]
    name: Option<String>,
    #[serde(default, deserialize_with = "fields::boolean_or_false")]
    #[schema(value_type = Option<bool>)]
    disable_parallel_tool_use: bool,
}

#[derive(Deserialize, ToSchema)]
#[schema(as = Thinking)]
struct ThinkingParam {
    /// enabled, disabled or adaptive
    #[serde(default, rename = "type", deserialize_with = "fields::string")]
    #[schema(value_type = String, required)]
    kind: Option<String>,
    #[serde(default, deserialize_with = "fields::integer")]
    budget_tokens: Option<usize>,
    #[serde(flatten)]
    others: Map<String, Value>,
}

json_schema! {
    /// A string, or blocks.
    Content, uses [], {
        "anyOf": [
            {"type": "string"},
            {"type": "array", "items": {
                "type": "object",
                "required": ["type"],
                "properties": {
                    "type": {"type": "string", "description": "text, thinking, redacted_thinking, tool_use, tool_result, document or search_result"},
                    "text": {"type": "string"},
                    "thinking": {"type": "string"},
                    "signature": {"type": "string"},
                    "id": {"type": "string"},
                    "name": {"type": "string"},
                    "input": {"type": "object"},
                    "tool_use_id": {"type": "string"},
                    "is_error": {"type": "boolean"},
                    "content": {"anyOf": [
                        {"type": "string"},
                        {"type": "array", "items": {
                            "type": "object",
                            "required": ["type"],
                            "properties": {"type": {"type": "string"}, "text": {"type": "string"}},
                        }},
                    ]},
                    "cache_control": {"type": ["object", "null"]},
                },
            }},
        ],
    }
}

json_schema! {
    /// A tool that may be called. Types other than `custom` are ignored.
    MessageTool, uses [], {
        "type": "object",
        "required": ["name"],
        "properties": {
            "type": {"type": "string"},
            "name": {"type": "string", "minLength": 1, "maxLength": 128},
            "description": {"type": ["string", "null"]},
            "input_schema": {"type": ["object", "null"], "description": "A JSON schema."},
            "strict": {"type": ["boolean", "null"], "description": "Calls follow the schema, even if the model is free not to call it."},
        },
    }
}

/// Fields that would change the answer but are not supported.
const REFUSED: [&str; 3] = ["prefill", "mcp_servers", "message"];

impl MessagesRequest {
    /// Converts it.
    ///
    /// # Errors
    /// A field that is invalid or not supported, by name.
    pub fn into_chat(self) -> Result<ChatRequest, ApiError> {
        self.check_unknown_fields()?;
        let mut messages = Vec::new();
        // 1. The system prompt, and messages
        if let Some(system) = self.system.filter(|s| !s.is_null()) {
            let (mut text, marked) = text_blocks("system", &system, with_constant_value)?;
            if system.is_string() {
                text = with_constant_value(&text);
            }
            if !text.is_empty() {
                messages.push(message("system", text, marked));
            }
        }
        let tools = self.tools.unwrap_or_default();
        let strict = strict_names(tools.iter());
        let mut offered = OfferedTools::new(&tools)?;
        let mut turn = AssistantTurn::default();
        let sources = self.messages.ok_or_else(|| ApiError::invalid_field("messages", "is missing"))?;
        for (i, source) in sources.iter().enumerate() {
            append_message(i, source, &mut turn, &mut offered, &mut messages)?;
        }
        if turn.has_answered() {
            return Err(ApiError::invalid_field(
                "messages",
                "the last message is the assistant's; continuing it is not supported",
            ));
        }
        turn.flush_into(&mut messages);
        if is_marked(self.cache_control.as_ref())
            && let Some(last) = messages.last_mut()
        {
            last["cache_control"] = json!({});
        }
        // 2. Tools
        let (tools, unlisted) = offered.tools();
        let one_call = self.tool_choice.as_ref().is_some_and(|c| c.disable_parallel_tool_use);
        let tool_choice = self.tool_choice.map_or(Ok(ToolChoice::Auto), parse_tool_choice)?;
        // 3. Sampling and format
        let (thinking, budget) = self.thinking.map_or(Ok((Thinking::Default, None)), parse_thinking)?;
        let sampling = SamplingFields {
            max_tokens: self.max_tokens,
            temperature: self.temperature,
            top_p: self.top_p,
            top_k: self.top_k,
            seed: self.seed,
            stop: self.stop_sequences.map(Stop::Many),
            stream: self.stream.unwrap_or(false),
            cache_salt: self.cache_salt,
            ..SamplingFields::default()
        };
        let within = |name: &str| self.others.get(name).unwrap_or(&Value::Null);
        let format = match parse_format("output_config.format", &within("output_config")["format"])? {
            None => parse_format("output_format", within("output_format"))?,
            format => format,
        };
        let effort =
            within("output_config")["effort"].as_str().map(|effort| ("output_config.effort", effort.to_owned()));
        if one_call && tool_choice == ToolChoice::Auto && format.is_none() && strict.is_empty() {
            note_ignored("tool_choice.disable_parallel_tool_use");
        }
        let mut output =
            OutputSpec::new(tools, &tool_choice, !one_call, format, budget)?.with_strict_tools(strict, !one_call);
        output.unlisted = unlisted;
        let extra = self.chat_template_kwargs;
        Ok(ChatRequest { messages, output, thinking, extra, effort, sampling, ..ChatRequest::default() })
    }

    /// The model that it names.
    pub fn model(&self) -> Option<&str> {
        self.others.get("model").and_then(Value::as_str)
    }

    fn check_unknown_fields(&self) -> Result<(), ApiError> {
        for (field, value) in &self.others {
            let asks = !value.is_null() && *value != json!([]) && *value != json!({});
            match field.as_str() {
                "model" => {}
                "thread" if asks => {
                    let error = ApiError::invalid_field(
                        "thread",
                        "no messages are stored: send the whole conversation instead",
                    );
                    return Err(ApiError { code: Some(NO_THREADS), ..error });
                }
                field if asks && REFUSED.contains(&field) => {
                    return Err(ApiError::invalid_field(field, "is not supported"));
                }
                "output_format" => {}
                "output_config" => {
                    let named = value
                        .as_object()
                        .into_iter()
                        .flat_map(Map::keys)
                        .filter(|name| !["format", "effort"].contains(&name.as_str()));
                    named.for_each(|name| note_ignored(&format!("output_config.{name}")));
                }
                field if asks => note_ignored(field),
                _ => {}
            }
        }
        Ok(())
    }
}

fn parse_tool_choice(choice: ToolChoiceParam) -> Result<ToolChoice, ApiError> {
    match (choice.kind.as_deref().unwrap_or_default(), choice.name) {
        ("auto", _) => Ok(ToolChoice::Auto),
        ("none", _) => Ok(ToolChoice::None),
        ("any", _) => Ok(ToolChoice::Required),
        ("tool", Some(name)) => Ok(ToolChoice::Named(name)),
        ("tool", None) => Err(ApiError::invalid_field("tool_choice.name", "is missing")),
        (kind, _) => Err(ApiError::invalid_field(
            "tool_choice.type",
            &format!("{kind:?} is not supported; it must be auto, any, tool or none"),
        )),
    }
}

/// Whether to think, and the most tokens for it.
fn parse_thinking(thinking: ThinkingParam) -> Result<(Thinking, Option<usize>), ApiError> {
    thinking.others.keys().for_each(|field| note_ignored(&format!("thinking.{field}")));
    match thinking.kind.as_deref().unwrap_or_default() {
        "enabled" => Ok((Thinking::On, thinking.budget_tokens)),
        "disabled" => Ok((Thinking::Off, None)),
        // As much as the model wants, which is what it does anyway.
        "adaptive" | "between_tools" => Ok((Thinking::On, None)),
        kind => Err(ApiError::invalid_field(
            "thinking.type",
            &format!("{kind:?} is not supported; it must be enabled, disabled or adaptive"),
        )),
    }
}

#[cfg(test)]
mod tests {
    use sluice_engine::GrammarFormat;

    use super::*;
    use crate::api::messages::tool_call;

    fn asked(request: Value) -> Result<ChatRequest, ApiError> {
        serde_json::from_value::<MessagesRequest>(request).unwrap().into_chat()
    }

    #[test]
    fn a_turn_with_thoughts_calls_and_results_becomes_what_templates_take() {
        let arguments: Value = serde_json::from_str(r#"{"path": "b", "a": [1, {"z": 0, "y": null}]}"#).unwrap();
        let chat = asked(json!({
            "model": "any", "max_tokens": 5, "stop_sequences": ["x"], "stream": true, "top_k": 3,
            "system": [{"type": "text", "text": "S"}, {"type": "text", "text": "T", "cache_control": {"type": "ephemeral"}}],
            "thinking": {"type": "enabled", "budget_tokens": 1024},
            "tools": [
                {"name": "read", "description": "Reads.", "input_schema": {"type": "object", "z": 1, "a": 2}, "cache_control": {"type": "ephemeral"}},
                {"type": "web_search_20250305", "name": "web_search"},
            ],
            "tool_choice": {"type": "any", "disable_parallel_tool_use": true},
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
                {"role": "assistant", "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "whatever"},
                    {"type": "redacted_thinking", "data": "xyz"},
                    {"type": "text", "text": "I look."},
                    {"type": "tool_use", "id": "toolu_1", "name": "read", "input": arguments},
                ]},
                {"role": "user", "content": [
                    {"type": "tool_result", "tool_use_id": "toolu_1", "is_error": true,
                        "content": [{"type": "text", "text": "no such file"}, {"type": "image", "source": {}}]},
                    {"type": "text", "text": "go on", "cache_control": {"type": "ephemeral"}},
                ]},
            ],
        }))
        .unwrap();
        let call = tool_call("toolu_1", "read", arguments);
        assert_eq!(
            chat.messages,
            [
                json!({"role": "system", "content": "S\nT", "cache_control": {}}),
                json!({"role": "user", "content": "one\ntwo"}),
                json!({"role": "assistant", "content": "I look.", "reasoning_content": "hm", "tool_calls": [call]}),
                json!({"role": "tool", "content": "no such file\n[image: it cannot be shown to this model]",
                "tool_call_id": "toolu_1", "is_error": true}),
                json!({"role": "user", "content": "go on", "cache_control": {}}),
            ]
        );
        // Fields keep the client's order.
        assert!(chat.messages[2].to_string().contains(r#"{"path":"b","a":[1,{"z":0,"y":null}]}"#));
        let function =
            json!({"name": "read", "description": "Reads.", "parameters": {"type": "object", "z": 1, "a": 2}});
        assert_eq!(chat.output.tools, Some(json!([{"type": "function", "function": function}])));
        let spec = &chat.output.constraint;
        assert!(spec.called.as_ref().is_some_and(|called| called.must && !called.several));
        assert_eq!((chat.thinking, spec.thinking_budget), (Thinking::On, Some(1024)));
        assert_eq!((chat.sampling.max_tokens, chat.sampling.top_k, chat.sampling.stream), (Some(5), Some(3), true));
        assert_eq!(chat.sampling.stops().unwrap(), ["x"]);
    }

    #[test]
    fn what_the_assistant_says_in_several_messages_is_one_turn() {
        let said = |block: Value| json!({"role": "assistant", "content": [block]});
        let chat = asked(json!({"messages": [
            {"role": "user", "content": "q"},
            said(json!({"type": "thinking", "thinking": "hm", "signature": ""})),
            said(json!({"type": "text", "text": "a"})),
            said(json!({"type": "tool_use", "id": "1", "name": "f", "input": {}})),
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1"}]},
            {"role": "system", "content": "be brief"},
        ]}))
        .unwrap();
        let call = tool_call("1", "f", json!({}));
        assert_eq!(
            chat.messages[1..],
            [
                json!({"role": "assistant", "content": "a", "reasoning_content": "hm", "tool_calls": [call]}),
                json!({"role": "tool", "content": "", "tool_call_id": "1"}),
                json!({"role": "system", "content": "be brief"}),
            ]
        );
    }

    #[test]
    fn the_changing_value_of_the_first_block_is_a_constant() {
        let block =
            |value: &str| format!("x-anthropic-billing-header: cc_version=2.1.40.f00; cc_entrypoint=cli; cch={value};");
        for system in [
            json!(block("1a2b3")),
            json!([{"type": "text", "text": block("ffff0")}, {"type": "text", "text": "cch=1"}]),
        ] {
            let chat =
                asked(json!({"system": system, "messages": [{"role": "user", "content": "cch=12345"}]})).unwrap();
            let text = chat.messages[0]["content"].as_str().unwrap();
            assert!(text.starts_with(&block("00000")), "{text}");
            assert!(!system.is_array() || text.ends_with("\ncch=1"), "{text}");
            assert_eq!(chat.messages[1]["content"], "cch=12345");
        }
        assert_eq!(with_constant_value("about cch=123"), "about cch=123");
        assert_eq!(with_constant_value("x-anthropic-billing-header: cch="), "x-anthropic-billing-header: cch=00000");
    }

    #[test]
    fn what_cannot_be_done_is_refused_by_its_place() {
        let user = |content: Value| json!({"messages": [{"role": "user", "content": content}]});
        let with = |field: &str, value: Value| {
            let mut request = user("x".into());
            request[field] = value;
            request
        };
        let last = json!({"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "{"}]});
        for (request, part) in [
            (user(json!([{"type": "image", "source": {}}])), "messages.0.content.0: blocks of image"),
            (user(json!(5)), "messages.0.content: must be"),
            (user(json!([{"type": "tool_result"}])), "messages.0.content.0: a tool_result needs"),
            (json!({"messages": [{"role": "king", "content": "x"}]}), "messages.0.role: \"king\""),
            (last, "messages: the last message is the assistant's"),
            (with("tool_choice", json!({"type": "tool"})), "tool_choice.name"),
            (with("thinking", json!({"type": "loud"})), "thinking.type"),
            (with("mcp_servers", json!([{"url": "x"}])), "mcp_servers"),
            (with("tools", json!([{"description": "x"}])), "tools.0.name"),
        ] {
            let error = asked(request).unwrap_err();
            assert!(error.message.starts_with(part), "{}", error.message);
            assert_eq!(error.status.as_u16(), 400);
        }
        let format = json!({"type": "json_schema", "schema": {"type": "object"}});
        let output = asked(with("output_config", json!({"effort": "low", "format": format}))).unwrap().output;
        assert_eq!(
            (output.constraint.format, output.blamed_field),
            (GrammarFormat::Schema(json!({"type": "object"})), "output_config.format")
        );
        // Fields without effect are accepted.
        asked(with("mcp_servers", json!([]))).unwrap();
        asked(with("context_management", json!({"edits": [{"type": "clear_tool_uses_20250919"}]}))).unwrap();
    }
}
