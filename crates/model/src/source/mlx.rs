//! MLX's layout: matrices quantised to groups with a scale and a bias each, which are tensors beside the packed weights, and experts in a stack per
//! projection. What `pack` writes is this too, also where a bundle gives experts tensors of their own.

use anyhow::{Result, anyhow, ensure};
use sluice_backend::{E2m1, Fp8, Fp8Scale, WeightFormat};
use sluice_store::{Checkpoint, Dtype, Tensor};

use super::hugging_face::HuggingFaceLayout;
use super::layout::{ExpertStorage, TensorLayout, float_type};
use crate::config::{Config, GroupMode, Quantization};
use crate::mlx_names;

/// The layout of models that MLX has converted.
#[derive(Debug)]
pub struct MlxLayout {
    /// Everything that MLX leaves as it was.
    plain: HuggingFaceLayout,
    /// Which modules have how many bits, or why that is not known.
    quantization: Result<Quantization, String>,
    /// Centred norms have 1 added, and convolutions are `[channels, taps, 1]`: MLX does either only with the other.
    converted: bool,
}

impl MlxLayout {
    /// `converted`: convolutions have been through MLX's conversion.
    pub fn new(plain: HuggingFaceLayout, config: &Config, converted: bool) -> MlxLayout {
        MlxLayout { plain, quantization: config.quantization().map_err(|e| format!("{e:#}")), converted }
    }
}

/// The module whose values the tensor `name` holds.
fn module(name: &str) -> &str {
    name.strip_suffix(".weight").unwrap_or(name)
}

impl TensorLayout for MlxLayout {
    fn name(&self) -> &'static str {
        "MLX"
    }

    fn quantized_form(&self) -> Option<&str> {
        let mode = self.quantization.as_ref().ok()?.mode()?;
        (mode != GroupMode::Affine).then(|| mode.name())
    }

    fn full(&self, short: &str) -> String {
        self.plain.full(short)
    }

    fn short(&self, name: &str) -> Option<String> {
        self.plain.short(name)
    }

    fn shares_head(&self) -> bool {
        self.plain.shares_head()
    }

    fn format(&self, checkpoint: &Checkpoint, tensor: &Tensor) -> Result<WeightFormat> {
        let (name, module) = (&tensor.name, module(&tensor.name));
        let Some(scales) = checkpoint.tensor(&format!("{module}.scales")) else {
            return self.plain.format(checkpoint, tensor);
        };
        let quantization = self.quantization.as_ref().map_err(|why| anyhow!("{why}"))?;
        let (mode, bits, group) = quantization.width_of(module)?;
        ensure!(tensor.dtype == Dtype::U32, "tensor {name:?} has scales, but is {:?} instead of U32", tensor.dtype);
        let biases = checkpoint.tensor(&format!("{module}.biases"));
        if mode != GroupMode::Affine {
            let bytes = scales.dtype == Dtype::U8;
            ensure!(bytes, "tensor {:?}: {} are no scales of {}", scales.name, scales.dtype, mode.name());
            ensure!(biases.is_none(), "tensor {module:?}: biases, which {} does not have", mode.name());
            let global = checkpoint.tensor(&format!("{module}.global_scale"));
            ensure!(global.is_none(), "tensor {module:?}: a scale of the whole matrix is not supported");
        }
        match mode {
            GroupMode::Affine => {}
            GroupMode::Mxfp4 => return Ok(WeightFormat::E2m1(E2m1::Power)),
            GroupMode::Nvfp4 => {
                return Ok(WeightFormat::E2m1(E2m1::E4m3 { global: 1f32.to_bits(), divides: false }));
            }
            GroupMode::Mxfp8 => return Ok(WeightFormat::Fp8(Fp8 { group, scale: Fp8Scale::Power })),
        }
        let biases = biases.ok_or_else(|| anyhow!("tensor {module:?}: scales without biases are not supported"))?;
        ensure!(biases.dtype == scales.dtype, "{module:?}: scales and biases differ in type");
        Ok(WeightFormat::Affine { bits, group, scale: float_type(&scales.name, scales.dtype)? })
    }

    fn plane(&self, checkpoint: &Checkpoint, name: &str, plane: &str) -> Option<Tensor> {
        match plane {
            "weight" => checkpoint.tensor(name),
            other => checkpoint.tensor(&format!("{}.{other}", module(name))),
        }
    }

    fn experts(&self, checkpoint: &Checkpoint, gate: &str) -> ExpertStorage {
        match self.plain.experts(checkpoint, gate) {
            ExpertStorage::Single if checkpoint.tensor(&format!("{}.weight", self.stacked_experts(gate))).is_some() => {
                ExpertStorage::Stacked
            }
            plain => plain,
        }
    }

    fn stacked_experts(&self, short: &str) -> String {
        self.full(&mlx_names::of_stack(short))
    }

    fn has_centred_norms(&self) -> bool {
        !self.converted
    }

    fn convolution_shape(&self, channels: usize, taps: usize) -> Vec<usize> {
        if self.converted { vec![channels, taps, 1] } else { vec![channels, 1, taps] }
    }
}
