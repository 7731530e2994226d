//! All that a model's folder says about text.

use std::path::Path;
use std::sync::Arc;
use std::thread;

use anyhow::Result;

use super::generation::{GenerationDefaults, stop_ids};
use super::template::ChatTemplate;
use super::tokenizer::Tokenizer;

/// Everything between people's text and token ids.
pub struct TextSide {
    pub tokenizer: Arc<Tokenizer>,
    pub template: Option<ChatTemplate>,
    pub defaults: GenerationDefaults,
    pub stop_ids: Vec<u32>,
}

impl TextSide {
    /// Reads a checkpoint's files. `cache`: a folder for tokenizers in the form in which they load fastest.
    ///
    /// # Errors
    /// A file that is broken; the message names it.
    pub fn load(folder: &Path, cache: Option<&Path>) -> Result<TextSide> {
        // The template's process starts while the tokenizer is read.
        let (tokenizer, template) = thread::scope(|scope| {
            let template = scope.spawn(|| ChatTemplate::load(folder));
            let tokenizer = Tokenizer::load(folder, cache);
            (tokenizer, template.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
        });
        let tokenizer = tokenizer?;
        Ok(TextSide {
            template: template?,
            defaults: GenerationDefaults::load(folder)?,
            stop_ids: stop_ids(folder, Some(&tokenizer))?,
            tokenizer: Arc::new(tokenizer),
        })
    }
}
