//! Sampling parameters and lengths, as every dialect fills them in, and what happens to fields that are not known.

use serde::de::Error;
use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value};
use sluice_engine::Generation;
use sluice_engine::text::ModelText;
use utoipa::ToSchema;

use crate::api::fields;
use crate::api::fields::TextsOrTokens;
use crate::http::context::note_ignored;
use crate::http::error::ApiError;

/// How tokens are sampled, and how many.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[schema(as = Sampling)]
pub struct SamplingFields {
    /// Ignored unless it names one of several models that the server offers.
    #[serde(default, deserialize_with = "fields::string")]
    pub model: Option<String>,
    /// Below 0: as many as the context allows.
    #[serde(default, deserialize_with = "fields::limit")]
    #[schema(value_type = Option<i64>, minimum = -1)]
    pub max_tokens: Option<usize>,
    #[serde(default, deserialize_with = "fields::limit")]
    #[schema(value_type = Option<i64>, minimum = -1)]
    pub max_completion_tokens: Option<usize>,
    #[serde(default, deserialize_with = "fields::number")]
    pub temperature: Option<f32>,
    #[serde(default, deserialize_with = "fields::number")]
    pub top_p: Option<f32>,
    /// 0 or less: no limit.
    #[serde(default, deserialize_with = "fields::integer")]
    pub top_k: Option<i64>,
    #[serde(default, deserialize_with = "fields::number")]
    pub min_p: Option<f32>,
    #[serde(default, deserialize_with = "fields::number")]
    pub presence_penalty: Option<f32>,
    #[serde(default, deserialize_with = "fields::number")]
    pub frequency_penalty: Option<f32>,
    #[serde(default, deserialize_with = "fields::number")]
    pub repetition_penalty: Option<f32>,
    #[serde(default, deserialize_with = "fields::seed")]
    pub seed: Option<i64>,
    /// Number of answers, at most 16.
    #[serde(default, deserialize_with = "fields::integer")]
    #[schema(minimum = 1, maximum = 16)]
    pub n: Option<usize>,
    #[serde(default)]
    pub stop: Option<Stop>,
    /// Token ids that end the answer, besides the model's own.
    #[serde(default, deserialize_with = "fields::token_ids")]
    pub stop_token_ids: Option<Vec<u32>>,
    /// The model's own end tokens do not end the answer.
    #[serde(default, deserialize_with = "fields::boolean_or_false")]
    #[schema(value_type = Option<bool>)]
    pub ignore_eos: bool,
    #[serde(default, deserialize_with = "fields::boolean_or_false")]
    #[schema(value_type = Option<bool>)]
    pub stream: bool,
    #[serde(default, deserialize_with = "fields::nested")]
    pub stream_options: Option<StreamOptions>,
    /// Only requests with equal salts share cached prompts.
    #[serde(default, deserialize_with = "fields::string")]
    pub cache_salt: Option<String>,
    #[serde(flatten)]
    pub others: Map<String, Value>,
}

/// Strings that end the answer: at most 16, of at most 1,024 bytes each.
#[derive(Debug, ToSchema)]
#[serde(untagged)]
pub enum Stop {
    One(String),
    Many(Vec<String>),
}

impl<'de> Deserialize<'de> for Stop {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Stop, D::Error> {
        let value = Value::deserialize(deserializer)?;
        let is_empty = value.as_array().is_some_and(Vec::is_empty);
        match TextsOrTokens::from_value(value) {
            Some(TextsOrTokens::One(one)) => Ok(Stop::One(one)),
            Some(TextsOrTokens::Many(many)) => Ok(Stop::Many(many)),
            _ if is_empty => Ok(Stop::Many(Vec::new())),
            _ => Err(D::Error::custom("must be a string or a list of strings")),
        }
    }
}

/// Options of a stream.
#[derive(Debug, Default, Deserialize, ToSchema)]
pub struct StreamOptions {
    /// The last event of the stream has the token counts.
    #[serde(default, deserialize_with = "fields::boolean_or_false")]
    #[schema(value_type = Option<bool>)]
    pub include_usage: bool,
}

/// Most choices of one request.
const MAX_CHOICES: usize = 16;
/// Most stop strings of one request, and most bytes of one.
const MAX_STOPS: usize = 16;
const MAX_STOP_BYTES: usize = 1024;

/// Fields that would change the output but are not supported, with values that are harmless. Chat requests have taken tools and formats out before.
const REFUSED: [(&str, &[&str]); 31] = [
    ("tools", &["[]"]),
    ("functions", &["[]"]),
    ("tool_choice", &["\"none\"", "\"auto\""]),
    ("function_call", &["\"none\"", "\"auto\""]),
    ("response_format", &["{\"type\":\"text\"}"]),
    ("logit_bias", &["{}"]),
    ("suffix", &["\"\""]),
    ("best_of", &["1"]),
    // Fields of other servers.
    ("audio", &[]),
    ("modalities", &["[\"text\"]"]),
    ("web_search_options", &[]),
    ("grammar", &["\"\""]),
    ("json_schema", &["{}"]),
    ("structured_outputs", &["{}"]),
    ("guided_json", &[]),
    ("guided_regex", &[]),
    ("guided_choice", &["[]"]),
    ("guided_grammar", &[]),
    ("min_tokens", &["0"]),
    ("bad_words", &["[]"]),
    ("logits_processors", &["[]"]),
    ("use_beam_search", &["false"]),
    ("length_penalty", &["1.0"]),
    ("typical_p", &["1.0"]),
    ("mirostat", &["0"]),
    ("dynatemp_range", &["0.0"]),
    ("dry_multiplier", &["0.0"]),
    ("xtc_probability", &["0.0"]),
    ("top_n_sigma", &["-1.0"]),
    ("continue_final_message", &["false"]),
    ("add_generation_prompt", &["true"]),
];

impl SamplingFields {
    /// Whether a stream ends with token counts.
    pub fn wants_usage(&self) -> bool {
        self.stream_options.as_ref().is_some_and(|o| o.include_usage)
    }

    /// How many answers to generate.
    ///
    /// # Errors
    /// A number out of range.
    pub fn choices(&self) -> Result<usize, ApiError> {
        match self.n.unwrap_or(1) {
            n @ 1..=MAX_CHOICES => Ok(n),
            n => Err(ApiError::invalid("n", format!("n is {n}; it must be between 1 and {MAX_CHOICES}"))),
        }
    }

    /// Stop strings.
    ///
    /// # Errors
    /// Too many, or one that is empty or too long.
    pub fn stops(&self) -> Result<Vec<String>, ApiError> {
        let stops = match &self.stop {
            None => Vec::new(),
            Some(Stop::One(one)) => vec![one.clone()],
            Some(Stop::Many(many)) => many.clone(),
        };
        if stops.len() > MAX_STOPS || stops.iter().any(|s| s.is_empty() || s.len() > MAX_STOP_BYTES) {
            let message = format!("stop: at most {MAX_STOPS} strings of 1 to {MAX_STOP_BYTES} bytes");
            return Err(ApiError::invalid("stop", message));
        }
        Ok(stops)
    }

    /// Records unknown fields as ignored.
    ///
    /// # Errors
    /// A field that would change the output but is not supported.
    pub fn check_unknown_fields(&self) -> Result<(), ApiError> {
        for (field, value) in self.others.iter().filter(|(_, value)| !value.is_null()) {
            let refused = REFUSED.iter().find(|(name, _)| name == field);
            match refused {
                Some((_, nothing)) if !nothing.iter().any(|n| is_same(value, n)) => {
                    let value: String = value.to_string().chars().take(60).collect();
                    return Err(ApiError::invalid(field, format!("{field} is not supported (got {value})")));
                }
                Some(_) => {}
                None => note_ignored(field),
            }
        }
        Ok(())
    }

    /// How to continue a prompt of `prompt` tokens in a context of `context` tokens. Missing parameters are the model's defaults.
    ///
    /// # Errors
    /// A parameter out of range; a prompt that leaves no room for an answer.
    pub fn generation(&self, text: &ModelText, prompt: usize, context: usize) -> Result<Generation, ApiError> {
        if prompt >= context {
            return Err(ApiError::too_long(prompt, context));
        }
        let d = text.defaults.sampling();
        let mut sampling = d.clone();
        sampling.temperature = self.temperature.unwrap_or(d.temperature);
        // -1 and 0 mean off.
        sampling.top_k = self.top_k.map_or(d.top_k, |k| u32::try_from(k).unwrap_or(0));
        sampling.top_p = self.top_p.unwrap_or(d.top_p);
        if sampling.top_p == 0.0 {
            // The smallest nucleus is one token.
            (sampling.top_k, sampling.top_p) = (1, 1.0);
        }
        sampling.min_p = self.min_p.unwrap_or(d.min_p);
        sampling.repetition_penalty = self.repetition_penalty.unwrap_or(d.repetition_penalty);
        sampling.presence_penalty = self.presence_penalty.unwrap_or(d.presence_penalty);
        sampling.frequency_penalty = self.frequency_penalty.unwrap_or(d.frequency_penalty);
        sampling.seed = self.seed.map_or_else(fresh_seed, |seed| seed as u64);
        if let Err(e) = sampling.validate() {
            return Err(ApiError::invalid(e.field, e.to_string()));
        }
        let most = self.max_completion_tokens.or(self.max_tokens).unwrap_or(usize::MAX);
        if most == 0 {
            return Err(ApiError::invalid("max_tokens", "max_tokens is 0; it must be at least 1"));
        }
        let mut stop_ids = if self.ignore_eos { Vec::new() } else { text.stop_ids.clone() };
        stop_ids.extend(self.stop_token_ids.iter().flatten());
        Ok(Generation { sampling, max_tokens: most.min(context - prompt), stop_ids, ..Generation::default() })
    }
}

/// Whether a value equals the JSON in `written`; 1 equals 1.0.
fn is_same(value: &Value, written: &str) -> bool {
    let written: Value = serde_json::from_str(written).unwrap_or_default();
    *value == written || (value.is_number() && value.as_f64() == written.as_f64())
}

/// A random seed.
fn fresh_seed() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(0)
}
