//! The thread that owns the folder: it looks for prefixes, writes what it is handed in batches, and has others read. What goes wrong with the disk ends the
//! cache and nothing else.

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Result;
use sluice_cache::disk::{DiskCache, Entry, Error, FileKey, Key, Label, New, Order, Place, STATE, Settings};
use sluice_cache::{BlockHash, Wanted, block_hash};

use super::{PromptCacheOptions, Shape};

/// A batch is written when it has so many bytes, or when nothing came for so long.
const BATCH: u64 = 8 << 20;
const PAUSE: Duration = Duration::from_millis(20);
const IDLE: Duration = Duration::from_secs(5);

/// A node that is to be kept, with its bytes.
pub(crate) struct Outgoing {
    pub hash: BlockHash,
    pub before: BlockHash,
    pub position: u32,
    pub tokens: Vec<u32>,
    pub parts: Vec<(u32, Vec<u8>)>,
    pub bytes: u64,
}

/// What is looked for.
pub(crate) struct Query {
    pub root: BlockHash,
    pub tokens: Arc<[u32]>,
    /// Of each of its blocks that is in memory, a bit for each group.
    pub present: Vec<u64>,
    /// So many tokens can be taken up from memory alone.
    pub usable: usize,
}

/// A part of an entry that memory lacked.
#[derive(Clone, Debug)]
pub(crate) struct Part {
    /// Number of the node on the path.
    pub node: usize,
    /// The number of the cache group, or [`STATE`].
    pub part: u32,
    pub bytes: u64,
    /// Tokens of the entry.
    tokens: usize,
    hash: BlockHash,
    before: BlockHash,
    place: Place,
}

/// A prefix that is longer with what lies here.
pub(crate) struct Found {
    pub wanted: Wanted,
    pub tokens: Arc<[u32]>,
    pub to: usize,
    /// What memory alone would have given.
    pub usable: usize,
    pub parts: Vec<Part>,
}

/// What comes of reading.
pub(crate) enum Read {
    /// The part with this number.
    Part(usize, Vec<u8>),
    /// One of them is not there, or not what was written.
    Lost,
    /// That was all: bytes, and the time that reading them took.
    Over(u64, Duration),
}

pub(crate) enum Command {
    Find(Query, Sender<Found>),
    Read(Arc<[u32]>, Vec<Part>, SyncSender<Read>),
    Store(Outgoing),
    Touch(Vec<BlockHash>),
    Flush(Sender<()>),
    /// Somebody has read what was wanted: what was wrong with it is to be settled.
    ReadOver,
    Close,
}

/// What both sides know.
#[derive(Default)]
pub(crate) struct Shared {
    /// Bytes that wait to be written.
    pub waiting: AtomicU64,
    pub bytes: AtomicU64,
    pub entries: AtomicU64,
    pub stored: AtomicU64,
    pub written: AtomicU64,
    pub refused: AtomicU64,
    pub read: AtomicU64,
    pub wrong: AtomicU64,
    sick: AtomicBool,
    broken: Mutex<Option<String>>,
    notes: Mutex<Vec<String>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    pub fn is_well(&self) -> bool {
        !self.sick.load(Ordering::Relaxed)
    }

    pub fn broken(&self) -> Option<String> {
        lock(&self.broken).clone()
    }

    pub fn take_notes(&self) -> Vec<String> {
        std::mem::take(&mut lock(&self.notes))
    }
}

pub(crate) struct Keeper {
    cache: DiskCache,
    secret: [u8; 32],
    model: u64,
    shape: Shape,
    shared: Arc<Shared>,
    batch: Vec<Outgoing>,
    batched: u64,
    folder: String,
    fewest: usize,
    /// To itself.
    own: Sender<Command>,
}

impl Keeper {
    /// # Errors
    /// A folder that cannot be used, or that another process uses.
    pub fn open(
        options: &PromptCacheOptions,
        (model, of): (u64, &Path),
        shape: Shape,
        shared: Arc<Shared>,
        own: Sender<Command>,
    ) -> Result<(Keeper, [u8; 32], u64)> {
        let folder = options.folder.display().to_string();
        let key = options.key_file.as_deref().map(FileKey::read).transpose()?;
        let settings = Settings { quota: options.quota, daily_limit: options.daily_limit, key };
        let mut cache = DiskCache::open_folder(&options.folder, settings)?;
        if let Some(why) = cache.cleared() {
            lock(&shared.notes).push(format!("{folder}: the prompt cache begins anew: {why}"));
        }
        let (secret, quota) = (cache.secret(), cache.quota());
        let real = of.canonicalize().unwrap_or_else(|_| of.to_owned());
        let name = real.file_name().unwrap_or_default().to_string_lossy();
        cache.note_model(model, &name, &real.to_string_lossy())?;
        let mut keeper = Keeper {
            cache,
            secret,
            model,
            shape,
            shared,
            batch: Vec::new(),
            batched: 0,
            folder,
            fewest: options.fewest.max(1),
            own,
        };
        keeper.count();
        Ok((keeper, secret, quota))
    }

    /// Until it is told to close.
    pub fn run(mut self, received: &Receiver<Command>) {
        // Who waits until all is written.
        let mut flushed: Vec<Sender<()>> = Vec::new();
        loop {
            let pause = if self.batch.is_empty() && flushed.is_empty() { IDLE } else { PAUSE };
            let done = match received.recv_timeout(pause) {
                Ok(Command::Find(query, tell)) => self.find(&query).map(|found| {
                    // Who asked may be gone.
                    found.into_iter().for_each(|found| _ = tell.send(found));
                }),
                Ok(Command::Read(tokens, parts, tell)) => self.read(&tokens, &parts, tell),
                Ok(Command::Store(outgoing)) => {
                    self.batched += outgoing.bytes;
                    self.batch.push(outgoing);
                    if self.batched >= BATCH { self.write() } else { Ok(()) }
                }
                Ok(Command::ReadOver) => Ok(()),
                Ok(Command::Touch(path)) => self.touch(&path),
                Ok(Command::Flush(tell)) => {
                    flushed.push(tell);
                    self.write()
                }
                Err(RecvTimeoutError::Timeout) => self.write(),
                Ok(Command::Close) | Err(RecvTimeoutError::Disconnected) => {
                    let last = self.write();
                    self.judge(last);
                    return;
                }
            };
            self.judge(done);
            self.count();
            flushed.drain(..).for_each(|tell| _ = tell.send(()));
        }
    }

    /// After an error nothing is asked of the folder any more.
    fn judge(&mut self, done: Result<(), Error>) {
        if let Err(e) = done {
            let why = anyhow::Error::new(e);
            *lock(&self.shared.broken) = Some(format!("{}: {why:#}", self.folder));
            self.shared.sick.store(true, Ordering::Relaxed);
            self.batch.clear();
        }
        if !self.shared.is_well() {
            self.batch.clear();
        }
    }

    fn count(&mut self) {
        lock(&self.shared.notes).extend(self.cache.notes());
        let counts = self.cache.counts();
        let set = |n: &AtomicU64, value: u64| n.store(value, Ordering::Relaxed);
        set(&self.shared.bytes, self.cache.bytes());
        set(&self.shared.entries, self.cache.len());
        set(&self.shared.stored, counts.stored);
        set(&self.shared.written, counts.written);
        set(&self.shared.refused, counts.refused);
    }

    /// Writes what waits.
    fn write(&mut self) -> Result<(), Error> {
        if self.batch.is_empty() || !self.shared.is_well() {
            return Ok(());
        }
        let batch = std::mem::take(&mut self.batch);
        let bytes = std::mem::take(&mut self.batched);
        let done = self.store(&batch);
        self.shared.waiting.fetch_sub(bytes, Ordering::Relaxed);
        done
    }

    fn store(&mut self, batch: &[Outgoing]) -> Result<(), Error> {
        // 1. An entry that was stored without its state makes room for one with it
        let mut replaced = Vec::new();
        for new in batch.iter().filter(|new| new.parts.iter().any(|(part, _)| *part == STATE)) {
            let key = (self.model, new.hash);
            if self.cache.find(&key)?.is_some_and(|entry| !entry.has_state()) {
                replaced.push(key);
            }
        }
        self.cache.remove(&replaced)?;
        // 2. All of them
        let parts: Vec<Vec<(u32, &[u8])>> =
            batch.iter().map(|new| new.parts.iter().map(|(part, bytes)| (*part, &bytes[..])).collect()).collect();
        let news = batch.iter().zip(&parts).map(|(new, parts)| New {
            hash: new.hash,
            before: new.before,
            position: new.position,
            tokens: &new.tokens,
            parts,
        });
        self.cache.store(self.model, &news.collect::<Vec<_>>())?;
        Ok(())
    }

    fn touch(&mut self, path: &[BlockHash]) -> Result<(), Error> {
        let keys: Vec<Key> = path.iter().map(|hash| (self.model, *hash)).collect();
        self.cache.touch(&keys)
    }

    /// An entry of these tokens, if it is here and has what it should have.
    fn entry(
        &mut self,
        hash: BlockHash,
        before: BlockHash,
        position: usize,
        tokens: usize,
    ) -> Result<Option<Entry>, Error> {
        let found = self.cache.find(&(self.model, hash))?;
        let fits = |(part, bytes, _): &(u32, u64, Place)| match *part {
            STATE => *bytes == self.shape.state_bytes as u64,
            group => self.shape.block_bytes.get(group as usize).is_some_and(|b| *b as u64 == *bytes),
        };
        Ok(found.filter(|e| {
            (e.before, e.position as usize, e.tokens as usize) == (before, position, tokens) && e.parts.iter().all(fits)
        }))
    }

    /// The longest prefix that memory and the folder have between them, if it is longer than what memory alone has.
    fn find(&mut self, q: &Query) -> Result<Option<Found>, Error> {
        let n = self.shape.block_tokens;
        let all_groups = (1u64 << self.shape.windows.len()) - 1;
        let full = (0..).zip(&self.shape.windows).filter(|(_, w)| w.is_none()).fold(0u64, |bits, (g, _)| bits | 1 << g);
        let hybrid = self.shape.state_bytes > 0;
        // 1. As far as the layers go that see everything
        let mut path = vec![q.root];
        let mut nodes: Vec<(u64, Option<Entry>)> = Vec::new();
        for (i, block) in q.tokens.chunks_exact(n).enumerate() {
            let hash = block_hash(&self.secret, &path[i], block);
            let present = q.present.get(i).copied().unwrap_or(0);
            let entry = match present == all_groups && !hybrid {
                true => None,
                false => self.entry(hash, path[i], i * n, n)?,
            };
            if (present | groups_of(entry.as_ref())) & full != full {
                break;
            }
            path.push(hash);
            nodes.push((present, entry));
        }
        // 2. From the end back, until windows and a state are there too
        for whole in (0..path.len()).rev() {
            let rest = &q.tokens[whole * n..];
            let mut ends: Vec<(usize, Option<Entry>, BlockHash)> = Vec::new();
            if hybrid {
                for (tokens, hash) in self.cache.with_state(self.model, path[whole])? {
                    let tokens = tokens as usize;
                    let is_ours = tokens < n
                        && rest.get(..tokens).is_some_and(|t| block_hash(&self.secret, &path[whole], t) == hash);
                    if is_ours && let Some(entry) = self.entry(hash, path[whole], whole * n, tokens)? {
                        ends.push((tokens, Some(entry), hash));
                    }
                }
                ends.sort_unstable_by_key(|(tokens, ..)| std::cmp::Reverse(*tokens));
                ends.retain(|(_, entry, _)| groups_of(entry.as_ref()) == all_groups);
                if whole > 0 && nodes[whole - 1].1.as_ref().is_some_and(Entry::has_state) {
                    ends.push((0, None, path[whole]));
                }
            } else {
                ends.push((0, None, path[whole]));
            }
            for (tail, end, hash) in ends {
                let to = whole * n + tail;
                // Less is nothing that would be kept, either.
                if to < q.usable + self.fewest {
                    continue;
                }
                let firsts: Vec<usize> = self.shape.first_blocks(to).collect();
                let has = |i: usize, g: usize| (nodes[i].0 | groups_of(nodes[i].1.as_ref())) >> g & 1 == 1;
                if !firsts.iter().enumerate().all(|(g, first)| (*first..whole).all(|i| has(i, g))) {
                    continue;
                }
                let part_of = |node: usize, entry: &Entry, part: u32, hash: BlockHash, before: BlockHash| {
                    let found = entry.parts.iter().find(|(p, ..)| *p == part);
                    let tokens = entry.tokens as usize;
                    found.map(|(_, bytes, place)| Part {
                        node,
                        part,
                        bytes: *bytes,
                        tokens,
                        hash,
                        before,
                        place: *place,
                    })
                };
                let mut parts = Vec::new();
                for (i, (present, entry)) in nodes[..whole].iter().enumerate() {
                    let Some(entry) = entry else { continue };
                    let groups = (0..firsts.len()).filter(|g| i >= firsts[*g] && present >> g & 1 == 0);
                    parts.extend(groups.filter_map(|g| part_of(i, entry, g as u32, path[i + 1], path[i])));
                    if hybrid && tail == 0 && i + 1 == whole {
                        parts.extend(part_of(i, entry, STATE, path[i + 1], path[i]));
                    }
                }
                if let Some(entry) = &end {
                    let all = (0..firsts.len() as u32).chain([STATE]);
                    parts.extend(all.filter_map(|part| part_of(whole, entry, part, hash, path[whole])));
                }
                let wanted = Wanted { whole, tail };
                return Ok(Some(Found { wanted, tokens: Arc::clone(&q.tokens), to, usable: q.usable, parts }));
            }
            if whole * n < q.usable + self.fewest {
                break;
            }
        }
        Ok(None)
    }

    /// Has parts read by another thread.
    fn read(&mut self, tokens: &[u32], parts: &[Part], tell: SyncSender<Read>) -> Result<(), Error> {
        let n = self.shape.block_tokens;
        let wanted = parts.iter().map(|part| {
            let position = part.node * n;
            let label = Label {
                part: part.part,
                bytes: part.bytes,
                model: self.model,
                hash: part.hash,
                before: part.before,
                position: position as u32,
                tokens: &tokens[position..position + part.tokens],
            };
            (label, part.place)
        });
        let reads = self.cache.reads(&wanted.collect::<Vec<_>>())?;
        let (shared, own) = (Arc::clone(&self.shared), self.own.clone());
        let work = move || {
            let (begun, mut waited, mut bytes) = (Instant::now(), Duration::ZERO, 0);
            reads.each(Order::AsTheyCome, |i, came| {
                let came = match came {
                    Ok(part) => {
                        bytes += part.len() as u64;
                        Read::Part(i, part.to_vec())
                    }
                    Err(_) => {
                        shared.wrong.fetch_add(1, Ordering::Relaxed);
                        Read::Lost
                    }
                };
                let handing = Instant::now();
                // Whoever wanted it may have given up.
                let _ = tell.send(came);
                waited += handing.elapsed();
            });
            shared.read.fetch_add(bytes, Ordering::Relaxed);
            let _ = tell.send(Read::Over(bytes, begun.elapsed().saturating_sub(waited)));
            let _ = own.send(Command::ReadOver);
        };
        // Without a thread it is as if nothing could be read.
        let _ = thread::Builder::new().name("prompt-reads".into()).spawn(work);
        Ok(())
    }
}

/// A bit for each cache group that an entry has a part of.
fn groups_of(entry: Option<&Entry>) -> u64 {
    let parts = entry.map_or(&[][..], |e| &e.parts[..]);
    parts.iter().filter(|(part, ..)| *part < 64).fold(0, |bits, (g, ..)| bits | 1 << g)
}
