//! Random tokens in every encoding.

use fastrand::Rng;
use sluice_kernels::Isa;
use sluice_kernels::activations::{encode_bf16, encode_int8};
use sluice_kernels::format::ActivationFormat;
use sluice_kernels::input::{Input, Int11};
use sluice_kernels::int11::encode_int11;
use sluice_kernels::int11_tiles::{self, TokenTile};

use super::weights::unit;

/// Tokens as integers of 11 bits.
pub struct Integers {
    pub n: Vec<i16>,
    pub steps: Vec<f32>,
    pub sums: Vec<f32>,
    pub scales: Vec<f32>,
    pub tiles: Vec<TokenTile>,
}

impl Integers {
    pub fn of(isa: Isa, x: &[f32], cols: usize) -> Integers {
        let tokens = x.len() / cols;
        let (n, steps) = (vec![0; x.len()], vec![0.0; tokens * cols.div_ceil(64)]);
        let tiles = vec![TokenTile::default(); int11_tiles::count(tokens, cols)];
        let mut all = Integers { n, steps, sums: vec![0.0; tokens * (cols / 32)], scales: vec![0.0; tokens], tiles };
        encode_int11(isa, x, cols, &mut all.n, &mut all.steps, &mut all.sums, &mut all.scales);
        let mut tiles = std::mem::take(&mut all.tiles);
        for (block, tiles) in tiles.chunks_mut(cols.div_ceil(64)).enumerate() {
            int11_tiles::lay_out(isa, &all.input(), cols, block * int11_tiles::TOKENS, tiles);
        }
        Integers { tiles, ..all }
    }

    pub fn input(&self) -> Int11<'_> {
        let Integers { n, steps, sums, scales, tiles } = self;
        Int11 { n, steps, sums, scales, tiles }
    }
}

/// Tokens in all encodings.
pub struct Tokens {
    pub f32: Vec<f32>,
    pub bf16: Vec<u16>,
    pub q: Vec<i8>,
    pub scales: Vec<f32>,
    pub sums: Vec<f32>,
    pub int11: Integers,
}

impl Tokens {
    pub fn random(n: usize, cols: usize, rng: &mut Rng) -> Tokens {
        Tokens::of((0..n * cols).map(|_| unit(rng) * unit(rng)).collect(), cols)
    }

    pub fn of(f32: Vec<f32>, cols: usize) -> Tokens {
        let mut bf16 = vec![0; f32.len()];
        encode_bf16(Isa::GENERIC, &f32, &mut bf16);
        let groups = if cols.is_multiple_of(32) { f32.len() / 32 } else { 0 };
        let (mut q, mut scales, mut sums) = (vec![0; groups * 32], vec![0.0; groups], vec![0.0; groups]);
        encode_int8(Isa::GENERIC, &f32[..groups * 32], &mut q, &mut scales, &mut sums);
        let int11 = Integers::of(Isa::GENERIC, &f32, cols);
        Tokens { f32, bf16, q, scales, sums, int11 }
    }

    pub fn input(&self, encoding: ActivationFormat) -> Input<'_> {
        match encoding {
            ActivationFormat::F32 => Input::F32(&self.f32),
            ActivationFormat::Bf16 => Input::Bf16(&self.bf16),
            ActivationFormat::Int8 => Input::Int8 { q: &self.q, scales: &self.scales, sums: &self.sums },
            ActivationFormat::Int11 => Input::Int11(self.int11.input()),
        }
    }
}
