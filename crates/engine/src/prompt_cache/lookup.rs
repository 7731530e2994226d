//! The thread that looks for prefixes and has them read. It is another than the one that writes, so that a request waits for no batch and no sync: the longest
//! that a look-up waits for is one before it, the disk where the index's pages are not in memory, and pages of the index that a transaction is handing to the
//! system at the time (which waits for no disk, but for the removal of the mark of a clean end, once in a run).

use std::cmp::Reverse;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, Sender, SyncSender};
use std::thread;
use std::time::{Duration, Instant};

use sluice_cache::disk::{self, Entry, Error, Label, Lookups, Order, Place, STATE};
use sluice_cache::{BlockHash, RestoreSpan, block_hash};

use super::Shape;
use super::writer::{Command, Shared};

/// What is looked for.
pub(crate) struct Query {
    pub root: BlockHash,
    pub tokens: Arc<[u32]>,
    /// Of each of its blocks that is in memory, a bit for each group.
    pub present: Vec<u64>,
    /// So many tokens can be taken up from memory alone.
    pub usable: usize,
    /// What adds fewer than these is not looked for.
    pub fewest: usize,
}

/// A part of an entry that memory lacked.
#[derive(Clone, Debug)]
pub(crate) struct RestorePart {
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
    pub wanted: RestoreSpan,
    /// Those of the entries: behind `to` the last of them may have others than the prompt.
    pub tokens: Arc<[u32]>,
    pub to: usize,
    /// What memory alone would have given.
    pub usable: usize,
    pub parts: Vec<RestorePart>,
}

/// What comes of reading.
pub(crate) enum Read {
    /// The part with this number, in the memory that it was read to: what follows waits for it.
    Part(usize, disk::ReadPart),
    /// One of them is not there, or not what was written.
    Lost,
    /// That was all: bytes, and the time that reading them took.
    Over(u64, Duration),
}

pub(crate) enum Ask {
    Find(Query, Sender<Found>),
    Read(Arc<[u32]>, Vec<RestorePart>, SyncSender<Read>),
    Close,
}

/// Of the entries that a prompt may go on with in part, so many are looked up, and of so many the tokens read: of one where the whole slot has to be.
const MOST_LISTED: usize = 64;
const MOST_COMPARED: usize = 4;

/// Where a prefix may end: behind whole blocks, or `tail` tokens of an entry that follows them.
struct End {
    tail: usize,
    entry: Option<Entry>,
    hash: BlockHash,
    /// All of the entry's, where the prompt has others behind `tail`.
    tokens: Option<Vec<u32>>,
}

pub(crate) struct Lookup {
    pub lookups: Lookups,
    pub secret: [u8; 32],
    pub shape: Shape,
    pub shared: Arc<Shared>,
    /// To the thread that writes.
    pub keeper: Sender<Command>,
}

impl Lookup {
    /// Until it is told to close.
    pub fn run(self, received: &Receiver<Ask>) {
        if self.shared.entries.load(Ordering::Relaxed) > 0 {
            self.lookups.prepare();
        }
        while let Ok(ask) = received.recv() {
            let done = match ask {
                Ask::Close => return,
                // Who asked learns that there is no answer.
                _ if !self.shared.is_ready() => Ok(()),
                Ask::Find(query, tell) => self.find(&query).map(|found| {
                    // Who asked may be gone.
                    found.into_iter().for_each(|found| _ = tell.send(found));
                }),
                Ask::Read(tokens, parts, tell) => self.read(&tokens, &parts, tell),
            };
            if let Err(e) = done {
                self.shared.fail(e);
            }
        }
    }

    /// Who asks has seen that it is known.
    fn model(&self) -> u64 {
        self.shared.model().expect("nothing is looked for of a model that is not known")
    }

    /// An entry of these tokens, if it is here and has what it should have.
    fn entry(
        &self,
        hash: BlockHash,
        before: BlockHash,
        position: usize,
        tokens: usize,
    ) -> Result<Option<Entry>, Error> {
        let found = self.lookups.find(&(self.model(), hash))?;
        let fits = |(part, bytes, _): &(u32, u64, Place)| match *part {
            STATE => *bytes == self.shape.state_bytes as u64,
            group => self.shape.block_bytes.get(group as usize).is_some_and(|b| *b as u64 == *bytes),
        };
        Ok(found.filter(|e| {
            (e.before, e.position as usize, e.tokens as usize) == (before, position, tokens) && e.parts.iter().all(fits)
        }))
    }

    /// The longest prefix that memory and the folder have between them, if it is longer than what memory alone has.
    fn find(&self, q: &Query) -> Result<Option<Found>, Error> {
        let n = self.shape.block_tokens;
        let all_groups = self.all_groups();
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
            let mut ends: Vec<End> = Vec::new();
            if hybrid {
                for (tokens, hash) in self.lookups.following(self.model(), path[whole])? {
                    let tokens = tokens as usize;
                    let is_ours = tokens < n
                        && rest.get(..tokens).is_some_and(|t| block_hash(&self.secret, &path[whole], t) == hash);
                    if is_ours && let Some(entry) = self.entry(hash, path[whole], whole * n, tokens)? {
                        ends.push(End { tail: tokens, entry: Some(entry), hash, tokens: None });
                    }
                }
                ends.sort_unstable_by_key(|end| Reverse(end.tail));
                ends.retain(|end| groups_of(end.entry.as_ref()) == all_groups);
            } else if whole + 1 == path.len() && whole * n + rest.len().min(n - 1) >= q.usable + q.fewest {
                ends.extend(self.partly(path[whole], whole * n, rest)?);
            }
            if !hybrid || whole > 0 && nodes[whole - 1].1.as_ref().is_some_and(Entry::has_state) {
                ends.push(End { tail: 0, entry: None, hash: path[whole], tokens: None });
            }
            for End { tail, entry: end, hash, tokens: own } in ends {
                let to = whole * n + tail;
                // Less is nothing that would be kept, either.
                if to < q.usable + q.fewest {
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
                    found.map(|(_, bytes, place)| RestorePart {
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
                return Ok(Some(Found { wanted: RestoreSpan { whole, tail }, tokens, to, usable: q.usable, parts }));
            }
            if whole * n < q.usable + q.fewest {
                break;
            }
        }
        Ok(None)
    }

    /// Of the entries that follow a whole one, the one that begins with most of `rest`.
    fn partly(&self, before: BlockHash, position: usize, rest: &[u32]) -> Result<Option<End>, Error> {
        // 1. Those that were used last are the likely ones, and each costs a read
        let mut all = Vec::new();
        for (tokens, hash) in self.lookups.following(self.model(), before)?.into_iter().take(MOST_LISTED) {
            let entry = self.entry(hash, before, position, tokens as usize)?;
            all.extend(entry.filter(|e| groups_of(Some(e)) == self.all_groups()).map(|e| (hash, e)));
        }
        all.sort_unstable_by_key(|(_, entry)| Reverse(entry.used));
        all.truncate(if self.lookups.is_encrypted() { 1 } else { MOST_COMPARED });
        // 2. What they have in common with the prompt
        let mut best: Option<End> = None;
        for (hash, entry) in all {
            let Some(tokens) = self.lookups.tokens_of(&(self.model(), hash), &entry)? else { continue };
            let tail = tokens.iter().zip(rest).take_while(|(a, b)| a == b).count();
            if (1..self.shape.block_tokens).contains(&tail) && best.as_ref().is_none_or(|b| b.tail < tail) {
                best = Some(End { tail, entry: Some(entry), hash, tokens: Some(tokens) });
            }
        }
        Ok(best)
    }

    /// A bit for each cache group.
    fn all_groups(&self) -> u64 {
        (1u64 << self.shape.windows.len()) - 1
    }

    /// Has parts read by another thread.
    fn read(&self, tokens: &[u32], parts: &[RestorePart], tell: SyncSender<Read>) -> Result<(), Error> {
        let (n, model) = (self.shape.block_tokens, self.model());
        let wanted = parts.iter().map(|part| {
            let position = part.node * n;
            let label = Label {
                part: part.part,
                bytes: part.bytes,
                model,
                hash: part.hash,
                before: part.before,
                position: position as u32,
                tokens: &tokens[position..position + part.tokens],
            };
            (label, part.place)
        });
        let reads = self.lookups.reads(&wanted.collect::<Vec<_>>())?;
        let (shared, own, given_up) = (Arc::clone(&self.shared), self.keeper.clone(), reads.cancel_flag());
        let work = move || {
            let (begun, mut waited, mut bytes) = (Instant::now(), Duration::ZERO, 0);
            reads.for_each(Order::AsRead, |i, came| {
                let came = match came {
                    Ok(part) => {
                        bytes += part.len() as u64;
                        Read::Part(i, part)
                    }
                    Err(_) => {
                        shared.wrong.fetch_add(1, Ordering::Relaxed);
                        Read::Lost
                    }
                };
                let handing = Instant::now();
                if tell.send(came).is_err() {
                    // Nobody wants it any more.
                    given_up.store(true, Ordering::Relaxed);
                }
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
