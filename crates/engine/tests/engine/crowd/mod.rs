//! Sixty-four sequences that come and go as they like, in memory for a few of them: nobody starves, nobody's text is another than if it had been alone,
//! and in the end all memory is free.
//!
//! How long a sequence may take. A step either has an event (a token, an end), or takes the sequence that was started first among those that run through
//! `chunk` tokens or all it has left or all before one of its M marks, and that one is never preempted; so of W = 1 + ceil(longest / chunk) + M steps in a row one has an
//! event. A sequence has no event while one that was started before it has none in the same step, but for who stops at a mark: memory is taken from the later one, and
//! prompts are served in their order. So from its start to its end a sequence takes at most W steps for each event of its own and of those that ran when it was started,
//! whoever comes later.

mod requests;

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use fastrand::Rng;
use requests::{CONTEXT, Disk, GRID, Kind, MARKS, Request, SEQUENCES, fails, folder, is_no_number, options, requests};
use sluice_conformance::{Checker, Spoilt};
use sluice_engine::sampling::SamplingParams;
use sluice_engine::{Cpu, Engine, Event, ExpertOptions, Finish, Generation, KvType, Options, ReadFaults, SequenceId};

/// A sequence on its way.
struct Live {
    request: usize,
    turn: usize,
    /// Which start of all this was, and at which step.
    number: usize,
    since: usize,
    /// Events that may come before its end: its own and those of who ran when it was started.
    events: usize,
    generated: usize,
    running: bool,
    cancelled: bool,
    had_token: bool,
}

#[derive(Default)]
struct Tally {
    ended: usize,
    failed: usize,
    cancelled: usize,
    removed: usize,
    refused: usize,
    again: usize,
    together: usize,
}

struct Crowd {
    kind: Kind,
    seed: u64,
    random: Rng,
    engine: Engine,
    requests: Vec<Request>,
    live: HashMap<SequenceId, Live>,
    starts: usize,
    step: usize,
    /// Steps since the last event.
    quiet: usize,
    /// Among so many steps in a row, one must have an event.
    patience: usize,
    salt: u64,
    spoils: Arc<AtomicBool>,
    disk: Arc<Disk>,
    tally: Tally,
}

impl Crowd {
    fn new(kind: Kind, seed: u64) -> Crowd {
        let mut random = Rng::with_seed(seed);
        let kv_type = [None, Some(KvType::Int8), Some(KvType::F32), Some(KvType::Int16)][seed as usize % 4];
        let kind = Kind { kv_type, ..kind };
        let requests = requests(kind, &mut random);
        let (salt, spoils) = (random.u64(..), Arc::new(AtomicBool::new(true)));
        let disk = Arc::new(Disk::default());
        let faults = kind.disk.then(|| Arc::clone(&disk) as Arc<dyn ReadFaults>);
        let expert_options = ExpertOptions { faults, ..ExpertOptions::default() };
        let mut options = Options { expert_options, ..options(kind, &mut random) };
        let chunk = options.chunk.unwrap();
        if kind.disk {
            // Room for some of its experts.
            options.expert_budget = Some(400_000);
        }
        let spoils_rows = Arc::clone(&spoils);
        let engine = Engine::open_on(&folder(kind.model), options, &|o| {
            let checker = Checker::new(Box::new(Cpu::new(o.isa, o.threads, o.activations)?));
            let on = Arc::clone(&spoils_rows);
            checker.log().lock().unwrap().spoil = Some(Box::new(move |inputs| {
                let mut spoilt = Spoilt::default();
                if on.load(Ordering::SeqCst) {
                    let (tokens, positions) = (inputs.tokens(), inputs.positions());
                    let at = |row: usize| (tokens[row], positions[row]);
                    let all = (0..tokens.len()).filter(|row| fails(salt, at(*row).0, at(*row).1));
                    spoilt.failed = all.map(|row| row as u32).collect();
                    let wanted = inputs.wanted().iter().map(|row| at(*row as usize)).enumerate();
                    let wrong = wanted.filter(|(_, (token, position))| is_no_number(salt, *token, *position));
                    spoilt.not_numbers = wrong.map(|(i, _)| i).collect();
                }
                spoilt
            }));
            Ok(Box::new(checker))
        });
        Crowd {
            kind,
            seed,
            random,
            engine: engine.unwrap(),
            requests,
            live: HashMap::new(),
            starts: 0,
            step: 0,
            quiet: 0,
            patience: 1 + CONTEXT.div_ceil(chunk) + MARKS + GRID + 1,
            salt,
            spoils,
            disk,
            tally: Tally::default(),
        }
    }

    fn told(&self) -> String {
        format!("{:?}, seed {}, step {}", self.kind, self.seed, self.step)
    }

    /// The text that the turn of a sequence would have alone.
    fn wanted(&self, live: &Live) -> &[u32] {
        &self.requests[live.request].turns[live.turn].2
    }

    /// Starts a sequence, with what is left of its turn.
    fn start(&mut self, id: SequenceId, prompt: &[u32]) {
        let running = self.live.values().filter(|l| l.running);
        let events = |l: &Live| self.requests[l.request].turns[l.turn].1.max_tokens + 1;
        let before: usize = running.map(events).sum();
        let live = &self.live[&id];
        let mut generation = self.requests[live.request].turns[live.turn].1.clone();
        generation.max_tokens -= live.generated;
        // Drafts are right as often as wrong.
        generation.prediction = self.wanted(live).to_vec();
        let vocabulary = self.engine.model().vocabulary as u32;
        for token in &mut generation.prediction {
            if self.random.u8(..8) == 0 {
                *token = self.random.u32(..vocabulary);
            }
        }
        self.engine.start(id, prompt, generation).unwrap();
        let (own, number, since) = (events(live), self.starts, self.step);
        self.starts += 1;
        let live = self.live.get_mut(&id).unwrap();
        (live.number, live.since, live.events) = (number, since, before + own);
        (live.running, live.cancelled, live.had_token) = (true, false, false);
    }

    fn begin(&mut self, request: usize) {
        let id = self.engine.add_sequence();
        let prompt = self.requests[request].turns[0].0.clone();
        let generation = self.requests[request].turns[0].1.clone();
        if self.random.u8(..4) == 0 {
            // What is refused leaves no trace.
            let vocabulary = self.engine.model().vocabulary as u32;
            let wrong = SamplingParams { temperature: f32::NAN, ..SamplingParams::default() };
            let wrong = Generation { sampling: wrong, ..generation.clone() };
            assert!(self.engine.start(id, &vec![0; CONTEXT + 1], generation.clone()).is_err());
            assert!(self.engine.start(id, &[vocabulary], generation).is_err());
            assert!(self.engine.start(id, &prompt, wrong).is_err());
            self.tally.refused += 1;
        }
        let live = Live {
            request,
            turn: 0,
            number: 0,
            since: 0,
            events: 0,
            generated: 0,
            running: false,
            cancelled: false,
            had_token: false,
        };
        self.live.insert(id, live);
        self.start(id, &prompt);
    }

    fn remove(&mut self, id: SequenceId) {
        self.engine.remove_sequence(id);
        self.live.remove(&id);
    }

    /// What people do between steps.
    fn meddle(&mut self) {
        let mut ids: Vec<SequenceId> = self.live.iter().filter(|(_, l)| l.running).map(|(id, _)| *id).collect();
        ids.sort_by_key(|id| self.live[id].number);
        for id in ids {
            match self.random.u32(..800) {
                0..=3 => {
                    self.engine.cancel(id).unwrap();
                    self.live.get_mut(&id).unwrap().cancelled = true;
                }
                4 => {
                    self.remove(id);
                    self.tally.removed += 1;
                }
                _ => {}
            }
        }
        if self.kind.disk && self.random.u8(..6) == 0 {
            self.disk.bad.store(self.random.u8(..3) == 0, Ordering::SeqCst);
        }
    }

    /// A step, and what it says.
    fn go(&mut self) {
        let is_busy = self.live.values().any(|l| l.running && !l.cancelled);
        self.step += 1;
        let events = self.engine.step().unwrap().to_vec();
        self.tally.together = self.tally.together.max(events.len());
        let counts = |e: &Event| !matches!(e, Event::Prefill { .. });
        self.quiet = if events.iter().any(counts) { 0 } else { self.quiet + usize::from(is_busy) };
        assert!(self.quiet < self.patience, "{}: nothing came of {} steps", self.told(), self.quiet);
        for event in events {
            let told = self.told();
            let id = event.id();
            let live = self.live.get_mut(&id).unwrap_or_else(|| panic!("{told}: {event:?} of nobody"));
            assert!(live.running, "{told}: {event:?} of who does not run");
            match event {
                Event::Prefill { done, total, .. } => assert!(done <= total, "{told}: {event:?}"),
                Event::Token { .. } => {
                    live.generated += 1;
                    let first = !std::mem::replace(&mut live.had_token, true);
                    let number = live.number;
                    // First come, first served; but who stops at a mark to leave a copy of its state lets others by, and goes on in the next step.
                    let marks = self.engine.model().state_len() > 0;
                    let waits = |l: &&Live| l.running && !l.cancelled && !l.had_token && l.number < number;
                    let passed = self.live.values().find(waits).map(|l| l.number);
                    assert!(
                        !first || marks || passed.is_none(),
                        "{told}: start {number} was served before start {passed:?}"
                    );
                }
                Event::Finished { reason, .. } => self.finished(id, reason),
            }
        }
    }

    fn finished(&mut self, id: SequenceId, reason: Finish) {
        let told = self.told();
        let live = self.live.get_mut(&id).unwrap();
        live.running = false;
        let took = self.step - live.since;
        let most = self.patience * live.events;
        assert!(took <= most, "{told}: a sequence took {took} steps, {most} at most");
        let live = &self.live[&id];
        let (text, wanted) = (self.engine.tokens(id).unwrap().to_vec(), self.wanted(live));
        assert!(wanted.starts_with(&text), "{told}: another text than alone");
        // Where it must fail, if it comes so far: at its first row that fails, or where it draws from what is no number.
        let missing = wanted.len() - text.len();
        let spoils = self.spoils.load(Ordering::SeqCst);
        match reason {
            Finish::Cancelled => {
                assert!(live.cancelled, "{told}: nobody cancelled it");
                self.tally.cancelled += 1;
            }
            Finish::Failed => {
                let why = self.engine.take_failure(id).expect("who fails hears why").to_string();
                let last = text.len() - 1;
                let bad = |p: usize| fails(self.salt, text[p], p as u32);
                let no_number = is_no_number(self.salt, text[last], last as u32);
                let spoilt = spoils && ((0..text.len()).any(bad) || no_number);
                assert!(spoilt || self.kind.disk, "{told}: failed for no reason: {why}");
                self.tally.failed += 1;
            }
            Finish::Stop | Finish::Length | Finish::ContextFull => {
                assert_eq!(missing, 0, "{told}: a text that ends too early");
                // The token that was drawn last is not computed.
                let computed = &text[..text.len() - usize::from(reason != Finish::Stop)];
                let bad = computed.iter().enumerate().any(|(p, t)| fails(self.salt, *t, p as u32));
                let last = computed.len() - 1;
                let bad = bad || is_no_number(self.salt, computed[last], last as u32);
                assert!(!(spoils && bad), "{told}: a row that failed was used");
                self.tally.ended += 1;
            }
        }
    }

    /// What idle sequences do: go on after a failure or a cancellation, take another turn, or leave.
    fn idle(&mut self) {
        let mut ids: Vec<SequenceId> = self.live.iter().filter(|(_, l)| !l.running).map(|(id, _)| *id).collect();
        ids.sort_by_key(|id| self.live[id].number);
        for id in ids {
            if self.random.u8(..5) > 0 {
                continue;
            }
            let live = &self.live[&id];
            let turns = &self.requests[live.request].turns;
            let text = self.engine.tokens(id).unwrap().to_vec();
            let is_over = text == turns[live.turn].2;
            if is_over && live.turn + 1 < turns.len() {
                let prompt = turns[live.turn + 1].0.clone();
                let live = self.live.get_mut(&id).unwrap();
                (live.turn, live.generated) = (live.turn + 1, 0);
                self.start(id, &prompt);
            } else if !is_over && live.generated < turns[live.turn].1.max_tokens && !self.spoils.load(Ordering::SeqCst)
            {
                // The last token again: nothing may be left to compute where drawing failed.
                self.engine.truncate(id, text.len() - 1).unwrap();
                self.start(id, &text[text.len() - 1..]);
                self.tally.again += 1;
            } else if is_over || self.random.u8(..4) == 0 {
                self.remove(id);
            }
        }
    }
}

fn crowd(kind: Kind, seeds: std::ops::Range<u64>) {
    let schedules = std::env::var("SLUICE_ENGINE_CROWDS").ok().and_then(|n| n.parse().ok());
    let mut all = Tally::default();
    for seed in schedules.map_or(seeds, |n| 0..n) {
        let mut c = Crowd::new(kind, seed);
        // 1. They come, while rows fail
        let mut due: Vec<usize> = (0..SEQUENCES).collect();
        due.sort_by_key(|r| std::cmp::Reverse(c.requests[*r].start));
        let most = SEQUENCES * 31 * c.patience;
        while !due.is_empty() || c.live.values().any(|l| l.running) {
            while due.last().is_some_and(|r| c.requests[*r].start <= c.step) {
                c.begin(due.pop().unwrap());
            }
            c.meddle();
            c.go();
            c.idle();
            assert!(c.step < 2 * most, "{}: it does not end", c.told());
        }
        // 2. Who failed goes on, now that nothing fails
        c.spoils.store(false, Ordering::SeqCst);
        c.disk.bad.store(false, Ordering::SeqCst);
        while !c.live.is_empty() {
            c.disk.bad.store(false, Ordering::SeqCst);
            c.idle();
            c.go();
            assert!(c.step < 4 * most, "{}: it does not end", c.told());
        }
        // 3. Nothing is left
        let left = (c.engine.kv_in_use(), c.engine.states_in_use());
        assert_eq!(left, (0, 0), "{}: memory that nobody holds", c.told());
        assert!(c.engine.is_idle());
        let Tally { ended, failed, cancelled, removed, refused, again, together } = c.tally;
        all.ended += ended;
        all.failed += failed;
        all.cancelled += cancelled;
        all.removed += removed;
        all.refused += refused;
        all.again += again;
        all.together = all.together.max(together);
        println!(
            "{kind:?}, seed {seed}: {} steps; {ended} turns ended, {failed} failed, {cancelled} cancelled, {removed} removed, {again} went on",
            c.step
        );
    }
    let Tally { ended, failed, cancelled, removed, refused, again, together } = all;
    // Who goes on after a failure is few: how prompts are cut depends on how long steps take, and with it whose rows fail.
    let counts = [failed, cancelled, removed, refused];
    assert!(ended > SEQUENCES / 2 && together > 3, "{ended} ended, {together} together");
    assert!(counts.iter().all(|n| *n > 0), "{counts:?}, {again} went on");
}

#[test]
fn nobody_starves_in_a_dense_model_with_windows() {
    crowd(Kind { model: "qwen3_window", disk: false, kv_type: None }, 0..4);
}

#[test]
fn nobody_starves_in_hybrid_models() {
    crowd(Kind { model: "qwen3_next", disk: false, kv_type: None }, 0..3);
    crowd(Kind { model: "qwen3_5", disk: false, kv_type: None }, 3..6);
}

#[test]
fn nobody_starves_in_a_mixture() {
    crowd(Kind { model: "mlx_qwen3_moe", disk: false, kv_type: None }, 0..4);
}

#[test]
fn nobody_starves_while_a_disk_fails() {
    crowd(Kind { model: "qwen3_moe", disk: true, kv_type: None }, 0..3);
    crowd(Kind { model: "mlx_qwen3_next", disk: true, kv_type: None }, 3..6);
}
