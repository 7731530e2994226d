//! Products of one token with integer weights or pairs of bf16. Small steps are dominated by launch gaps more than by bytes, so this chooses how many lanes a row has and
//! how large blocks are.

use anyhow::Result;

use crate::device::stream::Gpu;
use crate::kernels::{Kernel, STATIC_SHARED, Variant};
use crate::ops::product::{MatmulInput, Product};
use crate::parameters::{self as p, number};
use crate::weights::{HALVES, KernelFormat};

/// Columns that a lane takes at a time: a weight group, or 32 columns of blocks.
const GROUP: usize = 64;
const PART: usize = 32;
/// The kernels of a bit width: small blocks, large blocks, and large blocks with more loads in flight.
const SMALL: usize = 0;
const WIDE: usize = 1;
const DEEP: usize = 2;
/// What a lane of each has in flight: rows if its lanes take a row in one step, otherwise units of one row.
const UNITS: [usize; 3] = [2, 2, 4];
/// Threads of a block of each.
const THREADS: [usize; 3] = [256, 512, 512];
/// Up to this many rounds of a warp, one block per multiprocessor is better than two: x is encoded once, and the next kernel has room to begin.
const MAX_SINGLE_BLOCK_ROUNDS: usize = 4;
/// Up to this many columns small blocks encode as quickly.
const MAX_SMALL_COLUMNS: usize = 2048;
/// From so many bytes of weights in blocks on, a launch more to encode their input costs less than [`KernelFormat::gemv_rows`] gains.
const MIN_ROWS_BYTES: u64 = 4 << 20;
/// Columns whose squares are summed together.
const NORMED: usize = 256;
/// Rows of bf16 pairs that a warp takes, and the columns of them that it has in flight.
const PAIR_ROWS: usize = 2;
const PIECE_COLUMNS: usize = 512;

/// How a launch is divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct LaunchPlan {
    /// A row has 2^log_lanes lanes.
    log_lanes: u32,
    /// [`SMALL`], [`WIDE`] or [`DEEP`].
    kernel: usize,
    blocks: usize,
}

/// The plan with the least work for a warp. The costs were measured: instructions of a unit, of a round of units, and of a chain's step from lane to lane. `groups`: the
/// groups of a row, each of which one lane takes. `chains`: how many of the four chains a lane carries.
fn plan(
    rows: &[usize],
    (groups, cols): (usize, usize),
    chains: usize,
    gated: bool,
    multiprocessors: usize,
) -> LaunchPlan {
    let all: usize = rows.iter().sum();
    let rounds = |kernel: usize, log: u32, warps: usize| {
        let (sets, steps) = (all >> (5 - log), groups.div_ceil(1 << log));
        match (steps, gated) {
            (1, _) => sets.div_ceil(warps * UNITS[kernel]),
            (_, true) => 2 * (sets / 2).div_ceil(warps) * steps.div_ceil(UNITS[kernel]),
            (_, false) => sets.div_ceil(warps) * steps.div_ceil(UNITS[kernel]),
        }
    };
    let cost = |kernel: usize, log: u32, warps: usize| {
        let steps = chains * chains * if groups <= 1 << log { 1 } else { UNITS[kernel] };
        rounds(kernel, log, warps) * (UNITS[kernel] * 70 + 100 + 35 * (1 << log) / 4 * steps)
    };
    let whole = |log: &u32| rows.iter().all(|r| r.is_multiple_of(32 >> log));
    let best = |kernel: usize, blocks: usize| {
        let warps = blocks * THREADS[kernel] / 32;
        let log_lanes = (2..=5).rev().filter(whole).min_by_key(|log| cost(kernel, *log, warps)).unwrap_or(5);
        (LaunchPlan { log_lanes, kernel, blocks }, rounds(kernel, log_lanes, warps))
    };
    let (small, once) = best(SMALL, multiprocessors);
    if once == 1 && cols <= MAX_SMALL_COLUMNS {
        return small;
    }
    // A row of many units.
    if !gated && groups >= 32 * UNITS[DEEP] {
        return best(DEEP, multiprocessors).0;
    }
    match best(WIDE, multiprocessors) {
        (wide, few) if few <= MAX_SINGLE_BLOCK_ROUNDS => wide,
        _ => best(WIDE, 2 * multiprocessors).0,
    }
}

/// Products of one token with norm and encoding; if `gated`, of gate and up with `silu(gate) * up`. Returns whether a kernel took them.
pub fn gemv(gpu: &Gpu, input: MatmulInput, products: &[Product], gated: bool) -> Result<bool> {
    let plain = products.iter().all(|product| product.runs.is_none());
    Ok(plain && launch(gpu, input, products, gated, &[])?)
}

/// Products of one token with matrices of interleaved heads, if `products` are all rows of these matrices, which are then read from end to end. Returns whether a
/// kernel took them.
pub fn gemv_interleaved(gpu: &Gpu, input: MatmulInput, products: &[Product]) -> Result<bool> {
    let one = matches!(input, MatmulInput::Floats { rows: 1, .. });
    let Some((matrices, heads)) = one.then(|| join_heads(products)).flatten() else { return Ok(false) };
    launch(gpu, input, &matrices, false, &heads)
}

/// The matrices of which these are all interleaved heads, and where their rows go. `None` if a matrix has other rows.
fn join_heads<'a>(products: &[Product<'a>]) -> Option<(Vec<Product<'a>>, Vec<p::Interleaved>)> {
    products.first()?.runs?;
    let mut sorted = products.to_vec();
    sorted.sort_by_key(|product| product.matrix.data);
    let (mut matrices, mut all) = (Vec::new(), Vec::new());
    let mut rest = &sorted[..];
    while let Some(first) = rest.first() {
        let [_, period, _] = first.runs?;
        let mut heads = p::Interleaved { starts: [u32::MAX; p::RUNS], period: number(period), ..Default::default() };
        let (mut at, mut count) = (0, 0);
        while at < period {
            let product = rest.get(count).filter(|_| count < p::RUNS)?;
            let [run, rows, columns] = product.runs?;
            // Its place if it follows those before it. Scales have two bytes, or are in the rows.
            let scales = at as u64 * scale_bytes(&first.matrix);
            let behind = p::Matrix {
                data: first.matrix.data + at as u64 * first.matrix.row_bytes,
                scales: first.matrix.scales + scales,
                biases: first.matrix.biases + scales,
                ..first.matrix
            };
            let heads_alike = product.rows / run == first.rows / first.runs?[0];
            if product.matrix != behind || rows != period || !heads_alike {
                return None;
            }
            (heads.outs[count], heads.starts[count], heads.columns[count]) =
                (product.out.at, number(at), number(columns));
            (at, count) = (at + run, count + 1);
        }
        if at != period {
            return None;
        }
        let rows = first.rows / first.runs?[0] * period;
        matrices.push(Product { rows, runs: None, ..*first });
        all.push(heads);
        rest = &rest[count..];
    }
    Some((matrices, all))
}

/// Bytes from one row's scales to the next's.
fn scale_bytes(matrix: &p::Matrix) -> u64 {
    let is_blocks = KernelFormat::from_number(matrix.kind).is_blocks();
    if is_blocks { matrix.row_bytes } else { 2 * u64::from(matrix.groups) }
}

/// Launches the kernel for these products, if there is one. `heads`: where the rows of each product go; empty if they are consecutive. Returns whether it did.
fn launch(gpu: &Gpu, input: MatmulInput, products: &[Product], gated: bool, heads: &[p::Interleaved]) -> Result<bool> {
    let MatmulInput::Floats { x, norm, rows: 1 } = input else { return Ok(false) };
    let Some(first) = products.first().filter(|_| gpu.device.has(Variant::One) && products.len() <= p::PARTS) else {
        return Ok(false);
    };
    let cols = first.cols;
    let kind = first.kinds()[0];
    let (pairs, blocks) = (kind == KernelFormat::Bf16Bf16, kind.is_blocks());
    let fits = |product: &Product| {
        product.table.is_none()
            && product.bias == 0
            && (product.outputs, product.cols, product.accumulate) == (1, cols, first.accumulate)
            && (product.matrix.kind, product.matrix.element) == (first.matrix.kind, first.matrix.element)
            && match pairs {
                true => product.rows.is_multiple_of(PAIR_ROWS),
                false if blocks => product.matrix.row_bytes == first.matrix.row_bytes,
                false => product.matrix.group as usize == GROUP && HALVES.contains(&product.matrix.element),
            }
    };
    let aligned = cols.is_multiple_of(if blocks { PART } else { GROUP })
        && [x.at, norm.weight].iter().all(|at| at.is_multiple_of(16))
        && (norm.weight == 0 || cols.is_multiple_of(NORMED));
    if !aligned || !products.iter().all(fits) {
        return Ok(false);
    }
    let rows: Vec<usize> = products.iter().map(|product| product.rows).collect();
    let bytes: u64 = products.iter().map(|product| product.rows as u64 * product.matrix.row_bytes).sum();
    if blocks && bytes >= MIN_ROWS_BYTES && kind.gemv_rows(rows.iter().sum(), cols, gpu.device.shared).is_some() {
        return Ok(false);
    }
    let (multiprocessors, groups) = (gpu.device.multiprocessors, cols / GROUP);
    let (kernel, threads, LaunchPlan { log_lanes, blocks, .. }, shared) = if pairs {
        // All of x, and the norm's weights.
        let shared = 4 * (cols.next_multiple_of(PIECE_COLUMNS) + if norm.weight != 0 { cols } else { 0 });
        let warps = rows.iter().sum::<usize>() / PAIR_ROWS / if gated { 2 } else { 1 };
        let blocks = if warps > multiprocessors * THREADS[WIDE] / 32 { 2 } else { 1 } * multiprocessors;
        (Kernel::GEMV_FUSED_BF16, THREADS[WIDE], LaunchPlan { log_lanes: 4, kernel: WIDE, blocks }, shared)
    } else if let Some(kernels) = kind.gemv_fused() {
        let (units, chains) = if blocks { (cols / PART, PART / first.matrix.group as usize) } else { (groups, 1) };
        let chosen = plan(&rows, (units, cols), chains, gated, multiprocessors);
        let (kernel, threads) = (kernels[chosen.kernel], THREADS[chosen.kernel]);
        // Quarters of groups with their scales and means, and as f32 what is needed whole before it is encoded, with the norm's weights.
        let loose = if norm.weight != 0 { 8 * cols } else { 4 * cols * usize::from(cols / 8 > threads) };
        let encoded = match blocks {
            true => PART * units + 4 * (units.next_multiple_of(4) + (units * chains).next_multiple_of(4)),
            false => 16 * 4 * (groups + 1) + 4 * (3 * groups).next_multiple_of(4),
        };
        (kernel, threads, chosen, encoded + loose)
    } else {
        return Ok(false);
    };
    if shared + STATIC_SHARED > gpu.device.shared {
        return Ok(false);
    }
    let together = 32usize >> log_lanes;
    let mut parameters = p::GemvFused {
        x: x.at,
        norm: norm.weight,
        row_bytes: first.matrix.row_bytes,
        eps: norm.eps,
        cols: number(cols),
        sets: number(rows.iter().sum::<usize>() / together),
        second: u32::MAX,
        third: u32::MAX,
        log_lanes,
        gated: gated.into(),
        accumulate: first.accumulate.into(),
        element: first.matrix.element,
        interleaved: (!heads.is_empty()).into(),
        ..p::GemvFused::default()
    };
    parameters.heads[..heads.len()].copy_from_slice(heads);
    let mut before = 0;
    for (i, product) in products.iter().enumerate() {
        // Rows of gate and up are counted side by side, others consecutively.
        let skipped = if gated { 0 } else { before };
        let from = |at: u64, row: usize| at.wrapping_sub((skipped * row) as u64);
        parameters.parts[i] = p::FusedMatrix {
            data: from(product.matrix.data, product.matrix.row_bytes as usize),
            // bf16 has none.
            scales: from(product.matrix.scales, scale_bytes(&product.matrix) as usize),
            biases: from(product.matrix.biases, scale_bytes(&product.matrix) as usize),
            out: from(product.out.at, 4),
        };
        match i {
            1 => parameters.second = number(before / together),
            2 => parameters.third = number(before / together),
            _ => {}
        }
        before += product.rows;
    }
    // SAFETY: rows of the matrices and of x, and the tensors written, were checked against their buffers.
    unsafe { gpu.launch(kernel, [number(blocks), 1, 1], number(threads), number(shared), &parameters)? };
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_has_lanes_for_which_all_matrices_are_whole() {
        // Queries, keys and values; the output; gate and up; down: of 0.6B and 8B dimensions on 132 multiprocessors.
        for (rows, cols, gated) in [
            (vec![2048, 1024, 1024], 1024, false),
            (vec![1024], 2048, false),
            (vec![3072, 3072], 1024, true),
            (vec![1024], 3072, false),
            (vec![4096, 1024, 1024], 4096, false),
            (vec![12288, 12288], 4096, true),
            (vec![4096], 12288, false),
            (vec![151_936], 1024, false),
            (vec![3, 1], 64, false),
        ] {
            let LaunchPlan { log_lanes, blocks, .. } = plan(&rows, (cols / GROUP, cols), 1, gated, 132);
            assert!((2..=5).contains(&log_lanes) && blocks >= 132, "{rows:?} {cols}");
            assert!(rows.iter().all(|r| r.is_multiple_of(32 >> log_lanes)), "{rows:?} {cols}: 2^{log_lanes} lanes");
        }
    }

    #[test]
    fn one_round_has_small_blocks_and_few_rounds_one_block_per_multiprocessor() {
        assert_eq!(
            plan(&[2048, 1024, 1024], (16, 1024), 1, false, 132),
            LaunchPlan { log_lanes: 4, kernel: SMALL, blocks: 132 }
        );
        assert_eq!(
            plan(&[3072, 3072], (16, 1024), 1, true, 132),
            LaunchPlan { log_lanes: 4, kernel: WIDE, blocks: 132 }
        );
        assert_eq!(plan(&[12288, 12288], (64, 4096), 1, true, 132).blocks, 264);
        assert_eq!(plan(&[4096, 1024, 1024], (64, 4096), 1, false, 132).blocks, 132);
    }

    #[test]
    fn long_rows_have_more_in_flight() {
        assert_eq!(plan(&[4096], (192, 12288), 1, false, 132).kernel, DEEP);
        assert_eq!(plan(&[1024], (48, 3072), 1, false, 132).kernel, WIDE);
    }
}
