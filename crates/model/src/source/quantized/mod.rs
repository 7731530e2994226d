//! Checkpoints that their producers have quantised: FP8, NVFP4 and MXFP4, compressed-tensors' integers, AWQ, GPTQ. Names and everything that is not quantised are
//! Hugging Face's.
//!
//! Kernels compute with the tensors where they are mapped. Loading makes what a file lacks: scales that are stored once for several rows are repeated for each
//! (`scales.rs`), and the biases of integers follow from their zero points (`integers.rs`). AWQ and GPTQ store matrices by columns; loading copies them by rows
//! (`transposed.rs`). Columns that are grouped in the order of activations are put beside their groups (`column_order.rs`), and inputs follow them.

mod by_rows;
mod column_order;
mod integers;
mod module;
mod scales;
mod transposed;

use std::borrow::Cow;
use std::collections::BTreeMap;

use anyhow::{Result, anyhow, bail, ensure};
use sluice_backend::{E2m1, Fp8, MatrixSource, WeightFormat};
use sluice_store::{Bytes, Checkpoint, Dtype, Tensor};

use self::column_order::column_order;
use self::module::{Global, Stored, check_columns};
use super::hugging_face::HuggingFaceLayout;
use super::layout::{Assembled, ExpertStorage, MatrixShape, TensorLayout};
use crate::config::Config;
use crate::method::Method;

/// How the names of tensors end that belong to quantised values, or to activations, and are no values.
const BESIDE: [&str; 29] = [
    ".weight_scale",
    ".weight_scale_inv",
    ".weight_scale_2",
    ".weight_global_scale",
    ".weight_zero_point",
    ".weight_shape",
    ".weight_g_idx",
    ".qzeros",
    ".scales",
    ".g_idx",
    "_proj_scales",
    "_proj_scale_inv",
    "_proj_scale",
    ".input_scale",
    ".activation_scale",
    ".input_global_scale",
    ".input_scale_ub",
    ".output_scale",
    ".q_scale",
    ".k_scale",
    ".v_scale",
    ".wq_a.scale",
    ".wq_b.scale",
    ".wkv.scale",
    ".wo_a.scale",
    ".wo_b.scale",
    ".w1.scale",
    ".w2.scale",
    ".w3.scale",
];

/// How the names of packed values end, and what those of floats have instead.
const PACKED: [(&str, &str); 3] = [(".qweight", ".weight"), (".weight_packed", ".weight"), ("_blocks", "")];

/// The layout of a checkpoint that its producer has quantised.
#[derive(Debug)]
pub(super) struct QuantizedLayout {
    /// Everything that is not quantised.
    plain: HuggingFaceLayout,
    /// What the config says, or why that is not read.
    method: Result<Option<Method>, String>,
    /// What numbers of four bits are called.
    fp4: &'static str,
    /// What people call the form of most matrices.
    form: String,
}

/// Whether a checkpoint is of this layout.
pub(super) fn is_quantized(checkpoint: &Checkpoint, config: &Config) -> bool {
    let is_packed =
        |t: &Tensor| PACKED.iter().any(|(end, _)| t.name.ends_with(end)) || t.name.ends_with(".weight_scale_2");
    let is_fp8 = |t: &Tensor| t.dtype == Dtype::F8_E4M3 && t.name.ends_with("weight");
    !matches!(config.method(), Ok(None)) || checkpoint.tensors().iter().any(|t| is_packed(t) || is_fp8(t))
}

impl QuantizedLayout {
    pub fn new(plain: HuggingFaceLayout, checkpoint: &Checkpoint, config: &Config) -> QuantizedLayout {
        let method = config.method().map_err(|e| format!("{e:#}"));
        let is_there = |end: &str| checkpoint.tensors().iter().any(|t| t.name.ends_with(end));
        let is_nvfp4 = [".weight_global_scale", ".weight_scale_2"].into_iter().any(is_there);
        let fp4 = if is_nvfp4 { "NVFP4" } else { "MXFP4" };
        let mut layout = QuantizedLayout { plain, method, fp4, form: String::new() };
        layout.form = layout.largest_form(checkpoint);
        layout
    }

    fn method(&self) -> Option<Method> {
        self.method.as_ref().ok().copied().flatten()
    }

    /// What people call the form that takes most of the text model's bytes.
    fn largest_form(&self, checkpoint: &Checkpoint) -> String {
        let method = self.method();
        let mut bytes = BTreeMap::<&str, usize>::new();
        for t in checkpoint.tensors() {
            let (name, elements) = self.stored(t);
            if elements > 0 && self.plain.short(&t.name).is_some() && !["F32", "F16", "BF16"].contains(&name) {
                *bytes.entry(name).or_default() += t.bytes.len();
            }
        }
        let most = bytes.into_iter().max_by_key(|(_, bytes)| *bytes).map(|(name, _)| name);
        let what = match (most, method.and_then(Method::block)) {
            (None, _) => "no matrix".to_owned(),
            (Some("F8_E4M3"), Some([rows, cols])) => format!("FP8 (e4m3) in blocks of {rows} x {cols}"),
            (Some("F8_E4M3"), None) => "FP8 (e4m3)".to_owned(),
            (Some(other), _) => other.to_owned(),
        };
        match method {
            None | Some(Method::Fp8 { .. } | Method::Mxfp4) => what,
            Some(method) => format!("{what}, by {}", method.name()),
        }
    }

    /// The matrix of a quantised module.
    fn assemble(&self, stored: &Stored, shape: MatrixShape, reads: bool) -> Result<Assembled> {
        let mut order = None;
        let (format, planes) = match stored {
            Stored::Fp8 { values, scales } => self.fp8(values, scales, shape, reads)?,
            Stored::Fp4 { values, scales, global } => fp4(values, scales, global.as_ref(), shape)?,
            Stored::Integers { packed, scales, zeros, groups } => {
                let per_row = if let [_, per_row] = scales.shape[..] { per_row } else { 1 };
                order = column_order(groups.as_ref(), per_row, shape.cols)?;
                integers::assemble(packed, scales, zeros.as_ref(), order.as_deref(), shape, reads)?
            }
            Stored::Transposed { packed, scales, zeros, groups, words } => {
                let per_row = scales.shape.first().copied().unwrap_or(1);
                order = column_order(groups.as_ref(), per_row, shape.cols)?;
                transposed::assemble([packed, scales, zeros], order.as_deref(), *words, shape, reads)?
            }
        };
        Ok(Assembled { matrix: MatrixSource { format, rows: shape.all_rows(), cols: shape.cols, planes }, order })
    }

    fn fp8(
        &self,
        values: &Tensor,
        scales: &Tensor,
        shape: MatrixShape,
        reads: bool,
    ) -> Result<(WeightFormat, Vec<Bytes>)> {
        shape.check(values, shape.cols)?;
        let scale = scales::kind(scales)?;
        let (group, plane) = scales::fp8(scales, shape, self.method().and_then(Method::block), reads)?;
        let format = WeightFormat::Fp8(Fp8 { group, scale });
        check_columns(format, shape, &values.name)?;
        Ok((format, vec![values.bytes.clone(), plane]))
    }
}

/// MXFP4 and NVFP4.
fn fp4(
    values: &Tensor,
    scales: &Tensor,
    global: Option<&Global>,
    shape: MatrixShape,
) -> Result<(WeightFormat, Vec<Bytes>)> {
    let (kind, group) = match (scales.dtype, global) {
        (Dtype::U8 | Dtype::F8_E8M0, None) => (E2m1::Power, 32),
        (Dtype::F8_E4M3, Some(Global { scale, divides })) => {
            ensure!(
                scale.dtype == Dtype::F32 && scale.bytes.len() == 4,
                "tensor {:?}: {} {:?}, expected one F32",
                scale.name,
                scale.dtype,
                scale.shape
            );
            // A part of the format, so it is read even where weights are not.
            let bytes = module::read(scale)?;
            let global = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
            (E2m1::E4m3 { global, divides: *divides }, 16)
        }
        (Dtype::F8_E4M3, None) => bail!("tensor {:?}: scales of NVFP4 without one of the whole matrix", scales.name),
        (other, _) => bail!("tensor {:?}: {other} are no scales of numbers of four bits", scales.name),
    };
    let format = WeightFormat::E2m1(kind);
    check_columns(format, shape, &values.name)?;
    let is_packed = matches!(values.dtype, Dtype::U8 | Dtype::I8);
    ensure!(is_packed, "tensor {:?}: {}, expected U8 or I8", values.name, values.dtype);
    // gpt-oss has an axis for the bytes of a group.
    let blocks = [shape.leading, &[shape.rows, shape.cols / 32, 16]].concat();
    if values.shape != blocks {
        shape.check(values, shape.cols / 2)?;
    }
    shape.check(scales, shape.cols / group)?;
    Ok((format, vec![values.bytes.clone(), scales.bytes.clone()]))
}

/// The tensor of a float matrix that stands for the same values: `X.weight` for `X.qweight`.
fn value_name(name: &str) -> Cow<'_, str> {
    let of = |(end, instead): (&str, &str)| Some(Cow::Owned(format!("{}{instead}", name.strip_suffix(end)?)));
    PACKED.into_iter().find_map(of).unwrap_or(Cow::Borrowed(name))
}

/// Whether the tensor `name` only belongs to others' values.
fn is_beside(name: &str) -> bool {
    BESIDE.iter().any(|end| name.ends_with(end))
}

impl TensorLayout for QuantizedLayout {
    fn name(&self) -> &'static str {
        "quantised safetensors"
    }

    fn check(&self) -> Result<()> {
        self.method.as_ref().map(|_| ()).map_err(|why| anyhow!("{why}"))
    }

    fn quantized_form(&self) -> Option<&str> {
        Some(&self.form)
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
        let name = value_name(&tensor.name);
        let Some(stored) = module::find(checkpoint, self.method(), &name)? else {
            return self.plain.format(checkpoint, tensor);
        };
        let is_matrix = |shape: &Vec<usize>| shape.len() >= 2 && shape.iter().all(|n| *n > 0);
        let shape = stored.shape(self.method().map_or(4, Method::bits)).filter(is_matrix);
        let shape = shape.ok_or_else(|| anyhow!("tensor {:?}: {:?} is no matrix", tensor.name, tensor.shape))?;
        let (leading, last) = shape.split_at(shape.len() - 2);
        let shape = MatrixShape { leading, rows: last[0], cols: last[1] };
        Ok(self.assemble(&stored, shape, false)?.matrix.format)
    }

    fn plane(&self, checkpoint: &Checkpoint, name: &str, plane: &str) -> Option<Tensor> {
        self.plain.plane(checkpoint, name, plane)
    }

    fn assembled(
        &self,
        checkpoint: &Checkpoint,
        name: &str,
        shape: MatrixShape,
        reads: bool,
    ) -> Result<Option<Assembled>> {
        let stored = module::find(checkpoint, self.method(), name)?;
        stored.map(|stored| self.assemble(&stored, shape, reads)).transpose()
    }

    fn values_of<'a>(&self, name: &'a str) -> Option<Cow<'a, str>> {
        (!is_beside(name)).then(|| value_name(name))
    }

    fn experts(&self, checkpoint: &Checkpoint, gate: &str) -> ExpertStorage {
        // Two stacks of numbers of four bits (gpt-oss).
        let stack = |projection: &str| self.full(&gate.replace("gate_proj", projection));
        let gate_up = stack("gate_up_proj");
        match checkpoint.tensor(&format!("{gate_up}_blocks")) {
            Some(_) => ExpertStorage::FusedGateUp { gate_up, down: stack("down_proj") },
            None => self.plain.experts(checkpoint, gate),
        }
    }

    fn has_own_stacks(&self) -> bool {
        true
    }

    fn stacked_experts(&self, short: &str) -> String {
        self.plain.stacked_experts(short)
    }

    fn has_centred_norms(&self) -> bool {
        self.plain.has_centred_norms()
    }

    fn convolution_shape(&self, channels: usize, taps: usize) -> Vec<usize> {
        self.plain.convolution_shape(channels, taps)
    }

    fn stored(&self, tensor: &Tensor) -> (&'static str, u64) {
        let (name, bytes) = (&*tensor.name, tensor.bytes.len() as u64);
        if is_beside(name) {
            return (tensor.dtype.name(), 0);
        }
        let bits = self.method().map_or(4, Method::bits);
        let integers = match bits {
            2 => "INT2",
            3 => "INT3",
            5 => "INT5",
            6 => "INT6",
            8 => "INT8",
            _ => "INT4",
        };
        let is_packed = PACKED.iter().any(|(end, _)| name.ends_with(end));
        match tensor.dtype {
            Dtype::I32 if is_packed => (integers, bytes * 8 / u64::from(bits)),
            Dtype::U8 | Dtype::I8 if is_packed || name.ends_with(".weight") => (self.fp4, 2 * bytes),
            _ => self.plain.stored(tensor),
        }
    }
}
