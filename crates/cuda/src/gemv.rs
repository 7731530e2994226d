//! Products of integer groups and of bf16 pairs for one token, whose time is what lies between kernels more than bytes: how many lanes a row has, and how large
//! blocks are. `kernels/gemv/fused.cu` computes them.

use anyhow::Result;

use crate::driver::Gpu;
use crate::kernels::{Kernel, STATIC_SHARED};
use crate::matmul::{Input, Product};
use crate::parameters::{self as p, number};
use crate::weights::{HALVES, KernelFormat};

/// Columns of a weight group that these kernels take.
const GROUP: usize = 64;
/// Kernels of a bit width: small blocks, large ones, and large ones that have more under way.
const SMALL: usize = 0;
const WIDE: usize = 1;
const DEEP: usize = 2;
/// What a lane of each has under way: rows where a row is one unit of its lanes, else units of one row.
const UNITS: [usize; 3] = [2, 2, 4];
/// Threads of a block of each.
const THREADS: [usize; 3] = [256, 512, 512];
/// Rounds of a warp up to which one block of a multiprocessor is better than two: x is encoded once, and the next kernel has room to begin.
const FEW_ROUNDS: usize = 4;
/// Columns up to which small blocks encode as quickly.
const FEW_COLUMNS: usize = 2048;
/// Columns whose squares are summed in one go.
const NORMED: usize = 256;
/// Rows of bf16 pairs that a warp takes, and columns of them that it has under way: `PIECE_COLUMNS` of `kernels/gemv/fused_bf16.cu`.
const PAIR_ROWS: usize = 2;
const PIECE_COLUMNS: usize = 512;

/// How a launch is split.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Split {
    /// A row has 2^log_lanes lanes.
    log_lanes: u32,
    /// [`SMALL`], [`WIDE`] or [`DEEP`].
    kernel: usize,
    blocks: usize,
}

/// The split in which a warp has least to do, as measured: instructions of a unit, of a round of them, and of a chain's step from lane to lane.
fn split(rows: &[usize], cols: usize, gated: bool, multiprocessors: usize) -> Split {
    let all: usize = rows.iter().sum();
    let groups = cols / GROUP;
    let rounds = |kernel: usize, log: u32, warps: usize| {
        let (sets, steps) = (all >> (5 - log), groups.div_ceil(1 << log));
        match (steps, gated) {
            (1, _) => sets.div_ceil(warps * UNITS[kernel]),
            (_, true) => 2 * (sets / 2).div_ceil(warps) * steps.div_ceil(UNITS[kernel]),
            (_, false) => sets.div_ceil(warps) * steps.div_ceil(UNITS[kernel]),
        }
    };
    let cost = |kernel: usize, log: u32, warps: usize| {
        let chains = if groups <= 1 << log { 1 } else { UNITS[kernel] };
        rounds(kernel, log, warps) * (UNITS[kernel] * 70 + 100 + 35 * (1 << log) / 4 * chains)
    };
    let whole = |log: &u32| rows.iter().all(|r| r.is_multiple_of(32 >> log));
    let best = |kernel: usize, blocks: usize| {
        let warps = blocks * THREADS[kernel] / 32;
        let log_lanes = (2..=5).rev().filter(whole).min_by_key(|log| cost(kernel, *log, warps)).unwrap_or(5);
        (Split { log_lanes, kernel, blocks }, rounds(kernel, log_lanes, warps))
    };
    let (small, once) = best(SMALL, multiprocessors);
    if once == 1 && cols <= FEW_COLUMNS {
        return small;
    }
    // A row of many units.
    if !gated && groups >= 32 * UNITS[DEEP] {
        return best(DEEP, multiprocessors).0;
    }
    match best(WIDE, multiprocessors) {
        (wide, few) if few <= FEW_ROUNDS => wide,
        _ => best(WIDE, 2 * multiprocessors).0,
    }
}

/// Products of one token, with a norm and its encoding before them, and where `gated`, for gate and up, with `silu(gate) * up` behind them: one kernel. Says whether it
/// does.
pub fn multiply_one(gpu: &Gpu, input: Input, products: &[Product], gated: bool) -> Result<bool> {
    let plain = products.iter().all(|product| product.runs.is_none());
    Ok(plain && launched(gpu, input, products, gated, &[])?)
}

/// The same of matrices in which heads are interleaved, where `products` are all that such matrices hold: they are read from end to end.
pub fn multiply_interleaved(gpu: &Gpu, input: Input, products: &[Product]) -> Result<bool> {
    let one = matches!(input, Input::Floats { rows: 1, .. });
    let Some((matrices, heads)) = one.then(|| whole(products)).flatten() else { return Ok(false) };
    launched(gpu, input, &matrices, false, &heads)
}

/// Matrices of which these are the interleaved heads, and where their rows go, if they hold nothing else.
fn whole<'a>(products: &[Product<'a>]) -> Option<(Vec<Product<'a>>, Vec<p::Interleaved>)> {
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
            // Where it lies if it follows those before it; scales of two bytes.
            let scales = 2 * at as u64 * u64::from(first.matrix.groups);
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

/// Whether one kernel takes these. `heads`: for each product where its rows go, or none if they go one behind the other.
fn launched(gpu: &Gpu, input: Input, products: &[Product], gated: bool, heads: &[p::Interleaved]) -> Result<bool> {
    let Input::Floats { x, norm, rows: 1 } = input else { return Ok(false) };
    let Some(first) = products.first().filter(|_| gpu.device.one && products.len() <= p::PARTS) else {
        return Ok(false);
    };
    let cols = first.cols;
    let kind = first.kinds()[0];
    let pairs = kind == KernelFormat::Bf16Bf16;
    let fits = |product: &Product| {
        product.table.is_none()
            && product.bias == 0
            && (product.outputs, product.cols, product.accumulate) == (1, cols, first.accumulate)
            && (product.matrix.kind, product.matrix.element) == (first.matrix.kind, first.matrix.element)
            && match pairs {
                true => product.rows.is_multiple_of(PAIR_ROWS),
                false => product.matrix.group as usize == GROUP && HALVES.contains(&product.matrix.element),
            }
    };
    let aligned = cols.is_multiple_of(GROUP)
        && [x.at, norm.weight].iter().all(|at| at.is_multiple_of(16))
        && (norm.weight == 0 || cols.is_multiple_of(NORMED));
    if !aligned || !products.iter().all(fits) {
        return Ok(false);
    }
    let rows: Vec<usize> = products.iter().map(|product| product.rows).collect();
    let (multiprocessors, groups) = (gpu.device.multiprocessors, cols / GROUP);
    let (kernel, threads, Split { log_lanes, blocks, .. }, shared) = if pairs {
        // All of x, and the norm's weights.
        let shared = 4 * (cols.next_multiple_of(PIECE_COLUMNS) + if norm.weight != 0 { cols } else { 0 });
        let warps = rows.iter().sum::<usize>() / PAIR_ROWS / if gated { 2 } else { 1 };
        let blocks = if warps > multiprocessors * THREADS[WIDE] / 32 { 2 } else { 1 } * multiprocessors;
        (Kernel::GEMV_FUSED_BF16, THREADS[WIDE], Split { log_lanes: 4, kernel: WIDE, blocks }, shared)
    } else if let Some(kernels) = kind.gemv_fused() {
        let split = split(&rows, cols, gated, multiprocessors);
        let (kernel, threads) = (kernels[split.kernel], THREADS[split.kernel]);
        // Quarters of groups, what is known of each, and as floats what has to be seen whole before it is encoded, with the norm's weights.
        let loose = if norm.weight != 0 { 8 * cols } else { 4 * cols * usize::from(cols / 8 > threads) };
        (kernel, threads, split, 16 * 4 * (groups + 1) + 4 * (3 * groups).next_multiple_of(4) + loose)
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
        // Gate and up are counted side by side, others one behind the other.
        let skipped = if gated { 0 } else { before };
        let from = |at: u64, row: usize| at.wrapping_sub((skipped * row) as u64);
        parameters.parts[i] = p::FusedMatrix {
            data: from(product.matrix.data, product.matrix.row_bytes as usize),
            // Of bf16 there are none.
            scales: from(product.matrix.scales, 2 * groups),
            biases: from(product.matrix.biases, 2 * groups),
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
            let Split { log_lanes, blocks, .. } = split(&rows, cols, gated, 132);
            assert!((2..=5).contains(&log_lanes) && blocks >= 132, "{rows:?} {cols}");
            assert!(rows.iter().all(|r| r.is_multiple_of(32 >> log_lanes)), "{rows:?} {cols}: 2^{log_lanes} lanes");
        }
    }

    #[test]
    fn what_is_through_at_once_has_small_blocks_and_what_soon_is_one_of_a_multiprocessor() {
        assert_eq!(split(&[2048, 1024, 1024], 1024, false, 132), Split { log_lanes: 4, kernel: SMALL, blocks: 132 });
        assert_eq!(split(&[3072, 3072], 1024, true, 132), Split { log_lanes: 4, kernel: WIDE, blocks: 132 });
        assert_eq!(split(&[12288, 12288], 4096, true, 132).blocks, 264);
        assert_eq!(split(&[4096, 1024, 1024], 4096, false, 132).blocks, 132);
    }

    #[test]
    fn long_rows_have_more_under_way() {
        assert_eq!(split(&[4096], 12288, false, 132).kernel, DEEP);
        assert_eq!(split(&[1024], 3072, false, 132).kernel, WIDE);
    }
}
