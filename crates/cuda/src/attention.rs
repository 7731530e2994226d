//! Paged attention: rotary tables, the cache's layout as kernels see it, the kernels of a layer.
//!
//! Keys and values go into their slots first. Then a block takes the query heads of a token that share a KV head through all partitions; or, where that would be too
//! few blocks for the device, each partition has a block of its own, and what they leave is joined.

use anyhow::{Context, Result};
use sluice_backend::{Activations, AttentionLayer, AttentionMode, KvLayout, KvType, Norm, RotaryFrequencies};

use crate::backend::Cuda;
use crate::driver::{Address, Gpu};
use crate::kernels::{Kernel, STATIC_SHARED};
use crate::matmul::{GROUP, MOST_BY_ROWS};
use crate::memory::{Memory, Reserved, Scratch, bytes_of};
use crate::parameters::{self as p, number};
use crate::weights::Needs;

/// Cosines and then sines of each position's angles, `[positions, 2 * frequencies]`: addresses for all positions, of which those are filled that steps came to.
pub struct RotaryTable {
    frequencies: RotaryFrequencies,
    pub memory: Reserved,
    positions: usize,
    /// For each [`FILLED`] positions.
    filled: Vec<bool>,
    angles: Vec<f32>,
}

/// Positions that are filled at once: few, since a step may begin far behind the first, where a prompt's keys and values were there.
const FILLED: usize = 64;

impl RotaryTable {
    pub fn new(gpu: &Gpu, frequencies: &RotaryFrequencies, positions: usize) -> Result<RotaryTable> {
        let bytes = positions.checked_mul(frequencies.inv_freq.len() * 8);
        let bytes = bytes.with_context(|| format!("{positions} positions are too many"))?;
        let memory = Reserved::new(gpu, bytes, "rotary angles")?;
        let filled = vec![false; positions.div_ceil(FILLED)];
        Ok(RotaryTable { frequencies: frequencies.clone(), memory, positions, filled, angles: Vec::new() })
    }

    pub fn half(&self) -> usize {
        self.frequencies.inv_freq.len()
    }

    /// Computes the angles of these positions that are not there yet. On the host: a device's sine has other bits.
    pub fn fill(&mut self, gpu: &Gpu, positions: &[u32]) -> Result<()> {
        let (half, row) = (self.half(), 8 * self.half());
        for position in positions.iter().map(|p| *p as usize) {
            assert!(position < self.positions, "position {position} of {}", self.positions);
            if self.filled[position / FILLED] {
                continue;
            }
            let from = position / FILLED * FILLED;
            let to = (from + FILLED).min(self.positions);
            self.memory.commit(gpu, to * row, "rotary angles")?;
            self.angles.clear();
            self.angles.resize((to - from) * 2 * half, 0.0);
            for (row, position) in self.angles.chunks_exact_mut((2 * half).max(1)).zip(from..) {
                let (cos, sin) = row.split_at_mut(half);
                self.frequencies.angles(position as u32, cos, sin);
            }
            // SAFETY: so much was just committed.
            unsafe { gpu.write(self.memory.at + (from * row) as u64, bytes_of(&self.angles), gpu.quiet()?)? };
            self.filled[position / FILLED] = true;
        }
        Ok(())
    }
}

/// Positions of a partition: see `docs/numerics.md`.
const PARTITION: usize = 128;

/// Query heads that a block takes together, and the kernels for that: the fewest that are enough for the heads that share a KV head.
const TILES: [(usize, Kernel, Kernel); 3] = [
    (1, Kernel::ATTENTION_1, Kernel::ATTENTION_PARTITION_1),
    (2, Kernel::ATTENTION_2, Kernel::ATTENTION_PARTITION_2),
    (4, Kernel::ATTENTION_4, Kernel::ATTENTION_PARTITION_4),
];

/// The same for steps with a token of each sequence.
const LAST: [(usize, Kernel); 3] =
    [(1, Kernel::ATTENTION_DECODE_1), (2, Kernel::ATTENTION_DECODE_2), (4, Kernel::ATTENTION_DECODE_4)];

/// The same by smaller blocks, with keys and values of [`DEEP_DIM`] elements of sixteen bits; their threads, and how many of them a multiprocessor holds.
const DEEP: [(usize, Kernel); 2] = [(2, Kernel::ATTENTION_SPLIT_K_2), (4, Kernel::ATTENTION_SPLIT_K_4)];
const DEEP_DIM: usize = 128;
const DEEP_THREADS: u32 = 128;
const DEEP_BLOCKS: usize = 4;

/// Threads of their blocks, and blocks that a multiprocessor holds.
const LAST_THREADS: u32 = 512;
const LAST_BLOCKS: usize = 2;

/// So many partitions at most are joined by the kernel that computes them: `MOST_NEAR` of `kernels/attention/decode.cu`. More have a kernel of their own, since few blocks
/// would join them here, after the others.
const MOST_JOINED: usize = 4;
/// Threads that join, and columns that a block of them takes.
const JOIN_THREADS: u32 = 128;
const JOIN_COLUMNS: usize = 32;

/// Bytes that a partition leaves of a head: `part_width` of `kernels/attention/paged.cu`.
pub fn part_bytes(v_dim: usize) -> usize {
    4 * (v_dim + 2).next_multiple_of(4)
}

/// So many partitions have blocks where there are that many: few sizes, so that steps are alike.
fn rounded(partitions: usize) -> usize {
    if partitions <= 8 { partitions.next_power_of_two() } else { partitions.next_multiple_of(8) }
}

/// How a kernel takes prompts by tiles: `Way` of `kernels/attention/prefill.cu`.
struct TileWay {
    kernel: Kernel,
    /// Elements of a head: just that many in sixteen bits, or any multiple of sixteen up to them.
    dim: usize,
    only: bool,
    /// Rows of a tile, tokens times the heads of a KV head. A block has four threads for each.
    rows: usize,
    /// Positions whose keys lie across at a time: as floats with `only` and where the cache has them, else in sixteen bits.
    keys: usize,
    /// Rooms that keys and values take turns in, as the cache has them, and positions of each.
    rooms: usize,
    piece: usize,
}

/// The quickest first.
#[rustfmt::skip]
const TILE_WAYS: [TileWay; 5] = [
    TileWay { kernel: Kernel::ATTENTION_PREFILL_128, dim: 128, only: true, rows: 64, keys: 128, rooms: 2, piece: 128 },
    TileWay { kernel: Kernel::ATTENTION_PREFILL_256, dim: 256, only: true, rows: 64, keys: 64, rooms: 3, piece: 32 },
    TileWay { kernel: Kernel::ATTENTION_PREFILL, dim: 128, only: false, rows: 64, keys: 32, rooms: 3, piece: 16 },
    TileWay { kernel: Kernel::ATTENTION_PREFILL_LONG, dim: 256, only: false, rows: 64, keys: 32, rooms: 3, piece: 16 },
    TileWay { kernel: Kernel::ATTENTION_PREFILL_LOW, dim: 256, only: false, rows: 32, keys: 32, rooms: 2, piece: 16 },
];

impl TileWay {
    /// Whether heads of `dim` elements are taken.
    fn takes(&self, dim: usize, kv_type: KvType) -> bool {
        let halves = matches!(kv_type, KvType::F16 | KvType::Bf16);
        if self.only { dim == self.dim && halves } else { dim.is_multiple_of(16) && dim <= self.dim }
    }

    /// Bytes of shared memory: queries, keys across, weights, rooms. Each row is a bit longer than it has to be, so that neighbours meet other banks.
    fn shared(&self, dim: usize, kv_type: KvType) -> usize {
        let floats = self.only || kv_type == KvType::F32;
        let key = if floats { 4 * (self.keys + 4) } else { 2 * (self.keys + 8) };
        let stored = self.rooms * self.piece * (dim * kv_type.size() + 16);
        dim * (4 * (self.rows + 4) + key) + 4 * PARTITION * (self.rows + 8) + stored
    }
}

/// The same on integers, by the elements of a head.
const INTEGERS: [(usize, Kernel); 3] =
    [(64, Kernel::ATTENTION_INT8_64), (128, Kernel::ATTENTION_INT8_128), (256, Kernel::ATTENTION_INT8_256)];
/// Rows of a tile there, and threads of its block.
const INTEGER_ROWS: usize = 64;
const INTEGER_THREADS: u32 = 128;
/// From so many tokens on they are taken by tiles.
pub const MOST_SINGLE: usize = 12;

#[derive(Default)]
pub struct AttentionWork {
    /// What partitions leave: `[tokens, heads, partitions]` of [`part_bytes`].
    parts: Scratch,
    /// How many of them are through, of each tile of heads of a token; zero between kernels.
    counters: Option<Memory>,
}

impl AttentionWork {
    pub fn bytes(&self) -> usize {
        self.parts.bytes() + self.counters.as_ref().map_or(0, |m| m.bytes)
    }

    fn counters(&mut self, gpu: &Gpu, n: usize) -> Result<Address> {
        if let Some(counters) = self.counters.as_ref().filter(|m| m.bytes >= 4 * n) {
            return Ok(counters.at);
        }
        self.counters = None;
        let memory = Memory::zeroed(gpu, (4 * n).next_power_of_two().max(4096), "scratch")?;
        Ok(self.counters.insert(memory).at)
    }
}

/// Where a layer's keys and values lie inside blocks: as [`KvLayout`] says.
fn cache(pool: u64, layout: &KvLayout, layer: usize) -> p::Cache {
    let KvLayout { kv_heads, k_dim, v_dim, kv_type, block_tokens, .. } = *layout;
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
        },
    }
}

impl Cuda {
    pub(crate) fn run_attention(&mut self, layer: &AttentionLayer) -> Result<()> {
        let (pool, layout) = (self.kv[layer.group].memory.at, self.kv[layer.group].layout);
        self.encoded.left_of = None;
        let tokens = self.inputs.tokens().len();
        let (heads, kv_heads) = (layer.heads, layout.kv_heads);
        assert!(heads > 0 && heads.is_multiple_of(kv_heads), "{heads} heads for {kv_heads} KV heads");
        assert!(!layer.gated || layout.k_dim == layout.v_dim, "a gate as wide as the output");
        assert!(layer.window != Some(0), "a window of no positions");
        let q_dim = layout.k_dim * if layer.gated { 2 } else { 1 };
        let widths = [heads * q_dim, kv_heads * layout.k_dim, kv_heads * layout.v_dim, heads * layout.v_dim];
        for (t, width) in [layer.q, layer.k, layer.v, layer.out].into_iter().zip(widths) {
            assert!(t.rows >= tokens && t.cols == width, "{tokens} tokens of {width} in {t:?}");
        }
        let rotary = &self.rotary[layer.rotary.number()];
        assert!(2 * rotary.half() <= layout.k_dim, "{} pairs in a head of {}", rotary.half(), layout.k_dim);
        let group = self.step.groups[layer.group];
        // 1. How the work is split
        let shared = heads / kv_heads;
        let (tile, whole, partition) = TILES.into_iter().find(|(n, ..)| *n >= shared).unwrap_or(TILES[TILES.len() - 1]);
        let tiles = kv_heads * shared.div_ceil(tile);
        let partitions = rounded(self.most_partitions(layer.window));
        let part_room = tokens * heads * partitions * part_bytes(layout.v_dim);
        let integers = layout.mode == AttentionMode::Int8;
        assert!(!integers || layout.kv_type == KvType::Int8, "attention on integers wants them in the cache");
        // Of more tokens than that no parts were reckoned with.
        let split = partitions > 1
            && tokens <= MOST_SINGLE.max(self.inputs.sequences())
            && tokens * tiles < 2 * self.gpu.device.multiprocessors;
        let parts = match split {
            true => self.attention.parts.room(&self.gpu, part_room)?,
            false => 0,
        };
        let norm = |norm: Option<Norm>| norm.map_or(p::Norm::default(), |n| self.norm(&n));
        let parameters = p::Attention {
            cache: cache(pool, &layout, layer.layer),
            q: self.place(layer.q),
            k: self.place(layer.k),
            v: self.place(layer.v),
            out: self.place(layer.out),
            q_norm: norm(layer.q_norm),
            k_norm: norm(layer.k_norm),
            angles: rotary.memory.at,
            sinks: layer.sinks.map_or(0, |s| self.place(s).at),
            positions: self.step.positions,
            sequences: self.step.sequences,
            slots: group.slots,
            tables: group.tables,
            table_starts: group.table_starts,
            tokens: number(tokens),
            heads: number(heads),
            kv_heads: number(kv_heads),
            gated: layer.gated.into(),
            half: number(rotary.half()),
            window: layer.window.map_or(0, |w| number(w.min(u32::MAX as usize))),
            scale: layer.scale,
            cap: layer.softcap.unwrap_or(0.0),
            capped: layer.softcap.is_some().into(),
            partitions: number(partitions),
            parts,
            counters: 0,
            integers: integers.into(),
            unused: 0,
            encoded: p::Encoded::default(),
        };
        let join_tiles = layout.v_dim.div_ceil(JOIN_COLUMNS);
        // 2. A token of each sequence: one kernel stores and attends
        let blocks = |tile: usize| kv_heads * shared.div_ceil(tile);
        // Few heads to a block are through sooner; keys are read again for each block, which counts once the device is full.
        let few = |tile: usize| tokens * blocks(tile) * partitions <= self.gpu.device.multiprocessors;
        let last_tile = [1, 2].into_iter().find(|n| *n < tile && few(*n)).unwrap_or(tile);
        if let Some((kernel, shared)) = self.last(&layout, &parameters.cache, last_tile) {
            let tiles = blocks(last_tile);
            let parts = if partitions > 1 { self.attention.parts.room(&self.gpu, part_room)? } else { 0 };
            // The last block to end joins a few.
            let joins = partitions <= MOST_JOINED;
            let full = tokens * tiles * partitions > LAST_BLOCKS * self.gpu.device.multiprocessors;
            let deep = self.deep(&layout, &parameters);
            // Smaller blocks are through sooner where partitions are many, blocks more than the device holds, or the heads that share keys and values.
            let deep = deep.filter(|_| !joins || partitions > 1 && (full || heads / kv_heads > DEEP[0].0));
            let counters = if joins { self.attention.counters(&self.gpu, tokens * heads)? } else { 0 };
            // Who joins has whole groups of the activations that the product behind it takes.
            let joined = partitions > 1 && (!joins || deep.is_some());
            let leaves = self.gpu.device.joined
                && joined
                && layout.v_dim.is_multiple_of(GROUP)
                && tokens > MOST_BY_ROWS
                && self.mode == Activations::Int8;
            let encoded = match leaves {
                true => self.encoded.room(&self.gpu, tokens, heads * layout.v_dim, Needs::INT8)?,
                false => p::Encoded::default(),
            };
            self.encoded.left_of = leaves.then_some(parameters.out);
            let parameters = p::Attention { parts, counters, encoded, ..parameters };
            let grid = |y: usize, z: usize| [number(tokens), number(y), number(z)];
            // SAFETY: as below.
            unsafe {
                match deep {
                    Some((tile, kernel)) => {
                        let shared = number(PARTITION * DEEP_DIM * layout.kv_type.size());
                        self.gpu.launch(kernel, grid(blocks(tile), partitions), DEEP_THREADS, shared, &parameters)?;
                    }
                    None => {
                        self.gpu.launch(kernel, grid(tiles, partitions), LAST_THREADS, number(shared), &parameters)?
                    }
                }
                if partitions > 1 && !joins {
                    self.gpu.launch(
                        Kernel::ATTENTION_COMBINE,
                        grid(heads, join_tiles),
                        JOIN_THREADS,
                        0,
                        &parameters,
                    )?;
                }
            }
            return Ok(());
        }
        // 3. Keys and values into their slots, attention
        let grid = |y: usize, z: usize| [number(tokens), number(y), number(z)];
        let floats = |n: usize| number(4 * n);
        let padded = layout.k_dim.next_multiple_of(16);
        // SAFETY: tensors, angles and slots were checked; tables reach as far as positions, as the step's inputs hold; the room was just made.
        unsafe {
            self.gpu.launch(Kernel::ATTENTION_STORE_KV, grid(kv_heads, 1), 64, floats(layout.k_dim), &parameters)?;
            if let Some((kernel, threads, grid, shared)) = self.tiled(&layout, &parameters) {
                self.gpu.launch(kernel, grid, threads, shared, &parameters)?;
            } else if split {
                self.gpu.launch(partition, grid(tiles, partitions), 128, floats(tile * padded), &parameters)?;
                self.gpu.launch(Kernel::ATTENTION_COMBINE, grid(heads, join_tiles), JOIN_THREADS, 0, &parameters)?;
            } else {
                self.gpu.launch(whole, grid(tiles, 1), 128, floats(tile * (padded + layout.v_dim)), &parameters)?;
            }
        }
        Ok(())
    }

    /// The kernel for steps with a token of each sequence, and its shared memory, if it can be taken.
    fn last(&self, layout: &KvLayout, cache: &p::Cache, tile: usize) -> Option<(Kernel, usize)> {
        let inputs = &self.inputs;
        let single = (0..inputs.sequences()).all(|s| inputs.rows(s).len() <= 1);
        let size = layout.kv_type.size();
        let words = [cache.block_bytes, cache.k, cache.v].iter().all(|at| at % 16 == 0)
            && layout.k_dim.is_multiple_of(16)
            && (layout.v_dim * size).is_multiple_of(16)
            && (layout.k_dim * size).is_multiple_of(16);
        // Values, a key as it is stored, queries, a key, two norms' weights, angles.
        let shared = PARTITION * layout.v_dim * size + layout.k_dim * size + 4 * (tile + 4) * layout.k_dim;
        let fits = shared + STATIC_SHARED <= self.gpu.device.shared && layout.k_dim <= LAST_THREADS as usize;
        let (.., kernel) = LAST.into_iter().find(|(n, _)| *n == tile)?;
        (self.gpu.device.last && single && words && fits && layout.mode == AttentionMode::F32)
            .then_some((kernel, shared))
    }

    /// The kernel for steps with a token of each sequence behind many partitions, and heads of a block, if it can be taken where that for few can.
    fn deep(&self, layout: &KvLayout, p: &p::Attention) -> Option<(usize, Kernel)> {
        let of_size = [layout.k_dim, layout.v_dim, 2 * p.half as usize].iter().all(|dim| *dim == DEEP_DIM);
        let halves = matches!(layout.kv_type, KvType::F16 | KvType::Bf16);
        let shared = (p.heads / p.kv_heads) as usize;
        // Fewer heads a block than share keys and values while the device holds all blocks at once.
        let blocks = |tile: usize| (p.tokens * p.kv_heads * p.partitions) as usize * shared.div_ceil(tile);
        let enough = |tile: usize| tile >= shared || blocks(tile) <= DEEP_BLOCKS * self.gpu.device.multiprocessors;
        let found = DEEP.into_iter().find(|(n, _)| enough(*n)).unwrap_or(DEEP[DEEP.len() - 1]);
        (of_size && halves).then_some(found)
    }

    /// The kernel for tiles of tokens, threads of a block, the grid, and shared memory, if that way can be taken: not where values are longer or shorter than keys,
    /// which no model has that is read so far.
    fn tiled(&self, layout: &KvLayout, p: &p::Attention) -> Option<(Kernel, u32, [u32; 3], u32)> {
        let (dim, kv_type, group) = (layout.k_dim, layout.kv_type, (p.heads / p.kv_heads) as usize);
        let words = [p.cache.block_bytes, p.cache.k, p.cache.v].iter().all(|at| at % 16 == 0)
            && (dim * kv_type.size()).is_multiple_of(16);
        let possible = p.tokens as usize >= MOST_SINGLE && dim == layout.v_dim && self.gpu.device.prompts && words;
        let takes = |rows: usize, kernel: Kernel, shared: usize| {
            possible && group <= rows && shared + kernel.static_shared() <= self.gpu.device.shared
        };
        let grid = |rows: usize| [p.tokens.div_ceil(number((rows / group.max(1)).max(1))), p.kv_heads, 1];
        if layout.mode == AttentionMode::Int8 {
            // Keys and values as they lie, and values across.
            let shared = 2 * PARTITION * (dim + 16) + dim * (PARTITION + 16);
            let takes = |kernel| self.gpu.device.tiles && takes(INTEGER_ROWS, kernel, shared);
            let (_, kernel) = INTEGERS.into_iter().find(|(of_kernel, kernel)| *of_kernel == dim && takes(*kernel))?;
            return Some((kernel, INTEGER_THREADS, grid(INTEGER_ROWS), number(shared)));
        }
        let shared = |way: &TileWay| way.shared(dim, kv_type);
        let found = |way: &&TileWay| way.takes(dim, kv_type) && takes(way.rows, way.kernel, shared(way));
        let way = TILE_WAYS.iter().find(found)?;
        Some((way.kernel, number(4 * way.rows), grid(way.rows), number(shared(way))))
    }

    /// Partitions that any of the step's tokens sees, at most.
    fn most_partitions(&self, window: Option<usize>) -> usize {
        let inputs = &self.inputs;
        let seen = |s: usize| {
            let (first, count) = (inputs.position(s), inputs.rows(s).len());
            let all = (first + count - 1) / PARTITION + 1;
            window.map_or(all, |w| all.min(w.div_ceil(PARTITION) + 1))
        };
        (0..inputs.sequences()).filter(|s| !inputs.rows(*s).is_empty()).map(seen).max().unwrap_or(1)
    }
}
