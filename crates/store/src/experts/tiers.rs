//! A tier above the store's own slots: a device's memory, of which the store knows which expert lies where, and nothing else. Whoever has that memory copies.
//!
//! Experts are in one tier alone. Those of a layer that are not in the faster one are handed over from slots here; once they are released, those that are worth it
//! rise, and each takes the place of one that falls to the slot that it left.

use std::ops::Range;

use super::fetch::FetchId;
use super::residency::Promotion;
use super::store::{Class, ExpertStore};

/// Slots of one size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotClass {
    /// Bytes of a slot.
    pub bytes: usize,
    /// Experts of all layers whose size it is; those of the layer with the most of them.
    pub experts: usize,
    pub widest: usize,
}

/// The host computes, and its memory is all there is.
pub fn no_faster(classes: &[SlotClass]) -> Vec<usize> {
    vec![0; classes.len()]
}

/// An expert of a layer that comes to the faster tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Move {
    pub layer: usize,
    pub expert: usize,
    /// Its slot of the faster tier from now on, counted within the class.
    pub to: usize,
    /// The (layer, expert) that was there: [`ExpertStore::falling`] is where its bytes have to go.
    pub falls: Option<(usize, usize)>,
    rise: Promotion,
    class: usize,
}

/// An expert whose slot stays as it is until [`ExpertStore::give_back`].
#[derive(Debug, PartialEq, Eq)]
pub struct Borrowed {
    pub layer: usize,
    pub expert: usize,
    slot: u32,
}

impl ExpertStore {
    /// Whether a slot is the faster tier's.
    pub(super) fn is_fast(&self, slot: u32) -> bool {
        let number = self.classes.partition_point(|c| c.first <= slot) - 1;
        let class = &self.classes[number];
        slot - class.first < class.fast
    }

    /// Slots of the faster tier, of all sizes.
    pub fn fast_slots(&self) -> usize {
        self.classes.iter().map(|c| c.fast as usize).sum()
    }

    /// What slots there are, of each size.
    pub fn slot_classes(&self) -> Vec<SlotClass> {
        self.slot_classes.clone()
    }

    /// Whether an expert is in the faster tier.
    pub fn is_there_fast(&self, layer: usize, expert: usize) -> bool {
        self.slot(layer, expert).is_some_and(|slot| self.is_fast(slot))
    }

    /// Whether an expert is in either tier, or on its way to memory.
    pub fn is_there(&self, layer: usize, expert: usize) -> bool {
        self.slot(layer, expert).is_some()
    }

    /// Which slots a layer's experts take.
    pub fn class(&self, layer: usize) -> usize {
        self.layers[layer].class
    }

    /// Whether all experts of a layer are in the faster tier, and stay there.
    pub fn is_all_fast(&self, layer: usize) -> bool {
        let class = &self.classes[self.layers[layer].class];
        let there = |e: usize| class.residency.slot(layer, e).is_some_and(|slot| slot < class.fast);
        class.fast == class.experts && (0..self.layers[layer].len()).all(there)
    }

    /// The slot of the faster tier, counted within the class, in which the expert at this position is, which was handed over; `None` if it is in memory here.
    pub fn fast(&self, fetch: FetchId, position: usize) -> Option<usize> {
        let fetch = self.live(fetch);
        let class = &self.classes[self.layers[fetch.layer].class];
        let slot = fetch.handed_over(position) - class.first;
        (slot < class.fast).then_some(slot as usize)
    }

    /// Where an array of an expert lies in a slot.
    pub fn part(&self, layer: usize, expert: usize, array: usize) -> Range<usize> {
        self.layers[layer].part(expert, array)
    }

    /// A part of the slot of the expert at this position, which was handed over and is in memory here.
    pub fn bytes_of(&self, fetch: FetchId, position: usize, range: Range<usize>) -> &[u8] {
        self.slot_bytes(self.live(fetch).handed_over(position), range)
    }

    fn slot_bytes(&self, slot: u32, range: Range<usize>) -> &[u8] {
        self.slot_state(slot).loan.as_ref().expect("in memory here, and not being read").bytes(range)
    }

    /// Keeps an expert where it is that lies in memory here, to be copied before it is asked for; `None` where it does not lie here, or is being read.
    pub fn pin(&mut self, layer: usize, expert: usize) -> Option<Borrowed> {
        let slot = self.slot(layer, expert)?;
        let state = self.slot_state(slot);
        if self.is_fast(slot) || state.landing || state.loan.is_none() {
            return None;
        }
        let class = self.class_of(slot);
        class.residency.hold(slot - class.first);
        self.state(slot).wanted += 1;
        Some(Borrowed { layer, expert, slot })
    }

    /// A part of the slot of what was borrowed.
    pub fn borrowed(&self, borrowed: &Borrowed, range: Range<usize>) -> &[u8] {
        self.slot_bytes(borrowed.slot, range)
    }

    pub fn unpin(&mut self, borrowed: Borrowed) {
        self.state(borrowed.slot).wanted -= 1;
        self.let_go(borrowed.slot);
    }

    /// What it is worth in the long run to have an expert in a faster tier, beside others of its layer.
    pub fn worth(&self, layer: usize, expert: usize) -> f64 {
        self.classes[self.layers[layer].class].residency.lasting(layer, expert)
    }

    /// Moves one of the experts that the layer asked for last, and has released, to the faster tier, if one is worth it; what was in its place falls, unless
    /// `falls` says that nothing may. Until [`ExpertStore::landed`] nobody may ask for the one that falls.
    pub fn rise(&mut self, layer: usize, falls: bool) -> Option<Move> {
        let number = self.layers[layer].class;
        let class = &mut self.classes[number];
        if class.fast == 0 || !falls && !class.residency.has_room(0) {
            return None;
        }
        let rise = class.residency.rise()?;
        self.stats.rises += 1;
        self.stats.falls += u64::from(rise.falls.is_some());
        Some(self.moved(rise, number))
    }

    /// Moves an expert from memory here to the faster tier, whoever wants it, if there is room, and both have room for all experts together: as [`ExpertStore::rise`].
    /// Else only what is wanted comes there, since the place of another is had for two copies.
    pub fn rise_to_room(&mut self) -> Option<Move> {
        let holds_all = |class: &Class| class.residency.len() >= class.experts as usize;
        let rises = |(number, class): (usize, &mut Class)| Some((class.residency.rise_to_room()?, number));
        let mut classes = self.classes.iter_mut().enumerate().filter(|(_, class)| holds_all(class));
        let (rise, number) = classes.find_map(rises)?;
        self.stats.rises += 1;
        Some(self.moved(rise, number))
    }

    fn moved(&mut self, rise: Promotion, class: usize) -> Move {
        let from = self.classes[class].first + rise.from;
        self.state(from).landing = true;
        let Promotion { layer, expert, to, falls, .. } = rise;
        Move { layer, expert, to: to as usize, falls, rise, class }
    }

    /// A part of the slot that the expert which rises leaves, until something falls to it.
    pub fn rising(&self, moved: &Move, range: Range<usize>) -> &[u8] {
        self.slot_bytes(self.classes[moved.class].first + moved.rise.from, range)
    }

    /// The slot that the expert which falls comes to, as far as `range`.
    ///
    /// # Panics
    /// Where none falls, or it has landed.
    pub fn falling(&mut self, moved: &Move, range: Range<usize>) -> &mut [u8] {
        assert!(moved.falls.is_some(), "nothing falls");
        let from = self.classes[moved.class].first + moved.rise.from;
        let state = self.state(from);
        assert!(state.landing, "it has landed");
        state.loan.as_mut().expect("nobody reads into a slot that is held").bytes_mut(range)
    }

    /// What a move copies is copied.
    pub fn landed(&mut self, moved: Move) {
        let class = &mut self.classes[moved.class];
        let from = class.first + moved.rise.from;
        class.residency.landed(&moved.rise);
        self.state(from).landing = false;
    }
}
