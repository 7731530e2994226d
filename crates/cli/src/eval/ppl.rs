//! `sluice eval ppl`: a model's perplexity on a text.
//!
//! The text is one list of tokens, cut into windows that do not overlap; in each, every token but the first is predicted from those
//! before it in the window, beginning with an empty context. The last window may be shorter. Where the tokenizer begins every text with a token (a BOS), that takes
//! the place of each window's first one, as in llama-perplexity: a model that was trained with it is lost without it.

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
    let (mut tokens, beginning) = args.text.tokens_and_beginning(&folder)?;
    let window = args.window.get();
    ensure!(window >= 2, "--window {window}: a window needs a token to predict, and one to predict it from");
    begin_windows(&mut tokens, window, &beginning);
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

/// Replaces the first tokens of each window.
fn begin_windows(tokens: &mut [u32], window: usize, beginning: &[u32]) {
    for window in tokens.chunks_mut(window) {
        window.iter_mut().zip(beginning).for_each(|(token, first)| *token = *first);
    }
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
    fn each_window_begins_as_the_tokenizer_begins_a_text() {
        let mut tokens = [5, 6, 7, 8, 9];
        begin_windows(&mut tokens, 2, &[]);
        assert_eq!(tokens, [5, 6, 7, 8, 9]);
        begin_windows(&mut tokens, 2, &[1]);
        assert_eq!(tokens, [1, 6, 1, 8, 1]);
    }

    #[test]
    fn surprise_is_minus_log_softmax() {
        assert!((surprise(&[1000.0; 4], 2) - 4f64.ln()).abs() < 1e-12);
        assert!((surprise(&[0.0, 3f32.ln()], 1) - (4.0f64 / 3.0).ln()).abs() < 1e-7);
        assert!(surprise(&[f32::NAN, 0.0], 0).is_nan());
    }
}
