//! Anthropic's dialect: the events, tools and errors that its clients rely on.

use crate::support;

use serde_json::{Value, json};
use support::dialects::{chat_says, model_name, outline};
use support::server::Server;

/// A request of Claude Code: a first block whose `cch=` changes, blocks marked for caching, tools, and fields that only Anthropic's own server knows.
fn like_claude_code(cch: &str, question: &str) -> Value {
    let mark = json!({"type": "ephemeral"});
    json!({
        "model": "claude-opus-4-6",
        "max_tokens": 16,
        "temperature": 0,
        "stream": true,
        "system": [
            {"type": "text", "text": format!("x-anthropic-billing-header: cc_version=2.1.40.f00; cc_entrypoint=cli; cch={cch};")},
            {"type": "text", "text": "You are a kind narrator.", "cache_control": mark},
            {"type": "text", "text": "Tell stories about foxes, crows and old trees by the river. ".repeat(12), "cache_control": mark},
        ],
        "messages": [{"role": "user", "content": [
            {"type": "text", "text": "<system-reminder>Today is Monday.</system-reminder>"},
            {"type": "text", "text": question, "cache_control": mark},
        ]}],
        "tools": [
            {"name": "Read", "description": "Reads a file.", "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}},
            {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
        ],
        "metadata": {"user_id": "user_0_session_1"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "thinking": {"type": "adaptive"},
        "output_config": {"effort": "medium"},
    })
}

#[test]
fn a_message_is_streamed_in_anthropics_events() {
    let Some(server) = Server::start(&[]) else { return };
    let headers = [
        ("anthropic-version", "2023-06-01"),
        ("anthropic-beta", "claude-code-20250219,interleaved-thinking-2025-05-14,something-new-2027-01-01"),
        ("x-api-key", "whatever"),
    ];
    let body = like_claude_code("1a2b3", "Tell me a story.");
    let (status, answered, text) = server.post_with("/v1/messages?beta=true", &headers, &body);
    assert_eq!(status, 200, "{text}");
    let ignored = answered["sluice-ignored"].to_str().unwrap();
    for field in ["metadata", "context_management", "output_config.effort", "tools.web_search_20250305"] {
        assert!(ignored.contains(field), "{field} is not in {ignored}");
    }
    assert!(answered["request-id"].to_str().unwrap().starts_with("req_"));
    let events = server.named_events("/v1/messages", &body);
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
    let message = &events[0]["message"];
    assert_eq!(
        (&message["model"], &message["role"], &message["content"]),
        (&json!(model_name()), &json!("assistant"), &json!([]))
    );
    assert_eq!(events[1]["content_block"], json!({"type": "text", "text": ""}));
    let streamed: String = events.iter().filter_map(|e| e["delta"]["text"].as_str()).collect();
    let end = &events[events.len() - 2];
    assert_eq!(end["delta"], json!({"stop_reason": "max_tokens", "stop_sequence": null}));
    assert_eq!(end["usage"]["output_tokens"], 16);
    // The same, whole
    let mut whole = body.clone();
    whole["stream"] = false.into();
    let (status, message) = server.post("/v1/messages", &whole);
    assert_eq!((status, &message["type"], &message["stop_reason"]), (200, &json!("message"), &json!("max_tokens")));
    assert_eq!(message["content"], json!([{"type": "text", "text": streamed}]));
    // It is the model's answer to those messages.
    let system: Vec<String> = body["system"]
        .as_array()
        .unwrap()
        .iter()
        .map(|b| b["text"].as_str().unwrap().replace("1a2b3", "00000"))
        .collect();
    let messages = json!([
        {"role": "system", "content": system.join("\n")},
        {"role": "user", "content": "<system-reminder>Today is Monday.</system-reminder>\nTell me a story."},
    ]);
    assert_eq!(streamed, chat_says(&server, messages, 16));
}

#[test]
fn requests_of_claude_code_share_what_they_begin_with() {
    let Some(server) = Server::start(&[]) else { return };
    let usage = |cch: &str, question: &str| {
        let events = server.named_events("/v1/messages", &like_claude_code(cch, question));
        let of = |usage: &Value| {
            let count = |name: &str| usage[name].as_u64().unwrap();
            [count("input_tokens"), count("cache_creation_input_tokens"), count("cache_read_input_tokens")]
        };
        let (begin, end) = (of(&events[0]["message"]["usage"]), of(&events[events.len() - 2]["usage"]));
        assert_eq!(begin, end);
        end
    };
    let first = usage("aaaaa", "Tell me a story.");
    let total: u64 = first.iter().sum();
    assert_eq!(first, [1, total - 1, 0], "all is written, and nothing was there");
    // 1. The same question in another request: only the last token is computed
    assert_eq!(usage("0f1e2", "Tell me a story."), [1, 0, total - 1]);
    // 2. Another question after the same system prompt
    let [_, written, read] = usage("bbbbb", "What is a crow?");
    assert!(written < 80 && read > 100, "{written} written, {read} read");
    let body = like_claude_code("ccccc", "Tell me a story.");
    let (status, counted) = server.post("/v1/messages/count_tokens", &body);
    assert_eq!((status, counted), (200, json!({"input_tokens": total})));
}

#[test]
fn a_stop_sequence_is_named() {
    let Some(server) = Server::start(&[]) else { return };
    let mut body =
        json!({"messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 60, "temperature": 0});
    let (_, answer) = server.post("/v1/messages", &body);
    let text = answer["content"][0]["text"].as_str().unwrap();
    let word = text.split_whitespace().nth(3).unwrap();
    body["stop_sequences"] = json!([word]);
    let (_, answer) = server.post("/v1/messages", &body);
    assert_eq!((&answer["stop_reason"], &answer["stop_sequence"]), (&json!("stop_sequence"), &json!(word)));
    assert_eq!(answer["content"][0]["text"].as_str().unwrap(), text.split_once(word).unwrap().0);
}

#[test]
fn a_thread_is_refused_such_that_sdks_send_the_conversation() {
    let Some(server) = Server::start(&[]) else { return };
    let mut body =
        json!({"max_tokens": 4, "messages": [{"role": "user", "content": "Hi"}], "thread": {"type": "create"}});
    for thread in [json!({"type": "create"}), json!({"type": "continue", "previous_message_id": "msg_1"})] {
        body["thread"] = thread;
        let (status, answer) = server.post("/v1/messages", &body);
        let details = json!({"error_code": "thread_unsupported_request", "unsupported": ["thread"]});
        assert_eq!((status, &answer["error"]["details"]), (400, &details), "{answer}");
        assert!(answer["error"]["message"].as_str().unwrap().starts_with("thread: "), "{answer}");
    }
    body["thread"] = Value::Null;
    assert_eq!(server.post("/v1/messages", &body).0, 200);
}

#[test]
fn a_tool_that_is_found_later_can_be_called_and_leaves_what_was_computed() {
    let Some(server) = Server::start(&[]) else { return };
    let tool = |name: &str| json!({"name": name, "description": "A tool.", "input_schema": {"type": "object", "properties": {"of": {"const": name}}, "required": ["of"], "additionalProperties": false}});
    let mut deferred = tool("fetch");
    deferred["defer_loading"] = true.into();
    let call = json!({"type": "tool_use", "id": "toolu_1", "name": "search", "input": {"of": "search"}});
    let found = json!({"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "tool_reference", "tool_name": "fetch"}]});
    let mut body = json!({
        "max_tokens": 60, "temperature": 0, "tools": [tool("search")], "tool_choice": {"type": "tool", "name": "search"},
        "messages": [{"role": "user", "content": "Look it up."}], "cache_control": {"type": "ephemeral"},
    });
    let of = |answer: &Value, name: &str| answer["usage"][name].as_u64().unwrap();
    let (status, first) = server.post("/v1/messages", &body);
    assert_eq!(status, 200, "{first}");
    // The list of tools has grown, but not what the prompt shows of it.
    body["tools"] = json!([deferred, tool("search")]);
    body["tool_choice"] = json!({"type": "tool", "name": "fetch"});
    let (status, unknown) = server.post("/v1/messages", &body);
    assert_eq!((status, unknown["error"]["type"].as_str()), (400, Some("invalid_request_error")), "{unknown}");
    let all = body["messages"].as_array_mut().unwrap();
    all.push(json!({"role": "assistant", "content": [call]}));
    all.push(json!({"role": "user", "content": [found]}));
    let (status, answer) = server.post("/v1/messages", &body);
    assert_eq!(status, 200, "{answer}");
    let made = answer["content"].as_array().unwrap().last().unwrap();
    assert_eq!((&made["name"], &made["input"]), (&json!("fetch"), &json!({"of": "fetch"})), "{answer}");
    let known = of(&first, "cache_creation_input_tokens") + of(&first, "cache_read_input_tokens");
    assert!(of(&answer, "cache_read_input_tokens") >= known, "{answer}");
    // The same for a tool that a system message adds.
    let added = json!({"type": "tool_addition", "tool": {"type": "tool_definition", "definition": tool("draw")}});
    body["messages"].as_array_mut().unwrap().push(json!({"role": "system", "content": [added]}));
    body["tool_choice"] = json!({"type": "tool", "name": "draw"});
    let (status, answer) = server.post("/v1/messages", &body);
    assert_eq!((status, &answer["content"][0]["input"]), (200, &json!({"of": "draw"})), "{answer}");
}
