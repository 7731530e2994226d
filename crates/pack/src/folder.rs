//! The output folder. It is locked against a second packing, refused if it holds anything else, and removed if a packing ends before its first file is complete.
//! `config.json` is written last, so an interrupted packing never looks like a model.

use std::fs::{self, File, TryLockError};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use sluice_model::ModelSource;
use sluice_model::source::TextFiles;
use sluice_store::{AtomicFile, bundle, open_folder};

use crate::journal;

/// Files without weights that are copied from the input: beginnings and ends of their names.
const COPIED: [(&str, &str); 12] = [
    ("tokenizer", ".json"),
    ("tokenizer", ".model"),
    ("vocab", ""),
    ("merges", ".txt"),
    ("added_tokens", ".json"),
    ("special_tokens_map", ".json"),
    ("chat_template", ""),
    ("generation_config", ".json"),
    ("", ".tiktoken"),
    ("README", ""),
    ("LICENSE", ""),
    ("NOTICE", ""),
];

/// The most bytes of a copied file: as many as a tokenizer may have.
const MAX_COPIED: u64 = 256 << 20;

/// An exclusive lock on the folder. The kernel holds it, so it ends with the process and leaves no file. Dropping it removes the folders that it made, if they
/// are still empty.
pub struct Lock {
    /// Why there is no lock: the file system does not support them.
    pub unlocked: Option<String>,
    // In this order: made folders are removed while the lock is still held.
    _made: Made,
    _folder: File,
}

/// Folders, innermost first.
struct Made(Vec<PathBuf>);

impl Lock {
    /// Makes the folder if necessary, and locks it.
    ///
    /// # Errors
    /// Another packing holds the lock, it is no folder, or it cannot be made.
    pub fn take(folder: &Path) -> Result<Lock> {
        if let Ok(found) = fs::metadata(folder) {
            ensure!(found.is_dir(), "{}: not a folder", folder.display());
        }
        loop {
            let missing = folder.ancestors().take_while(|p| !p.as_os_str().is_empty() && !p.exists());
            let made = Made(missing.map(Path::to_owned).collect());
            fs::create_dir_all(folder).with_context(|| format!("{}: cannot create", folder.display()))?;
            let open = open_folder(folder).with_context(|| format!("{}: cannot open", folder.display()))?;
            let unlocked = match open.try_lock() {
                Ok(()) => None,
                Err(TryLockError::WouldBlock) => {
                    bail!("{}: another pack is writing to this folder; wait for its end, or end it", folder.display())
                }
                // Some network and user-space file systems have no locks.
                Err(TryLockError::Error(e)) => {
                    Some(format!("{}: cannot be locked ({e}); do not pack to it twice at a time", folder.display()))
                }
            };
            // A packing that ended meanwhile may have removed the folder.
            let number = |m: fs::Metadata| (m.dev(), m.ino());
            let (locked, there) = (open.metadata().ok().map(number), fs::metadata(folder).ok().map(number));
            if locked.is_some() && locked == there {
                let lock = Lock { unlocked, _made: made, _folder: open };
                lock.clean(folder)?;
                return Ok(lock);
            }
        }
    }
}

impl Lock {
    /// Removes temporary files of killed packings. The lock proves that nobody writes to them any more; without a lock they stay.
    fn clean(&self, folder: &Path) -> Result<()> {
        if self.unlocked.is_some() {
            return Ok(());
        }
        for entry in fs::read_dir(folder).with_context(|| folder.display().to_string())?.flatten() {
            if entry.file_name().to_str().is_some_and(is_temporary) && entry.file_type().is_ok_and(|t| t.is_file()) {
                let path = entry.path();
                fs::remove_file(&path).with_context(|| format!("{}: cannot remove", path.display()))?;
            }
        }
        Ok(())
    }
}

impl Drop for Made {
    fn drop(&mut self) {
        for folder in &self.0 {
            // Fails unless it is empty, as it should.
            let _ = fs::remove_dir(folder);
        }
    }
}

/// A folder being filled. Dropped before [`complete`](Output::complete), it removes what was written, unless a file of weights is complete: then everything
/// stays for the next try.
pub struct Output {
    folder: PathBuf,
    written: Vec<PathBuf>,
    kept: bool,
}

/// Refuses a folder that is the input, or that holds anything but an unfinished packing (unless `force`).
pub fn check(input: &Path, output: &Path, force: bool, unfinished: bool) -> Result<()> {
    let same = fs::canonicalize(output).ok().zip(fs::canonicalize(input).ok()).is_some_and(|(a, b)| a == b);
    ensure!(!same, "{}: input and output are the same folder", output.display());
    let mut entries = fs::read_dir(output).with_context(|| output.display().to_string())?;
    if !force && !unfinished && entries.next().is_some() {
        bail!("{}: not empty (--force overwrites the model in it)", output.display());
    }
    Ok(())
}

/// Weights that an earlier packing wrote, which `--force` removes.
fn old_weights(output: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(output).into_iter().flatten().flatten();
    entries.filter(|e| e.file_name().to_str().is_some_and(is_of_weights)).map(|e| e.path()).collect()
}

/// Whether a packing writes weights or an index of them to a file of this name.
fn is_of_weights(name: &str) -> bool {
    let begins = ["model", "resident", "experts-"].iter().any(|b| name.starts_with(b));
    begins && (name.ends_with(".safetensors") || name.ends_with(".index.json")) || name == bundle::MANIFEST
}

/// Whether the input's file of this name is copied.
fn is_copied(name: &str) -> bool {
    COPIED.iter().any(|(begin, end)| name.starts_with(begin) && name.ends_with(end))
}

/// Whether this is `AtomicFile`'s temporary name of a file that a packing writes.
fn is_temporary(name: &str) -> bool {
    let parts = name.strip_prefix('.').and_then(|rest| rest.rsplit_once(".tmp-"));
    parts.is_some_and(|(name, random)| {
        let is_random = random.len() == 16 && random.bytes().all(|b| b.is_ascii_hexdigit());
        let is_ours = name == "config.json" || name == journal::NAME || is_of_weights(name) || is_copied(name);
        is_random && is_ours
    })
}

/// Bytes that `--force` will free.
pub fn freed(output: &Path) -> u64 {
    old_weights(output).iter().filter_map(|path| fs::metadata(path).ok()).map(|m| m.len()).sum()
}

/// Names and sizes of the input's files that are copied, in order of name.
pub fn other_files(input: &dyn ModelSource) -> Result<Vec<(String, u64)>> {
    let mut files = input.list("").with_context(|| input.path().display().to_string())?;
    files.retain(|(name, _)| is_copied(name));
    files.sort();
    Ok(files)
}

impl Output {
    /// Empties the folder of an earlier model's weights and config, unless this goes on with an unfinished packing.
    pub fn create(folder: &Path, going_on: bool) -> Result<Output> {
        if !going_on {
            let others = [folder.join("config.json"), journal::path(folder)].into_iter().filter(|p| p.exists());
            for path in old_weights(folder).into_iter().chain(others) {
                fs::remove_file(&path).with_context(|| format!("{}: cannot remove", path.display()))?;
            }
        }
        Ok(Output { folder: folder.to_owned(), written: Vec::new(), kept: going_on })
    }

    /// A file of weights is complete, and stays even if the packing fails.
    pub fn keep(&mut self) {
        self.kept = true;
    }

    /// Whether written files stay if this is dropped.
    pub fn is_kept(&self) -> bool {
        self.kept
    }

    /// Registers a file that will be written, so that it is removed if nothing is kept.
    pub fn written(&mut self, name: &str) {
        self.written.push(self.folder.join(name));
    }

    fn file(&mut self, name: &str) -> PathBuf {
        self.written(name);
        self.folder.join(name)
    }

    /// Copies a small file.
    pub fn copy(&mut self, from: &dyn TextFiles, name: &str) -> Result<()> {
        let bytes = from.read(name, MAX_COPIED)?;
        self.write(name, &bytes)
    }

    /// Writes a small file.
    pub fn write(&mut self, name: &str, bytes: &[u8]) -> Result<()> {
        let mut file = AtomicFile::create(&self.file(name))?;
        file.write_all(bytes)?;
        Ok(file.commit()?)
    }

    /// Writes `config.json`, the last file: from now on this is a model.
    pub fn complete(mut self, config: &str) -> Result<()> {
        self.write("config.json", config.as_bytes())?;
        self.kept = true;
        let journal = journal::path(&self.folder);
        if journal.exists() {
            fs::remove_file(&journal).with_context(|| format!("{}: cannot remove", journal.display()))?;
        }
        Ok(())
    }
}

impl Drop for Output {
    fn drop(&mut self) {
        if self.kept {
            return;
        }
        for path in &self.written {
            let _ = fs::remove_file(path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn temporary_names_are_those_of_files_that_are_packed() {
        let random = "0123456789abcdef";
        for name in [
            ".sluice-pack.json",
            "config.json",
            "bundle.json",
            "model.safetensors.index.json",
            "model-00001-of-00002.safetensors",
            "resident.safetensors",
            "experts-07.safetensors",
            "tokenizer.json",
            "chat_template.jinja",
            "README.md",
        ] {
            assert!(is_temporary(&format!(".{name}.tmp-{random}")), "{name}");
            assert!(!is_temporary(name) && !is_temporary(&format!("{name}.tmp-{random}")), "{name}");
            assert!(!is_temporary(&format!(".{name}.tmp-{}", &random[1..])) && !is_temporary(&format!(".{name}.tmp-")));
        }
        for name in ["notes.txt", "conversation.json", "x.safetensors"] {
            assert!(!is_temporary(&format!(".{name}.tmp-{random}")), "{name}");
        }
    }

    #[test]
    fn what_is_in_the_place_of_a_small_file_is_not_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let mut output = Output::create(dir.path(), false).unwrap();
        for name in ["zero", "null"] {
            let error = output.copy(&Path::new("/dev"), name).unwrap_err().to_string();
            assert!(error.contains(name), "{error}");
        }
        fs::create_dir(journal::path(dir.path())).unwrap();
        assert!(journal::Journal::read(dir.path()).unwrap_err().to_string().contains(journal::NAME));
    }
}
