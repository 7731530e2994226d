//! What kernels are measured on: random weights, tokens, keys and values.

use anyhow::Result;
use fastrand::Rng;
use sluice_backend::Isa;
use sluice_kernels::activations::{encode_bf16, encode_int8};
use sluice_kernels::attention::{AttentionMode, KvShape, KvType, store_row};
use sluice_kernels::format::{ActivationFormat, WeightFormat};
use sluice_kernels::input::{Input, Int11};
use sluice_kernels::int11::encode_int11;
use sluice_kernels::int11_tiles::{self, TokenTile};
use sluice_kernels::matrix::Matrix;

use crate::engine_args::kv_type_name;

/// Columns of a gate projection of Qwen3-0.6B.
pub(super) const COLS: usize = 1024;

/// Bytes of a cache line.
const LINE: usize = 64;

/// Keys and values, and how attention works on them.
pub(super) type Kind = (KvType, AttentionMode);

pub(super) const KINDS: [Kind; 4] = [
    (KvType::Bf16, AttentionMode::F32),
    (KvType::Int8, AttentionMode::F32),
    (KvType::Int8, AttentionMode::Int8),
    (KvType::Int16, AttentionMode::Int16),
];

pub(super) fn kind_name((kv_type, mode): Kind) -> &'static str {
    match mode {
        AttentionMode::F32 => kv_type_name(Some(kv_type)),
        AttentionMode::Int8 => "int8 x int8",
        AttentionMode::Int16 => "int16 x int16",
    }
}

/// Blocks of one layer: keys, then values of the same width.
pub(super) fn kv_shape((kv_type, mode): Kind, kv_heads: usize, dim: usize, block_tokens: usize) -> KvShape {
    let half = kv_type.bytes(kv_heads * block_tokens, dim);
    KvShape {
        block_bytes: 2 * half,
        k_offset: 0,
        v_offset: half,
        block_tokens,
        kv_heads,
        k_dim: dim,
        v_dim: dim,
        values_in_keys: false,
        by_slot: false,
        every: 1,
        kv_type,
        mode,
    }
}

/// A block's keys, which may be its values too.
pub(super) fn half_block(isa: Isa, shape: &KvShape) -> Vec<u8> {
    let KvShape { kv_type, kv_heads, block_tokens, k_dim, .. } = *shape;
    let (mut row, mut scale) = (vec![0; k_dim * kv_type.size()], vec![0; kv_type.scale_size()]);
    store_row(isa, kv_type, &noise(k_dim), &mut row, &mut scale);
    [row.repeat(kv_heads * block_tokens), scale.repeat(kv_heads * block_tokens)].concat()
}

/// `blocks` as often as `times`, from the first cache line of what is returned on ([`from_a_line`]), as an engine's pools begin: loads that cross lines are slower.
pub(super) fn pool(blocks: &[u8], times: usize) -> Vec<u8> {
    let mut pool: Vec<u8> = Vec::with_capacity(blocks.len() * times + LINE);
    // Not moved any more, since it has all of its room.
    pool.resize(pool.as_ptr().align_offset(LINE).min(LINE), 0);
    (0..times).for_each(|_| pool.extend_from_slice(blocks));
    pool
}

/// A pool from its first cache line on.
pub(super) fn from_a_line(pool: &[u8]) -> &[u8] {
    &pool[pool.as_ptr().align_offset(LINE).min(LINE)..]
}

/// A random matrix of [`COLS`] columns.
pub(super) struct Random {
    format: WeightFormat,
    rows: usize,
    planes: Vec<Vec<u8>>,
}

impl Random {
    pub fn new(format: WeightFormat, rows: usize) -> Result<Random> {
        let mut rng = Rng::with_seed(1);
        let planes = format.planes(COLS)?;
        let planes = planes.iter().map(|plane| {
            // Zeroed at once, so that large pages hold it, as they hold a file's map.
            let mut bytes = vec![0; rows * plane.row_bytes];
            match plane.name {
                // Exponents of moderate size, should these bytes be floats.
                "weight" => bytes.as_chunks_mut::<8>().0.iter_mut().for_each(|word| {
                    *word = (rng.u64(..) & !0x4000_4000_4000_4000 | 0x3000_3000_3000_3000).to_le_bytes();
                }),
                _ => bytes.fill(0x3c),
            }
            if let WeightFormat::Blocks(blocks) = format {
                blocks.set_size(&mut bytes, 1.0);
            }
            bytes
        });
        Ok(Random { format, rows, planes: planes.collect() })
    }

    pub fn matrix(&self) -> Result<Matrix<'_>> {
        Ok(Matrix::new(self.format, self.rows, COLS, self.planes.iter().map(|p| &p[..]))?)
    }
}

/// Activations in every encoding.
pub(super) struct Tokens {
    pub f32: Vec<f32>,
    pub bf16: Vec<u16>,
    pub q: Vec<i8>,
    pub scales: Vec<f32>,
    pub sums: Vec<f32>,
    pub n: Vec<i16>,
    pub steps: Vec<f32>,
    pub int11_sums: Vec<f32>,
    pub int11_scales: Vec<f32>,
    pub int11_tiles: Vec<TokenTile>,
}

impl Tokens {
    pub fn new(isa: Isa, n: usize) -> Tokens {
        let len = n * COLS;
        let mut x = Tokens {
            f32: noise(len),
            bf16: vec![0; len],
            q: vec![0; len],
            scales: vec![0.0; len / 32],
            sums: vec![0.0; len / 32],
            n: vec![0; len],
            steps: vec![0.0; len / 64],
            int11_sums: vec![0.0; len / 32],
            int11_scales: vec![0.0; n],
            int11_tiles: vec![],
        };
        encode_bf16(isa, &x.f32, &mut x.bf16);
        encode_int8(isa, &x.f32, &mut x.q, &mut x.scales, &mut x.sums);
        encode_int11(isa, &x.f32, COLS, &mut x.n, &mut x.steps, &mut x.int11_sums, &mut x.int11_scales);
        let mut tiles = vec![TokenTile::default(); int11_tiles::count(n, COLS)];
        for (block, tiles) in tiles.chunks_mut(COLS.div_ceil(64)).enumerate() {
            int11_tiles::lay_out(isa, &x.int11(), COLS, block * int11_tiles::TOKENS, tiles);
        }
        x.int11_tiles = tiles;
        x
    }

    fn int11(&self) -> Int11<'_> {
        let (n, steps, sums) = (&self.n, &self.steps, &self.int11_sums);
        Int11 { n, steps, sums, scales: &self.int11_scales, tiles: &self.int11_tiles }
    }

    pub fn input(&self, encoding: ActivationFormat) -> Input<'_> {
        match encoding {
            ActivationFormat::F32 => Input::F32(&self.f32),
            ActivationFormat::Bf16 => Input::Bf16(&self.bf16),
            ActivationFormat::Int8 => Input::Int8 { q: &self.q, scales: &self.scales, sums: &self.sums },
            ActivationFormat::Int11 => Input::Int11(self.int11()),
        }
    }
}

/// Numbers between -1 and 1.
pub(super) fn noise(n: usize) -> Vec<f32> {
    let mut rng = Rng::with_seed(2);
    (0..n).map(|_| 2.0 * rng.f32() - 1.0).collect()
}
