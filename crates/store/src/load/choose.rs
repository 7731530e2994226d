//! Chooses how each file is read if the user did not: by how much of it is cached, by free memory, and by the disk's speeds. Every choice comes with its
//! reason.

use super::options::{LoadMode, LoadOptions};
use super::probe::{self, Speeds};
use super::read::ReadFile;
use crate::error::Error;
use crate::page_cache::resident_bytes;
use crate::platform;

/// Files below this many bytes are mapped: for them the choice does not matter.
pub(crate) const SMALL: u64 = 64 << 20;
/// A map is preferred unless it is slower by more than this factor: it leaves the file in the page cache, so the next start is immediate.
const TIE: f64 = 1.03;

/// The same if the map is read ahead while a device starts: it begins sooner.
const TIE_AHEAD: f64 = 1.1;

pub(crate) struct Chooser<'a> {
    options: &'a LoadOptions,
    /// Bytes of all files.
    total: u64,
    speeds: Vec<(u64, Option<Speeds>)>,
}

impl<'a> Chooser<'a> {
    /// For files of `total` bytes in all.
    pub fn new(options: &'a LoadOptions, total: u64) -> Chooser<'a> {
        Chooser { options, total, speeds: Vec::new() }
    }

    /// The way (never `Auto`), the reason, and whether all of the file is in the page cache.
    pub fn choose(&mut self, file: &ReadFile, wanted: u64) -> Result<(LoadMode, String, bool), Error> {
        let cached = resident_bytes(&file.buffered, 0, file.len).ok().map(|n| n.min(file.len));
        // For a file that is arriving, the page cache says nothing about how much of it is there.
        let all = cached == Some(file.len) && !file.is_arriving();
        if self.options.mode != LoadMode::Auto {
            return Ok((self.options.mode, "asked for".into(), all));
        }
        if wanted < file.len / 2 {
            // An image would be mostly unused addresses, and its large pages mostly unwanted bytes.
            return Ok((LoadMode::Mmap, "most of it stays on disk".into(), all));
        }
        let (mode, reason) = self.by_facts(file, cached);
        Ok((mode, reason, all))
    }

    fn by_facts(&mut self, file: &ReadFile, cached: Option<u64>) -> (LoadMode, String) {
        // 1. Nothing to choose
        if file.is_arriving() {
            // Bytes that arrive are in the page cache.
            return match remote(file) {
                Some(name) => (LoadMode::Pread, format!("still arriving, on {name}")),
                None => (LoadMode::Mmap, "still arriving".into()),
            };
        }
        if file.len < SMALL {
            return (LoadMode::Mmap, "small".into());
        }
        let Some(cached) = cached else {
            return (LoadMode::Mmap, "whether it is in the page cache is not told".into());
        };
        let percent = 100.0 * cached as f64 / file.len as f64;
        if cached == file.len {
            return (LoadMode::Mmap, "all of it is in the page cache".into());
        }
        // 2. No room for a copy
        if let Some(room) = self.options.copy_budget.filter(|room| *room < self.total) {
            let (total, room) = (gigabytes(self.total), gigabytes(room));
            return (
                LoadMode::Mmap,
                format!("{total} of weights, but memory for {room}: the kernel drops and rereads"),
            );
        }
        // 3. Over a network a page fault may wait for ever, and a file may vanish
        if let Some(name) = remote(file) {
            return (LoadMode::Pread, format!("on {name}, {percent:.0}% in the page cache"));
        }
        // 4. By time
        let Some(speeds) = self.speeds(file) else {
            return (LoadMode::Mmap, format!("{percent:.0}% in the page cache"));
        };
        let Some(direct) = speeds.direct else {
            return (LoadMode::Mmap, format!("{percent:.0}% in the page cache, and the disk refuses direct reads"));
        };
        let times = [(file.len - cached) as f64 / speeds.mapped, file.len as f64 / direct];
        let tie = if self.options.ahead { TIE_AHEAD } else { TIE };
        let mode = if times[0] <= tie * times[1] { LoadMode::Mmap } else { LoadMode::Direct };
        let reason = format!(
            "{percent:.0}% in the page cache; mapped the rest takes {:.2} s at {}/s, direct all {:.2} s at {}/s",
            times[0],
            gigabytes(speeds.mapped as u64),
            times[1],
            gigabytes(direct as u64)
        );
        (mode, reason)
    }

    /// The speeds of the file's disk, asked for once.
    fn speeds(&mut self, file: &ReadFile) -> Option<Speeds> {
        if let Some((_, known)) = self.speeds.iter().find(|(device, _)| *device == file.device()) {
            return *known;
        }
        let found = probe::speeds(file, self.options).map(|(speeds, _)| speeds);
        self.speeds.push((file.device(), found));
        found
    }
}

/// Whether a file is brought into the page cache before its use is known. True if it will be mapped, as far as that is known without measuring.
pub(crate) fn is_read_ahead(file: &ReadFile, options: &LoadOptions) -> bool {
    let is_slower = |speeds: Speeds| speeds.direct.is_some_and(|direct| direct > TIE_AHEAD * speeds.mapped);
    let speeds = || options.disk_speeds_file.as_deref().and_then(|memory| probe::recall(file, memory));
    file.len >= SMALL
        && !file.is_arriving()
        && remote(file).is_none()
        && resident_bytes(&file.buffered, 0, file.len).is_ok_and(|cached| cached < file.len)
        && (options.mode == LoadMode::Mmap || speeds().is_some_and(|speeds| !is_slower(speeds)))
}

fn gigabytes(n: u64) -> String {
    format!("{:.2} GB", n as f64 / 1e9)
}

/// The name of a network file system.
fn remote(file: &ReadFile) -> Option<&'static str> {
    platform::remote(&file.buffered)
}
