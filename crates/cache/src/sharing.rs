//! What sequences share: a prompt reuses the prefix that is in memory, computed blocks are published, snapshots of
//! states are kept, and the least recently used prefix is evicted when blocks are needed.

use crate::kv_cache::{BlockOp, Group, KvCache, ReusedPrefix, SequenceBlocks};
use crate::pool::BlockPool;
use crate::prefix::{BlockHash, Match, NodeId};
use crate::table::DROPPED;

impl KvCache {
    /// Where prefixes with this salt begin: with another salt nothing is shared.
    pub fn root(&self, salt: &[u8]) -> BlockHash {
        self.index.as_ref().map_or([0; 16], |index| index.root(salt))
    }

    /// The hash of a block behind the node with hash `before`; `None` where no prefixes are kept.
    pub fn hash_behind(&self, before: &BlockHash, tokens: &[u32]) -> Option<BlockHash> {
        Some(self.index.as_ref()?.hash(before, tokens))
    }

    /// Whether a sequence that holds nothing could grow to `total` tokens, of which `most` are reused if they are in
    /// memory.
    pub fn would_fit(&self, root: BlockHash, tokens: &[u32], most: usize, total: usize) -> bool {
        if self.states.as_ref().is_some_and(|s| s.free() + s.idle() == 0) {
            return false;
        }
        let known = match &self.index {
            // A hybrid model reuses only as many tokens as there is a state for.
            Some(index) if self.states.is_none() => index.matched(&root, &tokens[..most.min(tokens.len())]).nodes.len(),
            _ => 0,
        };
        self.groups.iter().all(|(g, pool)| {
            let missing = total.div_ceil(g.block_tokens).saturating_sub(known);
            missing <= pool.free() + pool.idle().saturating_sub(known)
        })
    }

    /// The longest prefix of `tokens` to go on from, of what was found: whole blocks, and a part of the one behind them.
    fn usable(&self, tokens: &[u32], found: &Match) -> Option<(usize, Option<(NodeId, usize)>)> {
        let index = self.index.as_ref()?;
        let block_tokens = index.block_tokens();
        let sees = |whole: usize, part: Option<(NodeId, usize)>| {
            // A copy needs a block, which may not be one of those that it goes with.
            let room = |(_, pool): &(Group, BlockPool)| pool.free() + pool.idle() > whole + 1;
            if part.is_some() && !self.groups.iter().all(room) {
                return false;
            }
            let to = whole * block_tokens + part.map_or(0, |(_, n)| n);
            self.groups.iter().enumerate().all(|(g, (group, _))| {
                let first = group.first_seen(to) / block_tokens;
                let nodes = found.nodes[..whole].iter().chain(part.as_ref().map(|(id, _)| id));
                nodes.skip(first).all(|id| index.blocks(*id)[g] != DROPPED)
            })
        };
        let best = if self.states.is_some() {
            let all = index.with_state(tokens, found);
            let mut all = all.map(|(whole, tail)| (whole, tail.map(|id| (id, index.tokens(id).len()))));
            all.find(|(whole, part)| sees(*whole, *part))
        } else {
            let whole = (0..=found.nodes.len()).rev().map(|n| (n, None));
            let partial = found.partial.map(|part| (found.nodes.len(), Some(part)));
            partial.into_iter().chain(whole).find(|(whole, part)| sees(*whole, *part))
        };
        best.filter(|best| *best != (0, None))
    }

    /// How many of a prompt's first tokens [`KvCache::reuse_prefix`] would reuse.
    pub fn would_reuse(&self, root: BlockHash, tokens: &[u32], most: usize) -> usize {
        let Some(index) = &self.index else { return 0 };
        let tokens = &tokens[..most.min(tokens.len())];
        let best = self.usable(tokens, &index.matched(&root, tokens));
        best.map_or(0, |(whole, part)| whole * index.block_tokens() + part.map_or(0, |(_, n)| n))
    }

    /// Gives a sequence that holds nothing the prefix of its tokens that is in memory: shares whole blocks, copies the
    /// part of a block, and copies the state at that place. `most`: tokens that are reused at most; fewer than there
    /// are where logits are wanted.
    pub fn reuse_prefix(
        &mut self,
        held: &mut SequenceBlocks,
        root: BlockHash,
        tokens: &[u32],
        most: usize,
    ) -> ReusedPrefix {
        debug_assert!(held.is_empty() && held.node.is_none());
        let Some(index) = &self.index else { return ReusedPrefix::default() };
        let tokens = &tokens[..most.min(tokens.len())];
        let block_tokens = index.block_tokens();
        let found = index.matched(&root, tokens);
        let known = found.nodes.len() * block_tokens + found.partial.map_or(0, |(_, n)| n);
        // 1. The longest of which all is there that a query after it sees
        let best = self.usable(tokens, &found);
        let Some((whole, part)) = best else { return ReusedPrefix { tokens: 0, known } };
        let last = if whole == 0 { found.root } else { Some(found.nodes[whole - 1]) };
        let last = last.expect("something was found");
        let to = whole * block_tokens + part.map_or(0, |(_, n)| n);
        // 2. Whole blocks are shared, but those that no query sees any more
        for (g, (group, pool)) in self.groups.iter_mut().enumerate() {
            let first = group.first_seen(to) / block_tokens;
            for (i, id) in found.nodes[..whole].iter().enumerate() {
                let block = if i < first { DROPPED } else { index.blocks(*id)[g] };
                if block != DROPPED {
                    pool.share(block);
                }
                held.tables[g].push(block);
            }
        }
        let index = self.index.as_mut().expect("looked at before");
        index.touch_path(part.map_or(last, |(id, _)| id));
        index.pin(last);
        self.note_reuse(part.map_or(last, |(id, _)| id));
        (held.node, held.indexed) = (Some(last), whole * block_tokens);
        // 3. Copies
        if let Some((id, _)) = part {
            // Held meanwhile, so that it does not go itself.
            let sources = self.index.as_ref().expect("looked at before").blocks(id).to_vec();
            self.groups.iter_mut().zip(&sources).for_each(|((_, pool), from)| pool.share(*from));
            for (group, from) in sources.iter().copied().enumerate() {
                let to = self.allocate(group).expect("room was found");
                self.pending_ops.push(BlockOp::CopyBlock { group, from, to });
                held.tables[group].push(to);
            }
            self.groups.iter_mut().zip(&sources).for_each(|((_, pool), from)| pool.release(*from));
        }
        if self.states.is_some() {
            let place = part.map_or(last, |(id, _)| id);
            held.state = Some(self.copy_of_state(place).expect("there is a state at this place"));
        }
        ReusedPrefix { tokens: to, known }
    }

    /// A row with a copy of a node's state. If no row is left, the node's own.
    fn copy_of_state(&mut self, id: NodeId) -> Option<u32> {
        let row = self.allocate_state(Some(id));
        let node = self.index.as_mut()?.node_mut(id);
        match row {
            Some(to) => {
                self.pending_ops.push(BlockOp::CopyState { from: node.state?, to });
                Some(to)
            }
            None => {
                let row = node.state.take()?;
                let states = self.states.as_mut()?;
                states.share(row);
                states.drop_from_index(row);
                self.snapshots -= 1;
                Some(row)
            }
        }
    }

    /// Publishes the whole blocks that a sequence has computed, so that others find them. Where another sequence has
    /// published the same block, this one shares it from now on and its own is freed.
    pub fn publish(&mut self, held: &mut SequenceBlocks, root: BlockHash, tokens: &[u32], computed: usize) {
        let Some(index) = &mut self.index else { return };
        let block_tokens = index.block_tokens();
        let before = held.indexed;
        while !held.collided && held.indexed + block_tokens <= computed {
            let at = held.indexed;
            let parent = held.node.unwrap_or_else(|| index.root_node(root));
            let Some((id, _)) = index.insert(parent, &tokens[at..at + block_tokens]) else {
                // Other tokens have this hash: what follows stays this sequence's own.
                held.collided = true;
                break;
            };
            let blocks = index.blocks_mut(id);
            for (g, (table, (_, pool))) in held.tables.iter_mut().zip(&mut self.groups).enumerate() {
                let (own, theirs) = (table.blocks()[at / block_tokens], blocks[g]);
                match (own, theirs) {
                    (DROPPED, _) => {}
                    (own, DROPPED) => {
                        pool.hold_for_index(own);
                        blocks[g] = own;
                    }
                    (own, theirs) if own != theirs => {
                        pool.share(theirs);
                        table.replace(at / block_tokens, theirs);
                        pool.release(own);
                    }
                    _ => {}
                }
            }
            index.pin(id);
            held.node.replace(id).inspect(|old| index.unpin(*old));
            held.indexed += block_tokens;
        }
        if held.indexed != before
            && let Some(node) = held.node
        {
            index.touch_path(node);
        }
    }

    /// Keeps a copy of a sequence's state, and of the block that it ends in, for prompts that begin with these
    /// `computed` tokens. Returns whether there was room.
    pub fn snapshot(&mut self, held: &mut SequenceBlocks, root: BlockHash, tokens: &[u32], computed: usize) -> bool {
        self.keep_end(held, root, tokens, computed, true)
    }

    /// As [`KvCache::release`], but what was computed stays in memory for others as long as there is room, with the
    /// part of a block at its end and the state there.
    pub fn retire(&mut self, held: &mut SequenceBlocks, root: BlockHash, tokens: &[u32], computed: usize) {
        self.keep_end(held, root, tokens, computed, false);
        self.release(held);
    }

    /// Keeps the last tokens, fewer than a block, and the state after them: copies if the sequence goes on, else what
    /// the sequence has itself.
    fn keep_end(
        &mut self,
        held: &mut SequenceBlocks,
        root: BlockHash,
        tokens: &[u32],
        computed: usize,
        copies: bool,
    ) -> bool {
        self.publish(held, root, tokens, computed);
        // 1. The place
        let Some(index) = self.index.as_mut().filter(|_| computed > 0 && !held.collided) else {
            return false;
        };
        if self.states.is_some() && held.state.is_none() || self.states.is_none() && copies {
            return false;
        }
        let parent = held.node.unwrap_or_else(|| index.root_node(root));
        let rest = &tokens[held.indexed..computed];
        let (place, new) = if rest.is_empty() {
            (parent, false)
        } else {
            let Some(found) = index.insert(parent, rest) else { return false };
            found
        };
        index.pin(place);
        index.touch_path(place);
        // 2. Its part of a block
        let at = held.indexed / index.block_tokens();
        let mut kept = true;
        if new {
            for group in 0..self.groups.len() {
                let own = held.tables[group].blocks()[at];
                let block = if copies { self.allocate(group) } else { Some(own) };
                let Some(block) = block else {
                    kept = false;
                    break;
                };
                let pool = &mut self.groups[group].1;
                pool.hold_for_index(block);
                if copies {
                    // Held by the index alone from here on.
                    pool.release(block);
                    self.pending_ops.push(BlockOp::CopyBlock { group, from: own, to: block });
                }
                self.index.as_mut().expect("looked at before").blocks_mut(place)[group] = block;
            }
        }
        // 3. Its state
        let has_state = |cache: &KvCache| cache.index.as_ref().is_some_and(|i| i.node(place).state.is_some());
        if kept && self.states.is_some() && !has_state(self) {
            kept = self.most_snapshots > 0;
            if self.snapshots >= self.most_snapshots && kept {
                kept = self.evict_snapshot(None);
            }
            let own = held.state.expect("looked at before");
            let row = match copies {
                _ if !kept => None,
                false => held.state.take(),
                true => {
                    let row = self.allocate_state(None);
                    row.inspect(|to| self.pending_ops.push(BlockOp::CopyState { from: own, to: *to }))
                }
            };
            kept = row.is_some();
            if let (Some(row), Some(states)) = (row, &mut self.states) {
                states.hold_for_index(row);
                states.release(row);
                self.index.as_mut().expect("looked at before").node_mut(place).state = Some(row);
                self.snapshots += 1;
            }
        }
        let index = self.index.as_mut().expect("looked at before");
        index.unpin(place);
        // A part of a block is of use only with what makes it whole.
        if !kept && new && index.may_evict(place) {
            self.remove(place);
        }
        kept
    }

    /// Allocates a block of a group. If none is free, the least recently used prefix is evicted.
    pub(crate) fn allocate(&mut self, group: usize) -> Option<u32> {
        loop {
            if let Some(block) = self.groups[group].1.allocate() {
                return Some(block);
            }
            if self.groups[group].1.idle() == 0 || !self.evict(group) {
                return None;
            }
        }
    }

    /// Allocates a row for a state. If none is free, a snapshot other than that of `but` is evicted.
    pub(crate) fn allocate_state(&mut self, but: Option<NodeId>) -> Option<u32> {
        loop {
            if let Some(row) = self.states.as_mut()?.allocate() {
                return Some(row);
            }
            if !self.evict_snapshot(but) {
                return None;
            }
        }
    }

    /// Evicts a block of a group that no sequence holds, and returns whether there was one.
    fn evict(&mut self, group: usize) -> bool {
        let Some(index) = &mut self.index else { return false };
        let (of, pool) = &mut self.groups[group];
        // 1. A window's old blocks are of use only to prompts that end near them: they go first, and what follows them stays.
        if of.window.is_some() {
            let idle = |id: &NodeId| {
                let block = index.blocks(*id)[group];
                block != DROPPED && pool.is_idle(block)
            };
            let Some(id) = index.oldest_first().find(idle) else { return false };
            self.copy_out(id);
            let (Some(index), (_, pool)) = (&mut self.index, &mut self.groups[group]) else { return false };
            pool.drop_from_index(std::mem::replace(&mut index.blocks_mut(id)[group], DROPPED));
            self.evicted.blocks += 1;
            self.tidy(id);
            return true;
        }
        // 2. Leaves first: the least recently used node is one, since using a node makes all before it younger.
        for _ in 0..index.len() {
            let Some(oldest) = index.oldest_first().next() else { return false };
            if index.may_evict(oldest) {
                self.remove(oldest);
                return true;
            }
            // A sequence holds it, or what follows it.
            index.touch_path(oldest);
        }
        false
    }

    /// Evicts the least recently used snapshot that is not that of `but`, and returns whether there was one.
    pub(crate) fn evict_snapshot(&mut self, but: Option<NodeId>) -> bool {
        let Some(index) = &mut self.index else { return false };
        let oldest = index.oldest_first().find(|id| index.node(*id).state.is_some() && Some(*id) != but);
        let Some(id) = oldest else { return false };
        // Many snapshots are never used again: those that were reused are worth writing to disk.
        if index.node(id).reused {
            self.copy_out(id);
        }
        let Some(index) = &mut self.index else { return false };
        let row = index.node_mut(id).state.take().expect("just looked");
        self.states.as_mut().expect("a state was kept").drop_from_index(row);
        self.snapshots -= 1;
        self.evicted.snapshots += 1;
        true
    }

    /// Removes a node that has no block and no successor, and then those before it that have none either.
    pub(crate) fn tidy(&mut self, id: NodeId) {
        let mut at = Some(id);
        while let (Some(id), Some(index)) = (at, &self.index) {
            at = index.parent(id);
            let empty = at.is_some() && index.may_evict(id) && index.blocks(id).iter().all(|b| *b == DROPPED);
            if !empty {
                return;
            }
            self.remove(id);
        }
    }

    fn remove(&mut self, id: NodeId) {
        self.copy_out(id);
        let index = self.index.as_mut().expect("a node is in it");
        for ((_, pool), block) in
            self.groups.iter_mut().zip(index.blocks_mut(id)).filter(|(_, block)| **block != DROPPED)
        {
            pool.drop_from_index(std::mem::replace(block, DROPPED));
            self.evicted.blocks += 1;
        }
        if let (Some(states), Some(row)) = (&mut self.states, index.node_mut(id).state.take()) {
            states.drop_from_index(row);
            self.snapshots -= 1;
            self.evicted.snapshots += 1;
        }
        index.remove(id);
    }

    /// Evicts all prefixes that no sequence goes on from, and returns how many blocks that frees.
    pub fn forget_prefixes(&mut self) -> u64 {
        let before = self.evicted.blocks;
        let leaf = |cache: &KvCache| cache.index.as_ref().and_then(|i| i.oldest_first().find(|id| i.may_evict(*id)));
        while let Some(id) = leaf(self) {
            self.remove(id);
        }
        self.evicted.blocks - before
    }
}
