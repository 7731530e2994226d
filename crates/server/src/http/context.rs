//! What is known of a request besides its answer: its id, the fields that were ignored, and the line that is logged when it is over. No part of a prompt or an
//! answer is ever in it.

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

use axum::extract::Request;
use axum::http::StatusCode;
use tokio::sync::OwnedSemaphorePermit;

use crate::log::note;

tokio::task_local! {
    /// The context of the request whose handler runs.
    pub static CURRENT: Arc<RequestContext>;
}

/// Longest request id, in bytes, that a client may choose.
const MAX_ID: usize = 128;
/// How many ignored fields are listed, and the longest name of one in characters.
const MAX_IGNORED: usize = 32;
const MAX_FIELD_NAME: usize = 64;
/// The response header that lists ignored fields.
pub const IGNORED_HEADER: &str = "sluice-ignored";

/// One request and its answer. It is logged when the last reference is dropped.
pub struct RequestContext {
    /// The client's `x-request-id`, or one made here.
    pub id: String,
    /// Method and path.
    target: String,
    arrived: Instant,
    is_logged: bool,
    outcome: Mutex<Outcome>,
    body_memory: Mutex<Option<OwnedSemaphorePermit>>,
}

#[derive(Default)]
struct Outcome {
    /// 0 until the response begins.
    status: u16,
    usage: Option<TokenCounts>,
    ignored: Vec<String>,
}

#[derive(Clone, Copy, Default)]
struct TokenCounts {
    prompt: usize,
    cached: usize,
    generated: usize,
}

/// The context of the request whose handler runs; `None` outside of one.
pub fn current() -> Option<Arc<RequestContext>> {
    CURRENT.try_with(Arc::clone).ok()
}

/// Records that a field of the request has no effect.
pub fn note_ignored(field: &str) {
    let is_allowed = |c: &char| c.is_ascii_alphanumeric() || "_-.[]".contains(*c);
    let name: String = field.chars().filter(is_allowed).take(MAX_FIELD_NAME).collect();
    let Some(context) = current() else { return };
    let ignored = &mut context.outcome().ignored;
    if !name.is_empty() && ignored.len() < MAX_IGNORED && !ignored.contains(&name) {
        ignored.push(name);
    }
}

/// 24 hexadecimal digits, unique also across restarts: clients keep ids in their histories.
pub fn fresh_id() -> String {
    use std::hash::{BuildHasher, RandomState};
    let number = |salt: u64| RandomState::new().hash_one((salt, Instant::now(), std::process::id()));
    format!("{:016x}{:08x}", number(0), number(1) as u32)
}

impl RequestContext {
    /// `is_logged`: whether the server logs requests at all.
    pub fn new(request: &Request, is_logged: bool) -> RequestContext {
        let given = request.headers().get("x-request-id").and_then(|id| id.to_str().ok());
        let is_valid = |id: &&str| !id.is_empty() && id.len() <= MAX_ID && id.bytes().all(|b| b.is_ascii_graphic());
        let id = given.filter(is_valid).map_or_else(|| format!("req_{}", fresh_id()), str::to_owned);
        let path = request.uri().path();
        // Monitors poll these every few seconds.
        let is_logged = is_logged && !["/health", "/metrics"].contains(&path);
        let target = format!("{} {path}", request.method());
        let (outcome, body_memory) = (Mutex::default(), Mutex::default());
        RequestContext { id, target, arrived: Instant::now(), is_logged, outcome, body_memory }
    }

    fn outcome(&self) -> MutexGuard<'_, Outcome> {
        self.outcome.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Keeps the memory reserved for the request's body until this is called again, or until the request is over.
    pub fn hold_body_memory(&self, permit: Option<OwnedSemaphorePermit>) {
        *self.body_memory.lock().unwrap_or_else(|e| e.into_inner()) = permit;
    }

    /// Adds the tokens of one of the request's prompts.
    pub fn add_usage(&self, prompt: usize, cached: usize, generated: usize) {
        let mut outcome = self.outcome();
        let usage = outcome.usage.get_or_insert_default();
        usage.prompt += prompt;
        usage.cached += cached;
        usage.generated += generated;
    }

    /// Records the status of the response.
    pub fn set_status(&self, status: StatusCode) {
        self.outcome().status = status.as_u16();
    }

    /// Ignored fields, separated by commas.
    pub fn ignored_fields(&self) -> String {
        self.outcome().ignored.join(", ")
    }

    fn log_line(&self) -> String {
        let outcome = self.outcome();
        // A client that leaves before the answer begins has no status.
        let status = if outcome.status == 0 { "gone".to_owned() } else { outcome.status.to_string() };
        let mut line = format!("{} {} {}, {:.2} s", self.id, self.target, status, self.arrived.elapsed().as_secs_f64());
        if let Some(TokenCounts { prompt, cached, generated }) = outcome.usage {
            line += &format!(": {prompt} prompt tokens ({cached} cached), {generated} generated");
        }
        if !outcome.ignored.is_empty() {
            line += &format!("; ignored: {}", outcome.ignored.join(", "));
        }
        line
    }
}

impl Drop for RequestContext {
    fn drop(&mut self) {
        if self.is_logged {
            note(&self.log_line());
        }
    }
}
