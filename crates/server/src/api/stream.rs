//! How an answer is sent, in any dialect: as one object, or as a stream of events. A separate task makes it. The task takes updates as they come and frees the
//! model at the end, however much the client has read by then.

use std::convert::Infallible;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::header;
use axum::response::{IntoResponse, Response};
use futures_util::Stream;
use futures_util::stream::unfold;
use serde_json::Value;
use tokio::task::JoinHandle;
use tokio::time::timeout;

use crate::api::answer::Delta;
use crate::api::pending::{Pending, Step, Usage};
use crate::http::error::ApiError;
use crate::http::outbox::{self, KeptBytes, Outbox, OutboxReader};

/// An answer that has been silent for this long sends a keep-alive.
const KEEP_ALIVE: Duration = Duration::from_secs(10);

/// Words answers in a dialect. For a stream, [`send`] calls `opening`, `started`, `delta` for each delta, and `end` or `failed`; in between, `keep_alive`. For a
/// whole answer it calls `collect_delta` for each delta, and `complete`.
pub trait StreamEncoder: Send + 'static {
    /// Content type of a stream.
    fn media_type(&self) -> &'static str {
        "text/event-stream"
    }
    /// Sent at once.
    fn opening(&mut self) -> String {
        String::new()
    }
    /// Sent once the number of cached tokens is known, or before the first keep-alive if that comes earlier.
    fn started(&mut self, _usage: Usage) -> String {
        String::new()
    }
    /// Events for a delta. The first delta of a choice includes the events that start it.
    fn delta(&mut self, delta: &Delta) -> String;
    /// An event that clients accept and that has no content.
    fn keep_alive(&mut self) -> String;
    /// Ends the stream. `stopped_by`: the stop string that has ended the first choice.
    fn end(&mut self, usage: Usage, stopped_by: Option<&str>) -> String;
    /// Ends a stream with an error.
    fn failed(&mut self, error: &ApiError) -> String;
    /// Keeps a delta for [`StreamEncoder::complete`].
    fn collect_delta(&mut self, delta: Delta);
    /// Bytes of log-probabilities that are kept until the answer is complete.
    fn kept_bytes(&self) -> usize {
        0
    }
    /// The whole answer as one object: its JSON.
    fn complete(&mut self, usage: Usage, stopped_by: Option<&str>) -> String;
    /// The error as an object, for when status 200 has already been sent.
    fn error(&self, error: &ApiError) -> Value;
}

/// Sends the answer, as a stream or whole.
pub async fn send(pending: Pending, encoder: impl StreamEncoder, streamed: bool) -> Response {
    if streamed { stream(pending, encoder) } else { whole(pending, encoder).await }
}

/// A task that is aborted when this is dropped.
struct AbortOnDrop<T>(JoinHandle<T>);

impl<T> Drop for AbortOnDrop<T> {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Counts what an encoder keeps.
///
/// # Errors
/// When it, or all encoders together, keep more than there is room for.
fn count_kept(kept: &mut KeptBytes, encoder: &impl StreamEncoder) -> Result<(), ApiError> {
    // In the end there is a copy in the answer, and one more while a text grows.
    if kept.grow_to(3 * encoder.kept_bytes()) {
        return Ok(());
    }
    Err(if kept.is_too_much() {
        let message = "the log-probabilities of this answer take too much memory: ask for fewer, or for a shorter answer, or stream a completion";
        ApiError::invalid("logprobs", message)
    } else {
        let message = "the log-probabilities of all answers take too much memory; try again later";
        ApiError { retry_after: Some(5), ..ApiError::unavailable(message) }
    })
}

/// A whole answer as JSON; or an error, with its object for when status 200 has already been sent.
type CollectedAnswer = Result<String, Box<(Value, ApiError)>>;

async fn collect<W: StreamEncoder>(mut pending: Pending, mut encoder: W) -> CollectedAnswer {
    let mut kept = KeptBytes::new(&pending.model().send_budget);
    loop {
        let next = match pending.next().await {
            Ok(Some(delta)) => {
                encoder.collect_delta(delta);
                count_kept(&mut kept, &encoder).map(|()| true)
            }
            Ok(None) => Ok(false),
            Err(error) => Err(error),
        };
        match next {
            Ok(true) => {}
            Ok(false) => return Ok(encoder.complete(pending.usage(), pending.answer.stopped_by(0))),
            Err(error) => return Err(Box::new((encoder.error(&error), error))),
        }
    }
}

impl AbortOnDrop<CollectedAnswer> {
    async fn done(&mut self) -> CollectedAnswer {
        (&mut self.0).await.unwrap_or_else(|e| {
            let error = ApiError::internal(e.to_string());
            Err(Box::new((error.to_json(), error)))
        })
    }
}

/// Sends one object. If it takes long, white space goes first, so that nobody takes the connection for dead.
async fn whole(pending: Pending, encoder: impl StreamEncoder) -> Response {
    let mut task = AbortOnDrop(tokio::spawn(collect(pending, encoder)));
    match timeout(KEEP_ALIVE, task.done()).await {
        Ok(Ok(text)) => ([(header::CONTENT_TYPE, "application/json")], text).into_response(),
        Ok(Err(failed)) => failed.1.into_response(),
        Err(_) => {
            let body = unfold(Some(task), |task| async move {
                let mut task = task?;
                match timeout(KEEP_ALIVE, task.done()).await {
                    Ok(result) => {
                        let text = result.unwrap_or_else(|failed| failed.0.to_string());
                        Some((Ok::<_, Infallible>(text), None))
                    }
                    Err(_) => Some((Ok(" ".to_owned()), Some(task))),
                }
            });
            ([(header::CONTENT_TYPE, "application/json")], Body::from_stream(body)).into_response()
        }
    }
}

/// Sends events. Headers go out at once.
fn stream(pending: Pending, encoder: impl StreamEncoder) -> Response {
    let headers = [(header::CONTENT_TYPE, encoder.media_type()), (header::CACHE_CONTROL, "no-cache")];
    let (outbox, sent) = outbox::outbox(&pending.model().send_budget);
    let events = Events { sent, _job: AbortOnDrop(tokio::spawn(fill(pending, encoder, outbox))) };
    (headers, Body::from_stream(events)).into_response()
}

/// The events of an answer as the client reads them. If the client goes away, dropping this aborts the task that makes them.
struct Events {
    sent: OutboxReader,
    _job: AbortOnDrop<()>,
}

impl Stream for Events {
    type Item = io::Result<Bytes>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<io::Result<Bytes>>> {
        Pin::new(&mut self.sent).poll_next(cx)
    }
}

/// A server-sent event without a name.
pub fn data(value: &Value) -> String {
    format!("data: {value}\n\n")
}

/// A server-sent event named by the value's `type`.
pub fn event(value: &Value) -> String {
    named_event(value, &value.to_string())
}

/// The same, of a value that was written already.
pub fn named_event(value: &Value, text: &str) -> String {
    format!("event: {}\ndata: {text}\n\n", value["type"].as_str().unwrap_or("message"))
}

/// Fills the outbox until the answer is complete or the client is too far behind.
async fn fill<W: StreamEncoder>(mut pending: Pending, mut encoder: W, outbox: Outbox) {
    let mut text = encoder.opening();
    let mut kept = KeptBytes::new(&pending.model().send_budget);
    let mut has_started = false;
    loop {
        if !text.is_empty() && !outbox.push(&text) {
            // Cancels the rest.
            drop(pending);
            let error = ApiError::timed_out("the answer was read too slowly: too much of it waited to be sent");
            return outbox.finish(&encoder.failed(&error));
        }
        text.clear();
        let next = timeout(KEEP_ALIVE, pending.step()).await;
        let is_failed = matches!(next, Ok(Err(_)));
        if !is_failed && !std::mem::replace(&mut has_started, true) {
            text += &encoder.started(pending.usage());
        }
        match next {
            Err(_) => text += &encoder.keep_alive(),
            Ok(Ok(Step::Started)) => {}
            Ok(Ok(Step::Delta(delta))) => {
                text += &encoder.delta(&delta);
                if let Err(error) = count_kept(&mut kept, &encoder) {
                    drop(pending);
                    return outbox.finish(&(text + &encoder.failed(&error)));
                }
            }
            Ok(Ok(Step::Over)) => {
                text += &encoder.end(pending.usage(), pending.answer.stopped_by(0));
                drop(pending);
                return outbox.finish(&text);
            }
            Ok(Err(error)) => {
                drop(pending);
                return outbox.finish(&(text + &encoder.failed(&error)));
            }
        }
    }
}
