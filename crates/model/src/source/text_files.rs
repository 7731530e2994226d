//! The small files of a model beside its weights: tokenizer, chat template, generation defaults.

use std::fs;
use std::io::{self, Cursor, ErrorKind, Read, Seek};
use std::path::{Path, PathBuf};

use sluice_store::{Error, open_small, read_small};

/// A small file opened for reading.
pub trait TextFile: Read + Seek {}

impl<T: Read + Seek> TextFile for T {}

/// The small files of a model, under the names that they have in a Hugging Face folder: `tokenizer.json`, `generation_config.json`,
/// `1_Pooling/config.json`. A folder is the plain case. A format that keeps the same facts in its own file answers with text in Hugging Face's form.
pub trait TextFiles: Send + Sync {
    /// The contents of file `name`.
    ///
    /// # Errors
    /// A missing file is an [`Error::Io`] whose cause is `NotFound`; a file above `limit` bytes is an [`Error::TooLarge`].
    fn read(&self, name: &str, limit: u64) -> Result<Vec<u8>, Error>;

    /// The same file opened, for readers that do not need all of it at once.
    ///
    /// # Errors
    /// As for [`TextFiles::read`].
    fn open(&self, name: &str, limit: u64) -> Result<Box<dyn TextFile>, Error> {
        Ok(Box::new(Cursor::new(self.read(name, limit)?)))
    }

    /// Names and sizes in bytes of the regular files in the subfolder `folder` (empty: beside the weights), in any order; none where there is no such
    /// subfolder.
    ///
    /// # Errors
    /// What the system says while it lists them.
    fn list(&self, folder: &str) -> io::Result<Vec<(String, u64)>>;

    /// What messages call file `name`.
    fn locate(&self, name: &str) -> PathBuf;

    /// A hash that changes with every byte that the text of file `name` is made of, where that is far cheaper than the text: a key for caches of what is
    /// compiled from it. `None`: hash the text itself.
    fn fingerprint(&self, _name: &str) -> Option<u128> {
        None
    }

    /// Whether there is a file `name`, readable or not.
    fn has(&self, name: &str) -> bool {
        !self.open(name, u64::MAX).is_err_and(|e| is_missing(&e))
    }
}

/// A folder of files.
impl TextFiles for Path {
    fn read(&self, name: &str, limit: u64) -> Result<Vec<u8>, Error> {
        read_small(&self.join(name), limit)
    }

    fn open(&self, name: &str, limit: u64) -> Result<Box<dyn TextFile>, Error> {
        Ok(Box::new(open_small(&self.join(name), limit)?))
    }

    fn list(&self, folder: &str) -> io::Result<Vec<(String, u64)>> {
        let Ok(entries) = fs::read_dir(self.join(folder)) else { return Ok(Vec::new()) };
        let mut files = Vec::new();
        for entry in entries {
            let entry = entry?;
            if let Some(found) = fs::metadata(entry.path()).ok().filter(fs::Metadata::is_file) {
                files.push((entry.file_name().to_string_lossy().into_owned(), found.len()));
            }
        }
        Ok(files)
    }

    fn locate(&self, name: &str) -> PathBuf {
        self.join(name)
    }
}

impl TextFiles for PathBuf {
    fn read(&self, name: &str, limit: u64) -> Result<Vec<u8>, Error> {
        self.as_path().read(name, limit)
    }

    fn open(&self, name: &str, limit: u64) -> Result<Box<dyn TextFile>, Error> {
        TextFiles::open(self.as_path(), name, limit)
    }

    fn list(&self, folder: &str) -> io::Result<Vec<(String, u64)>> {
        self.as_path().list(folder)
    }

    fn locate(&self, name: &str) -> PathBuf {
        self.as_path().locate(name)
    }
}

impl<T: TextFiles + ?Sized> TextFiles for &T {
    fn read(&self, name: &str, limit: u64) -> Result<Vec<u8>, Error> {
        (**self).read(name, limit)
    }

    fn open(&self, name: &str, limit: u64) -> Result<Box<dyn TextFile>, Error> {
        (**self).open(name, limit)
    }

    fn list(&self, folder: &str) -> io::Result<Vec<(String, u64)>> {
        (**self).list(folder)
    }

    fn locate(&self, name: &str) -> PathBuf {
        (**self).locate(name)
    }

    fn fingerprint(&self, name: &str) -> Option<u128> {
        (**self).fingerprint(name)
    }
}

/// Whether the error says that there is no such file.
pub fn is_missing(error: &Error) -> bool {
    matches!(error, Error::Io { cause, .. } if cause.kind() == ErrorKind::NotFound)
}
