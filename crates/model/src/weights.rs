//! Weights by their checkpoint names, in Hugging Face's and in MLX's spelling.

use anyhow::{Context, Result, anyhow, bail, ensure};
use sluice_backend::{
    Backend, ExpertKind, ExpertMatrix, ExpertPart, Experts, Float, Linear, MatrixId, MatrixSource, MemoryClass, Mlp,
    Norm, Tensor, WeightFormat,
};
use sluice_store::{Bytes, Checkpoint, Dtype};

use crate::config::Quantization;
use crate::description::Description;
use crate::names::Names;
use crate::parts::{WeightDescription, WeightKind};

/// Looks weights up under the text model's prefix, checks their shapes and hands them to the backend.
pub struct Weights<'a> {
    checkpoint: &'a Checkpoint,
    quantization: Quantization,
    backend: &'a mut dyn Backend,
    names: Names,
    /// The checkpoint has been through MLX's conversion: see [`Names::converted_by_mlx`].
    converted_by_mlx: bool,
    /// What matrices lie in, in the order in which they were asked for, which is that in which a step uses them: layer by layer, then
    /// embedding and head.
    order: Vec<Used>,
    description: &'a Description,
    /// Rows of activations.
    max_tokens: usize,
    /// Values of vectors are read; without them only names, types and shapes are looked at.
    reads: bool,
}

/// What a matrix lies in.
#[derive(Clone, Debug)]
pub struct Used {
    pub bytes: Bytes,
    /// Of a mixture: not every token uses it.
    pub by_experts: bool,
}

impl<'a> Weights<'a> {
    pub fn new(
        checkpoint: &'a Checkpoint,
        quantization: Quantization,
        description: &'a Description,
        backend: &'a mut dyn Backend,
        max_tokens: usize,
    ) -> Result<Weights<'a>> {
        let names = Names::of(checkpoint)?;
        Ok(Weights {
            checkpoint,
            quantization,
            backend,
            names,
            converted_by_mlx: names.converted_by_mlx(description, checkpoint),
            order: Vec::new(),
            description,
            max_tokens,
            reads: true,
        })
    }

    /// Takes zeros for the values of vectors, so that no byte of a weight is read.
    pub fn without_values(self) -> Self {
        Weights { reads: false, ..self }
    }

    /// The floating-point type that the checkpoint works in: that of the embedding, or of its scales where it is quantised
    /// (never the packed integers').
    pub fn working_type(&self) -> Result<Float> {
        let name = |part: &str| self.names.full(&format!("embed_tokens.{part}"));
        let t = self.checkpoint.tensor(&name("scales")).or_else(|| self.checkpoint.tensor(&name("weight")));
        let t = t.ok_or_else(|| anyhow!("no tensor {:?}", name("weight")))?;
        Self::float_of(&t.name, t.dtype)
    }

    /// What was asked for, in the order in which a step uses it.
    pub fn into_order(self) -> Vec<Used> {
        self.order
    }

    /// Activations of a step: `[max_tokens, cols]`.
    pub fn scratch(&mut self, cols: usize) -> Result<Tensor> {
        self.backend.alloc(MemoryClass::Scratch, self.max_tokens, cols)
    }

    /// The backend, for what is not a weight.
    pub fn backend(&mut self) -> &mut dyn Backend {
        self.backend
    }

    /// What of the checkpoint is not the text model's, for one line to the user.
    pub fn left_out(&self) -> Vec<String> {
        self.names.left_out(self.description, self.checkpoint)
    }

    /// The weight that is called `part` in a layer, or outside of layers.
    fn described(&self, layer: impl Into<Option<usize>>, part: &str) -> WeightDescription {
        let found = self.description.weight(layer.into(), part);
        found.unwrap_or_else(|| panic!("the description of {} lacks {part}", self.description.architecture))
    }

    /// The checkpoint's name of a weight's module.
    fn module(&self, w: &WeightDescription) -> String {
        self.names.full(&w.name())
    }

    fn float_of(name: &str, dtype: Dtype) -> Result<Float> {
        match dtype {
            Dtype::F32 => Ok(Float::F32),
            Dtype::F16 => Ok(Float::F16),
            Dtype::BF16 => Ok(Float::Bf16),
            other => bail!("tensor {name}: {other:?} weights are not supported (F32, F16, BF16 and MLX's U32 are)"),
        }
    }

    /// The matrix of a module (its name without `.weight`), `[.., rows, cols]` with `leading` in front (experts of a stack).
    /// `module` is whole, `plain` says that the tensor has no `.weight` at its end.
    fn source(&self, module: &str, plain: bool, leading: &[usize], rows: usize, cols: usize) -> Result<MatrixSource> {
        let name = if plain { module.to_string() } else { format!("{module}.weight") };
        let t = self.checkpoint.tensor(&name);
        let t = t.ok_or_else(|| anyhow!("{}: no tensor {name:?}", self.checkpoint.folder().display()))?;
        let shape = |cols: usize| [leading, &[rows, cols]].concat();
        let all_rows = leading.iter().product::<usize>() * rows;
        let form = match self.checkpoint.tensor(&format!("{module}.scales")) {
            None => WeightFormat::Float(Self::float_of(&name, t.dtype)?),
            Some(scales) => {
                let (bits, group) = self.quantization.of(module)?;
                ensure!(t.dtype == Dtype::U32, "tensor {name:?} has scales, but is {:?} instead of U32", t.dtype);
                ensure!(
                    cols.is_multiple_of(group as usize),
                    "tensor {name:?}: {cols} inputs are not whole groups of {group}"
                );
                let biases = self.checkpoint.tensor(&format!("{module}.biases"));
                let biases =
                    biases.ok_or_else(|| anyhow!("tensor {module:?}: scales without biases are not supported"))?;
                ensure!(biases.dtype == scales.dtype, "{module:?}: scales and biases differ in type");
                WeightFormat::Affine { bits, group, scale: Self::float_of(&scales.name, scales.dtype)? }
            }
        };
        let mut parts = Vec::new();
        for part in form.planes(cols).with_context(|| format!("tensor {module}"))?.iter() {
            let t = match part.name {
                "weight" => Some(t.clone()),
                other => self.checkpoint.tensor(&format!("{module}.{other}")),
            };
            let t = t.ok_or_else(|| anyhow!("no tensor {module:?}.{}", part.name))?;
            let wanted = shape(part.row_bytes / part.element.size());
            ensure!(t.shape == wanted, "tensor {:?} has shape {:?}, config.json asks for {wanted:?}", t.name, t.shape);
            parts.push(t.bytes.clone());
        }
        Ok(MatrixSource { form, rows: all_rows, cols, parts })
    }

    fn load(&mut self, module: &str, plain: bool, leading: &[usize], rows: usize, cols: usize) -> Result<MatrixId> {
        let source = self.source(module, plain, leading, rows, cols)?;
        self.order.extend(source.parts.iter().map(|bytes| Used { bytes: bytes.clone(), by_experts: false }));
        self.backend.matrix(source).with_context(|| format!("tensor {module}"))
    }

    /// The matrix that is called `part`.
    pub fn matrix(&mut self, layer: impl Into<Option<usize>>, part: &str) -> Result<MatrixId> {
        let w = self.described(layer, part);
        self.load(&self.module(&w), false, &[], w.rows, w.cols)
    }

    /// The matrix that is called `part`, with its bias if it has one.
    pub fn linear(&mut self, layer: usize, part: &str) -> Result<Linear> {
        let w = self.described(layer, part);
        let matrix = self.matrix(layer, part)?;
        let bias = format!("{}.bias", self.module(&w));
        let bias = match self.checkpoint.tensor(&bias).filter(|_| w.biased) {
            Some(_) => Some(self.values(&bias, &[w.rows]).and_then(|(values, _)| self.upload(&values, 1, w.rows))?),
            None => None,
        };
        Ok(Linear { matrix, rows: 0..w.rows, bias })
    }

    /// The values of tensor `name` as f32, as many as the shape `wanted` has, and its shape.
    fn values(&self, name: &str, wanted: &[usize]) -> Result<(Vec<f32>, Vec<usize>)> {
        let t = self.checkpoint.tensor(name);
        let t = t.ok_or_else(|| anyhow!("{}: no tensor {name:?}", self.checkpoint.folder().display()))?;
        let float = Self::float_of(name, t.dtype)?;
        // Before any of it is widened: a tensor of another size may be of any size.
        let fits = t.shape.iter().product::<usize>() == wanted.iter().product::<usize>();
        ensure!(fits, "tensor {name} has shape {:?}, expected {wanted:?}", t.shape);
        let values = if self.reads {
            sluice_backend::widen(float, &t.bytes)?
        } else {
            vec![0.0; t.bytes.len() / t.dtype.size()]
        };
        Ok((values, t.shape.clone()))
    }

    fn upload(&mut self, values: &[f32], rows: usize, cols: usize) -> Result<Tensor> {
        let t = self.backend.alloc(MemoryClass::WeightsCopied, rows, cols)?;
        self.backend.upload(values, t);
        Ok(t)
    }

    /// The vector that is called `part`: `[1, len]`.
    pub fn vector(&mut self, layer: usize, part: &str) -> Result<Tensor> {
        let w = self.described(layer, part);
        let (values, _) = self.values(&self.module(&w), &[w.cols])?;
        self.upload(&values, 1, w.cols)
    }

    /// The RMS norm that is called `part`.
    pub fn norm(&mut self, layer: impl Into<Option<usize>>, part: &str) -> Result<Norm> {
        let w = self.described(layer, part);
        let (mut values, _) = self.values(&format!("{}.weight", self.module(&w)), &[w.cols])?;
        if w.kind == (WeightKind::Norm { centred: true }) && !self.converted_by_mlx {
            values.iter_mut().for_each(|w| *w += 1.0);
        }
        Ok(Norm { weight: self.upload(&values, 1, w.cols)?, eps: self.description.eps as f32 })
    }

    /// The depthwise convolution that is called `part`, as `[taps, channels]`: from `[channels, 1, taps]`, or MLX's `[channels, taps, 1]`.
    pub fn convolution(&mut self, layer: usize, part: &str) -> Result<Tensor> {
        let w = self.described(layer, part);
        let (name, channels, taps) = (format!("{}.weight", self.module(&w)), w.rows, w.cols);
        let wanted = if self.converted_by_mlx { [channels, taps, 1] } else { [channels, 1, taps] };
        let (values, shape) = self.values(&name, &wanted)?;
        ensure!(shape == wanted, "tensor {name} has shape {shape:?}, expected {wanted:?}");
        let by_tap: Vec<f32> = (0..taps * channels).map(|i| values[i % channels * taps + i / channels]).collect();
        self.upload(&by_tap, taps, channels)
    }

    /// The gated feed-forward module that is called `part`.
    ///
    /// # Errors
    /// A bias too: backends multiply gate and up without one, and leaving it out would be another model.
    pub fn mlp(&mut self, layer: usize, part: &str) -> Result<Mlp> {
        let mut projection = |name: &str| -> Result<Linear> {
            let part = format!("{part}.{name}");
            let bias = format!("{}.bias", self.module(&self.described(layer, &part)));
            ensure!(self.checkpoint.tensor(&bias).is_none(), "tensor {bias}: feed-forward biases are not supported");
            self.linear(layer, &part)
        };
        Ok(Mlp { gate: projection("gate_proj")?, up: projection("up_proj")?, down: projection("down_proj")? })
    }

    /// The routed experts of a layer: stacked by Hugging Face (`experts.gate_up_proj`, gate first), by MLX (`switch_mlp`), or one
    /// tensor each.
    pub fn experts(&mut self, layer: usize) -> Result<Experts> {
        let parts = ["gate_proj", "up_proj", "down_proj"].map(|p| self.described(layer, &format!("mlp.experts.{p}")));
        let [gate, up, down] = parts;
        let count = gate.count;
        let from = self.order.len();
        let both = self.names.full(&gate.name().replace("gate_proj", "gate_up_proj"));
        let mlx_name = |w: &WeightDescription| self.names.full(&w.mlx_name());
        let matrices = if self.checkpoint.tensor(&both).is_some() {
            let stride = gate.rows + up.rows;
            let both = self.load(&both, true, &[count], stride, gate.cols)?;
            let matrix = self.load(&self.module(&down), true, &[count], down.rows, down.cols)?;
            [
                ExpertMatrix::Stacked { matrix: both, stride, offset: 0 },
                ExpertMatrix::Stacked { matrix: both, stride, offset: gate.rows },
                ExpertMatrix::Stacked { matrix, stride: down.rows, offset: 0 },
            ]
        } else if self.checkpoint.tensor(&format!("{}.weight", mlx_name(&gate))).is_some() {
            let mut stacked = |w: WeightDescription| -> Result<ExpertMatrix> {
                let matrix = self.load(&self.names.full(&w.mlx_name()), false, &[count], w.rows, w.cols)?;
                Ok(ExpertMatrix::Stacked { matrix, stride: w.rows, offset: 0 })
            };
            [stacked(gate)?, stacked(up)?, stacked(down)?]
        } else {
            let mut single = |w: WeightDescription| -> Result<ExpertMatrix> {
                let module = self.module(&w);
                let name = |e: usize| module.replace(".experts.", &format!(".experts.{e}."));
                let each = (0..count).map(|e| self.load(&name(e), false, &[], w.rows, w.cols));
                Ok(ExpertMatrix::Single(each.collect::<Result<_>>()?))
            };
            [single(gate)?, single(up)?, single(down)?]
        };
        self.order[from..].iter_mut().for_each(|used| used.by_experts = true);
        let part = |(matrix, w): (ExpertMatrix, WeightDescription)| ExpertPart { matrix, rows: w.rows, cols: w.cols };
        let parts = matrices.into_iter().zip(parts).map(part).collect();
        Ok(Experts { count, kind: ExpertKind::SwiGlu, parts })
    }
}
