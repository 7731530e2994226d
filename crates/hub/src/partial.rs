//! A blob that is still arriving, in several places at once: `BLOB.sluice.incomplete` has its final length from the start, and `BLOB.sluice.progress` says which
//! bytes of it are there. Neither name is one of `huggingface_hub`'s, which takes a file's length for what is there.
//!
//! The blob is divided into segments, each filled from its beginning. For each, the record has two numbers of bytes: those written, and those that had reached the
//! disk at the last sync. Bytes are written before they are counted, so after a kill the first number is right. After a crash of the machine only the second is: the
//! record has the id of the boot that it was written in, and a later boot takes the second. (Whatever the record says, the whole is summed before it gets its name.)

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use rustix::fs::{FallocateFlags, fallocate, fdatasync, fsync};
use rustix::io::Errno;

use crate::error::{Error, Naming, Result};

const MAGIC: &[u8; 16] = b"SLUICE-PARTIAL-1";
/// Magic, size of the blob, length of a segment, boot.
const HEADER: usize = 16 + 8 + 8 + 40;
/// Bytes written, bytes synced.
const ENTRY: usize = 16;
/// The least and the greatest length of a segment: large enough that requests do not count, small enough that several connections share a file.
const SEGMENT: (u64, u64) = (8 << 20, 64 << 20);
/// What a record may have at most; a blob of 4 TB has that many.
const MAX_SEGMENTS: u64 = 1 << 20;

/// A stretch of the blob.
#[derive(Debug)]
struct Segment {
    is_taken: AtomicBool,
    written: AtomicU64,
    synced: AtomicU64,
}

/// A blob that is still arriving. The caller holds its lock.
#[derive(Debug)]
pub struct Partial {
    path: PathBuf,
    record_path: PathBuf,
    data: File,
    record: File,
    size: u64,
    segment: u64,
    segments: Vec<Segment>,
    syncing: Mutex<()>,
}

/// What follows a blob's name while it arrives.
pub const INCOMPLETE: &str = ".sluice.incomplete";
/// What follows a blob's name for the record of its progress.
const PROGRESS: &str = ".sluice.progress";

/// The path of an incomplete blob.
pub fn incomplete(blob: &Path) -> PathBuf {
    with(blob, INCOMPLETE)
}

/// Removes what may be left of an incomplete blob.
pub fn discard(blob: &Path) {
    let _ = fs::remove_file(with(blob, PROGRESS));
    let _ = fs::remove_file(incomplete(blob));
}

/// Bytes of an incomplete blob that are there, and all of them.
pub fn progress(blob: &Path) -> Option<(u64, u64)> {
    let record = fs::read(with(blob, PROGRESS)).ok()?;
    let (size, segment, written) = read_record(&record, &boot_id())?;
    let length = |i: usize| segment.min(size - i as u64 * segment);
    Some((written.iter().enumerate().map(|(i, (n, _))| length(i).min(*n)).sum(), size))
}

fn with(blob: &Path, end: &str) -> PathBuf {
    let mut name = blob.file_name().unwrap_or_default().to_owned();
    name.push(end);
    blob.with_file_name(name)
}

fn boot_id() -> [u8; 40] {
    let mut id = [0; 40];
    let text = fs::read("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let n = text.len().min(36);
    id[..n].copy_from_slice(&text[..n]);
    id
}

/// The size of the blob, the length of a segment, and of each segment the bytes that are there and those of them that were synced.
type Record = (u64, u64, Vec<(u64, u64)>);

fn read_record(record: &[u8], boot: &[u8; 40]) -> Option<Record> {
    let number = |at: usize| Some(u64::from_le_bytes(record.get(at..at + 8)?.try_into().ok()?));
    let (size, segment) = (number(16)?, number(24)?);
    let count = size.checked_div(segment)?.checked_add(u64::from(size % segment > 0))?;
    if record.get(..16)? != MAGIC
        || size == 0
        || count > MAX_SEGMENTS
        || record.len() as u64 != HEADER as u64 + count * ENTRY as u64
    {
        return None;
    }
    // Without an id of the boot only what was synced is sure.
    let is_same_boot = record.get(32..HEADER)? == boot && boot[0] != 0;
    let entry = |i: usize| {
        let (written, synced) = (number(HEADER + i * ENTRY)?, number(HEADER + i * ENTRY + 8)?);
        let is_right = synced <= written && written <= segment.min(size - i as u64 * segment);
        is_right.then_some((if is_same_boot { written } else { synced }, synced))
    };
    let entries: Option<Vec<(u64, u64)>> = (0..count as usize).map(entry).collect();
    Some((size, segment, entries?))
}

impl Partial {
    /// Goes on with an incomplete blob of `size` bytes, or begins one.
    pub fn open(blob: &Path, size: u64) -> Result<Partial> {
        let (path, record_path) = (incomplete(blob), with(blob, PROGRESS));
        let open = |path: &Path| {
            let file =
                OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path).naming(path)?;
            let is_file = file.metadata().naming(path)?.is_file();
            let other = || std::io::Error::other("not a regular file");
            if is_file { Ok(file) } else { Err(Error::Io { path: path.to_owned(), cause: other() }) }
        };
        let (data, record) = (open(&path)?, open(&record_path)?);
        let boot = boot_id();
        let mut known = Vec::new();
        if record.metadata().naming(&record_path)?.len() <= HEADER as u64 + MAX_SEGMENTS * ENTRY as u64 {
            known = fs::read(&record_path).naming(&record_path)?;
        }
        let known = read_record(&known, &boot).filter(|(known, ..)| *known == size);
        let known = known.filter(|_| data.metadata().is_ok_and(|m| m.len() == size));
        let usual =
            size.div_ceil(32).next_multiple_of(1 << 20).clamp(SEGMENT.0, SEGMENT.1).max(size.div_ceil(MAX_SEGMENTS));
        if known.is_none() {
            data.set_len(0).naming(&path)?;
        }
        let (segment, entries) = known.map_or((usual, Vec::new()), |(_, segment, entries)| (segment, entries));
        let count = size.div_ceil(segment) as usize;
        let segments = (0..count).map(|i| {
            let (written, synced) = entries.get(i).copied().unwrap_or_default();
            Segment {
                is_taken: AtomicBool::new(false),
                written: AtomicU64::new(written),
                synced: AtomicU64::new(synced),
            }
        });
        let partial = Partial {
            path,
            record_path,
            data,
            record,
            size,
            segment,
            segments: segments.collect(),
            syncing: Mutex::new(()),
        };
        partial.write_record(&boot)?;
        Ok(partial)
    }

    /// The numbers first, since with an older boot's id they are read with care.
    fn write_record(&self, boot: &[u8; 40]) -> Result<()> {
        let write = |bytes: &[u8], at: u64| self.record.write_all_at(bytes, at).naming(&self.record_path);
        self.record.set_len((HEADER + self.segments.len() * ENTRY) as u64).naming(&self.record_path)?;
        for (i, segment) in self.segments.iter().enumerate() {
            let written = segment.written.load(Ordering::Relaxed).to_le_bytes();
            let synced = segment.synced.load(Ordering::Relaxed).to_le_bytes();
            write(&[written, synced].concat(), (HEADER + i * ENTRY) as u64)?;
        }
        let header = [&MAGIC[..], &self.size.to_le_bytes(), &self.segment.to_le_bytes(), boot].concat();
        write(&header, 0)
    }

    /// Takes the room that the whole blob needs.
    ///
    /// # Errors
    /// A full disk, as [`Errno::NOSPC`].
    pub fn reserve(&self) -> Result<()> {
        match fallocate(&self.data, FallocateFlags::empty(), 0, self.size) {
            Ok(()) => Ok(()),
            // Not every file system can; then a full disk is met on the way.
            Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL) => self.data.set_len(self.size).naming(&self.path),
            Err(e) => Err(e).naming(&self.path),
        }
    }

    /// Bytes of the disk that it has not taken yet.
    pub fn room_needed(&self) -> u64 {
        let taken = self.data.metadata().map_or(0, |m| m.blocks() * 512);
        self.size.saturating_sub(taken)
    }

    /// Bytes of the blob.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Bytes that are there.
    pub fn written(&self) -> u64 {
        self.segments.iter().map(|s| s.written.load(Ordering::Acquire)).sum()
    }

    fn length(&self, index: usize) -> u64 {
        self.segment.min(self.size - index as u64 * self.segment)
    }

    /// Takes the first segment that is not whole and that nobody fills.
    pub fn claim(&self) -> Option<Claim<'_>> {
        let index = (0..self.segments.len()).find(|&i| self.take(i))?;
        Some(Claim { partial: self, index })
    }

    fn take(&self, index: usize) -> bool {
        let segment = &self.segments[index];
        let is_whole = || segment.written.load(Ordering::Acquire) == self.length(index);
        !is_whole() && !segment.is_taken.swap(true, Ordering::AcqRel) && {
            // It may have become whole in between.
            let mine = !is_whole();
            segment.is_taken.store(mine, Ordering::Release);
            mine
        }
    }

    /// Bytes that are there without a gap from the beginning on.
    pub fn frontier(&self) -> u64 {
        let mut end = 0;
        for (i, segment) in self.segments.iter().enumerate() {
            let written = segment.written.load(Ordering::Acquire);
            end += written;
            if written < self.length(i) {
                break;
            }
        }
        end
    }

    /// Reads bytes before the frontier.
    pub fn read(&self, buffer: &mut [u8], at: u64) -> Result<()> {
        self.data.read_exact_at(buffer, at).naming(&self.path)
    }

    /// Makes what is there safe from a crash of the machine.
    pub fn sync(&self) -> Result<()> {
        let _one = self.syncing.lock().unwrap_or_else(|e| e.into_inner());
        let written: Vec<u64> = self.segments.iter().map(|s| s.written.load(Ordering::Acquire)).collect();
        let changed =
            |(i, n): (usize, &u64)| (self.segments[i].synced.load(Ordering::Relaxed) != *n).then_some((i, *n));
        let changed: Vec<(usize, u64)> = written.iter().enumerate().filter_map(changed).collect();
        if changed.is_empty() {
            return Ok(());
        }
        fdatasync(&self.data).naming(&self.path)?;
        for (i, n) in changed {
            self.record.write_all_at(&n.to_le_bytes(), (HEADER + i * ENTRY + 8) as u64).naming(&self.record_path)?;
            self.segments[i].synced.store(n, Ordering::Relaxed);
        }
        fdatasync(&self.record).naming(&self.record_path)
    }

    /// Forgets all bytes, because they are wrong. Nobody may be filling a segment.
    pub fn reset(&self) -> Result<()> {
        let _one = self.syncing.lock().unwrap_or_else(|e| e.into_inner());
        for segment in &self.segments {
            segment.synced.store(0, Ordering::Relaxed);
            segment.written.store(0, Ordering::Release);
        }
        self.write_record(&boot_id())
    }

    /// Gives the whole blob its name, once its bytes are on the disk.
    pub fn finish(&self, blob: &Path) -> Result<()> {
        fsync(&self.data).naming(&self.path)?;
        fs::rename(&self.path, blob).naming(blob)?;
        sync_folder(blob)?;
        let _ = fs::remove_file(&self.record_path);
        Ok(())
    }
}

/// Makes a name in a folder safe from a crash of the machine.
pub fn sync_folder(path: &Path) -> Result<()> {
    let folder = path.parent().unwrap_or(Path::new("."));
    let opened = File::open(folder).naming(folder)?;
    fsync(&opened).naming(folder)
}

/// A segment that only its holder fills.
#[derive(Debug)]
pub struct Claim<'a> {
    partial: &'a Partial,
    index: usize,
}

impl Claim<'_> {
    /// Where in the blob its next byte belongs, and where the segment ends.
    pub fn range(&self) -> (u64, u64) {
        let begin = self.index as u64 * self.partial.segment;
        let written = self.partial.segments[self.index].written.load(Ordering::Acquire);
        (begin + written, begin + self.partial.length(self.index))
    }

    /// Appends bytes to the segment: first the bytes, then the record of them.
    pub fn write(&self, bytes: &[u8]) -> Result<()> {
        let (at, end) = self.range();
        assert!(bytes.len() as u64 <= end - at, "more than the segment has");
        let partial = self.partial;
        partial.data.write_all_at(bytes, at).naming(&partial.path)?;
        let written = at + bytes.len() as u64 - self.index as u64 * partial.segment;
        let place = (HEADER + self.index * ENTRY) as u64;
        partial.record.write_all_at(&written.to_le_bytes(), place).naming(&partial.record_path)?;
        partial.segments[self.index].written.store(written, Ordering::Release);
        Ok(())
    }

    /// The segment after this one, for a response that goes on; `None` if another fills it or it is whole.
    pub fn next(self) -> Option<Self> {
        let (partial, index) = (self.partial, self.index + 1);
        drop(self);
        (index < partial.segments.len() && partial.take(index)).then(|| Claim { partial, index })
    }
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        self.partial.segments[self.index].is_taken.store(false, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZE: u64 = (20 << 20) + 5;

    fn filled(blob: &Path) -> Partial {
        let partial = Partial::open(blob, SIZE).unwrap();
        partial.reserve().unwrap();
        {
            let (first, second) = (partial.claim().unwrap(), partial.claim().unwrap());
            assert_eq!((first.range(), second.range()), ((0, 8 << 20), (8 << 20, 16 << 20)));
            first.write(&[1; 1000]).unwrap();
            second.write(&[2; 500]).unwrap();
        }
        partial
    }

    #[test]
    fn what_was_written_is_there_after_a_kill() {
        let dir = tempfile::tempdir().unwrap();
        let blob = dir.path().join("abc");
        drop(filled(&blob));
        assert_eq!(progress(&blob), Some((1500, SIZE)));
        let again = Partial::open(&blob, SIZE).unwrap();
        assert_eq!((again.written(), again.frontier()), (1500, 1000));
        let mut bytes = [0; 500];
        again.read(&mut bytes, 8 << 20).unwrap();
        assert_eq!(bytes, [2; 500]);
        assert_eq!(again.claim().unwrap().range(), (1000, 8 << 20));
    }

    #[test]
    fn after_a_crash_of_the_machine_only_what_was_synced_counts() {
        let dir = tempfile::tempdir().unwrap();
        let blob = dir.path().join("abc");
        let partial = filled(&blob);
        partial.sync().unwrap();
        partial.claim().unwrap().write(&[1; 24]).unwrap();
        drop(partial);
        assert_eq!(progress(&blob), Some((1524, SIZE)));
        // Another boot.
        let record = OpenOptions::new().write(true).open(dir.path().join("abc.sluice.progress")).unwrap();
        record.write_all_at(b"another", 32).unwrap();
        assert_eq!(Partial::open(&blob, SIZE).unwrap().written(), 1500);
    }

    #[test]
    fn a_record_that_cannot_be_is_begun_again() {
        let dir = tempfile::tempdir().unwrap();
        let blob = dir.path().join("abc");
        let record = dir.path().join("abc.sluice.progress");
        drop(filled(&blob));
        let good = fs::read(&record).unwrap();
        let with = |at: usize, bytes: &[u8]| {
            let mut bad = good.clone();
            bad[at..at + bytes.len()].copy_from_slice(bytes);
            bad
        };
        let huge = u64::MAX.to_le_bytes();
        for bad in [
            vec![],
            good[..good.len() - 1].to_vec(),
            with(0, b"X"),
            with(16, &huge),
            with(24, &[0; 8]),
            with(24, &1_u64.to_le_bytes()),
            with(HEADER, &huge),
            with(24, &huge),
        ] {
            fs::write(&record, &bad).unwrap();
            assert_eq!(Partial::open(&blob, SIZE).unwrap().written(), 0);
        }
        // Nor is one whose file has another length.
        fs::write(&record, &good).unwrap();
        OpenOptions::new().write(true).open(incomplete(&blob)).unwrap().set_len(SIZE - 1).unwrap();
        assert_eq!(Partial::open(&blob, SIZE).unwrap().written(), 0);
    }

    #[test]
    fn no_record_promises_more_than_the_blob_has() {
        let mut random = fastrand::Rng::with_seed(1);
        let dir = tempfile::tempdir().unwrap();
        let blob = dir.path().join("abc");
        drop(filled(&blob));
        let good = fs::read(dir.path().join("abc.sluice.progress")).unwrap();
        let mut read = 0;
        for _ in 0..20_000 {
            let mut bad = good.clone();
            for _ in 0..random.usize(1..4) {
                let at = random.usize(16..bad.len());
                bad[at] = random.u8(..);
            }
            bad.truncate(random.usize(bad.len() - 2..=bad.len()));
            let Some((size, segment, entries)) = read_record(&bad, &boot_id()) else { continue };
            read += 1;
            assert!(entries.iter().map(|(written, _)| written).sum::<u64>() <= size && segment > 0);
        }
        assert!(read > 0);
    }

    #[test]
    fn a_whole_blob_gets_its_name_and_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let blob = dir.path().join("abc");
        let partial = Partial::open(&blob, 10).unwrap();
        partial.reserve().unwrap();
        partial.claim().unwrap().write(b"0123456789").unwrap();
        assert!(partial.claim().is_none() && !blob.exists());
        partial.finish(&blob).unwrap();
        assert_eq!(fs::read(&blob).unwrap(), b"0123456789");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn claims_go_from_segment_to_segment() {
        let dir = tempfile::tempdir().unwrap();
        let partial = Partial::open(&dir.path().join("abc"), SIZE).unwrap();
        let (first, third) = (partial.claim().unwrap(), {
            let (_a, b) = (partial.claim().unwrap(), partial.claim().unwrap());
            b
        });
        let second = first.next().unwrap();
        assert_eq!(second.range().0, 8 << 20);
        assert!(second.next().is_none());
        drop(third);
        partial.reset().unwrap();
        assert_eq!(partial.written(), 0);
    }
}
