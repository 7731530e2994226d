//! The engine's thread. It takes submissions and cancellations between steps, hands what comes of each step to whom it belongs, and sleeps where there is
//! nothing to do. No request blocks it: what it has to say goes into queues that a task of the server empties at once, whatever the client does
//! (`reply.rs`), and a queue whose other end is gone cancels its sequences. However the thread ends before it was told to, in a panic too, everybody is told why
//! and the server ends.

use std::any::Any;
use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use sluice_engine::sampling::Logprobs;
use sluice_engine::{Engine, Event, Finish, Generation, ReadAhead, Saved, SequenceId};
use tokio::sync::mpsc::UnboundedSender;

use crate::metrics::Metrics;
use crate::model_manager::ModelLease;

/// How much there may be of everything, and how long it may take.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Requests that wait for their turn; more are refused.
    pub queue: usize,
    /// Connections that are open; more are refused.
    pub connections: usize,
    /// Bytes of bodies that are being read or worked on, and so of one at most; where it is none, as many as two may have.
    pub bodies: Option<usize>,
    /// For a request's line and headers, from the connection's beginning or the answer before.
    pub header_time: Duration,
    /// For a client to take anything of what is sent to it.
    pub write_time: Duration,
    /// For requests to come to their end when the server is told to stop.
    pub grace: Duration,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            queue: 256,
            connections: 512,
            bodies: None,
            header_time: Duration::from_secs(30),
            write_time: Duration::from_secs(60),
            grace: Duration::from_secs(240),
        }
    }
}

/// What is to be generated.
pub struct Submission {
    pub prompt: Vec<u32>,
    /// Of the first choice; those after it have the next seeds.
    pub generation: Generation,
    pub choices: usize,
    /// Prefixes are shared among those with the same.
    pub salt: Vec<u8>,
    pub updates: UnboundedSender<Update>,
    pub arrived: Instant,
}

/// What came of a submission, choice by choice.
#[derive(Debug)]
pub enum Update {
    /// Its prompt is being computed; so many tokens of it were there.
    Begun {
        cached: usize,
    },
    Token {
        choice: usize,
        token: u32,
        logprobs: Option<Logprobs>,
    },
    /// The vector of its prompt, where that is what was asked for.
    Embedding(Vec<f32>),
    Finished {
        choice: usize,
        reason: Finish,
    },
    Failed {
        choice: usize,
        why: String,
    },
}

enum Command {
    Submit(u64, Submission, Counted),
    /// All of a submission, or one of its choices.
    Cancel(u64),
    CancelChoice(u64, usize),
    SaveSession {
        name: String,
        salt: Vec<u8>,
        tokens: Vec<u32>,
        told: Saved,
    },
    ReadAhead(ReadAhead),
    Stop,
}

/// What others may know of the engine's thread.
#[derive(Default)]
struct Shared {
    next: AtomicU64,
    /// Submissions that have not begun.
    waiting: Arc<AtomicUsize>,
    /// Those that have begun and are not over.
    running: Arc<AtomicUsize>,
    /// No more submissions are taken.
    stopping: AtomicBool,
    /// Why the engine has ended before it was told to.
    dead: OnceLock<String>,
}

/// One of those that are counted, for as long as it is there: however it goes, it is counted no more.
struct Counted(Arc<AtomicUsize>);

impl Counted {
    /// One more; and how many there were.
    fn new(count: &Arc<AtomicUsize>) -> (Counted, usize) {
        let before = count.fetch_add(1, Ordering::SeqCst);
        (Counted(Arc::clone(count)), before)
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// The engine's thread, from outside.
pub struct Runtime {
    commands: mpsc::Sender<Command>,
    shared: Arc<Shared>,
    limits: Limits,
    metrics: Arc<Metrics>,
}

/// Why a submission was not taken.
#[derive(Debug, PartialEq, Eq)]
pub enum Refused {
    /// So many wait already.
    Full(usize),
    Stopping,
    Dead(String),
}

/// A submission under way; dropping it cancels what is left of it.
pub struct Ticket {
    id: u64,
    commands: mpsc::Sender<Command>,
}

impl Ticket {
    /// One of the choices has all that it needs.
    pub fn stop(&self, choice: usize) {
        let _ = self.commands.send(Command::CancelChoice(self.id, choice));
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        // Whether it is over already is for the engine's thread to know.
        let _ = self.commands.send(Command::Cancel(self.id));
    }
}

impl Runtime {
    /// `held` is dropped when the engine is.
    ///
    /// # Errors
    /// When the system refuses a thread.
    pub fn start(engine: Engine, held: ModelLease, limits: Limits, metrics: Arc<Metrics>) -> std::io::Result<Runtime> {
        let (commands, received) = mpsc::channel();
        let shared = Arc::new(Shared::default());
        let own = Worker {
            engine,
            received,
            shared: Arc::clone(&shared),
            metrics: Arc::clone(&metrics),
            requests: HashMap::new(),
            owners: HashMap::new(),
            busy: Instant::now(),
            is_over: false,
            held,
        };
        thread::Builder::new().name("engine".into()).spawn(move || own.live())?;
        Ok(Runtime { commands, shared, limits, metrics })
    }

    /// # Errors
    /// When too many wait, or the engine takes no more.
    pub fn submit(&self, submission: Submission) -> Result<Ticket, Refused> {
        if let Some(why) = self.dead() {
            return Err(Refused::Dead(why));
        }
        if self.shared.stopping.load(Ordering::SeqCst) {
            return Err(Refused::Stopping);
        }
        let (counted, waiting) = Counted::new(&self.shared.waiting);
        if waiting >= self.limits.queue {
            self.metrics.refused();
            return Err(Refused::Full(waiting));
        }
        let id = self.shared.next.fetch_add(1, Ordering::Relaxed);
        let ticket = Ticket { id, commands: self.commands.clone() };
        match self.commands.send(Command::Submit(id, submission, counted)) {
            Ok(()) => Ok(ticket),
            Err(_) => Err(Refused::Dead(self.dead().unwrap_or_else(|| "the engine has ended".into()))),
        }
    }

    /// Has what is in memory of a conversation written to the prompt cache and named. `told` is dropped where the engine takes no more.
    pub fn save_session(&self, name: String, salt: Vec<u8>, tokens: Vec<u32>, told: Saved) {
        let _ = self.commands.send(Command::SaveSession { name, salt, tokens, told });
    }

    /// Has a conversation read into memory when nothing else is to be done.
    pub fn read_ahead(&self, session: ReadAhead) {
        let _ = self.commands.send(Command::ReadAhead(session));
    }

    /// Why the engine can do no more; `None` as long as it can.
    pub fn dead(&self) -> Option<String> {
        self.shared.dead.get().cloned()
    }

    /// Takes no more submissions; those that were taken come to their end.
    pub fn drain(&self) {
        self.shared.stopping.store(true, Ordering::SeqCst);
        let _ = self.commands.send(Command::Stop);
    }
}

impl Drop for Runtime {
    fn drop(&mut self) {
        self.drain();
    }
}

/// A submission with its sequences.
struct Request {
    submission: Submission,
    sequences: Vec<SequenceId>,
    /// Choices that are not over.
    left: usize,
    /// Among those that wait, until it begins; then among those that run.
    waits: Option<Counted>,
    runs: Option<Counted>,
    last_token: Vec<Option<Instant>>,
}

struct Worker {
    engine: Engine,
    received: mpsc::Receiver<Command>,
    shared: Arc<Shared>,
    metrics: Arc<Metrics>,
    requests: HashMap<u64, Request>,
    /// Of each sequence, the submission and which of its choices it is.
    owners: HashMap<SequenceId, (u64, usize)>,
    /// When somebody last asked for something, or was answered.
    busy: Instant,
    /// It has ended as it was told to, or everybody knows why not.
    is_over: bool,
    /// Behind the engine: it is dropped after it.
    held: ModelLease,
}

/// How often the counters of caches are looked at while nothing happens.
const IDLE: Duration = Duration::from_secs(5);
/// So long nobody asks for anything before something is read ahead: who answers an answer at once does not wait for it.
const QUIET: Duration = Duration::from_millis(50);
/// Between two looks at something that waits for the disk.
const MOMENT: Duration = Duration::from_millis(1);

/// What a panic said.
fn said(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("it did not say why")
}

impl Drop for Worker {
    /// No way out of the thread leads past this.
    fn drop(&mut self) {
        if !self.is_over {
            self.die("the engine's thread has ended");
        }
    }
}

impl Worker {
    fn live(mut self) {
        match catch_unwind(AssertUnwindSafe(|| self.run())) {
            Ok(Ok(())) => self.is_over = true,
            Ok(Err(e)) => self.die(&format!("{e:#}")),
            Err(panic) => self.die(&format!("the engine has panicked: {}", said(&*panic))),
        }
    }

    /// # Errors
    /// The engine can do no more.
    fn run(&mut self) -> anyhow::Result<()> {
        let mut stopping = false;
        loop {
            if let Some(why) = self.held.given_up() {
                self.give_up(why);
            }
            // 1. What others want; nothing else is to do where all is idle
            loop {
                // Where there is nothing else to do, what conversations hold is written to disk, a little at a time.
                // Then what was used last before this start is read, and experts for which there is memory.
                let tends = self.tend()?;
                let command = if self.engine.is_idle() && !stopping && !tends {
                    self.measure();
                    let quiet = QUIET.saturating_sub(self.busy.elapsed());
                    match self.received.recv_timeout(if quiet.is_zero() { IDLE } else { quiet }) {
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
                self.busy = Instant::now();
                match command {
                    Command::Submit(id, submission, counted) => self.submit(id, submission, counted),
                    Command::Cancel(id) => self.cancel(id),
                    Command::CancelChoice(id, choice) => self.cancel_choice(id, choice),
                    Command::SaveSession { name, salt, tokens, told } => {
                        self.engine.save_session(name, &salt, &tokens, told);
                    }
                    Command::ReadAhead(session) => self.engine.read_ahead(session),
                    Command::Stop => stopping = true,
                }
            }
            if self.engine.is_idle() && stopping {
                // Who saves a session is told before all ends.
                while let Ok(true) = self.engine.flush_sessions() {
                    thread::sleep(MOMENT);
                }
                let _ = self.engine.save();
                self.measure();
                return Ok(());
            }
            if self.engine.is_idle() {
                continue;
            }
            // 2. A step
            let begun = Instant::now();
            let events = self.engine.step()?.to_vec();
            self.metrics.step(begun.elapsed());
            events.into_iter().for_each(|event| self.tell(event));
            self.busy = Instant::now();
            self.measure();
        }
    }

    /// What there is to do between steps and, where nobody generates, beside them: a portion. Whether there is more.
    fn tend(&mut self) -> anyhow::Result<bool> {
        if self.engine.flush_sessions()? {
            if self.engine.is_idle() {
                // It may wait for what is being written.
                thread::sleep(MOMENT);
            }
            return Ok(self.engine.is_idle());
        }
        let quiet = self.busy.elapsed() >= QUIET;
        let idle = self.engine.is_idle();
        Ok(idle
            && (self.engine.copy_weights()
                || self.engine.flush_idle()?
                || quiet && (self.engine.prefetch()? || self.engine.fill_experts())))
    }

    fn submit(&mut self, id: u64, submission: Submission, counted: Counted) {
        let choices = submission.choices;
        let request = Request {
            submission,
            sequences: Vec::with_capacity(choices),
            left: choices,
            waits: Some(counted),
            runs: None,
            last_token: vec![None; choices],
        };
        self.requests.insert(id, request);
        self.begin_choice(id);
    }

    /// Starts the next choice of a submission: one first, and the others when its prompt is computed, which they share.
    fn begin_choice(&mut self, id: u64) {
        let Some(request) = self.requests.get_mut(&id) else { return };
        let choice = request.sequences.len();
        let mut generation = request.submission.generation.clone();
        generation.sampling.seed = generation.sampling.seed.wrapping_add(choice as u64);
        let sequence = self.engine.add_sequence_salted(&request.submission.salt);
        request.sequences.push(sequence);
        self.owners.insert(sequence, (id, choice));
        if let Err(e) = self.engine.start(sequence, &request.submission.prompt, generation) {
            self.end(sequence, Err(format!("{e:#}")));
        }
    }

    fn tell(&mut self, event: Event) {
        let sequence = event.id();
        let Some(&(id, choice)) = self.owners.get(&sequence) else { return };
        let Some(request) = self.requests.get_mut(&id) else { return };
        let mut gone = false;
        if request.runs.is_none() {
            request.waits = None;
            request.runs = Some(Counted::new(&self.shared.running).0);
            let cached = self.engine.reused_tokens(sequence).unwrap_or(0);
            let restored = self.engine.restored_tokens(sequence).unwrap_or(0);
            self.metrics.begun(request.submission.prompt.len(), cached, restored, request.submission.arrived.elapsed());
            gone |= request.submission.updates.send(Update::Begun { cached }).is_err();
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
                    (1..request.submission.choices).for_each(|_| self.begin_choice(id));
                }
            }
            Event::Finished { reason: Finish::Failed, .. } => {
                let why = self.engine.take_failure(sequence);
                let why = why.map_or_else(|| "the tokens could not be computed".to_owned(), |e| format!("{e:#}"));
                return self.end(sequence, Err(why));
            }
            Event::Finished { reason, .. } => {
                if let Some(vector) = self.engine.take_embedding(sequence) {
                    let _ = request.submission.updates.send(Update::Embedding(vector));
                }
                return self.end(sequence, Ok(reason));
            }
        }
        if gone {
            self.cancel(id);
        }
    }

    /// A choice is over.
    fn end(&mut self, sequence: SequenceId, how: Result<Finish, String>) {
        self.engine.remove_sequence(sequence);
        let Some((id, choice)) = self.owners.remove(&sequence) else { return };
        let Some(request) = self.requests.get_mut(&id) else { return };
        let update = match how {
            Ok(reason) => {
                self.metrics.finished(reason);
                Update::Finished { choice, reason }
            }
            Err(why) => Update::Failed { choice, why },
        };
        let _ = request.submission.updates.send(update);
        request.left -= 1;
        // Who never had a token has no others to wait for.
        if choice == 0 && request.sequences.len() < request.submission.choices {
            return (1..request.submission.choices).for_each(|_| self.begin_choice(id));
        }
        if request.left == 0 {
            self.forget(id);
        }
    }

    fn forget(&mut self, id: u64) {
        let Some(request) = self.requests.remove(&id) else { return };
        if request.runs.is_some() {
            self.metrics.ended(request.submission.arrived.elapsed());
        }
    }

    fn cancel(&mut self, id: u64) {
        let Some(request) = self.requests.get(&id) else { return };
        for sequence in request.sequences.clone() {
            if self.owners.remove(&sequence).is_some() {
                // What was computed stays: a client that sends the same again goes on from there.
                self.engine.remove_sequence(sequence);
                self.metrics.finished(Finish::Cancelled);
            }
        }
        self.forget(id);
    }

    fn cancel_choice(&mut self, id: u64, choice: usize) {
        let sequence = self.requests.get(&id).and_then(|r| r.sequences.get(choice)).copied();
        if let Some(sequence) = sequence.filter(|s| self.owners.contains_key(s)) {
            self.end(sequence, Ok(Finish::Stop));
        }
    }

    /// The engine can do no more: everybody is told why, first those who are asked whether it lives.
    fn die(&mut self, why: &str) {
        self.is_over = true;
        let _ = self.shared.dead.set(why.to_owned());
        self.held.died(why);
        crate::note(why);
        self.fail_all(why);
        self.metrics.requests(0, 0);
    }

    /// Ends what is under way, and what waits.
    fn give_up(&mut self, why: &str) {
        for (sequence, _) in self.owners.drain() {
            self.engine.remove_sequence(sequence);
            self.metrics.finished(Finish::Cancelled);
        }
        self.fail_all(why);
    }

    /// Tells all requests that are here.
    fn fail_all(&mut self, why: &str) {
        self.owners.clear();
        for (_, request) in self.requests.drain() {
            for choice in 0..request.submission.choices {
                let _ = request.submission.updates.send(Update::Failed { choice, why: why.to_owned() });
            }
        }
    }

    fn measure(&mut self) {
        let (waiting, running) =
            (self.shared.waiting.load(Ordering::SeqCst), self.shared.running.load(Ordering::SeqCst));
        self.metrics.requests(waiting, running);
        self.metrics.caches(&mut self.engine);
        self.engine.take_prompt_cache_notes().iter().for_each(|note| crate::note(note));
    }
}
