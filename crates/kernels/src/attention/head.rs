//! Heads and runs of tokens.

use std::ops::Range;

use super::kv::KvView;
use super::paged::PARTITION;

/// One KV head in one layer, and the parameters of its attention.
#[derive(Clone, Copy)]
pub struct Head<'a> {
    /// Its keys and values.
    pub kv: KvView<'a>,
    /// The number of the KV head.
    pub kv_head: usize,
    /// Query heads that share the KV head.
    pub group: usize,
    /// Scores are multiplied by it.
    pub scale: f32,
    /// The number of last positions that a token sees, its own among them; at least 1. `None`: all.
    pub window: Option<usize>,
    /// Scores become `cap * tanh(s / cap)` (Gemma 2).
    pub softcap: Option<f32>,
    /// One logit per query head of the group, `[group]`, that takes part in the softmax without a value (gpt-oss).
    pub sinks: Option<&'a [f32]>,
}

/// Consecutive query tokens of one sequence. Their keys and values are already in the cache.
#[derive(Clone, Copy)]
pub struct Run<'a> {
    /// Block numbers in ascending position.
    pub table: &'a [u32],
    /// The position of the first token.
    pub position: usize,
    /// The first token's row of the queries and of the outputs.
    pub row: usize,
    /// Tokens.
    pub tokens: usize,
}

impl Run<'_> {
    /// A run of no tokens.
    pub const EMPTY: Run<'static> = Run { table: &[], position: 0, row: 0, tokens: 0 };

    /// The last token's position.
    pub(super) fn last(&self) -> usize {
        self.position + self.tokens - 1
    }
}

impl Head<'_> {
    /// The first position that a token at `position` sees.
    pub(super) fn first_visible(&self, position: usize) -> usize {
        self.window.map_or(0, |w| (position + 1).saturating_sub(w))
    }

    /// The partitions that a token at `position` sees, wholly or in part.
    pub fn partitions(&self, position: usize) -> Range<usize> {
        self.first_visible(position) / PARTITION..position / PARTITION + 1
    }

    /// The positions of a partition that any token from `first` to `last` sees.
    pub(super) fn seen(&self, first: usize, last: usize, p: usize) -> Range<usize> {
        let base = p * PARTITION;
        let (from, to) =
            (self.first_visible(first).saturating_sub(base), (last + 1).saturating_sub(base).min(PARTITION));
        if from < to { from..to } else { 0..0 }
    }

    /// Elements of a part ([`attend_partition`](super::attend_partition)): for each query head `v_dim` weighted sums, the greatest score and the sum of weights.
    pub fn part_len(&self) -> usize {
        self.group * (self.kv.shape.v_dim + 2)
    }
}
