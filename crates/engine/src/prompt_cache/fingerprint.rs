//! Whether two starts compute the same bits: a number of all that decides them. Of the weights, headers and samples are read, and the result is remembered for
//! files that nobody has touched since.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use sluice_backend::{Activations, KvType, NUMERICS_VERSION};
use sluice_store::{AtomicFile, read_small};
use xxhash_rust::xxh3::Xxh3;

/// What somebody chose at the start and what changes bits.
#[derive(Clone, Debug)]
pub(crate) struct Choices {
    pub activations: Activations,
    pub kv_type: KvType,
    pub experts_per_token: Option<usize>,
    /// Some rotary scalings choose by it.
    pub context: usize,
    pub block_tokens: usize,
}

/// Files that decide what tokens mean and what is computed of them; others need not be there.
const SMALL: [&str; 4] = ["config.json", "tokenizer.json", "tokenizer_config.json", "sluice-bundle.json"];
/// Samples of all weights together, and bytes of each.
const SAMPLES: u64 = 256;
const SAMPLE: u64 = 4096;
/// Of a header at most so many bytes: beyond them lies what samples see.
const MOST_HEADER: u64 = 64 << 20;
/// Bytes of what is remembered, and files in it.
const MOST_MEMORY: u64 = 1 << 20;
const MOST_FILES: usize = 4096;

/// # Errors
/// A file that cannot be read.
pub(crate) fn fingerprint(folder: &Path, choices: &Choices, memory: Option<&Path>) -> Result<u64> {
    let mut hash = Xxh3::new();
    // 1. Small files as they are
    for name in SMALL {
        let path = folder.join(name);
        if path.is_file() {
            let bytes = fs::read(&path).with_context(|| path.display().to_string())?;
            hash.update(name.as_bytes());
            hash.update(&(bytes.len() as u64).to_le_bytes());
            hash.update(&bytes);
        }
    }
    // 2. Weights
    let mut files: Vec<PathBuf> = fs::read_dir(folder)
        .with_context(|| folder.display().to_string())?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.extension().is_some_and(|e| e == "safetensors"))
        .collect();
    files.sort();
    let mut known = Known::read(memory);
    for path in &files {
        let sum = known.of(path, files.len() as u64).with_context(|| path.display().to_string())?;
        hash.update(path.file_name().unwrap_or_default().as_encoded_bytes());
        hash.update(&sum.to_le_bytes());
    }
    known.write(memory);
    // 3. Choices
    let rotary = String::from_utf8_lossy(&fs::read(folder.join("config.json"))?).contains("rope_");
    let Choices { activations, kv_type, experts_per_token, context, block_tokens } = choices;
    let context = if rotary { *context } else { 0 };
    let text = format!("{NUMERICS_VERSION} {activations:?} {kv_type:?} {experts_per_token:?} {context} {block_tokens}");
    hash.update(text.as_bytes());
    Ok(hash.digest())
}

/// Sums of files, by what says whether somebody has touched them.
struct Known {
    before: BTreeMap<String, u64>,
    now: BTreeMap<String, u64>,
}

impl Known {
    fn read(memory: Option<&Path>) -> Known {
        let bytes = memory.and_then(|m| read_small(m, MOST_MEMORY).ok()).unwrap_or_default();
        Known { before: serde_json::from_slice(&bytes).unwrap_or_default(), now: BTreeMap::new() }
    }

    /// The sum of one of so many files.
    fn of(&mut self, path: &Path, files: u64) -> Result<u64> {
        let file = File::open(path)?;
        let m = file.metadata()?;
        let mut name = String::new();
        let _ = write!(
            name,
            "{}:{}:{}:{}.{}:{}.{}:{files}",
            m.dev(),
            m.ino(),
            m.len(),
            m.mtime(),
            m.mtime_nsec(),
            m.ctime(),
            m.ctime_nsec()
        );
        let sum = match self.before.get(&name) {
            Some(sum) => *sum,
            None => sum_of(&file, m.len(), (SAMPLES / files).max(1))?,
        };
        self.now.insert(name, sum);
        Ok(sum)
    }

    fn write(mut self, memory: Option<&Path>) {
        let Some(memory) = memory.filter(|_| self.now.keys().any(|name| !self.before.contains_key(name))) else {
            return;
        };
        if self.before.len() < MOST_FILES {
            self.now.append(&mut self.before);
        }
        let json = serde_json::to_vec(&self.now).expect("strings and numbers are always JSON");
        // Another start reads samples again where this could not be kept.
        let _ = AtomicFile::create(memory).and_then(|mut f| f.write_all(&json).and_then(|()| f.commit()));
    }
}

/// Of a file's header, its length and so many samples.
fn sum_of(file: &File, len: u64, samples: u64) -> Result<u64> {
    let mut hash = Xxh3::new();
    hash.update(&len.to_le_bytes());
    let mut head = [0; 8];
    let mut at = 0;
    if len >= 8 {
        file.read_exact_at(&mut head, 0)?;
        at = u64::from_le_bytes(head).min(MOST_HEADER).min(len - 8) + 8;
    }
    let mut buffer = vec![0; 1 << 16];
    let mut from = 0;
    while from < at {
        let n = buffer.len().min((at - from) as usize);
        file.read_exact_at(&mut buffer[..n], from)?;
        hash.update(&buffer[..n]);
        from += n as u64;
    }
    // Where they lie depends on the lengths alone.
    let rest = len - at;
    for i in 0..samples.min(rest.div_ceil(SAMPLE)) {
        let from = at + (rest / samples.max(1) * i).min(rest.saturating_sub(SAMPLE));
        let n = SAMPLE.min(len - from) as usize;
        file.read_exact_at(&mut buffer[..n], from)?;
        hash.update(&buffer[..n]);
    }
    Ok(hash.digest())
}
