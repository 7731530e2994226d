//! The folder that is written: refused when it holds something that is not ours, removed again when a packing ends before its first file is whole. It
//! holds a `config.json` only when everything else is in its place, so that an interrupted packing never looks like a model.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use sluice_store::{AtomicFile, bundle};

use super::journal;

/// Files of a model that hold no weights, by their names' beginnings and ends; the input's are copied.
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

/// A folder being filled. Dropped before [`complete`](Output::complete), it takes back what was written, unless files of weights are whole: then
/// these stay for the next try.
pub struct Output {
    folder: PathBuf,
    /// It was not there before.
    created: bool,
    written: Vec<PathBuf>,
    kept: bool,
}

/// Refuses a folder that must not be written to: it holds something else than an unfinished packing (unless `force`), is no folder, or is the input.
pub fn check(input: &Path, output: &Path, force: bool, unfinished: bool) -> Result<()> {
    let Ok(found) = fs::metadata(output) else { return Ok(()) };
    ensure!(found.is_dir(), "{}: not a folder", output.display());
    let same = fs::canonicalize(output).ok().zip(fs::canonicalize(input).ok()).is_some_and(|(a, b)| a == b);
    ensure!(!same, "{}: input and output are the same folder", output.display());
    let mut entries = fs::read_dir(output).with_context(|| output.display().to_string())?;
    if !force && !unfinished && entries.next().is_some() {
        bail!("{}: not empty (--force overwrites the model in it)", output.display());
    }
    Ok(())
}

/// Weights that `--force` removes: those of an earlier packing, and what an interrupted one left behind.
fn old_weights(output: &Path) -> Vec<PathBuf> {
    let is_old = |name: &str| {
        let begins = |name: &str| ["model", "resident", "experts-"].iter().any(|b| name.starts_with(b));
        let plain = begins(name) && (name.ends_with(".safetensors") || name.ends_with(".index.json"));
        plain || name == bundle::MANIFEST || is_temporary(name)
    };
    let entries = fs::read_dir(output).into_iter().flatten().flatten();
    entries.filter(|e| e.file_name().to_str().is_some_and(is_old)).map(|e| e.path()).collect()
}

/// A file that a dead writer of weights left under its temporary name.
fn is_temporary(name: &str) -> bool {
    let ours = [".model", ".resident.", ".experts-"].iter().any(|b| name.starts_with(b));
    ours && name.contains(".safetensors.") && name.contains(".tmp-")
}

/// Bytes that `--force` will free.
pub fn freed(output: &Path) -> u64 {
    old_weights(output).iter().filter_map(|path| fs::metadata(path).ok()).map(|m| m.len()).sum()
}

/// The input's files that are copied, with their sizes, in order of name.
pub fn other_files(input: &Path) -> Result<Vec<(PathBuf, u64)>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(input).with_context(|| input.display().to_string())? {
        let path = entry.with_context(|| input.display().to_string())?.path();
        let name = path.file_name().and_then(|n| n.to_str()).unwrap_or_default();
        let known = |(begin, end): &(&str, &str)| name.starts_with(begin) && name.ends_with(end);
        let Ok(found) = fs::metadata(&path) else { continue };
        if found.is_file() && COPIED.iter().any(known) {
            files.push((path, found.len()));
        }
    }
    files.sort();
    Ok(files)
}

impl Output {
    /// Makes the folder, or empties it of an earlier model's weights and config; to go on with an unfinished packing, only of what its death left behind.
    pub fn create(folder: &Path, going_on: bool) -> Result<Output> {
        let created = !folder.exists();
        fs::create_dir_all(folder).with_context(|| format!("{}: cannot create", folder.display()))?;
        let mut old = old_weights(folder);
        if going_on {
            old.retain(|path| path.file_name().and_then(|n| n.to_str()).is_some_and(is_temporary));
        } else {
            old.extend([folder.join("config.json"), journal::path(folder)].into_iter().filter(|p| p.exists()));
        }
        for path in old {
            fs::remove_file(&path).with_context(|| format!("{}: cannot remove", path.display()))?;
        }
        Ok(Output { folder: folder.to_owned(), created, written: Vec::new(), kept: going_on })
    }

    /// A file of weights is whole, and stays whatever happens.
    pub fn keep(&mut self) {
        self.kept = true;
    }

    /// Whether something of an unfinished packing stays.
    pub fn is_kept(&self) -> bool {
        self.kept
    }

    /// Says that this file will be written: it goes, too, if nothing is kept.
    pub fn written(&mut self, name: &str) {
        self.written.push(self.folder.join(name));
    }

    fn file(&mut self, name: &str) -> PathBuf {
        self.written(name);
        self.folder.join(name)
    }

    /// Copies a small file.
    pub fn copy(&mut self, from: &Path) -> Result<()> {
        let name = from.file_name().and_then(|n| n.to_str()).context("a file without a name")?;
        let bytes = fs::read(from).with_context(|| format!("{}: cannot read", from.display()))?;
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
        if self.created {
            // Only an empty folder goes.
            let _ = fs::remove_dir(&self.folder);
        }
    }
}
