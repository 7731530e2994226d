//! A model in memory with the server's scheduler, caches and endpoints, for any number of threads.

use std::path::{Path, PathBuf};
use std::sync::mpsc::channel;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Error, Result};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use sluice_engine::text::{ChatTemplate, ModelText};
use sluice_engine::{Engine as Computing, Loading, MemoryClass, ModelSource, source};
use sluice_front::naming;
use sluice_server::{Access, Limits, LoadedModel, LocalServer, ModelFacts, Offer, Settings, Submission};
use tokio::sync::mpsc::unbounded_channel;

use crate::arrays::Array;
use crate::errors::{self, EngineError};
use crate::inbox::Inbox;
use crate::options::Setup;
use crate::reply::Reply;
use crate::request::GenerateRequest;
use crate::score::{self, Scored};
use crate::stream::{Stream, check_process};
use crate::tokenizer::Tokenizer;
use crate::waiting::{detached, on_thread};

/// How long facts that only the engine's thread knows are waited for, while it computes a step.
const FACTS: Duration = Duration::from_secs(60);

/// A model in memory. Dropping it frees the memory, once what it still computes is cancelled.
#[pyclass(frozen, module = "sluice._sluice")]
pub struct Engine {
    /// `None` once it is dropped.
    server: RwLock<Option<LocalServer>>,
    process: u32,
    /// Seconds that loading took.
    #[pyo3(get)]
    load_seconds: f64,
    /// The folder or the file of the model.
    #[pyo3(get)]
    path: PathBuf,
}

/// Loads the weights on this thread, and the text side on another.
fn load(source: &Arc<dyn ModelSource>, setup: &Setup, cache: Option<&Path>) -> Result<(Computing, ModelText)> {
    let path = source.path();
    thread::scope(|scope| {
        let text = scope.spawn(|| ModelText::load(&**source, cache).map_err(|e| naming(path, e)));
        let join = |text: thread::ScopedJoinHandle<'_, Result<ModelText>>| {
            text.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        // Within a limit the tokenizer loads first: what it takes is not left for weights.
        let mut text = Some(text);
        let early = setup.engine.memory_budget.is_some().then(|| text.take().map(join)).flatten();
        let engine = sluice_front::open(source, setup.engine.clone(), &setup.device, &|_| ());
        let late = text.map(join);
        // The weights' error first: for a missing file, one about the tokenizer would be misleading.
        let engine = engine?;
        let text = early.or(late).unwrap_or_else(|| Err(anyhow::anyhow!("the text of the model was not read")))?;
        Ok((engine, text))
    })
}

/// Opens a model as a server of one.
fn serve(path: &Path, setup: Setup, cache: Option<PathBuf>) -> Result<LocalServer> {
    let name = setup.name.clone().or_else(|| source::gguf_name(path));
    let folder = || path.canonicalize().ok().and_then(|p| p.file_name().map(|n| n.to_string_lossy().into_owned()));
    // Opened once: the metadata of a GGUF file is long.
    let source = source::open(path).map_err(|e| naming(path, e))?;
    let style = ChatTemplate::style_of(&*source).map_err(|e| naming(path, e))?;
    let limits = Limits { queue: setup.queue, grace: Duration::ZERO, ..Limits::default() };
    let access = Access::default();
    let settings = Settings { limits, access, request_timeout: None, idle_unload: None, log_requests: false };
    let offer = Offer {
        name: name.or_else(folder).unwrap_or_else(|| "sluice".into()),
        context: setup.engine.max_context.unwrap_or(1 << 20),
        style,
        facts: ModelFacts::default(),
        load: Box::new(move || load(&source, &setup, cache.as_deref())),
    };
    LocalServer::start(settings, offer)
}

impl Engine {
    fn server(&self) -> PyResult<RwLockReadGuard<'_, Option<LocalServer>>> {
        check_process(self.process)?;
        Ok(self.server.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Does something with the server. Never waits for long.
    fn with<T>(&self, work: impl FnOnce(&LocalServer) -> Result<T>) -> PyResult<T> {
        let server = self.server()?;
        let server = server.as_ref().ok_or_else(|| EngineError::new_err("the model is closed"))?;
        work(server).map_err(|e| errors::engine(&e))
    }

    fn model(&self) -> PyResult<Arc<LoadedModel>> {
        self.with(|server| server.model().cloned())
    }

    fn run(&self, work: Box<dyn FnOnce(&mut Computing) + Send>) -> PyResult<()> {
        self.with(|server| server.run(work))
    }

    /// What the engine's thread says.
    fn ask<T: Send + 'static>(
        &self,
        py: Python<'_>,
        question: impl FnOnce(&mut Computing) -> T + Send + 'static,
    ) -> PyResult<T> {
        let (sender, mut receiver) = channel();
        self.run(Box::new(move |engine| _ = sender.send(question(engine))))?;
        let receiver = &mut receiver;
        let heard = detached(py, move || Ok(receiver.recv_timeout(FACTS)))?;
        heard.map_err(|_| EngineError::new_err("the engine does not answer"))
    }
}

#[pymethods]
impl Engine {
    /// Loads the model in a folder or a file. `options`: see `sluice.load`. `cache`: a folder for compiled tokenizers.
    #[new]
    #[pyo3(signature = (path, options, cache=None))]
    fn new(py: Python<'_>, path: PathBuf, options: &Bound<'_, PyDict>, cache: Option<PathBuf>) -> PyResult<Engine> {
        let (setup, begun, own) = (Setup::read(options)?, Instant::now(), path.clone());
        let work = move || serve(&own, setup, cache).map_err(|e| errors::model(&e));
        let server = on_thread(py, "open", work, || ())?;
        let load_seconds = begun.elapsed().as_secs_f64();
        Ok(Engine { server: RwLock::new(Some(server)), process: std::process::id(), load_seconds, path })
    }

    /// Starts to answer a prompt.
    fn generate(&self, py: Python<'_>, prompt: Vec<u32>, params: &Bound<'_, PyDict>) -> PyResult<Stream> {
        let model = self.model()?;
        let mut request = GenerateRequest::read(params, &prompt, &model)?;
        detached(py, || request.constrain(&model.text, &prompt).map_err(|e| errors::request(&e)))?;
        let (updates, received) = unbounded_channel();
        let (generation, tokens) = (request.generation.clone(), prompt.len());
        let (choices, salt, arrived) = (request.choices, request.salt.clone(), Instant::now());
        let submission = Submission { prompt, generation, choices, salt, updates, arrived };
        let ticket = self.with(|server| server.submit(submission))?;
        Ok(Stream::new(Inbox::new(received), ticket, &model.text.tokenizer, &request, tokens))
    }

    /// Answers a request as the server does.
    fn request(&self, method: &str, path: &str, body: Vec<u8>) -> PyResult<Reply> {
        self.with(|server| server.request(method, path, body)).map(Reply::new)
    }

    /// Logits behind each of the tokens, or behind the last: `[rows, vocabulary]`.
    #[pyo3(signature = (tokens, all=true))]
    fn logits(&self, py: Python<'_>, tokens: Vec<u32>, all: bool) -> PyResult<Array> {
        score::logits(py, &|work| self.run(work), tokens, all)
    }

    /// Final hidden states: `[tokens, hidden]`.
    fn hidden_states(&self, py: Python<'_>, tokens: Vec<u32>) -> PyResult<Array> {
        score::states(py, &|work| self.run(work), tokens)
    }

    /// Log-probabilities of the tokens from `from` on, each with the `top` likeliest.
    #[pyo3(signature = (tokens, start=1, top=0))]
    fn logprobs(&self, py: Python<'_>, tokens: Vec<u32>, start: usize, top: usize) -> PyResult<Vec<Scored>> {
        score::logprobs(py, &|work| self.run(work), tokens, start, top)
    }

    /// The model's tokenizer and chat template.
    #[getter]
    fn tokenizer(&self) -> PyResult<Tokenizer> {
        Ok(Tokenizer::of(&self.model()?))
    }

    /// The name in requests and answers.
    #[getter]
    fn name(&self) -> PyResult<String> {
        Ok(self.model()?.name.clone())
    }

    /// Longest context in tokens.
    #[getter]
    fn context(&self) -> PyResult<usize> {
        Ok(self.model()?.context)
    }

    /// Rows of logits.
    #[getter]
    fn vocabulary(&self) -> PyResult<usize> {
        Ok(self.model()?.vocabulary)
    }

    /// Width of hidden states.
    #[getter]
    fn hidden(&self) -> PyResult<usize> {
        Ok(self.model()?.hidden)
    }

    /// Why the engine has failed; `None` while it works.
    #[getter]
    fn failure(&self) -> PyResult<Option<String>> {
        self.with(|server| Ok(server.failure()))
    }

    /// Bytes of memory by class: `weights`, `kv`, and so on.
    fn memory(&self, py: Python<'_>) -> PyResult<Vec<(&'static str, usize)>> {
        self.ask(py, |engine| CLASSES.map(|(name, class)| (name, engine.memory(class))).to_vec())
    }

    /// Facts of the model and of how it runs: (name, value), and notes.
    fn facts(&self, py: Python<'_>) -> PyResult<(Facts, Vec<String>)> {
        self.ask(py, |engine| {
            let files = engine.loading().into_iter().flat_map(Loading::files);
            let readers: Vec<String> = files.map(|f| format!("{}: {}: {}", f.name, f.mode.name(), f.reason)).collect();
            let model = engine.model();
            let facts = vec![
                ("architecture", model.architecture.to_string()),
                ("layers", model.layers.len().to_string()),
                ("threads", engine.options().threads.to_string()),
                ("instructions", format!("{:?}", engine.options().isa)),
                ("placement", engine.placement().placement.name().to_owned()),
                ("readers", readers.join("; ")),
            ];
            let mut notes = engine.model().notes.clone();
            notes.extend(engine.fallbacks());
            (facts, notes)
        })
    }

    /// Waits until all weights are in memory.
    fn wait_loaded(&self, py: Python<'_>) -> PyResult<()> {
        let progress = self.ask(py, |engine| engine.loading().map(Loading::progress))?;
        let Some(progress) = progress else { return Ok(()) };
        loop {
            detached(py, || {
                thread::sleep(Duration::from_millis(1));
                Ok(())
            })?;
            py.check_signals()?;
            if progress.is_over() {
                let checked = self.ask(py, |engine| engine.loading().map(|l| l.check().map_err(Error::new)))?;
                return checked.unwrap_or(Ok(())).map_err(|e| errors::model(&e));
            }
        }
    }

    /// Cancels what runs, writes what is to be kept to the prompt cache, and frees the memory.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        check_process(self.process)?;
        detached(py, || {
            drop(self.server.write().unwrap_or_else(PoisonError::into_inner).take());
            sluice_store::return_freed();
            Ok(())
        })
    }

    /// Whether [`Engine::close`] was called.
    #[getter]
    fn is_closed(&self) -> bool {
        self.server.read().unwrap_or_else(PoisonError::into_inner).is_none()
    }
}

/// Names and values.
type Facts = Vec<(&'static str, String)>;

/// Classes of memory by name.
const CLASSES: [(&str, MemoryClass); 6] = [
    ("mapped_weights", MemoryClass::WeightsMapped),
    ("copied_weights", MemoryClass::WeightsCopied),
    ("kv", MemoryClass::Kv),
    ("state", MemoryClass::State),
    ("experts", MemoryClass::Experts),
    ("scratch", MemoryClass::Scratch),
];

impl Drop for Engine {
    fn drop(&mut self) {
        let server = self.server.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        let Some(server) = server else { return };
        if self.process != std::process::id() {
            // A fork has none of its threads, and must not touch what belongs to them.
            std::mem::forget(server);
            return;
        }
        let mut server = Some(server);
        let mut close = || {
            drop(server.take());
            sluice_store::return_freed();
        };
        // What it waits for may need the interpreter's lock. Without an interpreter there is none.
        if Python::try_attach(|py| py.detach(&mut close)).is_none() {
            close();
        }
    }
}
