//! The engine's thread itself.

use std::any::Any;
use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use sluice_engine::{Engine, Event, Finish, SequenceId};

use crate::log::note;
use crate::metrics::Metrics;
use crate::models::lease::ModelLease;
use crate::models::runtime::commands::{Command, CountGuard, Submission, ThreadState, Update};

/// A submission with its sequences.
struct ActiveRequest {
    submission: Submission,
    /// One per choice that was started.
    sequences: Vec<SequenceId>,
    /// Choices that are not complete.
    left: usize,
    /// Counts the request as waiting until it starts.
    waits: Option<CountGuard>,
    /// Counts it as running from then on.
    runs: Option<CountGuard>,
    /// By choice: when its last token came.
    last_token: Vec<Option<Instant>>,
}

/// What the thread owns.
pub struct Worker {
    engine: Engine,
    received: mpsc::Receiver<Command>,
    state: Arc<ThreadState>,
    metrics: Arc<Metrics>,
    requests: HashMap<u64, ActiveRequest>,
    /// The submission and choice of each sequence.
    owners: HashMap<SequenceId, (u64, usize)>,
    /// Time of the last command or step.
    last_activity: Instant,
    /// The thread has ended as it was told to, or has reported why not.
    is_over: bool,
    /// Declared after the engine, so that it is dropped after it.
    lease: ModelLease,
}

/// How often metrics are updated while nothing happens.
const METRICS_INTERVAL: Duration = Duration::from_secs(5);
/// How long the engine must be idle before anything is read ahead. A client that answers an answer at once does not wait for it.
const QUIET: Duration = Duration::from_millis(50);
/// Pause between two polls of something that waits for the disk.
const DISK_POLL: Duration = Duration::from_millis(1);

fn panic_message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("it did not say why")
}

impl Drop for Worker {
    /// Runs however the thread ends.
    fn drop(&mut self) {
        if !self.is_over {
            self.fail("the engine's thread has ended");
        }
    }
}

impl Worker {
    /// Takes over the engine. Commands arrive through `received`.
    pub fn new(
        engine: Engine,
        received: mpsc::Receiver<Command>,
        state: Arc<ThreadState>,
        metrics: Arc<Metrics>,
        lease: ModelLease,
    ) -> Worker {
        let (requests, owners) = (HashMap::new(), HashMap::new());
        Worker {
            engine,
            received,
            state,
            metrics,
            requests,
            owners,
            last_activity: Instant::now(),
            is_over: false,
            lease,
        }
    }

    /// Runs until the engine is told to stop, or fails.
    pub fn run_to_end(mut self) {
        match catch_unwind(AssertUnwindSafe(|| self.run())) {
            Ok(Ok(())) => self.is_over = true,
            Ok(Err(e)) => self.fail(&format!("{e:#}")),
            Err(panic) => self.fail(&format!("the engine has panicked: {}", panic_message(&*panic))),
        }
    }

    /// # Errors
    /// Why the engine has failed.
    fn run(&mut self) -> anyhow::Result<()> {
        let mut stopping = false;
        loop {
            if let Some(why) = self.lease.abort_reason() {
                self.abort(why);
            }
            // 1. Take commands; block only while the engine is idle
            loop {
                // An idle engine writes conversations to disk, a little at a time. Then it reads what was used before this
                // start, and experts that fit in memory.
                let has_work = self.background_work()?;
                let command = if self.engine.is_idle() && !stopping && !has_work {
                    self.update_metrics();
                    let quiet = QUIET.saturating_sub(self.last_activity.elapsed());
                    match self.received.recv_timeout(if quiet.is_zero() { METRICS_INTERVAL } else { quiet }) {
                        Ok(command) => command,
                        Err(mpsc::RecvTimeoutError::Timeout) => continue,
                        Err(mpsc::RecvTimeoutError::Disconnected) => {
                            let _ = self.engine.save();
                            return Ok(());
                        }
                    }
                } else {
                    match self.received.try_recv() {
                        Ok(command) => command,
                        Err(_) => break,
                    }
                };
                self.last_activity = Instant::now();
                match command {
                    Command::Submit(id, submission, guard) => self.submit(id, submission, guard),
                    Command::Cancel(id) => self.cancel(id),
                    Command::CancelChoice(id, choice) => self.cancel_choice(id, choice),
                    Command::SaveSession { name, salt, tokens, reply } => {
                        self.engine.save_session(name, &salt, &tokens, reply);
                    }
                    Command::ReadAhead(session) => self.engine.read_ahead(session),
                    Command::Run(work) => work(&mut self.engine),
                    Command::Stop => stopping = true,
                }
            }
            if self.engine.is_idle() && stopping {
                // Sessions that are being saved are finished first.
                while let Ok(true) = self.engine.flush_sessions() {
                    thread::sleep(DISK_POLL);
                }
                let _ = self.engine.save();
                self.update_metrics();
                return Ok(());
            }
            if self.engine.is_idle() {
                continue;
            }
            // 2. Compute one step
            let begun = Instant::now();
            let events = self.engine.step()?.to_vec();
            self.metrics.step(begun.elapsed());
            events.into_iter().for_each(|event| self.deliver(event));
            self.last_activity = Instant::now();
            self.update_metrics();
        }
    }

    /// Does a portion of the work that requests need not wait for. Returns whether there is more of it to do now.
    fn background_work(&mut self) -> anyhow::Result<bool> {
        if self.engine.flush_sessions()? {
            if self.engine.is_idle() {
                // The engine may be waiting for a write.
                thread::sleep(DISK_POLL);
            }
            return Ok(self.engine.is_idle());
        }
        let quiet = self.last_activity.elapsed() >= QUIET;
        let idle = self.engine.is_idle();
        Ok(idle
            && (self.engine.copy_weights()
                || self.engine.flush_idle()?
                || quiet && (self.engine.measure_drafts() || self.engine.prefetch()? || self.engine.fill_experts())))
    }

    fn submit(&mut self, id: u64, submission: Submission, guard: CountGuard) {
        let choices = submission.choices;
        let request = ActiveRequest {
            submission,
            sequences: Vec::with_capacity(choices),
            left: choices,
            waits: Some(guard),
            runs: None,
            last_token: vec![None; choices],
        };
        self.requests.insert(id, request);
        self.start_choice(id);
    }

    /// Starts the next choice of a submission. The first starts alone; the others start when its prompt is computed, which they share.
    fn start_choice(&mut self, id: u64) {
        let Some(request) = self.requests.get_mut(&id) else { return };
        let choice = request.sequences.len();
        let mut generation = request.submission.generation.clone();
        generation.sampling.seed = generation.sampling.seed.wrapping_add(choice as u64);
        let sequence = self.engine.add_sequence_salted(&request.submission.salt);
        request.sequences.push(sequence);
        self.owners.insert(sequence, (id, choice));
        if let Err(e) = self.engine.start(sequence, &request.submission.prompt, generation) {
            self.finish_choice(sequence, Err(format!("{e:#}")));
        }
    }

    /// Sends an event to the request that it belongs to.
    fn deliver(&mut self, event: Event) {
        let sequence = event.id();
        let Some(&(id, choice)) = self.owners.get(&sequence) else { return };
        let Some(request) = self.requests.get_mut(&id) else { return };
        let mut gone = false;
        if request.runs.is_none() {
            request.waits = None;
            request.runs = Some(CountGuard::new(&self.state.running).0);
            let cached = self.engine.reused_tokens(sequence).unwrap_or(0);
            let restored = self.engine.restored_tokens(sequence).unwrap_or(0);
            self.metrics.prompt_started(
                request.submission.prompt.len(),
                cached,
                restored,
                request.submission.arrived.elapsed(),
            );
            gone |= request.submission.updates.send(Update::Started { cached }).is_err();
        }
        match event {
            Event::Prefill { .. } => {}
            Event::Token { token, .. } => {
                let logprobs = self.engine.take_logprobs(sequence);
                let (now, before) = (Instant::now(), request.last_token[choice]);
                request.last_token[choice] = Some(now);
                match before {
                    None => self.metrics.first_token(request.submission.arrived.elapsed()),
                    Some(before) => self.metrics.next_token(now - before),
                }
                gone |= request.submission.updates.send(Update::Token { choice, token, logprobs }).is_err();
                let all = request.sequences.len() == request.submission.choices;
                if before.is_none() && choice == 0 && !all {
                    (1..request.submission.choices).for_each(|_| self.start_choice(id));
                }
            }
            Event::Finished { reason: Finish::Failed, .. } => {
                let why = self.engine.take_failure(sequence);
                let why = why.map_or_else(|| "the tokens could not be computed".to_owned(), |e| format!("{e:#}"));
                return self.finish_choice(sequence, Err(why));
            }
            Event::Finished { reason, .. } => {
                if let Some(vector) = self.engine.take_embedding(sequence) {
                    let _ = request.submission.updates.send(Update::Embedding(vector));
                }
                return self.finish_choice(sequence, Ok(reason));
            }
        }
        if gone {
            self.cancel(id);
        }
    }

    /// Ends a choice. `result`: why it finished, or why it failed.
    fn finish_choice(&mut self, sequence: SequenceId, result: Result<Finish, String>) {
        let drafted = self.engine.drafted(sequence);
        self.engine.remove_sequence(sequence);
        let Some((id, choice)) = self.owners.remove(&sequence) else { return };
        let Some(request) = self.requests.get_mut(&id) else { return };
        let update = match result {
            Ok(reason) => {
                self.metrics.finished(reason);
                Update::Finished { choice, reason, drafted }
            }
            Err(why) => Update::Failed(why),
        };
        let _ = request.submission.updates.send(update);
        request.left -= 1;
        // A first choice without any token has not started the others.
        if choice == 0 && request.sequences.len() < request.submission.choices {
            return (1..request.submission.choices).for_each(|_| self.start_choice(id));
        }
        if request.left == 0 {
            self.remove_request(id);
        }
    }

    fn remove_request(&mut self, id: u64) {
        let Some(request) = self.requests.remove(&id) else { return };
        if request.runs.is_some() {
            self.metrics.request_ended(request.submission.arrived.elapsed());
        }
    }

    fn cancel(&mut self, id: u64) {
        let Some(request) = self.requests.get(&id) else { return };
        for sequence in request.sequences.clone() {
            if self.owners.remove(&sequence).is_some() {
                // The computed blocks stay cached, for a client that sends the same prompt again.
                self.engine.remove_sequence(sequence);
                self.metrics.finished(Finish::Cancelled);
            }
        }
        self.remove_request(id);
    }

    fn cancel_choice(&mut self, id: u64, choice: usize) {
        let sequence = self.requests.get(&id).and_then(|r| r.sequences.get(choice)).copied();
        if let Some(sequence) = sequence.filter(|s| self.owners.contains_key(s)) {
            self.finish_choice(sequence, Ok(Finish::Stop));
        }
    }

    /// The engine has failed: reports it, first to `/health`, then to all requests.
    fn fail(&mut self, why: &str) {
        self.is_over = true;
        let _ = self.state.failure.set(why.to_owned());
        self.lease.report_failure(why);
        note(why);
        self.fail_all(why);
        self.metrics.requests(0, 0);
    }

    /// Cancels all requests, running and waiting.
    fn abort(&mut self, why: &str) {
        for (sequence, _) in self.owners.drain() {
            self.engine.remove_sequence(sequence);
            self.metrics.finished(Finish::Cancelled);
        }
        self.fail_all(why);
    }

    /// Ends all requests with an error.
    fn fail_all(&mut self, why: &str) {
        self.owners.clear();
        for (_, request) in self.requests.drain() {
            let _ = request.submission.updates.send(Update::Failed(why.to_owned()));
        }
    }

    fn update_metrics(&mut self) {
        let (waiting, running) = (self.state.waiting.load(Ordering::SeqCst), self.state.running.load(Ordering::SeqCst));
        self.metrics.requests(waiting, running);
        self.metrics.caches(&mut self.engine);
        self.engine.take_prompt_cache_notes().iter().for_each(|line| note(line));
    }
}
