//! Requests and answers in all dialects.

use serde_json::{Value, json};

use super::demo;
use super::server::Server;

pub fn kinds(events: &[Value]) -> Vec<&str> {
    events.iter().map(|e| e["type"].as_str().unwrap()).collect()
}

/// The same without consecutive repetitions.
pub fn outline(events: &[Value]) -> Vec<&str> {
    let mut kinds = kinds(events);
    kinds.dedup();
    kinds
}

pub fn model_name() -> String {
    demo().unwrap().rsplit('/').next().unwrap().to_owned()
}

/// The greedy answer of a chat completion to these messages.
pub fn chat_says(server: &Server, messages: Value, tokens: usize) -> String {
    let body = json!({"messages": messages, "max_tokens": tokens, "temperature": 0});
    let (status, answer) = server.post("/v1/chat/completions", &body);
    assert_eq!(status, 200, "{answer}");
    answer["choices"][0]["message"]["content"].as_str().unwrap().to_owned()
}

/// One request per dialect, for `tokens` tokens.
pub fn requests(tokens: Value) -> [(&'static str, Value); 4] {
    let said = json!([{"role": "user", "content": "Tell me a story."}]);
    [
        ("/v1/completions", json!({"prompt": "Once", "max_tokens": tokens})),
        ("/v1/chat/completions", json!({"messages": said, "max_tokens": tokens})),
        ("/v1/responses", json!({"input": said, "max_output_tokens": tokens})),
        ("/v1/messages", json!({"messages": said, "max_tokens": tokens})),
    ]
}

pub fn with(mut body: Value, fields: Value) -> Value {
    body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    body
}
