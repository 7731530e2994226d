//! What is known of a request beside its answer: its id, which of its fields had no effect, and the line that is logged when it is over. No part of a
//! prompt or of an answer is ever in it.

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, header};
use axum::middleware::Next;
use axum::response::Response;
use tokio::sync::OwnedSemaphorePermit;

use crate::app::App;
use crate::error::ApiError;
use crate::{anthropic, ollama};

tokio::task_local! {
    /// Of the request whose handler runs.
    static CURRENT: Arc<RequestContext>;
}

/// Bytes of an id that a client may choose.
const LONGEST_ID: usize = 128;
/// Names in the header that lists what was ignored, and the bytes of each.
const MOST_NAMES: usize = 32;
const LONGEST_NAME: usize = 64;
/// The header that lists what was ignored.
pub const IGNORED: &str = "sluice-ignored";

/// One request and its answer. The last who holds it is done with the request: then it is logged.
pub struct RequestContext {
    /// As the client calls it, or made here.
    pub id: String,
    what: String,
    arrived: Instant,
    is_logged: bool,
    facts: Mutex<Facts>,
    /// The room that its body takes.
    room: Mutex<Option<OwnedSemaphorePermit>>,
}

#[derive(Default)]
struct Facts {
    status: u16,
    /// Tokens: of the prompt, of those the ones that were there, and generated ones.
    tokens: Option<(usize, usize, usize)>,
    ignored: Vec<String>,
}

/// The request whose handler runs.
pub fn current() -> Option<Arc<RequestContext>> {
    CURRENT.try_with(Arc::clone).ok()
}

/// Says that a field of the request has no effect here.
pub fn ignore(field: &str) {
    let named = |c: char| c.is_ascii_alphanumeric() || "_-.[]".contains(c);
    let name: String = field.chars().filter(|c| named(*c)).take(LONGEST_NAME).collect();
    let Some(exchange) = current() else { return };
    let ignored = &mut exchange.facts().ignored;
    if !name.is_empty() && ignored.len() < MOST_NAMES && !ignored.contains(&name) {
        ignored.push(name);
    }
}

/// 24 digits that nothing else is called by, after restarts too: clients keep ids in their histories.
pub fn fresh_id() -> String {
    use std::hash::{BuildHasher, RandomState};
    let number = |salt: u64| RandomState::new().hash_one((salt, Instant::now(), std::process::id()));
    format!("{:016x}{:08x}", number(0), number(1) as u32)
}

impl RequestContext {
    fn new(request: &Request, is_logged: bool) -> RequestContext {
        let given = request.headers().get("x-request-id").and_then(|id| id.to_str().ok());
        let is_fit = |id: &&str| !id.is_empty() && id.len() <= LONGEST_ID && id.bytes().all(|b| b.is_ascii_graphic());
        let id = given.filter(is_fit).map_or_else(|| format!("req_{}", fresh_id()), str::to_owned);
        let path = request.uri().path();
        // Asked every few seconds by those who watch a server.
        let is_logged = is_logged && !["/health", "/metrics"].contains(&path);
        let what = format!("{} {path}", request.method());
        RequestContext { id, what, arrived: Instant::now(), is_logged, facts: Mutex::default(), room: Mutex::default() }
    }

    fn facts(&self) -> MutexGuard<'_, Facts> {
        self.facts.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Keeps the room that the request's body takes until it is given another, or the request is over.
    pub fn keep_room(&self, room: Option<OwnedSemaphorePermit>) {
        *self.room.lock().unwrap_or_else(|e| e.into_inner()) = room;
    }

    /// What a prompt of the request has come to.
    pub fn counted(&self, prompt: usize, cached: usize, generated: usize) {
        // It may have several prompts.
        let mut facts = self.facts();
        let (others, there, made) = facts.tokens.unwrap_or_default();
        facts.tokens = Some((others + prompt, there + cached, made + generated));
    }

    fn line(&self) -> String {
        let facts = self.facts();
        // Who goes away before the answer begins has no status.
        let status = if facts.status == 0 { "gone".to_owned() } else { facts.status.to_string() };
        let mut line = format!("{} {} {}, {:.2} s", self.id, self.what, status, self.arrived.elapsed().as_secs_f64());
        if let Some((prompt, cached, generated)) = facts.tokens {
            line += &format!(": {prompt} tokens of prompt, {cached} of them cached, {generated} generated");
        }
        if !facts.ignored.is_empty() {
            line += &format!("; no effect: {}", facts.ignored.join(", "));
        }
        line
    }
}

impl Drop for RequestContext {
    fn drop(&mut self) {
        if self.is_logged {
            crate::note(&self.line());
        }
    }
}

/// Around everything else: gives the request an id, has errors said in the dialect that the path belongs to, and names what was ignored.
pub async fn accompany(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let is_ollama = ollama::speaks(request.uri().path());
    let is_anthropic = !is_ollama && anthropic::speaks(request.uri().path(), request.headers());
    let exchange = Arc::new(RequestContext::new(&request, app.settings().log_requests));
    let mut response = CURRENT.scope(Arc::clone(&exchange), next.run(request)).await;
    if (is_anthropic || is_ollama)
        && let Some(error) = response.extensions_mut().remove::<Arc<ApiError>>()
    {
        let said = if is_ollama { ollama::error_json(&error) } else { anthropic::error_json(&error, &exchange.id) };
        // Whatever headers it has by now stay.
        response.headers_mut().remove(header::CONTENT_LENGTH);
        *response.body_mut() = Body::from(said.to_string());
    }
    exchange.facts().status = response.status().as_u16();
    let ignored = exchange.facts().ignored.join(", ");
    let headers = response.headers_mut();
    set(headers, "x-request-id", &exchange.id);
    set(headers, "request-id", &exchange.id);
    if !ignored.is_empty() {
        set(headers, IGNORED, &ignored);
    }
    response
}

fn set(headers: &mut HeaderMap, name: &'static str, value: &str) {
    if let Ok(value) = HeaderValue::from_str(value) {
        headers.insert(name, value);
    }
}
