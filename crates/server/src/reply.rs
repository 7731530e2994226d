//! How an answer is sent, whatever its dialect: as one object, or as a stream of events. It is made by a task of its own, which takes what the engine says as it
//! comes and lets the model go at the end, whatever the client has read of it by then.

use std::convert::Infallible;
use std::future::poll_fn;
use std::io;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::Json;
use axum::body::{Body, Bytes};
use axum::http::header;
use axum::response::{IntoResponse, Response};
use futures_util::Stream;
use futures_util::stream::unfold;
use serde_json::Value;
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout, timeout_at};

use crate::answer::{Answer, Delta};
use crate::app::LoadedModel;
use crate::context::RequestContext;
use crate::error::ApiError;
use crate::outbox::{self, Outbox, Outgoing, Sent};
use crate::runtime::{Ticket, Update};

/// After so long without anything to say a stream gives a sign of life.
const SIGN_OF_LIFE: Duration = Duration::from_secs(10);

/// A request that the engine has.
pub struct Pending {
    pub ticket: Ticket,
    pub updates: UnboundedReceiver<Update>,
    pub answer: Answer,
    pub prompt_tokens: usize,
    /// In memory until the request is over.
    pub model: Arc<LoadedModel>,
    /// When it is given up.
    pub deadline: Option<Instant>,
    /// What waits for clients.
    pub outgoing: Arc<Outgoing>,
    /// Told what it came to.
    pub exchange: Option<Arc<RequestContext>>,
    /// Other prompts of the same request: their choices follow.
    pub beside: Vec<Pending>,
}

impl Drop for Pending {
    fn drop(&mut self) {
        if let Some(exchange) = &self.exchange {
            exchange.counted(self.prompt_tokens, self.answer.cached, self.answer.generated);
        }
    }
}

/// Tokens of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    pub prompt: usize,
    /// Those of the prompt that were there.
    pub cached: usize,
    /// Those of it that were not, and are from now on: all others but the last, which is always computed.
    pub written: usize,
    pub generated: usize,
}

/// What happens to a request.
enum Next {
    /// Its prompt is being computed.
    Begun,
    Delta(Delta),
    Over,
}

/// What makes texts of events, and objects, of a dialect's answers.
pub trait StreamEncoder: Send + 'static {
    /// What a stream is of.
    fn media_type(&self) -> &'static str {
        "text/event-stream"
    }
    /// What is sent at once.
    fn first(&mut self) -> String {
        String::new()
    }
    /// What is sent when it is known how much of the prompt was there; or before the first sign of life, where that takes long.
    fn begun(&mut self, _usage: Usage) -> String {
        String::new()
    }
    /// Events for a delta; also those that begin the choice, where it is its first.
    fn delta(&mut self, delta: &Delta) -> String;
    /// An event that says nothing, and that clients take for one.
    fn sign_of_life(&mut self) -> String;
    /// What ends the stream; `stopped_by` is the stop string that has ended the first choice.
    fn end(&mut self, usage: Usage, stopped_by: Option<&str>) -> String;
    /// What ends a stream in which something went wrong.
    fn failed(&mut self, error: &ApiError) -> String;
    /// Keeps a delta for [`Wire::whole`].
    fn gather(&mut self, delta: Delta);
    /// The whole answer.
    fn whole(&mut self, usage: Usage, stopped_by: Option<&str>) -> Value;
    /// An error in place of the whole answer, for which a good status was sent already.
    fn error(&self, error: &ApiError) -> Value;
}

impl Pending {
    pub fn usage(&self) -> Usage {
        let (prompt, cached, generated) = (self.prompt_tokens, self.answer.cached, self.answer.generated);
        let written = if self.model.keeps_prefixes { prompt.saturating_sub(cached + 1) } else { 0 };
        self.beside.iter().map(Pending::usage).fold(Usage { prompt, cached, written, generated }, |a, b| Usage {
            prompt: a.prompt + b.prompt,
            cached: a.cached + b.cached,
            written: a.written + b.written,
            generated: a.generated + b.generated,
        })
    }

    /// The next delta; `Ok(None)` after the last.
    pub async fn next(&mut self) -> Result<Option<Delta>, ApiError> {
        loop {
            match self.step().await? {
                Next::Begun => {}
                Next::Delta(delta) => return Ok(Some(delta)),
                Next::Over => return Ok(None),
            }
        }
    }

    async fn step(&mut self) -> Result<Next, ApiError> {
        let deadline = self.deadline.filter(|_| !self.beside.is_empty());
        let Some(deadline) = deadline else { return self.any_step().await };
        // Each poll of the steps begins them anew, with their own clocks.
        timeout_at(deadline, self.any_step()).await.unwrap_or_else(|_| Err(too_long()))
    }

    /// The step of whichever prompt has one.
    async fn any_step(&mut self) -> Result<Next, ApiError> {
        if self.beside.is_empty() {
            return self.own_step().await;
        }
        poll_fn(|cx| {
            let mut are_over = true;
            let mut first = self.answer.choices();
            match pin!(self.own_step()).poll(cx) {
                Poll::Ready(Ok(Next::Over)) => {}
                Poll::Pending => are_over = false,
                ready => return ready,
            }
            for pending in &mut self.beside {
                match pin!(pending.own_step()).poll(cx) {
                    Poll::Ready(Ok(Next::Over)) => {}
                    Poll::Pending => are_over = false,
                    Poll::Ready(Ok(Next::Delta(delta))) => {
                        return Poll::Ready(Ok(Next::Delta(Delta { choice: first + delta.choice, ..delta })));
                    }
                    ready => return ready,
                }
                first += pending.answer.choices();
            }
            if are_over { Poll::Ready(Ok(Next::Over)) } else { Poll::Pending }
        })
        .await
    }

    async fn own_step(&mut self) -> Result<Next, ApiError> {
        while !self.answer.is_over() {
            let update = match self.deadline {
                None => self.updates.recv().await,
                Some(deadline) => timeout_at(deadline, self.updates.recv()).await.map_err(|_| too_long())?,
            };
            let Some(update) = update else {
                let why = self.model.dead().unwrap_or_else(|| "it was told to".to_owned());
                return Err(ApiError::internal(format!("the engine has ended: {why}")));
            };
            let has_begun = matches!(update, Update::Begun { .. });
            let delta = self.answer.take(update).map_err(|e| ApiError::internal(format!("{e:#}")))?;
            if let Some(delta) = delta {
                if delta.stopped {
                    self.ticket.stop(delta.choice);
                }
                return Ok(Next::Delta(delta));
            }
            if has_begun {
                return Ok(Next::Begun);
            }
        }
        Ok(Next::Over)
    }
}

fn too_long() -> ApiError {
    ApiError::timed_out("the request took longer than this server allows")
}

/// Seconds since 1970.
pub fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs())
}

/// The answer, as the request wants it.
pub async fn send(pending: Pending, wire: impl StreamEncoder, streamed: bool) -> Response {
    if streamed { stream(pending, wire) } else { whole(pending, wire).await }
}

/// A task that ends when nobody waits for it any more.
struct Job<T>(JoinHandle<T>);

impl<T> Drop for Job<T> {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// A whole answer; or an error, and what is said of it where a good status was sent already.
type Gathered = Result<Value, Box<(Value, ApiError)>>;

async fn gather<W: StreamEncoder>(mut pending: Pending, mut wire: W) -> Gathered {
    loop {
        match pending.next().await {
            Ok(Some(delta)) => wire.gather(delta),
            Ok(None) => return Ok(wire.whole(pending.usage(), pending.answer.stopped_by(0))),
            Err(error) => return Err(Box::new((wire.error(&error), error))),
        }
    }
}

impl Job<Gathered> {
    async fn done(&mut self) -> Gathered {
        (&mut self.0).await.unwrap_or_else(|e| {
            let error = ApiError::internal(e.to_string());
            Err(Box::new((error.to_json(), error)))
        })
    }
}

/// The answer as one object. Where it takes long, what comes first is white space, so that nobody takes the connection for dead.
async fn whole(pending: Pending, wire: impl StreamEncoder) -> Response {
    let mut job = Job(tokio::spawn(gather(pending, wire)));
    match timeout(SIGN_OF_LIFE, job.done()).await {
        Ok(Ok(value)) => Json(value).into_response(),
        Ok(Err(failed)) => failed.1.into_response(),
        Err(_) => {
            let body = unfold(Some(job), |job| async move {
                let mut job = job?;
                match timeout(SIGN_OF_LIFE, job.done()).await {
                    Ok(result) => {
                        let value = result.unwrap_or_else(|failed| failed.0);
                        Some((Ok::<_, Infallible>(value.to_string()), None))
                    }
                    Err(_) => Some((Ok(" ".to_owned()), Some(job))),
                }
            });
            ([(header::CONTENT_TYPE, "application/json")], Body::from_stream(body)).into_response()
        }
    }
}

/// The answer as events. Headers go out at once.
fn stream(pending: Pending, wire: impl StreamEncoder) -> Response {
    let headers = [(header::CONTENT_TYPE, wire.media_type()), (header::CACHE_CONTROL, "no-cache")];
    let (outbox, sent) = outbox::pair(&pending.outgoing);
    let events = Events { sent, _job: Job(tokio::spawn(fill(pending, wire, outbox))) };
    (headers, Body::from_stream(events)).into_response()
}

/// The events of an answer as its client reads them. When the client goes away, so does what makes them.
struct Events {
    sent: Sent,
    _job: Job<()>,
}

impl Stream for Events {
    type Item = io::Result<Bytes>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<io::Result<Bytes>>> {
        Pin::new(&mut self.sent).poll_next(cx)
    }
}

/// An event without a name.
pub fn data(value: &Value) -> String {
    format!("data: {value}\n\n")
}

/// An event that is named by its `type`.
pub fn event(value: &Value) -> String {
    format!("event: {}\ndata: {value}\n\n", value["type"].as_str().unwrap_or("message"))
}

/// Makes events of what comes, until it is over or the client is too far behind.
async fn fill<W: StreamEncoder>(mut pending: Pending, mut wire: W, outbox: Outbox) {
    let mut text = wire.first();
    let mut has_begun = false;
    loop {
        if !text.is_empty() && !outbox.push(&text) {
            // The rest is computed for nobody.
            drop(pending);
            let error = ApiError::timed_out("the answer was read too slowly: too much of it waited to be sent");
            return outbox.finish(&wire.failed(&error));
        }
        text.clear();
        let next = timeout(SIGN_OF_LIFE, pending.step()).await;
        let is_failed = matches!(next, Ok(Err(_)));
        if !is_failed && !std::mem::replace(&mut has_begun, true) {
            text += &wire.begun(pending.usage());
        }
        match next {
            Err(_) => text += &wire.sign_of_life(),
            Ok(Ok(Next::Begun)) => {}
            Ok(Ok(Next::Delta(delta))) => text += &wire.delta(&delta),
            Ok(Ok(Next::Over)) => {
                text += &wire.end(pending.usage(), pending.answer.stopped_by(0));
                drop(pending);
                return outbox.finish(&text);
            }
            Ok(Err(error)) => {
                drop(pending);
                return outbox.finish(&(text + &wire.failed(&error)));
            }
        }
    }
}
