//! The pool as one of two tiers. Above its own slots there may be a device's memory. The pool only knows which expert is where in it; the device's backend
//! copies.
//!
//! Experts are in one tier alone. Those of a layer that are not in the faster one are handed over from slots here. Once they are released, those whose scores
//! earn it are promoted, and each takes the slot of one that is demoted to the slot here.

use std::ops::Range;

use sluice_store::Bytes;

use super::fetch::FetchId;
use super::slots::{SlotClass, SlotState};
use super::{ClassPool, ExpertPool};
use crate::options::Keep;
use crate::residency::Promotion;

/// A promotion to the faster tier, until its copies are done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TierMove {
    /// Layer of the expert that is promoted.
    pub layer: usize,
    /// Its number within the layer.
    pub expert: usize,
    /// Its slot of the faster tier from now on, counted within the class.
    pub to: usize,
    /// The (layer, expert) that was there: [`ExpertPool::falling`] is where its bytes have to go.
    pub demoted: Option<(usize, usize)>,
    promotion: Promotion,
    class: usize,
}

/// An expert whose slot stays as it is until [`ExpertPool::unpin`].
#[derive(Debug, PartialEq, Eq)]
pub struct PinnedExpert {
    /// The expert's layer.
    pub layer: usize,
    /// Its number within the layer.
    pub expert: usize,
    slot: u32,
}

impl ExpertPool {
    /// Whether a slot is the faster tier's.
    pub(super) fn is_fast(&self, slot: u32) -> bool {
        let number = self.classes.partition_point(|c| c.first <= slot) - 1;
        let class = &self.classes[number];
        slot - class.first < class.fast
    }

    /// Slots of the faster tier, of all classes.
    pub fn fast_slots(&self) -> usize {
        self.classes.iter().map(|c| c.fast as usize).sum()
    }

    /// The classes of slots.
    pub fn slot_classes(&self) -> Vec<SlotClass> {
        self.slot_classes.clone()
    }

    /// Whether an expert is in the faster tier.
    pub fn is_in_fast_tier(&self, layer: usize, expert: usize) -> bool {
        self.slot(layer, expert).is_some_and(|slot| self.is_fast(slot))
    }

    /// Whether an expert is in either tier, or is being read.
    pub fn is_resident(&self, layer: usize, expert: usize) -> bool {
        self.slot(layer, expert).is_some()
    }

    /// The class of slots that a layer's experts take.
    pub fn class_of_layer(&self, layer: usize) -> usize {
        self.layers[layer].class
    }

    /// Whether all experts of a layer are in the faster tier for good: its class has a slot there for every expert.
    pub fn is_layer_in_fast_tier(&self, layer: usize) -> bool {
        let class = &self.classes[self.layers[layer].class];
        let there = |e: usize| class.residency.slot(layer, e).is_some_and(|slot| slot < class.fast);
        class.fast == class.experts && (0..self.layers[layer].len()).all(there)
    }

    /// Whether all experts of a layer are in slots here and stay in them: their class has a slot for every expert, and no faster tier.
    pub fn is_layer_here_for_good(&self, layer: usize) -> bool {
        let class = &self.classes[self.layers[layer].class];
        let has_all = self.keep == Keep::Slots && class.fast == 0 && class.residency.len() >= class.experts as usize;
        has_all && (0..self.layers[layer].len()).all(|expert| self.expert_bytes(layer, expert).is_some())
    }

    /// The slot of an expert, if it is here and nobody writes to it.
    pub fn expert_bytes(&self, layer: usize, expert: usize) -> Option<&[u8]> {
        match &self.slots[self.slot(layer, expert)? as usize].state {
            SlotState::Ready(guard) => Some(guard.bytes(0..guard.len())),
            _ => None,
        }
    }

    /// The first byte of the memory of a class's slots here.
    pub fn memory_of_class(&self, class: usize) -> *const u8 {
        self.classes[class].memory.start()
    }

    /// The slot of the faster tier, counted within the class, of the expert at this position, which was handed over; `None` if its slot is here.
    pub fn fast_slot(&self, fetch: FetchId, position: usize) -> Option<usize> {
        let fetch = self.live(fetch);
        let class = &self.classes[self.layers[fetch.layer].class];
        let slot = fetch.handed_over(position) - class.first;
        (slot < class.fast).then_some(slot as usize)
    }

    /// An expert's array that is in no file, and so in no slot.
    pub fn kept(&self, layer: usize, expert: usize, array: usize) -> Option<&Bytes> {
        self.layers[layer].kept(expert, array)
    }

    /// The bytes of an expert's array in its slot; none if it is [kept](ExpertPool::kept).
    pub fn array_range(&self, layer: usize, expert: usize, array: usize) -> Range<usize> {
        self.layers[layer].part(expert, array)
    }

    /// Bytes of the slot of the expert at this position, which was handed over and whose slot is here.
    pub fn slot_bytes_at(&self, fetch: FetchId, position: usize, range: Range<usize>) -> &[u8] {
        self.slot_bytes(self.live(fetch).handed_over(position), range)
    }

    fn slot_bytes(&self, slot: u32, range: Range<usize>) -> &[u8] {
        self.slots[slot as usize].bytes(range)
    }

    /// Pins an expert's slot, so that it can be copied before its layer asks for it; `None` unless the slot is here and nobody writes to it.
    pub fn pin(&mut self, layer: usize, expert: usize) -> Option<PinnedExpert> {
        let slot = self.slot(layer, expert)?;
        if !matches!(self.slots[slot as usize].state, SlotState::Ready(_)) {
            return None;
        }
        let class = self.class_of_slot(slot);
        class.residency.pin(slot - class.first);
        self.slots[slot as usize].users += 1;
        Some(PinnedExpert { layer, expert, slot })
    }

    /// Bytes of a pinned slot.
    pub fn pinned_bytes(&self, borrowed: &PinnedExpert, range: Range<usize>) -> &[u8] {
        self.slot_bytes(borrowed.slot, range)
    }

    /// Ends a pin.
    pub fn unpin(&mut self, borrowed: PinnedExpert) {
        self.slots[borrowed.slot as usize].users -= 1;
        self.unpin_if_unused(borrowed.slot);
    }

    /// What the faster tier gains by keeping an expert for good: to be compared with scores of other experts of the layer's class.
    pub fn long_term_score(&self, layer: usize, expert: usize) -> f64 {
        self.classes[self.layers[layer].class].residency.long_term_score(layer, expert)
    }

    /// Promotes one of the experts that the layer asked for last, and has released, to the faster tier, if its score earns it. The expert in whose slot it comes
    /// is demoted, unless `falls` forbids it. Until [`ExpertPool::landed`] nobody may ask for that one.
    pub fn promote(&mut self, layer: usize, falls: bool) -> Option<TierMove> {
        let number = self.layers[layer].class;
        let class = &mut self.classes[number];
        if class.fast == 0 || !falls && !class.residency.has_free_slot(0) {
            return None;
        }
        let promotion = class.residency.promote()?;
        self.stats.promotions += 1;
        self.stats.demotions += u64::from(promotion.demoted.is_some());
        Some(self.begin_move(promotion, number))
    }

    /// Promotes an expert to a free slot of the faster tier, whether or not anybody wants it, if both tiers together have slots for all experts: as
    /// [`ExpertPool::rise`]. If they have not, only experts that are wanted are promoted: each of the others might have to be demoted again.
    pub fn promote_into_free_slot(&mut self) -> Option<TierMove> {
        let holds_all = |class: &ClassPool| class.residency.len() >= class.experts as usize;
        let promote =
            |(number, class): (usize, &mut ClassPool)| Some((class.residency.promote_into_free_slot()?, number));
        let mut classes = self.classes.iter_mut().enumerate().filter(|(_, class)| holds_all(class));
        let (promotion, number) = classes.find_map(promote)?;
        self.stats.promotions += 1;
        Some(self.begin_move(promotion, number))
    }

    fn begin_move(&mut self, promotion: Promotion, class: usize) -> TierMove {
        let from = self.classes[class].first + promotion.from;
        self.slots[from as usize].begin_move();
        let Promotion { layer, expert, to, demoted, .. } = promotion;
        TierMove { layer, expert, to: to as usize, demoted, promotion, class }
    }

    /// The slot here that a promotion copies from.
    fn source_slot(&self, moved: &TierMove) -> u32 {
        self.classes[moved.class].first + moved.promotion.from
    }

    /// Bytes of the slot that the promoted expert leaves, until the demoted one is copied there.
    pub fn promoted_bytes(&self, moved: &TierMove, range: Range<usize>) -> &[u8] {
        self.slot_bytes(self.source_slot(moved), range)
    }

    /// Bytes of the slot here that the demoted expert is copied to.
    ///
    /// # Panics
    /// When none is demoted, or the promotion is done.
    pub fn demoted_bytes_mut(&mut self, moved: &TierMove, range: Range<usize>) -> &mut [u8] {
        assert!(moved.demoted.is_some(), "nothing is demoted");
        let from = self.source_slot(moved) as usize;
        let SlotState::Moving(guard) = &mut self.slots[from].state else { panic!("the promotion is done") };
        guard.bytes_mut(range)
    }

    /// The copies of a promotion are done.
    pub fn finish_promotion(&mut self, moved: TierMove) {
        let from = self.source_slot(&moved);
        self.classes[moved.class].residency.finish_promotion(&moved.promotion);
        self.slots[from as usize].end_move();
    }
}
