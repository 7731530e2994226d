//! Reading slots while others use the cache: a batch of parts, many in flight at once, each checked before it is
//! handed out.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashSet};
use std::io;
use std::ops::Deref;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread;

use sluice_store::load::{Chunk, Filled, Staging};
use sluice_store::{Buffer, LoadOptions, ReusedMemory, Turn};

use super::cipher::Cipher;
use super::index::Key;
use super::slot::{self, Label};
use super::storage::StoredFile;

/// Bytes that are in flight, being checked, or not taken yet, unless a single slot is larger.
pub const READING: usize = 48 << 20;
const MOST_REQUESTS: usize = 64;
/// Of these, bytes that the disk is asked for at once, but at least two slots: more than a fast disk works on, and
/// soon checked.
const IN_FLIGHT: usize = 8 << 20;
/// A slot of so many bytes is read into the shared memory even if it is the only one.
const LARGE: usize = 1 << 20;

/// Threads that check what was read.
const CHECKERS: usize = 2;

/// Why a part is not there.
#[derive(Debug, thiserror::Error)]
pub enum Miss {
    /// It was evicted, or never stored.
    #[error("not in the prompt cache")]
    Gone,
    /// Its bytes are not those that were written. The entry is removed.
    #[error("a slot of the prompt cache is not what was written")]
    Wrong,
    /// The entry is removed.
    #[error("a slot of the prompt cache cannot be read")]
    Io(#[source] io::Error),
}

/// In which order parts are handed out. They are read in the order in which they were asked for, or large ones first,
/// since these also take longest to put in place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// In the order in which they were asked for.
    AsRequested,
    /// As they are read: a part that is read early does not wait for others.
    AsRead,
}

/// What reads return to their cache.
#[derive(Debug, Default)]
pub(super) struct Returned {
    pub pins: Vec<Key>,
    pub wrong: Vec<Key>,
    /// Messages for people.
    pub notes: Vec<String>,
    pub parts: u64,
    pub bytes: u64,
}

/// Where reads leave what they return.
pub(super) type ReturnBox = Arc<Mutex<Returned>>;

pub(super) fn lock(desk: &ReturnBox) -> MutexGuard<'_, Returned> {
    desk.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The slot of a part.
#[derive(Debug)]
pub(super) struct SlotSource {
    pub file: Arc<dyn StoredFile>,
    pub path: Option<PathBuf>,
    pub offset: u64,
    pub len: usize,
}

#[derive(Debug)]
pub(super) struct WantedPart {
    pub label: Label<'static>,
    pub tokens: Vec<u32>,
    /// `None` if it is not there any more.
    pub from: Option<SlotSource>,
}

/// Parts to be read. Their entries are not evicted until this is dropped.
pub struct Reads {
    wants: Vec<WantedPart>,
    cipher: Option<Arc<Cipher>>,
    held: HashSet<Key>,
    desk: ReturnBox,
    memory: ReusedMemory,
    cancelled: Arc<AtomicBool>,
}

impl std::fmt::Debug for Reads {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        write!(f, "Reads({} parts)", self.wants.len())
    }
}

impl Drop for Reads {
    fn drop(&mut self) {
        lock(&self.desk).pins.extend(self.held.drain());
    }
}

impl Reads {
    pub(super) fn new(
        wants: Vec<WantedPart>,
        cipher: Option<Arc<Cipher>>,
        held: HashSet<Key>,
        desk: ReturnBox,
        memory: ReusedMemory,
    ) -> Reads {
        Reads { wants, cipher, held, desk, memory, cancelled: Arc::default() }
    }

    /// How many parts were asked for.
    pub fn len(&self) -> usize {
        self.wants.len()
    }

    /// Whether no part was asked for.
    pub fn is_empty(&self) -> bool {
        self.wants.is_empty()
    }

    /// A flag to cancel: once it is set nothing more is read. What is in flight may still be handed out.
    pub fn cancel_flag(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.cancelled)
    }

    fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Relaxed)
    }

    /// Reads all parts and hands each to `take` once, with its number: its bytes, right to the last bit, or why not.
    /// `take` is called from any thread, one call at a time. The cache later removes, logs and counts what is not
    /// right. Only one of a cache's reads runs at a time, since they share one disk and one memory: the next begins
    /// when all parts of this one are dropped.
    pub fn for_each(self, order: Order, take: impl FnMut(usize, Result<ReadPart, Miss>) + Send) {
        let turn = Arc::new(self.memory.turn());
        let counter = Mutex::new(Delivery { order, next: 0, waiting: BTreeMap::new(), take, turn });
        for batch in self.batches(order) {
            let mut left = batch;
            let mut refused = None;
            let bytes = |i: &usize| self.wants[*i].from.as_ref().map_or(0, |f| f.len);
            if (left.len() > 1 || left.iter().any(|i| bytes(i) >= LARGE))
                && !self.is_cancelled()
                && let Err(e) = self.read_batch(&mut left, &counter)
            {
                refused = Some(e);
                // From here on each part has memory of its own.
                self.memory.release();
            }
            for i in left.into_iter().take_while(|_| !self.is_cancelled()) {
                let came = self.read_one(i);
                // Then this part was the cause.
                refused = refused.filter(|_| !matches!(came, Err(Miss::Io(_))));
                deliver(&counter, i, came);
            }
            if let Some(e) = refused {
                lock(&self.desk).notes.push(format!("the prompt cache reads one by one: {e}"));
            }
        }
    }

    /// Groups parts that are read together. With [`Order::AsRequested`], no part waits for one of a later batch.
    fn batches(&self, order: Order) -> Vec<Vec<usize>> {
        let mut all: Vec<usize> = (0..self.wants.len()).collect();
        // Slots of different sizes are read apart, since memory is divided by the largest.
        let class = |i: usize| self.wants[i].from.as_ref().filter(|f| f.path.is_some()).map(|f| f.len.ilog2());
        if order == Order::AsRead {
            all.sort_by_key(|&i| Reverse(class(i)));
        }
        let mut batches: Vec<Vec<usize>> = Vec::new();
        let mut seen = HashSet::new();
        for i in all {
            let place = self.wants[i].from.as_ref().map(|f| (&f.path, f.offset));
            // The same slot again goes to another batch: parts are told apart by their slots.
            let goes_on = batches.last().is_some_and(|b| class(b[0]).is_some() && class(b[0]) == class(i))
                && !seen.contains(&place);
            if !goes_on {
                batches.push(Vec::new());
                seen.clear();
            }
            seen.insert(place);
            batches.last_mut().expect("there is one").push(i);
        }
        batches
    }

    /// Reads a batch with the readers of weights. Parts that are in `left` afterwards were not handed out.
    fn read_batch<T>(&self, left: &mut Vec<usize>, counter: &Mutex<Delivery<T>>) -> Result<(), String>
    where
        T: FnMut(usize, Result<ReadPart, Miss>) + Send,
    {
        let mut paths: Vec<&Path> = Vec::new();
        let mut numbers: BTreeMap<(usize, u64), usize> = BTreeMap::new();
        let mut chunks = Vec::with_capacity(left.len());
        let mut size = 0;
        for &i in left.iter() {
            let Some((from, path)) = self.wants[i].from.as_ref().and_then(|f| Some((f, f.path.as_deref()?))) else {
                return Ok(());
            };
            let file = paths.iter().rposition(|p| *p == path).unwrap_or_else(|| {
                paths.push(path);
                paths.len() - 1
            });
            numbers.insert((file, from.offset), i);
            chunks.push(Chunk { file, offset: from.offset, len: from.len });
            size = size.max(from.len);
        }
        let buffers = (READING / size).clamp(2, MOST_REQUESTS).min(left.len());
        let handed = Mutex::new(HashSet::new());
        let check = |i: usize, filled: Filled| {
            let checked = self.checked(i, Slot::Staged(filled));
            deliver(counter, i, checked);
        };
        // Some disks complete reads only when all that they were given are done. So half of the buffers are asked for
        // while the others are checked.
        let options =
            LoadOptions { depth: (IN_FLIGHT / size).max(2).min(buffers.div_ceil(2)), ..LoadOptions::default() };
        let (sender, receiver) = mpsc::channel::<(usize, Filled)>();
        let (mut sender, receiver) = (Some(sender), Mutex::new(receiver));
        let panicked = Mutex::new(None);
        let read = thread::scope(|scope| {
            // Dropped at the end of this scope, however that comes: then the checkers end.
            let sender = sender.take().expect("there is one");
            // Checksums and decryption keep pace with a fast disk only on threads of their own.
            let work = || {
                // The lock is not held while a slot is checked.
                let next = || receiver.lock().unwrap_or_else(PoisonError::into_inner).recv();
                while let Ok((i, filled)) = next() {
                    // The reader waits for buffers: they must come back even if `take` panics.
                    if let Err(panic) = catch_unwind(AssertUnwindSafe(|| check(i, filled))) {
                        panicked.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(panic);
                    }
                }
            };
            let spawn = || thread::Builder::new().name("sluice-check".into()).spawn_scoped(scope, work).is_ok();
            let checkers = (0..CHECKERS).filter(|_| spawn()).count();
            let came = |filled: Filled| {
                let i = numbers[&(filled.chunk().file, filled.chunk().offset)];
                handed.lock().unwrap_or_else(PoisonError::into_inner).insert(i);
                if checkers > 0 {
                    sender.send((i, filled)).expect("the receiver is there until all is read");
                } else {
                    check(i, filled);
                }
            };
            let staging = Staging::new(chunks, buffers, size, &mut |bytes| self.memory.lend(bytes), came);
            let read = staging.map_err(|e| e.to_string());
            read.and_then(|staging| {
                staging.cancelled_by(&self.cancelled).read(&paths, &options).map_err(|e| e.to_string())
            })
        });
        if let Some(panic) = panicked.into_inner().unwrap_or_else(PoisonError::into_inner) {
            resume_unwind(panic);
        }
        let handed = handed.into_inner().unwrap_or_else(PoisonError::into_inner);
        left.retain(|i| !handed.contains(i));
        read.map(drop)
    }

    fn read_one(&self, i: usize) -> PartResult {
        let from = self.wants[i].from.as_ref().ok_or(Miss::Gone)?;
        let mut slot = Buffer::zeroed(from.len).map_err(Miss::Io)?;
        match from.file.read_at(from.offset, &mut slot) {
            Ok(()) => self.checked(i, Slot::Own(slot)),
            Err(e) => {
                self.is_wrong(i, &format!("cannot be read: {e}"));
                Err(Miss::Io(e))
            }
        }
    }

    /// Checks a slot: decrypts it, and compares it with its label.
    fn checked(&self, i: usize, mut slot: Slot) -> PartResult {
        let want = &self.wants[i];
        let label = Label { tokens: &want.tokens, ..want.label };
        if !is_right(self.cipher.as_deref(), &label, slot.bytes()) {
            self.is_wrong(i, "is not what was written");
            return Err(Miss::Wrong);
        }
        let mut desk = lock(&self.desk);
        desk.parts += 1;
        desk.bytes += slot.bytes().len() as u64;
        Ok((slot, label.bytes as usize))
    }

    fn is_wrong(&self, i: usize, why: &str) {
        let WantedPart { label, from, .. } = &self.wants[i];
        let place = from.as_ref().map_or(String::new(), |f| match &f.path {
            Some(path) => format!("{} at byte {}", path.display(), f.offset),
            None => format!("byte {}", f.offset),
        });
        let line = format!("the prompt cache has lost an entry: {place} {why}");
        let mut desk = lock(&self.desk);
        desk.wrong.push((label.model, label.hash));
        desk.notes.push(line);
    }
}

/// Decrypts a slot in place, and returns whether it holds what its label says.
pub(super) fn is_right(cipher: Option<&Cipher>, label: &Label, slot: &mut [u8]) -> bool {
    match cipher {
        Some(cipher) => cipher.open(slot) && slot::holds(label, false, slot),
        None => slot::holds(label, true, slot),
    }
}

/// A slot that was read.
enum Slot {
    Staged(Filled),
    Own(Buffer),
    /// From a store.
    Fetched(Vec<u8>),
}

impl Slot {
    fn bytes(&mut self) -> &mut [u8] {
        match self {
            Slot::Staged(filled) => filled,
            Slot::Own(buffer) => buffer,
            Slot::Fetched(bytes) => bytes,
        }
    }
}

/// A part as it was written. Other reads wait for its memory until this is dropped.
pub struct ReadPart {
    slot: Slot,
    len: usize,
    /// Dropped after the slot. `None`: its memory is its own.
    _turn: Option<Arc<Turn>>,
}

impl ReadPart {
    /// A part from a slot that a store gave; `None` if it is not what the label says.
    pub(crate) fn checked(cipher: Option<&Cipher>, label: &Label, mut slot: Vec<u8>) -> Option<ReadPart> {
        let is_slot = slot.len() as u64 == slot::slot_bytes(label.bytes);
        (is_slot && is_right(cipher, label, &mut slot)).then(|| ReadPart {
            slot: Slot::Fetched(slot),
            len: label.bytes as usize,
            _turn: None,
        })
    }
}

impl Deref for ReadPart {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match &self.slot {
            Slot::Staged(filled) => &filled[..self.len],
            Slot::Own(buffer) => &buffer[..self.len],
            Slot::Fetched(bytes) => &bytes[..self.len],
        }
    }
}

/// A slot and the length of its part, or why there is none.
type PartResult = Result<(Slot, usize), Miss>;

/// Hands parts out, in order if asked to.
struct Delivery<T> {
    order: Order,
    next: usize,
    waiting: BTreeMap<usize, PartResult>,
    take: T,
    turn: Arc<Turn>,
}

fn deliver<T: FnMut(usize, Result<ReadPart, Miss>)>(counter: &Mutex<Delivery<T>>, i: usize, came: PartResult) {
    let mut counter = counter.lock().unwrap_or_else(PoisonError::into_inner);
    let counter = &mut *counter;
    let turn = &counter.turn;
    let mut give = |i, came: PartResult| {
        (counter.take)(i, came.map(|(slot, len)| ReadPart { slot, len, _turn: Some(Arc::clone(turn)) }))
    };
    if counter.order == Order::AsRead {
        return give(i, came);
    }
    counter.waiting.insert(i, came);
    while let Some(came) = counter.waiting.remove(&counter.next) {
        give(counter.next, came);
        counter.next += 1;
    }
}
