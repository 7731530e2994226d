//! Every kernel against the definition in `docs/numerics.md`, written down here once more, plainly, from the weights' values.

use super::*;
use crate::activations::{encode_bf16, encode_int8};
use crate::affine;
use crate::format::{BlockFormat, MatrixError};
use crate::generic::Generic16;
use crate::input::{Int11, ORDER};
use crate::instructions::unpack::Unpack;
use crate::int11::encode_int11;
use fastrand::Rng;
use proptest::prelude::*;

/// In [-1, 1).
fn unit(rng: &mut Rng) -> f32 {
    2.0 * rng.f32() - 1.0
}

/// Bytes that end where unreadable memory begins, so that a kernel which reads further crashes.
struct Guarded {
    map: *mut u8,
    pages: usize,
    len: usize,
}

#[cfg(target_os = "linux")]
impl Guarded {
    const PAGE: usize = 4096;

    fn new(bytes: &[u8]) -> Guarded {
        unsafe extern "C" {
            fn mmap(at: *mut u8, len: usize, prot: i32, flags: i32, fd: i32, offset: i64) -> *mut u8;
            fn mprotect(at: *mut u8, len: usize, prot: i32) -> i32;
        }
        let pages = bytes.len().div_ceil(Self::PAGE);
        // SAFETY: a private anonymous map (flags 0x22) of our own, readable and writable (3), its last page forbidden (0).
        unsafe {
            let map = mmap(std::ptr::null_mut(), (pages + 1) * Self::PAGE, 3, 0x22, -1, 0);
            assert!(map as isize != -1);
            assert_eq!(mprotect(map.add(pages * Self::PAGE), Self::PAGE, 0), 0);
            map.add(pages * Self::PAGE - bytes.len()).copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
            Guarded { map, pages, len: bytes.len() }
        }
    }

    fn bytes(&self) -> &[u8] {
        // SAFETY: written in `new`.
        unsafe { std::slice::from_raw_parts(self.map.add(self.pages * Self::PAGE - self.len), self.len) }
    }
}

#[cfg(target_os = "linux")]
impl Drop for Guarded {
    fn drop(&mut self) {
        unsafe extern "C" {
            fn munmap(at: *mut u8, len: usize) -> i32;
        }
        // SAFETY: the map made in `new`.
        unsafe { munmap(self.map, (self.pages + 1) * Self::PAGE) };
    }
}

struct Weights {
    format: WeightFormat,
    rows: usize,
    cols: usize,
    planes: Vec<Guarded>,
}

impl Weights {
    fn random(format: WeightFormat, rows: usize, cols: usize, rng: &mut Rng) -> Weights {
        let floats = |float: Float, n: usize, size: f32, rng: &mut Rng| -> Vec<u8> {
            (0..n)
                .flat_map(|_| {
                    let x = unit(rng) * size;
                    match float {
                        Float::F32 => x.to_le_bytes().to_vec(),
                        Float::F16 => half::f16::from_f32(x).to_le_bytes().to_vec(),
                        Float::Bf16 => half::bf16::from_f32(x).to_le_bytes().to_vec(),
                    }
                })
                .collect()
        };
        let planes = match format {
            WeightFormat::Float(float) => vec![floats(float, rows * cols, 1.0, rng)],
            WeightFormat::Affine { bits, group, scale } => {
                let groups = rows * cols / group as usize;
                let data = (0..rows * cols / 8 * bits as usize).map(|_| rng.u64(..) as u8).collect();
                vec![data, floats(scale, groups, 0.1, rng), floats(scale, groups, 1.0, rng)]
            }
            WeightFormat::Blocks(blocks) => {
                let mut data = vec![0; rows * cols / blocks.block_columns() * blocks.block_bytes()];
                rng.fill(&mut data);
                for block in data.chunks_exact_mut(blocks.block_bytes()) {
                    blocks.set_size(block, rng.f32());
                }
                vec![data]
            }
        };
        let planes = planes.iter().map(|bytes| Guarded::new(bytes)).collect();
        Weights { format, rows, cols, planes }
    }

    fn matrix(&self) -> Matrix<'_> {
        Matrix::new(self.format, self.rows, self.cols, self.planes.iter().map(Guarded::bytes)).unwrap()
    }
}

/// Tokens as integers of 11 bits.
#[derive(Default, PartialEq, Debug)]
struct Integers {
    n: Vec<i16>,
    steps: Vec<f32>,
    sums: Vec<f32>,
    scales: Vec<f32>,
}

impl Integers {
    /// Nothing where the columns are no whole halves of groups.
    fn of(isa: Isa, x: &[f32], cols: usize) -> Integers {
        if !cols.is_multiple_of(32) {
            return Integers::default();
        }
        let tokens = x.len() / cols;
        let (n, steps) = (vec![0; x.len()], vec![0.0; tokens * cols.div_ceil(64)]);
        let mut all = Integers { n, steps, sums: vec![0.0; x.len() / 32], scales: vec![0.0; tokens] };
        encode_int11(isa, x, cols, &mut all.n, &mut all.steps, &mut all.sums, &mut all.scales);
        all
    }
}

/// Tokens in all encodings.
struct Tokens {
    f32: Vec<f32>,
    bf16: Vec<u16>,
    q: Vec<i8>,
    scales: Vec<f32>,
    sums: Vec<f32>,
    int11: Integers,
}

impl Tokens {
    fn random(n: usize, cols: usize, rng: &mut Rng) -> Tokens {
        let f32: Vec<f32> = (0..n * cols).map(|_| unit(rng) * unit(rng)).collect();
        let mut bf16 = vec![0; f32.len()];
        encode_bf16(Isa::GENERIC, &f32, &mut bf16);
        let groups = if cols.is_multiple_of(32) { f32.len() / 32 } else { 0 };
        let (mut q, mut scales, mut sums) = (vec![0; groups * 32], vec![0.0; groups], vec![0.0; groups]);
        encode_int8(Isa::GENERIC, &f32[..groups * 32], &mut q, &mut scales, &mut sums);
        let int11 = Integers::of(Isa::GENERIC, &f32, cols);
        Tokens { f32, bf16, q, scales, sums, int11 }
    }

    fn input(&self, encoding: ActivationFormat) -> Input<'_> {
        match encoding {
            ActivationFormat::F32 => Input::F32(&self.f32),
            ActivationFormat::Bf16 => Input::Bf16(&self.bf16),
            ActivationFormat::Int8 => Input::Int8 { q: &self.q, scales: &self.scales, sums: &self.sums },
            ActivationFormat::Int11 => {
                let Integers { n, steps, sums, scales } = &self.int11;
                Input::Int11(Int11 { n, steps, sums, scales })
            }
        }
    }
}

fn tree(mut lanes: [f32; 16]) -> f32 {
    for half in [8, 4, 2, 1] {
        for i in 0..half {
            lanes[i] += lanes[i + half];
        }
    }
    lanes[0]
}

/// Columns of a group, for formats that have such.
fn group_of(format: WeightFormat) -> usize {
    match format {
        WeightFormat::Float(_) => unreachable!("no groups"),
        WeightFormat::Affine { group, .. } => group as usize,
        WeightFormat::Blocks(blocks) => blocks.group(),
    }
}

/// A row's unsigned integers, and the scale and bias of each group.
fn grouped_row(w: &Matrix, r: usize) -> (Vec<u8>, Vec<(f32, f32)>) {
    let (mut q, (scales, biases)) = (vec![0u8; w.cols()], w.row_scales(r));
    let groups = 0..w.cols() / group_of(w.format());
    match w.format() {
        WeightFormat::Float(_) => unreachable!("no groups"),
        WeightFormat::Affine { bits, scale, .. } => {
            affine::unpack(bits, w.row(r), &mut q);
            (q, groups.map(|g| (scale.read(scales, g), scale.read(biases, g))).collect())
        }
        WeightFormat::Blocks(blocks) => {
            let (count, n) = (w.cols() / blocks.block_columns(), groups.len());
            let (mut s, mut b) = (vec![0f32; n], vec![0f32; n]);
            let (to, s_to, b_to) = (q.as_mut_ptr(), s.as_mut_ptr(), b.as_mut_ptr());
            // SAFETY: a row of q and its groups.
            unsafe { Generic16::unpack_blocks(blocks, w.row(r).as_ptr(), count, to, s_to, b_to) };
            (q, s.into_iter().zip(b).collect())
        }
    }
}

/// One output by the definition, and in f64 from the same encoded values.
fn defined(w: &Matrix, r: usize, x: &Tokens, token: usize, encoding: ActivationFormat) -> (f32, f64) {
    let cols = w.cols();
    let mut row = vec![0f32; cols];
    affine::dequantize_row(Isa::GENERIC, w, r, &mut row);
    match encoding {
        ActivationFormat::F32 => {
            let x = &x.f32[token * cols..][..cols];
            let mut lanes = [0f32; 16];
            for i in 0..cols.next_multiple_of(16) {
                let (w, x) = if i < cols { (row[i], x[i]) } else { (0.0, 0.0) };
                lanes[i % 16] = w.mul_add(x, lanes[i % 16]);
            }
            (tree(lanes), row.iter().zip(x).map(|(&w, &x)| w as f64 * x as f64).sum())
        }
        ActivationFormat::Bf16 => {
            let bf16 = |x: u16| f32::from_bits((x as u32) << 16);
            let row: Vec<f32> = row.iter().map(|&w| bf16(half::bf16::from_f32(w).to_bits())).collect();
            let x: Vec<f32> = x.bf16[token * cols..][..cols].iter().map(|&x| bf16(x)).collect();
            let mut lanes = [0f32; 16];
            for c in 0..cols.div_ceil(32) {
                for (l, lane) in lanes.iter_mut().enumerate() {
                    for i in [32 * c + 2 * l + 1, 32 * c + 2 * l] {
                        let (w, x) = if i < cols { (row[i], x[i]) } else { (0.0, 0.0) };
                        *lane = w.mul_add(x, *lane);
                    }
                }
            }
            (tree(lanes), row.iter().zip(&x).map(|(&w, &x)| w as f64 * x as f64).sum())
        }
        ActivationFormat::Int8 => {
            let (group, groups) = (group_of(w.format()), cols / 32);
            // A part of a weight group is an activation group, or half of one.
            let part = group.min(32);
            let (q, scale_and_bias) = grouped_row(w, r);
            let xq = |k: usize| {
                let place = ORDER.iter().position(|&i| i == k % 8).unwrap();
                x.q[token * cols + k / 8 * 8 + place] as i32
            };
            let (mut lanes, mut exact) = ([0f32; 4], 0f64);
            for wide in 0..cols / group {
                let (s, b) = scale_and_bias[wide];
                let (mut t, mut m) = (None, None);
                for k in (wide * group..(wide + 1) * group).step_by(part) {
                    let sx = x.scales[token * groups + k / 32];
                    let mx = sx * (k..k + part).map(xq).sum::<i32>() as f32;
                    let sum: i32 = (k..k + part).map(|k| q[k] as i32 * xq(k)).sum();
                    t = Some(t.map_or(sx * sum as f32, |t| sx.mul_add(sum as f32, t)));
                    m = Some(m.map_or(mx, |m| m + mx));
                    exact += s as f64 * sx as f64 * sum as f64 + b as f64 * mx as f64;
                }
                lanes[wide % 4] = s.mul_add(t.unwrap(), lanes[wide % 4]);
                lanes[wide % 4] = b.mul_add(m.unwrap(), lanes[wide % 4]);
            }
            ((lanes[0] + lanes[2]) + (lanes[1] + lanes[3]), exact)
        }
        ActivationFormat::Int11 => {
            let (group, x) = (group_of(w.format()), &x.int11);
            let (q, scale_and_bias) = grouped_row(w, r);
            let (mut acc, mut exact) = (0f32, 0f64);
            for from in (0..cols).step_by(group.min(64)) {
                let (s, b) = scale_and_bias[from / group];
                let step = x.steps[token * cols.div_ceil(64) + from / 64];
                let n = |k: usize| x.n[token * cols + k] as i32;
                let piece = from..from + group.min(64);
                let products: i32 = piece.clone().map(|k| q[k] as i32 * n(k)).sum();
                let sum: i32 = piece.map(n).sum();
                acc = s.mul_add(products as f32 * step, acc);
                acc = b.mul_add(sum as f32 * step, acc);
                exact += (s as f64 * products as f64 + b as f64 * sum as f64) * step as f64;
            }
            (acc * x.scales[token], exact * x.scales[token] as f64)
        }
    }
}

fn float() -> impl Strategy<Value = Float> {
    prop::sample::select(vec![Float::F32, Float::F16, Float::Bf16])
}

fn format() -> impl Strategy<Value = WeightFormat> {
    let affine = (prop::sample::select(vec![2u8, 3, 4, 5, 6, 8]), prop::sample::select(vec![32u16, 64, 128]), float());
    prop_oneof![
        1 => float().prop_map(WeightFormat::Float),
        3 => affine.prop_map(|(bits, group, scale)| WeightFormat::Affine { bits, group, scale }),
        6 => prop::sample::select(&BlockFormat::ALL[..]).prop_map(WeightFormat::Blocks),
    ]
}

fn mode() -> impl Strategy<Value = Activations> {
    prop::sample::select(vec![Activations::F32, Activations::Bf16, Activations::Int8, Activations::Int11])
}

/// Columns of a format: any number for floats, whole groups for the others.
fn columns(format: WeightFormat, rng: &mut Rng) -> usize {
    match format {
        WeightFormat::Float(_) => 1 + rng.usize(..300),
        WeightFormat::Blocks(blocks) => blocks.block_columns() * (1 + rng.usize(..(1300 / blocks.block_columns()))),
        _ => group_of(format) * (1 + rng.usize(..(1300 / group_of(format)))),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn every_kernel_follows_the_definition(format in format(), mode in mode(), rows in 1usize..80, n in 1usize..20, seed in 1u64..) {
        let mut rng = Rng::with_seed(seed);
        let cols = columns(format, &mut rng);
        let weights = Weights::random(format, rows, cols, &mut rng);
        let (w, x) = (weights.matrix(), Tokens::random(n, cols, &mut rng));
        let encoding = format.activation_format(mode);
        let wanted: Vec<(f32, f64)> =
            (0..n).flat_map(|t| (0..rows).map(move |r| (t, r))).map(|(t, r)| defined(&w, r, &x, t, encoding)).collect();
        for isa in Isa::supported() {
            for _ in 0..4 {
                let start = rng.usize(..rows);
                let range = start..start + 1 + rng.usize(..(rows - start));
                let count = if rng.usize(..2) == 0 { 1 + rng.usize(..4) } else { 1 + rng.usize(..50) };
                let tokens: Vec<u32> = (0..count).map(|_| rng.usize(..n) as u32).collect();
                let mut scratch = Scratch::with_bytes(scratch_bytes(format, cols, range.len(), tokens.len(), mode));
                let ahead = scratch.bytes();
                let mut tile = vec![f32::NAN; tokens.len() * range.len()];
                matmul(isa, &w, range.clone(), x.input(encoding), &tokens, &mut tile, &mut scratch);
                prop_assert_eq!(scratch.bytes(), ahead, "the scratch grew");
                for (i, &t) in tokens.iter().enumerate() {
                    for (r, row) in range.clone().enumerate() {
                        let (got, wanted) = (tile[i * range.len() + r], wanted[t as usize * rows + row]);
                        prop_assert_eq!(got.to_bits(), wanted.0.to_bits(),
                            "{} {:?} {:?} {} columns, rows {:?}, {} tokens: row {} of token {}: {} not {}",
                            isa, format, encoding, cols, &range, tokens.len(), row, t, got, wanted.0);
                        prop_assert!((got as f64 - wanted.1).abs() < 1e-3, "{} is not {}", got, wanted.1);
                    }
                }
            }
        }
    }

    /// Scales, biases, weights and activations that are tiny, huge or not finite: same values everywhere (NaN compares by being NaN).
    #[test]
    fn extreme_values_give_the_same_everywhere(format in format(), mode in mode(), n in 1usize..50, seed in 1u64..) {
        let mut rng = Rng::with_seed(seed);
        let (rows, cols) = (5, columns(format, &mut rng));
        let mut weights = Weights::random(format, rows, cols, &mut rng);
        // Blocks are random bytes, units and all.
        if let WeightFormat::Blocks(_) = format {
            let mut any = weights.planes[0].bytes().to_vec();
            rng.fill(&mut any);
            weights.planes[0] = Guarded::new(&any);
        }
        let wild = |rng: &mut Rng| match rng.usize(..12) {
            0 => f32::from_bits(rng.u64(..) as u32),
            1 => f32::INFINITY,
            2 => f32::from_bits(rng.u64(..) as u32 & 0x80ff_ffff),
            3 => f32::from_bits(0x0080_0000 | rng.u64(..) as u32 & 0x8000_0003),
            _ => unit(rng) * 2f32.powi(-60 - rng.usize(..10) as i32),
        };
        let mut bytes = |old: &Guarded| {
            let mut bytes = old.bytes().to_vec();
            for four in bytes.chunks_exact_mut(4) {
                four.copy_from_slice(&wild(&mut rng).to_le_bytes());
            }
            Guarded::new(&bytes)
        };
        // All that are floats; the packed integers of formats in groups are not.
        let first = usize::from(!matches!(format, WeightFormat::Float(_)));
        for part in &mut weights.planes[first..] {
            *part = bytes(part);
        }
        let values: Vec<f32> = (0..n * cols).map(|_| wild(&mut rng)).collect();
        let (w, encoding) = (weights.matrix(), format.activation_format(mode));
        let tokens: Vec<u32> = (0..n as u32).collect();
        let groups = if encoding == ActivationFormat::Int8 { values.len() / 32 } else { 0 };
        let mut first: Option<(Tokens, Vec<u32>)> = None;
        for isa in Isa::supported() {
            let mut x = Tokens {
                bf16: vec![0; values.len()],
                q: vec![0; groups * 32],
                scales: vec![0.0; groups],
                sums: vec![0.0; groups],
                int11: Integers::of(isa, &values, cols),
                f32: values.clone(),
            };
            encode_bf16(isa, &values, &mut x.bf16);
            encode_int8(isa, &values[..groups * 32], &mut x.q, &mut x.scales, &mut x.sums);
            let mut tile = vec![0f32; rows * n];
            matmul(isa, &w, 0..rows, x.input(encoding), &tokens, &mut tile, &mut Scratch::default());
            let bits: Vec<u32> = tile.iter().map(|y| if y.is_nan() { !0 } else { y.to_bits() }).collect();
            let numbers = |x: &[f32]| -> Vec<u32> { x.iter().map(|x| x.to_bits()).collect() };
            match &first {
                None => first = Some((x, bits)),
                Some((oracle, wanted)) => {
                    prop_assert_eq!(&x.bf16, &oracle.bf16);
                    prop_assert_eq!(&x.q, &oracle.q);
                    prop_assert_eq!(numbers(&x.scales), numbers(&oracle.scales));
                    prop_assert_eq!(numbers(&x.sums), numbers(&oracle.sums));
                    prop_assert_eq!(&x.int11.n, &oracle.int11.n);
                    prop_assert_eq!(numbers(&x.int11.steps), numbers(&oracle.int11.steps));
                    prop_assert_eq!(numbers(&x.int11.sums), numbers(&oracle.int11.sums));
                    prop_assert_eq!(numbers(&x.int11.scales), numbers(&oracle.int11.scales));
                    prop_assert_eq!(&bits, wanted, "{} {:?} {:?}", isa, format, encoding);
                }
            }
        }
    }

    #[test]
    fn rows_dequantise_alike_everywhere(format in format(), seed in 1u64..) {
        let mut rng = Rng::with_seed(seed);
        let cols = columns(format, &mut rng);
        let weights = Weights::random(format, 3, cols, &mut rng);
        let w = weights.matrix();
        let mut wanted = vec![0f32; cols];
        match format {
            WeightFormat::Float(float) => wanted.iter_mut().enumerate().for_each(|(i, x)| *x = float.read(w.row(2), i)),
            WeightFormat::Affine { group, .. } => {
                let (q, scale_and_bias) = grouped_row(&w, 2);
                for (i, x) in wanted.iter_mut().enumerate() {
                    let (s, b) = scale_and_bias[i / group as usize];
                    *x = (q[i] as f32).mul_add(s, b);
                }
            }
            WeightFormat::Blocks(blocks) => {
                let (q, scale_and_bias) = grouped_row(&w, 2);
                let (zero, biased) = blocks.zero();
                for (i, x) in wanted.iter_mut().enumerate() {
                    let (s, b) = scale_and_bias[i / blocks.group()];
                    *x = if biased { (q[i] as f32).mul_add(s, b) } else { (q[i] as f32 - zero) * s };
                }
            }
        }
        for isa in Isa::supported() {
            let mut got = vec![f32::NAN; cols];
            affine::dequantize_row(isa, &w, 2, &mut got);
            prop_assert_eq!(&got, &wanted);
        }
    }
}

/// A token's products do not depend on how many others share the call, which decides between kernels and how these divide tokens, rows and columns.
#[test]
fn integer_products_are_the_same_beside_any_number_of_tokens() {
    let mut rng = Rng::with_seed(13);
    let affine = |bits| [32, 64, 128].map(|group| WeightFormat::Affine { bits, group, scale: Float::Bf16 });
    let formats = [2, 3, 4, 5, 6, 8].into_iter().flat_map(affine).chain(BlockFormat::ALL.map(WeightFormat::Blocks));
    for format in formats {
        let group = match format {
            WeightFormat::Blocks(blocks) => blocks.block_columns(),
            _ => group_of(format),
        };
        // Rows and columns that end inside of every tile, and rows of a tile's second half only.
        for (rows, cols) in [(53, 544usize.next_multiple_of(group)), (7, 2 * group), (32, 1024)] {
            let weights = Weights::random(format, rows, cols, &mut rng);
            let (w, x) = (weights.matrix(), Tokens::random(33, cols, &mut rng));
            for mode in [Activations::Int8, Activations::Int11] {
                let product = |isa: Isa, tokens: &[u32]| {
                    let mut tile = vec![f32::NAN; tokens.len() * rows];
                    let mut scratch = Scratch::with_bytes(scratch_bytes(format, cols, rows, tokens.len(), mode));
                    let x = x.input(format.activation_format(mode));
                    matmul(isa, &w, 0..rows, x, tokens, &mut tile, &mut scratch);
                    tile.into_iter().map(f32::to_bits).collect::<Vec<u32>>()
                };
                let all: Vec<u32> = (0..33).rev().collect();
                let wanted = product(Isa::GENERIC, &all);
                for isa in Isa::supported() {
                    for n in 1..=33 {
                        let got = product(isa, &all[..n]);
                        assert_eq!(got, wanted[..n * rows], "{isa} {mode:?} {format:?}, {rows} x {cols}, {n} tokens");
                    }
                }
            }
        }
    }
}

#[test]
fn a_wrong_length_is_an_error() {
    let format = WeightFormat::Affine { bits: 4, group: 64, scale: Float::Bf16 };
    let (data, scales) = (vec![0u8; 2 * 64], vec![0u8; 2 * 2 * 2]);
    let new = |format, rows, cols| Matrix::new(format, rows, cols, [&data[..], &scales, &scales]).map(|_| ());
    assert_eq!(new(format, 2, 128), Ok(()));
    assert_eq!(new(format, 3, 128), Err(MatrixError::Length { part: "weight", got: 128, wanted: 192 }));
    assert_eq!(new(format, 2, 96), Err(MatrixError::Columns { cols: 96, group: 64 }));
    assert_eq!(new(format, usize::MAX, 128), Err(MatrixError::TooBig { rows: usize::MAX, cols: 128 }));
    assert_eq!(new(WeightFormat::Affine { bits: 7, group: 64, scale: Float::Bf16 }, 2, 128), Err(MatrixError::Bits(7)));
    assert_eq!(
        new(WeightFormat::Affine { bits: 4, group: 16, scale: Float::Bf16 }, 2, 128),
        Err(MatrixError::Group(16))
    );
    assert_eq!(new(WeightFormat::Float(Float::Bf16), 1, 64), Err(MatrixError::Parts { got: 3, wanted: 1 }));
    assert_eq!(Matrix::new(format, 2, 128, [&data[..], &scales]).err(), Some(MatrixError::Parts { got: 2, wanted: 3 }));
}
