//! Which model is in memory: one at a time of those that are offered. A request for another model waits until the requests of the current one are over, the
//! current one is dropped, and the other is loaded. A model that no request uses can be dropped too; the next request loads it again.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use sluice_engine::Engine;
use sluice_engine::text::{ModelText, Style};
use tokio::sync::{oneshot, watch};
use tokio::time::sleep;

use crate::http::error::ApiError;
use crate::http::outbox::SendBudget;
use crate::http::settings::Settings;
use crate::log::note;
use crate::metrics::Metrics;
use crate::models::facts::ModelFacts;
use crate::models::lease::{EngineTracker, ModelLease};
use crate::models::loaded::{LoadedModel, MemoryUse};
use crate::models::runtime::thread::Refused;

/// Loads a model; may be called any number of times.
type LoadFn = dyn Fn() -> Result<(Engine, ModelText)> + Send + Sync;
/// Called with each model that was loaded.
pub type OnLoaded = dyn Fn(&LoadedModel) + Send + Sync;

/// A model that can be served.
pub struct Offer {
    /// Its name in requests and answers.
    pub name: String,
    /// Longest context in tokens. Once the model is loaded, what memory allows replaces it.
    pub context: usize,
    /// What its chat template supports; `None` without one.
    pub style: Option<Style>,
    /// What is known of it without loading it.
    pub facts: ModelFacts,
    /// Loads it.
    pub load: Box<LoadFn>,
}

struct OfferedModel {
    offer: Offer,
    context: AtomicUsize,
}

/// Which model is in memory. Numbers are indices of offers.
enum Residency {
    /// The first model is loading; requests are refused rather than kept waiting.
    Starting,
    Empty,
    /// The previous model is being dropped, or this one is loading.
    Switching(usize),
    Resident(usize, Arc<LoadedModel>),
    /// Why this model could not be loaded.
    Failed(usize, String),
    Stopping,
}

/// The models that are offered, one of them in memory.
pub struct ModelManager {
    offered: Vec<OfferedModel>,
    state: watch::Sender<Residency>,
    engines: Arc<EngineTracker>,
    /// When a request last used a model.
    last_use: Mutex<Instant>,
    metrics: Arc<Metrics>,
    settings: Settings,
    /// Shared by all models.
    send_budget: Arc<SendBudget>,
    on_loaded: Box<OnLoaded>,
}

/// A model as lists show it.
pub struct ModelEntry<'a> {
    /// Its name in requests and answers.
    pub name: &'a str,
    /// Longest context in tokens.
    pub context: usize,
    /// What its chat template supports; `None` without one.
    pub style: Option<Style>,
    /// `loaded`, `loading` or `unloaded`.
    pub status: &'static str,
    /// When it was loaded, in seconds since 1970.
    pub loaded: Option<u64>,
    /// Memory that it took when it was loaded.
    pub memory: Option<MemoryUse>,
    /// What is known of it without loading it.
    pub facts: &'a ModelFacts,
}

/// A name without its publisher: `Qwen3-0.6B` of `Qwen/Qwen3-0.6B`.
fn base_name(name: &str) -> &str {
    name.rsplit('/').next().unwrap_or(name)
}

impl ModelManager {
    /// # Panics
    /// Without any offer.
    pub fn new(
        offers: Vec<Offer>,
        metrics: Arc<Metrics>,
        settings: Settings,
        on_loaded: Box<OnLoaded>,
    ) -> ModelManager {
        assert!(!offers.is_empty(), "a server offers at least one model");
        let offered = |offer: Offer| OfferedModel { context: AtomicUsize::new(offer.context), offer };
        ModelManager {
            offered: offers.into_iter().map(offered).collect(),
            state: watch::Sender::new(Residency::Starting),
            engines: Arc::default(),
            last_use: Mutex::new(Instant::now()),
            metrics,
            send_budget: Arc::new(SendBudget::new(settings.limits.send_budget(), settings.limits.kept_budget())),
            settings,
            on_loaded,
        }
    }

    /// All offered models, the default first.
    pub fn entries<'a>(&'a self) -> Vec<ModelEntry<'a>> {
        let state = self.state.borrow();
        let entry = |(i, offered): (usize, &'a OfferedModel)| {
            let (status, loaded) = match &*state {
                Residency::Resident(at, model) if *at == i => ("loaded", Some(model.created)),
                Residency::Switching(at) if *at == i => ("loading", None),
                Residency::Starting if i == 0 => ("loading", None),
                _ => ("unloaded", None),
            };
            let memory = match &*state {
                Residency::Resident(at, model) if *at == i => Some(model.memory),
                _ => None,
            };
            let OfferedModel { offer, context } = offered;
            let (name, context, facts) = (&offer.name, context.load(Ordering::Relaxed), &offer.facts);
            ModelEntry { name, context, style: offer.style, status, loaded, memory, facts }
        };
        self.offered.iter().enumerate().map(entry).collect()
    }

    /// The index of the model that a client means by a name. An exact match counts first; then a match that ignores case and publishers on both sides.
    pub fn find(&self, name: &str) -> Option<usize> {
        let is = |same: fn(&str, &str) -> bool| self.offered.iter().position(|o| same(&o.offer.name, name));
        is(|a, b| a == b).or_else(|| is(|a, b| base_name(a).eq_ignore_ascii_case(base_name(b))))
    }

    /// The longest context of any model, in tokens.
    pub fn max_context(&self) -> usize {
        self.offered.iter().map(|o| o.context.load(Ordering::Relaxed)).max().unwrap_or(0)
    }

    /// Checks that the first model has been loaded.
    ///
    /// # Errors
    /// While it is loading.
    pub fn check_started(&self) -> Result<(), ApiError> {
        if matches!(*self.state.borrow(), Residency::Starting) { Err(ApiError::loading()) } else { Ok(()) }
    }

    /// Why an engine has failed; `None` while all work.
    pub fn failure(&self) -> Option<String> {
        self.engines.failure()
    }

    /// Waits until an engine fails, and returns the reason.
    pub async fn failed(&self) -> String {
        self.engines.failed().await
    }

    /// The model of this name, which stays in memory as long as the result is held. Waits while it is loaded. An unknown name means the model in memory, or
    /// the first one.
    ///
    /// # Errors
    /// While the first model is loading; when the model cannot be loaded; when the server stops; when an engine has failed.
    pub async fn get(self: &Arc<ModelManager>, name: Option<&str>) -> Result<Arc<LoadedModel>, ApiError> {
        let named = name.and_then(|name| self.find(name));
        let mut changes = self.state.subscribe();
        // A failure from before is tried again; a failure of the load that this call waited for is returned.
        let mut has_waited = false;
        loop {
            changes.mark_unchanged();
            let mut found = None;
            let mut left = None;
            self.state.send_if_modified(|state| {
                let wanted = named.unwrap_or(match state {
                    Residency::Resident(at, _) | Residency::Switching(at) => *at,
                    _ => 0,
                });
                match state {
                    Residency::Starting => found = Some(Err(ApiError::loading())),
                    Residency::Stopping => found = Some(Err(Refused::Stopping.into())),
                    Residency::Resident(at, model) if *at == wanted => found = Some(Ok(Arc::clone(model))),
                    Residency::Failed(at, why) if *at == wanted && has_waited => {
                        found = Some(Err(ApiError::internal(why.clone())));
                    }
                    Residency::Switching(_) => {}
                    Residency::Resident(..) | Residency::Empty | Residency::Failed(..) => {
                        left = Some((std::mem::replace(state, Residency::Switching(wanted)), wanted));
                        return true;
                    }
                }
                false
            });
            if let Some(found) = found {
                self.touch();
                return found;
            }
            if let Some((before, wanted)) = left {
                drop(before);
                // A task of its own: the client that asked for it may go away.
                tokio::spawn(Arc::clone(self).switch_to(wanted));
            }
            has_waited = true;
            tokio::select! {
                _ = changes.changed() => {}
                why = self.failed() => return Err(Refused::Failed(why).into()),
            }
        }
    }

    fn touch(&self) {
        *self.last_use.lock().unwrap_or_else(|e| e.into_inner()) = Instant::now();
    }

    /// Loads a model once the previous one has freed its memory.
    async fn switch_to(self: Arc<ModelManager>, wanted: usize) {
        self.engines.all_ended().await;
        let state = match self.load(wanted).await {
            Ok(model) => Residency::Resident(wanted, model),
            Err(e) => {
                let name = &self.offered[wanted].offer.name;
                note(&format!("{name}: {e:#}"));
                Residency::Failed(wanted, format!("{name} cannot be loaded: {e:#}"))
            }
        };
        self.set(state);
    }

    /// Loads the first model.
    ///
    /// # Errors
    /// Why it cannot be loaded.
    pub async fn start(self: &Arc<ModelManager>) -> Result<()> {
        let model = self.load(0).await?;
        self.set(Residency::Resident(0, model));
        Ok(())
    }

    /// Changes the state, unless the server is stopping.
    fn set(&self, to: Residency) {
        self.touch();
        let model = if let Residency::Resident(_, model) = &to { Some(Arc::clone(model)) } else { None };
        self.state.send_if_modified(|state| {
            let goes_on = !matches!(state, Residency::Stopping);
            if goes_on {
                *state = to;
            }
            goes_on
        });
        if let Some(model) = model {
            (self.on_loaded)(&model);
        }
    }

    async fn load(self: &Arc<ModelManager>, which: usize) -> Result<Arc<LoadedModel>> {
        let (sender, receiver) = oneshot::channel();
        let own = Arc::clone(self);
        thread::Builder::new().name("load".into()).spawn(move || {
            let offered = &own.offered[which];
            let loaded = (offered.offer.load)().and_then(|(engine, text)| {
                let lease = ModelLease::new(&own.engines);
                LoadedModel::new(
                    offered.offer.name.clone(),
                    engine,
                    text,
                    lease,
                    &own.settings,
                    &own.metrics,
                    &own.send_budget,
                )
            });
            if let Ok(model) = &loaded {
                offered.context.store(model.context, Ordering::Relaxed);
                own.metrics.loaded(Some(&model.name));
            }
            let _ = sender.send(loaded.map(Arc::new));
        })?;
        receiver.await.context("the loading thread has panicked")?
    }

    /// Drops the model in memory whenever no request has used it for this long; never returns.
    pub async fn unload_when_idle(self: Arc<ModelManager>, after: Duration) {
        loop {
            sleep((after / 10).clamp(Duration::from_millis(10), Duration::from_secs(5))).await;
            let mut dropped = None;
            self.state.send_if_modified(|state| {
                let Residency::Resident(_, model) = state else { return false };
                if Arc::strong_count(model) > 1 {
                    self.touch();
                }
                let idle = self.last_use.lock().unwrap_or_else(|e| e.into_inner()).elapsed();
                if idle >= after {
                    dropped = Some(std::mem::replace(state, Residency::Empty));
                }
                dropped.is_some()
            });
            if let Some(Residency::Resident(_, model)) = dropped {
                note(&format!("{}: unloaded after {} s without a request", model.name, after.as_secs()));
                self.metrics.loaded(None);
            }
        }
    }

    /// Takes no more requests, and lets running ones finish.
    pub fn stop(&self) {
        let before = self.state.send_replace(Residency::Stopping);
        if let Residency::Resident(_, model) = before {
            model.engine.drain();
        }
    }

    /// Cancels running requests, after [`ModelManager::stop`].
    pub fn abort(&self) {
        self.engines.abort("the server is shutting down, and its grace period for running requests is over");
    }

    /// Waits until no engine holds memory, after [`ModelManager::stop`].
    pub async fn ended(&self) {
        self.engines.all_ended().await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::access::Access;
    use crate::http::settings::Limits;

    fn models(names: &[&str]) -> ModelManager {
        let offer = |name: &&str| Offer {
            name: (*name).to_owned(),
            context: 10,
            style: None,
            facts: ModelFacts::default(),
            load: Box::new(|| anyhow::bail!("there is none")),
        };
        let settings = Settings {
            limits: Limits::default(),
            access: Access::default(),
            request_timeout: None,
            idle_unload: None,
            log_requests: false,
        };
        ModelManager::new(names.iter().map(offer).collect(), Arc::new(Metrics::new()), settings, Box::new(|_| ()))
    }

    #[test]
    fn names_are_found_with_and_without_their_publisher() {
        let models = models(&["small", "org/Large"]);
        for (name, expected) in [
            ("small", Some(0)),
            ("acme/small", Some(0)),
            ("org/Large", Some(1)),
            ("large", Some(1)),
            ("gpt-5", None),
            ("", None),
        ] {
            assert_eq!(models.find(name), expected, "{name}");
        }
    }
}
