//! Embeddings over HTTP, in OpenAI's and Ollama's dialects.

use crate::support;

use std::fs;
use std::io::Write;
use std::net::TcpStream;

use serde_json::{Value, json};
use support::server::Server;
use support::{demo_with, sluice};

const TEXT: &str = "The fox ran to the river.";

fn embeddings(server: &Server, body: Value) -> Value {
    let (status, answer) = server.post("/v1/embeddings", &body);
    assert_eq!(status, 200, "{answer}");
    answer
}

/// The vector of input number `at`.
fn vector(answer: &Value, at: usize) -> Vec<f32> {
    assert_eq!(answer["data"][at]["index"], at);
    answer["data"][at]["embedding"].as_array().unwrap().iter().map(|x| x.as_f64().unwrap() as f32).collect()
}

fn length(vector: &[f32]) -> f64 {
    vector.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt()
}

/// Decodes Base64.
fn decoded(text: &str) -> Vec<f32> {
    let digits = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let bits = text.trim_end_matches('=').bytes().map(|c| digits.iter().position(|d| *d == c).unwrap() as u32);
    let (mut bytes, mut held, mut count) = (Vec::new(), 0u32, 0);
    for six in bits {
        (held, count) = ((held << 6) | six, count + 6);
        if count >= 8 {
            count -= 8;
            bytes.push((held >> count) as u8);
        }
    }
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
}

#[test]
fn vectors_are_the_same_in_every_way_of_asking() {
    let Some(server) = Server::start(&["--parallel", "4"]) else { return };
    let alone = embeddings(&server, json!({"model": "any", "input": TEXT}));
    let wanted = vector(&alone, 0);
    assert!((length(&wanted) - 1.0).abs() < 1e-5);
    let (_, tokens) = server.post("/tokenize", &json!({"prompt": TEXT}));
    assert_eq!(alone["usage"], json!({"prompt_tokens": tokens["count"], "total_tokens": tokens["count"]}));
    // In a batch, larger than what is computed at once; as tokens; in Base64
    let others: Vec<String> = (0..11).map(|i| format!("{} {i}", "Once upon a time. ".repeat(i))).collect();
    let batch: Vec<&str> = others.iter().map(String::as_str).chain([TEXT]).collect();
    let answer = embeddings(&server, json!({"input": batch}));
    assert_eq!(vector(&answer, 11), wanted);
    let first = vector(&embeddings(&server, json!({"input": others[3]})), 0);
    assert_eq!(vector(&answer, 3), first);
    assert_ne!(first, wanted);
    let tokens = &tokens["tokens"];
    assert_eq!(vector(&embeddings(&server, json!({"input": tokens})), 0), wanted);
    assert_eq!(vector(&embeddings(&server, json!({"input": [tokens, [5]]})), 0), wanted);
    let answer = embeddings(&server, json!({"input": TEXT, "encoding_format": "base64", "user": "me"}));
    assert_eq!(decoded(answer["data"][0]["embedding"].as_str().unwrap()), wanted);
    // The first elements, scaled again
    let short = vector(&embeddings(&server, json!({"input": TEXT, "dimensions": 8})), 0);
    assert_eq!(short.len(), 8);
    assert!((length(&short) - 1.0).abs() < 1e-5);
    let scale = f64::from(wanted[0]) / f64::from(short[0]);
    assert!(short.iter().zip(&wanted).all(|(a, b)| (f64::from(*a) * scale - f64::from(*b)).abs() < 1e-6));
    // In Ollama's dialect
    let (status, answer) = server.post("/api/embed", &json!({"model": "any:latest", "input": [TEXT, others[3]]}));
    assert_eq!(status, 200, "{answer}");
    assert_eq!(answer["embeddings"], json!([wanted, first]));
    let (status, answer) = server.post("/api/embeddings", &json!({"model": "any", "prompt": TEXT}));
    assert_eq!((status, &answer["embedding"]), (200, &json!(wanted)));
    assert_eq!(server.post("/api/embed", &json!({"input": []})).1["embeddings"], json!([]));
}

#[test]
fn what_cannot_be_made_a_vector_of_is_refused() {
    let Some(server) = Server::start(&["--max-context", "128"]) else { return };
    let long = "word ".repeat(300);
    for (body, code, part) in [
        (json!({"input": long}), json!("context_length_exceeded"), "maximum context length is 128 tokens"),
        (json!({"input": [TEXT, long]}), json!("context_length_exceeded"), "maximum context length"),
        (json!({"input": ""}), Value::Null, "empty"),
        (json!({"input": []}), Value::Null, "no tokens"),
        (json!({"input": vec!["a"; 2049]}), Value::Null, "2049 elements"),
        (json!({"input": [4_000_000]}), Value::Null, "vocabulary"),
        (json!({"input": TEXT, "dimensions": 1_000_000}), Value::Null, "dimensions"),
        (json!({"input": TEXT, "encoding_format": "hex"}), Value::Null, "hex"),
        (json!({"input": 5}), Value::Null, "did not match"),
    ] {
        let (status, answer) = server.post("/v1/embeddings", &body);
        let message = answer["error"]["message"].as_str().unwrap();
        assert_eq!((status, &answer["error"]["code"]), (400, &code), "{answer}");
        assert!(message.contains(part), "{message}");
    }
    // The whole context may be used; for Ollama's clients, longer inputs are truncated.
    let ids = vec![7; 128];
    assert_eq!(server.post("/v1/embeddings", &json!({"input": ids})).0, 200);
    assert_eq!(server.post("/api/embed", &json!({"input": long})).1["prompt_eval_count"], 128);
    let (status, answer) = server.post("/api/embed", &json!({"input": long, "truncate": false}));
    let error = answer["error"].as_str().unwrap();
    assert!(status == 400 && error.contains("the input length exceeds the context length"), "{error}");
}

#[test]
fn the_models_folder_says_which_states_are_taken() {
    let template = "{% for m in messages %}{{ m.content }}{% endfor %}";
    let vectors = |pooling: Option<&str>, modules: Option<&str>| {
        let folder = demo_with(template, &[])?;
        for (name, text) in [("1_Pooling/config.json", pooling), ("modules.json", modules)] {
            if let Some(text) = text {
                let path = folder.path().join(name);
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, text).unwrap();
            }
        }
        let server = Server::of(sluice(&["serve", folder.path().to_str().unwrap(), "--port", "0"]));
        Some(server.post("/v1/embeddings", &json!({"input": TEXT})))
    };
    let mean = r#"{"pooling_mode_mean_tokens": true}"#;
    let plain = r#"[{"type": "sentence_transformers.models.Transformer"}, {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}]"#;
    let Some((_, last)) = vectors(None, None) else { return };
    let (_, mean_scaled) = vectors(Some(mean), None).unwrap();
    let (_, mean_plain) = vectors(Some(mean), Some(plain)).unwrap();
    let (last, scaled, plain) = (vector(&last, 0), vector(&mean_scaled, 0), vector(&mean_plain, 0));
    assert_ne!(last, scaled);
    assert!((length(&scaled) - 1.0).abs() < 1e-5 && (length(&plain) - 1.0).abs() > 1e-3);
    let by = length(&plain);
    assert!(scaled.iter().zip(&plain).all(|(a, b)| (f64::from(*a) * by - f64::from(*b)).abs() < 1e-4 * by));
    // A model without supported embeddings still answers; a request for one gets the reason.
    let (status, answer) = vectors(Some(r#"{"pooling_mode_cls_token": true}"#), None).unwrap();
    let message = answer["error"]["message"].as_str().unwrap();
    assert!(status == 400 && message.contains("1_Pooling/config.json") && message.contains("cls_token"), "{message}");
}

#[test]
fn who_goes_away_is_not_computed_for() {
    let Some(server) = Server::start(&["--parallel", "4"]) else { return };
    let input: Vec<String> =
        (0..2000).map(|i| format!("{i} {}", "Once upon a time there was a fox. ".repeat(10))).collect();
    let body = json!({"input": input}).to_string();
    let mut stream = TcpStream::connect(server.address.strip_prefix("http://").unwrap()).unwrap();
    let head = format!("POST /v1/embeddings HTTP/1.1\r\nhost: localhost\r\ncontent-length: {}\r\n\r\n", body.len());
    stream.write_all((head + &body).as_bytes()).unwrap();
    let computed = |s: &Server| s.metric("vllm:prompt_tokens_total");
    server.wait_until("it has begun", |s| s.metric("vllm:num_requests_running") > 0.0);
    // Others are answered meanwhile.
    server.complete(json!({"prompt": "Once", "max_tokens": 2}));
    assert!(server.metric("vllm:num_requests_running") > 0.0);
    drop(stream);
    server.wait_until("it is over", |s| s.metric("vllm:num_requests_running") == 0.0);
    let (all, tokens) = (input.len() as f64, server.post("/tokenize", &json!({"prompt": input[5]})).1);
    assert!(computed(&server) < all * tokens["count"].as_f64().unwrap() / 2.0);
}
