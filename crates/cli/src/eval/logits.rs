//! `sluice eval logits`: the model's logits, exactly.

use std::io::{self, BufWriter, Write};
use std::path::PathBuf;

use anyhow::Result;
use clap::Args;

use crate::engine_args::{EngineArgs, model_or_demo};
use crate::load;

#[derive(Args)]
pub struct LogitsArgs {
    /// The model's folder (default: the demo model)
    #[arg(value_name = "MODEL")]
    folder: Option<PathBuf>,
    /// The model's folder
    #[arg(short, long, value_name = "MODEL", conflicts_with = "folder")]
    model: Option<PathBuf>,
    /// Token ids
    #[arg(long, value_name = "1,2,3", value_delimiter = ',', required = true)]
    tokens: Vec<u32>,
    /// Logits after every token, not only after the last
    #[arg(long)]
    all: bool,
    /// Print {"logits": [[..], ..]}, a row per position; each number is the f32's own shortest form
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    engine: EngineArgs,
}

/// Tokens in a row of the table.
const BEST: usize = 5;

pub fn run(args: LogitsArgs) -> Result<()> {
    let folder = model_or_demo(args.folder.or(args.model).as_deref())?;
    let mut engine = load::engine(&folder, &args.engine, args.engine.options()?)?;
    let mut out = BufWriter::new(io::stdout().lock());
    let mut rows = 0;
    // Row by row, to bound memory.
    engine.score(&args.tokens, args.all, |position, logits| {
        if args.json {
            write!(out, "{}", if rows == 0 { "{\"logits\": [" } else { ", " })?;
            serde_json::to_writer(&mut out, logits).map_err(io::Error::from)?;
        } else {
            let best: Vec<String> = best(logits).iter().map(|t| format!("{t}: {}", logits[*t])).collect();
            writeln!(out, "{position:>6}  {}", best.join("  "))?;
        }
        rows += 1;
        Ok(())
    })?;
    if args.json {
        writeln!(out, "]}}")?;
    }
    load::say_notes(&engine);
    Ok(out.flush()?)
}

/// The tokens with the highest logits, highest first.
fn best(logits: &[f32]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]));
    order.truncate(BEST);
    order
}
