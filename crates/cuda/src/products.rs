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

/// How many projections from the first on are runs of one matrix at even distances, and how far apart they are in the matrix and in the output.
fn run_of(projections: &[Projection]) -> Option<(usize, usize, usize)> {
    let place = |p: &Projection| (p.linear.rows.start, p.out.offset);
    let [first, second, ..] = projections else { return None };
    let (rows, columns) = (place(second).0.checked_sub(place(first).0)?, place(second).1.checked_sub(place(first).1)?);
    let alike = |(i, p): &(usize, &Projection)| {
        let (from, to) = place(first);
        p.linear.matrix == first.linear.matrix
            && p.linear.bias.is_none()
            && p.linear.rows.len() == first.linear.rows.len()
            && (p.out.buffer, p.out.stride, p.out.rows) == (first.out.buffer, first.out.stride, first.out.rows)
            && place(p) == (from + i * rows, to + i * columns)
    };
    let count = projections.iter().enumerate().take_while(alike).count();
    (count > 1).then_some((count, rows, columns))
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
        let (matrix, rows, cols) = (weight.from_row(linear.rows.start, mode), linear.rows.len(), weight.cols());
        Product { matrix, rows, cols, outputs, out, bias, accumulate, runs: None }
    }

    /// Products that share their input, those of the runs of a matrix together: where heads are interleaved there are dozens of them.
    pub fn multiply_all(&self, projections: &[Projection], outputs: usize, x: &Encoded) -> Result<()> {
        let mut done = 0;
        while done < projections.len() {
            let run = run_of(&projections[done..]);
            let Projection { linear, out } = &projections[done];
            let mut product = self.product(linear, outputs, self.place(*out), false, self.mode);
            if let Some((count, rows, columns)) = run {
                // The last of them, too, lies inside its matrix and its buffer.
                let Projection { linear: last, out } = &projections[done + count - 1];
                self.product(last, outputs, self.place(*out), false, self.mode);
                product.runs = Some([product.rows, rows, columns]);
                product.rows *= count;
            }
            multiply(&self.gpu, product, None, x)?;
            done += run.map_or(1, |(count, ..)| count);
        }
        Ok(())
    }

    /// What input a matrix takes.
    pub fn needs(&self, linear: &Linear, mode: Activations) -> Needs {
        self.weights.all[linear.matrix.number()].kind(mode).needs()
    }
}
