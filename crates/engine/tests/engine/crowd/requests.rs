//! What the sequences ask for, and what each answers when it is alone.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use fastrand::Rng;
use sluice_engine::sampling::SamplingParams;
use sluice_engine::{
    Activations, DraftOptions, DrafterChoice, Engine, Generation, KvType, Options, Placement, ReadFaults,
};

pub fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden").join(name)
}

pub const SEQUENCES: usize = 64;
pub const CONTEXT: usize = 150;
/// The most places where a sequence is asked to leave a copy of its state. A long prompt leaves more of them by itself, and one where it finds a known prefix.
pub const MARKS: usize = 2;
pub const GRID: usize = 2;

/// What a run is like.
#[derive(Clone, Copy, Debug)]
pub struct Kind {
    pub model: &'static str,
    /// Experts are read from a disk that now and then cannot be read.
    pub disk: bool,
    /// The type of keys and values; `None`: the model's own.
    pub kv_type: Option<KvType>,
}

/// Room for few of them: in a step, and in memory.
pub fn options(kind: Kind, random: &mut Rng) -> Options {
    let mut one_of = |all: &[usize]| all[random.usize(..all.len())];
    let block_tokens = one_of(&[5, 8, 16]);
    Options {
        threads: 2,
        activations: Activations::Int8,
        max_context: Some(CONTEXT),
        max_sequences: one_of(&[2, 6, 20]),
        // Of one context to three.
        kv_tokens: Some(one_of(&[1, 2, 3]) * CONTEXT.next_multiple_of(block_tokens)),
        chunk: Some(one_of(&[4, 20, 50])),
        block_tokens,
        kv_type: kind.kv_type,
        prefix_cache: random.u8(..4) > 0,
        snapshots: [0, 1, 3, 12][random.usize(..4)],
        experts: if kind.disk { Placement::Slots } else { Placement::Mapped },
        drafts: DraftOptions {
            drafter: [DrafterChoice::Off, DrafterChoice::Ngram][random.usize(..2)],
            tokens: [1, 3, 8][random.usize(..3)],
            governed: random.bool(),
            only_spare_memory: random.bool(),
        },
        ..Options::for_this_machine().unwrap()
    }
}

/// Rows that fail, and rows whose logits are not numbers, by what anybody can know of them.
pub fn fails(salt: u64, token: u32, position: u32) -> bool {
    Rng::with_seed(salt ^ u64::from(token) << 32 ^ u64::from(position)).u32(..400) == 0
}

pub fn is_no_number(salt: u64, token: u32, position: u32) -> bool {
    fails(!salt, token, position)
}

/// Places of a disk that cannot be read while it is bad.
#[derive(Debug, Default)]
pub struct Disk {
    pub bad: AtomicBool,
}

impl ReadFaults for Disk {
    fn intercept(&self, _: &Path, at: u64, memory: &mut [u8], came: io::Result<usize>) -> Option<io::Result<usize>> {
        let dead = self.bad.load(Ordering::SeqCst) && Rng::with_seed(at).u8(..10) == 0;
        if dead {
            memory.fill(0xee);
        }
        // A disk's error, on Linux.
        Some(if dead { Err(io::Error::from_raw_os_error(5)) } else { came })
    }
}

/// What a sequence is asked for, turn after turn, and what it would answer if it were alone.
pub struct Request {
    /// (New tokens, what to generate, the whole text after it)
    pub turns: Vec<(Vec<u32>, Generation, Vec<u32>)>,
    /// The step at which it is started.
    pub start: usize,
}

/// Requests, each answered by itself.
pub fn requests(kind: Kind, random: &mut Rng) -> Vec<Request> {
    let own = Some(CONTEXT + 16);
    let alone = Options {
        max_sequences: 1,
        kv_tokens: own,
        experts: Placement::Mapped,
        prefix_cache: false,
        drafts: DraftOptions::default(),
        ..options(kind, &mut random.clone())
    };
    let mut engine = Engine::open(&folder(kind.model), alone).unwrap();
    let vocabulary = engine.model().vocabulary as u32;
    let mut requests = Vec::new();
    for _ in 0..SEQUENCES {
        let id = engine.add_sequence();
        let (mut turns, mut room) = (Vec::new(), CONTEXT);
        for _ in 0..if random.u8(..4) == 0 { 2 } else { 1 } {
            let most = [1, 8, 40, 100][random.usize(..4)];
            let mut prompt: Vec<u32> =
                (0..random.usize(1..=most).min(room / 2)).map(|_| random.u32(..vocabulary)).collect();
            // Many begin as another's text does.
            if let (true, Some(Request { turns: of, .. })) =
                (random.bool() && turns.is_empty(), random.choice(&requests))
            {
                let known = &of[0].2;
                let n = random.usize(..=known.len().min(prompt.len() - 1));
                prompt[..n].copy_from_slice(&known[..n]);
            }
            let marks = (0..random.usize(..=MARKS)).map(|_| random.usize(..CONTEXT)).collect();
            let sampling = SamplingParams {
                temperature: [0.0, 0.7, 1.0][random.usize(..3)],
                top_k: random.u32(..40),
                repetition_penalty: [1.0, 1.2][random.usize(..2)],
                seed: random.u64(..),
                ..SamplingParams::default()
            };
            let stop_ids = if random.bool() { vec![] } else { (0..vocabulary / 30).collect() };
            let generation = Generation {
                sampling,
                max_tokens: random.usize(1..=30),
                stop_ids,
                snapshot_points: marks,
                ..Generation::default()
            };
            engine.start(id, &prompt, generation.clone()).unwrap();
            while !engine.is_idle() {
                engine.step().unwrap();
            }
            let text = engine.tokens(id).unwrap().to_vec();
            room = CONTEXT - text.len();
            turns.push((prompt, generation, text));
            if room < 10 {
                break;
            }
        }
        engine.remove_sequence(id);
        requests.push(Request { turns, start: random.usize(..90) });
    }
    requests
}
