//! A slab file that is open, with what is known of its slots.

use std::collections::HashSet;
use std::sync::Arc;

use super::index::Slab;
use super::storage::StoredFile;

/// A slab that is open.
#[derive(Debug)]
pub(super) struct OpenSlab {
    /// Its file.
    pub file: Arc<dyn StoredFile>,
    /// As the index has it.
    pub slab: Slab,
    /// Slots that are being written, for entries that the index does not name yet.
    pub reserved: HashSet<u32>,
}

impl OpenSlab {
    /// Bytes of the file.
    pub fn bytes(&self) -> u64 {
        self.slab.bytes()
    }

    /// Slots that are taken.
    pub fn taken(&self) -> usize {
        self.slab.taken.iter().filter(|taken| **taken).count()
    }
}

/// The name of a slab's file.
pub(super) fn file_name(slab: u32) -> String {
    format!("{slab:08}.slab")
}
