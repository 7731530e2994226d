//! The files of a cache folder, as slabs and the index see them: one thin layer, so that tests can take a disk away at any instant below both.

use std::fmt::Debug;
use std::fs::{DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The files of one folder, by name.
pub trait Storage: Debug + Send + Sync {
    /// Opens a file; with `create` it is made if it is not there.
    ///
    /// # Errors
    /// The system's.
    fn open(&self, name: &str, create: bool) -> io::Result<Arc<dyn StoredFile>>;
    /// Names and lengths of all files.
    ///
    /// # Errors
    /// The system's.
    fn list(&self) -> io::Result<Vec<(String, u64)>>;
    /// # Errors
    /// The system's.
    fn remove(&self, name: &str) -> io::Result<()>;
    /// Returns once names that were made or removed will stay so.
    ///
    /// # Errors
    /// The system's.
    fn sync_names(&self) -> io::Result<()>;
}

/// A file at whose places is read and written.
pub trait StoredFile: Debug + Send + Sync {
    /// # Errors
    /// The system's.
    fn size(&self) -> io::Result<u64>;
    /// # Errors
    /// The system's; a disk that is full.
    fn set_len(&self, len: u64) -> io::Result<()>;
    /// Fills `out`.
    ///
    /// # Errors
    /// The system's; a file that ends before.
    fn read_at(&self, offset: u64, out: &mut [u8]) -> io::Result<()>;
    /// Writes all of `bytes`.
    ///
    /// # Errors
    /// The system's.
    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()>;
    /// Returns once all that was written, and the length, will stay so.
    ///
    /// # Errors
    /// The system's.
    fn sync(&self) -> io::Result<()>;
}

/// A folder of this machine, which only its owner may look into.
#[derive(Debug)]
pub struct Folder {
    path: PathBuf,
}

impl Folder {
    /// Makes the folder where it is missing.
    ///
    /// # Errors
    /// The system's.
    pub fn open(path: &Path) -> io::Result<Folder> {
        DirBuilder::new().recursive(true).mode(0o700).create(path)?;
        Ok(Folder { path: path.to_owned() })
    }
}

impl Storage for Folder {
    fn open(&self, name: &str, create: bool) -> io::Result<Arc<dyn StoredFile>> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(create).truncate(false).mode(0o600);
        Ok(Arc::new(options.open(self.path.join(name))?))
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
        File::open(&self.path)?.sync_all()
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

    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.write_all_at(bytes, offset)
    }

    fn sync(&self) -> io::Result<()> {
        self.sync_data()
    }
}
