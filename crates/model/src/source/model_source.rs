//! What a path names: a config, text files, and tensors.

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Result;
use sluice_store::load::{self, OpenCheckpoint};
use sluice_store::{Checkpoint, Error, LoadOptions, Loading};

use super::layout::TensorLayout;
use super::tensors::{self, ModelTensors, OnDisk};
use super::text_files::TextFiles;
use crate::config::Config;

/// A model on disk. Made by [`open`](super::open); reads the config at once and everything else when it is asked for.
pub trait ModelSource: TextFiles {
    /// The folder or file that was named, for messages.
    fn path(&self) -> &Path;

    /// The config, in the keys of Hugging Face's `config.json`.
    fn config(&self) -> &Arc<Config>;

    /// What cuts text into tokens, by the names that the format has for it; `None` where `tokenizer.json` has the rules themselves.
    fn tokenizer_name(&self) -> Option<String> {
        None
    }

    /// Files of weights and their sizes in bytes, before anything of them is read. Files that cannot be looked at are left out: opening them says why.
    fn weight_files(&self) -> Vec<(PathBuf, u64)>;

    /// Opens the weights' files and reads their headers.
    ///
    /// # Errors
    /// Files that are missing, truncated or contradictory.
    fn open_checkpoint(&self) -> Result<OpenCheckpoint, Error>;

    /// How the tensors of `checkpoint`, which [`ModelSource::open_checkpoint`] opened, hold the model's weights.
    fn layout(&self, checkpoint: &Checkpoint) -> Box<dyn TensorLayout>;

    /// Names and bytes of everything but the weights' files that decides what is computed, in a fixed order.
    ///
    /// # Errors
    /// A file that cannot be read.
    fn fingerprint_inputs(&self) -> Result<Vec<(&'static str, Vec<u8>)>>;

    /// The model's tensors, as views of mapped files: to look at, or to compute with as they are.
    ///
    /// # Errors
    /// As for [`ModelSource::open_checkpoint`].
    fn tensors(&self) -> Result<ModelTensors, Error> {
        let checkpoint = self.open_checkpoint()?.into_checkpoint();
        let layout = self.layout(&checkpoint);
        Ok(ModelTensors::new(checkpoint, Arc::clone(self.config()), layout))
    }

    /// The model's tensors and the load that reads all but what stays on disk.
    ///
    /// # Errors
    /// As for [`ModelSource::open_checkpoint`], and when there is no address space for a file's image.
    fn load(&self, options: &LoadOptions, on_disk: Option<OnDisk>) -> Result<(ModelTensors, Loading), Error> {
        let opened = self.open_checkpoint()?;
        let (checkpoint, loading) = load::begin(opened, options, |checkpoint| match on_disk {
            Some(on_disk) => tensors::names_on_disk(on_disk, checkpoint, &*self.layout(checkpoint)),
            None => HashSet::new(),
        })?;
        let layout = self.layout(&checkpoint);
        Ok((ModelTensors::new(checkpoint, Arc::clone(self.config()), layout), loading))
    }
}
