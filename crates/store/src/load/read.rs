//! One file as readers see it: its descriptors, how it may be read, and reads that continue until a chunk is complete.

use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use crate::arriving::{self, Arriving};
use crate::error::Error;
use crate::page_cache::{self, resident_bytes};
use crate::platform;
use crate::small::open_regular;
use crate::stamp::Stamp;

/// Alignment of direct reads. File systems ask for this or less; one that asks for more refuses the read.
pub const ALIGNMENT: usize = 4096;

/// Metadata that change when the file is replaced or written to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Identity {
    device: u64,
    inode: u64,
    len: u64,
    modified: (i64, i64),
}

/// Metadata of an inode: those that change with its contents, and those that may change without.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Inode {
    len: u64,
    modified: (i64, i64),
    /// Time of the last change of anything. No program can set it.
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
    arriving: Option<Arc<dyn Arriving>>,
    /// As it was when it was seen to be whole.
    arrived: OnceLock<Identity>,
}

impl ReadFile {
    pub fn open(path: &Path) -> Result<ReadFile, Error> {
        ReadFile::new(path, open_regular(path)?)
    }

    pub fn new(path: &Path, buffered: File) -> Result<ReadFile, Error> {
        let found = buffered.metadata().map_err(Error::io(path, "open"))?;
        let arriving = arriving::find(&found);
        Ok(ReadFile {
            path: path.to_owned(),
            buffered,
            len: found.len(),
            stamp: if arriving.is_some() { Stamp::without_times(&found) } else { Stamp::of(&found) },
            identity: Identity::of(&found),
            inode: Mutex::new(Inode::of(&found)),
            direct: OnceLock::new(),
            refused: AtomicBool::new(false),
            arriving,
            arrived: OnceLock::new(),
        })
    }

    /// The source of its bytes, if it was arriving when it was opened.
    pub fn arriving(&self) -> Option<&Arc<dyn Arriving>> {
        self.arriving.as_ref()
    }

    /// Whether parts of it may not be there.
    pub fn is_arriving(&self) -> bool {
        self.arriving.is_some() && self.arrived.get().is_none()
    }

    /// Whether a part is there.
    ///
    /// # Errors
    /// It never will be.
    pub fn has(&self, part: &Range<u64>) -> Result<bool, Error> {
        let has = |arriving: &Arc<dyn Arriving>| arriving.has(part).map_err(|why| arriving::error(&self.path, why));
        self.arriving.as_ref().map_or(Ok(true), has)
    }

    /// Has a part brought before the rest, if it is not there: see [`Arriving::ask`].
    pub fn ask(&self, part: &Range<u64>, waits: bool) {
        if let Some(arriving) = self.arriving.as_ref().filter(|_| self.is_arriving()) {
            arriving.ask(part, waits);
        }
    }

    /// Waits for a part, up to the file's end.
    ///
    /// # Errors
    /// It will never be there.
    pub fn wait_for(&self, part: Range<u64>) -> Result<(), Error> {
        let part = part.start.min(self.len)..part.end.min(self.len);
        let wait = |arriving: &Arc<dyn Arriving>| {
            arriving::wait(&**arriving, &part).map_err(|why| arriving::error(&self.path, why))
        };
        self.arriving.as_ref().map_or(Ok(()), wait)
    }

    /// How it is told from others: that of the file as it was opened, or as it arrived; `None` while it is arriving.
    fn identity(&self) -> Result<Option<Identity>, Error> {
        let Some(arriving) = &self.arriving else { return Ok(Some(self.identity)) };
        if self.arrived.get().is_none() && arriving.is_whole().map_err(|why| arriving::error(&self.path, why))? {
            let found = self.buffered.metadata().map_err(Error::io(&self.path, "look at"))?;
            *self.inode.lock().unwrap_or_else(|e| e.into_inner()) = Inode::of(&found);
            let _ = self.arrived.set(Identity::of(&found));
        }
        Ok(self.arrived.get().copied())
    }

    pub fn device(&self) -> u64 {
        self.identity.device
    }

    /// Opens the file once more for reads past the page cache. If that is refused, the file is read through the page cache, and the result says why.
    pub fn open_direct(&self) -> Option<String> {
        match platform::open_direct(&self.path) {
            // The name belongs to another file by now; only the open one was checked.
            Ok(file) if file.metadata().is_ok_and(|m| self.is_same(&Identity::of(&m))) => {
                let _ = self.direct.set(file);
                None
            }
            Ok(_) | Err(Error::NotAFile { .. }) => Some(self.refuse_direct("the name leads to another file now")),
            Err(Error::Io { cause, .. }) => Some(self.refuse_direct(&format!("refused at open: {cause}"))),
            Err(e) => Some(self.refuse_direct(&e.to_string())),
        }
    }

    fn is_same(&self, found: &Identity) -> bool {
        // While a file arrives, only its times change.
        let times = if self.arriving.is_some() { found.modified } else { self.identity.modified };
        *found == Identity { modified: times, ..self.identity }
    }

    /// Turns the kernel's read-ahead off, before buffered reads that should leave no trace.
    pub fn read_nothing_ahead(&self) {
        // If the advice is refused, only more stays in the page cache.
        let _ = platform::read_nothing_ahead(&self.buffered);
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

    /// Checks that neither the open file nor the file of this name has changed.
    pub fn check_unchanged(&self) -> Result<(), Error> {
        let Some(identity) = self.identity()? else { return Ok(()) };
        let now = self.buffered.metadata().map_err(Error::io(&self.path, "look at"))?;
        let named = fs::metadata(&self.path).map_err(Error::io(&self.path, "look at"))?;
        if Identity::of(&now) != identity || Identity::of(&named) != identity {
            if now.len() < self.len {
                return Err(self.error(now.len(), None));
            }
            return Err(Error::Replaced { path: self.path.clone() });
        }
        Ok(())
    }

    /// Checks by the inode that the contents have not changed since the file was opened. Call it after reading and before the bytes are used. It costs one
    /// `fstat`. Another name, link, owner or mode does not matter.
    ///
    /// # Errors
    /// When it was written to, even if its time of modification was set back, or is shorter than it was.
    pub fn check_contents(&self) -> Result<(), Error> {
        if self.identity()?.is_none() {
            return Ok(());
        }
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
        // Either the file was written to and its time set back, or something else changed: an attribute, or the name now belongs to another file.
        let renamed = || fs::metadata(&self.path).map_or(true, |m| (m.dev(), m.ino()) != (found.dev(), found.ino()));
        if now.other == known.other && !renamed() {
            return Err(Error::Replaced { path: self.path.clone() });
        }
        *known = now;
        Ok(())
    }

    /// The error of a read that stopped at `offset`. Without a `cause` the file ends there, or by now even before.
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
    /// The offset that was reached, and the system's error; no error at the file's end.
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

    /// The parts of a range that are not cached at all, in as few pieces as possible: the kernel drops a large page only whole.
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
                // It is not known which pages were cached before, so all stay.
                Err(_) => return Vec::new(),
            }
        }
        found
    }

    /// Drops what a read has brought into the page cache.
    pub fn wipe(&self, trace: &[(u64, u64)]) {
        for &(at, n) in trace {
            // Pages that cannot be dropped stay; the kernel reclaims them when it needs memory.
            let _ = page_cache::drop_cached(&self.buffered, at, n);
        }
    }
}

/// Whether the error means that the file system has no direct reads, rather than that this read failed.
pub(crate) fn refuses_direct(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EINVAL | libc::EOPNOTSUPP))
}

/// Where a short read continues: at the byte that it reached, or for a direct read at the boundary before.
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
    // A direct read that ends between two boundaries is repeated from the boundary before, as long as it makes progress.
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
