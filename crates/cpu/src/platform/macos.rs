//! macOS: threads run where the system lets them, and there is one node of memory.

use std::io::{ErrorKind, Result};

use memmap2::MmapMut;

/// # Errors
/// Always: it is not told.
pub fn affinity(_thread: i32, _mask: &mut [u64]) -> Result<()> {
    Err(ErrorKind::Unsupported.into())
}

/// # Errors
/// Always: it cannot be chosen.
pub fn set_affinity(_thread: i32, _mask: &[u64]) -> Result<()> {
    Err(ErrorKind::Unsupported.into())
}

/// Always 0: macOS does not report it.
pub fn current_processor() -> usize {
    0
}

/// # Errors
/// Always: there is one.
pub fn set_memory_nodes(_in_turn: bool, _nodes: &[u64]) -> Result<()> {
    Err(ErrorKind::Unsupported.into())
}

/// A number of the calling thread, not 0.
pub fn thread_number() -> i32 {
    let mut number = 0;
    // SAFETY: 0 is the calling thread, and `number` outlives the call.
    unsafe { libc::pthread_threadid_np(0, &raw mut number) };
    (number as i32).max(1)
}

/// macOS has no large pages to ask for.
pub fn ask_for_large_pages(_map: &MmapMut) {}

/// # Errors
/// `InvalidInput`: a write to each page must do.
pub fn commit(_map: &MmapMut, _at: usize, _len: usize) -> Result<()> {
    Err(ErrorKind::InvalidInput.into())
}
