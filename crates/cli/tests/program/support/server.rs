//! Starts a server, and sends it requests over real connections.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;
use ureq::http::{HeaderMap, HeaderValue};

use super::{demo, sluice};

/// A running server and its address.
pub struct Server {
    pub child: Child,
    pub address: String,
    /// Its messages since it was ready.
    pub lines: Arc<Mutex<Vec<String>>>,
}

impl Server {
    /// `None`, with a note, without a demo model.
    pub fn start(flags: &[&str]) -> Option<Server> {
        let mut command = sluice(&["serve", &demo()?, "--port", "0"]);
        command.args(flags);
        Some(Server::of(command))
    }

    pub fn of(mut command: Command) -> Server {
        let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let mut before = String::new();
        let mut line = |part: &str| loop {
            let line = lines.next().unwrap_or_else(|| panic!("the server has ended: {before}")).unwrap();
            if line.contains(part) {
                return line;
            }
            before += &format!("{line}; ");
        };
        let address = line("listening on").split("listening on ").nth(1).unwrap().to_owned();
        line("ready");
        let said = Arc::new(Mutex::new(Vec::new()));
        let own = Arc::clone(&said);
        thread::spawn(move || lines.map_while(Result::ok).for_each(|line| own.lock().unwrap().push(line)));
        Server { child, address, lines: said }
    }

    pub fn url(&self, path: &str) -> String {
        format!("{}{path}", self.address)
    }

    pub fn get(&self, path: &str) -> (u16, String) {
        let mut response = agent().get(self.url(path)).call().unwrap();
        (response.status().as_u16(), response.body_mut().read_to_string().unwrap())
    }

    pub fn post(&self, path: &str, body: &Value) -> (u16, Value) {
        let mut response = agent().post(self.url(path)).send_json(body).unwrap();
        (response.status().as_u16(), response.body_mut().read_json().unwrap())
    }

    pub fn complete(&self, body: Value) -> Value {
        let (status, answer) = self.post("/v1/completions", &body);
        assert_eq!(status, 200, "{answer}");
        answer
    }

    /// The events of a streamed answer, except the last, which is `[DONE]`.
    pub fn stream(&self, path: &str, body: &Value) -> Vec<Value> {
        let mut response = agent().post(self.url(path)).send_json(body).unwrap();
        assert_eq!(response.headers()["content-type"], "text/event-stream");
        let text = response.body_mut().read_to_string().unwrap();
        let mut events: Vec<&str> = text.split("\n\n").filter(|e| !e.is_empty()).collect();
        assert_eq!(events.pop(), Some("data: [DONE]"), "{text}");
        events.iter().map(|e| serde_json::from_str(e.strip_prefix("data: ").unwrap()).unwrap()).collect()
    }

    /// Status, headers and body of the answer to a request with more headers.
    pub fn post_with(&self, path: &str, headers: &[(&str, &str)], body: &Value) -> (u16, HeaderMap, String) {
        let mut request = agent().post(self.url(path));
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let mut response = request.send_json(body).unwrap();
        let text = response.body_mut().read_to_string().unwrap();
        (response.status().as_u16(), response.headers().clone(), text)
    }

    /// The events of a streamed answer with named events; each is named by its type.
    pub fn named_events(&self, path: &str, body: &Value) -> Vec<Value> {
        let (status, headers, text) = self.post_with(path, &[], body);
        assert_eq!((status, &headers["content-type"]), (200, &HeaderValue::from_static("text/event-stream")), "{text}");
        let one = |event: &str| {
            let (name, data) = event.strip_prefix("event: ").unwrap().split_once("\ndata: ").unwrap();
            let value: Value = serde_json::from_str(data).unwrap();
            assert_eq!(value["type"], name);
            value
        };
        text.split("\n\n").filter(|e| !e.is_empty()).map(one).collect()
    }

    /// The lines of an answer that is streamed as lines of JSON.
    pub fn lines(&self, path: &str, body: &Value) -> Vec<Value> {
        let (status, headers, text) = self.post_with(path, &[], body);
        let media = HeaderValue::from_static("application/x-ndjson");
        assert_eq!((status, &headers["content-type"]), (200, &media), "{text}");
        assert!(text.ends_with('\n'), "{text}");
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    /// A metric of `/metrics`.
    pub fn metric(&self, name: &str) -> f64 {
        let text = self.get("/metrics").1;
        let line = text.lines().find(|l| l.strip_prefix(name).is_some_and(|rest| rest.starts_with(' ')));
        line.unwrap_or_else(|| panic!("no {name} in {text}")).rsplit(' ').next().unwrap().parse().unwrap()
    }

    pub fn wait_until(&self, what: &str, holds: impl Fn(&Server) -> bool) {
        let begun = Instant::now();
        while !holds(self) {
            assert!(begun.elapsed() < Duration::from_secs(60), "never: {what}");
            thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A client that treats error statuses like any other.
pub fn agent() -> ureq::Agent {
    ureq::Agent::config_builder().http_status_as_error(false).build().into()
}
