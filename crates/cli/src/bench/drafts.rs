//! `sluice bench drafts`: the same answer without drafts, with drafts of a fixed width, and with as many as pay.

use std::time::Instant;

use anyhow::{Result, bail, ensure};
use clap::Args;
use serde_json::{Value, json};
use sluice_engine::sampling::SamplingParams;
use sluice_engine::{DraftCounts, DraftOptions, DrafterChoice, Engine, Event, Finish, Generation, Options};

use super::figures::Figures;
use super::kept_states::{self, KeptStates};
use super::subject::tokens;
use crate::disk::mix;
use crate::engine_args::{EngineArgs, activations_name, model_or_demo};
use crate::load;

#[derive(Args, Debug)]
pub struct DraftsArgs {
    /// Folder of the model (config.json and safetensors) [default: the demo model]
    model: Option<std::path::PathBuf>,
    /// Number of measurements; the median counts
    #[arg(long, default_value_t = 5, value_name = "N")]
    rounds: usize,
    /// Print one line of JSON for each width
    #[arg(long)]
    json: bool,
    /// Drafted tokens of each step: off, a number, which is then drafted whether it pays or not, or auto; one or several
    #[arg(long, value_delimiter = ',', default_value = "off,auto", value_parser = width_arg, value_name = "WIDTH,..")]
    widths: Vec<Width>,
    /// Tokens of the prompt, by number [default: 32 that are pseudo-random]
    #[arg(long, value_delimiter = ',', value_name = "ID,..")]
    prompt: Vec<u32>,
    /// Tokens of each answer
    #[arg(long, default_value_t = 200, value_name = "N")]
    tokens: usize,
    /// Temperature of the answer
    #[arg(long, default_value_t = 0.0, value_name = "T")]
    temperature: f32,
    /// Instead of answers: steps of a model with recurrent layers that keep the state after each drafted token, and steps that do not
    #[arg(long)]
    kept_states: bool,
    #[command(flatten)]
    engine: EngineArgs,
}

/// How much is drafted.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Width {
    /// Nothing.
    Off,
    /// So many tokens in each step.
    Fixed(usize),
    /// As many as pay.
    Auto,
}

fn width_arg(text: &str) -> Result<Width, String> {
    match text {
        "off" => Ok(Width::Off),
        "auto" => Ok(Width::Auto),
        n => match n.parse() {
            Ok(n @ 1..=32) => Ok(Width::Fixed(n)),
            _ => Err("expected off, auto, or a number from 1 to 32".into()),
        },
    }
}

impl Width {
    fn name(self) -> String {
        match self {
            Width::Off => "off".into(),
            Width::Fixed(n) => n.to_string(),
            Width::Auto => "auto".into(),
        }
    }

    /// The numbers of a list without `off` and `auto`.
    fn numbers(widths: &[Width]) -> Vec<usize> {
        widths.iter().filter_map(|width| if let Width::Fixed(n) = width { Some(*n) } else { None }).collect()
    }

    /// Options for an engine that drafts so much. `drafts`: those that flags ask for.
    fn of(self, options: &Options, drafts: DraftOptions) -> Options {
        let drafts = match self {
            Width::Off => DraftOptions { drafter: DrafterChoice::Off, ..drafts },
            Width::Fixed(tokens) => DraftOptions { tokens, governed: false, ..drafts },
            Width::Auto => DraftOptions { governed: true, ..drafts },
        };
        Options { drafts, ..options.clone() }
    }
}

/// What one engine did with the prompt.
struct Answer {
    tokens: Vec<u32>,
    /// Tokens behind the first over their time.
    tokens_per_second: f64,
    drafted: DraftCounts,
    /// Tokens that went through the model.
    computed: u64,
}

/// What was measured of one width.
#[derive(Default)]
struct Measured {
    tokens_per_second: Figures,
    drafted: DraftCounts,
    computed: u64,
    /// Tokens that were computed although they had been computed before.
    again: i64,
}

/// Runs the benchmark and prints a row for each width. Widths take turns, so that what slows the machine down slows all of them.
pub fn run(args: &DraftsArgs) -> Result<()> {
    ensure!(args.rounds > 0 && args.tokens > 1, "--rounds must be at least 1, and --tokens 2");
    let folder = model_or_demo(args.model.as_deref())?;
    if args.kept_states {
        return kept_states::run(&KeptStates {
            folder: &folder,
            engine: &args.engine,
            widths: &Width::numbers(&args.widths),
            steps: args.tokens,
            rounds: args.rounds,
            json: args.json,
        });
    }
    let mut options = args.engine.options()?;
    let positions = args.prompt.len().max(32) + args.tokens;
    options.max_context.get_or_insert(positions + 64);
    options.max_sequences = 1;
    let mut drafts = options.drafts;
    if drafts.drafter == DrafterChoice::Off {
        drafts.drafter = DrafterChoice::Auto;
    }
    let mut measured: Vec<Measured> = args.widths.iter().map(|_| Measured::default()).collect();
    let mut first: Option<Vec<u32>> = None;
    for _ in 0..args.rounds {
        for (width, measured) in args.widths.iter().zip(&mut measured) {
            // A new engine for each: what is learnt of drafts is a part of what they cost.
            let mut engine = load::engine(&folder, &args.engine, width.of(&options, drafts))?;
            load::finish(&mut engine)?;
            while engine.fill_experts() {}
            // As a server does while nobody asks.
            engine.measure_drafts();
            let answer = answered(&mut engine, args)?;
            measured.tokens_per_second.push(answer.tokens_per_second);
            measured.drafted = measured.drafted.plus(answer.drafted);
            measured.computed += answer.computed;
            let rejected = answer.drafted.drafted - answer.drafted.accepted;
            let once = prompt(args, engine.model().vocabulary).len() + answer.tokens.len() - 1;
            measured.again += answer.computed as i64 - once as i64 - rejected as i64;
            match &first {
                Some(first) if *first != answer.tokens => bail!("drafts {}: other tokens", width.name()),
                Some(_) => {}
                None => first = Some(answer.tokens),
            }
        }
    }
    if !args.json {
        println!("{}: {} threads, {}", folder.display(), options.threads, options.isa);
        println!(
            "{:>6}{:>24}{:>10}{:>10}{:>10}{:>16}",
            "width", "tokens/s", "drafts", "drafted", "accepted", "computed again"
        );
    }
    for (width, m) in args.widths.iter().zip(&measured) {
        let (name, counts) = (width.name(), m.drafted);
        if args.json {
            println!("{}", to_json(args, &options, &name, m));
        } else {
            let speed = m.tokens_per_second.to_text(1);
            println!(
                "{name:>6}{speed:>24}{:>10}{:>10}{:>10}{:>16}",
                counts.drafts, counts.drafted, counts.accepted, m.again
            );
        }
    }
    Ok(())
}

fn prompt(args: &DraftsArgs, vocabulary: usize) -> Vec<u32> {
    if args.prompt.is_empty() { tokens(0, 32, vocabulary) } else { args.prompt.clone() }
}

fn answered(engine: &mut Engine, args: &DraftsArgs) -> Result<Answer> {
    let sampling = SamplingParams { temperature: args.temperature, seed: mix(1), ..SamplingParams::default() };
    let generation = Generation { sampling, max_tokens: args.tokens, ..Generation::default() };
    let id = engine.add_sequence();
    engine.start(id, &prompt(args, engine.model().vocabulary), generation)?;
    let (mut tokens, mut first, mut last) = (Vec::with_capacity(args.tokens), None, None);
    while !engine.is_idle() {
        for event in engine.step()? {
            match event {
                Event::Token { token, .. } => tokens.push(*token),
                Event::Finished { reason: Finish::Failed, .. } => bail!("the answer has failed"),
                _ => {}
            }
        }
        if !tokens.is_empty() {
            last = Some(Instant::now());
            // Drafts begin behind the first token, so that it is alone.
            first = first.or(last);
        }
    }
    let taken = last.zip(first).map_or(0.0, |(last, first)| (last - first).as_secs_f64());
    let drafted = engine.drafted(id);
    let tokens_per_second = (tokens.len() - 1) as f64 / taken.max(1e-9);
    Ok(Answer { tokens, tokens_per_second, drafted, computed: engine.computed_tokens() })
}

fn to_json(args: &DraftsArgs, options: &Options, width: &str, m: &Measured) -> Value {
    json!({
        "bench": "drafts",
        "width": width,
        "threads": options.threads,
        "activations": activations_name(options.activations),
        "isa": options.isa.to_string(),
        "tokens": args.tokens,
        "rounds": args.rounds,
        "tokens_per_second": m.tokens_per_second.to_json(),
        "drafts": m.drafted.drafts,
        "draft_tokens": m.drafted.drafted,
        "accepted_tokens": m.drafted.accepted,
        "computed_tokens": m.computed,
        "computed_again": m.again,
    })
}
