//! `sluice bench prefill`: a prompt in an empty sequence.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use clap::Args;
use serde_json::json;
use sluice_backend::NUMERICS_VERSION;
use sluice_engine::{Engine, Phase, Profile, Streamed};
use sluice_kernels::roofline::Arithmetic;

use super::figures::Figures;
use super::roofline::{has_tiles, peak, peak_of_tiles};
use super::subject::{ModelArgs, Subject, tokens};
use crate::engine_args::activations_name;
use crate::{stats, streamed, units};
use sluice_front::machine;

#[derive(Args, Debug)]
pub struct PrefillArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// Tokens of the prompt, one number or several
    #[arg(long, value_delimiter = ',', default_value = "512", value_name = "N,..")]
    tokens: Vec<usize>,
    /// Before measuring, read streamed experts into all the memory there is for them
    #[arg(long)]
    fill_experts: bool,
}

/// Runs the benchmark and prints a row for each length.
pub fn run(args: &PrefillArgs) -> Result<()> {
    ensure!(args.tokens.iter().all(|n| *n > 0), "--tokens must be at least 1");
    let longest = args.tokens.iter().max().expect("clap wants one");
    let mut subject = Subject::load(&args.model, *longest, 1)?;
    let (json, name) = (args.model.json, subject.arithmetic.name());
    if !json {
        let (engine, options) = (&subject.name, subject.engine.options());
        println!(
            "{engine}: {} threads, {}, activations {}",
            options.threads,
            options.isa,
            activations_name(options.activations)
        );
        let peak = format!("{name} peak TOPS");
        print!("{:>8}{:>24}{:>12}{:>12}{:>22}{:>20}", "tokens", "tokens/s", "MACs", "TOPS", peak, "of it");
        println!(
            "{}",
            if shows_tiles(&subject) { format!("{:>22}{:>20}", "AMX peak TOPS", "of it") } else { String::new() }
        );
    }
    for &n in &args.tokens {
        let m = measure(&mut subject, args, n)?;
        let rate = m.tokens_per_second.map(|t| 2.0 * t / n as f64 * m.macs as f64);
        let (fraction, of_tiles) = (rate.over(&m.peak), rate.over(&m.tiles));
        if json {
            let options = subject.engine.options();
            let line = json!({
                "bench": "prefill",
                "model": subject.name,
                "threads": options.threads,
                "activations": activations_name(options.activations),
                "isa": options.isa.to_string(),
                "numerics_version": NUMERICS_VERSION,
                "tokens": n,
                "rounds": args.model.rounds,
                "tokens_per_second": m.tokens_per_second.to_json(),
                "weight_macs": m.macs,
                "operations_per_second": rate.to_json(),
                "arithmetic": name,
                "peak_operations_per_second": m.peak.to_json(),
                "fraction_of_peak": fraction.to_json(),
                "amx_peak_operations_per_second": m.tiles.to_json(),
                "fraction_of_amx_peak": of_tiles.to_json(),
                "peak_memory": machine::own_memory("VmHWM"),
                "experts": streamed::to_json(&subject.engine, m.streamed.as_ref(), m.time, n),
                "phases": stats::profile_json(&m.profile),
            });
            println!("{line}");
        } else {
            let share = |peak: &Figures, of: &Figures| {
                let percent = of.map(|x| 100.0 * x).to_text(0) + "%";
                format!("{:>22}{percent:>20}", peak.map(|x| x / 1e12).to_text(2))
            };
            println!(
                "{n:>8}{:>24}{:>12}{:>12.2}{}{}",
                m.tokens_per_second.to_text(1),
                units::count(m.macs),
                rate.median() / 1e12,
                share(&m.peak, &fraction),
                if shows_tiles(&subject) { share(&m.tiles, &of_tiles) } else { String::new() }
            );
        }
    }
    Ok(())
}

/// Whether there is a second peak, of AMX: integer products would use tiles if that were faster.
fn shows_tiles(subject: &Subject) -> bool {
    subject.arithmetic == Arithmetic::Int8 && has_tiles(subject.engine.options().isa)
}

struct PrefillResult {
    tokens_per_second: Figures,
    /// The machine's peak operations per second in the model's arithmetic.
    peak: Figures,
    /// The same with AMX tiles; empty without AMX, or for other arithmetic.
    tiles: Figures,
    /// Multiply-adds of the whole prompt with weights.
    macs: u64,
    profile: Profile,
    /// Profile of the last round, and its time.
    streamed: Option<Streamed>,
    time: Duration,
}

fn measure(subject: &mut Subject, args: &PrefillArgs, n: usize) -> Result<PrefillResult> {
    let shows_tiles = shows_tiles(subject);
    let Subject { engine, arithmetic, profile_apart, .. } = subject;
    engine.profile(!*profile_apart);
    // If experts are read from disk or copied to a device, each round has a different prompt: the same one would find its experts in place.
    let (streams, vocabulary) = (engine.take_streamed().is_some(), engine.model().vocabulary);
    let prompt = |round: usize| tokens(if streams { round * n } else { 0 }, n, vocabulary);
    if args.fill_experts {
        while engine.fill_experts() {}
    }
    read_prompt(engine, &prompt(0))?;
    let [mut tokens_per_second, mut best, mut tiles] = [(); 3].map(|()| Figures::default());
    let mut profile = Profile::default();
    let (mut streamed, mut time) = (None, Duration::ZERO);
    for round in 0..args.model.rounds {
        let prompt = prompt(1 + round);
        if !args.model.no_roofline {
            let options = engine.options();
            best.push(peak(options.isa, options.threads, *arithmetic));
            if shows_tiles {
                tiles.push(peak_of_tiles(options.isa, options.threads));
            }
        }
        engine.take_profile();
        engine.take_streamed();
        let start = Instant::now();
        read_prompt(engine, &prompt)?;
        time = start.elapsed();
        streamed = engine.take_streamed();
        tokens_per_second.push(n as f64 / time.as_secs_f64());
        profile = engine.take_profile();
    }
    if *profile_apart {
        engine.profile(true);
        read_prompt(engine, &prompt(1 + args.model.rounds))?;
        profile = engine.take_profile();
    }
    let macs = Phase::ALL.iter().map(|p| profile.row(*p).macs).sum();
    Ok(PrefillResult { tokens_per_second, peak: best, tiles, macs, profile, streamed, time })
}

/// Computes the prompt in a sequence of its own.
fn read_prompt(engine: &mut Engine, prompt: &[u32]) -> Result<()> {
    engine.score(prompt, false, |_, _| Ok(()))
}
