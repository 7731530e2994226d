//! How an answer is sent: as one object, or as a stream of events.

use std::convert::Infallible;
use std::pin::Pin;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::Json;
use axum::body::Body;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use futures_util::Stream;
use futures_util::stream::unfold;
use serde_json::{Value, json};
use sluice_engine::Finish;
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::time::timeout;

use super::fields::Common;
use crate::answer::{Answer, Delta};
use crate::error::ApiError;
use crate::runtime::{Ticket, Update};

/// After so long without anything to say a stream gives a sign of life.
const SIGN_OF_LIFE: Duration = Duration::from_secs(10);

/// A request that the engine has.
pub struct Pending {
    pub ticket: Ticket,
    pub updates: UnboundedReceiver<Update>,
    pub answer: Answer,
    pub prompt_tokens: usize,
}

/// What makes events and objects of an endpoint's answers.
pub trait Dialect: Send + 'static {
    /// Events for a delta; also those that begin the choice, where it is its first.
    fn events(&mut self, delta: &Delta) -> Vec<Value>;
    /// An event that says nothing, and that clients take for one.
    fn sign_of_life(&self) -> Value;
    /// The last event, where usage was asked for.
    fn usage_event(&self, usage: Value) -> Value;
    /// Keeps a delta for [`Dialect::whole`].
    fn gather(&mut self, delta: Delta);
    /// The whole answer.
    fn whole(&mut self, usage: Value) -> Value;
}

impl Pending {
    fn usage(&self) -> Value {
        let (prompt, generated) = (self.prompt_tokens, self.answer.generated);
        json!({
            "prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated,
            "prompt_tokens_details": {"cached_tokens": self.answer.cached},
        })
    }

    /// The next delta; `Ok(None)` after the last.
    pub(super) async fn next(&mut self) -> Result<Option<Delta>, ApiError> {
        while !self.answer.is_over() {
            let Some(update) = self.updates.recv().await else {
                return Err(ApiError::internal("the engine has ended"));
            };
            let delta = self.answer.take(update).map_err(|e| ApiError::internal(format!("{e:#}")))?;
            if let Some(delta) = delta {
                if delta.stopped {
                    self.ticket.stop(delta.choice);
                }
                return Ok(Some(delta));
            }
        }
        Ok(None)
    }
}

/// Why an answer ended, in OpenAI's words.
pub fn finish_reason(finish: Finish) -> &'static str {
    match finish {
        Finish::Stop => "stop",
        Finish::Length | Finish::ContextFull => "length",
        Finish::Cancelled | Finish::Failed => "stop",
    }
}

pub fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs())
}

/// The answer, as the request wants it.
pub async fn send(pending: Pending, dialect: impl Dialect, common: &Common) -> Response {
    if common.stream {
        stream(pending, dialect, common.stream_options.as_ref().is_some_and(|o| o.include_usage))
    } else {
        whole(pending, dialect).await
    }
}

/// The answer as one object. Where it takes long, what comes first is white space, so that nobody takes the connection for dead.
async fn whole(mut pending: Pending, mut dialect: impl Dialect) -> Response {
    let gathered = async move {
        while let Some(delta) = pending.next().await? {
            dialect.gather(delta);
        }
        Ok::<Value, ApiError>(dialect.whole(pending.usage()))
    };
    let mut gathered: Pin<Box<dyn Future<Output = Result<Value, ApiError>> + Send>> = Box::pin(gathered);
    match timeout(SIGN_OF_LIFE, &mut gathered).await {
        Ok(Ok(value)) => Json(value).into_response(),
        Ok(Err(error)) => error.into_response(),
        Err(_) => {
            let body = unfold(Some(gathered), |gathered| async move {
                let mut gathered = gathered?;
                match timeout(SIGN_OF_LIFE, &mut gathered).await {
                    Ok(result) => {
                        let value = result.unwrap_or_else(|e| e.to_json());
                        Some((Ok::<_, Infallible>(value.to_string()), None))
                    }
                    Err(_) => Some((Ok(" ".to_owned()), Some(gathered))),
                }
            });
            ([(header::CONTENT_TYPE, "application/json")], Body::from_stream(body)).into_response()
        }
    }
}

/// The answer as events. Headers go out at once.
fn stream(pending: Pending, dialect: impl Dialect, with_usage: bool) -> Response {
    let headers = [(header::CONTENT_TYPE, "text/event-stream"), (header::CACHE_CONTROL, "no-cache")];
    (headers, Body::from_stream(events(pending, dialect, with_usage))).into_response()
}

fn data(value: &Value) -> String {
    format!("data: {value}\n\n")
}

fn events(pending: Pending, dialect: impl Dialect, with_usage: bool) -> impl Stream<Item = Result<String, Infallible>> {
    unfold(Some((pending, dialect)), move |state| async move {
        let (mut pending, mut dialect) = state?;
        loop {
            let text = match timeout(SIGN_OF_LIFE, pending.next()).await {
                Err(_) => data(&dialect.sign_of_life()),
                Ok(Ok(Some(delta))) => dialect.events(&delta).iter().map(data).collect(),
                Ok(Ok(None)) => {
                    let usage = with_usage.then(|| data(&dialect.usage_event(pending.usage())));
                    return Some((Ok(usage.unwrap_or_default() + "data: [DONE]\n\n"), None));
                }
                Ok(Err(error)) => return Some((Ok(data(&error.to_json()) + "data: [DONE]\n\n"), None)),
            };
            if !text.is_empty() {
                return Some((Ok(text), Some((pending, dialect))));
            }
        }
    })
}
