//! The blob: its bytes, what of them is there, and what becomes of it.

use std::fs::{self, File, OpenOptions};
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock};

use rustix::fs::{FallocateFlags, fallocate, fsync};
use rustix::io::Errno;

use super::asks::{Asks, Urgency};
use super::record::{ENTRY, HEADER, MAGIC, MAX_BLOCKS, PROGRESS, boot_id, incomplete, read_record, with};
use crate::error::{Error, Naming, Result};

/// The least length of a block: small enough that a part which is asked for costs little more than itself.
pub(super) const BLOCK: u64 = 64 << 10;
/// How many blocks a large blob has: a record of 4 MiB.
const BLOCKS: u64 = 1 << 18;
/// The least and the greatest bytes of a request in order: large enough that requests do not count, small enough that several connections share a file.
pub(super) const REQUEST: (u64, u64) = (8 << 20, 64 << 20);

/// A part of the blob that is filled from its beginning.
#[derive(Debug)]
pub(super) struct Block {
    pub(super) is_taken: AtomicBool,
    pub(super) written: AtomicU64,
    synced: AtomicU64,
}

/// A blob that is still arriving. The caller holds its lock.
#[derive(Debug)]
pub struct Partial {
    pub(super) path: PathBuf,
    pub(super) record_path: PathBuf,
    pub(super) data: File,
    pub(super) record: File,
    size: u64,
    pub(super) block: u64,
    pub(super) blocks: Vec<Block>,
    /// Bytes of all blocks that are there.
    pub(super) there: AtomicU64,
    /// All blocks before this one are there.
    whole: Mutex<usize>,
    syncing: Mutex<()>,
    asks: Mutex<Asks>,
    /// Its name was given, or why it never will be.
    fate: OnceLock<Result<(), String>>,
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
        if record.metadata().naming(&record_path)?.len() <= HEADER as u64 + MAX_BLOCKS * ENTRY as u64 {
            known = fs::read(&record_path).naming(&record_path)?;
        }
        let known = read_record(&known, &boot).filter(|(known, ..)| *known == size);
        let known = known.filter(|_| data.metadata().is_ok_and(|m| m.len() == size));
        let usual = size.div_ceil(BLOCKS).next_multiple_of(BLOCK);
        if known.is_none() {
            data.set_len(0).naming(&path)?;
        }
        let (block, entries) = known.map_or((usual, Vec::new()), |(_, block, entries)| (block, entries));
        let count = size.div_ceil(block) as usize;
        let blocks = (0..count).map(|i| {
            let (written, synced) = entries.get(i).copied().unwrap_or_default();
            Block { is_taken: AtomicBool::new(false), written: AtomicU64::new(written), synced: AtomicU64::new(synced) }
        });
        let partial = Partial {
            path,
            record_path,
            data,
            record,
            size,
            block,
            blocks: blocks.collect(),
            there: AtomicU64::new(entries.iter().map(|(written, _)| written).sum()),
            whole: Mutex::default(),
            syncing: Mutex::new(()),
            asks: Mutex::default(),
            fate: OnceLock::new(),
        };
        partial.write_record(&boot)?;
        Ok(partial)
    }

    /// The numbers first, since with an older boot's id they are read with care.
    fn write_record(&self, boot: &[u8; 40]) -> Result<()> {
        let write = |bytes: &[u8], at: u64| self.record.write_all_at(bytes, at).naming(&self.record_path);
        self.record.set_len((HEADER + self.blocks.len() * ENTRY) as u64).naming(&self.record_path)?;
        let numbers = self.blocks.iter().flat_map(|block| [&block.written, &block.synced]);
        let entries: Vec<u8> = numbers.flat_map(|n| n.load(Ordering::Relaxed).to_le_bytes()).collect();
        write(&entries, HEADER as u64)?;
        let header = [&MAGIC[..], &self.size.to_le_bytes(), &self.block.to_le_bytes(), boot].concat();
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

    /// The file that the bytes are in, under whatever name.
    pub fn file(&self) -> &File {
        &self.data
    }

    /// Bytes of the blob.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Bytes that are there.
    pub fn written(&self) -> u64 {
        self.there.load(Ordering::Acquire)
    }

    pub(super) fn length(&self, index: usize) -> u64 {
        self.block.min(self.size - index as u64 * self.block)
    }

    pub(super) fn is_whole(&self, index: usize) -> bool {
        self.blocks[index].written.load(Ordering::Acquire) == self.length(index)
    }

    pub(super) fn asks(&self) -> MutexGuard<'_, Asks> {
        self.asks.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// The bytes of a request in order.
    pub fn usual_request(&self) -> u64 {
        self.size.div_ceil(32).next_multiple_of(1 << 20).clamp(REQUEST.0, REQUEST.1)
    }

    /// Wants a part of the blob before the rest. Parts that are there already are no matter.
    pub fn ask(&self, part: &Range<u64>, urgency: Urgency) {
        let end = part.end.min(self.size);
        if part.start < end && self.fate.get().is_none() {
            let blocks = (part.start / self.block) as usize..end.div_ceil(self.block) as usize;
            if !blocks.clone().all(|block| self.is_whole(block)) {
                self.asks().push(blocks, urgency);
            }
        }
    }

    /// Whether a part of the blob is there.
    pub fn has(&self, part: &Range<u64>) -> bool {
        let end = part.end.min(self.size);
        if part.start >= end || self.written() == self.size {
            return true;
        }
        (part.start / self.block..end.div_ceil(self.block)).all(|index| {
            let wanted = (end - index * self.block).min(self.block);
            self.blocks[index as usize].written.load(Ordering::Acquire) >= wanted
        })
    }

    /// `Some(Ok)` if it is whole and checked, `Some(Err)` with the reason if it never will be.
    pub fn fate(&self) -> Option<&Result<(), String>> {
        self.fate.get()
    }

    /// Tells whoever reads it that no more will come.
    pub fn give_up(&self, why: &str) {
        let _ = self.fate.set(Err(why.to_owned()));
        self.asks().clear();
    }

    pub(super) fn take(&self, index: usize) -> bool {
        let block = &self.blocks[index];
        !self.is_whole(index) && !block.is_taken.swap(true, Ordering::AcqRel) && {
            // It may have become whole in between.
            let mine = !self.is_whole(index);
            block.is_taken.store(mine, Ordering::Release);
            mine
        }
    }

    pub(super) fn release(&self, index: usize) {
        self.blocks[index].is_taken.store(false, Ordering::Release);
    }

    /// The first block that is not there.
    pub(super) fn first_missing(&self) -> usize {
        // Held, so that what was forgotten in between is not taken for whole.
        let mut whole = self.whole.lock().unwrap_or_else(|e| e.into_inner());
        *whole = (*whole..self.blocks.len()).find(|&i| !self.is_whole(i)).unwrap_or(self.blocks.len());
        *whole
    }

    /// Bytes that are there without a gap from the beginning on.
    pub fn frontier(&self) -> u64 {
        let first = self.first_missing();
        let Some(block) = self.blocks.get(first) else { return self.size };
        first as u64 * self.block + block.written.load(Ordering::Acquire)
    }

    /// Reads bytes before the frontier.
    pub fn read(&self, buffer: &mut [u8], at: u64) -> Result<()> {
        self.data.read_exact_at(buffer, at).naming(&self.path)
    }

    /// Makes what is there safe from a crash of the machine.
    pub fn sync(&self) -> Result<()> {
        let _one = self.syncing.lock().unwrap_or_else(|e| e.into_inner());
        let written = |block: &Block| block.written.load(Ordering::Acquire);
        let now = self.blocks.iter().enumerate().map(|(i, block)| (i, written(block)));
        let changed: Vec<(usize, u64)> =
            now.filter(|(i, n)| self.blocks[*i].synced.load(Ordering::Relaxed) != *n).collect();
        if changed.is_empty() {
            return Ok(());
        }
        self.data.sync_data().naming(&self.path)?;
        for (i, n) in changed {
            self.record.write_all_at(&n.to_le_bytes(), (HEADER + i * ENTRY + 8) as u64).naming(&self.record_path)?;
            self.blocks[i].synced.store(n, Ordering::Relaxed);
        }
        self.record.sync_data().naming(&self.record_path)
    }

    /// Forgets all bytes, because they are wrong. Nobody may be filling a block, or reading the blob.
    pub fn reset(&self) -> Result<()> {
        let _one = self.syncing.lock().unwrap_or_else(|e| e.into_inner());
        let mut whole = self.whole.lock().unwrap_or_else(|e| e.into_inner());
        for block in &self.blocks {
            block.synced.store(0, Ordering::Relaxed);
            block.written.store(0, Ordering::Release);
        }
        self.there.store(0, Ordering::Release);
        *whole = 0;
        self.write_record(&boot_id())
    }

    /// Gives the whole blob its name, once its bytes are on the disk.
    pub fn finish(&self, blob: &Path) -> Result<()> {
        fsync(&self.data).naming(&self.path)?;
        fs::rename(&self.path, blob).naming(blob)?;
        sync_folder(blob)?;
        let _ = fs::remove_file(&self.record_path);
        let _ = self.fate.set(Ok(()));
        Ok(())
    }
}

/// Makes a name in a folder safe from a crash of the machine.
pub fn sync_folder(path: &Path) -> Result<()> {
    let folder = path.parent().unwrap_or(Path::new("."));
    let opened = File::open(folder).naming(folder)?;
    fsync(&opened).naming(folder)
}
