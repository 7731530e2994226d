//! A file of weights while it is loaded: the memory that holds it, and which of its chunks are there.

use std::collections::HashSet;
use std::fmt::Debug;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use super::bring::populate_cache;
use super::choose::SMALL;
use super::options::{LoadError, LoadMode, LoadOptions};
use super::read::ReadFile;
use crate::error::Error;
use crate::map::Map;

/// No reader has begun with the chunk.
pub(crate) const PENDING: u8 = 0;
/// A reader is reading it.
pub(crate) const TAKEN: u8 = 1;
/// It is there.
pub(crate) const READY: u8 = 2;
/// It will never be there.
pub(crate) const FAILED: u8 = 3;

/// Bytes of a chunk of a file of which parts stay on disk.
const AMONG_LEFT: usize = 256 << 10;

/// Reads the chunks of sources: the queue of their load.
pub(crate) trait ChunkReader: Debug + Send + Sync {
    /// Waits until a range of the source with this number is there, or can never be.
    fn wait(self: Arc<Self>, number: usize, source: &Source, range: &Range<usize>);

    /// Ends the load with an error.
    fn fail(&self, error: LoadError);
}

/// One file. Its memory has the file's bytes at the same offsets as the file.
#[derive(Debug)]
pub(crate) struct Source {
    pub file: ReadFile,
    pub mode: LoadMode,
    memory: Map,
    /// It is mapped, wanted whole, and not all cached, so parts of it are read ahead into the page cache.
    read_ahead: bool,
    chunk: usize,
    states: Box<[AtomicU8]>,
    /// Chunks that are not there yet; 0 answers most queries at once.
    missing: AtomicUsize,
    /// Bytes and name of each tensor, by offset; for messages.
    tensors: Vec<(Range<u64>, Arc<str>)>,
    /// Parts of a file that were not in the page cache before, if it is read through that.
    trace: Vec<(u64, u64)>,
    /// Everything that was read of it was delivered, so later changes of the file do not matter.
    delivered: AtomicBool,
    /// Parts of it are read while the model is used, so its contents must not change.
    streamed: AtomicBool,
    /// The queue that has it read, and its number there.
    reader: OnceLock<(Weak<dyn ChunkReader>, usize)>,
}

impl Source {
    /// A file to be read in this mode (not `Auto`), with memory for it. `resident`: all of it is in the page cache. `left`: the names of tensors that stay on
    /// disk.
    pub fn new(
        file: ReadFile,
        mode: LoadMode,
        resident: bool,
        options: &LoadOptions,
        tensors: Vec<(Range<u64>, Arc<str>)>,
        left: &HashSet<String>,
    ) -> Result<Source, Error> {
        let len = usize::try_from(file.len)
            .map_err(|_| Error::io(&file.path, "map")(std::io::ErrorKind::FileTooLarge.into()))?;
        // If most of a file stays on disk, chunks are small: unwanted bytes of a chunk cost reads and memory.
        let some_left = tensors.iter().any(|(_, name)| left.contains(&**name));
        let request = options.request(mode);
        let chunk = if some_left && options.request.is_none() { request.min(AMONG_LEFT) } else { request };
        let mapped = mode == LoadMode::Mmap;
        let mut trace = Vec::new();
        if mode == LoadMode::Pread {
            file.read_nothing_ahead();
            trace = file.trace(0, file.len);
        }
        let memory = if mapped {
            let map = Map::file(&file.buffered, len).map_err(Error::io(&file.path, "map"))?;
            // Loads are checked after every use: see `Loading::check`.
            map.watch();
            map
        } else {
            Map::image(len, options.large_pages).map_err(Error::io(&file.path, "find memory for"))?
        };
        // A small cached file is used where it is mapped: touching it costs less than a thread. For a large one the page faults would be the longest part of a
        // warm start.
        let first = if mapped && resident && file.len < SMALL { READY } else { PENDING };
        let states: Box<[AtomicU8]> = (0..len.div_ceil(chunk)).map(|_| AtomicU8::new(first)).collect();
        let left = AtomicUsize::new(if first == READY { 0 } else { states.len() });
        Ok(Source {
            file,
            mode,
            memory,
            read_ahead: mapped && !resident && !some_left,
            chunk,
            states,
            missing: left,
            tensors,
            trace,
            delivered: AtomicBool::new(false),
            streamed: AtomicBool::new(false),
            reader: OnceLock::new(),
        })
    }

    pub fn set_reader(&self, queue: Weak<dyn ChunkReader>, number: usize) {
        let _ = self.reader.set((queue, number));
    }

    pub fn is_mapped(&self) -> bool {
        self.mode == LoadMode::Mmap
    }

    pub fn memory(&self) -> &Map {
        &self.memory
    }

    /// Bytes of a chunk, but perhaps the last.
    pub fn chunk_size(&self) -> usize {
        self.chunk
    }

    /// The chunks that hold a part of the file.
    pub fn chunks(&self, range: &Range<usize>) -> Range<usize> {
        if range.is_empty() { 0..0 } else { range.start / self.chunk..range.end.div_ceil(self.chunk) }
    }

    /// The bytes of a chunk.
    pub fn chunk(&self, number: usize) -> Range<usize> {
        let start = number * self.chunk;
        start..(start + self.chunk).min(self.file.len as usize)
    }

    pub fn state(&self, chunk: usize) -> u8 {
        self.states[chunk].load(Ordering::Acquire)
    }

    /// Takes a chunk that no reader has begun with.
    pub fn take(&self, chunk: usize) -> bool {
        self.states[chunk].compare_exchange(PENDING, TAKEN, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    /// Marks a chunk that was taken as ready or failed.
    pub fn settle(&self, chunk: usize, state: u8) {
        self.states[chunk].store(state, Ordering::Release);
        if state == READY {
            self.missing.fetch_sub(1, Ordering::AcqRel);
        }
    }

    /// Whether the bytes of a chunk are in the file.
    ///
    /// # Errors
    /// They never will be.
    pub fn has_arrived(&self, chunk: usize) -> Result<bool, Error> {
        let range = self.chunk(chunk);
        if self.file.is_arriving() { self.file.has(&(range.start as u64..range.end as u64)) } else { Ok(true) }
    }

    /// Has parts of a file that is arriving brought before the rest: see [`crate::arriving::Arriving::ask`].
    pub fn ask(&self, range: &Range<usize>, waits: bool) {
        self.file.ask(&(range.start as u64..range.end as u64), waits);
    }

    pub fn is_ready(&self, range: &Range<usize>) -> bool {
        self.missing.load(Ordering::Acquire) == 0 || self.chunks(range).all(|c| self.state(c) == READY)
    }

    /// Waits until a part of the file is read or has failed.
    pub fn wait(&self, range: &Range<usize>) {
        if self.is_ready(range) {
            return;
        }
        let (queue, number) = self.reader.get().expect("a source that is handed out has a reader");
        let queue = queue.upgrade().expect("weights are used only as long as their load lives");
        queue.wait(*number, self, range);
    }

    /// Brings a part of a mapped file into the page cache, for a read that follows and tells what is wrong.
    pub fn bring(&self, range: Range<usize>) {
        if self.read_ahead {
            let _ = populate_cache(&self.file, &self.memory, range);
        }
    }

    /// Waits for bytes of the file. A part that cannot be read is zeros.
    pub fn bytes(&self, range: Range<usize>) -> &[u8] {
        self.wait(&range);
        // SAFETY: the range's chunks are there, or the load has ended and no request is in flight: neither is written to again.
        unsafe { self.memory.slice(range) }
    }

    /// Copies a part of the file at once: from memory if it was read already, else by a read of its own.
    pub fn read_now(&self, range: Range<usize>, into: &mut [u8]) -> Result<(), LoadError> {
        assert_eq!(range.len(), into.len());
        if self.is_ready(&range) {
            // SAFETY: chunks that are there are not written to again.
            into.copy_from_slice(unsafe { self.memory.slice(range) });
            return Ok(());
        }
        let failed = |error: Error| {
            let error = LoadError::from(Arc::new(self.naming(error)));
            if let Some(queue) = self.reader.get().and_then(|(queue, _)| queue.upgrade()) {
                queue.fail(error.clone());
            }
            error
        };
        self.file.wait_for(range.start as u64..range.end as u64).map_err(failed)?;
        // SAFETY: a buffer of exactly this length, borrowed mutably.
        let done = unsafe { self.file.read_buffered(into.as_mut_ptr(), range.start as u64, into.len()) };
        done.map_err(|(at, cause)| failed(self.file.error(at, cause)))
    }

    /// Adds to an error the name of the tensor at its offset.
    pub fn naming(&self, mut error: Error) -> Error {
        if let Error::Read { tensor, offset, .. } | Error::Shrunk { tensor, offset, .. } = &mut error {
            let after = self.tensors.partition_point(|(range, _)| range.end <= *offset);
            *tensor = self.tensors.get(after).filter(|(r, _)| r.contains(offset)).map(|(_, name)| name.to_string());
        }
        error
    }

    /// Drops the pages that reading left in the page cache after all.
    pub fn drop_trace(&self) {
        self.file.wipe(&self.trace);
    }

    /// Notes whether what is read of it is delivered, and not used here.
    pub fn set_delivered(&self, delivered: bool) {
        self.delivered.store(delivered, Ordering::Release);
    }

    /// From here on parts of the file are read again and again.
    pub fn set_streamed(&self) {
        self.streamed.store(true, Ordering::Release);
    }

    /// Checks that the bytes in use are those of the file as it was opened: no mapped page was missing, and a file that is still read was not written to.
    /// `reads`: the load is still reading all of its files.
    pub fn check(&self, reads: bool) -> Result<(), Error> {
        if let Some(offset) = self.memory.missing() {
            return Err(self.naming(self.file.error(offset, None)));
        }
        let used = self.is_mapped() && !self.delivered.load(Ordering::Acquire);
        if reads || used || self.streamed.load(Ordering::Acquire) {
            return self.file.check_contents().map_err(|e| self.naming(e));
        }
        Ok(())
    }
}
