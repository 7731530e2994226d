//! Memory that bytes are read to, lent by whoever will use them: ordinary memory, or such as a device's driver has pinned.

use std::io;

use rustix::mm::{Advice, madvise};

use crate::map::Map;

/// A run of memory that begins at a page and lives as long as this.
///
/// # Safety
/// `start..start + len` stays valid for reads and writes, by any thread and by the kernel, and where it is, until this is dropped; nobody but who has been
/// given this touches it.
pub unsafe trait Memory: Send + Sync {
    fn start(&self) -> *mut u8;
    fn len(&self) -> usize;

    fn is_empty(&self) -> bool {
        self.len() == 0
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

/// Ordinary memory, in large pages where there are some, and resident: nothing that is read into it waits for pages to be found and cleared.
///
/// # Errors
/// When there is none.
pub fn host_memory(bytes: usize) -> io::Result<Box<dyn Memory>> {
    let map = Map::image(bytes, true)?;
    if map.len() > 0 {
        // SAFETY: the map's own memory, whose contents this does not change. Kernels before 5.14 refuse, and commit when it is first read to.
        let _ = unsafe { madvise(map.start().cast(), map.len(), Advice::LinuxPopulateWrite) };
    }
    Ok(Box::new(map))
}
