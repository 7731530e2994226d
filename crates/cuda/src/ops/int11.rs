//! Products of integers of 11 bits: of one token in one kernel with what comes before them, and with 4-bit weights on tensor cores where these were seen to add exactly.
//!
//! That f16 products whose sums fit 24 bits are added without rounding is no promise of the instruction set. So a device is asked when it is opened in this mode: products
//! of extreme values must have the bits of plain arithmetic. What differs is not used.

use anyhow::Result;
use sluice_backend::{Activations, BlockFormat, WeightFormat};

use crate::device::memory::{DeviceBuffer, bytes_of, bytes_of_mut};
use crate::device::stream::Gpu;
use crate::device::sys::Address;
use crate::kernels::{
    AFFINE, Exact, INT11_BLOCK_FORMATS, INT11_FLOAT_FORMATS, INT11_FORMATS, INT11_TENSOR_FORMATS, KernelFormat,
    RowLayout, STATIC_SHARED, Variant,
};
use crate::ops::activations::{EncodeInput, EncodedActivations, INT11_GROUP as GROUP, NORMED, encode};
use crate::ops::int11_blocks::{self, ONE_BLOCKS, ONE_THREADS};
use crate::ops::product::{MAX_GRID_Y, MatmulInput, PairTiles, Product};
use crate::ops::{int11_floats, int11_narrow, int11_records};
use crate::parameters::{self as p, number};
use crate::weights::{HALVES, Needs};

/// `kernels/gemm/int11_few.cu`: rows of a set, groups of a turn, tokens and threads of a block, the most blocks of a multiprocessor.
const SET: usize = 16;
const TURN: usize = 32;
const FEW: [(usize, u32); 4] = [(1, 288), (2, 288), (4, 320), (8, 384)];
const FEW_BLOCKS: usize = 2;
/// The same for a mixture: the most pairs of a tile, and threads.
const FEW_PAIRS: [(usize, u32); 2] = [(4, 320), (8, 384)];
/// Blocks that share a tile's rows are so many that there are enough for each multiprocessor to have this many.
const FEW_SHARES: usize = 2;
const FEW_RINGS: usize = 8 * 4 * (2048 + 256);
/// `kernels/gemv/fused_int11.cu`: rows of a set.
const ONE_ROWS: usize = 32;
/// `kernels/gemm/int11_wide.cu`: rows and tokens of a tile, threads, bytes of shared memory.
pub const WIDE: usize = 128;
const WIDE_THREADS: u32 = 384;
const WIDE_SHARED: usize = 8 * 21504 + 2 * 2 * 128 * 16 + 1024;
/// Without narrow tiles large ones are taken from so many tokens on; of a mixture from so many pairs for each expert on.
const MIN_WIDE: usize = 24;
const MIN_WIDE_PAIRS: usize = 8;
/// Up to so many pairs for each expert tiles are of four.
const MAX_SMALL_PAIRS: usize = 2;

/// Bytes of shared memory of a block for `tokens` tokens.
fn few_shared(tokens: usize, cols: usize) -> usize {
    let groups = cols / GROUP;
    FEW_RINGS
        + 4 * 2 * (TURN * tokens * SET + 2 * (TURN + 1) * SET)
        + 4 * (groups * tokens).next_multiple_of(4)
        + 128 * groups * tokens
}

/// Whether rows of all are aligned as tensor-core kernels load them.
fn fits(products: &[Product]) -> bool {
    let first = &products[0];
    let m = first.matrix;
    first.table.is_none()
        && matches!(m.group, 64 | 128)
        && HALVES.contains(&m.element)
        && first.cols.is_multiple_of(GROUP)
        && m.groups.is_multiple_of(8)
        && products.iter().all(|product| {
            let own = product.matrix;
            (own.group, own.element) == (m.group, m.element)
                && (own.data | own.row_bytes | own.scales | own.biases) % 16 == 0
                && product.rows > 0
        })
}

/// Products of the same columns and tokens on tensor cores. Returns whether a kernel took them.
pub fn multiply(gpu: &Gpu, products: &[Product], parameters: &p::Products, x: &EncodedActivations) -> Result<bool> {
    multiply_by(gpu, products, (parameters, x), gpu.device.exact().unwrap_or_default())
}

fn multiply_by(
    gpu: &Gpu,
    products: &[Product],
    (parameters, x): (&p::Products, &EncodedActivations),
    exact: Exact,
) -> Result<bool> {
    let first = &products[0];
    let kind = first.kinds()[0];
    if let Some(table) = first.table {
        let Some(tiles) = table.tiles else { return Ok(false) };
        if takes_pairs(gpu, tiles.tile_pairs, table.kinds, table.groups, first.cols) {
            multiply_pairs(gpu, products, parameters, tiles)?;
            return Ok(true);
        }
        let takes = tiles.tile_pairs == WIDE
            && products.iter().all(|of| int11_records::takes_pairs(gpu, table.kinds, of.groups(), of.cols));
        if takes {
            for alike in products.chunk_by(|a, b| a.groups() == b.groups()) {
                int11_records::multiply_pairs(gpu, alike, x, tiles)?;
            }
        }
        return Ok(takes);
    }
    if INT11_FLOAT_FORMATS.contains(&kind) {
        return int11_floats::multiply(gpu, products, x, exact);
    }
    if INT11_BLOCK_FORMATS.contains(&kind) {
        return int11_records::multiply(gpu, products, x, exact);
    }
    if first.kinds().len() > 1 {
        return Ok(false);
    }
    if !fits(products) {
        return int11_records::multiply(gpu, products, x, exact);
    }
    let shared = gpu.device.shared;
    if exact.wide[AFFINE] && int11_narrow::multiply(gpu, products, parameters)? {
        return Ok(true);
    }
    if let Some(kernel) = kind.gemm_wide().filter(|kernel| {
        exact.wide[AFFINE]
            && gpu.device.has_kernel(*kernel)
            && first.outputs >= MIN_WIDE
            && WIDE_SHARED + STATIC_SHARED <= shared
            && first.cols.is_multiple_of(128)
    }) {
        let tiles: usize = products.iter().map(|product| product.rows.div_ceil(WIDE)).sum();
        let tiles = tiles * first.outputs.div_ceil(WIDE);
        let grid = [number(tiles.min(gpu.device.multiprocessors)), 1, 1];
        // SAFETY: rows of the matrices and of x, and the tensors written, were checked against their buffers.
        unsafe { gpu.launch(kernel, grid, WIDE_THREADS, number(WIDE_SHARED), parameters)? };
        return Ok(true);
    }
    if !INT11_TENSOR_FORMATS.contains(&kind) {
        return int11_records::multiply(gpu, products, x, exact);
    }
    // All tokens at once, or as many as there is room for.
    let room = |tokens: usize| few_shared(tokens, first.cols) + STATIC_SHARED <= shared;
    let mut fitting = FEW.iter().enumerate().filter(|(_, (tokens, _))| room(*tokens));
    let all = fitting.clone().find(|(_, (tokens, _))| *tokens >= first.outputs);
    let Some((tile, &(tokens, threads))) = all.or_else(|| fitting.next_back()).filter(|_| exact.few[AFFINE]) else {
        return Ok(false);
    };
    let Some(kernel) = kind.gemm_few(tile).filter(|_| first.outputs.div_ceil(tokens) <= MAX_GRID_Y) else {
        return Ok(false);
    };
    let bytes = few_shared(tokens, first.cols);
    let blocks = gpu.device.multiprocessors * (shared / (bytes + 1024)).clamp(1, FEW_BLOCKS);
    let sets = products.iter().map(|p| p.rows.div_ceil(SET)).sum::<usize>();
    let grid = [number(sets.min(blocks)), number(first.outputs.div_ceil(tokens)), 1];
    // SAFETY: as above.
    unsafe { gpu.launch(kernel, grid, threads, number(bytes), parameters)? };
    Ok(true)
}

/// The tiles in which [`multiply`] may take a mixture's products, for so many pairs of `count` experts, few or many; the best come first.
pub fn tile_pairs(pairs: usize, count: usize) -> &'static [usize] {
    match pairs {
        _ if pairs >= MIN_WIDE_PAIRS * count => &[WIDE],
        _ if pairs > MAX_SMALL_PAIRS * count => &[int11_narrow::PAIRS, FEW_PAIRS[1].0],
        _ => &[int11_narrow::PAIRS, FEW_PAIRS[0].0],
    }
}

/// Whether tensor cores take weights of this kind as they lie in memory, on devices that have the kernels.
pub fn takes_directly(kind: KernelFormat, groups: Option<(u32, u32)>) -> bool {
    INT11_TENSOR_FORMATS.contains(&kind)
        && groups.is_some_and(|(group, element)| matches!(group, 64 | 128) && HALVES.contains(&element))
}

/// Whether [`multiply`] takes a mixture's products where its pairs are sorted by expert, in tiles of so many.
pub fn takes_pairs(
    gpu: &Gpu,
    tile_pairs: usize,
    kinds: &[KernelFormat],
    groups: Option<(u32, u32)>,
    cols: usize,
) -> bool {
    let (Some(exact), &[kind]) = (gpu.device.exact(), kinds) else { return false };
    let (kernel, is_exact, columns, bytes) = match FEW_PAIRS.iter().position(|(pairs, _)| *pairs == tile_pairs) {
        Some(tile) => (kind.gemm_few_grouped(tile), exact.few[AFFINE], GROUP, few_shared(tile_pairs, cols)),
        None if tile_pairs == int11_narrow::PAIRS => {
            return takes_directly(kind, groups) && int11_narrow::takes_pairs(gpu, kind, cols);
        }
        None => (kind.gemm_wide_grouped().filter(|_| tile_pairs == WIDE), exact.wide[AFFINE], 2 * GROUP, WIDE_SHARED),
    };
    is_exact
        && kernel.is_some_and(|kernel| gpu.device.has_kernel(kernel))
        && takes_directly(kind, groups)
        && cols.is_multiple_of(columns)
        && bytes + STATIC_SHARED <= gpu.device.shared
}

fn multiply_pairs(gpu: &Gpu, products: &[Product], parameters: &p::Products, tiles: PairTiles) -> Result<()> {
    let (table, cols) = (products[0].table.expect("a mixture"), products[0].cols);
    let (kind, multiprocessors) = (table.kinds[0], gpu.device.multiprocessors);
    let sets = |rows: usize| products.iter().map(|product| product.rows.div_ceil(rows)).sum::<usize>();
    let few = FEW_PAIRS.iter().enumerate().find(|(_, (pairs, _))| *pairs == tiles.tile_pairs);
    if let Some((tile, &(pairs, threads))) = few {
        let kernel = kind.gemm_few_grouped(tile).expect("it was looked for");
        let shares = (FEW_SHARES * multiprocessors).div_ceil(tiles.max_tiles).min(sets(SET));
        let grid = [number(shares), number(tiles.max_tiles), 1];
        // SAFETY: rows of the matrices and of x, and the tensors written, were checked against their buffers; the table has a matrix for each expert.
        unsafe { gpu.launch(kernel, grid, threads, number(few_shared(pairs, cols)), parameters)? };
        return Ok(());
    }
    if tiles.tile_pairs == int11_narrow::PAIRS {
        return int11_narrow::multiply_pairs(gpu, products, parameters, tiles);
    }
    let kernel = kind.gemm_wide_grouped().expect("it was looked for");
    let (group, element) = table.groups.expect("they were looked at");
    let mut parameters = *parameters;
    parameters.parts[0].matrix = p::Matrix { group, element, ..p::Matrix::default() };
    let grid = [number((tiles.max_tiles * sets(WIDE)).min(multiprocessors)), 1, 1];
    // SAFETY: as above.
    unsafe { gpu.launch(kernel, grid, WIDE_THREADS, number(WIDE_SHARED), &parameters)? };
    Ok(())
}

/// Products of one token that comes as floats, which is normed and encoded on the way; if `gated`, of gate and up with `silu(gate) * up`. Returns whether a kernel
/// took them.
pub fn multiply_one(gpu: &Gpu, input: MatmulInput, products: &[Product], gated: bool) -> Result<bool> {
    let MatmulInput::Floats { x, norm, rows } = input else { return Ok(false) };
    let first = &products[0];
    let kind = first.kinds()[0];
    if INT11_BLOCK_FORMATS.contains(&kind) {
        return int11_blocks::multiply_one(gpu, (x, norm, rows), products, gated);
    }
    // Tensor cores take some weights from two tokens on, and others' from [`int11_records::MIN_TOKENS`] on.
    let one_by_one = INT11_FORMATS.contains(&kind) && !INT11_TENSOR_FORMATS.contains(&kind);
    if rows > if one_by_one { int11_records::MIN_TOKENS - 1 } else { 1 } {
        return Ok(false);
    }
    if INT11_FLOAT_FORMATS.contains(&kind) {
        return int11_floats::multiply_one(gpu, (x, norm), products, gated);
    }
    let (cols, m) = (first.cols, first.matrix);
    let groups = cols / GROUP;
    let Some((kernel, lanes)) = kind.gemv_one(groups).filter(|_| gpu.device.has(Variant::One)) else {
        return Ok(false);
    };
    let alike = |product: &Product| {
        let own = product.matrix;
        product.table.is_none()
            && (product.cols, product.outputs) == (cols, rows)
            && (own.kind, own.group, own.element) == (m.kind, m.group, m.element)
            && (own.data | own.row_bytes).is_multiple_of(16)
    };
    let fits = products.len() <= p::PARTS
        && matches!(m.group, 64 | 128)
        && HALVES.contains(&m.element)
        && cols.is_multiple_of(GROUP)
        && [x.at, norm.weight].iter().all(|at| at.is_multiple_of(16))
        && (norm.weight == 0 || cols.is_multiple_of(NORMED));
    if !fits || !products.iter().all(alike) {
        return Ok(false);
    }
    // Slices of the token, powers and sums, what two turns leave for chains, and the norm's weights.
    let bytes = 16 * 8 * (groups + 1) + 4 * 2 * groups.next_multiple_of(4) + 4 * 4 * ONE_ROWS * (lanes + 1);
    let room = |bytes: usize| bytes + STATIC_SHARED <= gpu.device.shared;
    let resident = |bytes: usize| (gpu.device.shared / (bytes + 1024)).clamp(1, ONE_BLOCKS);
    let bytes = bytes + if norm.weight != 0 { 4 * cols } else { 0 };
    // The floats are kept where a norm needs them, or where as many blocks have room for them.
    let keeps = room(bytes + 4 * cols) && (norm.weight != 0 || resident(bytes + 4 * cols) == resident(bytes));
    let bytes = bytes + if keeps { 4 * cols } else { 0 };
    if !room(bytes) || (norm.weight != 0 && !keeps) {
        return Ok(false);
    }
    let sets =
        products.iter().map(|product| product.rows.div_ceil(ONE_ROWS)).sum::<usize>() / if gated { 2 } else { 1 };
    let grid = [number(sets.min(gpu.device.multiprocessors * resident(bytes))), 1, 1];
    for token in 0..rows {
        let (x, gated, keeps) = (x.rows_from(token), gated.into(), keeps.into());
        let mut parameters = p::OneToken { x, norm, gated, keeps, ..p::OneToken::default() };
        for (product, part) in products.iter().zip(&mut parameters.parts) {
            *part = product.of_token(token).parameters(p::Encoded::default());
        }
        // SAFETY: rows of the matrices and of x, and the tensors written, were checked against their buffers.
        unsafe { gpu.launch(kernel, grid, ONE_THREADS, number(bytes), &parameters)? };
    }
    Ok(true)
}

/// Compares the kernels on tensor cores with plain arithmetic.
///
/// # Errors
/// Where the device fails.
pub fn probe(gpu: &Gpu) -> Result<Exact> {
    // 1. Extreme values: the greatest everywhere, beside the least, of both signs, and many exponents
    let hash = |i: usize| (i as u32).wrapping_mul(2_654_435_761) >> 13;
    let value = |(t, k): (usize, usize)| match (t % 4, hash(t * COLS + k)) {
        (0, _) => GREATEST,
        (1, _) if k % 64 == t % 64 => GREATEST,
        (1, _) => LEAST,
        (2, h) => [GREATEST, LEAST, -LEAST, -GREATEST][h as usize % 4],
        (_, h) => (h as f32 / (1 << 18) as f32 - 1.0) * 2f32.powi(-((k / 64 % 8) as i32)),
    };
    let x: Vec<f32> = (0..TOKENS * COLS).map(|i| value((i / COLS, i % COLS))).collect();
    let x = upload(gpu, bytes_of(&x))?;
    // As many as eight bits take; of four, the first half.
    let data: Vec<u8> =
        (0..ROWS * COLS).map(|i| if (i / (ROWS * COLS / 4)).is_multiple_of(2) { 255 } else { hash(i) as u8 }).collect();
    let scale =
        |from: u16| -> Vec<u8> { (0..ROWS * COLS / 64).flat_map(|i| (from + (i % 97) as u16).to_le_bytes()).collect() };
    let [data, scales, biases] = [upload(gpu, &data)?, upload(gpu, &scale(0x3c00))?, upload(gpu, &scale(0xbe00))?];
    let affine = p::Matrix {
        data: data.at,
        scales: scales.at,
        biases: biases.at,
        row_bytes: COLS as u64 / 2,
        groups: number(COLS / 64),
        kind: KernelFormat::Q4Int11 as u32,
        element: 2,
        group: 64,
        bits: 4,
        unused: 0,
    };
    // As bf16: the greatest high slice, the greatest low ones of both signs, and many exponents.
    let float = |(r, h): (usize, u32)| match r % 4 {
        0 => 0x3f7f,
        1 => 0x3f04,
        2 => [0x3f7f, 0x3f04, 0xbf04, 0xbf7f][h as usize % 4],
        _ => (0x3b00 + h % 0x500) as u16 | (h >> 3) as u16 & 0x8000,
    };
    let floats: Vec<u8> = (0..ROWS * COLS).flat_map(|i| float((i / COLS, hash(i))).to_le_bytes()).collect();
    let floats = upload(gpu, &floats)?;
    let float = p::Matrix {
        data: floats.at,
        row_bytes: 2 * COLS as u64,
        kind: KernelFormat::Bf16Int11 as u32,
        element: 2,
        ..p::Matrix::default()
    };
    // In blocks: integers of five bits in groups of 32, and of eight bits, which are taken in slices.
    let block = |format| -> Result<(DeviceBuffer, p::Matrix)> {
        let layout = RowLayout::of(WeightFormat::Blocks(format)).expect("it has blocks");
        let (row, [codes, units]) = (layout.row_bytes(COLS), layout.starts(COLS));
        let numbers = |r: usize, i: usize| if r < ROWS / 2 { 255 } else { hash(r * COLS + i) as u8 };
        let scales = |i: usize| (0x3c00 + (i % 97) as u16).to_le_bytes()[i % 2];
        let bytes: Vec<u8> = (0..ROWS * row)
            .map(|at| (at / row, at % row))
            .map(|(r, i)| if i < codes { numbers(r, i) } else { scales(i) })
            .collect();
        let bytes = upload(gpu, &bytes)?;
        let matrix = p::Matrix {
            data: bytes.at,
            scales: bytes.at + codes as u64,
            biases: bytes.at + units as u64,
            row_bytes: row as u64,
            groups: number(COLS / layout.group),
            kind: KernelFormat::of(WeightFormat::Blocks(format), Activations::Int11) as u32,
            element: layout.element,
            group: number(layout.group),
            bits: number(layout.bits),
            unused: 0,
        };
        Ok((bytes, matrix))
    };
    let (plain, sliced) = (block(BlockFormat::Q5_1)?, block(BlockFormat::Q8_0)?);
    // 2. Their products in each way
    let eight = p::Matrix { row_bytes: COLS as u64, kind: KernelFormat::Q8Int11 as u32, bits: 8, ..affine };
    let [affine, float, plain, sliced, eight] =
        [affine, float, plain.1, sliced.1, eight].map(|matrix| probe_matrix(gpu, x.at, matrix));
    let (affine, float, records) = (affine?, float?, plain?[1] && sliced?[1] && eight?[1]);
    Ok(Exact { few: [affine[0], float[0], false], wide: [affine[1], float[1], records] })
}

/// Rows, columns and tokens of a probe, and sizes of its activations.
const ROWS: usize = 128;
const COLS: usize = 1024;
const TOKENS: usize = 128;
const GREATEST: f32 = 0.99999;
const LEAST: f32 = 1.0 / 16384.0;

fn upload(gpu: &Gpu, bytes: &[u8]) -> Result<DeviceBuffer> {
    let buffer = DeviceBuffer::zeroed(gpu, bytes.len(), "a probe of tensor cores")?;
    // SAFETY: as many bytes.
    unsafe { gpu.write(buffer.at, bytes, gpu.wait_permit()?)? };
    Ok(buffer)
}

/// Which kernels give the products of this matrix with these tokens the bits of plain arithmetic.
fn probe_matrix(gpu: &Gpu, x: Address, matrix: p::Matrix) -> Result<[bool; 2]> {
    let kind = KernelFormat::from_number(matrix.kind);
    let mut encoded = EncodedActivations::default();
    let product = |tokens: usize, exact: Option<Exact>, encoded: &mut EncodedActivations| -> Result<Vec<f32>> {
        let out = DeviceBuffer::zeroed(gpu, 4 * TOKENS * ROWS, "a probe of tensor cores")?;
        let input = EncodeInput { x: p::Tensor::dense(x, COLS), rows: tokens, cols: COLS, ..EncodeInput::default() };
        encode(gpu, input, Needs::INT11, encoded)?;
        let product = Product {
            matrix,
            table: None,
            rows: ROWS,
            cols: COLS,
            outputs: tokens,
            out: p::Tensor::dense(out.at, ROWS),
            bias: 0,
            accumulate: false,
            runs: None,
        };
        let mut parameters = p::Products::default();
        parameters.parts[0] = product.parameters(encoded.view);
        // What no kernel takes stays zero, and so differs.
        match exact {
            Some(exact) => {
                multiply_by(gpu, &[product], (&parameters, encoded), exact)?;
            }
            None => {
                let shape = kind.gemv_or_gemm(true, ROWS, COLS);
                let grid = [number(ROWS.div_ceil(shape.rows)), number(tokens.div_ceil(8)), 1];
                // SAFETY: as above, of the buffers that were just made.
                unsafe { gpu.launch(shape.kernel, grid, shape.threads, 0, &parameters)? };
            }
        }
        let mut result = vec![0f32; tokens * ROWS];
        // SAFETY: so many were written.
        unsafe { gpu.read(out.at, bytes_of_mut(&mut result), gpu.wait_permit()?)? };
        Ok(result)
    };
    let bits = |x: Vec<f32>| x.into_iter().map(f32::to_bits).collect::<Vec<u32>>();
    let wanted = bits(product(TOKENS, None, &mut encoded)?);
    let few = Some(Exact { few: [true; 3], wide: [false; 3] });
    let one = bits(product(1, few, &mut encoded)?);
    let eight = bits(product(8, few, &mut encoded)?);
    let some = bits(product(TOKENS, few, &mut encoded)?);
    let large = Some(Exact { few: [false; 3], wide: [true; 3] });
    let wide = bits(product(TOKENS, large, &mut encoded)?);
    // In narrow tiles, where the device has them.
    let narrow = bits(product(TOKENS / 2, large, &mut encoded)?);
    let few = one == wanted[..ROWS] && eight == wanted[..8 * ROWS] && some == wanted;
    Ok([few, wide == wanted && narrow == wanted[..ROWS * TOKENS / 2]])
}
