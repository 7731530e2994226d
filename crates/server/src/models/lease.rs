//! Which engines hold memory, shared by the model manager and the engines' threads. Neither needs to know the other.

use std::sync::{Arc, OnceLock};

use tokio::sync::watch;

/// What the manager and all engines tell each other.
#[derive(Default)]
pub struct EngineTracker {
    /// How many engines hold memory.
    count: watch::Sender<usize>,
    /// Why an engine has ended without being told to.
    failure: watch::Sender<Option<String>>,
    /// Set when engines are to cancel what they have; the text is for clients.
    abort: OnceLock<&'static str>,
}

impl EngineTracker {
    /// Why an engine has failed; `None` while all work.
    pub fn failure(&self) -> Option<String> {
        self.failure.borrow().clone()
    }

    /// Waits until an engine fails, and returns the reason.
    pub async fn failed(&self) -> String {
        let mut failure = self.failure.subscribe();
        let why = failure.wait_for(Option::is_some).await.ok().and_then(|why| why.clone());
        why.unwrap_or_default()
    }

    /// Waits until no engine holds memory.
    pub async fn all_ended(&self) {
        let _ = self.count.subscribe().wait_for(|n| *n == 0).await;
    }

    /// Makes engines cancel what they have. Clients get `why`.
    pub fn abort(&self, why: &'static str) {
        let _ = self.abort.set(why);
    }
}

/// Stands for an engine that holds memory, until it is dropped.
pub struct ModelLease(Arc<EngineTracker>);

impl ModelLease {
    /// Counts one more engine.
    pub fn new(engines: &Arc<EngineTracker>) -> ModelLease {
        engines.count.send_modify(|n| *n += 1);
        ModelLease(Arc::clone(engines))
    }

    /// Reports that this engine has ended without being told to. The first report counts.
    pub fn report_failure(&self, why: &str) {
        self.0.failure.send_modify(|failure| _ = failure.get_or_insert_with(|| why.to_owned()));
    }

    /// The reason, if the engine is to cancel what it has.
    pub fn abort_reason(&self) -> Option<&'static str> {
        self.0.abort.get().copied()
    }
}

impl Drop for ModelLease {
    fn drop(&mut self) {
        self.0.count.send_modify(|n| *n -= 1);
    }
}
