//! Where one partition's keys and values lie: in the cache, found through the block table, or widened in scratch.

use std::marker::PhantomData;
use std::ops::Range;

use super::PARTITION;
use super::kv::{Bf16, Element, F16, F32, Int8, KvType, KvView};
use crate::lanes::Lanes;
use crate::simd;

/// Columns of widened values that lie together: a partition of them fits the first-level cache, which rows a power of two apart do not.
const PANEL: usize = 32;

/// How many positions ahead stored keys and values are asked for.
pub const AHEAD: usize = 16;

/// Where a partition's keys and values lie.
pub struct Located<'a> {
    /// Those that are not `seen` point to a row that is.
    pub keys: [*const u8; PARTITION],
    /// Row by row, and then addresses to prefetch; or all of them in panels of [`PANEL`] columns: `[panels, PARTITION, PANEL]` f32.
    pub values: [*const u8; PARTITION + AHEAD],
    pub panels: Option<*const f32>,
    /// The scales of those keys and values that are seen, where they have some. What is not seen has any scale.
    pub scales: Option<Scales>,
    pub seen: Range<usize>,
    pub kv_type: KvType,
    pub k_dim: usize,
    pub v_dim: usize,
    pool: PhantomData<&'a [u8]>,
}

/// Of a partition's keys and values.
#[derive(Clone, Copy)]
pub struct Scales {
    pub k: [f32; PARTITION],
    pub v: [f32; PARTITION],
}

impl<'a> Located<'a> {
    /// Looks the positions `base + seen` up and checks that they lie in the pool.
    pub fn new(kv: &KvView<'a>, table: &[u32], kv_head: usize, base: usize, seen: Range<usize>) -> Located<'a> {
        let s = &kv.shape;
        let mut keys = [kv.bytes.as_ptr(); PARTITION];
        let mut values = [kv.bytes.as_ptr(); PARTITION + AHEAD];
        let scaled = s.kv_type.scale_size() > 0;
        let mut scales = scaled.then_some(Scales { k: [0.0; PARTITION], v: [0.0; PARTITION] });
        let mut i = seen.start;
        while i < seen.end {
            // The rest of a block: its rows lie one after the other.
            let (block, token) = ((base + i) / s.block_tokens, (base + i) % s.block_tokens);
            let n = (s.block_tokens - token).min(seen.end - i);
            let slot = table[block] as usize * s.block_tokens + token;
            let (k, v) = (s.k_at(slot, kv_head), s.v_at(slot, kv_head));
            let (k_row, v_row) = (k.len(), v.len());
            let k = &kv.bytes[k.start..k.start + n * k_row];
            let v = &kv.bytes[v.start..v.start + n * v_row];
            for j in 0..n {
                keys[i + j] = k[j * k_row..].as_ptr();
                values[i + j] = v[j * v_row..].as_ptr();
            }
            if let Some(scales) = &mut scales {
                let (k, v) = (s.k_scale_at(slot, kv_head).start, s.v_scale_at(slot, kv_head).start);
                read_scales(&kv.bytes[k..k + 4 * n], &mut scales.k[i..i + n]);
                read_scales(&kv.bytes[v..v + 4 * n], &mut scales.v[i..i + n]);
            }
            i += n;
        }
        // Tiles of positions read a little beyond what is seen, and forget it.
        let last = keys[seen.end - 1];
        keys[..seen.start].fill(last);
        keys[seen.end..].fill(last);
        let (kv_type, k_dim, v_dim) = (s.kv_type, s.k_dim, s.v_dim);
        Located { keys, values, panels: None, scales, seen, kv_type, k_dim, v_dim, pool: PhantomData }
    }

    /// The partition that will be read next: its first keys are prefetched at the end of this one.
    pub fn followed_by(&mut self, next: &Located) {
        for (i, to) in self.values[PARTITION..].iter_mut().enumerate() {
            *to = next.keys[next.seen.start].wrapping_add(i * self.k_dim * self.kv_type.size());
        }
    }
}

fn read_scales(bytes: &[u8], to: &mut [f32]) {
    for (b, to) in bytes.as_chunks::<4>().0.iter().zip(to) {
        *to = f32::from_le_bytes(*b);
    }
}

/// Elements of room for [`widen`].
pub fn widened_len(k_dim: usize, v_dim: usize) -> usize {
    PARTITION * (k_dim + v_dim.next_multiple_of(PANEL))
}

#[inline(always)]
unsafe fn widen_lanes<'a, V: Lanes>(from: &Located<'a>, room: &'a mut [f32]) -> Located<'a> {
    // SAFETY: `from` was checked when it was made; the shell has the instruction set.
    unsafe {
        match from.kv_type {
            KvType::F32 => widen_typed::<V, F32>(from, room),
            KvType::Bf16 => widen_typed::<V, Bf16>(from, room),
            KvType::F16 => widen_typed::<V, F16>(from, room),
            KvType::Int8 => widen_typed::<V, Int8>(from, room),
        }
    }
}

#[inline(always)]
unsafe fn widen_typed<'a, V: Lanes, T: Element>(from: &Located<'a>, room: &'a mut [f32]) -> Located<'a> {
    let (k_dim, v_dim) = (from.k_dim, from.v_dim);
    let (keys, panels) = room[..widened_len(k_dim, v_dim)].split_at_mut(PARTITION * k_dim);
    for i in from.seen.clone() {
        // SAFETY: `from` was checked when it was made; row i of the keys and of each panel is inside `room`.
        unsafe {
            widen_row::<V, T>(from.keys[i], keys[i * k_dim..].as_mut_ptr(), k_dim);
            for c in (0..v_dim).step_by(PANEL) {
                let to = panels[PARTITION * c + i * PANEL..].as_mut_ptr();
                widen_row::<V, T>(from.values[i].add(c * T::SIZE), to, PANEL.min(v_dim - c));
            }
        }
    }
    let mut to = [keys.as_ptr().cast::<u8>(); PARTITION];
    let last = from.seen.end - 1;
    for (i, to) in to.iter_mut().enumerate() {
        let key = if from.seen.contains(&i) { i } else { last };
        *to = keys[key * k_dim..].as_ptr().cast();
    }
    let panels = Some(panels.as_ptr());
    Located { keys: to, panels, seen: from.seen.clone(), kv_type: KvType::F32, ..*from }
}

#[inline(always)]
unsafe fn widen_row<V: Lanes, T: Element>(from: *const u8, to: *mut f32, n: usize) {
    let whole = n / 16 * 16;
    // SAFETY: `n` elements at both; the caller vouches for the instruction set.
    unsafe {
        for i in (0..whole).step_by(16) {
            T::load::<V>(from.add(i * T::SIZE)).store(to.add(i));
        }
        if whole < n {
            T::load_first::<V>(from.add(whole * T::SIZE), n - whole).store_first(to.add(whole), n - whole);
        }
    }
}

simd! {
    /// Copies the keys and values that are seen to `room` ([`widened_len`] elements), as f32 (which changes no value; scales stay apart), in
    /// the layout that suits many rows.
    pub fn widen<'a>(from: &Located<'a>, room: &'a mut [f32]) -> Located<'a> = widen_lanes
}

/// How values are reached: the address of column c of position i.
///
/// # Safety
/// The position is seen, or at most [`AHEAD`] beyond those of a partition and only prefetched; the column exists.
#[allow(clippy::missing_safety_doc)]
pub trait Values: Copy {
    /// Whether that is memory, to be asked for ahead of its use.
    const STORED: bool;
    unsafe fn at(self, i: usize, c: usize) -> *const u8;
}

/// In the cache, row by row.
#[derive(Clone, Copy)]
pub struct Stored<'a, T>(pub &'a [*const u8; PARTITION + AHEAD], pub PhantomData<T>);
impl<T: Element + Copy> Values for Stored<'_, T> {
    const STORED: bool = true;
    #[inline(always)]
    unsafe fn at(self, i: usize, c: usize) -> *const u8 {
        // SAFETY: the caller vouches for `i`; what is only prefetched may lie anywhere.
        unsafe { self.0.get_unchecked(i) }.wrapping_add(c * T::SIZE)
    }
}

/// In panels. No tile of columns crosses one.
#[derive(Clone, Copy)]
pub struct Panels(pub *const f32);
impl Values for Panels {
    const STORED: bool = false;
    #[inline(always)]
    unsafe fn at(self, i: usize, c: usize) -> *const u8 {
        // SAFETY: the caller vouches for `i` and `c`.
        unsafe { self.0.add(c / PANEL * (PARTITION * PANEL) + i * PANEL + c % PANEL).cast() }
    }
}
