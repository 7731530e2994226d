//! The arguments of delta rules with a decay for each channel.

use crate::layers::{DeltaShape, Norm};
use crate::memory::Tensor;

/// One layer of Kimi Delta Attention (Kimi Team 2025), without its projections: a delta rule whose state forgets each channel of its keys at a pace of its own.
#[derive(Clone, Debug)]
pub struct ChannelDeltaLayer {
    /// Heads and dimensions: as many heads of keys as of values.
    pub shape: DeltaShape,
    /// `[tokens, channels]`: q, k, v before the convolution.
    pub qkv: Tensor,
    /// `[tokens, heads * value_dim]`: what gates the output, before its sigmoid.
    pub z: Tensor,
    /// `[tokens, heads]`: write strength before its sigmoid.
    pub b: Tensor,
    /// `[tokens, heads * key_dim]`: input of the decays.
    pub f: Tensor,
    /// `[tokens, heads * value_dim]`
    pub out: Tensor,
    /// `[taps, channels]`: the oldest tap first.
    pub conv: Tensor,
    /// `[1, heads]`: what the decays' softplus is multiplied by, `-exp(A_log)`; see `bound`, too.
    pub rates: Tensor,
    /// `[1, heads * key_dim]`: added to `f`.
    pub dt_bias: Tensor,
    /// The lowest logarithm of a decay: decays are `exp(bound * sigmoid((0 - rate) * (f + dt_bias)))` then, and otherwise `exp(rate * softplus(f + dt_bias))`.
    pub bound: Option<f32>,
    /// The norm of the output, over each head.
    pub norm: Norm,
    /// The recurrent layer, counted from 0.
    pub layer: usize,
}
