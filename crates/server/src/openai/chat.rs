//! `/v1/chat/completions`: its request, its schemas, and the encoding of its answers.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use sluice_engine::Finish;
use sluice_engine::text::{Piece, Tokenizer};
use utoipa::ToSchema;

use crate::api::answer::Delta;
use crate::api::chat::{ChatRequest, Thinking};
use crate::api::fields;
use crate::api::sampling::SamplingFields;
use crate::clock::now;
use crate::http::context::fresh_id;
use crate::http::error::ApiError;
use crate::http::extract::JsonBody;
use crate::http::openapi::{ComputeErrors, json_schema};
use crate::http::state::AppState;
use crate::openai::chunks::{self, ChatUsage, ChunkEncoder, finish_reason};
use crate::openai::logprobs::{LogprobLists, MAX_TOP_LOGPROBS, TokenLogprob, entries};
use crate::openai::messages::chat_messages;
use crate::openai::output_fields::{ChatMessage, OutputFields};

/// The request.
#[derive(Deserialize, ToSchema)]
#[schema(as = ChatCompletionRequest)]
pub struct ChatCompletionRequest {
    #[serde(default, deserialize_with = "fields::objects")]
    #[schema(value_type = Vec<ChatMessage>, required)]
    messages: Option<Vec<Map<String, Value>>>,
    #[serde(default, deserialize_with = "fields::boolean_or_false")]
    #[schema(value_type = Option<bool>)]
    logprobs: bool,
    /// How many of the most likely tokens to list, at most 20.
    #[serde(default, deserialize_with = "fields::integer")]
    #[schema(maximum = 20)]
    top_logprobs: Option<usize>,
    /// How long to think, for templates that say so (gpt-oss's: `low`, `medium`, `high`); `none` turns thinking off.
    #[serde(default, deserialize_with = "fields::string")]
    reasoning_effort: Option<String>,
    /// What the answer may be. Where it comes true, tokens are computed several at a time (see `--draft`); the answer is the same without it.
    #[serde(default, deserialize_with = "fields::nested")]
    prediction: Option<Prediction>,
    /// More variables for the chat template.
    #[serde(default, deserialize_with = "fields::object")]
    #[schema(value_type = Option<Object>)]
    chat_template_kwargs: Map<String, Value>,
    #[serde(flatten)]
    output: OutputFields,
    #[serde(flatten)]
    sampling: SamplingFields,
}

/// A predicted answer.
#[derive(Deserialize, ToSchema)]
#[schema(as = ChatPrediction)]
pub struct Prediction {
    /// `content`.
    #[serde(default, rename = "type", deserialize_with = "fields::string")]
    kind: Option<String>,
    /// A string, or a list of parts with a `text` each.
    #[serde(default)]
    #[schema(value_type = Option<Value>)]
    content: Value,
}

impl Prediction {
    fn text(self) -> Result<String, ApiError> {
        let invalid = |what: &str| ApiError::invalid("prediction", format!("prediction.{what}"));
        if let Some(other) = self.kind.filter(|kind| kind != "content") {
            return Err(invalid(&format!("type must be content, found {other:?}")));
        }
        match self.content {
            Value::String(text) => Ok(text),
            Value::Array(parts) => parts
                .iter()
                .map(|part| part["text"].as_str().ok_or_else(|| invalid("content: each part must have a text")))
                .collect(),
            _ => Err(invalid("content must be a string or a list of parts")),
        }
    }
}

impl ChatCompletionRequest {
    /// Converts it.
    ///
    /// # Errors
    /// A field that is invalid or not supported, by name.
    pub fn into_chat(self) -> Result<ChatRequest, ApiError> {
        self.sampling.check_unknown_fields()?;
        let missing = || ApiError::invalid("messages", "messages is missing");
        let messages = chat_messages(self.messages.ok_or_else(missing)?)?;
        let top = self.top_logprobs.unwrap_or(0);
        if top > MAX_TOP_LOGPROBS {
            let message = format!("top_logprobs is {top}; it must be at most {MAX_TOP_LOGPROBS}");
            return Err(ApiError::invalid("top_logprobs", message));
        }
        let thinking = if self.reasoning_effort.as_deref() == Some("none") { Thinking::Off } else { Thinking::Default };
        let effort = self.reasoning_effort.filter(|effort| effort != "none").map(|effort| ("reasoning_effort", effort));
        Ok(ChatRequest {
            messages,
            output: self.output.output_spec()?,
            thinking,
            extra: self.chat_template_kwargs,
            effort,
            logprobs: self.logprobs.then_some(top),
            prediction: self.prediction.map(Prediction::text).transpose()?,
            sampling: self.sampling,
        })
    }
}

json_schema! {
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
                            "reasoning_content": {"type": "string", "description": "The thoughts."},
                            "reasoning": {"type": "string", "description": "The same; clients differ in the name that they look for."},
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
                                            "arguments": {"type": "string", "description": "A JSON object, with its fields in the order in which the model wrote them."},
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

json_schema! {
    /// An event of a stream. The last event is `[DONE]`.
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

/// Answers a conversation.
#[utoipa::path(post, path = "/v1/chat/completions", tag = "openai", request_body = ChatCompletionRequest, responses(
    (status = 200, description = "The answer; with `stream`, its events. If it takes long, white space is sent before it.",
        content((ChatCompletion = "application/json"), (ChatCompletionChunk = "text/event-stream"))),
    ComputeErrors,
))]
pub async fn chat(
    State(app): State<Arc<AppState>>,
    JsonBody(request): JsonBody<ChatCompletionRequest>,
) -> Result<Response, ApiError> {
    let model = app.model(request.sampling.model.as_deref()).await?;
    let chat = request.into_chat()?;
    let (logprobs, choices) = (chat.logprobs, chat.sampling.choices()?);
    let (streamed, with_usage) = (chat.sampling.stream, chat.sampling.wants_usage());
    let pending = chat.submit(&model).await?;
    let encoder = ChatEncoder {
        id: format!("chatcmpl-{}", fresh_id()),
        created: now(),
        model: model.name.clone(),
        tokenizer: Arc::clone(&model.text.tokenizer),
        with_logprobs: logprobs.is_some(),
        started: vec![false; choices],
        has_calls: vec![false; choices],
        collected: (0..choices).map(|_| CollectedChat::default()).collect(),
        logprobs: LogprobLists::new(choices),
    };
    Ok(chunks::send(pending, encoder, streamed, with_usage).await)
}

fn call_id() -> String {
    format!("call_{}", fresh_id())
}

/// A choice, for a whole answer.
#[derive(Default)]
struct CollectedChat {
    text: String,
    thought: String,
    /// Objects as they are sent, with arguments as strings.
    calls: Vec<Value>,
    finish: Option<&'static str>,
}

struct ChatEncoder {
    id: String,
    created: u64,
    model: String,
    tokenizer: Arc<Tokenizer>,
    with_logprobs: bool,
    /// By choice: its role was sent.
    started: Vec<bool>,
    /// By choice: it has called a tool.
    has_calls: Vec<bool>,
    collected: Vec<CollectedChat>,
    /// By choice, for a whole answer.
    logprobs: LogprobLists,
}

fn has_calls(pieces: &[Piece]) -> bool {
    pieces.iter().any(|piece| matches!(piece, Piece::Call { .. }))
}

fn chat_finish_reason(finish: Finish, has_calls: bool) -> &'static str {
    match finish {
        Finish::Stop if has_calls => "tool_calls",
        other => finish_reason(other),
    }
}

/// A piece as the delta of a chunk. Clients differ in the name under which they look for thoughts, so both are sent.
fn delta_json(piece: &Piece) -> Value {
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

impl ChatEncoder {
    fn chunk(&self, index: usize, delta: Value, logprobs: Value, finish: Option<&str>) -> Value {
        json!({
            "id": self.id, "object": "chat.completion.chunk", "created": self.created, "model": self.model,
            "choices": [{"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}],
        })
    }
}

impl ChunkEncoder for ChatEncoder {
    fn events(&mut self, delta: &Delta) -> Vec<Value> {
        let mut events = Vec::new();
        if !std::mem::replace(&mut self.started[delta.choice], true) {
            events.push(self.chunk(delta.choice, json!({"role": "assistant", "content": ""}), Value::Null, None));
        }
        let entries = entries(&self.tokenizer, &delta.tokens);
        let mut parts: Vec<Value> = delta.pieces.iter().map(delta_json).collect();
        if parts.is_empty() && !entries.is_empty() {
            parts.push(json!({"content": ""}));
        }
        // The log-probabilities of all tokens go with the first part.
        let mut logprobs = if self.with_logprobs { json!({"content": entries}) } else { Value::Null };
        for part in parts {
            events.push(self.chunk(delta.choice, part, std::mem::take(&mut logprobs), None));
        }
        self.has_calls[delta.choice] |= has_calls(&delta.pieces);
        if let Some(finish) = delta.finish {
            let reason = chat_finish_reason(finish, self.has_calls[delta.choice]);
            events.push(self.chunk(delta.choice, json!({}), Value::Null, Some(reason)));
        }
        events
    }

    fn keep_alive(&self) -> Value {
        self.chunk(0, json!({}), Value::Null, None)
    }

    fn usage_event(&self, usage: Value) -> Value {
        json!({
            "id": self.id, "object": "chat.completion.chunk", "created": self.created, "model": self.model,
            "choices": [], "usage": usage,
        })
    }

    fn collect_delta(&mut self, delta: Delta) {
        for entry in entries(&self.tokenizer, &delta.tokens) {
            self.logprobs.push(delta.choice, &entry);
        }
        let collected = &mut self.collected[delta.choice];
        for piece in delta.pieces {
            match piece {
                Piece::Thought(text) => collected.thought += &text,
                Piece::Text(text) => collected.text += &text,
                Piece::Call { name, .. } => {
                    let function = json!({"name": name, "arguments": ""});
                    collected.calls.push(json!({"id": call_id(), "type": "function", "function": function}));
                }
                Piece::Arguments { json, .. } => {
                    if let Some(Value::String(arguments)) =
                        collected.calls.last_mut().map(|c| &mut c["function"]["arguments"])
                    {
                        *arguments += &json;
                    }
                }
            }
        }
        let has_calls = !collected.calls.is_empty();
        collected.finish = delta.finish.map(|finish| chat_finish_reason(finish, has_calls)).or(collected.finish);
    }

    fn kept_bytes(&self) -> usize {
        self.logprobs.bytes()
    }

    fn complete(&mut self, usage: Value) -> String {
        let choice = |(index, g): (usize, &CollectedChat)| {
            let logprobs =
                if self.with_logprobs { json!({"content": self.logprobs.placeholder(index)}) } else { Value::Null };
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
        let choices: Vec<Value> = self.collected.iter().enumerate().map(choice).collect();
        self.logprobs.write(&json!({
            "id": self.id, "object": "chat.completion", "created": self.created, "model": self.model,
            "choices": choices, "usage": usage,
        }))
    }
}
