//! What attention on integers needs beside keys and values: sizes, scratch, and the rows that kernels work on.

use std::ops::Range;

use crate::attention::kv::{AttentionMode, KvShape};
use crate::attention::paged::PARTITION;
use crate::attention::partition::QueryRow;
use crate::attention::prefill::{BATCH, PrefillScratch};

/// Positions, or columns of values, of a panel of quads.
pub const PANEL: usize = 32;
/// Bytes of a panel's quads.
pub const QUADS: usize = 4 * PANEL;
/// In front of a query's quads: its scale, and what shifted keys add to its products, negative (an i32's bits).
pub const HEADER: usize = 2;
/// With at least so many rows tiles are faster, though some of their rows multiply nothing.
pub const FOR_TILES: usize = 8;
/// Rows, at most, that read the cache directly: laying it out would cost more than what it saves them.
pub const DIRECT: usize = 4;
/// Words of a cache line.
const LINE: usize = 16;

/// Bytes of an integer: planes of quads.
fn planes(mode: AttentionMode) -> usize {
    if mode == AttentionMode::Int16 { 2 } else { 1 }
}

/// Four elements each, in whole registers of sixteen.
pub fn k_quads(k_dim: usize) -> usize {
    k_dim.next_multiple_of(64) / 4
}

/// Columns of values, in whole panels.
pub fn padded_v(v_dim: usize) -> usize {
    v_dim.next_multiple_of(PANEL)
}

/// Words of a partition that is laid out.
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
pub fn score_len(planes: usize) -> usize {
    PARTITION + planes * PARTITION / 4
}

/// Words of scratch for `rows` query rows.
pub fn scratch_len(shape: &KvShape, rows: usize) -> usize {
    let each = score_len(planes(shape.mode)) + padded_v(shape.v_dim);
    LINE + packed_len(shape) + rows * q_stride(shape) + batch(rows) * each
}

/// Scratch, divided: [`PrefillScratch::widened`] is for what is laid out, [`PrefillScratch::q`] for queries as integers, [`PrefillScratch::scores`] ends with the weights' bytes.
pub fn room<'a>(shape: &KvShape, rows: usize, scratch: &'a mut [f32]) -> PrefillScratch<'a> {
    let (q_stride, v_stride, batch) = (q_stride(shape), padded_v(shape.v_dim), batch(rows));
    let skip = scratch.as_ptr().align_offset(4 * LINE).min(LINE);
    let (widened, rest) = scratch[skip..].split_at_mut(packed_len(shape));
    let (q, rest) = rest.split_at_mut(rows * q_stride);
    let (scores, rest) = rest.split_at_mut(batch * score_len(planes(shape.mode)));
    PrefillScratch { widened, q, scores, sums: &mut rest[..batch * v_stride], q_stride, v_stride }
}

/// Words as bytes.
pub fn bytes_of(words: &mut [f32]) -> &mut [u8] {
    // SAFETY: as many bytes; both types take any bits.
    unsafe { std::slice::from_raw_parts_mut(words.as_mut_ptr().cast(), 4 * words.len()) }
}

/// Some rows, and what becomes of them in a partition.
pub struct Batch<'a, 'q> {
    pub rows: &'a mut [QueryRow<'q>],
    /// `[rows, PARTITION]`
    pub scores: &'a mut [f32],
    /// Weights as integers, `[rows, planes, PARTITION]`.
    pub bytes: &'a mut [u8],
    /// Scales of the weights.
    pub scales: [f32; BATCH],
    /// `[rows, v_stride]`
    pub sums: &'a mut [f32],
}

impl<'a, 'q> Batch<'a, 'q> {
    /// Checks that all that kernels rely on is there. `strides`: elements of a query, and of a row's sums.
    pub fn new(
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
