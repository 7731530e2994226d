//! Activations encoded, and matrix products of them.

use anyhow::Result;
use sluice_backend::{Activations, Linear, Projection};

use crate::backend::Cuda;
use crate::driver::{Address, Gpu};
use crate::gemv::{multiply_interleaved, multiply_one};
use crate::grouped_gemm::multiply_long;
use crate::kernels::{Kernel, STATIC_SHARED};
use crate::memory::Scratch;
use crate::parameters::{self as p, number};
use crate::weights::{self, KernelFormat, LaunchShape, Needs};

/// Elements per scale of int8 activations.
pub const GROUP: usize = 32;
/// Rows that are too few to keep the device busy.
const FEW_ROWS: usize = 64;
/// Tokens of a tile in the kernels for several.
const TILE: usize = 8;
/// So many tokens at most have tiles of [`weights::FEW`], and more where larger tiles would leave multiprocessors without one.
const MOST_FEW: usize = 16;
/// Of products by blocks of few rows (`kernels/gemm/m16.cu`): columns of a weight group, rows and threads of a block, the most bytes of shared memory that it has, blocks for each multiprocessor, and tokens.
const THIN_GROUP: usize = 64;
const THIN_ROWS: usize = 16;
const THIN_THREADS: u32 = 128;
const THIN_SHARED: usize = 80 << 10;
const THIN_BLOCKS: usize = 8;
const MOST_THIN: usize = 16;
/// Of products by even shares (`kernels/gemm/balanced.cu`): columns of a weight group; rows and threads of a set, the most sets, and tokens of a block; at most, tokens, and blocks that a multiprocessor takes.
const SLAB_GROUP: usize = 64;
const SLAB_ROWS: usize = 16;
const SLAB_THREADS: usize = 128;
const SLAB_SETS: usize = 5;
const SLAB_TOKENS: usize = 16;
const MOST_SLABS: usize = 64;
const MOST_TURNS: usize = 2;
/// Lane sums of so many tokens or more go by squares (`kernels/gemm/f32_tiles.cu`): fewer would leave most multiprocessors without one.
const LEAST_SQUARES: usize = 64;
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
    pub(crate) is: p::Encoded,
    /// Whose integers these are, where the kernel that made it has left them, until the next operation.
    pub(crate) left_of: Option<p::Tensor>,
}

impl Encoded {
    pub fn room(&mut self, gpu: &Gpu, rows: usize, cols: usize, needs: Needs) -> Result<p::Encoded> {
        let n = rows * cols;
        (self.rows, self.cols, self.is, self.left_of) = (rows, cols, p::Encoded::default(), None);
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

    /// Whether these rows lie there as integers already.
    fn holds(&self, x: p::Tensor, rows: usize, cols: usize) -> bool {
        self.left_of == Some(x) && (self.rows, self.cols) == (rows, cols)
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
    let parameters = p::Quantize { x, up, norm, taken, rows: number(rows), cols: number(cols), to };
    // Few rows have large blocks where they are normed; else each has several, whose threads take four columns at a time.
    let threads =
        if rows < FEW_ROWS && norm.weight != 0 { cols.div_ceil(4).next_multiple_of(32).min(1024) } else { 256 };
    let parts = if norm.weight == 0 { cols.div_ceil(4 * threads) } else { 1 };
    // SAFETY: tensors were checked against their buffers; the room was just made.
    unsafe { gpu.launch(Kernel::QUANTIZE, [number(rows), number(parts), 1], number(threads), 0, &parameters)? };
    Ok(())
}

/// Which matrix each output row takes, for mixtures.
#[derive(Clone, Copy, Debug)]
pub struct Table<'a> {
    /// [`p::Matrix`] of each expert.
    pub matrices: Address,
    /// `[outputs]`
    pub experts: Address,
    /// Output rows of each row of x.
    pub per_row: usize,
    /// All kinds of the table's matrices.
    pub kinds: &'a [KernelFormat],
    /// Columns of a group and type of its scale, where all have the same.
    pub groups: Option<(u32, u32)>,
    /// Output rows by their expert, where that was found out.
    pub grouped: Option<Grouped>,
}

/// Output rows of a mixture by their expert, as [`p::Pairs`] has them: so many tiles at most, of up to so many rows.
#[derive(Clone, Copy, Debug)]
pub struct Grouped {
    pub tiles: Address,
    pub order: Address,
    pub most: usize,
    pub of_tile: usize,
    /// Experts have a few each.
    pub few: bool,
}

/// A matrix product: `out[t] (+)= W x[t] + bias`.
#[derive(Clone, Copy, Debug)]
pub struct Product<'a> {
    pub matrix: p::Matrix,
    /// Instead of the matrix.
    pub table: Option<Table<'a>>,
    pub rows: usize,
    pub cols: usize,
    pub outputs: usize,
    pub out: p::Tensor,
    pub bias: Address,
    pub accumulate: bool,
    /// Where rows come in runs: rows of one, and how far the next lies in the matrix and in the output.
    pub runs: Option<[usize; 3]>,
}

impl Product<'_> {
    /// What a kernel is given of it.
    fn part(&self, x: p::Encoded) -> p::Matmul {
        let Product { matrix, table, rows, cols, outputs, out, bias, accumulate, runs } = *self;
        let [run, run_rows, run_columns] = runs.unwrap_or([rows, 0, 0]).map(number);
        p::Matmul {
            matrix,
            table: table.map_or(0, |t| t.matrices),
            experts: table.map_or(0, |t| t.experts),
            tiles: table.and_then(|t| t.grouped).map_or(0, |g| g.tiles),
            order: table.and_then(|t| t.grouped).map_or(0, |g| g.order),
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

    /// Rows of x.
    fn inputs(&self) -> usize {
        self.outputs / self.table.map_or(1, |t| t.per_row)
    }

    pub fn kinds(&self) -> Vec<KernelFormat> {
        self.table.map_or(vec![KernelFormat::from_number(self.matrix.kind)], |t| t.kinds.to_vec())
    }

    /// The same where [`multiply_rows`] may do it, with groups of integers and the type of their scales.
    fn fused(&self) -> Option<(KernelFormat, u32, u32)> {
        let bf16 = KernelFormat::Bf16Bf16;
        if self.kinds() == [bf16] { Some((bf16, 0, 0)) } else { self.integers() }
    }

    /// The one kind of its matrices, their groups and the type of scales, if they are integers that have the same.
    pub(crate) fn integers(&self) -> Option<(KernelFormat, u32, u32)> {
        let (kind, (group, element)) = match self.table {
            None => (KernelFormat::from_number(self.matrix.kind), (self.matrix.group, self.matrix.element)),
            Some(Table { kinds: &[kind], groups: Some(groups), .. }) => (kind, groups),
            Some(_) => return None,
        };
        kind.needs().int8.then_some((kind, group, element))
    }
}

/// Products of one input, side by side where one kernel does all of them.
pub fn multiply(gpu: &Gpu, products: &[Product], x: &Encoded) -> Result<()> {
    let mut rest = products;
    while let Some((first, others)) = rest.split_first() {
        let alike = |p: &&Product| {
            (p.kinds(), p.integers(), p.cols, p.outputs, p.table.is_some())
                == (first.kinds(), first.integers(), first.cols, first.outputs, first.table.is_some())
        };
        let count = 1 + others.iter().take(p::PARTS - 1).take_while(alike).count();
        let (together, behind) = rest.split_at(count);
        multiply_alike(gpu, together, x)?;
        rest = behind;
    }
    Ok(())
}

/// Tokens of a tile, for products of so many rows in all.
fn tokens_of_tile(gpu: &Gpu, rows: usize, tokens: usize) -> usize {
    let blocks = rows.div_ceil(128) * tokens.div_ceil(weights::TILE);
    if tokens <= MOST_FEW || blocks < gpu.device.multiprocessors { weights::FEW } else { weights::TILE }
}

fn multiply_alike(gpu: &Gpu, products: &[Product], x: &Encoded) -> Result<()> {
    let mut parameters = p::Products::default();
    for (product, part) in products.iter().zip(&mut parameters.parts) {
        assert_eq!(product.cols, x.cols, "activations of a matrix with {} columns", product.cols);
        assert_eq!(product.inputs(), x.rows, "tokens");
        *part = product.part(x.is);
    }
    let (first, rows) = (&products[0], products.iter().map(|p| p.rows).max().unwrap_or(0));
    let grouped = first.table.and_then(|t| t.grouped);
    if let [product] = products
        && multiply_long(gpu, product, x)?
    {
        return Ok(());
    }
    if grouped.is_none()
        && (multiply_thin(gpu, products, &parameters)? || multiply_by_shares(gpu, products, &parameters)?)
    {
        return Ok(());
    }
    let several = gpu.device.tiles && (grouped.is_some() || first.outputs > 1 && first.table.is_none());
    if let Some((kind, group, _)) = first.integers().filter(|_| several) {
        let of = group as usize / GROUP;
        let shape = |tokens| kind.gemm_mma(of, tokens, gpu.device.shared);
        let of_tile = grouped.map_or_else(|| tokens_of_tile(gpu, rows * products.len(), first.outputs), |g| g.of_tile);
        // Where a tile of many tokens does not fit, it is one of few.
        let of_tile = if grouped.is_none() && shape(of_tile).is_none() { weights::FEW } else { of_tile };
        if let Some(LaunchShape { kernel, rows: block, threads, shared }) = shape(of_tile) {
            let tiles = grouped.map_or(first.outputs.div_ceil(of_tile), |g| g.most).min(MOST_BLOCKS);
            let grid = [number(rows.div_ceil(block)), number(tiles), number(products.len())];
            // SAFETY: rows of the matrix and of x, and the tensor written, were checked against their buffers.
            unsafe { gpu.launch(kernel, grid, threads, number(shared), &parameters)? };
            return Ok(());
        }
    }
    for kind in first.kinds() {
        // Tokens of a mixture have an expert each.
        let many = first.outputs > 1 && first.table.is_none();
        if let Some(kernel) = kind.gemm_32().filter(|_| many && first.outputs >= LEAST_SQUARES) {
            let tiles = first.outputs.div_ceil(weights::SQUARE).min(MOST_BLOCKS);
            let grid = [number(rows.div_ceil(weights::SQUARE)), number(tiles), number(products.len())];
            // SAFETY: rows of the matrix and of x, and the tensor written, were checked against their buffers.
            unsafe { gpu.launch(kernel, grid, weights::SQUARE_THREADS, 0, &parameters)? };
            continue;
        }
        let tiles = if many { first.outputs.div_ceil(TILE) } else { first.outputs };
        let LaunchShape { kernel, rows: block, threads, shared } = kind.gemv_or_gemm(many, rows * tiles, first.cols);
        let grid = [number(rows.div_ceil(block)), number(tiles.min(MOST_BLOCKS)), number(products.len())];
        // SAFETY: rows of the matrix and of x, and the tensor written, were checked against their buffers.
        unsafe { gpu.launch(kernel, grid, threads, number(shared), &parameters)? };
    }
    Ok(())
}

/// The same for up to [`MOST_THIN`] tokens whose tiles would leave most multiprocessors without a block. Says whether it does.
fn multiply_thin(gpu: &Gpu, products: &[Product], parameters: &p::Products) -> Result<bool> {
    let first = &products[0];
    let Some((kind, group, element)) = first.integers().filter(|_| gpu.device.thin && gpu.device.tiles) else {
        return Ok(false);
    };
    let of_block = if first.outputs <= 8 { 8 } else { 16 };
    let (cols, rows) = (first.cols, products.iter().map(|p| p.rows).max().unwrap_or(0));
    let shared = of_block * (cols.next_multiple_of(128) + 32 + 12 * (cols / THIN_GROUP));
    let all = products.iter().map(|p| p.rows.div_ceil(THIN_ROWS)).sum::<usize>();
    let words = products.iter().all(|p| (p.matrix.data | p.matrix.row_bytes) % 4 == 0);
    let fits = first.outputs > 1
        && first.table.is_none()
        && first.outputs <= MOST_THIN
        && all <= THIN_BLOCKS * gpu.device.multiprocessors
        && group as usize == THIN_GROUP
        && weights::HALVES.contains(&element)
        && shared <= THIN_SHARED
        && shared + STATIC_SHARED <= gpu.device.shared;
    let Some(kernel) = kind.gemm_m16(of_block).filter(|_| fits && words) else { return Ok(false) };
    let tiles = first.outputs.div_ceil(of_block);
    let grid = [number(rows.div_ceil(THIN_ROWS)), number(tiles), number(products.len())];
    // SAFETY: rows of the matrices and of x, and the tensors written, were checked against their buffers.
    unsafe { gpu.launch(kernel, grid, THIN_THREADS, number(shared), parameters)? };
    Ok(true)
}

/// Bytes of shared memory that a block of [`multiply_by_shares`] has.
fn slab_shared(kind: KernelFormat, sets: usize, cols: usize) -> usize {
    let (groups, meet) = (cols / SLAB_GROUP, 16 * sets * SLAB_TOKENS * (SLAB_ROWS + 1));
    let row = if kind.bits() == Some(4) { 32 } else { 96 };
    let activations = (SLAB_TOKENS * (cols.next_multiple_of(128) + 32)).max(meet);
    let weights = sets * 4 * groups.div_ceil(4) * SLAB_ROWS * row;
    activations + groups * 12 * (SLAB_TOKENS + 2) + weights + groups * 8 * (SLAB_ROWS * sets + 1)
}

/// The same for up to [`MOST_SLABS`] tokens where tiles would leave multiprocessors without a block, or would mostly be empty. Says whether it does.
fn multiply_by_shares(gpu: &Gpu, products: &[Product], parameters: &p::Products) -> Result<bool> {
    let first = &products[0];
    let Some((kind, group, element)) = first.integers().filter(|_| gpu.device.slabs && gpu.device.tiles) else {
        return Ok(false);
    };
    let (cols, tokens) = (first.cols, first.outputs);
    let aligned = products.iter().all(|p| (p.matrix.data | p.matrix.row_bytes) % 16 == 0 && p.rows > 0);
    let fits = (MOST_THIN + 1..=MOST_SLABS).contains(&tokens)
        && first.table.is_none()
        && group as usize == SLAB_GROUP
        && weights::HALVES.contains(&element);
    let Some(kernel) = kind.gemm_balanced().filter(|_| fits && aligned) else { return Ok(false) };
    let (all, tiles) =
        (products.iter().map(|p| p.rows.div_ceil(SLAB_ROWS)).sum::<usize>(), tokens.div_ceil(SLAB_TOKENS));
    // Blocks that a multiprocessor takes one after the other: where these are many, weights come too late.
    let turns = |sets: usize| (all.div_ceil(sets) * tiles).div_ceil(gpu.device.multiprocessors);
    let fitting = (1..=SLAB_SETS).rev().filter(|sets| {
        turns(*sets) <= MOST_TURNS && slab_shared(kind, *sets, cols) + STATIC_SHARED <= gpu.device.shared
    });
    let Some(sets) = fitting.min_by_key(|sets| turns(*sets) * sets) else { return Ok(false) };
    let grid = [number(all.div_ceil(sets)), number(tiles), 1];
    let (threads, shared) = (number(SLAB_THREADS * sets), number(slab_shared(kind, sets, cols)));
    // SAFETY: rows of the matrices and of x, and the tensors written, were checked against their buffers.
    unsafe { gpu.launch(kernel, grid, threads, shared, parameters)? };
    Ok(true)
}

/// What products take in that encode it themselves.
#[derive(Clone, Copy)]
pub enum Input<'a> {
    Encoded(&'a Encoded),
    /// As it is, or normed.
    Floats {
        x: p::Tensor,
        norm: p::Norm,
        rows: usize,
    },
}

/// So many tokens at most are no work for tensor cores.
pub const MOST_BY_ROWS: usize = 2;
/// Elements that each block encodes for itself, at most.
const MOST_ENCODED: usize = 24 << 10;
/// Threads of a block of [`Way::Rows`].
const ROW_THREADS: u32 = 256;
/// Blocks of it on each multiprocessor.
const ROW_BLOCKS: usize = 2;

/// The same for a few tokens of integer groups with all that comes before it, and where `gated`, for gate and up, with `silu(gate) * up` behind it: one
/// kernel. Says whether it does.
pub fn multiply_rows(gpu: &Gpu, input: Input, products: &[Product], gated: bool) -> Result<bool> {
    let Some(first) = products.first() else { return Ok(true) };
    if gated {
        assert!(products.len() == 2 && products[0].rows == products[1].rows, "gate and up");
        assert!(products.iter().all(|p| p.bias == 0 && p.runs.is_none() && !p.accumulate), "plain products");
    }
    if multiply_one(gpu, input, products, gated)? {
        return Ok(true);
    }
    let Some((kind, group, element)) = first.fused() else { return Ok(false) };
    if gpu.device.tiles && kind.needs().int8 && first.table.is_none() && first.outputs > MOST_BY_ROWS {
        return Ok(false);
    }
    let (cols, inputs) = (first.cols, first.inputs());
    let alike = |p: &Product| {
        p.fused() == first.fused()
            && (p.cols, p.outputs, p.inputs()) == (cols, first.outputs, inputs)
            && p.table.is_some() == first.table.is_some()
    };
    let Some(kernel) = kind.gemv_batched(if first.table.is_some() { 1 } else { first.outputs }) else {
        return Ok(false);
    };
    let integers = kind.needs().int8;
    let encoded = match integers {
        true => inputs * cols + 2 * 4 * (inputs * cols / GROUP).next_multiple_of(4),
        false => (2 * inputs * cols).next_multiple_of(16),
    };
    let (mut parameters, mut shared) = (p::GemvBatched::default(), encoded);
    let encoded = match input {
        Input::Encoded(x) => x.is,
        Input::Floats { x, norm, rows } => {
            assert_eq!(rows, inputs, "tokens");
            if norm.weight != 0 {
                shared += 4 * cols;
            }
            let aligned = x.at % 16 == 0 && (x.stride % 4 == 0 || rows == 1) && norm.weight % 16 == 0;
            if !aligned || inputs * cols > MOST_ENCODED {
                return Ok(false);
            }
            (parameters.x, parameters.norm) = (x, norm);
            p::Encoded::default()
        }
    };
    let fits = shared + STATIC_SHARED <= gpu.device.shared
        && cols % GROUP == 0
        && (!integers || [32, 64, 128].contains(&group));
    if !gpu.device.rows || !fits || products.len() > p::PARTS || !products.iter().all(alike) {
        return Ok(false);
    }
    for (product, part) in products.iter().zip(&mut parameters.parts) {
        *part = product.part(encoded);
    }
    (parameters.tokens, parameters.count) = (number(inputs), number(products.len()));
    (parameters.gated, parameters.of, parameters.element) = (gated.into(), group / GROUP as u32, element);
    let per_warp = if integers { 32 / (4 * group as usize / GROUP) } else { 2 };
    let tasks = products.iter().map(|p| p.rows.div_ceil(per_warp) * p.table.map_or(1, |_| p.outputs)).sum::<usize>();
    // A warp takes gate and up. Few tasks are spread over all multiprocessors.
    let (tasks, warps) = (if gated { tasks / 2 } else { tasks }, ROW_THREADS as usize / 32);
    let blocks =
        tasks.div_ceil(warps).clamp(tasks.min(gpu.device.multiprocessors), ROW_BLOCKS * gpu.device.multiprocessors);
    // SAFETY: rows of the matrices and of x, and the tensors written, were checked against their buffers.
    unsafe { gpu.launch(kernel, [number(blocks), 1, 1], ROW_THREADS, number(shared), &parameters)? };
    Ok(true)
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

    /// Products that share their input, those of the runs of a matrix together: where heads are interleaved there are dozens of them.
    pub fn products(&self, projections: &[Projection], outputs: usize) -> Vec<Product<'static>> {
        let (mut done, mut products) = (vec![false; projections.len()], Vec::with_capacity(projections.len()));
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
            products.push(product);
        }
        products
    }

    /// Encodes and multiplies: in one kernel what can be, else one after the other, with `encoded` for what lies between.
    pub fn encode_and_multiply(
        &self,
        x: p::Tensor,
        norm: p::Norm,
        products: &[Product],
        encoded: &mut Encoded,
    ) -> Result<()> {
        let Some(first) = products.first() else { return Ok(()) };
        let (rows, cols) = (first.outputs, first.cols);
        let (mut fused, mut rest): (Vec<Product>, Vec<Product>) = products.iter().partition(|p| p.fused().is_some());
        let input = Input::Floats { x, norm, rows };
        fused.sort_by_key(Product::fused);
        for alike in fused.chunk_by(|a, b| a.fused() == b.fused()) {
            if multiply_interleaved(&self.gpu, input, alike)? {
                continue;
            }
            for few in alike.chunks(p::PARTS) {
                if !multiply_rows(&self.gpu, input, few, false)? {
                    rest.extend_from_slice(few);
                }
            }
        }
        if rest.is_empty() {
            return Ok(());
        }
        let kinds = rest.iter().flat_map(Product::kinds);
        let needs = kinds.fold(Needs::default(), |needs, kind| needs.and(kind.needs()));
        let integers = needs == Needs::INT8;
        if !integers || norm.weight != 0 || !encoded.holds(x, rows, cols) {
            encode(&self.gpu, Source { x, norm, rows, cols, ..Source::default() }, needs, encoded)?;
        }
        rest.sort_by_key(Product::kinds);
        multiply(&self.gpu, &rest, encoded)
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
