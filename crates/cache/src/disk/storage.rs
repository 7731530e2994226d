//! The files of a cache folder, as slabs and the index see them. One thin layer, so that tests can take the disk away
//! at any instant.

use std::fmt::Debug;
use std::io;
use std::path::PathBuf;
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
    /// Makes created and removed names durable.
    ///
    /// # Errors
    /// The system's.
    fn sync_names(&self) -> io::Result<()>;
    /// The path of a file, if it is in a folder of this machine: it is then read with the readers of weights.
    fn path(&self, _name: &str) -> Option<PathBuf> {
        None
    }
}

/// A file that is read and written at any offset.
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
    /// Hints that so many bytes from the beginning will be read soon.
    fn will_need(&self, _bytes: u64) {}
    /// Writes all of `bytes`.
    ///
    /// # Errors
    /// The system's.
    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()>;
    /// Makes all that was written, and the length, durable.
    ///
    /// # Errors
    /// The system's.
    fn sync(&self) -> io::Result<()>;
}
