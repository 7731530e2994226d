//! Between people's text and the model's token ids: tokenizer, chat template, incremental detokenizer, stop strings and the
//! defaults that a checkpoint states for generation.
//!
//! The files are the ones that the Python stack reads, and the results are the ones that it gives: `tests/golden/text` holds it to
//! that. All of them are hostile input: a broken one is an error that names the file, never a panic.

mod bpe;
mod compiled;
mod detokenizer;
mod generation;
mod image;
mod prompt;
mod python;
mod stop;
mod template;
mod tojson;
mod tokenizer;

pub use compiled::Origin;
pub use detokenizer::Detokenizer;
pub use generation::{GenerationDefaults, stop_ids};
pub use prompt::{Prompt, Quoting};
pub use stop::StopStrings;
pub use template::ChatTemplate;
pub use tokenizer::Tokenizer;

use anyhow::{Context, Result};
use serde_json::Value;
use std::fs;
use std::io::ErrorKind;
use std::path::Path;

/// The JSON in `folder/name`; `None` where there is no such file.
///
/// # Errors
/// A file that cannot be read, or is no JSON: the message names the file, line and column.
fn read_json(folder: &Path, name: &str) -> Result<Option<Value>> {
    let path = folder.join(name);
    match fs::read(&path) {
        Ok(bytes) => Ok(Some(serde_json::from_slice(&bytes).with_context(|| path.display().to_string())?)),
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(None),
        Err(e) => Err(e).with_context(|| path.display().to_string()),
    }
}
