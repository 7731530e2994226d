//! The caches of a model: a pool of blocks for each cache group, one of recurrent states, and what of them each sequence holds. All sequences draw
//! from the same pools, by need.

use crate::pool::BlockPool;
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

/// Which blocks and states are whose.
#[derive(Debug)]
pub struct KvCache {
    groups: Vec<(Group, BlockPool)>,
    /// Where the model has recurrent layers.
    states: Option<BlockPool>,
}

/// What one sequence holds.
#[derive(Debug, Default)]
pub struct Held {
    /// One for each cache group.
    pub tables: Vec<BlockTable>,
    /// Row of the pool of states.
    pub state: Option<u32>,
}

impl Held {
    /// Whether it holds nothing.
    pub fn is_empty(&self) -> bool {
        self.state.is_none() && self.tables.iter().all(|t| t.blocks().is_empty())
    }
}

/// Blocks or states are not free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoRoom;

impl KvCache {
    /// `states`: rows of the pool of states; 0 for a model without.
    pub fn new(groups: &[Group], states: usize) -> KvCache {
        KvCache {
            groups: groups.iter().map(|g| (*g, BlockPool::new(g.blocks))).collect(),
            states: (states > 0).then(|| BlockPool::new(states)),
        }
    }

    /// For a sequence that has nothing yet.
    pub fn hold(&self) -> Held {
        Held { tables: self.groups.iter().map(|_| BlockTable::default()).collect(), state: None }
    }

    /// A sequence will have so many tokens at most: growing to them allocates nothing.
    pub fn expect(&self, held: &mut Held, tokens: usize) {
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
    pub fn has_room(&self, held: &Held, tokens: usize) -> bool {
        let state = held.state.is_some() || self.states.as_ref().is_none_or(|s| s.free() > 0);
        let mut groups = held.tables.iter().zip(&self.groups);
        state && groups.all(|(table, (g, pool))| table.missing(tokens, g.block_tokens) <= pool.free())
    }

    /// Makes room for `tokens` positions and a state. The row of the state, if it is new: it holds what somebody left there.
    ///
    /// # Errors
    /// When there is no room; then nothing has changed.
    pub fn grow(&mut self, held: &mut Held, tokens: usize) -> Result<Option<u32>, NoRoom> {
        if !self.has_room(held, tokens) {
            return Err(NoRoom);
        }
        for (table, (g, pool)) in held.tables.iter_mut().zip(&mut self.groups) {
            table.grow(pool, tokens, g.block_tokens);
        }
        let Some(states) = self.states.as_mut().filter(|_| held.state.is_none()) else { return Ok(None) };
        held.state = states.allocate();
        Ok(held.state)
    }

    /// Gives back what lies beyond `tokens` positions. The state stays.
    pub fn shrink(&mut self, held: &mut Held, tokens: usize) {
        for (table, (g, pool)) in held.tables.iter_mut().zip(&mut self.groups) {
            table.shrink(pool, tokens, g.block_tokens);
        }
    }

    /// Gives everything back.
    pub fn release(&mut self, held: &mut Held) {
        self.shrink(held, 0);
        if let (Some(states), Some(row)) = (&mut self.states, held.state.take()) {
            states.release(row);
        }
    }

    /// Gives back what no query at position `next` or after it sees.
    pub fn drop_unseen(&mut self, held: &mut Held, next: usize) {
        for (table, (g, pool)) in held.tables.iter_mut().zip(&mut self.groups) {
            if let Some(window) = g.window {
                table.drop_before(pool, (next + 1).saturating_sub(window), g.block_tokens);
            }
        }
    }

    /// Whether all that a query at position `next` sees is there: not, where windows have moved beyond.
    pub fn can_go_on_at(&self, held: &Held, next: usize) -> bool {
        held.tables.iter().zip(&self.groups).all(|(table, (g, _))| {
            let first = g.window.map_or(0, |w| (next + 1).saturating_sub(w));
            table.has_from(first, g.block_tokens)
        })
    }

    /// Of each group, one above the highest block that was ever handed out.
    pub fn touched(&self) -> impl Iterator<Item = usize> {
        self.groups.iter().map(|(_, pool)| pool.touched())
    }

    /// Of each group, blocks that somebody holds.
    pub fn in_use(&self) -> impl Iterator<Item = usize> {
        self.groups.iter().map(|(_, pool)| pool.total() - pool.free())
    }

    /// States that somebody holds.
    pub fn states_in_use(&self) -> usize {
        self.states.as_ref().map_or(0, |s| s.total() - s.free())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn growing_is_all_or_nothing_over_groups_and_states() {
        let full = Group { block_tokens: 16, window: None, blocks: 4 };
        let windowed = Group { block_tokens: 16, window: Some(20), blocks: 3 };
        let mut cache = KvCache::new(&[full, windowed], 1);
        let (mut a, mut b) = (cache.hold(), cache.hold());
        assert_eq!(cache.grow(&mut a, 40), Ok(Some(0)));
        assert_eq!(cache.grow(&mut a, 41), Ok(None));
        assert_eq!(cache.grow(&mut b, 1), Err(NoRoom), "no state");
        assert!(b.is_empty());
        // The window's group is spent, until what it does not see is given back.
        assert_eq!(cache.grow(&mut a, 64), Err(NoRoom));
        assert_eq!(a.tables[0].held(), 3);
        cache.drop_unseen(&mut a, 48);
        assert_eq!(cache.grow(&mut a, 64), Ok(None));
        assert!(cache.can_go_on_at(&a, 48) && !cache.can_go_on_at(&a, 30));
        cache.release(&mut a);
        assert!(a.is_empty());
        assert_eq!((Vec::from_iter(cache.in_use()), cache.states_in_use()), (vec![0, 0], 0));
        assert_eq!(cache.grow(&mut b, 30), Ok(Some(0)));
    }

    #[test]
    fn a_window_needs_no_more_blocks_than_it_sees() {
        let windowed = Group { block_tokens: 16, window: Some(20), blocks: 4 };
        let cache = KvCache::new(&[windowed], 0);
        assert!(cache.could_hold(10_000, 8) && !cache.could_hold(10_000, 64));
        let full = KvCache::new(&[Group { window: None, ..windowed }], 0);
        assert!(full.could_hold(64, 64) && !full.could_hold(65, 1));
    }
}
