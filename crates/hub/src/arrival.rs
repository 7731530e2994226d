//! A model that can be opened while its files arrive.
//!
//! No final name ever leads to a file that is not whole. So whoever opens such a model does it through a folder of this process: links to what is there, and links
//! to descriptors (`/proc/self/fd/N`) of what is arriving. They lead to the same files when those have got their names. The folder is made where a snapshot could
//! be, below `.locks`, which other programs leave alone. Its maker holds a lock on it; who makes another removes those of processes that have ended.

use std::fs::{self, File};
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::fs::{FlockOperation, flock};

use crate::cache::RepoCache;
use crate::error::{Naming, Result};
use crate::partial::{Partial, Urgency};

/// Below `.locks`.
const FOLDER: &str = ".sluice";
/// Bytes at the beginning of each file that are fetched before all else: most headers of weights.
const HEAD: u64 = 1 << 20;

/// A file that is arriving. Clones are the same file.
#[derive(Clone, Debug)]
pub struct ArrivingFile(Arc<Partial>);

impl ArrivingFile {
    fn new(partial: &Arc<Partial>, first: u64) -> ArrivingFile {
        partial.ask(&(0..first), Urgency::Now);
        ArrivingFile(Arc::clone(partial))
    }

    /// The file: of its final length, with bytes that are not there yet.
    pub fn file(&self) -> &File {
        self.0.file()
    }

    /// Its bytes, once it is whole.
    pub fn size(&self) -> u64 {
        self.0.size()
    }

    /// Bytes that are not there yet.
    pub fn missing(&self) -> u64 {
        self.0.size().saturating_sub(self.0.written())
    }

    /// Whether the part is there.
    ///
    /// # Errors
    /// Why it never will be, or why what is there is not to be used: the transfer has ended, or the bytes are wrong.
    pub fn has(&self, part: &Range<u64>) -> Result<bool, String> {
        match self.0.fate() {
            Some(Err(why)) => Err(why.clone()),
            _ => Ok(self.0.has(part)),
        }
    }

    /// Has the part fetched before the rest: `waits` says whether somebody waits for it, or will wait after what was asked for before.
    pub fn ask(&self, part: &Range<u64>, waits: bool) {
        self.0.ask(part, if waits { Urgency::Now } else { Urgency::Soon });
    }

    /// Whether all of it is there and its sum is right.
    ///
    /// # Errors
    /// As for [`ArrivingFile::has`].
    pub fn is_whole(&self) -> Result<bool, String> {
        self.0.fate().map_or(Ok(false), |fate| fate.clone().map(|()| true))
    }
}

/// A model whose files are arriving, and can be opened: whoever reads a file has to wait for the parts that it reads.
#[derive(Debug)]
pub struct Arrival {
    /// What to open, as long as this exists.
    pub path: PathBuf,
    /// The files of weights that are not whole.
    pub files: Vec<ArrivingFile>,
    /// Files beside them, such as a large tokenizer, that have to be whole before the model is opened.
    pub before: Vec<ArrivingFile>,
    folder: Folder,
}

/// Removes the folder when it is dropped.
#[derive(Debug)]
struct Folder {
    path: PathBuf,
    _lock: File,
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.path);
    }
}

impl Arrival {
    /// The model of a commit. `files`: names, whether they are weights, and those that are arriving. The model is the file `entry`, or all of them.
    ///
    /// # Errors
    /// Where links cannot be made, or do not lead to what they should.
    pub(crate) fn new<'a>(
        cache: &RepoCache,
        commit: &str,
        files: impl Iterator<Item = (&'a str, bool, Option<&'a Arc<Partial>>)>,
        entry: Option<&str>,
    ) -> Result<Arrival> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let all = cache.locks().with_file_name(FOLDER);
        fs::create_dir_all(&all).naming(&all)?;
        sweep(&all);
        let name = format!("{}.{}", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed));
        let path = all.join(name);
        let _ = fs::remove_dir_all(&path);
        fs::create_dir(&path).naming(&path)?;
        let lock = File::open(&path).naming(&path)?;
        flock(&lock, FlockOperation::NonBlockingLockExclusive).naming(&path)?;
        let folder = Folder { path, _lock: lock };
        // As in the cache, so that the path tells which model it is.
        let repo = cache.folder().file_name().unwrap_or_default();
        let snapshot = folder.path.join(repo).join("snapshots").join(commit);
        let (mut arriving, mut before) = (Vec::new(), Vec::new());
        for (name, is_weights, partial) in files {
            let link = snapshot.join(name);
            let parent = link.parent().unwrap_or(&snapshot);
            fs::create_dir_all(parent).naming(parent)?;
            let target = match partial {
                Some(partial) => PathBuf::from(format!("/proc/self/fd/{}", partial.file().as_raw_fd())),
                None => {
                    let there = cache.snapshot(commit).join(name);
                    fs::canonicalize(&there).naming(&there)?
                }
            };
            symlink(&target, &link).naming(&link)?;
            if let Some(partial) = partial {
                let same = File::open(&link).and_then(|file| is_same(&file, partial.file())).naming(&link)?;
                if !same {
                    return Err(std::io::Error::other("the link leads to another file")).naming(&link);
                }
                let to = if is_weights { &mut arriving } else { &mut before };
                to.push(ArrivingFile::new(partial, if is_weights { HEAD } else { u64::MAX }));
            }
        }
        let path = entry.map_or_else(|| snapshot.clone(), |entry| snapshot.join(entry));
        Ok(Arrival { path, files: arriving, before, folder })
    }

    /// The folder that it makes, for messages.
    pub fn folder(&self) -> &Path {
        &self.folder.path
    }
}

fn is_same(one: &File, other: &File) -> std::io::Result<bool> {
    use std::os::unix::fs::MetadataExt;
    let (one, other) = (one.metadata()?, other.metadata()?);
    Ok((one.dev(), one.ino()) == (other.dev(), other.ino()))
}

/// Removes the folders of processes that have ended.
fn sweep(all: &Path) {
    for entry in fs::read_dir(all).into_iter().flatten().flatten() {
        let Ok(folder) = File::open(entry.path()) else { continue };
        if flock(&folder, FlockOperation::NonBlockingLockExclusive).is_ok() {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::name::Repo;

    #[test]
    fn what_arrives_is_the_same_file_before_and_after_it_has_its_name() {
        let dir = tempfile::tempdir().unwrap();
        let cache = RepoCache::new(dir.path(), &Repo::new("org", "name").unwrap());
        let commit = "0".repeat(40);
        cache.write(&cache.blob("11"), b"{}").unwrap();
        cache.link(&commit, "config.json", "11").unwrap();
        let partial = Arc::new(Partial::open(&cache.blob("22"), 10).unwrap());
        partial.reserve().unwrap();
        let files = || [("config.json", false, None), ("sub/a.gguf", true, Some(&partial))].into_iter();
        let arrival = Arrival::new(&cache, &commit, files(), Some("sub/a.gguf")).unwrap();
        assert_eq!(crate::cache::origin(&arrival.path).unwrap().0.as_str(), "org/name");
        assert_eq!(fs::metadata(&arrival.path).unwrap().len(), 10);
        assert_eq!((arrival.files[0].has(&(0..4)), arrival.files[0].is_whole()), (Ok(false), Ok(false)));
        // What is asked for at the beginning is the header.
        let mut claim = partial.claim_asked(Urgency::Now, 1 << 20).unwrap();
        claim.write(b"0123456789").unwrap();
        drop(claim);
        assert_eq!((arrival.files[0].has(&(0..10)), arrival.files[0].is_whole()), (Ok(true), Ok(false)));
        partial.finish(&cache.blob("22")).unwrap();
        assert_eq!(arrival.files[0].is_whole(), Ok(true));
        assert_eq!(fs::read(&arrival.path).unwrap(), b"0123456789");
        // Another process, or another model of this one, leaves it alone; who comes later removes what was left.
        let second = Arrival::new(&cache, &commit, files(), None).unwrap();
        let left = second.folder().with_file_name("1.0");
        fs::create_dir(&left).unwrap();
        let third = Arrival::new(&cache, &commit, files(), None).unwrap();
        assert!(arrival.folder().exists() && second.folder().exists() && !left.exists());
        assert_eq!(third.path, third.folder().join("models--org--name/snapshots").join(&commit));
        assert_eq!(fs::read(third.path.join("config.json")).unwrap(), b"{}");
        let all = third.folder().parent().unwrap().to_owned();
        drop((arrival, second, third));
        assert_eq!(fs::read_dir(all).unwrap().count(), 0);
    }
}
