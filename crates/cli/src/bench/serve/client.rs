//! A client for OpenAI's API that reads streamed answers and records when each part came. It opens a connection for each request, as most clients do for their first.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use http_body_util::{BodyExt, Full};
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::http1;
use hyper::{Method, Request, Response, Uri};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};
use tokio::time::timeout;

/// Most bytes of one event, or of a body that is not a stream.
const MOST: usize = 16 << 20;

#[derive(Clone, Debug)]
enum Address {
    Tcp(String, u16),
    Unix(PathBuf),
}

/// A server, and how long to wait for it.
#[derive(Clone, Debug)]
pub struct Client {
    address: Address,
    /// Prefix of each path: `/api` of `http://host:port/api`.
    prefix: String,
    patience: Duration,
}

/// A streamed answer.
#[derive(Clone, Debug)]
pub struct StreamedAnswer {
    /// When the request was sent.
    pub sent: Instant,
    /// When each part with text came. If there was none, when the answer ended.
    pub parts: Vec<Instant>,
    /// When the answer was complete.
    pub done: Instant,
    /// As the server counts; `None` if it does not say.
    pub prompt_tokens: Option<usize>,
    pub generated_tokens: Option<usize>,
    pub cached_tokens: Option<usize>,
}

impl Client {
    /// `http://HOST:PORT`, with or without a path, or `unix:PATH`.
    ///
    /// # Errors
    /// Addresses of other kinds.
    pub fn new(address: &str, patience: Duration) -> Result<Client> {
        if let Some(path) = address.strip_prefix("unix:") {
            return Ok(Client { address: Address::Unix(path.into()), prefix: String::new(), patience });
        }
        let no = || anyhow!("--base-url {address}: must be http://HOST:PORT or unix:PATH");
        let uri: Uri = address.parse().map_err(|_| no())?;
        ensure!(uri.scheme_str() == Some("http"), no());
        let host = uri.host().ok_or_else(no)?.trim_matches(['[', ']']).to_owned();
        let prefix = uri.path().trim_end_matches('/').trim_end_matches("/v1").to_owned();
        Ok(Client { address: Address::Tcp(host, uri.port_u16().unwrap_or(80)), prefix, patience })
    }

    /// The name of the server's first model.
    pub async fn model(&self) -> Result<String> {
        let asked = async {
            let response = self.send(Method::GET, "/v1/models", None).await?;
            let status = response.status();
            let text = whole(response).await?;
            ensure!(status.is_success(), "/v1/models: {}", refusal(status, &text));
            let models: Value = serde_json::from_str(&text).context("/v1/models is not JSON")?;
            let name = models["data"][0]["id"].as_str();
            name.map(str::to_owned).context("/v1/models lists no model: name one with --model")
        };
        timeout(self.patience, asked).await.map_err(|_| anyhow!("no answer in time"))?
    }

    /// Sends a request for a streamed answer and reads it to the end; calls `part` for each part with text.
    ///
    /// # Errors
    /// Errors that the server reports; an answer that ends early or takes too long.
    pub async fn stream(&self, path: &str, mut body: Value, part: impl FnMut(Instant)) -> Result<StreamedAnswer> {
        body["stream"] = true.into();
        body["stream_options"] = json!({"include_usage": true});
        let read = self.read(path, body.to_string(), part);
        timeout(self.patience, read).await.map_err(|_| anyhow!("no answer in {} s", self.patience.as_secs()))?
    }

    async fn read(&self, path: &str, body: String, mut part: impl FnMut(Instant)) -> Result<StreamedAnswer> {
        let sent = Instant::now();
        let mut response = self.send(Method::POST, path, Some(body)).await?;
        if !response.status().is_success() {
            let status = response.status();
            bail!(refusal(status, &whole(response).await?));
        }
        let mut answer = StreamedAnswer {
            sent,
            parts: Vec::new(),
            done: sent,
            prompt_tokens: None,
            generated_tokens: None,
            cached_tokens: None,
        };
        let (mut held, mut finished) = (Vec::<u8>::new(), false);
        while let Some(frame) = response.frame().await {
            let Ok(data) = frame?.into_data() else { continue };
            let now = Instant::now();
            held.extend_from_slice(&data);
            let mut from = 0;
            while let Some(len) = held[from..].iter().position(|b| *b == b'\n') {
                let line = held[from..from + len].trim_ascii_end();
                from += len + 1;
                let Some(data) = line.strip_prefix(b"data:") else { continue };
                let data = data.trim_ascii();
                if data == b"[DONE]" {
                    finished = true;
                    continue;
                }
                let event: Value = serde_json::from_slice(data).context("an event of the stream is not JSON")?;
                if let Some(error) = event.get("error") {
                    bail!("{}", error["message"].as_str().unwrap_or("an error without a message"));
                }
                let ends = event["choices"][0]["finish_reason"].is_string();
                finished |= ends;
                if has_text(&event) || (ends && answer.parts.is_empty()) {
                    answer.parts.push(now);
                    part(now);
                }
                answer.note_usage(&event["usage"]);
            }
            held.drain(..from);
            ensure!(held.len() <= MOST, "an event of the stream has more than {MOST} bytes");
        }
        ensure!(finished, "the stream ended early");
        ensure!(!answer.parts.is_empty(), "an answer without a token");
        answer.done = Instant::now();
        Ok(answer)
    }

    async fn send(&self, method: Method, path: &str, body: Option<String>) -> Result<Response<Incoming>> {
        let (host, stream): (String, Box<dyn Stream>) = match &self.address {
            Address::Tcp(host, port) => {
                let stream = TcpStream::connect((host.as_str(), *port)).await;
                let stream = stream.with_context(|| format!("cannot connect to {host}:{port}"))?;
                stream.set_nodelay(true)?;
                (format!("{host}:{port}"), Box::new(stream))
            }
            Address::Unix(path) => {
                let stream = UnixStream::connect(path).await;
                let stream = stream.with_context(|| format!("cannot connect to {}", path.display()))?;
                ("localhost".to_owned(), Box::new(stream))
            }
        };
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
        // Drives the connection as long as the response is held; its errors also appear there.
        tokio::spawn(connection);
        let request = Request::builder()
            .method(method)
            .uri(format!("{}{path}", self.prefix))
            .header("host", host)
            .header("content-type", "application/json")
            .body(Full::new(Bytes::from(body.unwrap_or_default())))?;
        Ok(sender.send_request(request).await?)
    }
}

trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}

impl StreamedAnswer {
    fn note_usage(&mut self, usage: &Value) {
        let count = |value: &Value| value.as_u64().map(|n| n as usize);
        self.prompt_tokens = count(&usage["prompt_tokens"]).or(self.prompt_tokens);
        self.generated_tokens = count(&usage["completion_tokens"]).or(self.generated_tokens);
        self.cached_tokens = count(&usage["prompt_tokens_details"]["cached_tokens"]).or(self.cached_tokens);
    }
}

/// Whether an event of either endpoint adds text to the answer; thoughts count.
fn has_text(event: &Value) -> bool {
    let choice = &event["choices"][0];
    let delta = &choice["delta"];
    let texts = [&choice["text"], &delta["content"], &delta["reasoning_content"], &delta["reasoning"]];
    texts.iter().any(|t| t.as_str().is_some_and(|t| !t.is_empty()))
}

/// The body of a response that is not a stream.
async fn whole(mut response: Response<Incoming>) -> Result<String> {
    let mut bytes = Vec::new();
    while let Some(frame) = response.frame().await {
        if let Ok(data) = frame?.into_data() {
            bytes.extend_from_slice(&data);
        }
        ensure!(bytes.len() <= MOST, "a message of more than {MOST} bytes");
    }
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// Why the server refused the request, in its own words if it has any.
fn refusal(status: hyper::StatusCode, text: &str) -> String {
    let value: Value = serde_json::from_str(text).unwrap_or_default();
    let said = value["error"]["message"].as_str().map_or_else(|| text.trim().to_owned(), str::to_owned);
    let said: String = said.chars().take(200).collect();
    format!("{status}: {said}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_those_of_servers_and_sockets() {
        let of = |address| Client::new(address, Duration::ZERO);
        let tcp = of("http://[::1]:8080/api/v1/").unwrap();
        assert!(matches!(&tcp.address, Address::Tcp(host, 8080) if host == "::1"), "{tcp:?}");
        assert_eq!(tcp.prefix, "/api");
        assert!(matches!(of("http://localhost").unwrap().address, Address::Tcp(_, 80)));
        assert!(matches!(of("unix:/tmp/x").unwrap().address, Address::Unix(_)));
        for bad in ["https://localhost", "localhost:8080", "", "http://"] {
            assert!(of(bad).unwrap_err().to_string().contains("unix:PATH"), "{bad}");
        }
    }

    #[test]
    fn parts_are_what_has_text() {
        let text = json!({"choices": [{"text": "a"}]});
        let thought = json!({"choices": [{"delta": {"reasoning_content": "hm"}}]});
        assert!(has_text(&text) && has_text(&thought));
        for empty in [json!({"choices": []}), json!({"choices": [{"delta": {"role": "assistant", "content": ""}}]})] {
            assert!(!has_text(&empty), "{empty}");
        }
    }

    #[test]
    fn a_refusal_is_said_in_the_servers_words() {
        let status = hyper::StatusCode::BAD_REQUEST;
        assert_eq!(refusal(status, r#"{"error": {"message": "too long"}}"#), "400 Bad Request: too long");
        assert_eq!(refusal(status, "no\n"), "400 Bad Request: no");
    }
}
