//! How much disk space an output needs, before it is written.

use anyhow::Result;
use sluice_store::Writer;

use crate::layout::{self, OutFile};

/// The block size of file systems.
const BLOCK: u64 = 4096;

/// Bytes that an output needs.
#[derive(Clone, Copy, Debug)]
pub struct Space {
    /// Tensors.
    pub weights: u64,
    /// Headers, indexes and partly filled blocks.
    pub headers: u64,
    /// Copied files, and the config.
    pub others: u64,
    /// Weights that an unfinished packing has already written.
    pub done: u64,
}

impl Space {
    /// Bytes that have to be free.
    pub fn needed(&self) -> u64 {
        self.weights.saturating_sub(self.done) + self.others + self.headers
    }
}

/// Bytes besides tensors and copied files: headers of the files that are due, the manifest or index of all files, the journal, and what a file system wastes on
/// the last block of each file.
pub fn headers(files: &[OutFile], due: &[&OutFile]) -> Result<u64> {
    let mut bytes = 0;
    for file in due {
        let len = Writer::file_len(&file.tensors, &layout::metadata(), file.align)?;
        bytes += len - file.data_bytes();
    }
    for file in files {
        bytes += BLOCK;
        if files.len() == 1 {
            continue;
        }
        bytes += match &file.experts {
            // The manifest and two journals, since a new one replaces the old: each has the same for a layer, indented further, and errors and notes.
            Some((_, experts)) => 3 * (2048 + 2 * serde_json::to_vec_pretty(experts)?.len() as u64),
            // A line of the index for each tensor.
            None => 2048 + file.tensors.iter().map(|t| (t.name.len() + file.name.len() + 16) as u64).sum::<u64>(),
        };
    }
    Ok(bytes)
}
