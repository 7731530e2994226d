//! Models: one file per architecture, from `config.json` and checkpoint names to a [`Decoder`] that the engine steps.
//!
//! A model speaks to its backend only. A new architecture is one file here and one line in [`ARCHITECTURES`].
#![forbid(unsafe_code)]

mod config;
mod decoder;
mod layers;
mod qwen3;
mod qwen3_5;
mod qwen3_5_moe;
mod qwen3_moe;
mod qwen3_next;
mod rope;
mod weights;

use anyhow::{Result, anyhow, ensure};
use sluice_backend::Backend;
use sluice_store::Checkpoint;

pub use config::{Config, Quantization};
pub use decoder::{CacheGroup, CacheKind, Caches, Decoder, Spec};
use weights::Weights;
pub use weights::{Used, is_of_experts};

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

type Build = fn(&Config, &mut Weights, &Options) -> Result<Decoder>;

/// `model_type` and the function that builds it.
const ARCHITECTURES: &[(&str, Build)] = &[
    ("qwen3", qwen3::build),
    ("qwen3_moe", qwen3_moe::build),
    ("qwen3_next", qwen3_next::build),
    ("qwen3_5", qwen3_5::build),
    ("qwen3_5_text", qwen3_5::build),
    ("qwen3_5_moe", qwen3_5_moe::build),
    ("qwen3_5_moe_text", qwen3_5_moe::build),
];

/// The `model_type`s that can be loaded.
pub fn supported() -> Vec<&'static str> {
    ARCHITECTURES.iter().map(|(name, _)| *name).collect()
}

fn builder(config: &Config) -> Result<Build> {
    let kind = config.model_type()?;
    let found = ARCHITECTURES.iter().find(|(name, _)| *name == kind);
    found.map(|(_, build)| *build).ok_or_else(|| {
        let (path, all) = (config.path().display(), supported().join(", "));
        anyhow!("{path}: architecture {kind:?} is not supported (supported are {all})")
    })
}

/// Refuses an architecture that is not supported, naming those that are.
pub fn check_supported(config: &Config) -> Result<()> {
    builder(config).map(|_| ())
}

/// A loaded model and what the user should be told about the loading.
pub struct Loaded {
    pub decoder: Decoder,
    /// Parts of the checkpoint that are not the text model's.
    pub skipped: Vec<String>,
    /// The weights that are used where they lie, in the order in which a step uses them: the order to read them in.
    pub order: Vec<Used>,
}

/// What would keep [`load`] from loading the model of `checkpoint`, with the same error. Reads no weight.
pub fn check(checkpoint: &Checkpoint, config: &Config, backend: &mut dyn Backend) -> Result<Spec> {
    let build = builder(config)?;
    let mut weights = Weights::new(checkpoint, config.quantization()?, backend)?.without_values();
    let options = Options { max_tokens: 1, context: None, experts_per_token: None };
    Ok(build(config, &mut weights, &options)?.spec)
}

/// Loads the model of `checkpoint`. Errors name the key of `config.json` or the tensor.
pub fn load(checkpoint: &Checkpoint, config: &Config, backend: &mut dyn Backend, options: &Options) -> Result<Loaded> {
    let build = builder(config)?;
    ensure!(options.max_tokens > 0, "a step must take at least one token");
    let mut weights = Weights::new(checkpoint, config.quantization()?, backend)?;
    let skipped = weights.skipped();
    let decoder = build(config, &mut weights, options)?;
    Ok(Loaded { decoder, skipped, order: weights.into_order() })
}
