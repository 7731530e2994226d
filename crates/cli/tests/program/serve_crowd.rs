//! Hundreds of requests (`SLUICE_CROWD=N`: as many) over 64 connections, many of which go away, ask for too much or are invalid. Each answer is the one that the
//! request has alone, nobody waits forever, and nothing is held afterwards.

use crate::support;

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use fastrand::Rng;
use serde_json::{Value, json};
use support::server::{Server, agent};
use support::{demo, figure_in, memory_of, output, stderr};

const REQUESTS: usize = 200;
const CONNECTIONS: usize = 64;
const CONTEXT: usize = 400;

/// The answers that each request has had, which must all be the same.
type Answers = Mutex<HashMap<String, String>>;

/// A few hundred requests, many of which begin alike.
fn request(random: &mut Rng) -> Value {
    let beginnings = [
        "Once upon a time there was a fox who",
        "Once upon a time there was a fox who lived in a house of glass, and every morning",
        "The list of all things that one may find behind a door is long:",
        "One day",
    ];
    let kind = random.usize(..100);
    let mut prompt = beginnings[kind % beginnings.len()].to_owned();
    prompt.push_str(&" and then".repeat(kind % 7 * 9));
    let mut body = json!({
        "prompt": prompt, "seed": kind, "max_tokens": 1 + kind % 23, "temperature": if kind.is_multiple_of(3) { 0.0 } else { 0.9 },
    });
    if kind.is_multiple_of(11) {
        body["n"] = json!(3);
    }
    if kind.is_multiple_of(13) {
        body["stop"] = json!(["and", "."]);
    }
    if kind.is_multiple_of(17) {
        body["logprobs"] = json!(2);
    }
    if kind.is_multiple_of(5) {
        body["cache_salt"] = json!("another");
    }
    body
}

/// All texts of a request, joined.
fn ask(server: &Server, body: &Value) -> String {
    loop {
        let (status, answer) = server.post("/v1/completions", body);
        match status {
            // Not at once: refusals cost the processor time that answers need.
            429 => thread::sleep(Duration::from_millis(250)),
            200 => {
                let choices = answer["choices"].as_array().unwrap();
                return choices.iter().map(|c| format!("{}|{}", c["text"], c["finish_reason"])).collect();
            }
            _ => panic!("{status}: {answer}"),
        }
    }
}

/// Starts a request over a connection of its own, reads this many lines of the answer, and goes away.
fn go_away(server: &Server, body: &Value, lines: usize) {
    let host = server.address.strip_prefix("http://").unwrap();
    let mut stream = TcpStream::connect(host).unwrap();
    let mut body = body.clone();
    (body["stream"], body["max_tokens"]) = (json!(true), json!(300));
    let body = body.to_string();
    let head = format!("POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {}\r\n\r\n", body.len());
    stream.write_all(format!("{head}{body}").as_bytes()).unwrap();
    // Does not wait for a server that has nothing to send yet.
    stream.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
    BufReader::new(stream).lines().take(lines).for_each(drop);
}

fn wrong(server: &Server, random: &mut Rng) {
    let (body, status) = match random.usize(..4) {
        0 => (json!({"prompt": "word ".repeat(2 * CONTEXT)}), 400),
        1 => (json!({"prompt": "a", "n": 99}), 400),
        2 => (json!({"prompt": [1, 2, 1 << 30]}), 400),
        _ => (json!({"prompt": "a", "temperature": -1}), 400),
    };
    assert_eq!(server.post("/v1/completions", &body).0, status, "{body}");
}

#[test]
fn a_crowd_of_requests_leaves_nothing_behind() {
    let Some(demo) = demo() else { return };
    let requests = std::env::var("SLUICE_CROWD").map_or(REQUESTS, |n| n.parse().expect("SLUICE_CROWD: a number"));
    let context = CONTEXT.to_string();
    let flags = |budget| ["--parallel", "6", "--queue", "30", "--max-context", &context, "--memory-budget", budget];
    let refused = output(&[&["serve", &demo, "--port", "0"], &flags("10M")[..]].concat());
    // Little more than the least; the states of six requests are not in it.
    let budget = figure_in(&stderr(&refused), "--memory-budget ").1 + 12_000_000;
    let server = Server::start(&flags(&budget.to_string())).unwrap();
    let (answers, next): (Answers, _) = (Mutex::default(), AtomicUsize::new(0));
    let (whole, gone) = (AtomicUsize::new(0), AtomicUsize::new(0));
    thread::scope(|scope| {
        for connection in 0..CONNECTIONS {
            let (server, answers, next, whole, gone) = (&server, &answers, &next, &whole, &gone);
            scope.spawn(move || {
                let mut random = Rng::with_seed(connection as u64);
                while next.fetch_add(1, Ordering::Relaxed) < requests {
                    let body = request(&mut random);
                    match random.usize(..10) {
                        0..=5 => {
                            let answer = ask(server, &body);
                            let mut answers = answers.lock().unwrap();
                            let before = answers.entry(body.to_string()).or_insert_with(|| answer.clone());
                            assert_eq!(*before, answer, "{body}");
                            whole.fetch_add(1, Ordering::Relaxed);
                        }
                        6..=8 => {
                            go_away(server, &body, random.usize(..12));
                            gone.fetch_add(1, Ordering::Relaxed);
                        }
                        _ => wrong(server, &mut random),
                    }
                }
            });
        }
    });
    assert!(whole.into_inner() > requests / 3 && gone.into_inner() > requests / 6);
    // 1. All memory is freed, that of clients which went away included
    let nobody = |s: &Server| {
        ["vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc", "sluice:states_in_use"]
            .iter()
            .all(|name| s.metric(name) == 0.0)
    };
    server.wait_until("nothing is held", nobody);
    // 2. It never took more than it may
    let peak = memory_of(server.child.id(), "VmHWM");
    assert!(peak <= budget, "{peak} held, {budget} allowed");
    // 3. A request alone has the same answer as among the others
    for (body, answer) in answers.into_inner().unwrap().iter().take(40) {
        assert_eq!(ask(&server, &serde_json::from_str(body).unwrap()), *answer, "{body}");
    }
    assert_eq!(agent().get(server.url("/health")).call().unwrap().status().as_u16(), 200);
}
