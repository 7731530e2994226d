//! Runs every target with its seeds and random changes of these: the same at every run, or, with
//! `SLUICE_FUZZ_SECONDS`, other ones each time and as many as there is time for. It needs no fuzzer.

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use sluice_fuzz_targets::{FuzzTarget, TARGETS, root};

/// Changes that are tried per target if no time is given.
const ROUNDS: u64 = 200;

/// A deterministic generator: splitmix64.
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut x = self.0;
        x = (x ^ x >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        x = (x ^ x >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((x ^ x >> 31) % n.max(1) as u64) as usize
    }
}

/// What numbers and words are replaced with.
const WORDS: [&str; 16] = [
    "0",
    "-1",
    "1",
    "1e999",
    "0.5",
    "4294967296",
    "18446744073709551615",
    "16777217",
    "null",
    "[]",
    "{}",
    "\"\"",
    "true",
    "\"a\"",
    "-0.0",
    "[[1]]",
];

/// One of the usual changes: flips a bit, sets a byte, removes or repeats a piece, inserts a piece of another seed, or
/// replaces a word.
fn change(bytes: &mut Vec<u8>, other: &[u8], random: &mut Random) {
    let at = random.below(bytes.len() + 1);
    let end = at + random.below((bytes.len() - at).min(64) + 1);
    match random.below(6) {
        0 if at < bytes.len() => bytes[at] ^= 1 << random.below(8),
        1 if at < bytes.len() => bytes[at] = random.below(256) as u8,
        2 => drop(bytes.drain(at..end)),
        3 => {
            let piece = bytes[at..end].to_vec();
            bytes.splice(at..at, piece);
        }
        4 => {
            let from = random.below(other.len() + 1);
            let piece = &other[from..from + random.below((other.len() - from).min(64) + 1)];
            bytes.splice(at..end, piece.iter().copied());
        }
        _ => {
            // Replaces the number or word after this place.
            let part_of_one = |b: &u8| b.is_ascii_alphanumeric() || b"-.+".contains(b);
            let Some(start) = bytes[at..].iter().position(part_of_one).map(|n| at + n) else { return };
            let len = bytes[start..].iter().position(|b| !part_of_one(b)).unwrap_or(bytes.len() - start);
            bytes.splice(start..start + len, WORDS[random.below(WORDS.len())].bytes());
        }
    }
}

/// Keeps what was found where `scripts/fuzz.sh` keeps it, and says where.
fn keep(name: &str, bytes: &[u8]) -> PathBuf {
    let folder = root().join("target/fuzz/found");
    fs::create_dir_all(&folder).unwrap();
    let path = folder.join(format!(
        "{name}-{:016x}",
        bytes.iter().fold(0, |h: u64, b| (h ^ u64::from(*b)).wrapping_mul(0x100_0000_01B3))
    ));
    fs::write(&path, bytes).unwrap();
    path
}

fn replay((name, target): FuzzTarget) {
    let mut paths: Vec<_> =
        fs::read_dir(root().join("fuzz/seeds").join(name)).unwrap().map(|e| e.unwrap().path()).collect();
    paths.sort();
    let seeds: Vec<Vec<u8>> = paths.iter().map(|path| fs::read(path).unwrap()).collect();
    assert!(!seeds.is_empty());
    seeds.iter().for_each(|seed| target(seed));
    let seconds = std::env::var("SLUICE_FUZZ_SECONDS").ok().map(|s| Duration::from_secs(s.parse().unwrap()));
    let start = if seconds.is_some() { fastrand::u64(..) } else { 0 };
    let (begun, mut random, mut rounds) = (Instant::now(), Random(start), 0);
    while seconds.map_or(rounds < ROUNDS, |s| begun.elapsed() < s) {
        let mut bytes = seeds[random.below(seeds.len())].clone();
        let other = &seeds[random.below(seeds.len())];
        (0..=random.below(4)).for_each(|_| change(&mut bytes, other, &mut random));
        let result = std::panic::catch_unwind(|| target(&bytes));
        if result.is_err() {
            panic!("{name}: round {rounds} from {start} panics at what lies in {}", keep(name, &bytes).display());
        }
        rounds += 1;
    }
    println!("{name}: {rounds} changes of {} seeds, {:.1} s", seeds.len(), begun.elapsed().as_secs_f64());
}

/// A template may take unbounded memory outside of its process: only the seeds themselves are tried.
fn seeds_alone((name, target): FuzzTarget) {
    for entry in fs::read_dir(root().join("fuzz/seeds").join(name)).unwrap() {
        target(&fs::read(entry.unwrap().path()).unwrap());
    }
}

#[test]
fn nothing_that_others_wrote_makes_it_panic() {
    let only = std::env::var("SLUICE_FUZZ_TARGET").ok();
    for target in TARGETS.into_iter().filter(|e| only.as_ref().is_none_or(|only| only == e.0)) {
        if target.0 == "template" { seeds_alone(target) } else { replay(target) }
    }
}
