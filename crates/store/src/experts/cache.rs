//! Which expert lies in which slot of memory, and which has to go when another comes. Bookkeeping only: reading is done elsewhere, and the
//! simulator drives the same code with recorded traces.
//!
//! One pool of slots serves all layers. What is known of an expert changes only when its layer is visited, and so each layer keeps its experts
//! that may go in a heap, which is made anew a few times from one visit to the next; a victim is then the worst of as many tops as there are
//! layers. Nothing is allocated after [`ExpertCache::new`].

use std::cmp::Ordering;
use std::collections::BinaryHeap;

use super::forecast::Forecast;

/// How it is decided which expert has to go.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Policy {
    /// The one that was wanted longest ago.
    Lru,
    /// The one that was wanted least often, where a use counts half after [`HALF_LIFE`] tokens.
    Lfu,
    /// The one whose slot is expected to serve least while it waits, from how likely visits of its layer are to want it and how many visits of
    /// other layers come before: layers are come to in order, so that what was used last waits longest.
    #[default]
    Scan,
}

impl Policy {
    pub const ALL: [Policy; 3] = [Policy::Lru, Policy::Lfu, Policy::Scan];

    pub fn name(self) -> &'static str {
        match self {
            Policy::Lru => "lru",
            Policy::Lfu => "lfu",
            Policy::Scan => "scan",
        }
    }
}

/// Tokens after which a use counts half in [`Policy::Lfu`].
const HALF_LIFE: f64 = 64.0;

const NONE: u32 = u32::MAX;

/// An expert of one of the layers, numbered through.
type Key = u32;

/// An expert that may go, in the heap of its layer: the least worth on top.
#[derive(Clone, Copy, Debug)]
struct Candidate {
    worth: f64,
    key: Key,
}

impl Ord for Candidate {
    fn cmp(&self, other: &Candidate) -> Ordering {
        other.worth.total_cmp(&self.worth).then(other.key.cmp(&self.key))
    }
}

impl PartialOrd for Candidate {
    fn partial_cmp(&self, other: &Candidate) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Candidate {
    fn eq(&self, other: &Candidate) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Candidate {}

/// The experts of one layer that may go.
#[derive(Debug)]
struct Layer {
    /// Its keys: `first..end`.
    first: Key,
    end: Key,
    /// Holds every expert of the layer that has a slot and is neither held, pinned nor wanted at the present visit; perhaps some that have
    /// become so since, which are dropped when they come to the top, and listed again when they are let go.
    candidates: BinaryHeap<Candidate>,
    /// What the heap holds is of no more use: it is to be made anew.
    stale: bool,
    /// Visits that the layer was away from its next one when the heap was made.
    listed_at: u32,
}

/// Experts in slots of equal size.
#[derive(Debug)]
pub struct ExpertCache {
    policy: Policy,
    layers: Vec<Layer>,
    forecast: Forecast,
    /// By key: the slot, or [`NONE`].
    slots: Vec<u32>,
    /// By key: the last visit that wanted it, from 1.
    last_wanted: Vec<u64>,
    /// By key, where the policy looks back: who is worth least goes first.
    worth: Vec<f64>,
    /// By key, where it looks ahead: probability to be wanted at the layer's next visit; at those after it.
    soon: Vec<f32>,
    later: Vec<f32>,
    /// By key: whether it is in its layer's heap, unless that is stale.
    listed: Vec<bool>,
    pinned: Vec<bool>,
    /// By key.
    layer_of: Vec<u32>,
    /// By slot.
    keys: Vec<Key>,
    held: Vec<bool>,
    free: Vec<u32>,
    visits: u64,
    /// The layer of the last visit.
    current: usize,
    /// By layer: tokens that have come to it.
    tokens: Vec<f64>,
    /// The fewest uses that a visit had: experts per token, once a step had one token.
    fewest_uses: f64,
}

impl ExpertCache {
    /// `slots` slots for the experts of some layers, of which there are `experts[layer]`. `pinned`: (layer, expert) that stay once they are there.
    pub fn new(experts: &[usize], slots: usize, policy: Policy, pinned: &[(usize, usize)]) -> ExpertCache {
        ExpertCache::with_pairs(experts, slots, policy, pinned, u64::MAX)
    }

    /// The same, where what a policy learns about pairs of experts may take so many bytes.
    pub(super) fn with_pairs(
        experts: &[usize],
        slots: usize,
        policy: Policy,
        pinned: &[(usize, usize)],
        pairs: u64,
    ) -> ExpertCache {
        let mut layers = Vec::with_capacity(experts.len());
        let mut all = 0;
        for &n in experts {
            let (first, end) = (all, all + n as Key);
            layers.push(Layer { first, end, candidates: BinaryHeap::with_capacity(n), stale: true, listed_at: 0 });
            all = end;
        }
        let keys = all as usize;
        let mut cache = ExpertCache {
            policy,
            layer_of: layers.iter().zip(0..).flat_map(|(l, i)| (l.first..l.end).map(move |_| i)).collect(),
            // Where there is room for all, nobody has to go.
            forecast: Forecast::new(if policy == Policy::Scan && slots < keys { experts } else { &[] }, pairs),
            slots: vec![NONE; keys],
            last_wanted: vec![0; keys],
            worth: vec![f64::NEG_INFINITY; keys],
            soon: vec![0.0; keys],
            later: vec![0.0; keys],
            listed: vec![false; keys],
            pinned: vec![false; keys],
            keys: vec![NONE; slots],
            held: vec![false; slots],
            free: (0..slots as u32).rev().collect(),
            visits: 0,
            current: 0,
            tokens: vec![0.0; layers.len()],
            fewest_uses: f64::INFINITY,
            layers,
        };
        for &(layer, expert) in pinned {
            let key = cache.key(layer, expert);
            cache.pinned[key as usize] = true;
        }
        cache
    }

    fn key(&self, layer: usize, expert: usize) -> Key {
        let layer = &self.layers[layer];
        debug_assert!(expert < (layer.end - layer.first) as usize);
        layer.first + expert as Key
    }

    /// A step has come to `layer`, and `tokens[i]` of its tokens want expert `wanted[i]`. To be called before the slots of these experts are asked for.
    pub fn visit(&mut self, layer: usize, wanted: &[u32], tokens: &[u32]) {
        debug_assert_eq!(wanted.len(), tokens.len());
        // What the last visit wanted may go from now on; what this one wants may not.
        self.layers[self.current].stale = true;
        self.layers[layer].stale = true;
        self.current = layer;
        self.visits += 1;
        for &expert in wanted {
            let key = self.key(layer, expert as usize);
            self.last_wanted[key as usize] = self.visits;
        }
        let n = self.tokens(tokens);
        self.tokens[layer] += n;
        let first = self.layers[layer].first as usize;
        match self.policy {
            Policy::Lru => wanted.iter().for_each(|e| self.worth[first + *e as usize] = self.visits as f64),
            Policy::Lfu => {
                // Uses count double every half-life, rather than those before half: log2 of the sum, so that it does not overflow.
                let now = self.tokens[layer] / HALF_LIFE;
                for (expert, n) in wanted.iter().zip(tokens) {
                    let worth = &mut self.worth[first + *expert as usize];
                    let (a, b) = (*worth, now + f64::from(*n).log2());
                    let (low, high) = (a.min(b), a.max(b));
                    *worth = high + (low - high).exp2().ln_1p() / std::f64::consts::LN_2;
                }
            }
            Policy::Scan if self.keys.len() < self.slots.len() => {
                let keys = first..self.layers[layer].end as usize;
                let (soon, later) = (&mut self.soon[keys.clone()], &mut self.later[keys]);
                self.forecast.visit(layer, wanted, tokens, n as f32, soon, later);
            }
            Policy::Scan => {}
        }
    }

    /// How many tokens a visit had at least, from how many of them want each expert: all want the same number of experts, and each once.
    fn tokens(&mut self, uses: &[u32]) -> f64 {
        let all = uses.iter().map(|n| f64::from(*n)).sum::<f64>().max(1.0);
        let most = uses.iter().copied().max().map_or(1.0, f64::from);
        self.fewest_uses = self.fewest_uses.min(all);
        most.max(all / self.fewest_uses)
    }

    /// The slot of an expert that has one.
    pub fn slot(&self, layer: usize, expert: usize) -> Option<u32> {
        Some(self.slots[self.key(layer, expert) as usize]).filter(|s| *s != NONE)
    }

    /// A slot for an expert that has none: a free one, or that of an expert which then has none. Held. `None` if all are held or pinned.
    pub fn place(&mut self, layer: usize, expert: usize) -> Option<u32> {
        let key = self.key(layer, expert);
        debug_assert_eq!(self.slots[key as usize], NONE);
        let slot = self.free.pop().or_else(|| self.evict())?;
        self.keys[slot as usize] = key;
        self.slots[key as usize] = slot;
        self.held[slot as usize] = true;
        Some(slot)
    }

    /// Takes its slot from the expert that has to go.
    fn evict(&mut self) -> Option<u32> {
        let mut best: Option<(f64, Key)> = None;
        for layer in 0..self.layers.len() {
            let Some(top) = self.top(layer) else { continue };
            let worth = self.worth(top.key, self.distance(layer));
            if best.is_none_or(|(least, _)| worth < least) {
                best = Some((worth, top.key));
            }
        }
        // The present visit's own experts last: those whose work is done already.
        let key = best.map(|(_, key)| key).or_else(|| {
            let layer = &self.layers[self.current];
            (layer.first..layer.end).find(|key| self.slots[*key as usize] != NONE && self.may_go(*key))
        })?;
        let slot = std::mem::replace(&mut self.slots[key as usize], NONE);
        self.keys[slot as usize] = NONE;
        Some(slot)
    }

    /// The least worth of a layer's experts that may go.
    fn top(&mut self, layer: usize) -> Option<Candidate> {
        // The order within a layer changes as its visit comes nearer, if slowly.
        let ahead = self.policy == Policy::Scan && self.distance(layer) * 2 <= self.layers[layer].listed_at;
        if self.layers[layer].stale || ahead {
            self.list(layer);
        }
        loop {
            let top = *self.layers[layer].candidates.peek()?;
            if self.slots[top.key as usize] != NONE && self.may_go(top.key) {
                return Some(top);
            }
            self.layers[layer].candidates.pop();
            self.listed[top.key as usize] = false;
        }
    }

    /// Makes a layer's heap anew.
    fn list(&mut self, layer: usize) {
        let (first, end, distance) = (self.layers[layer].first, self.layers[layer].end, self.distance(layer));
        let mut candidates = std::mem::take(&mut self.layers[layer].candidates).into_vec();
        candidates.clear();
        for key in first..end {
            let listed = self.slots[key as usize] != NONE && !self.is_wanted_now(key) && self.may_go(key);
            self.listed[key as usize] = listed;
            if listed {
                candidates.push(Candidate { worth: self.worth(key, distance), key });
            }
        }
        let layer = &mut self.layers[layer];
        (layer.candidates, layer.stale, layer.listed_at) = (BinaryHeap::from(candidates), false, distance);
    }

    /// Visits until this layer's next one, the next layer's being 1.
    fn distance(&self, layer: usize) -> u32 {
        let ahead = if layer > self.current { layer - self.current } else { layer + self.layers.len() - self.current };
        ahead as u32
    }

    /// What keeping an expert is worth, `distance` visits before its layer's next one.
    fn worth(&self, key: Key, distance: u32) -> f64 {
        match self.policy {
            Policy::Lru | Policy::Lfu => self.worth[key as usize],
            // Hits per visit for which it holds its slot: until its layer's next visit, or, if that is more, until it is wanted. (Wherever one would
            // rather stop in between, one of these is no less: every visit after the next gives the same for the same.)
            Policy::Scan => {
                let (soon, later) = (self.soon[key as usize], self.later[key as usize]);
                let (distance, scan) = (distance as f32, self.layers.len() as f32);
                f64::from((soon / distance).max(later / (distance * later + (1.0 - soon) * scan)))
            }
        }
    }

    /// Of an expert that has a slot.
    fn may_go(&self, key: Key) -> bool {
        !self.pinned[key as usize] && !self.held[self.slots[key as usize] as usize]
    }

    fn is_wanted_now(&self, key: Key) -> bool {
        self.visits > 0 && self.last_wanted[key as usize] == self.visits
    }

    /// Keeps a slot's expert where it is until it is let go. Who holds it, and how often, is for the caller to know.
    pub fn hold(&mut self, slot: u32) {
        self.held[slot as usize] = true;
    }

    pub fn let_go(&mut self, slot: u32) {
        self.held[slot as usize] = false;
        let key = self.keys[slot as usize];
        if self.listed[key as usize] || self.pinned[key as usize] {
            return;
        }
        let layer = self.layer_of[key as usize] as usize;
        if !self.layers[layer].stale && !self.is_wanted_now(key) {
            let worth = self.worth(key, self.layers[layer].listed_at);
            self.listed[key as usize] = true;
            self.layers[layer].candidates.push(Candidate { worth, key });
        }
    }

    /// Frees a slot: what it should hold could not be read.
    pub fn forget(&mut self, slot: u32) {
        let key = std::mem::replace(&mut self.keys[slot as usize], NONE);
        self.slots[key as usize] = NONE;
        self.held[slot as usize] = false;
        self.free.push(slot);
    }

    /// Bytes that the bookkeeping itself takes: with [`Policy::Scan`] mostly a number for each pair of a layer's experts.
    pub fn bookkeeping_bytes(&self) -> usize {
        let by_key = size_of::<(u32, u64, f64, f32, f32, bool, bool, u32, Candidate)>();
        let by_slot = size_of::<(Key, bool, u32)>();
        self.slots.len() * by_key + self.keys.len() * by_slot + self.forecast.bytes()
    }

    /// How many slots there are.
    pub fn len(&self) -> usize {
        self.keys.len()
    }

    pub fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    impl ExpertCache {
        /// What must hold between any two calls.
        fn check(&mut self) {
            // 1. slots and keys name each other, and what is free is empty and not held
            let used = self.keys.iter().filter(|key| **key != NONE).count();
            assert_eq!(self.slots.iter().filter(|slot| **slot != NONE).count(), used);
            for (slot, key) in self.keys.iter().enumerate().filter(|(_, key)| **key != NONE) {
                assert_eq!(self.slots[*key as usize] as usize, slot);
            }
            let mut free = self.free.clone();
            free.sort_unstable();
            free.dedup();
            assert_eq!((free.len(), free.len() + used), (self.free.len(), self.keys.len()));
            assert!(free.iter().all(|s| self.keys[*s as usize] == NONE && !self.held[*s as usize]));
            // 2. heaps that are not stale hold all that may go, each once
            for layer in &self.layers {
                assert!(layer.candidates.len() <= (layer.end - layer.first) as usize);
                let mut keys: Vec<Key> = layer.candidates.iter().map(|c| c.key).collect();
                keys.sort_unstable();
                if layer.stale {
                    continue;
                }
                assert!(keys.windows(2).all(|w| w[0] < w[1]));
                for key in layer.first..layer.end {
                    assert_eq!(self.listed[key as usize], keys.binary_search(&key).is_ok());
                    let there = self.slots[key as usize] != NONE;
                    assert!(self.listed[key as usize] || !there || !self.may_go(key) || self.is_wanted_now(key));
                }
            }
        }
    }

    #[derive(Clone, Debug)]
    enum Call {
        Visit { layer: usize, experts: Vec<u32> },
        Place { layer: usize, expert: usize },
        Hold(usize),
        LetGo(usize),
        Forget(usize),
    }

    const EXPERTS: [usize; 3] = [5, 1, 8];

    fn call() -> impl Strategy<Value = Call> {
        let layer = || 0..EXPERTS.len();
        prop_oneof![
            (layer(), proptest::collection::btree_set(0u32..8, 1..5)).prop_map(|(layer, e)| {
                let experts = e.into_iter().filter(|e| (*e as usize) < EXPERTS[layer]).collect();
                Call::Visit { layer, experts }
            }),
            (layer(), 0usize..8).prop_map(|(layer, e)| Call::Place { layer, expert: e % EXPERTS[layer] }),
            (0usize..64).prop_map(Call::Hold),
            (0usize..64).prop_map(Call::LetGo),
            (0usize..64).prop_map(Call::Forget),
        ]
    }

    proptest! {
        #[test]
        fn bookkeeping_holds_whatever_the_calls(
            slots in 1usize..12, pinned in 0usize..3, policy in 0..Policy::ALL.len(),
            calls in proptest::collection::vec(call(), 1..200),
        ) {
            let pins = [(0, 2), (2, 7), (1, 0)];
            let mut cache = ExpertCache::new(&EXPERTS, slots, Policy::ALL[policy], &pins[..pinned]);
            for call in calls {
                match call {
                    Call::Visit { layer, experts } => {
                        let tokens: Vec<u32> = (1..).take(experts.len()).collect();
                        cache.visit(layer, &experts, &tokens);
                    }
                    Call::Place { layer, expert } if cache.slot(layer, expert).is_none() => {
                        let before = (cache.keys.clone(), cache.held.clone());
                        let stays = |key: Key, slot: usize| {
                            key != NONE && (before.1[slot] || cache.pinned[key as usize])
                        };
                        let stays: Vec<bool> = before.0.iter().enumerate().map(|(s, key)| stays(*key, s)).collect();
                        match cache.place(layer, expert) {
                            None => prop_assert!(stays.iter().all(|s| *s)),
                            Some(slot) => {
                                prop_assert!(!stays[slot as usize]);
                                prop_assert_eq!(cache.slot(layer, expert), Some(slot));
                                prop_assert!(cache.held[slot as usize]);
                                let others = before.0.iter().zip(&cache.keys).enumerate();
                                prop_assert!(others.filter(|(s, _)| *s != slot as usize).all(|(_, (a, b))| a == b));
                            }
                        }
                    }
                    Call::Place { .. } => {}
                    Call::Hold(slot) | Call::LetGo(slot) | Call::Forget(slot)
                        if slot >= slots || cache.keys[slot] == NONE => {}
                    Call::Hold(slot) => cache.hold(slot as u32),
                    Call::LetGo(slot) => cache.let_go(slot as u32),
                    Call::Forget(slot) => cache.forget(slot as u32),
                }
                cache.check();
            }
        }

        /// A look at all slots finds the same victim, where the order within a layer does not depend on when it is looked at.
        #[test]
        fn the_victim_is_the_one_of_least_worth(
            policy in 0..2usize,
            visits in proptest::collection::vec(proptest::collection::btree_set(0u32..8, 1..4), 1..80),
        ) {
            let policy = [Policy::Lru, Policy::Lfu][policy];
            let mut cache = ExpertCache::new(&[8, 8, 8], 7, policy, &[(1, 3)]);
            for (i, wanted) in visits.into_iter().enumerate() {
                let (layer, wanted) = (i % 3, Vec::from_iter(wanted));
                cache.visit(layer, &wanted, &vec![1; wanted.len()]);
                let mut held: Vec<u32> = wanted.iter().filter_map(|e| cache.slot(layer, *e as usize)).collect();
                held.iter().for_each(|s| cache.hold(*s));
                for expert in wanted {
                    if cache.slot(layer, expert as usize).is_some() {
                        continue;
                    }
                    let worth = |key: &Key| cache.worth(*key, cache.distance(cache.layer_of[*key as usize] as usize));
                    let going = |key: &&Key| **key != NONE && cache.may_go(**key) && !cache.is_wanted_now(**key);
                    let least = cache.keys.iter().filter(going).map(worth).min_by(f64::total_cmp);
                    let of_slot = |key: &Key| if *key == NONE { 0.0 } else { worth(key) };
                    let worths: Vec<f64> = cache.keys.iter().map(of_slot).collect();
                    let before = cache.keys.clone();
                    let full = cache.free.is_empty();
                    let slot = cache.place(layer, expert as usize).unwrap();
                    if full {
                        prop_assert!(before[slot as usize] != NONE);
                        prop_assert_eq!(Some(worths[slot as usize]), least);
                    }
                    held.push(slot);
                }
                held.iter().for_each(|s| cache.let_go(*s));
            }
        }
    }

    /// Serves a visit, and returns what had to be read.
    fn serve(cache: &mut ExpertCache, layer: usize, wanted: &[u32]) -> Vec<u32> {
        cache.visit(layer, wanted, &vec![1; wanted.len()]);
        let there = |cache: &ExpertCache, e: u32| cache.slot(layer, e as usize);
        let mut held: Vec<u32> = wanted.iter().filter_map(|e| there(cache, *e)).collect();
        held.iter().for_each(|s| cache.hold(*s));
        let missing: Vec<u32> = wanted.iter().copied().filter(|e| there(cache, *e).is_none()).collect();
        held.extend(missing.iter().map(|e| cache.place(layer, *e as usize).unwrap()));
        held.iter().for_each(|s| cache.let_go(*s));
        missing
    }

    #[test]
    fn lru_lets_go_what_was_wanted_longest_ago() {
        let mut cache = ExpertCache::new(&[4], 2, Policy::Lru, &[]);
        for (wanted, missing) in [([0], 1), ([1], 1), ([0], 0), ([2], 1), ([0], 0), ([1], 1)] {
            assert_eq!(serve(&mut cache, 0, &wanted).len(), missing, "{wanted:?}");
        }
    }

    #[test]
    fn lfu_keeps_what_was_wanted_often_but_not_for_ever() {
        let mut cache = ExpertCache::new(&[4], 2, Policy::Lfu, &[]);
        (0..4).for_each(|_| _ = serve(&mut cache, 0, &[0]));
        for expert in [1, 2, 3] {
            assert_eq!(serve(&mut cache, 0, &[expert]), [expert]);
        }
        assert_eq!(serve(&mut cache, 0, &[0]), [0; 0]);
        // Many half-lives of others later it is forgotten.
        (0..20 * HALF_LIFE as usize).for_each(|_| _ = serve(&mut cache, 0, &[1]));
        serve(&mut cache, 0, &[2]);
        assert_eq!(serve(&mut cache, 0, &[0]), [0]);
    }

    #[test]
    fn scan_keeps_the_layers_that_come_next() {
        // Each layer wants one of its two experts, always the same; there is room for three.
        let mut cache = ExpertCache::new(&[2; 4], 3, Policy::Scan, &[]);
        let mut missed = 0;
        for token in 0..100 {
            for layer in 0..4 {
                missed += serve(&mut cache, layer, &[0]).len() * usize::from(token >= 50);
            }
        }
        // LRU would miss all 200; the optimum lets one of four go per token and a third more.
        assert!(missed <= 100, "{missed}");
    }

    #[test]
    fn pinned_experts_stay() {
        for policy in Policy::ALL {
            let mut cache = ExpertCache::new(&[8], 3, policy, &[(0, 5)]);
            serve(&mut cache, 0, &[5]);
            (0..100).for_each(|i| _ = serve(&mut cache, 0, &[[0, 1, 2, 3, 4][i % 5]]));
            assert_eq!(serve(&mut cache, 0, &[5]), [0; 0], "{policy:?}");
        }
    }

    #[test]
    fn what_the_visit_wants_goes_last() {
        for policy in Policy::ALL {
            let mut cache = ExpertCache::new(&[8], 3, policy, &[]);
            serve(&mut cache, 0, &[0, 1, 2]);
            cache.visit(0, &[0, 1, 3, 4], &[1; 4]);
            // Not held, and yet 2 goes first; then there is no other left.
            let slot = cache.slot(0, 2).unwrap();
            assert_eq!(cache.place(0, 3), Some(slot), "{policy:?}");
            assert!(cache.place(0, 4).is_some());
            assert!(cache.place(0, 5).is_some());
            assert_eq!(cache.place(0, 6), None, "all are held");
        }
    }
}
