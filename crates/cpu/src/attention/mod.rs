//! Paged attention on the CPU: with grouped queries, over latent rows, and over what indexers select. What they have in common is here.

mod compressed;
mod grouped;
mod index;
mod latent;
mod selected;
mod turn;
mod work_split;

use std::ops::Range;

pub use compressed::{AttendOperands, CompressOperands, CompressedWork, compress, most_parts};
pub use grouped::{AttentionWork, Operands};
pub use index::{IndexOperands, IndexWork, sizes as index_sizes};
pub use latent::{LatentOperands, LatentWork, heads_at_once, most_rows, product_rows, shape_of_latents};
pub use selected::HEADS;
use sluice_backend::KvLayout;
use sluice_kernels::attention::KvShape;
pub use work_split::{PARTITION_BYTES, ROWS, SEQUENCE_BYTES, TOKEN_BYTES};

use crate::memory::Place;

/// Tokens that one task norms, rotates and stores.
const TOKENS: usize = 4;

pub fn kv_shape(layout: &KvLayout, layer: usize) -> KvShape {
    let KvLayout { kv_heads, k_dim, v_dim, kv_type, mode, .. } = *layout;
    // Where positions share rows, tables and slots are in rows, too.
    let block_tokens = layout.block_rows();
    let k_offset = layer * layout.layer_bytes();
    let v_offset = k_offset + kv_type.bytes(kv_heads * block_tokens, k_dim);
    KvShape {
        block_bytes: layout.block_bytes(),
        k_offset,
        v_offset,
        block_tokens,
        kv_heads,
        k_dim,
        v_dim,
        values_in_keys: false,
        by_slot: false,
        every: 1,
        kv_type,
        mode,
    }
}

/// The blocks of a cache group, of which this layer has a part.
pub struct Blocks<'a> {
    pub layout: KvLayout,
    pub bytes: &'a mut [u8],
}

/// The queries of a layer for tokens whose keys and values are in the cache, and where results go.
struct Queries<'a> {
    /// `[tokens, heads * k_dim]`
    q: Place,
    /// `[tokens, heads * v_dim]`
    out: Place,
    heads: usize,
    cache_group: usize,
    shape: KvShape,
    scale: f32,
    window: Option<usize>,
    softcap: Option<f32>,
    /// `[1, heads]`
    sinks: Option<Place>,
    /// Makes the queries of some heads of a token that is not alone in its step, by the task that uses them.
    prepare: &'a (dyn Fn(usize, Range<usize>) + Sync),
    /// Is told of the heads of a token whose results are there.
    finish: &'a (dyn Fn(usize, Range<usize>) + Sync),
}
