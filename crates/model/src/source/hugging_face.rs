//! Hugging Face's layout: floating-point matrices, each in a tensor, and experts either fused into two stacks or in tensors of their own.

use std::borrow::Cow;

use anyhow::Result;
use sluice_backend::WeightFormat;
use sluice_store::{Checkpoint, Tensor};

use super::layout::{ExpertStorage, TensorLayout, float_type};
use super::prefixes::Prefixes;

/// The layout of models as they are published.
#[derive(Debug)]
pub struct HuggingFaceLayout {
    /// What stands in front of names.
    pub prefixes: Prefixes,
}

impl TensorLayout for HuggingFaceLayout {
    fn name(&self) -> &'static str {
        "safetensors"
    }

    fn full(&self, short: &str) -> String {
        self.prefixes.full(short)
    }

    fn short(&self, name: &str) -> Option<String> {
        self.prefixes.of_mtp(name).or_else(|| self.prefixes.short(name).map(Cow::into_owned))
    }

    fn shares_head(&self) -> bool {
        self.prefixes.shares_head
    }

    fn format(&self, _: &Checkpoint, tensor: &Tensor) -> Result<WeightFormat> {
        Ok(WeightFormat::Float(float_type(&tensor.name, tensor.dtype)?))
    }

    fn plane(&self, checkpoint: &Checkpoint, name: &str, plane: &str) -> Option<Tensor> {
        if plane == "weight" { checkpoint.tensor(name) } else { None }
    }

    fn experts(&self, checkpoint: &Checkpoint, short: &str) -> ExpertStorage {
        let gate_up = self.full(&short.replace("gate_proj", "gate_up_proj"));
        match checkpoint.tensor(&gate_up) {
            Some(_) => {
                ExpertStorage::FusedGateUp { gate_up, down: self.full(&short.replace("gate_proj", "down_proj")) }
            }
            None => ExpertStorage::Single,
        }
    }

    fn has_own_stacks(&self) -> bool {
        true
    }

    fn stacked_experts(&self, short: &str) -> String {
        self.full(short)
    }

    fn has_centred_norms(&self) -> bool {
        true
    }

    fn convolution_shape(&self, channels: usize, taps: usize) -> Vec<usize> {
        vec![channels, 1, taps]
    }
}
