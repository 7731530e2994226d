//! Memory that files are read to, lent by the code that will use the bytes: ordinary memory, or memory that a device's driver has pinned.

use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use crate::map::Map;
use crate::platform;

/// A run of memory that begins at a page and lives as long as this.
///
/// # Safety
/// `start..start + len` stays valid and in place, for reads and writes by any thread and by the kernel, until this is dropped. Only the owner of this value
/// touches it.
pub unsafe trait Memory: Send + Sync {
    /// The first byte.
    fn start(&self) -> *mut u8;
    /// Bytes of memory.
    fn len(&self) -> usize;

    /// Whether there is no memory.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl dyn Memory {
    /// Its contents.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: valid as long as this is, and nobody else touches it.
        unsafe { std::slice::from_raw_parts_mut(self.start(), self.len()) }
    }
}

// SAFETY: a mapping of its own, which stays where it is until it is dropped.
unsafe impl Memory for Map {
    fn start(&self) -> *mut u8 {
        Map::start(self)
    }

    fn len(&self) -> usize {
        Map::len(self)
    }
}

/// Ordinary memory, in large pages if there are any. It is resident, so reads into it do not wait for pages to be cleared.
///
/// # Errors
/// When there is none.
pub fn host_memory(bytes: usize) -> io::Result<Box<dyn Memory>> {
    let map = Map::image(bytes, true)?;
    if map.len() > 0 {
        // SAFETY: the map's own memory.
        unsafe { platform::commit(map.start(), map.len()) };
    }
    Ok(Box::new(map))
}

/// Bytes of a page of this system.
pub fn page_size() -> usize {
    rustix::param::page_size()
}

/// Asks the allocator to return freed memory to the system, if it can.
pub fn return_freed() {
    #[cfg(target_env = "gnu")]
    // SAFETY: glibc's own call, which any thread may make at any time.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// Memory that is reused by one borrower after the other, so that its pages are allocated and cleared once. Clones lend the same memory.
#[derive(Clone, Default)]
pub struct ReusedMemory(Arc<Kept>);

#[derive(Default)]
struct Kept {
    memory: Mutex<Option<Box<dyn Memory>>>,
    /// Whether somebody has the turn.
    taken: Mutex<bool>,
    given_back: Condvar,
}

/// The turn of [`KeptMemory::turn`], until this is dropped; it may go to another thread.
pub struct Turn(ReusedMemory);

impl Drop for Turn {
    fn drop(&mut self) {
        *self.0.0.taken.lock().unwrap_or_else(PoisonError::into_inner) = false;
        self.0.0.given_back.notify_one();
    }
}

impl ReusedMemory {
    fn lock(&self) -> MutexGuard<'_, Option<Box<dyn Memory>>> {
        self.0.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the turn. Borrowers that wait for their turn never need more memory together than the largest of them.
    pub fn turn(&self) -> Turn {
        let mut taken = self.0.taken.lock().unwrap_or_else(PoisonError::into_inner);
        while *taken {
            taken = self.0.given_back.wait(taken).unwrap_or_else(PoisonError::into_inner);
        }
        *taken = true;
        Turn(self.clone())
    }

    /// Lends at least so many bytes, with undefined contents. Dropping them gives them back.
    ///
    /// # Errors
    /// When there is no memory.
    pub fn lend(&self, bytes: usize) -> io::Result<Box<dyn Memory>> {
        let kept = self.lock().take().filter(|memory| memory.len() >= bytes);
        let memory = kept.map_or_else(|| host_memory(bytes), Ok)?;
        Ok(Box::new(LentMemory { memory: Some(memory), home: self.clone() }))
    }

    /// Gives memory that is not lent back to the system.
    pub fn release(&self) {
        drop(self.lock().take());
    }
}

struct LentMemory {
    /// `None` when it is given back.
    memory: Option<Box<dyn Memory>>,
    home: ReusedMemory,
}

// SAFETY: the memory is this value's alone until it is dropped, and does not move with it.
unsafe impl Memory for LentMemory {
    fn start(&self) -> *mut u8 {
        self.memory.as_ref().expect("here until it is dropped").start()
    }

    fn len(&self) -> usize {
        self.memory.as_ref().expect("here until it is dropped").len()
    }
}

impl Drop for LentMemory {
    fn drop(&mut self) {
        *self.home.lock() = self.memory.take();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kept_memory_is_lent_to_one_at_a_time_and_again() {
        let kept = ReusedMemory::default();
        let first = kept.lend(10_000).unwrap();
        let second = kept.lend(10_000).unwrap();
        assert_ne!(first.start(), second.start());
        let at = second.start();
        drop((first, second));
        let again = kept.lend(5000).unwrap();
        assert!(again.start() == at && again.len() >= 10_000);
        drop(again);
        assert!(kept.lend(100_000).unwrap().len() >= 100_000);
        kept.release();
    }
}
