//! What goes to the second tier, which is a disk: nodes that are copied out before they are evicted, or while they are still in memory.

use std::collections::VecDeque;

use crate::prefix::BlockHash;

/// A node that is to be kept elsewhere, with its blocks and state by number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EvictedNode {
    pub hash: BlockHash,
    /// Of the node before it.
    pub before: BlockHash,
    /// Position of its first token.
    pub position: u32,
    /// Those of a block, or of the part of one at whose end there is a state or a conversation ends.
    pub tokens: Vec<u32>,
    /// `[groups]`: none where a window has moved beyond.
    pub blocks: Vec<Option<u32>>,
    /// Row of the pool of states.
    pub state: Option<u32>,
}

/// What is kept elsewhere, and what is to be.
#[derive(Debug)]
pub(crate) struct SecondTier {
    /// Prefixes with fewer tokens are not worth it.
    pub fewest: usize,
    pub leaving: Vec<EvictedNode>,
    /// Nodes that somebody took up, so that they are likely to be wanted again.
    pub used: VecDeque<BlockHash>,
}
