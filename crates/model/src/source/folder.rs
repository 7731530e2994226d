//! A folder with `config.json` and safetensors, as Hugging Face, MLX and `pack` write it.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result};
use sluice_store::bundle::MANIFEST;
use sluice_store::load::OpenCheckpoint;
use sluice_store::{Checkpoint, Error, read_small};

use super::layout::TensorLayout;
use super::model_source::ModelSource;
use super::safetensors::layout_of;
use super::text_files::{TextFile, TextFiles};
use crate::config::Config;

/// Files that decide what tokens mean, which files have the weights, and what is computed of them; all but the first are optional.
const FINGERPRINTED: [&str; 7] = [
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "model.safetensors.index.json",
    MANIFEST,
];

/// Bytes that one of them may have.
const MAX_FINGERPRINTED: u64 = 256 << 20;

/// A model in a folder: `config.json`, safetensors, and small files beside them.
#[derive(Debug)]
pub struct SafetensorsFolder {
    path: PathBuf,
    config: Arc<Config>,
}

impl SafetensorsFolder {
    /// Reads the config of the model in `path`.
    ///
    /// # Errors
    /// A config that is missing or no JSON object.
    pub fn open(path: &Path) -> Result<SafetensorsFolder> {
        Ok(SafetensorsFolder { path: path.to_owned(), config: Arc::new(Config::open(path)?) })
    }
}

impl ModelSource for SafetensorsFolder {
    fn path(&self) -> &Path {
        &self.path
    }

    fn config(&self) -> &Arc<Config> {
        &self.config
    }

    fn weight_files(&self) -> Vec<(PathBuf, u64)> {
        let Ok(entries) = fs::read_dir(&self.path) else { return Vec::new() };
        let weights = |e: &fs::DirEntry| e.path().extension().is_some_and(|x| x == "safetensors");
        let sized = |e: fs::DirEntry| (e.path(), fs::metadata(e.path()).map_or(0, |m| m.len()));
        entries.flatten().filter(weights).map(sized).collect()
    }

    fn open_checkpoint(&self) -> Result<OpenCheckpoint, Error> {
        OpenCheckpoint::safetensors(&self.path)
    }

    fn layout(&self, checkpoint: &Checkpoint) -> Box<dyn TensorLayout> {
        layout_of(checkpoint, &self.config)
    }

    fn fingerprint_inputs(&self) -> Result<Vec<(&'static str, Vec<u8>)>> {
        let mut inputs = Vec::new();
        for name in FINGERPRINTED {
            let path = self.path.join(name);
            if path.exists() {
                let bytes = read_small(&path, MAX_FINGERPRINTED).with_context(|| path.display().to_string())?;
                inputs.push((name, bytes));
            }
        }
        Ok(inputs)
    }
}

impl TextFiles for SafetensorsFolder {
    fn read(&self, name: &str, limit: u64) -> Result<Vec<u8>, Error> {
        self.path.read(name, limit)
    }

    fn open(&self, name: &str, limit: u64) -> Result<Box<dyn TextFile>, Error> {
        TextFiles::open(&self.path, name, limit)
    }

    fn list(&self, folder: &str) -> io::Result<Vec<(String, u64)>> {
        self.path.list(folder)
    }

    fn locate(&self, name: &str) -> PathBuf {
        self.path.locate(name)
    }
}
