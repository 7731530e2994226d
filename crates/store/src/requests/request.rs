//! Requests to a [`super::ReadQueue`], and their results.

use std::io;
use std::path::Path;

use crate::error::Error;

/// The most bytes of one request: the kernel moves at most 2 GiB less a page at once.
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

/// Faults that a test injects into reads: failures, short reads and delays, for every way of reading.
pub trait ReadFaults: std::fmt::Debug + Send + Sync {
    /// A read of `memory.len()` bytes at `offset` of a file has ended with `outcome`. The returned value replaces it; `None` delays the read, and this is
    /// called again. Memory beyond the returned outcome may be overwritten.
    fn intercept(
        &self,
        file: &Path,
        offset: u64,
        memory: &mut [u8],
        outcome: io::Result<usize>,
    ) -> Option<io::Result<usize>>;
}
