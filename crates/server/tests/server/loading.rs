//! What a server answers before its model is loaded, and if it can never be.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::{Mutex, mpsc};
use std::thread;

use sluice_server::{Access, Bound, Limits, ModelFacts, Offer, Server, Settings};

/// Status and body.
fn get(address: &str, path: &str) -> (u16, String) {
    ask(address, &format!("GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"))
}

fn ask(address: &str, request: &str) -> (u16, String) {
    let mut stream = TcpStream::connect(address.strip_prefix("http://").unwrap()).unwrap();
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
}

#[test]
fn a_server_answers_while_its_model_is_loaded_and_ends_where_there_is_none() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let bound = runtime.block_on(Bound::tcp("127.0.0.1", 0)).unwrap();
    let address = bound.address().unwrap();
    let (go_on, wait) = mpsc::channel::<()>();
    let settings = Settings {
        limits: Limits::default(),
        access: Access::default(),
        request_timeout: None,
        idle_unload: None,
        log_requests: false,
    };
    let server = thread::spawn(move || {
        let wait = Mutex::new(wait);
        let load = move || {
            wait.lock().unwrap().recv().unwrap();
            anyhow::bail!("the weights are gone")
        };
        let offer = Offer {
            name: "model".into(),
            context: 10,
            style: None,
            facts: ModelFacts::default(),
            load: Box::new(load),
        };
        let server = Server::new(bound, settings, vec![offer], |_| panic!("it is not ready"));
        runtime.block_on(server.run(std::future::pending()))
    });
    let (status, body) = get(&address, "/health");
    assert_eq!((status, body.contains("loading")), (503, true), "{body}");
    assert_eq!(get(&address, "/v1/models").0, 503);
    assert_eq!(get(&address, "/metrics").0, 200);
    assert_eq!(get(&address, "/nowhere").0, 404);
    // Anthropic's clients get it in their own format.
    let (status, body) = ask(
        &address,
        "GET /v1/models HTTP/1.1\r\nhost: localhost\r\nanthropic-version: 2023-06-01\r\nconnection: close\r\n\r\n",
    );
    assert_eq!((status, body.contains("overloaded_error")), (503, true), "{body}");
    let body = r#"{"prompt": "a"}"#;
    let length = body.len();
    let request = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n{body}"
    );
    assert_eq!(ask(&address, &request).0, 503);
    go_on.send(()).unwrap();
    let error = server.join().unwrap().unwrap_err();
    assert_eq!(error.to_string(), "the weights are gone");
}
