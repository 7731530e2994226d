//! OpenAI's Responses: the events and items that its clients rely on.

use crate::support;

use serde_json::{Value, json};
use support::dialects::{chat_says, model_name, outline};
use support::server::Server;

/// A request of Codex, with all of its fields.
fn like_codex(input: Value) -> Value {
    json!({
        "model": "gpt-5.2-codex",
        "instructions": "You are a kind narrator.",
        "input": input,
        "tools": [
            {"type": "function", "name": "shell_command", "description": "Runs a command.", "strict": false, "parameters": {"type": "object", "properties": {"command": {"type": "string"}}}},
            {"type": "web_search", "external_web_access": false},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": false,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": false,
        "stream": true,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0198c1f2",
        "client_metadata": {"x-codex-installation-id": "1"},
        "temperature": 0,
        "max_output_tokens": 12,
    })
}

#[test]
fn a_response_is_streamed_in_events_with_numbers() {
    let Some(server) = Server::start(&[]) else { return };
    let said = |role: &str, kind: &str, text: &str| json!({"type": "message", "role": role, "content": [{"type": kind, "text": text}]});
    let body = like_codex(json!([
        said("developer", "input_text", "Be brief."),
        said("user", "input_text", "Tell me a story.")
    ]));
    let events = server.named_events("/v1/responses", &body);
    assert!(events.iter().enumerate().all(|(i, event)| event["sequence_number"] == i));
    assert_eq!(
        outline(&events),
        [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
            "response.output_text.delta",
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.incomplete",
        ]
    );
    let text: String = events
        .iter()
        .filter(|e| e["type"] == "response.output_text.delta")
        .map(|e| e["delta"].as_str().unwrap())
        .collect();
    let response = &events.last().unwrap()["response"];
    assert_eq!(
        (&response["output"][0]["content"][0]["text"], &response["status"]),
        (&json!(text), &json!("incomplete"))
    );
    assert_eq!((&response["usage"]["output_tokens"], &response["model"]), (&json!(12), &json!(model_name())));
    // It is the model's answer to those messages.
    let system = "You are a kind narrator.\n\nBe brief.";
    let messages = json!([{"role": "system", "content": system}, {"role": "user", "content": "Tell me a story."}]);
    assert_eq!(text, chat_says(&server, messages, 12));
    // The next turn, not streamed, sends back the answer and continues from what was computed.
    let mut next = body.clone();
    next["stream"] = false.into();
    let items = next["input"].as_array_mut().unwrap();
    items.push(response["output"][0].clone());
    items.push(said("user", "input_text", "And then?"));
    let (status, headers, answer) = server.post_with("/v1/responses", &[], &next);
    assert_eq!(status, 200, "{answer}");
    let answer: Value = serde_json::from_str(&answer).unwrap();
    let usage = &answer["usage"];
    let cached = usage["input_tokens_details"]["cached_tokens"].as_u64().unwrap();
    assert!(cached >= response["usage"]["input_tokens"].as_u64().unwrap() - 1, "{usage}");
    let ignored = headers["sluice-ignored"].to_str().unwrap();
    for field in ["store", "prompt_cache_key", "client_metadata", "tools.web_search"] {
        assert!(ignored.contains(field), "{field} is not in {ignored}");
    }
    // A string alone is also a question.
    let (status, answer) = server.post("/v1/responses", &json!({"input": "Once", "max_output_tokens": 1}));
    assert_eq!((status, &answer["object"]), (200, &json!("response")));
}

#[test]
fn a_function_in_a_namespace_is_called_by_both_of_its_names() {
    let Some(server) = Server::start(&[]) else { return };
    let schema = json!({"type": "object", "properties": {"to": {"const": "fox"}}, "required": ["to"], "additionalProperties": false});
    let function = json!({"type": "function", "name": "send", "description": "Sends.", "parameters": schema});
    let mut body = json!({
        "input": [{"role": "user", "content": "Send it."}], "max_output_tokens": 60, "temperature": 0,
        "tools": [{"type": "namespace", "name": "mail", "description": "Mail.", "tools": [function]}], "tool_choice": "required", "parallel_tool_calls": false,
    });
    let (status, answer) = server.post("/v1/responses", &body);
    assert_eq!(status, 200, "{answer}");
    let call = answer["output"].as_array().unwrap().last().unwrap().clone();
    assert_eq!((&call["namespace"], &call["name"]), (&json!("mail"), &json!("send")), "{answer}");
    // Sent back, it is what the model wrote: all of the first prompt is cached.
    let items = body["input"].as_array_mut().unwrap();
    let result = json!({"type": "function_call_output", "call_id": call["call_id"], "output": "Sent."});
    items.extend([call, result]);
    let (status, next) = server.post("/v1/responses", &body);
    assert_eq!(status, 200, "{next}");
    let cached = next["usage"]["input_tokens_details"]["cached_tokens"].as_u64().unwrap();
    assert!(cached + 1 >= answer["usage"]["input_tokens"].as_u64().unwrap(), "{next}");
}

#[test]
fn a_response_tells_how_likely_its_tokens_were() {
    let Some(server) = Server::start(&[]) else { return };
    let mut body = json!({
        "input": "Tell me a story.", "max_output_tokens": 8, "temperature": 0, "top_logprobs": 2, "include": ["message.output_text.logprobs"],
    });
    let (status, headers, text) = server.post_with("/v1/responses", &[], &body);
    assert!(status == 200 && !headers.contains_key("sluice-ignored"), "{headers:?} {text}");
    let answer: Value = serde_json::from_str(&text).unwrap();
    let part = &answer["output"][0]["content"][0];
    let tokens = part["logprobs"].as_array().unwrap();
    let joined: String = tokens.iter().map(|token| token["token"].as_str().unwrap()).collect();
    assert_eq!((joined.as_str(), tokens.len()), (part["text"].as_str().unwrap(), 8), "{answer}");
    // They are those of a chat completion.
    let chat = json!({"messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 8, "temperature": 0, "logprobs": true, "top_logprobs": 2});
    let (_, chat) = server.post("/v1/chat/completions", &chat);
    assert_eq!(&chat["choices"][0]["logprobs"]["content"], &part["logprobs"]);
    // Streamed, they come with their text.
    body["stream"] = true.into();
    let events = server.named_events("/v1/responses", &body);
    let deltas = events.iter().filter(|event| event["type"] == "response.output_text.delta");
    let streamed: Vec<Value> = deltas.flat_map(|event| event["logprobs"].as_array().unwrap().clone()).collect();
    assert_eq!(&streamed, tokens);
    let done = events.iter().find(|event| event["type"] == "response.output_text.done").unwrap();
    assert_eq!(&done["logprobs"], &part["logprobs"]);
    // Without a request there are none, and there is a limit.
    let (_, answer) = server.post("/v1/responses", &json!({"input": "Hi", "max_output_tokens": 2}));
    assert_eq!(answer["output"][0]["content"][0]["logprobs"], json!([]));
    let (status, answer) = server.post("/v1/responses", &json!({"input": "Hi", "top_logprobs": 21}));
    assert_eq!((status, &answer["error"]["param"]), (400, &json!("top_logprobs")), "{answer}");
}

#[test]
fn the_tokens_of_a_response_are_counted_before_it_is_made() {
    let Some(server) = Server::start(&[]) else { return };
    let tool = json!({"type": "function", "name": "read", "parameters": {"type": "object"}});
    let body =
        json!({"instructions": "Be kind.", "input": "Tell me a story.", "tools": [tool], "max_output_tokens": 1});
    let (status, counted) = server.post("/v1/responses/input_tokens", &body);
    let (_, answer) = server.post("/v1/responses", &body);
    let tokens = &answer["usage"]["input_tokens"];
    assert_eq!((status, counted), (200, json!({"object": "response.input_tokens", "input_tokens": tokens})));
}
