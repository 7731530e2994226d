//! Sampling parameters, and the history of tokens that penalties need.

use std::collections::HashMap;

/// How to choose a token. `Default` is the model's own distribution: temperature 1, no cut, no penalty, seed 0.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    /// Divides the logits; 0 takes the most likely token.
    pub temperature: f32,
    /// Keep the k most likely tokens; 0 keeps all.
    pub top_k: u32,
    /// Keep the fewest most likely tokens whose probabilities reach this sum; 1 keeps all.
    pub top_p: f32,
    /// Keep tokens at least this fraction as likely as the most likely one; 0 keeps all.
    pub min_p: f32,
    /// Divides the positive logits, and multiplies the negative ones, of all tokens seen in prompt and answer; 1 is none
    /// (CTRL, <https://arxiv.org/abs/1909.05858>, as in Hugging Face).
    pub repetition_penalty: f32,
    /// Taken once off the logit of every token that the answer already has; 0 is none (as in OpenAI and vLLM).
    pub presence_penalty: f32,
    /// Taken off the logit once for every time that the answer already has the token; 0 is none (as in OpenAI and vLLM).
    pub frequency_penalty: f32,
    /// Seeds the random numbers. The same seed, prompt and parameters give the same answer.
    pub seed: u64,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            seed: 0,
        }
    }
}

/// A sampling parameter outside its range.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{field} must be {expected}, found {value}")]
pub struct ParamError {
    /// The field of [`SamplingParams`].
    pub field: &'static str,
    /// Its value.
    pub value: f32,
    /// The range, for people.
    pub expected: &'static str,
}

impl SamplingParams {
    /// Checks all ranges.
    ///
    /// # Errors
    /// The first field that is outside its range.
    pub fn validate(&self) -> Result<(), ParamError> {
        let check = |field, value: f32, expected, ok: bool| {
            if ok { Ok(()) } else { Err(ParamError { field, value, expected }) }
        };
        let at_least = |x: f32, low: f32| x.is_finite() && x >= low;
        let penalty = "between -2 and 2";
        check("temperature", self.temperature, "0 or more", at_least(self.temperature, 0.0))?;
        check("top_p", self.top_p, "above 0, at most 1", self.top_p > 0.0 && self.top_p <= 1.0)?;
        check("min_p", self.min_p, "between 0 and 1", (0.0..=1.0).contains(&self.min_p))?;
        let repetition = self.repetition_penalty;
        check("repetition_penalty", repetition, "above 0", repetition.is_finite() && repetition > 0.0)?;
        check("presence_penalty", self.presence_penalty, penalty, (-2.0..=2.0).contains(&self.presence_penalty))?;
        check("frequency_penalty", self.frequency_penalty, penalty, (-2.0..=2.0).contains(&self.frequency_penalty))
    }

    /// Whether the tokens seen so far matter.
    pub fn has_penalty(&self) -> bool {
        self.repetition_penalty != 1.0 || self.presence_penalty != 0.0 || self.frequency_penalty != 0.0
    }

    /// Whether penalties never raise a logit.
    pub(crate) fn lowers_only(&self) -> bool {
        self.repetition_penalty >= 1.0 && self.presence_penalty >= 0.0 && self.frequency_penalty >= 0.0
    }

    /// How many tokens top-k keeps; `None`: all.
    pub(super) fn top_k_of(&self, vocabulary: usize) -> Option<usize> {
        Some(self.top_k as usize).filter(|k| *k > 0 && *k < vocabulary)
    }

    /// A logit after penalties. `count`: how often the answer has the token.
    pub(crate) fn penalised(&self, logit: f32, count: u32) -> f32 {
        let mut logit = if logit > 0.0 { logit / self.repetition_penalty } else { logit * self.repetition_penalty };
        if count > 0 {
            logit -= count as f32 * self.frequency_penalty;
            logit -= self.presence_penalty;
        }
        logit
    }

    /// What logits are multiplied by: 1 / temperature.
    pub(crate) fn scale(&self) -> f64 {
        1.0 / f64::from(self.temperature)
    }
}

/// The tokens that a sequence has seen, as the penalties need them. Without penalties it can stay empty.
#[derive(Clone, Debug, Default)]
pub struct History {
    /// token -> how often the answer has it; 0 for tokens of the prompt alone.
    seen: HashMap<u32, u32>,
}

impl History {
    /// A history with room for `tokens` different ones, so that it never grows while generating.
    pub fn with_capacity(tokens: usize) -> Self {
        Self { seen: HashMap::with_capacity(tokens) }
    }

    /// Tokens of the prompt: they count for the repetition penalty only.
    pub fn add_prompt(&mut self, tokens: &[u32]) {
        for token in tokens {
            self.seen.entry(*token).or_insert(0);
        }
    }

    /// A token of the answer.
    pub fn add_generated(&mut self, token: u32) {
        *self.seen.entry(token).or_insert(0) += 1;
    }

    /// How often the answer has the token; `None` if neither prompt nor answer has it.
    pub(super) fn count(&self, token: u32) -> Option<u32> {
        self.seen.get(&token).copied()
    }

    /// All tokens seen, with their counts.
    pub(super) fn all(&self) -> impl Iterator<Item = (u32, u32)> {
        self.seen.iter().map(|(token, count)| (*token, *count))
    }

    /// Forgets all tokens.
    pub fn clear(&mut self) {
        self.seen.clear();
    }
}
