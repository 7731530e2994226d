//! The caches of a model: a pool of blocks for each cache group, one of recurrent states, and what of them each sequence holds. All sequences draw
//! from the same pools, by need; what they share is in `sharing.rs`.

use crate::pool::BlockPool;
use crate::prefix::{NodeId, PrefixIndex};
use crate::second_tier::{EvictedNode, SecondTier};
use crate::table::BlockTable;

/// A cache group: layers whose keys and values are cached alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Group {
    /// Tokens per block.
    pub block_tokens: usize,
    /// Only the last so many positions are seen.
    pub window: Option<usize>,
    /// Blocks of the pool.
    pub blocks: usize,
}

impl Group {
    /// The first position that a query at position `next` sees.
    pub(crate) fn first_seen(&self, next: usize) -> usize {
        self.window.map_or(0, |w| (next + 1).saturating_sub(w))
    }
}

/// Whether and how prefixes stay in memory for others.
#[derive(Clone, Copy, Debug)]
pub struct Prefixes {
    /// Of the hashes: nobody who does not know it can make two prompts that share one.
    pub key: [u8; 32],
    /// Recurrent states that are kept at most, of those that there are.
    pub snapshots: usize,
}

/// Which blocks and states are whose.
#[derive(Debug)]
pub struct KvCache {
    pub(crate) groups: Vec<(Group, BlockPool)>,
    /// Where the model has recurrent layers.
    pub(crate) states: Option<BlockPool>,
    pub(crate) index: Option<PrefixIndex>,
    pub(crate) most_snapshots: usize,
    pub(crate) snapshots: usize,
    /// Blocks and states that the index gave up.
    pub(crate) evicted: Evicted,
    pub(crate) chores: Vec<BlockOp>,
    /// What goes and is to be kept elsewhere: see [`KvCache::keep_elsewhere`].
    pub(crate) elsewhere: Option<SecondTier>,
}

/// How many the index gave up, so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Evicted {
    pub blocks: u64,
    pub snapshots: u64,
}

/// What one sequence holds.
#[derive(Debug, Default)]
pub struct SequenceBlocks {
    /// One for each cache group.
    pub tables: Vec<BlockTable>,
    /// Row of the pool of states.
    pub state: Option<u32>,
    /// The last node of the index that its tokens go through, and how many of them lead there.
    pub(crate) node: Option<NodeId>,
    pub(crate) indexed: usize,
}

impl SequenceBlocks {
    /// Whether it holds nothing.
    pub fn is_empty(&self) -> bool {
        self.state.is_none() && self.tables.iter().all(|t| t.blocks().is_empty())
    }
}

/// What a backend has to do before the next step, in order: blocks and states by number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockOp {
    /// Block `to` of a cache group becomes what `from` is.
    CopyBlock {
        group: usize,
        from: u32,
        to: u32,
    },
    CopyState {
        from: u32,
        to: u32,
    },
    ZeroState(u32),
    /// What has this number among what is leaving is about to be overwritten: its bytes can be copied out now.
    CopyOut(usize),
}

/// What of a prompt was there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReusedPrefix {
    /// Tokens that need not be computed.
    pub tokens: usize,
    /// Tokens whose keys and values are there: more, where a recurrent state is not known so far on. A snapshot at this place would help the next.
    pub known: usize,
}

/// Blocks or states are not free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoRoom;

impl KvCache {
    /// `states`: rows of the pool of states; 0 for a model without.
    ///
    /// # Panics
    /// When prefixes are kept and groups have blocks of different lengths.
    pub fn new(groups: &[Group], states: usize, prefixes: Option<Prefixes>) -> KvCache {
        let block_tokens = groups.first().map_or(32, |g| g.block_tokens);
        let index = prefixes.map(|p| {
            assert!(groups.iter().all(|g| g.block_tokens == block_tokens), "a node is a block of every group");
            // As many as there are blocks, and roots.
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
            chores: Vec::new(),
            elsewhere: None,
        }
    }

    /// What the backend has to do before the next step, in order, and what [`Chore::CopyOut`] speaks of by number.
    pub fn carry_out(&mut self, mut each: impl FnMut(BlockOp, &[EvictedNode])) {
        let leaving: &mut Vec<EvictedNode> = match &mut self.elsewhere {
            Some(elsewhere) => &mut elsewhere.leaving,
            None => &mut Vec::new(),
        };
        self.chores.drain(..).for_each(|chore| each(chore, leaving));
        leaving.clear();
    }

    /// For a sequence that has nothing yet.
    pub fn hold(&self) -> SequenceBlocks {
        let tables = self.groups.iter().map(|_| BlockTable::default()).collect();
        SequenceBlocks { tables, ..SequenceBlocks::default() }
    }

    /// A sequence will have so many tokens at most: growing to them allocates nothing.
    pub fn expect(&self, held: &mut SequenceBlocks, tokens: usize) {
        for (table, (g, _)) in held.tables.iter_mut().zip(&self.groups) {
            table.reserve(tokens.div_ceil(g.block_tokens));
        }
    }

    /// Whether a sequence of so many tokens would have room if it had the cache for itself, taking at most `step` tokens at once.
    pub fn could_hold(&self, tokens: usize, step: usize) -> bool {
        self.groups.iter().all(|(g, _)| {
            let seen = g.window.map_or(tokens, |w| tokens.min(w + step + g.block_tokens));
            seen.div_ceil(g.block_tokens) <= g.blocks
        })
    }

    /// Whether [`KvCache::grow`] would find room.
    pub fn has_room(&self, held: &SequenceBlocks, tokens: usize) -> bool {
        let state = held.state.is_some() || self.states.as_ref().is_none_or(|s| s.free() + s.idle() > 0);
        let mut groups = held.tables.iter().zip(&self.groups);
        state && groups.all(|(table, (g, pool))| table.missing(tokens, g.block_tokens) <= pool.free() + pool.idle())
    }

    /// Makes room for `tokens` positions and a zeroed state.
    ///
    /// # Errors
    /// When there is no room; then nothing has changed.
    pub fn grow(&mut self, held: &mut SequenceBlocks, tokens: usize) -> Result<(), NoRoom> {
        if !self.has_room(held, tokens) {
            return Err(NoRoom);
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
            self.chores.push(BlockOp::ZeroState(row));
            held.state = Some(row);
        }
        Ok(())
    }

    /// Gives back what lies beyond `tokens` positions. The state stays.
    ///
    /// # Panics
    /// When others may know of what is given back: see [`KvCache::publish`].
    pub fn shrink(&mut self, held: &mut SequenceBlocks, tokens: usize) {
        assert!(tokens >= held.indexed, "what others know of stays");
        self.cut(held, tokens);
    }

    fn cut(&mut self, held: &mut SequenceBlocks, tokens: usize) {
        for (table, (g, pool)) in held.tables.iter_mut().zip(&mut self.groups) {
            table.shrink(pool, tokens, g.block_tokens);
        }
    }

    /// Gives everything back.
    pub fn release(&mut self, held: &mut SequenceBlocks) {
        self.cut(held, 0);
        if let (Some(index), Some(node)) = (&mut self.index, held.node.take()) {
            index.let_go(node);
            self.tidy(node);
        }
        held.indexed = 0;
        if let (Some(states), Some(row)) = (&mut self.states, held.state.take()) {
            states.release(row);
        }
    }

    /// Gives back what no query at position `next` or after it sees.
    pub fn drop_unseen(&mut self, held: &mut SequenceBlocks, next: usize) {
        for (table, (g, pool)) in held.tables.iter_mut().zip(&mut self.groups) {
            if let Some(window) = g.window {
                table.drop_before(pool, (next + 1).saturating_sub(window), g.block_tokens);
            }
        }
    }

    /// Whether all that a query at position `next` sees is there: not, where windows have moved beyond.
    pub fn can_go_on_at(&self, held: &SequenceBlocks, next: usize) -> bool {
        held.tables.iter().zip(&self.groups).all(|(table, (g, _))| {
            let first = g.window.map_or(0, |w| (next + 1).saturating_sub(w));
            table.has_from(first, g.block_tokens)
        })
    }

    /// Of each group, one above the highest block that was ever handed out.
    pub fn touched(&self) -> impl Iterator<Item = usize> {
        self.groups.iter().map(|(_, pool)| pool.touched())
    }

    /// Of each group, blocks that sequences hold.
    pub fn in_use(&self) -> impl Iterator<Item = usize> {
        self.groups.iter().map(|(_, pool)| pool.total() - pool.free() - pool.idle())
    }

    /// Of each group, all blocks.
    pub fn blocks(&self) -> impl Iterator<Item = usize> {
        self.groups.iter().map(|(_, pool)| pool.total())
    }

    /// Of each group, blocks that are kept for prompts to come and that nobody holds.
    pub fn idle(&self) -> impl Iterator<Item = usize> {
        self.groups.iter().map(|(_, pool)| pool.idle())
    }

    /// Of each group, blocks that hold nothing.
    pub fn free(&self) -> impl Iterator<Item = usize> {
        self.groups.iter().map(|(_, pool)| pool.free())
    }

    /// Rows for states that hold nothing.
    pub fn free_states(&self) -> usize {
        self.states.as_ref().map_or(0, BlockPool::free)
    }

    /// States that sequences hold.
    pub fn states_in_use(&self) -> usize {
        self.states.as_ref().map_or(0, |s| s.total() - s.free()) - self.snapshots
    }

    /// States that are kept for prompts to come.
    pub fn snapshots(&self) -> usize {
        self.snapshots
    }

    /// States that are kept for prompts to come at most.
    pub fn most_snapshots(&self) -> usize {
        self.most_snapshots
    }

    /// What the index gave up so far.
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
        let (mut a, mut b) = (cache.hold(), cache.hold());
        assert_eq!(cache.grow(&mut a, 40), Ok(()));
        assert_eq!(cache.grow(&mut a, 41), Ok(()));
        assert_eq!(cache.chores, [BlockOp::ZeroState(0)]);
        assert_eq!(cache.grow(&mut b, 1), Err(NoRoom), "no state");
        assert!(b.is_empty());
        // The window's group is spent, until what it does not see is given back.
        assert_eq!(cache.grow(&mut a, 64), Err(NoRoom));
        assert_eq!(a.tables[0].held(), 3);
        cache.drop_unseen(&mut a, 48);
        assert_eq!(cache.grow(&mut a, 64), Ok(()));
        assert!(cache.can_go_on_at(&a, 48) && !cache.can_go_on_at(&a, 30));
        cache.release(&mut a);
        assert!(a.is_empty());
        assert_eq!((Vec::from_iter(cache.in_use()), cache.states_in_use()), (vec![0, 0], 0));
        assert_eq!(cache.grow(&mut b, 30), Ok(()));
    }

    #[test]
    fn a_window_needs_no_more_blocks_than_it_sees() {
        let windowed = Group { block_tokens: 16, window: Some(20), blocks: 4 };
        let cache = KvCache::new(&[windowed], 0, None);
        assert!(cache.could_hold(10_000, 8) && !cache.could_hold(10_000, 64));
        let full = KvCache::new(&[Group { window: None, ..windowed }], 0, None);
        assert!(full.could_hold(64, 64) && !full.could_hold(65, 1));
    }
}
