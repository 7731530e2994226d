//! A checkpoint between its headers and its bytes.

use std::path::Path;

use super::read::ReadFile;
use crate::checkpoint::Checkpoint;
use crate::error::Error;

/// A checkpoint whose headers are read and whose files are still open: what [`super::begin`] loads. Each kind of file has its own way of making one.
#[derive(Debug)]
pub struct OpenCheckpoint {
    pub(super) checkpoint: Checkpoint,
    /// In the order of [`Checkpoint::file_sizes`].
    pub(super) files: Vec<ReadFile>,
}

impl OpenCheckpoint {
    /// Opens the safetensors of a folder.
    ///
    /// # Errors
    /// As for [`Checkpoint::open`].
    pub fn safetensors(folder: &Path) -> Result<OpenCheckpoint, Error> {
        let (checkpoint, files) = Checkpoint::open_keeping_files(folder)?;
        Ok(OpenCheckpoint { checkpoint, files })
    }

    /// The tensors, as views of mapped files. Closes the files.
    pub fn into_checkpoint(self) -> Checkpoint {
        self.checkpoint
    }
}
