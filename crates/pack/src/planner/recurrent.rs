//! Recurrent layers of GGUF files. llama.cpp's converter has value heads tiled over key heads, so that rows and channels of values are in another order, and columns of the output
//! projection; decay rates in place of their logarithms; convolutions without their axis of length one; and of Qwen3-Next z by itself. What is packed has the order of safetensors.

use anyhow::{Result, bail, ensure};
use sluice_backend::DeltaShape;
use sluice_model::{Leaf, MixerDescription, ProjectionLayout, WeightDescription};
use sluice_store::{Tensor, TensorPlan};

use super::{Planner, elements};
use crate::conversion::{ColumnBlocks, Rows, Source, Treatment};

/// The place in the file of each value head.
fn value_heads(shape: &DeltaShape, is_tiled: bool) -> Vec<usize> {
    let ratio = shape.value_heads / shape.key_heads;
    let place = |v: usize| if is_tiled { v % ratio * shape.key_heads + v / ratio } else { v };
    (0..shape.value_heads).map(place).collect()
}

/// Runs of `len` rows, from row `first` on, in runs of `unit` rows, which divides them.
fn runs(first: usize, len: usize, unit: usize) -> impl Iterator<Item = usize> {
    (first..first + len).step_by(unit)
}

fn greatest_common_divisor(a: usize, b: usize) -> usize {
    if b == 0 { a } else { greatest_common_divisor(b, a % b) }
}

impl Planner<'_> {
    /// Plans a weight of a recurrent layer that GGUF has in a form of its own; whether `t` is one.
    pub(super) fn recurrent(&mut self, i: usize, t: &Tensor, weight: &WeightDescription, leaf: Leaf) -> Result<bool> {
        let layout = self.tensors.layout();
        let layer = weight.layer.and_then(|layer| self.description.layer(layer));
        let Some(mixer) = layer.map(|layer| &layer.mixer) else { return Ok(false) };
        let MixerDescription::DeltaNet(delta) = mixer else {
            let stored = layout.has_decay_rates() && weight.part.ends_with(".A_log");
            ensure!(!stored, "tensor {:?}: recurrent layers of this kind cannot be packed from GGUF", t.name);
            return Ok(false);
        };
        if !layout.has_decay_rates() || !matches!(leaf, Leaf::Weight | Leaf::Bare) {
            return Ok(false);
        }
        let (shape, is_tiled) = (delta.shape, layout.has_tiled_value_heads());
        let heads = value_heads(&shape, is_tiled);
        let (keys, dim) = (2 * shape.key_heads * shape.key_dim, shape.value_dim);
        let unit = greatest_common_divisor(shape.key_dim, dim);
        // Rows, or channels, of q and k as they are, then those of values.
        let channels = || -> Vec<usize> {
            let values = heads.iter().flat_map(|head| runs(keys + head * dim, dim, unit));
            runs(0, keys, unit).chain(values).collect()
        };
        let joined = delta.layout == ProjectionLayout::PairsByKeyHead;
        match weight.part {
            "linear_attn.A_log" => self.vector_of_heads(i, t, weight, &heads, Treatment::Logarithm)?,
            "linear_attn.dt_bias" => self.vector_of_heads(i, t, weight, &heads, Treatment::Copy)?,
            "linear_attn.conv1d" => self.convolution(i, t, weight, &channels(), unit)?,
            "linear_attn.in_proj_qkv" if joined => self.joined(i, t, weight, (&shape, unit))?,
            // It comes with the others.
            "linear_attn.in_proj_z" if joined => {}
            _ if !is_tiled => return Ok(false),
            "linear_attn.in_proj_qkv" => self.rows_in_order(i, t, weight, &channels(), unit)?,
            "linear_attn.in_proj_z" => {
                let rows: Vec<usize> = heads.iter().map(|head| head * dim).collect();
                self.rows_in_order(i, t, weight, &rows, dim)?;
            }
            "linear_attn.in_proj_b" | "linear_attn.in_proj_a" => self.rows_in_order(i, t, weight, &heads, 1)?,
            "linear_attn.out_proj" => {
                let mut source = self.matrix_of(t)?;
                let (dtype, cols) = (self.stored(t).expect("a matrix of these").2, source.cols);
                ensure!(cols == heads.len() * dim, "tensor {:?}: {cols} columns of {} heads", t.name, heads.len());
                source.columns = Some(ColumnBlocks { len: dim, order: heads });
                self.matrix(i, weight, source, &[weight.rows, cols], dtype)?;
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// The whole matrix in `t`.
    fn matrix_of(&self, t: &Tensor) -> Result<Source> {
        let Some((form, cols, _)) = self.stored(t) else { bail!("tensor {:?}: {} cannot be packed", t.name, t.dtype) };
        Ok(Source { form: Some(form), cols, ..self.whole(t) })
    }

    /// `source` in runs of `unit` rows that begin at these rows of the file.
    fn in_runs(source: Source, starts: &[usize], unit: usize) -> Result<Source> {
        let Rows { row_bytes, segments } = &source.parts[0];
        let (file, offset) = segments[0];
        let whole = starts.len() * unit == source.rows && starts.iter().all(|start| start + unit <= source.rows);
        ensure!(whole, "tensor {:?}: {} rows, expected {}", source.name, source.rows, starts.len() * unit);
        let segments = starts.iter().map(|start| (file, offset + (start * row_bytes) as u64)).collect();
        Ok(Source { parts: vec![Rows { row_bytes: *row_bytes, segments }], rows: unit, ..source })
    }

    fn rows_in_order(
        &mut self,
        i: usize,
        t: &Tensor,
        weight: &WeightDescription,
        starts: &[usize],
        unit: usize,
    ) -> Result<()> {
        let source = Planner::in_runs(self.matrix_of(t)?, starts, unit)?;
        let (dtype, shape) = (self.stored(t).expect("a matrix of these").2, [weight.rows, source.cols]);
        self.matrix(i, weight, source, &shape, dtype)
    }

    fn vector_of_heads(
        &mut self,
        i: usize,
        t: &Tensor,
        weight: &WeightDescription,
        heads: &[usize],
        treatment: Treatment,
    ) -> Result<()> {
        ensure!(super::is_float(t), "tensor {:?}: {} cannot be packed", t.name, t.dtype);
        let whole = self.whole(t);
        let each = Rows { row_bytes: t.dtype.size(), segments: whole.parts[0].segments.clone() };
        let source = Source { parts: vec![each], rows: whole.cols, cols: 1, ..whole };
        let source = Planner::in_runs(source, heads, 1)?;
        self.found.parameters += elements(t);
        let name = self.description.mlx.full(&self.written.mlx_name(weight));
        let tensors = vec![TensorPlan { name, dtype: t.dtype, shape: vec![heads.len()] }];
        self.push(i, weight, source, treatment, tensors);
        Ok(())
    }

    fn convolution(
        &mut self,
        i: usize,
        t: &Tensor,
        weight: &WeightDescription,
        starts: &[usize],
        unit: usize,
    ) -> Result<()> {
        ensure!(super::is_float(t), "tensor {:?}: {} cannot be packed", t.name, t.dtype);
        let source = Planner::in_runs(self.whole(t), starts, unit)?;
        self.found.parameters += elements(t);
        let name = format!("{}.weight", self.description.mlx.full(&self.written.mlx_name(weight)));
        let tensors = vec![TensorPlan { name, dtype: t.dtype, shape: vec![weight.rows, source.cols, 1] }];
        self.push(i, weight, source, Treatment::Copy, tensors);
        Ok(())
    }

    /// Qwen3-Next: q, k and v of all heads in `t` and z in a tensor of its own become one matrix, key head by key head.
    fn joined(
        &mut self,
        i: usize,
        t: &Tensor,
        weight: &WeightDescription,
        (shape, unit): (&DeltaShape, usize),
    ) -> Result<()> {
        let layer = weight.layer.expect("of a layer");
        let z = self.tensors.layout().full(&format!("layers.{layer}.linear_attn.in_proj_z.weight"));
        let Some(z) = self.checkpoint.tensor(&z) else { bail!("no tensor {z:?}") };
        let joined = self.written.layer_weights(layer).into_iter().find(|w| w.part == "linear_attn.in_proj_qkvz");
        let joined = joined.unwrap_or_else(|| panic!("the description of {} lacks it", self.written.architecture));
        let (key_dim, values) = (shape.key_dim, shape.value_heads / shape.key_heads * shape.value_dim);
        let keys = shape.key_heads * key_dim;
        let source = self.matrix_of(t)?;
        let other = self.matrix_of(&z)?;
        ensure!(
            source.form == other.form && source.cols == other.cols,
            "tensors {:?} and {:?}: of two types or sizes, which one matrix cannot have",
            t.name,
            z.name
        );
        let sizes = (source.rows, other.rows) == (2 * keys + shape.key_heads * values, shape.key_heads * values);
        ensure!(sizes, "tensors {:?} and {:?}: {} and {} rows", t.name, z.name, source.rows, other.rows);
        let row_bytes = source.parts[0].row_bytes;
        let at = |of: &Source, row: usize| {
            let (file, offset) = of.parts[0].segments[0];
            (file, offset + (row * row_bytes) as u64)
        };
        let mut segments = Vec::new();
        for head in 0..shape.key_heads {
            for (of, first, len) in [
                (&source, head * key_dim, key_dim),
                (&source, keys + head * key_dim, key_dim),
                (&source, 2 * keys + head * values, values),
                (&other, head * values, values),
            ] {
                segments.extend(runs(first, len, unit).map(|row| at(of, row)));
            }
        }
        let (dtype, cols) = (self.stored(t).expect("a matrix of these").2, source.cols);
        let source = Source { parts: vec![Rows { row_bytes, segments }], rows: unit, ..source };
        self.matrix(i, &joined, source, &[joined.rows, cols], dtype)
    }
}
