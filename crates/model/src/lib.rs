//! Models: one file per architecture, from `config.json` to a [`Description`], of which a [`Decoder`] is made that the engine steps.
//!
//! A model speaks to its backend only. A new architecture is one file here and one line in [`ARCHITECTURES`].
#![forbid(unsafe_code)]

mod config;
mod decoder;
mod description;
mod head;
mod layers;
mod llama;
mod mlx;
mod parts;
mod qwen3;
mod qwen3_5;
mod qwen3_5_moe;
mod qwen3_moe;
mod qwen3_next;
mod rope;
pub mod source;
mod weights;

use anyhow::{Result, anyhow, ensure};
use sluice_backend::{Backend, Float};

pub use config::{Config, Quantization};
pub use decoder::Decoder;
pub use description::*;
pub use mlx::Mlx;
pub use parts::{Leaf, Meaning, WeightClass, WeightDescription, WeightKind};
pub use source::{Belongs, ModelSource, ModelTensors};
pub use weights::Used;
use weights::Weights;

/// How to load a model.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// The most tokens that one step takes.
    pub max_tokens: usize,
    /// Positions that will be used at most; the model's own maximum if nothing is said. Some rotary scalings choose by it.
    pub context: Option<usize>,
    /// Experts per token instead of the router's own number. Changes the model's output.
    pub experts_per_token: Option<usize>,
}

impl Default for Options {
    /// The model as it was made, token by token: for who only looks at it.
    fn default() -> Options {
        Options { max_tokens: 1, context: None, experts_per_token: None }
    }
}

type Describe = fn(&Config, &Options) -> Result<Description>;

/// `model_type` and the function that describes such a model.
const ARCHITECTURES: &[(&str, Describe)] = &[
    ("llama", llama::describe),
    ("qwen3", qwen3::describe),
    ("qwen3_moe", qwen3_moe::describe),
    ("qwen3_next", qwen3_next::describe),
    ("qwen3_5", qwen3_5::describe),
    ("qwen3_5_text", qwen3_5::describe),
    ("qwen3_5_moe", qwen3_5_moe::describe),
    ("qwen3_5_moe_text", qwen3_5_moe::describe),
];

/// The `model_type`s that can be loaded.
pub fn supported() -> Vec<&'static str> {
    ARCHITECTURES.iter().map(|(name, _)| *name).collect()
}

fn describer(config: &Config) -> Result<Describe> {
    let kind = config.model_type()?;
    let found = ARCHITECTURES.iter().find(|(name, _)| *name == kind);
    found.map(|(_, describe)| *describe).ok_or_else(|| {
        let (path, all) = (config.path().display(), supported().join(", "));
        anyhow!("{path}: architecture {kind:?} is not supported (supported are {all})")
    })
}

/// Refuses an architecture that is not supported, naming those that are.
pub fn check_supported(config: &Config) -> Result<()> {
    describer(config).map(|_| ())
}

/// What the config says the model is. Errors name the key of `config.json`.
pub fn describe(config: &Config, options: &Options) -> Result<Description> {
    describer(config)?(config, options)
}

/// What the model of `tensors` is: what its config says, except for the output head, of which the files know better. Reads head and embedding where
/// one may be the other once more. Errors name the key of `config.json` or the tensor.
pub fn describe_stored(tensors: &ModelTensors, options: &Options) -> Result<Description> {
    let mut description = describe(tensors.config(), options)?;
    description.notes.extend_from_slice(tensors.checkpoint().notes());
    head::settle(&mut description, tensors)?;
    Ok(description)
}

/// A loaded model and what the user should be told about the loading.
pub struct Loaded {
    pub description: Description,
    pub decoder: Decoder,
    /// The type that the checkpoint works in.
    pub working_type: Float,
    /// Parts of the checkpoint that are not the text model's.
    pub skipped: Vec<String>,
    /// The weights that are used where they lie, in the order in which a step uses them: the order to read them in.
    pub order: Vec<Used>,
}

/// What would keep [`load`] from loading the model of `tensors`, with the same error. Reads no weight but those of [`describe_stored`].
pub fn check(tensors: &ModelTensors, backend: &mut dyn Backend) -> Result<Description> {
    let description = describe_stored(tensors, &Options::default())?;
    let mut weights = Weights::new(tensors, &description, backend, 1)?.without_values();
    tensors.working_type()?;
    Decoder::load(&mut weights, &description, 1)?;
    Ok(description)
}

/// Loads the model of `tensors`. Errors name the key of `config.json` or the tensor.
pub fn load(tensors: &ModelTensors, backend: &mut dyn Backend, options: &Options) -> Result<Loaded> {
    let description = describe_stored(tensors, options)?;
    ensure!(options.max_tokens > 0, "a step must take at least one token");
    let positions = options.context.unwrap_or(description.max_context);
    let mut weights = Weights::new(tensors, &description, backend, options.max_tokens)?;
    let (skipped, working_type) = (tensors.left_out(&description), tensors.working_type()?);
    let decoder = Decoder::load(&mut weights, &description, positions)?;
    let order = weights.into_order();
    Ok(Loaded { description, decoder, working_type, skipped, order })
}
