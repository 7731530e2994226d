//! Linux.

use std::io::{Error, Result};

use memmap2::{Advice, MmapMut};

/// The processors that a thread may run on, a bit each. 0: the calling thread.
pub fn affinity(thread: i32, mask: &mut [u64]) -> Result<()> {
    // SAFETY: the kernel writes no more than the bytes that it is given.
    let done = unsafe { libc::sched_getaffinity(thread, size_of_val(mask), mask.as_mut_ptr().cast()) };
    if done == 0 { Ok(()) } else { Err(Error::last_os_error()) }
}

/// Restricts a thread to processors. 0: the calling thread.
pub fn set_affinity(thread: i32, mask: &[u64]) -> Result<()> {
    // SAFETY: the kernel reads no more than the bytes that it is given.
    let done = unsafe { libc::sched_setaffinity(thread, size_of_val(mask), mask.as_ptr().cast()) };
    if done == 0 { Ok(()) } else { Err(Error::last_os_error()) }
}

/// The processor that the calling thread runs on.
pub fn current_processor() -> usize {
    // SAFETY: it takes nothing; where the kernel cannot say, it is -1.
    usize::try_from(unsafe { libc::sched_getcpu() }).unwrap_or(0)
}

/// Whether memory comes from some nodes in turn, or from one as long as it has any.
pub fn set_memory_nodes(in_turn: bool, nodes: &[u64]) -> Result<()> {
    let mode = if in_turn { libc::MPOL_INTERLEAVE } else { libc::MPOL_PREFERRED };
    let bits = 64 * nodes.len() + 1;
    // SAFETY: the kernel reads a bit less than it is told, which are those of the mask.
    let done = unsafe { libc::syscall(libc::SYS_set_mempolicy, mode, nodes.as_ptr(), bits) };
    if done == 0 { Ok(()) } else { Err(Error::last_os_error()) }
}

/// The kernel's number of the calling thread.
pub fn thread_number() -> i32 {
    // SAFETY: it takes nothing and cannot fail.
    unsafe { libc::gettid() }
}

/// Asks for large pages. Without them, small ones are used.
pub fn ask_for_large_pages(map: &MmapMut) {
    let _ = map.advise(Advice::HugePage);
}

/// Makes a part of anonymous memory resident. `InvalidInput` where the system cannot (Linux before 5.14), and a write to each page must do.
pub fn commit(map: &MmapMut, at: usize, len: usize) -> Result<()> {
    map.advise_range(Advice::PopulateWrite, at, len)
}
