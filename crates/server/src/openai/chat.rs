//! `/v1/chat/completions`

use std::sync::Arc;

use anyhow::Context;
use axum::extract::State;
use axum::response::Response;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use sluice_engine::sampler::Logprobs;
use sluice_engine::text::{Dialogue, TextSide, Tokenizer};

use super::fields::Common;
use super::reply::{self, Dialect, finish_reason, now};
use crate::answer::Delta;
use crate::app::{App, Body, Ready};
use crate::error::ApiError;

#[derive(Deserialize)]
pub struct Request {
    messages: Vec<Map<String, Value>>,
    #[serde(default)]
    logprobs: bool,
    #[serde(default)]
    top_logprobs: Option<usize>,
    /// More names that the template may look at.
    #[serde(default)]
    chat_template_kwargs: Map<String, Value>,
    #[serde(flatten)]
    common: Common,
}

/// Likeliest tokens that may be asked for.
const MOST_LOGPROBS: usize = 20;

pub async fn chat(State(app): State<Arc<App>>, Body(request): Body<Request>) -> Result<Response, ApiError> {
    let ready = app.ready()?;
    request.common.check_others()?;
    let messages = messages(request.messages)?;
    let top = request.top_logprobs.unwrap_or(0);
    if top > MOST_LOGPROBS {
        let message = format!("top_logprobs is {top}; it must be at most {MOST_LOGPROBS}");
        return Err(ApiError::invalid("top_logprobs", message));
    }
    // 1. The prompt, by a thread that may take its time
    let (own, extra) = (Arc::clone(&ready), request.chat_template_kwargs);
    let rendered = tokio::task::spawn_blocking(move || rendered(&own, &messages, &extra)).await;
    let rendered = rendered.map_err(|e| ApiError::internal(e.to_string()))?;
    let rendered = rendered.map_err(|e| ApiError::invalid("messages", format!("{e:#}")))?;
    // 2. Its answer
    let common = request.common;
    let (tokens, marks) = rendered;
    let mut generation = common.generation(&ready.text, tokens.len(), ready.context)?;
    generation.logprobs = request.logprobs.then_some(top);
    generation.marks = marks;
    let pending = ready.submit(tokens, generation, &common)?;
    let choices = common.choices()?;
    let dialect = Chat {
        id: format!("chatcmpl-{}", app.next_id()),
        created: now(),
        model: ready.name.clone(),
        tokenizer: Arc::clone(&ready.text.tokenizer),
        with_logprobs: request.logprobs,
        begun: vec![false; choices],
        gathered: (0..choices).map(|_| Gathered::default()).collect(),
    };
    Ok(reply::send(pending, dialect, &common).await)
}

/// The prompt's tokens, and where prompts may part that begin like it: recurrent states are kept there.
pub(super) fn rendered(
    ready: &Ready,
    messages: &[Value],
    extra: &Map<String, Value>,
) -> anyhow::Result<(Vec<u32>, Vec<usize>)> {
    let TextSide { template, tokenizer, .. } = &ready.text;
    let template = Some(template.as_ref().context("this model has no chat template")?);
    let dialogue = Dialogue { template, tokenizer, messages, tools: None, extra };
    let tokens = dialogue.tokens()?;
    let marks = if ready.has_states { dialogue.partings(&tokens) } else { Vec::new() };
    Ok((tokens, marks))
}

/// Messages as templates want them: contents in parts become one text.
pub(super) fn messages(all: Vec<Map<String, Value>>) -> Result<Vec<Value>, ApiError> {
    if all.is_empty() {
        return Err(ApiError::invalid("messages", "messages is empty"));
    }
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
                    (kind, _) => {
                        let kind = kind.unwrap_or("no type");
                        let message = format!("messages[{i}].content: parts of {kind} are not supported");
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
        Ok(Value::Object(message))
    };
    all.into_iter().enumerate().map(one).collect()
}

#[derive(Default)]
struct Gathered {
    text: String,
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
    gathered: Vec<Gathered>,
}

impl Chat {
    fn chunk(&self, index: usize, delta: Value, logprobs: Value, finish: Option<&str>) -> Value {
        json!({
            "id": self.id, "object": "chat.completion.chunk", "created": self.created, "model": self.model,
            "choices": [{"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}],
        })
    }

    fn token(&self, id: u32, logprob: f64) -> Value {
        let text = self.tokenizer.decode(&[id], false).unwrap_or_default();
        json!({"token": text, "logprob": logprob, "bytes": text.as_bytes()})
    }

    fn entries(&self, tokens: &[(u32, Option<Logprobs>)]) -> Vec<Value> {
        let entry = |(id, logprobs): &(u32, Option<Logprobs>)| {
            let logprobs = logprobs.as_ref()?;
            let mut entry = self.token(*id, logprobs.chosen);
            let top: Vec<Value> = logprobs.top.iter().map(|(id, p)| self.token(*id, *p)).collect();
            entry["top_logprobs"] = json!(top);
            Some(entry)
        };
        tokens.iter().filter_map(entry).collect()
    }
}

impl Dialect for Chat {
    fn events(&mut self, delta: &Delta) -> Vec<Value> {
        let mut events = Vec::new();
        if !std::mem::replace(&mut self.begun[delta.choice], true) {
            events.push(self.chunk(delta.choice, json!({"role": "assistant", "content": ""}), Value::Null, None));
        }
        let entries = self.entries(&delta.tokens);
        if !delta.text.is_empty() || !entries.is_empty() {
            let logprobs = if self.with_logprobs { json!({"content": entries}) } else { Value::Null };
            events.push(self.chunk(delta.choice, json!({"content": delta.text}), logprobs, None));
        }
        if let Some(finish) = delta.finish {
            events.push(self.chunk(delta.choice, json!({}), Value::Null, Some(finish_reason(finish))));
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
        let entries = self.entries(&delta.tokens);
        let gathered = &mut self.gathered[delta.choice];
        gathered.text += &delta.text;
        gathered.logprobs.extend(entries);
        gathered.finish = delta.finish.map(finish_reason).or(gathered.finish);
    }

    fn whole(&mut self, usage: Value) -> Value {
        let choice = |(index, g): (usize, &Gathered)| {
            let logprobs = if self.with_logprobs { json!({"content": g.logprobs}) } else { Value::Null };
            let message = json!({"role": "assistant", "content": g.text});
            json!({"index": index, "message": message, "logprobs": logprobs, "finish_reason": g.finish})
        };
        let choices: Vec<Value> = self.gathered.iter().enumerate().map(choice).collect();
        json!({
            "id": self.id, "object": "chat.completion", "created": self.created, "model": self.model,
            "choices": choices, "usage": usage,
        })
    }
}
