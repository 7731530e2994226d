//! The store itself: what layers ask for, found in slots or read into them.

use std::sync::Arc;
use std::time::Instant;

use super::fetch::{Fetch, FetchId, Item, Next};
use super::forecast::Forecast;
use super::layout::{self, LayerLayout};
use super::lookahead::Ahead;
use super::reads::{Reads, SlotGuard, Ticket};
use super::requests::{self, Requests};
use super::residency::Residency;
use super::tiers::SlotClass;
use super::warmup::Warmup;
use super::{ExpertOptions, ExpertStats, Keep};
use crate::bytes::Bytes;
use crate::error::Error;
use crate::load::Source;
use crate::memory::Memory;

/// Slots of one size.
pub(super) struct Class {
    /// Never read or written but through loans of its slots.
    memory: Box<dyn Memory>,
    pub residency: Residency,
    /// Number of its first slot among those of all classes: first those of the faster tier, which have no memory here.
    pub first: u32,
    /// Slots of the faster tier; experts of all layers.
    pub fast: u32,
    pub experts: u32,
}

/// Who needs a slot to stay as it is. As long as any of these does, residency holds it and no other expert is put there.
#[derive(Debug, Default)]
pub(super) struct SlotState {
    /// Its memory, if nobody writes to it; `None` in the faster tier.
    pub loan: Option<SlotGuard>,
    /// The read that fills it, if one does.
    ticket: Option<Ticket>,
    /// Items of fetches that are there or coming.
    pub wanted: u32,
    /// An expert that lost its place in the faster tier is being copied here.
    pub landing: bool,
    /// Look-ahead keeps it until its layer is visited.
    pub read_ahead: bool,
}

impl SlotState {
    fn is_needed(&self) -> bool {
        self.ticket.is_some() || self.wanted > 0 || self.read_ahead || self.landing
    }
}

/// Bytes that requests in flight ask for: enough to keep a disk busy, and no more: it works on all at once, so each completes later.
const IN_FLIGHT: usize = 40 << 20;
/// How many requests that may be.
const DEPTHS: std::ops::RangeInclusive<usize> = 8..=128;
/// Experts that may be read and not yet used, in ordered fetches.
const WINDOW: usize = 32;
/// Slots that experts pass through where the page cache keeps them.
const PASSING: usize = 48;
/// Fetches that there is room for from the beginning.
const FETCHES: usize = 4;

/// How many slots of each size a faster tier has.
pub(super) type Faster<'a> = dyn Fn(&[SlotClass]) -> Vec<usize> + 'a;
/// Memory for so many bytes.
pub(super) type Lend<'a> = dyn FnMut(usize) -> std::io::Result<Box<dyn Memory>> + 'a;

pub struct ExpertStore {
    // Before the memory: dropping it waits for what is in flight.
    pub(super) reads: Reads,
    pub(super) layers: Vec<LayerLayout>,
    pub(super) classes: Vec<Class>,
    pub(super) slot_classes: Vec<SlotClass>,
    slots: Vec<SlotState>,
    pub(super) keep: Keep,
    fetches: Vec<Fetch>,
    /// Fetches that were begun.
    begun: u64,
    pub(super) ahead: Ahead,
    pub(super) filling: Warmup,
    pub(super) stats: ExpertStats,
    reading_since: Option<Instant>,
    /// Kept, so that nothing is allocated.
    over: Vec<(Ticket, SlotGuard, Result<(), Error>)>,
}

impl ExpertStore {
    /// Sets slots up for the experts of some layers; each expert is the views of its arrays, the same number for all experts of a layer. `lend` gives memory
    /// for so many bytes, once for each size of slot; `faster` says how many slots of each size a faster tier has, whose memory is somebody else's.
    ///
    /// # Errors
    /// When the budget is too small for a layer's `most` experts at once, or there is no memory.
    pub fn open<E: Iterator<Item = Vec<Bytes>>>(
        layers: impl Iterator<Item = E>,
        most: usize,
        options: &ExpertOptions,
        lend: &mut Lend,
        faster: &Faster,
    ) -> Result<ExpertStore, Error> {
        let mut files: Vec<Arc<Source>> = Vec::new();
        let layers: Vec<LayerLayout> = layers.map(|experts| LayerLayout::new(experts, &mut files)).collect();
        files.iter().for_each(|f| f.set_streamed());
        let path = files.first().map(|f| f.file.path.clone()).unwrap_or_default();
        let direct = options.keep == Keep::Slots;
        let depth = options.depth.unwrap_or_else(|| usual_depth(&layers, request(options)));
        let no_memory = |cause| Error::Io { path: path.clone(), doing: "find memory for experts of", cause };
        let requests = Requests::new(files, direct, depth, options).map_err(no_memory)?;
        ExpertStore::with(layers, requests, most, options, (lend, faster), no_memory)
    }

    pub(super) fn with(
        mut layers: Vec<LayerLayout>,
        requests: Requests,
        most: usize,
        options: &ExpertOptions,
        (lend, faster): (&mut Lend, &Faster),
        no_memory: impl Fn(std::io::Error) -> Error,
    ) -> Result<ExpertStore, Error> {
        let sizes = layout::classes(&mut layers);
        // 1. The budget: each class has what a token needs, and of the rest what its share of all experts is
        let of_class = |number: usize| -> Vec<usize> {
            layers.iter().map(|l| if l.class == number { l.len() } else { 0 }).collect()
        };
        let least = |number: usize| most.min(of_class(number).into_iter().max().unwrap_or(0));
        let needed = sizes.iter().enumerate().map(|(c, size)| (least(c) as u64).saturating_mul(*size as u64));
        let counts: Vec<usize> = layers.iter().map(LayerLayout::len).collect();
        let class = |number: usize| SlotClass {
            bytes: sizes[number],
            experts: of_class(number).iter().sum(),
            widest: of_class(number).into_iter().max().unwrap_or(0),
        };
        let slot_classes: Vec<SlotClass> = (0..sizes.len()).map(class).collect();
        let faster = faster(&slot_classes);
        // Those that come to the faster tier come through slots here.
        let through: usize = (0..sizes.len()).filter(|c| faster[*c] > 0).map(least).sum();
        let per_expert = Residency::BYTES_PER_EXPERT + size_of::<SlotState>() + Reads::bytes(1);
        let tables = per_expert * (counts.iter().sum::<usize>() + through)
            + layers.iter().map(LayerLayout::table_bytes).sum::<usize>();
        let needed = needed.fold(tables as u64, u64::saturating_add);
        if needed > options.budget {
            return Err(Error::ExpertBudget { budget: options.budget, needed, experts: most });
        }
        let bytes = |number: usize| class_bytes(&layers, number, sizes[number]);
        let all = (0..sizes.len()).map(bytes).fold(0, u64::saturating_add);
        let spare = options.budget - needed;
        // A number for each pair of a layer's experts, if these leave most of the memory to slots.
        let pairs = Forecast::pair_bytes(&counts);
        let paired = pairs <= spare / 4;
        let spare = if paired { spare - pairs } else { spare };
        // 2. Slots
        let mut classes = Vec::with_capacity(sizes.len());
        let mut slots: Vec<SlotState> = Vec::new();
        let mut ahead = Ahead::new();
        for (number, &slot_bytes) in sizes.iter().enumerate() {
            let experts = of_class(number);
            let count: usize = experts.iter().sum();
            let rest = u128::from(spare) * u128::from(bytes(number));
            let more = (rest / u128::from(all.max(1))) as u64 / slot_bytes.max(1) as u64;
            let fast = faster[number].min(count);
            // What is in the faster tier takes no slot here, but comes through one.
            let enough = (count - fast).saturating_add(least(number)).min(count);
            let n = (least(number) as u64).saturating_add(more).min(enough as u64) as usize;
            let n = if options.keep == Keep::PageCache { n.min(PASSING.max(2 * most)) } else { n };
            let pinned: Vec<(usize, usize)> =
                options.pinned.iter().copied().filter(|&(l, e)| experts.get(l).is_some_and(|n| e < *n)).collect();
            // Half must stay free to move.
            let pinned = &pinned[..pinned.len().min(n / 2)];
            if options.keep == Keep::Slots {
                ahead.queue.extend(pinned.iter().map(|&(layer, expert)| (layer as u32, expert as u32)));
            }
            let first = slots.len() as u32;
            let memory = lend(n.saturating_mul(slot_bytes)).map_err(&no_memory)?;
            assert!(memory.len() >= n * slot_bytes, "less memory than was asked for");
            slots.extend((0..fast).map(|_| SlotState::default()));
            slots.extend((0..n).map(|i| {
                // SAFETY: each slot is a part of its own of the class's memory, which the store keeps for longer than its reads.
                let loan = unsafe {
                    SlotGuard::new(first + (fast + i) as u32, memory.start().add(i * slot_bytes), slot_bytes)
                };
                SlotState { loan: Some(loan), ..SlotState::default() }
            }));
            let pairs = if paired { pairs } else { 0 };
            let tiers = [fast, n];
            let tiers = if fast > 0 { &tiers[..] } else { &tiers[1..] };
            let residency = Residency::with_pairs(&experts, tiers, options.policy, pinned, pairs);
            classes.push(Class { memory, residency, first, fast: fast as u32, experts: count as u32 });
        }
        let widest = counts.into_iter().max().unwrap_or(0);
        let filling = Warmup::new(&layers, classes.len(), most);
        let mut store = ExpertStore {
            reads: Reads::new(requests, request(options), slots.len()),
            layers,
            classes,
            slot_classes,
            slots,
            keep: options.keep,
            fetches: (0..FETCHES).map(|_| Fetch::with_capacity(widest)).collect(),
            begun: 0,
            ahead,
            filling,
            stats: ExpertStats::default(),
            reading_since: None,
            over: Vec::with_capacity(1024),
        };
        store.look_ahead();
        Ok(store)
    }

    /// Asks for experts of a layer, `wanted` in ascending order, `tokens[i]` tokens for each: reads of all that are not there begin. With `ordered` they
    /// are handed over in this order, else as they come. Fetches that were begun before and are not over go first.
    pub fn fetch(&mut self, layer: usize, wanted: &[u32], tokens: &[u32], ordered: bool) -> FetchId {
        self.stats.wanted += wanted.len() as u64;
        let class = self.layers[layer].class;
        // 1. What look-ahead holds and is not wanted may be evicted.
        self.count_predictions(layer, wanted);
        self.classes[class].residency.visit(layer, wanted, tokens);
        // 2. What is there stays.
        let index = self.fetches.iter().position(|f| !f.is_live()).unwrap_or_else(|| {
            self.fetches.push(Fetch::default());
            self.fetches.len() - 1
        });
        self.begun += 1;
        self.fetches[index].begin(self.begun, layer, wanted, ordered);
        for &expert in wanted {
            let item = self.find(layer, expert as usize);
            self.stats.hits += u64::from(matches!(item, Item::There(_)));
            self.stats.fast_hits += u64::from(matches!(item, Item::There(slot) if self.is_fast(slot)));
            self.fetches[index].items.push(item);
        }
        let bytes = &self.layers[layer];
        self.stats.wanted_bytes += bytes.bytes / bytes.len().max(1) as u64 * wanted.len() as u64;
        // 3. What is not there is read.
        self.release_read_ahead();
        self.issue_all();
        FetchId { index: index as u32, number: self.begun }
    }

    /// The state of an expert that an item of a fetch wants from now on.
    fn find(&mut self, layer: usize, expert: usize) -> Item {
        let class = &mut self.classes[self.layers[layer].class];
        let Some(slot) = class.residency.slot(layer, expert) else { return Item::Missing };
        class.residency.hold(slot);
        let slot = class.first + slot;
        let state = &mut self.slots[slot as usize];
        assert!(!state.landing, "an expert is asked for that is still being copied back");
        state.wanted += 1;
        state.ticket.map_or(Item::There(slot), Item::Coming)
    }

    /// Begins to read what is missing, as far as there are slots; what was asked for first goes first.
    fn issue_all(&mut self) {
        let mut before = 0;
        let after = |before: u64| move |f: &&Fetch| f.waits() && f.number > before;
        while let Some(number) = self.fetches.iter().filter(after(before)).map(|f| f.number).min() {
            let index = self.fetches.iter().position(|f| f.number == number).expect("just found");
            self.issue(index);
            before = number;
        }
        self.submit();
    }

    /// Queues what a fetch is missing, as far as there are slots.
    fn issue(&mut self, index: usize) {
        let mut ahead = 0;
        let Fetch { layer, next, ordered, .. } = self.fetches[index];
        for i in next..self.fetches[index].items.len() {
            if ordered && ahead >= WINDOW {
                break;
            }
            match self.fetches[index].items[i] {
                Item::Missing => {}
                Item::Coming(_) | Item::There(_) => {
                    ahead += 1;
                    continue;
                }
                _ => continue,
            }
            let expert = self.fetches[index].wanted[i] as usize;
            // Another fetch may have asked for it.
            let mut item = self.find(layer, expert);
            if item == Item::Missing {
                let Some(slot) = self.place(layer, expert) else { break };
                let state = &mut self.slots[slot as usize];
                state.wanted += 1;
                // An expert may be empty.
                item = state.ticket.map_or(Item::There(slot), Item::Coming);
            }
            self.fetches[index].items[i] = item;
            ahead += 1;
        }
    }

    /// Finds a slot for an expert that has none and queues its read. `None` where all are needed.
    pub(super) fn place(&mut self, layer: usize, expert: usize) -> Option<u32> {
        let class = &mut self.classes[self.layers[layer].class];
        let slot = class.first + class.residency.place(layer, expert)?;
        let state = &mut self.slots[slot as usize];
        debug_assert!(!state.is_needed());
        let loan = state.loan.take().expect("nobody reads into a slot that is free");
        let counted = (&mut self.stats.read_bytes, &mut self.stats.reads);
        match self.reads.begin(self.layers[layer].extents(expert), loan, counted) {
            Ok(ticket) => state.ticket = Some(ticket),
            Err(loan) => state.loan = Some(loan),
        }
        Some(slot)
    }

    pub(super) fn submit(&mut self) {
        if self.reads.in_flight() > 0 {
            if self.reading_since.is_none() {
                self.reading_since = Some(Instant::now());
            }
            self.reads.submit();
        }
    }

    /// The next expert of a fetch; with `wait` never [`Next::Later`]. It stays where it is until [`ExpertStore::release`].
    ///
    /// # Panics
    /// With `wait`, when nothing can come because the caller holds all slots.
    pub fn next(&mut self, fetch: FetchId, wait: bool) -> Next {
        let index = fetch.index as usize;
        loop {
            if self.fetches[index].number != fetch.number {
                return Next::Over;
            }
            match self.fetches[index].hand_over() {
                Ok(next) => return next,
                Err(Some(_)) => self.make_room(index),
                Err(None) => {}
            }
            if self.reads.in_flight() == 0 {
                // What is wanted now comes before what look-ahead holds.
                self.release_read_ahead();
                self.issue_all();
                if self.reads.in_flight() == 0 {
                    self.make_room(index);
                }
            }
            let began = Instant::now();
            let in_flight = self.reads.in_flight();
            self.reap(wait && in_flight > 0);
            if wait {
                self.stats.waiting += began.elapsed();
            }
            if self.reads.in_flight() < in_flight {
                self.issue_all();
                self.look_ahead();
            } else if !self.fetches[index].is_ready() {
                assert!(!wait, "experts are waited for and none is read: all slots are held");
                return Next::Later;
            }
        }
    }

    /// The next expert of a fetch has no slot: while no read is in flight, experts that were read for others (or for itself, later) and not handed over are evicted.
    fn make_room(&mut self, index: usize) {
        self.issue_all();
        while self.reads.in_flight() == 0 && !self.fetches[index].is_ready() {
            let class = self.layers[self.fetches[index].layer].class;
            let Some(slot) = self.last_that_waits(class) else { return };
            let items = self.fetches.iter_mut().filter(|f| f.waits()).flat_map(|f| &mut f.items);
            items.filter(|item| **item == Item::There(slot)).for_each(|item| *item = Item::Missing);
            self.slots[slot as usize].wanted = 0;
            self.empty(slot);
            // Before older fetches, which would take the slot back.
            self.issue(index);
            self.submit();
        }
    }

    /// Of the slots of a class whose experts are complete and not handed over, that of the last expert of the newest fetch.
    fn last_that_waits(&self, class: usize) -> Option<u32> {
        let waiting = || self.fetches.iter().filter(|f| f.waits() && self.layers[f.layer].class == class);
        let holders = |slot: u32| waiting().flat_map(|f| &f.items).filter(|item| **item == Item::There(slot)).count();
        let last = |f: &Fetch| {
            let mut slots =
                f.items.iter().rev().filter_map(|item| if let Item::There(slot) = item { Some(*slot) } else { None });
            slots
                .find(|slot| !self.is_fast(*slot) && holders(*slot) == self.slots[*slot as usize].wanted as usize)
                .map(|slot| (f.number, slot))
        };
        waiting().filter_map(last).max().map(|(_, slot)| slot)
    }

    /// Takes completed reads.
    pub(super) fn reap(&mut self, wait: bool) {
        let mut over = std::mem::take(&mut self.over);
        self.reads.reap(wait, |ticket, loan, result| over.push((ticket, loan, result)));
        for (ticket, loan, result) in over.drain(..) {
            let state = &mut self.slots[ticket.slot as usize];
            debug_assert_eq!(state.ticket, Some(ticket));
            (state.ticket, state.loan) = (None, Some(loan));
            self.settle(ticket, result.err().map(Arc::new));
        }
        self.over = over;
        if self.reads.in_flight() == 0
            && let Some(since) = self.reading_since.take()
        {
            self.stats.reading += since.elapsed();
        }
    }

    /// Tells all fetches that wait for a read that it is over.
    fn settle(&mut self, ticket: Ticket, error: Option<Arc<Error>>) {
        for fetch in self.fetches.iter_mut().filter(|f| f.waits()) {
            for i in fetch.next..fetch.items.len() {
                if fetch.items[i] == Item::Coming(ticket) {
                    match &error {
                        None => fetch.items[i] = Item::There(ticket.slot),
                        Some(error) => fetch.fail(i, Arc::clone(error)),
                    }
                }
            }
        }
        match error {
            None => self.let_go(ticket.slot),
            // It must not be found by any fetch. What only look-ahead wanted is no error: it is read again when it is wanted.
            Some(_) => {
                self.slots[ticket.slot as usize].wanted = 0;
                self.empty(ticket.slot);
            }
        }
    }

    /// Frees a slot that nobody but look-ahead needs.
    fn empty(&mut self, slot: u32) {
        let state = &mut self.slots[slot as usize];
        debug_assert!(state.ticket.is_none() && state.wanted == 0 && state.loan.is_some());
        state.read_ahead = false;
        self.ahead.slots.retain(|s| *s != slot);
        let class = self.class_of(slot);
        class.residency.forget(slot - class.first);
    }

    /// Allows the slot's expert to be evicted, unless it is needed.
    pub(super) fn let_go(&mut self, slot: u32) {
        if self.slots[slot as usize].is_needed() {
            return;
        }
        // With a faster tier above, a few stay for as long as they may come to it.
        let passing = self.keep == Keep::PageCache && self.class_of(slot).fast == 0;
        if passing {
            return self.empty(slot);
        }
        let class = self.class_of(slot);
        class.residency.let_go(slot - class.first);
    }

    pub(super) fn class_of(&mut self, slot: u32) -> &mut Class {
        let number = self.classes.partition_point(|c| c.first <= slot) - 1;
        &mut self.classes[number]
    }

    /// The slot of an expert that has one.
    pub(super) fn slot(&self, layer: usize, expert: usize) -> Option<u32> {
        let class = &self.classes[self.layers[layer].class];
        class.residency.slot(layer, expert).map(|slot| class.first + slot)
    }

    pub(super) fn slot_state(&self, slot: u32) -> &SlotState {
        &self.slots[slot as usize]
    }

    pub(super) fn state(&mut self, slot: u32) -> &mut SlotState {
        &mut self.slots[slot as usize]
    }

    /// Whether something that was asked for has no slot.
    pub(super) fn is_missing_some(&self) -> bool {
        self.fetches.iter().any(Fetch::is_missing_some)
    }

    /// Whether what was asked for last goes in order.
    pub(super) fn goes_in_order(&self) -> bool {
        self.fetches.iter().max_by_key(|f| f.number).is_some_and(|f| f.ordered)
    }

    pub(super) fn live(&self, fetch: FetchId) -> &Fetch {
        let found = &self.fetches[fetch.index as usize];
        assert_eq!(found.number, fetch.number, "the fetch is over");
        found
    }

    /// Gives back the expert at this position of what was asked for: its slot may be used for another.
    ///
    /// # Panics
    /// When it was not handed over, or was released before.
    pub fn release(&mut self, fetch: FetchId, position: usize) {
        self.live(fetch);
        let slot = self.fetches[fetch.index as usize].release(position);
        self.slots[slot as usize].wanted -= 1;
        self.let_go(slot);
        if self.fetches.iter().any(Fetch::waits) {
            self.issue_all();
        }
    }

    /// Array `array` of the expert at this position, which was handed over and not released.
    pub fn array(&self, fetch: FetchId, position: usize, array: usize) -> &[u8] {
        let fetch = self.live(fetch);
        let slot = &self.slots[fetch.handed_over(position) as usize];
        let part = self.layers[fetch.layer].part(fetch.wanted[position] as usize, array);
        slot.loan.as_ref().expect("handed over, and so not being read").bytes(part)
    }

    /// Why the expert at this position, which has failed, cannot be read. To be asked once.
    ///
    /// # Panics
    /// When it has not failed, or was asked before.
    pub fn take_error(&mut self, fetch: FetchId, position: usize) -> Arc<Error> {
        // The fetch may be over already, if this was its last expert.
        let found = &mut self.fetches[fetch.index as usize];
        assert_eq!(found.number, fetch.number, "another fetch was begun since");
        found.take_error(position)
    }

    /// Bytes of the slots, and of what is kept to find experts and to choose among them.
    pub fn bytes(&self) -> usize {
        let classes = self.classes.iter().map(|c| c.memory.len() + c.residency.bookkeeping_bytes());
        let tables = classes.chain(self.layers.iter().map(LayerLayout::table_bytes)).sum::<usize>();
        tables + size_of_val(&*self.slots) + Reads::bytes(self.slots.len())
    }

    /// Whether reads are in flight.
    pub fn is_reading(&self) -> bool {
        self.reads.in_flight() > 0
    }

    /// Slots of memory, and experts of all layers.
    pub fn slots(&self) -> (usize, usize) {
        (self.slots.len() - self.fast_slots(), self.layers.iter().map(LayerLayout::len).sum())
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
pub(super) fn request(options: &ExpertOptions) -> usize {
    options.request.clamp(1, requests::MOST).next_multiple_of(crate::load::ALIGNMENT)
}

/// Requests for these experts that ask for [`IN_FLIGHT`] bytes, where one asks for `request` at most.
fn usual_depth(layers: &[LayerLayout], request: usize) -> usize {
    let of_expert = |l: &LayerLayout| l.extents(0).iter().map(|e| e.len.div_ceil(request)).sum::<usize>();
    let (bytes, reads) = layers
        .iter()
        .filter(|l| l.len() > 0)
        .fold((0, 0), |(bytes, reads), l| (bytes + l.bytes as usize / l.len(), reads + of_expert(l)));
    (IN_FLIGHT / (bytes / reads.max(1)).max(1)).clamp(*DEPTHS.start(), *DEPTHS.end())
}

/// Bytes of slots that would hold all experts of a class.
fn class_bytes(layers: &[LayerLayout], class: usize, slot_bytes: usize) -> u64 {
    let of_layer = |l: &LayerLayout| (l.len() as u64).saturating_mul(slot_bytes as u64);
    layers.iter().filter(|l| l.class == class).map(of_layer).fold(0, u64::saturating_add)
}
