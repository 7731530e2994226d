//! The layout of GGUF's tensors: formats from the table, stacked experts, and what llama.cpp's converter moves or computes beforehand.

use std::collections::HashMap;

use anyhow::{Result, bail};
use sluice_backend::{BlockFormat, Float, WeightFormat};
use sluice_store::{Checkpoint, Tensor};

use super::names::Names;
use super::tensor_type::TensorType;
use crate::description::ProjectionLayout;
use crate::source::layout::{ExpertStorage, TensorLayout};

/// The layout of one model.
#[derive(Clone, Debug)]
pub struct GgufLayout {
    pub names: Names,
    /// The type of each tensor.
    pub kinds: HashMap<String, TensorType>,
    /// Rows of q and k are moved so that rotated pairs are beside each other.
    pub adjacent_pairs: bool,
    /// Value head `v` of a recurrent layer uses key head `v % key_heads`.
    pub tiled_value_heads: bool,
    /// Gate and up have matrices of their own, where the architecture's checkpoints have them in one.
    pub divides_joined: bool,
    /// How the input projections of recurrent layers are stored.
    pub projections: Option<ProjectionLayout>,
}

impl GgufLayout {
    fn has(&self, name: &str) -> bool {
        self.kinds.contains_key(name)
    }
}

impl TensorLayout for GgufLayout {
    fn name(&self) -> &'static str {
        "GGUF"
    }

    fn full(&self, short: &str) -> String {
        self.names.full(short)
    }

    fn short(&self, name: &str) -> Option<String> {
        self.names.short(name)
    }

    /// Without a head of its own, the embedding is the head.
    fn shares_head(&self) -> bool {
        false
    }

    fn format(&self, _: &Checkpoint, tensor: &Tensor) -> Result<WeightFormat> {
        let Some(kind) = self.kinds.get(&*tensor.name) else { bail!("tensor {:?}: not in the table", tensor.name) };
        match weight_format(*kind) {
            Some(format) => Ok(format),
            None => bail!("tensor {:?}: type {} is not supported", tensor.name, kind.name),
        }
    }

    fn plane(&self, checkpoint: &Checkpoint, name: &str, plane: &str) -> Option<Tensor> {
        if plane == "weight" { checkpoint.tensor(name) } else { None }
    }

    fn experts(&self, _: &Checkpoint, gate: &str) -> ExpertStorage {
        let gate_up = format!("{}.weight", self.full(&gate.replace("gate_proj", "gate_up_proj")));
        if self.has(&gate_up) {
            let down = format!("{}.weight", self.full(&gate.replace("gate_proj", "down_proj")));
            return ExpertStorage::FusedGateUp { gate_up, down };
        }
        let first = self.full(&format!("{}.weight", gate.replace(".experts.", ".experts.0.")));
        if self.has(&first) { ExpertStorage::Single } else { ExpertStorage::Stacked }
    }

    fn stacked_experts(&self, short: &str) -> String {
        self.full(short)
    }

    fn has_centred_norms(&self) -> bool {
        false
    }

    fn convolution_shape(&self, channels: usize, taps: usize) -> Vec<usize> {
        vec![channels, taps]
    }

    fn stored(&self, tensor: &Tensor) -> (&'static str, u64) {
        let Some(kind) = self.kinds.get(&*tensor.name) else { return (tensor.dtype.name(), 0) };
        (kind.name, (tensor.bytes.len() / kind.bytes * kind.elements) as u64)
    }

    fn has_own_names(&self) -> bool {
        true
    }

    fn has_adjacent_pairs(&self) -> bool {
        self.adjacent_pairs
    }

    fn has_tiled_value_heads(&self) -> bool {
        self.tiled_value_heads
    }

    fn has_decay_rates(&self) -> bool {
        true
    }

    fn divides_joined(&self) -> bool {
        self.divides_joined
    }

    fn delta_projections(&self) -> Option<ProjectionLayout> {
        self.projections
    }
}

/// The format of a type; `None`: no kernel reads it.
fn weight_format(kind: TensorType) -> Option<WeightFormat> {
    let blocks = match kind.name {
        "F32" => return Some(WeightFormat::Float(Float::F32)),
        "F16" => return Some(WeightFormat::Float(Float::F16)),
        "BF16" => return Some(WeightFormat::Float(Float::Bf16)),
        "Q4_0" => BlockFormat::Q4_0,
        "Q4_1" => BlockFormat::Q4_1,
        "Q5_0" => BlockFormat::Q5_0,
        "Q5_1" => BlockFormat::Q5_1,
        "Q8_0" => BlockFormat::Q8_0,
        "Q2_K" => BlockFormat::Q2K,
        "Q3_K" => BlockFormat::Q3K,
        "Q4_K" => BlockFormat::Q4K,
        "Q5_K" => BlockFormat::Q5K,
        "Q6_K" => BlockFormat::Q6K,
        "IQ4_NL" => BlockFormat::Iq4Nl,
        "IQ4_XS" => BlockFormat::Iq4Xs,
        "IQ3_XXS" => BlockFormat::Iq3Xxs,
        "IQ3_S" => BlockFormat::Iq3S,
        "IQ2_XXS" => BlockFormat::Iq2Xxs,
        "IQ2_XS" => BlockFormat::Iq2Xs,
        "IQ2_S" => BlockFormat::Iq2S,
        "IQ1_S" => BlockFormat::Iq1S,
        "IQ1_M" => BlockFormat::Iq1M,
        "MXFP4" => BlockFormat::Mxfp4,
        "NVFP4" => BlockFormat::Nvfp4,
        _ => return None,
    };
    Some(WeightFormat::Blocks(blocks))
}
