//! Speeds of a disk in bytes per second: past the page cache, and into a map. They are measured on parts of a model's file that are not cached, in a fraction
//! of a second, and remembered for the device.

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::options::{LoadMode, LoadOptions};
use super::read::ReadFile;
use super::sink::Chunk;
use super::staging::{Filled, Staging};
use crate::atomic::AtomicFile;
use crate::map::Map;
use crate::memory::host_memory;
use crate::page_cache::{drop_cached, resident_bytes};
use crate::small::read_small;

/// Bytes that each way of reading is tried on, and the time after which no more requests are made.
const SAMPLE: u64 = 128 << 20;
const PATIENCE: Duration = Duration::from_millis(150);

/// Bytes per second.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Speeds {
    /// Past the page cache; `None` where that is refused.
    pub direct: Option<f64>,
    /// Populating a map.
    pub mapped: f64,
}

/// Speeds by device number, as JSON.
#[derive(Default, Serialize, Deserialize)]
struct Remembered(BTreeMap<String, Speeds>);

fn key(file: &ReadFile) -> String {
    let device = file.device();
    // A device is a signed number on some systems.
    format!("{}:{}", libc::major(device as libc::dev_t), libc::minor(device as libc::dev_t))
}

/// Bytes that the memory of disks may have: thousands of disks.
const MAX_MEMORY: u64 = 1 << 20;

/// The speeds in `json`, by device. Impossible speeds are dropped, and text that cannot be parsed counts as empty.
fn remembered(json: &[u8]) -> Remembered {
    let Remembered(mut all) = serde_json::from_slice(json).unwrap_or_default();
    let possible = |x: f64| x.is_finite() && x > 0.0;
    all.retain(|_, s| possible(s.mapped) && s.direct.is_none_or(possible));
    Remembered(all)
}

/// What [`remembered`] finds in `json`, for fuzzing: each disk's speeds.
#[doc(hidden)]
pub fn remembered_speeds(json: &[u8]) -> Vec<Speeds> {
    remembered(json).0.into_values().collect()
}

/// What is remembered of the file's device.
pub(crate) fn recall(file: &ReadFile, memory: &Path) -> Option<Speeds> {
    remembered(&read_small(memory, MAX_MEMORY).ok()?).0.get(&key(file)).copied()
}

fn remember(file: &ReadFile, memory: &Path, speeds: Speeds) {
    let Remembered(mut all) = remembered(&read_small(memory, MAX_MEMORY).unwrap_or_default());
    all.insert(key(file), speeds);
    let json = serde_json::to_vec_pretty(&Remembered(all)).expect("strings and numbers are always JSON");
    // If this cannot be written, the next start measures again.
    let _ = AtomicFile::create(memory).and_then(|mut f| f.write_all(&json).and_then(|()| f.commit()));
}

/// The speeds of the disk that `file` is on, and whether they were measured now. `None` where they cannot be measured: nearly all of
/// the file is in the page cache, or it cannot be read.
pub(crate) fn speeds(file: &ReadFile, options: &LoadOptions) -> Option<(Speeds, bool)> {
    let memory = options.disk_speeds_file.as_deref();
    if let Some(known) = memory.and_then(|m| recall(file, m)) {
        return Some((known, false));
    }
    // Its bytes may not be there, or not yet on the disk.
    if file.is_arriving() {
        return None;
    }
    // Two stretches that are not cached: one for each way, so that neither profits from the other.
    let stretches = (0..file.len / SAMPLE).map(|i| i * SAMPLE..(i + 1) * SAMPLE);
    let is_cold = |r: &Range<u64>| resident_bytes(&file.buffered, r.start, SAMPLE).is_ok_and(|n| n == 0);
    let cold: Vec<Range<u64>> = stretches.filter(is_cold).collect();
    let (first, last) = (cold.first()?.clone(), cold.last()?.clone());
    if first == last {
        return None;
    }
    let speeds = Speeds { direct: direct(file, first, options), mapped: mapped(file, last, options).ok()? };
    if let Some(memory) = memory {
        remember(file, memory, speeds);
    }
    Some((speeds, true))
}

fn direct(file: &ReadFile, part: Range<u64>, options: &LoadOptions) -> Option<f64> {
    let size = options.request(LoadMode::Direct) as u64;
    let begun = Instant::now();
    let (read, late) = (AtomicU64::new(0), AtomicU64::new(0));
    let count = |filled: Filled| {
        read.fetch_add(filled.len() as u64, Ordering::Relaxed);
        late.fetch_max(begun.elapsed().as_nanos() as u64, Ordering::Relaxed);
    };
    let chunks = part.step_by(size as usize).map(|offset| Chunk { file: 0, offset, len: size as usize });
    let staging = Staging::new(chunks, options.depth, size as usize, &mut host_memory, count);
    let staging = staging.ok()?.until(begun + PATIENCE);
    let notes = staging.read(&[&file.path], options).ok()?;
    let refused = notes.iter().any(|n| n.contains("buffered"));
    let time = Duration::from_nanos(late.into_inner()).as_secs_f64();
    (!refused && time > 0.0).then(|| read.into_inner() as f64 / time)
}

fn mapped(file: &ReadFile, part: Range<u64>, options: &LoadOptions) -> io::Result<f64> {
    let map = Map::file(&file.buffered, file.len as usize)?;
    map.watch();
    let begun = Instant::now();
    let (next, read) = (AtomicU64::new(part.start), AtomicU64::new(0));
    let size = options.request(LoadMode::Mmap) as u64;
    let work = || -> io::Result<()> {
        while begun.elapsed() < PATIENCE {
            let from = next.fetch_add(size, Ordering::Relaxed);
            if from >= part.end {
                break;
            }
            map.populate(from as usize..(from + size).min(part.end) as usize)?;
            read.fetch_add(size.min(part.end - from), Ordering::Relaxed);
        }
        Ok(())
    };
    thread::scope(|scope| -> io::Result<()> {
        let others: Vec<_> = (1..options.threads).map(|_| scope.spawn(work)).collect();
        work()?;
        others.into_iter().try_for_each(|t| t.join().unwrap_or(Ok(())))
    })?;
    let speed = read.into_inner() as f64 / begun.elapsed().as_secs_f64();
    drop(map);
    // Leaves the page cache as it was, whichever way is chosen.
    let _ = drop_cached(&file.buffered, part.start, part.end - part.start);
    Ok(speed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn speeds_that_no_disk_has_are_not_remembered() {
        let json = br#"{"1:1": {"direct": 2e9, "mapped": 1e9}, "1:2": {"direct": null, "mapped": 5.0}, "1:3": {"direct": -1, "mapped": 1e9},
            "1:4": {"direct": 0, "mapped": 1e9}, "1:5": {"direct": 1, "mapped": 0}}"#;
        assert_eq!(remembered(json).0.into_keys().collect::<Vec<_>>(), ["1:1", "1:2"]);
        for broken in [&b"{"[..], b"[]", b"", br#"{"1:1": {"direct": 1e999, "mapped": 1}}"#] {
            assert!(remembered(broken).0.is_empty());
        }
    }
}
