//! Nodes for the second tier, a disk. They are copied out before they are evicted, or while they are still in memory.

use std::collections::VecDeque;

use crate::prefix::BlockHash;

/// A node to be written to disk, with its blocks and state by number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EvictedNode {
    /// Hash of all tokens up to its end.
    pub hash: BlockHash,
    /// Hash of the node before it.
    pub before: BlockHash,
    /// Position of its first token.
    pub position: u32,
    /// The tokens of a block, or of the part of a block at whose end there is a state or a conversation ends.
    pub tokens: Vec<u32>,
    /// `[groups]`: none where a window has moved beyond.
    pub blocks: Vec<Option<u32>>,
    /// Row of the pool of states.
    pub state: Option<u32>,
}

/// What is to be written to disk.
#[derive(Debug)]
pub(crate) struct SecondTier {
    /// Prefixes with fewer tokens are not written.
    pub min_tokens: usize,
    pub evicted: Vec<EvictedNode>,
    /// Nodes that a sequence reused, so that they are likely to be wanted again.
    pub reused: VecDeque<BlockHash>,
}
