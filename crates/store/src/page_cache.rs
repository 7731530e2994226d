//! How much of a file is in the page cache, and dropping it from there. Used to choose a way of reading, around buffered reads that should leave no trace, and
//! by measurements of cold files.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::ptr;

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

/// Bytes of `file` from `offset` on (`len` of them) that are in the page cache, in whole pages; by `cachestat`, or by `mincore` on
/// older kernels.
///
/// # Errors
/// Those of the system; `PermissionDenied` where only a user who may write the file may know.
pub fn resident_bytes(file: &File, offset: u64, len: u64) -> io::Result<u64> {
    if len == 0 {
        return Ok(0);
    }
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

/// Asks the kernel to drop the clean pages of a part of `file`. Mapped pages stay, and others may: [`resident_bytes`] tells.
pub fn drop_cached(file: &File, offset: u64, len: u64) -> io::Result<()> {
    advise(file, offset, len, libc::POSIX_FADV_DONTNEED)
}

pub(crate) fn advise(file: &File, offset: u64, len: u64, advice: libc::c_int) -> io::Result<()> {
    // SAFETY: a call with a descriptor and numbers.
    match unsafe { libc::posix_fadvise(file.as_raw_fd(), offset as libc::off_t, len as libc::off_t, advice) } {
        0 => Ok(()),
        error => Err(io::Error::from_raw_os_error(error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_just_written_is_resident_and_both_ways_of_asking_agree() {
        let mut file = tempfile::tempfile().unwrap();
        io::Write::write_all(&mut file, &[1; 40_000]).unwrap();
        assert_eq!(mincore(&file, 0, 40_000).unwrap(), 40_960);
        assert_eq!(mincore(&file, 5000, 4000).unwrap(), 8192);
        match cachestat(&file, 0, 40_000) {
            Ok(found) => assert_eq!(found, 40_960),
            Err(e) => assert_eq!(e.raw_os_error(), Some(libc::ENOSYS)),
        }
        assert_eq!(resident_bytes(&file, 0, 0).unwrap(), 0);
    }
}
