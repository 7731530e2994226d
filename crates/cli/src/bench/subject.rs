//! The model that a benchmark measures, and the flags for it.

use std::path::{Path, PathBuf};

use anyhow::{Result, ensure};
use clap::Args;
use sluice_engine::{Engine, Options};
use sluice_kernels::format::{ActivationFormat, Float, WeightFormat};
use sluice_kernels::roofline::Arithmetic;
use sluice_store::Dtype;

use crate::disk::mix;
use crate::engine_args::{EngineArgs, model_or_demo};
use crate::load;

/// Flags that all measurements of a model share.
#[derive(Args, Debug)]
pub struct ModelArgs {
    /// Folder of the model (config.json and safetensors) [default: the demo model]
    pub model: Option<PathBuf>,
    /// Number of measurements; the median counts
    #[arg(long, default_value_t = 5, value_name = "N")]
    pub rounds: usize,
    /// Do not measure the machine's limits (which takes 2 GB of memory)
    #[arg(long)]
    pub no_roofline: bool,
    /// Print one line of JSON for each measurement
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub engine: EngineArgs,
}

/// A loaded model.
pub struct Subject {
    /// The folder's name.
    pub name: String,
    /// The engine, with profiling available.
    pub engine: Engine,
    /// The arithmetic of most of its matrix products.
    pub arithmetic: Arithmetic,
    /// Whether profiling slows steps down, so that phases need a round of their own.
    pub profile_apart: bool,
}

impl Subject {
    /// Loads the model. `positions`: the context to allocate for each of `sequences`, unless a flag sets it.
    pub fn load(args: &ModelArgs, positions: usize, sequences: usize) -> Result<Subject> {
        ensure!(args.rounds > 0, "--rounds must be at least 1");
        let folder = model_or_demo(args.model.as_deref())?;
        let mut options = args.engine.options()?;
        options.max_context.get_or_insert(positions);
        options.max_sequences = sequences;
        // Two states per prompt: where it diverges from others, and its end.
        options.snapshots = if sequences > 1 { 2 * sequences } else { 0 };
        options.profile = true;
        let arithmetic = arithmetic(&folder, &options)?;
        let mut engine = load::engine(&folder, &args.engine, options)?;
        load::finish(&mut engine)?;
        let name = folder.file_name().unwrap_or(folder.as_os_str()).to_string_lossy().into_owned();
        let profile_apart = !args.engine.device().is_host();
        Ok(Subject { name, engine, arithmetic, profile_apart })
    }
}

/// The arithmetic of the weight format that most of a checkpoint's bytes have.
fn arithmetic(folder: &Path, options: &Options) -> Result<Arithmetic> {
    let source = sluice_model::source::open(folder).map_err(|e| load::naming(folder, e))?;
    let tensors = source.tensors().map_err(|e| load::naming(folder, e.into()))?;
    let (checkpoint, quantization) = (tensors.checkpoint(), source.config().quantization()?);
    let bytes =
        |dtype: Dtype| checkpoint.tensors().iter().filter(|t| t.dtype == dtype).map(|t| t.bytes.len()).sum::<usize>();
    let largest = [Dtype::U32, Dtype::BF16, Dtype::F16, Dtype::F32].into_iter().max_by_key(|d| bytes(*d));
    let blocks = checkpoint.tensors().iter().filter_map(|t| match tensors.layout().format(checkpoint, t) {
        Ok(form @ WeightFormat::Blocks(_)) => Some((t.bytes.len(), form)),
        _ => None,
    });
    let blocks = blocks.max_by_key(|(bytes, _)| *bytes);
    let form = match (largest, quantization.default()) {
        _ if blocks.is_some() => blocks.expect("just seen").1,
        (Some(Dtype::U32), Some((bits, group))) => WeightFormat::Affine { bits, group, scale: Float::Bf16 },
        (Some(Dtype::BF16), _) => WeightFormat::Float(Float::Bf16),
        _ => WeightFormat::Float(Float::F32),
    };
    Ok(match form.activation_format(options.activations) {
        ActivationFormat::F32 => Arithmetic::F32,
        ActivationFormat::Bf16 => Arithmetic::Bf16,
        ActivationFormat::Int8 | ActivationFormat::Int11 => Arithmetic::Int8,
    })
}

/// Token `i` of the measured text.
pub fn token(i: usize, vocabulary: usize) -> u32 {
    (mix(i as u64) % vocabulary as u64) as u32
}

/// Tokens `from .. from + n` of the measured text.
pub fn tokens(from: usize, n: usize, vocabulary: usize) -> Vec<u32> {
    (from..from + n).map(|i| token(i, vocabulary)).collect()
}
