//! A checkpoint between its headers and its bytes.

use std::fs::File;
use std::io::{self, BufRead, BufReader, ErrorKind, Read};
use std::os::unix::fs::FileExt;
use std::path::Path;

use super::read::ReadFile;
use crate::bytes::Bytes;
use crate::checkpoint::Checkpoint;
use crate::error::Error;
use crate::map::Map;
use crate::safetensors::Entry;
use crate::stamp::Stamp;

/// A file of weights of another format than safetensors, opened and mapped. Whoever knows the format reads its header and says where tensors lie.
#[derive(Debug)]
pub struct OpenFile {
    file: ReadFile,
    bytes: Bytes,
}

impl OpenFile {
    /// Opens and maps the regular file at `path`.
    ///
    /// # Errors
    /// What is there instead, or what the system says.
    pub fn open(path: &Path) -> Result<OpenFile, Error> {
        // Looked at once, before anything of it is read: what follows is checked against this length, and what changes later shows.
        let file = ReadFile::open(path)?;
        let too_long = |_| Error::io(path, "map")(ErrorKind::FileTooLarge.into());
        let len = usize::try_from(file.len).map_err(too_long)?;
        let map = Map::file(&file.buffered, len).map_err(Error::io(path, "map"))?;
        let bytes = Bytes::mapped(map, file.arriving().cloned());
        Ok(OpenFile { file, bytes })
    }

    /// The file, to read its header.
    pub fn file(&self) -> &File {
        &self.file.buffered
    }

    /// Reads the file from its beginning on, and waits for what is not there yet.
    pub fn reader(&self) -> impl BufRead {
        BufReader::with_capacity(READ, Reader { file: &self.file, at: 0 })
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.file.path
    }

    /// Its length and times as it was opened.
    pub fn stamp(&self) -> Stamp {
        self.file.stamp
    }

    /// All of it.
    pub fn bytes(&self) -> &Bytes {
        &self.bytes
    }
}

/// Bytes that a header's reader takes at once.
const READ: usize = 64 << 10;
/// Bytes that it asks for, where a file is arriving: requests for less would mostly wait.
const ASK: u64 = 4 << 20;

struct Reader<'a> {
    file: &'a ReadFile,
    at: u64,
}

impl Read for Reader<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let end = (self.at + buffer.len() as u64).min(self.file.len);
        let waited = self.file.has(&(self.at..end)).and_then(|is_there| {
            if !is_there {
                self.file.ask(&(self.at..end.max(self.at + ASK)), true);
            }
            self.file.wait_for(self.at..end)
        });
        waited.map_err(|e| io::Error::other(e.to_string()))?;
        let n = self.file.buffered.read_at(&mut buffer[..(end - self.at) as usize], self.at)?;
        self.at += n as u64;
        Ok(n)
    }
}

/// A checkpoint whose headers are read and whose files are still open: what [`super::begin`] loads. Each kind of file has its own way of making one.
#[derive(Debug)]
pub struct OpenCheckpoint {
    pub(super) checkpoint: Checkpoint,
    /// In the order of [`Checkpoint::file_sizes`].
    pub(super) files: Vec<ReadFile>,
}

impl OpenCheckpoint {
    /// Opens the safetensors of a folder.
    ///
    /// # Errors
    /// As for [`Checkpoint::open`].
    pub fn safetensors(folder: &Path) -> Result<OpenCheckpoint, Error> {
        let (checkpoint, files) = Checkpoint::open_keeping_files(folder)?;
        Ok(OpenCheckpoint { checkpoint, files })
    }

    /// The tensors of files of another format, which lie in one folder. `named`: what the user gave, for messages. Tensors of blocks are bytes: their last
    /// dimension is that of a row.
    ///
    /// # Errors
    /// A tensor that two files have, or that is not inside its file.
    pub fn of_files(named: &Path, files: Vec<(OpenFile, Vec<Entry>)>) -> Result<OpenCheckpoint, Error> {
        let (open, described): (Vec<ReadFile>, Vec<_>) =
            files.into_iter().map(|(OpenFile { file, bytes }, entries)| (file, (bytes, entries))).unzip();
        let described = open.iter().map(|file| file.path.clone()).zip(described);
        let checkpoint = Checkpoint::of_files(named, described.map(|(path, (bytes, all))| (path, bytes, all)))?;
        Ok(OpenCheckpoint { checkpoint, files: open })
    }

    /// The tensors, as views of mapped files. Closes the files.
    pub fn into_checkpoint(self) -> Checkpoint {
        self.checkpoint
    }
}
