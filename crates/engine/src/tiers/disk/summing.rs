//! The thread that sums weights while the engine serves already.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::Sender;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Context, Result};
use sluice_store::{LoadProgress, lower_priority};

use super::fingerprint::ModelIdentity;
use super::shared::Shared;
use super::writer::WriterCommand;

/// How often it checks whether the weights are loaded, which has priority.
const PAUSE: Duration = Duration::from_millis(20);

/// Starts a thread that sums the remaining weights of a model once they are loaded, and sends the fingerprint to the writer.
///
/// # Errors
/// When the system refuses a thread.
pub(super) fn start(
    mut identity: ModelIdentity,
    load: LoadProgress,
    shared: Arc<Shared>,
    writer: Sender<WriterCommand>,
) -> Result<JoinHandle<()>> {
    shared.to_sum.store(identity.unsummed(), Ordering::Relaxed);
    let work = move || {
        lower_priority();
        let is_wanted = || shared.is_ok() && !shared.is_closing();
        while !load.is_over() {
            if !is_wanted() {
                return;
            }
            thread::sleep(PAUSE);
        }
        let summed = identity.sum(true, &mut |bytes| {
            shared.summed.fetch_add(bytes, Ordering::Relaxed);
            is_wanted()
        });
        match summed.map(|_| identity.fingerprint()) {
            Ok(Some(model)) => _ = writer.send(WriterCommand::SetFingerprint(model)),
            // It was stopped.
            Ok(None) => {}
            Err(e) => shared.give_up(e.to_string()),
        }
    };
    thread::Builder::new().name("prompt-sums".into()).spawn(work).context("a thread of the prompt cache")
}
