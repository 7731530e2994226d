//! Everything that a model's folder says about text.

use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::thread;

use anyhow::{Result, anyhow};
use sluice_model::source::TextFiles;

use super::answers::harmony_marks;
use super::answers::marks::XTML_END;
use super::embedding::Embedding;
use super::generation::{GenerationDefaults, stop_ids};
use super::template::ChatTemplate;
use super::tokenizer::Tokenizer;
use crate::constraint::Grammars;

/// Everything between text and token ids for one model.
pub struct ModelText {
    /// Its tokenizer.
    pub tokenizer: Arc<Tokenizer>,
    /// Its chat template, if it has one.
    pub template: Option<ChatTemplate>,
    /// What the checkpoint suggests for sampling.
    pub defaults: GenerationDefaults,
    /// Tokens that end an answer.
    pub stop_ids: Vec<u32>,
    /// How embeddings are made, or why they cannot be.
    pub embedding: Result<Embedding, String>,
    /// Made when the first constraint is compiled.
    grammars: OnceLock<Result<Grammars, String>>,
}

impl ModelText {
    /// Reads a model's files. `cache`: a folder for tokenizers in the form in which they load fastest.
    ///
    /// # Errors
    /// A file that is broken; the message names it.
    pub fn load(files: impl TextFiles, cache: Option<&Path>) -> Result<ModelText> {
        let files: &dyn TextFiles = &files;
        // The template's process starts while the tokenizer is read.
        let (tokenizer, template) = thread::scope(|scope| {
            let template = scope.spawn(|| ChatTemplate::load(files));
            let tokenizer = Tokenizer::load(files, cache);
            (tokenizer, template.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
        });
        let (tokenizer, template) = (tokenizer?, template?);
        let mut stop_ids = stop_ids(files, Some(&tokenizer))?;
        if template.as_ref().is_some_and(|template| template.style().is_harmony()) {
            stop_at_harmony(&mut stop_ids, &tokenizer);
        }
        if template.as_ref().is_some_and(|template| template.style().is_xtml()) {
            stop_ids.extend(tokenizer.id(XTML_END));
            stop_ids.sort_unstable();
            stop_ids.dedup();
        }
        Ok(ModelText {
            template,
            defaults: GenerationDefaults::load(files),
            stop_ids,
            embedding: Embedding::load(files).map_err(|e| format!("{e:#}")),
            tokenizer: Arc::new(tokenizer),
            grammars: OnceLock::new(),
        })
    }

    /// The compiler of grammars for this model. The first call takes a while.
    ///
    /// # Errors
    /// A tokenizer that they cannot be compiled for.
    pub(crate) fn grammars(&self) -> Result<&Grammars> {
        let made =
            self.grammars.get_or_init(|| Grammars::new(&self.tokenizer, &self.stop_ids).map_err(|e| format!("{e:#}")));
        made.as_ref().map_err(|e| anyhow!("{e}"))
    }
}

/// In the harmony format an answer ends with a text or with a call. `<|end|>` only ends a message of several.
fn stop_at_harmony(stop_ids: &mut Vec<u32>, tokenizer: &Tokenizer) {
    let ends = [harmony_marks::RETURN, harmony_marks::CALL].into_iter().filter_map(|mark| tokenizer.id(mark));
    stop_ids.extend(ends);
    stop_ids.retain(|id| Some(*id) != tokenizer.id(harmony_marks::END));
    stop_ids.sort_unstable();
    stop_ids.dedup();
}
