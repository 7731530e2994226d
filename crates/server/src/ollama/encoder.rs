//! From an answer to Ollama's lines of JSON, or to one object.

use std::time::{Duration, Instant};

use serde_json::{Map, Value, json};
use sluice_engine::Finish;

use crate::api::answer::Delta;
use crate::api::blocks::{Blocks, Change};
use crate::api::pending::Usage;
use crate::api::stream::StreamEncoder;
use crate::clock::{now, rfc3339};
use crate::http::context::fresh_id;
use crate::http::error::ApiError;
use crate::http::openapi::json_schema;
use crate::ollama::error::error_json;

/// The schema of an answer, or of a line of it. `content`: the name of the field that holds the answer's text; `fields`: that field, and others beside it.
fn answer_schema(content: &str, fields: Value) -> Value {
    let mut properties = json!({
        "model": {"type": "string"},
        "created_at": {"type": "string", "format": "date-time"},
    });
    let tail = json!({
        "done": {"type": "boolean"},
        "done_reason": {"type": "string", "enum": ["stop", "length", "load"]},
        "total_duration": {"type": "integer"},
        "load_duration": {"type": "integer"},
        "prompt_eval_count": {"type": "integer"},
        "prompt_eval_duration": {"type": "integer"},
        "eval_count": {"type": "integer"},
        "eval_duration": {"type": "integer"},
    });
    if let (Some(all), Value::Object(fields), Value::Object(tail)) = (properties.as_object_mut(), fields, tail) {
        all.extend(fields);
        all.extend(tail);
    }
    json!({
        "anyOf": [
            {"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}},
            {"type": "object", "required": ["model", "created_at", content, "done"], "properties": properties},
        ],
    })
}

json_schema! {
    /// A line of an answer to a conversation, or all of it. Durations are in nanoseconds.
    ChatAnswer, uses [], (answer_schema("message", json!({
        "message": {
            "type": "object",
            "required": ["role", "content"],
            "properties": {
                "role": {"type": "string", "enum": ["assistant"]},
                "content": {"type": "string"},
                "thinking": {"type": "string"},
                "tool_calls": {"type": "array", "items": {
                    "type": "object",
                    "required": ["function"],
                    "properties": {
                        "id": {"type": "string"},
                        "function": {
                            "type": "object",
                            "required": ["name", "arguments"],
                            "properties": {
                                "index": {"type": "integer"},
                                "name": {"type": "string"},
                                "arguments": {"type": "object", "additionalProperties": true},
                            },
                        },
                    },
                }},
            },
        },
    })))
}

json_schema! {
    /// A line of an answer to a prompt, or all of it. Durations are in nanoseconds.
    GenerateAnswer, uses [], (answer_schema("response", json!({"response": {"type": "string"}, "thinking": {"type": "string"}})))
}

/// The endpoint whose answers are encoded.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum ReplyKind {
    /// `/api/chat`.
    Chat,
    /// `/api/generate`.
    Generate,
}

/// Encodes the answer to one request.
pub struct OllamaEncoder {
    kind: ReplyKind,
    model: String,
    arrived: Instant,
    /// How long loading the model took.
    load: Duration,
    /// When the first token came.
    first_token: Option<Instant>,
    blocks: Blocks,
}

/// Content of a line.
#[derive(Default)]
struct LineContent<'a> {
    text: &'a str,
    thought: &'a str,
    calls: Vec<Value>,
}

impl OllamaEncoder {
    /// To be called when the model is loaded. `arrived`: when the request came.
    pub fn new(kind: ReplyKind, model: String, arrived: Instant) -> OllamaEncoder {
        OllamaEncoder { kind, model, arrived, load: arrived.elapsed(), first_token: None, blocks: Blocks::default() }
    }

    /// The answer to a request that only loads the model.
    pub fn loaded(&self) -> Value {
        let mut object = self.object(LineContent::default(), true);
        object["done_reason"] = "load".into();
        object
    }

    fn object(&self, content: LineContent, done: bool) -> Value {
        let mut object = json!({"model": self.model, "created_at": rfc3339(now())});
        let mut said = match self.kind {
            ReplyKind::Chat => json!({"role": "assistant", "content": content.text}),
            ReplyKind::Generate => json!({"response": content.text}),
        };
        if !content.thought.is_empty() {
            said["thinking"] = content.thought.into();
        }
        if !content.calls.is_empty() {
            said["tool_calls"] = content.calls.into();
        }
        match (self.kind, said) {
            (ReplyKind::Generate, Value::Object(fields)) => fields.into_iter().for_each(|(name, v)| object[name] = v),
            (_, said) => object["message"] = said,
        }
        object["done"] = done.into();
        object
    }

    fn line(&self, content: LineContent) -> String {
        format!("{}\n", self.object(content, false))
    }

    fn call(&self, index: usize) -> Option<Value> {
        let (name, json) = self.blocks.call(index)?;
        // If the answer was cut off within a call, its arguments are incomplete.
        let arguments: Map<String, Value> = serde_json::from_str(json).unwrap_or_default();
        let number = (0..index).filter(|i| self.blocks.call(*i).is_some()).count();
        let function = json!({"index": number, "name": name, "arguments": arguments});
        Some(json!({"id": format!("call_{}", fresh_id()), "function": function}))
    }

    /// The last object of an answer, with the reason for its end and its durations.
    fn final_object(&self, content: LineContent, usage: Usage) -> Value {
        let mut object = self.object(content, true);
        let reason = match self.blocks.finish {
            Some(Finish::Length | Finish::ContextFull) => "length",
            _ => "stop",
        };
        object["done_reason"] = reason.into();
        let total = self.arrived.elapsed();
        let until = self.first_token.map_or(total, |first| first.duration_since(self.arrived));
        let nanoseconds = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        for (name, figure) in [
            ("total_duration", nanoseconds(total)),
            ("load_duration", nanoseconds(self.load)),
            ("prompt_eval_count", usage.prompt as u64),
            ("prompt_eval_duration", nanoseconds(until.saturating_sub(self.load))),
            ("eval_count", usage.generated as u64),
            ("eval_duration", nanoseconds(total.saturating_sub(until))),
        ] {
            object[name] = figure.into();
        }
        object
    }
}

impl StreamEncoder for OllamaEncoder {
    fn media_type(&self) -> &'static str {
        "application/x-ndjson"
    }

    fn delta(&mut self, delta: &Delta) -> String {
        self.first_token.get_or_insert_with(Instant::now);
        let changes = self.blocks.apply(delta);
        let line = |change: &Change| match change {
            Change::Started(_) => String::new(),
            Change::Appended(index, _) if self.blocks.call(*index).is_some() => String::new(),
            Change::Appended(index, text) if self.blocks.is_thought(*index) => {
                self.line(LineContent { thought: text, ..LineContent::default() })
            }
            Change::Appended(_, text) => self.line(LineContent { text, ..LineContent::default() }),
            Change::Ended(index) => {
                let call = self
                    .call(*index)
                    .map(|call| self.line(LineContent { calls: vec![call], ..LineContent::default() }));
                call.unwrap_or_default()
            }
        };
        changes.iter().map(line).collect()
    }

    fn keep_alive(&mut self) -> String {
        self.line(LineContent::default())
    }

    fn end(&mut self, usage: Usage, _: Option<&str>) -> String {
        format!("{}\n", self.final_object(LineContent::default(), usage))
    }

    fn failed(&mut self, error: &ApiError) -> String {
        format!("{}\n", error_json(error))
    }

    fn collect_delta(&mut self, delta: Delta) {
        self.first_token.get_or_insert_with(Instant::now);
        self.blocks.apply(&delta);
    }

    fn complete(&mut self, usage: Usage, _: Option<&str>) -> String {
        let of = |thought: bool| -> String {
            let of_kind = |i: &usize| self.blocks.call(*i).is_none() && self.blocks.is_thought(*i) == thought;
            (0..self.blocks.all.len()).filter(of_kind).map(|i| self.blocks.all[i].text.as_str()).collect()
        };
        let calls = (0..self.blocks.all.len()).filter_map(|i| self.call(i)).collect();
        self.final_object(LineContent { text: &of(false), thought: &of(true), calls }, usage).to_string()
    }

    fn error(&self, error: &ApiError) -> Value {
        error_json(error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::blocks::tests::rich;

    const USAGE: Usage = Usage { prompt: 20, cached: 8, written: 0, generated: 9, predicted: None };

    fn new_encoder(kind: ReplyKind) -> OllamaEncoder {
        OllamaEncoder::new(kind, "demo:latest".into(), Instant::now())
    }

    fn said(object: &Value) -> String {
        let message = &object["message"];
        let calls = message["tool_calls"].as_array().map_or(String::new(), |calls| {
            calls
                .iter()
                .map(|c| format!("{}({})", c["function"]["name"].as_str().unwrap(), c["function"]["arguments"]))
                .collect()
        });
        let text = |name: &str| message[name].as_str().unwrap_or_default().to_owned();
        format!("{}|{}|{calls}", text("thinking"), text("content"))
    }

    #[test]
    fn an_answer_is_lines_of_which_the_last_is_done() {
        let mut encoder = new_encoder(ReplyKind::Chat);
        let mut lines: String = rich().iter().map(|delta| encoder.delta(delta)).collect();
        lines += &encoder.end(USAGE, None);
        let lines: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let all: Vec<String> = lines.iter().map(said).collect();
        assert_eq!(
            all,
            ["Let me ||", "look.||", "|I'll |", "|look.|", "||read({\"path\":\"b\",\"a\":1})", "||ls({})", "||"]
        );
        let (last, before) = lines.split_last().unwrap();
        assert!(before.iter().all(|line| line["done"] == false && line.get("done_reason").is_none()));
        assert_eq!(
            (&last["done"], &last["done_reason"], &last["eval_count"]),
            (&json!(true), &json!("stop"), &json!(9))
        );
        assert_eq!(last["prompt_eval_count"], 20);
        let sum = ["load_duration", "prompt_eval_duration", "eval_duration"].map(|name| last[name].as_u64().unwrap());
        assert!(sum.iter().sum::<u64>() <= last["total_duration"].as_u64().unwrap());
    }

    #[test]
    fn a_whole_answer_says_the_same() {
        let mut encoder = new_encoder(ReplyKind::Chat);
        rich().into_iter().for_each(|delta| encoder.collect_delta(delta));
        let whole: Value = serde_json::from_str(&encoder.complete(USAGE, None)).unwrap();
        assert_eq!(said(&whole), "Let me look.|I'll look.|read({\"path\":\"b\",\"a\":1})ls({})");
        assert_eq!((&whole["done"], &whole["model"]), (&json!(true), &json!("demo:latest")));
        let mut encoder = new_encoder(ReplyKind::Generate);
        rich().into_iter().take(4).for_each(|delta| encoder.collect_delta(delta));
        let whole: Value = serde_json::from_str(&encoder.complete(USAGE, None)).unwrap();
        assert_eq!((&whole["response"], &whole["thinking"]), (&json!("I'll look."), &json!("Let me look.")));
        assert_eq!(new_encoder(ReplyKind::Generate).loaded()["done_reason"], "load");
    }
}
