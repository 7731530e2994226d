//! The caches of a model: a pool of blocks for each cache group, a pool of recurrent states, and what each sequence
//! holds of them. All sequences draw from the same pools. `sharing` has what sequences share.

use crate::pool::BlockPool;
use crate::prefix::{NodeId, PrefixIndex};
use crate::second_tier::{EvictedNode, SecondTier};
use crate::table::BlockTable;

/// A cache group: layers whose keys and values are cached alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Group {
    /// Tokens per block.
    pub block_tokens: usize,
    /// A query sees only so many of the last positions; `None`: all.
    pub window: Option<usize>,
    /// Blocks in the pool.
    pub blocks: usize,
}

impl Group {
    /// The first position that a query at position `next` sees.
    pub(crate) fn first_seen(&self, next: usize) -> usize {
        self.window.map_or(0, |w| (next + 1).saturating_sub(w))
    }
}

/// How prefixes stay in memory for other sequences.
#[derive(Clone, Copy, Debug)]
pub struct PrefixOptions {
    /// The key of the hashes. Without it nobody can make two prompts with the same hash.
    pub key: [u8; 32],
    /// Recurrent states that are kept as snapshots, at most.
    pub snapshots: usize,
}

/// Which sequence has which blocks and states.
///
/// ```
/// use sluice_cache::{Group, KvCache};
///
/// let group = Group { block_tokens: 16, window: None, blocks: 4 };
/// let mut cache = KvCache::new(&[group], 0, None);
/// let mut sequence = cache.new_sequence();
/// cache.grow(&mut sequence, 20).unwrap();
/// assert_eq!(sequence.tables[0].blocks().len(), 2);
/// cache.release(&mut sequence);
/// assert_eq!(cache.free().next(), Some(4));
/// ```
#[derive(Debug)]
pub struct KvCache {
    pub(crate) groups: Vec<(Group, BlockPool)>,
    /// `None` for a model without recurrent layers.
    pub(crate) states: Option<BlockPool>,
    pub(crate) index: Option<PrefixIndex>,
    pub(crate) most_snapshots: usize,
    pub(crate) snapshots: usize,
    /// Blocks and states that were evicted from the index.
    pub(crate) evicted: Evicted,
    pub(crate) pending_ops: Vec<BlockOp>,
    /// The disk, if prefixes are offloaded to it: see [`KvCache::enable_offload`].
    pub(crate) second_tier: Option<SecondTier>,
}

/// How much was evicted from the index so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Evicted {
    /// Blocks of keys and values.
    pub blocks: u64,
    /// Recurrent states.
    pub snapshots: u64,
}

/// The blocks and the state of one sequence.
#[derive(Debug, Default)]
pub struct SequenceBlocks {
    /// One for each cache group.
    pub tables: Vec<BlockTable>,
    /// Row of the pool of states.
    pub state: Option<u32>,
    /// The last node of the index on the path of its tokens.
    pub(crate) node: Option<NodeId>,
    /// Tokens up to that node. Never more than were computed.
    pub(crate) indexed: usize,
    /// Whether what follows stays this sequence's own: other tokens have the hash of its next block.
    pub(crate) collided: bool,
}

impl SequenceBlocks {
    /// Whether it holds nothing.
    pub fn is_empty(&self) -> bool {
        self.state.is_none() && self.tables.iter().all(|t| t.blocks().is_empty())
    }
}

/// An operation that the backend has to do before the next step, in order. Blocks and states are given by number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockOp {
    /// Copies block `from` of a cache group to block `to`.
    CopyBlock {
        /// Number of the cache group.
        group: usize,
        /// What is copied.
        from: u32,
        /// Where it is copied to.
        to: u32,
    },
    /// Copies the state in row `from` to row `to`.
    CopyState {
        /// What is copied.
        from: u32,
        /// Where it is copied to.
        to: u32,
    },
    /// Fills the state in this row with zeros.
    ZeroState(u32),
    /// The evicted node with this number is about to be overwritten: its bytes can be copied out now.
    CopyOut(usize),
}

/// How much of a prompt was found in memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReusedPrefix {
    /// Tokens that need not be computed.
    pub tokens: usize,
    /// Tokens whose keys and values are there. This is more than `tokens` where no recurrent state is known so far on:
    /// a snapshot here would help the next prompt.
    pub known: usize,
}

/// There are not enough free blocks or states.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutOfBlocks;

impl KvCache {
    /// A cache with these groups. `states`: rows in the pool of states; 0 for a model without recurrent layers.
    ///
    /// # Panics
    /// When prefixes are kept and groups have blocks of different lengths.
    pub fn new(groups: &[Group], states: usize, prefixes: Option<PrefixOptions>) -> KvCache {
        let block_tokens = groups.first().map_or(32, |g| g.block_tokens);
        let index = prefixes.map(|p| {
            assert!(groups.iter().all(|g| g.block_tokens == block_tokens), "a node is a block of every group");
            // As many nodes as there are blocks, and a root.
            let nodes = groups.iter().map(|g| g.blocks).max().unwrap_or(0) + 1;
            PrefixIndex::new(block_tokens, groups.len(), nodes, p.key)
        });
        KvCache {
            groups: groups.iter().map(|g| (*g, BlockPool::new(g.blocks))).collect(),
            states: (states > 0).then(|| BlockPool::new(states)),
            index,
            most_snapshots: prefixes.map_or(0, |p| p.snapshots.min(states)),
            snapshots: 0,
            evicted: Evicted::default(),
            pending_ops: Vec::new(),
            second_tier: None,
        }
    }

    /// Hands out the operations that the backend has to do before the next step, in order, each with the list that
    /// [`BlockOp::CopyOut`] refers to.
    pub fn drain_ops(&mut self, mut each: impl FnMut(BlockOp, &[EvictedNode])) {
        let leaving: &mut Vec<EvictedNode> = match &mut self.second_tier {
            Some(elsewhere) => &mut elsewhere.evicted,
            None => &mut Vec::new(),
        };
        self.pending_ops.drain(..).for_each(|chore| each(chore, leaving));
        leaving.clear();
    }

    /// The empty tables of a new sequence.
    pub fn new_sequence(&self) -> SequenceBlocks {
        let tables = self.groups.iter().map(|_| BlockTable::default()).collect();
        SequenceBlocks { tables, ..SequenceBlocks::default() }
    }

    /// Reserves memory for the tables of a sequence of at most `tokens` tokens, so that growing to them allocates
    /// nothing.
    pub fn reserve_tables(&self, held: &mut SequenceBlocks, tokens: usize) {
        for (table, (g, _)) in held.tables.iter_mut().zip(&self.groups) {
            table.reserve(tokens.div_ceil(g.block_tokens));
        }
    }

    /// Whether a sequence of `tokens` tokens fits if it has the cache for itself, with at most `step` tokens in each
    /// step.
    pub fn fits_alone(&self, tokens: usize, step: usize) -> bool {
        self.groups.iter().all(|(g, _)| {
            let seen = g.window.map_or(tokens, |w| tokens.min(w + step + g.block_tokens));
            seen.div_ceil(g.block_tokens) <= g.blocks
        })
    }

    /// Whether [`KvCache::grow`] would succeed.
    pub fn can_grow(&self, held: &SequenceBlocks, tokens: usize) -> bool {
        let state = held.state.is_some() || self.states.as_ref().is_none_or(|s| s.free() + s.idle() > 0);
        let mut groups = held.tables.iter().zip(&self.groups);
        state && groups.all(|(table, (g, pool))| table.missing(tokens, g.block_tokens) <= pool.free() + pool.idle())
    }

    /// Whether there are blocks for `tokens` positions that hold nothing, so that [`KvCache::grow`] evicts nothing.
    pub fn has_free(&self, held: &SequenceBlocks, tokens: usize) -> bool {
        let mut groups = held.tables.iter().zip(&self.groups);
        groups.all(|(table, (g, pool))| table.missing(tokens, g.block_tokens) <= pool.free())
    }

    /// Gives a sequence blocks for `tokens` positions, and a zeroed state.
    ///
    /// # Errors
    /// When there is no room; then nothing has changed.
    pub fn grow(&mut self, held: &mut SequenceBlocks, tokens: usize) -> Result<(), OutOfBlocks> {
        if !self.can_grow(held, tokens) {
            return Err(OutOfBlocks);
        }
        for group in 0..self.groups.len() {
            let missing = held.tables[group].missing(tokens, self.groups[group].0.block_tokens);
            for _ in 0..missing {
                let block = self.allocate(group).expect("room was found");
                held.tables[group].push(block);
            }
        }
        if self.states.is_some() && held.state.is_none() {
            let row = self.allocate_state(None).expect("room was found");
            self.pending_ops.push(BlockOp::ZeroState(row));
            held.state = Some(row);
        }
        Ok(())
    }

    /// Gives back the blocks beyond `tokens` positions. The state stays.
    ///
    /// # Panics
    /// When others may know of what is given back: see [`KvCache::publish`]. They never know of more than was computed when that was called.
    pub fn shrink(&mut self, held: &mut SequenceBlocks, tokens: usize) {
        assert!(tokens >= held.indexed, "what others know of stays");
        self.cut(held, tokens);
    }

    fn cut(&mut self, held: &mut SequenceBlocks, tokens: usize) {
        for (table, (g, pool)) in held.tables.iter_mut().zip(&mut self.groups) {
            table.shrink(pool, tokens, g.block_tokens);
        }
    }

    /// Sets a sequence's state to that in row `from` of the backend's pool of states.
    ///
    /// # Panics
    /// When it has none.
    pub fn set_state(&mut self, held: &SequenceBlocks, from: u32) {
        let to = held.state.expect("a sequence with a state");
        self.pending_ops.push(BlockOp::CopyState { from, to });
    }

    /// Copies a row of the backend's pool of states. `to` is none of those that this cache hands out.
    pub fn copy_state(&mut self, from: u32, to: u32) {
        self.pending_ops.push(BlockOp::CopyState { from, to });
    }

    /// Gives back all blocks and the state.
    pub fn release(&mut self, held: &mut SequenceBlocks) {
        self.cut(held, 0);
        if let (Some(index), Some(node)) = (&mut self.index, held.node.take()) {
            index.unpin(node);
            self.tidy(node);
        }
        (held.indexed, held.collided) = (0, false);
        if let (Some(states), Some(row)) = (&mut self.states, held.state.take()) {
            states.release(row);
        }
    }

    /// Gives back blocks that no query at position `next` or after it sees.
    pub fn drop_before_window(&mut self, held: &mut SequenceBlocks, next: usize) {
        for (table, (g, pool)) in held.tables.iter_mut().zip(&mut self.groups) {
            if let Some(window) = g.window {
                table.drop_before(pool, (next + 1).saturating_sub(window), g.block_tokens);
            }
        }
    }

    /// Whether all that a query at position `next` sees is there. It is not where a window has moved beyond.
    pub fn can_resume_at(&self, held: &SequenceBlocks, next: usize) -> bool {
        held.tables.iter().zip(&self.groups).all(|(table, (g, _))| {
            let first = g.window.map_or(0, |w| (next + 1).saturating_sub(w));
            table.holds_from(first, g.block_tokens)
        })
    }

    /// By group: one above the highest block that was ever handed out.
    pub fn high_water(&self) -> impl Iterator<Item = usize> {
        self.groups.iter().map(|(_, pool)| pool.high_water())
    }

    /// By group: blocks that sequences hold.
    pub fn in_use(&self) -> impl Iterator<Item = usize> {
        self.groups.iter().map(|(_, pool)| pool.total() - pool.free() - pool.idle())
    }

    /// By group: all blocks.
    pub fn blocks(&self) -> impl Iterator<Item = usize> {
        self.groups.iter().map(|(_, pool)| pool.total())
    }

    /// By group: blocks of prefixes that no sequence holds.
    pub fn idle(&self) -> impl Iterator<Item = usize> {
        self.groups.iter().map(|(_, pool)| pool.idle())
    }

    /// By group: blocks that hold nothing.
    pub fn free(&self) -> impl Iterator<Item = usize> {
        self.groups.iter().map(|(_, pool)| pool.free())
    }

    /// States that hold nothing.
    pub fn free_states(&self) -> usize {
        self.states.as_ref().map_or(0, BlockPool::free)
    }

    /// States that sequences hold.
    pub fn states_in_use(&self) -> usize {
        self.states.as_ref().map_or(0, |s| s.total() - s.free()) - self.snapshots
    }

    /// Snapshots: states that are kept for prompts to come.
    pub fn snapshots(&self) -> usize {
        self.snapshots
    }

    /// Snapshots that are kept at most.
    pub fn most_snapshots(&self) -> usize {
        self.most_snapshots
    }

    /// How much was evicted from the index so far.
    pub fn evicted(&self) -> Evicted {
        self.evicted
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn growing_is_all_or_nothing_over_groups_and_states() {
        let full = Group { block_tokens: 16, window: None, blocks: 4 };
        let windowed = Group { block_tokens: 16, window: Some(20), blocks: 3 };
        let mut cache = KvCache::new(&[full, windowed], 1, None);
        let (mut a, mut b) = (cache.new_sequence(), cache.new_sequence());
        assert_eq!(cache.grow(&mut a, 40), Ok(()));
        assert_eq!(cache.grow(&mut a, 41), Ok(()));
        assert_eq!(cache.pending_ops, [BlockOp::ZeroState(0)]);
        assert_eq!(cache.grow(&mut b, 1), Err(OutOfBlocks), "no state");
        assert!(b.is_empty());
        // The window's group has no free block until the unseen ones are given back.
        assert_eq!(cache.grow(&mut a, 64), Err(OutOfBlocks));
        assert_eq!(a.tables[0].held(), 3);
        cache.drop_before_window(&mut a, 48);
        assert_eq!(cache.grow(&mut a, 64), Ok(()));
        assert!(cache.can_resume_at(&a, 48) && !cache.can_resume_at(&a, 30));
        cache.release(&mut a);
        assert!(a.is_empty());
        assert_eq!((Vec::from_iter(cache.in_use()), cache.states_in_use()), (vec![0, 0], 0));
        assert_eq!(cache.grow(&mut b, 30), Ok(()));
    }

    #[test]
    fn a_sequence_whose_block_has_the_hash_of_other_tokens_keeps_the_rest_to_itself_and_can_be_cut() {
        let group = Group { block_tokens: 4, window: None, blocks: 8 };
        let mut cache = KvCache::new(&[group], 0, Some(PrefixOptions { key: [7; 32], snapshots: 0 }));
        let (root, tokens) = (cache.root(b""), Vec::from_iter(0..14));
        // Something else has the hash of the second block.
        let index = cache.index.as_mut().unwrap();
        let first = index.hash(&root, &tokens[..4]);
        let second = index.hash(&first, &tokens[4..8]);
        index.root_node(second);
        let mut held = cache.new_sequence();
        cache.grow(&mut held, 14).unwrap();
        cache.publish(&mut held, root, &tokens, 10);
        assert!(held.collided && held.indexed == 4);
        // Drafted tokens that did not come are cut, again and again.
        for computed in [10, 12, 11, 13] {
            cache.grow(&mut held, 14).unwrap();
            cache.shrink(&mut held, computed);
            cache.publish(&mut held, root, &tokens, computed);
            assert_eq!((held.indexed, held.tables[0].held()), (4, computed.div_ceil(4)));
        }
        assert!(!cache.snapshot(&mut held, root, &tokens, 13));
        cache.retire(&mut held, root, &tokens, 13);
        assert!(held.is_empty() && !held.collided);
        // What was published before is found, and nothing behind it.
        assert_eq!(cache.would_reuse(root, &tokens, 13), 4);
        assert_eq!(cache.in_use().next(), Some(0));
    }

    #[test]
    fn a_window_needs_no_more_blocks_than_it_sees() {
        let windowed = Group { block_tokens: 16, window: Some(20), blocks: 4 };
        let cache = KvCache::new(&[windowed], 0, None);
        assert!(cache.fits_alone(10_000, 8) && !cache.fits_alone(10_000, 64));
        let full = KvCache::new(&[Group { window: None, ..windowed }], 0, None);
        assert!(full.fits_alone(64, 64) && !full.fits_alone(65, 1));
    }
}
