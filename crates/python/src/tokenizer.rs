//! A model's tokenizer and chat template.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, Result};
use pyo3::prelude::*;
use serde_json::{Map, Value};
use sluice_engine::source;
use sluice_engine::text::{Detokenizer, Dialogue, ModelText};
use sluice_server::LoadedModel;

use crate::errors;
use crate::waiting::detached;

enum Text {
    OfModel(Arc<LoadedModel>),
    Alone(Box<ModelText>),
}

/// A model's tokenizer and chat template. It can be used longer than the model is in memory.
#[pyclass(frozen, module = "sluice._sluice")]
pub struct Tokenizer(Text);

impl Tokenizer {
    pub fn of(model: &Arc<LoadedModel>) -> Tokenizer {
        Tokenizer(Text::OfModel(Arc::clone(model)))
    }

    fn text(&self) -> &ModelText {
        match &self.0 {
            Text::OfModel(model) => &model.text,
            Text::Alone(text) => text,
        }
    }
}

/// A conversation as JSON.
fn parsed<T: serde::de::DeserializeOwned>(name: &str, json: &str) -> Result<T> {
    serde_json::from_str(json).with_context(|| name.to_owned())
}

#[pymethods]
impl Tokenizer {
    /// Reads only the tokenizer and the template of the model in a folder or a file. `cache`: a folder for compiled tokenizers.
    #[new]
    #[pyo3(signature = (path, cache=None))]
    fn new(py: Python<'_>, path: PathBuf, cache: Option<PathBuf>) -> PyResult<Tokenizer> {
        detached(py, || {
            let load = || ModelText::load(&*source::open(&path)?, cache.as_deref());
            load().map(|text| Tokenizer(Text::Alone(Box::new(text)))).map_err(|e| errors::model(&e))
        })
    }

    /// The ids of a text. `special`: control tokens in it become their ids; `add_special`: the tokenizer's own are added, such as one for the beginning.
    #[pyo3(signature = (text, add_special=true, special=true))]
    fn encode(&self, py: Python<'_>, text: &str, add_special: bool, special: bool) -> PyResult<Vec<u32>> {
        let tokenizer = &self.text().tokenizer;
        let encode = || if special { tokenizer.encode(text, add_special) } else { tokenizer.encode_plain(text) };
        detached(py, || encode().map_err(|e| errors::request(&e)))
    }

    /// The text of tokens.
    #[pyo3(signature = (ids, skip_special=false))]
    fn decode(&self, py: Python<'_>, ids: Vec<u32>, skip_special: bool) -> PyResult<String> {
        detached(py, || self.text().tokenizer.decode(&ids, skip_special).map_err(|e| errors::request(&e)))
    }

    /// The text that each token completes, and what is left at the end: together the text of all.
    #[pyo3(signature = (ids, skip_special=true))]
    fn pieces(&self, ids: Vec<u32>, skip_special: bool) -> PyResult<Vec<String>> {
        let mut detokenizer = Detokenizer::new(Arc::clone(&self.text().tokenizer), skip_special);
        let mut pieces = ids.into_iter().map(|id| detokenizer.push(id)).collect::<Result<Vec<String>>>();
        if let Ok(pieces) = &mut pieces {
            pieces.push(detokenizer.flush().map_err(|e| errors::request(&e))?);
        }
        pieces.map_err(|e| errors::request(&e))
    }

    /// A token as the vocabulary writes it.
    fn token(&self, id: u32) -> Option<String> {
        self.text().tokenizer.token(id)
    }

    /// The id of a token as the vocabulary writes it.
    fn id(&self, token: &str) -> Option<u32> {
        self.text().tokenizer.id(token)
    }

    /// Whether a token steers the model and is no text.
    fn is_special(&self, id: u32) -> bool {
        self.text().tokenizer.is_special(id)
    }

    /// Tokens of the vocabulary.
    #[getter]
    fn vocab_size(&self) -> usize {
        self.text().tokenizer.vocab_size()
    }

    /// Tokens that end an answer.
    #[getter]
    fn stop_ids(&self) -> Vec<u32> {
        self.text().stop_ids.clone()
    }

    /// Names of control tokens.
    #[getter]
    fn control_tokens(&self) -> Vec<String> {
        self.text().tokenizer.control_tokens().to_vec()
    }

    /// Whether there is a chat template.
    #[getter]
    fn has_template(&self) -> bool {
        self.text().template.is_some()
    }

    /// Notes for the user about the template.
    #[getter]
    fn note(&self) -> Option<String> {
        let notes = self.text().template.as_ref().map(|template| template.notes().join("; "));
        notes.filter(|notes| !notes.is_empty())
    }

    /// What the checkpoint suggests for sampling: (temperature, top_k, top_p, min_p, repetition_penalty).
    #[getter]
    fn defaults(&self) -> (f32, u32, f32, f32, f32) {
        let params = self.text().defaults.sampling();
        (params.temperature, params.top_k, params.top_p, params.min_p, params.repetition_penalty)
    }

    /// The prompt of a conversation as tokens, up to the beginning of the answer. What messages spell of control tokens stays text. All arguments are JSON.
    #[pyo3(signature = (messages, tools=None, extra=None))]
    fn prompt(&self, py: Python<'_>, messages: &str, tools: Option<&str>, extra: Option<&str>) -> PyResult<Vec<u32>> {
        let text = self.text();
        let encode = || -> Result<Vec<u32>> {
            let messages: Vec<Value> = parsed("messages", messages)?;
            let tools: Option<Value> = tools.map(|json| parsed("tools", json)).transpose()?;
            let extra: Map<String, Value> = extra.map_or_else(|| Ok(Map::new()), |json| parsed("extra", json))?;
            let template = text.template.as_ref();
            let (messages, tools, tokenizer) = (&messages[..], tools.as_ref(), &*text.tokenizer);
            Dialogue { template, tokenizer, messages, tools, extra: &extra }.tokens()
        };
        detached(py, || encode().map_err(|e| errors::request(&e)))
    }

    /// A conversation as the template writes it, its control tokens as text. All arguments are JSON.
    #[pyo3(signature = (messages, tools=None, add_generation_prompt=true, extra=None))]
    fn render(
        &self,
        py: Python<'_>,
        messages: &str,
        tools: Option<&str>,
        add_generation_prompt: bool,
        extra: Option<&str>,
    ) -> PyResult<String> {
        let render = || -> Result<String> {
            let template = self.text().template.as_ref().context("this model has no chat template")?;
            let messages: Value = parsed("messages", messages)?;
            let tools: Option<Value> = tools.map(|json| parsed("tools", json)).transpose()?;
            let extra: Map<String, Value> = extra.map_or_else(|| Ok(Map::new()), |json| parsed("extra", json))?;
            template.render(&messages, tools.as_ref(), add_generation_prompt, &extra)
        };
        detached(py, || render().map_err(|e| errors::request(&e)))
    }
}
