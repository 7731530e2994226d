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
        /// Activations, in [`ORDER`](crate::activations::ORDER) inside each eight columns.
        q: &'a [i8],
        /// `sx`: [n, cols / 32]
        scales: &'a [f32],
        /// `mx`: [n, cols / 32]
        sums: &'a [f32],
    },
    /// From [`encode_int11`](crate::int11::encode_int11).
    Int11(Int11<'a>),
}

/// Integers of 11 significant bits: element i of a token is `n * 2^e * tok`, with e for each 64 columns and tok for the token.
#[derive(Clone, Copy)]
pub struct Int11<'a> {
    /// `[n, cols]`, at most 2^14 in size
    pub n: &'a [i16],
    /// `2^(e - 20)`: [n, cols / 64, rounded up]
    pub steps: &'a [f32],
    /// Sums of 32 integers times their step: [n, cols / 32]
    pub sums: &'a [f32],
    /// `tok * 2^20`: `[n]`
    pub scales: &'a [f32],
    /// The same for AMX, [n / 16, cols / 64], each rounded up, from [`lay_out`](crate::int11_tiles::lay_out). Empty where nobody wants it.
    pub tiles: &'a [TokenTile],
}

/// Tokens and columns of a [`TokenTile`].
pub const TOKENS: usize = 16;
pub(crate) const TILE_COLUMNS: usize = 64;

/// A group of 64 columns of sixteen tokens. An integer is `256 high + low`. Inside each eight columns the bytes are in [`ORDER`].
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub struct TokenTile {
    pub(crate) low: [[u8; TILE_COLUMNS]; TOKENS],
    pub(crate) high: [[i8; TILE_COLUMNS]; TOKENS],
    pub(crate) steps: [f32; TOKENS],
    /// Sums of all columns, and of each half of them, times the step.
    pub(crate) whole: [f32; TOKENS],
    pub(crate) halves: [[f32; TOKENS]; 2],
}

impl Default for TokenTile {
    fn default() -> Self {
        let of = [0.0; TOKENS];
        TokenTile {
            low: [[0; TILE_COLUMNS]; TOKENS],
            high: [[0; TILE_COLUMNS]; TOKENS],
            steps: of,
            whole: of,
            halves: [of; 2],
        }
    }
}

impl Input<'_> {
    /// Elements of all tokens.
    pub(crate) fn len(&self) -> usize {
        match self {
            Input::F32(x) => x.len(),
            Input::Bf16(x) => x.len(),
            Input::Int8 { q, .. } => q.len(),
            Input::Int11(x) => x.n.len(),
        }
    }
}
