//! What layers ask the pool for: fetches, and the reads that they need.

use std::sync::Arc;
use std::time::Instant;

use sluice_store::Error;

use super::ExpertPool;
use super::fetch::{Fetch, FetchId, Item, Next, NotReady};
use super::slots::SlotState;

/// Experts that may be read and not yet used, in ordered fetches.
const WINDOW: usize = 32;

impl ExpertPool {
    /// Asks for the experts `wanted` of a layer, in ascending order, `tokens[i]` tokens for each. Reads of all that are not in memory begin. With `ordered` experts
    /// are handed over in this order, else as their reads complete. Earlier fetches that are not over are served first.
    pub fn fetch(&mut self, layer: usize, wanted: &[u32], tokens: &[u32], ordered: bool) -> FetchId {
        self.stats.wanted += wanted.len() as u64;
        let class = self.layers[layer].class;
        // 1. What look-ahead read and nobody wants may be evicted.
        self.count_predictions(layer, wanted);
        self.classes[class].residency.visit(layer, wanted, tokens);
        // 2. What is in memory stays there.
        let index = self.fetches.iter().position(|f| !f.is_live()).unwrap_or_else(|| {
            self.fetches.push(Fetch::default());
            self.fetches.len() - 1
        });
        self.begun += 1;
        self.fetches[index].begin(self.begun, layer, wanted, ordered);
        for &expert in wanted {
            let item = self.use_slot(layer, expert as usize);
            self.stats.hits += u64::from(matches!(item, Item::Ready(_)));
            self.stats.fast_hits += u64::from(matches!(item, Item::Ready(slot) if self.is_fast(slot)));
            self.fetches[index].items.push(item);
        }
        let bytes = &self.layers[layer];
        self.stats.wanted_bytes += bytes.bytes / bytes.len().max(1) as u64 * wanted.len() as u64;
        // 3. The rest is read.
        self.release_lookahead();
        self.issue_all();
        FetchId { index: index as u32, number: self.begun }
    }

    /// Pins an expert's slot for an item of a fetch, and returns the item's state.
    fn use_slot(&mut self, layer: usize, expert: usize) -> Item {
        let class = &mut self.classes[self.layers[layer].class];
        let Some(slot) = class.residency.slot(layer, expert) else { return Item::Missing };
        class.residency.pin(slot);
        let slot = class.first + slot;
        let slot_state = &mut self.slots[slot as usize];
        assert!(
            !matches!(slot_state.state, SlotState::Moving(_)),
            "an expert is asked for that is still being demoted"
        );
        slot_state.users += 1;
        slot_state.ticket().map_or(Item::Ready(slot), Item::Reading)
    }

    /// Queues reads of what fetches are missing, as far as there are slots; the oldest fetch first.
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

    /// Queues reads of what a fetch is missing, as far as there are slots.
    fn issue(&mut self, index: usize) {
        let mut ahead = 0;
        let Fetch { layer, next, ordered, .. } = self.fetches[index];
        for i in next..self.fetches[index].items.len() {
            if ordered && ahead >= WINDOW {
                break;
            }
            match self.fetches[index].items[i] {
                Item::Missing => {}
                Item::Reading(_) | Item::Ready(_) => {
                    ahead += 1;
                    continue;
                }
                _ => continue,
            }
            let expert = self.fetches[index].wanted[i] as usize;
            // Another fetch may have asked for it.
            let mut item = self.use_slot(layer, expert);
            if item == Item::Missing {
                let Some(slot) = self.begin_read(layer, expert) else { break };
                let state = &mut self.slots[slot as usize];
                state.users += 1;
                // An expert without bytes is ready at once.
                item = state.ticket().map_or(Item::Ready(slot), Item::Reading);
            }
            self.fetches[index].items[i] = item;
            ahead += 1;
        }
    }

    /// The next expert of a fetch; with `wait` never [`Next::Later`]. Its slot stays as it is until [`ExpertPool::release`].
    ///
    /// # Panics
    /// With `wait`, if no read can begin because the caller holds all slots.
    pub fn next(&mut self, fetch: FetchId, wait: bool) -> Next {
        let index = fetch.index as usize;
        loop {
            if self.fetches[index].number != fetch.number {
                return Next::Over;
            }
            match self.fetches[index].hand_over() {
                Ok(next) => return next,
                Err(NotReady { needs_slot: true }) => self.free_slot_for(index),
                Err(NotReady { needs_slot: false }) => {}
            }
            if self.reads.in_flight() == 0 {
                // What is wanted now comes before what look-ahead has read.
                self.release_lookahead();
                self.issue_all();
                if self.reads.in_flight() == 0 {
                    self.free_slot_for(index);
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
                self.read_ahead();
            } else if !self.fetches[index].is_ready() {
                assert!(!wait, "experts are waited for and none is read: all slots are held");
                return Next::Later;
            }
        }
    }

    /// Finds a slot for the next expert of a fetch, where no read in flight will free one: evicts experts that were read for other fetches, or for later positions
    /// of this one, and not handed over.
    fn free_slot_for(&mut self, index: usize) {
        self.issue_all();
        while self.reads.in_flight() == 0 && !self.fetches[index].is_ready() {
            let class = self.layers[self.fetches[index].layer].class;
            let Some(slot) = self.last_unclaimed(class) else { return };
            let items = self.fetches.iter_mut().filter(|f| f.waits()).flat_map(|f| &mut f.items);
            items.filter(|item| **item == Item::Ready(slot)).for_each(|item| *item = Item::Missing);
            self.slots[slot as usize].users = 0;
            self.discard(slot);
            // Before older fetches, which would take the slot back.
            self.issue(index);
            self.submit();
        }
    }

    /// The slot of a class whose expert is ready and not handed over: that of the last such expert of the newest fetch.
    fn last_unclaimed(&self, class: usize) -> Option<u32> {
        let waiting = || self.fetches.iter().filter(|f| f.waits() && self.layers[f.layer].class == class);
        let holders = |slot: u32| waiting().flat_map(|f| &f.items).filter(|item| **item == Item::Ready(slot)).count();
        let last = |f: &Fetch| {
            let mut slots =
                f.items.iter().rev().filter_map(|item| if let Item::Ready(slot) = item { Some(*slot) } else { None });
            slots
                .find(|slot| !self.is_fast(*slot) && holders(*slot) == self.slots[*slot as usize].users as usize)
                .map(|slot| (f.number, slot))
        };
        waiting().filter_map(last).max().map(|(_, slot)| slot)
    }

    /// A fetch that is not over.
    pub(super) fn live(&self, fetch: FetchId) -> &Fetch {
        let found = &self.fetches[fetch.index as usize];
        assert_eq!(found.number, fetch.number, "the fetch is over");
        found
    }

    /// Gives back the expert at this position of what was asked for: another may take its slot.
    ///
    /// # Panics
    /// When it was not handed over, or was released before.
    pub fn release(&mut self, fetch: FetchId, position: usize) {
        self.live(fetch);
        let slot = self.fetches[fetch.index as usize].release(position);
        self.slots[slot as usize].users -= 1;
        self.unpin_if_unused(slot);
        if self.fetches.iter().any(Fetch::waits) {
            self.issue_all();
        }
    }

    /// Array `array` of the expert at this position, which was handed over, not released, and is in a slot here.
    ///
    /// # Panics
    /// When it is not.
    pub fn array(&self, fetch: FetchId, position: usize, array: usize) -> &[u8] {
        let fetch = self.live(fetch);
        let slot = &self.slots[fetch.handed_over(position) as usize];
        let (layer, expert) = (&self.layers[fetch.layer], fetch.wanted[position] as usize);
        match layer.kept(expert, array) {
            Some(bytes) => bytes,
            None => slot.bytes(layer.part(expert, array)),
        }
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

    /// Whether something that was asked for has no slot.
    pub(super) fn is_missing_some(&self) -> bool {
        self.fetches.iter().any(Fetch::is_missing_some)
    }

    /// Whether what was asked for last goes in order.
    pub(super) fn goes_in_order(&self) -> bool {
        self.fetches.iter().max_by_key(|f| f.number).is_some_and(|f| f.ordered)
    }
}
