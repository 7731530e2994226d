//! `sluice eval ppl`: a model's perplexity on a text.
//!
//! The text is one list of tokens, cut into windows that do not overlap; in each, every token but the first is predicted from those
//! before it in the window, beginning with an empty context. The last window may be shorter.

use std::io::{self, Write};
use std::num::NonZeroUsize;
use std::time::Instant;

use anyhow::{Result, ensure};
use clap::Args;
use serde_json::json;
use sluice_engine::Loading;

use super::text::TextArgs;
use crate::engine_args::EngineArgs;
use crate::load;
use crate::progress::Progress;

#[derive(Args)]
pub struct PplArgs {
    #[command(flatten)]
    text: TextArgs,
    /// Tokens in a window
    #[arg(long, value_name = "TOKENS", default_value = "512")]
    window: NonZeroUsize,
    /// Only the first so many windows
    #[arg(long, value_name = "N")]
    windows: Option<NonZeroUsize>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    engine: EngineArgs,
}

pub fn run(args: PplArgs) -> Result<()> {
    // 1. the text's tokens, in windows
    let folder = args.text.folder()?;
    let mut engine = load::engine(&folder, &args.engine, args.engine.options()?)?;
    let tokens = args.text.tokens(&folder)?;
    let window = args.window.get();
    ensure!(window >= 2, "--window {window}: a window needs a token to predict, and one to predict it from");
    let limit = args.windows.map_or(usize::MAX, NonZeroUsize::get);
    let windows: Vec<&[u32]> = tokens.chunks(window).filter(|w| w.len() >= 2).take(limit).collect();
    ensure!(!windows.is_empty(), "{}: too short, {} tokens", args.text.name(), tokens.len());

    // 2. the negative log-likelihood of each
    let begun = Instant::now();
    let load = engine.loading().map(Loading::progress);
    let mut progress = Progress::after_loading(load, "measuring", "windows", windows.len());
    let (mut nats, mut predictions) = (0.0, 0);
    for (i, window) in windows.iter().enumerate() {
        let mut own = 0.0;
        engine.score(window, true, |position, logits| {
            if let Some(next) = window.get(position + 1) {
                own += surprise(logits, *next as usize);
            }
            Ok(())
        })?;
        nats += own;
        predictions += window.len() - 1;
        progress.set(i + 1, windows.len());
    }
    progress.finish();
    load::say_notes(&engine);
    let seconds = begun.elapsed().as_secs_f64();

    // 3. the figures
    let mean = nats / predictions as f64;
    ensure!(mean.is_finite(), "the model's logits are not all finite");
    let mut out = io::stdout().lock();
    if args.json {
        let object = json!({
            "perplexity": mean.exp(),
            "nats_per_token": mean,
            "tokens": predictions,
            "text_tokens": tokens.len(),
            "windows": windows.len(),
            "window": window,
            "seconds": seconds,
        });
        writeln!(out, "{object}")?;
    } else {
        let speed = predictions as f64 / seconds;
        writeln!(out, "perplexity      {:.4}", mean.exp())?;
        writeln!(out, "nats per token  {mean:.6}")?;
        writeln!(out, "tokens          {predictions} predicted in {} windows of {window}", windows.len())?;
        writeln!(out, "seconds         {seconds:.2} ({speed:.0} tokens/s)")?;
    }
    Ok(out.flush()?)
}

/// -log softmax(logits)[token], in f64.
fn surprise(logits: &[f32], token: usize) -> f64 {
    let highest = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    let sum: f64 = logits.iter().map(|x| (f64::from(*x) - highest).exp()).sum();
    sum.ln() + highest - f64::from(logits[token])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn surprise_is_minus_log_softmax() {
        assert!((surprise(&[1000.0; 4], 2) - 4f64.ln()).abs() < 1e-12);
        assert!((surprise(&[0.0, 3f32.ln()], 1) - (4.0f64 / 3.0).ln()).abs() < 1e-7);
        assert!(surprise(&[f32::NAN, 0.0], 0).is_nan());
    }
}
