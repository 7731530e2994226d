//! The arguments of sparse indexers.

use crate::layers::Norm;
use crate::memory::{RotaryId, Tensor};

/// Layer norm: of what is left of the mean, over its root of the mean of squares, times a weight, plus a bias.
#[derive(Clone, Copy, Debug)]
pub struct LayerNorm {
    /// `[1, cols]`, and what is added to the mean of squares.
    pub scale: Norm,
    /// `[1, cols]`
    pub bias: Tensor,
}

/// What weighs the keys of a pool's positions, element by element: a softmax of logits (GLM-5.3).
#[derive(Clone, Copy, Debug)]
pub struct PoolLogits {
    /// `[tokens, dim]`: logits of each token; may be changed.
    pub logits: Tensor,
    /// `[1, size * dim]`: added to the logits of a pool's positions, one after the other.
    pub bias: Tensor,
}

/// An indexer that selects whole pools of positions (GLM-5.3, Qwen4-Exp). A pool is `size` positions in a row; its key is the average of theirs. Positions behind the last whole pool are always seen.
#[derive(Clone, Copy, Debug)]
pub struct IndexPool {
    /// Positions of a pool, which divide those that are selected.
    pub size: usize,
    /// What weighs keys; `None`: they weigh alike.
    pub logits: Option<PoolLogits>,
}

/// What becomes of keys before they are scored.
#[derive(Clone, Copy, Debug)]
pub enum IndexNorm {
    /// Each token's key goes through a layer norm and is turned by its position.
    Tokens(LayerNorm),
    /// A token's key is stored as it is. That of a pool goes through this norm, and is turned by the position of its first token.
    Pools(Norm),
}

/// The indexer of a layer (DeepSeek-V3.2): which positions the attention behind it sees. The cache holds one key for each token, in a group of its own with
/// one KV head and no values. With pools that logits weigh it has a second KV head, for those of each token; and where a token is the last of its pool, the pool's key takes the place of its own.
#[derive(Clone, Debug)]
pub struct IndexLayer {
    /// `[tokens, heads * dim]`; may be changed.
    pub q: Tensor,
    /// `[tokens, dim]`, before its norm; may be changed.
    pub k: Tensor,
    /// `[tokens, heads]`: how much each head counts; `None`: all count once.
    pub weights: Option<Tensor>,
    /// Of keys.
    pub norm: IndexNorm,
    /// Heads.
    pub heads: usize,
    /// The most positions that are selected for a token: all that it sees, unless there are pools.
    pub top: usize,
    /// What is selected are whole pools of positions.
    pub pool: Option<IndexPool>,
    /// The rotary embedding of the first elements of queries and keys.
    pub rotary: RotaryId,
    /// Elements 2i and 2i + 1 of what is rotated are turned together, instead of i and half of it later.
    pub adjacent_pairs: bool,
    /// The cache group of its keys.
    pub group: usize,
    /// The layer in that cache group.
    pub layer: usize,
    /// The cache group of the rows that are selected.
    pub rows_group: usize,
    /// Scores of heads are multiplied by this, before what is below 0 becomes 0.
    pub scale: f32,
    /// The weights of heads are multiplied by this.
    pub weight_scale: f32,
}

impl IndexLayer {
    /// Elements of a key, and of each head's query.
    pub fn dim(&self) -> usize {
        self.k.cols
    }

    /// Positions of a pool; 1 without pools.
    pub fn pool_size(&self) -> usize {
        self.pool.map_or(1, |pool| pool.size)
    }

    /// The most positions that a token sees.
    pub fn most_seen(&self) -> usize {
        self.top + self.pool_size() - 1
    }

    /// KV heads of its cache group.
    pub fn kv_heads(&self) -> usize {
        1 + usize::from(self.pool_logits().is_some())
    }

    /// What weighs the keys of a pool's positions.
    pub fn pool_logits(&self) -> Option<PoolLogits> {
        self.pool.and_then(|pool| pool.logits)
    }
}
