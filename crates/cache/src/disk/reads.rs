//! Reading what the cache holds, while others use it: a batch of parts, many in flight at once, each checked before it is handed out.

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
use sluice_store::{Buffer, KeptMemory, LoadOptions, Turn};

use super::cipher::Cipher;
use super::index::Key;
use super::slot::{self, Label};
use super::storage::StoredFile;

/// Bytes that are in flight, being checked, or not taken yet, if a slot is not larger; and how many slots.
pub const READING: usize = 48 << 20;
const MOST_REQUESTS: usize = 64;
/// Of these, bytes that the disk is asked for at once, if they are no less than two slots: more than a fast disk has under way, and soon checked.
const IN_FLIGHT: usize = 8 << 20;
/// A slot from here on is read to the memory that is there for it, also when it is the only one.
const LARGE: usize = 1 << 20;

/// Threads that check what was read.
const CHECKERS: usize = 2;

/// Why a part is not there.
#[derive(Debug, thiserror::Error)]
pub enum Miss {
    /// Evicted, or never there.
    #[error("not in the prompt cache")]
    Gone,
    /// Other bytes than were written, or somebody else's. The entry is removed.
    #[error("a slot of the prompt cache is not what was written")]
    Wrong,
    /// The entry is removed.
    #[error("a slot of the prompt cache cannot be read")]
    Io(#[source] io::Error),
}

/// In which order parts are handed out. They are read in the order in which they are wanted, or large ones first: to put them in their place takes long, too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    AsWanted,
    /// A part that came early does not wait for others.
    AsTheyCome,
}

/// What reads give back to their cache.
#[derive(Debug, Default)]
pub(super) struct Returned {
    pub holds: Vec<Key>,
    pub wrong: Vec<Key>,
    /// Lines for people.
    pub notes: Vec<String>,
    pub parts: u64,
    pub bytes: u64,
}

/// The place where reads leave what they give back.
pub(super) type Desk = Arc<Mutex<Returned>>;

pub(super) fn lock(desk: &Desk) -> MutexGuard<'_, Returned> {
    desk.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Where a part lies.
#[derive(Debug)]
pub(super) struct Source {
    pub file: Arc<dyn StoredFile>,
    pub path: Option<PathBuf>,
    pub offset: u64,
    pub len: usize,
}

#[derive(Debug)]
pub(super) struct Want {
    pub label: Label<'static>,
    pub tokens: Vec<u32>,
    /// `None` where it is not there any more.
    pub from: Option<Source>,
}

/// Parts that are to be read: their entries are not evicted before this is dropped.
pub struct Reads {
    wants: Vec<Want>,
    cipher: Option<Arc<Cipher>>,
    held: HashSet<Key>,
    desk: Desk,
    memory: KeptMemory,
    given_up: Arc<AtomicBool>,
}

impl std::fmt::Debug for Reads {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        write!(f, "Reads({} parts)", self.wants.len())
    }
}

impl Drop for Reads {
    fn drop(&mut self) {
        lock(&self.desk).holds.extend(self.held.drain());
    }
}

impl Reads {
    pub(super) fn new(
        wants: Vec<Want>,
        cipher: Option<Arc<Cipher>>,
        held: HashSet<Key>,
        desk: Desk,
        memory: KeptMemory,
    ) -> Reads {
        Reads { wants, cipher, held, desk, memory, given_up: Arc::default() }
    }

    /// How many parts were wanted.
    pub fn len(&self) -> usize {
        self.wants.len()
    }

    pub fn is_empty(&self) -> bool {
        self.wants.is_empty()
    }

    /// Who sets this wants no more: what is being read then may be handed out yet, and nothing else is read.
    pub fn given_up(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.given_up)
    }

    fn is_given_up(&self) -> bool {
        self.given_up.load(Ordering::Relaxed)
    }

    /// Reads all parts, and hands each to `take` once, by its number among those that were wanted: the bytes of the part, right to the last bit, or why not. From
    /// whichever thread, one at a time. What is not right is removed by the cache later, logged and counted.
    /// One of a cache's reads is made at a time: they share one disk, and the memory of one. So it is over for others only when all of its parts are dropped, too.
    pub fn each(self, order: Order, take: impl FnMut(usize, Result<ReadPart, Miss>) + Send) {
        let turn = Arc::new(self.memory.turn());
        let counter = Mutex::new(Counter { order, next: 0, waiting: BTreeMap::new(), take, turn });
        for batch in self.batches(order) {
            let mut left = batch;
            let mut refused = None;
            let bytes = |i: &usize| self.wants[*i].from.as_ref().map_or(0, |f| f.len);
            if (left.len() > 1 || left.iter().any(|i| bytes(i) >= LARGE))
                && !self.is_given_up()
                && let Err(e) = self.together(&mut left, &counter)
            {
                refused = Some(e);
                // Each has memory of its own from here on.
                self.memory.release();
            }
            for i in left.into_iter().take_while(|_| !self.is_given_up()) {
                let came = self.alone(i);
                // Then it was this part that could not be read.
                refused = refused.filter(|_| !matches!(came, Err(Miss::Io(_))));
                hand(&counter, i, came);
            }
            if let Some(e) = refused {
                lock(&self.desk).notes.push(format!("the prompt cache reads one by one: {e}"));
            }
        }
    }

    /// Numbers of wants that are read together. In order, nothing that others in a batch wait for lies outside of it and behind it.
    fn batches(&self, order: Order) -> Vec<Vec<usize>> {
        let mut all: Vec<usize> = (0..self.wants.len()).collect();
        // Slots of other sizes are read apart: as many would be in flight as there is memory for the largest.
        let class = |i: usize| self.wants[i].from.as_ref().filter(|f| f.path.is_some()).map(|f| f.len.ilog2());
        if order == Order::AsTheyCome {
            all.sort_by_key(|&i| Reverse(class(i)));
        }
        let mut batches: Vec<Vec<usize>> = Vec::new();
        let mut seen = HashSet::new();
        for i in all {
            let place = self.wants[i].from.as_ref().map(|f| (&f.path, f.offset));
            // The same slot once more is another batch's: what comes is told apart by its place.
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

    /// Reads a batch through the readers of weights. What is in `left` afterwards was not handed out.
    fn together<T>(&self, left: &mut Vec<usize>, counter: &Mutex<Counter<T>>) -> Result<(), String>
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
            hand(counter, i, checked);
        };
        // Some disks say that reads are done only when all are that they were given: the others are asked for while those are checked, and the last ones are few.
        let options =
            LoadOptions { depth: (IN_FLIGHT / size).max(2).min(buffers.div_ceil(2)), ..LoadOptions::default() };
        let (sender, receiver) = mpsc::channel::<(usize, Filled)>();
        let (mut sender, receiver) = (Some(sender), Mutex::new(receiver));
        let panicked = Mutex::new(None);
        let read = thread::scope(|scope| {
            // Gone with this scope, however that ends: then the checkers end.
            let sender = sender.take().expect("there is one");
            // Summing and decrypting keep pace with a fast disk only beside the thread that reads.
            let work = || {
                // The lock is not held while a slot is checked.
                let next = || receiver.lock().unwrap_or_else(PoisonError::into_inner).recv();
                while let Ok((i, filled)) = next() {
                    // Who reads waits for buffers: they come back whatever `take` does.
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
            read.and_then(|staging| staging.unless(&self.given_up).read(&paths, &options).map_err(|e| e.to_string()))
        });
        if let Some(panic) = panicked.into_inner().unwrap_or_else(PoisonError::into_inner) {
            resume_unwind(panic);
        }
        let handed = handed.into_inner().unwrap_or_else(PoisonError::into_inner);
        left.retain(|i| !handed.contains(i));
        read.map(drop)
    }

    fn alone(&self, i: usize) -> Came {
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

    /// A slot whose part may be believed: decrypted, and what its label says to the last bit.
    fn checked(&self, i: usize, mut slot: Slot) -> Came {
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
        let Want { label, from, .. } = &self.wants[i];
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

/// Whether a slot, which is decrypted in place, holds what its label says.
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
}

impl Slot {
    fn bytes(&mut self) -> &mut [u8] {
        match self {
            Slot::Staged(filled) => filled,
            Slot::Own(buffer) => buffer,
        }
    }
}

/// A part as it was written. What was read next to it waits for its memory to be given back, by dropping this.
pub struct ReadPart {
    slot: Slot,
    len: usize,
    /// Given back after the slot.
    _turn: Arc<Turn>,
}

impl Deref for ReadPart {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match &self.slot {
            Slot::Staged(filled) => &filled[..self.len],
            Slot::Own(buffer) => &buffer[..self.len],
        }
    }
}

/// A slot and the length of its part, or why there is none.
type Came = Result<(Slot, usize), Miss>;

/// Hands parts out, in order if wanted so.
struct Counter<T> {
    order: Order,
    next: usize,
    waiting: BTreeMap<usize, Came>,
    take: T,
    turn: Arc<Turn>,
}

fn hand<T: FnMut(usize, Result<ReadPart, Miss>)>(counter: &Mutex<Counter<T>>, i: usize, came: Came) {
    let mut counter = counter.lock().unwrap_or_else(PoisonError::into_inner);
    let counter = &mut *counter;
    let turn = &counter.turn;
    let mut give =
        |i, came: Came| (counter.take)(i, came.map(|(slot, len)| ReadPart { slot, len, _turn: Arc::clone(turn) }));
    if counter.order == Order::AsTheyCome {
        return give(i, came);
    }
    counter.waiting.insert(i, came);
    while let Some(came) = counter.waiting.remove(&counter.next) {
        give(counter.next, came);
        counter.next += 1;
    }
}
