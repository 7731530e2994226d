//! Reads small files whole: configs, tokenizers, templates, conversations. They are untrusted. A pipe, a device or a folder in a file's place is refused before
//! it is opened: opening a pipe waits for a writer, and opening a device may do anything. A file above its limit is refused, even one that grows while it is
//! read.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::{OFlags, fcntl_setfl};

use crate::error::Error;

/// The most bytes of a JSON file of settings. Enough for one that names the precision of each of 100,000 modules.
pub const MAX_SETTINGS: u64 = 16 << 20;

/// The bytes of the regular file at `path` (a link to one will do), which has at most `limit` of them.
///
/// # Errors
/// [`Error::NotAFile`], [`Error::TooLarge`], or what the system says: a missing file is an [`Error::Io`] whose cause is `NotFound`.
pub fn read_small(path: &Path, limit: u64) -> Result<Vec<u8>, Error> {
    let mut bytes = Vec::new();
    open_small(path, limit)?.take(limit + 1).read_to_end(&mut bytes).map_err(Error::io(path, "read"))?;
    // The file may have grown.
    if bytes.len() as u64 > limit {
        return Err(Error::TooLarge { path: path.to_owned(), limit });
    }
    Ok(bytes)
}

/// Opens such a file, for callers that do not need all of it at once. It may still grow.
pub fn open_small(path: &Path, limit: u64) -> Result<File, Error> {
    let file = open_regular(path)?;
    if file.metadata().map_err(Error::io(path, "open"))?.len() > limit {
        return Err(Error::TooLarge { path: path.to_owned(), limit });
    }
    Ok(file)
}

/// The regular file at `path` (a link to one will do), of any size, opened for reading. Never waits for a pipe's writer, even if the pipe takes the file's place
/// meanwhile.
///
/// # Errors
/// [`Error::NotAFile`], or what the system says.
pub fn open_regular(path: &Path) -> Result<File, Error> {
    open_regular_with(path, OFlags::empty())
}

/// The same with more flags.
pub(crate) fn open_regular_with(path: &Path, flags: OFlags) -> Result<File, Error> {
    let refuse = || Error::NotAFile { path: path.to_owned() };
    if !fs::metadata(path).map_err(Error::io(path, "open"))?.is_file() {
        return Err(refuse());
    }
    let non_blocking = (flags | OFlags::NONBLOCK | OFlags::NOCTTY).bits().cast_signed();
    let file = OpenOptions::new().read(true).custom_flags(non_blocking).open(path);
    let file = file.map_err(Error::io(path, "open"))?;
    if !file.metadata().map_err(Error::io(path, "open"))?.is_file() {
        return Err(refuse());
    }
    // With the flag, io_uring would refuse reads that wait for the disk.
    fcntl_setfl(&file, flags).map_err(|e| Error::io(path, "open")(e.into()))?;
    Ok(file)
}

/// The bytes of a file that the user names on the command line: a regular file, or a pipe that somebody writes to, as a shell's `<(COMMAND)` makes them. At most
/// `limit` bytes.
///
/// # Errors
/// As for [`read_small`]; a pipe without a writer, since waiting for one could not be told from hanging.
pub fn read_named(path: &Path, limit: u64) -> Result<Vec<u8>, Error> {
    if !fs::metadata(path).map_err(Error::io(path, "open"))?.file_type().is_fifo() {
        return read_small(path, limit);
    }
    let pipe = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY).open(path);
    let pipe = pipe.map_err(Error::io(path, "open"))?;
    if !pipe.metadata().map_err(Error::io(path, "open"))?.file_type().is_fifo() {
        return Err(Error::NotAFile { path: path.to_owned() });
    }
    // From here on reads wait for the writer. Without one, the first read is the end.
    fcntl_setfl(&pipe, OFlags::empty()).map_err(|e| Error::io(path, "open")(e.into()))?;
    let mut bytes = Vec::new();
    pipe.take(limit + 1).read_to_end(&mut bytes).map_err(Error::io(path, "read"))?;
    if bytes.is_empty() {
        let cause = io::Error::new(io::ErrorKind::UnexpectedEof, "nobody writes to this pipe");
        return Err(Error::io(path, "read")(cause));
    }
    if bytes.len() as u64 > limit {
        return Err(Error::TooLarge { path: path.to_owned(), limit });
    }
    Ok(bytes)
}

/// Opens a folder, to sync or lock it. Anything else is an error; a pipe is never waited for.
pub fn open_folder(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).custom_flags(libc::O_DIRECTORY).open(path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{ErrorKind, Write};

    #[test]
    fn pipes_devices_folders_and_large_files_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("small");
        assert!(matches!(read_small(&path, 3), Err(Error::Io { cause, .. }) if cause.kind() == ErrorKind::NotFound));
        fs::write(&path, "abc").unwrap();
        assert_eq!(read_small(&path, 3).unwrap(), b"abc");
        let error = read_small(&path, 2).unwrap_err().to_string();
        assert!(error.contains("small: above the limit of 2 bytes"), "{error}");
        // A hole of a terabyte is refused without being read.
        File::options().write(true).open(&path).unwrap().set_len(1 << 40).unwrap();
        assert!(matches!(read_small(&path, 1000), Err(Error::TooLarge { .. })));
        let link = dir.path().join("link");
        std::os::unix::fs::symlink("/dev/zero", &link).unwrap();
        let pipe = dir.path().join("pipe");
        rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, rustix::fs::Mode::RUSR).unwrap();
        for path in [dir.path(), &link, &pipe, Path::new("/dev/null")] {
            assert!(matches!(read_small(path, 1000), Err(Error::NotAFile { .. })), "{}", path.display());
            assert!(matches!(open_regular(path), Err(Error::NotAFile { .. })), "{}", path.display());
        }
        assert!(open_folder(&pipe).is_err() && open_folder(dir.path()).is_ok());
    }

    #[test]
    fn a_pipe_that_is_named_is_read_if_somebody_writes_to_it() {
        let dir = tempfile::tempdir().unwrap();
        let [pipe, file] = ["pipe", "file"].map(|name| dir.path().join(name));
        rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR).unwrap();
        let error = read_named(&pipe, 10).unwrap_err().to_string();
        assert!(error.contains("nobody writes to this pipe"), "{error}");
        let write = |text: &str| {
            // A reader of its own, so that opening it for writing does not wait.
            let both = File::options().read(true).write(true).open(&pipe).unwrap();
            let writer = File::options().write(true).open(&pipe).unwrap();
            (&both).write_all(text.as_bytes()).unwrap();
            let path = pipe.clone();
            let reader = std::thread::spawn(move || read_named(&path, 10));
            // The writers stay until the reader is there: a pipe that nobody has open forgets what was written.
            while rustix::io::ioctl_fionread(&both).unwrap() == text.len() as u64 {
                std::thread::yield_now();
            }
            drop((both, writer));
            reader.join().unwrap()
        };
        assert_eq!(write("abc").unwrap(), b"abc");
        assert!(matches!(write("more than ten"), Err(Error::TooLarge { limit: 10, .. })));
        fs::write(&file, "abc").unwrap();
        assert_eq!(read_named(&file, 10).unwrap(), b"abc");
        assert!(matches!(read_named(Path::new("/dev/zero"), 10), Err(Error::NotAFile { .. })));
    }

    /// A pipe that takes a file's place between the look and the opening.
    #[test]
    fn a_pipe_that_is_swapped_in_is_not_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let [path, file, pipe] = ["x", "file", "pipe"].map(|name| dir.path().join(name));
        fs::write(&file, "abc").unwrap();
        rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, rustix::fs::Mode::RUSR).unwrap();
        let over = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let swap = |from: &Path| {
                    let next = dir.path().join("next");
                    fs::hard_link(from, &next).unwrap();
                    fs::rename(next, &path).unwrap();
                };
                while !over.load(std::sync::atomic::Ordering::Relaxed) {
                    swap(&file);
                    swap(&pipe);
                }
            });
            let (mut read, mut refused) = (0, 0);
            while read < 100 || refused < 100 {
                match read_small(&path, 1000) {
                    Ok(bytes) => read += usize::from(bytes == b"abc"),
                    Err(Error::NotAFile { .. }) => refused += 1,
                    Err(Error::Io { cause, .. }) if cause.kind() == ErrorKind::NotFound => {}
                    Err(e) => panic!("{e}"),
                }
            }
            over.store(true, std::sync::atomic::Ordering::Relaxed);
        });
    }
}
