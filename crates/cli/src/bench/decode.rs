//! `sluice bench decode`: single tokens after a context of a given length.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use serde_json::json;
use sluice_backend::NUMERICS_VERSION;
use sluice_engine::{Engine, MemoryClass, Phase, Profile, SequenceId, Streamed};

use super::batch_decode;
use super::decode_args::{DecodeArgs, print_subject};
use super::figures::Figures;
use super::roofline::Memory;
use super::subject::{Subject, token, tokens};
use crate::engine_args::activations_name;
use crate::{stats, streamed, units};
use sluice_front::machine;

/// Runs the benchmark and prints a row for each context.
pub fn run(args: &DecodeArgs) -> Result<()> {
    ensure!(args.tokens > 0, "--tokens must be at least 1");
    ensure!(args.context.iter().all(|c| *c > 0), "--context must be at least 1");
    if !args.sequences.is_empty() {
        return batch_decode::run(args);
    }
    let longest = args.context.iter().max().expect("clap wants one");
    // If experts are read from disk, each round continues where the last one ended: the same tokens again would find their experts in memory.
    let mut subject = Subject::load(&args.model, longest + args.tokens * (args.model.rounds + 2), 1)?;
    let mut memory = None;
    if !args.model.json {
        print_head(&subject);
    }
    for &context in &args.context {
        let measured = measure(&mut subject, args, context, &mut memory)?;
        if args.model.json {
            println!("{}", to_json(&mut subject, args, &measured));
        } else {
            print_row(&measured);
            if measured.streamed.is_some() {
                let (all, tokens) = (Duration::from_secs_f64(measured.seconds), args.tokens * args.model.rounds);
                println!("{}", streamed::to_text(&subject.engine, measured.streamed.as_ref(), all, tokens));
            }
        }
    }
    Ok(())
}

struct DecodeResult {
    context: usize,
    tokens_per_second: Figures,
    /// The machine's memory bandwidth in bytes per second.
    read: Figures,
    /// Bytes of weights that a token uses: all resident ones, and its experts.
    weight_bytes: f64,
    /// Bytes of keys, values and recurrent state that a token reads in the middle of the measurement.
    cache_bytes: f64,
    /// Highest resident set so far, without the roofline's buffer.
    peak_memory: Option<u64>,
    profile: Profile,
    streamed: Option<Streamed>,
    /// Seconds of all rounds.
    seconds: f64,
    /// Hash of the logits of context and warm-up: equal only if every bit is.
    logits: u64,
}

impl DecodeResult {
    /// Fractions of memory bandwidth: for the weights alone, and for everything that is read.
    fn fractions(&self) -> [Figures; 2] {
        [self.weight_bytes, self.weight_bytes + self.cache_bytes]
            .map(|bytes| self.tokens_per_second.map(|t| t * bytes).over(&self.read))
    }
}

fn measure(
    subject: &mut Subject,
    args: &DecodeArgs,
    context: usize,
    memory: &mut Option<Memory>,
) -> Result<DecodeResult> {
    let Subject { engine, profile_apart, .. } = subject;
    engine.profile(!*profile_apart);
    if args.fill_experts {
        while engine.fill_experts() {}
    }
    let vocabulary = engine.model().vocabulary;
    let id = engine.add_sequence();
    let mut logits = FNV;
    let mut add = |row: &[f32]| row.iter().for_each(|x| logits = hashed(logits, x.to_bits()));
    engine.feed(id, &tokens(0, context, vocabulary), false, |_, row| {
        add(row);
        Ok(())
    })?;
    let mut tokens_per_second = Figures::default();
    let mut read = Figures::default();
    // Warm-up touches new pages and wakes threads, neither of which is to be measured.
    for i in context..context + args.tokens.min(8) {
        engine.feed(id, &[token(i, vocabulary)], false, |_, row| {
            add(row);
            Ok(())
        })?;
    }
    let peak_memory = machine::own_memory("VmHWM");
    engine.take_profile();
    let mut profile = Profile::default();
    let streams = engine.take_streamed().is_some();
    let (mut streamed, mut seconds, mut at) = (None::<Streamed>, 0.0, context + args.tokens.min(8));
    for round in 0..args.model.rounds {
        if !args.model.no_roofline {
            if memory.is_none() {
                *memory = Some(Memory::new()?);
            }
            let memory = memory.as_mut().expect("made above");
            read.push(memory.read(engine.options().isa, engine.options().threads));
        }
        // Rewinding may take long, since a recurrent state is computed again from the start.
        if !streams {
            rewind(engine, id, context)?;
            at = context;
        }
        engine.take_profile();
        engine.take_streamed();
        let start = Instant::now();
        generate(engine, id, at, args.tokens)?;
        let taken = start.elapsed().as_secs_f64();
        at += args.tokens;
        seconds += taken;
        tokens_per_second.push(args.tokens as f64 / taken);
        match (&mut streamed, engine.take_streamed()) {
            (Some(all), Some(more)) => all.add(&more),
            (all, more) => *all = more,
        }
        if round + 1 == args.model.rounds {
            profile = engine.take_profile();
        }
    }
    if *profile_apart {
        engine.profile(true);
        if !streams {
            rewind(engine, id, context)?;
            at = context;
        }
        engine.take_profile();
        generate(engine, id, at, args.tokens)?;
        profile = engine.take_profile();
    }
    let weights: u64 = Phase::ALL.iter().map(|p| profile.row(*p).weight_bytes).sum();
    let cache_bytes = (engine.kv_in_use() + engine.kv_cached() + engine.memory(MemoryClass::State)) as f64;
    engine.remove_sequence(id);
    let weight_bytes = weights as f64 / args.tokens as f64;
    Ok(DecodeResult {
        context,
        tokens_per_second,
        read,
        weight_bytes,
        cache_bytes,
        peak_memory,
        profile,
        streamed,
        seconds,
        logits,
    })
}

/// FNV-1a's initial value.
const FNV: u64 = 0xcbf2_9ce4_8422_2325;

/// FNV-1a of four more bytes.
fn hashed(hash: u64, bits: u32) -> u64 {
    bits.to_le_bytes().iter().fold(hash, |h, byte| (h ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3))
}

/// Computes `n` tokens, one after the other, from position `context` on.
fn generate(engine: &mut Engine, id: SequenceId, context: usize, n: usize) -> Result<()> {
    let vocabulary = engine.model().vocabulary;
    for i in context..context + n {
        engine.advance(id, &[token(i, vocabulary)])?;
    }
    Ok(())
}

/// Cuts the sequence back to its first `context` tokens, all of them computed.
fn rewind(engine: &mut Engine, id: SequenceId, context: usize) -> Result<()> {
    engine.truncate(id, context - 1)?;
    let vocabulary = engine.model().vocabulary;
    engine.feed(id, &[token(context - 1, vocabulary)], false, |_, _| Ok(()))
}

fn to_json(subject: &mut Subject, args: &DecodeArgs, m: &DecodeResult) -> serde_json::Value {
    let [of_weights, of_all] = m.fractions();
    let options = subject.engine.options();
    json!({
        "bench": "decode",
        "model": subject.name,
        "threads": options.threads,
        "activations": activations_name(options.activations),
        "isa": options.isa.to_string(),
        "numerics_version": NUMERICS_VERSION,
        "context": m.context,
        "tokens": args.tokens,
        "rounds": args.model.rounds,
        "tokens_per_second": m.tokens_per_second.to_json(),
        "weight_bytes_per_token": m.weight_bytes,
        "cache_bytes_per_token": m.cache_bytes,
        "read_bytes_per_second": m.read.to_json(),
        "fraction_of_read": of_weights.to_json(),
        "fraction_of_read_with_cache": of_all.to_json(),
        "logits": format!("{:016x}", m.logits),
        "peak_memory": m.peak_memory,
        "resident": {"anonymous": machine::own_memory("RssAnon"), "file": machine::own_memory("RssFile"), "peak": machine::own_memory("VmHWM")},
        "experts": streamed::to_json(&subject.engine, m.streamed.as_ref(), Duration::from_secs_f64(m.seconds), args.tokens * args.model.rounds),
        "memory": MemoryClass::ALL.map(|c| (c.name(), subject.engine.memory(c))).into_iter().collect::<std::collections::BTreeMap<_, _>>(),
        "phases": stats::profile_json(&m.profile),
    })
}

fn print_head(subject: &Subject) {
    print_subject(subject);
    println!(
        "{:>8}{:>24}{:>14}{:>14}{:>22}{:>20}{:>20}",
        "context", "tokens/s", "weights", "cache", "read GB/s", "of it by weights", "by all"
    );
}

fn print_row(m: &DecodeResult) {
    let [of_weights, of_all] = m.fractions();
    let percent = |f: &Figures| f.map(|x| 100.0 * x).to_text(0) + "%";
    println!(
        "{:>8}{:>24}{:>14}{:>14}{:>22}{:>20}{:>20}",
        m.context,
        m.tokens_per_second.to_text(1),
        units::bytes(m.weight_bytes as u64),
        units::bytes(m.cache_bytes as u64),
        m.read.map(|x| x / 1e9).to_text(1),
        percent(&of_weights),
        percent(&of_all)
    );
}
