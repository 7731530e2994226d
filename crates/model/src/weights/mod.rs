//! Loading: weights are looked up by their place in the model, checked against its description, and registered with the backend.

mod column_orders;
mod experts;
mod ngrams;
mod values;
mod vectors;

use std::ops::Range;

use anyhow::{Context, Result, ensure};
use sluice_backend::{
    Backend, Float, Linear, MatrixId, MatrixSource, MemoryClass, Mlp, NgramTable, Tensor, WeightFormat,
};
use sluice_store::Bytes;

use self::column_orders::{ColumnOrders, Purpose};
use crate::description::{Description, WeightDescription};
use crate::source::{Assembled, MatrixShape, ModelTensors, TensorLayout};

/// Looks weights up in a model's tensors, checks their shapes and hands them to the backend.
pub struct Weights<'a> {
    tensors: &'a ModelTensors,
    backend: &'a mut dyn Backend,
    /// Matrices in the order of their use in a step: layer by layer, then head and embedding.
    order: Vec<Used>,
    /// What of routed experts is made in memory.
    made_experts: Option<MadeExperts>,
    /// Whose what is loaded is.
    by: UsedBy,
    /// Tables of which a token uses few rows.
    tables: Vec<RowTable>,
    /// Of matrices whose columns are in the order of activations.
    orders: ColumnOrders,
    description: &'a Description,
    /// Rows of activations.
    max_tokens: usize,
    /// Positions below this one are used.
    positions: usize,
    /// Whether values of vectors are read; otherwise only names, types and shapes are checked.
    reads: bool,
}

/// Routed experts of which a part is made at load and is in no file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MadeExperts {
    /// The first of their matrices, by the name of its tensor.
    pub name: String,
    /// Their integers are made too: nothing of them is on disk.
    pub whole: bool,
}

impl MadeExperts {
    /// Why experts that are made as a whole cannot stay on disk.
    pub fn cannot_stay_on_disk(&self) -> String {
        let name = &self.name;
        format!(
            "{name}: experts that are stored by columns cannot stay on disk: keep them in memory (--experts mapped)"
        )
    }
}

/// The bytes of one plane of a matrix.
#[derive(Clone, Debug)]
pub struct Used {
    /// The plane, as a view of its file.
    pub bytes: Bytes,
    /// Who uses it.
    pub by: UsedBy,
}

/// What of a step uses a plane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UsedBy {
    /// Every token all of it.
    All,
    /// Routed experts, so not every token.
    Experts,
    /// Each token one row, or a few.
    Rows,
}

/// A table of which a token uses few rows.
#[derive(Clone, Debug)]
pub enum RowTable {
    /// The row of the token's number.
    Tokens(MatrixId),
    /// Those of its n-grams.
    Ngrams(NgramTable),
}

/// These of its rows.
pub fn rows_of(linear: &Linear, rows: Range<usize>) -> Linear {
    Linear { bias: linear.bias.map(|bias| bias.columns(rows.clone())), rows, ..linear.clone() }
}

impl<'a> Weights<'a> {
    /// # Errors
    /// A checkpoint without an embedding, or quantised in a way that is not supported.
    pub fn new(
        tensors: &'a ModelTensors,
        description: &'a Description,
        backend: &'a mut dyn Backend,
        (max_tokens, positions): (usize, usize),
    ) -> Result<Weights<'a>> {
        tensors.config().quantization()?;
        tensors.layout().check()?;
        tensors.check_embedding()?;
        Ok(Weights {
            tensors,
            backend,
            order: Vec::new(),
            made_experts: None,
            by: UsedBy::All,
            tables: Vec::new(),
            orders: ColumnOrders::default(),
            description,
            max_tokens,
            positions,
            reads: true,
        })
    }

    /// Uses zeros for the values of vectors, so that no weight is read.
    pub fn without_values(self) -> Self {
        Weights { reads: false, ..self }
    }

    /// The matrices that were registered, in the order of their use, what of routed experts is in no file, and the tables of which a token uses few rows.
    pub fn into_order(self) -> (Vec<Used>, Option<MadeExperts>, Vec<RowTable>) {
        (self.order, self.made_experts, self.tables)
    }

    /// Activations of a step: `[max_tokens, cols]`.
    pub fn scratch(&mut self, cols: usize) -> Result<Tensor> {
        self.backend.alloc(MemoryClass::Scratch, self.max_tokens, cols)
    }

    /// The backend, for everything that is not a weight.
    pub fn backend(&mut self) -> &mut dyn Backend {
        self.backend
    }

    /// How the checkpoint holds weights.
    pub fn layout(&self) -> &dyn TensorLayout {
        self.tensors.layout()
    }

    /// A number as the reference has it in the type that the checkpoint works in. Of GGUF's blocks that is f32.
    pub fn rounded(&self, x: f64) -> Result<f32> {
        let embedding = self.tensors.tensor("embed_tokens.weight");
        let is_blocks = |t: &sluice_store::Tensor| {
            matches!(self.layout().format(self.tensors.checkpoint(), t), Ok(WeightFormat::Blocks(_)))
        };
        if embedding.as_ref().is_some_and(is_blocks) {
            return Ok(x as f32);
        }
        // To nearest even, for numbers that are normal in each type.
        let dropped = match self.tensors.working_type()? {
            Float::F32 => return Ok(x as f32),
            Float::F16 => 13,
            Float::Bf16 => 16,
        };
        let bits = (x as f32).to_bits();
        let half = (1 << (dropped - 1)) - 1 + (bits >> dropped & 1);
        Ok(f32::from_bits((bits + half) >> dropped << dropped))
    }

    /// The weight named `part` in a layer, or outside of layers.
    fn described(&self, layer: impl Into<Option<usize>>, part: &str) -> WeightDescription {
        let found = self.description.weight(layer.into(), part);
        found.unwrap_or_else(|| panic!("the description of {} lacks {part}", self.description.architecture))
    }

    /// The checkpoint's name of a weight's module.
    fn module(&self, w: &WeightDescription) -> String {
        self.tensors.layout().full(&self.description.stored_name(w))
    }

    /// Registers the matrix in the tensor `name`, of `leading` matrices of `[rows, cols]`.
    fn load(&mut self, name: &str, leading: &[usize], rows: usize, cols: usize) -> Result<MatrixId> {
        let source = self.tensors.matrix(name, MatrixShape { leading, rows, cols }, self.reads)?;
        self.register(name, source)
    }

    /// Registers the matrix in the tensor `name`, whose columns may be in an order of their own: [`Weights::order_of`] knows it.
    fn load_ordered(&mut self, name: &str, rows: usize, cols: usize) -> Result<MatrixId> {
        let shape = MatrixShape { leading: &[], rows, cols };
        let Assembled { matrix, order } = self.tensors.ordered_matrix(name, shape, self.reads)?;
        let id = self.register(name, matrix)?;
        if let Some(order) = order {
            self.orders.keep(self.backend, id, order)?;
        }
        Ok(id)
    }

    /// Registers a matrix, which is in the tensor `name` or made of it.
    fn register(&mut self, name: &str, source: MatrixSource) -> Result<MatrixId> {
        // What was made in memory is there, and no reader brings it.
        let of_files = source.planes.iter().filter(|bytes| bytes.is_of_file());
        self.order.extend(of_files.map(|bytes| Used { bytes: bytes.clone(), by: self.by }));
        if self.by == UsedBy::Experts && source.planes.iter().any(|bytes| !bytes.is_of_file()) {
            let first = || MadeExperts { name: name.to_owned(), whole: false };
            self.made_experts.get_or_insert_with(first).whole |= !source.planes[0].is_of_file();
        }
        self.backend.matrix(source).with_context(|| format!("tensor {}", name.strip_suffix(".weight").unwrap_or(name)))
    }

    /// The order in which a matrix takes its input, `[1, cols]`, if it is not the input's own.
    pub fn order_of(&self, linear: &Linear) -> Option<Tensor> {
        self.orders.of(linear)
    }

    /// Where inputs of `cols` columns are gathered: `[max_tokens, cols]`.
    pub fn gathered(&mut self, cols: usize) -> Result<Tensor> {
        self.orders.scratch(self.backend, Purpose::Gathered, (self.max_tokens, cols))
    }

    /// Where inputs of `cols` columns are normed before they are gathered: `[max_tokens, cols]`.
    pub fn normed(&mut self, cols: usize) -> Result<Tensor> {
        self.orders.scratch(self.backend, Purpose::Normed, (self.max_tokens, cols))
    }

    /// Gate and up of dense layers that no fused operation computes: `[max_tokens, cols]` each.
    pub fn gate_and_up(&mut self, cols: usize) -> Result<[Tensor; 2]> {
        let mut of = |purpose| self.orders.scratch(self.backend, purpose, (self.max_tokens, cols));
        Ok([of(Purpose::Gate)?, of(Purpose::Up)?])
    }

    /// The matrix `part`.
    pub fn matrix(&mut self, layer: impl Into<Option<usize>>, part: &str) -> Result<MatrixId> {
        let w = self.described(layer, part);
        self.load(&format!("{}.weight", self.module(&w)), &[], w.rows, w.cols)
    }

    /// The table `part` outside of layers, of which a step reads a row for each token.
    pub fn table(&mut self, part: &str) -> Result<MatrixId> {
        self.by = UsedBy::Rows;
        let table = self.matrix(None, part);
        self.by = UsedBy::All;
        self.tables.extend(table.as_ref().ok().copied().map(RowTable::Tokens));
        table
    }

    /// The matrix `part` with its bias, if it has one.
    pub fn linear(&mut self, layer: impl Into<Option<usize>> + Copy, part: &str) -> Result<Linear> {
        let matrix = self.matrix(layer, part)?;
        self.with_bias(matrix, layer, part)
    }

    /// The matrix `part`, whose tensor's name has no `.weight`.
    pub fn bare_linear(&mut self, layer: impl Into<Option<usize>>, part: &str) -> Result<Linear> {
        let w = self.described(layer, part);
        let matrix = self.load(&self.module(&w), &[], w.rows, w.cols)?;
        Ok(Linear { matrix, rows: 0..w.rows, bias: None })
    }

    /// The same with columns that may be in an order of their own: [`Weights::order_of`] has it, and whoever uses the matrix gathers inputs by it.
    pub fn ordered_linear(&mut self, layer: impl Into<Option<usize>> + Copy, part: &str) -> Result<Linear> {
        let w = self.described(layer, part);
        let matrix = self.load_ordered(&format!("{}.weight", self.module(&w)), w.rows, w.cols)?;
        self.with_bias(matrix, layer, part)
    }

    fn with_bias(&mut self, matrix: MatrixId, layer: impl Into<Option<usize>>, part: &str) -> Result<Linear> {
        let w = self.described(layer, part);
        let bias = format!("{}.bias", self.module(&w));
        let bias = match self.tensors.checkpoint().tensor(&bias).filter(|_| w.biased) {
            Some(_) => Some(self.values(&bias, &[w.rows]).and_then(|(values, _)| self.upload(&values, 1, w.rows))?),
            None => None,
        };
        Ok(Linear { matrix, rows: 0..w.rows, bias })
    }

    /// The matrices `part` of all heads, stored one after the other: `[heads, rows, cols]`.
    pub fn head_matrices(&mut self, layer: usize, part: &str, heads: usize) -> Result<MatrixId> {
        let w = self.described(layer, part);
        self.load(&format!("{}.weight", self.module(&w)), &[heads], w.rows / heads, w.cols)
    }

    fn upload(&mut self, values: &[f32], rows: usize, cols: usize) -> Result<Tensor> {
        let t = self.backend.alloc(MemoryClass::WeightsCopied, rows, cols)?;
        self.backend.upload(values, t);
        Ok(t)
    }

    /// The vector `part`, or its rows one after the other: `[1, len]`.
    pub fn vector(&mut self, layer: impl Into<Option<usize>>, part: &str) -> Result<Tensor> {
        let w = self.described(layer, part);
        let (values, _) = self.values(&self.module(&w), &[w.rows, w.cols])?;
        self.upload(&values, 1, w.rows * w.cols)
    }

    /// The values of the rows of `part`: `[rows, cols]`.
    pub fn host_rows(&mut self, layer: usize, part: &str) -> Result<Vec<f32>> {
        let w = self.described(layer, part);
        self.values(&self.module(&w), &[w.rows, w.cols]).map(|(values, _)| values)
    }

    /// A vector of such values: `[1, len]`.
    pub fn made_vector(&mut self, values: &[f32]) -> Result<Tensor> {
        self.upload(values, 1, values.len())
    }

    /// The bias of `part`: `[1, rows]`.
    pub fn bias(&mut self, layer: usize, part: &str) -> Result<Tensor> {
        let w = self.described(layer, part);
        let (values, _) = self.values(&format!("{}.bias", self.module(&w)), &[w.rows])?;
        self.upload(&values, 1, w.rows)
    }

    /// The gated feed-forward module `part`.
    ///
    /// # Errors
    /// A stored bias that is not all zeros (programs of GPTQ write such), too: no operation adds one, and without it this would be another model.
    pub fn mlp(&mut self, layer: usize, part: &str) -> Result<Mlp> {
        let mlp = self.ordered_mlp(layer, part)?;
        let is_ordered = [&mlp.gate, &mlp.up, &mlp.down].into_iter().any(|linear| self.order_of(linear).is_some());
        ensure!(
            !is_ordered,
            "layer {layer}: {part} with columns in the order of activations (`desc_act`, `actorder`) is not supported"
        );
        Ok(mlp)
    }

    /// The same with columns that may be in orders of their own, as for [`Weights::ordered_linear`].
    ///
    /// # Errors
    /// As for [`Weights::mlp`].
    pub fn ordered_mlp(&mut self, layer: usize, part: &str) -> Result<Mlp> {
        let joined = format!("{part}.gate_up_proj");
        let is_joined = self.description.weight(Some(layer), &joined).is_some();
        let mut projection = |name: &str| -> Result<Linear> {
            let part = format!("{part}.{name}");
            let bias = format!("{}.bias", self.module(&self.described(layer, &part)));
            if let Some(stored) = self.tensors.checkpoint().tensor(&bias) {
                let is_quantized = self.layout().quantized_form().is_some();
                let none = is_quantized && stored.bytes.iter().all(|byte| *byte == 0);
                ensure!(none, "tensor {bias}: feed-forward biases are not supported");
            }
            self.ordered_linear(layer, &part)
        };
        if is_joined {
            let both = projection("gate_up_proj")?;
            let half = both.rows.len() / 2;
            let [gate, up] = [0..half, half..2 * half].map(|rows| rows_of(&both, rows));
            return Ok(Mlp { gate, up, down: projection("down_proj")? });
        }
        Ok(Mlp { gate: projection("gate_proj")?, up: projection("up_proj")?, down: projection("down_proj")? })
    }
}
