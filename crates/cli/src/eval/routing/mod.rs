//! `sluice eval routing`: which experts the tokens of a text use, and how well caches would serve them.
//!
//! The text goes through the model in chunks, which does not change routing, and is then replayed as decoding would see it: token by token, layer by layer. It is
//! cut into contexts of at most [`CONTEXT`] tokens.

mod chart;
mod report;
mod statistics;
mod tiers;

use std::fs;
use std::io::{self, Write};
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use clap::Args;
use sluice_engine::{Engine, HotExperts, Loading};
use sluice_experts::{MAX_RECORDING, Recording};
use sluice_store::AtomicFile;

use super::text::TextArgs;
use crate::engine_args::EngineArgs;
use crate::load;
use crate::progress::Progress;
use report::Report;

#[derive(Args)]
pub struct RoutingArgs {
    #[command(flatten)]
    text: TextArgs,
    /// Only the first so many tokens of it
    #[arg(long, value_name = "N")]
    tokens: Option<NonZeroUsize>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    /// Write all figures as CSV, a row for each: statistic, layer (counted among those with experts, or `all`), series, x, value
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,
    /// Draw the figures: one image if the name ends in .svg, else a folder with an image for each
    #[arg(long, value_name = "FILE|DIR")]
    svg: Option<PathBuf>,
    /// Write the experts by heat, for `--pin`: JSON with rows of layer, expert, share of the tokens that want it
    #[arg(long, value_name = "FILE")]
    pin_out: Option<PathBuf>,
    /// Write which experts each token took, for `plan --trace`
    #[arg(long, value_name = "FILE")]
    trace_out: Option<PathBuf>,
    #[command(flatten)]
    engine: EngineArgs,
}

/// Tokens of one context.
const CONTEXT: usize = 4096;

/// The fewest tokens that have statistics.
const FEWEST: usize = 32;

pub fn run(args: RoutingArgs) -> Result<()> {
    // 1. the text's tokens
    let folder = args.text.folder()?;
    let mut engine = load::engine(&folder, &args.engine, args.engine.options()?)?;
    ensure!(engine.model().experts().is_some(), "{}: this model has no experts", folder.display());
    let mut tokens = args.text.tokens(&folder)?;
    tokens.truncate(args.tokens.map_or(usize::MAX, NonZeroUsize::get));
    ensure!(tokens.len() >= FEWEST, "{}: too short, {} tokens; {FEWEST} are needed", args.text.name(), tokens.len());

    // 2. their experts, and the statistics
    let (recording, lookahead) = record(&mut engine, &tokens)?;
    load::say_notes(&engine);
    let report = Report::new(&recording, lookahead, engine.options().threads);

    // 3. the figures
    if let Some(path) = &args.csv {
        write(path, report.to_csv().as_bytes())?;
    }
    if let Some(path) = &args.svg {
        draw(path, &report.charts())?;
    }
    if let Some(path) = &args.pin_out {
        let uses: Vec<Vec<u64>> = (0..recording.layers.len()).map(|l| recording.uses(l)).collect();
        write(path, HotExperts::new(&uses, recording.tokens()).to_text().as_bytes())?;
    }
    if let Some(path) = &args.trace_out {
        let bytes = recording.to_bytes();
        let fits = bytes.len() as u64 <= MAX_RECORDING;
        ensure!(fits, "--trace-out: {} bytes, above the limit of {MAX_RECORDING}: give fewer --tokens", bytes.len());
        write(path, &bytes)?;
    }
    let mut out = io::stdout().lock();
    if args.json {
        writeln!(out, "{}", report.to_json())?;
    } else {
        write!(out, "{}", report.to_text())?;
    }
    Ok(out.flush()?)
}

/// Runs the tokens through the model. Also returns by layer the share of a token's experts that its router finds in the input of the layer before; NaN for the
/// first layer.
fn record(engine: &mut Engine, tokens: &[u32]) -> Result<(Recording, Vec<f64>)> {
    let (experts, k) = engine.model().experts().context("a model without experts")?;
    let mut recording = Recording { experts, k, layers: Vec::new() };
    let context = engine.max_context().min(CONTEXT);
    let load = engine.loading().map(Loading::progress);
    let mut progress = Progress::after_loading(load, "reading the text", "tokens", tokens.len());
    engine.record_routing();
    let mut right: Vec<usize> = Vec::new();
    for (i, part) in tokens.chunks(context).enumerate() {
        engine.score(part, false, |_, _| Ok(()))?;
        for routed in engine.take_routing() {
            recording.k = routed.k;
            if recording.layers.len() <= routed.layer {
                recording.layers.resize(routed.layer + 1, Vec::new());
                right.resize(routed.layer + 1, 0);
            }
            let pairs = routed.experts.chunks_exact(routed.k).zip(routed.guessed.chunks_exact(routed.k));
            let hits = pairs.map(|(wanted, guessed)| guessed.iter().filter(|e| wanted.contains(e)).count());
            right[routed.layer] += hits.sum::<usize>();
            recording.layers[routed.layer].extend_from_slice(&routed.experts);
        }
        progress.set((i + 1) * context.min(tokens.len()), tokens.len());
    }
    progress.finish();
    let whole = recording.layers.iter().all(|l| l.len() == tokens.len() * recording.k);
    ensure!(whole && !recording.layers.is_empty(), "the model has not routed every token in every layer");
    let pairs = (tokens.len() * recording.k) as f64;
    let share = |(layer, right): (usize, usize)| if layer == 0 { f64::NAN } else { right as f64 / pairs };
    Ok((recording, right.into_iter().enumerate().map(share).collect()))
}

fn draw(path: &Path, charts: &[chart::Chart]) -> Result<()> {
    if path.extension().is_some_and(|e| e.eq_ignore_ascii_case("svg")) {
        return write(path, chart::svg(charts)?.as_bytes());
    }
    fs::create_dir_all(path).with_context(|| path.display().to_string())?;
    charts.iter().try_for_each(|c| {
        write(&path.join(c.name).with_extension("svg"), chart::svg(std::slice::from_ref(c))?.as_bytes())
    })
}

fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    let mut file = AtomicFile::create(path)?;
    file.write_all(bytes)?;
    Ok(file.commit()?)
}
