//! Weights by their checkpoint names, in Hugging Face's and in MLX's spelling.

use anyhow::{Context, Result, anyhow, bail, ensure};
use sluice_backend::{
    Backend, ExpertKind, ExpertMatrix, ExpertPart, Experts, Float, Form, Linear, MatrixId, MatrixSource, MemoryClass,
    Mlp, Norm, SharedExpert, Tensor,
};
use sluice_store::{Bytes, Checkpoint, Dtype};

use crate::config::Quantization;
use crate::description::Description;

/// Looks weights up under the text model's prefix, checks their shapes and hands them to the backend.
pub struct Weights<'a> {
    checkpoint: &'a Checkpoint,
    quantization: Quantization,
    backend: &'a mut dyn Backend,
    /// In front of `embed_tokens`, `layers` and `norm`: `model.`, `model.language_model.` or `language_model.model.`.
    prefix: &'static str,
    /// In front of `lm_head`.
    head_prefix: &'static str,
    /// The checkpoint has been through MLX's conversion: zero-centred norms already have 1 added, convolution weights are
    /// `[channels, taps, 1]`.
    pub converted_by_mlx: bool,
    /// What matrices lie in, in the order in which they were asked for, which is that in which a step uses them: layer by layer, then
    /// embedding and head.
    order: Vec<Used>,
    hidden: usize,
    eps: f32,
    centred_norms: bool,
    /// Rows of activations.
    max_tokens: usize,
    /// Values of vectors are read; without them only names, types and shapes are looked at.
    reads: bool,
}

/// Whether this is a tensor of routed experts, by its name.
pub fn is_of_experts(name: &str) -> bool {
    name.contains(".mlp.experts.") || name.contains(".mlp.switch_mlp.")
}

/// What a matrix lies in.
#[derive(Clone, Debug)]
pub struct Used {
    pub bytes: Bytes,
    /// Of a mixture: not every token uses it.
    pub by_experts: bool,
}

const PREFIXES: [(&str, &str); 4] =
    [("model.language_model.", ""), ("language_model.model.", "language_model."), ("model.", ""), ("", "")];

impl<'a> Weights<'a> {
    pub fn new(
        checkpoint: &'a Checkpoint,
        quantization: Quantization,
        description: &Description,
        backend: &'a mut dyn Backend,
        max_tokens: usize,
    ) -> Result<Weights<'a>> {
        let found = PREFIXES.into_iter().find(|(p, _)| checkpoint.tensor(&format!("{p}embed_tokens.weight")).is_some());
        let Some((prefix, head_prefix)) = found else {
            bail!("{}: no tensor `model.embed_tokens.weight`", checkpoint.folder().display())
        };
        // MLX moves the convolution's single input channel to the end, and centres norms at one in the same breath.
        let conv = checkpoint.tensors().iter().find(|t| t.name.ends_with("linear_attn.conv1d.weight"));
        let converted_by_mlx = conv.is_some_and(|t| t.shape.len() == 3 && t.shape[2] == 1 && t.shape[1] != 1);
        Ok(Weights {
            checkpoint,
            quantization,
            backend,
            prefix,
            head_prefix,
            converted_by_mlx,
            order: Vec::new(),
            hidden: description.hidden,
            eps: description.eps as f32,
            centred_norms: description.centred_norms,
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
        let name = |part: &str| format!("{}embed_tokens.{part}", self.prefix);
        let t = self.checkpoint.tensor(&name("scales")).or_else(|| self.checkpoint.tensor(&name("weight")));
        let t = t.ok_or_else(|| anyhow!("no tensor {:?}", name("weight")))?;
        Self::float_of(&t.name, t.dtype)
    }

    /// What was asked for, in the order in which a step uses it.
    pub fn into_order(self) -> Vec<Used> {
        self.order
    }

    /// Width of the residual stream.
    pub fn hidden(&self) -> usize {
        self.hidden
    }

    /// Activations of a step: `[max_tokens, cols]`.
    pub fn scratch(&mut self, cols: usize) -> Result<Tensor> {
        self.backend.alloc(MemoryClass::Scratch, self.max_tokens, cols)
    }

    /// The backend, for what is not a weight.
    pub fn backend(&mut self) -> &mut dyn Backend {
        self.backend
    }

    /// What of the checkpoint is not the text model's, by its first name parts ("visual", "mtp"), for one line to the user.
    pub fn skipped(&self) -> Vec<String> {
        let mut parts: Vec<String> = Vec::new();
        for t in self.checkpoint.tensors() {
            let ours = ["embed_tokens.", "layers.", "norm."]
                .iter()
                .any(|n| t.name.strip_prefix(self.prefix).is_some_and(|rest| rest.starts_with(n)))
                || t.name.strip_prefix(self.head_prefix).is_some_and(|rest| rest.starts_with("lm_head."));
            if !ours {
                let known = ["visual", "vision_tower", "mtp", "audio_tower"];
                let part = t.name.split('.').find(|p| known.contains(p)).unwrap_or(&*t.name);
                if !parts.iter().any(|p| p == part) {
                    parts.push(part.to_string());
                }
            }
        }
        parts
    }

    fn exists(&self, name: &str) -> bool {
        self.checkpoint.tensor(&format!("{}{name}", self.prefix)).is_some()
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
            None => Form::Float(Self::float_of(&name, t.dtype)?),
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
                Form::Affine { bits, group, scale: Self::float_of(&scales.name, scales.dtype)? }
            }
        };
        let mut parts = Vec::new();
        for part in form.parts(cols).with_context(|| format!("tensor {module}"))?.iter() {
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

    /// `[rows, cols]` matrix of a module.
    pub fn matrix(&mut self, module: &str, rows: usize, cols: usize) -> Result<MatrixId> {
        self.load(&format!("{}{module}", self.prefix), false, &[], rows, cols)
    }

    /// A module's matrix `[rows, cols]` with its bias, if it has one.
    pub fn linear(&mut self, module: &str, rows: usize, cols: usize) -> Result<Linear> {
        let matrix = self.matrix(module, rows, cols)?;
        let bias = format!("{module}.bias");
        let bias = if self.exists(&bias) { Some(self.vector(&bias, rows)?) } else { None };
        Ok(Linear { matrix, rows: 0..rows, bias })
    }

    /// The output head.
    pub fn head(&mut self, vocabulary: usize, hidden: usize) -> Result<MatrixId> {
        let module = format!("{}lm_head", self.head_prefix);
        self.load(&module, false, &[], vocabulary, hidden)
    }

    /// A tensor's values as f32, as many as the shape `wanted` has, and its shape.
    fn values(&self, name: &str, wanted: &[usize]) -> Result<(Vec<f32>, Vec<usize>)> {
        let name = format!("{}{name}", self.prefix);
        let t = self.checkpoint.tensor(&name);
        let t = t.ok_or_else(|| anyhow!("{}: no tensor {name:?}", self.checkpoint.folder().display()))?;
        let float = Self::float_of(&name, t.dtype)?;
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

    /// A vector `[1, len]`.
    pub fn vector(&mut self, name: &str, len: usize) -> Result<Tensor> {
        let (values, _) = self.values(name, &[len])?;
        self.upload(&values, 1, len)
    }

    /// An RMS norm's weight, where the model centres it.
    pub fn norm(&mut self, module: &str, len: usize) -> Result<Norm> {
        self.norm_of(module, len, self.centred_norms)
    }

    /// The weight of a norm that is stored as it is in every model.
    pub fn plain_norm(&mut self, module: &str, len: usize) -> Result<Norm> {
        self.norm_of(module, len, false)
    }

    /// An RMS norm's weight; `centred`: the checkpoint stores it minus one.
    fn norm_of(&mut self, module: &str, len: usize, centred: bool) -> Result<Norm> {
        let name = format!("{module}.weight");
        let (mut values, _) = self.values(&name, &[len])?;
        if centred && !self.converted_by_mlx {
            values.iter_mut().for_each(|w| *w += 1.0);
        }
        Ok(Norm { weight: self.upload(&values, 1, len)?, eps: self.eps })
    }

    /// A depthwise convolution's weight as `[taps, channels]`, from `[channels, 1, taps]` or MLX's `[channels, taps, 1]`.
    pub fn convolution(&mut self, module: &str, channels: usize, taps: usize) -> Result<Tensor> {
        let name = format!("{module}.weight");
        let wanted = if self.converted_by_mlx { [channels, taps, 1] } else { [channels, 1, taps] };
        let (values, shape) = self.values(&name, &wanted)?;
        ensure!(shape == wanted, "tensor {}{name} has shape {shape:?}, expected {wanted:?}", self.prefix);
        let by_tap: Vec<f32> = (0..taps * channels).map(|i| values[i % channels * taps + i / channels]).collect();
        self.upload(&by_tap, taps, channels)
    }

    /// A gated feed-forward module.
    pub fn mlp(&mut self, module: &str, hidden: usize, intermediate: usize) -> Result<Mlp> {
        Ok(Mlp {
            gate: self.linear(&format!("{module}.gate_proj"), intermediate, hidden)?,
            up: self.linear(&format!("{module}.up_proj"), intermediate, hidden)?,
            down: self.linear(&format!("{module}.down_proj"), hidden, intermediate)?,
        })
    }

    /// A shared expert and its gate.
    pub fn shared_expert(&mut self, module: &str, hidden: usize, intermediate: usize) -> Result<SharedExpert> {
        let mlp = self.mlp(&format!("{module}.shared_expert"), hidden, intermediate)?;
        let gate = Some(self.linear(&format!("{module}.shared_expert_gate"), 1, hidden)?);
        Ok(SharedExpert { mlp, gate })
    }

    /// The routed experts of a layer: stacked by Hugging Face (`experts.gate_up_proj`, gate first), by MLX (`switch_mlp`), or one
    /// tensor each.
    pub fn experts(&mut self, module: &str, count: usize, hidden: usize, intermediate: usize) -> Result<Experts> {
        let whole = format!("{}{module}", self.prefix);
        let from = self.order.len();
        let [gate, up, down] = if self.exists(&format!("{module}.experts.gate_up_proj")) {
            let both = self.load(&format!("{whole}.experts.gate_up_proj"), true, &[count], 2 * intermediate, hidden)?;
            let down = self.load(&format!("{whole}.experts.down_proj"), true, &[count], hidden, intermediate)?;
            [
                ExpertMatrix::Stacked { matrix: both, stride: 2 * intermediate, offset: 0 },
                ExpertMatrix::Stacked { matrix: both, stride: 2 * intermediate, offset: intermediate },
                ExpertMatrix::Stacked { matrix: down, stride: hidden, offset: 0 },
            ]
        } else if self.exists(&format!("{module}.switch_mlp.gate_proj.weight")) {
            let mut stacked = |part: &str, rows: usize, cols: usize| -> Result<ExpertMatrix> {
                let matrix = self.load(&format!("{whole}.switch_mlp.{part}"), false, &[count], rows, cols)?;
                Ok(ExpertMatrix::Stacked { matrix, stride: rows, offset: 0 })
            };
            [
                stacked("gate_proj", intermediate, hidden)?,
                stacked("up_proj", intermediate, hidden)?,
                stacked("down_proj", hidden, intermediate)?,
            ]
        } else {
            let mut single = |part: &str, rows: usize, cols: usize| -> Result<ExpertMatrix> {
                let name = |e| format!("{whole}.experts.{e}.{part}");
                let each = (0..count).map(|e| self.load(&name(e), false, &[], rows, cols));
                Ok(ExpertMatrix::Single(each.collect::<Result<_>>()?))
            };
            [
                single("gate_proj", intermediate, hidden)?,
                single("up_proj", intermediate, hidden)?,
                single("down_proj", hidden, intermediate)?,
            ]
        };
        self.order[from..].iter_mut().for_each(|used| used.by_experts = true);
        let parts = [(gate, intermediate, hidden), (up, intermediate, hidden), (down, hidden, intermediate)];
        let parts = parts.map(|(matrix, rows, cols)| ExpertPart { matrix, rows, cols }).into();
        Ok(Experts { count, kind: ExpertKind::SwiGlu, parts })
    }
}
