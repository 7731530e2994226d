//! Pages from the kernel: a file mapped read-only, or zeroed anonymous memory. The only unsafe code that holds memory here;
//! everything above sees slices.

use std::fmt;
use std::fs::File;
use std::io;
use std::ops::{Deref, DerefMut, Range};
use std::ptr::{self, NonNull};
use std::sync::OnceLock;

use rustix::mm::{self, Advice, MapFlags, ProtFlags};

use crate::fault::Watch;
use crate::platform;

/// Bytes of a large page on x86-64, and on ARM with pages of 4 KiB. Weights are read from end to end for every token, and with small pages a core spends a third of its time on translating
/// addresses (`docs/experiments.md`). Memory for large pages begins at a multiple of this.
const LARGE_PAGE: usize = 2 << 20;

/// One mapping, unmapped on drop. Page-aligned.
pub(crate) struct Map {
    base: NonNull<u8>,
    len: usize,
    watch: OnceLock<Watch>,
}

// SAFETY: the mapping belongs to this value alone, so it may move to any thread like a boxed slice.
unsafe impl Send for Map {}
// SAFETY: as above; what `&Map` gives out is a pointer, and slices whose taker vouches that nobody writes to them.
unsafe impl Sync for Map {}

impl Map {
    fn of(base: NonNull<u8>, len: usize) -> Map {
        Map { base, len, watch: OnceLock::new() }
    }

    fn empty() -> Map {
        Map::of(NonNull::dangling(), 0)
    }

    /// Maps the first `len` bytes of `file` read-only, in large pages where kernel and file system have them: pages that are first read
    /// into the page cache through such a map are large, those that it holds already stay as they are. The descriptor may be closed afterwards.
    ///
    /// The map is shared, since a driver that locks a private map of large pages for a device may never come back (Linux 6.18, NVIDIA 580). It is private where
    /// the file system has no shared maps, as FUSE past the page cache.
    ///
    /// Two things lie outside what a map can promise: a file that another process rewrites in place changes under the
    /// reader, and a file that is truncated raises SIGBUS on access to what is gone.
    pub fn file(file: &File, len: usize) -> io::Result<Map> {
        if len == 0 {
            return Ok(Map::empty());
        }
        let mut map = Map::reserve(len, len >= LARGE_PAGE)?;
        map.len = len;
        let at = map.base.as_ptr().cast();
        // SAFETY: the pages lie inside the reservation, which nothing else knows of; they are replaced.
        let map_as = |flags| unsafe { mm::mmap(at, len, ProtFlags::READ, flags | MapFlags::FIXED, file, 0) };
        map_as(MapFlags::SHARED).or_else(|_| map_as(MapFlags::PRIVATE))?;
        if len >= LARGE_PAGE {
            map.ask_for_large_pages();
        }
        Ok(map)
    }

    /// Address space for `len` bytes (not 0) that cannot be accessed yet; `aligned`: from a multiple of [`LARGE_PAGE`].
    fn reserve(len: usize, aligned: bool) -> io::Result<Map> {
        let len = len.checked_next_multiple_of(rustix::param::page_size()).ok_or(io::ErrorKind::OutOfMemory)?;
        let total = len.checked_add(if aligned { LARGE_PAGE } else { 0 }).ok_or(io::ErrorKind::OutOfMemory)?;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a fresh mapping at an address of the kernel's choice overlaps nothing that Rust knows of.
        let whole = unsafe { mm::mmap_anonymous(ptr::null_mut(), total, ProtFlags::empty(), flags) }?.cast::<u8>();
        let mut map = Map::of(NonNull::new(whole).expect("mmap never returns null"), total);
        if aligned {
            // The rest on both sides is unmapped.
            let before = whole.align_offset(LARGE_PAGE);
            let after = total - before - len;
            // SAFETY: both parts are whole pages of the mapping just made, outside of what stays.
            unsafe {
                let start = whole.add(before);
                if before > 0 {
                    mm::munmap(whole.cast(), before)?;
                    (map.base, map.len) = (NonNull::new_unchecked(start), total - before);
                }
                if after > 0 {
                    mm::munmap(start.add(len).cast(), after)?;
                    map.len = len;
                }
            }
        }
        Ok(map)
    }

    fn ask_for_large_pages(&self) {
        // SAFETY: the pages belong to this mapping.
        unsafe { platform::ask_for_large_pages(self.base.as_ptr(), self.len) };
    }

    /// `len` bytes of zeroed memory that is committed as it is touched.
    fn anonymous(len: usize, large_pages: bool) -> io::Result<Map> {
        if len == 0 {
            return Ok(Map::empty());
        }
        let mut map = Map::reserve(len, large_pages)?;
        let (at, flags) = (map.base.as_ptr().cast(), MapFlags::PRIVATE | MapFlags::FIXED);
        // SAFETY: the pages lie inside the reservation, which nothing else knows of; they are replaced.
        unsafe { mm::mmap_anonymous(at, map.len, ProtFlags::READ | ProtFlags::WRITE, flags) }?;
        if large_pages {
            map.ask_for_large_pages();
        }
        map.len = len;
        Ok(map)
    }

    /// Memory that is to hold what a file of `len` bytes holds, at least to the end of its last page; zeroed, committed as it is
    /// filled, in `large_pages` if asked for and where the system has them.
    pub fn image(len: usize, large_pages: bool) -> io::Result<Map> {
        let rounded = len.checked_next_multiple_of(rustix::param::page_size()).ok_or(io::ErrorKind::OutOfMemory)?;
        Map::anonymous(rounded, large_pages && rounded >= LARGE_PAGE)
    }

    /// Where the memory begins, for those who fill it.
    pub fn start(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    pub fn len(&self) -> usize {
        self.len
    }

    /// From now on a page that the file has lost reads as zeros. The caller must check [`Map::missing`].
    pub fn watch(&self) {
        if self.len > 0 {
            self.watch.get_or_init(|| Watch::new(self.base.as_ptr() as usize, self.len));
        }
    }

    /// The offset of the first page that was gone when it was read, if one was.
    pub fn missing(&self) -> Option<u64> {
        self.watch.get()?.missing()
    }

    /// Takes pages of an anonymous map that are not committed yet from this node, whichever thread touches them first, while the node has free memory.
    ///
    /// # Errors
    /// When the kernel knows no such node, or forbids it (containers do).
    pub fn prefer_node(&self, node: usize) -> io::Result<()> {
        if self.len == 0 {
            return Ok(());
        }
        // SAFETY: the pages belong to this mapping, and no contents change.
        unsafe { platform::prefer_node(self.base.as_ptr(), self.len, node) }
    }

    /// The bytes in `range`, and no reference to any other: those may be written to meanwhile.
    ///
    /// # Safety
    /// Nobody writes to `range` as long as the slice is used. (Of a file's map, another process might: see [`Map::file`].)
    ///
    /// # Panics
    /// When the range is reversed or reaches beyond the map.
    pub unsafe fn slice(&self, range: Range<usize>) -> &[u8] {
        assert!(range.start <= range.end && range.end <= self.len, "range outside the map");
        // SAFETY: inside the mapping, which is valid for reads until drop (dangling only when `len` is 0); kernel memory is always
        // initialised. That nobody writes to it is the caller's word.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr().add(range.start), range.len()) }
    }

    /// Starts reading `range` ahead in the background, and returns at once.
    pub fn will_need(&self, range: Range<usize>) -> io::Result<()> {
        // SAFETY: the pages belong to this mapping; the advice changes no contents.
        self.pages(range, |start, len| unsafe { Ok(mm::madvise(start.cast(), len, Advice::WillNeed)?) })
    }

    /// Reads `range` in and enters it into the page table, and returns when that is done.
    pub fn populate(&self, range: Range<usize>) -> io::Result<()> {
        // SAFETY: as above.
        self.pages(range, |start, len| unsafe { platform::populate(start, len) })
    }

    /// Takes a range of a file's map out of the page table, so that it no longer counts as this process's memory.
    pub fn leave(&self, range: Range<usize>) -> io::Result<()> {
        // SAFETY: as above.
        self.pages(range, |start, len| unsafe { platform::leave(start, len) })
    }

    /// Does something with the pages that hold `range`.
    fn pages(&self, range: Range<usize>, each: impl Fn(*mut u8, usize) -> io::Result<()>) -> io::Result<()> {
        assert!(range.start <= range.end && range.end <= self.len, "range outside the map");
        if range.is_empty() {
            return Ok(());
        }
        let start = range.start & !(rustix::param::page_size() - 1);
        each(self.base.as_ptr().wrapping_add(start), range.end - start)
    }
}

impl fmt::Debug for Map {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "Map({} bytes)", self.len)
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        // Before the addresses can belong to somebody else.
        drop(self.watch.take());
        if self.len > 0 {
            // SAFETY: mapped with this length, and no slice outlives the value. An error could only
            // mean a wrong address; there is nothing to do about it here.
            let _ = unsafe { mm::munmap(self.base.as_ptr().cast(), self.len) };
        }
    }
}

/// Zeroed, page-aligned memory to copy a tensor or a file into; `Bytes::from` turns it into a shared view.
pub struct Buffer(Map);

impl Buffer {
    /// `len` bytes; nothing is committed before it is written. Fails when the address space or the memory limit is spent.
    pub fn zeroed(len: usize) -> io::Result<Buffer> {
        Map::anonymous(len, false).map(Buffer)
    }

    /// The same in large pages, where the system has them.
    pub fn large(len: usize) -> io::Result<Buffer> {
        Map::image(len, true).map(Buffer)
    }

    /// Takes pages that are not touched yet from this node, while the node has free memory.
    ///
    /// # Errors
    /// When the kernel knows no such node, or forbids it.
    pub fn prefer_node(&self, node: usize) -> io::Result<()> {
        self.0.prefer_node(node)
    }

    pub(crate) fn into_map(self) -> Map {
        self.0
    }
}

impl Deref for Buffer {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: a buffer is written to only through `&mut self`.
        unsafe { self.0.slice(0..self.0.len) }
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: a buffer is always anonymous and writable, valid for `len` bytes (dangling only when `len` is 0), and
        // `&mut self` makes this the only reference.
        unsafe { std::slice::from_raw_parts_mut(self.0.base.as_ptr(), self.0.len) }
    }
}
