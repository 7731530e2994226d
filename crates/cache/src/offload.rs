//! What of the prefix tree is kept elsewhere, on disk, and comes back from there: which nodes are worth it, what is copied out before it goes, and the blocks
//! that a sequence sets aside for what is read. Bookkeeping by number: whoever asks moves the bytes.

use std::collections::{HashSet, VecDeque};

use crate::kv_cache::{BlockOp, KvCache, SequenceBlocks};
use crate::prefix::{BlockHash, NodeId};
use crate::second_tier::{EvictedNode, SecondTier};
use crate::table::GONE;

/// What of a prompt is in memory, by whole block.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Present {
    /// Of each node a bit for each group whose block is there.
    pub groups: Vec<u64>,
    /// So many tokens can be taken up from memory alone.
    pub usable: usize,
}

/// What is in memory of a conversation, and worth being kept elsewhere.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Kept {
    /// From the beginning to its end, or to the newest state.
    pub path: Vec<BlockHash>,
    pub tokens: usize,
    /// Where the state before the newest is, if that is no part of the path.
    pub beside: Option<BlockHash>,
}

/// A prefix that a sequence is to have, part of it from elsewhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// Whole blocks.
    pub whole: usize,
    /// Tokens behind them, fewer than a block; with recurrent layers the state at their end is wanted.
    pub tail: usize,
}

/// What is to be filled before a sequence may go on: number of the node on its path, and its block or the row of its state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RestoreTarget {
    Block { node: usize, group: usize, block: u32 },
    State { node: usize, row: u32 },
}

impl KvCache {
    /// From now on what goes is worth being copied out ([`Chore::CopyOut`]), where it belongs to a prefix of at least `fewest` tokens.
    pub fn keep_elsewhere(&mut self, fewest: usize) {
        self.elsewhere = Some(SecondTier { fewest, leaving: Vec::new(), used: VecDeque::new() });
    }

    /// The first position that a query at `next` sees, of each group.
    pub fn first_seen(&self, next: usize) -> impl Iterator<Item = usize> {
        self.groups.iter().map(move |(group, _)| group.first_seen(next))
    }

    /// Whether a node has something that is worth keeping elsewhere and is not there yet.
    fn is_worth(&self, id: NodeId) -> bool {
        let (Some(elsewhere), Some(index)) = (&self.elsewhere, &self.index) else { return false };
        let (node, blocks, len) = (index.node(id), index.blocks(id), index.tokens(id).len());
        let reaches = node.position as usize + len >= elsewhere.fewest || node.leads;
        // A part of a block is of use with its state, or where a conversation goes on; a full layer's block is needed by all that follows.
        let whole = index.is_whole(id) || node.state.is_some() || node.ends;
        let there = self.groups.iter().zip(blocks).all(|((group, _), b)| *b != GONE || group.window.is_some());
        let new = !node.stored || node.state.is_some() && !node.state_stored;
        len > 0 && reaches && whole && there && new && blocks.iter().any(|b| *b != GONE)
    }

    /// What is to be copied of a node, which counts as stored from now on.
    fn leave(&mut self, id: NodeId) -> EvictedNode {
        let index = self.index.as_mut().expect("a node is in it");
        let parent = index.parent(id).expect("roots have no tokens");
        index.node_mut(parent).leads = true;
        let before = index.node(parent).hash;
        let node = index.node_mut(id);
        (node.stored, node.state_stored) = (true, node.state.is_some());
        let (hash, position, state) = (node.hash, node.position, node.state);
        let blocks = index.blocks(id).iter().map(|b| Some(*b).filter(|b| *b != GONE)).collect();
        EvictedNode { hash, before, position, tokens: index.tokens(id).to_vec(), blocks, state }
    }

    /// A node is about to lose a block or its state.
    pub(crate) fn copy_out(&mut self, id: NodeId) {
        if self.is_worth(id) {
            let leaving = self.leave(id);
            let elsewhere = self.elsewhere.as_mut().expect("it was worth it");
            self.chores.push(BlockOp::CopyOut(elsewhere.leaving.len()));
            elsewhere.leaving.push(leaving);
        }
    }

    /// A sequence goes on from a node: it and all before it were used once more.
    pub(crate) fn note_use(&mut self, id: NodeId) {
        let (Some(elsewhere), Some(index)) = (&mut self.elsewhere, &mut self.index) else { return };
        let (mut at, mut new) = (id, Vec::new());
        let reaches = index.node(id).position as usize + index.tokens(id).len() >= elsewhere.fewest;
        while let Some(parent) = index.parent(at) {
            let node = index.node_mut(at);
            node.leads |= reaches;
            if !std::mem::replace(&mut node.used, true) {
                new.push(node.hash);
            }
            at = parent;
        }
        // What comes first is needed by what follows.
        if elsewhere.used.len() < MOST_USED {
            elsewhere.used.extend(new.into_iter().rev());
        }
    }

    /// The next of what was used again and is not kept elsewhere yet; from now on it counts as kept.
    pub fn next_used(&mut self) -> Option<EvictedNode> {
        loop {
            let hash = self.elsewhere.as_mut()?.used.pop_front()?;
            let id = self.index.as_ref()?.by_hash(&hash);
            if let Some(id) = id.filter(|id| self.is_worth(*id)) {
                return Some(self.leave(id));
            }
        }
    }

    /// The node with this hash, if it is to be kept elsewhere; from now on it counts as kept.
    pub fn leave_by_hash(&mut self, hash: &BlockHash) -> Option<EvictedNode> {
        let id = self.index.as_ref()?.by_hash(hash).filter(|id| self.is_worth(*id))?;
        Some(self.leave(id))
    }

    /// A node that was to be kept elsewhere is not, or no longer.
    pub fn not_kept(&mut self, hash: &BlockHash) {
        if let Some(index) = &mut self.index
            && let Some(id) = index.by_hash(hash)
        {
            let node = index.node_mut(id);
            (node.stored, node.state_stored) = (false, false);
        }
    }

    /// What of all conversations is to be kept elsewhere and is not there yet, those used last first and each from its beginning: their blocks; with recurrent
    /// layers, the blocks up to the newest state of each and its two newest states. `ends`: also the part of a block that a conversation ends with, which costs
    /// as much as a block and is of no use any more once it has gone on.
    pub fn unsaved(&mut self, ends: bool) -> Vec<BlockHash> {
        // With recurrent layers it is the state that counts.
        let ends = ends && self.states.is_none();
        let all: Vec<NodeId> = self.conversations(ends);
        let Some(index) = &mut self.index else { return Vec::new() };
        for id in all.iter().copied() {
            // Short beginnings too: what follows them is to be kept.
            index.node_mut(id).leads = true;
            index.node_mut(id).ends |= ends && !index.is_whole(id);
        }
        let mut once = HashSet::new();
        let new = all.into_iter().filter(|id| once.insert(id.number()) && self.is_worth(*id));
        new.filter_map(|id| Some(self.index.as_ref()?.node(id).hash)).collect()
    }

    /// The nodes of all conversations that are worth keeping, from the one that was used last.
    fn conversations(&self, ends: bool) -> Vec<NodeId> {
        let (Some(index), Some(elsewhere)) = (&self.index, &self.elsewhere) else { return Vec::new() };
        let mut all = Vec::new();
        let mut seen = HashSet::new();
        let block_tokens = index.block_tokens();
        let is_whole = |id: NodeId| index.is_whole(id);
        for leaf in index.by_youth() {
            // 1. Where a conversation ends: a block that no whole one follows, or a part of the first one
            let parent = index.parent(leaf).expect("roots are not among those that are used");
            let end = match is_whole(leaf) {
                true => leaf,
                false if index.parent(parent).is_none() => leaf,
                false => parent,
            };
            if index.children(end).any(is_whole) || !seen.insert(end.number()) {
                continue;
            }
            let reach = |id: &NodeId| index.node(*id).position as usize + index.tokens(*id).len();
            if self.states.is_none() && reach(&end) < elsewhere.fewest {
                continue;
            }
            // 2. Its path, from the end; without states only what no other conversation has begun with
            let mut path = vec![end];
            while let Some(before) = index.parent(path[path.len() - 1]).filter(|id| index.parent(*id).is_some()) {
                if self.states.is_none() && !seen.insert(before.number()) {
                    break;
                }
                path.push(before);
            }
            // 3. Which of it
            let mut chosen = Vec::new();
            if self.states.is_none() {
                chosen.extend(path.iter().rev());
                // The last one that was computed comes first.
                chosen.extend(index.children(end).next().filter(|_| ends));
            } else {
                let mut states: Vec<NodeId> = Vec::new();
                let mut after: &[u32] = &[];
                for (i, at) in path.iter().enumerate() {
                    let mut ends: Vec<NodeId> = match is_whole(*at) {
                        true => index.children(*at).filter(|c| !is_whole(*c)).collect(),
                        false => Vec::new(),
                    };
                    ends.retain(|c| i == 0 || after.starts_with(index.tokens(*c)));
                    ends.sort_unstable_by_key(|c| std::cmp::Reverse(index.tokens(*c).len()));
                    ends.push(*at);
                    states.extend(ends.into_iter().filter(|c| index.node(*c).state.is_some()));
                    if states.len() >= NEWEST {
                        break;
                    }
                    after = index.tokens(*at);
                }
                states.truncate(NEWEST);
                let Some(newest) = states.first() else { continue };
                let to = index.node(*newest).position as usize + index.tokens(*newest).len();
                let ends_within =
                    |id: &&NodeId| is_whole(**id) && index.node(**id).position as usize + block_tokens <= to;
                chosen.extend(path.iter().rev().filter(ends_within));
                chosen.extend(states.iter().rev().filter(|id| !is_whole(**id)));
            }
            if chosen.last().is_some_and(|last| reach(last) >= elsewhere.fewest) {
                all.extend(chosen);
            }
        }
        all
    }

    /// What is kept elsewhere of a sequence's path, and states on it, the last one first.
    pub fn kept_of(&self, held: &SequenceBlocks) -> Vec<BlockHash> {
        let Some(index) = &self.index else { return Vec::new() };
        let path = std::iter::successors(held.node, |id| index.parent(*id));
        let ends = |id: &NodeId| index.children(*id).filter(|c| index.node(*c).state_stored || !index.is_whole(*c));
        let all = path.flat_map(|id| ends(&id).chain([id]).collect::<Vec<_>>());
        all.map(|id| index.node(id)).filter(|n| n.stored).map(|n| n.hash).collect()
    }

    /// What is in memory of a conversation: all of it is to be kept elsewhere from now on, also a short beginning.
    pub fn lead_to(&mut self, root: BlockHash, tokens: &[u32]) -> Kept {
        let Some(index) = &mut self.index else { return Kept::default() };
        let found = index.matched(&root, tokens);
        let ends: Vec<(usize, Option<NodeId>)> = match self.states {
            Some(_) => index.with_state(tokens, &found).take(NEWEST).collect(),
            None => vec![(found.nodes.len(), index.tail(&found))],
        };
        let Some((whole, tail)) = ends.first().copied() else { return Kept::default() };
        let path: Vec<NodeId> = found.nodes[..whole].iter().copied().chain(tail).collect();
        let beside = ends.get(1).and_then(|(_, tail)| *tail);
        for id in path.iter().copied().chain(beside) {
            index.node_mut(id).leads = true;
        }
        tail.into_iter().for_each(|id| index.node_mut(id).ends = self.states.is_none());
        let hash = |id: &NodeId| index.node(*id).hash;
        Kept {
            tokens: path.iter().map(|id| index.tokens(*id).len()).sum(),
            beside: beside.as_ref().map(hash),
            path: path.iter().map(hash).collect(),
        }
    }

    /// What is in memory of these tokens.
    pub fn present(&self, root: BlockHash, tokens: &[u32], most: usize) -> Present {
        let Some(index) = &self.index else { return Present::default() };
        let found = index.matched(&root, &tokens[..most.min(tokens.len())]);
        let bits = |id: &NodeId| {
            let there = index.blocks(*id).iter().enumerate().filter(|(_, b)| **b != GONE);
            there.fold(0, |bits, (g, _)| bits | 1 << g)
        };
        Present { groups: found.nodes.iter().map(bits).collect(), usable: self.would_reuse(root, tokens, most) }
    }

    /// A sequence that holds nothing takes the first tokens of a prompt as `wanted` says: what is in memory together with others, and room for the rest, which
    /// is to be filled before it goes on. `may_fill`: whether a node's block of a group, or a state (group [`usize::MAX`]), can be filled. `None` where something can not, or
    /// where there is no room; then nothing has changed.
    pub fn reserve_restore(
        &mut self,
        held: &mut SequenceBlocks,
        root: BlockHash,
        tokens: &[u32],
        wanted: Wanted,
        may_fill: impl Fn(usize, usize) -> bool,
    ) -> Option<Vec<RestoreTarget>> {
        debug_assert!(held.is_empty() && held.node.is_none());
        let index = self.index.as_ref()?;
        let block_tokens = index.block_tokens();
        let (whole, all) = (wanted.whole, wanted.whole + usize::from(wanted.tail > 0));
        let to = whole * block_tokens + wanted.tail;
        let found = index.matched(&root, tokens.get(..whole * block_tokens)?);
        // 1. By group, what is in memory
        let there = |g: usize, first: usize, i: usize| {
            let block = found.nodes.get(i).map_or(GONE, |id| index.blocks(*id)[g]);
            if i < first { GONE } else { block }
        };
        let firsts: Vec<usize> = self.first_seen(to).map(|first| first / block_tokens).collect();
        let mut tables: Vec<Vec<u32>> =
            firsts.iter().enumerate().map(|(g, first)| (0..all).map(|i| there(g, *first, i)).collect()).collect();
        let missing = |g: usize| (firsts[g].min(all)..all).filter(|i| tables[g][*i] == GONE).collect::<Vec<_>>();
        let missing: Vec<Vec<usize>> = (0..tables.len()).map(missing).collect();
        let fills = missing.iter().enumerate().all(|(g, nodes)| nodes.iter().all(|i| may_fill(*i, g)));
        if !fills || self.states.is_some() && !may_fill(all.checked_sub(1)?, usize::MAX) {
            return None;
        }
        // 2. It is held before room is made for the rest
        let last = found.nodes.last().copied();
        for ((_, pool), table) in self.groups.iter_mut().zip(&tables) {
            table.iter().filter(|b| **b != GONE).for_each(|b| pool.share(*b));
        }
        let enough = self.groups.iter().zip(&missing).all(|((_, pool), m)| m.len() <= pool.free() + pool.idle())
            && self.states.as_ref().is_none_or(|s| s.free() + s.idle() > 0);
        if !enough {
            for ((_, pool), table) in self.groups.iter_mut().zip(&tables) {
                table.iter().filter(|b| **b != GONE).for_each(|b| pool.release(*b));
            }
            return None;
        }
        if let (Some(last), Some(index)) = (last, &mut self.index) {
            index.touch_path(last);
            index.hold(last);
            (held.node, held.indexed) = (Some(last), found.nodes.len() * block_tokens);
        }
        // 3. The rest
        let mut fillings = Vec::new();
        for (group, nodes) in missing.into_iter().enumerate() {
            for node in nodes {
                let block = self.allocate(group).expect("room was found");
                tables[group][node] = block;
                fillings.push(RestoreTarget::Block { node, group, block });
            }
        }
        if self.states.is_some() {
            let row = self.allocate_state(None).expect("room was found");
            held.state = Some(row);
            fillings.push(RestoreTarget::State { node: all - 1, row });
        }
        for (table, blocks) in held.tables.iter_mut().zip(tables) {
            blocks.into_iter().for_each(|b| table.push(b));
        }
        fillings.sort_by_key(|f| match f {
            RestoreTarget::Block { node, .. } | RestoreTarget::State { node, .. } => *node,
        });
        Some(fillings)
    }

    /// What lies behind the first `from` of these tokens counts as used before all else: somebody only thought that it might be asked for.
    pub fn make_oldest(&mut self, root: BlockHash, tokens: &[u32], from: usize) {
        let Some(index) = &mut self.index else { return };
        let found = index.matched(&root, tokens);
        let tail = index.tail(&found);
        if let Some(last) = tail.or(found.nodes.last().copied()) {
            let nodes = found.nodes.len() + usize::from(tail.is_some());
            index.age_end(last, nodes - (from / index.block_tokens()).min(nodes));
        }
    }

    /// What a sequence has taken from elsewhere and published is there still.
    pub fn note_kept(&mut self, root: BlockHash, tokens: &[u32], wanted: Wanted) {
        let Some(index) = &mut self.index else { return };
        let to = (wanted.whole * index.block_tokens() + wanted.tail).min(tokens.len());
        let found = index.matched(&root, &tokens[..to]);
        let tail = index.tail(&found).filter(|id| index.tokens(*id).len() == wanted.tail);
        for (i, id) in found.nodes.iter().chain(&tail).enumerate() {
            let node = index.node_mut(*id);
            node.stored = true;
            node.state_stored |= i + 1 == wanted.whole + usize::from(wanted.tail > 0);
        }
    }
}

/// Nodes that wait to be copied since they were used again: beyond them others wait until somebody is idle.
const MOST_USED: usize = 1 << 14;
/// States of a conversation that are kept elsewhere: after its last prompt, and after the answer.
const NEWEST: usize = 2;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kv_cache::{Group, Prefixes};

    #[test]
    fn what_was_only_thought_of_goes_before_what_was_used() {
        let group = Group { block_tokens: 4, window: None, blocks: 9 };
        let mut cache = KvCache::new(&[group], 0, Some(Prefixes { key: [1; 32], snapshots: 0 }));
        let root = cache.root(b"");
        let keep = |cache: &mut KvCache, tokens: &[u32]| {
            let mut held = cache.hold();
            cache.reuse_prefix(&mut held, root, tokens, tokens.len());
            cache.grow(&mut held, tokens.len()).unwrap();
            cache.retire(&mut held, root, tokens, tokens.len());
        };
        let there = |cache: &KvCache, tokens: &[u32]| cache.would_reuse(root, tokens, tokens.len());
        // The last two begin alike: what they share stays as young as the younger of them.
        let (other, used, thought_of) = ([1; 12], [2; 12], [2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 4]);
        [&other, &used, &thought_of].into_iter().for_each(|tokens| keep(&mut cache, tokens));
        cache.make_oldest(root, &thought_of, 0);
        for (new, left) in [([5; 8], 8), ([6; 8], 4)] {
            assert_eq!(there(&cache, &thought_of), left + 4);
            keep(&mut cache, &new[..left]);
            assert_eq!([&other, &used, &thought_of].map(|tokens| there(&cache, tokens)), [12, 12, left]);
        }
    }
}
