//! Sums of files of weights: where they are remembered, and the thread that takes them beside an engine that serves already.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::Sender;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use sluice_store::{AtomicFile, LoadProgress, Stamp, lower_priority, read_small};
use xxhash_rust::xxh3::Xxh3;

use super::fingerprint::Identity;
use super::writer::{Command, Shared};

/// Bytes of what is remembered, and files in it.
const MOST_MEMORY: u64 = 2 << 20;
const MOST_FILES: usize = 8192;
/// How often it is looked whether weights are loaded, which comes first.
const PAUSE: Duration = Duration::from_millis(20);

/// What is remembered: sums of files, in hexadecimal, by their stamps.
#[derive(Default, Serialize, Deserialize)]
struct Memory {
    version: u32,
    /// Of all the rest: a sum that was changed would be another model's.
    check: String,
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

fn read_files(memory: &Path) -> BTreeMap<String, String> {
    let bytes = read_small(memory, MOST_MEMORY).unwrap_or_default();
    let found: Memory = serde_json::from_slice(&bytes).unwrap_or_default();
    if found.version == VERSION && found.check == check(&found.files) { found.files } else { BTreeMap::new() }
}

/// All that is remembered, by stamp. What cannot be read, or was changed, is nothing.
pub(super) fn read(memory: &Path) -> BTreeMap<String, u128> {
    let files = read_files(memory).into_iter();
    files.filter_map(|(stamp, sum)| Some((stamp, u128::from_str_radix(&sum, 16).ok()?))).collect()
}

/// Remembers one more. Where there are too many, those of the `wanted` stay.
pub(super) fn remember(memory: &Path, stamp: &Stamp, sum: u128, wanted: impl Iterator<Item = Stamp>) {
    // Another process may have written it meanwhile.
    let mut files = read_files(memory);
    if files.len() >= MOST_FILES {
        let wanted: Vec<String> = wanted.map(|stamp| stamp.to_string()).collect();
        files.retain(|stamp, _| wanted.contains(stamp));
    }
    files.insert(stamp.to_string(), format!("{sum:032x}"));
    let memory_of = Memory { version: VERSION, check: check(&files), files };
    let json = serde_json::to_vec(&memory_of).expect("strings and numbers are always JSON");
    // Where it cannot be kept, the next start sums the file again.
    let _ = AtomicFile::create(memory).and_then(|mut f| f.write_all(&json).and_then(|()| f.commit()));
}

/// Sums the rest of a model in a thread of its own, once its weights are loaded, and tells the keeper what comes of it.
pub(super) fn begin(
    mut identity: Identity,
    load: LoadProgress,
    shared: Arc<Shared>,
    keeper: Sender<Command>,
) -> Result<JoinHandle<()>> {
    shared.to_sum.store(identity.unsummed(), Ordering::Relaxed);
    let work = move || {
        lower_priority();
        let is_wanted = || shared.is_well() && !shared.ends();
        while !load.is_over() {
            if !is_wanted() {
                return;
            }
            thread::sleep(PAUSE);
        }
        let summed = identity.sum(true, &mut |bytes| {
            shared.summed.fetch_add(bytes, Ordering::Relaxed);
            is_wanted()
        });
        match summed.map(|_| identity.fingerprint()) {
            Ok(Some(model)) => _ = keeper.send(Command::Know(model)),
            // Nobody wants it any more.
            Ok(None) => {}
            Err(e) => shared.give_up(e.to_string()),
        }
    };
    thread::Builder::new().name("prompt-sums".into()).spawn(work).context("a thread of the prompt cache")
}
