//! Who may use `sluice serve`, by key, host and origin, and what it logs about requests.

use crate::support;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Instant;

use serde_json::{Value, json};
use support::server::{Server, agent};
use support::{assert_refused, demo, sluice};

/// Status line, headers and body of the answer to a request given as text.
fn ask(server: &Server, request: &str) -> String {
    let mut stream = TcpStream::connect(server.address.strip_prefix("http://").unwrap()).unwrap();
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

fn status_of(answer: &str) -> u16 {
    answer.split(' ').nth(1).unwrap().parse().unwrap()
}

fn get(server: &Server, path: &str, headers: &str) -> String {
    ask(server, &format!("GET {path} HTTP/1.1\r\n{headers}Connection: close\r\n\r\n"))
}

#[test]
fn a_server_with_keys_answers_those_who_have_one() {
    let Some(demo) = demo() else { return };
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("keys");
    std::fs::write(&file, "# ours\nsk-first\n\n  sk-second  \n").unwrap();
    let mut command = sluice(&["serve", &demo, "--port", "0", "--api-key-file", file.to_str().unwrap()]);
    command.env("SLUICE_API_KEY", "sk-third");
    let server = Server::of(command);
    let ask = |path: &str, name: &str, key: &str| {
        let mut response = agent().get(server.url(path)).header(name, key).call().unwrap();
        (response.status().as_u16(), response.body_mut().read_to_string().unwrap())
    };
    for key in ["sk-first", "sk-second", "sk-third"] {
        assert_eq!(ask("/v1/models", "authorization", &format!("Bearer {key}")).0, 200);
        assert_eq!(ask("/v1/models", "x-api-key", key).0, 200);
    }
    for (path, name, key) in [
        ("/v1/models", "authorization", "Bearer sk-firs"),
        ("/metrics", "x", "y"),
        ("/v1/nothing", "x-api-key", "# ours"),
    ] {
        let (status, body) = ask(path, name, key);
        let error: Value = serde_json::from_str(&body).unwrap();
        assert_eq!((status, &error["error"]["code"]), (401, &json!("invalid_api_key")), "{body}");
    }
    // In Anthropic's format for its clients; nothing is computed.
    let (status, error) = server.post("/v1/messages", &json!({"messages": []}));
    assert_eq!((status, &error["error"]["type"]), (401, &json!("authentication_error")));
    // The page is open to all, who then enter a key; so is the health check.
    for path in ["/", "/page/main.js"] {
        assert_eq!(ask(path, "x", "y").0, 200);
    }
    assert_eq!(ask("/health", "x", "y").0, 200);
}

#[test]
fn where_others_can_ask_a_key_is_needed() {
    let Some(demo) = demo() else { return };
    let with = |flags: &[&str]| {
        let mut command = sluice(&["serve", &demo, "--port", "0", "--host", "0.0.0.0"]);
        command.args(flags);
        command
    };
    assert_refused(&with(&[]).output().unwrap(), &["--host 0.0.0.0", "--api-key-file", "--insecure"]);
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("keys");
    std::fs::write(&file, "# none\n").unwrap();
    let file = file.to_str().unwrap();
    assert_refused(&with(&["--api-key-file", file]).output().unwrap(), &[file, "no key"]);
    assert_refused(&with(&["--api-key-file", "/none"]).output().unwrap(), &["/none"]);
    assert_refused(&with(&["--api-key", "two words"]).output().unwrap(), &["--api-key"]);
    assert_refused(&with(&["--api-key", ""]).output().unwrap(), &["--api-key"]);
    assert_refused(
        &with(&["--insecure", "--cors-origin", "example.org"]).output().unwrap(),
        &["--cors-origin", "example.org"],
    );
    // With a key, or with --insecure, it listens, and any host is accepted.
    for flags in [&["--api-key", "sk-1"][..], &["--insecure"]] {
        let mut server = Server::of(with(flags));
        server.address = server.address.replace("0.0.0.0", "127.0.0.1");
        let answer = get(&server, "/v1/models", "Host: model.lan\r\nAuthorization: Bearer sk-1\r\n");
        assert_eq!(status_of(&answer), 200, "{answer}");
    }
}

#[test]
fn a_page_that_calls_itself_by_the_address_is_not_answered() {
    let Some(server) = Server::start(&["--allowed-host", "box.lan"]) else { return };
    for host in ["localhost", "127.0.0.1:8080", "[::1]:80", "box.lan"] {
        assert_eq!(status_of(&get(&server, "/health", &format!("Host: {host}\r\n"))), 200, "{host}");
    }
    for headers in [
        "Host: evil.example\r\n",
        "Host: localhost.evil.example\r\n",
        "Host: localhost\r\nOrigin: https://evil.example\r\n",
    ] {
        let answer = get(&server, "/v1/models", headers);
        assert_eq!(status_of(&answer), 403, "{answer}");
        assert!(answer.contains("permission_error") && answer.contains("evil.example"), "{answer}");
    }
    assert_eq!(
        status_of(&ask(
            &server,
            "GET http://evil.example/health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        )),
        403
    );
}

#[test]
fn pages_that_are_named_may_ask_from_a_browser() {
    let Some(server) = Server::start(&["--cors-origin", "https://chat.example", "--api-key", "sk-1"]) else { return };
    let preflight = "OPTIONS /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nOrigin: https://chat.example\r\n\
        Access-Control-Request-Method: POST\r\nAccess-Control-Request-Headers: authorization, content-type\r\nConnection: close\r\n\r\n";
    let answer = ask(&server, preflight).to_lowercase();
    assert_eq!(status_of(&answer), 200, "{answer}");
    for part in ["access-control-allow-origin: https://chat.example", "authorization"] {
        assert!(answer.contains(part), "{part} is not in {answer}");
    }
    // That origin can read answers and errors, and no other can.
    let answer =
        get(&server, "/v1/models", "Host: localhost\r\nOrigin: https://chat.example\r\nAuthorization: Bearer sk-1\r\n");
    assert!(
        status_of(&answer) == 200 && answer.contains("access-control-allow-origin: https://chat.example"),
        "{answer}"
    );
    let answer = get(&server, "/v1/models", "Host: localhost\r\nOrigin: https://chat.example\r\n");
    assert!(
        status_of(&answer) == 401 && answer.contains("access-control-allow-origin: https://chat.example"),
        "{answer}"
    );
    let answer =
        get(&server, "/v1/models", "Host: localhost\r\nOrigin: https://evil.example\r\nAuthorization: Bearer sk-1\r\n");
    assert!(status_of(&answer) == 403 && !answer.contains("access-control-allow-origin"), "{answer}");
}

#[test]
fn a_request_that_takes_too_long_is_given_up() {
    let Some(server) = Server::start(&["--request-timeout", "1", "--parallel", "1"]) else { return };
    let body = json!({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4000, "stream": true});
    let long = json!({"prompt": "Once", "max_tokens": 4000, "ignore_eos": true, "n": 16, "stream": true});
    // 1. A request that computes
    let begun = Instant::now();
    let (status, _, text) = server.post_with("/v1/completions", &[], &long);
    let took = begun.elapsed().as_secs_f64();
    if !text.contains("timeout_error") {
        // A machine that finishes within a second has nothing to time out.
        eprintln!("SKIPPED: it took {took} s");
        return;
    }
    assert_eq!((status, text.ends_with("data: [DONE]\n\n")), (200, true));
    // 2. The next client is answered.
    server.wait_until("nothing runs", |s| s.metric("vllm:num_requests_running") == 0.0);
    assert_eq!(server.post_with("/v1/messages", &[], &body).0, 200);
}

#[test]
fn what_is_logged_of_a_request_says_nothing_of_what_was_said() {
    let Some(server) = Server::start(&[]) else { return };
    let block = json!([{"type": "text", "text": "x-anthropic-billing-header: cch=1a2b3; SECRET"}]);
    let body = json!({"system": block, "messages": [{"role": "user", "content": "SECRET"}], "max_tokens": 3, "temperature": 0, "metadata": {}, "speed": "fast"});
    for id in ["first", "second"] {
        let (status, _, text) = server.post_with("/v1/messages?SECRET=1", &[("x-request-id", id)], &body);
        assert_eq!(status, 200, "{text}");
    }
    server.get("/health");
    server.get("/v1/models");
    let has_last = |s: &Server| s.lines.lock().unwrap().iter().any(|line| line.contains("/v1/models"));
    server.wait_until("the last request's line", has_last);
    let seen = server.lines.lock().unwrap().clone();
    let all = seen.join("\n");
    assert!(!all.contains("SECRET") && !all.contains("/health"), "{all}");
    assert_eq!(seen.iter().filter(|l| l.contains("cch=")).count(), 1, "it is said once: {all}");
    let line = seen.iter().find(|l| l.starts_with("sluice: second ")).unwrap();
    for part in ["POST /v1/messages 200", "prompt tokens", "3 generated", "ignored: speed"] {
        assert!(line.contains(part), "{part} is not in {line}");
    }
}
