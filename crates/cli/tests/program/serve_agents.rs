//! Recorded sessions of real agents (`scripts/agents/run --fixtures`): each request is understood, calls have the form that the agents read, and what they send back starts
//! with what is cached.

use crate::support;

use std::fs;
use std::path::Path;

use serde_json::{Value, json};
use support::server::Server;

/// What one agent sent, with long texts cut.
struct Session {
    path: String,
    headers: Vec<(String, String)>,
    /// In order: one for each step of the script, and the last.
    requests: Vec<Value>,
    /// Requests besides the session, such as for a title.
    asides: Vec<Value>,
    /// The call of each step, with its arguments.
    steps: Vec<(String, Value)>,
    /// Ignored fields of each request.
    ignored: Vec<Vec<String>>,
}

fn session(agent: &str) -> Session {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/program/agents").join(format!("{agent}.json"));
    let all: Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    let list = |name: &str| all[name].as_array().unwrap().clone();
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    Session {
        path: text(&all["path"]),
        headers: all["headers"].as_object().unwrap().iter().map(|(name, value)| (name.clone(), text(value))).collect(),
        requests: list("requests"),
        asides: list("asides"),
        steps: list("steps").iter().map(|step| (text(&step["name"]), step["arguments"].clone())).collect(),
        ignored: list("ignored").iter().map(|names| names.as_array().unwrap().iter().map(text).collect()).collect(),
    }
}

impl Session {
    fn post(&self, server: &Server, body: &Value) -> (String, Vec<String>) {
        let headers: Vec<(&str, &str)> = self.headers.iter().map(|(n, v)| (n.as_str(), v.as_str())).collect();
        let (status, headers, text) = server.post_with(&self.path, &headers, body);
        assert_eq!(status, 200, "{text}");
        let ignored = headers.get("sluice-ignored").map_or("", |names| names.to_str().unwrap());
        (text, ignored.split(", ").filter(|name| !name.is_empty()).map(str::to_owned).collect())
    }

    /// A request that forces the model to make this step's call, in the dialect's words.
    fn narrowed(&self, step: usize) -> Value {
        let (mut body, (name, arguments)) = (self.requests[step].clone(), &self.steps[step]);
        let values: serde_json::Map<String, Value> = arguments
            .as_object()
            .unwrap()
            .iter()
            .map(|(name, value)| (name.clone(), json!({"const": value})))
            .collect();
        let required: Vec<&String> = values.keys().collect();
        let schema =
            json!({"type": "object", "properties": values, "required": required, "additionalProperties": false});
        // A function in a namespace is written NAMESPACE.NAME.
        let (namespace, own) = name.split_once('.').map_or((None, name.as_str()), |(space, own)| (Some(space), own));
        let chat = self.path == "/v1/chat/completions";
        let mut tools = body["tools"].as_array_mut().unwrap();
        if let Some(namespace) = namespace {
            let space = tools.iter_mut().find(|tool| tool["name"] == namespace).unwrap();
            tools = space["tools"].as_array_mut().unwrap();
        }
        for tool in tools {
            let tool = if chat { &mut tool["function"] } else { tool };
            if tool["name"] == own {
                let field = if self.path.starts_with("/v1/messages") { "input_schema" } else { "parameters" };
                tool[field] = schema.clone();
            }
        }
        body["tool_choice"] = match self.path.as_str() {
            "/v1/chat/completions" => json!({"type": "function", "function": {"name": own}}),
            "/v1/responses" => json!({"type": "function", "name": own, "namespace": namespace}),
            _ => json!({"type": "tool", "name": own}),
        };
        body
    }

    /// Tokens of a request as the agent sent it, and how many of them were cached.
    fn counted(&self, server: &Server, body: &Value) -> (u64, u64) {
        let mut body = body.clone();
        let fields = body.as_object_mut().unwrap();
        for name in ["max_tokens", "max_completion_tokens", "max_output_tokens", "stream_options"] {
            fields.shift_remove(name);
        }
        body["stream"] = false.into();
        body[if self.path == "/v1/responses" { "max_output_tokens" } else { "max_tokens" }] = 1.into();
        let answer: Value = serde_json::from_str(&self.post(server, &body).0).unwrap();
        let usage = &answer["usage"];
        let of = |value: &Value| value.as_u64().unwrap();
        match self.path.as_str() {
            "/v1/chat/completions" => {
                (of(&usage["prompt_tokens"]), of(&usage["prompt_tokens_details"]["cached_tokens"]))
            }
            "/v1/responses" => (of(&usage["input_tokens"]), of(&usage["input_tokens_details"]["cached_tokens"])),
            _ => {
                let read = of(&usage["cache_read_input_tokens"]);
                (of(&usage["input_tokens"]) + of(&usage["cache_creation_input_tokens"]) + read, read)
            }
        }
    }

    /// Every step makes its call, ignored fields are listed, and each request finds all of the one before.
    fn holds(&self, read: impl Fn(&str) -> (String, Value)) {
        let Some(server) = Server::start(&["--max-context", "16384"]) else { return };
        for (step, expected) in self.steps.iter().enumerate() {
            let (text, ignored) = self.post(&server, &self.narrowed(step));
            assert_eq!(&read(&text), expected, "{text}");
            assert_eq!(ignored, self.ignored[step]);
        }
        let mut known = 0;
        for request in &self.requests {
            let (prompt, cached) = self.counted(&server, request);
            assert!(
                cached + 1 >= known && prompt > known,
                "{cached} of {prompt} tokens were there, and {known} before"
            );
            known = prompt;
        }
        for aside in &self.asides {
            self.counted(&server, aside);
        }
    }
}

/// Data of a stream's events; an event with a name is named by its type.
fn events(text: &str) -> Vec<Value> {
    let mut all = Vec::new();
    for event in text.split("\n\n").filter(|event| !event.is_empty() && *event != "data: [DONE]") {
        let (name, data) = event.split_once("data: ").unwrap();
        let value: Value = serde_json::from_str(data).unwrap();
        if let Some(name) = name.strip_prefix("event: ") {
            assert_eq!(value["type"], name.trim_end());
        }
        all.push(value);
    }
    all
}

/// The events' types, without repetitions.
fn outline(events: &[Value]) -> Vec<&str> {
    let mut kinds: Vec<&str> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
    kinds.dedup();
    kinds
}

fn called(name: &Value, arguments: &str) -> (String, Value) {
    (name.as_str().unwrap().to_owned(), serde_json::from_str(arguments).unwrap())
}

fn chat_call(text: &str) -> (String, Value) {
    assert!(text.ends_with("data: [DONE]\n\n"), "{text}");
    let events = events(text);
    let (mut name, mut arguments, mut finish) = (Value::Null, String::new(), Value::Null);
    for choice in events.iter().flat_map(|event| event["choices"].as_array().unwrap()) {
        assert!(choice["delta"]["content"].as_str().is_none_or(str::is_empty), "{choice}");
        for call in choice["delta"]["tool_calls"].as_array().into_iter().flatten() {
            assert_eq!(call["index"], 0);
            if let Some(id) = call["id"].as_str() {
                assert!(id.starts_with("call_") && name.is_null() && call["type"] == "function", "{call}");
                name = call["function"]["name"].clone();
            }
            arguments += call["function"]["arguments"].as_str().unwrap();
        }
        if !choice["finish_reason"].is_null() {
            finish = choice["finish_reason"].clone();
        }
    }
    assert_eq!(finish, "tool_calls");
    let usage = &events.last().unwrap()["usage"];
    assert!(
        usage["completion_tokens"].as_u64().unwrap() > 0 && usage["prompt_tokens_details"]["cached_tokens"].is_u64()
    );
    called(&name, &arguments)
}

fn responses_call(text: &str) -> (String, Value) {
    let events = events(text);
    assert!(events.iter().enumerate().all(|(i, event)| event["sequence_number"] == i));
    assert_eq!(
        outline(&events),
        [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.function_call_arguments.delta",
            "response.function_call_arguments.done",
            "response.output_item.done",
            "response.completed",
        ]
    );
    let response = &events.last().unwrap()["response"];
    let item = &response["output"][0];
    assert_eq!((&item["type"], &item["status"]), (&json!("function_call"), &json!("completed")));
    assert!(item["call_id"].as_str().unwrap().starts_with("call_") && response["usage"]["total_tokens"].is_u64());
    let (name, arguments) = called(&item["name"], item["arguments"].as_str().unwrap());
    (item["namespace"].as_str().map_or(name.clone(), |namespace| format!("{namespace}.{name}")), arguments)
}

fn messages_call(text: &str) -> (String, Value) {
    let mut events = events(text);
    events.retain(|event| event["type"] != "ping");
    assert_eq!(
        outline(&events),
        [
            "message_start",
            "content_block_start",
            "content_block_delta",
            "content_block_stop",
            "message_delta",
            "message_stop",
        ]
    );
    let block = &events[1]["content_block"];
    assert_eq!((&block["type"], &block["input"]), (&json!("tool_use"), &json!({})));
    assert!(block["id"].as_str().unwrap().starts_with("toolu_"));
    let end = &events[events.len() - 2];
    assert_eq!(end["delta"]["stop_reason"], "tool_use");
    assert!(end["usage"]["cache_read_input_tokens"].is_u64());
    let arguments: String = events.iter().filter_map(|event| event["delta"]["partial_json"].as_str()).collect();
    called(&block["name"], &arguments)
}

#[test]
fn a_session_of_codex() {
    session("codex").holds(responses_call);
}

#[test]
fn a_session_of_claude_code() {
    session("claude-code").holds(messages_call);
}

#[test]
fn a_session_of_opencode() {
    session("opencode").holds(chat_call);
}

#[test]
fn a_session_of_qwen_code() {
    session("qwen-code").holds(chat_call);
}
