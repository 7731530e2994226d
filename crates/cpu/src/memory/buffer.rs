//! Anonymous memory that never moves.

use std::io::ErrorKind;
use std::sync::OnceLock;

use anyhow::{Context, Result};
use memmap2::{MmapMut, MmapOptions};
use sluice_backend::MemoryClass;

use crate::platform;
use crate::threads::Pool;

/// Zeroed anonymous memory that never moves.
pub struct Buffer {
    map: MmapMut,
    pub(super) start: *mut u8,
    pub class: MemoryClass,
    pub bytes: usize,
    /// Bytes that count as used: all, or the committed ones of a buffer that is committed in steps.
    pub committed: usize,
}

// SAFETY: the address is that of the buffer's own memory; every access through it goes by `Place`, whose callers keep threads apart.
unsafe impl Send for Buffer {}
// SAFETY: as above.
unsafe impl Sync for Buffer {}

/// The least that is committed at once: a large page.
const STEP: usize = 2 << 20;
/// From this many steps on, one step per thread is committed together, for at most as many threads.
const MANY: usize = 8;

impl Buffer {
    /// Zeroed memory that is committed page by page when touched.
    pub fn zeroed(class: MemoryClass, bytes: usize) -> Result<Buffer> {
        // The system refuses an empty map. A page that is never touched costs nothing.
        let map = MmapOptions::new().len(bytes.max(1)).map_anon();
        let mut map = map.with_context(|| format!("cannot reserve {bytes} bytes for {}", class.name()))?;
        if class == MemoryClass::State && bytes >= STEP {
            // Copying a state mostly clears pages, which takes a tenth of the time with large ones. If there are none, small ones are used.
            platform::ask_for_large_pages(&map);
        }
        Ok(Buffer { start: map.as_mut_ptr(), map, class, bytes, committed: bytes })
    }

    /// Address space that must be committed before it is touched.
    pub fn reserved(class: MemoryClass, bytes: usize) -> Result<Buffer> {
        let map = MmapOptions::new().len(bytes.max(1)).no_reserve_swap().map_anon();
        let mut map = map.with_context(|| format!("cannot reserve {bytes} bytes of addresses for {}", class.name()))?;
        if bytes >= STEP {
            // Without large pages, small ones are used.
            platform::ask_for_large_pages(&map);
        }
        Ok(Buffer { start: map.as_mut_ptr(), map, class, bytes, committed: 0 })
    }

    /// Makes the first `bytes` bytes resident. Resident bytes keep their values and addresses. The threads of `pool` clear pages in parallel, since a new page
    /// may cost as much time as reading its contents.
    ///
    /// # Errors
    /// When the system has no more memory, or this process may have none.
    pub fn commit(&mut self, bytes: usize, pool: &mut Pool) -> Result<()> {
        if bytes <= self.committed {
            return Ok(());
        }
        // Compared with that much memory, a page for each thread is little.
        let step = if self.committed >= MANY * STEP { STEP * pool.threads().min(MANY) } else { STEP };
        let to = bytes.next_multiple_of(step).min(self.bytes);
        let (from, more) = (self.committed, to - self.committed);
        let (map, start, refused) = (&self.map, Addresses(self.start), OnceLock::new());
        pool.run(more.div_ceil(STEP), &|piece, _| {
            let at = from + piece * STEP;
            let len = STEP.min(to - at);
            match platform::commit(map, at, len) {
                // Kernels before 5.14, and other systems: a write to each page does it.
                // SAFETY: inside the map, zeros as yet, and of this piece alone: the buffer is borrowed as one that changes.
                Err(e) if e.kind() == ErrorKind::InvalidInput => unsafe { start.touch(at, len) },
                Err(e) => _ = refused.set(e),
                Ok(()) => {}
            }
        });
        if let Some(e) = refused.into_inner() {
            return Err(e).with_context(|| format!("cannot commit {more} more bytes for {}", self.class.name()));
        }
        self.committed = to;
        Ok(())
    }

    pub fn as_bytes_mut(&mut self) -> &mut [u8] {
        &mut self.map[..self.bytes]
    }
}

/// The address of a buffer, for threads that each have their own part of it.
struct Addresses(*mut u8);

// SAFETY: an address; whoever goes there answers for it.
unsafe impl Sync for Addresses {}

impl Addresses {
    /// Writes zeros, one to each page.
    ///
    /// # Safety
    /// These bytes are mapped, hold zeros, and nobody else uses them meanwhile.
    unsafe fn touch(&self, from: usize, len: usize) {
        // SAFETY: as the caller guarantees.
        (from..from + len).step_by(4096).for_each(|at| unsafe { self.0.add(at).write_volatile(0) });
    }
}
