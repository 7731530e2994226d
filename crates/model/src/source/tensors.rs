//! The tensors of a model, and what each of them is to it.

use std::collections::HashSet;
use std::sync::Arc;

use anyhow::{Context, Result, anyhow, ensure};
use sluice_backend::{Float, MatrixSource, WeightFormat};
use sluice_store::{Checkpoint, Tensor};

use super::layout::{Assembled, MatrixShape, TensorLayout, float_type};
use super::safetensors::layout_of;
use crate::config::Config;
use crate::description::{Description, Leaf, Meaning, NGRAM_NUMBERS, WeightClass};

/// Parts of multimodal and draft models, which stay behind.
const OTHER_PARTS: [&str; 11] = [
    "visual",
    "vision_tower",
    "vision_embedder",
    "multi_modal_projector",
    "mtp",
    "audio_tower",
    "embed_vision",
    "embed_audio",
    "v",
    "mm",
    "a",
];

/// What a tensor of a checkpoint belongs to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Belongs {
    /// To the text model.
    Text(Meaning),
    /// To something that is left out, under the name by which people know it.
    LeftOut(String),
    /// To nobody: a table that can be computed, which older checkpoints store.
    Computed,
}

/// A model's tensors as views of files, its config, and how the one holds what the other describes.
#[derive(Debug)]
pub struct ModelTensors {
    checkpoint: Arc<Checkpoint>,
    config: Arc<Config>,
    layout: Box<dyn TensorLayout>,
}

impl ModelTensors {
    /// The tensors of `checkpoint`, laid out as `layout` says.
    pub fn new(checkpoint: Checkpoint, config: Arc<Config>, layout: Box<dyn TensorLayout>) -> ModelTensors {
        ModelTensors { checkpoint: Arc::new(checkpoint), config, layout }
    }

    /// The tensors of a checkpoint of safetensors with a config of its own, wherever that was read.
    pub fn of_safetensors(checkpoint: impl Into<Arc<Checkpoint>>, config: impl Into<Arc<Config>>) -> ModelTensors {
        let (checkpoint, config) = (checkpoint.into(), config.into());
        let layout = layout_of(&checkpoint, &config);
        ModelTensors { checkpoint, config, layout }
    }

    /// The model's config.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The tensors by the names that they have in their files.
    pub fn checkpoint(&self) -> &Checkpoint {
        &self.checkpoint
    }

    /// Which tensor holds which weight.
    pub fn layout(&self) -> &dyn TensorLayout {
        &*self.layout
    }

    /// The tensor that the text model calls `short`, such as `norm.weight`.
    pub fn tensor(&self, short: &str) -> Option<Tensor> {
        self.checkpoint.tensor(&self.layout.full(short))
    }

    /// Refuses a checkpoint without an embedding, or a head that may be one.
    ///
    /// # Errors
    /// The message names the folder.
    pub(crate) fn check_embedding(&self) -> Result<()> {
        let found = has_embedding(&self.checkpoint, &*self.layout);
        let name = self.layout.full("embed_tokens.weight");
        ensure!(found, "{}: no tensor `{name}`", self.checkpoint.named().display());
        Ok(())
    }

    /// The floating-point type that the checkpoint works in: that of the embedding, or of its scales where it is quantised. Blocks of GGUF and scales of
    /// eight bits do not say what they were made of; it was bf16, most likely.
    ///
    /// # Errors
    /// An embedding that is missing or of another type.
    pub fn working_type(&self) -> Result<Float> {
        let t = self.tensor("embed_tokens.scales").or_else(|| self.tensor("embed_tokens.weight"));
        let t = t.ok_or_else(|| anyhow!("no tensor {:?}", self.layout.full("embed_tokens.weight")))?;
        match self.layout.format(&self.checkpoint, &t) {
            Ok(WeightFormat::Blocks(_) | WeightFormat::E2m1(_) | WeightFormat::Fp8(_)) => Ok(Float::Bf16),
            _ => float_type(&t.name, t.dtype),
        }
    }

    /// The matrix whose values are in the tensor `name`, with the experts of a stack in front. Unless it `reads`, planes that are made of others are zeros.
    ///
    /// # Errors
    /// A tensor that is missing, has another shape, or is of a format that is not supported; columns in an order of their own.
    pub fn matrix(&self, name: &str, shape: MatrixShape, reads: bool) -> Result<MatrixSource> {
        self.ordered_matrix(name, shape, reads)?.in_order(name)
    }

    /// The same with the order of its columns, which is read in any case.
    ///
    /// # Errors
    /// As for [`ModelTensors::matrix`], but for the order of columns.
    pub fn ordered_matrix(&self, name: &str, shape: MatrixShape, reads: bool) -> Result<Assembled> {
        let checkpoint = &self.checkpoint;
        if let Some(made) = self.layout.assembled(checkpoint, name, shape, reads)? {
            return Ok(made);
        }
        let cols = shape.cols;
        let t = checkpoint.tensor(name);
        let t = t.ok_or_else(|| anyhow!("{}: no tensor {name:?}", checkpoint.named().display()))?;
        let form = self.layout.format(checkpoint, &t)?;
        if let WeightFormat::Affine { group, .. } = form {
            let whole = cols.is_multiple_of(group as usize);
            ensure!(whole, "tensor {name:?}: {cols} inputs are not whole groups of {group}");
        }
        let module = name.strip_suffix(".weight").unwrap_or(name);
        let mut parts = Vec::new();
        for plane in form.planes(cols).with_context(|| format!("tensor {module}"))?.iter() {
            let t = self.layout.plane(checkpoint, name, plane.name);
            let t = t.ok_or_else(|| anyhow!("no tensor {module:?}.{}", plane.name))?;
            // MLX has bytes in words.
            shape.check(&t, plane.row_bytes / t.dtype.size())?;
            parts.push(t.bytes.clone());
        }
        Ok(MatrixSource { format: form, rows: shape.all_rows(), cols, planes: parts }.into())
    }

    /// What the tensor `name` is to the model that `description` describes.
    pub fn belongs(&self, description: &Description, name: &str) -> Belongs {
        belongs(description, &*self.layout, name)
    }

    /// The parts of the checkpoint that are not the text model's ("visual", "mtp"), for one line to the user.
    pub fn left_out(&self, description: &Description) -> Vec<String> {
        let mut parts: Vec<String> = Vec::new();
        for tensor in self.checkpoint.tensors() {
            match self.belongs(description, &tensor.name) {
                Belongs::LeftOut(part) if !parts.contains(&part) => parts.push(part),
                _ => {}
            }
        }
        parts
    }
}

fn has_embedding(checkpoint: &Checkpoint, layout: &dyn TensorLayout) -> bool {
    checkpoint.tensor(&layout.full("embed_tokens.weight")).is_some()
}

/// What of a model stays on disk until tokens want it.
#[derive(Clone, Copy, Debug)]
pub struct OnDisk<'a> {
    /// What the model is.
    pub model: &'a Description,
    /// Its routed experts.
    pub experts: bool,
    /// Its tables of which a token uses one row.
    pub tables: bool,
}

/// The names of the tensors that stay on disk. None for a checkpoint of something else: loading it says what is missing.
pub(super) fn names_on_disk(on_disk: OnDisk, checkpoint: &Checkpoint, layout: &dyn TensorLayout) -> HashSet<String> {
    if !has_embedding(checkpoint, layout) {
        return HashSet::new();
    }
    let stays = |name: &str| match belongs(on_disk.model, layout, name) {
        // Biases are vectors, which are copied at load.
        Belongs::Text(Meaning { leaf: Leaf::Bias, .. }) | Belongs::LeftOut(_) | Belongs::Computed => false,
        Belongs::Text(meaning) => match meaning.weight.class {
            WeightClass::Expert => on_disk.experts,
            class => class.is_table() && on_disk.tables,
        },
    };
    checkpoint.names().filter(|name| stays(name)).map(str::to_owned).collect()
}

fn belongs(description: &Description, layout: &dyn TensorLayout, name: &str) -> Belongs {
    let is_other = |part: &&str| *part == "mtp" && description.mtp.is_none();
    let short = layout.short(name).filter(|_| !name.split('.').any(|part| is_other(&part)));
    let Some(short) = short.as_deref() else {
        let part = name.split('.').find(|part| OTHER_PARTS.contains(part)).unwrap_or(name);
        return Belongs::LeftOut(part.to_owned());
    };
    let left_out = |part: &str| Belongs::LeftOut(part.to_owned());
    match description.meaning(short) {
        // The reference leaves it out, too, and warns.
        Some(Meaning { weight, expert: Some(_), leaf: Leaf::Bias, .. }) if !weight.biased => {
            return left_out("biases of experts");
        }
        Some(Meaning { weight, leaf: Leaf::Bias, .. }) if !weight.biased => {}
        Some(Meaning { weight, .. }) if weight.class == WeightClass::Head && description.tied => {
            return left_out("lm_head (the embedding once more)");
        }
        Some(meaning) => return Belongs::Text(meaning),
        None => {}
    }
    let is_number = |part: &&str| short.ends_with(part);
    if short.ends_with(".rotary_emb.inv_freq") || NGRAM_NUMBERS.iter().any(is_number) {
        return Belongs::Computed;
    }
    // A layer beyond the last, or a part that no layer has: named once for all layers that have it.
    let inside = short.strip_prefix("layers.").and_then(|rest| rest.split_once('.'));
    let is_layer = |number: &str| number.parse().is_ok_and(|n: usize| n < description.stored_layers());
    match inside {
        Some((number, part)) if is_layer(number) => left_out(part),
        Some((number, _)) => left_out(&short[..short.len().min("layers.".len() + number.len())]),
        None => left_out(short),
    }
}
