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
mod room;
mod weigh;

use super::kv::{AttentionMode, KvType, store_row};
use super::paged::Paged;
use super::partition::{QueryRow, Rule};
use crate::Isa;
#[cfg(target_arch = "x86_64")]
use crate::avx512::amx::Tiles;
#[cfg(target_arch = "x86_64")]
use crate::isa::Level;

pub use pack::{Packed, pack};
use room::{Batch, HEADER, bytes_of, k_quads, padded_v};
pub use room::{DIRECT, room, scratch_len};

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
/// for `score_len` per row.
pub fn attend_integers(isa: Isa, at: &Packed, rule: Rule, rows: &mut [QueryRow], scores: &mut [f32], sums: &mut [f32]) {
    let mut batch = Batch::new(at.planes, &at.seen, (at.q_stride(), at.v_stride), rows, scores, sums);
    #[cfg(target_arch = "x86_64")]
    if isa.level() == Level::Amx && products::fills_tiles(at, &batch) {
        // SAFETY: checked by `fills_tiles`, and an `Isa` of this level is made only where it is supported.
        unsafe {
            let tiles = Tiles::whole();
            products::dots_by_tiles(isa, &tiles, at, &mut batch);
            weigh::weigh(isa, at.planes, at.scales, rule, &mut batch, true);
            products::sums_by_tiles(isa, &tiles, at, &mut batch);
        }
        products::scale_sums(isa, &mut batch, at.v_stride);
        return;
    }
    products::dots_of_all(isa, at, &mut batch);
    weigh::weigh(isa, at.planes, at.scales, rule, &mut batch, false);
    products::sums_of_all(isa, at, &mut batch);
}
