//! The file that remembers sums of weight files, so that a later start need not read them.

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};
use sluice_store::{AtomicFile, Stamp, read_small};
use xxhash_rust::xxh3::Xxh3;

/// Bytes of the file, and weight files in it, at most.
const MAX_BYTES: u64 = 2 << 20;
const MAX_FILES: usize = 8192;

/// The file's content.
#[derive(Default, Serialize, Deserialize)]
struct SumsFile {
    version: u32,
    /// A checksum of `files`: a damaged sum would name another model.
    check: String,
    /// Sums in hexadecimal, by the stamps of files.
    files: BTreeMap<String, String>,
}

const VERSION: u32 = 1;

fn check(files: &BTreeMap<String, String>) -> String {
    let mut hash = Xxh3::new();
    for (stamp, sum) in files {
        hash.update(format!("{stamp} {sum}\n").as_bytes());
    }
    format!("{:016x}", hash.digest())
}

fn read_files(path: &Path) -> BTreeMap<String, String> {
    let bytes = read_small(path, MAX_BYTES).unwrap_or_default();
    let found: SumsFile = serde_json::from_slice(&bytes).unwrap_or_default();
    if found.version == VERSION && found.check == check(&found.files) { found.files } else { BTreeMap::new() }
}

/// All remembered sums by stamp; none if the file is missing or damaged.
pub(super) fn read(path: &Path) -> BTreeMap<String, u128> {
    let files = read_files(path).into_iter();
    files.filter_map(|(stamp, sum)| Some((stamp, u128::from_str_radix(&sum, 16).ok()?))).collect()
}

/// Adds a sum. If the file is full, only sums of the stamps in `keep` stay.
pub(super) fn add(path: &Path, stamp: &Stamp, sum: u128, keep: impl Iterator<Item = Stamp>) {
    // Another process may have written the file meanwhile.
    let mut files = read_files(path);
    if files.len() >= MAX_FILES {
        let keep: Vec<String> = keep.map(|stamp| stamp.to_string()).collect();
        files.retain(|stamp, _| keep.contains(stamp));
    }
    files.insert(stamp.to_string(), format!("{sum:032x}"));
    let content = SumsFile { version: VERSION, check: check(&files), files };
    let json = serde_json::to_vec(&content).expect("strings and numbers are always JSON");
    // If it cannot be written, the next start sums the weights again.
    let _ = AtomicFile::create(path).and_then(|mut f| f.write_all(&json).and_then(|()| f.commit()));
}
