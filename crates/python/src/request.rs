//! What is asked of a prompt: a dictionary of parameters becomes a submission to the engine.

use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::types::PyDict;
use sluice_engine::sampling::{LogitsProcessor, SamplingParams};
use sluice_engine::text::{ModelText, Reading};
use sluice_engine::{Constraint, ConstraintSpec, Generation, GrammarFormat};
use sluice_server::LoadedModel;

use crate::errors::{self, RequestError};
use crate::options::Fields;
use crate::processor::Processor;

/// Answers to a prompt at most.
const MAX_CHOICES: usize = 1024;

const NAMES: [&str; 24] = [
    "max_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "logprobs",
    "n",
    "cache_salt",
    "json_schema",
    "json_object",
    "regex",
    "grammar",
    "thinking_budget",
    "logits_processor",
    "prediction",
    "skip_special_tokens",
    "snapshot_points",
];

/// What to generate behind a prompt.
pub struct GenerateRequest {
    pub generation: Generation,
    pub choices: usize,
    pub salt: Vec<u8>,
    pub stops: Vec<String>,
    pub skip_special: bool,
    pub processor: Option<Arc<Processor>>,
    /// Compiled apart, since that may take a while.
    form: GrammarFormat,
    thinking_budget: Option<usize>,
}

impl GenerateRequest {
    /// Reads a dictionary of parameters for a prompt.
    ///
    /// # Errors
    /// A parameter that is not known, or a value that is none; the message names it.
    pub fn read(dict: &Bound<'_, PyDict>, prompt: &[u32], model: &LoadedModel) -> PyResult<GenerateRequest> {
        let fields = Fields(dict);
        fields.known(&NAMES)?;
        if prompt.is_empty() {
            return Err(RequestError::new_err("there is nothing to generate from: the prompt has no tokens"));
        }
        if let Some(bad) = prompt.iter().find(|token| **token as usize >= model.vocabulary) {
            return Err(RequestError::new_err(format!("token {bad} is not in the vocabulary of {}", model.vocabulary)));
        }
        if prompt.len() >= model.context {
            let (tokens, context) = (prompt.len(), model.context);
            return Err(RequestError::new_err(format!(
                "the prompt has {tokens} tokens, and the context is {context}: there is no room for an answer (see max_context)"
            )));
        }
        let neutral = SamplingParams::default();
        let sampling = SamplingParams {
            temperature: fields.get("temperature")?.unwrap_or(neutral.temperature),
            // As elsewhere, a negative number keeps all.
            top_k: fields.get::<i64>("top_k")?.map_or(0, |k| u32::try_from(k.max(0)).unwrap_or(u32::MAX)),
            top_p: fields.get("top_p")?.unwrap_or(neutral.top_p),
            min_p: fields.get("min_p")?.unwrap_or(neutral.min_p),
            repetition_penalty: fields.get("repetition_penalty")?.unwrap_or(neutral.repetition_penalty),
            presence_penalty: fields.get("presence_penalty")?.unwrap_or(neutral.presence_penalty),
            frequency_penalty: fields.get("frequency_penalty")?.unwrap_or(neutral.frequency_penalty),
            seed: fields.get("seed")?.unwrap_or(0),
        };
        sampling.validate().map_err(|e| errors::request(&e.into()))?;
        let room = model.context - prompt.len();
        let mut stop_ids =
            if fields.get("ignore_eos")?.unwrap_or(false) { Vec::new() } else { model.text.stop_ids.clone() };
        stop_ids.extend(fields.get::<Vec<u32>>("stop_token_ids")?.unwrap_or_default());
        let processor = fields.get::<Bound<'_, PyAny>>("logits_processor")?;
        let processor = processor.map(|run| Arc::new(Processor::new(run.unbind())));
        let choices = fields.get("n")?.unwrap_or(1);
        if !(1..=MAX_CHOICES).contains(&choices) {
            return Err(errors::argument("n", "between 1 and 1024", choices));
        }
        let max_tokens = fields.get::<usize>("max_tokens")?.unwrap_or(room).min(room);
        if max_tokens == 0 {
            return Err(errors::argument("max_tokens", "at least 1", 0));
        }
        Ok(GenerateRequest {
            generation: Generation {
                sampling,
                max_tokens,
                stop_ids,
                snapshot_points: fields.get("snapshot_points")?.unwrap_or_else(|| vec![prompt.len() - 1]),
                logprobs: fields.get("logprobs")?,
                processor: processor.clone().map(|p| p as Arc<dyn LogitsProcessor>),
                prediction: fields.get("prediction")?.unwrap_or_default(),
                ..Generation::default()
            },
            choices,
            salt: fields.get::<String>("cache_salt")?.unwrap_or_default().into_bytes(),
            stops: fields.get("stop")?.unwrap_or_default(),
            skip_special: fields.get("skip_special_tokens")?.unwrap_or(true),
            processor,
            form: form(&fields)?,
            thinking_budget: fields.get("thinking_budget")?,
        })
    }

    /// Compiles what the answer must match. To be called without the interpreter's lock.
    ///
    /// # Errors
    /// A grammar that cannot be compiled.
    pub fn constrain(&mut self, text: &ModelText, prompt: &[u32]) -> anyhow::Result<()> {
        let format = std::mem::take(&mut self.form);
        let spec = ConstraintSpec { format, thinking_budget: self.thinking_budget, ..ConstraintSpec::default() };
        if matches!(spec.format, GrammarFormat::Text) && spec.thinking_budget.is_none() {
            return Ok(());
        }
        let opened = Reading::new(text, None, prompt).opened();
        self.generation.constraint = Constraint::new(text, &spec, opened)?.map(Arc::new);
        Ok(())
    }
}

fn form(fields: &Fields) -> PyResult<GrammarFormat> {
    let mut forms = Vec::new();
    if let Some(text) = fields.get::<String>("json_schema")? {
        let schema = serde_json::from_str(&text);
        let schema = schema.map_err(|e| RequestError::new_err(format!("json_schema: {e}")))?;
        forms.push(("json_schema", GrammarFormat::Schema(schema)));
    }
    if fields.get("json_object")?.unwrap_or(false) {
        forms.push(("json_object", GrammarFormat::Object));
    }
    forms.extend(fields.get("regex")?.map(|text| ("regex", GrammarFormat::Regex(text))));
    forms.extend(fields.get("grammar")?.map(|text| ("grammar", GrammarFormat::Lark(text))));
    match forms.len() {
        0 => Ok(GrammarFormat::Text),
        1 => Ok(forms.remove(0).1),
        _ => Err(RequestError::new_err(format!("{} and {} exclude each other", forms[0].0, forms[1].0))),
    }
}
