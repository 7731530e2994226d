//! `sluice bench prefill`: a prompt in an empty sequence.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use clap::Args;
use serde_json::json;
use sluice_backend::NUMERICS_VERSION;
use sluice_engine::{Engine, Phase, Profile, Streamed};

use super::figures::Figures;
use super::roofline::peak;
use super::{ModelArgs, Subject, tokens};
use crate::engine_args::activations_name;
use crate::{machine, stats, streamed, units};

#[derive(Args, Debug)]
pub struct PrefillArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// Tokens of the prompt, one number or several
    #[arg(long, value_delimiter = ',', default_value = "512", value_name = "N,..")]
    tokens: Vec<usize>,
}

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
        println!("{:>8}{:>24}{:>12}{:>12}{:>22}{:>20}", "tokens", "tokens/s", "MACs", "TOPS", peak, "of it");
    }
    for &n in &args.tokens {
        let m = measure(&mut subject, args, n)?;
        let rate = m.tokens_per_second.map(|t| 2.0 * t / n as f64 * m.macs as f64);
        let fraction = rate.over(&m.peak);
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
                "peak_memory": machine::own_memory("VmHWM"),
                "experts": streamed::to_json(&subject.engine, m.streamed.as_ref(), m.time, n),
                "phases": stats::profile_json(&m.profile),
            });
            println!("{line}");
        } else {
            println!(
                "{n:>8}{:>24}{:>12}{:>12.2}{:>22}{:>20}",
                m.tokens_per_second.to_text(1),
                units::count(m.macs),
                rate.median() / 1e12,
                m.peak.map(|x| x / 1e12).to_text(2),
                fraction.map(|x| 100.0 * x).to_text(0) + "%"
            );
        }
    }
    Ok(())
}

struct Measured {
    tokens_per_second: Figures,
    /// Operations per second that the machine does at best, in the model's arithmetic.
    peak: Figures,
    /// Multiply-adds with weights, of the whole prompt.
    macs: u64,
    profile: Profile,
    /// Of the last round, and its time.
    streamed: Option<Streamed>,
    time: Duration,
}

fn measure(subject: &mut Subject, args: &PrefillArgs, n: usize) -> Result<Measured> {
    let Subject { engine, arithmetic, profile_apart, .. } = subject;
    engine.profile(!*profile_apart);
    let prompt = tokens(0, n, engine.model().vocabulary);
    read_prompt(engine, &prompt)?;
    let (mut tokens_per_second, mut best) = (Figures::default(), Figures::default());
    let mut profile = Profile::default();
    let (mut streamed, mut time) = (None, Duration::ZERO);
    for _ in 0..args.model.rounds {
        if !args.model.no_roofline {
            best.push(peak(engine.options().isa, engine.options().threads, *arithmetic));
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
        read_prompt(engine, &prompt)?;
        profile = engine.take_profile();
    }
    let macs = Phase::ALL.iter().map(|p| profile.row(*p).macs).sum();
    Ok(Measured { tokens_per_second, peak: best, macs, profile, streamed, time })
}

/// The prompt as a sequence of its own.
fn read_prompt(engine: &mut Engine, prompt: &[u32]) -> Result<()> {
    engine.score(prompt, false, |_, _| Ok(()))
}
