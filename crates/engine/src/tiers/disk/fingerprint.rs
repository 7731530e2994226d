//! A model's fingerprint: a hash of everything that decides the bits it computes. Two starts with the same fingerprint can share cached blocks. Every byte of the
//! weights counts. Sums of weight files are remembered as long as the files stay untouched.

use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use anyhow::Result;
use sluice_backend::{Activations, AttentionMode, KvType, NUMERICS_VERSION};
use sluice_model::ModelSource;
use sluice_store::{Error, Stamp, sum_file};
use xxhash_rust::xxh3::Xxh3;

use super::sums_file;

/// Options that change bits.
#[derive(Clone, Debug)]
pub(crate) struct BitOptions {
    pub activations: Activations,
    pub kv_type: KvType,
    pub attention: AttentionMode,
    pub experts_per_token: Option<usize>,
    /// Some rotary scalings depend on it.
    pub context: usize,
    pub block_tokens: usize,
}

/// Right after a change, a file's time stamp may miss another change. Such a file is checked again every `PAUSE`, for `SETTLING` at most.
const PAUSE: Duration = Duration::from_millis(50);
const SETTLING: Duration = Duration::from_secs(5);

/// A weight file as it was opened.
struct WeightFile {
    path: PathBuf,
    stamp: Stamp,
    sum: Option<u128>,
}

/// Everything that decides a model's bits, as far as it is known.
pub(crate) struct ModelIdentity {
    /// Hash of everything but the weights.
    rest: u128,
    weights: Vec<WeightFile>,
    /// The file that remembers sums.
    sums_file: Option<PathBuf>,
}

impl ModelIdentity {
    /// Reads the identity of the model of `source`. `opened`: its weight files in order of name. They are not read: their sums are taken from `sums_file`, if
    /// it has them.
    ///
    /// # Errors
    /// A small file that cannot be read.
    pub fn read<'a>(
        source: &dyn ModelSource,
        choices: &BitOptions,
        opened: impl Iterator<Item = (&'a Path, Stamp)>,
        sums_file: Option<&Path>,
    ) -> Result<ModelIdentity> {
        let mut hash = Xxh3::new();
        let mut rotary = false;
        // 1. Small files
        for (name, bytes) in source.fingerprint_inputs()? {
            hash.update(name.as_bytes());
            hash.update(&(bytes.len() as u64).to_le_bytes());
            hash.update(&bytes);
            rotary |= name == "config.json" && String::from_utf8_lossy(&bytes).contains("rope_");
        }
        // 2. Options
        let BitOptions { activations, kv_type, attention, experts_per_token, context, block_tokens } = choices;
        let context = if rotary { *context } else { 0 };
        let text = format!(
            "{NUMERICS_VERSION} {activations:?} {kv_type:?} {attention:?} {experts_per_token:?} {context} {block_tokens}"
        );
        hash.update(text.as_bytes());
        // 3. Weights, as far as they were summed before
        let known = sums_file.map(sums_file::read).unwrap_or_default();
        let weights = opened.map(|(path, stamp)| {
            let sum = known.get(&stamp.to_string()).copied();
            WeightFile { path: path.to_owned(), stamp, sum }
        });
        Ok(ModelIdentity {
            rest: hash.digest128(),
            weights: weights.collect(),
            sums_file: sums_file.map(Path::to_owned),
        })
    }

    /// Bytes of weight files without a known sum.
    pub fn unsummed(&self) -> u64 {
        self.weights.iter().filter(|w| w.sum.is_none()).map(|w| w.stamp.len()).sum()
    }

    /// The fingerprint; `None` until all sums are known.
    pub fn fingerprint(&self) -> Option<u64> {
        let mut hash = Xxh3::new();
        hash.update(&self.rest.to_le_bytes());
        for WeightFile { path, sum, .. } in &self.weights {
            let name = path.file_name().unwrap_or_default().as_encoded_bytes();
            hash.update(&(name.len() as u64).to_le_bytes());
            hash.update(name);
            hash.update(&(*sum)?.to_le_bytes());
        }
        Some(hash.digest())
    }

    /// Sums the remaining weight files, and remembers each sum. `wait`: waits for files that changed a moment ago, so that their sums can be remembered.
    /// `goes_on` is called with the bytes that were summed, and stops the work by returning false. Returns whether all sums are known.
    ///
    /// # Errors
    /// A file that was replaced since it was opened, or cannot be read.
    pub fn sum(&mut self, wait: bool, goes_on: &mut dyn FnMut(u64) -> bool) -> Result<bool, Error> {
        for i in 0..self.weights.len() {
            let WeightFile { path, stamp, sum: None } = &self.weights[i] else { continue };
            let until = Instant::now() + SETTLING;
            let mut begun = SystemTime::now();
            while wait && stamp.is_fresh(begun) && Instant::now() < until {
                if !goes_on(0) {
                    return Ok(false);
                }
                thread::sleep(PAUSE);
                begun = SystemTime::now();
            }
            let Some(sum) = sum_file(path, stamp, goes_on)? else { return Ok(false) };
            if let Some(path) = self.sums_file.as_ref().filter(|_| !stamp.is_fresh(begun)) {
                sums_file::add(path, stamp, sum, self.weights.iter().map(|w| w.stamp));
            }
            self.weights[i].sum = Some(sum);
        }
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::os::unix::fs::{FileExt, MetadataExt};

    use super::*;

    /// Small files of a folder that count.
    const SMALL: [&str; 7] = [
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "model.safetensors.index.json",
        "bundle.json",
    ];

    fn weights(path: &Path, bytes: &[u8]) {
        fs::write(path, bytes).unwrap();
    }

    fn folder() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("config.json"), "{}").unwrap();
        fs::write(dir.path().join("tokenizer.json"), "{}").unwrap();
        weights(&dir.path().join("model.safetensors"), &[1; 10_000]);
        dir
    }

    fn choices() -> BitOptions {
        BitOptions {
            activations: Activations::Int8,
            kv_type: KvType::Bf16,
            attention: AttentionMode::F32,
            experts_per_token: None,
            context: 4096,
            block_tokens: 32,
        }
    }

    /// The identity of a model with all safetensors files of a folder.
    fn identity(dir: &Path, choices: &BitOptions, memory: Option<&Path>) -> ModelIdentity {
        let mut files: Vec<(PathBuf, Stamp)> = fs::read_dir(dir)
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .filter(|path| path.extension().is_some_and(|e| e == "safetensors"))
            .map(|path| (path.clone(), Stamp::of(&fs::metadata(path).unwrap())))
            .collect();
        files.sort_by(|a, b| a.0.cmp(&b.0));
        let source = sluice_model::source::open(dir).unwrap();
        ModelIdentity::read(&*source, choices, files.iter().map(|(path, stamp)| (&**path, *stamp)), memory).unwrap()
    }

    fn fingerprint(dir: &Path, choices: &BitOptions) -> u64 {
        let mut identity = identity(dir, choices, None);
        assert_eq!(identity.fingerprint(), None);
        assert!(identity.sum(false, &mut |_| true).unwrap());
        assert_eq!(identity.unsummed(), 0);
        identity.fingerprint().unwrap()
    }

    #[test]
    fn what_changes_bits_changes_the_fingerprint() {
        let dir = folder();
        let path = |name: &str| dir.path().join(name);
        let of = |choices: &BitOptions| fingerprint(dir.path(), choices);
        let mut seen = vec![of(&choices())];
        assert_eq!(of(&choices()), seen[0]);
        let mut is_new = |number: u64| {
            assert!(!seen.contains(&number));
            seen.push(number);
        };
        for other in [
            BitOptions { activations: Activations::F32, ..choices() },
            BitOptions { kv_type: KvType::F32, ..choices() },
            BitOptions { attention: AttentionMode::Int8, ..choices() },
            BitOptions { kv_type: KvType::Int16, attention: AttentionMode::Int16, ..choices() },
            BitOptions { experts_per_token: Some(2), ..choices() },
            BitOptions { block_tokens: 16, ..choices() },
        ] {
            is_new(of(&other));
        }
        // The context counts only where angles depend on it.
        let longer = BitOptions { context: 8192, ..choices() };
        assert_eq!(of(&longer), of(&choices()));
        for (i, name) in SMALL.iter().enumerate() {
            fs::write(path(name), format!("{{\"rope_\": {i}}}")).unwrap();
            is_new(of(&choices()));
        }
        is_new(of(&longer));
        weights(&path("more.safetensors"), &[1; 10_000]);
        is_new(of(&choices()));
        fs::rename(path("more.safetensors"), path("less.safetensors")).unwrap();
        is_new(of(&choices()));
    }

    #[test]
    fn every_byte_of_the_weights_counts() {
        let dir = folder();
        let path = dir.path().join("model.safetensors");
        let mut random = fastrand::Rng::with_seed(3);
        let mut bytes: Vec<u8> = (0..5_000_000).map(|_| random.u8(..)).collect();
        weights(&path, &bytes);
        let all = fingerprint(dir.path(), &choices());
        for i in 0..40 {
            let at = match i {
                0 => 0,
                1 => bytes.len() - 1,
                _ => random.usize(..bytes.len()),
            };
            bytes[at] ^= 1;
            weights(&path, &bytes);
            assert_ne!(fingerprint(dir.path(), &choices()), all, "byte {at}");
            bytes[at] ^= 1;
        }
        weights(&path, &bytes);
        assert_eq!(fingerprint(dir.path(), &choices()), all);
    }

    #[test]
    fn sums_are_remembered_for_files_that_nobody_has_touched() {
        let (dir, home) = (folder(), tempfile::tempdir().unwrap());
        let memory = home.path().join("sums.json");
        let file = dir.path().join("model.safetensors");
        let read = || identity(dir.path(), &choices(), Some(&memory));
        let all = fingerprint(dir.path(), &choices());
        // 1. A file that has changed just now might change once more and look the same: its sum is used, and not remembered
        weights(&file, &[1; 10_000]);
        let mut fresh = read();
        assert!(fresh.sum(false, &mut |_| true).unwrap());
        assert_eq!((fresh.fingerprint(), read().unsummed()), (Some(all), 10_000));
        // 2. Once a change would show it is, and nothing of it is read again
        assert!(read().sum(true, &mut |_| true).unwrap());
        assert_eq!((read().fingerprint(), read().unsummed()), (Some(all), 0));
        // 3. Until something of it changes: bytes, also where the time is set back, or its times alone
        let before = fs::metadata(&file).unwrap();
        let handle = File::options().write(true).open(&file).unwrap();
        let as_before = || {
            handle.set_modified(before.modified().unwrap()).unwrap();
            fs::metadata(&file).unwrap()
        };
        handle.write_all_at(&[2], 5000).unwrap();
        // Clocks of files are coarse.
        let mut now = as_before();
        while (now.ctime(), now.ctime_nsec()) == (before.ctime(), before.ctime_nsec()) {
            now = as_before();
        }
        assert_eq!((now.len(), now.modified().unwrap()), (before.len(), before.modified().unwrap()));
        let mut changed = read();
        assert_eq!((changed.fingerprint(), changed.unsummed()), (None, 10_000));
        assert!(changed.sum(true, &mut |_| true).unwrap());
        assert!(changed.fingerprint().is_some_and(|found| found != all));
        // 4. A memory that is no memory, or was changed, or cannot be written, is done without
        let good = fs::read(&memory).unwrap();
        assert_eq!(read().unsummed(), 0);
        for at in 0..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 1;
            fs::write(&memory, &bad).unwrap();
            let found = read().fingerprint();
            assert!(found.is_none() || found == changed.fingerprint(), "byte {at}");
        }
        for bad in ["", "{}", "[]", "{\"files\": 1}"] {
            fs::write(&memory, bad).unwrap();
            assert_eq!(read().unsummed(), 10_000);
        }
        assert!(read().sum(true, &mut |_| true).unwrap());
        assert_eq!(read().fingerprint(), changed.fingerprint());
        let nowhere = home.path().join("no/such/folder");
        let mut nowhere = identity(dir.path(), &choices(), Some(&nowhere));
        assert!(nowhere.sum(false, &mut |_| true).unwrap());
        assert_eq!(nowhere.fingerprint(), changed.fingerprint());
    }

    #[test]
    fn who_stops_in_the_middle_keeps_the_files_that_are_summed() {
        let (dir, home) = (folder(), tempfile::tempdir().unwrap());
        let memory = home.path().join("sums.json");
        weights(&dir.path().join("b.safetensors"), &[2; 20_000]);
        weights(&dir.path().join("c.safetensors"), &[3; 30_000]);
        let read = || identity(dir.path(), &choices(), Some(&memory));
        let mut first = read();
        assert_eq!(first.unsummed(), 60_000);
        // The second file is not finished.
        let mut summed = 0;
        let whole = first.sum(true, &mut |bytes| {
            summed += bytes;
            summed <= 20_000
        });
        assert!(!whole.unwrap());
        assert_eq!((first.fingerprint(), read().unsummed()), (None, 40_000));
        let mut second = read();
        let mut rest = 0;
        assert!(
            second
                .sum(true, &mut |bytes| {
                    rest += bytes;
                    true
                })
                .unwrap()
        );
        assert_eq!((rest, second.fingerprint()), (40_000, Some(fingerprint(dir.path(), &choices()))));
    }

    #[test]
    fn weights_that_are_not_what_was_opened_have_no_fingerprint() {
        let dir = folder();
        let file = dir.path().join("model.safetensors");
        let mut opened = identity(dir.path(), &choices(), None);
        fs::write(dir.path().join("new"), [1; 10_000]).unwrap();
        fs::rename(dir.path().join("new"), &file).unwrap();
        let found = opened.sum(false, &mut |_| true);
        assert!(matches!(found, Err(Error::Replaced { .. })), "{found:?}");
        assert_eq!(opened.fingerprint(), None);
    }
}
