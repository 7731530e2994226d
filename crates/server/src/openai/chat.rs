//! `/v1/chat/completions`

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use sluice_engine::Finish;
use sluice_engine::sampling::Logprobs;
use sluice_engine::text::{Piece, Tokenizer};
use utoipa::ToSchema;

use super::chat_fields::{ChatMessage, Fields};
use super::fields::SamplingFields;
use super::reply::{self, ChatUsage, Dialect, finish_reason, now};
use crate::answer::Delta;
use crate::app::{App, Body};
use crate::context::fresh_id;
use crate::error::ApiError;
use crate::given;
use crate::openapi::{Computing, written};
use crate::request::ChatRequest;

#[derive(Deserialize, ToSchema)]
#[schema(as = ChatCompletionRequest)]
pub struct ChatCompletionRequest {
    #[serde(default, deserialize_with = "given::objects")]
    #[schema(value_type = Vec<ChatMessage>, required)]
    messages: Option<Vec<Map<String, Value>>>,
    #[serde(default, deserialize_with = "given::flag_or_false")]
    #[schema(value_type = Option<bool>)]
    logprobs: bool,
    /// So many of the likeliest tokens: 20 at most.
    #[serde(default, deserialize_with = "given::whole")]
    #[schema(maximum = 20)]
    top_logprobs: Option<usize>,
    /// More names that the template may look at.
    #[serde(default, deserialize_with = "given::object")]
    #[schema(value_type = Option<Object>)]
    chat_template_kwargs: Map<String, Value>,
    #[serde(flatten)]
    fields: Fields,
    #[serde(flatten)]
    common: SamplingFields,
}

/// Likeliest tokens that may be asked for.
pub const MOST_LOGPROBS: usize = 20;

impl ChatCompletionRequest {
    /// # Errors
    /// What cannot be what it is, and what cannot be obeyed, by name.
    pub fn asked(self) -> Result<ChatRequest, ApiError> {
        self.common.check_others()?;
        let missing = || ApiError::invalid("messages", "messages is missing");
        let messages = messages(self.messages.ok_or_else(missing)?)?;
        let top = self.top_logprobs.unwrap_or(0);
        if top > MOST_LOGPROBS {
            let message = format!("top_logprobs is {top}; it must be at most {MOST_LOGPROBS}");
            return Err(ApiError::invalid("top_logprobs", message));
        }
        Ok(ChatRequest {
            messages,
            demanded: self.fields.demanded()?,
            extra: self.chat_template_kwargs,
            logprobs: self.logprobs.then_some(top),
            common: self.common,
            ..ChatRequest::default()
        })
    }
}

written! {
    ChatCompletion, uses [TokenLogprob, ChatUsage], {
        "type": "object",
        "required": ["id", "object", "created", "model", "choices", "usage"],
        "properties": {
            "id": {"type": "string"},
            "object": {"type": "string", "enum": ["chat.completion"]},
            "created": {"type": "integer"},
            "model": {"type": "string"},
            "choices": {"type": "array", "items": {
                "type": "object",
                "required": ["index", "message", "logprobs", "finish_reason"],
                "properties": {
                    "index": {"type": "integer"},
                    "message": {
                        "type": "object",
                        "required": ["role", "content"],
                        "properties": {
                            "role": {"type": "string", "enum": ["assistant"]},
                            "content": {"type": ["string", "null"]},
                            "reasoning_content": {"type": "string", "description": "What was thought."},
                            "reasoning": {"type": "string", "description": "The same under the other name."},
                            "tool_calls": {"type": "array", "items": {
                                "type": "object",
                                "required": ["id", "type", "function"],
                                "properties": {
                                    "id": {"type": "string"},
                                    "type": {"type": "string", "enum": ["function"]},
                                    "function": {
                                        "type": "object",
                                        "required": ["name", "arguments"],
                                        "properties": {
                                            "name": {"type": "string"},
                                            "arguments": {"type": "string", "description": "A JSON object, in the order in which it was written."},
                                        },
                                    },
                                },
                            }},
                        },
                    },
                    "logprobs": {"type": ["object", "null"], "required": ["content"], "properties": {
                        "content": {"type": "array", "items": {"$ref": "#/components/schemas/TokenLogprob"}},
                    }},
                    "finish_reason": {"type": "string", "enum": ["stop", "length", "tool_calls"]},
                },
            }},
            "usage": {"$ref": "#/components/schemas/ChatUsage"},
        },
    }
}

written! {
    /// An event of a stream, which ends with `[DONE]`.
    ChatCompletionChunk, uses [TokenLogprob, ChatUsage], {
        "type": "object",
        "required": ["id", "object", "created", "model", "choices"],
        "properties": {
            "id": {"type": "string"},
            "object": {"type": "string", "enum": ["chat.completion.chunk"]},
            "created": {"type": "integer"},
            "model": {"type": "string"},
            "choices": {"type": "array", "items": {
                "type": "object",
                "required": ["index", "delta", "logprobs", "finish_reason"],
                "properties": {
                    "index": {"type": "integer"},
                    "delta": {
                        "type": "object",
                        "properties": {
                            "role": {"type": "string", "enum": ["assistant"]},
                            "content": {"type": "string"},
                            "reasoning_content": {"type": "string"},
                            "reasoning": {"type": "string"},
                            "tool_calls": {"type": "array", "items": {
                                "type": "object",
                                "required": ["index", "function"],
                                "properties": {
                                    "index": {"type": "integer"},
                                    "id": {"type": "string"},
                                    "type": {"type": "string", "enum": ["function"]},
                                    "function": {
                                        "type": "object",
                                        "required": ["arguments"],
                                        "properties": {"name": {"type": "string"}, "arguments": {"type": "string"}},
                                    },
                                },
                            }},
                        },
                    },
                    "logprobs": {"type": ["object", "null"], "required": ["content"], "properties": {
                        "content": {"type": "array", "items": {"$ref": "#/components/schemas/TokenLogprob"}},
                    }},
                    "finish_reason": {"type": ["string", "null"], "enum": ["stop", "length", "tool_calls", null]},
                },
            }},
            "usage": {"$ref": "#/components/schemas/ChatUsage"},
        },
    }
}

written! {
    TokenLogprob, uses [], {
        "type": "object",
        "required": ["token", "logprob", "bytes", "top_logprobs"],
        "properties": {
            "token": {"type": "string"},
            "logprob": {"type": ["number", "null"]},
            "bytes": {"type": "array", "items": {"type": "integer"}},
            "top_logprobs": {"type": "array", "items": {
                "type": "object",
                "required": ["token", "logprob", "bytes"],
                "properties": {
                    "token": {"type": "string"},
                    "logprob": {"type": ["number", "null"]},
                    "bytes": {"type": "array", "items": {"type": "integer"}},
                },
            }},
        },
    }
}

/// Answers a conversation.
#[utoipa::path(post, path = "/v1/chat/completions", tag = "openai", request_body = ChatCompletionRequest, responses(
    (status = 200, description = "The answer; with `stream` its events. Where a prompt takes long, white space comes before it.",
        content((ChatCompletion = "application/json"), (ChatCompletionChunk = "text/event-stream"))),
    Computing,
))]
pub async fn chat(
    State(app): State<Arc<App>>,
    Body(request): Body<ChatCompletionRequest>,
) -> Result<Response, ApiError> {
    let ready = app.model(request.common.model.as_deref()).await?;
    let asked = request.asked()?;
    let (logprobs, choices) = (asked.logprobs, asked.common.choices()?);
    let (streamed, with_usage) = (asked.common.stream, asked.common.wants_usage());
    let pending = asked.submit(&ready).await?;
    let dialect = Chat {
        id: format!("chatcmpl-{}", fresh_id()),
        created: now(),
        model: ready.name.clone(),
        tokenizer: Arc::clone(&ready.text.tokenizer),
        with_logprobs: logprobs.is_some(),
        begun: vec![false; choices],
        calls: vec![false; choices],
        gathered: (0..choices).map(|_| Gathered::default()).collect(),
    };
    Ok(reply::send(pending, dialect, streamed, with_usage).await)
}

/// Messages as templates want them: contents in parts become one text, and what only calls tools says nothing. Calls are checked.
pub fn messages(all: Vec<Map<String, Value>>) -> Result<Vec<Value>, ApiError> {
    let one = |(i, mut message): (usize, Map<String, Value>)| {
        if !message.get("role").is_some_and(Value::is_string) {
            return Err(ApiError::invalid(&format!("messages[{i}].role"), format!("messages[{i}] has no role")));
        }
        if let Some(Value::Array(parts)) = message.get("content") {
            let mut text = String::new();
            let marked = parts.iter().any(|part| part.get("cache_control").is_some_and(|c| !c.is_null()));
            for part in parts {
                match (part["type"].as_str(), part["text"].as_str()) {
                    (Some("text"), Some(part)) => text += part,
                    (kind, text) => {
                        let message = match (kind, text) {
                            (Some("text"), None) => format!("messages[{i}].content: a part of text has no text"),
                            _ => format!(
                                "messages[{i}].content: parts of {} are not supported",
                                kind.unwrap_or("no type")
                            ),
                        };
                        return Err(ApiError::invalid(&format!("messages[{i}].content"), message));
                    }
                }
            }
            message.insert("content".into(), Value::String(text));
            if marked {
                // Asked for by a part, kept for the whole message.
                message.insert("cache_control".into(), json!({}));
            }
        }
        let is = |role: &str| message["role"] == role;
        if is("assistant") {
            check_calls(i, &message)?;
        }
        let nothing_said = message.get("content").is_none_or(Value::is_null);
        if nothing_said && ["assistant", "tool", "function"].iter().any(|role| is(role)) {
            message.insert("content".into(), "".into());
        } else if !message.get("content").is_some_and(Value::is_string) {
            let field = format!("messages[{i}].content");
            return Err(ApiError::invalid(&field, format!("{field} must be a text or a list of parts")));
        }
        Ok(Value::Object(message))
    };
    all.into_iter().enumerate().map(one).collect()
}

fn check_calls(i: usize, message: &Map<String, Value>) -> Result<(), ApiError> {
    let field = format!("messages[{i}].tool_calls");
    let wrong = |what: &str| ApiError::invalid(&field, format!("{field} {what}"));
    let calls = match message.get("tool_calls") {
        None | Some(Value::Null) => return Ok(()),
        Some(calls) => calls.as_array().ok_or_else(|| wrong("is no list"))?,
    };
    for call in calls {
        if !call["function"]["name"].is_string() {
            return Err(wrong("has a call without function.name"));
        }
        if !matches!(call["function"]["arguments"], Value::Null | Value::String(_) | Value::Object(_)) {
            return Err(wrong("has arguments that are neither an object nor its text"));
        }
    }
    Ok(())
}

fn call_id() -> String {
    format!("call_{}", fresh_id())
}

#[derive(Default)]
struct Gathered {
    text: String,
    thought: String,
    /// As they are sent: names, and arguments as text.
    calls: Vec<Value>,
    logprobs: Vec<Value>,
    finish: Option<&'static str>,
}

struct Chat {
    id: String,
    created: u64,
    model: String,
    tokenizer: Arc<Tokenizer>,
    with_logprobs: bool,
    /// By choice: its role was said.
    begun: Vec<bool>,
    /// By choice: it has called a tool.
    calls: Vec<bool>,
    gathered: Vec<Gathered>,
}

fn has_calls(pieces: &[Piece]) -> bool {
    pieces.iter().any(|piece| matches!(piece, Piece::Call { .. }))
}

fn ended(finish: Finish, has_calls: bool) -> &'static str {
    match finish {
        Finish::Stop if has_calls => "tool_calls",
        other => finish_reason(other),
    }
}

/// A piece as the delta of a chunk. Some clients look for thoughts under the one name, some under the other.
fn to_json(piece: &Piece) -> Value {
    match piece {
        Piece::Thought(text) => json!({"reasoning_content": text, "reasoning": text}),
        Piece::Text(text) => json!({"content": text}),
        Piece::Call { index, name } => {
            let function = json!({"name": name, "arguments": ""});
            json!({"tool_calls": [{"index": index, "id": call_id(), "type": "function", "function": function}]})
        }
        Piece::Arguments { index, json } => {
            json!({"tool_calls": [{"index": index, "function": {"arguments": json}}]})
        }
    }
}

/// A token as log-probabilities name it. Its text has U+FFFD for a part of a character; its bytes are its own, so that clients can join those.
pub(super) fn token(tokenizer: &Tokenizer, id: u32, logprob: f64) -> Value {
    let text = tokenizer.decode(&[id], false).unwrap_or_default();
    json!({"token": text, "logprob": logprob, "bytes": tokenizer.raw_bytes(id)})
}

/// How likely tokens were, those of which it is known.
pub(super) fn entries(tokenizer: &Tokenizer, tokens: &[(u32, Option<Logprobs>)]) -> Vec<Value> {
    let entry = |(id, logprobs): &(u32, Option<Logprobs>)| {
        let logprobs = logprobs.as_ref()?;
        let mut entry = token(tokenizer, *id, logprobs.chosen);
        let top: Vec<Value> = logprobs.top.iter().map(|(id, p)| token(tokenizer, *id, *p)).collect();
        entry["top_logprobs"] = json!(top);
        Some(entry)
    };
    tokens.iter().filter_map(entry).collect()
}

impl Chat {
    fn chunk(&self, index: usize, delta: Value, logprobs: Value, finish: Option<&str>) -> Value {
        json!({
            "id": self.id, "object": "chat.completion.chunk", "created": self.created, "model": self.model,
            "choices": [{"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}],
        })
    }
}

impl Dialect for Chat {
    fn events(&mut self, delta: &Delta) -> Vec<Value> {
        let mut events = Vec::new();
        if !std::mem::replace(&mut self.begun[delta.choice], true) {
            events.push(self.chunk(delta.choice, json!({"role": "assistant", "content": ""}), Value::Null, None));
        }
        let entries = entries(&self.tokenizer, &delta.tokens);
        let mut parts: Vec<Value> = delta.pieces.iter().map(to_json).collect();
        if parts.is_empty() && !entries.is_empty() {
            parts.push(json!({"content": ""}));
        }
        // The tokens are those of all that was added: they go with the first of it.
        let mut logprobs = if self.with_logprobs { json!({"content": entries}) } else { Value::Null };
        for part in parts {
            events.push(self.chunk(delta.choice, part, std::mem::take(&mut logprobs), None));
        }
        self.calls[delta.choice] |= has_calls(&delta.pieces);
        if let Some(finish) = delta.finish {
            let reason = ended(finish, self.calls[delta.choice]);
            events.push(self.chunk(delta.choice, json!({}), Value::Null, Some(reason)));
        }
        events
    }

    fn sign_of_life(&self) -> Value {
        self.chunk(0, json!({}), Value::Null, None)
    }

    fn usage_event(&self, usage: Value) -> Value {
        json!({
            "id": self.id, "object": "chat.completion.chunk", "created": self.created, "model": self.model,
            "choices": [], "usage": usage,
        })
    }

    fn gather(&mut self, delta: Delta) {
        let entries = entries(&self.tokenizer, &delta.tokens);
        let gathered = &mut self.gathered[delta.choice];
        gathered.logprobs.extend(entries);
        for piece in delta.pieces {
            match piece {
                Piece::Thought(text) => gathered.thought += &text,
                Piece::Text(text) => gathered.text += &text,
                Piece::Call { name, .. } => {
                    let function = json!({"name": name, "arguments": ""});
                    gathered.calls.push(json!({"id": call_id(), "type": "function", "function": function}));
                }
                Piece::Arguments { json, .. } => {
                    if let Some(Value::String(arguments)) =
                        gathered.calls.last_mut().map(|c| &mut c["function"]["arguments"])
                    {
                        *arguments += &json;
                    }
                }
            }
        }
        let has_calls = !gathered.calls.is_empty();
        gathered.finish = delta.finish.map(|finish| ended(finish, has_calls)).or(gathered.finish);
    }

    fn whole(&mut self, usage: Value) -> Value {
        let choice = |(index, g): (usize, &Gathered)| {
            let logprobs = if self.with_logprobs { json!({"content": g.logprobs}) } else { Value::Null };
            let content = if g.text.is_empty() && !g.calls.is_empty() { Value::Null } else { g.text.as_str().into() };
            let mut message = json!({"role": "assistant", "content": content});
            if !g.thought.is_empty() {
                message["reasoning_content"] = g.thought.as_str().into();
                message["reasoning"] = g.thought.as_str().into();
            }
            if !g.calls.is_empty() {
                message["tool_calls"] = json!(g.calls);
            }
            json!({"index": index, "message": message, "logprobs": logprobs, "finish_reason": g.finish})
        };
        let choices: Vec<Value> = self.gathered.iter().enumerate().map(choice).collect();
        json!({
            "id": self.id, "object": "chat.completion", "created": self.created, "model": self.model,
            "choices": choices, "usage": usage,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn a_token_that_is_part_of_a_character_has_its_own_bytes() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/demo");
        let tokenizer = Tokenizer::load(&folder, None).unwrap();
        let ids = tokenizer.encode("👩‍🚀", false).unwrap();
        let tokens: Vec<Value> = ids.iter().map(|id| token(&tokenizer, *id, -1.0)).collect();
        assert!(tokens.iter().any(|t| t["token"].as_str().unwrap().contains('\u{FFFD}')), "{tokens:?}");
        let bytes: Vec<u8> =
            tokens.iter().flat_map(|t| t["bytes"].as_array().unwrap()).map(|b| b.as_u64().unwrap() as u8).collect();
        assert_eq!(bytes, "👩‍🚀".as_bytes());
    }
}
