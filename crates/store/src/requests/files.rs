//! The files that requests read, by number.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use crate::bytes::Bytes;
use crate::load::Source;

/// Files of a load that are read in parts while the model is used, numbered in the order in which they were first named.
#[derive(Debug, Default)]
pub struct StreamedFiles {
    sources: Vec<Arc<Source>>,
}

impl StreamedFiles {
    /// The number of the view's file, and the view's bytes in it. A new file gets the next number.
    ///
    /// # Panics
    /// When this is not a view of a file that is being loaded.
    pub fn locate(&mut self, bytes: &Bytes) -> (u32, Range<u64>) {
        let (source, range) = bytes.source().expect("only files that are being loaded are streamed");
        let number = self.sources.iter().position(|s| Arc::ptr_eq(s, source)).unwrap_or_else(|| {
            self.sources.push(Arc::clone(source));
            self.sources.len() - 1
        });
        (number as u32, range.start as u64..range.end as u64)
    }

    /// The first file, for messages.
    pub fn first(&self) -> Option<&Path> {
        self.sources.first().map(|s| &*s.file.path)
    }

    /// From now on these files are read again and again, so their contents must not change.
    pub(super) fn into_sources(self) -> Vec<Arc<Source>> {
        self.sources.iter().for_each(|s| s.set_streamed());
        self.sources
    }
}
