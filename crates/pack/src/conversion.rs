//! The plan of a conversion, made before any weight is read: for each tensor of the text model its source and its treatment.

use std::collections::{BTreeMap, BTreeSet};

use sluice_backend::MatrixSource;
use sluice_kernels::format::{Float, WeightFormat};
use sluice_model::{Options, WeightDescription};
use sluice_store::TensorPlan;

use crate::rules::Width;

/// An MTP head is packed with the rest.
pub const OPTIONS: Options = Options { max_tokens: 1, context: None, experts_per_token: None, mtp: true, layers: None };

/// The bytes of a tensor's rows, in segments of files.
#[derive(Clone, Debug)]
pub struct Rows {
    /// Bytes of a row.
    pub row_bytes: usize,
    /// File (its position in `Checkpoint::file_sizes`) and offset of each segment.
    pub segments: Vec<(usize, u64)>,
}

/// The rows of a module or tensor in the input: one run of bytes each, or three (q, scales, biases) if it is quantised.
#[derive(Clone, Debug)]
pub struct Source {
    pub parts: Vec<Rows>,
    /// Rows of each segment.
    pub rows: usize,
    /// How rows are stored, if they are numbers of a known format.
    pub form: Option<WeightFormat>,
    pub cols: usize,
    /// For matrices that are not in files as they are: one for each segment, with the bytes of the parts.
    pub made: Vec<MatrixSource>,
    /// The first of its tensors, for messages.
    pub name: String,
    /// Elements of a head whose rows are moved: rows 2i and 2i + 1 of the input are rows i and i + half a head of the output.
    pub pairs: Option<usize>,
    /// Of two matrices whose rows take turns: which of them this is.
    pub turn: Option<usize>,
    /// The order of columns, where it is not that of the input.
    pub columns: Option<ColumnBlocks>,
}

/// Columns in blocks: block `i` of the output is block `order[i]` of the input.
#[derive(Clone, Debug)]
pub struct ColumnBlocks {
    /// Columns of a block.
    pub len: usize,
    pub order: Vec<usize>,
}

impl ColumnBlocks {
    /// Puts rows of elements of `size` bytes in order.
    pub fn put(&self, rows: &[u8], size: usize) -> Vec<u8> {
        let block = self.len * size;
        let mut out = Vec::with_capacity(rows.len());
        for row in rows.chunks_exact(block * self.order.len()) {
            self.order.iter().for_each(|from| out.extend_from_slice(&row[from * block..(from + 1) * block]));
        }
        out
    }
}

impl Source {
    /// Rows that are in files, in their order.
    pub fn of_files(parts: Vec<Rows>, rows: usize, form: Option<WeightFormat>, cols: usize, name: &str) -> Source {
        let name = name.to_owned();
        Source { parts, rows, form, cols, made: Vec::new(), name, pairs: None, turn: None, columns: None }
    }

    /// The row of the input that is row `row` of the output.
    pub fn row_of(&self, row: usize) -> usize {
        if let Some(turn) = self.turn {
            return 2 * row + turn;
        }
        let Some(head) = self.pairs else { return row };
        let (start, within) = (row / head * head, row % head);
        start + if within < head / 2 { 2 * within } else { 2 * (within - head / 2) + 1 }
    }

    /// Whether rows of the input are in another order.
    pub fn is_moved(&self) -> bool {
        self.pairs.is_some() || self.turn.is_some()
    }

    /// Rows of the output.
    pub fn all_rows(&self) -> usize {
        let stored = self.rows * self.parts[0].segments.len();
        if self.turn.is_some() { stored / 2 } else { stored }
    }

    /// Bytes of a row, all parts together.
    pub fn row_bytes(&self) -> usize {
        self.parts.iter().map(|p| p.row_bytes).sum()
    }

    /// Bytes of all rows.
    pub fn bytes(&self) -> u64 {
        self.all_rows() as u64 * self.row_bytes() as u64
    }
}

/// How a source is written.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Treatment {
    Copy,
    /// Add one and store f32: bf16 would lose bits of 1 + w.
    AddOne(Float),
    /// Store the values of quantised blocks as f32.
    Widen,
    /// Store f32 numbers whose `-exp` these are.
    Logarithm,
    Quantize {
        bits: u8,
        group: u16,
        /// The type of scales and biases.
        float: Float,
    },
}

/// One projection of a layer's experts.
#[derive(Clone, Debug, PartialEq)]
pub struct Stack {
    pub layer: usize,
    /// Which of an expert's projections: gate, up and down are 0, 1 and 2.
    pub projection: usize,
    /// The name up to the expert's number: `model.layers.0.mlp.experts`.
    pub prefix: String,
    /// `gate_proj`, `up_proj` or `down_proj`.
    pub part: String,
    pub count: usize,
}

/// One module (three tensors when it is quantised) or one lone tensor.
#[derive(Clone, Debug)]
pub struct ConversionUnit {
    pub source: Source,
    pub treatment: Treatment,
    /// `weight`, `scales`, `biases`. In a stack the experts are the first dimension.
    pub tensors: Vec<TensorPlan>,
    /// The weight of the model.
    pub weight: WeightDescription,
    pub stack: Option<Stack>,
}

impl ConversionUnit {
    /// Bytes of its tensors in the output.
    pub fn size(&self) -> u64 {
        self.tensors.iter().filter_map(TensorPlan::size).sum()
    }
}

/// The whole plan.
#[derive(Debug)]
pub struct Conversion {
    pub(crate) units: Vec<ConversionUnit>,
    /// Modules whose width `config.json` has to name.
    pub(crate) overrides: BTreeMap<String, Width>,
    /// Some module is quantised.
    pub quantizes: bool,
    /// Matrices whose rows do not divide into groups.
    pub undivided: Vec<String>,
    /// Modules that were quantised already and are copied.
    pub copied: usize,
    /// Of these, modules with fewer bits than the rules ask for.
    pub too_few: usize,
    /// Modules that were quantised already and are quantised again.
    pub requantised: usize,
    /// Weights of the model.
    pub parameters: u64,
    /// `mlx_lm` cannot run the layers of this model in their order.
    pub refused_by_mlx: bool,
    /// Parts of the checkpoint that are not packed.
    pub left_out: BTreeSet<String>,
}
