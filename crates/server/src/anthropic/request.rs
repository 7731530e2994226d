//! From Anthropic's words to what every dialect asks for.

use std::sync::Once;

use serde::Deserialize;
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

use super::NO_THREADS;
use super::offered::Offered;
use crate::context::ignore;
use crate::error::ApiError;
use crate::given;
use crate::openai::{SamplingFields, Stop};
use crate::openapi::written;
use crate::output_spec::{OutputSpec, ToolChoice, format_of, strict_names};
use crate::request::{ChatRequest, Thinking, Turn, tool_call};

#[derive(Deserialize, ToSchema)]
#[schema(as = MessageRequest)]
pub struct MessagesRequest {
    #[serde(default, deserialize_with = "given::objects")]
    #[schema(value_type = Vec<MessageParam>, required)]
    messages: Option<Vec<Map<String, Value>>>,
    #[serde(default)]
    #[schema(value_type = Option<Content>)]
    system: Option<Value>,
    #[serde(default, deserialize_with = "given::limit")]
    max_tokens: Option<usize>,
    #[serde(default, deserialize_with = "given::texts")]
    stop_sequences: Option<Vec<String>>,
    #[serde(default, deserialize_with = "given::flag")]
    stream: Option<bool>,
    #[serde(default, deserialize_with = "given::number")]
    temperature: Option<f32>,
    #[serde(default, deserialize_with = "given::number")]
    top_p: Option<f32>,
    #[serde(default, deserialize_with = "given::whole")]
    top_k: Option<i64>,
    #[serde(default, deserialize_with = "given::list")]
    #[schema(value_type = Option<Vec<MessageTool>>)]
    tools: Option<Vec<Value>>,
    #[serde(default, deserialize_with = "given::part")]
    tool_choice: Option<Choice>,
    #[serde(default, deserialize_with = "given::part")]
    thinking: Option<WireThinking>,
    /// The client wants to keep the whole prompt.
    #[serde(default)]
    #[schema(value_type = Option<Object>)]
    cache_control: Option<Value>,
    // What Anthropic does not know and our users want.
    /// What is kept of prompts is shared among those of the same salt.
    #[serde(default, deserialize_with = "given::text")]
    cache_salt: Option<String>,
    #[serde(default, deserialize_with = "given::seed")]
    seed: Option<i64>,
    /// More names that the template may look at.
    #[serde(default, deserialize_with = "given::object")]
    #[schema(value_type = Option<Object>)]
    chat_template_kwargs: Map<String, Value>,
    #[serde(flatten)]
    others: Map<String, Value>,
}

written! {
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
struct Choice {
    /// auto, any, tool or none
    #[serde(default, rename = "type", deserialize_with = "given::text")]
    #[schema(value_type = String, required)]
    kind: Option<String>,
    #[serde(default, deserialize_with = "given::text")]
    name: Option<String>,
    #[serde(default, deserialize_with = "given::flag_or_false")]
    #[schema(value_type = Option<bool>)]
    disable_parallel_tool_use: bool,
}

#[derive(Deserialize, ToSchema)]
#[schema(as = Thinking)]
struct WireThinking {
    /// enabled, disabled or adaptive
    #[serde(default, rename = "type", deserialize_with = "given::text")]
    #[schema(value_type = String, required)]
    kind: Option<String>,
    #[serde(default, deserialize_with = "given::whole")]
    budget_tokens: Option<usize>,
    #[serde(flatten)]
    others: Map<String, Value>,
}

written! {
    /// Words, or blocks of them.
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

written! {
    /// A tool that may be called. Those of other types than `custom` have no effect.
    MessageTool, uses [], {
        "type": "object",
        "required": ["name"],
        "properties": {
            "type": {"type": "string"},
            "name": {"type": "string", "minLength": 1, "maxLength": 128},
            "description": {"type": ["string", "null"]},
            "input_schema": {"type": ["object", "null"], "description": "A JSON schema."},
            "strict": {"type": ["boolean", "null"], "description": "Its calls keep to the schema, also where the model is free to call it or not."},
        },
    }
}

/// Fields that would change the answer if they were obeyed.
const REFUSED: [&str; 3] = ["prefill", "mcp_servers", "message"];

pub fn invalid(field: &str, what: &str) -> ApiError {
    ApiError::invalid(field, format!("{field}: {what}"))
}

impl MessagesRequest {
    /// # Errors
    /// What cannot be what it is, and what cannot be obeyed, by name.
    pub fn asked(self) -> Result<ChatRequest, ApiError> {
        self.check_others()?;
        let mut messages = Vec::new();
        // 1. The system prompt, and what was said
        if let Some(system) = self.system.filter(|s| !s.is_null()) {
            let (mut text, marked) = texts("system", &system, "\n", first_block)?;
            if system.is_string() {
                text = first_block(&text);
            }
            if !text.is_empty() {
                messages.push(message("system", text, marked));
            }
        }
        let tools = self.tools.unwrap_or_default();
        let strict = strict_names(tools.iter());
        let mut offered = Offered::new(&tools)?;
        let mut turn = Turn::default();
        let said = self.messages.ok_or_else(|| invalid("messages", "it is missing"))?;
        for (i, said) in said.iter().enumerate() {
            take_message(i, said, &mut turn, &mut offered, &mut messages)?;
        }
        if turn.has_answered() {
            return Err(invalid("messages", "the last message is the assistant's; to go on with it is not supported"));
        }
        turn.end(&mut messages);
        if is_mark(self.cache_control.as_ref())
            && let Some(last) = messages.last_mut()
        {
            last["cache_control"] = json!({});
        }
        // 2. Tools
        let (tools, unlisted) = offered.tools();
        let one_call = self.tool_choice.as_ref().is_some_and(|c| c.disable_parallel_tool_use);
        let tool_choice = self.tool_choice.map_or(Ok(ToolChoice::Auto), tool_choice)?;
        // 3. The answer
        let (thinking, budget) = self.thinking.map_or(Ok((Thinking::Default, None)), thinking)?;
        let common = SamplingFields {
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
        let format = match format_of("output_config.format", &within("output_config")["format"])? {
            None => format_of("output_format", within("output_format"))?,
            format => format,
        };
        if one_call && tool_choice == ToolChoice::Auto && format.is_none() && strict.is_empty() {
            ignore("tool_choice.disable_parallel_tool_use");
        }
        let mut demanded = OutputSpec::new(tools, &tool_choice, !one_call, format, budget)?.strictly(strict, !one_call);
        demanded.unlisted = unlisted;
        Ok(ChatRequest { messages, demanded, thinking, extra: self.chat_template_kwargs, logprobs: None, common })
    }

    /// Which model it names.
    pub fn model(&self) -> Option<&str> {
        self.others.get("model").and_then(Value::as_str)
    }

    fn check_others(&self) -> Result<(), ApiError> {
        for (field, value) in &self.others {
            let asks = !value.is_null() && *value != json!([]) && *value != json!({});
            match field.as_str() {
                "model" => {}
                "thread" if asks => {
                    let error = invalid("thread", "no messages are kept here: send the whole conversation without it");
                    return Err(ApiError { code: Some(NO_THREADS), ..error });
                }
                field if asks && REFUSED.contains(&field) => return Err(invalid(field, "this is not supported")),
                "output_format" => {}
                "output_config" => {
                    let named = value.as_object().into_iter().flat_map(Map::keys).filter(|name| *name != "format");
                    named.for_each(|name| ignore(&format!("output_config.{name}")));
                }
                field if asks => ignore(field),
                _ => {}
            }
        }
        Ok(())
    }
}

fn message(role: &str, content: String, marked: bool) -> Value {
    let mut message = json!({"role": role, "content": content});
    if marked {
        message["cache_control"] = json!({});
    }
    message
}

fn is_mark(value: Option<&Value>) -> bool {
    value.is_some_and(|v| !v.is_null())
}

/// Blocks of a content; a text is one.
fn blocks(content: &Value) -> Option<Vec<Value>> {
    match content {
        Value::String(text) => Some(vec![json!({"type": "text", "text": text})]),
        Value::Array(blocks) => Some(blocks.clone()),
        _ => None,
    }
}

/// The text of blocks that may be nothing else, and whether one of them is marked. `first` is what becomes of the first block.
fn texts(name: &str, content: &Value, between: &str, first: fn(&str) -> String) -> Result<(String, bool), ApiError> {
    let blocks = blocks(content).ok_or_else(|| invalid(name, "neither a text nor a list of blocks"))?;
    let mut all = Vec::new();
    for (i, block) in blocks.iter().enumerate() {
        let name = format!("{name}.{i}");
        let text = text_of(block).ok_or_else(|| unsupported(&name, block))?;
        all.push(if i == 0 { first(&text) } else { text });
    }
    Ok((all.join(between), blocks.iter().any(|block| is_mark(block.get("cache_control")))))
}

fn unsupported(name: &str, block: &Value) -> ApiError {
    if kind_of(block) == "text" {
        return invalid(name, "it has no text");
    }
    invalid(name, &format!("blocks of {} are not supported", kind_of(block)))
}

fn kind_of(block: &Value) -> &str {
    block["type"].as_str().unwrap_or("no type")
}

/// What a block says, where it says it in words.
fn text_of(block: &Value) -> Option<String> {
    match kind_of(block) {
        "text" => block["text"].as_str().map(str::to_owned),
        "document" if block["source"]["type"] == "text" => block["source"]["data"].as_str().map(str::to_owned),
        "document" if block["source"]["type"] == "content" => {
            texts("", &block["source"]["content"], "\n", str::to_owned).ok().map(|(text, _)| text)
        }
        "search_result" => texts("", &block["content"], "\n", str::to_owned).ok().map(|(text, _)| text),
        _ => None,
    }
}

/// Puts a message behind those that were said, and what the assistant said into `turn`, which ends when somebody else says something.
fn take_message(
    i: usize,
    said: &Map<String, Value>,
    turn: &mut Turn,
    offered: &mut Offered,
    messages: &mut Vec<Value>,
) -> Result<(), ApiError> {
    let name = format!("messages.{i}.content");
    let blocks =
        said.get("content").and_then(blocks).ok_or_else(|| invalid(&name, "neither a text nor a list of blocks"))?;
    match said.get("role").and_then(Value::as_str).unwrap_or_default() {
        "assistant" => {
            for (at, block) in blocks.iter().enumerate() {
                take_own_block(&format!("{name}.{at}"), block, turn)?;
            }
        }
        "user" => {
            turn.end(messages);
            let mut words: Option<(String, bool)> = None;
            for (at, block) in blocks.iter().enumerate() {
                let name = format!("{name}.{at}");
                let marked = is_mark(block.get("cache_control"));
                if kind_of(block) == "tool_result" {
                    messages.extend(words.take().map(|(text, marked)| message("user", text, marked)));
                    messages.push(tool_result(&name, block, marked, offered)?);
                    continue;
                }
                let text = text_of(block).ok_or_else(|| unsupported(&name, block))?;
                let (all, is_marked) = words.get_or_insert_default();
                if !all.is_empty() {
                    all.push('\n');
                }
                *all += &text;
                *is_marked |= marked;
            }
            messages.extend(words.map(|(text, marked)| message("user", text, marked)));
        }
        "system" => {
            turn.end(messages);
            let mut words = Vec::new();
            for (at, block) in blocks.iter().enumerate() {
                let name = format!("{name}.{at}");
                let text = text_of(block).map_or_else(|| offered.change(&name, block), |text| Ok(Some(text)))?;
                words.push(text.ok_or_else(|| unsupported(&name, block))?);
            }
            let marked = blocks.iter().any(|block| is_mark(block.get("cache_control")));
            messages.push(message("system", words.join("\n"), marked));
        }
        role => {
            return Err(invalid(
                &format!("messages.{i}.role"),
                &format!("{role:?} is none of user, assistant and system"),
            ));
        }
    }
    Ok(())
}

/// A block of what the assistant said.
fn take_own_block(name: &str, block: &Value, turn: &mut Turn) -> Result<(), ApiError> {
    turn.is_marked |= is_mark(block.get("cache_control"));
    match kind_of(block) {
        "text" => turn.text += block["text"].as_str().ok_or_else(|| invalid(name, "it has no text"))?,
        "thinking" => turn.thoughts += block["thinking"].as_str().ok_or_else(|| invalid(name, "it has no thinking"))?,
        "tool_use" => {
            let (Some(id), Some(tool)) = (block["id"].as_str(), block["name"].as_str()) else {
                return Err(invalid(name, "a tool_use needs an id and a name"));
            };
            let arguments = block.get("input").filter(|v| v.is_object()).cloned().unwrap_or_else(|| json!({}));
            turn.calls.push(tool_call(id, tool, arguments));
        }
        // Only who made them can read them, or they tell of tools that ran elsewhere.
        kind => ignore(&format!("messages.content.{kind}")),
    }
    Ok(())
}

fn tool_result(name: &str, block: &Value, marked: bool, offered: &mut Offered) -> Result<Value, ApiError> {
    let id = block["tool_use_id"].as_str().ok_or_else(|| invalid(name, "a tool_result needs a tool_use_id"))?;
    let content = block.get("content").filter(|c| !c.is_null());
    let blocks = content.map_or_else(|| Some(Vec::new()), blocks);
    let blocks = blocks.ok_or_else(|| invalid(name, "its content is neither a text nor a list of blocks"))?;
    let mut words = |block: &Value| {
        let found = block["tool_name"].as_str().filter(|_| kind_of(block) == "tool_reference");
        let known = text_of(block).or_else(|| offered.refer(found?));
        known.unwrap_or_else(|| {
            // A conversation goes on where a tool has looked at a picture; the model is told that it did not.
            let kind = kind_of(block);
            ignore(&format!("tool_result.content.{kind}"));
            format!("[{kind}: it cannot be shown to this model]")
        })
    };
    let text: Vec<String> = blocks.iter().map(&mut words).collect();
    let marked = marked || blocks.iter().any(|b| is_mark(b.get("cache_control")));
    let mut message = message("tool", text.join("\n"), marked);
    message["tool_call_id"] = id.into();
    if block["is_error"] == true {
        message["is_error"] = true.into();
    }
    Ok(message)
}

fn tool_choice(choice: Choice) -> Result<ToolChoice, ApiError> {
    match (choice.kind.as_deref().unwrap_or_default(), choice.name) {
        ("auto", _) => Ok(ToolChoice::Auto),
        ("none", _) => Ok(ToolChoice::None),
        ("any", _) => Ok(ToolChoice::Required),
        ("tool", Some(name)) => Ok(ToolChoice::Named(name)),
        ("tool", None) => Err(invalid("tool_choice.name", "which tool is missing")),
        (kind, _) => Err(invalid("tool_choice.type", &format!("{kind:?} is none of auto, any, tool and none"))),
    }
}

/// Whether to think, and for how many tokens at most.
fn thinking(thinking: WireThinking) -> Result<(Thinking, Option<usize>), ApiError> {
    thinking.others.keys().for_each(|field| ignore(&format!("thinking.{field}")));
    match thinking.kind.as_deref().unwrap_or_default() {
        "enabled" => Ok((Thinking::On, thinking.budget_tokens)),
        "disabled" => Ok((Thinking::Off, None)),
        // As much as the model likes, which is what it does.
        "adaptive" | "between_tools" => Ok((Thinking::On, None)),
        kind => Err(invalid("thinking.type", &format!("{kind:?} is none of enabled, disabled and adaptive"))),
    }
}

/// What Claude Code says of itself, in a first block of its own.
const BILLING: &str = "x-anthropic-billing-header:";
const CHANGING: &str = "cch=";
const CONSTANT: &str = "00000";

/// The first block of a system prompt with the one value in it that changes from request to request made a constant: with it, no two requests would begin
/// alike, and nothing of them could be shared.
fn first_block(text: &str) -> String {
    let Some(at) = text.trim_start().starts_with(BILLING).then(|| text.find(CHANGING)).flatten() else {
        return text.to_owned();
    };
    let begin = at + CHANGING.len();
    let length = text[begin..].find(|c: char| !c.is_ascii_alphanumeric()).unwrap_or(text.len() - begin);
    static SAID: Once = Once::new();
    SAID.call_once(|| {
        crate::note(&format!(
            "the changing {CHANGING} in the first block of the system prompt is taken as {CONSTANT}, so that requests begin alike"
        ));
    });
    [&text[..begin], CONSTANT, &text[begin + length..]].concat()
}

#[cfg(test)]
mod tests {
    use sluice_engine::GrammarFormat;

    use super::*;

    fn asked(request: Value) -> Result<ChatRequest, ApiError> {
        serde_json::from_value::<MessagesRequest>(request).unwrap().asked()
    }

    #[test]
    fn a_turn_with_thoughts_calls_and_results_becomes_what_templates_take() {
        let arguments: Value = serde_json::from_str(r#"{"path": "b", "a": [1, {"z": 0, "y": null}]}"#).unwrap();
        let asked = asked(json!({
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
            asked.messages,
            [
                json!({"role": "system", "content": "S\nT", "cache_control": {}}),
                json!({"role": "user", "content": "one\ntwo"}),
                json!({"role": "assistant", "content": "I look.", "reasoning_content": "hm", "tool_calls": [call]}),
                json!({"role": "tool", "content": "no such file\n[image: it cannot be shown to this model]",
                "tool_call_id": "toolu_1", "is_error": true}),
                json!({"role": "user", "content": "go on", "cache_control": {}}),
            ]
        );
        // The order of fields is the client's.
        assert!(asked.messages[2].to_string().contains(r#"{"path":"b","a":[1,{"z":0,"y":null}]}"#));
        let function =
            json!({"name": "read", "description": "Reads.", "parameters": {"type": "object", "z": 1, "a": 2}});
        assert_eq!(asked.demanded.tools, Some(json!([{"type": "function", "function": function}])));
        let demand = &asked.demanded.demand;
        assert!(demand.called.as_ref().is_some_and(|called| called.must && !called.several));
        assert_eq!((asked.thinking, demand.thinking_budget), (Thinking::On, Some(1024)));
        assert_eq!((asked.common.max_tokens, asked.common.top_k, asked.common.stream), (Some(5), Some(3), true));
        assert_eq!(asked.common.stops().unwrap(), ["x"]);
    }

    #[test]
    fn what_the_assistant_says_in_several_messages_is_one_turn() {
        let said = |block: Value| json!({"role": "assistant", "content": [block]});
        let asked = asked(json!({"messages": [
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
            asked.messages[1..],
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
            let asked =
                asked(json!({"system": system, "messages": [{"role": "user", "content": "cch=12345"}]})).unwrap();
            let text = asked.messages[0]["content"].as_str().unwrap();
            assert!(text.starts_with(&block("00000")), "{text}");
            assert!(!system.is_array() || text.ends_with("\ncch=1"), "{text}");
            assert_eq!(asked.messages[1]["content"], "cch=12345");
        }
        assert_eq!(first_block("about cch=123"), "about cch=123");
        assert_eq!(first_block("x-anthropic-billing-header: cch="), "x-anthropic-billing-header: cch=00000");
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
            (user(json!(5)), "messages.0.content: neither"),
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
        let demanded = asked(with("output_config", json!({"effort": "low", "format": format}))).unwrap().demanded;
        assert_eq!(
            (demanded.demand.form, demanded.blame),
            (GrammarFormat::Schema(json!({"type": "object"})), "output_config.format")
        );
        // What has no effect is taken.
        asked(with("mcp_servers", json!([]))).unwrap();
        asked(with("context_management", json!({"edits": [{"type": "clear_tool_uses_20250919"}]}))).unwrap();
    }
}
