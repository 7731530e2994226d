//! Products of a mixture's experts that have a few tokens each (`kernels/experts_few.cu`).

use anyhow::Result;

use crate::driver::{Address, Gpu};
use crate::kernels::STATIC_SHARED;
use crate::parameters::{self as p, number};
use crate::products::{Encoded, Grouped};
use crate::weights::{self, Kind, Needs};

/// Columns of a weight group, threads of a block, its rows, and tokens that are taken together.
const GROUP: usize = 64;
const THREADS: u32 = 128;
const ROWS: usize = 64;
pub const TOGETHER: usize = 8;
/// Blocks on each multiprocessor, at most, and shared memory that each has beside what it asks for: what is known when it is compiled, and the driver's.
const BLOCKS: usize = 5;
const OWN: usize = 7 << 10;

/// Which experts a few tokens each take, whose products [`multiply_few`] does.
#[derive(Clone, Copy)]
pub struct Few<'a> {
    /// [`p::Matrix`] of each expert; where what they give is put through `silu(gate) * up`, of up, too.
    pub tables: [Address; 2],
    pub kinds: &'a [Kind],
    pub groups: Option<(u32, u32)>,
    pub grouped: Grouped,
    /// Pairs of each row of x.
    pub per_row: usize,
    pub rows: usize,
    pub pairs: usize,
}

impl Few<'_> {
    /// Whether [`multiply_few`] can do it on a device, of so many columns.
    pub fn fits(gpu: &Gpu, kinds: &[Kind], groups: Option<(u32, u32)>, cols: usize) -> bool {
        let &[kind] = kinds else { return false };
        groups.is_some_and(|(group, element)| group as usize == GROUP && weights::HALVES.contains(&element))
            && kind.few().is_some()
            && cols.is_multiple_of(GROUP)
            && few_shared(kind, cols) + STATIC_SHARED <= gpu.device.shared
    }
}

/// Bytes that a block of [`multiply_few`] has: activations with their scales, and a ring of weights for each warp (`FewStep`).
fn few_shared(kind: Kind, cols: usize) -> usize {
    let (bits, groups) = (kind.bits().unwrap_or(8), cols / GROUP);
    let (row, deep) = (32 * bits + if bits == 4 { 0 } else { 16 }, if bits <= 4 { 3 } else { 2 });
    let ring = deep * 16 * (row + 16);
    TOGETHER * (cols.next_multiple_of(128) + 32 + 12 * groups) + THREADS as usize / 32 * ring
}

/// Where [`multiply_few`] leaves a product; that of gate together with that of up, as `silu(gate) * up`, encoded.
pub enum Output<'a> {
    Floats(p::Tensor),
    Hidden(&'a mut Encoded),
}

/// Products of experts that have a few tokens each.
pub fn multiply_few(gpu: &Gpu, few: Few, x: &Encoded, out: Output) -> Result<()> {
    let Few { tables: [table, up], kinds, groups, grouped, per_row, rows, pairs } = few;
    assert!(Few::fits(gpu, kinds, groups, x.cols), "products of experts that have a few tokens each");
    assert_eq!(x.rows * per_row, pairs, "tokens");
    let (Some([gated, plain]), Some((_, element))) = (kinds[0].few(), groups) else { unreachable!("it fits") };
    let mut parameters = p::ExpertsFew {
        table,
        up,
        tiles: grouped.tiles,
        order: grouped.order,
        x: x.is,
        per_row: number(per_row),
        rows: number(rows),
        cols: number(x.cols),
        element,
        ..p::ExpertsFew::default()
    };
    let (kernel, of_set) = match out {
        Output::Floats(out) => {
            parameters.out = out;
            (plain, ROWS)
        }
        Output::Hidden(hidden) => {
            parameters.hidden = hidden.room(gpu, pairs, rows, Needs::INT8)?;
            (gated, ROWS / 2)
        }
    };
    let shared = few_shared(kinds[0], x.cols);
    let together = (gpu.device.shared / (shared + OWN)).clamp(1, BLOCKS);
    let blocks = (grouped.most * rows.div_ceil(of_set)).min(together * gpu.device.multiprocessors);
    // SAFETY: the tables' matrices have so many rows and columns, as tensors were checked to have; the room was just made.
    unsafe { gpu.launch(kernel, [number(blocks), 1, 1], THREADS, number(shared), &parameters)? };
    Ok(())
}
