//! Linux.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::ptr;

use rustix::fs::OFlags;
use rustix::mm::{self, Advice};

use crate::error::Error;
use crate::small::open_regular_with;

/// The system call `cachestat` (Linux 6.5), which the libc crate does not name on every platform.
const SYS_CACHESTAT: libc::c_long = 451;

#[repr(C)]
struct Range {
    offset: u64,
    len: u64,
}

#[repr(C)]
#[derive(Default)]
struct Stat {
    cached: u64,
    dirty: u64,
    writeback: u64,
    evicted: u64,
    recently_evicted: u64,
}

/// The system's part of [`resident_bytes`](crate::resident_bytes), where `len` is not 0: by `cachestat`, or by `mincore` on older kernels.
pub(crate) fn resident_bytes(file: &File, offset: u64, len: u64) -> io::Result<u64> {
    match cachestat(file, offset, len) {
        Err(e) if e.raw_os_error() == Some(libc::ENOSYS) => mincore(file, offset, len),
        other => other,
    }
}

fn cachestat(file: &File, offset: u64, len: u64) -> io::Result<u64> {
    let (range, mut stat) = (Range { offset, len }, Stat::default());
    // SAFETY: both structures have the kernel's layout and outlive the call, which writes only the second.
    let done = unsafe { libc::syscall(SYS_CACHESTAT, file.as_raw_fd(), &raw const range, &raw mut stat, 0) };
    if done == 0 { Ok(stat.cached * rustix::param::page_size() as u64) } else { Err(io::Error::last_os_error()) }
}

fn mincore(file: &File, offset: u64, len: u64) -> io::Result<u64> {
    // For a file that the caller may not write, `mincore` calls every page resident.
    // SAFETY: a call with a descriptor and constants.
    if unsafe { libc::faccessat(file.as_raw_fd(), c"".as_ptr(), libc::W_OK, libc::AT_EMPTY_PATH) } != 0 {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
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
    let mut pages = vec![0u8; bytes.div_ceil(page)];
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

/// Asks the kernel to drop the clean pages of a part of `file`.
pub(crate) fn drop_cached(file: &File, offset: u64, len: u64) -> io::Result<()> {
    advise(file, offset, len, libc::POSIX_FADV_DONTNEED)
}

/// Turns the kernel's read-ahead of a file off.
pub(crate) fn read_nothing_ahead(file: &File) -> io::Result<()> {
    advise(file, 0, 0, libc::POSIX_FADV_RANDOM)
}

fn advise(file: &File, offset: u64, len: u64, advice: libc::c_int) -> io::Result<()> {
    // SAFETY: a call with a descriptor and numbers.
    match unsafe { libc::posix_fadvise(file.as_raw_fd(), offset as libc::off_t, len as libc::off_t, advice) } {
        0 => Ok(()),
        error => Err(io::Error::from_raw_os_error(error)),
    }
}

/// Opens a file for reads past the page cache.
pub(crate) fn open_direct(path: &Path) -> Result<File, Error> {
    open_regular_with(path, OFlags::DIRECT)
}

/// The name of the network file system that a file is on.
pub(crate) fn remote(file: &File) -> Option<&'static str> {
    const KINDS: [(i64, &str); 7] = [
        (0x6969, "NFS"),
        (0x517b, "SMB"),
        (0xff53_4d42, "SMB"),
        (0xfe53_4d42, "SMB"),
        (0x0102_1997, "9p"),
        (0x00c3_6400, "Ceph"),
        (0x6573_5546, "FUSE"),
    ];
    // SAFETY: an all-zero statfs is a valid one, and outlives the call that fills it.
    let kind = unsafe {
        let mut found: libc::statfs = std::mem::zeroed();
        (libc::fstatfs(file.as_raw_fd(), &raw mut found) == 0).then_some(found.f_type)
    }?;
    KINDS.into_iter().find(|(k, _)| *k == kind as i64).map(|(_, name)| name)
}

/// Gives this thread the lowest priority for the processor and the disk.
pub(crate) fn lower_priority() {
    // `IOPRIO_WHO_PROCESS`, of which 0 is the calling thread, and `IOPRIO_CLASS_IDLE`, as Linux numbers them.
    const WHO: libc::c_int = 1;
    const IDLE: libc::c_int = 3 << 13;
    // SAFETY: both take numbers and touch no memory. Where they are refused, the thread stays as it is.
    unsafe {
        libc::setpriority(libc::PRIO_PROCESS, 0, 19);
        libc::syscall(libc::SYS_ioprio_set, WHO, 0, IDLE);
    }
}

/// Asks for large pages. Where there are none, small ones do.
///
/// # Safety
/// The memory is one mapping, or a part of one.
pub(crate) unsafe fn ask_for_large_pages(start: *mut u8, len: usize) {
    // SAFETY: the caller's; the advice changes no contents.
    let _ = unsafe { mm::madvise(start.cast(), len, Advice::LinuxHugepage) };
}

/// Commits memory that will be written to. Kernels before 5.14 refuse, and commit when it is first touched.
///
/// # Safety
/// As for [`ask_for_large_pages`].
pub(crate) unsafe fn commit(start: *mut u8, len: usize) {
    // SAFETY: as above.
    let _ = unsafe { mm::madvise(start.cast(), len, Advice::LinuxPopulateWrite) };
}

/// Reads a part of a file's map in and enters it into the page table.
///
/// # Safety
/// As for [`ask_for_large_pages`].
pub(crate) unsafe fn populate(start: *mut u8, len: usize) -> io::Result<()> {
    // SAFETY: as above.
    match unsafe { mm::madvise(start.cast(), len, Advice::LinuxPopulateRead) } {
        // Kernels before 5.14 lack populate-read and only read ahead.
        // SAFETY: as above.
        Err(rustix::io::Errno::INVAL) => unsafe { Ok(mm::madvise(start.cast(), len, Advice::WillNeed)?) },
        other => Ok(other?),
    }
}

/// Takes a part of a file's map out of the page table.
///
/// # Safety
/// As for [`ask_for_large_pages`].
pub(crate) unsafe fn leave(start: *mut u8, len: usize) -> io::Result<()> {
    // SAFETY: as above.
    Ok(unsafe { mm::madvise(start.cast(), len, Advice::LinuxDontNeed) }?)
}

/// Takes pages of anonymous memory that are not committed yet from a node.
///
/// # Safety
/// As for [`ask_for_large_pages`].
pub(crate) unsafe fn prefer_node(start: *mut u8, len: usize, node: usize) -> io::Result<()> {
    const WORD: usize = u64::BITS as usize;
    let mut nodes = [0u64; 16];
    *nodes.get_mut(node / WORD).ok_or(io::ErrorKind::InvalidInput)? |= 1 << (node % WORD);
    let (mode, no_flags) = (libc::MPOL_PREFERRED, 0usize);
    // SAFETY: as above; the kernel reads a bit less than it is told, which are those of the mask.
    let done =
        unsafe { libc::syscall(libc::SYS_mbind, start, len, mode, nodes.as_ptr(), nodes.len() * WORD + 1, no_flags) };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Where this thread's error number is.
pub(crate) fn error_number() -> *mut libc::c_int {
    // SAFETY: it returns a pointer of this thread's.
    unsafe { libc::__errno_location() }
}

/// The codes of SIGBUS that an instruction of this thread raises, and will raise again.
pub(crate) const FAULTS: [libc::c_int; 4] = [libc::BUS_ADRALN, libc::BUS_ADRERR, libc::BUS_OBJERR, libc::BUS_MCEERR_AR];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_just_written_is_resident_and_both_ways_of_asking_agree() {
        let page = rustix::param::page_size() as u64;
        let mut file = tempfile::tempfile().unwrap();
        io::Write::write_all(&mut file, &[1; 40_000]).unwrap();
        let all = 40_000u64.next_multiple_of(page);
        assert_eq!(mincore(&file, 0, 40_000).unwrap(), all);
        assert_eq!(mincore(&file, 5000, 4000).unwrap(), 9000u64.next_multiple_of(page) - 5000 / page * page);
        match cachestat(&file, 0, 40_000) {
            Ok(found) => assert_eq!(found, all),
            Err(e) => assert_eq!(e.raw_os_error(), Some(libc::ENOSYS)),
        }
    }
}
