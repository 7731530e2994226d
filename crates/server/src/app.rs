//! The server: what it listens on, which path goes where, how it starts and how it ends.

use std::fs;
use std::future::Future;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use axum::body::HttpBody;
use axum::extract::{FromRequest, FromRequestParts, Path as UrlPath, Request, State};
use axum::http::request::Parts;
use axum::http::{Method, StatusCode, Uri, header};
use axum::middleware::from_fn_with_state;
use axum::response::{IntoResponse, Response};
use axum::{Json, Router};
use serde::de::DeserializeOwned;
use serde_json::json;
use sluice_engine::text::ModelText;
use sluice_engine::{Device, Engine, Generation, ReadAhead, Saved, Sessions};
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::mpsc::unbounded_channel;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::access::{Access, guard};
use crate::answer::Answer;
use crate::context::{self, accompany};
use crate::error::ApiError;
use crate::given;
use crate::metrics::Metrics;
use crate::model_manager::{ModelLease, Models, Offer};
use crate::openai::{self, SamplingFields};
use crate::openapi::{self, Asking, Seeing, written};
use crate::outbox::Outgoing;
use crate::reply::{Pending, now};
use crate::runtime::{Limits, Runtime, Submission};
use crate::{anthropic, listen, models, ollama, page, tokenize};

/// Bytes of a request at most: so many, and so many more for each token of context, which is several times what text or token ids take.
const BODY: usize = 1 << 20;
const BODY_PER_TOKEN: usize = 64;
/// Bytes of those that are held at once, where nothing else is said.
const MOST_BODIES: usize = 64 << 20;
/// The time that one may take to come.
const BODY_TIME: Duration = Duration::from_secs(60);
/// And that it may wait for others to be worked on.
const ROOM_TIME: Duration = Duration::from_secs(5);
/// Bytes that a permit to hold a body stands for.
const ROOM: usize = 1 << 10;
/// Bytes that a server itself holds: with nobody there, for each request that is computed or waits, and for each connection. An allowance;
/// `cli/tests/serve_crowd.rs` holds that it is enough for 64 connections.
const IDLE: u64 = 8 << 20;
const REQUEST: u64 = 32 << 10;
const CONNECTION: u64 = 16 << 10;
/// Bytes of answers that wait for clients: so many, and so many more for each request that may wait.
const ANSWERS: usize = 1 << 20;
const ANSWERS_PER_REQUEST: usize = 16 << 10;
/// For so long a server whose engine has ended says so to whoever asks.
const LAST_WORDS: Duration = Duration::from_secs(3);
/// For clients to read what is left of their answers, when the engine has ended.
const READING: Duration = Duration::from_secs(10);
/// For the engine to end once it is told that time is up.
const ENDING: Duration = Duration::from_secs(30);

/// Bytes of one body at most, with so many tokens of context; as far as there is room for it.
fn body(context: usize) -> usize {
    BODY.saturating_add(BODY_PER_TOKEN.saturating_mul(context))
}

/// Bytes of all bodies that are held at once.
fn bodies(limits: &Limits, context: usize) -> usize {
    limits.bodies.unwrap_or(body(context).saturating_mul(2).min(MOST_BODIES)).min(ROOM << 30)
}

/// Bytes of answers that may wait for all clients together.
pub fn outgoing(limits: &Limits) -> usize {
    ANSWERS + ANSWERS_PER_REQUEST * limits.queue
}

/// Bytes to set aside for a server of so many requests at once, whose longest context is this.
pub fn memory(parallel: usize, limits: &Limits, context: usize) -> u64 {
    // A body, and what is made of it.
    let bodies = 2 * bodies(limits, context) as u64;
    let each = REQUEST * (parallel + limits.queue) as u64 + CONNECTION * limits.connections as u64;
    IDLE + each + bodies + outgoing(limits) as u64
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
pub struct LoadedModel {
    pub name: String,
    pub text: ModelText,
    /// Tokens of prompt and answer.
    pub context: usize,
    vocabulary: usize,
    /// Elements of its hidden states.
    pub hidden: usize,
    /// The model has recurrent layers.
    pub has_states: bool,
    /// What is computed of prompts is kept for others that begin alike.
    pub keeps_prefixes: bool,
    /// When it was loaded, in seconds since 1970.
    pub created: u64,
    /// Conversations that have a name; `None` without a prompt cache.
    pub sessions: Option<Sessions>,
    /// Bytes that it took when it was loaded, and those of them that are a device's.
    pub memory: (u64, u64),
    runtime: Runtime,
    request_timeout: Option<Duration>,
    outgoing: Arc<Outgoing>,
}

/// What all requests share.
pub struct App {
    pub models: Arc<Models>,
    metrics: Arc<Metrics>,
    settings: Settings,
    on_loopback: bool,
    /// Room for bodies, and how many bytes that is.
    bodies: Arc<Semaphore>,
    most_bodies: usize,
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
    pub async fn model(&self, name: Option<&str>) -> Result<Arc<LoadedModel>, ApiError> {
        self.models.get(name).await
    }

    /// Room for a body of so many bytes.
    ///
    /// # Errors
    /// When there is none in time.
    async fn room(&self, bytes: usize) -> Result<OwnedSemaphorePermit, ApiError> {
        let room = Arc::clone(&self.bodies).acquire_many_owned(permits(bytes) as u32);
        let room = timeout(ROOM_TIME, room).await.ok().and_then(Result::ok);
        let full = || ApiError {
            retry_after: Some(1),
            ..ApiError::unavailable("the bodies of other requests take all room there is; try again later")
        };
        room.ok_or_else(full)
    }
}

impl LoadedModel {
    /// # Errors
    /// When the system refuses a thread.
    pub fn new(
        name: String,
        mut engine: Engine,
        text: ModelText,
        held: ModelLease,
        settings: &Settings,
        metrics: &Arc<Metrics>,
        outgoing: &Arc<Outgoing>,
    ) -> Result<LoadedModel> {
        metrics.memory(&mut engine);
        let memory = memory_of(&mut engine);
        let (context, vocabulary, hidden) = (engine.max_context(), engine.model().vocabulary, engine.model().hidden);
        let has_states = engine.model().state_len() > 0;
        let (sessions, keeps_prefixes) = (engine.sessions(), engine.has_prefix_cache());
        let runtime = Runtime::start(engine, held, settings.limits, Arc::clone(metrics))?;
        let (created, request_timeout) = (now(), settings.request_timeout);
        Ok(LoadedModel {
            name,
            text,
            context,
            vocabulary,
            hidden,
            has_states,
            keeps_prefixes,
            created,
            sessions,
            memory,
            runtime,
            request_timeout,
            outgoing: Arc::clone(outgoing),
        })
    }

    /// Hands a prompt to the engine.
    ///
    /// # Errors
    /// What is wrong with the request; a queue that is full.
    pub fn submit(
        self: &Arc<LoadedModel>,
        prompt: Vec<u32>,
        generation: Generation,
        common: &SamplingFields,
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
        let exchange = context::current();
        // Of the body there are the tokens left.
        exchange.iter().for_each(|exchange| exchange.keep_room(None));
        Ok(Pending {
            ticket,
            updates: received,
            answer,
            prompt_tokens,
            model: Arc::clone(self),
            deadline,
            outgoing: Arc::clone(&self.outgoing),
            exchange,
            beside: Vec::new(),
        })
    }
}

impl LoadedModel {
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

/// Permits to hold so many bytes of a body.
fn permits(bytes: usize) -> usize {
    bytes.div_ceil(ROOM)
}

/// Bytes that an engine takes, and those of them that are a device's.
fn memory_of(engine: &mut Engine) -> (u64, u64) {
    let uses = engine.memory_uses();
    let of = |is: fn(Device) -> bool| uses.iter().filter(|m| is(m.device)).map(|m| m.bytes as u64).sum();
    (of(|_| true), of(|device| device != Device::Host))
}

/// A JSON body, with what is wrong with it in the API's own words.
pub struct Body<T>(pub T);

impl<T: DeserializeOwned> FromRequest<Arc<App>> for Body<T> {
    type Rejection = ApiError;

    /// Whatever the client says that it sends: some say nothing, or that it is a form.
    async fn from_request(request: Request, app: &Arc<App>) -> Result<Body<T>, ApiError> {
        app.models.begun()?;
        let most = body(app.models.most_context()).min(app.most_bodies);
        let too_large = || ApiError {
            status: StatusCode::PAYLOAD_TOO_LARGE,
            ..ApiError::invalid("", format!("the request has more than {most} bytes"))
        };
        // 1. Room for it before any of it is read; where it is not known how long it is, for the longest
        let declared = request.body().size_hint().exact();
        let expected = declared.map_or(most, |bytes| usize::try_from(bytes).unwrap_or(usize::MAX));
        if expected > most {
            return Err(too_large());
        }
        let mut room = app.room(expected).await?;
        // 2. The body
        let bytes = timeout(BODY_TIME, axum::body::to_bytes(request.into_body(), most)).await;
        let too_slow = |_| ApiError {
            status: StatusCode::REQUEST_TIMEOUT,
            ..ApiError::timed_out(format!("the request's body did not come within {} s", BODY_TIME.as_secs()))
        };
        // One whose length is known is never longer than that.
        let broken = |_| match declared {
            Some(_) => ApiError::invalid("", "the request's body ends before its content-length"),
            None => too_large(),
        };
        let bytes = bytes.map_err(too_slow)?.map_err(broken)?;
        drop(room.split(room.num_permits().saturating_sub(permits(bytes.len()))));
        if let Some(exchange) = context::current() {
            exchange.keep_room(Some(room));
        }
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
    Unix(UnixListener, Socket),
}

/// A Unix socket that is there. Dropped, it is removed, unless another has taken its place.
pub struct Socket {
    path: PathBuf,
    id: Option<(u64, u64)>,
}

impl Socket {
    fn new(path: &Path) -> Socket {
        Socket { path: path.to_owned(), id: Socket::id_of(path) }
    }

    fn id_of(path: &Path) -> Option<(u64, u64)> {
        fs::symlink_metadata(path).ok().map(|found| (found.dev(), found.ino()))
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        if self.id.is_some() && self.id == Socket::id_of(&self.path) {
            let _ = fs::remove_file(&self.path);
        }
    }
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
    /// When something else lies at the path, or somebody may be listening there.
    pub async fn unix(path: &Path) -> Result<Bound> {
        let name = || format!("cannot listen on {}", path.display());
        if fs::symlink_metadata(path).is_ok_and(|found| found.file_type().is_socket()) {
            // That nobody listens is said by one error alone; others come of a server that is busy, or somebody else's.
            match tokio::net::UnixStream::connect(path).await {
                Err(e) if e.kind() == io::ErrorKind::ConnectionRefused => fs::remove_file(path).with_context(name)?,
                Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                Err(e) => {
                    return Err(e).with_context(|| {
                        format!("{}: a server may be listening there; if none is, remove it", name())
                    });
                }
                Ok(_) => bail!("{}: a server listens there already", name()),
            }
        }
        let listener = UnixListener::bind(path).with_context(name)?;
        Ok(Bound::Unix(listener, Socket::new(path)))
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
            Bound::Unix(_, socket) => format!("unix:{}", socket.path.display()),
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
        said: impl Fn(&LoadedModel) + Send + Sync + 'static,
    ) -> Server {
        let metrics = Arc::new(Metrics::new());
        let context = offers.iter().map(|offer| offer.context).max().unwrap_or(0);
        let most_bodies = bodies(&settings.limits, context);
        let app = App {
            bodies: Arc::new(Semaphore::new(permits(most_bodies))),
            most_bodies,
            models: Arc::new(Models::new(offers, Arc::clone(&metrics), settings.clone(), Box::new(said))),
            metrics,
            on_loopback: matches!(bound, Bound::Tcp(_)) && bound.is_local(),
            settings,
        };
        Server { app: Arc::new(app), bound }
    }

    /// Answers requests until `stop` is over; then those that were taken come to their end, in the time that there is for it. The first model is loaded meanwhile:
    /// until it is there requests are told so. Where it cannot be had, the server ends; and where an engine ends that nobody has told to.
    ///
    /// # Errors
    /// The first model's, and why an engine has ended.
    pub async fn run(self, stop: impl Future<Output = ()> + Send + 'static) -> Result<()> {
        let Server { app, bound } = self;
        let (models, metrics, limits) = (Arc::clone(&app.models), Arc::clone(&app.metrics), app.settings.limits);
        if let Some(after) = app.settings.idle_unload {
            tokio::spawn(Arc::clone(&models).unload_when_idle(after));
        }
        let (leave, leaving) = watch::channel(false);
        let router = router(app)?;
        let mut serving = JoinSet::new();
        let _socket = match bound {
            Bound::Tcp(listener) => {
                use axum::serve::ListenerExt;
                // A token is a few bytes: they are not to wait for more.
                let listener = listener.tap_io(|stream| _ = stream.set_nodelay(true));
                serving.spawn(listen::serve(listener, router, limits, metrics, leaving));
                None
            }
            Bound::Unix(listener, socket) => {
                serving.spawn(listen::serve(listener, router, limits, metrics, leaving));
                Some(socket)
            }
        };
        // 1. Until it is to end
        let mut why = tokio::select! {
            () = stop => None,
            Err(e) = models.start() => Some(e),
            died = models.died() => {
                sleep(LAST_WORDS).await;
                Some(engine_ended(&died))
            }
        };
        // 2. The engine, whose requests no client holds up
        models.stop();
        leave.send_replace(true);
        if why.is_none() && timeout(limits.grace, models.ended()).await.is_err() {
            crate::note("the requests that are left are given up: the time for them is over");
            models.give_up();
        }
        let is_over = timeout(ENDING, models.ended()).await.is_ok();
        // 3. The clients
        let _ = timeout(READING, serving.join_next()).await;
        serving.shutdown().await;
        why = why.or_else(|| models.dead().map(|died| engine_ended(&died)));
        if why.is_none() && !is_over {
            why = Some(anyhow!("the engine has not ended in time; what was to be kept of its prompts may be lost"));
        }
        why.map_or(Ok(()), Err)
    }
}

fn engine_ended(why: &str) -> anyhow::Error {
    anyhow!("the engine has ended: {why}")
}

/// Where everything is, and how it is described.
pub fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::with_openapi(openapi::base())
        .routes(routes!(openai::chat::chat))
        .routes(routes!(openai::completions::completions))
        .routes(routes!(openai::responses::responses))
        .routes(routes!(openai::responses::input_tokens))
        .routes(routes!(openai::embeddings::embeddings))
        .routes(routes!(models::list))
        .routes(routes!(models::one))
        .routes(routes!(anthropic::messages))
        .routes(routes!(anthropic::count_tokens))
        .routes(routes!(ollama::chat))
        .routes(routes!(ollama::generate))
        .routes(routes!(ollama::embed::embed))
        .routes(routes!(ollama::embed::older))
        .routes(routes!(ollama::catalog::tags))
        .routes(routes!(ollama::catalog::show))
        .routes(routes!(ollama::catalog::running))
        .routes(routes!(ollama::catalog::version))
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
        .method_not_allowed_fallback(method_not_allowed)
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

async fn method_not_allowed(method: Method, uri: Uri) -> ApiError {
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
    (status = 503, description = "It is being loaded, or cannot any more: then the server ends.", body = Health),
    Seeing,
))]
async fn health(State(app): State<Arc<App>>) -> Response {
    let state = |status, text: &str| (status, Json(json!({"status": text}))).into_response();
    match (app.models.begun(), app.models.dead()) {
        (Err(e), _) => state(e.status, "loading model"),
        (_, Some(why)) => state(StatusCode::SERVICE_UNAVAILABLE, &why),
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
