//! The keys and values of one partition, found in the cache through the block table.

use std::marker::PhantomData;
use std::ops::Range;

use super::kv::{KvType, KvView};

/// Positions that are reduced together, from a multiple of as many on.
pub const PARTITION: usize = 128;

/// How many positions ahead stored keys and values are asked for.
pub const AHEAD: usize = 32;

/// The addresses of a partition's keys and values.
pub struct Paged<'a> {
    /// Those that are not `seen` point to a row that is.
    pub keys: [*const u8; PARTITION],
    /// Row by row, and then addresses to prefetch.
    pub values: [*const u8; PARTITION + AHEAD],
    /// The scales of those keys and values that are seen, where they have some. What is not seen has any scale.
    pub scales: Option<KvScales>,
    /// The positions of the partition that any query sees.
    pub seen: Range<usize>,
    /// The stored type.
    pub kv_type: KvType,
    /// Elements of a key.
    pub k_dim: usize,
    /// Elements of a value.
    pub v_dim: usize,
    /// Bytes from a value's high bytes to its low ones, where it has both.
    pub v_plane: usize,
    pool: PhantomData<&'a [u8]>,
}

/// Of a partition's keys and values.
#[derive(Clone, Copy)]
pub struct KvScales {
    /// Of each position's key.
    pub k: [f32; PARTITION],
    /// Of each position's value.
    pub v: [f32; PARTITION],
}

impl<'a> Paged<'a> {
    /// Looks up the positions `base + seen` and checks that they are inside the pool.
    pub fn new(kv: &KvView<'a>, table: &[u32], kv_head: usize, base: usize, seen: Range<usize>) -> Paged<'a> {
        let s = &kv.shape;
        let mut keys = [kv.bytes.as_ptr(); PARTITION];
        let mut values = [kv.bytes.as_ptr(); PARTITION + AHEAD];
        let scaled = s.kv_type.scale_size() > 0;
        let mut scales = scaled.then_some(KvScales { k: [0.0; PARTITION], v: [0.0; PARTITION] });
        let mut i = seen.start;
        while i < seen.end {
            // The rest of a block: its rows are contiguous.
            let entry = s.entry_tokens();
            let position = (base + i) * s.every + s.every - 1;
            let (block, token) = (position / entry, position % entry);
            let n = if s.every > 1 { 1 } else { (entry - token).min(seen.end - i) };
            let slot = table[block] as usize * entry + token;
            let (k, v) = (s.k_at(slot, kv_head), s.v_at(slot, kv_head));
            let [k_row, v_row] = s.row_strides();
            let k = &kv.bytes[k.start..k.end + (n - 1) * k_row];
            let v = &kv.bytes[v.start..v.end + (n - 1) * v_row];
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
        Paged { keys, values, scales, seen, kv_type, k_dim, v_dim, v_plane: s.v_plane(), pool: PhantomData }
    }

    /// What will be read next, from a key on: it is prefetched at the end of this partition.
    pub fn followed_by(&mut self, key: *const u8) {
        for (i, to) in self.values[PARTITION..].iter_mut().enumerate() {
            *to = key.wrapping_add(i * self.k_dim * self.kv_type.size());
        }
    }
}

/// The address of a position's key, for a prefetch.
pub fn key_at(kv: &KvView, table: &[u32], kv_head: usize, position: usize) -> *const u8 {
    let s = &kv.shape;
    let entry = s.entry_tokens();
    let slot = table[position / entry] as usize * entry + position % entry;
    kv.bytes.as_ptr().wrapping_add(s.k_at(slot, kv_head).start)
}

fn read_scales(bytes: &[u8], to: &mut [f32]) {
    for (b, to) in bytes.as_chunks::<4>().0.iter().zip(to) {
        *to = f32::from_le_bytes(*b);
    }
}
