//! Which model is in memory: one at a time of those that are offered. A request for another waits until the requests of the one are over, which is then
//! dropped, and until the other is loaded. One that nobody asks for may be dropped too; it is loaded again when somebody does.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use sluice_engine::Engine;
use sluice_engine::text::{ModelText, Style};
use tokio::sync::{oneshot, watch};
use tokio::time::sleep;

use crate::app::{LoadedModel, Settings, outgoing};
use crate::error::ApiError;
use crate::facts::Facts;
use crate::metrics::Metrics;
use crate::outbox::Outgoing;
use crate::runtime::Refused;

/// Loads a model, as often as it is called.
type Load = dyn Fn() -> Result<(Engine, ModelText)> + Send + Sync;
/// Says that a model is there.
pub type Said = dyn Fn(&LoadedModel) + Send + Sync;

/// A model that can be served.
pub struct Offer {
    pub name: String,
    /// Tokens of prompt and answer that it can have; what memory leaves of them is known once it is loaded.
    pub context: usize,
    /// What its chat template knows; `None` where it has none.
    pub style: Option<Style>,
    pub facts: Facts,
    pub load: Box<Load>,
}

struct Offered {
    offer: Offer,
    context: AtomicUsize,
}

enum State {
    /// The first is being loaded: whoever asks is told so, and not kept waiting.
    Starting,
    Empty,
    /// The one before is being left, or this one is being loaded.
    Changing(usize),
    Resident(usize, Arc<LoadedModel>),
    /// Why this one could not be loaded.
    Failed(usize, String),
    Stopping,
}

/// The models that are offered, one of them in memory.
pub struct Models {
    offered: Vec<Offered>,
    state: watch::Sender<State>,
    engines: Arc<Engines>,
    /// When somebody last asked, or was seen to be served.
    used: Mutex<Instant>,
    metrics: Arc<Metrics>,
    settings: Settings,
    /// What waits for clients, whichever model it is of.
    outgoing: Arc<Outgoing>,
    /// Told of each that is loaded.
    said: Box<Said>,
}

/// What a model is, for those who ask which there are.
pub struct Entry<'a> {
    pub name: &'a str,
    pub context: usize,
    pub style: Option<Style>,
    pub status: &'static str,
    /// When it was loaded, in seconds since 1970.
    pub loaded: Option<u64>,
    /// Bytes that it took when it was loaded, and those of them that are a device's.
    pub memory: Option<(u64, u64)>,
    pub facts: &'a Facts,
}

/// What engines say, and what they are told, whichever of them.
#[derive(Default)]
struct Engines {
    /// Those that hold memory.
    count: watch::Sender<usize>,
    /// Why one of them has ended before it was told to.
    died: watch::Sender<Option<String>>,
    /// They are to end what they have, and what is said to those who asked for it.
    given_up: OnceLock<&'static str>,
}

/// An engine that holds memory, as long as this is there.
pub struct ModelLease(Arc<Engines>);

impl ModelLease {
    fn new(engines: &Arc<Engines>) -> ModelLease {
        engines.count.send_modify(|n| *n += 1);
        ModelLease(Arc::clone(engines))
    }

    /// It can do no more, though nobody has told it to end.
    pub fn died(&self, why: &str) {
        self.0.died.send_modify(|died| _ = died.get_or_insert_with(|| why.to_owned()));
    }

    /// Whether it is to end what it has, and why.
    pub fn given_up(&self) -> Option<&'static str> {
        self.0.given_up.get().copied()
    }
}

impl Drop for ModelLease {
    fn drop(&mut self) {
        self.0.count.send_modify(|n| *n -= 1);
    }
}

/// The part of a name behind its publisher's: `Qwen3-0.6B` of `Qwen/Qwen3-0.6B`.
fn base(name: &str) -> &str {
    name.rsplit('/').next().unwrap_or(name)
}

impl Models {
    /// # Panics
    /// Without any offer.
    pub fn new(offers: Vec<Offer>, metrics: Arc<Metrics>, settings: Settings, said: Box<Said>) -> Models {
        assert!(!offers.is_empty(), "a server offers a model at least");
        let offered = |offer: Offer| Offered { context: AtomicUsize::new(offer.context), offer };
        Models {
            offered: offers.into_iter().map(offered).collect(),
            state: watch::Sender::new(State::Starting),
            engines: Arc::default(),
            used: Mutex::new(Instant::now()),
            metrics,
            outgoing: Arc::new(Outgoing::new(outgoing(&settings.limits))),
            settings,
            said,
        }
    }

    /// All that are offered, the default first.
    pub fn entries<'a>(&'a self) -> Vec<Entry<'a>> {
        let state = self.state.borrow();
        let entry = |(i, offered): (usize, &'a Offered)| {
            let (status, loaded) = match &*state {
                State::Resident(at, ready) if *at == i => ("loaded", Some(ready.created)),
                State::Changing(at) if *at == i => ("loading", None),
                State::Starting if i == 0 => ("loading", None),
                _ => ("unloaded", None),
            };
            let memory = match &*state {
                State::Resident(at, ready) if *at == i => Some(ready.memory),
                _ => None,
            };
            let Offered { offer, context } = offered;
            let (name, context, facts) = (&offer.name, context.load(Ordering::Relaxed), &offer.facts);
            Entry { name, context, style: offer.style, status, loaded, memory, facts }
        };
        self.offered.iter().enumerate().map(entry).collect()
    }

    /// Which entry a client means by a name: its own, or one with a publisher's name before it, or after which a client has written another; any other name is
    /// nobody's.
    pub fn named(&self, name: &str) -> Option<usize> {
        let is = |same: fn(&str, &str) -> bool| self.offered.iter().position(|o| same(&o.offer.name, name));
        is(|a, b| a == b).or_else(|| is(|a, b| base(a).eq_ignore_ascii_case(base(b))))
    }

    /// Tokens of the longest context.
    pub fn most_context(&self) -> usize {
        self.offered.iter().map(|o| o.context.load(Ordering::Relaxed)).max().unwrap_or(0)
    }

    /// # Errors
    /// While the first is loaded.
    pub fn begun(&self) -> Result<(), ApiError> {
        if matches!(*self.state.borrow(), State::Starting) { Err(ApiError::loading()) } else { Ok(()) }
    }

    /// Why an engine has ended before it was told to.
    pub fn dead(&self) -> Option<String> {
        self.engines.died.borrow().clone()
    }

    /// Waits until one does.
    pub async fn died(&self) -> String {
        let mut died = self.engines.died.subscribe();
        let why = died.wait_for(Option::is_some).await.ok().and_then(|why| why.clone());
        why.unwrap_or_default()
    }

    /// The model of this name, in memory for as long as the result is held. A name that nobody has means the one that is there, or the first. It may have to be
    /// loaded, which is waited for.
    ///
    /// # Errors
    /// At the start, as long as the first is loaded; where it cannot be loaded; at the end; when an engine has failed.
    pub async fn get(self: &Arc<Models>, name: Option<&str>) -> Result<Arc<LoadedModel>, ApiError> {
        let named = name.and_then(|name| self.named(name));
        let mut changes = self.state.subscribe();
        // A failure that was there before is tried again; one that was waited for is told.
        let mut has_waited = false;
        loop {
            changes.mark_unchanged();
            let mut found = None;
            let mut left = None;
            self.state.send_if_modified(|state| {
                let wanted = named.unwrap_or(match state {
                    State::Resident(at, _) | State::Changing(at) => *at,
                    _ => 0,
                });
                match state {
                    State::Starting => found = Some(Err(ApiError::loading())),
                    State::Stopping => found = Some(Err(Refused::Stopping.into())),
                    State::Resident(at, ready) if *at == wanted => found = Some(Ok(Arc::clone(ready))),
                    State::Failed(at, why) if *at == wanted && has_waited => {
                        found = Some(Err(ApiError::internal(why.clone())));
                    }
                    State::Changing(_) => {}
                    State::Resident(..) | State::Empty | State::Failed(..) => {
                        left = Some((std::mem::replace(state, State::Changing(wanted)), wanted));
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
                // On its own: who has asked for it may go away.
                tokio::spawn(Arc::clone(self).change(wanted));
            }
            has_waited = true;
            tokio::select! {
                _ = changes.changed() => {}
                why = self.died() => return Err(Refused::Dead(why).into()),
            }
        }
    }

    fn touch(&self) {
        *self.used.lock().unwrap_or_else(|e| e.into_inner()) = Instant::now();
    }

    /// Loads one when the one before has given its memory back.
    async fn change(self: Arc<Models>, wanted: usize) {
        let _ = self.engines.count.subscribe().wait_for(|n| *n == 0).await;
        let state = match self.load(wanted).await {
            Ok(ready) => State::Resident(wanted, ready),
            Err(e) => {
                let name = &self.offered[wanted].offer.name;
                crate::note(&format!("{name}: {e:#}"));
                State::Failed(wanted, format!("{name} cannot be loaded: {e:#}"))
            }
        };
        self.set(state);
    }

    /// Loads the first.
    ///
    /// # Errors
    /// What is wrong with it.
    pub async fn start(self: &Arc<Models>) -> Result<()> {
        let ready = self.load(0).await?;
        self.set(State::Resident(0, ready));
        Ok(())
    }

    /// Unless all is over by now.
    fn set(&self, to: State) {
        self.touch();
        let ready = if let State::Resident(_, ready) = &to { Some(Arc::clone(ready)) } else { None };
        self.state.send_if_modified(|state| {
            let goes_on = !matches!(state, State::Stopping);
            if goes_on {
                *state = to;
            }
            goes_on
        });
        if let Some(ready) = ready {
            (self.said)(&ready);
        }
    }

    async fn load(self: &Arc<Models>, which: usize) -> Result<Arc<LoadedModel>> {
        let (tell, told) = oneshot::channel();
        let own = Arc::clone(self);
        thread::Builder::new().name("load".into()).spawn(move || {
            let offered = &own.offered[which];
            let loaded = (offered.offer.load)().and_then(|(engine, text)| {
                let held = ModelLease::new(&own.engines);
                LoadedModel::new(
                    offered.offer.name.clone(),
                    engine,
                    text,
                    held,
                    &own.settings,
                    &own.metrics,
                    &own.outgoing,
                )
            });
            if let Ok(ready) = &loaded {
                offered.context.store(ready.context, Ordering::Relaxed);
                own.metrics.loaded(Some(&ready.name));
            }
            let _ = tell.send(loaded.map(Arc::new));
        })?;
        told.await.context("what loads it has panicked")?
    }

    /// Drops the model in memory whenever nobody has asked for it for so long; never returns.
    pub async fn unload_when_idle(self: Arc<Models>, after: Duration) {
        loop {
            sleep((after / 10).clamp(Duration::from_millis(10), Duration::from_secs(5))).await;
            let mut dropped = None;
            self.state.send_if_modified(|state| {
                let State::Resident(_, ready) = state else { return false };
                if Arc::strong_count(ready) > 1 {
                    self.touch();
                }
                let idle = self.used.lock().unwrap_or_else(|e| e.into_inner()).elapsed();
                if idle >= after {
                    dropped = Some(std::mem::replace(state, State::Empty));
                }
                dropped.is_some()
            });
            if let Some(State::Resident(_, ready)) = dropped {
                crate::note(&format!("{}: unloaded, nobody has asked for it for {} s", ready.name, after.as_secs()));
                self.metrics.loaded(None);
            }
        }
    }

    /// No more requests are taken; those under way come to their end.
    pub fn stop(&self) {
        let before = self.state.send_replace(State::Stopping);
        if let State::Resident(_, ready) = before {
            ready.drain();
        }
    }

    /// Has what is under way ended, after [`Models::stop`].
    pub fn give_up(&self) {
        let _ = self
            .engines
            .given_up
            .set("the server is shutting down, and the time that answers had to come to their end is over");
    }

    /// Waits until no engine holds memory, after [`Models::stop`].
    pub async fn ended(&self) {
        let _ = self.engines.count.subscribe().wait_for(|n| *n == 0).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::access::Access;
    use crate::runtime::Limits;

    fn models(names: &[&str]) -> Models {
        let offer = |name: &&str| Offer {
            name: (*name).to_owned(),
            context: 10,
            style: None,
            facts: Facts::default(),
            load: Box::new(|| anyhow::bail!("there is none")),
        };
        let settings = Settings {
            limits: Limits::default(),
            access: Access::default(),
            request_timeout: None,
            idle_unload: None,
            log_requests: false,
        };
        Models::new(names.iter().map(offer).collect(), Arc::new(Metrics::new()), settings, Box::new(|_| ()))
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
            assert_eq!(models.named(name), expected, "{name}");
        }
    }
}
