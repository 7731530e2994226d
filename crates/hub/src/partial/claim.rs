//! Consecutive blocks that only their holder fills.

use std::os::unix::fs::FileExt;
use std::sync::atomic::Ordering;

use super::asks::Urgency;
use super::blob::Partial;
use super::record::{ENTRY, HEADER};
use crate::error::{Naming, Result};

impl Partial {
    /// Takes the first blocks that are not there and that nobody fills, of at most `most` bytes.
    pub fn claim(&self, most: u64) -> Option<Claim<'_>> {
        (self.first_missing()..self.blocks.len()).find_map(|first| {
            let is_free = !self.is_whole(first) && !self.blocks[first].is_taken.load(Ordering::Acquire);
            is_free.then(|| Claim::take(self, first, usize::MAX, most, None))?
        })
    }

    /// The same of the blocks that were asked for so urgently.
    pub fn claim_asked(&self, urgency: Urgency, most: u64) -> Option<Claim<'_>> {
        let is_free = |block: usize| !self.is_whole(block) && !self.blocks[block].is_taken.load(Ordering::Acquire);
        loop {
            // Released before the claim, which may put blocks back when it is dropped.
            let asked = self.asks().first(urgency, is_free)?;
            let claim = Claim::take(self, asked.start, asked.end, most, Some(urgency));
            if claim.is_some() {
                return claim;
            }
        }
    }
}

/// Blocks that only their holder fills, from the first to the last.
#[derive(Debug)]
pub struct Claim<'a> {
    partial: &'a Partial,
    /// The block that is being filled.
    index: usize,
    /// One beyond the last.
    end: usize,
    /// How long the next claim may be.
    most: u64,
    urgency: Option<Urgency>,
}

impl<'a> Claim<'a> {
    /// Takes the block `first`, and those after it that are free and empty, before `end` and of at most `most` bytes in all. `None` if the first is not free.
    fn take(partial: &'a Partial, first: usize, end: usize, most: u64, urgency: Option<Urgency>) -> Option<Claim<'a>> {
        if !partial.take(first) {
            return None;
        }
        let count = (most / partial.block).max(1) as usize;
        let last = first.saturating_add(count).min(end).min(partial.blocks.len());
        // A block that was begun is continued by a request of its own.
        let is_empty = |block: &usize| partial.blocks[*block].written.load(Ordering::Acquire) == 0;
        let more = (first + 1..last).take_while(|block| is_empty(block) && partial.take(*block)).count();
        Some(Claim { partial, index: first, end: first + 1 + more, most, urgency })
    }

    /// Why it was taken; `None` for the next in order.
    pub fn urgency(&self) -> Option<Urgency> {
        self.urgency
    }

    /// Where in the blob its next byte belongs, and where it ends.
    pub fn range(&self) -> (u64, u64) {
        let (partial, last) = (self.partial, self.end - 1);
        let end = last as u64 * partial.block + partial.length(last);
        if self.index == self.end {
            return (end, end);
        }
        let written = partial.blocks[self.index].written.load(Ordering::Acquire);
        (self.index as u64 * partial.block + written, end)
    }

    /// Appends bytes: first the bytes, then the record of them.
    pub fn write(&mut self, bytes: &[u8]) -> Result<()> {
        let (mut at, end) = self.range();
        assert!(bytes.len() as u64 <= end - at, "more than was claimed");
        let partial = self.partial;
        partial.data.write_all_at(bytes, at).naming(&partial.path)?;
        let reached = at + bytes.len() as u64;
        while at < reached {
            let begin = self.index as u64 * partial.block;
            let written = (reached - begin).min(partial.length(self.index));
            let place = (HEADER + self.index * ENTRY) as u64;
            partial.record.write_all_at(&written.to_le_bytes(), place).naming(&partial.record_path)?;
            partial.blocks[self.index].written.store(written, Ordering::Release);
            partial.there.fetch_add(begin + written - at, Ordering::AcqRel);
            at = begin + written;
            if written == partial.length(self.index) {
                partial.release(self.index);
                self.index += 1;
            }
        }
        Ok(())
    }

    /// The blocks after these, for a response that goes on; `None` if another fills them or they are there.
    pub fn next(self) -> Option<Claim<'a>> {
        let (partial, first, most, urgency) = (self.partial, self.end, self.most, self.urgency);
        drop(self);
        (first < partial.blocks.len()).then(|| Claim::take(partial, first, usize::MAX, most, urgency))?
    }
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        (self.index..self.end).for_each(|block| self.partial.release(block));
        // Whoever waits for these blocks does not ask again.
        if self.index < self.end && self.urgency.is_some() {
            self.partial.asks().push_front(self.index..self.end);
        }
    }
}
