//! Badly behaved clients: they read nothing, send slowly or never, come in crowds, send too much. None of them delays others, or the server's end.

use crate::support;

use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use support::server::Server;
use support::{demo, sluice};
use tempfile::TempDir;

/// A limit that fails a test which would otherwise wait forever.
const FOR_EVER: Duration = Duration::from_secs(90);

fn head(line: &str, length: usize) -> String {
    format!("{line} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n")
}

/// A server on a Unix socket, whose buffers are small.
struct OnSocket {
    server: Server,
    path: PathBuf,
    _folder: TempDir,
}

impl OnSocket {
    fn start(flags: &[&str]) -> OnSocket {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let mut command = sluice(&["serve", "--unix-socket", path.to_str().unwrap()]);
        command.args(flags);
        OnSocket { server: Server::of(command), path, _folder: folder }
    }

    fn send(&self, line: &str, body: &Value) -> UnixStream {
        let mut stream = UnixStream::connect(&self.path).unwrap();
        stream.set_read_timeout(Some(FOR_EVER)).unwrap();
        let body = if body.is_null() { String::new() } else { body.to_string() };
        stream.write_all((head(line, body.len()) + &body).as_bytes()).unwrap();
        stream
    }

    /// Headers and body.
    fn ask(&self, line: &str, body: &Value) -> String {
        let mut answer = String::new();
        self.send(line, body).read_to_string(&mut answer).unwrap();
        answer
    }

    /// Requests an answer of this many tokens, two kilobytes each, and reads nothing of it.
    fn stuck(&self, model: &str, tokens: usize) -> UnixStream {
        let body = json!({
            "model": model, "messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": tokens,
            "ignore_eos": true, "stream": true, "logprobs": true, "top_logprobs": 20, "seed": 1,
        });
        self.send("POST /v1/chat/completions", &body)
    }

    fn metric(&self, name: &str) -> Option<f64> {
        let text = self.ask("GET /metrics", &Value::Null);
        let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        value.map(|value| value.parse().unwrap())
    }

    fn wait_for(&self, name: &str, value: f64) {
        let begun = Instant::now();
        while self.metric(name) != Some(value) {
            assert!(begun.elapsed() < FOR_EVER, "{name} is never {value}");
            thread::sleep(Duration::from_millis(10));
        }
    }

    /// Whether it ends well when it is told to stop.
    fn stops(mut self) -> bool {
        let pid = self.server.child.id().to_string();
        assert!(Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
        let begun = Instant::now();
        loop {
            if let Some(status) = self.server.child.try_wait().unwrap() {
                return status.success();
            }
            assert!(begun.elapsed() < FOR_EVER, "it never ends");
            thread::sleep(Duration::from_millis(10));
        }
    }
}

#[test]
fn an_answer_that_nobody_reads_is_given_up() {
    let Some(demo) = demo() else { return };
    let server = OnSocket::start(&[&demo, "--write-timeout", "1"]);
    let mut stuck = server.stuck("any", 3900);
    // When too much of it waits, not when all of it is computed.
    server.wait_for("vllm:request_success_total{finished_reason=\"abort\"}", 1.0);
    assert_eq!(server.metric("vllm:request_success_total{finished_reason=\"length\"}"), None);
    server.wait_for("vllm:num_requests_running", 0.0);
    // The connection is closed as well.
    server.wait_for("sluice:connections", 1.0);
    let mut read = Vec::new();
    stuck.read_to_end(&mut read).unwrap();
    assert!(read.starts_with(b"HTTP/1.1 200") && !String::from_utf8_lossy(&read).contains("[DONE]"));
}

#[test]
fn a_client_who_reads_late_has_all_of_a_short_answer_and_is_told_where_a_long_one_was_cut() {
    let Some(demo) = demo() else { return };
    let server = OnSocket::start(&[&demo]);
    let ended = |stream: &mut UnixStream| {
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        (answer.contains("\"finish_reason\":\"length\""), answer.contains("read too slowly"))
    };
    let mut short = server.stuck("any", 100);
    let mut long = server.stuck("any", 3900);
    server.wait_for("vllm:request_success_total{finished_reason=\"length\"}", 1.0);
    server.wait_for("vllm:request_success_total{finished_reason=\"abort\"}", 1.0);
    assert_eq!(ended(&mut short), (true, false));
    assert_eq!(ended(&mut long), (false, true));
}

/// Two folders of the demo model.
fn two_models() -> Option<TempDir> {
    let demo = demo()?;
    let folder = tempfile::tempdir().unwrap();
    for name in ["first", "second"] {
        let own = folder.path().join(name);
        fs::create_dir(&own).unwrap();
        for entry in fs::read_dir(&demo).unwrap() {
            let entry = entry.unwrap();
            symlink(entry.path(), own.join(entry.file_name())).unwrap();
        }
    }
    Some(folder)
}

#[test]
fn clients_who_read_nothing_hold_up_neither_another_model_nor_the_end() {
    let Some(models) = two_models() else { return };
    let server = OnSocket::start(&["--models", models.path().to_str().unwrap()]);
    // More than any buffer holds, and less.
    let _stuck = [server.stuck("first", 3900), server.stuck("first", 150)];
    server.wait_for("vllm:num_requests_running", 0.0);
    let body = json!({"model": "second", "prompt": "One day", "max_tokens": 3, "temperature": 0});
    let answer = server.ask("POST /v1/completions", &body);
    assert!(answer.starts_with("HTTP/1.1 200") && answer.contains("\"model\":\"second\""), "{answer}");
    let _stuck_too = server.stuck("second", 3900);
    assert!(server.stops());
}

#[test]
fn requests_that_are_not_over_in_time_end_with_the_server() {
    let Some(demo) = demo() else { return };
    let server = OnSocket::start(&[&demo, "--grace", "0", "--parallel", "1"]);
    let body = json!({"prompt": "Once", "max_tokens": 4000, "ignore_eos": true, "stream": true});
    let [mut running, mut waiting] = [0, 1].map(|_| server.send("POST /v1/completions", &body));
    server.wait_for("vllm:num_requests_running", 1.0);
    server.wait_for("vllm:num_requests_waiting", 1.0);
    assert!(server.stops());
    for stream in [&mut running, &mut waiting] {
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        let whole = answer.contains("\"finish_reason\":\"length\"");
        assert!(answer.contains("the server is shutting down") && !whole, "{answer}");
    }
}

/// A server on TCP, and its address.
fn on_tcp(flags: &[&str]) -> Option<(Server, String)> {
    let server = Server::start(flags)?;
    let address = server.address.strip_prefix("http://").unwrap().to_owned();
    Some((server, address))
}

fn connect(address: &str, text: &str) -> TcpStream {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(FOR_EVER)).unwrap();
    stream.write_all(text.as_bytes()).unwrap();
    stream
}

/// Everything until the other end closes the connection.
fn rest(mut stream: TcpStream) -> String {
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

#[test]
fn who_says_nothing_or_never_ends_its_headers_is_not_waited_for() {
    let Some((server, address)) = on_tcp(&["--header-timeout", "1"]) else { return };
    let silent = connect(&address, "");
    let half = connect(&address, "POST /v1/completions HTTP/1.1\r\nhost: loc");
    let idle = connect(&address, "GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n");
    assert_eq!((rest(silent), rest(half)), (String::new(), String::new()));
    assert!(rest(idle).starts_with("HTTP/1.1 200"));
    // Endless headers are refused, however fast they arrive.
    let mut endless = connect(&address, "GET / HTTP/1.1\r\nhost: localhost\r\n");
    let line = format!("x: {}\r\n", "y".repeat(1000));
    let sent = (0..1000).take_while(|_| endless.write_all(line.as_bytes()).is_ok()).count();
    assert!(sent < 1000 || endless.read(&mut [0; 16]).is_ok());
    assert_eq!(server.get("/health").0, 200);
}

#[test]
fn connections_beyond_the_limit_are_told_so() {
    let Some((server, address)) = on_tcp(&["--connections", "2"]) else { return };
    let open = [0, 1].map(|_| connect(&address, ""));
    let asked = "GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n";
    let answer = rest(connect(&address, asked));
    assert!(answer.starts_with("HTTP/1.1 503") && answer.contains("retry-after: 1\r\n"), "{answer}");
    assert!(answer.contains("2 connections are open already"), "{answer}");
    drop(open);
    let begun = Instant::now();
    while !rest(connect(&address, asked)).starts_with("HTTP/1.1 200") {
        assert!(begun.elapsed() < FOR_EVER, "connections that are closed count for ever");
    }
    drop(server);
}

#[test]
fn bodies_have_the_room_that_there_is_before_they_are_read() {
    let Some((server, address)) = on_tcp(&["--body-memory", "100k"]) else { return };
    // 1. A body that can never fit is refused before it arrives
    let answer = rest(connect(&address, &head("POST /v1/completions", 100_001)));
    assert!(answer.starts_with("HTTP/1.1 413") && answer.contains("more than 100000 bytes"), "{answer}");
    // 2. A body on its way takes all the memory
    let slow = connect(&address, &(head("POST /v1/completions", 100_000) + "{"));
    let small = json!({"prompt": "a", "max_tokens": 1}).to_string();
    let ask = || rest(connect(&address, &(head("POST /v1/completions", small.len()) + &small)));
    let begun = Instant::now();
    let mut answer = ask();
    // Whichever of the two was read first.
    while !answer.starts_with("HTTP/1.1 503") {
        assert!(answer.starts_with("HTTP/1.1 200") && begun.elapsed() < FOR_EVER, "{answer}");
        answer = ask();
    }
    assert!(answer.contains("retry-after: 1\r\n") && answer.contains("take all the memory"), "{answer}");
    // A request without a body needs no memory.
    assert_eq!(server.get("/v1/models").0, 200);
    // 3. The memory is freed when the client is gone; and a body of unknown length takes no more than it has
    drop(slow);
    assert!(ask().starts_with("HTTP/1.1 200"));
    let chunked =
        "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n";
    let one = format!("{chunked}{:x}\r\n{small}\r\n0\r\n\r\n", small.len());
    assert!(rest(connect(&address, &one)).starts_with("HTTP/1.1 200"));
}

#[test]
fn what_is_no_request_of_ours_is_said_so() {
    let Some((_server, address)) = on_tcp(&[]) else { return };
    let status = |text: &str| {
        let answer = rest(connect(&address, text));
        answer.split(' ').nth(1).and_then(|status| status.parse::<u16>().ok()).unwrap_or_else(|| panic!("{answer}"))
    };
    assert_eq!(status("GET /health HTTP/1.1\r\nconnection: close\r\n\r\n"), 400);
    assert_eq!(status("GET /health HTTP/1.0\r\n\r\n"), 200);
    let body = json!({"prompt": "a", "max_tokens": 1}).to_string();
    let post = |more: &str, body: &str| {
        let length = body.len();
        format!(
            "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {length}\r\n{more}\r\n{body}"
        )
    };
    assert_eq!(status(&post("content-encoding: gzip\r\n", &body)), 415);
    assert_eq!(status(&post("content-encoding: identity\r\n", &body)), 200);
}

#[test]
fn no_number_of_a_request_ends_the_engine() {
    let Some(server) = Server::start(&[]) else { return };
    for most in [6_u64, 1 << 62, u64::MAX] {
        let (status, answer) =
            server.post("/v1/completions", &json!({"prompt": "x", "max_tokens": 1, "logprobs": most}));
        assert_eq!((status, &answer["error"]["param"]), (400, &json!("logprobs")), "{answer}");
    }
    let body = json!({
        "prompt": "x", "max_tokens": u64::MAX, "logprobs": 5, "top_k": i64::MAX, "seed": i64::MIN, "n": 16, "stop": "a",
        "temperature": 2.0, "repetition_penalty": 1.5, "stop_token_ids": [u32::MAX],
    });
    assert_eq!(server.post("/v1/completions", &body).0, 200);
    assert_eq!(server.get("/health").0, 200);
    assert!(Path::new(&format!("/proc/{}", server.child.id())).exists());
}
