//! One random case on one backend: its inputs and what it observed.

use std::any::Any;
use std::fmt;
use std::ops::Range;

use crate::setup::Setup;
use fastrand::Rng;
use sluice_backend::{
    Activations, Backend, Capacity, Linear, MatrixSource, MemoryClass, Norm, Outcome, SequenceInput, StepInputs,
    Tensor, Wanted, WeightFormat,
};
use sluice_store::Bytes;

/// What a case observed of a backend, in order.
#[derive(Default)]
pub(crate) struct Seen {
    /// For people; the same on every backend.
    pub shapes: Vec<String>,
    /// What the case is about and the backend does not take, such as a weight format.
    pub refused: Option<String>,
    pub values: Vec<(String, Value)>,
}

/// An observation that must be equal.
pub(crate) enum Value {
    Floats { cols: usize, values: Vec<f32> },
    Bytes(Vec<u8>),
    Text(String),
}

/// A tensor in the middle of a buffer whose other elements nobody may touch.
#[derive(Clone, Copy, Debug)]
pub struct Placed {
    pub tensor: Tensor,
    pub whole: Tensor,
}

impl fmt::Display for Placed {
    /// Without the handle, which differs between backends.
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let Tensor { offset, rows, cols, stride, .. } = self.tensor;
        write!(f, "{rows} x {cols} at {offset} by {stride}")
    }
}

/// A prime, so that rows of a matrix are not alike.
const POOL: usize = 4099;

/// A random case in progress. Random numbers never depend on the backend.
pub struct Case {
    // Dropped before what it reads from.
    pub backend: Box<dyn Backend>,
    pub random: Rng,
    pub activations: Activations,
    /// Whether this is the run that others are compared with.
    pub is_reference: bool,
    /// The format of all matrices from here on. `None`: each has its own.
    pub uniform: Option<WeightFormat>,
    seen: Seen,
    /// Values in (-1, 1) from which weights are copied, since many are needed quickly.
    pool: Vec<f32>,
    /// Files and loads that weights come from.
    kept: Vec<Box<dyn Any>>,
}

impl Case {
    pub(crate) fn new(backend: Box<dyn Backend>, random: Rng, setup: &Setup, is_reference: bool) -> Case {
        let (mut random, activations) = (random, setup.activations);
        let seen = Seen { shapes: vec![format!("activations {activations:?}")], ..Seen::default() };
        let pool = (0..POOL).map(|_| random.f32() * 2.0 - 1.0).collect();
        Case { backend, random, activations, is_reference, uniform: None, seen, pool, kept: Vec::new() }
    }

    pub(crate) fn into_seen(self) -> Seen {
        self.seen
    }

    /// Whether the backend takes matrices of this format. A case that is about a format ends early on a backend that does not.
    pub fn takes(&mut self, format: WeightFormat) -> bool {
        let planes = format.planes(256).expect("a format that there is");
        let planes = planes.iter().map(|plane| Bytes::from(vec![0; plane.row_bytes])).collect();
        let taken = self.backend.matrix(MatrixSource { format, rows: 1, cols: 256, planes }).is_ok();
        if !taken {
            self.refuse(format!("{format:?}"));
        }
        taken
    }

    /// Notes that the backend refuses this: the case is left out.
    pub fn refuse(&mut self, what: String) {
        self.seen.refused = Some(what);
    }

    /// Keeps something as long as the backend.
    pub fn keep(&mut self, what: impl Any) {
        self.kept.push(Box::new(what));
    }
}

/// Random choices.
impl Case {
    /// True once in `n` times.
    pub fn once_in(&mut self, n: usize) -> bool {
        self.random.usize(..n) == 0
    }

    pub fn coin(&mut self) -> bool {
        self.random.bool()
    }

    pub fn one_of<T: Clone>(&mut self, all: &[T]) -> T {
        all[self.random.usize(..all.len())].clone()
    }

    /// Tokens of a step: one, few, or enough for the kernels of many.
    pub fn tokens(&mut self) -> usize {
        let most = self.one_of(&[1, 4, 20, 70]);
        self.random.usize(1..=most)
    }

    /// Columns of a weight matrix: whole groups, or any number with a tail.
    pub fn cols(&mut self) -> usize {
        match self.random.u8(..8) {
            0 => self.random.usize(1..200),
            1..=3 => 32 * self.random.usize(1..=9),
            4 => 512 * self.random.usize(1..=3),
            _ => 128 * self.random.usize(1..=3),
        }
    }

    /// Activations: ordinary numbers, and rows of zeros, of very small and of rather large ones.
    pub fn values(&mut self, rows: usize, cols: usize) -> Vec<f32> {
        let mut all = Vec::with_capacity(rows * cols);
        for _ in 0..rows {
            let scale = match self.random.u8(..16) {
                0 => 0.0,
                1 => 1e-39,
                2 => 1e-30,
                3 => 3e4,
                _ => 2.0,
            };
            let sparse = self.once_in(4);
            for _ in 0..cols {
                let x = (self.random.f32() * 2.0 - 1.0) * scale;
                all.push(if sparse && self.once_in(3) { 0.0 } else { x });
            }
        }
        all
    }

    /// Values of about this size.
    pub fn small(&mut self, n: usize, size: f32) -> Vec<f32> {
        let from = self.random.usize(..POOL);
        let mut values = Vec::with_capacity(n);
        let (mut run, mut left) = (&self.pool[from..], n);
        while left > 0 {
            let part = &run[..run.len().min(left)];
            values.extend(part.iter().map(|x| x * size));
            (run, left) = (&self.pool, left - part.len());
        }
        values
    }
}

/// Tensors, weights and observations.
impl Case {
    pub fn shape(&mut self, text: String) {
        self.seen.shapes.push(text);
    }

    /// A tensor `[rows, cols]` with random values, somewhere in a larger buffer.
    pub fn tensor(&mut self, rows: usize, cols: usize) -> Placed {
        let around = match self.random.u8(..3) {
            0 => [0; 4],
            _ => [3, 3, 20, 20].map(|most| self.random.usize(..most)),
        };
        self.tensor_inside(rows, cols, around)
    }

    /// The same, with these margins in the larger buffer.
    pub fn tensor_inside(&mut self, rows: usize, cols: usize, [above, below, left, right]: [usize; 4]) -> Placed {
        let (all_rows, all_cols) = (above + rows + below, left + cols + right);
        let whole = self.backend.alloc(MemoryClass::Scratch, all_rows, all_cols).expect("memory for a tensor");
        let values = self.values(all_rows, all_cols);
        self.backend.upload(&values, whole);
        Placed { tensor: whole.rows(above..above + rows).columns(left..left + cols), whole }
    }

    /// New values in a tensor.
    pub fn fill(&mut self, tensor: Tensor) {
        let values = self.values(tensor.rows, tensor.cols);
        self.backend.upload(&values, tensor);
    }

    /// A vector of weights `[1, n]`.
    pub fn vector(&mut self, values: &[f32]) -> Tensor {
        let tensor = self.backend.alloc(MemoryClass::WeightsCopied, 1, values.len()).expect("memory for a vector");
        self.backend.upload(values, tensor);
        tensor
    }

    pub fn norm(&mut self, cols: usize) -> Norm {
        let weight = self.small(cols, 1.5);
        Norm { weight: self.vector(&weight), eps: self.one_of(&[1e-6, 1e-5, 1e-3]) }
    }

    /// A matrix `[rows, cols]` of any format.
    pub fn linear(&mut self, rows: usize, cols: usize, bias: bool) -> Linear {
        let extra = if self.once_in(3) { self.random.usize(..70) } else { 0 };
        let first = self.random.usize(..=extra);
        let matrix = self.matrix(rows + extra, cols);
        let bias = bias.then(|| self.small(rows, 1.0)).map(|values| self.vector(&values));
        Linear { matrix, rows: first..first + rows, bias }
    }

    /// Observes the values of a tensor.
    pub fn see(&mut self, label: impl Into<String>, tensor: Tensor) {
        let mut values = vec![0.0; tensor.rows * tensor.cols];
        self.backend.download(tensor, &mut values);
        self.see_floats(label, tensor.cols, values);
    }

    /// Observes some rows of a tensor.
    pub fn see_rows(&mut self, label: &str, tensor: Tensor, rows: impl Iterator<Item = usize>) {
        let mut values = vec![0.0; tensor.rows * tensor.cols];
        self.backend.download(tensor, &mut values);
        let rows = rows.flat_map(|r| values[r * tensor.cols..(r + 1) * tensor.cols].to_vec()).collect();
        self.see_floats(label, tensor.cols, rows);
    }

    pub fn see_floats(&mut self, label: impl Into<String>, cols: usize, values: Vec<f32>) {
        self.seen.values.push((label.into(), Value::Floats { cols: cols.max(1), values }));
    }

    pub fn see_bytes(&mut self, label: impl Into<String>, bytes: Vec<u8>) {
        self.seen.values.push((label.into(), Value::Bytes(bytes)));
    }

    pub fn see_text(&mut self, label: impl Into<String>, text: String) {
        self.seen.values.push((label.into(), Value::Text(text)));
    }
}

/// Steps.
impl Case {
    /// Inputs of a step of so many tokens that uses no cache: below `vocabulary`, of some sequences, with logits of some rows.
    pub fn inputs(&mut self, tokens: usize, vocabulary: usize) -> StepInputs {
        let mut inputs = StepInputs::new(&[], Capacity { tokens, sequences: tokens, blocks: 0 });
        let mut left = tokens;
        while left > 0 {
            let n = if self.coin() { 1 } else { self.random.usize(1..=left) };
            let ids: Vec<u32> = (0..n).map(|_| self.random.u32(..vocabulary as u32)).collect();
            let (tables, position): (&[Vec<u32>], _) = (&[], self.random.usize(..100));
            let wanted = self.one_of(&[Wanted::None, Wanted::Last, Wanted::Last, Wanted::All]);
            inputs.push(&SequenceInput { tokens: &ids, position, state: 0, tables, wanted });
            left -= n;
        }
        inputs
    }

    /// A step of so many tokens in which `operations` are enqueued.
    pub fn step(&mut self, tokens: usize, operations: impl FnOnce(&mut dyn Backend)) -> Outcome {
        let inputs = self.inputs(tokens, 2);
        self.backend.begin(&inputs);
        operations(&mut *self.backend);
        self.backend.end()
    }

    /// A run of rows of a matrix with `rows` of them.
    pub fn run_of(&mut self, rows: usize) -> Range<usize> {
        let from = self.random.usize(..rows);
        from..self.random.usize(from + 1..=rows)
    }
}
