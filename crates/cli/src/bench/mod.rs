//! `sluice bench`: how fast this machine computes, beside what it could do at best, measured in the same run. Weights may be anything and the folder
//! needs no tokenizer: token ids are random, from a fixed seed.

mod batch_decode;
mod case;
mod cold;
mod decode;
mod disk;
mod figures;
mod kernels;
mod kv;
mod load;
mod prefill;
mod roofline;
mod serve;

use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Result, ensure};
use clap::{Args, Subcommand};
use sluice_engine::{Engine, Options};
use sluice_store::Dtype;

use sluice_kernels::format::{ActivationFormat, Float, WeightFormat};
use sluice_kernels::roofline::Arithmetic;

use crate::disk::mix;
use crate::engine_args::{EngineArgs, model_or_demo};

#[derive(Args, Debug)]
pub struct BenchArgs {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand, Debug)]
enum What {
    /// Tokens per second, one after the other, and how much of the memory's bandwidth that is.
    Decode(decode::DecodeArgs),
    /// Tokens per second of a prompt, and how much of the arithmetic's peak that is.
    Prefill(prefill::PrefillArgs),
    /// Each way of loading, cold and warm: time, first token, speed after it, peak memory, beside the disk's own speed.
    Load(load::LoadArgs),
    /// Keys and values in memory that grows, and in memory that was reserved.
    Kv(kv::KvArgs),
    /// The disk's own speed for requests of one size or another.
    Disk(disk::DiskArgs),
    /// Each kernel by itself: products per weight form, attention, delta rule.
    Kernels(kernels::KernelsArgs),
    /// A server that speaks OpenAI's API, this one's or another's: tokens per second, time to the first, time between them.
    Serve(serve::ServeArgs),
    /// What the machine can do at best: reading memory, multiplying and adding.
    Roofline(roofline::RooflineArgs),
}

/// Measures. `start` is when the program did.
pub fn run(args: BenchArgs, start: Instant) -> Result<()> {
    match args.what {
        What::Decode(args) => decode::run(&args),
        What::Prefill(args) => prefill::run(&args),
        What::Load(args) => load::run(&args, start),
        What::Kv(args) => kv::run(&args),
        What::Disk(args) => disk::run(&args),
        What::Kernels(args) => kernels::run(&args),
        What::Roofline(args) => roofline::run(&args),
        What::Serve(args) => serve::run(&args),
    }
}

/// What the measurements of a model share.
#[derive(Args, Debug)]
struct ModelArgs {
    /// Folder of the model (config.json and safetensors) [default: the demo model]
    model: Option<PathBuf>,
    /// Measurements, of which the median counts
    #[arg(long, default_value_t = 5, value_name = "N")]
    rounds: usize,
    /// Do not measure what the machine can do at best (which takes 2 GB of memory)
    #[arg(long)]
    no_roofline: bool,
    /// One line of JSON for each measurement
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    engine: EngineArgs,
}

/// A model that is ready to be measured.
struct Subject {
    name: String,
    engine: Engine,
    /// In which its products of matrices are done, for the most part.
    arithmetic: Arithmetic,
    /// Whether a profile slows steps down, so that phases are measured in a round of their own.
    profile_apart: bool,
}

impl Subject {
    /// Loads the model, with room for `positions` tokens of each of so many sequences, unless the flags say how many.
    fn load(args: &ModelArgs, positions: usize, sequences: usize) -> Result<Subject> {
        ensure!(args.rounds > 0, "--rounds must be at least 1");
        let folder = model_or_demo(args.model.as_deref())?;
        let mut options = args.engine.options()?;
        options.max_context.get_or_insert(positions);
        options.max_sequences = sequences;
        // Two states of each sequence's prompt: where it parts from others, and its end.
        options.snapshots = if sequences > 1 { 2 * sequences } else { 0 };
        options.profile = true;
        let arithmetic = arithmetic(&folder, &options)?;
        let mut engine = crate::load::engine(&folder, &args.engine, options)?;
        crate::load::finish(&mut engine)?;
        let name = folder.file_name().unwrap_or(folder.as_os_str()).to_string_lossy().into_owned();
        let profile_apart = !args.engine.device().is_host();
        Ok(Subject { name, engine, arithmetic, profile_apart })
    }
}

/// The arithmetic of the form that most of a checkpoint's bytes have.
fn arithmetic(folder: &std::path::Path, options: &Options) -> Result<Arithmetic> {
    let source = sluice_model::source::open(folder).map_err(|e| crate::load::naming(folder, e))?;
    let tensors = source.tensors().map_err(|e| crate::load::naming(folder, e.into()))?;
    let (checkpoint, quantization) = (tensors.checkpoint(), source.config().quantization()?);
    let bytes =
        |dtype: Dtype| checkpoint.tensors().iter().filter(|t| t.dtype == dtype).map(|t| t.bytes.len()).sum::<usize>();
    let largest = [Dtype::U32, Dtype::BF16, Dtype::F16, Dtype::F32].into_iter().max_by_key(|d| bytes(*d));
    let form = match (largest, quantization.default()) {
        (Some(Dtype::U32), Some((bits, group))) => WeightFormat::Affine { bits, group, scale: Float::Bf16 },
        (Some(Dtype::BF16), _) => WeightFormat::Float(Float::Bf16),
        _ => WeightFormat::Float(Float::F32),
    };
    Ok(match form.activation_format(options.activations) {
        ActivationFormat::F32 => Arithmetic::F32,
        ActivationFormat::Bf16 => Arithmetic::Bf16,
        ActivationFormat::Int8 => Arithmetic::Int8,
    })
}

/// Token `i` of the text that is measured.
fn token(i: usize, vocabulary: usize) -> u32 {
    (mix(i as u64) % vocabulary as u64) as u32
}

/// Tokens `from .. from + n` of it.
fn tokens(from: usize, n: usize, vocabulary: usize) -> Vec<u32> {
    (from..from + n).map(|i| token(i, vocabulary)).collect()
}
