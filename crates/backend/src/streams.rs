//! The arguments of hyper-connections.

use crate::layers::{Linear, Norm};
use crate::memory::Tensor;

/// The beginning of a block between several residual streams (Xie et al. 2026), or of what is behind the last (DeepSeek-V4), which gives nothing back to them: then there is only the first part of the weights, n of them. From all streams of a token come its weights: how much of each stream goes into the block, how much of what the block puts out goes to each,
/// and how much of each stream to each.
#[derive(Clone, Debug)]
pub struct StreamLayer {
    /// `[tokens, n * hidden]` for n streams, of which there are at most 8.
    pub streams: Tensor,
    /// Over all columns of `streams`.
    pub norm: Norm,
    /// From what is normed to the logits of the weights, `[(2 + n) * n]`: in, out, and from each stream to each. It is always computed in f32.
    pub mix: Linear,
    /// `[1, (2 + n) * n]`, added to the logits.
    pub bias: Tensor,
    /// What logits are multiplied by before: of each of the three parts.
    pub scales: [f32; 3],
    /// Added to weights and to sums that they are divided by.
    pub eps: f32,
    /// How often rows and columns of the third part are divided by their sums (Sinkhorn and Knopp 1967).
    pub rounds: usize,
    /// `[tokens, (2 + n) * n]`: the weights.
    pub weights: Tensor,
    /// `[tokens, hidden]`: the block's input.
    pub out: Tensor,
}

impl StreamLayer {
    /// How many streams there are.
    pub fn count(&self) -> usize {
        self.streams.cols / self.out.cols
    }
}
