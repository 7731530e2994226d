//! Files that appear complete or not at all: written beside their place under a temporary name, synced, renamed.

use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions};
use std::hash::{BuildHasher, RandomState};
use std::io::{self, BufWriter, ErrorKind, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use crate::error::Error;

/// Bytes gathered before a write; larger pieces go straight through.
const BUFFER: usize = 1 << 20;

/// A file being written as `.NAME.tmp-RANDOM` beside its final place. [`commit`](AtomicFile::commit) puts it there; dropping it
/// removes it. Of several for one place, by whichever processes, the last to commit stays, whole.
#[derive(Debug)]
pub struct AtomicFile {
    /// `None` once committed.
    file: Option<BufWriter<File>>,
    path: PathBuf,
    temporary: PathBuf,
    /// Bytes written so far.
    len: u64,
    /// Bytes that it will have, as far as its writer knows: for messages about a full disk.
    expected: u64,
    /// A write has failed, so what the file holds is unknown.
    failed: bool,
}

impl AtomicFile {
    /// Begins a file that will stand at `path`. What stands there stays until the commit.
    pub fn create(path: &Path) -> Result<AtomicFile, Error> {
        let name = path.file_name().ok_or_else(|| Error::NotAFile { path: path.to_owned() })?;
        if path.is_dir() {
            return Err(Error::NotAFile { path: path.to_owned() });
        }
        let (file, temporary) = create_temporary(path, name, random)?;
        let file = Some(BufWriter::with_capacity(BUFFER, file));
        Ok(AtomicFile { file, path: path.to_owned(), temporary, len: 0, expected: 0, failed: false })
    }

    /// Says how long the file will be, so that a full disk can be reported with what the rest needs.
    pub(crate) fn expect(&mut self, len: u64) {
        self.expected = len;
    }

    /// The place where the file will stand.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Appends `bytes`. After an error the file can only be dropped.
    pub fn write_all(&mut self, bytes: &[u8]) -> Result<(), Error> {
        if self.failed {
            return Err(Error::Abandoned { path: self.path.clone() });
        }
        let result = self.open().write_all(bytes);
        result.map_err(|cause| self.write_error(cause, bytes.len() as u64))?;
        self.len += bytes.len() as u64;
        Ok(())
    }

    /// Writes `bytes` at `offset`, wherever the end is. A gap that this leaves reads as zeros. After an error the file can only be dropped.
    pub fn write_at(&mut self, bytes: &[u8], offset: u64) -> Result<(), Error> {
        if self.failed {
            return Err(Error::Abandoned { path: self.path.clone() });
        }
        let flushed = if self.open().buffer().is_empty() { Ok(()) } else { self.open().flush() };
        let written = flushed.and_then(|()| self.open().get_ref().write_all_at(bytes, offset));
        written.map_err(|cause| self.write_error(cause, bytes.len() as u64))?;
        self.len = self.len.max(offset + bytes.len() as u64);
        Ok(())
    }

    /// Writes the rest to disk, renames the file to its place and makes the name durable.
    pub fn commit(mut self) -> Result<(), Error> {
        if self.failed {
            return Err(Error::Abandoned { path: self.path.clone() });
        }
        let buffered = self.open().buffer().len() as u64;
        let synced = self.open().flush().and_then(|()| self.open().get_ref().sync_all());
        synced.map_err(|cause| self.write_error(cause, buffered))?;
        fs::rename(&self.temporary, &self.path).map_err(Error::io(&self.path, "rename to"))?;
        self.file = None;
        let folder = folder_of(&self.path);
        File::open(folder).and_then(|f| f.sync_all()).map_err(Error::io(folder, "sync"))
    }

    fn open(&mut self) -> &mut BufWriter<File> {
        self.file.as_mut().expect("a committed file is gone")
    }

    fn write_error(&mut self, cause: io::Error, pending: u64) -> Error {
        self.failed = true;
        let needed = self.expected.saturating_sub(self.len).max(pending);
        match cause.kind() {
            ErrorKind::StorageFull | ErrorKind::QuotaExceeded => {
                let free = free_space(folder_of(&self.path)).unwrap_or(0);
                Error::NoSpace { path: self.path.clone(), needed, free }
            }
            _ => Error::Io { path: self.path.clone(), doing: "write", cause },
        }
    }
}

impl Drop for AtomicFile {
    fn drop(&mut self) {
        if let Some(file) = self.file.take() {
            // Into its parts, so that the buffer is not flushed into a file that goes.
            drop(file.into_parts());
            let _ = fs::remove_file(&self.temporary);
        }
    }
}

/// A new file beside `path`, under a name that nobody else has.
fn create_temporary(path: &Path, name: &OsStr, random: impl Fn() -> u64) -> Result<(File, PathBuf), Error> {
    loop {
        let mut temporary = std::ffi::OsString::from(".");
        temporary.push(name);
        temporary.push(format!(".tmp-{:016x}", random()));
        let temporary = path.with_file_name(temporary);
        // `create_new` follows no symbolic link that somebody laid there, and takes no file that somebody else is writing: in another
        // container, say, where processes have the same numbers as here.
        match OpenOptions::new().write(true).create_new(true).open(&temporary) {
            Ok(file) => return Ok((file, temporary)),
            Err(e) if e.kind() == ErrorKind::AlreadyExists => {}
            Err(e) => return Err(Error::io(&temporary, "create")(e)),
        }
    }
}

/// Another number each time, from the system's randomness.
fn random() -> u64 {
    RandomState::new().hash_one(())
}

/// The folder that holds `path`.
fn folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    }
}

/// Bytes that this user may still write to the file system of `path` (which must exist). `u64::MAX` where the file system
/// keeps no count.
pub fn free_space(path: &Path) -> io::Result<u64> {
    let stat = rustix::fs::statvfs(path)?;
    Ok(if stat.f_blocks == 0 { u64::MAX } else { stat.f_bavail.saturating_mul(stat.f_frsize) })
}

/// An error unless `needed` bytes are free where `path` is to be written (its folder must exist).
pub fn check_space(path: &Path, needed: u64) -> Result<(), Error> {
    let folder = folder_of(path);
    let free = free_space(folder).map_err(Error::io(folder, "look at"))?;
    if free < needed {
        return Err(Error::NoSpace { path: path.to_owned(), needed, free });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(folder: &Path) -> Vec<String> {
        fs::read_dir(folder).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect()
    }

    #[test]
    fn a_file_stands_only_once_committed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.json");
        fs::write(&path, "old").unwrap();
        let mut file = AtomicFile::create(&path).unwrap();
        file.write_all(b"new").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"old");
        assert!(names(folder.path()).iter().any(|name| name.starts_with(".x.json.tmp-")));
        file.commit().unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"new");
        assert_eq!(names(folder.path()), ["x.json"]);
    }

    #[test]
    fn a_dropped_file_leaves_nothing_and_follows_no_link() {
        let folder = tempfile::tempdir().unwrap();
        let (path, victim) = (folder.path().join("x"), folder.path().join("victim"));
        fs::write(&victim, "kept").unwrap();
        let link = folder.path().join(".x.tmp-0000000000000005");
        std::os::unix::fs::symlink(&victim, &link).unwrap();
        let numbers = std::cell::Cell::new(4);
        let next = || numbers.replace(numbers.get() + 1) + 1;
        let (_, temporary) = create_temporary(&path, OsStr::new("x"), next).unwrap();
        assert_eq!(temporary, folder.path().join(".x.tmp-0000000000000006"));
        fs::remove_file(temporary).unwrap();
        fs::remove_file(link).unwrap();
        let mut file = AtomicFile::create(&path).unwrap();
        file.write_all(&[1; 3 << 20]).unwrap();
        drop(file);
        assert_eq!(names(folder.path()), ["victim"]);
        assert_eq!(fs::read(&victim).unwrap(), b"kept");
    }

    #[test]
    fn two_writers_with_one_process_number_each_put_their_own_whole_file_in_place() {
        // Two writers of one process stand for two containers, whose processes all have the number 1.
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x");
        let mut first = AtomicFile::create(&path).unwrap();
        first.write_all(b"the first, ").unwrap();
        let mut second = AtomicFile::create(&path).unwrap();
        second.write_all(b"half of the sec").unwrap();
        first.write_all(b"whole").unwrap();
        first.commit().unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"the first, whole");
        second.write_all(b"ond").unwrap();
        second.commit().unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"half of the second");
        assert_eq!(names(folder.path()), ["x"]);
    }

    #[test]
    fn a_full_disk_is_named_with_what_is_needed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("big");
        let error = check_space(&path, 1 << 60).unwrap_err().to_string();
        assert!(error.contains("big: no space left: needs 1152921504606846976 bytes"), "{error}");
        check_space(&path, 1).unwrap();
    }

    #[test]
    fn a_failed_write_is_not_committed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x");
        let mut file = AtomicFile::create(&path).unwrap();
        // /dev/full answers every write with ENOSPC.
        file.file = Some(BufWriter::new(OpenOptions::new().write(true).open("/dev/full").unwrap()));
        let error = file.write_all(&[0; 100_000]).unwrap_err();
        assert!(matches!(error, Error::NoSpace { needed: 100_000, .. }), "{error}");
        assert!(matches!(file.write_all(b"more"), Err(Error::Abandoned { .. })));
        assert!(matches!(file.commit(), Err(Error::Abandoned { .. })));
        assert!(names(folder.path()).is_empty());
    }
}
