//! A model in memory.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use sluice_engine::text::ModelText;
use sluice_engine::{Device, Engine, Sessions};

use crate::clock::now;
use crate::http::outbox::SendBudget;
use crate::http::settings::Settings;
use crate::metrics::Metrics;
use crate::models::lease::ModelLease;
use crate::models::runtime::thread::EngineThread;

/// A model in memory, where it stays as long as a reference is held.
pub struct LoadedModel {
    /// The name in requests and answers.
    pub name: String,
    /// Tokenizer, chat template and defaults.
    pub text: ModelText,
    /// Longest context in tokens: prompt and answer together.
    pub context: usize,
    /// Number of tokens in the vocabulary.
    pub vocabulary: usize,
    /// Width of hidden states, and so of embeddings.
    pub hidden: usize,
    /// Whether the model has recurrent layers.
    pub has_states: bool,
    /// Whether tokens are drafted.
    pub drafts: bool,
    /// Whether prefixes of prompts are kept for later requests.
    pub keeps_prefixes: bool,
    /// When it was loaded, in seconds since 1970.
    pub created: u64,
    /// Named conversations; `None` without a prompt cache.
    pub sessions: Option<Sessions>,
    /// Memory it took when it was loaded.
    pub memory: MemoryUse,
    pub(crate) engine: EngineThread,
    pub(crate) request_timeout: Option<Duration>,
    pub(crate) send_budget: Arc<SendBudget>,
}

/// Memory of a model.
#[derive(Clone, Copy, Debug, Default)]
pub struct MemoryUse {
    /// Bytes in all.
    pub total: u64,
    /// Bytes of them on devices other than the host.
    pub device: u64,
}

impl MemoryUse {
    fn of(engine: &mut Engine) -> MemoryUse {
        let uses = engine.memory_uses();
        let sum = |is: fn(Device) -> bool| uses.iter().filter(|m| is(m.device)).map(|m| m.bytes as u64).sum();
        MemoryUse { total: sum(|_| true), device: sum(|device| device != Device::Host) }
    }
}

impl LoadedModel {
    /// Starts the engine's thread.
    ///
    /// # Errors
    /// When the system refuses a thread.
    pub(crate) fn new(
        name: String,
        mut engine: Engine,
        text: ModelText,
        lease: ModelLease,
        settings: &Settings,
        metrics: &Arc<Metrics>,
        send_budget: &Arc<SendBudget>,
    ) -> Result<LoadedModel> {
        metrics.memory(&mut engine);
        Ok(LoadedModel {
            name,
            text,
            context: engine.max_context(),
            vocabulary: engine.model().vocabulary,
            hidden: engine.model().hidden,
            has_states: engine.model().state_len() > 0,
            drafts: !engine.draft_stats().is_empty(),
            keeps_prefixes: engine.has_prefix_cache(),
            created: now(),
            sessions: engine.sessions(),
            memory: MemoryUse::of(&mut engine),
            engine: EngineThread::start(engine, lease, settings.limits.queue, Arc::clone(metrics))?,
            request_timeout: settings.request_timeout,
            send_budget: Arc::clone(send_budget),
        })
    }
}
