//! Experts of a mixture that stay on disk until tokens want them. An [`ExpertStore`] holds as many as a budget allows in slots of memory that are set up
//! once, reads those that are missing, all at once, and hands each over when it is there, so that some are computed while others are on their way.

mod cache;
mod forecast;
mod layout;
mod lookahead;
mod reads;
#[cfg(test)]
mod schedules;
pub mod simulate;

use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::mm::{Advice, madvise};

use crate::bytes::Bytes;
use crate::error::Error;
use crate::load::Source;
use crate::map::Map;
pub use cache::{ExpertCache, Policy};
use forecast::Forecast;
use layout::Layer;
use lookahead::Ahead;
use reads::{Read, Reads};
pub use reads::{ReadFaults, SPIN};

/// Where experts that were used remain.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Keep {
    /// In slots of ours: read past the page cache, replaced by a [`Policy`].
    #[default]
    Slots,
    /// In the kernel's page cache: slots are used for as long as tokens go through them.
    PageCache,
}

/// How experts are read and kept.
#[derive(Clone, Debug)]
pub struct ExpertOptions {
    pub keep: Keep,
    /// Bytes of slots.
    pub budget: u64,
    pub policy: Policy,
    /// (Layer, expert) that stay in memory once they are there, and are read ahead of need.
    pub pinned: Vec<(usize, usize)>,
    /// Bytes that one request reads at most: whole pages.
    pub request: usize,
    /// Reads under way at once; `None`: so many that some [`IN_FLIGHT`] bytes are.
    pub depth: Option<usize>,
    /// Whether reads go through io_uring, where it is to be had.
    pub io_uring: bool,
    /// Threads that read where they do not.
    pub threads: usize,
    /// Experts that look-ahead guesses for a layer of few tokens.
    pub ahead: usize,
    /// What reads meet, in tests.
    pub faults: Option<Arc<dyn ReadFaults>>,
}

impl Default for ExpertOptions {
    fn default() -> ExpertOptions {
        ExpertOptions {
            keep: Keep::Slots,
            budget: u64::MAX,
            policy: Policy::default(),
            pinned: Vec::new(),
            request: 4 << 20,
            depth: None,
            io_uring: true,
            threads: 8,
            ahead: 3,
            faults: None,
        }
    }
}

/// What the store did, since it was opened or last asked.
#[derive(Clone, Copy, Debug, Default)]
pub struct ExpertStats {
    /// Experts that they asked for.
    pub wanted: u64,
    /// Of these, those that were in memory.
    pub hits: u64,
    /// Of these, those that look-ahead had begun to read or had read.
    pub foreseen: u64,
    /// Bytes of the arrays that were asked for.
    pub wanted_bytes: u64,
    /// Bytes that were read, look-ahead's and what pages hold beside the arrays included.
    pub read_bytes: u64,
    /// Requests.
    pub reads: u64,
    /// Experts that look-ahead named, and of these those that were then wanted.
    pub predicted: u64,
    pub predicted_right: u64,
    /// Experts that look-ahead read and nobody wanted.
    pub read_in_vain: u64,
    /// At least one read was under way.
    pub reading: Duration,
    /// Nothing was left to do but to wait for a read.
    pub waiting: Duration,
}

impl ExpertStats {
    /// Adds what came later.
    pub fn add(&mut self, later: &ExpertStats) {
        let ExpertStats { wanted, hits, foreseen, wanted_bytes, read_bytes, reads, .. } = later;
        self.wanted += wanted;
        self.hits += hits;
        self.foreseen += foreseen;
        self.wanted_bytes += wanted_bytes;
        self.read_bytes += read_bytes;
        self.reads += reads;
        self.predicted += later.predicted;
        self.predicted_right += later.predicted_right;
        self.read_in_vain += later.read_in_vain;
        self.reading += later.reading;
        self.waiting += later.waiting;
    }
}

/// Slots of one size.
#[derive(Debug)]
struct Class {
    memory: Map,
    slot_bytes: usize,
    cache: ExpertCache,
    /// Number of its first slot among those of all classes.
    first: u32,
}

/// Who needs a slot to stay as it is. While anybody does, the cache holds it, and no other expert is put there.
#[derive(Debug, Default)]
struct Slot {
    /// Requests in flight that write to it.
    pending: u32,
    /// Why one of those that are over failed.
    error: Option<Error>,
    /// Which of the experts that are fetched is in it, or will be.
    item: Option<u32>,
    /// Look-ahead keeps it until its layer's turn.
    foreseen: bool,
}

impl Slot {
    fn is_needed(&self) -> bool {
        self.pending > 0 || self.item.is_some() || self.foreseen
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Item {
    /// Not there, and no read was begun.
    Missing,
    /// In this slot as soon as its reads are over.
    Coming(u32),
    /// There, and not handed over.
    There(u32),
    /// Its error is among the fetch's.
    Failed,
    /// The caller has it.
    HandedOver(u32),
    Over,
}

/// The experts that a layer asked for.
#[derive(Default)]
struct Fetch {
    layer: usize,
    wanted: Vec<u32>,
    items: Vec<Item>,
    /// (Item, why it cannot be read)
    errors: Vec<(u32, Error)>,
    /// Everything before was handed over, or (unordered) begun with.
    next: usize,
    ordered: bool,
    /// Items that are not handed over.
    left: usize,
}

/// What [`ExpertStore::next`] has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// The expert at this position of what was asked for is there until it is released.
    Expert(usize),
    /// The expert at this position cannot be read: [`ExpertStore::take_error`] says why.
    Failed(usize),
    /// More are on their way.
    Later,
    /// All were handed over.
    Over,
}

/// Bytes that reads under way ask for: enough to keep a disk busy, and no more, since it serves all at once and each is there the later.
const IN_FLIGHT: usize = 40 << 20;
/// How many reads that may be.
const DEPTHS: std::ops::RangeInclusive<usize> = 8..=128;

/// Experts that may be read and not yet used, in ordered fetches.
const WINDOW: usize = 32;
/// Slots that experts pass through where the page cache keeps them.
const PASSING: usize = 48;

pub struct ExpertStore {
    // Before the memory: it waits for what is under way.
    reads: Reads,
    layers: Vec<Layer>,
    classes: Vec<Class>,
    slots: Vec<Slot>,
    keep: Keep,
    request: usize,
    fetch: Fetch,
    ahead: Ahead,
    /// Kept, so that nothing is allocated.
    over: Vec<reads::Done>,
    stats: ExpertStats,
    reading_since: Option<Instant>,
}

impl ExpertStore {
    /// Sets slots up for the experts of some layers; each expert is the views of its arrays, the same number for all experts of a layer.
    ///
    /// # Errors
    /// When the budget is too small for a layer's `most` experts at once, or there is no memory.
    pub fn open<E: Iterator<Item = Vec<Bytes>>>(
        layers: impl Iterator<Item = E>,
        most: usize,
        options: &ExpertOptions,
    ) -> Result<ExpertStore, Error> {
        let mut files: Vec<Arc<Source>> = Vec::new();
        let layers: Vec<Layer> = layers.map(|experts| Layer::new(experts, &mut files)).collect();
        files.iter().for_each(|f| f.set_streamed());
        let path = files.first().map(|f| f.file.path.clone()).unwrap_or_default();
        let direct = options.keep == Keep::Slots;
        let depth = options.depth.unwrap_or_else(|| usual_depth(&layers, request(options)));
        let reads = Reads::new(files, direct, depth, options);
        let no_memory = |cause| Error::Io { path: path.clone(), doing: "find memory for experts of", cause };
        match reads {
            Ok(reads) => ExpertStore::with(layers, reads, most, options, no_memory),
            Err(cause) => Err(no_memory(cause)),
        }
    }

    fn with(
        mut layers: Vec<Layer>,
        reads: Reads,
        most: usize,
        options: &ExpertOptions,
        no_memory: impl Fn(std::io::Error) -> Error,
    ) -> Result<ExpertStore, Error> {
        let sizes = layout::classes(&mut layers);
        // 1. The budget: each class has what a token needs, and of the rest what its share of all experts is
        let of_class = |number: usize| -> Vec<usize> {
            layers.iter().map(|l| if l.class == number { l.len() } else { 0 }).collect()
        };
        let least = |number: usize| most.min(of_class(number).into_iter().max().unwrap_or(0));
        let needed = sizes.iter().enumerate().map(|(c, size)| (least(c) as u64).saturating_mul(*size as u64));
        let needed = needed.fold(0, u64::saturating_add);
        if needed > options.budget {
            return Err(Error::ExpertBudget { budget: options.budget, needed, experts: most });
        }
        let bytes = |number: usize| class_bytes(&layers, number, sizes[number]);
        let all = (0..sizes.len()).map(bytes).fold(0, u64::saturating_add);
        // What a policy learns: some numbers for each expert, and one for each pair of a layer's, if these leave most of the memory to slots.
        let counts: Vec<usize> = layers.iter().map(Layer::len).collect();
        let tables = 256 * counts.iter().sum::<usize>() + layers.iter().map(Layer::table_bytes).sum::<usize>();
        let spare = (options.budget - needed).saturating_sub(tables as u64);
        let pairs = Forecast::pair_bytes(&counts);
        let paired = pairs <= spare / 4;
        let spare = if paired { spare - pairs } else { spare };
        let mut classes = Vec::with_capacity(sizes.len());
        let mut first = 0;
        let mut ahead = Ahead::new();
        for (number, &slot_bytes) in sizes.iter().enumerate() {
            let experts = of_class(number);
            let count: usize = experts.iter().sum();
            let rest = u128::from(spare) * u128::from(bytes(number));
            let more = (rest / u128::from(all.max(1))) as u64 / slot_bytes.max(1) as u64;
            let slots = (least(number) as u64).saturating_add(more).min(count as u64) as usize;
            let slots = if options.keep == Keep::PageCache { slots.min(PASSING.max(2 * most)) } else { slots };
            let pinned: Vec<(usize, usize)> =
                options.pinned.iter().copied().filter(|&(l, e)| experts.get(l).is_some_and(|n| e < *n)).collect();
            // Half must stay free to move.
            let pinned = &pinned[..pinned.len().min(slots / 2)];
            if options.keep == Keep::Slots {
                ahead.queue.extend(pinned.iter().map(|&(layer, expert)| (layer as u32, expert as u32)));
            }
            classes.push(Class {
                memory: Map::image(slots.saturating_mul(slot_bytes), true).map_err(&no_memory)?,
                slot_bytes,
                cache: ExpertCache::with_pairs(&experts, slots, options.policy, pinned, if paired { pairs } else { 0 }),
                first,
            });
            first += slots as u32;
        }
        let widest = layers.iter().map(Layer::len).max().unwrap_or(0);
        let mut store = ExpertStore {
            reads,
            layers,
            classes,
            slots: (0..first).map(|_| Slot::default()).collect(),
            keep: options.keep,
            request: request(options),
            fetch: Fetch { wanted: Vec::with_capacity(widest), items: Vec::with_capacity(widest), ..Fetch::default() },
            ahead,
            over: Vec::with_capacity(1024),
            stats: ExpertStats::default(),
            reading_since: None,
        };
        store.commit();
        store.look_ahead();
        Ok(store)
    }

    /// Makes the slots' memory resident: no read waits for pages to be found and cleared, and nothing is taken later.
    fn commit(&self) {
        for class in self.classes.iter().filter(|c| c.memory.len() > 0) {
            let (start, len) = (class.memory.start(), class.memory.len());
            // SAFETY: the class's own memory, whose contents this does not change. Kernels before 5.14 refuse, and commit when it is first read to.
            let _ = unsafe { madvise(start.cast(), len, Advice::LinuxPopulateWrite) };
        }
    }

    /// Asks for experts of a layer, `wanted` in ascending order, `tokens[i]` tokens for each: reads of all that are not there begin. With `ordered` they
    /// are handed over in this order, else as they come. Everything of the fetch before must have been handed over and released.
    pub fn fetch(&mut self, layer: usize, wanted: &[u32], tokens: &[u32], ordered: bool) {
        assert!(self.fetch.items.iter().all(|i| *i == Item::Over), "a fetch is under way");
        self.stats.wanted += wanted.len() as u64;
        let class = self.layers[layer].class;
        // 1. What was foreseen and is not wanted may go.
        self.settle_foreseen(layer, wanted);
        let cache = &mut self.classes[class].cache;
        cache.visit(layer, wanted, tokens);
        // 2. What is there stays.
        let first = self.classes[class].first;
        let f = &mut self.fetch;
        (f.layer, f.ordered, f.next, f.left) = (layer, ordered, 0, wanted.len());
        f.wanted.clear();
        f.wanted.extend_from_slice(wanted);
        f.items.clear();
        f.errors.clear();
        for (i, &expert) in wanted.iter().enumerate() {
            let cache = &mut self.classes[class].cache;
            let item = match cache.slot(layer, expert as usize) {
                None => Item::Missing,
                Some(slot) => {
                    cache.hold(slot);
                    let slot = first + slot;
                    let state = &mut self.slots[slot as usize];
                    state.item = Some(i as u32);
                    if state.pending > 0 {
                        Item::Coming(slot)
                    } else {
                        self.stats.hits += 1;
                        Item::There(slot)
                    }
                }
            };
            self.fetch.items.push(item);
        }
        let layer = &self.layers[layer];
        self.stats.wanted_bytes += layer.bytes / layer.len() as u64 * wanted.len() as u64;
        // 3. What is not there is read.
        self.give_up_foreseen();
        self.issue();
    }

    /// Begins to read what is missing, as far as there are slots.
    fn issue(&mut self) {
        let layer = self.fetch.layer;
        let class = self.layers[layer].class;
        let mut ahead = 0;
        for i in self.fetch.next..self.fetch.items.len() {
            if self.fetch.ordered && ahead >= WINDOW {
                break;
            }
            match self.fetch.items[i] {
                Item::Missing => {}
                Item::Coming(_) | Item::There(_) => {
                    ahead += 1;
                    continue;
                }
                _ => continue,
            }
            let expert = self.fetch.wanted[i] as usize;
            let Some(slot) = self.classes[class].cache.place(layer, expert) else { break };
            let slot = self.classes[class].first + slot;
            self.slots[slot as usize].item = Some(i as u32);
            self.begin(layer, expert, slot);
            // An expert may be empty.
            let is_read = self.slots[slot as usize].pending > 0;
            self.fetch.items[i] = if is_read { Item::Coming(slot) } else { Item::There(slot) };
            ahead += 1;
        }
        self.submit();
    }

    /// Queues the reads of an expert.
    fn begin(&mut self, layer: usize, expert: usize, slot: u32) {
        let class = &self.classes[self.layers[layer].class];
        // SAFETY: the slot lies inside the class's memory.
        let memory = unsafe { class.memory.start().add((slot - class.first) as usize * class.slot_bytes) };
        let mut pending = 0u32;
        for extent in self.layers[layer].extents(expert) {
            let mut done = 0;
            while done < extent.len {
                let len = (extent.len - done).min(self.request);
                // SAFETY: inside the slot, as the layout was made; nobody reads a slot with requests in flight, and the cache holds it, so that no
                // other expert is read into it; the store drops its reads before its memory.
                unsafe {
                    let memory = memory.add(extent.at + done);
                    let offset = extent.offset + done as u64;
                    self.reads.push(Read { file: extent.file, offset, len, memory, tag: slot });
                }
                self.stats.read_bytes += len as u64;
                self.stats.reads += 1;
                pending += 1;
                done += len;
            }
        }
        self.slots[slot as usize].pending = pending;
    }

    fn submit(&mut self) {
        if self.reads.under_way() > 0 {
            if self.reading_since.is_none() {
                self.reading_since = Some(Instant::now());
            }
            self.reads.submit();
        }
    }

    /// The next expert of the fetch; with `wait` never [`Next::Later`]. It stays where it is until [`ExpertStore::release`].
    ///
    /// # Panics
    /// With `wait`, when nothing can come because the caller holds all slots.
    pub fn next(&mut self, wait: bool) -> Next {
        loop {
            if let Some(next) = self.hand_over() {
                return next;
            }
            if self.reads.under_way() == 0 {
                // What is wanted now comes before what look-ahead holds.
                self.give_up_foreseen();
                self.issue();
            }
            let began = Instant::now();
            let under_way = self.reads.under_way();
            assert!(under_way > 0 || !wait, "experts are waited for and none is read: all slots are held");
            self.reap(wait);
            if wait {
                self.stats.waiting += began.elapsed();
            }
            if self.reads.under_way() < under_way {
                self.issue();
                self.look_ahead();
            } else if !wait {
                return Next::Later;
            }
        }
    }

    fn hand_over(&mut self) -> Option<Next> {
        if self.fetch.left == 0 {
            return Some(Next::Over);
        }
        let mut i = self.fetch.next;
        while i < self.fetch.items.len() {
            match self.fetch.items[i] {
                Item::There(slot) => {
                    self.fetch.items[i] = Item::HandedOver(slot);
                    self.fetch.left -= 1;
                    return Some(Next::Expert(i));
                }
                Item::Failed => {
                    self.fetch.items[i] = Item::Over;
                    self.fetch.left -= 1;
                    return Some(Next::Failed(i));
                }
                Item::HandedOver(_) | Item::Over => {
                    if i == self.fetch.next {
                        self.fetch.next += 1;
                    }
                }
                Item::Missing if self.fetch.ordered => {
                    self.make_room(i);
                    return None;
                }
                Item::Coming(_) if self.fetch.ordered => return None,
                Item::Missing | Item::Coming(_) => {}
            }
            i += 1;
        }
        None
    }

    /// All slots are taken, and the next in order has none: the last of those that wait for their turn has to go.
    fn make_room(&mut self, next: usize) {
        self.issue();
        if self.reads.under_way() > 0 {
            return;
        }
        let there = |item: &Item| matches!(item, Item::There(_));
        let Some(last) = self.fetch.items.iter().rposition(there).filter(|last| *last > next) else { return };
        let Item::There(slot) = self.fetch.items[last] else { return };
        self.fetch.items[last] = Item::Missing;
        self.empty(slot);
        self.issue();
    }

    /// Takes what is over from the reads.
    fn reap(&mut self, wait: bool) {
        let mut reads = std::mem::take(&mut self.over);
        self.reads.reap(wait, |done| reads.push(done));
        for done in reads.drain(..) {
            let slot = &mut self.slots[done.tag as usize];
            slot.pending -= 1;
            if let Some(error) = done.error {
                slot.error.get_or_insert(error);
            }
            if slot.pending == 0 {
                self.filled(done.tag);
            }
        }
        self.over = reads;
        if self.reads.under_way() == 0
            && let Some(since) = self.reading_since.take()
        {
            self.stats.reading += since.elapsed();
        }
    }

    /// No request writes to the slot any more: its expert is there, or has failed.
    fn filled(&mut self, slot: u32) {
        let state = &mut self.slots[slot as usize];
        let item = state.item;
        match state.error.take() {
            Some(error) => {
                // Nobody may find it, whoever asked for it; what only look-ahead wanted is nobody's loss and is tried again when it is wanted.
                if let Some(item) = item {
                    self.fetch.items[item as usize] = Item::Failed;
                    self.fetch.errors.push((item, error));
                }
                self.empty(slot);
            }
            None => match item {
                Some(item) => self.fetch.items[item as usize] = Item::There(slot),
                None => self.let_go(slot),
            },
        }
    }

    /// Frees a slot that no request writes to, whoever needed what is in it.
    fn empty(&mut self, slot: u32) {
        debug_assert_eq!(self.slots[slot as usize].pending, 0);
        self.slots[slot as usize] = Slot::default();
        self.ahead.slots.retain(|s| *s != slot);
        let class = self.class_of(slot);
        class.cache.forget(slot - class.first);
    }

    /// Lets another expert have the slot when its turn comes, unless somebody needs it.
    fn let_go(&mut self, slot: u32) {
        if self.slots[slot as usize].is_needed() {
            return;
        }
        if self.keep == Keep::PageCache {
            return self.empty(slot);
        }
        let class = self.class_of(slot);
        class.cache.let_go(slot - class.first);
    }

    fn class_of(&mut self, slot: u32) -> &mut Class {
        let number = self.classes.partition_point(|c| c.first <= slot) - 1;
        &mut self.classes[number]
    }

    /// Gives back the expert at this position of what was asked for: its slot may be used for another.
    pub fn release(&mut self, position: usize) {
        let Item::HandedOver(slot) = self.fetch.items[position] else { panic!("not handed over, or released before") };
        self.fetch.items[position] = Item::Over;
        self.slots[slot as usize].item = None;
        self.let_go(slot);
        if self.fetch.left > 0 {
            self.issue();
        }
    }

    /// Array `array` of the expert at this position, which was handed over and not released.
    pub fn array(&self, position: usize, array: usize) -> &[u8] {
        let Item::HandedOver(slot) = self.fetch.items[position] else { panic!("not handed over, or released before") };
        let layer = &self.layers[self.fetch.layer];
        let class = &self.classes[layer.class];
        let part = layer.part(self.fetch.wanted[position] as usize, array);
        let start = (slot - class.first) as usize * class.slot_bytes + part.start;
        assert!(part.end <= class.slot_bytes);
        // SAFETY: no request writes to the slot of an expert that was handed over, and none will until it is released, which takes `&mut self`.
        unsafe { class.memory.slice(start..start + part.len()) }
    }

    /// Why the expert at this position, which has failed, cannot be read. To be asked once.
    ///
    /// # Panics
    /// When it has not failed, or was asked before.
    pub fn take_error(&mut self, position: usize) -> Error {
        let errors = &mut self.fetch.errors;
        let at = errors.iter().position(|(item, _)| *item as usize == position).expect("failed, and not asked before");
        errors.swap_remove(at).1
    }

    /// Bytes of the slots, and of what is kept to find experts and to choose among them.
    pub fn bytes(&self) -> usize {
        let classes = self.classes.iter().map(|c| c.memory.len() + c.cache.bookkeeping_bytes());
        classes.chain(self.layers.iter().map(Layer::table_bytes)).sum()
    }

    /// Slots, and experts of all layers.
    pub fn slots(&self) -> (usize, usize) {
        (self.slots.len(), self.layers.iter().map(Layer::len).sum())
    }

    /// Bytes of the arrays of all experts on disk.
    pub fn file_bytes(&self) -> u64 {
        self.layers.iter().map(|l| l.bytes).sum()
    }

    /// What was counted since the last call.
    pub fn take_stats(&mut self) -> ExpertStats {
        std::mem::take(&mut self.stats)
    }

    /// What reading fell back on, a clause each.
    pub fn notes(&self) -> &[String] {
        self.reads.notes()
    }

    /// The way in which experts are read, for people.
    pub fn reader(&self) -> &'static str {
        match (self.reads.is_ring(), self.keep) {
            (true, Keep::Slots) => "io_uring, direct",
            (true, Keep::PageCache) => "io_uring, buffered",
            (false, Keep::Slots) => "threads, direct",
            (false, Keep::PageCache) => "threads, buffered",
        }
    }
}

/// Bytes that one request asks for at most: whole pages, one at least, and no more than the kernel moves at once.
fn request(options: &ExpertOptions) -> usize {
    options.request.clamp(1, reads::MOST).next_multiple_of(crate::load::ALIGNMENT)
}

/// Reads of these experts that ask for [`IN_FLIGHT`] bytes, where one asks for `request` at most.
fn usual_depth(layers: &[Layer], request: usize) -> usize {
    let of_expert = |l: &Layer| l.extents(0).iter().map(|e| e.len.div_ceil(request)).sum::<usize>();
    let (bytes, reads) = layers
        .iter()
        .filter(|l| l.len() > 0)
        .fold((0, 0), |(bytes, reads), l| (bytes + l.bytes as usize / l.len(), reads + of_expert(l)));
    (IN_FLIGHT / (bytes / reads.max(1)).max(1)).clamp(*DEPTHS.start(), *DEPTHS.end())
}

/// Bytes of slots that would hold all experts of a class.
fn class_bytes(layers: &[Layer], class: usize, slot_bytes: usize) -> u64 {
    let of_layer = |l: &Layer| (l.len() as u64).saturating_mul(slot_bytes as u64);
    layers.iter().filter(|l| l.class == class).map(of_layer).fold(0, u64::saturating_add)
}
