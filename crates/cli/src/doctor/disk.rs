//! How fast a disk is: short direct reads of a large file that is there, or of a temporary one.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde::Serialize;

use crate::disk::{self, Case, Order, PAGE, mix};
use crate::units;

/// A file must be this large to be measured with.
const LARGE: u64 = 128 << 20;
/// A temporary file is written only if the disk has much more room than it takes.
const ROOM: u64 = 8 * LARGE;
/// Files that are looked at, at most.
const LOOKED_AT: usize = 20_000;

#[derive(Serialize)]
pub struct Speed {
    /// Speed of requests of 4 MiB, eight at once, in any order.
    pub bytes_per_second: f64,
    /// Time of one request of 128 KiB, alone.
    pub small_request_seconds: f64,
    pub measured_with: String,
}

/// Measures the disk of `folder`, with the largest file below `with` if there is one.
///
/// # Errors
/// Too little room, a disk that cannot be written or read directly.
pub fn measure(folder: &Path, with: Option<&Path>) -> Result<Speed> {
    let device = fs::metadata(folder)?.dev();
    let found = with.and_then(|with| largest(with, device));
    let (file, measured_with, _held) = match found {
        Some((path, len)) => {
            let name = format!("with a file of {} that was there", units::bytes(len));
            ((path, len), name, None)
        }
        None => {
            let (path, file) = temporary(folder)?;
            let name = format!("with a temporary file of {}, just written", units::bytes(LARGE));
            ((path, LARGE), name, Some(file))
        }
    };
    let of = |request: u64, depth: usize, milliseconds: u64, round: u64| {
        let case = Case { request, depth, order: Order::Random, align: PAGE };
        disk::measure(std::slice::from_ref(&file), case, Duration::from_millis(milliseconds), round)
    };
    let (small, large) = (of(128 << 10, 1, 200, 0)?, of(4 << 20, 8, 700, 1)?);
    Ok(Speed { bytes_per_second: large, small_request_seconds: (128 << 10) as f64 / small, measured_with })
}

/// The largest file on `device` that is large enough.
fn largest(folder: &Path, device: u64) -> Option<(PathBuf, u64)> {
    let (mut todo, mut best, mut seen) = (vec![folder.to_owned()], None, 0);
    while let Some(folder) = todo.pop() {
        for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
            seen += 1;
            if seen > LOOKED_AT {
                return best;
            }
            let Ok(facts) = entry.metadata() else { continue };
            // A file that is still being fetched has holes, which are read without the disk.
            let is_whole = facts.blocks() * 512 + (1 << 20) >= facts.len();
            if facts.is_dir() {
                todo.push(entry.path());
            } else if facts.is_file()
                && facts.dev() == device
                && is_whole
                && facts.len() >= best.as_ref().map_or(LARGE, |(_, len)| *len)
            {
                best = Some((entry.path(), facts.len()));
            }
        }
    }
    best
}

/// A file without a name, which is gone when it is closed, whatever happens. Its bytes cannot be compressed.
fn temporary(folder: &Path) -> Result<(PathBuf, File)> {
    let free = sluice_store::free_space(folder)?;
    ensure!(free >= ROOM, "{} free are too little for a temporary file", units::bytes(free));
    let mut file = nameless(folder).context("no temporary file can be made there")?;
    let mut block = vec![0; 1 << 20];
    for at in 0..LARGE >> 20 {
        for (i, word) in block.chunks_exact_mut(8).enumerate() {
            word.copy_from_slice(&mix((at << 32) + i as u64).to_le_bytes());
        }
        file.write_all(&block)?;
    }
    file.sync_all()?;
    use std::os::fd::AsRawFd;
    Ok((PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd())), file))
}

#[cfg(target_os = "linux")]
fn nameless(folder: &Path) -> std::io::Result<File> {
    use std::os::unix::fs::OpenOptionsExt;
    let flag = rustix::fs::OFlags::TMPFILE.bits() as i32;
    fs::OpenOptions::new().read(true).write(true).custom_flags(flag).mode(0o600).open(folder)
}

/// Other systems cannot open a file without a name a second time.
#[cfg(not(target_os = "linux"))]
fn nameless(_folder: &Path) -> std::io::Result<File> {
    Err(std::io::ErrorKind::Unsupported.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_large_and_whole_file_is_measured_with() {
        let dir = tempfile::tempdir().unwrap();
        let device = fs::metadata(dir.path()).unwrap().dev();
        fs::write(dir.path().join("small"), vec![1; 1 << 20]).unwrap();
        File::create(dir.path().join("hole")).unwrap().set_len(2 * LARGE).unwrap();
        assert_eq!(largest(dir.path(), device), None);
    }
}
