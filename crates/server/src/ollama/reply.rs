//! From an answer to Ollama's lines, and to its object.

use std::time::{Duration, Instant};

use serde_json::{Map, Value, json};
use sluice_engine::Finish;

use super::error_json;
use crate::answer::Delta;
use crate::blocks::{Blocks, Change};
use crate::context::fresh_id;
use crate::error::ApiError;
use crate::models::rfc3339;
use crate::openapi::written;
use crate::reply::{StreamEncoder, Usage, now};

written! {
    /// A line of an answer to a conversation, or all of it. Durations are in nanoseconds.
    ChatAnswer, uses [], {
        "anyOf": [
            {"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}},
            {
                "type": "object",
                "required": ["model", "created_at", "message", "done"],
                "properties": {
                    "model": {"type": "string"},
                    "created_at": {"type": "string", "format": "date-time"},
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
                    "done": {"type": "boolean"},
                    "done_reason": {"type": "string", "enum": ["stop", "length", "load"]},
                    "total_duration": {"type": "integer"},
                    "load_duration": {"type": "integer"},
                    "prompt_eval_count": {"type": "integer"},
                    "prompt_eval_duration": {"type": "integer"},
                    "eval_count": {"type": "integer"},
                    "eval_duration": {"type": "integer"},
                },
            },
        ],
    }
}

written! {
    /// A line of an answer to a prompt, or all of it. Durations are in nanoseconds.
    GenerateAnswer, uses [], {
        "anyOf": [
            {"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}},
            {
                "type": "object",
                "required": ["model", "created_at", "response", "done"],
                "properties": {
                    "model": {"type": "string"},
                    "created_at": {"type": "string", "format": "date-time"},
                    "response": {"type": "string"},
                    "thinking": {"type": "string"},
                    "done": {"type": "boolean"},
                    "done_reason": {"type": "string", "enum": ["stop", "length", "load"]},
                    "total_duration": {"type": "integer"},
                    "load_duration": {"type": "integer"},
                    "prompt_eval_count": {"type": "integer"},
                    "prompt_eval_duration": {"type": "integer"},
                    "eval_count": {"type": "integer"},
                    "eval_duration": {"type": "integer"},
                },
            },
        ],
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum ReplyKind {
    Chat,
    Generate,
}

/// The answer to one request.
pub struct Answering {
    kind: ReplyKind,
    model: String,
    arrived: Instant,
    /// How long the model was waited for.
    load: Duration,
    /// When the first token came.
    first: Option<Instant>,
    blocks: Blocks,
}

/// What a line adds.
#[derive(Default)]
struct Part<'a> {
    text: &'a str,
    thought: &'a str,
    calls: Vec<Value>,
}

impl Answering {
    /// The model is there by now.
    pub fn new(kind: ReplyKind, model: String, arrived: Instant) -> Answering {
        Answering { kind, model, arrived, load: arrived.elapsed(), first: None, blocks: Blocks::default() }
    }

    /// The answer to a request that only wants the model in memory.
    pub fn loaded(&self) -> Value {
        let mut object = self.object(Part::default(), true);
        object["done_reason"] = "load".into();
        object
    }

    fn object(&self, part: Part, done: bool) -> Value {
        let mut object = json!({"model": self.model, "created_at": rfc3339(now())});
        let mut said = match self.kind {
            ReplyKind::Chat => json!({"role": "assistant", "content": part.text}),
            ReplyKind::Generate => json!({"response": part.text}),
        };
        if !part.thought.is_empty() {
            said["thinking"] = part.thought.into();
        }
        if !part.calls.is_empty() {
            said["tool_calls"] = part.calls.into();
        }
        match (self.kind, said) {
            (ReplyKind::Generate, Value::Object(fields)) => fields.into_iter().for_each(|(name, v)| object[name] = v),
            (_, said) => object["message"] = said,
        }
        object["done"] = done.into();
        object
    }

    fn line(&self, part: Part) -> String {
        format!("{}\n", self.object(part, false))
    }

    fn call(&self, index: usize) -> Option<Value> {
        let (name, json) = self.blocks.call(index)?;
        // An answer that ended within a call has no more than its beginning.
        let arguments: Map<String, Value> = serde_json::from_str(json).unwrap_or_default();
        let number = (0..index).filter(|i| self.blocks.call(*i).is_some()).count();
        let function = json!({"index": number, "name": name, "arguments": arguments});
        Some(json!({"id": format!("call_{}", fresh_id()), "function": function}))
    }

    /// The end of an answer: with all of `part`, why it ended, and what it took.
    fn done(&self, part: Part, usage: Usage) -> Value {
        let mut object = self.object(part, true);
        let reason = match self.blocks.finish {
            Some(Finish::Length | Finish::ContextFull) => "length",
            _ => "stop",
        };
        object["done_reason"] = reason.into();
        let total = self.arrived.elapsed();
        let until = self.first.map_or(total, |first| first.duration_since(self.arrived));
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

impl StreamEncoder for Answering {
    fn media_type(&self) -> &'static str {
        "application/x-ndjson"
    }

    fn delta(&mut self, delta: &Delta) -> String {
        self.first.get_or_insert_with(Instant::now);
        let changes = self.blocks.take(delta);
        let line = |change: &Change| match change {
            Change::Begun(_) => String::new(),
            Change::Grown(index, _) if self.blocks.call(*index).is_some() => String::new(),
            Change::Grown(index, text) if self.blocks.is_thought(*index) => {
                self.line(Part { thought: text, ..Part::default() })
            }
            Change::Grown(_, text) => self.line(Part { text, ..Part::default() }),
            Change::Ended(index) => {
                let call = self.call(*index).map(|call| self.line(Part { calls: vec![call], ..Part::default() }));
                call.unwrap_or_default()
            }
        };
        changes.iter().map(line).collect()
    }

    fn sign_of_life(&mut self) -> String {
        self.line(Part::default())
    }

    fn end(&mut self, usage: Usage, _: Option<&str>) -> String {
        format!("{}\n", self.done(Part::default(), usage))
    }

    fn failed(&mut self, error: &ApiError) -> String {
        format!("{}\n", error_json(error))
    }

    fn gather(&mut self, delta: Delta) {
        self.first.get_or_insert_with(Instant::now);
        self.blocks.take(&delta);
    }

    fn whole(&mut self, usage: Usage, _: Option<&str>) -> Value {
        let of = |thought: bool| -> String {
            let of_kind = |i: &usize| self.blocks.call(*i).is_none() && self.blocks.is_thought(*i) == thought;
            (0..self.blocks.all.len()).filter(of_kind).map(|i| self.blocks.all[i].text.as_str()).collect()
        };
        let calls = (0..self.blocks.all.len()).filter_map(|i| self.call(i)).collect();
        self.done(Part { text: &of(false), thought: &of(true), calls }, usage)
    }

    fn error(&self, error: &ApiError) -> Value {
        error_json(error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::blocks::tests::rich;

    const USAGE: Usage = Usage { prompt: 20, cached: 8, written: 0, generated: 9 };

    fn answering(kind: ReplyKind) -> Answering {
        Answering::new(kind, "demo:latest".into(), Instant::now())
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
        let mut wire = answering(ReplyKind::Chat);
        let mut lines: String = rich().iter().map(|delta| wire.delta(delta)).collect();
        lines += &wire.end(USAGE, None);
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
        let mut wire = answering(ReplyKind::Chat);
        rich().into_iter().for_each(|delta| wire.gather(delta));
        let whole = wire.whole(USAGE, None);
        assert_eq!(said(&whole), "Let me look.|I'll look.|read({\"path\":\"b\",\"a\":1})ls({})");
        assert_eq!((&whole["done"], &whole["model"]), (&json!(true), &json!("demo:latest")));
        let mut wire = answering(ReplyKind::Generate);
        rich().into_iter().take(4).for_each(|delta| wire.gather(delta));
        let whole = wire.whole(USAGE, None);
        assert_eq!((&whole["response"], &whole["thinking"]), (&json!("I'll look."), &json!("Let me look.")));
        assert_eq!(answering(ReplyKind::Generate).loaded()["done_reason"], "load");
    }
}
