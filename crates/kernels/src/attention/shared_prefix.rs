//! Finds runs of query tokens that have a partition in the same blocks, so that it is read once for all of them.
//!
//! Sequences with a common prefix share blocks. Block tables show it: equal numbers are equal bytes. Only a partition that is wholly before a
//! run's first token is read together with others, so that all of them see it to its end.

use std::ops::Range;

use super::head::{Head, Run};
use super::paged::PARTITION;

/// The most runs that read the cache together.
pub const RUNS: usize = 64;

/// Not a leader: the run sees nothing of the partition.
const NONE: u8 = u8::MAX;

/// The runs that read a partition together, for ascending partitions. A run that reads a partition alone which others also see reads all later ones
/// alone: diverged prefixes do not converge again.
#[derive(Clone)]
pub struct SharedPrefix {
    /// For each run, the first of the runs that read the partition with it. Its table gives the blocks.
    leader: [u8; RUNS],
    parted: [bool; RUNS],
}

impl Default for SharedPrefix {
    fn default() -> SharedPrefix {
        SharedPrefix { leader: [NONE; RUNS], parted: [false; RUNS] }
    }
}

impl SharedPrefix {
    /// Looks at partition `p`.
    pub fn find(&mut self, head: &Head, runs: &[Run], p: usize) {
        assert!(runs.len() <= RUNS, "{} runs at once", runs.len());
        if let [run] = runs {
            self.leader[0] = if head.seen(run.position, run.last(), p).is_empty() { NONE } else { 0 };
            return;
        }
        let shareable = |parted: &[bool; RUNS], i: usize| !parted[i] && is_before(p, &runs[i]);
        let mut able = 0;
        let mut followers = [0u8; RUNS];
        for i in 0..runs.len() {
            self.leader[i] = NONE;
            if head.seen(runs[i].position, runs[i].last(), p).is_empty() {
                continue;
            }
            self.leader[i] = i as u8;
            if !shareable(&self.parted, i) {
                continue;
            }
            able += 1;
            let leads = |j: usize| usize::from(self.leader[j]) == j && shareable(&self.parted, j);
            if let Some(j) = (0..i).find(|j| leads(*j) && alike(head, &runs[*j], &runs[i], p)) {
                self.leader[i] = j as u8;
                followers[j] += 1;
            }
        }
        for i in 0..runs.len() {
            if able > 1 && usize::from(self.leader[i]) == i && followers[i] == 0 && is_before(p, &runs[i]) {
                self.parted[i] = true;
            }
        }
    }

    /// The first ones of those of `runs` runs that read the partition together.
    pub fn leaders(&self, runs: usize) -> impl Iterator<Item = usize> + use<'_> {
        (0..runs).filter(|i| usize::from(self.leader[*i]) == *i)
    }

    /// Whether a run reads the partition through the leader's table.
    pub fn follows(&self, run: usize, leader: usize) -> bool {
        usize::from(self.leader[run]) == leader
    }
}

/// Whether a partition ends before a run's first token.
fn is_before(p: usize, run: &Run) -> bool {
    (p + 1) * PARTITION <= run.position
}

/// Whether `run` finds in `leader`'s blocks all that it sees of partition `p`.
pub(super) fn alike(head: &Head, leader: &Run, run: &Run, p: usize) -> bool {
    let seen = |run: &Run| head.seen(run.position, run.last(), p);
    let (own, led) = (seen(run), seen(leader));
    let within = led.start <= own.start && own.end <= led.end;
    within && is_before(p, leader) && is_before(p, run) && same_blocks(head, leader, run, p, own)
}

fn same_blocks(head: &Head, a: &Run, b: &Run, p: usize, seen: Range<usize>) -> bool {
    let (base, block) = (p * PARTITION, head.kv.shape.entry_tokens());
    let blocks = (base + seen.start) / block..(base + seen.end - 1) / block + 1;
    a.table[blocks.clone()] == b.table[blocks]
}

/// Whether two runs find the first partition that both of them see in the same blocks, and so may have more in common.
pub fn begin_alike(head: &Head, a: &Run, b: &Run) -> bool {
    let p = (head.first_visible(a.position) / PARTITION).max(head.first_visible(b.position) / PARTITION);
    if !is_before(p, a) || !is_before(p, b) {
        return false;
    }
    let [a_seen, b_seen] = [a, b].map(|run| head.seen(run.position, run.last(), p));
    same_blocks(head, a, b, p, a_seen.start.max(b_seen.start)..PARTITION)
}
