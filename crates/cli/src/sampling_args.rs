//! How an answer is chosen and where it ends: flags over the checkpoint's own defaults.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::num::NonZeroUsize;

use anyhow::Result;
use clap::Args;
use sluice_engine::Generation;
use sluice_engine::sampler::SamplingParams;
use sluice_engine::text::GenerationDefaults;

#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Sampling (defaults: the model's generation_config.json)")]
pub struct SamplingArgs {
    /// Tokens to generate at most [default: until the model stops or the context is full]
    #[arg(short = 'n', long, value_name = "N")]
    max_tokens: Option<NonZeroUsize>,
    /// Divides the logits; 0 always takes the most likely token
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
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
    /// Makes all tokens seen so far less likely (above 1)
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    repetition_penalty: Option<f32>,
    /// Taken off the logit of every token that the answer has already
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    presence_penalty: Option<f32>,
    /// Taken off a token's logit for every time that the answer has it
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    frequency_penalty: Option<f32>,
    /// Seed of the choice: the same seed gives the same answer [default: a new one each time, shown by --stats]
    #[arg(long, value_name = "SEED")]
    seed: Option<u64>,
    /// End the answer before this text; may be given several times
    #[arg(long = "stop", value_name = "TEXT")]
    stop: Vec<String>,
}

impl SamplingArgs {
    /// What to generate, from the flags, the checkpoint's `defaults` and its `stop_ids`.
    ///
    /// # Errors
    /// A parameter outside its range.
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
            seed: self.seed.unwrap_or_else(fresh_seed),
        };
        sampling.validate()?;
        let max_tokens = self.max_tokens.map_or(usize::MAX, NonZeroUsize::get);
        Ok(Generation { sampling, max_tokens, stop_ids: stop_ids.to_vec() })
    }

    /// Texts that end an answer.
    pub fn stop_strings(&self) -> &[String] {
        &self.stop
    }
}

/// From the system's randomness, which the standard library's hasher is keyed with. Short enough to be typed again.
fn fresh_seed() -> u64 {
    RandomState::new().build_hasher().finish() >> 32
}
