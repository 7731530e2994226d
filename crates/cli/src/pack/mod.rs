//! `sluice pack`: a Hugging Face checkpoint to MLX-compatible quantised safetensors, in bounded memory.
//!
//! [`plan`] says from the headers alone what will be written, [`write`] carries it out, and [`folder`] sees to it that what is there is
//! whole or not there at all. Nothing here computes with a model.

mod config;
mod folder;
mod names;
mod ordered;
mod plan;
mod quantize;
mod rules;
mod search;
mod summary;
mod write;

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use sluice_kernels::Isa;
use sluice_model::{Config, check_supported};
use sluice_store::{Checkpoint, free_space};

use crate::progress::Progress;
use crate::{interrupt, terminal};
use quantize::Quantizer;
use rules::{Rule, Rules};

/// Exit code after Ctrl-C, as shells have it: 128 + SIGINT.
const INTERRUPTED: i32 = 130;

/// Quantise a model to MLX's format (lossy: `sluice eval ppl` measures what it costs)
#[derive(Debug, clap::Args)]
pub struct PackArgs {
    /// Folder with the checkpoint: safetensors in bf16, f16 or f32, or of MLX (what is quantised already stays as it is)
    input: PathBuf,
    /// Folder to write
    output: PathBuf,
    /// Bits per weight: 2, 3, 4, 5, 6 or 8
    #[arg(long, default_value = "4", value_parser = rules::bits)]
    bits: u8,
    /// Weights that share a scale: 32, 64 or 128
    #[arg(long, default_value = "64", value_parser = rules::group)]
    group_size: u16,
    /// Another width for modules whose name matches a pattern, such as 'embed_tokens=6' or '*.mlp.experts.*=4:32'; BITS is
    /// `none` to leave them as they are. The last match decides
    #[arg(long, value_name = "PATTERN=BITS[:GROUP]")]
    set: Vec<Rule>,
    /// Search the scale and bias of each group by least squares instead of taking MLX's: slower, closer to the original
    #[arg(long)]
    search: bool,
    /// Write into a folder that is not empty, over the model in it
    #[arg(long)]
    force: bool,
    /// Threads (default: all cores)
    #[arg(long)]
    threads: Option<usize>,
    /// Bytes of tensors in one file
    #[arg(long, default_value_t = 5 << 30, hide = true)]
    shard_bytes: u64,
}

/// The user pressed Ctrl-C.
#[derive(Debug)]
struct Interrupted;

impl fmt::Display for Interrupted {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("interrupted")
    }
}

impl std::error::Error for Interrupted {}

/// Packs. Ctrl-C takes back what was written and leaves with 130.
pub fn run(args: PackArgs) -> Result<()> {
    let hold = interrupt::hold();
    let result = pack(&args);
    drop(hold);
    if let Err(e) = &result
        && e.is::<Interrupted>()
    {
        terminal::note(&format!("{}: interrupted, nothing kept", args.output.display()));
        std::process::exit(INTERRUPTED);
    }
    result
}

fn pack(args: &PackArgs) -> Result<()> {
    let begin = Instant::now();
    // 1. what is there, and what is to be
    folder::check(&args.input, &args.output, args.force)?;
    let checkpoint = Checkpoint::open(&args.input)?;
    let model = Config::open(&args.input)?;
    check_supported(&model)?;
    let mut rules = Rules::new(args.bits, args.group_size, args.set.clone());
    let plan = plan::plan(&checkpoint, &model, &mut rules)?;
    let config = config::packed(&args.input, &plan, &rules)?;
    let others = folder::other_files(&args.input)?;
    for line in summary::remarks(&plan, &model) {
        terminal::note(&line);
    }

    // 2. whether it fits
    let sizes = summary::Sizes {
        weights: plan.units.iter().map(|u| u.size()).sum(),
        others: others.iter().map(|(_, len)| len).sum::<u64>() + config.len() as u64,
        spooled: write::spooled(&plan.units),
    };
    let existing = args.output.ancestors().find(|p| p.exists()).filter(|p| !p.as_os_str().is_empty());
    let parent = existing.unwrap_or(Path::new("."));
    let free = free_space(parent).with_context(|| parent.display().to_string())?;
    let free = free.saturating_add(if args.force { folder::freed(&args.output) } else { 0 });
    terminal::note(&sizes.line(free));
    ensure!(sizes.needed() <= free, "{}: not enough space", args.output.display());

    // 3. weights, other files, and last the file that makes it a model
    let mut output = folder::Output::create(&args.output)?;
    let input_bytes: u64 = plan.units.iter().map(|u| u.source.bytes()).sum();
    let mut progress = Progress::new("packing", "MB", (input_bytes / 1_000_000) as usize);
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
    let job = write::Job {
        checkpoint: &checkpoint,
        quantizer: Quantizer { isa: Isa::from_env()?, search: args.search },
        threads: args.threads.unwrap_or(cores).clamp(1, 1024),
        shard: args.shard_bytes,
        progress: &progress,
        input_bytes,
    };
    let done = job.run(&plan.units, &args.output, &mut output)?;
    progress.finish();
    for (path, _) in &others {
        output.copy(path)?;
    }
    ensure!(!interrupt::pressed(), Interrupted);
    output.complete(&config)?;

    // 4. what came of it
    let input_bytes = checkpoint.file_sizes().iter().map(|(_, len)| len).sum();
    print!("{}", summary::report(&plan, &done, input_bytes, begin.elapsed()));
    Ok(())
}
