//! The thread that looks prefixes up and has them read.
//!
//! It is separate from the writer, so that a request waits for no batch and no sync. A lookup waits at most for
//! - the lookup before it,
//! - the disk, where the index's pages are not in memory,
//! - index pages that a transaction is handing to the system. That waits for the disk once in a run, when the mark of a clean end is removed.

use std::cmp::Reverse;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, SyncSender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use sluice_cache::disk::{self, Entry, Error, Label, Lookups, Order, Place, STATE};
use sluice_cache::remote::{InStore, Remote};
use sluice_cache::{BlockHash, RestoreSpan, block_hash};

use super::costs::Origin;
use super::shared::Shared;
use super::writer::WriterCommand;
use crate::tiers::shape::CacheShape;

/// A prompt whose prefix is looked up.
pub(crate) struct PrefixQuery {
    pub root: BlockHash,
    pub tokens: Arc<[u32]>,
    /// Which groups have each of its blocks in the caches: a bit for each group.
    pub present: Vec<u64>,
    /// Tokens that can be reused from the caches alone.
    pub usable: usize,
    /// A prefix has to add this many tokens at least.
    pub min_tokens: usize,
    /// Whether the store that replicas share may be asked.
    pub asks_store: bool,
}

/// A block or state that the caches lack.
#[derive(Clone, Debug)]
pub(crate) struct PrefixPart {
    /// Index of the node on the path.
    pub node: usize,
    /// The cache group, or [`STATE`].
    pub part: u32,
    pub bytes: u64,
    /// Tokens of the entry.
    tokens: usize,
    hash: BlockHash,
    before: BlockHash,
    place: Place,
}

impl PrefixPart {
    fn is_in_store(&self) -> bool {
        self.place == Place::IN_STORE
    }

    /// Where parts come from.
    pub fn origin(parts: &[PrefixPart]) -> Origin {
        if parts.iter().any(PrefixPart::is_in_store) { Origin::Store } else { Origin::Disk }
    }
}

/// A prefix that is longer than what the caches have alone.
pub(crate) struct FoundPrefix {
    pub wanted: RestoreSpan,
    /// Tokens of the entries. After `to` they may differ from the prompt.
    pub tokens: Arc<[u32]>,
    /// Tokens of the prefix.
    pub to: usize,
    /// Tokens that can be reused from the caches alone.
    pub usable: usize,
    pub parts: Vec<PrefixPart>,
    /// How long the store may take for its parts.
    pub patience: Duration,
}

impl FoundPrefix {
    /// Where its parts come from.
    pub fn origin(&self) -> Origin {
        PrefixPart::origin(&self.parts)
    }
}

/// Progress of a read.
pub(crate) enum ReadReply {
    /// The part with this index, in its read buffer. The next reads wait until it is dropped.
    Part(usize, disk::ReadPart),
    /// A part is missing or damaged.
    Lost,
    /// All parts were read: their bytes, and the time that reading took.
    Done(u64, Duration),
}

/// What the lookup thread is told to do.
pub(crate) enum LookupCommand {
    /// Looks a prefix up. Drops the sender if there is none.
    Find(PrefixQuery, Sender<FoundPrefix>),
    /// Reads parts of a prefix with these tokens; those in the store for so long at most.
    Read(Arc<[u32]>, Vec<PrefixPart>, Duration, SyncSender<ReadReply>),
    /// Ends the thread.
    Close,
}

/// How many of the entries that share only some tokens with the prompt are looked up.
const MAX_LISTED: usize = 64;
/// Of how many of them the tokens are read. Encrypted, it is one: there the whole slot has to be read.
const MAX_COMPARED: usize = 4;

/// What was found.
pub(super) struct Found {
    pub prefix: Option<FoundPrefix>,
    /// So many of the prompt's first blocks are there.
    pub reach: usize,
}

/// A possible end of a prefix: after whole blocks, or after `tail` tokens of an entry that follows them.
struct PrefixEnd {
    tail: usize,
    entry: Option<Entry>,
    hash: BlockHash,
    /// The entry's tokens, where they differ from the prompt after `tail`.
    tokens: Option<Vec<u32>>,
}

/// The lookup thread.
pub(crate) struct Lookup {
    pub lookups: Lookups,
    /// The key of block hashes.
    pub secret: [u8; 32],
    pub shape: CacheShape,
    pub shared: Arc<Shared>,
    pub writer: Sender<WriterCommand>,
    /// What replicas share.
    pub remote: Option<Arc<Remote>>,
}

impl Lookup {
    /// Handles commands until [`LookupCommand::Close`].
    pub fn run(self: Arc<Self>, received: &Receiver<LookupCommand>) {
        if self.shared.entries.load(Ordering::Relaxed) > 0 {
            self.lookups.prepare();
        }
        while let Ok(command) = received.recv() {
            let done = match command {
                LookupCommand::Close => return,
                // The sender is dropped, which says that there is nothing.
                _ if !self.shared.is_ready() => Ok(()),
                LookupCommand::Find(query, reply) => self.find(&query, &InStore::default()).map(|found| {
                    if self.may_ask_store(&query, &found) {
                        Arc::clone(&self).ask_store(query, found, reply);
                    } else {
                        // The receiver may be gone.
                        found.prefix.into_iter().for_each(|found| _ = reply.send(found));
                    }
                }),
                LookupCommand::Read(tokens, parts, patience, reply) => self.read(&tokens, &parts, patience, reply),
            };
            if let Err(e) = done {
                self.shared.fail(e);
            }
        }
    }

    /// Senders of commands check that it is known.
    pub(super) fn model(&self) -> u64 {
        self.shared.fingerprint().expect("nothing is looked up for a model that is not known")
    }

    /// An entry of these tokens, if it exists and its parts have the right sizes. What the folder lacks may be in the store.
    fn entry(
        &self,
        store: &InStore,
        hash: BlockHash,
        before: BlockHash,
        position: usize,
        tokens: usize,
    ) -> Result<Option<Entry>, Error> {
        let mut found = self.lookups.find(&(self.model(), hash))?;
        match (&mut found, store.entries.get(&hash)) {
            (None, stored) => found = stored.cloned(),
            (Some(entry), Some(stored)) => {
                let lacking = |(part, ..): &&(u32, u64, Place)| !entry.parts.iter().any(|(p, ..)| p == part);
                let more: Vec<_> = stored.parts.iter().filter(lacking).copied().collect();
                entry.parts.extend(more);
            }
            _ => {}
        }
        let fits = |(part, bytes, _): &(u32, u64, Place)| match *part {
            STATE => *bytes == self.shape.state_bytes as u64,
            group => self.shape.block_bytes.get(group as usize).is_some_and(|b| *b as u64 == *bytes),
        };
        Ok(found.filter(|e| {
            (e.before, e.position as usize, e.tokens as usize) == (before, position, tokens) && e.parts.iter().all(fits)
        }))
    }

    /// The longest prefix that the caches, the folder and the store have between them, if it is longer than what the caches have alone.
    pub(super) fn find(&self, q: &PrefixQuery, store: &InStore) -> Result<Found, Error> {
        let n = self.shape.block_tokens;
        let all_groups = self.all_groups();
        let full = (0..).zip(&self.shape.windows).filter(|(_, w)| w.is_none()).fold(0u64, |bits, (g, _)| bits | 1 << g);
        let hybrid = self.shape.state_bytes > 0;
        // 1. Forward, as far as groups without a window reach
        let mut path = vec![q.root];
        let mut nodes: Vec<(u64, Option<Entry>)> = Vec::new();
        for (i, block) in q.tokens.chunks_exact(n).enumerate() {
            let hash = block_hash(&self.secret, &path[i], block);
            let present = q.present.get(i).copied().unwrap_or(0);
            let entry = match present == all_groups && !hybrid {
                true => None,
                false => self.entry(store, hash, path[i], i * n, n)?,
            };
            if (present | groups_of(entry.as_ref())) & full != full {
                break;
            }
            path.push(hash);
            nodes.push((present, entry));
        }
        let reach = nodes.len();
        // 2. Back from there, until windows and a state are complete
        for whole in (0..path.len()).rev() {
            let rest = &q.tokens[whole * n..];
            let mut ends: Vec<PrefixEnd> = Vec::new();
            if hybrid {
                let mut following = self.lookups.following(self.model(), path[whole])?;
                following.extend(store.following.get(&path[whole]).into_iter().flatten());
                following.sort_unstable();
                following.dedup();
                for (tokens, hash) in following {
                    let tokens = tokens as usize;
                    let is_ours = tokens < n
                        && rest.get(..tokens).is_some_and(|t| block_hash(&self.secret, &path[whole], t) == hash);
                    if is_ours && let Some(entry) = self.entry(store, hash, path[whole], whole * n, tokens)? {
                        ends.push(PrefixEnd { tail: tokens, entry: Some(entry), hash, tokens: None });
                    }
                }
                ends.sort_unstable_by_key(|end| Reverse(end.tail));
                ends.retain(|end| groups_of(end.entry.as_ref()) == all_groups);
            } else if whole + 1 == path.len() && whole * n + rest.len().min(n - 1) >= q.usable + q.min_tokens {
                ends.extend(self.best_partial(path[whole], whole * n, rest)?);
            }
            if !hybrid || whole > 0 && nodes[whole - 1].1.as_ref().is_some_and(Entry::has_state) {
                ends.push(PrefixEnd { tail: 0, entry: None, hash: path[whole], tokens: None });
            }
            for PrefixEnd { tail, entry: end, hash, tokens: own } in ends {
                let to = whole * n + tail;
                // A shorter one would not have been written.
                if to < q.usable + q.min_tokens {
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
                    found.map(|(_, bytes, place)| PrefixPart {
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
                let tokens = match own {
                    Some(own) => q.tokens[..whole * n].iter().copied().chain(own).collect(),
                    None => Arc::clone(&q.tokens),
                };
                let (wanted, usable) = (RestoreSpan { whole, tail }, q.usable);
                let patience = Duration::ZERO;
                let prefix = Some(FoundPrefix { wanted, tokens, to, usable, parts, patience });
                return Ok(Found { prefix, reach });
            }
            if whole * n < q.usable + q.min_tokens {
                break;
            }
        }
        Ok(Found { prefix: None, reach })
    }

    /// Of the entries that follow a whole block, the one that shares most tokens with `rest`.
    fn best_partial(&self, before: BlockHash, position: usize, rest: &[u32]) -> Result<Option<PrefixEnd>, Error> {
        // 1. Recently used ones first: each costs a read
        let mut all = Vec::new();
        for (tokens, hash) in self.lookups.following(self.model(), before)?.into_iter().take(MAX_LISTED) {
            let entry = self.entry(&InStore::default(), hash, before, position, tokens as usize)?;
            all.extend(entry.filter(|e| groups_of(Some(e)) == self.all_groups()).map(|e| (hash, e)));
        }
        all.sort_unstable_by_key(|(_, entry)| Reverse(entry.used));
        all.truncate(if self.lookups.is_encrypted() { 1 } else { MAX_COMPARED });
        // 2. Compare their tokens with the prompt
        let mut best: Option<PrefixEnd> = None;
        for (hash, entry) in all {
            let Some(tokens) = self.lookups.tokens_of(&(self.model(), hash), &entry)? else { continue };
            let tail = tokens.iter().zip(rest).take_while(|(a, b)| a == b).count();
            if (1..self.shape.block_tokens).contains(&tail) && best.as_ref().is_none_or(|b| b.tail < tail) {
                best = Some(PrefixEnd { tail, entry: Some(entry), hash, tokens: Some(tokens) });
            }
        }
        Ok(best)
    }

    /// All bits of the cache groups.
    fn all_groups(&self) -> u64 {
        (1u64 << self.shape.windows.len()) - 1
    }

    /// Starts a thread that reads parts.
    fn read(
        &self,
        tokens: &[u32],
        parts: &[PrefixPart],
        patience: Duration,
        reply: SyncSender<ReadReply>,
    ) -> Result<(), Error> {
        let (stored, on_disk): (Vec<usize>, Vec<usize>) = (0..parts.len()).partition(|i| parts[*i].is_in_store());
        let wanted = on_disk.iter().map(|i| (self.label_of(&parts[*i], tokens), parts[*i].place));
        let reads = self.lookups.reads(&wanted.collect::<Vec<_>>())?;
        let fetch = self.prepare_fetch(stored, parts, tokens, patience);
        let (shared, writer, given_up) = (Arc::clone(&self.shared), self.writer.clone(), reads.cancel_flag());
        let work = move || {
            let (started, waited, bytes) = (Instant::now(), Mutex::new(Duration::ZERO), AtomicU64::new(0));
            let send = |progress: ReadReply| {
                let sending = Instant::now();
                if reply.send(progress).is_err() {
                    // The receiver is gone.
                    given_up.store(true, Ordering::Relaxed);
                }
                *waited.lock().unwrap_or_else(PoisonError::into_inner) += sending.elapsed();
            };
            thread::scope(|scope| {
                // The store and the disk are read at the same time.
                if let Some(fetch) = fetch {
                    let (send, given_up, bytes) = (&send, &given_up, &bytes);
                    scope.spawn(move || {
                        let fetched = fetch(given_up, &mut |i, part| send(ReadReply::Part(i, part)));
                        bytes.fetch_add(fetched, Ordering::Relaxed);
                    });
                }
                let mut read = 0;
                reads.for_each(Order::AsRead, |i, part| {
                    send(match part {
                        Ok(part) => {
                            read += part.len() as u64;
                            ReadReply::Part(on_disk[i], part)
                        }
                        Err(_) => {
                            shared.wrong.fetch_add(1, Ordering::Relaxed);
                            ReadReply::Lost
                        }
                    });
                });
                shared.read.fetch_add(read, Ordering::Relaxed);
                bytes.fetch_add(read, Ordering::Relaxed);
            });
            let waited = waited.into_inner().unwrap_or_else(PoisonError::into_inner);
            let _ = reply.send(ReadReply::Done(bytes.into_inner(), started.elapsed().saturating_sub(waited)));
            let _ = writer.send(WriterCommand::ReadsDone);
        };
        // Without a thread the sender is dropped, as if nothing could be read.
        let _ = thread::Builder::new().name("prompt-reads".into()).spawn(work);
        Ok(())
    }

    /// What a part must hold.
    pub(super) fn label_of<'a>(&self, part: &PrefixPart, tokens: &'a [u32]) -> Label<'a> {
        let position = part.node * self.shape.block_tokens;
        Label {
            part: part.part,
            bytes: part.bytes,
            model: self.model(),
            hash: part.hash,
            before: part.before,
            position: position as u32,
            tokens: &tokens[position..position + part.tokens],
        }
    }
}

/// The bits of the cache groups that an entry has parts of.
fn groups_of(entry: Option<&Entry>) -> u64 {
    let parts = entry.map_or(&[][..], |e| &e.parts[..]);
    parts.iter().filter(|(part, ..)| *part < 64).fold(0, |bits, (g, ..)| bits | 1 << g)
}
