//! How tasks run: with which instruction set, weights, buffers and threads.

use sluice_backend::{Linear, MatrixId, Norm, Tensor};
use sluice_kernels::Isa;
use sluice_kernels::format::Activations;
use sluice_kernels::scratch::Scratch;

use crate::encoded::Needs;
use crate::memory::{Buffer, PerThread, Place, Weight, grow};
use crate::threads::Pool;

/// The [`ExecContext`] of a [`Cpu`](crate::Cpu) or of [`HostExperts`](crate::HostExperts). A macro, because it borrows single fields. With `&[]` no buffer is looked up: all places
/// are known.
macro_rules! context {
    ($cpu:ident) => {
        $crate::exec::context!($cpu, &$cpu.buffers)
    };
    ($cpu:ident, $buffers:expr) => {
        $crate::exec::ExecContext {
            isa: $cpu.isa,
            mode: $cpu.mode,
            weights: &$cpu.weights,
            buffers: $buffers,
            pool: &mut $cpu.pool,
            workers: &mut $cpu.workers,
        }
    };
}
pub(crate) use context;

/// The scratch of one thread, and its memory node: an index into the nodes that have copies of weights.
#[derive(Default)]
pub struct Worker {
    pub node: usize,
    pub kernel: Scratch,
    /// Results of a row block: `[tokens, rows]`.
    pub tile: Vec<f32>,
    pub tile2: Vec<f32>,
    pub row: Vec<f32>,
    pub floats: Vec<f32>,
}

/// What a round of tasks needs: instruction set, activation mode, weights, buffers, threads and their scratch.
pub struct ExecContext<'a> {
    pub isa: Isa,
    pub mode: Activations,
    pub weights: &'a [Weight],
    pub buffers: &'a [Buffer],
    pub pool: &'a mut Pool,
    pub workers: &'a mut PerThread<Worker>,
}

impl<'a> ExecContext<'a> {
    /// A shorter borrow of the same context.
    pub fn reborrow(&mut self) -> ExecContext<'_> {
        ExecContext { pool: self.pool, workers: self.workers, ..*self }
    }

    /// The address of a tensor.
    pub fn place(&self, t: Tensor) -> Place {
        Place::new(&self.buffers[t.buffer.number()], t)
    }

    /// The weight of a norm, and its epsilon.
    pub fn norm(&self, norm: &Norm) -> (&'a [f32], f32) {
        let place = self.place(norm.weight);
        // SAFETY: weights are written once, at load, and their buffers outlive the context.
        (unsafe { place.get(0, 0..place.cols) }, norm.eps)
    }

    /// The encodings that these matrices take.
    pub fn needs(&self, matrices: impl IntoIterator<Item = MatrixId>) -> Needs {
        Needs::of(matrices.into_iter().map(|m| self.weights[m.number()].format().activation_format(self.mode)))
    }

    /// Waits until the weights of some linears have been read. Called before the tasks start, so that idle threads leave the processor to the readers.
    pub fn wait_for<'l>(&self, linears: impl IntoIterator<Item = &'l Linear>) {
        linears.into_iter().for_each(|l| self.weights[l.matrix.number()].wait());
    }

    /// `out = linear(..)`, or with `add` `out += linear(..)`, for [`run_products`](crate::matmul::run_products).
    pub fn product(&self, linear: &Linear, out: Place, add: bool) -> Product {
        let bias = linear.bias.map(|b| self.place(b));
        let (weight, row) = (linear.matrix.number(), linear.rows.start);
        Product { weight, row, rows: linear.rows.len(), out, bias, add, first_task: 0 }
    }

    /// See [`PerThread::reserve`].
    pub fn reserve(&mut self, tile: usize, row: usize, floats: usize, kernel: usize) {
        self.workers.reserve(tile, row, floats, kernel);
    }
}

impl PerThread<Worker> {
    /// Sizes every thread's tiles and scratch ahead. Any thread may get any task, and a step must not allocate.
    pub fn reserve(&mut self, tile: usize, row: usize, floats: usize, kernel: usize) {
        for w in self.iter_mut() {
            grow(&mut w.tile, tile);
            grow(&mut w.tile2, tile);
            grow(&mut w.row, row);
            grow(&mut w.floats, floats);
            w.kernel.reserve(kernel);
        }
    }
}

impl Worker {
    pub fn bytes(&self) -> usize {
        let floats = self.tile.len() + self.tile2.len() + self.row.len() + self.floats.len();
        4 * floats + self.kernel.bytes()
    }
}

/// `out[t] (+)= W[rows] x[t] + bias` for all tokens.
#[derive(Clone, Copy)]
pub struct Product {
    pub weight: usize,
    pub row: usize,
    pub rows: usize,
    pub out: Place,
    /// `[1, rows]`
    pub bias: Option<Place>,
    pub add: bool,
    /// Tasks before this product's.
    pub first_task: usize,
}
