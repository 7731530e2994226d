//! Pages from the kernel: a file mapped read-only, or zeroed anonymous memory. The only unsafe code that holds memory here;
//! everything above sees slices.

use std::fs::File;
use std::io;
use std::ops::{Deref, DerefMut, Range};
use std::ptr::{self, NonNull};

use rustix::mm::{self, Advice, MapFlags, ProtFlags};

/// What a large page of this processor holds. Weights are read from end to end for every token, and with small pages a core spends a third of its time
/// on translating addresses (`docs/experiments.md`), so maps of at least this size begin at a multiple of it and ask for large pages.
const LARGE_PAGE: usize = 2 << 20;

/// One mapping, unmapped on drop. Page-aligned; large ones lie at a multiple of [`LARGE_PAGE`].
pub(crate) struct Map {
    base: NonNull<u8>,
    len: usize,
    /// Address space that was reserved, the mapping inside it.
    reserved: (NonNull<u8>, usize),
}

// SAFETY: the mapping belongs to this value alone and is written only through `&mut` (`Buffer`), so it may move to and be
// read from any thread like a boxed slice.
unsafe impl Send for Map {}
// SAFETY: as above; `&Map` gives out `&[u8]` only.
unsafe impl Sync for Map {}

impl Map {
    /// Maps the first `len` bytes of `file` read-only and private. The descriptor may be closed afterwards.
    ///
    /// Two things lie outside what a map can promise: a file that another process rewrites in place changes under the
    /// reader, and a file that is truncated raises SIGBUS on access to what is gone.
    pub fn file(file: &File, len: usize) -> io::Result<Map> {
        if len == 0 {
            return Ok(Map::empty());
        }
        let map = Map::reserve(len)?;
        let at = map.base.as_ptr().cast();
        // SAFETY: the pages lie inside the reservation, which nothing else knows of; they are replaced.
        unsafe { mm::mmap(at, len, ProtFlags::READ, MapFlags::PRIVATE | MapFlags::FIXED, file, 0) }?;
        map.ask_for_large_pages();
        Ok(map)
    }

    fn empty() -> Map {
        Map { base: NonNull::dangling(), len: 0, reserved: (NonNull::dangling(), 0) }
    }

    /// Address space for `len` bytes (not 0), inaccessible yet.
    fn reserve(len: usize) -> io::Result<Map> {
        let slack = if len >= LARGE_PAGE { LARGE_PAGE } else { 0 };
        let total = len.checked_add(slack).ok_or(io::ErrorKind::OutOfMemory)?;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a fresh mapping at an address of the kernel's choice overlaps nothing that Rust knows of.
        let start = unsafe { mm::mmap_anonymous(ptr::null_mut(), total, ProtFlags::empty(), flags) }?.cast::<u8>();
        let to_large = start.align_offset(LARGE_PAGE);
        let base = start.wrapping_add(if slack > 0 { to_large } else { 0 });
        let known = |p| NonNull::new(p).expect("mmap never returns null");
        Ok(Map { base: known(base), len, reserved: (known(start), total) })
    }

    /// Large pages where kernel and file system have them. A file's pages are large when they were first read into the page cache through
    /// such a map; what small pages hold already stays as it is.
    fn ask_for_large_pages(&self) {
        if self.len >= LARGE_PAGE {
            // SAFETY: the pages belong to this mapping; the advice changes no contents. A refusal only costs time.
            let _ = unsafe { mm::madvise(self.base.as_ptr().cast(), self.len, Advice::LinuxHugepage) };
        }
    }

    /// `len` bytes of zeroed memory that is committed as it is touched.
    fn anonymous(len: usize) -> io::Result<Map> {
        if len == 0 {
            return Ok(Map::empty());
        }
        let map = Map::reserve(len)?;
        let (at, protection) = (map.base.as_ptr().cast(), ProtFlags::READ | ProtFlags::WRITE);
        // SAFETY: the pages lie inside the reservation, which nothing else knows of; they are replaced.
        unsafe { mm::mmap_anonymous(at, len, protection, MapFlags::PRIVATE | MapFlags::FIXED) }?;
        map.ask_for_large_pages();
        Ok(map)
    }

    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: `base` is valid for reads of `len` bytes until drop (dangling only when `len` is 0), and kernel memory is
        // always initialised. That nobody else rewrites the file meanwhile is a condition on the user, stated at `file`.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.len) }
    }

    /// Starts reading `range` ahead in the background, and returns at once.
    pub fn will_need(&self, range: Range<usize>) -> io::Result<()> {
        self.advise(range, Advice::WillNeed)
    }

    /// Reads `range` in and enters it into the page table, and returns when that is done.
    pub fn populate(&self, range: Range<usize>) -> io::Result<()> {
        match self.advise(range.clone(), Advice::LinuxPopulateRead) {
            // Kernels before 5.14 do not know populate-read: read-ahead is what is left there.
            Err(e) if e.raw_os_error() == Some(rustix::io::Errno::INVAL.raw_os_error()) => self.will_need(range),
            other => other,
        }
    }

    /// `madvise` for the pages that hold `range`.
    fn advise(&self, range: Range<usize>, advice: Advice) -> io::Result<()> {
        assert!(range.start <= range.end && range.end <= self.len, "range outside the map");
        if range.is_empty() {
            return Ok(());
        }
        let start = range.start & !(rustix::param::page_size() - 1);
        // SAFETY: the pages from `start` to `range.end` belong to this mapping, and the advice given here changes no contents.
        unsafe { mm::madvise(self.base.as_ptr().add(start).cast(), range.end - start, advice) }?;
        Ok(())
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        if self.len > 0 {
            // SAFETY: reserved with this length, and no slice outlives the value. An error could only
            // mean a wrong address; there is nothing to do about it here.
            let _ = unsafe { mm::munmap(self.reserved.0.as_ptr().cast(), self.reserved.1) };
        }
    }
}

/// Zeroed, page-aligned memory to copy a tensor or a file into; `Bytes::from` turns it into a shared view.
pub struct Buffer(Map);

impl Buffer {
    /// `len` bytes; nothing is committed before it is written. Fails when the address space or the memory limit is spent.
    pub fn zeroed(len: usize) -> io::Result<Buffer> {
        Map::anonymous(len).map(Buffer)
    }

    pub(crate) fn into_map(self) -> Map {
        self.0
    }
}

impl Deref for Buffer {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        self.0.as_slice()
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: a buffer is always anonymous and writable, valid for `len` bytes (dangling only when `len` is 0), and
        // `&mut self` makes this the only reference.
        unsafe { std::slice::from_raw_parts_mut(self.0.base.as_ptr(), self.0.len) }
    }
}
