//! Paged attention: the cache's layout as kernels see it, and the kernels of a layer.
//!
//! Steps with one token of each sequence have one kernel that stores keys and values and attends (decode); behind many partitions, smaller blocks do it (split-k). Other
//! steps store keys and values first. Then a prompt is taken by tiles of tokens (prefill); otherwise a block takes the query heads of a token that share a KV head through
//! all partitions, or each partition has its own block and their results are joined.

use anyhow::Result;
use sluice_backend::{Activations, AttentionLayer, AttentionMode, KvLayout, KvType, Norm};

use crate::device::memory::{DeviceBuffer, Scratch};
use crate::device::stream::Gpu;
use crate::device::sys::Address;
use crate::kernels::{Kernel, STATIC_SHARED, Variant};
use crate::ops::activations::{EncodedActivations, GROUP};
use crate::ops::context::Context;
use crate::ops::selected::Selected;
use crate::parameters::{self as p, number};
use crate::weights::Needs;

/// Positions of a partition (`docs/numerics.md`).
pub(super) const PARTITION: usize = 128;

/// Query heads of a block, with the kernels for whole sequences and for partitions. The first that covers the heads of a KV head is taken.
pub(super) const TILES: [(usize, Kernel, Kernel); 3] = [
    (1, Kernel::ATTENTION_1, Kernel::ATTENTION_PARTITION_1),
    (2, Kernel::ATTENTION_2, Kernel::ATTENTION_PARTITION_2),
    (4, Kernel::ATTENTION_4, Kernel::ATTENTION_PARTITION_4),
];

/// Query heads of a block, for steps with one token of each sequence, and its kernels by the numbers of types that [`cache`] gives.
#[rustfmt::skip]
const DECODE: [(usize, [Kernel; 5]); 3] = [
    (1, [Kernel::ATTENTION_DECODE_F32_1, Kernel::ATTENTION_DECODE_F16_1, Kernel::ATTENTION_DECODE_BF16_1, Kernel::ATTENTION_DECODE_INT8_1, Kernel::ATTENTION_DECODE_INT16_1]),
    (2, [Kernel::ATTENTION_DECODE_F32_2, Kernel::ATTENTION_DECODE_F16_2, Kernel::ATTENTION_DECODE_BF16_2, Kernel::ATTENTION_DECODE_INT8_2, Kernel::ATTENTION_DECODE_INT16_2]),
    (4, [Kernel::ATTENTION_DECODE_F32_4, Kernel::ATTENTION_DECODE_F16_4, Kernel::ATTENTION_DECODE_BF16_4, Kernel::ATTENTION_DECODE_INT8_4, Kernel::ATTENTION_DECODE_INT16_4]),
];

/// The same by smaller blocks, for 16-bit keys and values of [`SPLIT_K_DIM`] elements; their threads, and the blocks that a multiprocessor runs at once.
const SPLIT_K: [(usize, Kernel); 2] = [(2, Kernel::ATTENTION_SPLIT_K_2), (4, Kernel::ATTENTION_SPLIT_K_4)];
const SPLIT_K_DIM: usize = 128;
const SPLIT_K_THREADS: u32 = 128;
const SPLIT_K_BLOCKS: usize = 4;

/// Threads of the blocks of [`DECODE`], and the blocks that a multiprocessor runs at once.
const DECODE_THREADS: u32 = 512;
const DECODE_BLOCKS: usize = 2;

/// Up to this many partitions are joined by the kernel that computes them (a constant of that kernel, too). More have a kernel of their own, because only a few late
/// blocks would join them here.
const MAX_JOINED_INSIDE: usize = 4;
/// Threads and columns of a block that joins partitions.
pub(super) const JOIN_THREADS: u32 = 128;
pub(super) const JOIN_COLUMNS: usize = 32;

/// Bytes of a partition's result for one head.
pub fn part_bytes(v_dim: usize) -> usize {
    4 * (v_dim + 2).next_multiple_of(4)
}

/// Rounds the number of partitions up to few sizes, so that steps of neighbouring lengths have the same graph.
pub(super) fn round_up(partitions: usize) -> usize {
    if partitions <= 8 { partitions.next_power_of_two() } else { partitions.next_multiple_of(8) }
}

/// A kernel that takes prompts by tiles.
struct PrefillKernel {
    kernel: Kernel,
    /// Elements of a head. If `exact`, it takes only heads of that size with 16-bit caches; otherwise any multiple of 16 up to it.
    dim: usize,
    exact: bool,
    /// Rows of a tile: tokens times the heads of a KV head. A block has four threads for each.
    rows: usize,
    /// Positions whose keys are transposed in shared memory at a time: as f32 if `exact` or if the cache has f32, otherwise in 16 bits.
    keys: usize,
    /// Stages of the ring of keys and values as the cache has them, and the positions of each.
    stages: usize,
    piece: usize,
}

/// The fastest first.
#[rustfmt::skip]
const PREFILL: [PrefillKernel; 5] = [
    PrefillKernel { kernel: Kernel::ATTENTION_PREFILL_128, dim: 128, exact: true, rows: 64, keys: 128, stages: 2, piece: 128 },
    PrefillKernel { kernel: Kernel::ATTENTION_PREFILL_256, dim: 256, exact: true, rows: 64, keys: 64, stages: 3, piece: 32 },
    PrefillKernel { kernel: Kernel::ATTENTION_PREFILL, dim: 128, exact: false, rows: 64, keys: 32, stages: 3, piece: 16 },
    PrefillKernel { kernel: Kernel::ATTENTION_PREFILL_LONG, dim: 256, exact: false, rows: 64, keys: 32, stages: 3, piece: 16 },
    PrefillKernel { kernel: Kernel::ATTENTION_PREFILL_LOW, dim: 256, exact: false, rows: 32, keys: 32, stages: 2, piece: 16 },
];

impl PrefillKernel {
    /// Whether heads of `dim` elements are taken.
    fn takes(&self, dim: usize, kv_type: KvType) -> bool {
        let halves = matches!(kv_type, KvType::F16 | KvType::Bf16);
        if self.exact { dim == self.dim && halves } else { dim.is_multiple_of(16) && dim <= self.dim }
    }

    /// Bytes of shared memory: queries, transposed keys, weights, stages. Rows are padded, so that neighbours use different banks.
    fn shared(&self, dim: usize, kv_type: KvType) -> usize {
        let floats = self.exact || kv_type == KvType::F32;
        let key = if floats { 4 * (self.keys + 4) } else { 2 * (self.keys + 8) };
        let stored = self.stages * self.piece * (dim * kv_type.size() + 16);
        dim * (4 * (self.rows + 4) + key) + 4 * PARTITION * (self.rows + 8) + stored
    }
}

/// The same on integers of eight and of sixteen bits, by the elements of a head.
const PREFILL_INTEGERS: [(usize, [Kernel; 2]); 3] = [
    (64, [Kernel::ATTENTION_INT8_64, Kernel::ATTENTION_INT16_64]),
    (128, [Kernel::ATTENTION_INT8_128, Kernel::ATTENTION_INT16_128]),
    (256, [Kernel::ATTENTION_INT8_256, Kernel::ATTENTION_INT16_256]),
];
/// Rows of a tile of these, and threads of a block.
const INTEGER_ROWS: usize = 64;
const INTEGER_THREADS: u32 = 128;
/// `kernels/attention/int16_wide.cu`: elements of a head, rows of a tile, threads, bytes of shared memory; and from how many rows on it is taken.
const WIDE_DIM: usize = 128;
const WIDE_ROWS: usize = 128;
const WIDE_THREADS: u32 = 384;
const WIDE_SHARED: usize = 1024 + 10 * 128 * 128 + PARTITION * (2 * WIDE_DIM + 16) + 8 * 4 * WIDE_DIM;
const MIN_WIDE_ROWS: usize = 256;
/// From this many tokens on a step is taken by tiles.
pub const MIN_PREFILL_TOKENS: usize = 12;

/// Scratch of attention.
#[derive(Default)]
pub struct AttentionScratch {
    /// Results of partitions: `[tokens, heads, partitions]` of [`part_bytes`].
    pub(super) parts: Scratch,
    /// `[tokens, tiles of heads]` u32: finished partitions. Zero between kernels.
    counters: Option<DeviceBuffer>,
}

impl AttentionScratch {
    pub fn bytes(&self) -> usize {
        self.parts.bytes() + self.counters.as_ref().map_or(0, |m| m.bytes)
    }

    fn counters(&mut self, gpu: &Gpu, n: usize) -> Result<Address> {
        if let Some(counters) = self.counters.as_ref().filter(|m| m.bytes >= 4 * n) {
            return Ok(counters.at);
        }
        self.counters = None;
        let memory = DeviceBuffer::zeroed(gpu, (4 * n).next_power_of_two().max(4096), "scratch")?;
        Ok(self.counters.insert(memory).at)
    }
}

/// Where a layer's keys and values are inside blocks, as [`KvLayout`] defines it.
pub(super) fn cache(pool: u64, layout: &KvLayout, layer: usize) -> p::Cache {
    let KvLayout { kv_heads, k_dim, v_dim, kv_type, .. } = *layout;
    // Where positions share rows, a block has as many places as rows.
    let block_tokens = layout.block_rows();
    let rows = kv_heads * block_tokens;
    let k = layer * layout.layer_bytes();
    let v = k + kv_type.bytes(rows, k_dim);
    let [k_scales, v_scales] =
        [k + rows * k_dim * kv_type.size(), v + rows * v_dim * kv_type.size()].map(|at| at as u64);
    p::Cache {
        pool,
        block_bytes: layout.block_bytes() as u64,
        k: k as u64,
        v: v as u64,
        k_scales,
        v_scales,
        block_tokens: number(block_tokens),
        k_dim: number(k_dim),
        v_dim: number(v_dim),
        kv_type: match kv_type {
            KvType::F32 => 0,
            KvType::F16 => 1,
            KvType::Bf16 => 2,
            KvType::Int8 => 3,
            KvType::Int16 => 4,
        },
        before_value: 0,
        unused: 0,
    }
}

impl AttentionScratch {
    /// Attention of one layer. `selected`: what each token sees, if not all. `encoded` may receive the output's int8 encoding for the next product.
    pub fn run(
        &mut self,
        context: &Context,
        (layer, selected): (&AttentionLayer, Option<Selected>),
        encoded: &mut EncodedActivations,
    ) -> Result<()> {
        let gpu = &context.gpu;
        let (pool, layout) = (context.kv[layer.group].memory.at, context.kv[layer.group].layout);
        encoded.encoded_from = None;
        let tokens = context.inputs.tokens().len();
        let (heads, kv_heads) = (layer.heads, layout.kv_heads);
        assert!(heads > 0 && heads.is_multiple_of(kv_heads), "{heads} heads for {kv_heads} KV heads");
        assert!(!layer.gated || layout.k_dim == layout.v_dim, "a gate as wide as the output");
        assert!(layer.window != Some(0), "a window of no positions");
        let q_dim = layout.k_dim * if layer.gated { 2 } else { 1 };
        let widths = [heads * q_dim, heads * layout.v_dim, kv_heads * layout.k_dim, kv_heads * layout.v_dim];
        let used = if layer.shared { 2 } else { 4 };
        for (t, width) in [layer.q, layer.out, layer.k, layer.v].into_iter().zip(widths).take(used) {
            assert!(t.rows >= tokens && t.cols == width, "{tokens} tokens of {width} in {t:?}");
        }
        let rotary = &context.rotary[layer.rotary.number()];
        assert!(2 * rotary.half() <= layout.k_dim, "{} pairs in a head of {}", rotary.half(), layout.k_dim);
        let group = context.step.groups[layer.group];
        // 1. How the work is divided
        let shared = heads / kv_heads;
        let (tile, whole, partition) = TILES.into_iter().find(|(n, ..)| *n >= shared).unwrap_or(TILES[TILES.len() - 1]);
        let tiles = kv_heads * shared.div_ceil(tile);
        let partitions = round_up(max_partitions(context, layer.window));
        let partitions = selected.map_or(partitions, |of| partitions.min(of.most().div_ceil(PARTITION)));
        let part_bytes_all = tokens * heads * partitions * part_bytes(layout.v_dim);
        let integers = layout.mode != AttentionMode::F32;
        assert!(
            layout.mode.takes(layout.kv_type),
            "attention in mode {:?} of keys and values in {:?}",
            layout.mode,
            layout.kv_type
        );
        // The scratch plan has no parts for more tokens than these.
        let split = partitions > 1
            && tokens <= MIN_PREFILL_TOKENS.max(context.inputs.sequences())
            && tokens * tiles < 2 * gpu.device.multiprocessors;
        let parts = match split {
            true => self.parts.reserve(gpu, part_bytes_all)?,
            false => 0,
        };
        let norm = |norm: Option<Norm>| norm.map_or(p::Norm::default(), |n| context.norm(&n));
        let parameters = p::Attention {
            cache: cache(pool, &layout, layer.layer),
            q: context.place(layer.q),
            k: context.place(layer.k),
            v: context.place(layer.v),
            out: context.place(layer.out),
            q_norm: norm(layer.q_norm),
            k_norm: norm(layer.k_norm),
            angles: rotary.memory.at,
            sinks: layer.sinks.map_or(0, |s| context.place(s).at),
            positions: context.step.positions,
            sequences: context.step.sequences,
            slots: group.slots,
            tables: group.tables,
            table_starts: group.table_starts,
            tokens: number(tokens),
            heads: number(heads),
            kv_heads: number(kv_heads),
            gated: layer.gated.into(),
            half: number(rotary.half()),
            window: layer.window.map_or(0, |w| number(w.min(u32::MAX as usize))),
            // Of powers of two, so that the factor of the transform is exact.
            scale: layer.scale / layout.hadamard_run() as f32,
            cap: layer.softcap.unwrap_or(0.0),
            capped: layer.softcap.is_some().into(),
            partitions: number(partitions),
            parts,
            integers: integers.into(),
            run: number(layout.hadamard_run()),
            selected: selected.map_or(0, |of| of.slots),
            top: selected.map_or(0, |of| number(of.top)),
            pool: selected.map_or(1, |of| number(of.pool)),
            ..p::Attention::default()
        };
        let join_tiles = layout.v_dim.div_ceil(JOIN_COLUMNS);
        let floats = |n: usize| number(4 * n);
        // 2. One token of each sequence: one kernel stores and attends. Where a sequence has a few, another kernel stores all of them first
        let blocks = |tile: usize| kv_heads * shared.div_ceil(tile);
        // Blocks of fewer heads finish sooner, but each reads the keys again, which costs once the device is full.
        let fits = |tile: usize| tokens * blocks(tile) * partitions <= gpu.device.multiprocessors;
        let decode_tile = [1, 2].into_iter().find(|n| *n < tile && fits(*n)).unwrap_or(tile);
        let decode = decode_kernel(context, &layout, &parameters.cache, decode_tile);
        // That kernel stores the keys and values itself, so it cannot serve layers that share those of an earlier layer. It takes all positions.
        if let Some((kernel, shared)) = decode.filter(|_| !layer.shared && selected.is_none()) {
            let tiles = blocks(decode_tile);
            let parts = if partitions > 1 { self.parts.reserve(gpu, part_bytes_all)? } else { 0 };
            // The last block to finish joins a few partitions.
            let joins_inside = partitions <= MAX_JOINED_INSIDE;
            let full = tokens * tiles * partitions > DECODE_BLOCKS * gpu.device.multiprocessors;
            let split_k = split_k_kernel(gpu, &layout, &parameters);
            // Smaller blocks finish sooner if there are many partitions, more blocks than the device runs at once, or many heads of a KV head.
            let split_k =
                split_k.filter(|_| !joins_inside || partitions > 1 && (full || heads / kv_heads > SPLIT_K[0].0));
            let counters = if joins_inside { self.counters(gpu, tokens * heads)? } else { 0 };
            // The kernel that joins has whole groups of the activations that the next product takes, and can encode them.
            let joined = partitions > 1 && (!joins_inside || split_k.is_some());
            let encodes = gpu.device.has(Variant::Joined)
                && joined
                && layout.v_dim.is_multiple_of(GROUP)
                && tokens > 1
                && context.mode == Activations::Int8;
            let view = match encodes {
                true => encoded.reserve(gpu, tokens, heads * layout.v_dim, Needs::INT8)?,
                false => p::Encoded::default(),
            };
            encoded.encoded_from = encodes.then_some(parameters.out);
            let stored = !context.inputs.has_single_rows();
            let parameters = p::Attention { parts, counters, encoded: view, stored: stored.into(), ..parameters };
            let grid = |y: usize, z: usize| [number(tokens), number(y), number(z)];
            // SAFETY: tensors, angles and slots were checked; tables reach as far as positions, as the step's inputs ensure; the scratch was just reserved.
            unsafe {
                if stored {
                    gpu.launch(Kernel::ATTENTION_STORE_KV, grid(kv_heads, 1), 64, floats(layout.k_dim), &parameters)?;
                }
                match split_k {
                    Some((tile, kernel)) => {
                        let shared = number(PARTITION * SPLIT_K_DIM * layout.kv_type.size());
                        gpu.launch(kernel, grid(blocks(tile), partitions), SPLIT_K_THREADS, shared, &parameters)?;
                    }
                    None => gpu.launch(kernel, grid(tiles, partitions), DECODE_THREADS, number(shared), &parameters)?,
                }
                if partitions > 1 && !joins_inside {
                    gpu.launch(Kernel::ATTENTION_COMBINE, grid(heads, join_tiles), JOIN_THREADS, 0, &parameters)?;
                }
            }
            return Ok(());
        }
        // 3. Other steps: keys and values into their slots, unless they are there, then attention
        let grid = |y: usize, z: usize| [number(tokens), number(y), number(z)];
        let padded = layout.k_dim.next_multiple_of(16);
        // SAFETY: tensors, angles and slots were checked; tables reach as far as positions, as the step's inputs ensure; the scratch was just reserved.
        unsafe {
            if !layer.shared {
                gpu.launch(Kernel::ATTENTION_STORE_KV, grid(kv_heads, 1), 64, floats(layout.k_dim), &parameters)?;
            }
            let prefill = prefill_kernel(gpu, &layout, &parameters).filter(|_| selected.is_none());
            if let Some((kernel, threads, grid, shared)) = prefill {
                gpu.launch(kernel, grid, threads, shared, &parameters)?;
            } else if split {
                gpu.launch(partition, grid(tiles, partitions), 128, floats(tile * padded), &parameters)?;
                gpu.launch(Kernel::ATTENTION_COMBINE, grid(heads, join_tiles), JOIN_THREADS, 0, &parameters)?;
            } else {
                gpu.launch(whole, grid(tiles, 1), 128, floats(tile * (padded + layout.v_dim)), &parameters)?;
            }
        }
        Ok(())
    }
}

/// The kernel for steps with one token of each sequence, or with a few in all, and its shared memory, if it can take this step.
fn decode_kernel(context: &Context, layout: &KvLayout, cache: &p::Cache, tile: usize) -> Option<(Kernel, usize)> {
    let gpu = &context.gpu;
    let few = context.inputs.tokens().len() < MIN_PREFILL_TOKENS || context.inputs.has_single_rows();
    let size = layout.kv_type.size();
    let words = [cache.block_bytes, cache.k, cache.v].iter().all(|at| at % 16 == 0)
        && layout.k_dim.is_multiple_of(16)
        && (layout.v_dim * size).is_multiple_of(16)
        && (layout.k_dim * size).is_multiple_of(16);
    // Values, a key as it is stored, queries, a key, two norms' weights, angles.
    let shared = PARTITION * layout.v_dim * size + layout.k_dim * size + 4 * (tile + 4) * layout.k_dim;
    let fits = shared + STATIC_SHARED <= gpu.device.shared && layout.k_dim <= DECODE_THREADS as usize;
    let (.., kernels) = DECODE.into_iter().find(|(n, _)| *n == tile)?;
    let kernel = kernels[cache.kv_type as usize];
    let mode = layout.mode != AttentionMode::Int8;
    (gpu.device.has(Variant::Last) && few && words && fits && mode).then_some((kernel, shared))
}

/// The heads of a block and the kernel with smaller blocks, if it can take a step that [`decode_kernel`] can take.
fn split_k_kernel(gpu: &Gpu, layout: &KvLayout, p: &p::Attention) -> Option<(usize, Kernel)> {
    let of_size = [layout.k_dim, layout.v_dim, 2 * p.half as usize].iter().all(|dim| *dim == SPLIT_K_DIM);
    let halves = matches!(layout.kv_type, KvType::F16 | KvType::Bf16);
    let shared = (p.heads / p.kv_heads) as usize;
    // Fewer heads for a block than a KV head has, as long as the device runs all blocks at once.
    let blocks = |tile: usize| (p.tokens * p.kv_heads * p.partitions) as usize * shared.div_ceil(tile);
    let enough = |tile: usize| tile >= shared || blocks(tile) <= SPLIT_K_BLOCKS * gpu.device.multiprocessors;
    let found = SPLIT_K.into_iter().find(|(n, _)| enough(*n)).unwrap_or(SPLIT_K[SPLIT_K.len() - 1]);
    (of_size && halves).then_some(found)
}

/// The kernel for tiles of tokens with its threads, grid and shared memory, if it can take this step. It needs values as long as keys, which all supported models have.
fn prefill_kernel(gpu: &Gpu, layout: &KvLayout, p: &p::Attention) -> Option<(Kernel, u32, [u32; 3], u32)> {
    let (dim, kv_type, group) = (layout.k_dim, layout.kv_type, (p.heads / p.kv_heads) as usize);
    let words = [p.cache.block_bytes, p.cache.k, p.cache.v].iter().all(|at| at % 16 == 0)
        && (dim * kv_type.size()).is_multiple_of(16);
    let possible =
        p.tokens as usize >= MIN_PREFILL_TOKENS && dim == layout.v_dim && gpu.device.has(Variant::Prompts) && words;
    let takes = |rows: usize, kernel: Kernel, shared: usize| {
        possible && group <= rows && shared + kernel.static_shared() <= gpu.device.shared
    };
    let grid = |rows: usize| [p.tokens.div_ceil(number((rows / group.max(1)).max(1))), p.kv_heads, 1];
    if layout.mode == AttentionMode::Int16 && dim == WIDE_DIM && p.tokens as usize * group >= MIN_WIDE_ROWS {
        let kernel = Kernel::ATTENTION_INT16_WIDE_128;
        if gpu.device.has_kernel(kernel) && takes(WIDE_ROWS, kernel, WIDE_SHARED) {
            return Some((kernel, WIDE_THREADS, grid(WIDE_ROWS), number(WIDE_SHARED)));
        }
    }
    if layout.mode != AttentionMode::F32 {
        // Keys and values as they are stored, and values transposed.
        let row = dim * kv_type.size();
        let shared = 2 * PARTITION * (row + 16) + row * (PARTITION + 16);
        let takes = |kernel| gpu.device.has(Variant::Tiles) && takes(INTEGER_ROWS, kernel, shared);
        let (_, [int8, int16]) = PREFILL_INTEGERS.into_iter().find(|(of_kernel, _)| *of_kernel == dim)?;
        let kernel = if layout.mode == AttentionMode::Int8 { int8 } else { int16 };
        return takes(kernel).then_some((kernel, INTEGER_THREADS, grid(INTEGER_ROWS), number(shared)));
    }
    let shared = |found: &PrefillKernel| found.shared(dim, kv_type);
    let takes_it = |found: &&PrefillKernel| found.takes(dim, kv_type) && takes(found.rows, found.kernel, shared(found));
    let found = PREFILL.iter().find(takes_it)?;
    Some((found.kernel, number(4 * found.rows), grid(found.rows), number(shared(found))))
}

/// The most partitions that any of the step's tokens sees.
pub(super) fn max_partitions(context: &Context, window: Option<usize>) -> usize {
    let inputs = &context.inputs;
    let seen = |s: usize| {
        let (first, count) = (inputs.position(s), inputs.rows(s).len());
        let all = (first + count - 1) / PARTITION + 1;
        window.map_or(all, |w| all.min(w.div_ceil(PARTITION) + 1))
    };
    (0..inputs.sequences()).filter(|s| !inputs.rows(*s).is_empty()).map(seen).max().unwrap_or(1)
}
