//! The folder that is written: refused when it holds something, removed again when the packing does not end well. It holds a
//! `config.json` only when everything else is in its place, so that an interrupted packing never looks like a model.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use sluice_store::AtomicFile;

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

/// A folder being filled. Dropped before [`complete`](Output::complete), it takes back what was written.
pub struct Output {
    folder: PathBuf,
    /// It was not there before.
    created: bool,
    written: Vec<PathBuf>,
    complete: bool,
}

/// Refuses a folder that must not be written to: it holds something (unless `force`), is no folder, or is the input.
pub fn check(input: &Path, output: &Path, force: bool) -> Result<()> {
    let Ok(found) = fs::metadata(output) else { return Ok(()) };
    ensure!(found.is_dir(), "{}: not a folder", output.display());
    let same = fs::canonicalize(output).ok().zip(fs::canonicalize(input).ok()).is_some_and(|(a, b)| a == b);
    ensure!(!same, "{}: input and output are the same folder", output.display());
    let mut entries = fs::read_dir(output).with_context(|| output.display().to_string())?;
    if !force && entries.next().is_some() {
        bail!("{}: not empty (--force overwrites the model in it)", output.display());
    }
    Ok(())
}

/// Weights that `--force` removes: those of an earlier packing, and what an interrupted one left behind.
fn old_weights(output: &Path) -> Vec<PathBuf> {
    let is_old = |name: &str| {
        let plain = name.starts_with("model") && (name.ends_with(".safetensors") || name.ends_with(".index.json"));
        plain || name.starts_with(".model") && name.contains(".safetensors.") && name.contains(".tmp-")
    };
    let entries = fs::read_dir(output).into_iter().flatten().flatten();
    entries.filter(|e| e.file_name().to_str().is_some_and(is_old)).map(|e| e.path()).collect()
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
    /// Makes the folder, or empties it of an earlier model's weights and config.
    pub fn create(folder: &Path) -> Result<Output> {
        let created = !folder.exists();
        fs::create_dir_all(folder).with_context(|| format!("{}: cannot create", folder.display()))?;
        let config = folder.join("config.json");
        let old = config.exists().then_some(config).into_iter().chain(old_weights(folder));
        for path in old {
            fs::remove_file(&path).with_context(|| format!("{}: cannot remove", path.display()))?;
        }
        Ok(Output { folder: folder.to_owned(), created, written: Vec::new(), complete: false })
    }

    /// The place of a file that is about to be written.
    pub fn file(&mut self, name: &str) -> PathBuf {
        let path = self.folder.join(name);
        self.written.push(path.clone());
        path
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
        self.complete = true;
        Ok(())
    }
}

impl Drop for Output {
    fn drop(&mut self) {
        if self.complete {
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
