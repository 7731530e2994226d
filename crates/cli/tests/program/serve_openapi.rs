//! `/openapi.json` describes what the server does: its answers follow the schemas, in every dialect, whole and streamed.

use crate::support;

use boon::{Compiler, SchemaIndex, Schemas};
use serde_json::{Value, json};
use support::demo;
use support::server::{Server, agent};

/// A server's document, and the same with undescribed fields forbidden.
struct Document {
    open: Value,
    closed: Value,
}

impl Document {
    fn of(server: &Server) -> Document {
        let (status, text) = server.get("/openapi.json");
        assert_eq!(status, 200);
        let open: Value = serde_json::from_str(&text).unwrap();
        // Clients must accept unknown fields; in these tests a field that is not described is an error.
        let mut closed = open.clone();
        closed["components"]["schemas"].as_object_mut().unwrap().values_mut().for_each(close);
        Document { open, closed }
    }

    /// Checks that the answer of `path` with this status follows its schema.
    fn holds(&self, method: &str, path: &str, status: u16, answer: &Value) {
        let response = &self.closed["paths"][path][method]["responses"][status.to_string()];
        self.check(&response["content"]["application/json"]["schema"], path, answer);
    }

    fn events_hold(&self, path: &str, events: &[Value]) {
        let content = &self.closed["paths"][path]["post"]["responses"]["200"]["content"];
        let lines = &content["application/x-ndjson"]["schema"];
        let data = &content["text/event-stream"]["schema"]["properties"]["data"]["contentSchema"];
        let schema = if path.starts_with("/api/") { lines } else { data };
        events.iter().for_each(|event| self.check(schema, path, event));
    }

    fn check(&self, schema: &Value, path: &str, value: &Value) {
        assert!(schema.is_object(), "{path} does not say what it answers");
        let (schemas, schema) = compiled(&self.closed, schema);
        if let Err(e) = schemas.validate(value, schema) {
            panic!("{path}: {e:#} in {value:#}");
        }
    }

    fn takes(&self, path: &str, body: &Value) -> bool {
        let content = &self.open["paths"][path]["post"]["requestBody"]["content"];
        let (schemas, schema) = compiled(&self.open, &content["application/json"]["schema"]);
        schemas.validate(body, schema).is_ok()
    }
}

fn compiled(document: &Value, schema: &Value) -> (Schemas, SchemaIndex) {
    let mut schema = schema.clone();
    schema["components"] = document["components"].clone();
    let (mut schemas, mut compiler) = (Schemas::new(), Compiler::new());
    compiler.add_resource("answer.json", schema).unwrap();
    let index = compiler.compile("answer.json", &mut schemas).unwrap();
    (schemas, index)
}

/// Forbids unknown properties wherever properties are listed.
fn close(schema: &mut Value) {
    match schema {
        Value::Object(fields) => {
            let lists =
                fields.get("properties").is_some_and(Value::is_object) && !fields.contains_key("additionalProperties");
            fields.values_mut().for_each(close);
            if lists && fields.get("type").is_some() {
                fields.insert("additionalProperties".into(), false.into());
            }
        }
        Value::Array(all) => all.iter_mut().for_each(close),
        _ => {}
    }
}

fn function() -> Value {
    let parameters =
        json!({"type": "object", "properties": {"path": {"type": "string", "maxLength": 4}}, "required": ["path"]});
    json!({"name": "read", "parameters": parameters})
}

/// Requests with all kinds of answers.
fn bodies() -> Vec<(&'static str, Value)> {
    let said = json!([{"role": "user", "content": "Tell me a story."}]);
    let tool = json!({"type": "function", "function": function()});
    let mut flat = function();
    flat["type"] = "function".into();
    let own = json!({"name": "read", "input_schema": function()["parameters"]});
    vec![
        ("/v1/completions", json!({"prompt": "Once", "max_tokens": 4, "logprobs": 2, "n": 2})),
        ("/v1/completions", json!({"prompt": ["Once", "Twice"], "max_tokens": 4, "echo": true})),
        ("/v1/chat/completions", json!({"messages": said, "max_tokens": 4, "logprobs": true, "top_logprobs": 2})),
        (
            "/v1/chat/completions",
            json!({"messages": said, "max_tokens": 90, "tools": [tool], "tool_choice": "required"}),
        ),
        (
            "/v1/responses",
            json!({"input": "Tell me a story.", "max_output_tokens": 4, "include": ["reasoning.encrypted_content"]}),
        ),
        (
            "/v1/responses",
            json!({"input": said, "max_output_tokens": 4, "include": ["message.output_text.logprobs"], "top_logprobs": 1}),
        ),
        (
            "/v1/responses",
            json!({"input": said, "max_output_tokens": 90, "tools": [flat], "tool_choice": "required", "text": {"verbosity": "low"}}),
        ),
        ("/v1/messages", json!({"messages": said, "max_tokens": 4, "thinking": {"type": "adaptive"}})),
        ("/v1/messages", json!({"messages": said, "max_tokens": 90, "tools": [own], "tool_choice": {"type": "any"}})),
        ("/api/chat", json!({"messages": said, "tools": [tool], "options": {"num_predict": 6}})),
        ("/api/generate", json!({"prompt": "Once", "options": {"num_predict": 6}})),
    ]
}

#[test]
fn answers_are_of_their_schemas() {
    let Some(server) = Server::start(&[]) else { return };
    let document = Document::of(&server);
    for (path, mut body) in bodies() {
        body["stream"] = false.into();
        let (status, answer) = server.post(path, &body);
        assert_eq!(status, 200, "{answer}");
        document.holds("post", path, 200, &answer);
    }
    let said = json!([{"role": "user", "content": "Hi"}]);
    for (path, body) in [
        ("/v1/messages/count_tokens", json!({"messages": said})),
        ("/v1/responses/input_tokens", json!({"input": said})),
        ("/tokenize", json!({"content": "Once upon"})),
        ("/tokenize", json!({"messages": said, "with_pieces": true, "return_token_strs": true})),
        ("/detokenize", json!({"tokens": [50, 60]})),
        ("/api/show", json!({"model": "any"})),
        ("/v1/embeddings", json!({"input": ["a", "b"], "dimensions": 4})),
        ("/v1/embeddings", json!({"input": [5, 6], "encoding_format": "base64"})),
        ("/api/embed", json!({"input": "a"})),
        ("/api/embeddings", json!({"prompt": "a"})),
    ] {
        let (status, answer) = server.post(path, &body);
        assert_eq!(status, 200, "{answer}");
        document.holds("post", path, 200, &answer);
    }
    let name = demo().unwrap().rsplit('/').next().unwrap().to_owned();
    for (path, asked) in [
        ("/v1/models", "/v1/models"),
        ("/v1/models/{name}", format!("/v1/models/{name}").as_str()),
        ("/health", "/health"),
        ("/api/tags", "/api/tags"),
        ("/api/ps", "/api/ps"),
        ("/api/version", "/api/version"),
    ] {
        let (status, answer) = server.get(asked);
        assert_eq!(status, 200);
        document.holds("get", path, 200, &serde_json::from_str(&answer).unwrap());
    }
}

#[test]
fn events_are_of_their_schemas() {
    let Some(server) = Server::start(&[]) else { return };
    let document = Document::of(&server);
    for (path, mut body) in bodies() {
        body["stream"] = true.into();
        let events = match path {
            "/v1/responses" | "/v1/messages" => server.named_events(path, &body),
            "/api/chat" | "/api/generate" => server.lines(path, &body),
            _ => {
                body["stream_options"] = json!({"include_usage": true});
                server.stream(path, &body)
            }
        };
        assert!(events.len() > 4);
        document.events_hold(path, &events);
    }
}

#[test]
fn errors_are_of_their_schemas_and_what_is_sent_is_described() {
    let Some(server) = Server::start(&[]) else { return };
    let document = Document::of(&server);
    for (path, body) in bodies() {
        assert!(document.takes(path, &body), "{path}: {body}");
        for (field, value) in [("temperature", json!("warm")), ("stream", json!(5)), ("top_p", json!([]))] {
            let mut wrong = body.clone();
            let at = if path.starts_with("/api/") && field != "stream" { &mut wrong["options"] } else { &mut wrong };
            at[field] = value;
            assert!(!document.takes(path, &wrong), "{path}: {wrong}");
            let (status, answer) = server.post(path, &wrong);
            assert_eq!(status, 400, "{answer}");
            document.holds("post", path, 400, &answer);
        }
    }
    for (path, asked, status) in [
        ("/v1/sessions", "/v1/sessions", 400),
        ("/v1/sessions", "/v1/sessions?salt=x", 400),
        ("/page/{name}", "/page/%ff", 400),
        ("/v1/models/{name}", "/v1/models/%ff", 400),
        ("/v1/models/{name}", "/v1/models/no/such", 404),
    ] {
        let (found, answer) = server.get(asked);
        assert_eq!(found, status, "{asked}: {answer}");
        document.holds("get", path, status, &serde_json::from_str(&answer).unwrap());
    }
}

/// Names of an object's fields, and which of them are required.
fn fields<'a>(document: &'a Value, schema: &'a Value, all: &mut Vec<(&'a str, bool)>) {
    if let Some(reference) = schema["$ref"].as_str() {
        fields(document, document.pointer(&reference[1..]).unwrap(), all);
    }
    schema["allOf"].as_array().into_iter().flatten().for_each(|part| fields(document, part, all));
    let required = schema["required"].as_array();
    for name in schema["properties"].as_object().into_iter().flat_map(|all| all.keys()) {
        all.push((name, required.is_some_and(|required| required.iter().any(|r| r == name))));
    }
}

#[test]
fn a_field_that_may_be_left_out_may_be_null() {
    let folder = tempfile::tempdir().unwrap();
    let Some(server) = Server::start(&[&format!("--prompt-cache={}", folder.path().display())]) else { return };
    let document = Document::of(&server);
    let said = json!([{"role": "user", "content": "Hi"}]);
    for (path, body) in [
        ("/v1/completions", json!({"prompt": "Once", "max_tokens": 2})),
        ("/v1/chat/completions", json!({"messages": said, "max_tokens": 2})),
        ("/v1/responses", json!({"input": "Hi", "max_output_tokens": 2})),
        ("/v1/messages", json!({"messages": said, "max_tokens": 2})),
        ("/v1/messages/count_tokens", json!({"messages": said})),
        ("/v1/responses/input_tokens", json!({"input": "Hi"})),
        ("/tokenize", json!({"content": "Hi"})),
        ("/detokenize", json!({"tokens": [50]})),
        ("/v1/sessions", json!({"name": "a", "prompt": "Once upon a time there was a fox. ".repeat(60)})),
    ] {
        let content = &document.open["paths"][path]["post"]["requestBody"]["content"];
        let mut all = Vec::new();
        fields(&document.open, &content["application/json"]["schema"], &mut all);
        assert!(
            all.iter().any(|(_, required)| *required)
                || ["/v1/responses", "/v1/responses/input_tokens", "/tokenize"].contains(&path),
            "{all:?}"
        );
        let mut nothing = body.clone();
        for (name, required) in &all {
            if body.get(name).is_none() {
                let mut alone = body.clone();
                alone[name] = Value::Null;
                assert_eq!(document.takes(path, &alone), !required, "{path}: {name}");
                nothing[name] = Value::Null;
            } else if *required {
                let mut without = body.clone();
                without.as_object_mut().unwrap().remove(*name);
                let (status, answer) = server.post(path, &without);
                assert!(!document.takes(path, &without) && status == 400, "{path}: {name}: {answer}");
                let said = answer["error"]["message"].as_str().unwrap();
                assert!(said.contains(name) && said.contains("missing"), "{said}");
            }
        }
        let (status, answer) = server.post(path, &nothing);
        assert_eq!(status, 200, "{path}: {answer}");
        let (_, headers, _) = server.post_with(path, &[], &nothing);
        assert!(!headers.contains_key("sluice-ignored"), "{path}: {headers:?}");
    }
    // Also inside a field
    for (path, field, value) in [
        ("/v1/chat/completions", "stream_options", json!({"include_usage": null})),
        ("/v1/chat/completions", "chat_template_kwargs", json!({"enable_thinking": null})),
        ("/v1/messages", "tool_choice", json!({"type": "auto", "name": null, "disable_parallel_tool_use": null})),
        ("/v1/messages", "thinking", json!({"type": "disabled", "budget_tokens": null})),
        ("/v1/responses", "reasoning", json!({"effort": null, "summary": null})),
        ("/v1/responses", "text", json!({"format": null, "verbosity": null})),
    ] {
        let mut body = json!({"messages": said, "input": said, "max_tokens": 2});
        body[field] = value;
        let (status, answer) = server.post(path, &body);
        assert!(status == 200 && document.takes(path, &body), "{path}: {body}: {answer}");
    }
}

#[test]
fn sessions_are_of_their_schemas() {
    let folder = tempfile::tempdir().unwrap();
    let flag = format!("--prompt-cache={}", folder.path().display());
    let Some(server) = Server::start(&[&flag]) else { return };
    let document = Document::of(&server);
    let (status, saved) =
        server.post("/v1/sessions", &json!({"name": "a", "prompt": "Once upon a time there was a fox. ".repeat(60)}));
    assert_eq!(status, 200, "{saved}");
    document.holds("post", "/v1/sessions", 200, &saved);
    let (status, all) = server.get("/v1/sessions");
    assert_eq!(status, 200, "{all}");
    document.holds("get", "/v1/sessions", 200, &serde_json::from_str(&all).unwrap());
    let (status, loaded) = server.post("/v1/sessions/a/load", &json!({}));
    assert_eq!(status, 200, "{loaded}");
    document.holds("post", "/v1/sessions/{name}/load", 200, &loaded);
    // Unknown and repeated query parameters are reported in the same way.
    for query in ["%C2%A7%28=%3F", "=&=t", "cache_salt=&%C3%92k%7C=%0E", "cache_salt=a&cache_salt=b", "model=%ff&x"] {
        let mut deleted = agent().delete(server.url(&format!("/v1/sessions/%40%26?{query}"))).call().unwrap();
        let deleted = (deleted.status().as_u16(), deleted.body_mut().read_json::<Value>().unwrap());
        let (status, listed) = server.get(&format!("/v1/sessions?{query}"));
        let listed = (status, serde_json::from_str(&listed).unwrap());
        let loaded = server.post(&format!("/v1/sessions/a/load?{query}"), &json!({}));
        for (method, path, (status, answer)) in [
            ("delete", "/v1/sessions/{name}", deleted),
            ("get", "/v1/sessions", listed),
            ("post", "/v1/sessions/{name}/load", loaded),
        ] {
            assert_eq!(status, 400, "{query}: {answer}");
            document.holds(method, path, 400, &answer);
            let message = answer["error"]["message"].as_str().unwrap();
            assert!(message.contains("parameter") || message.contains("more than once"), "{message}");
            assert!(answer["error"]["param"].is_string() || query.starts_with('='), "{answer}");
        }
    }
    for status in [200, 404] {
        let mut response = agent().delete(server.url("/v1/sessions/a")).call().unwrap();
        assert_eq!(response.status(), status);
        let answer: Value = response.body_mut().read_json().unwrap();
        document.holds("delete", "/v1/sessions/{name}", status, &answer);
    }
}
