//! Which prefixes are in memory: a tree of blocks. Each block is known by the hash of all tokens up to its end, and
//! compared token by token before it is believed.
//!
//! A node is one block of tokens, with the blocks of keys and values that hold them, one for each cache group, and
//! perhaps a recurrent state as it was at the node's end. Nodes with fewer tokens than a block are the ends of
//! sequences, and places where a state was kept; nothing follows them. The index knows blocks and states by number and
//! holds each once; the pools know who else does.

use std::collections::HashMap;

/// Stands for no node, or for a block that the node does not have.
pub(crate) const NONE: u32 = u32::MAX;

/// Nodes that tokens are compared with before they are hashed.
const MOST_COMPARED: usize = 4;

/// The hash of all tokens up to the end of a block, keyed.
pub type BlockHash = [u8; 16];

/// The hash that the first block of all prefixes with this salt follows.
pub fn root(key: &[u8; 32], salt: &[u8]) -> BlockHash {
    truncated(blake3::keyed_hash(key, salt))
}

/// The hash of a block of tokens that follow the prefix with the hash `before`.
pub fn block_hash(key: &[u8; 32], before: &BlockHash, tokens: &[u32]) -> BlockHash {
    let mut hasher = blake3::Hasher::new_keyed(key);
    hasher.update(before);
    // A hasher is far quicker on many bytes at once.
    let mut bytes = [0; 4 * 64];
    for tokens in tokens.chunks(64) {
        tokens.iter().zip(bytes.as_chunks_mut::<4>().0).for_each(|(t, at)| *at = t.to_le_bytes());
        hasher.update(&bytes[..4 * tokens.len()]);
    }
    truncated(hasher.finalize())
}

/// Names a node until it is evicted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NodeId(u32);

impl NodeId {
    pub(crate) fn number(self) -> u32 {
        self.0
    }
}

#[derive(Debug)]
pub(crate) struct Node {
    pub hash: BlockHash,
    parent: NodeId,
    /// Tokens: those of a whole block, or fewer; none before the first block, and in a slot that is free.
    len: u32,
    /// Row of the pool of states.
    pub state: Option<u32>,
    /// The first of those that follow it, and its neighbours among those that follow its parent.
    child: u32,
    next: u32,
    before: u32,
    /// Sequences that go on from here.
    users: u32,
    /// Position of its first token.
    pub position: u32,
    /// A sequence reused it after it was computed.
    pub reused: bool,
    /// Its blocks are on disk too, or on their way there.
    pub offloaded: bool,
    pub state_offloaded: bool,
    /// A node that follows it is on disk, and is useless without this one.
    pub leads_to_offloaded: bool,
    /// A conversation that is on disk ends with it, within a block.
    pub ends_conversation: bool,
    /// Neighbours by time of use.
    newer: u32,
    older: u32,
}

/// How far tokens match the tree.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Match {
    /// The root; `None` if nothing matches.
    pub root: Option<NodeId>,
    /// Whole blocks that match, from the first on.
    pub nodes: Vec<NodeId>,
    /// A node that follows the last of `nodes`, and how many of its first tokens match: fewer than a whole block has.
    pub partial: Option<(NodeId, usize)>,
}

/// Trees of blocks, one for each salt.
#[derive(Debug)]
pub(crate) struct PrefixIndex {
    key: [u8; 32],
    block_tokens: usize,
    groups: usize,
    nodes: Vec<Node>,
    /// `[nodes, block_tokens]`
    tokens: Vec<u32>,
    /// `[nodes, groups]`: [`NONE`] for a block that a window has moved beyond.
    blocks: Vec<u32>,
    free: Vec<u32>,
    /// Roots, which have no tokens, are in it too.
    by_hash: HashMap<BlockHash, u32>,
    newest: u32,
    oldest: u32,
}

impl PrefixIndex {
    /// An index of blocks of `block_tokens` tokens in `groups` groups. Up to `nodes` nodes allocate nothing more.
    /// Hashes are keyed, so that nobody can make two prompts with the same hash.
    pub fn new(block_tokens: usize, groups: usize, nodes: usize, key: [u8; 32]) -> PrefixIndex {
        PrefixIndex {
            key,
            block_tokens,
            groups,
            nodes: Vec::with_capacity(nodes),
            tokens: Vec::with_capacity(nodes * block_tokens),
            blocks: Vec::with_capacity(nodes * groups),
            free: Vec::with_capacity(nodes),
            by_hash: HashMap::with_capacity(nodes),
            newest: NONE,
            oldest: NONE,
        }
    }

    /// The hash that all prefixes with this salt begin from: prefixes with different salts never match.
    pub fn root(&self, salt: &[u8]) -> BlockHash {
        root(&self.key, salt)
    }

    pub(crate) fn hash(&self, before: &BlockHash, tokens: &[u32]) -> BlockHash {
        block_hash(&self.key, before, tokens)
    }

    pub fn block_tokens(&self) -> usize {
        self.block_tokens
    }

    /// Nodes in the tree.
    pub fn len(&self) -> usize {
        self.nodes.iter().filter(|n| n.len > 0).count()
    }

    pub(crate) fn node(&self, id: NodeId) -> &Node {
        &self.nodes[id.0 as usize]
    }

    pub(crate) fn node_mut(&mut self, id: NodeId) -> &mut Node {
        &mut self.nodes[id.0 as usize]
    }

    pub(crate) fn tokens(&self, id: NodeId) -> &[u32] {
        let from = id.0 as usize * self.block_tokens;
        &self.tokens[from..from + self.node(id).len as usize]
    }

    /// Whether a node has all tokens of a block.
    pub(crate) fn is_whole(&self, id: NodeId) -> bool {
        self.node(id).len as usize == self.block_tokens
    }

    /// One for each group.
    pub(crate) fn blocks(&self, id: NodeId) -> &[u32] {
        &self.blocks[id.0 as usize * self.groups..][..self.groups]
    }

    pub(crate) fn blocks_mut(&mut self, id: NodeId) -> &mut [u32] {
        &mut self.blocks[id.0 as usize * self.groups..][..self.groups]
    }

    pub(crate) fn children(&self, id: NodeId) -> impl Iterator<Item = NodeId> + '_ {
        let some = |id: u32| Some(id).filter(|id| *id != NONE);
        std::iter::successors(some(self.node(id).child), move |id| some(self.nodes[*id as usize].next)).map(NodeId)
    }

    /// The node of a block that follows `parent`, if there is one with just these tokens.
    fn find(&self, parent: NodeId, tokens: &[u32]) -> Option<NodeId> {
        // Comparing tokens is quicker than hashing them, and mostly there is one that follows.
        if let Some(id) = self.children(parent).take(MOST_COMPARED).find(|id| self.tokens(*id) == tokens) {
            return Some(id);
        }
        let id = NodeId(*self.by_hash.get(&self.hash(&self.node(parent).hash, tokens))?);
        // An equal hash proves nothing.
        (self.node(id).parent == parent && self.tokens(id) == tokens).then_some(id)
    }

    /// The node with this hash.
    pub(crate) fn by_hash(&self, hash: &BlockHash) -> Option<NodeId> {
        self.by_hash.get(hash).map(|id| NodeId(*id))
    }

    /// The longest prefix of `tokens` that is known.
    pub(crate) fn matched(&self, root: &BlockHash, tokens: &[u32]) -> Match {
        let mut found = Match::default();
        let Some(root) = self.by_hash.get(root) else { return found };
        let mut at = NodeId(*root);
        found.root = Some(at);
        for block in tokens.chunks_exact(self.block_tokens) {
            let Some(next) = self.find(at, block) else { break };
            at = next;
            found.nodes.push(next);
        }
        let rest = &tokens[found.nodes.len() * self.block_tokens..];
        let common = |id: NodeId| (self.tokens(id).iter().zip(rest).take_while(|(a, b)| a == b).count(), id);
        let best = self.children(at).map(common).max_by_key(|(n, _)| *n);
        found.partial = best.filter(|(n, _)| *n > 0).map(|(n, id)| (id, n));
        found
    }

    /// The partial node at the end of what was found, if all of its tokens match.
    pub(crate) fn tail(&self, found: &Match) -> Option<NodeId> {
        found.partial.filter(|(id, n)| self.tokens(*id).len() == *n).map(|(id, _)| id)
    }

    /// The known prefixes of `tokens` that end with a state, the longest first. Each is a number of whole blocks of what was found, and the partial node that
    /// follows them, if there is one.
    pub(crate) fn with_state<'a>(
        &'a self,
        tokens: &'a [u32],
        found: &'a Match,
    ) -> impl Iterator<Item = (usize, Option<NodeId>)> + 'a {
        let ends = |whole: usize| -> Vec<(usize, Option<NodeId>)> {
            let at = if whole == 0 { found.root } else { Some(found.nodes[whole - 1]) };
            let Some(at) = at else { return Vec::new() };
            let rest = &tokens[whole * self.block_tokens..];
            let ends_here = |id: &NodeId| {
                let tokens = self.tokens(*id);
                self.node(*id).state.is_some() && tokens.len() < self.block_tokens && rest.starts_with(tokens)
            };
            let mut tails: Vec<NodeId> = self.children(at).filter(ends_here).collect();
            tails.sort_unstable_by_key(|id| std::cmp::Reverse(self.node(*id).len));
            let own = (self.node(at).state.is_some()).then_some((whole, None));
            tails.into_iter().map(|id| (whole, Some(id))).chain(own).collect()
        };
        (0..=found.nodes.len()).rev().flat_map(ends)
    }

    /// A node for `tokens` (at most a block of them) that follow `parent`, or begin where `parent` is a root. Returns also whether it is new, and so needs its
    /// blocks set. `None` if other tokens have the same hash.
    ///
    /// # Panics
    /// When the parent is a part of a block.
    pub(crate) fn insert(&mut self, parent: NodeId, tokens: &[u32]) -> Option<(NodeId, bool)> {
        assert!(!tokens.is_empty() && tokens.len() <= self.block_tokens);
        let before = self.node(parent);
        assert!([0, self.block_tokens].contains(&(before.len as usize)), "nothing follows a part of a block");
        if let Some(known) = self.find(parent, tokens) {
            return Some((known, false));
        }
        let hash = self.hash(&before.hash, tokens);
        if self.by_hash.contains_key(&hash) {
            return None;
        }
        let id = self.add(hash, parent, tokens);
        let next = std::mem::replace(&mut self.node_mut(parent).child, id.0);
        self.node_mut(id).next = next;
        if next != NONE {
            self.nodes[next as usize].before = id.0;
        }
        self.link(id.0);
        Some((id, true))
    }

    /// The node of a root, which is made if it is missing.
    pub(crate) fn root_node(&mut self, root: BlockHash) -> NodeId {
        match self.by_hash.get(&root) {
            Some(id) => NodeId(*id),
            None => self.add(root, NodeId(NONE), &[]),
        }
    }

    fn add(&mut self, hash: BlockHash, parent: NodeId, tokens: &[u32]) -> NodeId {
        let position = match parent.0 {
            NONE => 0,
            before => self.nodes[before as usize].position + self.nodes[before as usize].len,
        };
        let node = Node {
            hash,
            parent,
            len: tokens.len() as u32,
            state: None,
            child: NONE,
            next: NONE,
            before: NONE,
            users: 0,
            position,
            reused: false,
            offloaded: false,
            state_offloaded: false,
            leads_to_offloaded: false,
            ends_conversation: false,
            newer: NONE,
            older: NONE,
        };
        let id = match self.free.pop() {
            Some(id) => {
                self.nodes[id as usize] = node;
                id
            }
            None => {
                self.nodes.push(node);
                self.tokens.resize(self.nodes.len() * self.block_tokens, 0);
                self.blocks.resize(self.nodes.len() * self.groups, NONE);
                self.nodes.len() as u32 - 1
            }
        };
        let from = id as usize * self.block_tokens;
        self.tokens[from..from + tokens.len()].copy_from_slice(tokens);
        self.blocks_mut(NodeId(id)).fill(NONE);
        self.by_hash.insert(hash, id);
        NodeId(id)
    }

    /// A sequence goes on from a node, which is not evicted until [`PrefixIndex::unpin`].
    pub(crate) fn pin(&mut self, id: NodeId) {
        self.node_mut(id).users += 1;
    }

    pub(crate) fn unpin(&mut self, id: NodeId) {
        self.node_mut(id).users -= 1;
        self.prune_root(id);
    }

    /// The node before a block; `None` of the first.
    pub(crate) fn parent(&self, id: NodeId) -> Option<NodeId> {
        Some(self.node(id).parent).filter(|p| p.0 != NONE)
    }

    /// Marks a node and all before it as used just now, from the end to the first block, so that a node is never older than its successors.
    pub(crate) fn touch_path(&mut self, mut id: NodeId) {
        while let Some(parent) = self.parent(id) {
            self.unlink(id.0);
            self.link(id.0);
            id = parent;
        }
    }

    /// Makes the end of a path the least recently used: its last `most` nodes, as far as no other path shares them.
    pub(crate) fn make_end_oldest(&mut self, mut id: NodeId, most: usize) {
        let mut end = Vec::new();
        while end.len() < most
            && let Some(parent) = self.parent(id)
            && self.children(id).all(|child| end.last() == Some(&child))
        {
            end.push(id);
            id = parent;
        }
        // The deepest is the oldest of them.
        for id in end.into_iter().rev() {
            self.unlink(id.0);
            let after = std::mem::replace(&mut self.oldest, id.0);
            (self.nodes[id.0 as usize].older, self.nodes[id.0 as usize].newer) = (NONE, after);
            match after {
                NONE => self.newest = id.0,
                after => self.nodes[after as usize].older = id.0,
            }
        }
    }

    fn link(&mut self, id: u32) {
        let before = std::mem::replace(&mut self.newest, id);
        (self.nodes[id as usize].older, self.nodes[id as usize].newer) = (before, NONE);
        match before {
            NONE => self.oldest = id,
            before => self.nodes[before as usize].newer = id,
        }
    }

    fn unlink(&mut self, id: u32) {
        let Node { newer, older, .. } = self.nodes[id as usize];
        match newer {
            NONE => self.newest = older,
            newer => self.nodes[newer as usize].older = older,
        }
        match older {
            NONE => self.oldest = newer,
            older => self.nodes[older as usize].newer = newer,
        }
    }

    /// Nodes by time of use, the least recently used first.
    pub(crate) fn oldest_first(&self) -> impl Iterator<Item = NodeId> + '_ {
        let next = |id: &u32| Some(self.nodes[*id as usize].newer).filter(|id| *id != NONE);
        std::iter::successors(Some(self.oldest).filter(|id| *id != NONE), next).map(NodeId)
    }

    /// The same, the most recently used first.
    pub(crate) fn newest_first(&self) -> impl Iterator<Item = NodeId> + '_ {
        let next = |id: &u32| Some(self.nodes[*id as usize].older).filter(|id| *id != NONE);
        std::iter::successors(Some(self.newest).filter(|id| *id != NONE), next).map(NodeId)
    }

    /// Whether a node may be evicted: nothing follows it, and no sequence goes on from it.
    pub(crate) fn may_evict(&self, id: NodeId) -> bool {
        let node = self.node(id);
        node.child == NONE && node.users == 0
    }

    /// Removes a node, whose blocks and state the caller has taken.
    ///
    /// # Panics
    /// When it may not go, or is a root.
    pub(crate) fn remove(&mut self, id: NodeId) {
        assert!(self.may_evict(id), "somebody needs this node");
        let parent = self.parent(id).expect("roots hold nothing");
        self.unlink(id.0);
        let Node { next, before, .. } = *self.node(id);
        match before {
            NONE => self.node_mut(parent).child = next,
            before => self.nodes[before as usize].next = next,
        }
        if next != NONE {
            self.nodes[next as usize].before = before;
        }
        self.forget(id);
        self.prune_root(parent);
    }

    /// Removes a root that no prefix begins with any more: clients choose salts, so there is no bound to them.
    fn prune_root(&mut self, id: NodeId) {
        if self.parent(id).is_none() && self.may_evict(id) {
            self.forget(id);
        }
    }

    fn forget(&mut self, id: NodeId) {
        let node = self.node_mut(id);
        node.len = 0;
        let hash = node.hash;
        self.by_hash.remove(&hash);
        self.free.push(id.0);
    }
}

fn truncated(hash: blake3::Hash) -> BlockHash {
    hash.as_bytes()[..16].try_into().expect("32 bytes")
}
