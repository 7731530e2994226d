//! Matrix products: what is multiplied with what, before a kernel is chosen.

use sluice_backend::{Activations, Linear, Projection};

use crate::device::sys::Address;
use crate::ops::activations::EncodedActivations;
use crate::ops::context::Context;
use crate::parameters::{self as p, number};
use crate::weights::{KernelFormat, Needs};

/// The most blocks that a grid has in its second dimension; beyond that, blocks take several tiles.
pub const MAX_GRID_Y: usize = 65_535;

/// The matrix of each output row, for mixtures.
#[derive(Clone, Copy, Debug)]
pub struct ExpertTable<'a> {
    /// `[count]` [`p::Matrix`]
    pub matrices: Address,
    pub count: usize,
    /// `[outputs]` u32: the expert of each output row
    pub experts: Address,
    /// Output rows of each row of x.
    pub per_row: usize,
    /// All kinds that the matrices have.
    pub kinds: &'a [KernelFormat],
    /// Columns of a group and the type of its scale, if all matrices have the same.
    pub groups: Option<(u32, u32)>,
    /// Output rows sorted by expert, if they were sorted.
    pub tiles: Option<PairTiles>,
    /// Output rows come in runs of one matrix, as long as multiples of a tile.
    pub in_runs: bool,
}

/// Output rows of a mixture (pairs of a token and an expert) sorted by expert and cut into tiles, as [`p::Pairs`] has them.
#[derive(Clone, Copy, Debug)]
pub struct PairTiles {
    pub tiles: Address,
    pub order: Address,
    pub max_tiles: usize,
    /// The most pairs of a tile.
    pub tile_pairs: usize,
    /// Each expert has only a few pairs, and [`crate::ops::grouped_gemm`] takes them.
    pub few: bool,
}

impl PairTiles {
    /// The most tiles of so many pairs, whose experts' last tiles may be partly empty.
    pub fn most(pairs: usize, experts: usize, tile_pairs: usize) -> usize {
        (pairs / tile_pairs + experts).min(pairs)
    }
}

/// A matrix product: `out[t] (+)= W x[t] + bias`.
#[derive(Clone, Copy, Debug)]
pub struct Product<'a> {
    pub matrix: p::Matrix,
    /// A matrix for each output row, instead of `matrix`.
    pub table: Option<ExpertTable<'a>>,
    pub rows: usize,
    pub cols: usize,
    pub outputs: usize,
    pub out: p::Tensor,
    pub bias: Address,
    pub accumulate: bool,
    /// If rows come in runs: the rows of a run, and the distance to the next one in the matrix and in the output.
    pub runs: Option<[usize; 3]>,
}

impl Product<'_> {
    /// Its parameters for a kernel.
    pub fn parameters(&self, x: p::Encoded) -> p::Matmul {
        let Product { matrix, table, rows, cols, outputs, out, bias, accumulate, runs } = *self;
        let [run, run_rows, run_columns] = runs.unwrap_or([rows, 0, 0]).map(number);
        p::Matmul {
            matrix,
            table: table.map_or(0, |t| t.matrices),
            experts: table.map_or(0, |t| t.experts),
            tiles: table.and_then(|t| t.tiles).map_or(0, |g| g.tiles),
            order: table.and_then(|t| t.tiles).map_or(0, |g| g.order),
            per_row: table.map_or(1, |t| number(t.per_row)),
            rows: number(rows),
            cols: number(cols),
            outputs: number(outputs),
            x,
            out,
            bias,
            accumulate: accumulate.into(),
            run,
            run_rows,
            run_columns,
        }
    }

    /// Its part that is one token's.
    pub fn of_token(&self, token: usize) -> Self {
        Product { outputs: 1, out: self.out.rows_from(token), ..*self }
    }

    /// Columns of a group and the type of its scale, if all its matrices have the same.
    pub fn groups(&self) -> Option<(u32, u32)> {
        self.table.map_or(Some((self.matrix.group, self.matrix.element)), |table| table.groups)
    }

    /// Rows of x.
    pub fn inputs(&self) -> usize {
        self.outputs / self.table.map_or(1, |t| t.per_row)
    }

    pub fn kinds(&self) -> Vec<KernelFormat> {
        self.table.map_or(vec![KernelFormat::from_number(self.matrix.kind)], |t| t.kinds.to_vec())
    }

    /// KernelFormat, columns of a group and type of the scale, if [`crate::ops::gemv_fused`] may have kernels for it.
    pub fn fused(&self) -> Option<(KernelFormat, u32, u32)> {
        match self.kinds()[..] {
            [kind @ KernelFormat::Bf16Bf16] => Some((kind, 0, 0)),
            [kind] if kind.needs().int11 => {
                self.table.is_none().then_some((kind, self.matrix.group, self.matrix.element))
            }
            _ => self.integers(),
        }
    }

    /// KernelFormat, columns of a group and type of the scale, if all its matrices are integers that have these in common.
    pub fn integers(&self) -> Option<(KernelFormat, u32, u32)> {
        let (kind, (group, element)) = match self.table {
            None => (KernelFormat::from_number(self.matrix.kind), (self.matrix.group, self.matrix.element)),
            Some(ExpertTable { kinds: &[kind], groups: Some(groups), .. }) => (kind, groups),
            Some(_) => return None,
        };
        kind.needs().int8.then_some((kind, group, element))
    }
}

/// The input of products whose kernel may encode it itself.
#[derive(Clone, Copy)]
pub enum MatmulInput<'a> {
    Encoded(&'a EncodedActivations),
    /// Rows as f32, to be normed if a norm is given.
    Floats {
        x: p::Tensor,
        norm: p::Norm,
        rows: usize,
    },
}

/// Projections that are runs of rows of one matrix at equal distances; other rows may be between them.
struct RunOfRows {
    count: usize,
    /// The distance from run to run in the matrix and in the output.
    rows: usize,
    columns: usize,
    last: usize,
}

/// The most projections that are tried as the second of a run: the next head's is among the first that look like it.
const MAX_TRIED: usize = 4;

/// Finds the longest run that begins with projection `first` and marks its members as done.
fn run_from(projections: &[Projection], first: usize, done: &mut [bool]) -> RunOfRows {
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
    // Visits the projections at multiples of a distance, in order.
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
    let mut run = RunOfRows { count: 1, rows: 0, columns: 0, last: first };
    let seconds = projections.iter().enumerate().skip(first + 1).filter(|(i, p)| !done[*i] && alike(p));
    for (_, second) in seconds.take(MAX_TRIED) {
        let (rows, columns) = (place(second).0.checked_sub(row), place(second).1.checked_sub(column));
        let (Some(rows), Some(columns)) = (rows, columns) else { continue };
        let count = members(rows, columns, done, &mut |_| ());
        if count > run.count {
            run = RunOfRows { count, rows, columns, ..run };
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

impl Context {
    /// The product of a linear with activations in this mode, for `outputs` tokens.
    pub fn product(
        &self,
        linear: &Linear,
        outputs: usize,
        out: p::Tensor,
        accumulate: bool,
        mode: Activations,
    ) -> Product<'static> {
        let weight = &self.weights.all[linear.matrix.number()];
        assert!(linear.rows.end <= weight.rows(), "rows {:?} of {}", linear.rows, weight.rows());
        let bias = linear.bias.map_or(0, |b| {
            assert_eq!(b.cols, linear.rows.len(), "one bias per row");
            self.place(b).at
        });
        let (matrix, rows, cols) = (weight.at_row(linear.rows.start, mode), linear.rows.len(), weight.cols());
        Product { matrix, table: None, rows, cols, outputs, out, bias, accumulate, runs: None }
    }

    /// The products of projections of one input. Runs of a matrix become one product: a matrix of interleaved heads has dozens.
    pub fn products(&self, projections: &[Projection], outputs: usize) -> Vec<Product<'static>> {
        let (mut done, mut products) = (vec![false; projections.len()], Vec::with_capacity(projections.len()));
        for (i, Projection { linear, out }) in projections.iter().enumerate() {
            if done[i] {
                continue;
            }
            let run = run_from(projections, i, &mut done);
            let mut product = self.product(linear, outputs, self.place(*out), false, self.mode);
            if run.count > 1 {
                // Checks that the last of the run, too, is inside its matrix and its buffer.
                let Projection { linear: last, out } = &projections[run.last];
                self.product(last, outputs, self.place(*out), false, self.mode);
                product.runs = Some([product.rows, run.rows, run.columns]);
                product.rows *= run.count;
            }
            products.push(product);
        }
        products
    }

    /// The encodings of activations that a linear needs.
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
            let RunOfRows { count, rows, columns, last } = run_from(&projections, first, &mut done);
            assert_eq!((count, rows, columns, last), (3, 16, if first < 2 { 4 } else { 8 }, first + 6));
        }
        assert_eq!(done, [true; 9]);
    }
}
