//! The handle of the engine's thread.

use std::sync::atomic::Ordering;
use std::sync::{Arc, mpsc};

use sluice_engine::{Engine, ReadAhead, Saved};

use crate::metrics::Metrics;
use crate::models::lease::ModelLease;
use crate::models::runtime::commands::{Command, CountGuard, Submission, ThreadState};
use crate::models::runtime::worker::Worker;

/// The handle of a thread that runs an engine. Dropping it lets running submissions finish and then ends the thread.
pub struct EngineThread {
    commands: mpsc::Sender<Command>,
    state: Arc<ThreadState>,
    /// How many submissions may wait.
    queue: usize,
    metrics: Arc<Metrics>,
}

/// Why a submission was refused.
#[derive(Debug, PartialEq, Eq)]
pub enum Refused {
    /// The queue is full, with this many waiting.
    Full(usize),
    /// The server is shutting down.
    Stopping,
    /// The engine has failed, for this reason.
    Failed(String),
}

/// A submission that was accepted. Dropping it cancels what is left of it.
pub struct Ticket {
    id: u64,
    commands: mpsc::Sender<Command>,
}

impl Ticket {
    /// Ends one choice, which needs no more tokens.
    pub fn stop(&self, choice: usize) {
        let _ = self.commands.send(Command::CancelChoice(self.id, choice));
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        // The thread ignores this if the submission is over.
        let _ = self.commands.send(Command::Cancel(self.id));
    }
}

impl EngineThread {
    /// Starts the thread. `queue`: how many submissions may wait. The thread drops `lease` after the engine.
    ///
    /// # Errors
    /// When the system refuses a thread.
    pub fn start(
        engine: Engine,
        lease: ModelLease,
        queue: usize,
        metrics: Arc<Metrics>,
    ) -> std::io::Result<EngineThread> {
        let (commands, received) = mpsc::channel();
        let state = Arc::new(ThreadState::default());
        let worker = Worker::new(engine, received, Arc::clone(&state), Arc::clone(&metrics), lease);
        std::thread::Builder::new().name("engine".into()).spawn(move || worker.run_to_end())?;
        Ok(EngineThread { commands, state, queue, metrics })
    }

    /// Queues a submission.
    ///
    /// # Errors
    /// When the queue is full, or the engine takes no more.
    pub fn submit(&self, submission: Submission) -> Result<Ticket, Refused> {
        if let Some(why) = self.failure() {
            return Err(Refused::Failed(why));
        }
        if self.state.stopping.load(Ordering::SeqCst) {
            return Err(Refused::Stopping);
        }
        let (guard, waiting) = CountGuard::new(&self.state.waiting);
        if waiting >= self.queue {
            self.metrics.refused();
            return Err(Refused::Full(waiting));
        }
        let id = self.state.next_id.fetch_add(1, Ordering::Relaxed);
        let ticket = Ticket { id, commands: self.commands.clone() };
        match self.commands.send(Command::Submit(id, submission, guard)) {
            Ok(()) => Ok(ticket),
            Err(_) => Err(Refused::Failed(self.failure().unwrap_or_else(|| "the engine has ended".into()))),
        }
    }

    /// Writes what memory holds of a conversation to the prompt cache, under a name. `reply` gets the result; it is dropped if the engine takes no more.
    pub fn save_session(&self, name: String, salt: Vec<u8>, tokens: Vec<u32>, reply: Saved) {
        let _ = self.commands.send(Command::SaveSession { name, salt, tokens, reply });
    }

    /// Reads a conversation into memory as soon as the engine is idle.
    pub fn read_ahead(&self, session: ReadAhead) {
        let _ = self.commands.send(Command::ReadAhead(session));
    }

    /// Has something done with the engine, between two steps. All requests wait for it. It is dropped undone if the engine takes no more.
    pub fn run(&self, work: impl FnOnce(&mut Engine) + Send + 'static) {
        let _ = self.commands.send(Command::Run(Box::new(work)));
    }

    /// Why the engine has failed; `None` while it works.
    pub fn failure(&self) -> Option<String> {
        self.state.failure.get().cloned()
    }

    /// Takes no more submissions, and lets those that were taken finish.
    pub fn drain(&self) {
        self.state.stopping.store(true, Ordering::SeqCst);
        let _ = self.commands.send(Command::Stop);
    }
}

impl Drop for EngineThread {
    fn drop(&mut self) {
        self.drain();
    }
}
