//! Files that appear complete or not at all: written beside their place under a temporary name, synced, renamed.
//!
//! A rename replaces whatever has the name. So other kinds of files are handled first: a symbolic link stays, and the file that it points to is replaced; a
//! pipe or a character device is written to directly.

use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions};
use std::hash::{BuildHasher, RandomState};
use std::io::{self, BufWriter, ErrorKind, Write};
use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;

use crate::error::Error;
use crate::small::open_folder;

/// Bytes gathered before a write; larger pieces go straight through.
const BUFFER: usize = 1 << 20;
/// As many symbolic links as the kernel follows.
const LINKS: usize = 40;

/// A file being written as `.NAME.tmp-RANDOM` beside its final place. [`commit`](AtomicFile::commit) puts it there; dropping it removes it. If several
/// processes write the same file, the last commit wins, whole. A pipe or a device is written to at once, and nothing can be taken back.
#[derive(Debug)]
pub struct AtomicFile {
    /// `None` once committed.
    file: Option<BufWriter<File>>,
    path: PathBuf,
    /// `None` for a pipe or a device.
    temporary: Option<PathBuf>,
    /// Bytes written so far.
    len: u64,
    /// Expected length in bytes, for messages about a full disk.
    expected: u64,
    /// A write has failed, so what the file holds is unknown.
    failed: bool,
}

impl AtomicFile {
    /// Begins a file for `path`, or for the target of a symbolic link there. The old file stays until the commit.
    ///
    /// # Errors
    /// A folder, a block device or a socket at `path`; a pipe that nobody reads; errors of the system.
    pub fn create(path: &Path) -> Result<AtomicFile, Error> {
        let path = match Destination::of(path)? {
            Destination::Stream(file) => {
                let file = Some(BufWriter::with_capacity(BUFFER, file));
                let path = path.to_owned();
                return Ok(AtomicFile { file, path, temporary: None, len: 0, expected: 0, failed: false });
            }
            Destination::File(path) => path,
        };
        let name = path.file_name().ok_or_else(|| Error::NotAFile { path: path.clone() })?;
        let (file, temporary) = create_temporary(&path, name, random)?;
        let file = Some(BufWriter::with_capacity(BUFFER, file));
        Ok(AtomicFile { file, path, temporary: Some(temporary), len: 0, expected: 0, failed: false })
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
    ///
    /// # Errors
    /// Those of a write, and that a pipe or a device has no offsets.
    pub fn write_at(&mut self, bytes: &[u8], offset: u64) -> Result<(), Error> {
        if self.failed {
            return Err(Error::Abandoned { path: self.path.clone() });
        }
        if self.temporary.is_none() {
            self.failed = true;
            return Err(Error::NotAFile { path: self.path.clone() });
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
        let Some(temporary) = self.temporary.clone() else {
            let flushed = self.open().flush();
            return flushed.map_err(|cause| self.write_error(cause, buffered));
        };
        let synced = self.open().flush().and_then(|()| self.open().get_ref().sync_all());
        synced.map_err(|cause| self.write_error(cause, buffered))?;
        fs::rename(temporary, &self.path).map_err(Error::io(&self.path, "rename to"))?;
        self.file = None;
        let folder = folder_of(&self.path);
        open_folder(folder).and_then(|f| f.sync_all()).map_err(Error::io(folder, "sync"))
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
            // Taken apart, so that the buffer is not flushed into a file that is about to be deleted.
            drop(file.into_parts());
            if let Some(temporary) = &self.temporary {
                let _ = fs::remove_file(temporary);
            }
        }
    }
}

/// The place that an output path leads to.
enum Destination {
    /// A regular file, existing or not, which a rename replaces.
    File(PathBuf),
    /// A pipe, a character device or an open descriptor, ready to be written to.
    Stream(File),
}

impl Destination {
    fn of(path: &Path) -> Result<Destination, Error> {
        let mut place = path.to_owned();
        for _ in 0..LINKS {
            if !fs::symlink_metadata(&place).is_ok_and(|m| m.is_symlink()) {
                break;
            }
            // `/dev/stdout` and the like lead here. A regular file behind a descriptor is appended to: a new file of the same name would not be seen through
            // the descriptor.
            if folder_of(&place).canonicalize().is_ok_and(|f| f.starts_with("/proc")) {
                return stream(path).map(Destination::Stream);
            }
            let target = fs::read_link(&place).map_err(Error::io(path, "look at"))?;
            place = folder_of(&place).join(target);
        }
        match fs::symlink_metadata(&place) {
            Ok(m) if m.is_file() => Ok(Destination::File(place)),
            Ok(m) if m.file_type().is_fifo() || m.file_type().is_char_device() => stream(path).map(Destination::Stream),
            // A disk is never meant as an output file, and a socket cannot be opened.
            Ok(_) => Err(Error::NotAFile { path: path.to_owned() }),
            Err(e) if e.kind() == ErrorKind::NotFound => Ok(Destination::File(place)),
            Err(e) => Err(Error::io(path, "look at")(e)),
        }
    }
}

/// Opens a pipe or a device for writing. A pipe without a reader is an error, since waiting for one would look like hanging.
fn stream(path: &Path) -> Result<File, Error> {
    let flags = (OFlags::NONBLOCK | OFlags::NOCTTY).bits();
    let file = OpenOptions::new().append(true).custom_flags(flags.cast_signed()).open(path);
    let file = file.map_err(|cause| match rustix::io::Errno::from_io_error(&cause) {
        Some(rustix::io::Errno::NXIO) => io::Error::new(cause.kind(), "nobody has it open for reading"),
        _ => cause,
    });
    let file = file.map_err(Error::io(path, "open"))?;
    // From here on writes block until a slow reader has read.
    rustix::fs::fcntl_getfl(&file)
        .and_then(|flags| rustix::fs::fcntl_setfl(&file, flags - OFlags::NONBLOCK))
        .map_err(|e| Error::io(path, "open")(e.into()))?;
    Ok(file)
}

/// A new file beside `path`, under a name that nobody else has.
fn create_temporary(path: &Path, name: &OsStr, random: impl Fn() -> u64) -> Result<(File, PathBuf), Error> {
    loop {
        let mut temporary = std::ffi::OsString::from(".");
        temporary.push(name);
        temporary.push(format!(".tmp-{:016x}", random()));
        let temporary = path.with_file_name(temporary);
        // `create_new` follows no symbolic link, and takes no file that another process is writing, even one in another container with the same process number.
        match OpenOptions::new().write(true).create_new(true).open(&temporary) {
            Ok(file) => return Ok((file, temporary)),
            Err(e) if e.kind() == ErrorKind::AlreadyExists => {}
            Err(e) => return Err(Error::io(&temporary, "create")(e)),
        }
    }
}

/// A random number from the system.
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

    fn write(path: &Path, bytes: &[u8]) -> Result<(), Error> {
        let mut file = AtomicFile::create(path)?;
        file.write_all(bytes)?;
        file.commit()
    }

    #[test]
    fn a_symbolic_link_stays_and_its_target_is_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        fs::create_dir(at("elsewhere")).unwrap();
        fs::write(at("elsewhere/real"), "old").unwrap();
        let link = |target: &str, name: &str| std::os::unix::fs::symlink(target, at(name)).unwrap();
        link("elsewhere/real", "link");
        link("link", "link-to-link");
        link("elsewhere/new", "link-to-nothing");
        for (name, real) in [("link", "real"), ("link-to-link", "real"), ("link-to-nothing", "new")] {
            write(&at(name), name.as_bytes()).unwrap();
            assert!(fs::symlink_metadata(at(name)).unwrap().is_symlink(), "{name}");
            assert_eq!(fs::read_to_string(at("elsewhere").join(real)).unwrap(), name);
        }
        link("ring", "ring");
        write(&at("ring"), b"x").unwrap_err();
        link("elsewhere", "folder");
        assert!(matches!(AtomicFile::create(&at("folder")), Err(Error::NotAFile { .. })));
    }

    #[test]
    fn a_pipe_is_written_to_and_stays() {
        let folder = tempfile::tempdir().unwrap();
        let pipe = folder.path().join("pipe");
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
        let error = write(&pipe, b"x").unwrap_err().to_string();
        assert!(error.contains("pipe: cannot open: nobody has it open for reading"), "{error}");
        // More than a pipe holds: a reader that is slower than us is waited for.
        let text = vec![b'x'; 300_000];
        let read = std::thread::spawn({
            let pipe = pipe.clone();
            move || fs::read(pipe).unwrap()
        });
        let mut file = AtomicFile::create(&pipe);
        while matches!(&file, Err(Error::Io { .. })) {
            std::thread::yield_now(); // until the reader is there
            file = AtomicFile::create(&pipe);
        }
        let mut file = file.unwrap();
        file.write_all(&text).unwrap();
        file.commit().unwrap();
        assert_eq!(read.join().unwrap(), text);
        assert!(fs::symlink_metadata(&pipe).unwrap().file_type().is_fifo());
        assert_eq!(names(folder.path()), ["pipe"]);
    }

    #[test]
    fn a_device_is_written_to_and_stays() {
        let folder = tempfile::tempdir().unwrap();
        let link = folder.path().join("link");
        std::os::unix::fs::symlink("/dev/null", &link).unwrap();
        write(&link, b"x").unwrap();
        assert!(fs::metadata(&link).unwrap().file_type().is_char_device());
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        // One of our own, which only root may make.
        let null = folder.path().join("null");
        let (kind, number) = (rustix::fs::FileType::CharacterDevice, rustix::fs::makedev(1, 3));
        if rustix::fs::mknodat(rustix::fs::CWD, &null, kind, 0o600.into(), number).is_err() {
            eprintln!("SKIPPED in part: only root makes devices");
            return;
        }
        write(&null, b"x").unwrap();
        assert!(fs::symlink_metadata(&null).unwrap().file_type().is_char_device());
        let mut file = AtomicFile::create(&null).unwrap();
        assert!(matches!(file.write_at(b"x", 0), Err(Error::NotAFile { .. })));
    }

    #[test]
    fn a_file_behind_a_descriptor_is_written_to_at_its_end() {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), "first ").unwrap();
        let descriptor = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(file.as_file()));
        write(Path::new(&descriptor), b"second").unwrap();
        assert_eq!(fs::read(file.path()).unwrap(), b"first second");
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
