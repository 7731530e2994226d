//! How requests are read in every dialect: numbers, unknown fields, and errors that name the field.

use crate::support;

use serde_json::{Value, json};
use support::dialects::{requests, with};
use support::server::Server;
use support::{demo_with, sluice};

/// The text of an answer in any dialect, and its numbers of prompt and output tokens.
fn said(answer: &Value) -> (String, u64, u64) {
    let texts = ["/choices/0/text", "/choices/0/message/content", "/output/0/content/0/text", "/content/0/text"];
    let text = texts.iter().find_map(|path| answer.pointer(path)?.as_str()).unwrap_or_else(|| panic!("{answer}"));
    let usage = &answer["usage"];
    let count = |names: &[&str]| names.iter().find_map(|name| usage[*name].as_u64()).unwrap();
    // Anthropic's usage counts cached and written tokens separately.
    let apart: u64 = ["cache_read_input_tokens", "cache_creation_input_tokens"]
        .iter()
        .filter_map(|name| usage[*name].as_u64())
        .sum();
    (text.to_owned(), count(&["prompt_tokens", "input_tokens"]) + apart, count(&["completion_tokens", "output_tokens"]))
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
        // 1. An integer may have a decimal point
        let chosen = ask(path, with(whole.clone(), json!({"temperature": 1, "seed": 7, "top_k": 5})));
        assert_eq!(ask(path, with(float, json!({"temperature": 1.0, "seed": 7.0, "top_k": 5.0}))), chosen, "{path}");
        // 2. The smallest nucleus is the most likely token
        let greedy = ask(path, with(whole.clone(), json!({"temperature": 0})));
        assert_eq!(ask(path, with(whole, json!({"top_p": 0, "temperature": 1.5}))), greedy, "{path}");
    }
    // 3. Below 0, only the context is a limit
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
    // 4. A fraction is refused
    for (path, body) in requests(json!(5.5)) {
        let (status, answer) = server.post(path, &body);
        let message = answer["error"]["message"].as_str().unwrap_or_default();
        assert!(status == 400 && message.contains("tokens must be an integer"), "{path}: {answer}");
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
        (&server, chat, message(Value::Null), "messages[0].content", "must be a string"),
        (&server, chat, message(json!(5)), "messages[0].content", "must be a string"),
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
        (&server, "/v1/messages", json!({"messages": [{"role": "user"}]}), "messages.0.content", "must be a string"),
        (&server, "/v1/responses", json!({"input": "x", "tools": 5}), "tools", "a list"),
        (&server, "/detokenize", json!({"tokens": "x"}), "tokens", "token ids"),
        (&server, chat, with(said.clone(), json!({"tools": tools, "tool_choice": "required"})), "tools", "\"bad\""),
        (&server, chat, with(said.clone(), json!({"response_format": format})), "response_format", "anyOf"),
        (&refusing, chat, said.clone(), "messages", "No conversations, please."),
    ];
    for (field, value, what) in [
        ("temperature", json!("warm"), "a number"),
        ("seed", json!(1.5), "an integer"),
        ("n", json!(-1), "below 0"),
        ("stream", json!("yes"), "true or false"),
        ("stop", json!([1]), "a list of strings"),
        ("stream_options", json!({"include_usage": 1}), "include_usage must be true or false"),
        ("model", json!(5), "a string"),
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
    // 1. As strings, as tokens, streamed; usage counts the tokens of all
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
    // 2. With their prompts in front
    let echoed: Vec<String> = expected.iter().enumerate().map(|(i, text)| prompts[i / 2].to_owned() + text).collect();
    assert_eq!(texts(&ask(json!({"prompt": prompts, "echo": true}))), echoed);
    assert_eq!(texts(&ask(json!({"prompt": lists, "echo": true}))), echoed);
    assert_eq!(streamed(json!({"prompt": prompts, "echo": true})), echoed);
    // 3. Errors are reported
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

/// A whole answer keeps its log-probabilities until it is complete, and there is a bound for that, which goes with the length of the queue.
#[test]
fn a_whole_answer_with_too_many_log_probabilities_is_refused() {
    let Some(server) = Server::start(&["--queue", "8"]) else { return };
    let messages = json!([{"role": "user", "content": "Hi"}]);
    let asking = |n: usize| json!({"messages": messages, "n": n, "max_tokens": 100, "ignore_eos": true, "seed": 1, "logprobs": true, "top_logprobs": 20});
    let (status, error) = server.post("/v1/chat/completions", &asking(8));
    assert_eq!((status, error["error"]["param"].as_str()), (400, Some("logprobs")), "{status}");
    // Nothing of it is left: there is room for others.
    let (status, answer) = server.post("/v1/chat/completions", &asking(1));
    let entries = answer["choices"][0]["logprobs"]["content"].as_array().map(Vec::len);
    assert_eq!((status, entries), (200, Some(100)));
}
