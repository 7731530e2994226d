//! Sampling flags; the defaults are the checkpoint's own.

use std::hash::{BuildHasher, Hasher, RandomState};

use anyhow::Result;
use clap::Args;
use sluice_engine::Generation;
use sluice_engine::sampling::SamplingParams;
use sluice_engine::text::GenerationDefaults;

#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Sampling (defaults: the model's generation_config.json)")]
pub struct SamplingArgs {
    /// Most tokens to generate; -1, the default: until the model stops or the context is full
    #[arg(short = 'n', long, visible_alias = "n-predict", value_name = "N", allow_negative_numbers = true, value_parser = max_tokens_arg)]
    max_tokens: Option<usize>,
    /// Divides the logits; 0 always takes the most likely token
    #[arg(long, visible_alias = "temp", value_name = "X", allow_negative_numbers = true)]
    temperature: Option<f32>,
    /// Choose among the K most likely tokens; 0: among all
    #[arg(long, value_name = "K")]
    top_k: Option<u32>,
    /// Choose among the most likely tokens whose probabilities add up to P
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    top_p: Option<f32>,
    /// Choose among tokens at least P times as likely as the most likely one
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    min_p: Option<f32>,
    /// Makes all earlier tokens less likely (above 1)
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    repetition_penalty: Option<f32>,
    /// Subtracted from the logit of every token that the answer already has
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    presence_penalty: Option<f32>,
    /// Subtracted from a token's logit for each time that the answer has it
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    frequency_penalty: Option<f32>,
    /// Seed for sampling: the same seed gives the same answer. -1, the default: a new one each time, shown by --stats
    #[arg(short, long, value_name = "SEED", allow_negative_numbers = true, value_parser = seed_arg)]
    seed: Option<Seed>,
    /// Continue when the model would stop, up to --max-tokens or the end of the context
    #[arg(long)]
    ignore_eos: bool,
    /// End the answer before this text; may be given several times
    #[arg(long = "stop", value_name = "TEXT")]
    stop: Vec<String>,
}

impl SamplingArgs {
    /// How to generate, from the flags, the checkpoint's `defaults` and its `stop_ids`.
    ///
    /// # Errors
    /// A parameter out of range.
    pub fn generation(&self, defaults: &GenerationDefaults, stop_ids: &[u32]) -> Result<Generation> {
        let d = defaults.sampling();
        let sampling = SamplingParams {
            temperature: self.temperature.unwrap_or(d.temperature),
            top_k: self.top_k.unwrap_or(d.top_k),
            top_p: self.top_p.unwrap_or(d.top_p),
            min_p: self.min_p.unwrap_or(d.min_p),
            repetition_penalty: self.repetition_penalty.unwrap_or(d.repetition_penalty),
            presence_penalty: self.presence_penalty.unwrap_or(d.presence_penalty),
            frequency_penalty: self.frequency_penalty.unwrap_or(d.frequency_penalty),
            seed: match self.seed {
                Some(Seed::This(seed)) => seed,
                None | Some(Seed::Fresh) => fresh_seed(),
            },
        };
        sampling.validate()?;
        let stop_ids = if self.ignore_eos { Vec::new() } else { stop_ids.to_vec() };
        Ok(Generation {
            sampling,
            max_tokens: self.max_tokens.unwrap_or(usize::MAX),
            stop_ids,
            ..Generation::default()
        })
    }

    /// Strings that end an answer.
    pub fn stop_strings(&self) -> &[String] {
        &self.stop
    }
}

/// The value of `--seed`.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Seed {
    This(u64),
    Fresh,
}

fn seed_arg(text: &str) -> Result<Seed, String> {
    match text {
        "-1" => Ok(Seed::Fresh),
        _ => text.parse().map(Seed::This).map_err(|_| "expected a number from 0 to 18446744073709551615, or -1".into()),
    }
}

/// -1 means no limit.
fn max_tokens_arg(text: &str) -> Result<usize, String> {
    match text {
        "-1" => Ok(usize::MAX),
        _ => text.parse().ok().filter(|n| *n > 0).ok_or_else(|| "expected a number from 1, or -1 for no limit".into()),
    }
}

/// A seed from the system's randomness, which keys the standard library's hasher; short enough to type again.
fn fresh_seed() -> u64 {
    RandomState::new().build_hasher().finish() >> 32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn minus_one_is_no_limit_and_a_fresh_seed() {
        assert_eq!((max_tokens_arg("-1"), max_tokens_arg("3")), (Ok(usize::MAX), Ok(3)));
        assert_eq!((seed_arg("-1"), seed_arg("0")), (Ok(Seed::Fresh), Ok(Seed::This(0))));
        for wrong in ["0", "-2", "", "x"] {
            assert!(max_tokens_arg(wrong).is_err(), "{wrong}");
        }
        for wrong in ["-2", "", "x", "18446744073709551616"] {
            assert!(seed_arg(wrong).is_err(), "{wrong}");
        }
    }
}
