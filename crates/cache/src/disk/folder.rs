//! A cache folder of this machine: one process owns it at a time, only its user may look into it, and slabs are read and written past the page cache,
//! which is left to weights.

use std::fs::{DirBuilder, File, OpenOptions, Permissions, TryLockError};
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{FallocateFlags, OFlags, fallocate, fcntl_getfl, fcntl_setfl};
use rustix::io::Errno;
use sluice_store::open_folder;

use super::Error;
use super::slot::PAGE;
use super::storage::{Storage, StoredFile};

const LOCK: &str = "lock";

/// A folder that this process owns until this is dropped.
#[derive(Debug)]
pub struct Folder {
    path: PathBuf,
    /// `None`: it is only looked at.
    lock: Option<File>,
}

impl Drop for Folder {
    /// Closing the file is not enough: a child process that is just being started has a copy of its descriptor, and so the lock, until it runs its program.
    fn drop(&mut self) {
        let _ = self.lock.as_ref().map(File::unlock);
    }
}

impl Folder {
    /// Makes the folder if it is missing, and locks it.
    ///
    /// # Errors
    /// Another process has it; a folder with something else in it; the system's.
    pub fn open(path: &Path) -> Result<Folder, Error> {
        let failed = |doing: &'static str| move |cause| Error::Folder { doing, path: path.to_owned(), cause };
        DirBuilder::new().recursive(true).mode(0o700).create(path).map_err(failed("make"))?;
        // Files in this folder may be removed, so it must be a cache folder.
        let empty = path.read_dir().map_err(failed("look through"))?.next().is_none();
        if !empty && !path.join(LOCK).is_file() {
            return Err(Error::NotACache { path: path.to_owned() });
        }
        if path.metadata().map_err(failed("look at"))?.permissions().mode() & 0o077 != 0 {
            std::fs::set_permissions(path, Permissions::from_mode(0o700)).map_err(failed("close to others"))?;
        }
        let lock = open(&path.join(LOCK), true, OFlags::empty()).map_err(failed("lock"))?;
        match lock.try_lock() {
            Ok(()) => Ok(Folder { path: path.to_owned(), lock: Some(lock) }),
            Err(TryLockError::WouldBlock) => Err(Error::InUse { path: path.to_owned() }),
            Err(TryLockError::Error(cause)) => Err(failed("lock")(cause)),
        }
    }
}

impl Folder {
    /// A folder that may be another process', to read.
    pub(super) fn look_at(path: &Path) -> Folder {
        Folder { path: path.to_owned(), lock: None }
    }
}

fn open(path: &Path, create: bool, flags: OFlags) -> io::Result<File> {
    // A pipe or a terminal may have taken a file's place. It must not be waited for, nor become the controlling terminal.
    let flags = (flags | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY).bits() as i32;
    let mut how = OpenOptions::new();
    let file = how.read(true).write(true).create(create).truncate(false).mode(0o600).custom_flags(flags).open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidData, format!("{}: not a regular file", path.display())));
    }
    // With the flag, io_uring would refuse reads that wait for the disk.
    fcntl_setfl(&file, fcntl_getfl(&file)? - OFlags::NONBLOCK)?;
    Ok(file)
}

/// For reads and writes past the page cache.
#[cfg(target_os = "linux")]
fn open_direct(path: &Path) -> io::Result<File> {
    open(path, false, OFlags::DIRECT)
}

#[cfg(target_os = "linux")]
fn read_ahead(file: &File, bytes: u64) -> io::Result<()> {
    Ok(rustix::fs::fadvise(file, 0, std::num::NonZeroU64::new(bytes), rustix::fs::Advice::WillNeed)?)
}

#[cfg(target_os = "macos")]
fn open_direct(path: &Path) -> io::Result<File> {
    let file = open(path, false, OFlags::empty())?;
    rustix::fs::fcntl_nocache(&file, true)?;
    Ok(file)
}

#[cfg(target_os = "macos")]
fn read_ahead(file: &File, bytes: u64) -> io::Result<()> {
    Ok(rustix::fs::fcntl_rdadvise(file, 0, bytes)?)
}

impl Storage for Folder {
    fn open(&self, name: &str, create: bool) -> io::Result<Arc<dyn StoredFile>> {
        let path = self.path.join(name);
        let file = open(&path, create, OFlags::empty())?;
        if !name.ends_with(".slab") {
            return Ok(Arc::new(file));
        }
        let direct = open_direct(&path).ok();
        Ok(Arc::new(SlabFile { buffered: file, direct, refused: AtomicBool::new(false) }))
    }

    fn list(&self) -> io::Result<Vec<(String, u64)>> {
        let mut files = Vec::new();
        for entry in self.path.read_dir()? {
            let entry = entry?;
            if let (Ok(name), meta) = (entry.file_name().into_string(), entry.metadata()?)
                && meta.is_file()
            {
                files.push((name, meta.len()));
            }
        }
        Ok(files)
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        std::fs::remove_file(self.path.join(name))
    }

    fn sync_names(&self) -> io::Result<()> {
        open_folder(&self.path)?.sync_all()
    }

    fn path(&self, name: &str) -> Option<PathBuf> {
        Some(self.path.join(name))
    }
}

impl StoredFile for File {
    fn size(&self) -> io::Result<u64> {
        Ok(self.metadata()?.len())
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        File::set_len(self, len)
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.read_exact_at(out, offset)
    }

    fn will_need(&self, bytes: u64) {
        // A read will report the error.
        let _ = read_ahead(self, bytes);
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.write_all_at(bytes, offset)
    }

    fn sync(&self) -> io::Result<()> {
        self.sync_data()
    }
}

/// A slab: whole pages in aligned memory go past the page cache, if the file system lets them.
#[derive(Debug)]
struct SlabFile {
    buffered: File,
    direct: Option<File>,
    refused: AtomicBool,
}

impl SlabFile {
    /// The file for a direct read or write of these bytes at this offset, if it can be direct.
    fn direct(&self, offset: u64, bytes: &[u8]) -> Option<&File> {
        let pages = [offset as usize, bytes.len(), bytes.as_ptr() as usize].iter().all(|n| n.is_multiple_of(PAGE));
        self.direct.as_ref().filter(|_| pages && !self.refused.load(Ordering::Relaxed))
    }

    /// Whether an error means that this file is not to be used directly; from here on it is not.
    fn refuses(&self, e: &io::Error) -> bool {
        let refuses = [Errno::INVAL, Errno::OPNOTSUPP].iter().any(|r| e.raw_os_error() == Some(r.raw_os_error()));
        self.refused.fetch_or(refuses, Ordering::Relaxed);
        refuses
    }
}

impl StoredFile for SlabFile {
    fn size(&self) -> io::Result<u64> {
        self.buffered.size()
    }

    /// A longer file is allocated at once, so that no write into a slab finds the disk full.
    fn set_len(&self, len: u64) -> io::Result<()> {
        let now = self.size()?;
        if len <= now {
            return File::set_len(&self.buffered, len);
        }
        match fallocate(&self.buffered, FallocateFlags::empty(), now, len - now) {
            Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL) => File::set_len(&self.buffered, len),
            other => Ok(other?),
        }
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        if let Some(file) = self.direct(offset, out) {
            match file.read_exact_at(out, offset) {
                Err(e) if self.refuses(&e) => {}
                other => return other,
            }
        }
        self.buffered.read_exact_at(out, offset)
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        if let Some(file) = self.direct(offset, bytes) {
            match file.write_all_at(bytes, offset) {
                Err(e) if self.refuses(&e) => {}
                other => return other,
            }
        }
        self.buffered.write_all_at(bytes, offset)
    }

    fn sync(&self) -> io::Result<()> {
        self.buffered.sync_data()
    }
}
