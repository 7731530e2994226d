//! How completions and chat completions are sent: as one object, or as a stream of chunks.

use axum::response::Response;
use serde_json::{Value, json};
use sluice_engine::Finish;

use crate::api::answer::Delta;
use crate::api::pending::{Pending, Usage};
use crate::api::stream::{self, StreamEncoder, data};
use crate::http::error::ApiError;
use crate::http::openapi::json_schema;

/// Words the answers of one endpoint; see [`StreamEncoder`] for the order of calls.
pub trait ChunkEncoder: Send + 'static {
    /// Chunks for a delta. The first delta of a choice includes the chunks that start it.
    fn events(&mut self, delta: &Delta) -> Vec<Value>;
    /// A chunk without content.
    fn keep_alive(&self) -> Value;
    /// The last chunk, if token counts were asked for.
    fn usage_event(&self, usage: Value) -> Value;
    /// Keeps a delta for [`ChunkEncoder::complete`].
    fn collect_delta(&mut self, delta: Delta);
    /// Bytes of log-probabilities that are kept until the answer is complete.
    fn kept_bytes(&self) -> usize;
    /// The whole answer as one object: its JSON.
    fn complete(&mut self, usage: Value) -> String;
}

struct ChunkStream<E> {
    encoder: E,
    with_usage: bool,
}

const DONE: &str = "data: [DONE]\n\n";

json_schema! {
    /// Token counts of a request.
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
                    "cached_tokens": {"type": "integer", "description": "Prompt tokens that were cached."},
                    "cache_write_tokens": {"type": "integer", "description": "Prompt tokens that are cached from now on."},
                },
            },
            "completion_tokens_details": {
                "type": "object",
                "required": ["accepted_prediction_tokens", "rejected_prediction_tokens"],
                "properties": {
                    "accepted_prediction_tokens": {"type": "integer", "description": "Tokens that were drafted, from the prediction and elsewhere, and came true."},
                    "rejected_prediction_tokens": {"type": "integer", "description": "Tokens that were drafted and did not."},
                },
                "description": "Only for a request with a prediction.",
            },
        },
    }
}

fn usage_json(usage: Usage) -> Value {
    let Usage { prompt, cached, written, generated, predicted } = usage;
    let mut counts = json!({
        "prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": cached, "cache_write_tokens": written},
    });
    if let Some((accepted, rejected)) = predicted {
        counts["completion_tokens_details"] =
            json!({"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected});
    }
    counts
}

impl<E: ChunkEncoder> StreamEncoder for ChunkStream<E> {
    fn delta(&mut self, delta: &Delta) -> String {
        self.encoder.events(delta).iter().map(data).collect()
    }

    fn keep_alive(&mut self) -> String {
        data(&self.encoder.keep_alive())
    }

    fn end(&mut self, usage: Usage, _: Option<&str>) -> String {
        let usage = self.with_usage.then(|| data(&self.encoder.usage_event(usage_json(usage))));
        usage.unwrap_or_default() + DONE
    }

    fn failed(&mut self, error: &ApiError) -> String {
        data(&error.to_json()) + DONE
    }

    fn collect_delta(&mut self, delta: Delta) {
        self.encoder.collect_delta(delta);
    }

    fn kept_bytes(&self) -> usize {
        self.encoder.kept_bytes()
    }

    fn complete(&mut self, usage: Usage, _: Option<&str>) -> String {
        self.encoder.complete(usage_json(usage))
    }

    fn error(&self, error: &ApiError) -> Value {
        error.to_json()
    }
}

/// OpenAI's `finish_reason`.
pub fn finish_reason(finish: Finish) -> &'static str {
    match finish {
        Finish::Stop => "stop",
        Finish::Length | Finish::ContextFull => "length",
        Finish::Cancelled | Finish::Failed => "stop",
    }
}

/// Sends an answer, as a stream or whole. `with_usage`: a stream ends with token counts.
pub async fn send(pending: Pending, encoder: impl ChunkEncoder, streamed: bool, with_usage: bool) -> Response {
    stream::send(pending, ChunkStream { encoder, with_usage }, streamed).await
}
