//! macOS: compiled (`scripts/cross-arm64.sh macos`), never run.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::ptr;

use rustix::fs::OFlags;
use rustix::mm::{self, Advice};

use crate::error::Error;
use crate::small::open_regular_with;

/// The system's part of [`resident_bytes`](crate::resident_bytes), where `len` is not 0: by `mincore`.
pub(crate) fn resident_bytes(file: &File, offset: u64, len: u64) -> io::Result<u64> {
    let page = rustix::param::page_size();
    let start = offset / page as u64 * page as u64;
    let bytes = usize::try_from(offset + len - start).map_err(|_| io::ErrorKind::FileTooLarge)?;
    // SAFETY: a fresh mapping at an address of the kernel's choice; no byte of it is read.
    let map = unsafe {
        libc::mmap(ptr::null_mut(), bytes, libc::PROT_READ, libc::MAP_SHARED, file.as_raw_fd(), start as libc::off_t)
    };
    if map == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    let mut pages = vec![0 as libc::c_char; bytes.div_ceil(page)];
    // SAFETY: the range is the mapping just made, and there is one byte for each of its pages.
    let asked = unsafe { libc::mincore(map, bytes, pages.as_mut_ptr()) };
    let error = io::Error::last_os_error();
    // SAFETY: made above with this length; nothing refers to it.
    unsafe { libc::munmap(map, bytes) };
    if asked != 0 {
        return Err(error);
    }
    Ok(pages.iter().filter(|p| **p & 1 != 0).count() as u64 * page as u64)
}

/// Drops the clean pages of a part of `file`, through a map of it.
pub(crate) fn drop_cached(file: &File, offset: u64, len: u64) -> io::Result<()> {
    let page = rustix::param::page_size() as u64;
    let start = offset / page * page;
    // As on Linux, a length of 0 means all that follows.
    let end = if len == 0 { file.metadata()?.len() } else { offset + len };
    let bytes = usize::try_from(end.saturating_sub(start)).map_err(|_| io::ErrorKind::FileTooLarge)?;
    if bytes == 0 {
        return Ok(());
    }
    // SAFETY: a fresh mapping, of which no byte is read or written; it is unmapped again.
    unsafe {
        let map = libc::mmap(
            ptr::null_mut(),
            bytes,
            libc::PROT_READ,
            libc::MAP_SHARED,
            file.as_raw_fd(),
            start as libc::off_t,
        );
        if map == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let done = libc::msync(map, bytes, libc::MS_INVALIDATE);
        let error = io::Error::last_os_error();
        libc::munmap(map, bytes);
        if done == 0 { Ok(()) } else { Err(error) }
    }
}

/// Turns the system's read-ahead of a file off.
pub(crate) fn read_nothing_ahead(file: &File) -> io::Result<()> {
    set(file, libc::F_RDAHEAD, 0)
}

fn set(file: &File, what: libc::c_int, to: libc::c_int) -> io::Result<()> {
    // SAFETY: a call with a descriptor and numbers.
    if unsafe { libc::fcntl(file.as_raw_fd(), what, to) } == -1 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Opens a file for reads that leave nothing in the page cache. What it holds already is read from there.
pub(crate) fn open_direct(path: &Path) -> Result<File, Error> {
    let file = open_regular_with(path, OFlags::empty())?;
    set(&file, libc::F_NOCACHE, 1).map_err(Error::io(path, "open"))?;
    Ok(file)
}

/// The name of the network file system that a file is on.
pub(crate) fn remote(file: &File) -> Option<&'static str> {
    // SAFETY: an all-zero statfs is a valid one, and outlives the call that fills it.
    let flags = unsafe {
        let mut found: libc::statfs = std::mem::zeroed();
        (libc::fstatfs(file.as_raw_fd(), &raw mut found) == 0).then_some(found.f_flags)
    }?;
    (flags & libc::MNT_LOCAL as u32 == 0).then_some("a network file system")
}

/// Gives this thread the lowest priority for the processor and the disk.
pub(crate) fn lower_priority() {
    // `setpriority(PRIO_DARWIN_THREAD, 0, PRIO_DARWIN_BG)`: this thread, its disk accesses too.
    const THREAD: libc::c_int = 3;
    const BACKGROUND: libc::c_int = 0x1000;
    // SAFETY: it takes numbers. Where it is refused, the thread stays as it is.
    unsafe { libc::setpriority(THREAD, 0, BACKGROUND) };
}

/// macOS has no large pages to ask for: pages have 16 KiB.
///
/// # Safety
/// None needed.
pub(crate) unsafe fn ask_for_large_pages(_start: *mut u8, _len: usize) {}

/// Memory is committed when it is first touched.
///
/// # Safety
/// None needed.
pub(crate) unsafe fn commit(_start: *mut u8, _len: usize) {}

/// Reads a part of a file's map in.
///
/// # Safety
/// The memory is a part of a readable mapping.
pub(crate) unsafe fn populate(start: *mut u8, len: usize) -> io::Result<()> {
    // SAFETY: the caller's.
    unsafe {
        mm::madvise(start.cast(), len, Advice::WillNeed)?;
        for at in (0..len).step_by(rustix::param::page_size()) {
            start.add(at).read_volatile();
        }
    }
    Ok(())
}

/// Lets the system take a part of a file's map out of the page table first.
///
/// # Safety
/// The memory is a part of a mapping.
pub(crate) unsafe fn leave(start: *mut u8, len: usize) -> io::Result<()> {
    // SAFETY: the caller's.
    Ok(unsafe { mm::madvise(start.cast(), len, Advice::DontNeed) }?)
}

/// There is one node.
///
/// # Safety
/// None needed.
pub(crate) unsafe fn prefer_node(_start: *mut u8, _len: usize, _node: usize) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}

/// Where this thread's error number is.
pub(crate) fn error_number() -> *mut libc::c_int {
    // SAFETY: it returns a pointer of this thread's.
    unsafe { libc::__error() }
}

/// The codes of SIGBUS that an instruction of this thread raises, and will raise again.
pub(crate) const FAULTS: [libc::c_int; 3] = [libc::BUS_ADRALN, libc::BUS_ADRERR, libc::BUS_OBJERR];
