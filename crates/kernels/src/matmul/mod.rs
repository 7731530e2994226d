//! Matrix products: `y = W x` for every weight format, one token or many, straight from the checkpoint's own bytes.
//!
//! Weights are unpacked and go through one of five dot products, which [`WeightFormat::activation_format`] chooses: f32 lanes (`f32_dot`), bf16
//! pairs (`bf16_dot`), integer groups (`int8_dot`), or integers of 11 bits with weights in groups (`int11_dot`) or floats of sixteen bits (`block_integers`). `docs/numerics.md` defines each output to the bit. A result must not depend on the range
//! of rows, the number or order of tokens, the blocking or the instruction set. [`matmul`] allocates nothing
//! when its [`Scratch`] was sized ahead, and never reads past the end of a matrix (which may be the end of a mapped file).

mod bf16_dot;
mod block_integers;
mod f32_dot;
mod int11_dot;
mod int8_dot;

use crate::Isa;
use crate::format::{ActivationFormat, Activations, Float, WeightFormat};
use crate::input::Input;
use crate::instructions::int8_dot::Groups;
use crate::matrix::Matrix;
use crate::scratch::Scratch;
use std::ops::Range;

/// Callers split rows among threads in multiples of this: a multiple of every kernel's row tile.
pub const ROW_BLOCK: usize = 32;

/// `tile[i * rows.len() + r] = dot(w[rows.start + r], x[tokens[i]])`; `tile` has `tokens.len() * rows.len()` elements.
///
/// Allocates nothing if `scratch` was made with [`scratch_bytes`] of at least these numbers of rows and tokens.
///
/// # Panics
/// Where a length, a row, a token or the pairing of weight format and activations is wrong.
pub fn matmul(
    isa: Isa,
    w: &Matrix,
    rows: Range<usize>,
    x: Input,
    tokens: &[u32],
    tile: &mut [f32],
    scratch: &mut Scratch,
) {
    let w = w.rows_slice(rows);
    assert_eq!(tile.len(), tokens.len() * w.rows, "the tile is [tokens, rows]");
    if tile.is_empty() {
        return;
    }
    if w.cols == 0 {
        return tile.fill(0.0);
    }
    assert!(x.len().is_multiple_of(w.cols), "{} activations for {} columns", x.len(), w.cols);
    let n = x.len() / w.cols;
    assert!(tokens.iter().all(|&t| (t as usize) < n), "a token is not among the {n} of the input");
    match (w.format, x) {
        (WeightFormat::Float(_), Input::F32(x)) => f32_dot::direct(isa, w, x, tokens, tile),
        (WeightFormat::Float(Float::Bf16), Input::Bf16(x)) => bf16_dot::direct(isa, w, x, tokens, tile, scratch),
        (WeightFormat::Float(_), Input::Int11(x)) => block_integers::direct(isa, w, x, tokens, tile, scratch),
        (format @ WeightFormat::Float(_), _) => panic!("{format:?} does not take activations in this encoding"),
        (_, Input::F32(x)) => f32_dot::grouped(isa, w, x, tokens, tile, scratch),
        (_, Input::Bf16(x)) => bf16_dot::grouped(isa, w, x, tokens, tile, scratch),
        (_, Input::Int8 { q, scales, sums }) => {
            assert!(scales.len() == q.len() / 32 && sums.len() == q.len() / 32, "one scale and one sum per 32");
            int8_dot::grouped(isa, w, Groups { q, scales, sums }, tokens, tile, scratch)
        }
        (_, Input::Int11(x)) => int11_dot::grouped(isa, w, x, tokens, tile, scratch),
    }
}

/// Bytes of [`Scratch`] that [`matmul`] needs for ranges of up to `rows` rows and up to `tokens` tokens.
pub fn scratch_bytes(format: WeightFormat, cols: usize, rows: usize, tokens: usize, mode: Activations) -> usize {
    match (format, format.activation_format(mode)) {
        (WeightFormat::Float(_), ActivationFormat::Bf16) => bf16_dot::direct_scratch_bytes(rows, cols, tokens),
        (WeightFormat::Float(_), ActivationFormat::Int11) => block_integers::scratch_bytes(tokens),
        (WeightFormat::Float(_), _) => 0,
        (_, ActivationFormat::F32) => f32_dot::scratch_bytes(cols),
        (_, ActivationFormat::Bf16) => bf16_dot::grouped_scratch_bytes(cols, tokens),
        (_, ActivationFormat::Int8) => {
            int8_dot::scratch_bytes(format.grouped().expect("integers have groups"), cols, tokens)
        }
        (_, ActivationFormat::Int11) => {
            int11_dot::scratch_bytes(format.grouped().expect("integers have groups"), cols, tokens)
        }
    }
}
