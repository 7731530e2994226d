//! One file as the readers see it: its descriptors, how it may be read, and how a chunk of it is read to the end whatever the system
//! does meanwhile.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, OnceLock};

use rustix::fs::OFlags;

use crate::error::Error;
use crate::page_cache::{self, resident_bytes};
use crate::small::{open_regular, open_regular_with};
use crate::stamp::Stamp;

/// What direct reads must be aligned to: file systems ask for this or less, and one that asks for more refuses.
pub const ALIGNMENT: usize = 4096;

/// What of a file's metadata changes when the file does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Identity {
    device: u64,
    inode: u64,
    len: u64,
    modified: (i64, i64),
}

/// What changes of a file's inode with its contents, and what changes without.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Inode {
    len: u64,
    modified: (i64, i64),
    /// Of anything about it: that cannot be set to what it was.
    changed: (i64, i64),
    /// Links, permissions, owner, group.
    other: (u64, u32, u32, u32),
}

impl Inode {
    fn of(found: &fs::Metadata) -> Inode {
        Inode {
            len: found.len(),
            modified: (found.mtime(), found.mtime_nsec()),
            changed: (found.ctime(), found.ctime_nsec()),
            other: (found.nlink(), found.mode(), found.uid(), found.gid()),
        }
    }
}

impl Identity {
    fn of(found: &fs::Metadata) -> Identity {
        let modified = (found.mtime(), found.mtime_nsec());
        Identity { device: found.dev(), inode: found.ino(), len: found.len(), modified }
    }
}

/// A file that is open for reading.
#[derive(Debug)]
pub(crate) struct ReadFile {
    pub path: PathBuf,
    pub buffered: File,
    pub len: u64,
    /// As it was opened.
    pub stamp: Stamp,
    identity: Identity,
    /// As it was last seen with the contents that were opened.
    inode: Mutex<Inode>,
    direct: OnceLock<File>,
    refused: AtomicBool,
}

impl ReadFile {
    pub fn open(path: &Path) -> Result<ReadFile, Error> {
        ReadFile::new(path, open_regular(path)?)
    }

    pub fn new(path: &Path, buffered: File) -> Result<ReadFile, Error> {
        let found = buffered.metadata().map_err(Error::io(path, "open"))?;
        Ok(ReadFile {
            path: path.to_owned(),
            buffered,
            len: found.len(),
            stamp: Stamp::of(&found),
            identity: Identity::of(&found),
            inode: Mutex::new(Inode::of(&found)),
            direct: OnceLock::new(),
            refused: AtomicBool::new(false),
        })
    }

    pub fn device(&self) -> u64 {
        self.identity.device
    }

    /// Opens the file once more for reads past the page cache. Where that is refused the file is read through it, and the answer says so.
    pub fn open_direct(&self) -> Option<String> {
        match open_regular_with(&self.path, OFlags::DIRECT) {
            // Another file of that name by now: what is open already is what was checked.
            Ok(file) if file.metadata().is_ok_and(|m| Identity::of(&m) == self.identity) => {
                let _ = self.direct.set(file);
                None
            }
            Ok(_) | Err(Error::NotAFile { .. }) => Some(self.refuse_direct("the name leads to another file now")),
            Err(Error::Io { cause, .. }) => Some(self.refuse_direct(&format!("refused at open: {cause}"))),
            Err(e) => Some(self.refuse_direct(&e.to_string())),
        }
    }

    /// To be called before buffered reads that should leave no trace: nothing is read ahead of what is asked for.
    pub fn read_nothing_ahead(&self) {
        // Where it cannot be had, more stays in the page cache.
        let _ = page_cache::advise(&self.buffered, 0, 0, libc::POSIX_FADV_RANDOM);
    }

    /// From here on the file is read through the page cache.
    pub fn refuse_direct(&self, why: &str) -> String {
        self.read_nothing_ahead();
        self.refused.store(true, Ordering::Relaxed);
        format!("{}: no direct reads ({why}); buffered ones instead", self.path.display())
    }

    /// The descriptor for reads past the page cache, unless they were refused.
    pub fn direct(&self) -> Option<&File> {
        self.direct.get().filter(|_| !self.refused.load(Ordering::Relaxed))
    }

    /// Whether the file is still what was opened, in itself and under its name.
    pub fn check_unchanged(&self) -> Result<(), Error> {
        let now = self.buffered.metadata().map_err(Error::io(&self.path, "look at"))?;
        let named = fs::metadata(&self.path).map_err(Error::io(&self.path, "look at"))?;
        if Identity::of(&now) != self.identity || Identity::of(&named) != self.identity {
            return Err(Error::Replaced { path: self.path.clone() });
        }
        Ok(())
    }

    /// Whether the file still has the contents that were opened, as its inode tells: for whoever goes on reading it, after each use and before what was
    /// read is used. Costs one `fstat`. That the file got another name, link, owner or mode is no harm.
    ///
    /// # Errors
    /// When it was written to, even if its time of modification was set back, or is shorter than it was.
    pub fn check_contents(&self) -> Result<(), Error> {
        let found = self.buffered.metadata().map_err(Error::io(&self.path, "look at"))?;
        let now = Inode::of(&found);
        let mut known = self.inode.lock().unwrap_or_else(|e| e.into_inner());
        if now == *known {
            return Ok(());
        }
        if now.len < known.len {
            return Err(self.error(now.len, None));
        }
        if (now.len, now.modified) != (known.len, known.modified) {
            return Err(Error::Replaced { path: self.path.clone() });
        }
        // Written to, and the time set back; or something else than the contents explains it: an attribute, or that the name leads elsewhere.
        let renamed = || fs::metadata(&self.path).map_or(true, |m| (m.dev(), m.ino()) != (found.dev(), found.ino()));
        if now.other == known.other && !renamed() {
            return Err(Error::Replaced { path: self.path.clone() });
        }
        *known = now;
        Ok(())
    }

    /// What stopped a read at `offset`: `cause`, or (`None`) that the file ends there or, as it may be by now, before.
    pub fn error(&self, offset: u64, cause: Option<io::Error>) -> Error {
        let path = self.path.clone();
        match cause {
            Some(cause) => Error::Read { path, tensor: None, offset, cause },
            None => {
                let ends = self.buffered.metadata().map_or(offset, |now| now.len().min(offset));
                Error::Shrunk { path, tensor: None, offset: ends, len: self.len }
            }
        }
    }

    /// Reads `len` bytes from `offset` on, through the page cache.
    ///
    /// # Safety
    /// `memory` is valid for writes of `len` bytes and nobody else touches it.
    ///
    /// # Errors
    /// The offset that was reached, and what stopped it there; nothing if it was the file's end.
    pub unsafe fn read_buffered(
        &self,
        memory: *mut u8,
        offset: u64,
        len: usize,
    ) -> Result<(), (u64, Option<io::Error>)> {
        // SAFETY: as the caller vouches.
        unsafe { read_to(&self.buffered, memory, offset, len, false) }
    }

    /// Reads `len` bytes past the page cache, `len` rounded up to whole pages at the file's end.
    ///
    /// # Safety
    /// As for [`ReadFile::read_buffered`], with `len` rounded up to whole pages.
    pub unsafe fn read_direct(
        &self,
        file: &File,
        memory: *mut u8,
        offset: u64,
        len: usize,
    ) -> Result<(), (u64, Option<io::Error>)> {
        // SAFETY: as the caller vouches.
        unsafe { read_to(file, memory, offset, len, true) }
    }

    /// A buffered read that leaves no more in the page cache than was there before.
    ///
    /// # Safety
    /// As for [`ReadFile::read_buffered`].
    pub unsafe fn read_leaving_no_trace(
        &self,
        memory: *mut u8,
        offset: u64,
        len: usize,
    ) -> Result<(), (u64, Option<io::Error>)> {
        let trace = self.trace(offset, len as u64);
        // SAFETY: as the caller vouches.
        let done = unsafe { self.read_buffered(memory, offset, len) };
        self.wipe(&trace);
        done
    }

    /// The parts of a range of which nothing is in the page cache, as few as possible: a large page of the cache is dropped only whole.
    pub fn trace(&self, offset: u64, len: u64) -> Vec<(u64, u64)> {
        let mut found: Vec<(u64, u64)> = Vec::new();
        let mut left = vec![(offset, len)];
        while let Some((at, n)) = left.pop() {
            match resident_bytes(&self.buffered, at, n) {
                Ok(0) => match found.last_mut() {
                    Some((start, len)) if *start + *len == at => *len += n,
                    _ => found.push((at, n)),
                },
                Ok(cached) if cached >= n || n <= 16 << 10 => {}
                Ok(_) => {
                    let half = (n / 2).next_multiple_of(ALIGNMENT as u64);
                    left.extend([(at + half, n - half), (at, half)]);
                }
                // Unknown which pages were there before: leave them all.
                Err(_) => return Vec::new(),
            }
        }
        found
    }

    /// Drops what a read has brought into the page cache.
    pub fn wipe(&self, trace: &[(u64, u64)]) {
        for &(at, n) in trace {
            // What cannot be dropped stays: page cache is the kernel's to reclaim.
            let _ = page_cache::drop_cached(&self.buffered, at, n);
        }
    }
}

/// Whether this says that the file system will not read in this way, rather than that the read failed.
pub(crate) fn refuses_direct(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EINVAL | libc::EOPNOTSUPP))
}

/// Where a read that stopped short goes on: at the byte it came to, or, of a direct read, at the boundary before.
pub(crate) fn resume_at(done: usize, direct: bool) -> usize {
    if direct { done / ALIGNMENT * ALIGNMENT } else { done }
}

/// Reads until `len` bytes are there, asking for whole pages where the reads are `direct`: short reads are continued, interrupted ones
/// repeated.
///
/// # Safety
/// `memory` is valid for writes of `len` bytes, rounded up to whole pages where the reads are direct, and nobody else touches it.
unsafe fn read_to(
    file: &File,
    memory: *mut u8,
    offset: u64,
    len: usize,
    direct: bool,
) -> Result<(), (u64, Option<io::Error>)> {
    let room = if direct { len.next_multiple_of(ALIGNMENT) } else { len };
    let mut done = 0;
    // Short reads that end between two boundaries are asked for again from the boundary before, as long as they come further.
    let mut from = 0;
    while done < len {
        // SAFETY: `from` is at most `len`, so this is a part of what the caller vouches for.
        let n = unsafe {
            let vec = libc::iovec { iov_base: memory.add(from).cast(), iov_len: room - from };
            libc::preadv(file.as_raw_fd(), &raw const vec, 1, (offset + from as u64) as libc::off_t)
        };
        if n < 0 {
            let error = io::Error::last_os_error();
            if error.kind() == io::ErrorKind::Interrupted {
                continue;
            }
            return Err((offset + done as u64, Some(error)));
        }
        let reached = from + n as usize;
        if reached <= done {
            return Err((offset + done as u64, None));
        }
        done = reached;
        from = resume_at(done, direct);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::thread;
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_pipe_that_took_the_name_is_not_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x");
        fs::write(&path, vec![1; ALIGNMENT]).unwrap();
        let file = ReadFile::open(&path).unwrap();
        fs::remove_file(&path).unwrap();
        rustix::fs::mkfifoat(rustix::fs::CWD, &path, rustix::fs::Mode::RUSR).unwrap();
        let (sender, receiver) = mpsc::channel();
        thread::spawn(move || sender.send((file.open_direct(), file.direct().is_none())));
        let (why, is_refused) = receiver.recv_timeout(Duration::from_secs(10)).expect("it waits for a writer");
        assert!(why.is_some_and(|why| why.contains("another file")) && is_refused);
    }
}
