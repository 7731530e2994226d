//! Telling the layouts of safetensors apart, by the tensors themselves.

use sluice_store::{Checkpoint, Tensor};

use super::hugging_face::HuggingFaceLayout;
use super::layout::TensorLayout;
use super::mlx::MlxLayout;
use super::prefixes::Prefixes;
use super::quantized::{QuantizedLayout, is_quantized};
use crate::config::Config;
use crate::mlx_names;

/// The layout of a checkpoint of safetensors. Only the tensors themselves tell MLX's from Hugging Face's: their names, and the shape of convolutions.
pub(super) fn layout_of(checkpoint: &Checkpoint, config: &Config) -> Box<dyn TensorLayout> {
    let plain = HuggingFaceLayout { prefixes: Prefixes::detect(checkpoint, config) };
    if is_quantized(checkpoint, config) {
        return Box::new(QuantizedLayout::new(plain, checkpoint, config));
    }
    let of_mlx = |t: &Tensor| t.name.ends_with(".scales") || mlx_names::split(&t.name).is_some();
    let converted = checkpoint.tensors().iter().find(|t| t.name.ends_with(".conv1d.weight")).is_some_and(is_converted);
    if converted
        || config.quantization().is_ok_and(|q| q.default().is_some())
        || checkpoint.tensors().iter().any(of_mlx)
    {
        return Box::new(MlxLayout::new(plain, config, converted));
    }
    Box::new(plain)
}

/// Whether a convolution has been through MLX's conversion, which moves the axis of length one to the end.
fn is_converted(t: &Tensor) -> bool {
    t.shape.len() == 3 && t.shape[2] == 1 && t.shape[1] != 1
}
