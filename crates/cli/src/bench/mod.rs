//! `sluice bench`: measures speed, next to the machine's own limits measured in the same run. Weights may be anything, and the folder needs no tokenizer: token ids
//! are pseudo-random.

mod batch_decode;
mod case;
mod cold;
mod decode;
mod decode_args;
mod disk;
mod drafts;
mod figures;
mod kept_states;
mod kernels;
mod kv;
mod load;
mod prefill;
mod roofline;
mod serve;
mod subject;

use std::time::Instant;

use anyhow::Result;
use clap::{Args, Subcommand};

#[derive(Args, Debug)]
pub struct BenchArgs {
    #[command(subcommand)]
    target: Target,
}

#[derive(Subcommand, Debug)]
enum Target {
    /// Tokens per second of generation, and the fraction of memory bandwidth that this uses.
    Decode(decode_args::DecodeArgs),
    /// Tokens per second of a prompt, and the fraction of peak arithmetic that this uses.
    Prefill(prefill::PrefillArgs),
    /// Each way of loading, cold and warm: time, first token, later speed, peak memory, and the disk's own speed.
    Load(load::LoadArgs),
    /// Keys and values in memory that grows, and in reserved memory.
    Kv(kv::KvArgs),
    /// The disk's own speed for different request sizes.
    Disk(disk::DiskArgs),
    /// An answer without drafts, with drafts of fixed widths, and with as many as pay.
    Drafts(drafts::DraftsArgs),
    /// Each kernel by itself: matrix products per weight format, attention, delta rule.
    Kernels(kernels::KernelsArgs),
    /// Any server with OpenAI's API: tokens per second, time to the first token, time between tokens.
    Serve(serve::ServeBenchArgs),
    /// The machine's limits: memory bandwidth and peak arithmetic.
    Roofline(roofline::RooflineArgs),
}

/// Runs a benchmark. `start`: when the program started.
pub fn run(args: BenchArgs, start: Instant) -> Result<()> {
    match args.target {
        Target::Decode(args) => decode::run(&args),
        Target::Prefill(args) => prefill::run(&args),
        Target::Load(args) => load::run(&args, start),
        Target::Kv(args) => kv::run(&args),
        Target::Disk(args) => disk::run(&args),
        Target::Drafts(args) => drafts::run(&args),
        Target::Kernels(args) => kernels::run(&args),
        Target::Roofline(args) => roofline::run(&args),
        Target::Serve(args) => serve::run(&args),
    }
}
