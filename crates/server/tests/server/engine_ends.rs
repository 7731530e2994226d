//! An engine that fails: here by a panic in the middle of a step, as if its device were gone.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use sluice_conformance::{Checker, Spoilt};
use sluice_engine::text::ModelText;
use sluice_engine::{Cpu, Engine, Options};
use sluice_server::{Access, Bound, Limits, ModelFacts, Offer, Server, Settings};

const WHY: &str = "the device is gone";

/// The demo model on a backend that panics in the first step after `panics` is set.
fn load(panics: &Arc<AtomicBool>) -> anyhow::Result<(Engine, ModelText)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/demo");
    let options = Options { threads: 1, max_sequences: 1, ..Options::for_this_machine()? };
    let engine = Engine::open_on(&folder, options, &|options| {
        let checker = Checker::new(Box::new(Cpu::new(options.isa, options.threads, options.activations)?));
        let panics = Arc::clone(panics);
        checker.log().lock().unwrap().spoil = Some(Box::new(move |_| {
            assert!(!panics.load(Ordering::SeqCst), "{WHY}");
            Spoilt::default()
        }));
        Ok(Box::new(checker))
    })?;
    Ok((engine, ModelText::load(&folder, None)?))
}

fn send(address: &str, head: &str, body: &str) -> TcpStream {
    let mut stream = TcpStream::connect(address.strip_prefix("http://").unwrap()).unwrap();
    // A client that is never answered fails instead of waiting forever.
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let length = body.len();
    let head = format!("{head} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n");
    stream.write_all((head + body).as_bytes()).unwrap();
    stream
}

/// Status and body.
fn answer(mut stream: TcpStream) -> (u16, String) {
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
}

fn get(address: &str, path: &str) -> (u16, String) {
    answer(send(address, &format!("GET {path}"), ""))
}

fn complete(address: &str, stream: bool) -> TcpStream {
    let body = format!(r#"{{"prompt":"Once","max_tokens":3000,"ignore_eos":true,"stream":{stream}}}"#);
    send(address, "POST /v1/completions", &body)
}

fn wait_until(address: &str, path: &str, holds: impl Fn(u16, &str) -> bool) {
    while !matches!(get(address, path), (status, body) if holds(status, &body)) {
        thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn an_engine_that_panics_is_told_to_all_who_wait_and_ends_the_server() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let bound = runtime.block_on(Bound::tcp("127.0.0.1", 0)).unwrap();
    let address = bound.address().unwrap();
    let settings = Settings {
        limits: Limits { queue: 2, ..Limits::default() },
        access: Access::default(),
        request_timeout: None,
        idle_unload: None,
        log_requests: false,
    };
    let panics = Arc::new(AtomicBool::new(false));
    let own = Arc::clone(&panics);
    let offer = Offer {
        name: "demo".into(),
        context: 4096,
        style: None,
        facts: ModelFacts::default(),
        load: Box::new(move || load(&own)),
    };
    let server = thread::spawn(move || {
        let server = Server::new(bound, settings, vec![offer], |_| ());
        runtime.block_on(server.run(std::future::pending()))
    });
    wait_until(&address, "/health", |status, _| status == 200);
    // 1. One request is being answered, and two wait
    let mut running = complete(&address, true);
    let mut begun = [0; 4096];
    while !String::from_utf8_lossy(&begun).contains("data:") {
        let _ = running.read(&mut begun).unwrap();
    }
    let waiting = [complete(&address, true), complete(&address, false)];
    wait_until(&address, "/metrics", |_, text| text.contains("vllm:num_requests_waiting 2\n"));
    assert_eq!(answer(complete(&address, false)).0, 429);
    // 2. The health check reports the failure at once, and so do later requests
    panics.store(true, Ordering::SeqCst);
    wait_until(&address, "/health", |status, body| {
        assert!(status == 200 || body.contains(WHY), "{status}: {body}");
        status == 503
    });
    for _ in 0..4 {
        let (status, body) = answer(complete(&address, false));
        assert_eq!((status, body.contains(WHY)), (503, true), "{body}");
    }
    wait_until(&address, "/metrics", |_, text| text.contains("vllm:num_requests_waiting 0\n"));
    // 3. Nobody waits forever
    let mut rest = String::new();
    running.read_to_string(&mut rest).unwrap();
    assert!(rest.contains(WHY) && !rest.contains("\"finish_reason\":\"length\""), "{rest}");
    let [streamed, whole] = waiting.map(answer);
    assert!(streamed.0 == 200 && streamed.1.contains(WHY), "{streamed:?}");
    assert!(whole.0 == 500 && whole.1.contains(WHY), "{whole:?}");
    // 4. The server ends
    let error = server.join().unwrap().unwrap_err();
    assert!(error.to_string().contains(WHY), "{error}");
}
