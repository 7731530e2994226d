//! What an output takes of the disk, before it is written.

use anyhow::Result;
use sluice_store::Writer;

use crate::layout::{self, OutFile};

/// What file systems give room by.
const BLOCK: u64 = 4096;

/// Bytes that an output takes.
#[derive(Clone, Copy, Debug)]
pub struct Space {
    pub weights: u64,
    /// Headers, and what else the files themselves need.
    pub headers: u64,
    pub others: u64,
    /// Of the weights, what an unfinished packing has left behind for this one.
    pub done: u64,
}

impl Space {
    /// What has to be free.
    pub fn needed(&self) -> u64 {
        self.weights.saturating_sub(self.done) + self.others + self.headers
    }
}

/// Bytes of disk that are taken beside tensors and copied files: headers of files that are due, and for all files what says where tensors are (the
/// manifest, or the index), the journal meanwhile, and what a file system wastes on the last block of each file.
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
            // The manifest, and two journals, since one takes the place of the other: the same of each layer, indented further, and errors and notes.
            Some((_, experts)) => 3 * (2048 + 2 * serde_json::to_vec_pretty(experts)?.len() as u64),
            // A line of the index for each tensor.
            None => 2048 + file.tensors.iter().map(|t| (t.name.len() + file.name.len() + 16) as u64).sum::<u64>(),
        };
    }
    Ok(bytes)
}
