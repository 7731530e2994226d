//! A checkpoint taken apart by its config and its headers: which bytes are read for every token, which only now and then, and what a
//! conversation adds. What the engine will really do with them is tested against this.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Result, anyhow};
use sluice_model::{Config, check_supported};
use sluice_store::{Checkpoint, Dtype};

/// What a tensor is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Part {
    /// The input embedding; also the output head where they are tied.
    Embedding,
    /// Routed experts: some of them are read for a token.
    Experts,
    /// All else that every token reads.
    Rest,
    /// Not the text model's (vision, multi-token prediction).
    LeftOut,
}

/// Sizes of a part.
#[derive(Clone, Copy, Debug, Default)]
pub struct Size {
    pub bytes: u64,
    pub parameters: u64,
}

pub struct Anatomy {
    pub model_type: String,
    /// Why this program cannot run it.
    pub unsupported: Option<String>,
    pub layers: usize,
    pub attention_layers: usize,
    pub recurrent_layers: usize,
    pub expert_layers: usize,
    pub hidden: usize,
    pub vocabulary: usize,
    pub max_context: usize,
    /// Experts per layer and per token.
    pub experts: Option<(usize, usize)>,
    pub left_out: Vec<String>,
    /// Bytes by element type as stored.
    pub dtypes: BTreeMap<&'static str, u64>,
    /// (bits, group size).
    pub quantization: Option<(u8, u16)>,
    /// Modules with other bits or groups than that, or unquantised ones of a matrix's shape.
    pub exceptions: usize,
    /// Of one conversation.
    pub state_bytes: u64,
    tied: bool,
    /// Elements of keys and values together, all layers.
    kv_elements: u64,
    parts: BTreeMap<Part, Size>,
    /// Bytes of one expert, per layer.
    expert_bytes: BTreeMap<usize, u64>,
}
