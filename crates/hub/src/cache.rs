//! The cache that Hugging Face's programs share: of each repository `refs` (a branch's commit), `blobs` (files by their checksum) and `snapshots` (a commit's
//! files, as relative links to blobs).

use std::fs::{self, File};
use std::io::{ErrorKind, Read};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use crate::error::{Error, Naming, Result};
use crate::name::{Repo, is_commit, is_relative};
use crate::partial::sync_folder;

/// The most bytes of a reference; a commit has forty.
const MAX_REFERENCE: u64 = 1024;
/// The most bytes of a file that is read whole: an index of shards, a config.
pub(crate) const MAX_SMALL: u64 = 64 << 20;
/// Folders inside a snapshot that are looked into.
const DEPTH: usize = 3;

/// A repository's part of the cache.
#[derive(Clone, Debug)]
pub struct RepoCache {
    cache: PathBuf,
    folder: PathBuf,
    repo: Repo,
}

impl RepoCache {
    /// The part of `repo`, whether or not there is one.
    pub fn new(cache: &Path, repo: &Repo) -> RepoCache {
        RepoCache { cache: cache.to_owned(), folder: cache.join(repo.folder()), repo: repo.clone() }
    }

    /// `models--ORG--NAME`.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// A blob's path.
    pub fn blob(&self, hex: &str) -> PathBuf {
        self.folder.join("blobs").join(hex)
    }

    /// The folder of a commit's files.
    pub fn snapshot(&self, commit: &str) -> PathBuf {
        self.folder.join("snapshots").join(commit)
    }

    /// The lock of a blob.
    pub fn lock(&self, hex: &str) -> PathBuf {
        self.locks().join(format!("{hex}.lock"))
    }

    /// The folder of this repository's locks.
    pub fn locks(&self) -> PathBuf {
        self.cache.join(".locks").join(self.repo.folder())
    }

    /// The commit that a revision stood for when it was last fetched. A commit stands for itself.
    pub fn commit_of(&self, revision: &str) -> Option<String> {
        if is_commit(revision) {
            return self.snapshot(revision).is_dir().then(|| revision.to_owned());
        }
        let text = read_limited(&self.folder.join("refs").join(revision), MAX_REFERENCE).ok()?;
        let commit = String::from_utf8(text).ok()?.trim().to_owned();
        (is_plain(&commit) && self.snapshot(&commit).is_dir()).then_some(commit)
    }

    /// The files of a commit that are there, named as in the repository, sorted.
    pub fn files(&self, commit: &str) -> Vec<String> {
        let mut found = Vec::new();
        list(&self.snapshot(commit), "", DEPTH, &mut found);
        found.sort();
        found
    }

    /// Commits with a snapshot, and the names of references to them.
    pub fn commits(&self) -> Vec<(String, Vec<String>)> {
        let mut references = Vec::new();
        list(&self.folder.join("refs"), "", DEPTH, &mut references);
        references.sort();
        let folders = fs::read_dir(self.folder.join("snapshots")).into_iter().flatten().flatten();
        let names = folders.filter(|e| e.path().is_dir()).filter_map(|e| e.file_name().into_string().ok());
        let mut commits: Vec<_> = names
            .map(|commit| {
                let mine = references.iter().filter(|name| self.commit_of(name).as_ref() == Some(&commit));
                (commit.clone(), mine.cloned().collect())
            })
            .collect();
        commits.sort();
        commits
    }

    /// What is in a small file of a commit.
    pub fn read(&self, commit: &str, file: &str) -> Result<Vec<u8>> {
        let path = self.snapshot(commit).join(file);
        read_limited(&path, MAX_SMALL).naming(&path)
    }

    /// Whether a commit's file is there with these bytes, in name and length.
    pub fn has(&self, commit: &str, file: &str, hex: &str, size: u64) -> bool {
        let path = self.snapshot(commit).join(file);
        let is_whole = fs::metadata(&path).is_ok_and(|m| m.is_file() && m.len() == size);
        // Where there are no links, the file itself is all there is.
        is_whole && fs::read_link(&path).map_or(true, |to| to.file_name().is_some_and(|name| name == hex))
    }

    /// Whether a blob is there, by its length.
    pub fn has_blob(&self, hex: &str, size: u64) -> bool {
        fs::metadata(self.blob(hex)).is_ok_and(|m| m.is_file() && m.len() == size)
    }

    /// Makes the link of a commit's file to its blob, at once or not at all.
    pub fn link(&self, commit: &str, file: &str, hex: &str) -> Result<()> {
        let path = self.snapshot(commit).join(file);
        let parent = path.parent().unwrap_or(&self.folder);
        fs::create_dir_all(parent).naming(parent)?;
        let up = "../".repeat(2 + file.matches('/').count());
        let begun = parent.join(temporary("link"));
        match symlink(format!("{up}blobs/{hex}"), &begun) {
            Ok(()) => fs::rename(&begun, &path).naming(&path)?,
            // A file system without links: as huggingface_hub does, the file moves there.
            Err(e) if matches!(e.kind(), ErrorKind::PermissionDenied | ErrorKind::Unsupported) => {
                fs::rename(self.blob(hex), &path).naming(&path)?;
            }
            Err(cause) => return Err(Error::Io { path, cause }),
        }
        sync_folder(&path)
    }

    /// Notes which commit a revision stands for, at once or not at all.
    pub fn set_reference(&self, revision: &str, commit: &str) -> Result<()> {
        if revision == commit || self.commit_of(revision).as_deref() == Some(commit) {
            return Ok(());
        }
        self.write(&self.folder.join("refs").join(revision), commit.as_bytes())
    }

    /// Writes a small file completely, and then gives it its name.
    pub fn write(&self, path: &Path, bytes: &[u8]) -> Result<()> {
        let parent = path.parent().unwrap_or(&self.folder);
        fs::create_dir_all(parent).naming(parent)?;
        let begun = parent.join(temporary("new"));
        let written = fs::write(&begun, bytes).and_then(|()| File::open(&begun)?.sync_all());
        let named = written.and_then(|()| fs::rename(&begun, path)).naming(path);
        if named.is_err() {
            let _ = fs::remove_file(&begun);
        }
        named?;
        sync_folder(path)
    }
}

/// A name for a file that gets another one when it is whole.
fn temporary(what: &str) -> String {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    format!(".{what}.{}.{}.sluice.tmp", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed))
}

/// Regular files below a folder, through links.
fn list(folder: &Path, prefix: &str, depth: usize, found: &mut Vec<String>) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let Ok(name) = entry.file_name().into_string() else { continue };
        let name = if prefix.is_empty() { name } else { format!("{prefix}/{name}") };
        match fs::metadata(entry.path()) {
            Ok(meta) if meta.is_file() && is_relative(&name) && !name.ends_with(".tmp") => found.push(name),
            Ok(meta) if meta.is_dir() && depth > 1 => list(&entry.path(), &name, depth - 1, found),
            _ => {}
        }
    }
}

/// Reads a regular file of at most `limit` bytes.
pub(crate) fn read_limited(path: &Path, limit: u64) -> std::io::Result<Vec<u8>> {
    let file = File::open(path)?;
    let meta = file.metadata()?;
    if !meta.is_file() || meta.len() > limit {
        return Err(std::io::Error::other(format!("not a file of at most {limit} bytes")));
    }
    let mut bytes = Vec::new();
    file.take(limit).read_to_end(&mut bytes)?;
    Ok(bytes)
}

fn is_plain(name: &str) -> bool {
    !name.is_empty() && !name.contains('/') && is_relative(name)
}

/// Whether this is the cache folder of a model, and not a model itself.
pub fn is_cached(folder: &Path) -> bool {
    !folder.join("config.json").exists() && folder.join("snapshots").is_dir()
}

/// The folder with the model. For a cache folder that is the snapshot that `refs/main` names, or the only one; any other folder is returned unchanged.
///
/// # Errors
/// A cached model without that snapshot; the message says what to give instead.
pub fn followed(folder: PathBuf) -> Result<PathBuf> {
    if !is_cached(&folder) {
        return Ok(folder);
    }
    let wrong = |what: String| Err(Error::NotFound(format!("{}: {what}", folder.display())));
    let (snapshots, main) = (folder.join("snapshots"), folder.join("refs/main"));
    if main.exists() {
        let name = String::from_utf8_lossy(&read_limited(&main, MAX_REFERENCE).naming(&main)?).trim().to_owned();
        let found = snapshots.join(&name);
        if !is_plain(&name) || !found.is_dir() {
            return wrong(format!(
                "refs/main names the snapshot {name:?}, which is not in snapshots/: download the model again"
            ));
        }
        return Ok(found);
    }
    let entries = fs::read_dir(&snapshots).naming(&snapshots)?;
    let mut all: Vec<PathBuf> = entries.flatten().map(|e| e.path()).filter(|path| path.is_dir()).collect();
    match (all.pop(), all.is_empty()) {
        (Some(only), true) => Ok(only),
        (None, _) => wrong("no snapshot in it: download the model again".to_owned()),
        (Some(_), false) => {
            wrong("several snapshots, and no refs/main: give one of the folders in snapshots/".to_owned())
        }
    }
}

/// The repository and the commit of a path in a snapshot, or of a snapshot's folder.
pub fn origin(path: &Path) -> Option<(Repo, String)> {
    let mut above = path.ancestors().take(DEPTH + 1);
    above.find_map(|folder| {
        let snapshots = folder.parent().filter(|p| p.file_name().is_some_and(|name| name == "snapshots"))?;
        let repo = Repo::of_folder(snapshots.parent()?.file_name()?.to_str()?)?;
        Some((repo, folder.file_name()?.to_str()?.to_owned()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cached_model_is_found_by_its_reference() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("models--org--some-model");
        let refused = || followed(folder.clone()).unwrap_err().to_string();
        fs::create_dir_all(folder.join("snapshots")).unwrap();
        assert!(refused().contains("no snapshot"), "{}", refused());
        fs::create_dir(folder.join("snapshots/aaa")).unwrap();
        assert_eq!(followed(folder.clone()).unwrap(), folder.join("snapshots/aaa"));
        fs::create_dir(folder.join("snapshots/bbb")).unwrap();
        assert!(refused().contains("give one of the folders in snapshots/"), "{}", refused());
        fs::create_dir(folder.join("refs")).unwrap();
        for wrong in ["ccc", "", "..", "../snapshots/aaa"] {
            fs::write(folder.join("refs/main"), wrong).unwrap();
            assert!(refused().contains("refs/main"), "{wrong:?}: {}", refused());
        }
        fs::write(folder.join("refs/main"), "bbb\n").unwrap();
        let found = followed(folder.clone()).unwrap();
        assert_eq!(found, folder.join("snapshots/bbb"));
        for inside in [found.clone(), found.join("a.gguf"), found.join("UD-Q4_K_XL/a.gguf")] {
            let (repo, commit) = origin(&inside).unwrap();
            assert_eq!((repo.as_str(), &*commit), ("org/some-model", "bbb"));
        }
        // A folder with a config is a model itself.
        fs::write(folder.join("config.json"), "{}").unwrap();
        assert_eq!(followed(folder.clone()).unwrap(), folder);
        assert_eq!(origin(&folder), None);
    }

    #[test]
    fn files_are_links_that_move_with_the_cache() {
        let dir = tempfile::tempdir().unwrap();
        let cache = RepoCache::new(dir.path(), &Repo::new("org", "name").unwrap());
        cache.write(&cache.blob("11"), b"one").unwrap();
        for file in ["config.json", "UD-Q4_K_XL/a.gguf"] {
            cache.link("c0", file, "11").unwrap();
            cache.link("c0", file, "11").unwrap();
            assert!(
                cache.has("c0", file, "11", 3) && !cache.has("c0", file, "12", 3) && !cache.has("c0", file, "11", 4)
            );
        }
        cache.link("c0", "broken.gguf", "22").unwrap();
        assert_eq!(cache.commit_of("main"), None);
        cache.set_reference("main", "c0").unwrap();
        cache.set_reference("refs/pr/1", "c0").unwrap();
        let moved = dir.path().join("moved");
        fs::create_dir(&moved).unwrap();
        fs::rename(cache.folder(), moved.join("models--org--name")).unwrap();
        let cache = RepoCache::new(&moved, &Repo::new("org", "name").unwrap());
        assert_eq!(cache.files("c0"), ["UD-Q4_K_XL/a.gguf", "config.json"]);
        assert_eq!(cache.read("c0", "UD-Q4_K_XL/a.gguf").unwrap(), b"one");
        assert_eq!(cache.commit_of("main").as_deref(), Some("c0"));
        assert_eq!(cache.commits(), [("c0".to_owned(), vec!["main".to_owned(), "refs/pr/1".to_owned()])]);
        fs::write(cache.folder().join("refs/main"), "../blobs").unwrap();
        assert_eq!(cache.commit_of("main"), None);
    }
}
