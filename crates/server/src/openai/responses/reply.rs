//! From an answer to the events of Responses, and to the response itself. Each block of the answer is an item of the output.

use serde_json::{Map, Value, json};
use sluice_engine::Finish;

use super::carried;
use super::request::Wishes;
use crate::answer::Delta;
use crate::blocks::{BlockKind, Blocks, Change};
use crate::context::fresh_id;
use crate::error::ApiError;
use crate::openai::chat::{TokenLogprob, entries};
use crate::openapi::{ANY, written};
use crate::reply::{StreamEncoder, Usage, event, now};

written! {
    ResponseObject, uses [OutputItem], {
        "type": "object",
        "required": [
            "id", "object", "created_at", "status", "background", "error", "incomplete_details", "instructions", "max_output_tokens", "metadata", "model", "output",
            "parallel_tool_calls", "previous_response_id", "reasoning", "store", "temperature", "text", "tool_choice", "tools", "top_p", "truncation", "usage",
        ],
        "properties": {
            "id": {"type": "string"},
            "object": {"type": "string", "enum": ["response"]},
            "created_at": {"type": "integer"},
            "completed_at": {"type": "integer"},
            "status": {"type": "string", "enum": ["in_progress", "completed", "incomplete", "failed"]},
            "background": {"type": "boolean"},
            "error": {
                "type": ["object", "null"],
                "required": ["code", "message"],
                "properties": {"code": {"type": "string"}, "message": {"type": "string"}},
            },
            "incomplete_details": {"type": ["object", "null"], "required": ["reason"], "properties": {"reason": {"type": "string", "enum": ["max_output_tokens"]}}},
            "instructions": {"type": ["string", "null"]},
            "max_output_tokens": {"type": ["integer", "null"]},
            "metadata": {"type": ANY, "description": "As it came."},
            "model": {"type": "string"},
            "output": {"type": "array", "items": {"$ref": "#/components/schemas/OutputItem"}},
            "parallel_tool_calls": {"type": "boolean"},
            "previous_response_id": {"type": "null"},
            "reasoning": {"type": ANY, "description": "As it came."},
            "store": {"type": "boolean"},
            "temperature": {"type": ["number", "null"]},
            "text": {"type": ANY, "description": "As it came."},
            "tool_choice": {"type": ANY, "description": "As it came."},
            "tools": {"type": "array", "items": {"type": ANY, "description": "As it came."}},
            "top_p": {"type": ["number", "null"]},
            "truncation": {"type": "string", "enum": ["disabled"]},
            "usage": {
                "type": ["object", "null"],
                "required": ["input_tokens", "input_tokens_details", "output_tokens", "output_tokens_details", "total_tokens"],
                "properties": {
                    "input_tokens": {"type": "integer"},
                    "input_tokens_details": {
                        "type": "object",
                        "required": ["cached_tokens", "cache_write_tokens"],
                        "properties": {"cached_tokens": {"type": "integer"}, "cache_write_tokens": {"type": "integer"}},
                    },
                    "output_tokens": {"type": "integer"},
                    "output_tokens_details": {"type": "object", "required": ["reasoning_tokens"], "properties": {"reasoning_tokens": {"type": "integer"}}},
                    "total_tokens": {"type": "integer"},
                },
            },
        },
    }
}

written! {
    /// A thought, a text, or a call of a tool.
    OutputItem, uses [OutputPart], {
        "oneOf": [
            {
                "type": "object",
                "required": ["type", "id", "status", "summary"],
                "properties": {
                    "type": {"type": "string", "enum": ["reasoning"]},
                    "id": {"type": "string"},
                    "status": {"type": "string", "enum": ["in_progress", "completed", "incomplete"]},
                    "summary": {"type": "array", "items": {"$ref": "#/components/schemas/OutputPart"}},
                    "content": {"type": "array", "items": {"$ref": "#/components/schemas/OutputPart"}},
                    "encrypted_content": {"type": "string", "description": "The thought in Base64, where `include` asks for it."},
                },
            },
            {
                "type": "object",
                "required": ["type", "id", "role", "status", "content"],
                "properties": {
                    "type": {"type": "string", "enum": ["message"]},
                    "id": {"type": "string"},
                    "role": {"type": "string", "enum": ["assistant"]},
                    "status": {"type": "string", "enum": ["in_progress", "completed", "incomplete"]},
                    "content": {"type": "array", "items": {"$ref": "#/components/schemas/OutputPart"}},
                },
            },
            {
                "type": "object",
                "required": ["type", "id", "call_id", "name", "arguments", "status"],
                "properties": {
                    "type": {"type": "string", "enum": ["function_call"]},
                    "id": {"type": "string"},
                    "call_id": {"type": "string"},
                    "name": {"type": "string"},
                    "arguments": {"type": "string", "description": "A JSON object, in the order in which it was written."},
                    "status": {"type": "string", "enum": ["in_progress", "completed", "incomplete"]},
                },
            },
        ],
    }
}

written! {
    OutputPart, uses [TokenLogprob], {
        "type": "object",
        "required": ["type", "text"],
        "properties": {
            "type": {"type": "string", "enum": ["output_text", "reasoning_text", "summary_text"]},
            "text": {"type": "string"},
            "annotations": {"type": "array", "items": {"type": ANY}, "maxItems": 0},
            "logprobs": {"type": "array", "items": {"$ref": "#/components/schemas/TokenLogprob"}, "description": "Where `include` asks for them."},
        },
    }
}

written! {
    /// An event of a stream.
    ResponseEvent, uses [ResponseObject, OutputItem, OutputPart, TokenLogprob], {
        "type": "object",
        "required": ["type", "sequence_number"],
        "properties": {
            "type": {"type": "string", "enum": [
                "response.created", "response.in_progress", "response.completed", "response.incomplete", "response.failed", "response.output_item.added",
                "response.output_item.done", "response.content_part.added", "response.content_part.done", "response.output_text.delta",
                "response.output_text.done", "response.reasoning_text.delta", "response.reasoning_text.done", "response.reasoning_summary_part.added",
                "response.reasoning_summary_part.done", "response.reasoning_summary_text.delta", "response.reasoning_summary_text.done",
                "response.function_call_arguments.delta", "response.function_call_arguments.done",
            ]},
            "sequence_number": {"type": "integer"},
            "response": {"$ref": "#/components/schemas/ResponseObject"},
            "output_index": {"type": "integer"},
            "item_id": {"type": "string"},
            "item": {"$ref": "#/components/schemas/OutputItem"},
            "content_index": {"type": "integer"},
            "summary_index": {"type": "integer"},
            "part": {"$ref": "#/components/schemas/OutputPart"},
            "delta": {"type": "string"},
            "text": {"type": "string"},
            "logprobs": {"type": "array", "items": {"$ref": "#/components/schemas/TokenLogprob"}, "description": "Where `include` asks for them."},
            "name": {"type": "string"},
            "arguments": {"type": "string"},
        },
    }
}

/// The answer to one request.
pub struct Responses {
    /// Without what it is the id of.
    id: String,
    model: String,
    created: u64,
    wishes: Wishes,
    blocks: Blocks,
    /// By block, where that is asked for: how likely the tokens of its text were; and those of text that is still held back.
    logprobs: Vec<Vec<Value>>,
    waiting: Vec<Value>,
    /// Of the next event.
    sequence: u64,
}

impl Responses {
    pub fn new(model: String, wishes: Wishes) -> Responses {
        let blocks = Blocks::default();
        let (logprobs, waiting) = (Vec::new(), Vec::new());
        Responses { id: fresh_id(), model, created: now(), wishes, blocks, logprobs, waiting, sequence: 0 }
    }

    fn event(&mut self, kind: &str, fields: Value) -> String {
        let mut object = json!({"type": kind, "sequence_number": self.sequence});
        self.sequence += 1;
        if let (Some(object), Value::Object(fields)) = (object.as_object_mut(), fields) {
            object.extend(fields);
        }
        event(&object)
    }

    /// An event of the response as a whole.
    fn state(&mut self, kind: &str, status: &str, rest: Value) -> String {
        let response = self.response(status, rest);
        self.event(kind, json!({"response": response}))
    }

    fn response(&self, status: &str, rest: Value) -> Value {
        let mut response = json!({
            "id": format!("resp_{}", self.id), "object": "response", "created_at": self.created, "status": status,
            "background": false, "error": null, "incomplete_details": null, "model": self.model, "output": [],
            "previous_response_id": null, "store": false, "truncation": "disabled", "usage": null,
        });
        if let (Some(object), Value::Object(rest)) = (response.as_object_mut(), rest) {
            object.extend(self.wishes.echo.clone());
            object.extend(rest);
        }
        response
    }

    fn usage(&self, usage: Usage) -> Value {
        let Usage { prompt, cached, written, generated } = usage;
        json!({
            "input_tokens": prompt, "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": written},
            "output_tokens": generated, "output_tokens_details": {"reasoning_tokens": self.blocks.thought_tokens},
            "total_tokens": prompt + generated,
        })
    }

    /// What a delta changes, and with each change the likelihoods of the tokens that it shows.
    fn take(&mut self, delta: &Delta) -> Vec<(Change, Vec<Value>)> {
        if let Some(tokenizer) = &self.wishes.tokenizer {
            self.waiting.extend(entries(tokenizer, &delta.tokens));
        }
        let mut all = Vec::new();
        for change in self.blocks.take(delta) {
            let mut shown = Vec::new();
            if let Change::Grown(index, _) = &change
                && self.blocks.all[*index].kind == BlockKind::Text
            {
                shown = std::mem::take(&mut self.waiting);
                self.logprobs.resize_with(self.blocks.all.len().max(self.logprobs.len()), Vec::new);
                self.logprobs[*index].extend_from_slice(&shown);
            }
            all.push((change, shown));
        }
        if self.blocks.open().is_some_and(|i| self.blocks.all[i].kind != BlockKind::Text) {
            self.waiting.clear();
        }
        all
    }

    fn logprobs(&self, index: usize) -> &[Value] {
        self.logprobs.get(index).map_or(&[], Vec::as_slice)
    }

    fn is_cut(&self) -> bool {
        matches!(self.blocks.finish, Some(Finish::Length | Finish::ContextFull))
    }

    /// How the response ends, and with what.
    fn ended(&self, usage: Usage) -> (&'static str, Value) {
        let output: Vec<Value> = (0..self.blocks.all.len()).map(|index| self.item(index, true)).collect();
        let mut rest = json!({"output": output, "usage": self.usage(usage), "completed_at": now()});
        if self.is_cut() {
            rest["incomplete_details"] = json!({"reason": "max_output_tokens"});
            return ("incomplete", rest);
        }
        ("completed", rest)
    }

    fn item_id(&self, index: usize) -> String {
        let kind = match self.blocks.all[index].kind {
            BlockKind::Thought => "rs",
            BlockKind::Text => "msg",
            BlockKind::Call(_) => "fc",
        };
        format!("{kind}_{}{index:02}", self.id)
    }

    /// An item of the output: as it begins, or as it is in the end.
    fn item(&self, index: usize, is_over: bool) -> Value {
        let (block, id) = (&self.blocks.all[index], self.item_id(index));
        let is_last = index + 1 == self.blocks.all.len();
        let status = match is_over {
            false => "in_progress",
            true if is_last && self.is_cut() => "incomplete",
            true => "completed",
        };
        let whole = |part: Value| if is_over { json!([part]) } else { json!([]) };
        match &block.kind {
            BlockKind::Thought => {
                let mut item = json!({"type": "reasoning", "id": id, "summary": [], "status": status});
                if self.wishes.as_summary {
                    item["summary"] = whole(json!({"type": "summary_text", "text": block.text}));
                } else {
                    item["content"] = whole(json!({"type": "reasoning_text", "text": block.text}));
                }
                if self.wishes.carried && is_over {
                    item["encrypted_content"] = carried(&block.text).into();
                }
                item
            }
            BlockKind::Text => {
                let content = whole(output_text(&block.text, self.logprobs(index)));
                json!({"type": "message", "id": id, "role": "assistant", "status": status, "content": content})
            }
            BlockKind::Call(name) => {
                let arguments = if is_over { block.text.as_str() } else { "" };
                let call_id = format!("call_{}{index:02}", self.id);
                let (namespace, name) = self.wishes.namespaces.parted(name);
                let mut item = json!({
                    "type": "function_call", "id": id, "call_id": call_id, "name": name, "arguments": arguments, "status": status,
                });
                if let Some(namespace) = namespace {
                    item["namespace"] = namespace.into();
                }
                item
            }
        }
    }

    /// Where in the output something is said: the item, and its only part.
    fn place(&self, index: usize) -> Map<String, Value> {
        let mut place = json!({"item_id": self.item_id(index), "output_index": index});
        match self.blocks.all[index].kind {
            BlockKind::Thought if self.wishes.as_summary => place["summary_index"] = 0.into(),
            BlockKind::Thought | BlockKind::Text => place["content_index"] = 0.into(),
            BlockKind::Call(_) => {}
        }
        place.as_object().cloned().unwrap_or_default()
    }

    fn at(&mut self, kind: &str, index: usize, fields: Value) -> String {
        let mut all = self.place(index);
        if let Value::Object(fields) = fields {
            all.extend(fields);
        }
        self.event(kind, Value::Object(all))
    }

    /// Events for a change of a block.
    fn changed(&mut self, change: &Change, shown: &[Value]) -> String {
        match change {
            Change::Begun(index) => {
                let added = json!({"output_index": index, "item": self.item(*index, false)});
                let text = self.event("response.output_item.added", added);
                text + &self.part("added", *index, "")
            }
            Change::Grown(index, more) => {
                let mut fields = json!({"delta": more});
                if self.blocks.all[*index].kind == BlockKind::Text {
                    fields["logprobs"] = json!(shown);
                }
                self.at(&format!("{}.delta", self.name(*index)), *index, fields)
            }
            Change::Ended(index) => {
                let block = self.blocks.all[*index].clone();
                let fields = match &block.kind {
                    BlockKind::Thought => json!({"text": block.text}),
                    BlockKind::Text => json!({"text": block.text, "logprobs": self.logprobs(*index)}),
                    BlockKind::Call(name) => {
                        json!({"name": self.wishes.namespaces.parted(name).1, "arguments": block.text})
                    }
                };
                let mut text = self.at(&format!("{}.done", self.name(*index)), *index, fields);
                text += &self.part("done", *index, &block.text);
                let item = json!({"output_index": index, "item": self.item(*index, true)});
                text + &self.event("response.output_item.done", item)
            }
        }
    }

    /// What the events of a block's text are called.
    fn name(&self, index: usize) -> &'static str {
        match self.blocks.all[index].kind {
            BlockKind::Thought if self.wishes.as_summary => "response.reasoning_summary_text",
            BlockKind::Thought => "response.reasoning_text",
            BlockKind::Text => "response.output_text",
            BlockKind::Call(_) => "response.function_call_arguments",
        }
    }

    /// The event with which the only part of an item begins or ends; calls have none.
    fn part(&mut self, what: &str, index: usize, text: &str) -> String {
        let (kind, part) = match self.blocks.all[index].kind {
            BlockKind::Thought if self.wishes.as_summary => {
                ("reasoning_summary_part", json!({"type": "summary_text", "text": text}))
            }
            BlockKind::Thought => ("content_part", json!({"type": "reasoning_text", "text": text})),
            BlockKind::Text => {
                let logprobs = if what == "done" { self.logprobs(index) } else { &[] };
                ("content_part", output_text(text, logprobs))
            }
            BlockKind::Call(_) => return String::new(),
        };
        self.at(&format!("response.{kind}.{what}"), index, json!({"part": part}))
    }
}

fn output_text(text: &str, logprobs: &[Value]) -> Value {
    json!({"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs})
}

impl StreamEncoder for Responses {
    fn first(&mut self) -> String {
        self.state("response.created", "in_progress", json!({})) + &self.sign_of_life()
    }

    fn delta(&mut self, delta: &Delta) -> String {
        let changes = self.take(delta);
        changes.iter().map(|(change, shown)| self.changed(change, shown)).collect()
    }

    fn sign_of_life(&mut self) -> String {
        self.state("response.in_progress", "in_progress", json!({}))
    }

    fn end(&mut self, usage: Usage, _: Option<&str>) -> String {
        let (status, rest) = self.ended(usage);
        self.state(&format!("response.{status}"), status, rest)
    }

    fn failed(&mut self, error: &ApiError) -> String {
        let error = json!({"code": error.code.unwrap_or("server_error"), "message": error.message});
        self.state("response.failed", "failed", json!({"error": error}))
    }

    fn gather(&mut self, delta: Delta) {
        self.take(&delta);
    }

    fn whole(&mut self, usage: Usage, _: Option<&str>) -> Value {
        let (status, rest) = self.ended(usage);
        self.response(status, rest)
    }

    fn error(&self, error: &ApiError) -> Value {
        error.to_json()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::blocks::tests::{finished, rich};

    const USAGE: Usage = Usage { prompt: 10, cached: 4, written: 5, generated: 7 };

    fn answer(wishes: Wishes) -> Responses {
        Responses { id: "1".into(), ..Responses::new("demo".into(), wishes) }
    }

    fn streamed(wire: &mut Responses, deltas: Vec<Delta>) -> Vec<Value> {
        let mut stream = wire.first();
        stream += &deltas.iter().map(|d| wire.delta(d)).collect::<String>();
        stream += &wire.end(USAGE, None);
        let one = |event: &str| {
            let (name, data) = event.strip_prefix("event: ").unwrap().split_once("\ndata: ").unwrap();
            let value: Value = serde_json::from_str(data).unwrap();
            assert_eq!(value["type"], name, "each is named by its type");
            value
        };
        stream.split("\n\n").filter(|e| !e.is_empty()).map(one).collect()
    }

    #[test]
    fn every_item_begins_grows_and_ends_with_events_of_its_kind() {
        let mut wire = answer(Wishes::default());
        let events = streamed(&mut wire, rich());
        for (i, event) in events.iter().enumerate() {
            assert_eq!(event["sequence_number"], i);
        }
        let names: Vec<&str> =
            events.iter().map(|e| e["type"].as_str().unwrap().strip_prefix("response.").unwrap()).collect();
        assert_eq!(
            names,
            [
                "created",
                "in_progress",
                "output_item.added",
                "content_part.added",
                "reasoning_text.delta",
                "reasoning_text.delta",
                "reasoning_text.done",
                "content_part.done",
                "output_item.done",
                "output_item.added",
                "content_part.added",
                "output_text.delta",
                "output_text.delta",
                "output_text.done",
                "content_part.done",
                "output_item.done",
                "output_item.added",
                "function_call_arguments.delta",
                "function_call_arguments.delta",
                "function_call_arguments.done",
                "output_item.done",
                "output_item.added",
                "function_call_arguments.delta",
                "function_call_arguments.done",
                "output_item.done",
                "completed",
            ]
        );
        let without_number = |event: &Value| {
            let mut event = event.clone();
            event.as_object_mut().unwrap().shift_remove("sequence_number");
            event
        };
        assert_eq!(
            without_number(&events[11]),
            json!({
                "type": "response.output_text.delta", "item_id": "msg_101", "output_index": 1, "content_index": 0, "delta": "I'll ", "logprobs": [],
            })
        );
        assert_eq!(
            without_number(&events[19]),
            json!({
                "type": "response.function_call_arguments.done", "item_id": "fc_102", "output_index": 2,
                "name": "read", "arguments": "{\"path\": \"b\", \"a\": 1}",
            })
        );
        // What ends the stream has all of it, as the events had it.
        let response = &events.last().unwrap()["response"];
        let done: Vec<&Value> =
            events.iter().filter(|e| e["type"] == "response.output_item.done").map(|e| &e["item"]).collect();
        assert_eq!(response["output"].as_array().unwrap().iter().collect::<Vec<_>>(), done);
        assert_eq!(
            response["output"],
            json!([
                {"type": "reasoning", "id": "rs_100", "summary": [], "status": "completed",
                    "content": [{"type": "reasoning_text", "text": "Let me look."}]},
                {"type": "message", "id": "msg_101", "role": "assistant", "status": "completed", "content": [output_text("I'll look.", &[])]},
                {"type": "function_call", "id": "fc_102", "call_id": "call_102", "name": "read",
                    "arguments": "{\"path\": \"b\", \"a\": 1}", "status": "completed"},
                {"type": "function_call", "id": "fc_103", "call_id": "call_103", "name": "ls", "arguments": "{}", "status": "completed"},
            ])
        );
        assert_eq!(
            response["usage"],
            json!({
                "input_tokens": 10, "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 5},
                "output_tokens": 7, "output_tokens_details": {"reasoning_tokens": 2}, "total_tokens": 17,
            })
        );
        // Not streamed it is the same.
        let mut wire = answer(Wishes::default());
        rich().into_iter().for_each(|d| wire.gather(d));
        assert_eq!(wire.whole(USAGE, None)["output"], response["output"]);
    }

    #[test]
    fn thoughts_are_shown_as_a_summary_and_carried_where_that_is_asked_for() {
        let mut wire = answer(Wishes { as_summary: true, carried: true, ..Wishes::default() });
        let events = streamed(&mut wire, rich());
        let names: Vec<&str> = events[2..9].iter().map(|e| e["type"].as_str().unwrap()).collect();
        assert_eq!(
            names,
            [
                "response.output_item.added",
                "response.reasoning_summary_part.added",
                "response.reasoning_summary_text.delta",
                "response.reasoning_summary_text.delta",
                "response.reasoning_summary_text.done",
                "response.reasoning_summary_part.done",
                "response.output_item.done",
            ]
        );
        assert_eq!(
            events[8]["item"],
            json!({
                "type": "reasoning", "id": "rs_100", "summary": [{"type": "summary_text", "text": "Let me look."}], "status": "completed",
                "encrypted_content": carried("Let me look."),
            })
        );
    }

    #[test]
    fn an_answer_that_is_cut_or_fails_says_so() {
        let mut wire = answer(Wishes::default());
        let mut deltas = rich();
        *deltas.last_mut().unwrap() = finished(Finish::Length);
        let events = streamed(&mut wire, deltas);
        let last = events.last().unwrap();
        assert_eq!(last["type"], "response.incomplete");
        assert_eq!(last["response"]["incomplete_details"], json!({"reason": "max_output_tokens"}));
        assert_eq!(last["response"]["output"][3]["status"], "incomplete");
        let failed = answer(Wishes::default()).failed(&ApiError::internal("the disk is gone"));
        let failed: Value = serde_json::from_str(failed.trim().split_once("data: ").unwrap().1).unwrap();
        assert_eq!((&failed["type"], &failed["response"]["status"]), (&json!("response.failed"), &json!("failed")));
        assert_eq!(failed["response"]["error"], json!({"code": "server_error", "message": "the disk is gone"}));
    }
}
