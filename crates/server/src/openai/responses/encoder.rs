//! From an answer to the events of a response, and to the response itself. Each block of the answer is one item of the output.

use serde_json::{Map, Value, json};
use sluice_engine::Finish;

use crate::api::answer::Delta;
use crate::api::blocks::{BlockKind, Blocks, Change};
use crate::api::pending::Usage;
use crate::api::stream::{StreamEncoder, named_event};
use crate::clock::now;
use crate::http::context::fresh_id;
use crate::http::error::ApiError;
use crate::openai::logprobs::{LogprobLists, entries};
use crate::openai::responses::request::ResponseOptions;
use crate::openai::responses::thoughts::encode_thought;

/// Encodes the answer to one request.
pub struct ResponseEncoder {
    /// Without a prefix such as `resp_`.
    id: String,
    model: String,
    created: u64,
    options: ResponseOptions,
    blocks: Blocks,
    /// By block, if asked for: log-probabilities of the tokens of its text.
    logprobs: LogprobLists,
    /// Log-probabilities of tokens whose text is still held back.
    held_back: Vec<Value>,
    /// Number of the next event.
    sequence: u64,
}

impl ResponseEncoder {
    /// `model`: the name to answer with.
    pub fn new(model: String, options: ResponseOptions) -> ResponseEncoder {
        let blocks = Blocks::default();
        let (logprobs, held_back) = (LogprobLists::new(0), Vec::new());
        ResponseEncoder { id: fresh_id(), model, created: now(), options, blocks, logprobs, held_back, sequence: 0 }
    }

    fn event(&mut self, kind: &str, fields: Value) -> String {
        let mut object = json!({"type": kind, "sequence_number": self.sequence});
        self.sequence += 1;
        if let (Some(object), Value::Object(fields)) = (object.as_object_mut(), fields) {
            object.extend(fields);
        }
        named_event(&object, &self.logprobs.write(&object))
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
            object.extend(self.options.echo.clone());
            object.extend(rest);
        }
        response
    }

    fn usage(&self, usage: Usage) -> Value {
        let Usage { prompt, cached, written, generated, .. } = usage;
        json!({
            "input_tokens": prompt, "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": written},
            "output_tokens": generated, "output_tokens_details": {"reasoning_tokens": self.blocks.thought_tokens},
            "total_tokens": prompt + generated,
        })
    }

    /// Applies a delta. Returns its changes, each with the log-probabilities of the tokens that it shows.
    fn apply(&mut self, delta: &Delta) -> Vec<(Change, Vec<Value>)> {
        if let Some(tokenizer) = &self.options.tokenizer {
            self.held_back.extend(entries(tokenizer, &delta.tokens));
        }
        let mut all = Vec::new();
        for change in self.blocks.apply(delta) {
            let mut shown = Vec::new();
            if let Change::Appended(index, _) = &change
                && self.blocks.all[*index].kind == BlockKind::Text
            {
                shown = std::mem::take(&mut self.held_back);
                shown.iter().for_each(|entry| self.logprobs.push(*index, entry));
            }
            all.push((change, shown));
        }
        if self.blocks.open_block().is_some_and(|i| self.blocks.all[i].kind != BlockKind::Text) {
            self.held_back.clear();
        }
        all
    }

    fn is_cut(&self) -> bool {
        matches!(self.blocks.finish, Some(Finish::Length | Finish::ContextFull))
    }

    /// The final status and fields of the response.
    fn final_fields(&self, usage: Usage) -> (&'static str, Value) {
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

    /// An item of the output, as it starts or as it is in the end.
    fn item(&self, index: usize, is_complete: bool) -> Value {
        let (block, id) = (&self.blocks.all[index], self.item_id(index));
        let is_last = index + 1 == self.blocks.all.len();
        let status = match is_complete {
            false => "in_progress",
            true if is_last && self.is_cut() => "incomplete",
            true => "completed",
        };
        let whole = |part: Value| if is_complete { json!([part]) } else { json!([]) };
        match &block.kind {
            BlockKind::Thought => {
                let mut item = json!({"type": "reasoning", "id": id, "summary": [], "status": status});
                if self.options.as_summary {
                    item["summary"] = whole(json!({"type": "summary_text", "text": block.text}));
                } else {
                    item["content"] = whole(json!({"type": "reasoning_text", "text": block.text}));
                }
                if self.options.carries_thoughts && is_complete {
                    item["encrypted_content"] = encode_thought(&block.text).into();
                }
                item
            }
            BlockKind::Text => {
                let content = whole(output_text(&block.text, self.logprobs.placeholder(index)));
                json!({"type": "message", "id": id, "role": "assistant", "status": status, "content": content})
            }
            BlockKind::Call(name) => {
                let arguments = if is_complete { block.text.as_str() } else { "" };
                let call_id = format!("call_{}{index:02}", self.id);
                let (namespace, name) = self.options.namespaces.split(name);
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

    /// Fields of an event that say where in the output it belongs: the item, and its only part.
    fn place(&self, index: usize) -> Map<String, Value> {
        let mut place = json!({"item_id": self.item_id(index), "output_index": index});
        match self.blocks.all[index].kind {
            BlockKind::Thought if self.options.as_summary => place["summary_index"] = 0.into(),
            BlockKind::Thought | BlockKind::Text => place["content_index"] = 0.into(),
            BlockKind::Call(_) => {}
        }
        place.as_object().cloned().unwrap_or_default()
    }

    /// An event of a block.
    fn block_event(&mut self, kind: &str, index: usize, fields: Value) -> String {
        let mut all = self.place(index);
        if let Value::Object(fields) = fields {
            all.extend(fields);
        }
        self.event(kind, Value::Object(all))
    }

    /// Events for a change of a block.
    fn change_events(&mut self, change: &Change, shown: &[Value]) -> String {
        match change {
            Change::Started(index) => {
                let added = json!({"output_index": index, "item": self.item(*index, false)});
                let text = self.event("response.output_item.added", added);
                text + &self.part("added", *index, "")
            }
            Change::Appended(index, more) => {
                let mut fields = json!({"delta": more});
                if self.blocks.all[*index].kind == BlockKind::Text {
                    fields["logprobs"] = json!(shown);
                }
                self.block_event(&format!("{}.delta", self.event_prefix(*index)), *index, fields)
            }
            Change::Ended(index) => {
                let block = self.blocks.all[*index].clone();
                let fields = match &block.kind {
                    BlockKind::Thought => json!({"text": block.text}),
                    BlockKind::Text => json!({"text": block.text, "logprobs": self.logprobs.placeholder(*index)}),
                    BlockKind::Call(name) => {
                        json!({"name": self.options.namespaces.split(name).1, "arguments": block.text})
                    }
                };
                let mut text = self.block_event(&format!("{}.done", self.event_prefix(*index)), *index, fields);
                text += &self.part("done", *index, &block.text);
                let item = json!({"output_index": index, "item": self.item(*index, true)});
                text + &self.event("response.output_item.done", item)
            }
        }
    }

    /// The common prefix of the types of a block's text events.
    fn event_prefix(&self, index: usize) -> &'static str {
        match self.blocks.all[index].kind {
            BlockKind::Thought if self.options.as_summary => "response.reasoning_summary_text",
            BlockKind::Thought => "response.reasoning_text",
            BlockKind::Text => "response.output_text",
            BlockKind::Call(_) => "response.function_call_arguments",
        }
    }

    /// The event that starts or ends the only part of an item; empty for calls, which have no parts.
    fn part(&mut self, what: &str, index: usize, text: &str) -> String {
        let (kind, part) = match self.blocks.all[index].kind {
            BlockKind::Thought if self.options.as_summary => {
                ("reasoning_summary_part", json!({"type": "summary_text", "text": text}))
            }
            BlockKind::Thought => ("content_part", json!({"type": "reasoning_text", "text": text})),
            BlockKind::Text => {
                let logprobs = if what == "done" { self.logprobs.placeholder(index) } else { json!([]) };
                ("content_part", output_text(text, logprobs))
            }
            BlockKind::Call(_) => return String::new(),
        };
        self.block_event(&format!("response.{kind}.{what}"), index, json!({"part": part}))
    }
}

fn output_text(text: &str, logprobs: Value) -> Value {
    json!({"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs})
}

impl StreamEncoder for ResponseEncoder {
    fn opening(&mut self) -> String {
        self.state("response.created", "in_progress", json!({})) + &self.keep_alive()
    }

    fn delta(&mut self, delta: &Delta) -> String {
        let changes = self.apply(delta);
        changes.iter().map(|(change, shown)| self.change_events(change, shown)).collect()
    }

    fn keep_alive(&mut self) -> String {
        self.state("response.in_progress", "in_progress", json!({}))
    }

    fn end(&mut self, usage: Usage, _: Option<&str>) -> String {
        let (status, rest) = self.final_fields(usage);
        self.state(&format!("response.{status}"), status, rest)
    }

    fn failed(&mut self, error: &ApiError) -> String {
        let error = json!({"code": error.code.unwrap_or("server_error"), "message": error.message});
        self.state("response.failed", "failed", json!({"error": error}))
    }

    fn collect_delta(&mut self, delta: Delta) {
        self.apply(&delta);
    }

    fn kept_bytes(&self) -> usize {
        self.logprobs.bytes()
    }

    fn complete(&mut self, usage: Usage, _: Option<&str>) -> String {
        let (status, rest) = self.final_fields(usage);
        self.logprobs.write(&self.response(status, rest))
    }

    fn error(&self, error: &ApiError) -> Value {
        error.to_json()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::blocks::tests::{finished, rich};

    const USAGE: Usage = Usage { prompt: 10, cached: 4, written: 5, generated: 7, predicted: None };

    fn answer(options: ResponseOptions) -> ResponseEncoder {
        ResponseEncoder { id: "1".into(), ..ResponseEncoder::new("demo".into(), options) }
    }

    fn streamed(encoder: &mut ResponseEncoder, deltas: Vec<Delta>) -> Vec<Value> {
        let mut stream = encoder.opening();
        stream += &deltas.iter().map(|d| encoder.delta(d)).collect::<String>();
        stream += &encoder.end(USAGE, None);
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
        let mut encoder = answer(ResponseOptions::default());
        let events = streamed(&mut encoder, rich());
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
        // The last event has all items as the earlier ones had them.
        let response = &events.last().unwrap()["response"];
        let done: Vec<&Value> =
            events.iter().filter(|e| e["type"] == "response.output_item.done").map(|e| &e["item"]).collect();
        assert_eq!(response["output"].as_array().unwrap().iter().collect::<Vec<_>>(), done);
        assert_eq!(
            response["output"],
            json!([
                {"type": "reasoning", "id": "rs_100", "summary": [], "status": "completed",
                    "content": [{"type": "reasoning_text", "text": "Let me look."}]},
                {"type": "message", "id": "msg_101", "role": "assistant", "status": "completed", "content": [output_text("I'll look.", json!([]))]},
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
        // Without streaming it is the same.
        let mut encoder = answer(ResponseOptions::default());
        rich().into_iter().for_each(|d| encoder.collect_delta(d));
        let whole: Value = serde_json::from_str(&encoder.complete(USAGE, None)).unwrap();
        assert_eq!(whole["output"], response["output"]);
    }

    #[test]
    fn thoughts_are_shown_as_a_summary_and_carried_where_that_is_asked_for() {
        let mut encoder =
            answer(ResponseOptions { as_summary: true, carries_thoughts: true, ..ResponseOptions::default() });
        let events = streamed(&mut encoder, rich());
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
                "encrypted_content": encode_thought("Let me look."),
            })
        );
    }

    #[test]
    fn an_answer_that_is_cut_or_fails_says_so() {
        let mut encoder = answer(ResponseOptions::default());
        let mut deltas = rich();
        *deltas.last_mut().unwrap() = finished(Finish::Length);
        let events = streamed(&mut encoder, deltas);
        let last = events.last().unwrap();
        assert_eq!(last["type"], "response.incomplete");
        assert_eq!(last["response"]["incomplete_details"], json!({"reason": "max_output_tokens"}));
        assert_eq!(last["response"]["output"][3]["status"], "incomplete");
        let failed = answer(ResponseOptions::default()).failed(&ApiError::internal("the disk is gone"));
        let failed: Value = serde_json::from_str(failed.trim().split_once("data: ").unwrap().1).unwrap();
        assert_eq!((&failed["type"], &failed["response"]["status"]), (&json!("response.failed"), &json!("failed")));
        assert_eq!(failed["response"]["error"], json!({"code": "server_error", "message": "the disk is gone"}));
    }
}
