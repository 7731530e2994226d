//! A folder as an object store: one that several machines mount, or a test's. Each object is a file.

use std::fs;
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use sluice_store::open_regular;

use super::store::{ObjectStore, StoreError};

/// Files that are being written. They are no objects.
const UNFINISHED: &str = "unfinished";

/// Objects as files of a folder.
#[derive(Debug)]
pub struct FolderStore {
    root: PathBuf,
    url: String,
}

fn failed(e: io::Error) -> StoreError {
    match e.kind() {
        io::ErrorKind::PermissionDenied => StoreError::Denied(e.kind().to_string()),
        io::ErrorKind::TimedOut => StoreError::Timeout,
        _ => StoreError::Failed(e.to_string()),
    }
}

/// A unique name for an unfinished file, among all processes and machines that write to the folder.
fn unfinished_name() -> io::Result<String> {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let mut random = [0; 8];
    fs::File::open("/dev/urandom")?.read_exact(&mut random)?;
    Ok(format!("{:016x}-{}", u64::from_le_bytes(random), COUNT.fetch_add(1, Ordering::Relaxed)))
}

impl FolderStore {
    /// The store in a folder. It is made when something is stored.
    pub fn new(root: &Path) -> FolderStore {
        FolderStore { root: root.to_owned(), url: format!("file://{}", root.display()) }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.root.join(name)
    }

    /// Writes an unfinished file with these bytes.
    fn write(&self, bytes: &[u8]) -> io::Result<PathBuf> {
        let folder = self.root.join(UNFINISHED);
        let path = folder.join(unfinished_name()?);
        let mut options = fs::OpenOptions::new();
        options.write(true).create_new(true).mode(0o600);
        let open = options.open(&path).or_else(|e| match e.kind() {
            io::ErrorKind::NotFound => make_folder(&folder).and_then(|()| options.open(&path)),
            _ => Err(e),
        });
        let written = open.and_then(|mut file| file.write_all(bytes));
        if let Err(e) = written {
            let _ = fs::remove_file(&path);
            return Err(e);
        }
        Ok(path)
    }

    /// Gives an unfinished file its name by `name_it`.
    fn finish(
        &self,
        bytes: &[u8],
        name: &str,
        name_it: impl Fn(&Path, &Path) -> io::Result<()>,
    ) -> io::Result<PathBuf> {
        let (from, to) = (self.write(bytes)?, self.path(name));
        let named = name_it(&from, &to).or_else(|e| match (e.kind(), to.parent()) {
            (io::ErrorKind::NotFound, Some(folder)) => make_folder(folder).and_then(|()| name_it(&from, &to)),
            _ => Err(e),
        });
        if named.is_err() {
            let _ = fs::remove_file(&from);
        }
        named.map(|()| from)
    }
}

fn make_folder(path: &Path) -> io::Result<()> {
    fs::DirBuilder::new().recursive(true).mode(0o700).create(path)
}

impl ObjectStore for FolderStore {
    fn url(&self) -> &str {
        &self.url
    }

    fn get(&self, name: &str, max: u64, _patience: Duration) -> Result<Option<Vec<u8>>, StoreError> {
        let file = match open_regular(&self.path(name)) {
            Ok(file) => file,
            Err(sluice_store::Error::Io { cause, .. }) if cause.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(sluice_store::Error::Io { cause, .. }) => return Err(failed(cause)),
            Err(e) => return Err(StoreError::Failed(e.to_string())),
        };
        let len = file.metadata().map_err(failed)?.len();
        if len > max {
            return Err(StoreError::TooLarge(len));
        }
        let mut bytes = Vec::with_capacity(len as usize);
        file.take(max).read_to_end(&mut bytes).map_err(failed)?;
        Ok(Some(bytes))
    }

    fn size(&self, name: &str, _patience: Duration) -> Result<Option<u64>, StoreError> {
        match fs::metadata(self.path(name)) {
            Ok(found) => Ok(Some(found.len())),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(failed(e)),
        }
    }

    fn put(&self, name: &str, bytes: &[u8], _patience: Duration) -> Result<(), StoreError> {
        self.finish(bytes, name, |from, to| fs::rename(from, to)).map_err(failed).map(drop)
    }

    fn create(&self, name: &str, bytes: &[u8], _patience: Duration) -> Result<bool, StoreError> {
        match self.finish(bytes, name, |from, to| fs::hard_link(from, to)) {
            Ok(unfinished) => {
                let _ = fs::remove_file(unfinished);
                Ok(true)
            }
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok(false),
            Err(e) => Err(failed(e)),
        }
    }

    fn list(
        &self,
        folder: &str,
        patience: Duration,
        take: &mut dyn FnMut(&str, u64) -> bool,
    ) -> Result<(), StoreError> {
        let until = Instant::now() + patience;
        let mut folders = vec![folder.to_owned()];
        while let Some(folder) = folders.pop() {
            let entries = match fs::read_dir(self.path(&folder)) {
                Ok(entries) => entries,
                Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
                Err(e) => return Err(failed(e)),
            };
            // In the order of names, as stores of clouds list them.
            let mut entries = entries.collect::<io::Result<Vec<_>>>().map_err(failed)?;
            entries.sort_unstable_by_key(fs::DirEntry::file_name);
            for entry in entries {
                if Instant::now() > until {
                    return Err(StoreError::Timeout);
                }
                let Ok(name) = entry.file_name().into_string() else { continue };
                let path = if folder.is_empty() { name } else { format!("{folder}/{name}") };
                // Others may remove files meanwhile.
                let Ok(found) = entry.metadata() else { continue };
                if found.is_dir() {
                    if path != UNFINISHED {
                        folders.push(path);
                    }
                } else if found.is_file() && !take(&path, found.len()) {
                    return Ok(());
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATIENCE: Duration = Duration::from_secs(5);

    #[test]
    fn objects_are_whole_or_not_there() {
        let dir = tempfile::tempdir().unwrap();
        let store = FolderStore::new(&dir.path().join("new"));
        assert_eq!(store.get("a/b", 9, PATIENCE).unwrap(), None);
        assert_eq!(store.size("a/b", PATIENCE).unwrap(), None);
        store.list("", PATIENCE, &mut |name, _| panic!("{name}")).unwrap();
        store.put("a/b", b"first", PATIENCE).unwrap();
        store.put("a/b", b"second", PATIENCE).unwrap();
        assert_eq!(store.get("a/b", 6, PATIENCE).unwrap().unwrap(), b"second");
        assert_eq!(store.get("a/b", 5, PATIENCE), Err(StoreError::TooLarge(6)));
        assert!(store.create("a/c", b"own", PATIENCE).unwrap());
        assert!(!store.create("a/c", b"another", PATIENCE).unwrap());
        assert_eq!(store.get("a/c", 9, PATIENCE).unwrap().unwrap(), b"own");
        let mut found = Vec::new();
        store
            .list("a", PATIENCE, &mut |name, size| {
                found.push((name.to_owned(), size));
                true
            })
            .unwrap();
        found.sort();
        assert_eq!(found, [("a/b".to_owned(), 6), ("a/c".to_owned(), 3)]);
        assert_eq!(fs::read_dir(dir.path().join("new").join(UNFINISHED)).unwrap().count(), 0);
        // What is no regular file is no object.
        fs::create_dir(dir.path().join("new/a/d")).unwrap();
        assert!(store.get("a/d", 9, PATIENCE).is_err());
    }
}
