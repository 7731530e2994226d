//! The disk's bandwidth and latency for reads of an expert's size, past the page cache: measured, for a second or two, on a model's own files.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use super::estimate::Disk;

/// Time of measuring reads one at a time, and many at once.
const ALONE: Duration = Duration::from_millis(500);
const SPAN: Duration = Duration::from_millis(1500);
/// Reads under way at once.
const THREADS: usize = 8;
const PAGE: usize = 4096;
/// As Linux has it on x86-64.
const O_DIRECT: i32 = 0o40000;

/// What reads of `size` bytes at places all over `files` take.
///
/// # Errors
/// Files that are too small to say anything, or a file system without direct reads.
pub fn measure(folder: &Path, files: &[(String, u64)], size: u64) -> Result<Disk> {
    let size = (size as usize).next_multiple_of(PAGE).clamp(256 << 10, 16 << 20);
    let open = |(name, len): &(String, u64)| -> Result<Option<(File, u64)>> {
        if *len < 4 * size as u64 {
            return Ok(None);
        }
        let path = folder.join(name);
        let file = OpenOptions::new().read(true).custom_flags(O_DIRECT).open(&path);
        Ok(Some((file.with_context(|| format!("{}: no direct reads (give --disk-bandwidth)", path.display()))?, *len)))
    };
    let files: Vec<(File, u64)> = files.iter().filter_map(|f| open(f).transpose()).collect::<Result<_>>()?;
    ensure!(
        !files.is_empty(),
        "{}: its files are too small to measure a disk by (give --disk-bandwidth)",
        folder.display()
    );
    let next = AtomicU64::new(1);
    let alone = size as f64 / reads(&files, size, 1, ALONE, &next)?;
    let bandwidth = reads(&files, size, THREADS, SPAN, &next)?;
    Ok(Disk { bandwidth, latency: (alone - size as f64 / bandwidth).max(0.0) })
}

/// Bytes per second of `threads` threads that read `size` bytes at a time for so long. `next`: how many places were read before.
fn reads(files: &[(File, u64)], size: usize, threads: usize, span: Duration, next: &AtomicU64) -> Result<f64> {
    let begin = Instant::now();
    let one = || -> Result<u64> {
        // Direct reads want whole pages in memory, too.
        let mut space = vec![0u8; size + PAGE];
        let shift = space.as_ptr().align_offset(PAGE);
        let buffer = &mut space[shift..shift + size];
        let mut read = 0;
        while begin.elapsed() < span {
            // Places far from each other, none twice soon.
            let n = next.fetch_add(1, Ordering::Relaxed).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            let (file, len) = &files[(n >> 8) as usize % files.len()];
            let pages = (len - size as u64) / PAGE as u64;
            let at = (n >> 20) % pages.max(1) * PAGE as u64;
            file.read_exact_at(buffer, at).context("cannot read past the page cache (give --disk-bandwidth)")?;
            read += size as u64;
        }
        Ok(read)
    };
    let bytes = thread::scope(|scope| {
        let all: Vec<_> = (0..threads).map(|_| scope.spawn(one)).collect();
        all.into_iter().map(|t| t.join().unwrap_or_else(|p| std::panic::resume_unwind(p))).sum::<Result<u64>>()
    })?;
    Ok(bytes as f64 / begin.elapsed().as_secs_f64())
}
