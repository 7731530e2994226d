//! The model that is evaluated, and the text that it reads.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::Args;
use sluice_store::read_named;

use crate::engine_args::model_or_demo;
use crate::load;

/// Bytes that a text may have.
const MAX_TEXT: u64 = 1 << 30;

#[derive(Args)]
pub struct TextArgs {
    /// The model's folder (default: the demo model)
    #[arg(value_name = "MODEL")]
    folder: Option<PathBuf>,
    /// The model's folder
    #[arg(short, long, value_name = "MODEL", conflicts_with = "folder")]
    model: Option<PathBuf>,
    /// The text, UTF-8; special tokens written in it are parsed
    #[arg(long, value_name = "FILE")]
    text: PathBuf,
}

impl TextArgs {
    pub fn folder(&self) -> Result<PathBuf> {
        model_or_demo(self.folder.as_deref().or(self.model.as_deref()))
    }

    /// The text's name, for people.
    pub fn name(&self) -> String {
        self.text.display().to_string()
    }

    /// Its tokens.
    pub fn tokens(&self, folder: &Path) -> Result<Vec<u32>> {
        Ok(self.tokens_and_beginning(folder)?.0)
    }

    /// Its tokens, and those that the tokenizer puts before every text (a BOS, or nothing).
    pub fn tokens_and_beginning(&self, folder: &Path) -> Result<(Vec<u32>, Vec<u32>)> {
        let tokenizer = load::tokenizer(folder)?;
        let name = || self.name();
        let text = read_named(&self.text, MAX_TEXT)?;
        let tokens = tokenizer.encode(std::str::from_utf8(&text).with_context(name)?, false)?;
        Ok((tokens, tokenizer.encode("", true)?))
    }
}
