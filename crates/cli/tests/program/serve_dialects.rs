//! What is the same in every dialect: lists of models, prompts, tools and formats, ids.

use crate::support;

use serde_json::{Value, json};
use support::dialects::{model_name, requests, with};
use support::server::Server;
use support::{demo_with, sluice};

/// A template like those of agents' models: tools, calls and thoughts are rendered, and system messages are accepted only at the start.
const TEMPLATE: &str = "\
    {%- if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}\
    {%- for m in messages %}\
    {%- if m.role == 'system' and not loop.first %}{{ raise_exception('System message must be at the beginning.') }}{% endif %}\
    {{- '<|im_start|>' + m.role + '\n' }}\
    {%- if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}\
    {%- for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}\
    {%- if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}";

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
fn every_client_finds_its_list_of_models() {
    let Some(server) = Server::start(&["--max-context", "256"]) else { return };
    let list: Value = serde_json::from_str(&server.get("/v1/models?client_version=0.150.0").1).unwrap();
    let name = model_name();
    assert_eq!((&list["data"][0]["id"], &list["data"][0]["type"]), (&json!(name), &json!("model")));
    let codex = &list["models"][0];
    assert_eq!((&codex["slug"], &codex["context_window"]), (&json!(name), &json!(256)));
    let one: Value = serde_json::from_str(&server.get(&format!("/v1/models/org/{name}")).1).unwrap();
    assert_eq!((&one["id"], &one["max_model_len"]), (&json!(name), &json!(256)));
    // An unknown name is answered, but no model has it.
    let (status, none) = server.get("/v1/models/org/another");
    let none: Value = serde_json::from_str(&none).unwrap();
    assert_eq!((status, &none["error"]["code"]), (404, &json!("model_not_found")), "{none}");
    assert!(none["error"]["message"].as_str().unwrap().contains(&name), "{none}");
    let body = json!({"model": "org/another", "prompt": "Once", "max_tokens": 1});
    assert_eq!(server.complete(body)["model"], name);
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
    // Spelled out, it is several tokens.
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
fn one_conversation_is_the_same_prompt_in_every_dialect() {
    let Some(folder) = demo_with(TEMPLATE, &[]) else { return };
    let server = Server::of(sluice(&["serve", folder.path().to_str().unwrap(), "--port", "0"]));
    let schema = json!({"type": "object", "properties": {"z": {"type": "string"}, "a": {"type": "integer"}}});
    let arguments: Value = serde_json::from_str(r#"{"z": "notes.txt", "a": 1}"#).unwrap();
    // 1. In Anthropic's dialect; the signature has nothing but a digest
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
    // 2. In Responses: all of it is cached
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
    // 3. What the template was given: fields in their order, and the last system message as a reminder after the tool's result
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
    // 4. Without thoughts, the prompt says so
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
    // 1. Messages: any tool, and an answer to its result
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
    // 2. Responses: a tool by name
    let tool = json!({"type": "function", "name": "read", "description": "Reads.", "parameters": schema});
    let body = json!({
        "input": asked, "max_output_tokens": 120, "temperature": 0, "tools": [tool], "tool_choice": {"type": "function", "name": "read"},
    });
    let (status, answer) = server.post("/v1/responses", &body);
    let call = answer["output"].as_array().unwrap_or(&Vec::new()).last().cloned().unwrap_or_default();
    assert_eq!((status, &call["type"], &call["name"]), (200, &json!("function_call"), &json!("read")), "{answer}");
    assert!(fits(&serde_json::from_str(call["arguments"].as_str().unwrap()).unwrap()), "{answer}");
    // 3. A format
    let format = json!({"type": "json_schema", "name": "place", "schema": schema});
    let body = json!({"input": asked, "max_output_tokens": 120, "temperature": 0, "text": {"format": format}});
    let (status, answer) = server.post("/v1/responses", &body);
    assert_eq!(status, 200, "{answer}");
    let said = answer["output"].as_array().unwrap().iter().find(|item| item["type"] == "message").unwrap();
    assert!(fits(&serde_json::from_str(said["content"][0]["text"].as_str().unwrap()).unwrap()), "{answer}");
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
