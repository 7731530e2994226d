//! `sluice bench decode`: one token at a time, behind a context of a given length.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use clap::Args;
use serde_json::json;
use sluice_backend::NUMERICS_VERSION;
use sluice_engine::{Engine, MemoryClass, Phase, Profile, SequenceId, Streamed};

use super::figures::Figures;
use super::roofline::Memory;
use super::{ModelArgs, Subject, batch_decode, token, tokens};
use crate::engine_args::activations_name;
use crate::{machine, stats, streamed, units};

#[derive(Args, Debug)]
pub struct DecodeArgs {
    #[command(flatten)]
    pub(super) model: ModelArgs,
    /// Tokens in front, one number or several
    #[arg(long, value_delimiter = ',', default_value = "128", value_name = "N,..")]
    pub(super) context: Vec<usize>,
    /// Tokens in each measurement
    #[arg(long, default_value_t = 64, value_name = "N")]
    pub(super) tokens: usize,
    /// Steps of so many sequences, a token each, one number or several; sampled at temperature 1
    #[arg(long, value_delimiter = ',', value_name = "N,..")]
    pub(super) sequences: Vec<usize>,
    /// Tokens that the contexts of these sequences begin with in common
    #[arg(long, default_value_t = 0, value_name = "N", requires = "sequences")]
    pub(super) shared: usize,
    /// With --sequences: choose among the K most likely tokens; 0: among all
    #[arg(long, default_value_t = 0, value_name = "K", requires = "sequences")]
    pub(super) top_k: u32,
    /// With --sequences: choose among the most likely tokens whose probabilities add up to P
    #[arg(long, default_value_t = 1.0, value_name = "P", requires = "sequences")]
    pub(super) top_p: f32,
    /// First read experts that are streamed for which there is memory: nothing of that is measured
    #[arg(long)]
    pub(super) fill_experts: bool,
    /// With --sequences: also where the time of the last measurement went
    #[arg(long, requires = "sequences")]
    pub(super) phases: bool,
}

pub fn run(args: &DecodeArgs) -> Result<()> {
    ensure!(args.tokens > 0, "--tokens must be at least 1");
    ensure!(args.context.iter().all(|c| *c > 0), "--context must be at least 1");
    if !args.sequences.is_empty() {
        return batch_decode::run(args);
    }
    let longest = args.context.iter().max().expect("clap wants one");
    // Where experts are read, each round goes on behind the one before: the same tokens again would find theirs in memory.
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

struct Measured {
    context: usize,
    tokens_per_second: Figures,
    /// Bytes per second that the machine reads at best.
    read: Figures,
    /// Weights that a token uses: all resident ones, and those of its experts.
    weight_bytes: f64,
    /// Keys, values and recurrent state that a token reads, in the middle of the measurement.
    cache_bytes: f64,
    /// Highest resident set so far, without the buffer of the roofline.
    peak_memory: Option<u64>,
    profile: Profile,
    streamed: Option<Streamed>,
    /// Of all rounds.
    seconds: f64,
    /// Of the logits behind the context and of the tokens that warm up: equal where every bit of them is.
    logits: u64,
}

impl Measured {
    /// Of the read bandwidth, with the weights alone and with everything that is read.
    fn fractions(&self) -> [Figures; 2] {
        [self.weight_bytes, self.weight_bytes + self.cache_bytes]
            .map(|bytes| self.tokens_per_second.map(|t| t * bytes).over(&self.read))
    }
}

fn measure(subject: &mut Subject, args: &DecodeArgs, context: usize, memory: &mut Option<Memory>) -> Result<Measured> {
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
    // Pages that were never touched, and threads that sleep, are not what is measured.
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
        // What comes before may take long: a recurrent state is computed again from the start.
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
    Ok(Measured {
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

/// Where FNV-1a begins.
const FNV: u64 = 0xcbf2_9ce4_8422_2325;

/// FNV-1a of four bytes more.
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

/// Leaves the sequence with exactly the `context` tokens that it began with, all of them computed.
fn rewind(engine: &mut Engine, id: SequenceId, context: usize) -> Result<()> {
    engine.truncate(id, context - 1)?;
    let vocabulary = engine.model().vocabulary;
    engine.feed(id, &[token(context - 1, vocabulary)], false, |_, _| Ok(()))
}

fn to_json(subject: &mut Subject, args: &DecodeArgs, m: &Measured) -> serde_json::Value {
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

/// The line above a table: the model, and how it is computed.
pub fn print_subject(subject: &Subject) {
    let options = subject.engine.options();
    println!(
        "{}: {} threads, {}, activations {}",
        subject.name,
        options.threads,
        options.isa,
        activations_name(options.activations)
    );
}

fn print_head(subject: &Subject) {
    print_subject(subject);
    println!(
        "{:>8}{:>24}{:>14}{:>14}{:>22}{:>20}{:>20}",
        "context", "tokens/s", "weights", "cache", "read GB/s", "of it by weights", "by all"
    );
}

fn print_row(m: &Measured) {
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
