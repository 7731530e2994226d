//! One partition of attention on integers: keys and values of eight or sixteen bits are laid out once for all query rows, and both products are sums of products
//! of bytes, exact in any order.
//!
//! Sixteen positions' scores, and sixteen columns of weighted sums, share a register: four elements of a key, or four positions of a column, lie together for each
//! of its lanes, as instruction sets multiply bytes. Keys are shifted by 128, since one side of such a product is unsigned; what that adds to a score is known
//! from the query. Weights are unsigned by themselves.
//!
//! Integers of sixteen bits are two planes of bytes, high and low. Their product is 256 times that of the high bytes plus the two mixed ones; that of the low bytes
//! is left out.

mod direct;
mod pack;
mod products;
mod weigh;

use std::ops::Range;

use super::kv::{AttentionMode, KvShape, KvType, store_row};
use super::paged::{PARTITION, Paged};
use super::partition::{QueryRow, Rule};
use super::prefill::{BATCH, PrefillScratch};
use crate::Isa;
#[cfg(target_arch = "x86_64")]
use crate::isa::Level;

pub use pack::{Packed, pack};

/// Positions, or columns of values, of a panel of quads.
const PANEL: usize = 32;
/// Bytes of a panel's quads.
const QUADS: usize = 4 * PANEL;
/// In front of a query's quads: its scale, and what shifted keys add to its products, negative (an i32's bits).
const HEADER: usize = 2;
/// From so many rows on, tiles are quicker, though some of their rows multiply nothing.
const FOR_TILES: usize = 8;
/// So few rows read the cache directly: laying it out would cost more than what it saves them.
pub const DIRECT: usize = 4;
/// Words of a cache line.
const LINE: usize = 16;

/// Bytes of an integer: planes of quads.
fn planes(mode: AttentionMode) -> usize {
    if mode == AttentionMode::Int16 { 2 } else { 1 }
}

/// Four elements each, in whole registers of sixteen.
fn k_quads(k_dim: usize) -> usize {
    k_dim.next_multiple_of(64) / 4
}

fn padded_v(v_dim: usize) -> usize {
    v_dim.next_multiple_of(PANEL)
}

/// Words for [`pack`].
fn packed_len(shape: &KvShape) -> usize {
    planes(shape.mode) * (PARTITION * k_quads(shape.k_dim) + PARTITION / 4 * padded_v(shape.v_dim))
}

/// Rows that there is room for at once: as many as whole tiles have, where there may be some.
fn batch(rows: usize) -> usize {
    if rows < FOR_TILES { rows } else { BATCH }
}

/// Words from one query to the next.
fn q_stride(shape: &KvShape) -> usize {
    HEADER + planes(shape.mode) * k_quads(shape.k_dim)
}

/// Words of a row's scores and of its weights' bytes.
fn score_len(planes: usize) -> usize {
    PARTITION + planes * PARTITION / 4
}

/// Words of scratch for `rows` query rows.
pub fn scratch_len(shape: &KvShape, rows: usize) -> usize {
    let each = score_len(planes(shape.mode)) + padded_v(shape.v_dim);
    LINE + packed_len(shape) + rows * q_stride(shape) + batch(rows) * each
}

/// Scratch, divided: [`PrefillScratch::widened`] is for [`pack`], [`PrefillScratch::q`] for [`quantise_query`], [`PrefillScratch::scores`] ends with the weights' bytes.
pub fn room<'a>(shape: &KvShape, rows: usize, scratch: &'a mut [f32]) -> PrefillScratch<'a> {
    let (q_stride, v_stride, batch) = (q_stride(shape), padded_v(shape.v_dim), batch(rows));
    let skip = scratch.as_ptr().align_offset(4 * LINE).min(LINE);
    let (widened, rest) = scratch[skip..].split_at_mut(packed_len(shape));
    let (q, rest) = rest.split_at_mut(rows * q_stride);
    let (scores, rest) = rest.split_at_mut(batch * score_len(planes(shape.mode)));
    PrefillScratch { widened, q, scores, sums: &mut rest[..batch * v_stride], q_stride, v_stride }
}

/// Words as bytes.
fn bytes_of(words: &mut [f32]) -> &mut [u8] {
    // SAFETY: as many bytes; both types take any bits.
    unsafe { std::slice::from_raw_parts_mut(words.as_mut_ptr().cast(), 4 * words.len()) }
}

/// A query as integers: its header and its quads (high ones, then low ones), zeros beyond its elements.
pub fn quantise_query(isa: Isa, mode: AttentionMode, q: &[f32], to: &mut [f32]) {
    let (header, quads) = to.split_at_mut(HEADER);
    let (dim, mut scale) = (q.len(), [0; 4]);
    let sum = |bytes: &[u8]| bytes.iter().map(|q| i32::from(*q as i8)).sum::<i32>();
    let bytes = bytes_of(quads);
    if mode == AttentionMode::Int16 {
        store_row(isa, KvType::Int16, q, &mut bytes[..2 * dim], &mut scale);
        let plane = bytes.len() / 2;
        bytes.copy_within(dim..2 * dim, plane);
        bytes[dim..plane].fill(0);
        bytes[plane + dim..].fill(0);
        // Both planes of keys are shifted: once by the query's high bytes (once more by 256 times these), once by its low ones.
        let (high, low) = (sum(&bytes[..dim]), sum(&bytes[plane..plane + dim]));
        header[0] = 256.0 * f32::from_le_bytes(scale);
        header[1] = f32::from_bits((257 * high + low).wrapping_mul(-128) as u32);
    } else {
        let (own, rest) = bytes.split_at_mut(dim);
        store_row(isa, KvType::Int8, q, own, &mut scale);
        rest.fill(0);
        header[0] = f32::from_le_bytes(scale);
        header[1] = f32::from_bits((-128 * sum(own)) as u32);
    }
}

/// What [`attend_integers`] fills for some rows.
struct Batch<'a, 'q> {
    rows: &'a mut [QueryRow<'q>],
    /// `[rows, PARTITION]`
    scores: &'a mut [f32],
    /// Weights as integers, `[rows, planes, PARTITION]`.
    bytes: &'a mut [u8],
    /// Of those.
    scales: [f32; BATCH],
    /// `[rows, v_stride]`
    sums: &'a mut [f32],
}

impl<'a, 'q> Batch<'a, 'q> {
    /// Checks that all that kernels rely on is there. `strides`: elements of a query, and of a row's sums.
    fn new(
        planes: usize,
        seen: &Range<usize>,
        strides: (usize, usize),
        rows: &'a mut [QueryRow<'q>],
        scores: &'a mut [f32],
        sums: &'a mut [f32],
    ) -> Batch<'a, 'q> {
        let (n, each, (q_stride, v_stride)) = (rows.len(), score_len(planes), strides);
        assert!(n <= BATCH && scores.len() >= n * each && sums.len() >= n * v_stride);
        for row in rows.iter() {
            let v = &row.visible;
            assert!(row.q.len() == q_stride && (v.is_empty() || seen.start <= v.start && v.end <= seen.end));
        }
        let (scores, bytes) = scores.split_at_mut(scores.len() / each * PARTITION);
        Batch { rows, scores, bytes: bytes_of(bytes), scales: [0.0; BATCH], sums }
    }
}

/// As [`attend_integers`], of a few rows, at most [`DIRECT`], straight from the cache.
pub fn attend_directly(isa: Isa, at: &Paged, rule: Rule, rows: &mut [QueryRow], scores: &mut [f32], sums: &mut [f32]) {
    let (planes, scales) = pack::planes_of(at);
    let strides = (HEADER + planes * k_quads(at.k_dim), padded_v(at.v_dim));
    let mut batch = Batch::new(planes, &at.seen, strides, rows, scores, sums);
    direct::dots_of_all(isa, at, planes, &mut batch);
    weigh::weigh(isa, planes, scales, rule, &mut batch, false);
    direct::sums_of_all(isa, at, planes, &mut batch);
}

/// Sets `m` and `l` of the rows that see something, and their weighted sums of values, `v_stride` apart. Queries are as [`quantise_query`] leaves them; `scores` has room
/// for [`score_len`] per row.
pub fn attend_integers(isa: Isa, at: &Packed, rule: Rule, rows: &mut [QueryRow], scores: &mut [f32], sums: &mut [f32]) {
    let mut batch = Batch::new(at.planes, &at.seen, (at.q_stride(), at.v_stride), rows, scores, sums);
    #[cfg(target_arch = "x86_64")]
    if isa.level() == Level::Amx && products::fills_tiles(at, &batch) {
        // SAFETY: checked by `fills_tiles`, and an `Isa` of this level is made only where it is supported.
        unsafe { products::by_tiles(isa, at, rule, &mut batch) };
        return;
    }
    products::dots_of_all(isa, at, &mut batch);
    weigh::weigh(isa, at.planes, at.scales, rule, &mut batch, false);
    products::sums_of_all(isa, at, &mut batch);
}
