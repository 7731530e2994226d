//! Recorded routing, and how often each policy would have had to read: the simulator drives the same residency that the expert pool uses.

use crate::policy::Policy;
use crate::residency::Residency;

/// What routers wanted, visit by visit, in the order of the visits.
#[derive(Clone, Debug, Default)]
pub struct Trace {
    /// Experts of each layer.
    experts: Vec<usize>,
    /// By visit: the layer, and where what it wanted ends.
    visits: Vec<(usize, usize)>,
    wanted: Vec<u32>,
    /// As long as `wanted`: how many of the visit's tokens want it.
    tokens: Vec<u32>,
}

impl Trace {
    /// An empty trace of layers with so many experts.
    pub fn new(experts: &[usize]) -> Trace {
        Trace { experts: experts.to_vec(), ..Trace::default() }
    }

    /// A step has come to `layer`, and `tokens[i]` of its tokens want expert `wanted[i]`; each expert once.
    ///
    /// # Panics
    /// When there is no such layer or expert.
    pub fn push(&mut self, layer: usize, wanted: &[u32], tokens: &[u32]) {
        assert_eq!(wanted.len(), tokens.len());
        assert!(wanted.iter().all(|e| (*e as usize) < self.experts[layer]));
        self.wanted.extend_from_slice(wanted);
        self.tokens.extend_from_slice(tokens);
        self.visits.push((layer, self.wanted.len()));
    }

    /// (layer, experts, tokens that want each), in order.
    pub fn visits(&self) -> impl Iterator<Item = (usize, &[u32], &[u32])> {
        let mut from = 0;
        self.visits.iter().map(move |&(layer, to)| {
            let range = std::mem::replace(&mut from, to)..to;
            (layer, &self.wanted[range.clone()], &self.tokens[range])
        })
    }

    /// Experts of each layer.
    pub fn experts(&self) -> &[usize] {
        &self.experts
    }

    /// Experts wanted, all visits together.
    pub fn uses(&self) -> u64 {
        self.wanted.len() as u64
    }

    /// The most experts that one visit wants, and so the fewest slots that hold a visit.
    pub fn widest(&self) -> usize {
        self.visits().map(|(_, wanted, _)| wanted.len()).max().unwrap_or(0)
    }

    /// The visits of one layer, as a trace of a model that has no other.
    pub fn layer(&self, layer: usize) -> Trace {
        let mut own = Trace::new(&self.experts[layer..=layer]);
        for (_, wanted, tokens) in self.visits().filter(|v| v.0 == layer) {
            own.push(0, wanted, tokens);
        }
        own
    }

    /// Each layer's first key, where experts are numbered through.
    fn first_keys(&self) -> Vec<usize> {
        let before = |all: &mut usize, n: &usize| Some(std::mem::replace(all, *all + n));
        self.experts.iter().scan(0, before).collect()
    }
}

/// What came of serving a trace.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Served {
    /// By tier, the fastest first: uses that it served. What has to be read is served by none.
    pub hits: Vec<u64>,
    /// Experts that had to be read.
    pub misses: u64,
    /// Experts that came to a faster tier.
    pub promotions: u64,
}

impl Served {
    /// Experts that were wanted.
    pub fn uses(&self) -> u64 {
        self.hits.iter().sum::<u64>() + self.misses
    }

    /// Shares of all uses, by who served them: each tier, the fastest first, and then the disk.
    pub fn shares(&self) -> Vec<f64> {
        let all = self.uses().max(1) as f64;
        self.hits.iter().chain([&self.misses]).map(|n| *n as f64 / all).collect()
    }

    /// What was served after `before`, which came of the beginning of the same trace.
    pub fn since(&self, before: &Served) -> Served {
        let hits = self.hits.iter().zip(&before.hits).map(|(all, before)| all - before).collect();
        Served { hits, misses: self.misses - before.misses, promotions: self.promotions - before.promotions }
    }
}

/// Experts that are promoted after each visit of a layer, at most: each is a copy, and what is demoted is another.
pub const MAX_PROMOTIONS: usize = 1;

/// Serves the trace from tiers of so many slots, the fastest first, that are empty at first. All experts of a visit are in slots together, and at most
/// `rises` of them then come to a faster tier.
///
/// # Panics
/// When the slots of the last tier are fewer than [`Trace::widest`] and pinned experts together.
pub fn serve(trace: &Trace, tiers: &[usize], rises: usize, policy: Policy, pinned: &[(usize, usize)]) -> Served {
    let mut residency = Residency::new(trace.experts(), tiers, policy, pinned);
    let mut held = Vec::with_capacity(trace.widest());
    let mut served = Served { hits: vec![0; tiers.len()], ..Served::default() };
    for (layer, wanted, tokens) in trace.visits() {
        // 1. those that are there
        residency.visit(layer, wanted, tokens);
        held.clear();
        for &expert in wanted {
            if let Some(slot) = residency.slot(layer, expert as usize) {
                residency.pin(slot);
                held.push(slot);
                served.hits[residency.tier(slot)] += 1;
            }
        }
        // 2. those that are to be read
        for &expert in wanted {
            if residency.slot(layer, expert as usize).is_none() {
                held.push(residency.allocate(layer, expert as usize).expect("slots for all experts of a visit"));
                served.misses += 1;
            }
        }
        held.iter().for_each(|slot| residency.unpin(*slot));
        // 3. those that are worth a better place
        for _ in 0..rises {
            let Some(promotion) = residency.promote() else { break };
            residency.finish_promotion(&promotion);
            served.promotions += 1;
        }
    }
    served
}

/// How many experts have to be read when one tier that is empty at first serves the trace.
///
/// # Panics
/// As [`serve`] does.
pub fn misses(trace: &Trace, slots: usize, policy: Policy, pinned: &[(usize, usize)]) -> u64 {
    serve(trace, &[slots], 0, policy, pinned).misses
}

/// The fewest misses that any policy could have: evict what is wanted last (L. A. Belady, 1966). The experts of a visit are in slots together.
///
/// # Panics
/// When the slots are fewer than [`Trace::widest`].
pub fn belady(trace: &Trace, slots: usize) -> u64 {
    const NEVER: usize = usize::MAX;
    assert!(slots >= trace.widest(), "slots for all experts of a visit");
    let first = trace.first_keys();
    let keys: usize = trace.experts.iter().sum();
    // 1. when each expert that is wanted will be wanted again
    let mut next = vec![NEVER; trace.wanted.len()];
    let mut next_of_key = vec![NEVER; keys];
    let mut to = trace.wanted.len();
    for (visit, &(layer, _)) in trace.visits.iter().enumerate().rev() {
        let from = visit.checked_sub(1).map_or(0, |v| trace.visits[v].1);
        for (expert, next) in trace.wanted[from..to].iter().zip(&mut next[from..to]) {
            *next = std::mem::replace(&mut next_of_key[first[layer] + *expert as usize], visit);
        }
        to = from;
    }
    // 2. what is in a slot, by when it is wanted next: the last in this order is evicted first. What the present visit wants is not in it
    let mut queue = std::collections::BTreeSet::new();
    let mut present = vec![None; keys];
    let (mut misses, mut from, mut there) = (0, 0, 0);
    for &(layer, to) in &trace.visits {
        let key = |expert: u32| first[layer] + expert as usize;
        for &expert in &trace.wanted[from..to] {
            match present[key(expert)] {
                Some(at) => assert!(queue.remove(&(at, key(expert)))),
                None => (misses, there) = (misses + 1, there + 1),
            }
        }
        while there > slots {
            let (_, gone) = queue.pop_last().expect("slots for all experts of a visit");
            present[gone] = None;
            there -= 1;
        }
        for (expert, next) in trace.wanted[from..to].iter().zip(&next[from..to]) {
            present[key(*expert)] = Some(*next);
            queue.insert((*next, key(*expert)));
        }
        from = to;
    }
    misses
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// One token each, layer after layer.
    fn trace(experts: &[usize], visits: &[&[u32]]) -> Trace {
        let mut trace = Trace::new(experts);
        for (i, wanted) in visits.iter().enumerate() {
            trace.push(i % experts.len(), wanted, &vec![1; wanted.len()]);
        }
        trace
    }

    #[test]
    fn hand_made_traces_have_known_misses() {
        // The textbook's: 7 0 1 2 0 3 0 4 2 3 0 3 2 1 2 0 1 7 0 1 with three frames is 9 for the optimum and 12 for LRU.
        let pages = [7, 0, 1, 2, 0, 3, 0, 4, 2, 3, 0, 3, 2, 1, 2, 0, 1, 7, 0, 1u32];
        let visits: Vec<[u32; 1]> = pages.map(|p| [p]).into();
        let textbook = trace(&[8], &visits.iter().map(|v| &v[..]).collect::<Vec<_>>());
        assert_eq!((textbook.uses(), textbook.widest()), (20, 1));
        assert_eq!(misses(&textbook, 3, Policy::Lru, &[]), 12);
        assert_eq!(belady(&textbook, 3), 9);
        // A scan of four through three slots: LRU never hits, the optimum misses every third time.
        let scan = trace(&[1; 4], &[&[0][..]; 40]);
        assert_eq!(misses(&scan, 3, Policy::Lru, &[]), 40);
        assert_eq!(belady(&scan, 3), 4 + 12);
        assert_eq!(misses(&scan, 4, Policy::Lru, &[]), 4);
    }

    #[test]
    fn experts_of_a_visit_are_there_together() {
        // Four slots, two experts at once: {0,1} {2,3} {4,5} {0,1}. At the third visit two of the first four go.
        let pairs = trace(&[6], &[&[0, 1], &[2, 3], &[4, 5], &[0, 1]]);
        assert_eq!(belady(&pairs, 4), 6);
        assert_eq!(misses(&pairs, 4, Policy::Lru, &[]), 8);
        // With no slot more than a visit needs, whatever comes new is read, and what stays is not.
        let overlapping = trace(&[6], &[&[0, 1], &[1, 2], &[2, 0], &[0, 1]]);
        for policy in Policy::ALL {
            assert_eq!(misses(&overlapping, 2, policy, &[]), 5);
        }
        assert_eq!(belady(&overlapping, 2), 5);
    }

    #[test]
    fn a_layer_alone_is_a_trace() {
        let both = trace(&[4, 4], &[&[0], &[1, 2], &[3], &[1, 3]]);
        let second = both.layer(1);
        assert_eq!(second.experts(), [4]);
        let visits: Vec<_> = second.visits().map(|(layer, wanted, _)| (layer, wanted.to_vec())).collect();
        assert_eq!(visits, [(0, vec![1, 2]), (0, vec![1, 3])]);
    }

    proptest! {
        #[test]
        fn no_policy_is_better_than_the_optimum(
            slots in 3usize..20,
            visits in proptest::collection::vec(proptest::collection::btree_set(0u32..8, 1..4), 1..120),
        ) {
            let visits: Vec<Vec<u32>> = visits.into_iter().map(Vec::from_iter).collect();
            let trace = trace(&[8, 8], &visits.iter().map(|v| &v[..]).collect::<Vec<_>>());
            let best = belady(&trace, slots);
            let distinct = trace.visits().flat_map(|(l, w, _)| w.iter().map(move |e| (l, *e))).collect::<std::collections::BTreeSet<_>>();
            prop_assert!(best >= distinct.len() as u64 && best <= trace.uses());
            prop_assert!(belady(&trace, slots + 1) <= best);
            for policy in Policy::ALL {
                let found = misses(&trace, slots, policy, &[]);
                prop_assert!(found >= best, "{policy:?}: {found} instead of {best}");
                prop_assert!(slots < distinct.len() || found == distinct.len() as u64, "{policy:?}");
            }
        }
    }
}
