//! Models: a [`ModelSource`] says how one lies on disk, an architecture turns its config into a [`Description`], and a [`Decoder`] made of both is what
//! the engine steps.
//!
//! A model speaks to its backend only. A new architecture is one file in `architectures/` and one line in its list; a new file format is one file in
//! `source/` and one line in [`source::open`].
#![forbid(unsafe_code)]

mod architectures;
mod config;
mod decoder;
mod description;
mod head;
mod layers;
mod method;
mod mlx_lm;
mod mlx_names;
mod options;
mod python_json;
mod rope;
pub mod source;
mod weights;

use anyhow::{Result, ensure};
use sluice_backend::{Backend, Float};

pub use architectures::{Architecture, Describe, check_supported, describe, register, supported};
pub use config::{Config, GroupMode, Quantization};
pub use decoder::Decoder;
pub use description::*;
use description::{ATTENDED_SCORES, INDEX_PARTS, JOIN};
pub use method::Method;
pub use mlx_lm::MlxLm;
pub use options::Options;
pub use rope::{Rotary, rotary};
pub use source::{Belongs, ModelSource, ModelTensors, OnDisk};
use weights::Weights;
pub use weights::{MadeExperts, RowTable, Used, UsedBy};

/// What the model of `tensors` is. The config says everything but whether the output head is the embedding: files decide that. Reads both matrices where they
/// may be the same. Errors name the key of `config.json` or the tensor.
pub fn describe_stored(tensors: &ModelTensors, options: &Options) -> Result<Description> {
    let mut description = describe(tensors.config(), options)?;
    description.notes.extend_from_slice(tensors.checkpoint().notes());
    if tensors.layout().has_own_names() {
        description.forget_spelling();
    }
    if let Some(stored) = tensors.layout().delta_projections() {
        description.set_projections(stored);
    }
    if tensors.layout().divides_joined() {
        description.divide_joined();
    }
    let is_stored = |layer: usize, part: &str| {
        tensors.checkpoint().tensor(&tensors.layout().full(&format!("layers.{layer}.{part}.weight"))).is_some()
    };
    if (0..description.stored_layers()).any(|layer| is_stored(layer, "self_attn.embed_q")) {
        description.split_latents();
    }
    if (0..description.stored_layers()).any(|layer| is_stored(layer, INDEX_PARTS[0])) {
        description.split_indexers();
    }
    if let Some(streams) = description.streams.as_mut().filter(|_| is_stored(0, ATTENDED_SCORES[0])) {
        streams.fuse_scores();
    }
    let join = tensors.layout().full(&format!("layers.{}.{JOIN}.weight", description.layers.len()));
    let has_norms = |description: &Description| {
        let all = description.layer_weights(description.layers.len());
        let norms = all.iter().filter(|w| matches!(w.kind, WeightKind::Norm { .. }));
        let stored =
            |w| tensors.checkpoint().tensor(&tensors.layout().full(&format!("{}.weight", description.stored_name(w))));
        norms.map(stored).all(|found| found.is_some())
    };
    // Some checkpoints have a part of it.
    if tensors.checkpoint().tensor(&join).is_none() || !has_norms(&description) {
        description.mtp = None;
    }
    head::settle(&mut description, tensors)?;
    match options.layers {
        Some(layers) => description.cut(layers),
        None => Ok(description),
    }
}

/// A loaded model and what the user should be told about the loading.
pub struct Loaded {
    /// What it is.
    pub description: Description,
    /// What runs its steps.
    pub decoder: Decoder,
    /// The floating-point type of its embedding, or of the scales of a quantised one.
    pub working_type: Float,
    /// Parts of the checkpoint that are not the text model's.
    pub skipped: Vec<String>,
    /// The weights that are used in place, in the order of their use: the order to read them in.
    pub order: Vec<Used>,
    /// Tables of which a token uses few rows, and which may stay on disk.
    pub tables: Vec<RowTable>,
    /// The parts of routed experts that are derived at load, and stay in memory.
    pub made_experts: Option<MadeExperts>,
}

/// Whether [`load`] would succeed; fails with the same error. Reads no weight except those that [`describe_stored`] reads.
pub fn check(tensors: &ModelTensors, backend: &mut dyn Backend) -> Result<Description> {
    let description = describe_stored(tensors, &Options::default())?;
    let mut weights = Weights::new(tensors, &description, backend, (1, 1))?.without_values();
    tensors.working_type()?;
    Decoder::load(&mut weights, &description, 1)?;
    Ok(description)
}

/// Loads the model of `tensors`. Errors name the key of `config.json` or the tensor.
pub fn load(tensors: &ModelTensors, backend: &mut dyn Backend, options: &Options) -> Result<Loaded> {
    let whole = describe_stored(tensors, &Options { layers: None, ..*options })?;
    let skipped = tensors.left_out(&whole);
    let description = match options.layers {
        Some(layers) => whole.cut(layers)?,
        None => whole,
    };
    ensure!(options.max_tokens > 0, "a step must take at least one token");
    let positions = options.context.unwrap_or(description.max_context);
    let mut weights = Weights::new(tensors, &description, backend, (options.max_tokens, positions))?;
    let working_type = tensors.working_type()?;
    let decoder = Decoder::load(&mut weights, &description, positions)?;
    let (order, made_experts, tables) = weights.into_order();
    Ok(Loaded { description, decoder, working_type, skipped, order, tables, made_experts })
}
