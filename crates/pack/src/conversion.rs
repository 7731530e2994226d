//! The plan of a conversion, made before any weight is read: each tensor of the text model with where it comes from and how it is written.

use std::collections::{BTreeMap, BTreeSet};

use sluice_kernels::format::{Float, WeightFormat};
use sluice_model::WeightDescription;
use sluice_store::TensorPlan;

use crate::rules::Width;

/// The bytes of a tensor by rows, wherever they lie.
#[derive(Clone, Debug)]
pub struct Rows {
    pub row_bytes: usize,
    /// File (its position in `Checkpoint::file_sizes`) and offset of each segment.
    pub segments: Vec<(usize, u64)>,
}

/// A module's or a tensor's rows in the input: one run of bytes each, or three (q, scales, biases) where it is quantised.
#[derive(Clone, Debug)]
pub struct Source {
    pub parts: Vec<Rows>,
    /// Of each segment.
    pub rows: usize,
    /// How a row is stored, where its values are wanted.
    pub form: Option<WeightFormat>,
    pub cols: usize,
    /// The tensor (of several: the first), for messages.
    pub name: String,
}

impl Source {
    pub fn all_rows(&self) -> usize {
        self.rows * self.parts[0].segments.len()
    }

    /// Of all parts of a row.
    pub fn row_bytes(&self) -> usize {
        self.parts.iter().map(|p| p.row_bytes).sum()
    }

    pub fn bytes(&self) -> u64 {
        self.all_rows() as u64 * self.row_bytes() as u64
    }
}

/// What becomes of a source.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Treatment {
    Copy,
    /// Plus one, as f32: bf16 has too few bits to hold 1 + w as well as it holds w.
    AddOne(Float),
    Quantize {
        bits: u8,
        group: u16,
        /// Of scales and biases.
        float: Float,
    },
}

/// Which projection of which layer's experts.
#[derive(Clone, Debug, PartialEq)]
pub struct Stack {
    pub layer: usize,
    /// Which of an expert's projections: gate, up and down are 0, 1 and 2.
    pub projection: usize,
    /// In front of the expert's number: `model.layers.0.mlp.experts`.
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
    /// `weight`, `scales`, `biases`. A stack's have the experts in front.
    pub tensors: Vec<TensorPlan>,
    /// What it is, in the model.
    pub weight: WeightDescription,
    pub stack: Option<Stack>,
}

impl ConversionUnit {
    pub fn size(&self) -> u64 {
        self.tensors.iter().filter_map(TensorPlan::size).sum()
    }
}

/// What becomes of a checkpoint.
#[derive(Debug)]
pub struct Conversion {
    pub(crate) units: Vec<ConversionUnit>,
    /// What `config.json` is to say of a module: its width, or that it has none.
    pub(crate) overrides: BTreeMap<String, Width>,
    /// Some module is quantised.
    pub quantizes: bool,
    /// Matrices whose rows do not divide into groups.
    pub undivided: Vec<String>,
    /// Modules that were quantised already and stay as they are, and how many of them were to have more bits than they have.
    pub copied: usize,
    pub too_few: usize,
    /// Modules that were quantised already and are quantised again.
    pub requantised: usize,
    /// Weights of the model.
    pub parameters: u64,
    /// `mlx_lm` cannot run the layers of this model in their order.
    pub refused_by_mlx: bool,
    /// Parts of the checkpoint that stay behind.
    pub left_out: BTreeSet<String>,
}
