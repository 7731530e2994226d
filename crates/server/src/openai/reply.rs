//! How answers of Completions and Chat Completions are sent: as one object, or as chunks of it.

use axum::response::Response;
use serde_json::{Value, json};
use sluice_engine::Finish;

use crate::answer::Delta;
use crate::error::ApiError;
use crate::openapi::written;
use crate::reply::{self, Pending, StreamEncoder, Usage, data};

pub use crate::reply::now;

/// What makes events and objects of an endpoint's answers.
pub trait Dialect: Send + 'static {
    /// Events for a delta; also those that begin the choice, where it is its first.
    fn events(&mut self, delta: &Delta) -> Vec<Value>;
    /// An event that says nothing, and that clients take for one.
    fn sign_of_life(&self) -> Value;
    /// The last event, where usage was asked for.
    fn usage_event(&self, usage: Value) -> Value;
    /// Keeps a delta for [`Dialect::whole`].
    fn gather(&mut self, delta: Delta);
    /// The whole answer.
    fn whole(&mut self, usage: Value) -> Value;
}

struct Chunks<D> {
    dialect: D,
    with_usage: bool,
}

const DONE: &str = "data: [DONE]\n\n";

written! {
    /// Tokens of a request.
    ChatUsage, uses [], {
        "type": "object",
        "required": ["prompt_tokens", "completion_tokens", "total_tokens", "prompt_tokens_details"],
        "properties": {
            "prompt_tokens": {"type": "integer"},
            "completion_tokens": {"type": "integer"},
            "total_tokens": {"type": "integer"},
            "prompt_tokens_details": {
                "type": "object",
                "required": ["cached_tokens", "cache_write_tokens"],
                "properties": {
                    "cached_tokens": {"type": "integer", "description": "Tokens of the prompt that were computed before."},
                    "cache_write_tokens": {"type": "integer", "description": "Those that are kept from now on."},
                },
            },
        },
    }
}

fn usage_json(usage: Usage) -> Value {
    let Usage { prompt, cached, written, generated } = usage;
    json!({
        "prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": cached, "cache_write_tokens": written},
    })
}

impl<D: Dialect> StreamEncoder for Chunks<D> {
    fn delta(&mut self, delta: &Delta) -> String {
        self.dialect.events(delta).iter().map(data).collect()
    }

    fn sign_of_life(&mut self) -> String {
        data(&self.dialect.sign_of_life())
    }

    fn end(&mut self, usage: Usage, _: Option<&str>) -> String {
        let usage = self.with_usage.then(|| data(&self.dialect.usage_event(usage_json(usage))));
        usage.unwrap_or_default() + DONE
    }

    fn failed(&mut self, error: &ApiError) -> String {
        data(&error.to_json()) + DONE
    }

    fn gather(&mut self, delta: Delta) {
        self.dialect.gather(delta);
    }

    fn whole(&mut self, usage: Usage, _: Option<&str>) -> Value {
        self.dialect.whole(usage_json(usage))
    }

    fn error(&self, error: &ApiError) -> Value {
        error.to_json()
    }
}

/// Why an answer ended, in OpenAI's words.
pub fn finish_reason(finish: Finish) -> &'static str {
    match finish {
        Finish::Stop => "stop",
        Finish::Length | Finish::ContextFull => "length",
        Finish::Cancelled | Finish::Failed => "stop",
    }
}

/// The answer, streamed or whole; `with_usage`: a stream ends with how many tokens it took.
pub async fn send(pending: Pending, dialect: impl Dialect, streamed: bool, with_usage: bool) -> Response {
    reply::send(pending, Chunks { dialect, with_usage }, streamed).await
}
