//! How keys and values are stored: element types, the place of a row in the pool, writing one.

use std::ops::Range;

use half::f16;
use half::slice::HalfFloatSliceExt;

use crate::dispatch::simd;
use crate::instructions::f32_dot::Lanes;

/// The element type of cached keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KvType {
    F32,
    Bf16,
    F16,
    /// Integers of -127..=127 and, for each key and each value of a token and head, an f32 scale.
    Int8,
    /// Integers of -32639..=32639 and a scale, as for [`KvType::Int8`]. A row's high bytes come first, and then its low bytes, both signed.
    Int16,
}

impl KvType {
    /// Bytes per element.
    pub const fn size(self) -> usize {
        match self {
            KvType::F32 => 4,
            KvType::Bf16 | KvType::F16 | KvType::Int16 => 2,
            KvType::Int8 => 1,
        }
    }

    /// Bytes of a row's scale; 0 where there is none.
    pub const fn scale_size(self) -> usize {
        match self {
            KvType::F32 | KvType::Bf16 | KvType::F16 => 0,
            KvType::Int8 | KvType::Int16 => 4,
        }
    }

    /// Bytes of `rows` keys (or values) of `dim` elements and their scales.
    pub const fn bytes(self, rows: usize, dim: usize) -> usize {
        rows * (dim * self.size() + self.scale_size())
    }
}

/// How attention works on cached keys and values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum AttentionMode {
    /// On what they stand for.
    #[default]
    F32,
    /// On their integers, with queries and weights as integers too: only for [`KvType::Int8`].
    Int8,
    /// The same with integers of sixteen bits: only for [`KvType::Int16`], which has no other mode.
    Int16,
}

impl AttentionMode {
    /// The elements of the longest key that sums of [`AttentionMode::Int16`] have room for in 32 bits.
    pub const LONGEST_INT16: usize = 516;

    /// Whether it works on keys and values of this type.
    pub const fn takes(self, kv_type: KvType) -> bool {
        match self {
            AttentionMode::F32 => !matches!(kv_type, KvType::Int16),
            AttentionMode::Int8 => matches!(kv_type, KvType::Int8),
            AttentionMode::Int16 => matches!(kv_type, KvType::Int16),
        }
    }
}

/// The layout of one layer's keys and values in a pool of blocks: inside each block, K `[kv_heads, block_tokens, k_dim]` and V
/// `[kv_heads, block_tokens, v_dim]`, each followed by its scales `[kv_heads, block_tokens]` where the type has them. Or values are the ends of their keys,
/// and nothing else is stored (latent attention).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvShape {
    /// Bytes from one block's start to the next one's.
    pub block_bytes: usize,
    /// Bytes from a block's start to the layer's K, and to its V.
    pub k_offset: usize,
    /// Bytes from the start of a block to this layer's values.
    pub v_offset: usize,
    /// Positions of a block.
    pub block_tokens: usize,
    /// Heads of keys and values.
    pub kv_heads: usize,
    /// Elements of a key.
    pub k_dim: usize,
    /// Elements of a value.
    pub v_dim: usize,
    /// A value is the last `v_dim` elements of its key. `v_offset` means nothing then.
    pub values_in_keys: bool,
    /// Tables name a slot for each position, instead of a block for as many as it has (positions that an indexer has selected).
    pub by_slot: bool,
    /// What is read are the last of each so many positions (pools of an indexer); 1: all of them.
    pub every: usize,
    /// Their stored type.
    pub kv_type: KvType,
    pub mode: AttentionMode,
}

impl KvShape {
    /// Positions of an entry of a table.
    pub(super) fn entry_tokens(&self) -> usize {
        if self.by_slot { 1 } else { self.block_tokens }
    }

    /// Bytes from a value's high bytes to its low ones, where it has both.
    pub(super) fn v_plane(&self) -> usize {
        if self.values_in_keys { self.k_dim } else { self.v_dim }
    }

    /// Bytes from a position's key to the next one's in its block, and from its value to the next one's.
    pub(super) fn row_strides(&self) -> [usize; 2] {
        let dims = [self.k_dim, if self.values_in_keys { self.k_dim } else { self.v_dim }];
        dims.map(|dim| dim * self.kv_type.size())
    }

    /// The bytes of one head's K at a slot (block number times `block_tokens` plus offset), from the pool's start.
    pub fn k_at(&self, slot: usize, kv_head: usize) -> Range<usize> {
        self.at(slot, kv_head, self.k_offset, self.k_dim)
    }

    /// The bytes of one head's V at a slot.
    pub fn v_at(&self, slot: usize, kv_head: usize) -> Range<usize> {
        if self.values_in_keys {
            // Of two planes, from the value's first byte in one to its last in the other.
            let key = self.k_at(slot, kv_head);
            let size = if self.kv_type == KvType::Int16 { 1 } else { self.kv_type.size() };
            return key.start + (self.k_dim - self.v_dim) * size..key.end;
        }
        self.at(slot, kv_head, self.v_offset, self.v_dim)
    }

    /// The bytes of the scale of one head's K at a slot: none where the type has no scales.
    pub fn k_scale_at(&self, slot: usize, kv_head: usize) -> Range<usize> {
        self.scale_at(slot, kv_head, self.k_offset, self.k_dim)
    }

    /// The bytes of the scale of one head's V at a slot.
    pub fn v_scale_at(&self, slot: usize, kv_head: usize) -> Range<usize> {
        if self.values_in_keys {
            return self.k_scale_at(slot, kv_head);
        }
        self.scale_at(slot, kv_head, self.v_offset, self.v_dim)
    }

    fn at(&self, slot: usize, kv_head: usize, offset: usize, dim: usize) -> Range<usize> {
        self.row_at(slot, kv_head, offset, dim * self.kv_type.size())
    }

    fn scale_at(&self, slot: usize, kv_head: usize, offset: usize, dim: usize) -> Range<usize> {
        let rows = self.kv_heads * self.block_tokens * dim * self.kv_type.size();
        self.row_at(slot, kv_head, offset + rows, self.kv_type.scale_size())
    }

    fn row_at(&self, slot: usize, kv_head: usize, offset: usize, row: usize) -> Range<usize> {
        assert!(kv_head < self.kv_heads, "KV head {kv_head} of {}", self.kv_heads);
        let (block, token) = (slot / self.block_tokens, slot % self.block_tokens);
        let start = block * self.block_bytes + offset + (kv_head * self.block_tokens + token) * row;
        start..start + row
    }
}

/// A pool of blocks, to read.
#[derive(Clone, Copy)]
pub struct KvView<'a> {
    /// The bytes of all blocks.
    pub bytes: &'a [u8],
    /// The layout of a layer in them.
    pub shape: KvShape,
}

#[inline(always)]
unsafe fn store_row_lanes<V: Lanes>(kv_type: KvType, x: &[f32], row: &mut [u8], scale: &mut [u8]) {
    assert_eq!(row.len(), x.len() * kv_type.size(), "{} elements in {} bytes", x.len(), row.len());
    assert_eq!(scale.len(), kv_type.scale_size(), "room for the scale");
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
        // SAFETY: the shell has the instruction set.
        KvType::Int8 => scale.copy_from_slice(&unsafe { quantise::<V, Eight>(x, row) }.to_le_bytes()),
        // SAFETY: as above.
        KvType::Int16 => scale.copy_from_slice(&unsafe { quantise::<V, Sixteen>(x, row) }.to_le_bytes()),
    }
}

simd! {
    /// Writes one head's key or value `x` into `row`, the bytes of [`KvShape::k_at`] or [`KvShape::v_at`], rounding to nearest even, and
    /// the scale of those integers, if there is one, into the bytes of [`KvShape::k_scale_at`] or [`KvShape::v_scale_at`].
    pub fn store_row(kv_type: KvType, x: &[f32], row: &mut [u8], scale: &mut [u8]) = store_row_lanes
}

/// How floats become integers of a certain size.
///
/// # Safety
/// As for [`Lanes`].
#[allow(clippy::missing_safety_doc)]
trait Integers {
    /// The greatest of them, and bytes of each.
    const TOP: f32;
    const SIZE: usize;
    /// Writes sixteen lanes of at most [`Integers::TOP`] in size, rounded, at `p`, and second bytes `apart` further on.
    unsafe fn store<V: Lanes>(x: V, p: *mut u8, apart: usize);
}

/// Of [`KvType::Int8`].
struct Eight;
impl Integers for Eight {
    const TOP: f32 = 127.0;
    const SIZE: usize = 1;
    #[inline(always)]
    unsafe fn store<V: Lanes>(x: V, p: *mut u8, _apart: usize) {
        // SAFETY: as the caller vouches.
        unsafe { x.store_rounded_i8(p) }
    }
}

/// Of [`KvType::Int16`].
struct Sixteen;
impl Integers for Sixteen {
    const TOP: f32 = 32639.0;
    const SIZE: usize = 2;
    #[inline(always)]
    unsafe fn store<V: Lanes>(x: V, p: *mut u8, apart: usize) {
        // SAFETY: as the caller vouches.
        unsafe { x.store_rounded_i16(p, p.add(apart)) }
    }
}

/// `a = max |x|`, `q = round(x * (TOP / a))`, ties to even; returns the scale `a / TOP`. What is not finite stays visible, as a scale of NaN.
#[inline(always)]
unsafe fn quantise<V: Lanes, T: Integers>(x: &[f32], q: &mut [u8]) -> f32 {
    assert_eq!(T::SIZE * x.len(), q.len());
    let (n, whole) = (x.len(), x.len() / 16 * 16);
    // SAFETY: every access stays inside the slices; a rest goes through a buffer; the caller vouches for the instruction set.
    unsafe {
        let (zero, mut greatest, mut odd) = (V::splat(0.0), V::splat(0.0), V::splat(0.0));
        for i in (0..n).step_by(16) {
            let x = V::load_first(x.as_ptr().add(i), 16.min(n - i));
            greatest = zero.sub(x).max(x).max(greatest);
            // Stays 0 but for a NaN or an infinity, which the maximum may pass over.
            odd = x.fma(zero, odd);
        }
        if odd.sum().is_nan() {
            q.fill(0);
            return f32::NAN;
        }
        let a = greatest.max_lane();
        let inv = T::TOP / a;
        // Of zeros, or of values so small that TOP / a is infinite: all 0.
        let inv = V::splat(if inv.is_finite() { inv } else { 0.0 });
        for i in (0..whole).step_by(16) {
            T::store(V::load(x.as_ptr().add(i)).mul(inv), q.as_mut_ptr().add(i), n);
        }
        if whole < n {
            let mut rest = [0; 32];
            T::store(V::load_first(x.as_ptr().add(whole), n - whole).mul(inv), rest.as_mut_ptr(), 16);
            for (q, rest) in q.chunks_exact_mut(n).zip(rest.chunks_exact(16)) {
                q[whole..].copy_from_slice(&rest[..n - whole]);
            }
        }
        a / T::TOP
    }
}

/// An element type as kernels read it.
///
/// # Safety
/// As for [`Lanes`]; pointers are valid for the elements read.
#[allow(clippy::missing_safety_doc)]
pub trait KvElement {
    const SIZE: usize;
    unsafe fn load<V: Lanes>(p: *const u8) -> V;
    /// The first `n <= 16`, the rest zero.
    unsafe fn load_first<V: Lanes>(p: *const u8, n: usize) -> V;
}

/// The first `n` bytes, at most 32, in a full register's worth.
#[inline(always)]
unsafe fn pad(p: *const u8, n: usize) -> [u8; 32] {
    let mut bytes = [0; 32];
    // SAFETY: the caller vouches for `n <= 32` bytes at `p`.
    unsafe { std::ptr::copy_nonoverlapping(p, bytes.as_mut_ptr(), n) };
    bytes
}

/// f32 keys and values.
#[derive(Clone, Copy)]
pub struct F32;
impl KvElement for F32 {
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

/// bf16 keys and values.
#[derive(Clone, Copy)]
pub struct Bf16;
impl KvElement for Bf16 {
    const SIZE: usize = 2;
    #[inline(always)]
    unsafe fn load<V: Lanes>(p: *const u8) -> V {
        // SAFETY: as the caller vouches.
        unsafe { V::load_bf16(p) }
    }
    #[inline(always)]
    unsafe fn load_first<V: Lanes>(p: *const u8, n: usize) -> V {
        // SAFETY: as the caller vouches.
        unsafe { V::load_bf16(pad(p, 2 * n).as_ptr()) }
    }
}

/// f16 keys and values.
#[derive(Clone, Copy)]
pub struct F16;
impl KvElement for F16 {
    const SIZE: usize = 2;
    #[inline(always)]
    unsafe fn load<V: Lanes>(p: *const u8) -> V {
        // SAFETY: as the caller vouches.
        unsafe { V::load_f16(p) }
    }
    #[inline(always)]
    unsafe fn load_first<V: Lanes>(p: *const u8, n: usize) -> V {
        // SAFETY: as the caller vouches.
        unsafe { V::load_f16(pad(p, 2 * n).as_ptr()) }
    }
}

/// The integers, without their scale.
#[derive(Clone, Copy)]
pub struct Int8;
impl KvElement for Int8 {
    const SIZE: usize = 1;
    #[inline(always)]
    unsafe fn load<V: Lanes>(p: *const u8) -> V {
        // SAFETY: as the caller vouches.
        unsafe { V::load_i8(p) }
    }
    #[inline(always)]
    unsafe fn load_first<V: Lanes>(p: *const u8, n: usize) -> V {
        // SAFETY: as the caller vouches.
        unsafe { V::load_i8(pad(p, n).as_ptr()) }
    }
}
