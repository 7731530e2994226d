//! A folder as it is, looked at beside the process that uses it.
//!
//! The index is copied to memory between two looks at its first page. A transaction changes that page last, when all of its other pages are durable, and it writes them to
//! places that the one before does not use. So a copy whose first page did not change meanwhile holds the last transaction, whole. A slab is named in the index after it is
//! made, and no longer when it is unlinked; so those that the copy names are listed. What the owner writes in between are slots, which are not looked at.
//!
//! Nothing is written to the folder. What a cache over this changes, it changes in the copy.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use super::error::{Error, io};
use super::index::NAME;
use super::secret::SECRET;
use super::slot::PAGE;
use super::storage::{Storage, StoredFile};

/// How often it is tried while transactions come in between, and the pause before another try.
const TRIES: u32 = 50;
const PAUSE: Duration = Duration::from_millis(20);
/// The most bytes of an index that is copied.
const MOST: u64 = 2 << 30;

/// Copies of the small files, and what is known of slabs.
#[derive(Debug)]
pub struct Snapshot(Mutex<BTreeMap<String, Arc<Copy>>>);

/// A file: its length, and its bytes unless it is a slab.
#[derive(Debug)]
struct Copy(Mutex<(u64, Option<Vec<u8>>)>);

impl Copy {
    fn new(len: u64, bytes: Option<Vec<u8>>) -> Arc<Copy> {
        Arc::new(Copy(Mutex::new((len, bytes))))
    }

    fn lock(&self) -> MutexGuard<'_, (u64, Option<Vec<u8>>)> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Snapshot {
    /// Copies what is in the folder at `path`, which is `folder` to read.
    ///
    /// # Errors
    /// [`Error::InUse`] where transactions come too fast; the system's.
    pub fn take(path: &Path, folder: &dyn Storage) -> Result<Snapshot, Error> {
        for _ in 0..TRIES {
            match attempt(folder) {
                Ok(Some(files)) => return Ok(Snapshot(Mutex::new(files))),
                Ok(None) => {}
                // A slab was unlinked, or the index became shorter.
                Err(e) if [io::ErrorKind::NotFound, io::ErrorKind::UnexpectedEof].contains(&e.kind()) => {}
                Err(e) => return Err(io("looking at")(e)),
            }
            thread::sleep(PAUSE);
        }
        Err(Error::InUse { path: path.to_owned() })
    }

    fn files(&self) -> MutexGuard<'_, BTreeMap<String, Arc<Copy>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// All files, unless a transaction came in between.
fn attempt(folder: &dyn Storage) -> io::Result<Option<BTreeMap<String, Arc<Copy>>>> {
    let mut files = BTreeMap::new();
    let whole = |name: &str| -> io::Result<Option<Vec<u8>>> {
        let file = match folder.open(name, false) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            file => file?,
        };
        let len = file.size()?;
        if len > MOST {
            return Err(io::Error::other(format!("{name}: {len} bytes are too many to look at beside its owner")));
        }
        let mut bytes = vec![0; len as usize];
        file.read_at(0, &mut bytes)?;
        Ok(Some(bytes))
    };
    let first_page = || -> io::Result<Option<Vec<u8>>> {
        let Ok(file) = folder.open(NAME, false) else { return Ok(None) };
        let mut page = vec![0; PAGE.min(file.size()? as usize)];
        file.read_at(0, &mut page)?;
        Ok(Some(page))
    };
    let before = first_page()?;
    for name in [SECRET, NAME] {
        if let Some(bytes) = whole(name)? {
            files.insert(name.to_owned(), Copy::new(bytes.len() as u64, Some(bytes)));
        }
    }
    for (name, len) in folder.list()? {
        if name.ends_with(".slab") {
            files.insert(name, Copy::new(len, None));
        }
    }
    let is_same = before == first_page()?;
    Ok(is_same.then_some(files))
}

impl Storage for Snapshot {
    fn open(&self, name: &str, create: bool) -> io::Result<Arc<dyn StoredFile>> {
        let mut files = self.files();
        if create {
            files.entry(name.to_owned()).or_insert_with(|| Copy::new(0, Some(Vec::new())));
        }
        files.get(name).map(|copy| Arc::clone(copy) as Arc<dyn StoredFile>).ok_or(io::ErrorKind::NotFound.into())
    }

    fn list(&self) -> io::Result<Vec<(String, u64)>> {
        Ok(self.files().iter().map(|(name, copy)| (name.clone(), copy.lock().0)).collect())
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        self.files().remove(name).map(drop).ok_or(io::ErrorKind::NotFound.into())
    }

    fn sync_names(&self) -> io::Result<()> {
        Ok(())
    }
}

impl StoredFile for Copy {
    fn size(&self) -> io::Result<u64> {
        Ok(self.lock().0)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        let mut copy = self.lock();
        copy.0 = len;
        copy.1.as_mut().into_iter().for_each(|bytes| bytes.resize(len as usize, 0));
        Ok(())
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let copy = self.lock();
        let bytes = copy.1.as_ref().ok_or(io::ErrorKind::Unsupported)?;
        let end = (offset as usize).checked_add(out.len()).ok_or(io::ErrorKind::UnexpectedEof)?;
        out.copy_from_slice(bytes.get(offset as usize..end).ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }

    fn write_at(&self, offset: u64, new: &[u8]) -> io::Result<()> {
        let mut copy = self.lock();
        let (len, bytes) = &mut *copy;
        let bytes = bytes.as_mut().ok_or(io::ErrorKind::Unsupported)?;
        let end = (offset as usize).checked_add(new.len()).ok_or(io::ErrorKind::StorageFull)?;
        if bytes.len() < end {
            bytes.resize(end, 0);
            *len = end as u64;
        }
        bytes[offset as usize..end].copy_from_slice(new);
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }
}
