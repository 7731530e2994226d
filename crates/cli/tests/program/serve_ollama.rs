//! What Ollama's clients (Home Assistant, Open WebUI, editors) send to `sluice serve`, and what they get.

use crate::support;

use serde_json::{Value, json};
use support::server::{Server, agent};
use support::{demo_with, sluice};

/// The greedy answer of a chat completion to these messages.
fn chat_says(server: &Server, messages: Value) -> String {
    let body = json!({"messages": messages, "max_tokens": 12, "temperature": 0});
    let (status, answer) = server.post("/v1/chat/completions", &body);
    assert_eq!(status, 200, "{answer}");
    answer["choices"][0]["message"]["content"].as_str().unwrap().to_owned()
}

#[test]
fn a_conversation_is_answered_in_lines_or_as_one_object() {
    let Some(server) = Server::start(&[]) else { return };
    let messages = json!([{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Tell me a story."}]);
    let options = json!({"temperature": 0, "num_predict": 12, "num_ctx": 8192, "repeat_penalty": 1.0});
    let mut body = json!({"model": "any:latest", "messages": messages, "options": options, "keep_alive": "5m"});
    let all = server.lines("/api/chat", &body);
    let (last, before) = all.split_last().unwrap();
    let said: String = before.iter().map(|line| line["message"]["content"].as_str().unwrap()).collect();
    assert_eq!(said, chat_says(&server, messages));
    assert!(
        before.len() > 4 && before.iter().all(|line| line["done"] == false && line["message"]["role"] == "assistant")
    );
    assert_eq!(
        (&last["done"], &last["done_reason"], &last["eval_count"]),
        (&json!(true), &json!("length"), &json!(12))
    );
    assert!(last["prompt_eval_count"].as_u64().unwrap() > 4 && last["total_duration"].as_u64().unwrap() > 0, "{last}");
    // The same, whole
    body["stream"] = false.into();
    let (status, headers, text) = server.post_with("/api/chat", &[], &body);
    let whole: Value = serde_json::from_str(&text).unwrap();
    assert_eq!((status, &whole["message"]["content"], &whole["done"]), (200, &json!(said), &json!(true)));
    let ignored = headers["sluice-ignored"].to_str().unwrap();
    assert!(ignored.contains("keep_alive") && ignored.contains("options.num_ctx"), "{ignored}");
    // A stop string ends it.
    body["options"]["stop"] = json!([said.chars().nth(4).unwrap().to_string()]);
    let (_, stopped) = server.post("/api/chat", &body);
    assert_eq!(stopped["done_reason"], "stop", "{stopped}");
    // Without messages, the request only loads the model.
    let (status, loaded) = server.post("/api/chat", &json!({"model": "any", "messages": []}));
    assert_eq!((status, &loaded["done_reason"]), (200, &json!("load")));
}

#[test]
fn a_prompt_is_answered_through_the_template_or_gone_on_with() {
    let Some(server) = Server::start(&[]) else { return };
    let options = json!({"temperature": 0, "num_predict": 12});
    let said =
        chat_says(&server, json!([{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]));
    let all = server.lines("/api/generate", &json!({"prompt": "Hi", "system": "Be kind.", "options": options}));
    let text: String = all.iter().map(|line| line["response"].as_str().unwrap()).collect();
    assert_eq!((text, &all[all.len() - 1]["done"]), (said, &json!(true)));
    let completed = server.complete(json!({"prompt": "Once upon a time", "temperature": 0, "max_tokens": 12}));
    let body = json!({"prompt": "Once upon a time", "raw": true, "stream": false, "options": options});
    let (status, raw) = server.post("/api/generate", &body);
    assert_eq!((status, &raw["response"]), (200, &completed["choices"][0]["text"]));
    assert_eq!(server.post("/api/generate", &json!({"model": "any"})).1["done_reason"], "load");
}

#[test]
fn forms_are_kept_to() {
    let Some(server) = Server::start(&[]) else { return };
    let schema = json!({"type": "object", "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}}, "required": ["age"], "additionalProperties": false});
    let messages = json!([{"role": "user", "content": "How old is the fox?"}]);
    let body = json!({"messages": messages, "format": schema, "stream": false, "options": {"num_predict": 64, "temperature": 0}});
    let (status, answer) = server.post("/api/chat", &body);
    assert_eq!(status, 200, "{answer}");
    let said: Value = serde_json::from_str(answer["message"]["content"].as_str().unwrap()).unwrap();
    assert!(said["age"].is_u64() && said.as_object().unwrap().len() == 1, "{said}");
}

/// Like Qwen3's template: with thoughts, and with calls that it renders itself.
const TEMPLATE: &str = "{%- if tools %}<|im_start|>tools\n<tool_call>\n{{ tools | tojson }}\n</tool_call><|im_end|>\n{%- endif %}\
    {%- for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}\
    {%- for call in m.tool_calls or [] %}<tool_call>\n{\"name\": \"{{ call.function.name }}\", \"arguments\": {{ call.function.arguments | tojson }}}\n</tool_call>{%- endfor %}<|im_end|>\n{% endfor %}\
    {%- if add_generation_prompt %}<|im_start|>assistant\n{%- if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{%- endif %}{%- endif %}";

#[test]
fn a_call_comes_whole_and_its_result_is_taken() {
    let special = ["<think>", "</think>", "<tool_call>", "</tool_call>"];
    let Some(folder) = demo_with(TEMPLATE, &special) else { return };
    let server = Server::of({
        let mut command = sluice(&["serve", folder.path().to_str().unwrap(), "--port", "0"]);
        command.args(["--model-name", "thinker"]);
        command
    });
    let parameters =
        json!({"type": "object", "properties": {"room": {"type": "string", "maxLength": 4}}, "required": ["room"]});
    let tools = json!([{"type": "function", "function": {"name": "warmth", "parameters": parameters}}]);
    let call = json!({"function": {"name": "warmth", "arguments": {"room": "a"}}});
    let messages = json!([
        {"role": "user", "content": "How warm is it?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_name": "warmth", "content": "20"},
    ]);
    let body =
        json!({"messages": messages, "tools": tools, "think": false, "stream": false, "options": {"num_predict": 4}});
    let (status, answer) = server.post("/api/chat", &body);
    assert_eq!(status, 200, "{answer}");
    assert_eq!(answer["model"], "thinker:latest");
    let (_, shown) = server.post("/api/show", &json!({"model": "thinker"}));
    assert_eq!(shown["capabilities"], json!(["completion", "tools", "thinking"]));
}

#[test]
fn clients_find_the_models_and_what_they_are() {
    let Some(server) = Server::start(&["--model-name", "fox"]) else { return };
    let parsed = |path: &str| -> Value { serde_json::from_str(&server.get(path).1).unwrap() };
    let tags = parsed("/api/tags");
    let model = &tags["models"][0];
    assert_eq!((&model["name"], &model["model"]), (&json!("fox:latest"), &json!("fox:latest")));
    assert_eq!(model["digest"].as_str().unwrap().len(), 64);
    assert!(model["size"].as_u64().unwrap() > 1_000_000 && model["details"]["parameter_size"] != "0", "{model}");
    let running = parsed("/api/ps");
    assert_eq!(running["models"][0]["name"], "fox:latest");
    assert!(running["models"][0]["size"].as_u64().unwrap() > 1_000_000, "{running}");
    let version = parsed("/api/version");
    assert!(version["version"].as_str().unwrap().split('.').all(|part| part.parse::<u32>().is_ok()), "{version}");
    let (status, shown) = server.post("/api/show", &json!({"model": "fox:latest"}));
    assert_eq!(status, 200);
    let family = shown["model_info"]["general.architecture"].as_str().unwrap();
    let length = &shown["model_info"][format!("{family}.context_length")];
    assert_eq!(*length, running["models"][0]["context_length"]);
    // Clients that check for a server
    for path in ["/", "/api/version", "/api/tags"] {
        let mut response = agent().head(server.url(path)).call().unwrap();
        assert_eq!((response.status().as_u16(), response.body_mut().read_to_string().unwrap()), (200, String::new()));
    }
}

#[test]
fn errors_are_in_ollamas_shape() {
    let Some(server) = Server::start(&["--api-key", "secret", "--max-context", "256"]) else { return };
    let key = [("authorization", "Bearer secret")];
    let asked = |path: &str, headers: &[(&str, &str)], body: Value| {
        let (status, _, text) = server.post_with(path, headers, &body);
        let answer: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(answer.as_object().unwrap().len(), 1, "{answer}");
        (status, answer["error"].as_str().unwrap().to_owned())
    };
    let said = |content: String| json!({"messages": [{"role": "user", "content": content}]});
    let long = asked("/api/chat", &key, said("word ".repeat(2000)));
    assert_eq!((long.0, long.1.contains("the input length exceeds the context length")), (400, true), "{}", long.1);
    for (path, body, status, part) in [
        ("/api/chat", json!({"messages": 5}), 400, "invalid type"),
        ("/api/generate", json!({"prompt": "a", "suffix": "b"}), 400, "suffix is not supported"),
        ("/api/chat", json!({"messages": [{"role": "user", "content": "a"}], "options": {"top_p": 7}}), 400, "top_p"),
        ("/api/pull", json!({"model": "x"}), 404, "/api/pull: no such path"),
        ("/api/tags", json!({}), 405, "/api/tags does not support POST"),
    ] {
        let (found, error) = asked(path, &key, body);
        assert_eq!((found, error.contains(part)), (status, true), "{path}: {error}");
    }
    let (status, error) = asked("/api/chat", &[], said("a".into()));
    assert_eq!((status, error.contains("API key")), (401, true), "{error}");
    let (status, _, _) = server.post_with(
        "/api/show",
        &[("authorization", "Bearer secret"), ("origin", "https://evil.example")],
        &json!({}),
    );
    assert_eq!(status, 403);
}
