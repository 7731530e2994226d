//! Prefixes on disk: which nodes of the prefix tree are worth writing, which are copied out before eviction, and the blocks that a sequence reserves to read
//! nodes back. Only numbers are kept here; the caller moves the bytes.

use std::collections::{HashSet, VecDeque};

use crate::kv_cache::{BlockOp, KvCache, SequenceBlocks};
use crate::prefix::{BlockHash, NodeId};
use crate::second_tier::{EvictedNode, SecondTier};
use crate::table::DROPPED;

/// How much of a prompt is in memory, by whole block.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MemoryMatch {
    /// By node: a bit for each group whose block is there.
    pub groups: Vec<u64>,
    /// Tokens that can be reused from memory alone.
    pub usable: usize,
}

/// The part of a conversation in memory that is worth writing to disk.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OffloadPath {
    /// Its nodes, from the beginning to its end or to the newest state.
    pub path: Vec<BlockHash>,
    /// Tokens of the path.
    pub tokens: usize,
    /// The node with the state before the newest, if it is not on the path.
    pub earlier_state: Option<BlockHash>,
}

/// A prefix that a sequence is to have, part of it from disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RestoreSpan {
    /// Whole blocks.
    pub whole: usize,
    /// Tokens behind them, fewer than a block. With recurrent layers the state at their end is wanted.
    pub tail: usize,
}

/// What is to be filled before a sequence may go on: the number of the node on its path, and its block or the row of
/// its state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RestoreTarget {
    /// A block of keys and values.
    #[allow(missing_docs)]
    Block { node: usize, group: usize, block: u32 },
    /// A recurrent state.
    #[allow(missing_docs)]
    State { node: usize, row: u32 },
}

impl KvCache {
    /// Turns offloading on: nodes that are evicted are first copied out ([`BlockOp::CopyOut`]) if they belong to a
    /// prefix of at least `fewest` tokens.
    pub fn enable_offload(&mut self, fewest: usize) {
        self.second_tier = Some(SecondTier { min_tokens: fewest, evicted: Vec::new(), reused: VecDeque::new() });
    }

    /// For each group, the first position that a query at `next` sees.
    pub fn first_seen(&self, next: usize) -> impl Iterator<Item = usize> {
        self.groups.iter().map(move |(group, _)| group.first_seen(next))
    }

    /// Whether a node has something that is worth writing to disk and is not there yet.
    fn should_offload(&self, id: NodeId) -> bool {
        let (Some(elsewhere), Some(index)) = (&self.second_tier, &self.index) else { return false };
        let (node, blocks, len) = (index.node(id), index.blocks(id), index.tokens(id).len());
        let reaches = node.position as usize + len >= elsewhere.min_tokens || node.leads_to_offloaded;
        // A part of a block is useful with its state, or where a conversation ends. A full layer's block is needed by
        // all that follows.
        let whole = index.is_whole(id) || node.state.is_some() || node.ends_conversation;
        let there = self.groups.iter().zip(blocks).all(|((group, _), b)| *b != DROPPED || group.window.is_some());
        let new = !node.offloaded || node.state.is_some() && !node.state_offloaded;
        len > 0 && reaches && whole && there && new && blocks.iter().any(|b| *b != DROPPED)
    }

    /// Describes a node to be written; it counts as offloaded from now on.
    fn prepare_offload(&mut self, id: NodeId) -> EvictedNode {
        let index = self.index.as_mut().expect("a node is in it");
        let parent = index.parent(id).expect("roots have no tokens");
        index.node_mut(parent).leads_to_offloaded = true;
        let before = index.node(parent).hash;
        let node = index.node_mut(id);
        (node.offloaded, node.state_offloaded) = (true, node.state.is_some());
        let (hash, position, state) = (node.hash, node.position, node.state);
        let blocks = index.blocks(id).iter().map(|b| Some(*b).filter(|b| *b != DROPPED)).collect();
        EvictedNode { hash, before, position, tokens: index.tokens(id).to_vec(), blocks, state }
    }

    /// A node is about to lose a block or its state: copies it out first, if it is worth it.
    pub(crate) fn copy_out(&mut self, id: NodeId) {
        if self.should_offload(id) {
            let leaving = self.prepare_offload(id);
            let elsewhere = self.second_tier.as_mut().expect("it was worth it");
            self.pending_ops.push(BlockOp::CopyOut(elsewhere.evicted.len()));
            elsewhere.evicted.push(leaving);
        }
    }

    /// A sequence goes on from a node: notes that it and all nodes before it were reused.
    pub(crate) fn note_reuse(&mut self, id: NodeId) {
        let (Some(elsewhere), Some(index)) = (&mut self.second_tier, &mut self.index) else { return };
        let (mut at, mut new) = (id, Vec::new());
        let reaches = index.node(id).position as usize + index.tokens(id).len() >= elsewhere.min_tokens;
        while let Some(parent) = index.parent(at) {
            let node = index.node_mut(at);
            node.leads_to_offloaded |= reaches;
            if !std::mem::replace(&mut node.reused, true) {
                new.push(node.hash);
            }
            at = parent;
        }
        // The first nodes come first: the others are useless without them.
        if elsewhere.reused.len() < MOST_USED {
            elsewhere.reused.extend(new.into_iter().rev());
        }
    }

    /// The next node that was reused and is not on disk yet; from now on it counts as offloaded.
    pub fn next_reused(&mut self) -> Option<EvictedNode> {
        loop {
            let hash = self.second_tier.as_mut()?.reused.pop_front()?;
            let id = self.index.as_ref()?.by_hash(&hash);
            if let Some(id) = id.filter(|id| self.should_offload(*id)) {
                return Some(self.prepare_offload(id));
            }
        }
    }

    /// The node with this hash, if it is worth writing; from now on it counts as offloaded.
    pub fn offload_by_hash(&mut self, hash: &BlockHash) -> Option<EvictedNode> {
        let id = self.index.as_ref()?.by_hash(hash).filter(|id| self.should_offload(*id))?;
        Some(self.prepare_offload(id))
    }

    /// A node that counted as offloaded was not written, or is no longer on disk.
    pub fn forget_offloaded(&mut self, hash: &BlockHash) {
        if let Some(index) = &mut self.index
            && let Some(id) = index.by_hash(hash)
        {
            let node = index.node_mut(id);
            (node.offloaded, node.state_offloaded) = (false, false);
        }
    }

    /// Nodes of all conversations that are worth writing and are not on disk yet. Conversations that were used last
    /// come first, and each from its beginning: its blocks; with recurrent layers the blocks up to its newest state,
    /// and its two newest states. `ends`: also the part of a block that a conversation ends with. That costs as much
    /// as a block, and is useless once the conversation has gone on.
    pub fn not_offloaded(&mut self, ends: bool) -> Vec<BlockHash> {
        // With recurrent layers only states matter.
        let ends = ends && self.states.is_none();
        let all: Vec<NodeId> = self.conversations(ends);
        let Some(index) = &mut self.index else { return Vec::new() };
        for id in all.iter().copied() {
            // Short beginnings too: what follows them is to be written.
            index.node_mut(id).leads_to_offloaded = true;
            index.node_mut(id).ends_conversation |= ends && !index.is_whole(id);
        }
        let mut once = HashSet::new();
        let new = all.into_iter().filter(|id| once.insert(id.number()) && self.should_offload(*id));
        new.filter_map(|id| Some(self.index.as_ref()?.node(id).hash)).collect()
    }

    /// The nodes of all conversations that are worth writing, from the conversation that was used last.
    fn conversations(&self, ends: bool) -> Vec<NodeId> {
        let (Some(index), Some(elsewhere)) = (&self.index, &self.second_tier) else { return Vec::new() };
        let mut all = Vec::new();
        let mut seen = HashSet::new();
        let block_tokens = index.block_tokens();
        let is_whole = |id: NodeId| index.is_whole(id);
        for leaf in index.newest_first() {
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
            if self.states.is_none() && reach(&end) < elsewhere.min_tokens {
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
            if chosen.last().is_some_and(|last| reach(last) >= elsewhere.min_tokens) {
                all.extend(chosen);
            }
        }
        all
    }

    /// The hashes of nodes on a sequence's path that are on disk, and of states on it, the last one first.
    pub fn offloaded_path(&self, held: &SequenceBlocks) -> Vec<BlockHash> {
        let Some(index) = &self.index else { return Vec::new() };
        let path = std::iter::successors(held.node, |id| index.parent(*id));
        let ends = |id: &NodeId| index.children(*id).filter(|c| index.node(*c).state_offloaded || !index.is_whole(*c));
        let all = path.flat_map(|id| ends(&id).chain([id]).collect::<Vec<_>>());
        all.map(|id| index.node(id)).filter(|n| n.offloaded).map(|n| n.hash).collect()
    }

    /// Marks the part of a conversation that is in memory to be written to disk, also if it is short.
    pub fn mark_for_offload(&mut self, root: BlockHash, tokens: &[u32]) -> OffloadPath {
        let Some(index) = &mut self.index else { return OffloadPath::default() };
        let found = index.matched(&root, tokens);
        let ends: Vec<(usize, Option<NodeId>)> = match self.states {
            Some(_) => index.with_state(tokens, &found).take(NEWEST).collect(),
            None => vec![(found.nodes.len(), index.tail(&found))],
        };
        let Some((whole, tail)) = ends.first().copied() else { return OffloadPath::default() };
        let path: Vec<NodeId> = found.nodes[..whole].iter().copied().chain(tail).collect();
        let beside = ends.get(1).and_then(|(_, tail)| *tail);
        for id in path.iter().copied().chain(beside) {
            index.node_mut(id).leads_to_offloaded = true;
        }
        tail.into_iter().for_each(|id| index.node_mut(id).ends_conversation = self.states.is_none());
        let hash = |id: &NodeId| index.node(*id).hash;
        OffloadPath {
            tokens: path.iter().map(|id| index.tokens(*id).len()).sum(),
            earlier_state: beside.as_ref().map(hash),
            path: path.iter().map(hash).collect(),
        }
    }

    /// How much of these tokens is in memory.
    pub fn memory_match(&self, root: BlockHash, tokens: &[u32], most: usize) -> MemoryMatch {
        let Some(index) = &self.index else { return MemoryMatch::default() };
        let found = index.matched(&root, &tokens[..most.min(tokens.len())]);
        let bits = |id: &NodeId| {
            let there = index.blocks(*id).iter().enumerate().filter(|(_, b)| **b != DROPPED);
            there.fold(0, |bits, (g, _)| bits | 1 << g)
        };
        MemoryMatch { groups: found.nodes.iter().map(bits).collect(), usable: self.would_reuse(root, tokens, most) }
    }

    /// Gives a sequence that holds nothing the first tokens of a prompt as `wanted` says: shares what is in memory,
    /// and reserves blocks for the rest, which is to be filled before the sequence goes on. `may_fill`: whether a
    /// node's block of a group, or its state (group [`usize::MAX`]), can be filled. `None` where something cannot, or
    /// blocks are missing; then nothing has changed.
    pub fn reserve_restore(
        &mut self,
        held: &mut SequenceBlocks,
        root: BlockHash,
        tokens: &[u32],
        wanted: RestoreSpan,
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
            let block = found.nodes.get(i).map_or(DROPPED, |id| index.blocks(*id)[g]);
            if i < first { DROPPED } else { block }
        };
        let firsts: Vec<usize> = self.first_seen(to).map(|first| first / block_tokens).collect();
        let mut tables: Vec<Vec<u32>> =
            firsts.iter().enumerate().map(|(g, first)| (0..all).map(|i| there(g, *first, i)).collect()).collect();
        let missing = |g: usize| (firsts[g].min(all)..all).filter(|i| tables[g][*i] == DROPPED).collect::<Vec<_>>();
        let missing: Vec<Vec<usize>> = (0..tables.len()).map(missing).collect();
        let fills = missing.iter().enumerate().all(|(g, nodes)| nodes.iter().all(|i| may_fill(*i, g)));
        if !fills || self.states.is_some() && !may_fill(all.checked_sub(1)?, usize::MAX) {
            return None;
        }
        // 2. It is held before room is made for the rest
        let last = found.nodes.last().copied();
        for ((_, pool), table) in self.groups.iter_mut().zip(&tables) {
            table.iter().filter(|b| **b != DROPPED).for_each(|b| pool.share(*b));
        }
        let enough = self.groups.iter().zip(&missing).all(|((_, pool), m)| m.len() <= pool.free() + pool.idle())
            && self.states.as_ref().is_none_or(|s| s.free() + s.idle() > 0);
        if !enough {
            for ((_, pool), table) in self.groups.iter_mut().zip(&tables) {
                table.iter().filter(|b| **b != DROPPED).for_each(|b| pool.release(*b));
            }
            return None;
        }
        if let (Some(last), Some(index)) = (last, &mut self.index) {
            index.touch_path(last);
            index.pin(last);
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

    /// Makes the nodes behind the first `from` of these tokens the oldest: they were only prefetched.
    pub fn make_oldest(&mut self, root: BlockHash, tokens: &[u32], from: usize) {
        let Some(index) = &mut self.index else { return };
        let found = index.matched(&root, tokens);
        let tail = index.tail(&found);
        if let Some(last) = tail.or(found.nodes.last().copied()) {
            let nodes = found.nodes.len() + usize::from(tail.is_some());
            index.make_end_oldest(last, nodes - (from / index.block_tokens()).min(nodes));
        }
    }

    /// Notes that the nodes that a sequence restored and published are on disk.
    pub fn note_kept(&mut self, root: BlockHash, tokens: &[u32], wanted: RestoreSpan) {
        let Some(index) = &mut self.index else { return };
        let to = (wanted.whole * index.block_tokens() + wanted.tail).min(tokens.len());
        let found = index.matched(&root, &tokens[..to]);
        let tail = index.tail(&found).filter(|id| index.tokens(*id).len() == wanted.tail);
        for (i, id) in found.nodes.iter().chain(&tail).enumerate() {
            let node = index.node_mut(*id);
            node.offloaded = true;
            node.state_offloaded |= i + 1 == wanted.whole + usize::from(wanted.tail > 0);
        }
    }
}

/// Reused nodes that wait to be written, at most. More of them wait until there is nothing else to do.
const MOST_USED: usize = 1 << 14;
/// States of a conversation that are written: the one after its last prompt, and the one after the answer.
const NEWEST: usize = 2;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kv_cache::{Group, PrefixOptions};

    #[test]
    fn what_was_only_thought_of_goes_before_what_was_used() {
        let group = Group { block_tokens: 4, window: None, blocks: 9 };
        let mut cache = KvCache::new(&[group], 0, Some(PrefixOptions { key: [1; 32], snapshots: 0 }));
        let root = cache.root(b"");
        let keep = |cache: &mut KvCache, tokens: &[u32]| {
            let mut held = cache.new_sequence();
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
