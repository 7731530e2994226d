//! The server: what it listens on, which path goes where, how it starts and how it ends.

use std::fs;
use std::future::Future;
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use axum::extract::{FromRequest, FromRequestParts, Path as UrlPath, Request, State};
use axum::http::request::Parts;
use axum::http::{Method, StatusCode, Uri, header};
use axum::middleware::from_fn_with_state;
use axum::response::{IntoResponse, Response};
use axum::{Json, Router};
use serde::de::DeserializeOwned;
use serde_json::json;
use sluice_engine::text::TextSide;
use sluice_engine::{Engine, Generation, ReadAhead, Saved, Sessions};
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::mpsc::unbounded_channel;
use tokio::time::timeout;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::access::{Access, guard};
use crate::answer::Answer;
use crate::error::ApiError;
use crate::exchange::{self, accompany};
use crate::given;
use crate::metrics::Metrics;
use crate::openai::{self, Common};
use crate::openapi::{self, Asking, Seeing, written};
use crate::page;
use crate::reply::{Pending, now};
use crate::resident::{Held, Models, Offer};
use crate::runtime::{Limits, Runtime, Submission};
use crate::{anthropic, models, tokenize};

/// Bytes of a request at most: so many, and so many more for each token of context, which is several times what text or token ids take.
const BODY: usize = 1 << 20;
const BODY_PER_TOKEN: usize = 64;
/// The time that it may take to come.
const BODY_TIME: Duration = Duration::from_secs(60);
/// Bytes that a server itself holds: with nobody there, and for each request that is computed or waits. An allowance; `cli/tests/serve_crowd.rs` holds that it is
/// enough for 64 connections.
const IDLE: u64 = 8 << 20;
const REQUEST: u64 = 32 << 10;

/// Bytes to set aside for a server of so many requests at once, and in its queue.
pub fn memory(parallel: usize, queue: usize) -> u64 {
    IDLE + REQUEST * (parallel + queue) as u64
}

/// How a server is set up.
#[derive(Clone, Debug)]
pub struct Settings {
    pub limits: Limits,
    pub access: Access,
    /// A request that is not over after so long is given up.
    pub request_timeout: Option<Duration>,
    /// A model that nobody has asked for in so long is dropped from memory.
    pub idle_unload: Option<Duration>,
    /// A line on standard error for each request that is over, without anything of what was said in it.
    pub log_requests: bool,
}

/// A model in memory: as long as this is held, it stays there.
pub struct Ready {
    pub name: String,
    pub text: TextSide,
    /// Tokens of prompt and answer.
    pub context: usize,
    vocabulary: usize,
    /// The model has recurrent layers.
    pub has_states: bool,
    /// What is computed of prompts is kept for others that begin alike.
    pub keeps_prefixes: bool,
    /// When it was loaded, in seconds since 1970.
    pub created: u64,
    /// Conversations that have a name; `None` without a prompt cache.
    pub sessions: Option<Sessions>,
    runtime: Runtime,
    request_timeout: Option<Duration>,
}

/// What all requests share.
pub struct App {
    pub models: Arc<Models>,
    metrics: Arc<Metrics>,
    settings: Settings,
    on_loopback: bool,
}

impl App {
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Whether the server is reached over TCP, and from this machine alone.
    pub fn is_on_loopback(&self) -> bool {
        self.on_loopback
    }

    /// The model that a request names, in memory.
    ///
    /// # Errors
    /// As [`Models::get`].
    pub async fn model(&self, name: Option<&str>) -> Result<Arc<Ready>, ApiError> {
        self.models.get(name).await
    }
}

impl Ready {
    /// # Errors
    /// When the system refuses a thread.
    pub fn new(
        name: String,
        mut engine: Engine,
        text: TextSide,
        held: Held,
        settings: &Settings,
        metrics: &Arc<Metrics>,
    ) -> Result<Ready> {
        metrics.memory(&mut engine);
        let (context, vocabulary) = (engine.max_context(), engine.model().vocabulary);
        let has_states = engine.model().state_len() > 0;
        let (sessions, keeps_prefixes) = (engine.sessions(), engine.keeps_prefixes());
        let runtime = Runtime::start(engine, held, settings.limits, Arc::clone(metrics))?;
        let (created, request_timeout) = (now(), settings.request_timeout);
        Ok(Ready {
            name,
            text,
            context,
            vocabulary,
            has_states,
            keeps_prefixes,
            created,
            sessions,
            runtime,
            request_timeout,
        })
    }

    /// Hands a prompt to the engine.
    ///
    /// # Errors
    /// What is wrong with the request; a queue that is full.
    pub fn submit(
        self: &Arc<Ready>,
        prompt: Vec<u32>,
        generation: Generation,
        common: &Common,
    ) -> Result<Pending, ApiError> {
        let (choices, stops) = (common.choices()?, common.stops()?);
        let (updates, received) = unbounded_channel();
        let prompt_tokens = prompt.len();
        if let Some(bad) = prompt.iter().find(|t| **t as usize >= self.vocabulary) {
            let message = format!("token {bad} is not in the vocabulary of {}", self.vocabulary);
            return Err(ApiError::invalid("prompt", message));
        }
        if prompt_tokens == 0 {
            return Err(ApiError::invalid("prompt", "the prompt has no tokens"));
        }
        let deadline = self.request_timeout.map(|time| tokio::time::Instant::now() + time);
        let salt = common.cache_salt.clone().unwrap_or_default().into_bytes();
        let submission = Submission { prompt, generation, choices, salt, updates, arrived: Instant::now() };
        let ticket = self.runtime.submit(submission)?;
        let answer = Answer::new(&self.text.tokenizer, choices, &stops);
        let exchange = exchange::current();
        Ok(Pending {
            ticket,
            updates: received,
            answer,
            prompt_tokens,
            model: Arc::clone(self),
            deadline,
            exchange,
            beside: Vec::new(),
        })
    }
}

impl Ready {
    /// Takes no more requests; those that were taken come to their end.
    pub fn drain(&self) {
        self.runtime.drain();
    }

    /// Why the engine can do no more; `None` as long as it can.
    pub fn dead(&self) -> Option<String> {
        self.runtime.dead()
    }

    /// Has what is in memory of a conversation written and named.
    pub fn save_session(&self, name: String, salt: Vec<u8>, tokens: Vec<u32>, told: Saved) {
        self.runtime.save_session(name, salt, tokens, told);
    }

    /// Has a conversation read into memory when nothing else is to be done.
    pub fn read_ahead(&self, session: ReadAhead) {
        self.runtime.read_ahead(session);
    }
}

/// A JSON body, with what is wrong with it in the API's own words.
pub struct Body<T>(pub T);

impl<T: DeserializeOwned> FromRequest<Arc<App>> for Body<T> {
    type Rejection = ApiError;

    /// Whatever the client says that it sends: some say nothing, or that it is a form.
    async fn from_request(request: Request, app: &Arc<App>) -> Result<Body<T>, ApiError> {
        app.models.begun()?;
        let most = BODY + BODY_PER_TOKEN * app.models.most_context();
        let too_large = |_| ApiError {
            status: StatusCode::PAYLOAD_TOO_LARGE,
            ..ApiError::invalid("", format!("the request has more than {most} bytes"))
        };
        let bytes = timeout(BODY_TIME, axum::body::to_bytes(request.into_body(), most)).await;
        let too_slow = |_| ApiError {
            status: StatusCode::REQUEST_TIMEOUT,
            ..ApiError::timed_out(format!("the request's body did not come within {} s", BODY_TIME.as_secs()))
        };
        let bytes = bytes.map_err(too_slow)?.map_err(too_large)?;
        given::read(&bytes).map(Body)
    }
}

/// A name in the path, with what is wrong with it in the API's own words.
pub struct Name(pub String);

impl<S: Send + Sync> FromRequestParts<S> for Name {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Name, ApiError> {
        let name = UrlPath::<String>::from_request_parts(parts, state).await;
        name.map(|UrlPath(name)| Name(name)).map_err(|_| ApiError::invalid("name", "name is no text in UTF-8"))
    }
}

/// Where the server listens.
pub enum Bound {
    Tcp(TcpListener),
    /// Removed when the server ends.
    Unix(UnixListener, PathBuf),
}

impl Bound {
    /// # Errors
    /// When the address cannot be had.
    pub async fn tcp(host: &str, port: u16) -> Result<Bound> {
        let listener = TcpListener::bind((host, port)).await;
        Ok(Bound::Tcp(listener.with_context(|| format!("cannot listen on {host}:{port}"))?))
    }

    /// A socket of a server that is gone is replaced.
    ///
    /// # Errors
    /// When something else lies at the path, or somebody listens there.
    pub async fn unix(path: &Path) -> Result<Bound> {
        let name = || format!("cannot listen on {}", path.display());
        if let Ok(found) = fs::symlink_metadata(path) {
            let is_left_over = found.file_type().is_socket() && tokio::net::UnixStream::connect(path).await.is_err();
            if is_left_over {
                fs::remove_file(path).with_context(name)?;
            }
        }
        Ok(Bound::Unix(UnixListener::bind(path).with_context(name)?, path.to_owned()))
    }

    /// Whether it is reached from this machine alone.
    pub fn is_local(&self) -> bool {
        match self {
            Bound::Tcp(listener) => listener.local_addr().is_ok_and(|address| address.ip().is_loopback()),
            Bound::Unix(..) => true,
        }
    }

    /// As people would type it.
    ///
    /// # Errors
    /// When the system does not say.
    pub fn address(&self) -> io::Result<String> {
        Ok(match self {
            Bound::Tcp(listener) => format!("http://{}", listener.local_addr()?),
            Bound::Unix(_, path) => format!("unix:{}", path.display()),
        })
    }
}

/// A server that listens.
pub struct Server {
    app: Arc<App>,
    bound: Bound,
}

impl Server {
    /// `offers`: what can be served, the first of them from the start; `said` is told of each that is loaded.
    pub fn new(
        bound: Bound,
        settings: Settings,
        offers: Vec<Offer>,
        said: impl Fn(&Ready) + Send + Sync + 'static,
    ) -> Server {
        let metrics = Arc::new(Metrics::new());
        let app = App {
            models: Arc::new(Models::new(offers, Arc::clone(&metrics), settings.clone(), Box::new(said))),
            metrics,
            on_loopback: matches!(bound, Bound::Tcp(_)) && bound.is_local(),
            settings,
        };
        Server { app: Arc::new(app), bound }
    }

    /// Answers requests until `stop` is over; then those that were taken come to their end. The first model is loaded meanwhile: until it is there requests are
    /// told so. Where it cannot be had, the server ends.
    ///
    /// # Errors
    /// The first model's, and those of the listener.
    pub async fn run(self, stop: impl Future<Output = ()> + Send + 'static) -> Result<()> {
        let Server { app, bound } = self;
        if let Some(after) = app.settings.idle_unload {
            tokio::spawn(Arc::clone(&app.models).unload_when_idle(after));
        }
        let models = Arc::clone(&app.models);
        let (over, ended) = tokio::sync::oneshot::channel();
        let stop = async move {
            tokio::pin!(stop);
            let failed = tokio::select! {
                () = &mut stop => None,
                started = models.start() => match started {
                    Ok(()) => {
                        stop.await;
                        None
                    }
                    Err(e) => Some(e),
                }
            };
            models.stop();
            let _ = over.send(failed);
        };
        let router = router(Arc::clone(&app))?;
        match bound {
            Bound::Tcp(listener) => {
                use axum::serve::ListenerExt;
                // A token is a few bytes: they are not to wait for more.
                let listener = listener.tap_io(|stream| _ = stream.set_nodelay(true));
                axum::serve(listener, router).with_graceful_shutdown(stop).await?;
            }
            Bound::Unix(listener, path) => {
                let served = axum::serve(listener, router).with_graceful_shutdown(stop).await;
                let _ = fs::remove_file(path);
                served?;
            }
        }
        app.models.ended().await;
        match ended.await {
            Ok(Some(failed)) => Err(failed),
            _ => Ok(()),
        }
    }
}

/// Where everything is, and how it is described.
pub fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::with_openapi(openapi::base())
        .routes(routes!(openai::chat::chat))
        .routes(routes!(openai::completions::completions))
        .routes(routes!(openai::responses::responses))
        .routes(routes!(openai::responses::input_tokens))
        .routes(routes!(models::list))
        .routes(routes!(models::one))
        .routes(routes!(anthropic::messages))
        .routes(routes!(anthropic::count_tokens))
        .routes(routes!(tokenize::tokenize))
        .routes(routes!(tokenize::detokenize))
        .routes(routes!(openai::sessions::list, openai::sessions::save))
        .routes(routes!(openai::sessions::delete))
        .routes(routes!(openai::sessions::load))
        .routes(routes!(health))
        .routes(routes!(metrics))
        .routes(routes!(openapi::document))
        .routes(routes!(page::index))
        .routes(routes!(page::named))
}

fn router(app: Arc<App>) -> Result<Router> {
    let cors = app.settings.access.cors()?;
    let mut router = Router::from(routes())
        .fallback(nothing_there)
        .method_not_allowed_fallback(not_so)
        // From here on: what comes later is around what comes before.
        .layer(from_fn_with_state(Arc::clone(&app), guard));
    if let Some(cors) = cors {
        router = router.layer(cors);
    }
    Ok(router.layer(from_fn_with_state(Arc::clone(&app), accompany)).with_state(app))
}

async fn nothing_there(uri: Uri) -> ApiError {
    ApiError::not_found(uri.path())
}

async fn not_so(method: Method, uri: Uri) -> ApiError {
    ApiError::method_not_allowed(method.as_str(), uri.path())
}

written! {
    Health, uses [], {
        "type": "object",
        "required": ["status"],
        "properties": {"status": {"type": "string", "description": "ok, loading model, or why nothing can be computed any more"}},
    }
}

/// Whether the model can be asked.
#[utoipa::path(get, path = "/health", tag = "server", security(()), responses(
    (status = 200, description = "It can.", body = Health),
    (status = 500, description = "It cannot any more.", body = Health),
    (status = 503, description = "It is being loaded.", body = Health),
    Seeing,
))]
async fn health(State(app): State<Arc<App>>) -> Response {
    let state = |status, text: &str| (status, Json(json!({"status": text}))).into_response();
    match (app.models.begun(), app.models.dead()) {
        (Err(e), _) => state(e.status, "loading model"),
        (_, Some(why)) => state(StatusCode::INTERNAL_SERVER_ERROR, &why),
        _ => state(StatusCode::OK, "ok"),
    }
}

/// Figures in the text format of OpenMetrics, as Prometheus reads them.
#[utoipa::path(get, path = "/metrics", tag = "server", responses(
    (status = 200, description = "Counters, gauges and histograms.", body = String, content_type = "application/openmetrics-text"), Asking,
))]
async fn metrics(State(app): State<Arc<App>>) -> impl IntoResponse {
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    ([(header::CONTENT_TYPE, kind)], app.metrics.text())
}
