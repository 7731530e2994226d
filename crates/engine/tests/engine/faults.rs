//! Disks that fail, stop short, are late or change: every token is the one of the sound run, bit for bit, or its sequence ends with an error.

use crate::support;
use crate::support::streamed;

use std::fs::{self, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use fastrand::Rng;
use sluice_engine::sampling::SamplingParams;
use sluice_engine::{
    Checkpoint, Engine, Event, ExpertOptions, Finish, Generation, Lookahead, Options, Placement, Policy, ReadFaults,
    SequenceId,
};
use sluice_store::{Tensor, TensorPlan, Writer};
use streamed::*;
use support::*;

/// A disk as bad as its numbers say, in percent of requests; whatever a request did not read is overwritten.
#[derive(Debug)]
struct Faults {
    on: AtomicBool,
    random: Mutex<Rng>,
    fails: u64,
    short: u64,
    late: u64,
    /// Percent of the places on disk, which can never be read.
    dead: u64,
    salt: u64,
}

impl Faults {
    fn new(random: &mut Rng) -> Faults {
        let one_of = |random: &mut Rng, of: &[u64]| of[random.usize(..of.len())];
        Faults {
            on: AtomicBool::new(random.bool()),
            fails: one_of(random, &[0, 3, 40, 70]),
            short: one_of(random, &[0, 5, 60]),
            late: one_of(random, &[0, 10, 80]),
            dead: one_of(random, &[0, 0, 2, 20]),
            salt: random.u64(..),
            random: Mutex::new(random.fork()),
        }
    }

    /// Nothing can be read, or all.
    fn all(on: bool) -> Faults {
        let random = Mutex::new(Rng::with_seed(1));
        Faults { on: AtomicBool::new(on), fails: 100, short: 0, late: 0, dead: 0, salt: 0, random }
    }
}

impl ReadFaults for Faults {
    fn intercept(
        &self,
        _: &Path,
        offset: u64,
        memory: &mut [u8],
        came: io::Result<usize>,
    ) -> Option<io::Result<usize>> {
        if !self.on.load(Ordering::SeqCst) {
            return Some(came);
        }
        let mut random = self.random.lock().unwrap();
        let mut chance = |percent: u64| random.u64(..100) < percent;
        let is_dead = Rng::with_seed(offset ^ self.salt).u64(..100) < self.dead;
        if chance(self.late) {
            return None;
        }
        if is_dead || chance(self.fails) {
            memory.fill(0xee);
            return Some(Err(io::Error::from_raw_os_error(EIO)));
        }
        match came {
            Ok(n) if chance(self.short) => {
                let n = random.usize(..=n);
                memory[n..].fill(0xee);
                Some(Ok(n))
            }
            came => Some(came),
        }
    }
}

/// A disk's error, on Linux.
const EIO: i32 = 5;

/// A copy of a golden model with its experts at the end of the file, and where they begin.
fn copy_of(name: &str) -> (tempfile::TempDir, u64) {
    let to = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    fs::copy(folder(name).join("config.json"), to.path().join("config.json")).unwrap();
    let checkpoint = Checkpoint::open(&folder(name)).unwrap();
    let names = [".switch_mlp.", ".experts.", ".block_sparse_moe.input_linear.", ".block_sparse_moe.output_linear."];
    let is_expert = |t: &Tensor| names.iter().any(|of| t.name.contains(of));
    let mut tensors: Vec<_> = checkpoint.tensors().iter().collect();
    tensors.sort_by_key(|t| is_expert(t));
    let plan = |t: &&Tensor| TensorPlan { name: t.name.to_string(), dtype: t.dtype, shape: t.shape.clone() };
    let plans: Vec<TensorPlan> = tensors.iter().map(plan).collect();
    let mut writer = Writer::create(&to.path().join("model.safetensors"), &plans, checkpoint.metadata()).unwrap();
    tensors.iter().for_each(|t| writer.append(&t.name, &t.bytes).unwrap());
    writer.finish().unwrap();
    let first = tensors.iter().find(|t| is_expert(t)).unwrap();
    let begin = Checkpoint::open(to.path()).unwrap().place(&first.name).unwrap().1;
    (to, begin)
}

/// What a sound run of a model gives: logits of a prompt, row by row, and greedy answers to the beginnings of it.
struct Sound {
    name: &'static str,
    slot_bytes: u64,
    least_bytes: u64,
    prompt: Vec<u32>,
    /// `[prompt, vocabulary]`, as bits.
    logits: Vec<u32>,
    /// To the first tokens of the prompt, so many.
    answers: Vec<(usize, Vec<u32>)>,
}

const PROMPT: usize = 48;
const ANSWER: usize = 8;

impl Sound {
    fn of(name: &'static str) -> Sound {
        let mut engine = Engine::open(&folder(name), mapped()).unwrap();
        let prompt = tokens(&engine, PROMPT, 5);
        let logits = logits(&mut engine, &prompt, &[PROMPT]);
        let answers = [3, 20, 40].map(|n| {
            let id = engine.add_sequence();
            engine.start(id, &prompt[..n], greedy()).unwrap();
            let mut answer = Vec::new();
            while !engine.is_idle() {
                let tokens = engine.step().unwrap().iter().filter_map(|e| match e {
                    Event::Token { token, .. } => Some(*token),
                    _ => None,
                });
                answer.extend(tokens);
            }
            engine.remove_sequence(id);
            (n, answer)
        });
        let (slot_bytes, least_bytes) = (slot_bytes(name), least_bytes(name));
        Sound { name, slot_bytes, least_bytes, prompt, logits, answers: answers.into() }
    }
}

fn greedy() -> Generation {
    let sampling = SamplingParams { temperature: 0.0, ..SamplingParams::default() };
    Generation { sampling, max_tokens: ANSWER, ..Generation::default() }
}

/// Reads, policies, budgets and look-ahead as they come.
fn options(sound: &Sound, random: &mut Rng, faults: &Arc<Faults>) -> Options {
    let pinned = (0..random.usize(..4)).map(|_| (random.usize(..4), random.usize(..16))).collect();
    let placement = if random.u8(..4) > 0 { Placement::Slots } else { Placement::PageCache };
    Options {
        max_sequences: 3,
        expert_budget: Some(sound.least_bytes + random.u64(..12) * sound.slot_bytes),
        lookahead: [Lookahead::Off, Lookahead::On, Lookahead::Auto][random.usize(..3)],
        expert_options: ExpertOptions {
            policy: Policy::ALL[random.usize(..3)],
            request: 4096 * random.usize(1..4),
            depth: Some(random.usize(1..20)),
            io_uring: random.u8(..4) > 0,
            threads: random.usize(1..4),
            pinned,
            faults: Some(Arc::clone(faults) as Arc<dyn ReadFaults>),
            ..ExpertOptions::default()
        },
        ..streamed(placement)
    }
}

/// What became of some sequences.
#[derive(Default)]
struct Tally {
    right: u64,
    failed: u64,
}

/// Takes the prompt through the model in pieces; every row of logits must be right, or the piece an error. `sure`: it must be an error.
fn feed(engine: &mut Engine, sound: &Sound, random: &mut Rng, faults: &Faults, sure: bool) -> Tally {
    let mut tally = Tally::default();
    let vocabulary = engine.model().vocabulary;
    let id = engine.add_sequence();
    let mut from = 0;
    while from < sound.prompt.len() {
        if random.u8(..4) == 0 {
            faults.on.store(random.bool(), Ordering::SeqCst);
        }
        let n = random.usize(1..20).min(sound.prompt.len() - from);
        let mut rows = Vec::new();
        let keep = |_, row: &[f32]| {
            rows.extend(row.iter().map(|x| x.to_bits()));
            Ok(())
        };
        let came = engine.feed(id, &sound.prompt[from..from + n], true, keep);
        assert!(!sure || came.is_err(), "{}: a changed file went unnoticed", sound.name);
        let wanted = &sound.logits[from * vocabulary..(from + n) * vocabulary];
        assert!(wanted.starts_with(&rows), "{}: wrong logits", sound.name);
        if came.is_err() {
            tally.failed += 1;
            break;
        }
        assert_eq!(rows.len(), wanted.len());
        tally.right += n as u64;
        from += n;
    }
    engine.remove_sequence(id);
    tally
}

/// Several sequences answer together: each answer is the right one as far as it goes, and goes to its end unless its sequence failed.
fn answer(engine: &mut Engine, sound: &Sound, random: &mut Rng, faults: &Faults) -> Tally {
    let mut tally = Tally::default();
    let mut running: Vec<(SequenceId, usize, Vec<u32>, Option<Finish>)> = Vec::new();
    for which in 0..random.usize(1..4) {
        let id = engine.add_sequence();
        engine.start(id, &sound.prompt[..sound.answers[which].0], greedy()).unwrap();
        running.push((id, which, Vec::new(), None));
    }
    while !engine.is_idle() {
        if random.u8(..4) == 0 {
            faults.on.store(random.bool(), Ordering::SeqCst);
        }
        for event in engine.step().unwrap() {
            let of = |id: SequenceId| running.iter().position(|r| r.0 == id).unwrap();
            match *event {
                Event::Token { id, token } => {
                    let at = of(id);
                    running[at].2.push(token);
                }
                Event::Finished { id, reason } => {
                    let at = of(id);
                    running[at].3 = Some(reason);
                }
                Event::Prefill { .. } => {}
            }
        }
    }
    for (id, which, answer, end) in running {
        let wanted = &sound.answers[which].1;
        assert!(wanted.starts_with(&answer), "{}: wrong text", sound.name);
        match end.unwrap() {
            Finish::Failed => {
                assert!(answer.len() < wanted.len());
                assert!(engine.take_failure(id).is_some(), "who fails hears why");
                tally.failed += 1;
            }
            _ => assert_eq!(answer.len(), wanted.len()),
        }
        tally.right += answer.len() as u64;
        engine.remove_sequence(id);
    }
    tally
}

/// So long after a file was opened its time of modification differs from that of a write.
const TICK: Duration = Duration::from_millis(15);

/// Rewrites the experts in place, as `rsync --inplace` does; the length stays.
fn rewrite(model: &Path, from: u64) {
    let file = OpenOptions::new().read(true).write(true).open(model.join("model.safetensors")).unwrap();
    let mut bytes = vec![0; (file.metadata().unwrap().len() - from) as usize];
    file.read_exact_at(&mut bytes, from).unwrap();
    bytes.iter_mut().for_each(|b| *b ^= 1);
    file.write_all_at(&bytes, from).unwrap();
}

/// As many schedules as `SLUICE_ENGINE_SCHEDULES` says.
#[test]
fn every_token_is_right_or_its_sequence_has_failed() {
    let schedules = std::env::var("SLUICE_ENGINE_SCHEDULES").ok().and_then(|n| n.parse().ok()).unwrap_or(100);
    let sound: Vec<Sound> = FOLDERS.into_iter().map(Sound::of).collect();
    let (mut right, mut failed, mut rewritten) = (0, 0, 0);
    for seed in 0..schedules {
        let mut random = Rng::with_seed(seed);
        let sound = &sound[random.usize(..sound.len())];
        let faults = Arc::new(Faults::new(&mut random));
        let options = options(sound, &mut random, &faults);
        let changes = random.u8(..10) == 0;
        let copy = changes.then(|| copy_of(sound.name));
        let path = copy.as_ref().map_or_else(|| folder(sound.name), |(dir, _)| dir.path().to_owned());
        let mut engine = Engine::open(&path, options).unwrap();
        let mut add = |t: Tally| (right, failed) = (right + t.right, failed + t.failed);
        for _ in 0..random.usize(1..6) {
            add(if random.bool() {
                feed(&mut engine, sound, &mut random, &faults, false)
            } else {
                answer(&mut engine, sound, &mut random, &faults)
            });
        }
        if let Some((model, from)) = copy {
            std::thread::sleep(TICK);
            // At any moment of a step, and then for good.
            let (at, path) = (Duration::from_micros(random.u64(..3000)), model.path().to_owned());
            let writer = std::thread::spawn(move || {
                std::thread::sleep(at);
                rewrite(&path, from);
            });
            add(feed(&mut engine, sound, &mut random, &faults, false));
            writer.join().unwrap();
            add(feed(&mut engine, sound, &mut random, &faults, true));
            rewritten += 1;
        }
    }
    println!(
        "{schedules} schedules, {rewritten} with a rewritten file: {right} tokens right, {failed} sequences failed, none wrong"
    );
    assert!(right > 0 && failed > 0, "{right} right, {failed} failed");
}

/// The greedy answer to nine tokens, how it ended, and why if it failed.
fn answer_alone(engine: &mut Engine, prompt: &[u32]) -> (Vec<u32>, Finish, String) {
    let id = engine.add_sequence();
    engine.start(id, prompt, greedy()).unwrap();
    let (mut answer, mut end) = (Vec::new(), None);
    while !engine.is_idle() {
        for event in engine.step().unwrap() {
            match event {
                Event::Token { token, .. } => answer.push(*token),
                Event::Finished { reason, .. } => end = Some(*reason),
                Event::Prefill { .. } => {}
            }
        }
    }
    let failure = engine.take_failure(id).map_or(String::new(), |e| e.to_string());
    engine.remove_sequence(id);
    (answer, end.unwrap(), failure)
}

#[test]
fn experts_that_cannot_be_read_end_their_own_request_only() {
    for name in ["qwen3_moe", "mlx_qwen3_next"] {
        for io_uring in [true, false] {
            let faults = Arc::new(Faults::all(false));
            let expert_options = ExpertOptions {
                io_uring,
                faults: Some(Arc::clone(&faults) as Arc<dyn ReadFaults>),
                ..ExpertOptions::default()
            };
            let options = Options {
                expert_budget: Some(least_bytes(name)),
                lookahead: Lookahead::Off,
                expert_options,
                ..streamed(Placement::Slots)
            };
            let mut engine = Engine::open(&folder(name), options).unwrap();
            let prompt = tokens(&engine, 9, 3);
            let (wanted, end, _) = answer_alone(&mut engine, &prompt);
            assert_eq!(end, Finish::Length, "{name}");
            faults.on.store(true, Ordering::SeqCst);
            let (_, end, failure) = answer_alone(&mut engine, &prompt);
            assert_eq!(end, Finish::Failed, "{name}");
            assert!(failure.contains("model.safetensors: cannot read in tensor"), "{failure}");
            // The disk is well again: the same engine goes on as if nothing had been.
            faults.on.store(false, Ordering::SeqCst);
            let (again, end, _) = answer_alone(&mut engine, &prompt);
            assert_eq!((again, end), (wanted, Finish::Length), "{name}");
        }
    }
}

/// A step of an engine whose files were changed after it was opened and used.
fn after(change: impl Fn(&Path, u64), placement: Placement) -> Result<Vec<u32>, String> {
    let name = "qwen3_moe";
    let (model, from) = copy_of(name);
    let options = Options { expert_budget: Some(least_bytes(name)), ..streamed(Placement::Slots) };
    let options = if placement == Placement::Mapped { mapped() } else { options };
    let mut engine = Engine::open(model.path(), options).unwrap();
    let prompt = tokens(&engine, 9, 3);
    let wanted = logits(&mut engine, &prompt, &[4, 5]);
    std::thread::sleep(TICK);
    change(model.path(), from);
    let id = engine.add_sequence();
    let mut bits = Vec::new();
    let keep = |_, row: &[f32]| {
        bits.extend(row.iter().map(|x| x.to_bits()));
        Ok(())
    };
    engine.feed(id, &prompt, true, keep).map_err(|e| format!("{e:#}"))?;
    assert!(bits == wanted);
    Ok(bits)
}

#[test]
fn a_file_that_is_rewritten_while_it_is_used_is_an_error() {
    for placement in [Placement::Slots, Placement::Mapped] {
        let error = after(rewrite, placement).unwrap_err();
        assert!(error.contains("model.safetensors: changed or replaced while it was in use"), "{error}");
        // Even if its time of modification says nothing of it.
        let quietly = |model: &Path, from| {
            let path = model.join("model.safetensors");
            let before = fs::metadata(&path).unwrap().modified().unwrap();
            rewrite(model, from);
            OpenOptions::new().write(true).open(&path).unwrap().set_modified(before).unwrap();
        };
        let error = after(quietly, placement).unwrap_err();
        assert!(error.contains("changed or replaced"), "{error}");
        let shorter = |model: &Path, from| {
            let path = model.join("model.safetensors");
            OpenOptions::new().write(true).open(path).unwrap().set_len(from + 40_000).unwrap();
        };
        let error = after(shorter, placement).unwrap_err();
        assert!(error.contains("truncated while it was in use"), "{error}");
    }
}

type Change<'a> = &'a dyn Fn(&Path, u64);

#[test]
fn what_changes_no_bytes_of_a_file_is_no_error() {
    let path = |model: &Path| model.join("model.safetensors");
    let changes: [Change; 5] = [
        &|model, _| fs::rename(path(model), model.join("moved")).unwrap(),
        &|model, _| fs::hard_link(path(model), model.join("linked")).unwrap(),
        &|model, _| fs::remove_file(path(model)).unwrap(),
        &|model, _| fs::set_permissions(path(model), fs::Permissions::from_mode(0o400)).unwrap(),
        // As an update that is written beside it and renamed: the model that was opened goes on.
        &|model, from| {
            fs::copy(path(model), model.join("new")).unwrap();
            fs::rename(model.join("new"), path(model)).unwrap();
            rewrite(model, from);
        },
    ];
    for placement in [Placement::Slots, Placement::Mapped] {
        changes.iter().for_each(|change| drop(after(change, placement).unwrap()));
    }
}
