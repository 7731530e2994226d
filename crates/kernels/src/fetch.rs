//! Asking for memory ahead of its use.

/// Asks for the cache line at an address, which may be any: a prefetch does not fault.
#[inline(always)]
pub fn fetch(address: usize) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch has no effect but on speed; the instruction is part of every x86-64.
    unsafe {
        use std::arch::x86_64::*;
        _mm_prefetch::<_MM_HINT_T0>(std::ptr::without_provenance(address));
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}
