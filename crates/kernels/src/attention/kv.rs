//! How keys and values are stored: element types, where a row lies in the pool, writing one.

use std::ops::Range;

use half::f16;
use half::slice::HalfFloatSliceExt;

use crate::lanes::Lanes;

/// The element type of cached keys and values. (8-bit, with a scale per token and head, joins here: a variant, its row
/// length, its [`Element`].)
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KvType {
    F32,
    Bf16,
    F16,
}

impl KvType {
    /// Bytes per element.
    pub const fn size(self) -> usize {
        match self {
            KvType::F32 => 4,
            KvType::Bf16 | KvType::F16 => 2,
        }
    }
}

/// Where one layer's keys and values lie in a pool of blocks: inside each block, K `[kv_heads, block_tokens, k_dim]` and V
/// `[kv_heads, block_tokens, v_dim]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvShape {
    /// Bytes from one block's start to the next one's.
    pub block_bytes: usize,
    /// Bytes from a block's start to the layer's K, and to its V.
    pub k_offset: usize,
    pub v_offset: usize,
    pub block_tokens: usize,
    pub kv_heads: usize,
    pub k_dim: usize,
    pub v_dim: usize,
    pub kv_type: KvType,
}

impl KvShape {
    /// The bytes of one head's K at a slot (block number times `block_tokens` plus offset), from the pool's start.
    pub fn k_at(&self, slot: usize, kv_head: usize) -> Range<usize> {
        self.at(slot, kv_head, self.k_offset, self.k_dim)
    }

    /// The bytes of one head's V at a slot.
    pub fn v_at(&self, slot: usize, kv_head: usize) -> Range<usize> {
        self.at(slot, kv_head, self.v_offset, self.v_dim)
    }

    fn at(&self, slot: usize, kv_head: usize, offset: usize, dim: usize) -> Range<usize> {
        assert!(kv_head < self.kv_heads, "KV head {kv_head} of {}", self.kv_heads);
        let (block, token) = (slot / self.block_tokens, slot % self.block_tokens);
        let row = dim * self.kv_type.size();
        let start = block * self.block_bytes + offset + (kv_head * self.block_tokens + token) * row;
        start..start + row
    }
}

/// A pool of blocks, to read.
#[derive(Clone, Copy)]
pub struct KvView<'a> {
    pub bytes: &'a [u8],
    pub shape: KvShape,
}

/// Writes one head's key or value `x` into `row`, the bytes of [`KvShape::k_at`] or [`KvShape::v_at`], rounding to nearest even.
pub fn store_row(kv_type: KvType, x: &[f32], row: &mut [u8]) {
    assert_eq!(row.len(), x.len() * kv_type.size(), "{} elements in {} bytes", x.len(), row.len());
    match kv_type {
        KvType::F32 => {
            for (x, b) in x.iter().zip(row.as_chunks_mut::<4>().0) {
                *b = x.to_le_bytes();
            }
        }
        KvType::Bf16 => {
            for (x, b) in x.iter().zip(row.as_chunks_mut::<2>().0) {
                let bits = x.to_bits();
                let rounded = (bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16) as u16;
                // A NaN stays one.
                let nan = (bits >> 16) as u16 | 0x40;
                *b = if x.is_nan() { nan } else { rounded }.to_le_bytes();
            }
        }
        KvType::F16 => {
            for (x, b) in x.chunks(64).zip(row.chunks_mut(128)) {
                let mut halves = [f16::ZERO; 64];
                let halves = &mut halves[..x.len()];
                halves.convert_from_f32_slice(x);
                for (h, b) in halves.iter().zip(b.as_chunks_mut::<2>().0) {
                    *b = h.to_le_bytes();
                }
            }
        }
    }
}

/// An element type as kernels read it.
///
/// # Safety
/// As for [`Lanes`]; pointers are valid for the elements read.
#[allow(clippy::missing_safety_doc)]
pub trait Element {
    const SIZE: usize;
    unsafe fn load<V: Lanes>(p: *const u8) -> V;
    /// The first `n <= 16`, the rest zero.
    unsafe fn load_first<V: Lanes>(p: *const u8, n: usize) -> V;
}

/// The first `n` elements of two bytes, in a full register's worth.
#[inline(always)]
unsafe fn pad(p: *const u8, n: usize) -> [u8; 32] {
    let mut bytes = [0; 32];
    // SAFETY: the caller vouches for `n <= 16` elements at `p`.
    unsafe { std::ptr::copy_nonoverlapping(p, bytes.as_mut_ptr(), 2 * n) };
    bytes
}

#[derive(Clone, Copy)]
pub struct F32;
impl Element for F32 {
    const SIZE: usize = 4;
    #[inline(always)]
    unsafe fn load<V: Lanes>(p: *const u8) -> V {
        // SAFETY: as the caller vouches.
        unsafe { V::load(p.cast()) }
    }
    #[inline(always)]
    unsafe fn load_first<V: Lanes>(p: *const u8, n: usize) -> V {
        // SAFETY: as the caller vouches.
        unsafe { V::load_first(p.cast(), n) }
    }
}

#[derive(Clone, Copy)]
pub struct Bf16;
impl Element for Bf16 {
    const SIZE: usize = 2;
    #[inline(always)]
    unsafe fn load<V: Lanes>(p: *const u8) -> V {
        // SAFETY: as the caller vouches.
        unsafe { V::load_bf16(p) }
    }
    #[inline(always)]
    unsafe fn load_first<V: Lanes>(p: *const u8, n: usize) -> V {
        // SAFETY: as the caller vouches.
        unsafe { V::load_bf16(pad(p, n).as_ptr()) }
    }
}

#[derive(Clone, Copy)]
pub struct F16;
impl Element for F16 {
    const SIZE: usize = 2;
    #[inline(always)]
    unsafe fn load<V: Lanes>(p: *const u8) -> V {
        // SAFETY: as the caller vouches.
        unsafe { V::load_f16(p) }
    }
    #[inline(always)]
    unsafe fn load_first<V: Lanes>(p: *const u8, n: usize) -> V {
        // SAFETY: as the caller vouches.
        unsafe { V::load_f16(pad(p, n).as_ptr()) }
    }
}
