//! What the kernels of recurrent layers are given.

use super::{Norm, Parameters, Tensor};
use crate::device::sys::Address;

parameters! {
    /// The delta rule.
    Delta {
        qkv: Tensor,
        z: Tensor,
        b: Tensor,
        a: Tensor,
        out: Tensor,
        conv: Tensor,
        states: Tensor,
        decay: Address,
        dt_bias: Address,
        norm: Norm,
        mixed: Address,
        decays: Address,
        beta: Address,
        starts: Address,
        rows: Address,
        kept: Address,
        tokens: u32,
        count: u32,
        key_heads: u32,
        value_heads: u32,
        key_dim: u32,
        value_dim: u32,
        taps: u32,
        scale: f32,
        by_lanes: u32,
        tiled: u32,
        by_channel: u32,
        bound: f32,
        sigmoid_gate: u32,
        unused: u32,
    }
    /// The short convolution before recurrent layers.
    Convolution {
        x: Tensor,
        weights: Tensor,
        windows: Tensor,
        bias: Address,
        out: Address,
        sequences: Address,
        starts: Address,
        rows: Address,
        kept: Address,
        tokens: u32,
        count: u32,
        channels: u32,
        taps: u32,
    }
    /// Mamba-2 behind its convolution.
    StateSpace {
        z: Tensor,
        dt: Tensor,
        out: Tensor,
        states: Tensor,
        mixed: Address,
        decay: Address,
        dt_bias: Address,
        skip: Address,
        norm: Norm,
        starts: Address,
        rows: Address,
        kept: Address,
        tokens: u32,
        count: u32,
        heads: u32,
        head_dim: u32,
        groups: u32,
        state: u32,
    }
    /// Embeddings of n-grams on their way to residual streams.
    Ngrams {
        keys: Tensor,
        queries: Tensor,
        value: Tensor,
        streams: Tensor,
        norm: Norm,
        gated: Address,
        normed: Address,
        convolved: Address,
        rows: u32,
        hidden: u32,
        count: u32,
        scale: f32,
    }
}
