//! Which expert moves to a faster tier: after a visit that wanted it, if it is worth more in the long run than the least there, which is demoted to its slot.

use super::{Candidate, NONE, Residency};
use crate::experts::eviction_score::{Key, Policy};

/// How much more an expert must be worth than the one whose place in a faster tier it takes: places that are changed back and forth cost two copies
/// each time and gain nothing (`docs/results/routing.md`).
const MARGIN: f64 = 3.0;

/// An expert is promoted to a faster tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Promotion {
    pub layer: usize,
    pub expert: usize,
    /// Its slot before, and from now on.
    pub from: u32,
    pub to: u32,
    /// The (layer, expert) that was in the faster slot, and is now in the other.
    pub falls: Option<(usize, usize)>,
}

impl Residency {
    /// Promotes an expert that the present visit wants, that is not held, and that is worth a place in the next faster tier; what was in that slot, if anything, is
    /// demoted to the expert's. Both slots are held until [`Residency::landed`]; the caller swaps their contents. To be called until it returns `None`.
    pub fn rise(&mut self) -> Option<Promotion> {
        let layer = self.worth.current;
        for tier in 1..self.tiers.len() {
            let rises = |key: &Key| {
                let slot = self.slots[*key as usize];
                slot != NONE && self.tier(slot) == tier && !self.held[slot as usize] && self.worth.is_wanted_now(*key)
            };
            let more = |a: &Key, b: &Key| self.worth.lasting(*a).total_cmp(&self.worth.lasting(*b)).then(b.cmp(a));
            let Some(key) = self.worth.keys(layer).filter(rises).max_by(more) else { continue };
            let (to, falls) = match self.tiers[tier - 1].free.pop() {
                Some(to) => (to, None),
                None => {
                    let Some(least) = self.least(tier - 1) else { continue };
                    // These policies' worths are logarithms or visit numbers: factors mean nothing, only order does.
                    let enough = match self.worth.policy {
                        Policy::Scan => least.worth * MARGIN,
                        Policy::Lru | Policy::Lfu => least.worth,
                    };
                    if self.worth.lasting(key) <= enough {
                        continue;
                    }
                    let to = self.slots[least.key as usize];
                    let of = self.worth.layer_of(least.key);
                    self.put(least.key, self.slots[key as usize]);
                    (to, Some((of, (least.key - self.worth.keys(of).start) as usize)))
                }
            };
            return Some(self.promote(key, tier, to, falls));
        }
        None
    }

    /// Promotes an expert of the second tier that is not held, whoever wants it, if a slot of the fastest is free: the one that is worth most in the long run. As
    /// [`Residency::rise`].
    pub fn rise_to_room(&mut self) -> Option<Promotion> {
        if self.tiers.len() < 2 || !self.has_room(0) {
            return None;
        }
        let second = &self.tiers[1];
        let rises = |slot: &u32| self.keys[*slot as usize] != NONE && !self.held[*slot as usize];
        let keys = (second.first..second.end).filter(rises).map(|slot| self.keys[slot as usize]);
        let key = keys.max_by(|a, b| self.worth.lasting(*a).total_cmp(&self.worth.lasting(*b)).then(b.cmp(a)))?;
        let to = self.tiers[0].free.pop().expect("a slot that is free");
        Some(self.promote(key, 1, to, None))
    }

    /// Has an expert of a tier in a slot of the next faster one; what falls is in the expert's slot already.
    fn promote(&mut self, key: Key, tier: usize, to: u32, falls: Option<(usize, usize)>) -> Promotion {
        let (layer, from) = (self.worth.layer_of(key), self.slots[key as usize]);
        if falls.is_none() {
            self.keys[from as usize] = NONE;
        }
        self.put(key, to);
        for tier in [tier - 1, tier] {
            self.forget_least(tier, layer);
            falls.inspect(|(layer, _)| self.forget_least(tier, *layer));
        }
        (self.held[from as usize], self.held[to as usize]) = (true, true);
        Promotion { layer, expert: (key - self.worth.keys(layer).start) as usize, from, to, falls }
    }

    /// The copies of a promotion are done.
    pub fn landed(&mut self, rise: &Promotion) {
        self.let_go(rise.to);
        match rise.falls {
            Some(_) => self.let_go(rise.from),
            None => self.release(rise.from),
        }
    }

    /// Which experts of a layer are in a tier, or may be evicted from it, has changed.
    pub(super) fn forget_least(&mut self, tier: usize, layer: usize) {
        // The last tier has none.
        if let Some(least) = self.tiers[tier].least.get_mut(layer) {
            *least = None;
        }
    }

    /// Of a tier that is not the last, the expert of least worth there that may be demoted.
    pub(super) fn least(&mut self, tier: usize) -> Option<Candidate> {
        let mut least: Option<Candidate> = None;
        for layer in 0..self.worth.layers() {
            let is_held = |c: &Candidate| self.held[self.slots[c.key as usize] as usize];
            let known = self.tiers[tier].least[layer].filter(|c| !c.as_ref().is_some_and(is_held));
            let own = known.unwrap_or_else(|| {
                let there = |key: &Key| {
                    let slot = self.slots[*key as usize];
                    let (tier, key) = (&self.tiers[tier], *key as usize);
                    (tier.first..tier.end).contains(&slot) && !self.held[slot as usize] && !self.pinned[key]
                };
                let candidate = |key| Candidate { worth: self.worth.lasting(key), key };
                // The order of candidates is that of a heap: the least is the greatest.
                self.worth.keys(layer).filter(there).map(candidate).max()
            });
            self.tiers[tier].least[layer] = Some(own);
            least = least.max(own);
        }
        least
    }
}
