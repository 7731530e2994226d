//! Which expert moves to a faster tier: one that the present visit wants and whose long-term score beats the least there. The other is demoted to its slot.

use super::candidates::Candidate;
use super::{NONE, Residency};
use crate::policy::{Key, Policy};

/// An expert's score must be so many times that of the expert whose slot in a faster tier it takes. Experts that change places back and forth cost two copies
/// each time and gain nothing (`docs/results/routing.md`).
const MARGIN: f64 = 3.0;

/// An expert is promoted to a faster tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Promotion {
    /// Layer of the expert that is promoted.
    pub layer: usize,
    /// Its number within the layer.
    pub expert: usize,
    /// Its slot before.
    pub from: u32,
    /// Its slot from now on.
    pub to: u32,
    /// The (layer, expert) that was in the faster slot, and is now in the other.
    pub demoted: Option<(usize, usize)>,
}

impl Residency {
    /// Promotes an expert that the present visit wants, that is not pinned, and whose score earns it a slot of the next faster tier; an expert that was in that
    /// slot is demoted to the other. Both slots are pinned until [`Residency::finish_promotion`]; the caller swaps their contents. To be called until it
    /// returns `None`.
    pub fn promote(&mut self) -> Option<Promotion> {
        let layer = self.scores.current;
        for tier in 1..self.tiers.len() {
            let may_rise = |key: &Key| {
                let slot = self.slots[*key as usize];
                slot != NONE
                    && self.tier(slot) == tier
                    && !self.pinned[slot as usize]
                    && self.scores.is_wanted_now(*key)
            };
            let by_score = |a: &Key, b: &Key| self.by_long_term_score(*a, *b);
            let Some(key) = self.scores.keys(layer).filter(may_rise).max_by(by_score) else { continue };
            let (to, demoted) = match self.tiers[tier - 1].free.pop() {
                Some(to) => (to, None),
                None => {
                    let Some(least) = self.least(tier - 1) else { continue };
                    // Scores of these policies are logarithms or visit numbers: only their order means anything.
                    let enough = match self.scores.policy {
                        Policy::Scan => least.score * MARGIN,
                        Policy::Lru | Policy::Lfu => least.score,
                    };
                    if self.scores.long_term(key) <= enough {
                        continue;
                    }
                    let to = self.slots[least.key as usize];
                    let layer = self.scores.layer_of(least.key);
                    self.assign(least.key, self.slots[key as usize]);
                    (to, Some((layer, (least.key - self.scores.keys(layer).start) as usize)))
                }
            };
            return Some(self.move_up(key, tier, to, demoted));
        }
        None
    }

    /// Promotes an expert of the second tier that is not pinned, whether or not anybody wants it, if a slot of the fastest is free: the one with the greatest
    /// long-term score. As [`Residency::promote`].
    pub fn promote_into_free_slot(&mut self) -> Option<Promotion> {
        if self.tiers.len() < 2 || !self.has_free_slot(0) {
            return None;
        }
        let second = &self.tiers[1];
        let may_rise = |slot: &u32| self.keys[*slot as usize] != NONE && !self.pinned[*slot as usize];
        let keys = (second.first..second.end).filter(may_rise).map(|slot| self.keys[slot as usize]);
        let key = keys.max_by(|a, b| self.by_long_term_score(*a, *b))?;
        let to = self.tiers[0].free.pop().expect("a slot that is free");
        Some(self.move_up(key, 1, to, None))
    }

    fn by_long_term_score(&self, a: Key, b: Key) -> std::cmp::Ordering {
        self.scores.long_term(a).total_cmp(&self.scores.long_term(b)).then(b.cmp(&a))
    }

    /// Moves an expert of a tier to a slot of the next faster one; what is demoted has the expert's slot already.
    fn move_up(&mut self, key: Key, tier: usize, to: u32, demoted: Option<(usize, usize)>) -> Promotion {
        let (layer, from) = (self.scores.layer_of(key), self.slots[key as usize]);
        if demoted.is_none() {
            self.keys[from as usize] = NONE;
        }
        self.assign(key, to);
        for tier in [tier - 1, tier] {
            self.invalidate_least(tier, layer);
            demoted.inspect(|(layer, _)| self.invalidate_least(tier, *layer));
        }
        (self.pinned[from as usize], self.pinned[to as usize]) = (true, true);
        Promotion { layer, expert: (key - self.scores.keys(layer).start) as usize, from, to, demoted }
    }

    /// The copies of a promotion are done.
    pub fn finish_promotion(&mut self, promotion: &Promotion) {
        self.unpin(promotion.to);
        match promotion.demoted {
            Some(_) => self.unpin(promotion.from),
            None => self.free(promotion.from),
        }
    }

    /// Which experts of a layer are in a tier, or may be demoted from it, has changed.
    pub(super) fn invalidate_least(&mut self, tier: usize, layer: usize) {
        // The last tier has none.
        if let Some(least) = self.tiers[tier].least.get_mut(layer) {
            *least = None;
        }
    }

    /// The expert of a tier that has the least long-term score of those that may be demoted. `tier` is not the last.
    pub(super) fn least(&mut self, tier: usize) -> Option<Candidate> {
        let mut least: Option<Candidate> = None;
        for layer in 0..self.scores.layers() {
            let is_pinned = |c: &Candidate| self.pinned[self.slots[c.key as usize] as usize];
            let known = self.tiers[tier].least[layer].filter(|c| !c.as_ref().is_some_and(is_pinned));
            let own = known.unwrap_or_else(|| {
                let may_fall = |key: &Key| {
                    let slot = self.slots[*key as usize];
                    let (tier, key) = (&self.tiers[tier], *key as usize);
                    (tier.first..tier.end).contains(&slot) && !self.pinned[slot as usize] && !self.permanent[key]
                };
                let candidate = |key| Candidate { score: self.scores.long_term(key), key };
                // The greatest candidate is the one with the least score.
                self.scores.keys(layer).filter(may_fall).map(candidate).max()
            });
            self.tiers[tier].least[layer] = Some(own);
            least = least.max(own);
        }
        least
    }
}
