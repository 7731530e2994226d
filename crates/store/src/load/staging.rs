//! A few buffers that a consumer empties, such as an upload to a device. Also used to measure the disk's own speed.

use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use super::options::{LoadMode, LoadOptions};
use super::read::ReadFile;
use super::sink::{Chunk, ChunkSink, Lent, Next, Reader};
use super::{ring, threads};
use crate::error::Error;
use crate::memory::{Memory, host_memory};

type Consumer<'a> = Box<dyn Fn(Filled) + Send + Sync + 'a>;

/// A sink of a few buffers, each emptied by a consumer before it is used again.
pub struct Staging<'a> {
    ring: Arc<Ring>,
    consumer: Consumer<'a>,
    deadline: Option<Instant>,
    cancelled: Option<&'a AtomicBool>,
}

/// The buffers, and which of them are free.
struct Ring {
    memory: Box<dyn Memory>,
    size: usize,
    state: Mutex<StagingState>,
    given_back: Condvar,
}

struct StagingState {
    chunks: Vec<Chunk>,
    free: Vec<usize>,
    error: Option<Error>,
    notes: Vec<String>,
}

impl Ring {
    fn lock(&self) -> std::sync::MutexGuard<'_, StagingState> {
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }

    fn give_back(&self, buffer: usize) {
        self.lock().free.push(buffer);
        self.given_back.notify_all();
    }
}

/// A chunk that was read. Dropping it frees its buffer, so a consumer that copies to a device drops it when the copy is done.
pub struct Filled {
    ring: Arc<Ring>,
    chunk: Chunk,
    memory: *mut u8,
    buffer: usize,
}

// SAFETY: nobody writes to the buffer as long as this is there, wherever it goes.
unsafe impl Send for Filled {}
// SAFETY: as above.
unsafe impl Sync for Filled {}

impl Filled {
    /// The chunk that was read.
    pub fn chunk(&self) -> &Chunk {
        &self.chunk
    }
}

impl std::ops::Deref for Filled {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: inside a buffer of the ring, filled, and lent again only when this is dropped.
        unsafe { std::slice::from_raw_parts(self.memory, self.chunk.len) }
    }
}

impl std::ops::DerefMut for Filled {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above; `&mut self` makes this the only reference.
        unsafe { std::slice::from_raw_parts_mut(self.memory, self.chunk.len) }
    }
}

impl Drop for Filled {
    fn drop(&mut self) {
        self.ring.give_back(self.buffer);
    }
}

impl<'a> Staging<'a> {
    /// `buffers` buffers (at least one) of `size` bytes (whole pages) in memory that `lend` gives, for `chunks` in that order. `consumer` is called once for each, in
    /// any order and from any thread, with at most `buffers` of them in flight or not dropped by it.
    ///
    /// # Errors
    /// When there is no memory.
    pub fn new(
        chunks: impl IntoIterator<Item = Chunk>,
        buffers: usize,
        size: usize,
        lend: &mut dyn FnMut(usize) -> io::Result<Box<dyn Memory>>,
        consumer: impl Fn(Filled) + Send + Sync + 'a,
    ) -> io::Result<Staging<'a>> {
        let mut chunks: Vec<Chunk> = chunks.into_iter().collect();
        chunks.reverse();
        let buffers = buffers.max(1);
        let bytes = buffers.checked_mul(size).ok_or(io::ErrorKind::OutOfMemory)?;
        let memory = lend(bytes)?;
        assert!(memory.len() >= bytes, "less memory than was asked for");
        let free = (0..buffers).rev().collect();
        let state = Mutex::new(StagingState { chunks, free, error: None, notes: Vec::new() });
        let ring = Arc::new(Ring { memory, size, state, given_back: Condvar::new() });
        Ok(Staging { ring, consumer: Box::new(consumer), deadline: None, cancelled: None })
    }

    /// Begins with no chunk after `deadline`.
    pub fn until(self, deadline: Instant) -> Staging<'a> {
        Staging { deadline: Some(deadline), ..self }
    }

    /// Begins with no chunk once this is true.
    pub fn cancelled_by(self, cancelled: &'a AtomicBool) -> Staging<'a> {
        Staging { cancelled: Some(cancelled), ..self }
    }

    fn is_over(&self) -> bool {
        self.deadline.is_some_and(|d| Instant::now() > d) || self.cancelled.is_some_and(|g| g.load(Ordering::Relaxed))
    }

    /// Reads `chunks` of the files at `paths` past the page cache (by buffered reads where that is refused) and hands each to the consumer.
    ///
    /// # Errors
    /// The first chunk that could not be read.
    pub fn read(self, paths: &[&Path], options: &LoadOptions) -> Result<Vec<String>, Error> {
        let files: Vec<ReadFile> = paths.iter().map(|p| ReadFile::open(p)).collect::<Result<_, _>>()?;
        let files: Vec<&ReadFile> = files.iter().collect();
        for file in &files {
            if let Some(note) = file.open_direct() {
                self.note(note);
            }
        }
        if let Err(refused) = ring::read(&files, &self, options.depth) {
            self.note(refused);
            let work = || threads::read(&files, &self, Reader::Direct);
            std::thread::scope(|scope| (0..options.threads).for_each(|_| drop(scope.spawn(work))));
        }
        let mut state = self.ring.lock();
        match state.error.take() {
            Some(error) => Err(error),
            None => Ok(std::mem::take(&mut state.notes)),
        }
    }
}

// SAFETY: a buffer's number is taken from the list of free ones when it is lent and put back when it is returned or what was read into it is dropped, so it is
// lent once at a time; the ring lives as long as the sink.
unsafe impl ChunkSink for Staging<'_> {
    fn next(&self, _: Reader, block: bool) -> Next {
        let mut state = self.ring.lock();
        loop {
            if state.chunks.is_empty() || state.error.is_some() || self.is_over() {
                return Next::Done;
            }
            if let Some(buffer) = state.free.pop() {
                let chunk = state.chunks.pop().expect("not empty");
                assert!(chunk.len <= self.ring.size, "a chunk is longer than its buffer");
                // SAFETY: buffer `buffer` lies inside the ring.
                let memory = unsafe { self.ring.memory.start().add(buffer * self.ring.size) };
                return Next::Read(Lent { chunk, memory, buffer });
            }
            if !block {
                return Next::Later;
            }
            state = self.ring.given_back.wait(state).unwrap_or_else(|e| e.into_inner());
        }
    }

    fn filled(&self, lent: Lent) {
        let Lent { chunk, memory, buffer } = lent;
        (self.consumer)(Filled { ring: Arc::clone(&self.ring), chunk, memory, buffer });
    }

    fn failed(&self, lent: Lent, error: Error) {
        self.ring.lock().error.get_or_insert(error);
        self.ring.give_back(lent.buffer);
    }

    fn put_back(&self, lent: Lent) {
        self.ring.lock().chunks.push(lent.chunk);
        self.ring.give_back(lent.buffer);
    }

    fn note(&self, note: String) {
        let mut state = self.ring.lock();
        if !state.notes.contains(&note) {
            state.notes.push(note);
        }
    }

    fn fixed(&self) -> Vec<(*mut u8, usize)> {
        let (start, size) = (self.ring.memory.start(), self.ring.size);
        // SAFETY: the buffers lie inside the ring.
        (0..self.ring.memory.len() / size).map(|i| unsafe { (start.add(i * size), size) }).collect()
    }
}

/// Reads `files` from end to end past the page cache, in order, keeping nothing: the disk's own speed. Stops after `limit` bytes. Returns
/// bytes, time, and what was fallen back on (then it was not the disk's own speed).
pub fn measure_disk(files: &[&Path], limit: u64, options: &LoadOptions) -> Result<(u64, Duration, Vec<String>), Error> {
    let request = options.request(LoadMode::Direct);
    let mut chunks = Vec::new();
    let mut total = 0;
    for (file, path) in files.iter().enumerate() {
        let len = std::fs::metadata(path).map_err(Error::io(path, "open"))?.len();
        let mut offset = 0;
        while offset < len && total < limit {
            let bytes = (len - offset).min(request as u64);
            chunks.push(Chunk { file, offset, len: bytes as usize });
            (offset, total) = (offset + bytes, total + bytes);
        }
    }
    let first = files.first().copied().unwrap_or(Path::new(""));
    let staging =
        Staging::new(chunks, options.depth, request, &mut host_memory, drop).map_err(Error::io(first, "read"))?;
    let start = Instant::now();
    let notes = staging.read(files, options)?;
    Ok((total, start.elapsed(), notes))
}
