//! The record of which bytes of a blob are there.
//!
//! The blob is divided into blocks, each filled from its beginning. For each, the record has two numbers of bytes: those written, and those that had reached the
//! disk at the last sync. Bytes are written before they are counted, so after a kill the first number is right. After a crash of the machine only the second is: the
//! record has the id of the boot that it was written in, and a later boot takes the second. (Whatever the record says, the whole is summed before it gets its name.)

use std::fs;
use std::path::{Path, PathBuf};

/// What follows a blob's name while it arrives.
pub const INCOMPLETE: &str = ".sluice.incomplete";
/// What follows a blob's name for the record of its progress.
pub(super) const PROGRESS: &str = ".sluice.progress";

/// The path of an incomplete blob.
pub(super) fn incomplete(blob: &Path) -> PathBuf {
    with(blob, INCOMPLETE)
}

/// Removes what may be left of an incomplete blob.
pub fn discard(blob: &Path) {
    let _ = fs::remove_file(with(blob, PROGRESS));
    let _ = fs::remove_file(incomplete(blob));
}

pub(super) fn with(blob: &Path, end: &str) -> PathBuf {
    let mut name = blob.file_name().unwrap_or_default().to_owned();
    name.push(end);
    blob.with_file_name(name)
}

pub(super) const MAGIC: &[u8; 16] = b"SLUICE-PARTIAL-1";
/// Magic, size of the blob, length of a block, boot.
pub(super) const HEADER: usize = 16 + 8 + 8 + 40;
/// Bytes written, bytes synced.
pub(super) const ENTRY: usize = 16;
/// What a record may have at most; a blob of 4 TB has that many.
pub(super) const MAX_BLOCKS: u64 = 1 << 20;

/// Bytes of an incomplete blob that are there, and all of them.
pub fn progress(blob: &Path) -> Option<(u64, u64)> {
    let record = fs::read(with(blob, PROGRESS)).ok()?;
    let (size, block, written) = read_record(&record, &boot_id())?;
    let length = |i: usize| block.min(size - i as u64 * block);
    Some((written.iter().enumerate().map(|(i, (n, _))| length(i).min(*n)).sum(), size))
}

pub(super) fn boot_id() -> [u8; 40] {
    let mut id = [0; 40];
    let text = fs::read("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let n = text.len().min(36);
    id[..n].copy_from_slice(&text[..n]);
    id
}

/// The size of the blob, the length of a block, and of each block the bytes that are there and those of them that were synced.
pub(super) type Record = (u64, u64, Vec<(u64, u64)>);

pub(super) fn read_record(record: &[u8], boot: &[u8; 40]) -> Option<Record> {
    let number = |at: usize| Some(u64::from_le_bytes(record.get(at..at + 8)?.try_into().ok()?));
    let (size, block) = (number(16)?, number(24)?);
    let count = size.checked_div(block)?.checked_add(u64::from(size % block > 0))?;
    if record.get(..16)? != MAGIC
        || size == 0
        || count > MAX_BLOCKS
        || record.len() as u64 != HEADER as u64 + count * ENTRY as u64
    {
        return None;
    }
    // Without an id of the boot only what was synced is sure.
    let is_same_boot = record.get(32..HEADER)? == boot && boot[0] != 0;
    let entry = |i: usize| {
        let (written, synced) = (number(HEADER + i * ENTRY)?, number(HEADER + i * ENTRY + 8)?);
        let is_right = synced <= written && written <= block.min(size - i as u64 * block);
        is_right.then_some((if is_same_boot { written } else { synced }, synced))
    };
    let entries: Option<Vec<(u64, u64)>> = (0..count as usize).map(entry).collect();
    Some((size, block, entries?))
}
