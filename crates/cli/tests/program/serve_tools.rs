//! Tools, thoughts and structured answers, over the APIs that agents use.

use crate::support;

use serde_json::{Value, json};
use support::server::Server;
use support::{demo_with, sluice};

const CHAT: &str = "/v1/chat/completions";

fn tools() -> Value {
    json!([
        {"type": "function", "function": {
            "name": "read_file",
            "description": "Reads a file.",
            "parameters": {
                "type": "object",
                "properties": {
                    "path": {"type": "string", "maxLength": 12},
                    "lines": {"type": "integer", "minimum": 1, "maximum": 99},
                    "mode": {"enum": ["text", "bytes"]},
                },
                "required": ["path", "lines", "mode"],
                "additionalProperties": false,
            },
        }},
        {"type": "function", "function": {"name": "stop", "description": "Ends it.", "parameters": {"type": "object", "properties": {}, "additionalProperties": false}}},
    ])
}

fn body(messages: &Value) -> Value {
    json!({"messages": messages, "tools": tools(), "max_tokens": 120, "temperature": 0.8, "seed": 5})
}

fn by_name(mut body: Value) -> Value {
    body["tool_choice"] = json!({"type": "function", "function": {"name": "read_file"}});
    body
}

fn ask(server: &Server, body: &Value) -> Value {
    let (status, answer) = server.post(CHAT, body);
    assert_eq!(status, 200, "{answer}");
    answer
}

/// The one call of an answer, checked.
fn call_of(choice: &Value) -> (String, Value) {
    assert_eq!(choice["finish_reason"], "tool_calls", "{choice}");
    let message = &choice["message"];
    assert_eq!((message["content"].is_null(), message["tool_calls"].as_array().unwrap().len()), (true, 1), "{choice}");
    let call = &message["tool_calls"][0];
    assert!(call["id"].as_str().unwrap().starts_with("call_") && call["type"] == "function", "{choice}");
    let arguments: Value = serde_json::from_str(call["function"]["arguments"].as_str().unwrap()).unwrap();
    (call["function"]["name"].as_str().unwrap().to_owned(), arguments)
}

#[test]
fn a_call_by_name_is_one_of_its_schema() {
    let Some(server) = Server::start(&[]) else { return };
    let messages = json!([{"role": "user", "content": "Read the story."}]);
    for seed in 0..4 {
        let mut body = by_name(body(&messages));
        body["seed"] = seed.into();
        let answer = ask(&server, &body);
        let (name, arguments) = call_of(&answer["choices"][0]);
        assert_eq!(name, "read_file");
        assert!(arguments["path"].as_str().unwrap().chars().count() <= 12, "{arguments}");
        assert!((1..=99).contains(&arguments["lines"].as_i64().unwrap()), "{arguments}");
        assert!(["text", "bytes"].contains(&arguments["mode"].as_str().unwrap()), "{arguments}");
        assert_eq!(arguments.as_object().unwrap().len(), 3, "{arguments}");
    }
    // Any tool, with several choices, each by itself.
    let mut required = body(&messages);
    required["tool_choice"] = "required".into();
    required["parallel_tool_calls"] = false.into();
    required["n"] = 3.into();
    let answer = ask(&server, &required);
    let choices = answer["choices"].as_array().unwrap();
    assert_eq!(choices.len(), 3);
    for (i, choice) in choices.iter().enumerate() {
        call_of(choice);
        let mut alone = required.clone();
        alone["n"] = 1.into();
        alone["seed"] = (5 + i).into();
        let alone = ask(&server, &alone);
        let function = |choice: &Value| choice["message"]["tool_calls"][0]["function"].clone();
        assert_eq!(function(&alone["choices"][0]), function(choice));
    }
}

#[test]
fn what_is_streamed_is_the_whole() {
    let Some(server) = Server::start(&[]) else { return };
    let messages = json!([{"role": "user", "content": "Read the story."}]);
    let mut body = by_name(body(&messages));
    let whole = ask(&server, &body);
    body["stream"] = true.into();
    let events = server.stream(CHAT, &body);
    let (mut id, mut name, mut arguments, mut parts, mut finish) =
        (Value::Null, Value::Null, String::new(), 0, Value::Null);
    for event in &events {
        let choice = &event["choices"][0];
        for call in choice["delta"]["tool_calls"].as_array().into_iter().flatten() {
            assert_eq!(call["index"], 0);
            if call.get("id").is_some() {
                assert!(id.is_null() && arguments.is_empty(), "{events:?}");
                (id, name) = (call["id"].clone(), call["function"]["name"].clone());
            }
            arguments += call["function"]["arguments"].as_str().unwrap();
            parts += 1;
        }
        if !choice["finish_reason"].is_null() {
            finish = choice["finish_reason"].clone();
        }
    }
    let function = &whole["choices"][0]["message"]["tool_calls"][0]["function"];
    assert_eq!((&name, arguments.as_str()), (&function["name"], function["arguments"].as_str().unwrap()));
    assert!(id.is_string() && finish == "tool_calls" && parts > 3, "{events:?}");
}

#[test]
fn only_allowed_tools_are_called() {
    let Some(server) = Server::start(&[]) else { return };
    let mut body = body(&json!([{"role": "user", "content": "Read the story."}]));
    let named = |name: &str| json!({"type": "function", "function": {"name": name}});
    let allowed =
        |mode: &str, tools: Value| json!({"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}});
    body["parallel_tool_calls"] = false.into();
    // 1. One of them must be called.
    for (seed, name) in [(0, "stop"), (1, "read_file"), (2, "stop")] {
        body["seed"] = seed.into();
        body["tool_choice"] = allowed("required", json!([named(name)]));
        assert_eq!(call_of(&ask(&server, &body)["choices"][0]).0, name);
    }
    // 2. None must: the prompt is the same, and so is an answer without calls.
    body["tool_choice"] = "auto".into();
    let free = ask(&server, &body);
    body["tool_choice"] = allowed("auto", json!([named("stop")]));
    let only = ask(&server, &body);
    assert_eq!(free["usage"]["prompt_tokens"], only["usage"]["prompt_tokens"]);
    assert_eq!(free["choices"][0]["message"]["content"], only["choices"][0]["message"]["content"]);
    // 3. The same in Responses
    let tool = |name: &str| json!({"type": "function", "name": name, "parameters": {"type": "object", "properties": {}, "additionalProperties": false}});
    let choice = json!({"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "b"}]});
    let asked = json!({"input": "Do it.", "tools": [tool("a"), tool("b")], "tool_choice": choice, "max_output_tokens": 60, "parallel_tool_calls": false});
    let (status, answer) = server.post("/v1/responses", &asked);
    let call = answer["output"].as_array().unwrap().last().unwrap();
    assert_eq!((status, &call["name"]), (200, &json!("b")), "{answer}");
    // 4. Tools that do not exist cannot be allowed.
    for choice in [
        allowed("auto", json!([named("other")])),
        allowed("auto", json!([])),
        allowed("some", json!([named("stop")])),
        json!({"type": "allowed_tools"}),
    ] {
        body["tool_choice"] = choice;
        let (status, answer) = server.post(CHAT, &body);
        assert_eq!((status, answer["error"]["param"].as_str()), (400, Some("tool_choice")), "{answer}");
    }
}

#[test]
fn a_strict_tool_is_compiled_also_where_it_need_not_be_called() {
    let Some(server) = Server::start(&[]) else { return };
    let tool = |strict: bool, schema: Value| json!({"type": "function", "function": {"name": "read", "strict": strict, "parameters": schema}});
    let mut body = json!({"messages": [{"role": "user", "content": "Read."}], "max_tokens": 8, "temperature": 0});
    // A schema that cannot be enforced is refused if it is strict.
    let bad = json!({"oneOf": [{"type": "object", "required": ["a"]}, {"type": "object", "required": ["b"]}]});
    for (strict, expected) in [(true, 400), (false, 200)] {
        body["tools"] = json!([tool(strict, bad.clone())]);
        let (status, answer) = server.post(CHAT, &body);
        assert_eq!(status, expected, "{answer}");
        assert!(status == 200 || answer["error"]["message"].as_str().unwrap().contains("\"read\""), "{answer}");
    }
    // Text stays unconstrained, in every dialect.
    let good = json!({"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"], "additionalProperties": false});
    body["tools"] = json!([tool(true, good.clone())]);
    let (status, headers, text) = server.post_with(CHAT, &[], &body);
    assert!(status == 200 && !headers.contains_key("sluice-ignored"), "{headers:?} {text}");
    let said: Value = serde_json::from_str(&text).unwrap();
    body["tools"] = json!([tool(false, good.clone())]);
    let free = ask(&server, &body);
    assert_eq!(said["usage"]["completion_tokens"], free["usage"]["completion_tokens"]);
    for (path, asked) in [
        (
            "/v1/messages",
            json!({"messages": body["messages"], "max_tokens": 4, "tools": [{"name": "read", "strict": true, "input_schema": bad}]}),
        ),
        (
            "/v1/responses",
            json!({"input": "Read.", "max_output_tokens": 4, "tools": [{"type": "function", "name": "read", "strict": true, "parameters": bad}]}),
        ),
    ] {
        let (status, answer) = server.post(path, &asked);
        assert!(status == 400 && answer["error"]["message"].as_str().unwrap().contains("\"read\""), "{answer}");
    }
}

/// A template whose calls are written in no way that is known: nothing can hold them to a schema.
#[test]
fn strictness_that_cannot_be_kept_is_named_as_without_effect() {
    let template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{{ tools | default([]) | tojson }}\nassistant:";
    let Some(model) = demo_with(template, &[]) else { return };
    let server = Server::of(sluice(&["serve", model.path().to_str().unwrap(), "--port", "0"]));
    let schema = json!({"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]});
    let function = |strict: bool| json!({"name": "read", "strict": strict, "parameters": schema});
    let messages = json!([{"role": "user", "content": "Read."}]);
    for strict in [true, false] {
        for (path, body) in [
            (CHAT, json!({"messages": messages, "tools": [{"type": "function", "function": function(strict)}]})),
            (
                "/v1/messages",
                json!({"messages": messages, "tools": [{"name": "read", "strict": strict, "input_schema": schema}]}),
            ),
            (
                "/v1/responses",
                json!({"input": "Read.", "tools": [{"type": "function", "name": "read", "strict": strict, "parameters": schema}]}),
            ),
        ] {
            let mut body = body;
            body[if path == "/v1/responses" { "max_output_tokens" } else { "max_tokens" }] = 4.into();
            let (status, headers, text) = server.post_with(path, &[], &body);
            let ignored = headers.get("sluice-ignored").map(|names| names.to_str().unwrap().to_owned());
            let is_named = ignored.as_deref().is_some_and(|names| names.contains("tools.strict"));
            assert_eq!((status, is_named), (200, strict), "{path}: {ignored:?} {text}");
        }
    }
}

#[test]
fn a_call_that_is_cut_off_leaves_no_markup() {
    let Some(server) = Server::start(&[]) else { return };
    let messages = json!([{"role": "user", "content": "Read the story."}]);
    let mut body = by_name(body(&messages));
    for tokens in 1..24 {
        body["max_tokens"] = tokens.into();
        body["stream"] = false.into();
        let answer = ask(&server, &body);
        let choice = &answer["choices"][0];
        let message = &choice["message"];
        assert_eq!(
            (choice["finish_reason"].as_str(), message["content"].as_str().unwrap_or_default()),
            (Some("length"), ""),
            "{answer}"
        );
        let arguments = message["tool_calls"][0]["function"]["arguments"].as_str().unwrap_or_default();
        assert!(!arguments.contains('<'), "{answer}");
        body["stream"] = true.into();
        let events = server.stream(CHAT, &body);
        let said: String = events.iter().filter_map(|e| e["choices"][0]["delta"]["content"].as_str()).collect();
        assert_eq!(said, "", "{events:?}");
    }
}

#[test]
fn a_conversation_with_tools_finds_its_prefix_again() {
    let Some(server) = Server::start(&[]) else { return };
    let mut messages =
        json!([{"role": "system", "content": "You are careful."}, {"role": "user", "content": "Read the story."}]);
    let mut known = 0;
    for turn in 0..4 {
        let mut body = by_name(body(&messages));
        body["seed"] = turn.into();
        let answer = ask(&server, &body);
        let usage = &answer["usage"];
        let of = |name: &str| usage[name].as_u64().unwrap();
        let cached = usage["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
        // Everything of the last turn's prompt is cached, except the token that is always computed.
        assert!(cached + 1 >= known, "turn {turn}: {cached} of {known}");
        known = of("prompt_tokens");
        let message = answer["choices"][0]["message"].clone();
        let id = message["tool_calls"][0]["id"].clone();
        let all = messages.as_array_mut().unwrap();
        all.push(message);
        all.push(json!({"role": "tool", "tool_call_id": id, "content": format!("Line {turn} of it.")}));
    }
}

#[test]
fn answers_are_of_the_form_that_is_asked_for() {
    let Some(server) = Server::start(&[]) else { return };
    let schema = json!({"type": "object", "properties": {"animal": {"enum": ["fox", "crow"]}, "old": {"type": "boolean"}}, "required": ["animal", "old"], "additionalProperties": false});
    let ask_for = |fields: Value| {
        let mut body = json!({"messages": [{"role": "user", "content": "Who?"}], "max_tokens": 60});
        body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        let answer = ask(&server, &body);
        assert_eq!(answer["choices"][0]["finish_reason"], "stop", "{answer}");
        answer["choices"][0]["message"]["content"].as_str().unwrap().to_owned()
    };
    let openai = json!({"type": "json_schema", "json_schema": {"name": "x", "strict": true, "schema": schema}});
    for fields in [
        json!({"response_format": openai}),
        json!({"guided_json": schema}),
        json!({"structured_outputs": {"json": schema}}),
        json!({"json_schema": schema}),
        json!({"response_format": {"type": "json_object", "schema": schema}}),
        // Tools may be called, but need not be.
        json!({"response_format": openai, "tools": [], "tool_choice": "auto"}),
    ] {
        let found: Value = serde_json::from_str(&ask_for(fields)).unwrap();
        assert!(found["old"].is_boolean() && ["fox", "crow"].contains(&found["animal"].as_str().unwrap()), "{found}");
    }
    for fields in [
        json!({"guided_regex": "fox|crow"}),
        json!({"structured_outputs": {"choice": ["fox", "crow"]}}),
        json!({"response_format": {"type": "regex", "regex": "fox|crow"}}),
        json!({"grammar": "start: \"fox\" | \"crow\""}),
    ] {
        assert!(["fox", "crow"].contains(&ask_for(fields).as_str()));
    }
}

#[test]
fn what_cannot_be_demanded_is_refused_by_name() {
    let Some(server) = Server::start(&[]) else { return };
    let refused = |fields: Value, param: &str, part: &str| {
        let mut body = json!({"messages": [{"role": "user", "content": "Who?"}], "max_tokens": 5});
        body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        let (status, answer) = server.post(CHAT, &body);
        assert_eq!((status, answer["error"]["param"].as_str()), (400, Some(param)), "{answer}");
        assert!(answer["error"]["message"].as_str().unwrap().contains(part), "{answer}");
    };
    let format = "response_format";
    refused(json!({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}}), format, "x");
    refused(json!({"response_format": {"type": "xml"}}), format, "json_schema");
    refused(json!({"guided_regex": "("}), "guided_regex", "guided_regex");
    refused(json!({"grammar": "root ::= \"x\""}), "grammar", "Lark");
    refused(json!({"guided_regex": "a", "response_format": {"type": "json_object"}}), "guided_regex", "both");
    refused(json!({"tool_choice": "required"}), "tool_choice", "no tools");
    let other = json!({"type": "function", "function": {"name": "other"}});
    refused(json!({"tools": tools(), "tool_choice": other}), "tool_choice", "other");
    refused(json!({"tools": [{"type": "function", "function": {}}]}), "tools[0]", "name");
    let echo = json!([{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 5}}]}]);
    refused(json!({"messages": echo}), "messages[1].tool_calls", "arguments");
}

/// Like Qwen3.5's template: the prompt starts a thought, and calls are in XML.
const THINKS: &str = "{%- for m in messages %}{{- '<|im_start|>' ~ m.role ~ '\\n' }}\
    {%- if m.role == 'assistant' %}{{- '<think>\\n' ~ (m.reasoning_content or '') ~ '\\n</think>\\n\\n' }}{%- endif %}{{- m.content }}\
    {%- for c in m.tool_calls or [] %}{{- '<tool_call>\\n<function=' ~ c.function.name ~ '>\\n' }}\
    {%- for name, value in c.function.arguments | items %}{{- '<parameter=' ~ name ~ '>\\n' ~ (value | string) ~ '\\n</parameter>\\n' }}{%- endfor %}\
    {{- '</function>\\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\\n' }}{%- endfor %}\
    {%- if tools %}{%- endif %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}";

#[test]
fn thoughts_end_with_their_budget_and_calls_come_in_the_familys_way() {
    let special = ["<think>", "</think>", "<tool_call>", "</tool_call>"];
    let Some(folder) = demo_with(THINKS, &special) else { return };
    let server = Server::of(sluice(&["serve", folder.path().to_str().unwrap(), "--port", "0"]));
    let mut messages = json!([{"role": "user", "content": "Read the story."}]);
    let mut body = by_name(body(&messages));
    body["reasoning_budget"] = 9.into();
    let answer = ask(&server, &body);
    let message = answer["choices"][0]["message"].clone();
    let thought = message["reasoning_content"].as_str().unwrap();
    assert!(!thought.is_empty() && !thought.contains("</think>") && message["reasoning"] == thought, "{message}");
    let (name, arguments) = call_of(&answer["choices"][0]);
    assert!(name == "read_file" && arguments["lines"].is_i64() && arguments["path"].is_string(), "{arguments}");
    // Sent back, it is the generated text: what is cached goes beyond the prompt to where a state was kept.
    let known = answer["usage"]["prompt_tokens"].as_u64().unwrap();
    messages.as_array_mut().unwrap().extend([message, json!({"role": "tool", "content": "Once."})]);
    let mut next = by_name(self::body(&messages));
    next["reasoning_budget"] = 3.into();
    let cached = ask(&server, &next)["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
    assert!(cached + 1 >= known, "{cached} of {known}");
    // Without tools, only a thought is limited.
    let free = json!({"messages": [{"role": "user", "content": "Who?"}], "max_tokens": 60, "ignore_eos": true, "thinking_budget": 4});
    let answer = ask(&server, &free);
    let message = &answer["choices"][0]["message"];
    assert!(!message["reasoning"].as_str().unwrap_or_default().is_empty(), "{message}");
    assert!(!message["content"].as_str().unwrap().is_empty(), "{message}");
}
