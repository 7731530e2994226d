//! What agents and apps send to `sluice serve`, in each dialect's own words, and what they are told.

mod support;

use serde_json::{Value, json};
use support::server::Server;
use support::{demo, demo_with, sluice};

fn kinds(events: &[Value]) -> Vec<&str> {
    events.iter().map(|e| e["type"].as_str().unwrap()).collect()
}

/// The same kinds without those that are repeated.
fn outline(events: &[Value]) -> Vec<&str> {
    let mut kinds = kinds(events);
    kinds.dedup();
    kinds
}

fn model_name() -> String {
    demo().unwrap().rsplit('/').next().unwrap().to_owned()
}

/// What a chat completion says to these messages, greedily.
fn chat_says(server: &Server, messages: Value, tokens: usize) -> String {
    let body = json!({"messages": messages, "max_tokens": tokens, "temperature": 0});
    let (status, answer) = server.post("/v1/chat/completions", &body);
    assert_eq!(status, 200, "{answer}");
    answer["choices"][0]["message"]["content"].as_str().unwrap().to_owned()
}

/// As Claude Code asks: a first block whose `cch=` changes, blocks marked for caching, tools, fields that only Anthropic's own server knows.
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
    // It is what the model says to those words.
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
    // 1. The same question of another request: only the last token is computed.
    assert_eq!(usage("0f1e2", "Tell me a story."), [1, 0, total - 1]);
    // 2. Another question behind the same system prompt.
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
fn errors_are_told_in_the_words_of_the_dialect() {
    let Some(server) = Server::start(&["--max-context", "64"]) else { return };
    let long = "word ".repeat(200);
    let (status, headers, text) = server.post_with(
        "/v1/messages",
        &[],
        &json!({"max_tokens": 5, "messages": [{"role": "user", "content": long}]}),
    );
    let error: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(
        (status, &error["type"], &error["error"]["type"]),
        (400, &json!("error"), &json!("invalid_request_error"))
    );
    let message = error["error"]["message"].as_str().unwrap();
    assert!(message.starts_with("prompt is too long: ") && message.ends_with(" tokens > 63 maximum"), "{message}");
    assert_eq!(error["request_id"], headers["request-id"].to_str().unwrap());
    let (status, error) = server.post("/v1/responses", &json!({"input": long}));
    assert_eq!((status, &error["error"]["code"]), (400, &json!("context_length_exceeded")));
    for (path, body, part) in [
        ("/v1/messages", json!({"messages": []}), "messages is empty"),
        (
            "/v1/messages",
            json!({"messages": [{"role": "user", "content": [{"type": "image"}]}]}),
            "messages.0.content.0: blocks of image",
        ),
        ("/v1/messages", json!({"messages": 5}), "messages must be a list of objects"),
        ("/v1/responses", json!({"input": "x", "previous_response_id": "resp_1"}), "previous_response_id"),
        ("/v1/responses", json!({"input": "x", "text": {"format": {"type": "poem"}}}), "text.format"),
        (
            "/v1/chat/completions",
            json!({"messages": [{"role": "user", "content": "x"}], "min_tokens": 5}),
            "min_tokens",
        ),
    ] {
        let (status, error) = server.post(path, &body);
        assert_eq!(status, 400, "{error}");
        assert!(error["error"]["message"].as_str().unwrap().contains(part), "{error}");
        assert_eq!(error["type"] == "error", path == "/v1/messages", "{error}");
    }
    let (status, text) = server.get("/v1/messages");
    assert_eq!((status, text.contains("not_found_error")), (405, true), "{text}");
}

/// As Codex asks, with all of its fields.
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
    // It is what the model says to those words.
    let system = "You are a kind narrator.\n\nBe brief.";
    let messages = json!([{"role": "system", "content": system}, {"role": "user", "content": "Tell me a story."}]);
    assert_eq!(text, chat_says(&server, messages, 12));
    // The next turn, not streamed: what was said comes with it, and goes on from what was computed.
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
    // A text alone is a question, too.
    let (status, answer) = server.post("/v1/responses", &json!({"input": "Once", "max_output_tokens": 1}));
    assert_eq!((status, &answer["object"]), (200, &json!("response")));
}

#[test]
fn every_client_finds_its_list_of_models() {
    let Some(server) = Server::start(&["--max-context", "256"]) else { return };
    let list: Value = serde_json::from_str(&server.get("/v1/models?client_version=0.150.0").1).unwrap();
    let name = model_name();
    assert_eq!((&list["data"][0]["id"], &list["data"][0]["type"]), (&json!(name), &json!("model")));
    let codex = &list["models"][0];
    assert_eq!((&codex["slug"], &codex["context_window"]), (&json!(name), &json!(256)));
    let one: Value = serde_json::from_str(&server.get(&format!("/v1/models/org/{name}")).1).unwrap();
    assert_eq!((&one["id"], &one["max_model_len"]), (&json!(name), &json!(256)));
    // A name that nobody has is served, but no model is called so.
    let (status, none) = server.get("/v1/models/org/another");
    let none: Value = serde_json::from_str(&none).unwrap();
    assert_eq!((status, &none["error"]["code"]), (404, &json!("model_not_found")), "{none}");
    assert!(none["error"]["message"].as_str().unwrap().contains(&name), "{none}");
    let body = json!({"model": "org/another", "prompt": "Once", "max_tokens": 1});
    assert_eq!(server.complete(body)["model"], name);
}

/// Requests of all dialects, for `tokens` tokens.
fn requests(tokens: Value) -> [(&'static str, Value); 4] {
    let said = json!([{"role": "user", "content": "Tell me a story."}]);
    [
        ("/v1/completions", json!({"prompt": "Once", "max_tokens": tokens})),
        ("/v1/chat/completions", json!({"messages": said, "max_tokens": tokens})),
        ("/v1/responses", json!({"input": said, "max_output_tokens": tokens})),
        ("/v1/messages", json!({"messages": said, "max_tokens": tokens})),
    ]
}

/// What an answer says, whatever its dialect, and the tokens of its prompt and of itself.
fn said(answer: &Value) -> (String, u64, u64) {
    let texts = ["/choices/0/text", "/choices/0/message/content", "/output/0/content/0/text", "/content/0/text"];
    let text = texts.iter().find_map(|path| answer.pointer(path)?.as_str()).unwrap_or_else(|| panic!("{answer}"));
    let usage = &answer["usage"];
    let count = |names: &[&str]| names.iter().find_map(|name| usage[*name].as_u64()).unwrap();
    // Messages count what was there and what is written apart.
    let apart: u64 = ["cache_read_input_tokens", "cache_creation_input_tokens"]
        .iter()
        .filter_map(|name| usage[*name].as_u64())
        .sum();
    (text.to_owned(), count(&["prompt_tokens", "input_tokens"]) + apart, count(&["completion_tokens", "output_tokens"]))
}

fn with(mut body: Value, fields: Value) -> Value {
    body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    body
}

#[test]
fn numbers_are_taken_as_clients_write_them() {
    let Some(server) = Server::start(&["--max-context", "96"]) else { return };
    let ask = |path: &str, body: Value| {
        let (status, answer) = server.post(path, &body);
        assert_eq!(status, 200, "{path}: {body}: {answer}");
        said(&answer)
    };
    for ((path, whole), (_, float)) in requests(json!(5)).into_iter().zip(requests(json!(5.0))) {
        // 1. A whole number with a point is one.
        let chosen = ask(path, with(whole.clone(), json!({"temperature": 1, "seed": 7, "top_k": 5})));
        assert_eq!(ask(path, with(float, json!({"temperature": 1.0, "seed": 7.0, "top_k": 5.0}))), chosen, "{path}");
        // 2. The smallest nucleus is the likeliest token.
        let greedy = ask(path, with(whole.clone(), json!({"temperature": 0})));
        assert_eq!(ask(path, with(whole, json!({"top_p": 0, "temperature": 1.5}))), greedy, "{path}");
    }
    // 3. Below 0 there is no limit but the context's.
    for (path, body) in requests(json!(-1)) {
        let (_, answer) = server.post(path, &body);
        let (_, prompt, generated) = said(&answer);
        let ended =
            ["stop", "end_turn", "completed"].iter().any(|end| answer.to_string().contains(&format!("\"{end}\"")));
        assert!(prompt + generated == 96 || ended, "{path}: {answer}");
    }
    let endless = json!({"prompt": "Once", "max_tokens": -1, "ignore_eos": true});
    let (_, prompt, generated) = ask("/v1/completions", endless);
    assert_eq!(prompt + generated, 96);
    // 4. What is no whole number is none.
    for (path, body) in requests(json!(5.5)) {
        let (status, answer) = server.post(path, &body);
        let message = answer["error"]["message"].as_str().unwrap_or_default();
        assert!(status == 400 && message.contains("tokens must be a whole number"), "{path}: {answer}");
    }
}

#[test]
fn errors_name_the_clients_field_and_nothing_of_the_server() {
    let Some(server) = Server::start(&[]) else { return };
    let template = demo_with("{{ raise_exception('No conversations, please.') }}", &[]).unwrap();
    let refusing = Server::of(sluice(&["serve", template.path().to_str().unwrap(), "--port", "0"]));
    let message = |content: Value| json!({"messages": [{"role": "user", "content": content}]});
    let chat = "/v1/chat/completions";
    let one_of = json!({"oneOf": [{"type": "object", "required": ["a"]}, {"type": "object", "required": ["b"]}]});
    let tool =
        |name: &str, schema: &Value| json!({"type": "function", "function": {"name": name, "parameters": schema}});
    let tools = json!([tool("good", &json!({"type": "object"})), tool("bad", &one_of)]);
    let said = message("x".into());
    let format = json!({"type": "json_schema", "json_schema": {"name": "n", "schema": one_of}});
    let mut all = vec![
        (&server, chat, json!({}), "messages", "missing"),
        (&server, chat, message(Value::Null), "messages[0].content", "must be a text"),
        (&server, chat, message(json!(5)), "messages[0].content", "must be a text"),
        (&server, chat, message(json!([{"type": "text"}])), "messages[0].content", "no text"),
        (&server, chat, json!({"messages": [5]}), "messages", "entry 0"),
        (&server, "/v1/completions", json!({"max_tokens": 1}), "prompt", "missing"),
        (&server, "/v1/completions", json!({"prompt": {"a": 1}}), "prompt", "token ids"),
        (&server, "/v1/completions", json!({"prompt": "x", "logprobs": 6}), "logprobs", "at most 5"),
        (
            &server,
            "/v1/completions",
            json!({"prompt": "x", "logprobs": 4611686018427387904u64}),
            "logprobs",
            "at most 5",
        ),
        (&server, "/v1/messages", json!({"messages": [{"role": "user"}]}), "messages.0.content", "neither"),
        (&server, "/v1/responses", json!({"input": "x", "tools": 5}), "tools", "a list"),
        (&server, "/detokenize", json!({"tokens": "x"}), "tokens", "token ids"),
        (&server, chat, with(said.clone(), json!({"tools": tools, "tool_choice": "required"})), "tools", "\"bad\""),
        (&server, chat, with(said.clone(), json!({"response_format": format})), "response_format", "anyOf"),
        (&refusing, chat, said.clone(), "messages", "No conversations, please."),
    ];
    for (field, value, what) in [
        ("temperature", json!("warm"), "a number"),
        ("seed", json!(1.5), "a whole number"),
        ("n", json!(-1), "below 0"),
        ("stream", json!("yes"), "true or false"),
        ("stop", json!([1]), "a list of texts"),
        ("stream_options", json!({"include_usage": 1}), "include_usage must be true or false"),
        ("model", json!(5), "a text"),
        ("chat_template_kwargs", json!([]), "an object"),
    ] {
        all.push((&server, chat, with(said.clone(), json!({field: value})), field, what));
    }
    for (server, path, body, field, part) in all {
        let (status, headers, text) = server.post_with(path, &[], &body);
        let error: Value = serde_json::from_str(&text).unwrap();
        let message = error["error"]["message"].as_str().unwrap();
        assert_eq!(status, 400, "{body}: {error}");
        assert_eq!(headers["content-type"], "application/json");
        assert!(message.contains(field) && message.contains(part), "{field} and {part} are not in {message}");
        if path != "/v1/messages" {
            assert_eq!(error["error"]["param"], field, "{error}");
        }
        for leaked in ["f32", "usize", "u32", "untagged", "expected", " line 1", "coerce", "/"] {
            assert!(!message.contains(leaked), "{leaked} is in {message}");
        }
    }
}

#[test]
fn a_format_that_is_not_known_is_a_note_and_is_named() {
    let Some(server) = Server::start(&[]) else { return };
    let schema = json!({"type": "object", "properties": {"to": {"type": "string", "format": "phone", "maxLength": 8}}, "required": ["to"], "additionalProperties": false});
    let said = json!([{"role": "user", "content": "Call me."}]);
    let format = json!({"type": "json_schema", "json_schema": {"name": "n", "schema": schema}});
    let body = json!({"messages": said, "max_tokens": 60, "response_format": format});
    let (status, headers, text) = server.post_with("/v1/chat/completions", &[], &body);
    assert_eq!(status, 200, "{text}");
    assert_eq!(headers["sluice-ignored"], "response_format.format.phone");
    let answer: Value = serde_json::from_str(&text).unwrap();
    let found: Value = serde_json::from_str(&self::said(&answer).0).unwrap();
    assert!(found["to"].as_str().unwrap().chars().count() <= 8, "{found}");
    let tool = json!({"name": "call", "input_schema": schema});
    let body = json!({"messages": said, "max_tokens": 60, "tools": [tool], "tool_choice": {"type": "any"}});
    let (status, headers, text) = server.post_with("/v1/messages", &[], &body);
    assert_eq!((status, headers["sluice-ignored"].to_str().unwrap()), (200, "tools.call.format.phone"), "{text}");
}

#[test]
fn texts_become_tokens_and_tokens_texts_as_either_server_has_it() {
    let Some(server) = Server::start(&[]) else { return };
    let text = "Once upon a time<|im_end|> é 🚀";
    let (_, llama) = server.post("/tokenize", &json!({"content": text}));
    let (_, vllm) = server.post("/tokenize", &json!({"model": "any", "prompt": text, "return_token_strs": true}));
    assert_eq!(llama["tokens"], vllm["tokens"]);
    assert_eq!(
        (&vllm["count"], &vllm["max_model_len"]),
        (&json!(vllm["tokens"].as_array().unwrap().len()), &json!(4096))
    );
    let strings: Vec<&str> = vllm["token_strs"].as_array().unwrap().iter().map(|s| s.as_str().unwrap()).collect();
    assert!(strings.contains(&"<|im_end|>"), "{strings:?}");
    let (_, back) = server.post("/detokenize", &json!({"tokens": llama["tokens"]}));
    assert_eq!(back, json!({"content": text, "prompt": text}));
    // Spelled out it is a few words.
    let (_, spelled) = server.post("/tokenize", &json!({"content": text, "parse_special": false, "with_pieces": true}));
    let pieces = spelled["tokens"].as_array().unwrap();
    assert!(pieces.len() > strings.len() && pieces.iter().all(|p| p["piece"] != "<|im_end|>"), "{spelled}");
    // Messages are rendered.
    let messages = json!([{"role": "user", "content": "Hi"}]);
    let (_, counted) = server.post("/tokenize", &json!({"messages": messages}));
    let (_, answer) = server.post("/v1/chat/completions", &json!({"messages": messages, "max_tokens": 1}));
    assert_eq!(counted["count"], answer["usage"]["prompt_tokens"]);
    for (path, body) in [("/tokenize", json!({})), ("/detokenize", json!({"tokens": [1 << 30]}))] {
        assert_eq!(server.post(path, &body).0, 400);
    }
}

#[test]
fn what_has_no_effect_is_named_in_a_header() {
    let Some(server) = Server::start(&[]) else { return };
    let body = json!({
        "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1, "store": true, "metadata": {"a": "b"}, "user": "me",
        "brand new\r\nfield": 1, "logit_bias": {}, "min_tokens": 0.0, "modalities": ["text"], "service_tier": null,
    });
    let (status, headers, text) = server.post_with("/v1/chat/completions", &[("x-request-id", "my-own")], &body);
    assert_eq!(status, 200, "{text}");
    assert_eq!(headers["sluice-ignored"], "store, metadata, user, brandnewfield");
    assert_eq!(headers["x-request-id"], "my-own");
}

/// As agents' models have it: tools, calls and thoughts are rendered, and the system speaks only at the beginning.
const TEMPLATE: &str = "\
    {%- if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}\
    {%- for m in messages %}\
    {%- if m.role == 'system' and not loop.first %}{{ raise_exception('System message must be at the beginning.') }}{% endif %}\
    {{- '<|im_start|>' + m.role + '\n' }}\
    {%- if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}\
    {%- for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}\
    {%- if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}";

#[test]
fn one_conversation_is_the_same_prompt_in_every_dialect() {
    let Some(folder) = demo_with(TEMPLATE, &[]) else { return };
    let server = Server::of(sluice(&["serve", folder.path().to_str().unwrap(), "--port", "0"]));
    let schema = json!({"type": "object", "properties": {"z": {"type": "string"}, "a": {"type": "integer"}}});
    let arguments: Value = serde_json::from_str(r#"{"z": "notes.txt", "a": 1}"#).unwrap();
    // 1. In Anthropic's words; with nothing but a digest in the way of a signature
    let messages = json!({
        "max_tokens": 1,
        "system": [{"type": "text", "text": "Be kind."}],
        "tools": [{"name": "read", "description": "Reads a file.", "input_schema": schema}],
        "messages": [
            {"role": "user", "content": "What is in my notes?"},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "I read them.", "signature": "sluice1-00"},
                {"type": "text", "text": "Let me see."},
                {"type": "tool_use", "id": "toolu_1", "name": "read", "input": arguments},
            ]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "A fox."}]}]},
            {"role": "system", "content": "Be brief."},
        ],
    });
    let (status, headers, answer) = server.post_with("/v1/messages", &[], &messages);
    assert_eq!(status, 200, "{answer}");
    assert!(headers["sluice-ignored"].to_str().unwrap().contains("messages[].role"), "{headers:?}");
    let answer: Value = serde_json::from_str(&answer).unwrap();
    let (_, counted) = server.post("/v1/messages/count_tokens", &messages);
    let total = counted["input_tokens"].as_u64().unwrap();
    assert_eq!(answer["usage"]["input_tokens"], total);
    // 2. In those of Responses: all of it was computed already.
    let responses = json!({
        "max_output_tokens": 1,
        "instructions": "Be kind.",
        "tools": [{"type": "function", "name": "read", "description": "Reads a file.", "parameters": schema, "strict": true}],
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "What is in my notes?"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "I read them."}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Let me see."}]},
            {"type": "function_call", "call_id": "toolu_1", "name": "read", "arguments": arguments.to_string()},
            {"type": "function_call_output", "call_id": "toolu_1", "output": "A fox."},
            {"role": "developer", "content": "Be brief."},
        ],
    });
    let (status, answer) = server.post("/v1/responses", &responses);
    assert_eq!(status, 200, "{answer}");
    let usage = &answer["usage"];
    assert_eq!(
        (&usage["input_tokens"], &usage["input_tokens_details"]["cached_tokens"]),
        (&json!(total), &json!(total - 1))
    );
    // 3. What the template was given: fields in their order, and what the system said last as a reminder behind the tool's result.
    let function = json!({"name": "read", "description": "Reads a file.", "parameters": schema});
    let call = json!({"id": "toolu_1", "type": "function", "function": {"name": "read", "arguments": arguments}});
    let plainly = json!([
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "What is in my notes?"},
        {"role": "assistant", "content": "Let me see.", "reasoning_content": "I read them.", "tool_calls": [call]},
        {"role": "tool", "content": "A fox.\n\n<system-reminder>\nBe brief.\n</system-reminder>", "tool_call_id": "toolu_1"},
    ]);
    let tools = json!([{"type": "function", "function": function}]);
    let (_, rendered) = server.post("/tokenize", &json!({"messages": plainly, "tools": tools}));
    assert_eq!(rendered["count"], total);
    let (_, text) = server.post("/detokenize", &json!({"tokens": rendered["tokens"]}));
    let text = text["content"].as_str().unwrap();
    for part in [
        "<tool_call>{\"name\": \"read\", \"arguments\": {\"z\": \"notes.txt\", \"a\": 1}}</tool_call>",
        "<think>I read them.</think>Let me see.",
    ] {
        assert!(text.contains(part), "{part} is not in {text}");
    }
    // 4. Who wants no thoughts gets a prompt that says so.
    let mut without = messages.clone();
    without["thinking"] = json!({"type": "disabled"});
    assert!(server.post("/v1/messages/count_tokens", &without).1["input_tokens"].as_u64().unwrap() > total);
}

#[test]
fn a_call_that_must_be_made_and_a_form_that_must_be_kept_are_so_in_every_dialect() {
    let Some(server) = Server::start(&[]) else { return };
    let schema = json!({"type": "object", "properties": {"path": {"type": "string", "maxLength": 12}}, "required": ["path"], "additionalProperties": false});
    let fits =
        |value: &Value| value.as_object().unwrap().len() == 1 && value["path"].as_str().unwrap().chars().count() <= 12;
    let asked = "Read the story.";
    // 1. Messages: any tool, and the answer to what it gave
    let mut body = json!({
        "max_tokens": 120, "temperature": 0, "messages": [{"role": "user", "content": asked}],
        "tools": [{"name": "read", "description": "Reads.", "input_schema": schema}], "tool_choice": {"type": "any", "disable_parallel_tool_use": true},
    });
    let (status, answer) = server.post("/v1/messages", &body);
    assert_eq!((status, &answer["stop_reason"]), (200, &json!("tool_use")), "{answer}");
    let call = answer["content"].as_array().unwrap().last().unwrap();
    assert!((&call["type"], &call["name"]) == (&json!("tool_use"), &json!("read")) && fits(&call["input"]), "{answer}");
    let result = json!([{"type": "tool_result", "tool_use_id": call["id"], "content": "Once."}]);
    let all = body["messages"].as_array_mut().unwrap();
    all.push(json!({"role": "assistant", "content": answer["content"]}));
    all.push(json!({"role": "user", "content": result}));
    body["tool_choice"] = json!({"type": "none"});
    body["max_tokens"] = 8.into();
    let (status, next) = server.post("/v1/messages", &body);
    assert_eq!(status, 200, "{next}");
    assert!(next["content"].as_array().unwrap().iter().all(|block| block["type"] != "tool_use"), "{next}");
    assert!(next["usage"]["cache_read_input_tokens"].as_u64().unwrap() > 0, "{next}");
    // 2. Responses: one by name
    let tool = json!({"type": "function", "name": "read", "description": "Reads.", "parameters": schema});
    let body = json!({
        "input": asked, "max_output_tokens": 120, "temperature": 0, "tools": [tool], "tool_choice": {"type": "function", "name": "read"},
    });
    let (status, answer) = server.post("/v1/responses", &body);
    let call = answer["output"].as_array().unwrap_or(&Vec::new()).last().cloned().unwrap_or_default();
    assert_eq!((status, &call["type"], &call["name"]), (200, &json!("function_call"), &json!("read")), "{answer}");
    assert!(fits(&serde_json::from_str(call["arguments"].as_str().unwrap()).unwrap()), "{answer}");
    // 3. A form
    let format = json!({"type": "json_schema", "name": "place", "schema": schema});
    let body = json!({"input": asked, "max_output_tokens": 120, "temperature": 0, "text": {"format": format}});
    let (status, answer) = server.post("/v1/responses", &body);
    assert_eq!(status, 200, "{answer}");
    let said = answer["output"].as_array().unwrap().iter().find(|item| item["type"] == "message").unwrap();
    assert!(fits(&serde_json::from_str(said["content"][0]["text"].as_str().unwrap()).unwrap()), "{answer}");
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
    // The list of tools has grown; what the model was shown of it has not.
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
    // So is one that the system adds.
    let added = json!({"type": "tool_addition", "tool": {"type": "tool_definition", "definition": tool("draw")}});
    body["messages"].as_array_mut().unwrap().push(json!({"role": "system", "content": [added]}));
    body["tool_choice"] = json!({"type": "tool", "name": "draw"});
    let (status, answer) = server.post("/v1/messages", &body);
    assert_eq!((status, &answer["content"][0]["input"]), (200, &json!({"of": "draw"})), "{answer}");
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
    // Sent back it is what the model said: all of the first prompt is there again.
    let items = body["input"].as_array_mut().unwrap();
    let result = json!({"type": "function_call_output", "call_id": call["call_id"], "output": "Sent."});
    items.extend([call, result]);
    let (status, next) = server.post("/v1/responses", &body);
    assert_eq!(status, 200, "{next}");
    let cached = next["usage"]["input_tokens_details"]["cached_tokens"].as_u64().unwrap();
    assert!(cached + 1 >= answer["usage"]["input_tokens"].as_u64().unwrap(), "{next}");
}

/// All ids in an answer.
fn ids(value: &Value, found: &mut Vec<String>) {
    match value {
        Value::Object(fields) => {
            let named = fields.iter().filter(|(name, _)| ["id", "call_id"].contains(&name.as_str()));
            found.extend(named.filter_map(|(_, id)| id.as_str().map(str::to_owned)));
            fields.values().for_each(|value| ids(value, found));
        }
        Value::Array(all) => all.iter().for_each(|value| ids(value, found)),
        _ => {}
    }
}

#[test]
fn ids_are_the_same_in_no_two_answers_after_a_restart_either() {
    let schema = json!({"type": "object", "properties": {}, "additionalProperties": false});
    let mut found = Vec::new();
    for _ in 0..2 {
        let Some(server) = Server::start(&[]) else { return };
        let function = json!({"name": "stop", "parameters": schema});
        for (path, body) in requests(json!(60)) {
            for more in [
                json!({}),
                match path {
                    "/v1/chat/completions" => {
                        json!({"tools": [{"type": "function", "function": function}], "tool_choice": "required"})
                    }
                    "/v1/responses" => {
                        json!({"tools": [{"type": "function", "name": "stop", "parameters": schema}], "tool_choice": "required"})
                    }
                    "/v1/messages" => {
                        json!({"tools": [{"name": "stop", "input_schema": schema}], "tool_choice": {"type": "any"}})
                    }
                    _ => json!({"n": 2}),
                },
            ] {
                let (status, answer) = server.post(path, &with(body.clone(), more));
                assert_eq!(status, 200, "{answer}");
                ids(&answer, &mut found);
            }
        }
    }
    assert!(
        found.len() >= 2 * 8
            && ["chatcmpl-", "cmpl-", "resp_", "msg_", "call_", "toolu_", "fc_"]
                .iter()
                .all(|kind| found.iter().any(|id| id.starts_with(kind))),
        "{found:?}"
    );
    let mut different = found.clone();
    different.sort();
    different.dedup();
    assert_eq!(different.len(), found.len(), "{found:?}");
}

#[test]
fn several_prompts_are_answered_as_each_would_be_alone() {
    let Some(server) = Server::start(&[]) else { return };
    let prompts = ["Once upon a time", "The fox", "A crow"];
    let ask = |fields: Value| server.complete(with(json!({"max_tokens": 6, "seed": 3, "n": 2}), fields));
    let alone: Vec<Value> = prompts.iter().map(|prompt| ask(json!({"prompt": prompt}))).collect();
    let texts = |answer: &Value| -> Vec<String> {
        let choices = answer["choices"].as_array().unwrap();
        assert!(choices.iter().enumerate().all(|(i, choice)| choice["index"] == i), "{answer}");
        choices.iter().map(|choice| choice["text"].as_str().unwrap().to_owned()).collect()
    };
    let expected: Vec<String> = alone.iter().flat_map(&texts).collect();
    // 1. As texts, as tokens, streamed; the tokens of all are counted
    let all = ask(json!({"prompt": prompts}));
    assert_eq!(texts(&all), expected);
    let sum = |name: &str| alone.iter().map(|answer| answer["usage"][name].as_u64().unwrap()).sum::<u64>();
    for name in ["prompt_tokens", "completion_tokens", "total_tokens"] {
        assert_eq!(all["usage"][name], sum(name), "{all}");
    }
    let tokens = |prompt: &str| server.post("/tokenize", &json!({"prompt": prompt})).1["tokens"].clone();
    let lists: Vec<Value> = prompts.iter().map(|prompt| tokens(prompt)).collect();
    assert_eq!(texts(&ask(json!({"prompt": lists}))), expected);
    let streamed = |fields: Value| {
        let body = with(json!({"max_tokens": 6, "seed": 3, "n": 2, "stream": true}), fields);
        let mut found = vec![String::new(); 6];
        for event in server.stream("/v1/completions", &body) {
            let choice = &event["choices"][0];
            found[choice["index"].as_u64().unwrap() as usize] += choice["text"].as_str().unwrap();
        }
        found
    };
    assert_eq!(streamed(json!({"prompt": prompts})), expected);
    // 2. With the prompts before them
    let echoed: Vec<String> = expected.iter().enumerate().map(|(i, text)| prompts[i / 2].to_owned() + text).collect();
    assert_eq!(texts(&ask(json!({"prompt": prompts, "echo": true}))), echoed);
    assert_eq!(texts(&ask(json!({"prompt": lists, "echo": true}))), echoed);
    assert_eq!(streamed(json!({"prompt": prompts, "echo": true})), echoed);
    // 3. What is wrong is said
    for (fields, param, part) in [
        (json!({"prompt": "x", "echo": true, "logprobs": 1}), "echo", "not supported"),
        (json!({"prompt": vec!["x"; 65], "n": 2}), "prompt", "128"),
        (json!({"prompt": ["x", ""]}), "prompt", "no tokens"),
        (json!({"prompt": []}), "prompt", "no tokens"),
    ] {
        let (status, answer) = server.post("/v1/completions", &with(json!({"max_tokens": 1}), fields));
        assert_eq!((status, answer["error"]["param"].as_str()), (400, Some(param)), "{answer}");
        assert!(answer["error"]["message"].as_str().unwrap().contains(part), "{answer}");
    }
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
    // They are what a chat says of them.
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
    // Without being asked for they are not there, and there is a limit.
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
