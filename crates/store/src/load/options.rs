//! How to load, how files were read, and why a load failed.

use std::path::PathBuf;
use std::sync::Arc;

use super::read::ALIGNMENT;
use crate::error::Error;

/// The kernel reads less than 2 GiB at once, and counts a request's bytes in 32 bits.
const LARGEST_REQUEST: usize = 1 << 30;

/// How files of weights come into memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LoadMode {
    /// Chosen for each file, by what is cached, what fits, and what the disk can do.
    #[default]
    Auto,
    /// Mapped, and populated ahead of use.
    Mmap,
    /// Buffered reads into memory of our own, leaving no more in the page cache than was there.
    Pread,
    /// Reads past the page cache, into memory of our own.
    Direct,
}

impl LoadMode {
    /// The name that the command line gives it.
    pub fn name(self) -> &'static str {
        match self {
            LoadMode::Auto => "auto",
            LoadMode::Mmap => "mmap",
            LoadMode::Pread => "pread",
            LoadMode::Direct => "direct",
        }
    }
}

/// How to load.
#[derive(Clone, Debug)]
pub struct LoadOptions {
    /// How files are read.
    pub mode: LoadMode,
    /// Bytes of memory that copies of files may take; `None`: not known. [`LoadMode::Auto`] maps what does not fit.
    pub copy_budget: Option<u64>,
    /// Where the speeds of disks are remembered; `None`: measured anew where they are needed.
    pub disk_speeds_file: Option<PathBuf>,
    /// Bytes that one request reads: rounded up to a power of two, at least a page, at most 1 GiB. `None`: the value that measured best.
    pub request: Option<usize>,
    /// Requests that io_uring keeps in flight.
    pub depth: usize,
    /// Whether copies of files ask for large pages.
    pub large_pages: bool,
    /// Threads with a ring each.
    pub rings: usize,
    /// Threads that read where io_uring does not.
    pub threads: usize,
    /// Whether opening a model may begin with [`super::ReadAhead`]: where a device takes a while to start.
    pub ahead: bool,
}

impl LoadOptions {
    /// Bytes that one request reads in this mode.
    pub(crate) fn request(&self, mode: LoadMode) -> usize {
        // Large direct requests hide the time for clearing pages. A buffered request is copied, best within a processor's cache.
        let best = if mode == LoadMode::Direct { 4 << 20 } else { 2 << 20 };
        self.request.unwrap_or(best).clamp(ALIGNMENT, LARGEST_REQUEST).next_power_of_two()
    }
}

impl Default for LoadOptions {
    fn default() -> LoadOptions {
        LoadOptions {
            mode: LoadMode::Auto,
            copy_budget: None,
            disk_speeds_file: None,
            request: None,
            large_pages: true,
            depth: 8,
            rings: 2,
            threads: 4,
            ahead: false,
        }
    }
}

/// How one file is read, and why.
#[derive(Clone, Debug)]
pub struct FileReport {
    /// The name that the command line gives it.
    pub name: String,
    /// Bytes of the whole file.
    pub bytes: u64,
    /// Never `Auto`.
    pub mode: LoadMode,
    /// For people: one clause.
    pub reason: String,
}

/// An error of a load. Everyone who asks gets the same one.
#[derive(Clone, Debug, thiserror::Error)]
#[error(transparent)]
pub struct LoadError(#[from] pub(crate) Arc<Error>);

impl LoadError {
    /// What went wrong.
    pub fn error(&self) -> &Error {
        &self.0
    }
}
