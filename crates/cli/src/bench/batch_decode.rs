//! `sluice bench decode --sequences N`: steps with one token for each of several sequences, next to the machine's limits: weights read once, each sequence's keys,
//! values and states read once (shared ones once for all), and all multiply-adds with weights at peak arithmetic.

use std::time::Instant;

use anyhow::{Result, ensure};
use serde_json::json;
use sluice_backend::NUMERICS_VERSION;
use sluice_engine::sampling::SamplingParams;
use sluice_engine::{Engine, Event, Finish, Generation, Phase, Profile, SequenceId};

use super::decode_args::{DecodeArgs, print_subject};
use super::figures::Figures;
use super::roofline::{Memory, peak};
use super::subject::{Subject, token};
use crate::engine_args::activations_name;
use crate::{stats, units};
use sluice_front::machine;

/// Tokens before each measurement that do not count.
const WARM: usize = 4;
/// Extra context of each sequence: it generates while others start, and the prefix cache keeps blocks besides its own.
const SLACK: usize = 256;

struct BatchResult {
    /// Seconds of a step.
    step: Figures,
    /// Limits of the machine: bytes per second, and operations per second.
    read: Figures,
    peak: Figures,
    /// Bytes that a step reads: weights, each once, and keys, values and states in the middle of the measurement.
    weight_bytes: f64,
    cache_bytes: f64,
    /// Multiply-adds of a step with weights.
    macs: f64,
    profile: Profile,
    steps: usize,
}

impl BatchResult {
    /// Lower bounds for a step in seconds: for what it reads, and for its products.
    fn bounds(&self) -> [Figures; 2] {
        [
            self.read.map(|read| (self.weight_bytes + self.cache_bytes) / read),
            self.peak.map(|peak| 2.0 * self.macs / peak),
        ]
    }

    /// The larger of the two bounds, as a fraction of the step's time.
    fn fraction(&self) -> Figures {
        let [bytes, products] = self.bounds().map(|b| if b.is_empty() { 0.0 } else { b.median() });
        if bytes == 0.0 { Figures::default() } else { self.step.map(|step| bytes.max(products) / step) }
    }
}

/// Runs the benchmark and prints a row for each number of sequences and context.
pub fn run(args: &DecodeArgs) -> Result<()> {
    let most = args.context.iter().max().expect("clap wants one") + args.tokens * (args.model.rounds + 1) + WARM;
    let sequences = *args.sequences.iter().max().expect("clap wants one");
    // The first sequences generate while the prompts of the others are computed.
    let most = most + 2 * sequences;
    ensure!(args.sequences.iter().all(|n| *n > 0), "--sequences must be at least 1");
    ensure!(args.context.iter().all(|c| *c > args.shared), "--shared must be less than --context");
    let mut subject = Subject::load(&args.model, most + SLACK, sequences)?;
    if !args.model.json {
        print_subject(&subject);
        println!(
            "{:>10}{:>9}{:>8}{:>24}{:>12}{:>12}{:>12}{:>14}{:>14}{:>22}",
            "sequences",
            "context",
            "shared",
            "ms a step",
            "tokens/s",
            "weights",
            "cache",
            "by bytes",
            "by products",
            "of the longer"
        );
    }
    let mut memory = if args.model.no_roofline { None } else { Some(Memory::new()?) };
    for &context in &args.context {
        for &n in &args.sequences {
            let measured = measure(&mut subject, args, n, context, &mut memory)?;
            if args.model.json {
                println!("{}", to_json(&subject, args, n, context, &measured));
            } else {
                print_row(args, n, context, &measured);
                if args.phases {
                    print!("{}", stats::profile_text("phases", &measured.profile));
                }
            }
        }
    }
    Ok(())
}

fn measure(
    subject: &mut Subject,
    args: &DecodeArgs,
    n: usize,
    context: usize,
    memory: &mut Option<Memory>,
) -> Result<BatchResult> {
    let Subject { engine, arithmetic, profile_apart, .. } = subject;
    engine.profile(!*profile_apart);
    let vocabulary = engine.model().vocabulary;
    // 1. Compute each prompt by itself, after those that it may share tokens with. Then all of them again, which are cached but for one token
    let prompts: Vec<Vec<u32>> = (0..n)
        .map(|i| {
            let own = |p: usize| if p < args.shared { p } else { (i + 1) << 24 | p };
            (0..context).map(|p| token(own(p), vocabulary)).collect()
        })
        .collect();
    for prompt in &prompts {
        let id = start(engine, prompt, 1, args, 0)?;
        while !engine.is_idle() {
            finished_well(engine.step()?)?;
        }
        engine.remove_sequence(id);
    }
    let (mut ids, mut begun) = (Vec::new(), 0);
    let steps = args.tokens * (args.model.rounds + usize::from(*profile_apart)) + WARM;
    for (i, prompt) in prompts.iter().enumerate() {
        ids.push(start(engine, prompt, steps + SLACK, args, i as u64)?);
    }
    while begun < n {
        begun = begun.max(tokens_of(engine.step()?));
    }
    // 2. Steps with all sequences
    for _ in 0..WARM {
        step(engine, n)?;
    }
    let (mut seconds, mut read, mut best) = (Figures::default(), Figures::default(), Figures::default());
    let mut profile = Profile::default();
    for _ in 0..args.model.rounds {
        if let Some(memory) = memory {
            read.push(memory.read(engine.options().isa, engine.options().threads));
            best.push(peak(engine.options().isa, engine.options().threads, *arithmetic));
        }
        engine.take_profile();
        let mut times = Figures::default();
        for _ in 0..args.tokens {
            let begun = Instant::now();
            step(engine, n)?;
            times.push(begun.elapsed().as_secs_f64());
        }
        // The median: a step that others delayed is not typical.
        seconds.push(times.median());
        profile = engine.take_profile();
    }
    if *profile_apart {
        engine.profile(true);
        for _ in 0..args.tokens {
            step(engine, n)?;
        }
        profile = engine.take_profile();
    }
    let weights: u64 = Phase::ALL.iter().map(|p| profile.row(*p).weight_bytes).sum();
    let macs: u64 = Phase::ALL.iter().map(|p| profile.row(*p).macs).sum();
    let states =
        if engine.model().state_len() > 0 { (n * engine.model().state_len() * size_of::<f32>()) as f64 } else { 0.0 };
    let cache_bytes = engine.kv_in_use() as f64 + states;
    for id in ids {
        engine.cancel(id)?;
        engine.remove_sequence(id);
    }
    let steps = args.tokens;
    Ok(BatchResult {
        step: seconds,
        read,
        peak: best,
        weight_bytes: weights as f64 / steps as f64,
        cache_bytes,
        macs: macs as f64 / steps as f64,
        profile,
        steps,
    })
}

/// Starts a sequence that generates `tokens` tokens after `prompt`.
fn start(engine: &mut Engine, prompt: &[u32], tokens: usize, args: &DecodeArgs, seed: u64) -> Result<SequenceId> {
    let mut generation =
        Generation { max_tokens: tokens, snapshot_points: vec![prompt.len() - 1], ..Generation::default() };
    generation.sampling = SamplingParams { top_k: args.top_k, top_p: args.top_p, seed, ..SamplingParams::default() };
    generation.sampling.validate()?;
    if args.shared > 0 {
        generation.snapshot_points.push(args.shared);
    }
    let id = engine.add_sequence();
    engine.start(id, prompt, generation)?;
    Ok(id)
}

/// One step, in which every sequence gets a token.
fn step(engine: &mut Engine, n: usize) -> Result<()> {
    let tokens = tokens_of(engine.step()?);
    ensure!(tokens == n, "a step gave {tokens} tokens instead of {n}");
    Ok(())
}

fn tokens_of(events: &[Event]) -> usize {
    events.iter().filter(|e| matches!(e, Event::Token { .. })).count()
}

fn finished_well(events: &[Event]) -> Result<()> {
    let failed = events.iter().any(|e| matches!(e, Event::Finished { reason: Finish::Failed, .. }));
    ensure!(!failed, "a prompt could not be computed");
    Ok(())
}

fn to_json(subject: &Subject, args: &DecodeArgs, n: usize, context: usize, m: &BatchResult) -> serde_json::Value {
    let options = subject.engine.options();
    let [by_bytes, by_products] = m.bounds();
    json!({
        "bench": "decode",
        "model": subject.name,
        "threads": options.threads,
        "activations": activations_name(options.activations),
        "isa": options.isa.to_string(),
        "numerics_version": NUMERICS_VERSION,
        "sequences": n,
        "context": context,
        "shared": args.shared,
        "steps": m.steps,
        "rounds": args.model.rounds,
        "step_seconds": m.step.to_json(),
        "tokens_per_second": m.step.map(|s| n as f64 / s).to_json(),
        "weight_bytes_per_step": m.weight_bytes,
        "cache_bytes_per_step": m.cache_bytes,
        "weight_macs_per_step": m.macs,
        "read_bytes_per_second": m.read.to_json(),
        "peak_operations_per_second": m.peak.to_json(),
        "bound_by_bytes_seconds": by_bytes.to_json(),
        "bound_by_products_seconds": by_products.to_json(),
        "fraction_of_bound": m.fraction().to_json(),
        "peak_memory": machine::own_memory("VmHWM"),
        "memory": {"kv_in_use": subject.engine.kv_in_use()},
        "phases": stats::profile_json(&m.profile),
    })
}

fn print_row(args: &DecodeArgs, n: usize, context: usize, m: &BatchResult) {
    let [by_bytes, by_products] = m.bounds();
    let ms = |f: &Figures, digits| f.map(|s| 1e3 * s).to_text(digits);
    let middle = |f: &Figures| if f.is_empty() { "-".into() } else { format!("{:.2}", 1e3 * f.median()) };
    println!(
        "{n:>10}{context:>9}{:>8}{:>24}{:>12.1}{:>12}{:>12}{:>14}{:>14}{:>22}",
        args.shared,
        ms(&m.step, 2),
        n as f64 / m.step.median(),
        units::bytes(m.weight_bytes as u64),
        units::bytes(m.cache_bytes as u64),
        middle(&by_bytes),
        middle(&by_products),
        m.fraction().map(|f| 100.0 * f).to_text(0) + "%"
    );
}
