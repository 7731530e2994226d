//! The chunks of a load in progress: which one is next, which readers run, and who waits.
//!
//! Chunks are read in the order in which weights will be used; those that somebody waits for come first. Readers are
//! threads of this process. They end when nothing is left, and are started again when somebody waits for a chunk that
//! was not asked for at first.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, Weak};

use std::time::{Duration, Instant};

use super::delivery::{Buffers, Delivery, Piece};
use super::options::{LoadError, LoadMode, LoadOptions};
use super::pending::{self, Choice, ChunkId, Pending};
use super::read::ReadFile;
use super::sink::{Chunk, ChunkSink, Lent, Next, Reader};
use super::source::{ChunkReader, FAILED, PENDING, READY, Source};
use super::{ring, threads};
use crate::bytes::Bytes;
use crate::error::Error;
use crate::memory::Memory;

/// Instead of a buffer: the chunk is read to its place in the file's image.
const IN_PLACE: usize = usize::MAX;

#[derive(Debug)]
pub(crate) struct ChunkQueue {
    sources: Vec<Arc<Source>>,
    threads: usize,
    depth: usize,
    rings: usize,
    pending: Mutex<Pending>,
    /// Notified when a chunk is complete or has failed, and when no more will come.
    settled: Condvar,
    waiters: AtomicUsize,
    stopped: AtomicBool,
    failure: OnceLock<LoadError>,
    /// The consumer of chunks that do not stay here.
    delivery: OnceLock<Delivery>,
    notes: Mutex<Vec<String>>,
    /// io_uring was refused.
    no_ring: AtomicBool,
    begun: OnceLock<Instant>,
    took: OnceLock<Duration>,
    /// Bytes that were asked for, and bytes that are there.
    wanted: AtomicU64,
    there: AtomicU64,
}

impl ChunkReader for ChunkQueue {
    fn wait(self: Arc<ChunkQueue>, number: usize, source: &Source, range: &Range<usize>) {
        ChunkQueue::wait(&self, number, source, range);
    }

    fn fail(&self, error: LoadError) {
        ChunkQueue::fail(self, error);
    }
}

impl ChunkQueue {
    pub fn new(sources: Vec<Arc<Source>>, options: &LoadOptions) -> Arc<ChunkQueue> {
        let queue = Arc::new(ChunkQueue {
            sources,
            threads: options.threads.max(1),
            depth: options.depth.max(1),
            rings: options.rings.max(1),
            pending: Mutex::default(),
            settled: Condvar::new(),
            waiters: AtomicUsize::new(0),
            stopped: AtomicBool::new(false),
            failure: OnceLock::new(),
            delivery: OnceLock::new(),
            notes: Mutex::default(),
            no_ring: AtomicBool::new(false),
            begun: OnceLock::new(),
            took: OnceLock::new(),
            wanted: AtomicU64::new(0),
            there: AtomicU64::new(0),
        });
        for (number, source) in queue.sources.iter().enumerate() {
            let reader: Weak<ChunkQueue> = Arc::downgrade(&queue);
            source.set_reader(reader, number);
            if source.mode == LoadMode::Direct
                && let Some(note) = source.file.open_direct()
            {
                queue.note(note);
            }
        }
        queue
    }

    pub fn sources(&self) -> &[Arc<Source>] {
        &self.sources
    }

    fn lock(&self) -> MutexGuard<'_, Pending> {
        self.pending.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// See [`super::Loading::start`].
    pub fn start<'a>(self: &Arc<ChunkQueue>, order: impl IntoIterator<Item = &'a Bytes>) {
        let _ = self.begun.set(Instant::now());
        let mut queue = self.lock();
        let ready = queue.ask_for(&self.sources, order);
        self.begin(queue, ready);
    }

    /// See [`super::Loading::deliver`].
    pub fn deliver(
        self: &Arc<ChunkQueue>,
        (views, stays): (&[&Bytes], &[&Bytes]),
        lend: &mut dyn FnMut(usize) -> std::io::Result<Box<dyn Memory>>,
        take: impl Fn(&[Piece]) -> std::io::Result<()> + Send + Sync + 'static,
    ) -> std::io::Result<Vec<usize>> {
        let (delivery, others) = Delivery::new(&self.sources, views, Box::new(take));
        let _ = self.begun.set(Instant::now());
        let mut queue = self.lock();
        let ready = queue.ask_for(&self.sources, views.iter().chain(stays).copied());
        let asked = queue.deliver_all_but(&self.sources, &ready, stays);
        let (count, size) = self.buffers();
        queue.buffers = Buffers::new(count.min(asked), size, lend)?;
        let delivery = self.delivery.get_or_init(|| delivery);
        drop(queue);
        // Small maps are there already: they are delivered the same way.
        for &(number, chunk) in &ready {
            let (source, range) = (&self.sources[number], self.sources[number].chunk(chunk));
            if let Err(cause) = delivery.hand_over(number, chunk, range.start, source.bytes(range.clone())) {
                self.set_failure(source.naming(source.file.error(range.start as u64, Some(cause))));
            }
        }
        self.begin(self.lock(), ready);
        Ok(others)
    }

    /// Number and size of a delivery's buffers: as many as can be in use at once, so that no reader waits for one.
    pub fn buffers(&self) -> (usize, usize) {
        let largest = self.sources.iter().map(|s| s.chunk_size()).max().unwrap_or(0);
        (self.rings * self.depth + self.threads, largest)
    }

    /// Starts to read what was asked for, except what is there already.
    fn begin(self: &Arc<ChunkQueue>, mut queue: MutexGuard<'_, Pending>, ready: Vec<ChunkId>) {
        let bytes = |(number, chunk): &ChunkId| self.sources[*number].chunk(*chunk).len() as u64;
        let there: u64 = ready.iter().map(bytes).sum();
        let wanted = there + queue.lanes.iter().flat_map(|lane| &lane.order).map(bytes).sum::<u64>();
        for (number, chunk) in queue.lanes.iter().flat_map(|lane| &lane.order) {
            self.sources[*number].ask(&self.sources[*number].chunk(*chunk), false);
        }
        self.wanted.store(wanted, Ordering::Release);
        self.there.store(there, Ordering::Release);
        self.ensure_readers(&mut queue);
        drop(queue);
        if there == wanted {
            self.finish_load();
        }
    }

    /// Bytes of the chunks that hold a part of these views: of files that are mapped, and of those that are copied.
    pub fn chunk_bytes<'a>(&self, views: impl IntoIterator<Item = &'a Bytes>) -> [u64; 2] {
        let mut seen: Vec<Vec<bool>> =
            self.sources.iter().map(|s| vec![false; s.chunks(&(0..s.file.len as usize)).len()]).collect();
        let mut bytes = [0; 2];
        for (source, range) in views.into_iter().filter_map(Bytes::source) {
            let Some(number) = self.sources.iter().position(|s| Arc::ptr_eq(s, source)) else { continue };
            for chunk in source.chunks(&range) {
                if !std::mem::replace(&mut seen[number][chunk], true) {
                    bytes[usize::from(!source.is_mapped())] += source.chunk(chunk).len() as u64;
                }
            }
        }
        bytes
    }

    /// Starts the readers that are needed and do not run.
    fn ensure_readers(self: &Arc<ChunkQueue>, queue: &mut Pending) {
        for reader in [Reader::Threads, Reader::Direct] {
            if self.is_halted() || queue.peek(&self.sources, reader).is_none() {
                continue;
            }
            // One thread keeps a ring full. With two, pages of an image are cleared by one while the other submits.
            let ring = reader == Reader::Direct && !self.no_ring.load(Ordering::Acquire);
            let wanted = if ring { self.rings } else { self.threads };
            while queue.lanes[reader as usize].readers < wanted {
                let own = Arc::clone(self);
                let read = move || if ring { own.read_by_ring() } else { own.read_by_thread(reader) };
                match std::thread::Builder::new().name("sluice-read".into()).spawn(read) {
                    Ok(handle) => {
                        queue.running.push(handle);
                        queue.lanes[reader as usize].readers += 1;
                    }
                    Err(_) if queue.lanes[reader as usize].readers > 0 => break,
                    Err(cause) => {
                        let path = self.sources[0].file.path.clone();
                        self.set_failure(Error::Io { path, doing: "start a thread to read", cause });
                        // Wake all waiting threads: no reader is left for their chunks.
                        self.settled.notify_all();
                        break;
                    }
                }
            }
        }
    }

    fn read_by_ring(self: &Arc<ChunkQueue>) {
        if let Err(refused) = ring::read(&self.files(), &**self, self.depth) {
            self.note(refused);
            self.no_ring.store(true, Ordering::Release);
            // This thread continues as a reader without a ring.
            self.ensure_readers(&mut self.lock());
            self.read_by_thread(Reader::Direct);
        }
    }

    fn read_by_thread(&self, reader: Reader) {
        let files = self.files();
        loop {
            match self.next(reader, true) {
                Next::Read(lent) if self.sources[lent.chunk.file].is_mapped() && lent.buffer == IN_PLACE => {
                    self.populate(lent);
                }
                Next::Read(lent) if self.sources[lent.chunk.file].is_mapped() => self.read_cached(lent),
                Next::Read(lent) => threads::read_chunk(files[lent.chunk.file], self, lent),
                Next::Later => {}
                Next::Done => return,
            }
        }
    }

    fn files(&self) -> Vec<&ReadFile> {
        self.sources.iter().map(|s| &s.file).collect()
    }

    /// Through the page cache, where it stays, as mapped pages would.
    fn read_cached(&self, lent: Lent) {
        let (source, chunk) = (&self.sources[lent.chunk.file], lent.chunk);
        let (file, start) = (&source.file, chunk.offset as usize);
        source.bring(start..start + chunk.len);
        // SAFETY: the memory was lent by `next`.
        match unsafe { file.read_buffered(lent.memory, chunk.offset, chunk.len) } {
            Ok(()) => self.filled(lent),
            Err((at, cause)) => self.failed(lent, file.error(at, cause)),
        }
    }

    fn populate(&self, lent: Lent) {
        let (source, offset) = (&self.sources[lent.chunk.file], lent.chunk.offset as usize);
        match source.memory().populate(offset..offset + lent.chunk.len) {
            Ok(()) => self.filled(lent),
            // The kernel's error for a page that the file no longer has, or that the disk cannot read.
            Err(e) if e.raw_os_error() == Some(libc::EFAULT) => {
                let ends = source.file.buffered.metadata().map_or(0, |m| m.len());
                let gone = ends < lent.chunk.offset + lent.chunk.len as u64;
                let cause = (!gone).then(|| std::io::Error::from_raw_os_error(libc::EIO));
                let at = if gone { ends } else { lent.chunk.offset };
                self.failed(lent, source.file.error(at, cause));
            }
            Err(e) => self.failed(lent, source.file.error(offset as u64, Some(e))),
        }
    }

    /// Waits until a part of a file is read or has failed, and moves it to the front.
    pub fn wait(self: &Arc<ChunkQueue>, number: usize, source: &Source, range: &Range<usize>) {
        self.waiters.fetch_add(1, Ordering::SeqCst);
        // From now on the file is used here too, not only delivered.
        source.set_delivered(false);
        let mut queue = self.lock();
        let mut is_asked_for = false;
        while !source.is_ready(range) {
            // After a failure nothing more is read, but requests in flight still write.
            if self.is_halted() && queue.lent == 0 {
                break;
            }
            // After the end of a load no reader takes chunks from this queue. A delivered chunk is read once more.
            if !self.is_halted() && (!is_asked_for || self.delivery.get().is_some()) {
                let chunks = source.chunks(range).map(|chunk| (number, chunk));
                let new: Vec<ChunkId> = chunks.filter(|id| !queue.urgent.contains(id)).collect();
                new.iter().for_each(|(_, chunk)| source.ask(&source.chunk(*chunk), true));
                queue.urgent.extend(new);
                self.ensure_readers(&mut queue);
                is_asked_for = true;
            }
            queue = self.settled.wait(queue).unwrap_or_else(|e| e.into_inner());
        }
        drop(queue);
        self.waiters.fetch_sub(1, Ordering::SeqCst);
    }

    fn is_halted(&self) -> bool {
        self.failure.get().is_some() || self.stopped.load(Ordering::Acquire)
    }

    /// See [`super::Loading::finish`].
    pub fn finish(&self) {
        self.waiters.fetch_add(1, Ordering::SeqCst);
        let mut queue = self.lock();
        while !self.is_over() {
            queue = self.settled.wait(queue).unwrap_or_else(|e| e.into_inner());
        }
        drop(queue);
        self.waiters.fetch_sub(1, Ordering::SeqCst);
    }

    pub fn is_over(&self) -> bool {
        self.took.get().is_some() || self.is_halted() || self.begun.get().is_none()
    }

    pub fn stop(&self) {
        self.stopped.store(true, Ordering::Release);
        let running = {
            let mut queue = self.lock();
            self.settled.notify_all();
            std::mem::take(&mut queue.running)
        };
        running.into_iter().for_each(|handle| drop(handle.join()));
    }

    /// The chunk has become `state`.
    fn settle(&self, lent: &Lent, state: u8) {
        let (number, offset) = (lent.chunk.file, lent.chunk.offset as usize);
        let source = &self.sources[number];
        let chunk = source.chunks(&(offset..offset + 1)).start;
        let mut queue = self.lock();
        let away = lent.buffer != IN_PLACE;
        // A chunk that went to the consumer is not in memory here. It stays pending, in case the host reads it as well.
        source.settle(chunk, if away && state == READY { PENDING } else { state });
        queue.lent -= 1;
        if state == PENDING {
            queue.urgent.push_back((number, chunk));
        }
        if away {
            queue.buffers.give_back(lent.buffer);
            queue.to_deliver[number][chunk] = state != READY;
        }
        let mut over = false;
        let wanted = queue.wanted.get_mut(number).map(|chunks| &mut chunks[chunk]);
        if state == READY && wanted.is_some_and(std::mem::take) {
            let len = lent.chunk.len as u64;
            over = self.there.fetch_add(len, Ordering::AcqRel) + len == self.wanted.load(Ordering::Acquire);
        }
        if self.waiters.load(Ordering::SeqCst) > 0 {
            self.settled.notify_all();
        }
        drop(queue);
        if over {
            self.finish_load();
        }
    }

    /// Everything that was asked for is there.
    fn finish_load(&self) {
        let begun = self.begun.get().expect("begun before anything was asked for");
        if let Some(error) = self.sources.iter().find_map(|s| s.file.check_unchanged().err().map(|e| s.naming(e))) {
            self.set_failure(error);
        }
        let _ = self.took.set(begun.elapsed());
        self.sources.iter().for_each(|s| s.drop_trace());
        let buffers = {
            let mut queue = self.lock();
            self.settled.notify_all();
            std::mem::take(&mut queue.buffers)
        };
        drop(buffers);
    }

    /// Ends the load with an error.
    pub fn fail(&self, error: LoadError) {
        let _ = self.failure.set(error);
        let _queue = self.lock();
        self.settled.notify_all();
    }

    fn set_failure(&self, error: Error) {
        let _ = self.failure.set(LoadError(Arc::new(error)));
    }

    /// See [`super::Loading::check`].
    pub fn check(&self) -> Result<(), LoadError> {
        // The reader of the last chunk checks the files once more before the load counts as complete.
        let all_there = self.there.load(Ordering::Acquire) >= self.wanted.load(Ordering::Acquire);
        if all_there && !self.is_over() {
            self.finish();
        }
        let reads = !self.is_over();
        if self.failure.get().is_none()
            && let Some(error) = self.sources.iter().find_map(|s| s.check(reads).err())
        {
            self.fail(LoadError(Arc::new(error)));
        }
        self.failure.get().map_or(Ok(()), |e| Err(e.clone()))
    }

    pub fn progress(&self) -> (u64, u64) {
        let wanted = self.wanted.load(Ordering::Acquire);
        (self.there.load(Ordering::Acquire).min(wanted), wanted)
    }

    pub fn time(&self) -> Option<Duration> {
        self.took.get().copied()
    }

    pub fn notes(&self) -> Vec<String> {
        self.notes.lock().unwrap_or_else(|e| e.into_inner()).clone()
    }
}

// SAFETY: a chunk is lent by whoever turned its state from pending to taken, so once at a time; nobody reads it before it is ready; its
// memory lives as long as its source, which the queue keeps.
unsafe impl ChunkSink for ChunkQueue {
    fn next(&self, reader: Reader, block: bool) -> Next {
        let mut queue = self.lock();
        while !self.is_halted() {
            let (number, chunk) = match queue.choose(&self.sources, reader, self.delivery.get().is_none()) {
                Ok(Choice::Read(id)) => id,
                Ok(Choice::Nothing) => break,
                Ok(Choice::Arriving) if !block => return Next::Later,
                Ok(Choice::Arriving) => {
                    queue = pending::look_again(&self.settled, queue);
                    continue;
                }
                Err(error) => {
                    self.set_failure(error);
                    self.settled.notify_all();
                    break;
                }
            };
            let source = &self.sources[number];
            let range = source.chunk(chunk);
            // SAFETY: the chunk lies inside the source's memory.
            let here = unsafe { source.memory().start().add(range.start) };
            let away = queue.to_deliver.get(number).is_some_and(|chunks| chunks[chunk]);
            if away && queue.buffers.are_all_lent() {
                if !block {
                    return Next::Later;
                }
                self.waiters.fetch_add(1, Ordering::SeqCst);
                queue = self.settled.wait(queue).unwrap_or_else(|e| e.into_inner());
                self.waiters.fetch_sub(1, Ordering::SeqCst);
                continue;
            }
            if !source.take(chunk) {
                continue;
            }
            let lent = if away { queue.buffers.lend() } else { None };
            let (memory, buffer) = lent.unwrap_or((here, IN_PLACE));
            queue.lent += 1;
            let lane = &mut queue.lanes[reader as usize];
            // A chunk that was delivered is pending again, and must not be delivered twice.
            lane.next += usize::from(lane.order.get(lane.next) == Some(&(number, chunk)));
            let chunk = Chunk { file: number, offset: range.start as u64, len: range.len() };
            return Next::Read(Lent { chunk, memory, buffer });
        }
        // A reader would wait for itself here, so it ends.
        if block {
            queue.lanes[reader as usize].readers -= 1;
        }
        Next::Done
    }

    fn filled(&self, lent: Lent) {
        let (number, offset) = (lent.chunk.file, lent.chunk.offset as usize);
        let source = &self.sources[number];
        let chunk = source.chunks(&(offset..offset + 1)).start;
        // What is read once more was handed over before.
        let is_first = || self.lock().wanted.get(number).is_some_and(|chunks| chunks[chunk]);
        let delivery = self.delivery.get().filter(|_| lent.buffer != IN_PLACE || is_first());
        if let Some(delivery) = delivery {
            // SAFETY: a buffer of which so much was filled, and nobody else's until it is given back; or the chunk's own place, which nobody writes to any more.
            let bytes = unsafe { std::slice::from_raw_parts(lent.memory, lent.chunk.len) };
            if let Err(cause) = delivery.hand_over(number, chunk, offset, bytes) {
                return self.failed(lent, source.file.error(offset as u64, Some(cause)));
            }
        }
        self.settle(&lent, READY);
    }

    fn failed(&self, lent: Lent, error: Error) {
        self.set_failure(self.sources[lent.chunk.file].naming(error));
        self.settle(&lent, FAILED);
    }

    fn put_back(&self, lent: Lent) {
        self.settle(&lent, PENDING);
    }

    fn note(&self, note: String) {
        let mut notes = self.notes.lock().unwrap_or_else(|e| e.into_inner());
        if !notes.contains(&note) {
            notes.push(note);
        }
    }
}
