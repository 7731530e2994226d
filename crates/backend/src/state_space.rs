//! The arguments of Mamba-2's layers.

use crate::layers::Norm;
use crate::memory::Tensor;

/// The shape of a Mamba-2 layer (Dao and Gu 2024).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateSpaceShape {
    /// Heads.
    pub heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Groups of heads beside each other, each with B and C of its own; they divide the heads.
    pub groups: usize,
    /// Elements of B and of C: rows of a head's state.
    pub state: usize,
    /// Taps of the short convolution.
    pub taps: usize,
}

impl StateSpaceShape {
    /// Elements of all heads.
    pub fn inner(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Channels of the convolution: x, B and C.
    pub fn channels(&self) -> usize {
        self.inner() + 2 * self.groups * self.state
    }

    /// The group of a head.
    pub fn group(&self, head: usize) -> usize {
        head / (self.heads / self.groups)
    }

    /// f32 elements of one layer's recurrent state: a matrix `[state, head_dim]` per head, then the last `taps - 1` inputs of the convolution.
    pub fn state_len(&self) -> usize {
        self.inner() * self.state + (self.taps - 1) * self.channels()
    }
}

/// One Mamba-2 layer, without its projections.
#[derive(Clone, Debug)]
pub struct StateSpaceLayer {
    /// Heads and sizes.
    pub shape: StateSpaceShape,
    /// `[tokens, channels]`: x, B, C before the convolution.
    pub xbc: Tensor,
    /// `[tokens, inner]`: what gates the output.
    pub z: Tensor,
    /// `[tokens, heads]`: time steps before their softplus.
    pub dt: Tensor,
    /// `[tokens, inner]`
    pub out: Tensor,
    /// `[taps, channels]`: the oldest tap first.
    pub conv: Tensor,
    /// `[1, channels]`, if the convolution has one.
    pub conv_bias: Option<Tensor>,
    /// `[1, heads]`: what time steps are multiplied by, `-exp(A_log)`.
    pub decay: Tensor,
    /// `[1, heads]`: added to `dt`.
    pub dt_bias: Tensor,
    /// `[1, heads]`: what of x goes to the output past the state (D).
    pub skip: Tensor,
    /// The norm of the gated output, `[1, inner]`: over each group by itself.
    pub norm: Norm,
    /// The recurrent layer, counted from 0.
    pub layer: usize,
}
