//! The locks of Hugging Face's cache: `.locks/models--ORG--NAME/BLOB.lock`, held with `flock(2)` as `huggingface_hub` does. The kernel drops them with the process.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use crate::error::{Error, Naming, Result};

/// A held lock.
#[derive(Debug)]
pub struct Lock(File);

impl Lock {
    /// Takes the lock at `path`, which is created with its folder. `None` if another process has it.
    ///
    /// # Errors
    /// A file system without locks.
    pub fn take(path: &Path) -> Result<Option<Lock>> {
        let folder = path.parent().unwrap_or(Path::new("."));
        fs::create_dir_all(folder).naming(folder)?;
        loop {
            // Group-writable, so that the users of a shared cache can wait for each other.
            let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o664).open(path);
            let file = file.naming(path)?;
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => {}
                Err(Errno::WOULDBLOCK) => return Ok(None),
                Err(Errno::INTR) => continue,
                Err(Errno::NOSYS | Errno::NOTSUP | Errno::NOLCK) => {
                    let what = "this file system has no locks: HF_HUB_CACHE names a folder on another";
                    return Err(Error::Answer { url: path.display().to_string(), what: what.to_owned() });
                }
                Err(e) => return Err(e).naming(path),
            }
            // Whoever held it before may have removed it: then this is no longer the file that others lock.
            let held = file.metadata().naming(path)?;
            if fs::metadata(path).is_ok_and(|now| now.ino() == held.ino() && now.dev() == held.dev()) {
                return Ok(Some(Lock(file)));
            }
        }
    }

    /// Whether a process holds one of the locks in a folder.
    pub fn any_held(folder: &Path) -> bool {
        let Ok(entries) = fs::read_dir(folder) else { return false };
        let paths: Vec<PathBuf> = entries.flatten().map(|e| e.path()).collect();
        paths.iter().any(|path| matches!(Lock::take(path), Ok(None)))
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        let _ = flock(&self.0, FlockOperation::Unlock);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_holds_it_and_others_do_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(".locks/models--a--b/etag.lock");
        let first = Lock::take(&path).unwrap().unwrap();
        assert!(Lock::take(&path).unwrap().is_none());
        assert!(Lock::any_held(path.parent().unwrap()));
        drop(first);
        assert!(!Lock::any_held(path.parent().unwrap()));
        // Whoever waits for a file that its holder removed locks the new one.
        let old = Lock::take(&path).unwrap().unwrap();
        fs::remove_file(&path).unwrap();
        let new = Lock::take(&path).unwrap().unwrap();
        assert!(Lock::take(&path).unwrap().is_none());
        drop((old, new));
    }
}
