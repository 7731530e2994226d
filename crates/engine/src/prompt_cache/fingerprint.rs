//! Whether two starts compute the same bits: a number of all that decides them. Of the weights, headers and samples are read, and the result is remembered for
//! files that nobody has touched since.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use sluice_backend::{Activations, AttentionMode, KvType, NUMERICS_VERSION};
use sluice_store::bundle::MANIFEST;
use sluice_store::{AtomicFile, read_small};
use xxhash_rust::xxh3::Xxh3;

/// What somebody chose at the start and what changes bits.
#[derive(Clone, Debug)]
pub(crate) struct Choices {
    pub activations: Activations,
    pub kv_type: KvType,
    pub attention: AttentionMode,
    pub experts_per_token: Option<usize>,
    /// Some rotary scalings choose by it.
    pub context: usize,
    pub block_tokens: usize,
}

/// Files that decide what tokens mean, which files have the weights, and what is computed of them; all but the first need not be there.
const SMALL: [&str; 5] =
    ["config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors.index.json", MANIFEST];
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
    let Choices { activations, kv_type, attention, experts_per_token, context, block_tokens } = choices;
    let context = if rotary { *context } else { 0 };
    let text = format!(
        "{NUMERICS_VERSION} {activations:?} {kv_type:?} {attention:?} {experts_per_token:?} {context} {block_tokens}"
    );
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
    // Where they lie depends on the lengths alone: from the first byte to the last, at even distances, and without gaps where there are enough of them.
    let rest = len - at;
    let samples = samples.min(rest.div_ceil(SAMPLE));
    for i in 0..samples {
        let from = at + rest.saturating_sub(SAMPLE) * i / (samples - 1).max(1);
        let n = SAMPLE.min(len - from) as usize;
        file.read_exact_at(&mut buffer[..n], from)?;
        hash.update(&buffer[..n]);
    }
    Ok(hash.digest())
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, SystemTime};

    use super::*;

    /// As far as a fingerprint looks: a header of so many bytes, and weights behind it.
    fn weights(path: &Path, header: u64, bytes: &[u8]) {
        let mut file = header.to_le_bytes().to_vec();
        file.resize(8 + header as usize, b' ');
        file.extend(bytes);
        fs::write(path, file).unwrap();
    }

    fn folder() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("config.json"), "{}").unwrap();
        fs::write(dir.path().join("tokenizer.json"), "{}").unwrap();
        weights(&dir.path().join("model.safetensors"), 100, &[1; 10_000]);
        dir
    }

    fn choices() -> Choices {
        Choices {
            activations: Activations::Int8,
            kv_type: KvType::Bf16,
            attention: AttentionMode::F32,
            experts_per_token: None,
            context: 4096,
            block_tokens: 32,
        }
    }

    fn of(dir: &Path, memory: Option<&Path>) -> u64 {
        fingerprint(dir, &choices(), memory).unwrap()
    }

    #[test]
    fn what_changes_bits_changes_the_fingerprint() {
        let dir = folder();
        let path = |name: &str| dir.path().join(name);
        let mut seen = vec![of(dir.path(), None)];
        assert_eq!(of(dir.path(), None), seen[0]);
        let mut is_new = |number: u64| {
            assert!(!seen.contains(&number));
            seen.push(number);
        };
        for other in [
            Choices { activations: Activations::F32, ..choices() },
            Choices { kv_type: KvType::F32, ..choices() },
            Choices { attention: AttentionMode::Int8, ..choices() },
            Choices { experts_per_token: Some(2), ..choices() },
            Choices { block_tokens: 16, ..choices() },
        ] {
            is_new(fingerprint(dir.path(), &other, None).unwrap());
        }
        // The context counts only where angles depend on it.
        let longer = Choices { context: 8192, ..choices() };
        assert_eq!(fingerprint(dir.path(), &longer, None).unwrap(), of(dir.path(), None));
        for (i, name) in SMALL.iter().enumerate() {
            fs::write(path(name), format!("{{\"rope_\": {i}}}")).unwrap();
            is_new(of(dir.path(), None));
        }
        is_new(fingerprint(dir.path(), &longer, None).unwrap());
        weights(&path("more.safetensors"), 100, &[1; 10_000]);
        is_new(of(dir.path(), None));
        fs::rename(path("more.safetensors"), path("less.safetensors")).unwrap();
        is_new(of(dir.path(), None));
    }

    #[test]
    fn of_weights_the_header_counts_whole_and_the_rest_by_samples() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.safetensors");
        let sum = |samples| {
            let file = File::open(&path).unwrap();
            sum_of(&file, file.metadata().unwrap().len(), samples).unwrap()
        };
        let header = 5000;
        let mut bytes = vec![0; 40 * SAMPLE as usize + 77];
        weights(&path, header, &bytes);
        let (some, all) = (sum(8), sum(SAMPLES));
        let mut random = fastrand::Rng::with_seed(3);
        // 1. Where there are enough samples every byte counts, with fewer the first and the last ones still do
        for i in 0..200 {
            let at = match i {
                0 => 0,
                1 => bytes.len() - 1,
                _ => random.usize(..bytes.len()),
            };
            bytes[at] ^= 1;
            weights(&path, header, &bytes);
            assert!(sum(SAMPLES) != all, "byte {at}");
            assert!(i > 1 || sum(8) != some, "byte {at}");
            bytes[at] ^= 1;
        }
        // 2. So does the header, and every length
        weights(&path, header, &bytes);
        let mut file = fs::read(&path).unwrap();
        for at in [0, 8, 3000, 5007] {
            file[at] ^= 1;
            fs::write(&path, &file).unwrap();
            assert!(sum(8) != some, "byte {at}");
            file[at] ^= 1;
        }
        for len in [0, 1, 7, 8, 9, 5007, 5008, 5009, file.len() - 1] {
            fs::write(&path, &file[..len]).unwrap();
            assert!(sum(8) != some, "{len} bytes");
        }
        // 3. A header of an absurd length is what comes first
        file[..8].fill(0xff);
        fs::write(&path, &file).unwrap();
        assert!(sum(8) != some);
    }

    #[test]
    fn sums_are_remembered_for_files_that_nobody_has_touched() {
        let (dir, home) = (folder(), tempfile::tempdir().unwrap());
        let memory = home.path().join("fingerprints.json");
        let file = dir.path().join("model.safetensors");
        let first = of(dir.path(), Some(&memory));
        let known = || -> BTreeMap<String, u64> { serde_json::from_slice(&fs::read(&memory).unwrap()).unwrap() };
        assert_eq!(known().len(), 1);
        // 1. The file is not looked at again: what is remembered counts, whatever it is
        let wrong: BTreeMap<String, u64> = known().into_keys().map(|name| (name, 1)).collect();
        fs::write(&memory, serde_json::to_vec(&wrong).unwrap()).unwrap();
        let remembered = of(dir.path(), Some(&memory));
        assert!(remembered != first && of(dir.path(), None) == first);
        // 2. Until something of it changes: its times, also those that a program cannot set
        let time = SystemTime::now() - Duration::from_secs(1000);
        let set = || File::options().write(true).open(&file).unwrap().set_modified(time).unwrap();
        set();
        assert_eq!(of(dir.path(), Some(&memory)), first);
        let names = known().len();
        assert_eq!(names, 2);
        let ctime = |path: &Path| fs::metadata(path).map(|m| (m.ctime(), m.ctime_nsec())).unwrap();
        let before = ctime(&file);
        while ctime(&file) == before {
            set();
        }
        assert_eq!(of(dir.path(), Some(&memory)), first);
        assert_eq!(known().len(), names + 1);
        // 3. Other bytes, also where the time is set back
        weights(&file, 100, &[2; 10_000]);
        set();
        assert!(![first, remembered].contains(&of(dir.path(), Some(&memory))));
        weights(&file, 100, &[1; 10_001]);
        assert!(![first, remembered].contains(&of(dir.path(), Some(&memory))));
        // 4. A memory that is no memory, or cannot be written, is done without
        weights(&file, 100, &[1; 10_000]);
        fs::write(&memory, "{\"x\": \"y\"}").unwrap();
        assert_eq!(of(dir.path(), Some(&memory)), first);
        assert_eq!(of(dir.path(), Some(&home.path().join("no/such/folder"))), first);
    }
}
