//! Parts of a blob that somebody wants before the rest.

use std::collections::VecDeque;
use std::ops::Range;

/// How much a part is wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Urgency {
    /// Somebody waits for it.
    Now,
    /// Somebody will, after what was asked for before it.
    Soon,
}

/// Blocks that were asked for, by urgency and in order.
#[derive(Debug, Default)]
pub(super) struct Asks {
    now: VecDeque<Range<usize>>,
    soon: VecDeque<Range<usize>>,
}

impl Asks {
    fn queue(&mut self, urgency: Urgency) -> &mut VecDeque<Range<usize>> {
        match urgency {
            Urgency::Now => &mut self.now,
            Urgency::Soon => &mut self.soon,
        }
    }

    /// Asks for blocks. Those that follow what was asked for last become one request with it.
    pub fn push(&mut self, blocks: Range<usize>, urgency: Urgency) {
        let queue = self.queue(urgency);
        match queue.back_mut() {
            Some(last) if last.start <= blocks.start && blocks.start <= last.end => last.end = last.end.max(blocks.end),
            _ => queue.push_back(blocks),
        }
    }

    /// Asks again, before all else, for what broke off.
    pub fn push_front(&mut self, blocks: Range<usize>) {
        self.now.push_front(blocks);
    }

    /// The first block that is free, and the end of the blocks that were asked for with it. What is in work or whole is forgotten.
    pub fn first(&mut self, urgency: Urgency, is_free: impl Fn(usize) -> bool) -> Option<Range<usize>> {
        let queue = self.queue(urgency);
        while let Some(blocks) = queue.front_mut() {
            match blocks.clone().find(|block| is_free(*block)) {
                Some(block) => {
                    blocks.start = block;
                    return Some(blocks.clone());
                }
                None => drop(queue.pop_front()),
            }
        }
        None
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        self.now.clear();
        self.soon.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_are_one_request_and_what_is_in_work_is_forgotten() {
        let mut asks = Asks::default();
        asks.push(4..6, Urgency::Soon);
        asks.push(6..9, Urgency::Soon);
        asks.push(5..7, Urgency::Soon);
        asks.push(0..2, Urgency::Soon);
        assert_eq!(asks.first(Urgency::Now, |_| true), None);
        assert_eq!(asks.first(Urgency::Soon, |_| true), Some(4..9));
        assert_eq!(asks.first(Urgency::Soon, |block| block > 6), Some(7..9));
        assert_eq!(asks.first(Urgency::Soon, |block| block == 1), Some(1..2));
        assert_eq!(asks.first(Urgency::Soon, |_| false), None);
        asks.push(3..4, Urgency::Now);
        asks.push_front(8..9);
        assert_eq!(asks.first(Urgency::Now, |_| true), Some(8..9));
    }
}
