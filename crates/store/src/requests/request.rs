//! What is asked of a [`super::ReadQueue`], and what it answers.

use std::io;
use std::path::Path;

use crate::error::Error;

/// Bytes that one request asks for at most: the kernel moves no more than 2 GiB less a page at once.
pub const MAX_REQUEST: usize = 1 << 30;

/// A part of a file, and the memory that it is read to.
#[derive(Clone, Copy, Debug)]
pub struct ReadRequest {
    /// The number that [`super::StreamedFiles::locate`] gave the file.
    pub file: u32,
    /// Offset in the file: a multiple of [`crate::load::ALIGNMENT`].
    pub offset: u64,
    /// Bytes: at most [`MAX_REQUEST`].
    pub len: usize,
    /// Aligned to [`crate::load::ALIGNMENT`], with room for `len` bytes rounded up to whole pages.
    pub memory: *mut u8,
    /// The caller's; comes back in the [`Completion`].
    pub tag: u32,
}

// SAFETY: the memory is lent to whoever holds this, and to nobody else, until the request is complete.
unsafe impl Send for ReadRequest {}

/// The end of a request.
#[derive(Debug)]
pub struct Completion {
    /// That of the request.
    pub tag: u32,
    /// Why it failed; `None`: all bytes are there.
    pub error: Option<Error>,
}

/// Faults that a test injects into reads: a disk that fails, stops short or is late, whichever way it is read.
pub trait ReadFaults: std::fmt::Debug + Send + Sync {
    /// A read of `memory.len()` bytes at `offset` of a file has ended with `outcome`. What is returned counts instead; `None`: it has not ended yet, and will be
    /// asked about again. Memory that the returned outcome does not cover may be overwritten.
    fn intercept(
        &self,
        file: &Path,
        offset: u64,
        memory: &mut [u8],
        outcome: io::Result<usize>,
    ) -> Option<io::Result<usize>>;
}
