//! HTTP for object_store: each call runs on the thread that makes it, by its deadline. What went wrong is left for that thread, in words without URLs, headers or bodies,
//! since stores quote keys in their errors.

use std::cell::{Cell, RefCell};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use bytes::Bytes;
use http_body_util::BodyExt;
use object_store::ClientOptions;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpResponseBody, HttpService,
};
use sluice_cache::remote::StoreError;
use ureq::Agent;
use ureq::http::request::Parts;
use ureq::http::{Request, Response};

/// A connection to a machine in reach takes far less.
const CONNECT: Duration = Duration::from_secs(2);
/// Answers that are no objects: lists, tokens, errors.
const MOST_OTHER: u64 = 16 << 20;
/// Connections that are kept.
const IDLE: usize = 32;

/// The limits of a call, and what has gone wrong.
struct Call {
    until: Cell<Option<Instant>>,
    most: Cell<u64>,
    error: RefCell<Option<StoreError>>,
}

thread_local! {
    static CALL: Call = const { Call { until: Cell::new(None), most: Cell::new(MOST_OTHER), error: RefCell::new(None) } };
}

/// Runs `call` on this thread, with a deadline and a limit of bytes for HTTP. Also returns what HTTP made of it, if it went wrong there.
pub(crate) fn within<T>(patience: Duration, most: u64, call: impl FnOnce() -> T) -> (T, Option<StoreError>) {
    CALL.with(|limits| {
        limits.until.set(Some(Instant::now() + patience));
        limits.most.set(most.max(MOST_OTHER));
        limits.error.take();
    });
    let done = call();
    (done, CALL.with(|limits| limits.error.take()))
}

fn note(error: StoreError) {
    CALL.with(|limits| *limits.error.borrow_mut() = Some(error));
}

#[derive(Debug)]
pub(crate) struct Connector;

#[derive(Debug)]
struct Client(Agent);

impl HttpConnector for Connector {
    fn connect(&self, _options: &ClientOptions) -> object_store::Result<HttpClient> {
        let config = Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .timeout_connect(Some(CONNECT))
            .max_idle_connections(IDLE)
            .max_idle_connections_per_host(IDLE)
            .user_agent(concat!("sluice/", env!("CARGO_PKG_VERSION")))
            .build();
        Ok(HttpClient::new(Client(config.new_agent())))
    }
}

#[async_trait]
impl HttpService for Client {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let (parts, body) = request.into_parts();
        // It is in memory, in one piece.
        let body = body.collect().await?.to_bytes();
        self.run(parts, &body).map_err(|e| {
            let (kind, error) = words(&e);
            note(error);
            // What ureq says may have a URL.
            HttpError::new(kind, StoreError::Failed("no answer over HTTP".into()))
        })
    }
}

impl Client {
    /// Sends a request and reads all of the answer.
    fn run(&self, parts: Parts, body: &[u8]) -> Result<HttpResponse, ureq::Error> {
        let (left, most) = CALL.with(|limits| (limits.until.get(), limits.most.get()));
        let left = left.map_or(CONNECT, |until| until.saturating_duration_since(Instant::now()));
        if left.is_zero() {
            return Err(ureq::Error::Timeout(ureq::Timeout::Global));
        }
        let sent = match body.is_empty() {
            true => self.send(Request::from_parts(parts, ()), left),
            false => self.send(Request::from_parts(parts, body), left),
        };
        let (parts, mut body) = sent?.into_parts();
        if !parts.status.is_success() && parts.status.as_u16() != 404 {
            note(match parts.status.as_u16() {
                code @ (401 | 403) => StoreError::Denied(format!("HTTP {code}")),
                408 | 504 => StoreError::Timeout,
                code => StoreError::Failed(format!("HTTP {code}")),
            });
        }
        let bytes = body.with_config().limit(most).read_to_vec()?;
        Ok(Response::from_parts(parts, HttpResponseBody::from(Bytes::from(bytes))))
    }

    fn send(
        &self,
        request: Request<impl ureq::AsSendBody>,
        left: Duration,
    ) -> Result<Response<ureq::Body>, ureq::Error> {
        self.0.run(self.0.configure_request(request).timeout_global(Some(left)).build())
    }
}

fn words(e: &ureq::Error) -> (HttpErrorKind, StoreError) {
    let failed = |what: &str| StoreError::Failed(what.into());
    match e {
        ureq::Error::Timeout(_) => (HttpErrorKind::Timeout, StoreError::Timeout),
        ureq::Error::HostNotFound => (HttpErrorKind::Connect, failed("host not found")),
        ureq::Error::ConnectionFailed => (HttpErrorKind::Connect, failed("no connection")),
        ureq::Error::Io(e) if e.kind() == std::io::ErrorKind::TimedOut => (HttpErrorKind::Timeout, StoreError::Timeout),
        ureq::Error::Io(e) => (HttpErrorKind::Interrupted, StoreError::Failed(e.kind().to_string())),
        ureq::Error::BodyExceedsLimit(limit) => (HttpErrorKind::Unknown, StoreError::TooLarge(limit.saturating_add(1))),
        ureq::Error::Rustls(_) | ureq::Error::Tls(_) => (HttpErrorKind::Unknown, failed("no secure connection")),
        _ => (HttpErrorKind::Interrupted, failed("no proper answer over HTTP")),
    }
}
