//! Encoded activations.
//!
//! Int8 activations are stored in [`ORDER`] inside each eight columns. A mask and a shift unpack 4-bit weights into even columns in one register and odd ones in
//! another, and in this order they meet their activations without a shuffle.

/// Columns of a group of int8 activations, which share a scale.
pub const GROUP: usize = 32;

/// Byte j of each eight q is that of column `ORDER[j]`.
pub const ORDER: [usize; 8] = [0, 2, 4, 6, 1, 3, 5, 7];

/// Encoded activations of n tokens, [n, cols] row-major and dense.
#[derive(Clone, Copy)]
pub enum Input<'a> {
    F32(&'a [f32]),
    /// Bits of bf16, from [`encode_bf16`](crate::activations::encode_bf16).
    Bf16(&'a [u16]),
    /// From [`encode_int8`](crate::activations::encode_int8).
    Int8 {
        /// In [`ORDER`](crate::activations::ORDER) inside each eight columns.
        q: &'a [i8],
        /// `sx`: [n, cols / 32]
        scales: &'a [f32],
        /// `mx`: [n, cols / 32]
        sums: &'a [f32],
    },
}

impl Input<'_> {
    /// Elements of all tokens.
    pub(crate) fn len(&self) -> usize {
        match self {
            Input::F32(x) => x.len(),
            Input::Bf16(x) => x.len(),
            Input::Int8 { q, .. } => q.len(),
        }
    }
}
