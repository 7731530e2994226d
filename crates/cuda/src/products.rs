//! Activations encoded, and matrix products of them.

use anyhow::Result;
use sluice_backend::{Activations, Linear, Projection};

use crate::backend::Cuda;
use crate::driver::{Address, Gpu};
use crate::kernels::Kernel;
use crate::memory::Scratch;
use crate::parameters::{self as p, number};
use crate::weights::{Kind, Needs, Shape};

/// Elements per scale of int8 activations.
const GROUP: usize = 32;
/// Rows that are too few to keep the device busy.
const FEW_ROWS: usize = 64;
/// Tokens of a tile in the kernels for several.
const TILE: usize = 8;
/// The most blocks that a grid has in its second direction; beyond, blocks take several tiles.
pub const MOST_BLOCKS: usize = 65_535;

/// Activations `[rows, cols]` in the encodings that were needed.
#[derive(Default)]
pub struct Encoded {
    f: Scratch,
    h: Scratch,
    q: Scratch,
    sx: Scratch,
    mx: Scratch,
    pub rows: usize,
    pub cols: usize,
    is: p::Encoded,
}

impl Encoded {
    fn room(&mut self, gpu: &Gpu, rows: usize, cols: usize, needs: Needs) -> Result<p::Encoded> {
        let n = rows * cols;
        (self.rows, self.cols, self.is) = (rows, cols, p::Encoded::default());
        if needs.f32 {
            self.is.f = self.f.room(gpu, 4 * n)?;
        }
        if needs.bf16 {
            self.is.h = self.h.room(gpu, 2 * n)?;
        }
        if needs.int8 {
            assert!(cols.is_multiple_of(GROUP), "int8 activations come in groups of {GROUP}");
            self.is.q = self.q.room(gpu, n)?;
            self.is.sx = self.sx.room(gpu, 4 * n / GROUP)?;
            self.is.mx = self.mx.room(gpu, 4 * n / GROUP)?;
        }
        Ok(self.is)
    }

    /// The rows as f32, if that was needed.
    pub fn floats(&self) -> Address {
        self.is.f
    }

    pub fn bytes(&self) -> usize {
        [&self.f, &self.h, &self.q, &self.sx, &self.mx].iter().map(|s| s.bytes()).sum()
    }
}

/// What is encoded: rows of `x`, all or those of a list; normed, or put through `silu(x) * up`.
#[derive(Clone, Copy, Default)]
pub struct Source {
    pub x: p::Tensor,
    pub up: p::Tensor,
    pub norm: p::Norm,
    pub taken: Address,
    pub rows: usize,
    pub cols: usize,
}

pub fn encode(gpu: &Gpu, from: Source, needs: Needs, to: &mut Encoded) -> Result<()> {
    let Source { x, up, norm, taken, rows, cols } = from;
    let to = to.room(gpu, rows, cols, needs)?;
    let parameters = p::Encode { x, up, norm, taken, rows: number(rows), cols: number(cols), to };
    // Few rows have large blocks, and where nothing is normed several each.
    let threads = if rows < FEW_ROWS { cols.next_multiple_of(32).min(1024) } else { 256 };
    let parts = if rows < FEW_ROWS && norm.weight == 0 { cols.div_ceil(threads) } else { 1 };
    // SAFETY: tensors were checked against their buffers; the room was just made.
    unsafe { gpu.launch(Kernel::Encode, [number(rows), number(parts), 1], number(threads), 0, &parameters)? };
    Ok(())
}

/// Which matrix each output row takes, for mixtures.
#[derive(Clone, Copy)]
pub struct Table<'a> {
    /// [`p::Matrix`] of each expert.
    pub matrices: Address,
    /// `[outputs]`
    pub experts: Address,
    /// Output rows of each row of x.
    pub per_row: usize,
    /// All kinds of the table's matrices.
    pub kinds: &'a [Kind],
}

/// A matrix product: `out[t] (+)= W x[t] + bias`.
#[derive(Clone, Copy)]
pub struct Product {
    pub matrix: p::Matrix,
    pub rows: usize,
    pub cols: usize,
    pub outputs: usize,
    pub out: p::Tensor,
    pub bias: Address,
    pub accumulate: bool,
    /// Where rows come in runs: rows of one, and how far the next lies in the matrix and in the output.
    pub runs: Option<[usize; 3]>,
}

pub fn multiply(gpu: &Gpu, product: Product, table: Option<Table>, x: &Encoded) -> Result<()> {
    let Product { matrix, rows, cols, outputs, out, bias, accumulate, runs } = product;
    let [run, run_rows, run_columns] = runs.unwrap_or([rows, 0, 0]).map(number);
    assert_eq!(cols, x.cols, "activations of a matrix with {cols} columns");
    assert_eq!(outputs, x.rows * table.map_or(1, |t| t.per_row), "tokens");
    let mut parameters = p::Matmul {
        matrix,
        table: 0,
        experts: 0,
        per_row: 1,
        rows: number(rows),
        cols: number(x.cols),
        outputs: number(outputs),
        x: x.is,
        out,
        bias,
        accumulate: accumulate.into(),
        run,
        run_rows,
        run_columns,
    };
    let own = [Kind(matrix.kind)];
    let kinds = match table {
        None => &own[..],
        Some(Table { matrices, experts, per_row, kinds }) => {
            (parameters.table, parameters.experts, parameters.per_row) = (matrices, experts, number(per_row));
            kinds
        }
    };
    for kind in kinds {
        // Tokens of a mixture have an expert each.
        let many = outputs > 1 && table.is_none();
        let tiles = if many { outputs.div_ceil(TILE) } else { outputs };
        let Shape { kernel, rows: block, threads, shared } = kind.kernel(many, rows * tiles, cols);
        let grid = [number(rows.div_ceil(block)), number(tiles.min(MOST_BLOCKS)), 1];
        // SAFETY: rows of the matrix and of x, and the tensor written, were checked against their buffers.
        unsafe { gpu.launch(kernel, grid, threads, number(shared), &parameters)? };
    }
    Ok(())
}

/// Projections that are runs of one matrix at even distances, whatever lies between them.
struct Run {
    count: usize,
    /// How far apart they are in the matrix and in the output.
    rows: usize,
    columns: usize,
    last: usize,
}

/// Projections that are tried as the second of a run: the next head's is among the first that look like it.
const TRIED: usize = 4;

/// Marks those that go with the one at `first`, as many as there are, and says how they lie.
fn run_from(projections: &[Projection], first: usize, done: &mut [bool]) -> Run {
    let place = |p: &Projection| (p.linear.rows.start, p.out.offset);
    let of = &projections[first];
    let (row, column) = place(of);
    let alike = |p: &Projection| {
        p.linear.matrix == of.linear.matrix
            && of.linear.bias.is_none()
            && p.linear.bias.is_none()
            && p.linear.rows.len() == of.linear.rows.len()
            && (p.out.buffer, p.out.stride, p.out.rows) == (of.out.buffer, of.out.stride, of.out.rows)
    };
    // Those that lie at even distances, in order.
    let members = |rows: usize, columns: usize, done: &[bool], each: &mut dyn FnMut(usize)| {
        let mut count = 1;
        for (i, p) in projections.iter().enumerate().skip(first + 1) {
            if !done[i] && alike(p) && place(p) == (row + count * rows, column + count * columns) {
                count += 1;
                each(i);
            }
        }
        count
    };
    let mut run = Run { count: 1, rows: 0, columns: 0, last: first };
    let seconds = projections.iter().enumerate().skip(first + 1).filter(|(i, p)| !done[*i] && alike(p));
    for (_, second) in seconds.take(TRIED) {
        let (rows, columns) = (place(second).0.checked_sub(row), place(second).1.checked_sub(column));
        let (Some(rows), Some(columns)) = (rows, columns) else { continue };
        let count = members(rows, columns, done, &mut |_| ());
        if count > run.count {
            run = Run { count, rows, columns, ..run };
        }
    }
    done[first] = true;
    if run.count > 1 {
        let before = done.to_vec();
        members(run.rows, run.columns, &before, &mut |i| {
            done[i] = true;
            run.last = i;
        });
    }
    run
}

impl Cuda {
    /// The product of a linear in this mode, for `outputs` tokens.
    pub fn product(
        &self,
        linear: &Linear,
        outputs: usize,
        out: p::Tensor,
        accumulate: bool,
        mode: Activations,
    ) -> Product {
        let weight = &self.weights.all[linear.matrix.number()];
        assert!(linear.rows.end <= weight.rows(), "rows {:?} of {}", linear.rows, weight.rows());
        let bias = linear.bias.map_or(0, |b| {
            assert_eq!(b.cols, linear.rows.len(), "one bias per row");
            self.place(b).at
        });
        let (matrix, rows, cols) = (weight.at_row(linear.rows.start, mode), linear.rows.len(), weight.cols());
        Product { matrix, rows, cols, outputs, out, bias, accumulate, runs: None }
    }

    /// Products that share their input, those of the runs of a matrix together: where heads are interleaved there are dozens of them.
    pub fn multiply_all(&self, projections: &[Projection], outputs: usize, x: &Encoded) -> Result<()> {
        let mut done = vec![false; projections.len()];
        for (i, Projection { linear, out }) in projections.iter().enumerate() {
            if done[i] {
                continue;
            }
            let run = run_from(projections, i, &mut done);
            let mut product = self.product(linear, outputs, self.place(*out), false, self.mode);
            if run.count > 1 {
                // The last of them, too, lies inside its matrix and its buffer.
                let Projection { linear: last, out } = &projections[run.last];
                self.product(last, outputs, self.place(*out), false, self.mode);
                product.runs = Some([product.rows, run.rows, run.columns]);
                product.rows *= run.count;
            }
            multiply(&self.gpu, product, None, x)?;
        }
        Ok(())
    }

    /// What input a matrix takes.
    pub fn needs(&self, linear: &Linear, mode: Activations) -> Needs {
        self.weights.all[linear.matrix.number()].kind(mode).needs()
    }
}

#[cfg(test)]
mod tests {
    use sluice_backend::{BufferId, MatrixId, Tensor};

    use super::*;

    fn projection(matrix: usize, rows: std::ops::Range<usize>, buffer: usize, offset: usize) -> Projection {
        let out = Tensor { buffer: BufferId::new(buffer), offset, rows: 3, cols: rows.len(), stride: 100 };
        Projection { linear: Linear { matrix: MatrixId::new(matrix), rows, bias: None }, out }
    }

    #[test]
    fn interleaved_heads_are_one_product_each() {
        // Three heads of q and k of 4 rows and v of 8, each head's behind one another in the matrix.
        let mut projections = Vec::new();
        for head in 0..3 {
            let from = head * 16;
            projections.push(projection(0, from..from + 4, 0, head * 4));
            projections.push(projection(0, from + 4..from + 8, 0, 12 + head * 4));
            projections.push(projection(0, from + 8..from + 16, 1, head * 8));
        }
        let mut done = vec![false; 9];
        for first in 0..3 {
            let Run { count, rows, columns, last } = run_from(&projections, first, &mut done);
            assert_eq!((count, rows, columns, last), (3, 16, if first < 2 { 4 } else { 8 }, first + 6));
        }
        assert_eq!(done, [true; 9]);
    }
}
