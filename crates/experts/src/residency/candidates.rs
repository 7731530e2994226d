//! The experts of a layer that may be evicted, by score.

use std::cmp::Ordering;
use std::collections::BinaryHeap;

use crate::policy::Key;

/// An expert that may be evicted. The one with the least score is the greatest candidate, so that it is on top of a heap.
#[derive(Clone, Copy, Debug)]
pub(super) struct Candidate {
    pub score: f64,
    pub key: Key,
}

impl Ord for Candidate {
    fn cmp(&self, other: &Candidate) -> Ordering {
        other.score.total_cmp(&self.score).then(other.key.cmp(&self.key))
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

/// The experts of one layer that may be evicted from the last tier.
#[derive(Debug)]
pub(super) struct Candidates {
    /// Every expert of the layer that has a slot there and is neither pinned, permanent nor wanted at the present visit. Some may have become so since: they
    /// are dropped when they come to the top, and listed again when they are unpinned.
    pub heap: BinaryHeap<Candidate>,
    /// The heap is out of date and has to be rebuilt.
    pub stale: bool,
    /// How many visits away the layer's next one was when the heap was built.
    pub built_at: u32,
}

impl Candidates {
    /// A stale heap with room for so many experts.
    pub fn with_capacity(experts: usize) -> Candidates {
        Candidates { heap: BinaryHeap::with_capacity(experts), stale: true, built_at: 0 }
    }

    /// The heap's memory, empty.
    pub fn take_list(&mut self) -> Vec<Candidate> {
        let mut list = std::mem::take(&mut self.heap).into_vec();
        list.clear();
        list
    }

    /// A heap that is up to date at this distance from the layer's next visit.
    pub fn from_list(list: Vec<Candidate>, distance: u32) -> Candidates {
        Candidates { heap: BinaryHeap::from(list), stale: false, built_at: distance }
    }
}
