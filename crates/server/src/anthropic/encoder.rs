//! From an answer to Anthropic's events, or to its message.

use serde_json::{Map, Value, json};
use sluice_engine::Finish;

use crate::anthropic::error::error_json;
use crate::api::answer::Delta;
use crate::api::blocks::{Block, BlockKind, Blocks, Change};
use crate::api::pending::Usage;
use crate::api::stream::{StreamEncoder, event};
use crate::http::context::{self, fresh_id};
use crate::http::error::ApiError;
use crate::http::openapi::{AnthropicError, json_schema};

json_schema! {
    Message, uses [ContentBlock, MessageUsage], {
        "type": "object",
        "required": ["id", "type", "role", "model", "content", "stop_reason", "stop_sequence", "usage"],
        "properties": {
            "id": {"type": "string"},
            "type": {"type": "string", "enum": ["message"]},
            "role": {"type": "string", "enum": ["assistant"]},
            "model": {"type": "string"},
            "content": {"type": "array", "items": {"$ref": "#/components/schemas/ContentBlock"}},
            "stop_reason": {"type": ["string", "null"], "enum": ["end_turn", "max_tokens", "model_context_window_exceeded", "stop_sequence", "tool_use", null]},
            "stop_sequence": {"type": ["string", "null"]},
            "usage": {"$ref": "#/components/schemas/MessageUsage"},
        },
    }
}

json_schema! {
    ContentBlock, uses [], {
        "oneOf": [
            {
                "type": "object",
                "required": ["type", "text"],
                "properties": {"type": {"type": "string", "enum": ["text"]}, "text": {"type": "string"}},
            },
            {
                "type": "object",
                "required": ["type", "thinking", "signature"],
                "properties": {"type": {"type": "string", "enum": ["thinking"]}, "thinking": {"type": "string"}, "signature": {"type": "string"}},
            },
            {
                "type": "object",
                "required": ["type", "id", "name", "input"],
                "properties": {
                    "type": {"type": "string", "enum": ["tool_use"]},
                    "id": {"type": "string"},
                    "name": {"type": "string"},
                    "input": {"type": "object", "additionalProperties": true},
                },
            },
        ],
    }
}

json_schema! {
    /// Token counts of a request. Each prompt token counts as read from the cache, as written to it, or as input.
    MessageUsage, uses [], {
        "type": "object",
        "required": ["input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens", "output_tokens", "output_tokens_details"],
        "properties": {
            "input_tokens": {"type": "integer"},
            "cache_creation_input_tokens": {"type": "integer"},
            "cache_read_input_tokens": {"type": "integer"},
            "output_tokens": {"type": "integer"},
            "output_tokens_details": {"type": "object", "required": ["thinking_tokens"], "properties": {"thinking_tokens": {"type": "integer"}}},
        },
    }
}

json_schema! {
    /// An event of a stream.
    MessageEvent, uses [Message, ContentBlock, MessageUsage, AnthropicError], {
        "oneOf": [
            {
                "type": "object",
                "required": ["type", "message"],
                "properties": {"type": {"type": "string", "enum": ["message_start"]}, "message": {"$ref": "#/components/schemas/Message"}},
            },
            {
                "type": "object",
                "required": ["type", "index", "content_block"],
                "properties": {
                    "type": {"type": "string", "enum": ["content_block_start"]},
                    "index": {"type": "integer"},
                    "content_block": {"$ref": "#/components/schemas/ContentBlock"},
                },
            },
            {
                "type": "object",
                "required": ["type", "index", "delta"],
                "properties": {
                    "type": {"type": "string", "enum": ["content_block_delta"]},
                    "index": {"type": "integer"},
                    "delta": {
                        "type": "object",
                        "required": ["type"],
                        "properties": {
                            "type": {"type": "string", "enum": ["text_delta", "thinking_delta", "signature_delta", "input_json_delta"]},
                            "text": {"type": "string"},
                            "thinking": {"type": "string"},
                            "signature": {"type": "string"},
                            "partial_json": {"type": "string"},
                        },
                    },
                },
            },
            {
                "type": "object",
                "required": ["type", "index"],
                "properties": {"type": {"type": "string", "enum": ["content_block_stop"]}, "index": {"type": "integer"}},
            },
            {
                "type": "object",
                "required": ["type", "delta", "usage"],
                "properties": {
                    "type": {"type": "string", "enum": ["message_delta"]},
                    "delta": {
                        "type": "object",
                        "required": ["stop_reason", "stop_sequence"],
                        "properties": {"stop_reason": {"type": "string"}, "stop_sequence": {"type": ["string", "null"]}},
                    },
                    "usage": {"$ref": "#/components/schemas/MessageUsage"},
                },
            },
            {
                "type": "object",
                "required": ["type"],
                "properties": {"type": {"type": "string", "enum": ["message_stop", "ping"]}},
            },
            {"$ref": "#/components/schemas/AnthropicError"},
        ],
    }
}

/// Encodes the answer to one request.
pub struct MessageEncoder {
    id: String,
    /// For errors.
    request_id: String,
    model: String,
    /// The client asks for caching, so cached tokens are reported as written.
    has_cache_control: bool,
    blocks: Blocks,
}

impl MessageEncoder {
    /// `model`: the name to answer with.
    pub fn new(model: String, has_cache_control: bool) -> MessageEncoder {
        let request_id = context::current().map_or_else(String::new, |e| e.id.clone());
        let id = format!("msg_{}", fresh_id());
        MessageEncoder { id, request_id, model, has_cache_control, blocks: Blocks::default() }
    }

    fn usage(&self, usage: Usage) -> Value {
        let computed = usage.prompt.saturating_sub(usage.cached);
        let written = if self.has_cache_control { usage.written } else { 0 };
        json!({
            "input_tokens": computed.saturating_sub(written),
            "cache_creation_input_tokens": written,
            "cache_read_input_tokens": usage.cached,
            "output_tokens": usage.generated,
            "output_tokens_details": {"thinking_tokens": self.blocks.thought_tokens},
        })
    }

    fn message(&self, content: Vec<Value>, usage: Usage) -> Value {
        json!({
            "id": self.id, "type": "message", "role": "assistant", "model": self.model, "content": content,
            "stop_reason": null, "stop_sequence": null, "usage": self.usage(usage),
        })
    }

    fn stop_reason(&self, stopped_by: Option<&str>) -> &'static str {
        match self.blocks.finish {
            Some(Finish::Length) => "max_tokens",
            Some(Finish::ContextFull) => "model_context_window_exceeded",
            _ if stopped_by.is_some() => "stop_sequence",
            _ if self.blocks.has_calls() => "tool_use",
            _ => "end_turn",
        }
    }

    /// A call's id, unique among all conversations.
    fn call_id(&self, index: usize) -> String {
        format!("toolu_{}{index:02}", self.id.trim_start_matches("msg_"))
    }

    /// The event that starts a block.
    fn start_event(&self, index: usize) -> Value {
        let block = match &self.blocks.all[index].kind {
            BlockKind::Thought => json!({"type": "thinking", "thinking": "", "signature": ""}),
            BlockKind::Text => json!({"type": "text", "text": ""}),
            BlockKind::Call(name) => json!({"type": "tool_use", "id": self.call_id(index), "name": name, "input": {}}),
        };
        json!({"type": "content_block_start", "index": index, "content_block": block})
    }

    /// A block of a whole answer.
    fn whole_block(&self, (index, block): (usize, &Block)) -> Value {
        match &block.kind {
            BlockKind::Thought => {
                json!({"type": "thinking", "thinking": block.text, "signature": signature(&block.text)})
            }
            BlockKind::Text => json!({"type": "text", "text": block.text}),
            BlockKind::Call(name) => {
                // If the answer was cut off within a call, its arguments are incomplete.
                let input: Map<String, Value> = serde_json::from_str(&block.text).unwrap_or_default();
                json!({"type": "tool_use", "id": self.call_id(index), "name": name, "input": input})
            }
        }
    }

    fn events(&self, change: &Change) -> String {
        let delta = |index: &usize, delta: Value| {
            event(&json!({"type": "content_block_delta", "index": index, "delta": delta}))
        };
        match change {
            Change::Started(index) => event(&self.start_event(*index)),
            Change::Appended(index, more) => delta(
                index,
                match self.blocks.all[*index].kind {
                    BlockKind::Thought => json!({"type": "thinking_delta", "thinking": more}),
                    BlockKind::Text => json!({"type": "text_delta", "text": more}),
                    BlockKind::Call(_) => json!({"type": "input_json_delta", "partial_json": more}),
                },
            ),
            Change::Ended(index) => {
                let block = &self.blocks.all[*index];
                let signed = (block.kind == BlockKind::Thought)
                    .then(|| delta(index, json!({"type": "signature_delta", "signature": signature(&block.text)})));
                signed.unwrap_or_default() + &event(&json!({"type": "content_block_stop", "index": index}))
            }
        }
    }
}

/// What clients send back with a thought: a digest of its text. It is never checked: the server takes thoughts as clients send them, whoever wrote them.
fn signature(thought: &str) -> String {
    format!("sluice1-{}", blake3::hash(thought.as_bytes()).to_hex())
}

impl StreamEncoder for MessageEncoder {
    fn started(&mut self, usage: Usage) -> String {
        let message = self.message(Vec::new(), usage);
        event(&json!({"type": "message_start", "message": message}))
    }

    fn delta(&mut self, delta: &Delta) -> String {
        self.blocks.apply(delta).iter().map(|change| self.events(change)).collect()
    }

    fn keep_alive(&mut self) -> String {
        event(&json!({"type": "ping"}))
    }

    fn end(&mut self, usage: Usage, stopped_by: Option<&str>) -> String {
        let delta = json!({"stop_reason": self.stop_reason(stopped_by), "stop_sequence": stopped_by});
        event(&json!({"type": "message_delta", "delta": delta, "usage": self.usage(usage)}))
            + &event(&json!({"type": "message_stop"}))
    }

    fn failed(&mut self, error: &ApiError) -> String {
        event(&self.error(error))
    }

    fn collect_delta(&mut self, delta: Delta) {
        self.blocks.apply(&delta);
    }

    fn complete(&mut self, usage: Usage, stopped_by: Option<&str>) -> String {
        let content = self.blocks.all.iter().enumerate().map(|block| self.whole_block(block)).collect();
        let mut message = self.message(content, usage);
        message["stop_reason"] = self.stop_reason(stopped_by).into();
        message["stop_sequence"] = stopped_by.into();
        message.to_string()
    }

    fn error(&self, error: &ApiError) -> Value {
        error_json(error, &self.request_id)
    }
}

#[cfg(test)]
mod tests {
    use sluice_engine::text::Piece;

    use super::*;
    use crate::api::blocks::tests::{delta, finished, rich};

    fn answer() -> MessageEncoder {
        MessageEncoder { id: "msg_1".into(), ..MessageEncoder::new("demo".into(), true) }
    }

    const USAGE: Usage = Usage { prompt: 10, cached: 4, written: 5, generated: 7, predicted: None };

    /// Names and data of a stream's events.
    fn parsed(stream: &str) -> Vec<(String, Value)> {
        let one = |event: &str| {
            let (name, data) = event.strip_prefix("event: ").unwrap().split_once("\ndata: ").unwrap();
            (name.to_owned(), serde_json::from_str(data).unwrap())
        };
        stream.split("\n\n").filter(|e| !e.is_empty()).map(one).collect()
    }

    #[test]
    fn thoughts_text_and_calls_are_blocks_with_events_of_their_own() {
        let mut encoder = answer();
        let mut stream = encoder.started(Usage { generated: 0, ..USAGE });
        stream += &rich().iter().map(|d| encoder.delta(d)).collect::<String>();
        stream += &encoder.end(USAGE, None);
        let events = parsed(&stream);
        let usage = |output: usize, thinking: usize| {
            json!({
                "input_tokens": 1, "cache_creation_input_tokens": 5, "cache_read_input_tokens": 4, "output_tokens": output,
                "output_tokens_details": {"thinking_tokens": thinking},
            })
        };
        let start =
            |index: usize, block: Value| json!({"type": "content_block_start", "index": index, "content_block": block});
        let delta = |index: usize, delta: Value| json!({"type": "content_block_delta", "index": index, "delta": delta});
        let stop = |index: usize| json!({"type": "content_block_stop", "index": index});
        let thinking = |text: &str| json!({"type": "thinking_delta", "thinking": text});
        let text = |text: &str| json!({"type": "text_delta", "text": text});
        let input = |json: &str| json!({"type": "input_json_delta", "partial_json": json});
        let call = |id: &str, name: &str| json!({"type": "tool_use", "id": id, "name": name, "input": {}});
        let message = json!({
            "id": "msg_1", "type": "message", "role": "assistant", "model": "demo", "content": [],
            "stop_reason": null, "stop_sequence": null, "usage": usage(0, 0),
        });
        let expected = [
            json!({"type": "message_start", "message": message}),
            start(0, json!({"type": "thinking", "thinking": "", "signature": ""})),
            delta(0, thinking("Let me ")),
            delta(0, thinking("look.")),
            delta(0, json!({"type": "signature_delta", "signature": signature("Let me look.")})),
            stop(0),
            start(1, json!({"type": "text", "text": ""})),
            delta(1, text("I'll ")),
            delta(1, text("look.")),
            stop(1),
            start(2, call("toolu_102", "read")),
            delta(2, input("{\"path\": ")),
            delta(2, input("\"b\", \"a\": 1}")),
            stop(2),
            start(3, call("toolu_103", "ls")),
            delta(3, input("{}")),
            stop(3),
            json!({"type": "message_delta", "delta": {"stop_reason": "tool_use", "stop_sequence": null}, "usage": usage(7, 2)}),
            json!({"type": "message_stop"}),
        ];
        let found: Vec<Value> = events.iter().map(|(_, value)| value.clone()).collect();
        assert_eq!(found, expected);
        assert!(events.iter().all(|(name, value)| value["type"] == *name), "each is named by its type");
    }

    #[test]
    fn a_whole_answer_has_what_the_stream_says() {
        let mut encoder = answer();
        rich().into_iter().for_each(|d| encoder.collect_delta(d));
        let whole: Value = serde_json::from_str(&encoder.complete(USAGE, None)).unwrap();
        let thinking = json!({"type": "thinking", "thinking": "Let me look.", "signature": signature("Let me look.")});
        assert_eq!(
            whole["content"],
            json!([
                thinking,
                {"type": "text", "text": "I'll look."},
                {"type": "tool_use", "id": "toolu_102", "name": "read", "input": {"path": "b", "a": 1}},
                {"type": "tool_use", "id": "toolu_103", "name": "ls", "input": {}},
            ])
        );
        assert!(whole.to_string().contains(r#"{"path":"b","a":1}"#), "fields stay in their order");
        assert_eq!(whole["stop_reason"], "tool_use");
    }

    #[test]
    fn the_reason_to_stop_is_named() {
        let after = |deltas: Vec<Delta>, stopped_by: Option<&str>| {
            let mut encoder = answer();
            deltas.into_iter().for_each(|d| encoder.collect_delta(d));
            let whole: Value = serde_json::from_str(&encoder.complete(USAGE, stopped_by)).unwrap();
            (whole["stop_reason"].as_str().unwrap().to_owned(), whole["stop_sequence"].clone())
        };
        let said = || delta(&[Piece::Text("a".into())]);
        assert_eq!(after(vec![said(), finished(Finish::Stop)], None), ("end_turn".into(), Value::Null));
        assert_eq!(after(vec![said(), finished(Finish::Length)], None), ("max_tokens".into(), Value::Null));
        assert_eq!(after(vec![said(), finished(Finish::Stop)], Some("END")), ("stop_sequence".into(), "END".into()));
    }

    #[test]
    fn a_signature_is_as_long_for_every_thought() {
        assert_eq!(signature("").len(), signature(&"x".repeat(5000)).len());
        assert_ne!(signature("a"), signature("b"));
    }
}
