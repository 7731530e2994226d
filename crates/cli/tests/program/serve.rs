//! `sluice serve` over real connections, with an ordinary client.

use crate::support;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::thread;

use serde_json::{Value, json};
use support::server::{Server, agent};
use support::{demo, output, sluice, success};

fn greedy(prompt: &str, max_tokens: usize) -> Value {
    json!({"prompt": prompt, "max_tokens": max_tokens, "temperature": 0})
}

fn text_of(answer: &Value) -> &str {
    answer["choices"][0]["text"].as_str().unwrap()
}

#[test]
fn an_answer_is_the_one_that_run_gives() {
    let Some(server) = Server::start(&[]) else { return };
    let prompt = "One day, a fox";
    let alone = success(output(&["run", &demo().unwrap(), prompt, "--raw", "-n", "24", "--temperature", "0"]));
    let answer = server.complete(greedy(prompt, 24));
    assert_eq!(text_of(&answer).trim_end(), alone.trim_end());
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
    assert_eq!(answer["usage"]["completion_tokens"], 24);
    // Streamed, it is the same, with usage at the end if requested.
    let mut body = greedy(prompt, 24);
    body["stream"] = true.into();
    body["stream_options"] = json!({"include_usage": true});
    let mut events = server.stream("/v1/completions", &body);
    let usage = events.pop().unwrap();
    assert_eq!((usage["choices"].as_array().unwrap().len(), &usage["usage"]["completion_tokens"]), (0, &json!(24)));
    let text: String = events.iter().map(text_of).collect();
    assert_eq!(text, text_of(&answer));
    // What was computed once is cached: all but the last token.
    let prompt_tokens = usage["usage"]["prompt_tokens"].as_u64().unwrap();
    assert_eq!(usage["usage"]["prompt_tokens_details"]["cached_tokens"], prompt_tokens - 1);
}

#[test]
fn many_at_once_have_the_texts_that_each_has_alone() {
    let Some(server) = Server::start(&["--parallel", "5", "--snapshots", "3"]) else { return };
    let Some(alone) = Server::start(&["--parallel", "1", "--no-prefix-cache"]) else { return };
    let beginnings = ["Once upon a time", "Once upon a time there was", "The old", "One day, a", "In a small village"];
    let bodies: Vec<Value> = (0..20)
        .map(
            |i| json!({"prompt": beginnings[i % 5], "max_tokens": 5 + 7 * (i % 4), "temperature": 0.8, "seed": i / 10}),
        )
        .collect();
    let together: Vec<Value> = thread::scope(|scope| {
        let server = &server;
        let running: Vec<_> = bodies.iter().map(|b| scope.spawn(move || server.complete(b.clone()))).collect();
        running.into_iter().map(|r| r.join().unwrap()).collect()
    });
    for (body, together) in bodies.iter().zip(&together) {
        assert_eq!(text_of(together), text_of(&alone.complete(body.clone())), "{body}");
    }
    assert_eq!((server.metric("vllm:num_requests_running"), server.metric("vllm:num_requests_waiting")), (0.0, 0.0));
    assert_eq!(server.metric("vllm:kv_cache_usage_perc"), 0.0);
}

#[test]
fn a_conversation_goes_on_where_it_was() {
    let Some(server) = Server::start(&[]) else { return };
    let ask = |messages: &Value| {
        let body = json!({"messages": messages, "max_tokens": 16, "temperature": 0});
        let (status, answer) = server.post("/v1/chat/completions", &body);
        assert_eq!(status, 200, "{answer}");
        let usage = &answer["usage"];
        let cached = usage["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
        (answer["choices"][0]["message"].clone(), usage["prompt_tokens"].as_u64().unwrap(), cached)
    };
    let story = "Tell me a story about a fox and a crow who lived in the same old tree by the river.";
    let mut messages =
        json!([{"role": "system", "content": "You are a kind narrator."}, {"role": "user", "content": story}]);
    let (first, tokens, cached) = ask(&messages);
    assert_eq!((first["role"].as_str(), cached), (Some("assistant"), 0));
    // 1. The same again
    let (again, _, cached) = ask(&messages);
    assert_eq!((&again, cached), (&first, tokens - 1));
    // 2. Another question after the same system prompt, in parts
    messages[1]["content"] = json!([{"type": "text", "text": "What is"}, {"type": "text", "text": " a crow?"}]);
    let (_, other, cached) = ask(&messages);
    assert!(cached > 4 && cached < other, "{cached} of {other}");
    // 3. The next turn
    messages[1]["content"] = story.into();
    messages.as_array_mut().unwrap().extend([first, json!({"role": "user", "content": "And then?"})]);
    let (_, next, cached) = ask(&messages);
    assert!(cached >= tokens - 1 && cached < next, "{cached} of {next}, {tokens} before");
}

#[test]
fn choices_share_their_prompt_and_stop_by_themselves() {
    let Some(server) = Server::start(&[]) else { return };
    let body =
        json!({"prompt": "Once upon a time", "n": 3, "max_tokens": 40, "temperature": 0.9, "seed": 3, "stop": ["."]});
    let answer = server.complete(body.clone());
    let choices = answer["choices"].as_array().unwrap();
    for (i, choice) in choices.iter().enumerate() {
        let one = json!({"n": 1, "seed": 3 + i});
        let mut own = body.clone();
        own.as_object_mut().unwrap().extend(one.as_object().unwrap().clone());
        let own = server.complete(own);
        assert_eq!((choice["index"].as_u64(), &choice["text"]), (Some(i as u64), &own["choices"][0]["text"]));
        assert!(!choice["text"].as_str().unwrap().contains('.'));
        assert_eq!(choice["finish_reason"], own["choices"][0]["finish_reason"]);
    }
    assert_eq!(choices.len(), 3);
    server.wait_until("nothing runs", |s| s.metric("vllm:num_requests_running") == 0.0);
}

#[test]
fn logprobs_are_those_of_the_tokens() {
    let Some(server) = Server::start(&[]) else { return };
    let mut body = greedy("Once upon a", 3);
    body["logprobs"] = 2.into();
    let answer = server.complete(body);
    let found = &answer["choices"][0]["logprobs"];
    let tokens: String = found["tokens"].as_array().unwrap().iter().map(|t| t.as_str().unwrap()).collect();
    assert_eq!(tokens, text_of(&answer));
    for (i, token) in found["tokens"].as_array().unwrap().iter().enumerate() {
        let top = found["top_logprobs"][i].as_object().unwrap();
        // The greedy choice is the most likely token.
        assert_eq!((top.len(), &top[token.as_str().unwrap()]), (2, &found["token_logprobs"][i]));
        assert!(top.values().all(|p| p.as_f64().unwrap() <= found["token_logprobs"][i].as_f64().unwrap()));
    }
}

#[test]
fn what_cannot_be_done_is_refused_by_name() {
    let Some(server) = Server::start(&["--max-context", "64"]) else { return };
    let refused = |path: &str, body: Value, status: u16, param: &str, part: &str| {
        let (found, answer) = server.post(path, &body);
        assert_eq!(found, status, "{answer}");
        let error = &answer["error"];
        assert!(error["message"].as_str().unwrap().contains(part), "{answer}");
        assert_eq!(error["param"].as_str().unwrap_or(""), param, "{answer}");
        answer
    };
    let completions = "/v1/completions";
    let long = "word ".repeat(200);
    let answer = refused(completions, greedy(&long, 5), 400, "messages", "maximum context length is 64 tokens");
    assert_eq!(answer["error"]["code"], "context_length_exceeded");
    refused(completions, json!({"prompt": "x", "temperature": -1}), 400, "temperature", "temperature");
    refused(completions, json!({"prompt": "x", "n": 0}), 400, "n", "between 1 and");
    refused(completions, json!({"prompt": "x", "logit_bias": {"5": 1}}), 400, "logit_bias", "not supported");
    refused(completions, json!({"prompt": vec!["a"; 129]}), 400, "prompt", "129 prompts");
    refused(completions, json!({"prompt": [1 << 30]}), 400, "prompt", "not in the vocabulary");
    refused("/v1/chat/completions", json!({"messages": []}), 400, "messages", "empty");
    let image = json!({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]});
    refused("/v1/chat/completions", image, 400, "messages[0].content", "image_url");
    refused("/v1/nothing", json!({}), 404, "", "/v1/nothing");
    let (status, text) = server.get("/health");
    assert_eq!((status, text.as_str()), (200, r#"{"status":"ok"}"#));
    // Invalid JSON is reported as such.
    let mut response = agent().post(server.url(completions)).send("{").unwrap();
    assert_eq!(response.status().as_u16(), 400);
    assert!(response.body_mut().read_to_string().unwrap().contains("invalid_request_error"));
}

/// Starts a streamed answer of many tokens, and reads its first event.
fn begin_long(server: &Server) -> BufReader<TcpStream> {
    let address = server.address.strip_prefix("http://").unwrap();
    let mut stream = TcpStream::connect(address).unwrap();
    let body = json!({"prompt": "Once", "max_tokens": 4000, "ignore_eos": true, "stream": true}).to_string();
    let head = format!("POST /v1/completions HTTP/1.1\r\nHost: {address}\r\nContent-Length: {}\r\n\r\n", body.len());
    stream.write_all((head + &body).as_bytes()).unwrap();
    let mut reader = BufReader::new(stream);
    let mut line = String::new();
    while !line.starts_with("data:") {
        line.clear();
        assert_ne!(reader.read_line(&mut line).unwrap(), 0, "the stream has ended");
    }
    reader
}

#[test]
fn a_queue_that_is_full_says_when_to_come_again() {
    let Some(server) = Server::start(&["--parallel", "1", "--queue", "1"]) else { return };
    let running = begin_long(&server);
    let waiting = thread::spawn({
        let url = server.url("/v1/completions");
        move || agent().post(url).send_json(greedy("The", 3)).unwrap().status().as_u16()
    });
    server.wait_until("one waits", |s| s.metric("vllm:num_requests_waiting") == 1.0);
    let mut response = agent().post(server.url("/v1/completions")).send_json(greedy("A", 3)).unwrap();
    assert_eq!(response.status().as_u16(), 429);
    assert!(response.headers()["retry-after"].to_str().unwrap().parse::<u64>().unwrap() >= 1);
    assert!(response.body_mut().read_to_string().unwrap().contains("waiting"));
    // A client that goes away makes room.
    drop(running);
    assert_eq!(waiting.join().unwrap(), 200);
    server.wait_until("nothing runs", |s| s.metric("vllm:num_requests_running") == 0.0);
    assert_eq!(server.metric("vllm:kv_cache_usage_perc"), 0.0);
}

#[test]
fn a_server_that_is_told_to_stop_finishes_what_it_began() {
    let Some(mut server) = Server::start(&[]) else { return };
    let mut running = begin_long(&server);
    let pid = server.child.id().to_string();
    assert!(Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
    // No new connections are accepted.
    server.wait_until("it takes no more", |s| {
        agent().post(s.url("/v1/completions")).send_json(greedy("A", 1)).map_or(true, |r| r.status().as_u16() == 503)
    });
    let mut rest = String::new();
    running.read_to_string(&mut rest).unwrap();
    assert!(rest.contains("data: [DONE]") && rest.contains("\"finish_reason\":\"length\""));
    assert!(server.child.wait().unwrap().success());
}

#[test]
fn it_listens_on_a_unix_socket_too() {
    let Some(demo) = demo() else { return };
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("sluice.sock");
    let flags = ["serve", &demo, "--unix-socket", path.to_str().unwrap(), "--model-name", "mine"];
    // A socket file that is left over is replaced.
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    let server = Server::of(sluice(&flags));
    assert!(server.address.ends_with("sluice.sock"));
    let mut stream = UnixStream::connect(&path).unwrap();
    stream.write_all(b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.contains("\"id\":\"mine\""), "{answer}");
    // A second server does not take it over.
    let second = sluice(&flags).output().unwrap();
    support::assert_refused(&second, &["sluice.sock"]);
}
