//! Averages of cached rows, element by element: keys of pools (GLM-5.3), where an indexer that scores runs of positions has one key for each run, and entries of compressed attention (DeepSeek-V4).

// No iterator adapters: their closures may be compiled without the instruction set of the kernel around them.
#![allow(clippy::needless_range_loop)]

use super::kv::{Bf16, F16, F32, Int8, KvElement, KvType, KvView};
use crate::Isa;
use crate::dispatch::simd;
use crate::instructions::f32_dot::Lanes;
use crate::math::exp;

/// The most positions of a pool.
pub const MOST_POOLED: usize = 128;

/// Where a row that is averaged is.
#[derive(Clone, Copy, Debug)]
pub struct Pooled {
    /// Its position.
    pub position: usize,
    /// The KV heads of the row itself, and of the logits that weigh it.
    pub heads: [usize; 2],
}

/// The rows of a pool: of each position its key, and the logits that weigh it, if there are any.
struct Pool<'a> {
    /// First those of keys, then those of logits.
    rows: [[&'a [u8]; MOST_POOLED]; 2],
    /// Of those rows; 1 where the type has no scales.
    scales: [[f32; MOST_POOLED]; 2],
    size: usize,
    kv_type: KvType,
}

#[inline(always)]
unsafe fn average_lanes<V: Lanes>(pool: &Pool, bias: Option<&[f32]>, out: &mut [f32]) {
    let dim = out.len();
    assert!((1..=MOST_POOLED).contains(&pool.size), "pools of {}", pool.size);
    assert!(bias.is_none_or(|bias| bias.len() == pool.size * dim), "a bias for each of {}", pool.size);
    let bytes = dim * pool.kv_type.size();
    for p in 0..pool.size {
        assert!(pool.rows[0][p].len() == bytes, "rows of {dim}");
        assert!(bias.is_none() || pool.rows[1][p].len() == bytes, "rows of {dim}");
    }
    // SAFETY: checked above; the shell has the instruction set.
    unsafe {
        match pool.kv_type {
            KvType::F32 => typed::<V, F32>(pool, bias, out),
            KvType::Bf16 => typed::<V, Bf16>(pool, bias, out),
            KvType::F16 => typed::<V, F16>(pool, bias, out),
            KvType::Int8 => typed::<V, Int8>(pool, bias, out),
            KvType::Int16 => unreachable!("keys of an indexer have no sixteen-bit integers"),
        }
    }
}

/// Elements `i .. i + n` of a position's row: of its key, or of its logits.
#[inline(always)]
unsafe fn read<V: Lanes, T: KvElement>(pool: &Pool, which: usize, p: usize, i: usize, n: usize) -> V {
    // SAFETY: as the caller vouches.
    unsafe {
        let x = T::load_first::<V>(pool.rows[which][p].as_ptr().add(i * T::SIZE), n);
        if pool.kv_type.scale_size() > 0 { x.mul(V::splat(pool.scales[which][p])) } else { x }
    }
}

#[inline(always)]
unsafe fn typed<V: Lanes, T: KvElement>(pool: &Pool, bias: Option<&[f32]>, out: &mut [f32]) {
    let dim = out.len();
    let mut i = 0;
    while i < dim {
        let n = (dim - i).min(16);
        // SAFETY: `n` elements from `i` on are inside each row, as the caller checked.
        unsafe {
            let Some(bias) = bias else {
                let mut key = V::splat(0.0);
                for p in 0..pool.size {
                    key = key.add(read::<V, T>(pool, 0, p, i, n));
                }
                key.div(V::splat(pool.size as f32)).store_first(out.as_mut_ptr().add(i), n);
                i += n;
                continue;
            };
            let mut logits = [V::splat(0.0); MOST_POOLED];
            for p in 0..pool.size {
                let logit = read::<V, T>(pool, 1, p, i, n);
                logits[p] = logit.add(V::load_first(bias.as_ptr().add(p * dim + i), n));
            }
            let mut most = logits[0];
            for p in 1..pool.size {
                most = logits[p].max(most);
            }
            let (mut sum, mut key) = (V::splat(0.0), V::splat(0.0));
            for p in 0..pool.size {
                let e = exp(logits[p].sub(most));
                sum = sum.add(e);
                key = e.fma(read::<V, T>(pool, 0, p, i, n), key);
            }
            key.div(sum).store_first(out.as_mut_ptr().add(i), n);
        }
        i += n;
    }
}

simd! {
    /// Each element of a pool's key is the average of its positions' keys there, weighed by a softmax of their logits; without a bias the plain one.
    fn average(pool: &Pool, bias: Option<&[f32]>, out: &mut [f32]) = average_lanes
}

/// The average of cached rows, of which there is one at least. `bias`: `[rows, k_dim]`, added to the logits; without it there are none, and all rows weigh alike. `out`: `[k_dim]`.
///
/// # Panics
/// With more than [`MOST_POOLED`] rows, when one is not in the table, and with rows of sixteen-bit integers.
pub fn average_rows(
    isa: Isa,
    kv: &KvView,
    table: &[u32],
    rows: impl ExactSizeIterator<Item = Pooled>,
    bias: Option<&[f32]>,
    out: &mut [f32],
) {
    let size = rows.len();
    assert!(size <= MOST_POOLED, "a pool of {size} positions");
    let shape = &kv.shape;
    let none: &[u8] = &[];
    let mut pool =
        Pool { rows: [[none; MOST_POOLED]; 2], scales: [[1.0; MOST_POOLED]; 2], size, kv_type: shape.kv_type };
    for (i, Pooled { position, heads }) in rows.enumerate() {
        let (block, token) = (position / shape.block_tokens, position % shape.block_tokens);
        let slot = table[block] as usize * shape.block_tokens + token;
        for (of, head) in heads.into_iter().enumerate().take(1 + usize::from(bias.is_some())) {
            pool.rows[of][i] = &kv.bytes[shape.k_at(slot, head)];
            if let Ok(scale) = <[u8; 4]>::try_from(&kv.bytes[shape.k_scale_at(slot, head)]) {
                pool.scales[of][i] = f32::from_le_bytes(scale);
            }
        }
    }
    average(isa, &pool, bias, out);
}
