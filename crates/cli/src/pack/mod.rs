//! `sluice pack`: a checkpoint to quantised safetensors, in bounded memory: MLX's layout, or a bundle that experts stream from.
//!
//! [`plan`] says from the headers alone what will be written, [`layout`] into which files and where, [`write`] carries it out, [`calibrate`] looks
//! at what experts see where that is wanted, [`journal`] remembers what is whole, and [`folder`] sees to it that what looks like a model is one.

mod calibrate;
pub mod compare;
mod config;
mod folder;
mod journal;
pub mod layout;
pub mod ordered;
pub mod plan;
pub mod quantize;
pub mod rules;
mod summary;
mod write;

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result, anyhow, ensure};
use sluice_kernels::Isa;
use sluice_kernels::quantize::Rounding;
use sluice_model::{Config, Options};
use sluice_store::safetensors::Header;
use sluice_store::{Checkpoint, Writer, bundle, free_space, write_index, xxh3_of};
use xxhash_rust::xxh3::Xxh3;

use crate::progress::Progress;
use crate::{interrupt, terminal};
use calibrate::Calibrator;
use journal::Journal;
use layout::Layout;
use quantize::Quantizer;
use rules::{Bits, Rule, Rules};

/// What file systems give room by.
const BLOCK: u64 = 4096;

/// Exit code after Ctrl-C, as shells have it: 128 + SIGINT.
const INTERRUPTED: i32 = 130;

/// Quantise a model to MLX's format (lossy: `sluice eval ppl` measures what it costs)
#[derive(Debug, clap::Args)]
pub struct PackArgs {
    /// Folder with the checkpoint: safetensors in bf16, f16 or f32, or of MLX (what is quantised already stays as it is, unless
    /// --experts-bits, --set or a recipe asks for fewer bits)
    input: PathBuf,
    /// Folder to write; an interrupted packing goes on where it was
    output: PathBuf,
    /// Bits per weight: 2, 3, 4, 5, 6 or 8; `none` leaves all but what is named as it is
    #[arg(long, default_value = "4", value_parser = rules::bits_or_none)]
    bits: Bits,
    /// Bits per weight of the routed experts [default: as --bits]
    #[arg(long, value_name = "BITS", value_parser = rules::bits)]
    experts_bits: Option<u8>,
    /// Weights that share a scale: 32, 64 or 128
    #[arg(long, default_value = "64", value_parser = rules::group)]
    group_size: u16,
    /// Another width for modules whose name matches a pattern, such as 'embed_tokens=6', '*.mlp.experts.*=4:32' or
    /// 'layers.{0-3}.*=none'; BITS is `none` to leave them as they are. The last match decides
    #[arg(long, value_name = "PATTERN=BITS[:GROUP]")]
    set: Vec<Rule>,
    /// A file of such rules, one a line, `#` for remarks; --set comes after them
    #[arg(long, value_name = "FILE")]
    recipe: Option<PathBuf>,
    /// mlx: experts stacked, in shards. bundle: each expert one aligned run, one file per layer, which streams best
    #[arg(long, value_enum, default_value = "mlx")]
    layout: Layout,
    /// Only these layers' experts (a bundle's files; the rest of the model too): later runs add the others
    #[arg(long, value_name = "A-B", value_parser = layers)]
    layers: Option<(usize, usize)>,
    /// Search the scale and bias of each group by least squares instead of taking MLX's: slower, closer to the original
    #[arg(long)]
    search: bool,
    /// Take the scale and bias of each group from its least and its greatest weight: worse than either, for comparison with who does so
    #[arg(long, conflicts_with_all = ["search", "calibration"])]
    min_max: bool,
    /// Quantise routed experts by what they see when the model reads this text: slowest, closest in what comes out
    #[arg(long, value_name = "FILE")]
    calibration: Option<PathBuf>,
    /// Tokens of that text to read, in windows of 512
    #[arg(long, value_name = "TOKENS", default_value = "131072", requires = "calibration")]
    calibration_tokens: usize,
    /// At the end read everything back and compare it with what was written
    #[arg(long)]
    verify: bool,
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

/// `A-B` or `A`.
fn layers(text: &str) -> Result<(usize, usize), String> {
    let wrong = || format!("{text:?}: expected a layer or a range of layers, such as 0-9");
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    let (first, last) = (first.parse().map_err(|_| wrong())?, last.parse().map_err(|_| wrong())?);
    if first <= last { Ok((first, last)) } else { Err(wrong()) }
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

/// Packs. Ctrl-C leaves with 130, and what is whole for another try.
pub fn run(args: PackArgs) -> Result<()> {
    let hold = interrupt::hold();
    let mut kept = false;
    let result = pack(&args, &mut kept);
    drop(hold);
    let what = if kept { "what is whole is kept, the same command goes on from there" } else { "nothing kept" };
    match &result {
        Err(e) if e.is::<Interrupted>() => {
            terminal::note(&format!("{}: interrupted, {what}", args.output.display()));
            std::process::exit(INTERRUPTED);
        }
        Err(_) if kept => terminal::note(&format!("{}: unfinished, {what}", args.output.display())),
        _ => {}
    }
    result
}

fn pack(args: &PackArgs, kept: &mut bool) -> Result<()> {
    let begin = Instant::now();
    // 1. what is there, and what is to be
    let _lock = folder::Lock::take(&args.output)?;
    let unfinished = if args.force { None } else { Journal::read(&args.output)? };
    folder::check(&args.input, &args.output, args.force, unfinished.is_some())?;
    ensure!(args.layers.is_none() || args.layout == Layout::Bundle, "--layers is for bundles: --layout bundle");
    let checkpoint = Checkpoint::open(&args.input)?;
    let model = Config::open(&args.input)?;
    let description = sluice_model::describe(&model, &Options::default())?;
    let mut rules = rules(args)?;
    let plan = plan::plan(&checkpoint, &model, &description, &mut rules)?;
    let files = layout::files(args.layout, &plan.units, args.shard_bytes)?;
    let config = config::packed(&args.input, &description, &plan, &rules)?;
    let others = folder::other_files(&args.input)?;
    for line in summary::remarks(&plan, &description) {
        terminal::note(&line);
    }
    let isa = Isa::from_env()?;
    let fingerprint = fingerprint(args, &checkpoint, &plan, &files)?;
    let mut journal = match unfinished {
        Some(journal) => {
            let same = journal.fingerprint == fingerprint;
            let whose = "holds an unfinished packing of another kind or input (--force begins anew)";
            ensure!(same, "{}: {whose}", args.output.display());
            journal
        }
        None => Journal { fingerprint, ..Journal::default() },
    };
    let going_on = !journal.done.is_empty();
    let is_due = |file: &layout::OutFile| match (&file.experts, args.layers) {
        (Some((layer, _)), Some((first, last))) => (first..=last).contains(layer),
        _ => true,
    };
    let due: Vec<&layout::OutFile> =
        files.iter().filter(|f| is_due(f) && !journal.done.contains_key(&f.name)).collect();
    if going_on {
        terminal::note(&format!("goes on: {} of {} files are whole", journal.done.len(), files.len()));
    }

    // 2. whether it fits
    let sizes = summary::Sizes {
        weights: due.iter().map(|f| f.data_bytes()).sum::<u64>()
            + journal.done.values().map(|f| f.entry.bytes).sum::<u64>(),
        headers: headers(&files, &due)?,
        others: others.iter().map(|(_, len)| len).sum::<u64>() + config.len() as u64,
        done: journal.done.values().map(|f| f.entry.bytes).sum(),
    };
    let free = free_space(&args.output).with_context(|| args.output.display().to_string())?;
    let free = free.saturating_add(if args.force { folder::freed(&args.output) } else { 0 });
    terminal::note(&sizes.line(free));
    ensure!(sizes.needed() <= free, "{}: not enough space", args.output.display());

    // 3. weights
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
    let threads = args.threads.unwrap_or(cores).clamp(1, 1024);
    let input = write::Input::open(&checkpoint)?;
    let mut calibrator = match &args.calibration {
        Some(text) if !due.is_empty() => {
            let calibration = calibrate::Settings { text, tokens: args.calibration_tokens, threads, isa };
            Some(Calibrator::open(&checkpoint, &model, calibration)?)
        }
        _ => None,
    };
    let mut output = folder::Output::create(&args.output, going_on)?;
    *kept = output.is_kept();
    let input_bytes: u64 = due.iter().flat_map(|f| &f.units).map(|p| plan.units[p.unit].source.bytes()).sum();
    let mut progress = Progress::new("packing", "MB", (input_bytes / 1_000_000) as usize);
    let quantizer = Quantizer { isa, rounding: rounding(args) };
    let mut job = write::Job {
        input: &input,
        units: &plan.units,
        folder: &args.output,
        quantizer,
        threads,
        progress: &progress,
        input_bytes,
        read: 0,
    };
    let calibrates = calibrator.is_some();
    for file in files.iter().filter(|f| is_due(f) || calibrates) {
        if !due.iter().any(|d| d.name == file.name) {
            // A calibration goes through all layers, packed here or before.
            let Some(calibrator) = &mut calibrator else { continue };
            if journal.done.contains_key(&file.name) {
                job.pass(file, calibrator)?;
                continue;
            }
            let last = due.last().is_some_and(|last| position(&files, &last.name) < position(&files, &file.name));
            ensure!(last, "{} is not packed yet, and a calibration takes the layers in order", file.name);
            break;
        }
        output.written(&file.name);
        let finished = job.file(file, calibrator.as_mut())?;
        finished.notes.iter().for_each(|line| terminal::note(line));
        journal.done.insert(file.name.clone(), finished);
        // A model of one file has nothing to go on from.
        if files.len() > 1 {
            journal.write(&args.output)?;
            output.keep();
            *kept = true;
        }
    }
    progress.finish();
    ensure!(!interrupt::pressed(), Interrupted);
    let missing = files.iter().filter(|f| !journal.done.contains_key(&f.name)).count();
    if missing > 0 {
        println!("{missing} of {} files are still to be packed (other --layers)", files.len());
        return Ok(());
    }

    // 4. whether it is what was written
    if args.verify {
        verify(&args.output, &files, &journal)?;
    }

    // 5. other files, and last the file that makes it a model
    match args.layout {
        Layout::Bundle => {
            output.written(bundle::MANIFEST);
            manifest(&journal).write(&args.output)?;
        }
        Layout::Mlx if files.len() > 1 => {
            output.written("model.safetensors.index.json");
            let tensors = files.iter().flat_map(|f| f.tensors.iter().map(|t| (t.name.clone(), f.name.clone())));
            write_index(&args.output, &tensors.collect(), files.iter().map(|f| f.data_bytes()).sum())?;
        }
        Layout::Mlx => {}
    }
    for (path, _) in &others {
        output.copy(path)?;
    }
    ensure!(!interrupt::pressed(), Interrupted);
    output.complete(&config)?;
    *kept = false;

    // 6. what came of it
    let input_bytes = checkpoint.file_sizes().iter().map(|(_, len)| len).sum();
    let mut done = summary::Done::default();
    for finished in journal.done.values() {
        done.bytes += finished.entry.bytes;
        finished.errors.iter().for_each(|(class, error)| done.errors.entry(class.clone()).or_default().add(*error));
    }
    print!("{}", summary::report(&plan, &done, input_bytes, begin.elapsed()));
    if args.verify {
        println!("verified: {} files read back, every byte as it was written", files.len());
    }
    Ok(())
}

fn rounding(args: &PackArgs) -> Rounding {
    match args {
        PackArgs { min_max: true, .. } => Rounding::Range,
        // A calibration starts from what the search finds.
        PackArgs { search: true, .. } | PackArgs { calibration: Some(_), .. } => Rounding::Search,
        _ => Rounding::Mlx,
    }
}

fn position(files: &[layout::OutFile], name: &str) -> Option<usize> {
    files.iter().position(|f| f.name == name)
}

/// All rules: --bits for all, --experts-bits, the recipe's, --set; the last that matches decides.
fn rules(args: &PackArgs) -> Result<Rules> {
    let mut set = Vec::new();
    let Bits(all) = args.bits;
    if all.is_none() {
        set.push("*=none".parse::<Rule>().expect("a rule"));
    }
    set.extend(args.experts_bits.map(Rule::experts));
    if let Some(path) = &args.recipe {
        let text = std::fs::read_to_string(path).with_context(|| path.display().to_string())?;
        set.extend(rules::recipe(&text).map_err(|e| anyhow!("{}: {e}", path.display()))?);
    }
    set.extend(args.set.iter().cloned());
    let default = all.or(args.experts_bits).unwrap_or(4);
    Ok(Rules::new(default, args.group_size, set))
}

/// Names everything that decides what the files hold.
fn fingerprint(
    args: &PackArgs,
    checkpoint: &Checkpoint,
    plan: &plan::Plan,
    files: &[layout::OutFile],
) -> Result<String> {
    let mut hash = Xxh3::new();
    hash.update(format!("{} {:?} {:?} {files:?}", env!("CARGO_PKG_VERSION"), rounding(args), plan.units).as_bytes());
    for (name, len) in checkpoint.file_sizes() {
        let path = checkpoint.folder().join(name);
        let time = std::fs::metadata(&path).and_then(|m| m.modified()).with_context(|| path.display().to_string())?;
        hash.update(format!("{name} {len} {time:?}").as_bytes());
    }
    if let Some(path) = &args.calibration {
        hash.update(&std::fs::read(path).with_context(|| path.display().to_string())?);
        hash.update(&args.calibration_tokens.to_le_bytes());
    }
    Ok(format!("{:016x}", hash.digest()))
}

fn manifest(journal: &Journal) -> bundle::Manifest {
    bundle::Manifest {
        version: 1,
        files: journal.done.iter().map(|(name, f)| (name.clone(), f.entry.clone())).collect(),
        experts: journal.done.values().filter_map(|f| f.experts.clone()).collect(),
    }
}

/// Bytes of disk that are taken beside tensors and copied files: headers of files that are due, and for all files what says where tensors are (the
/// manifest, or the index), the journal meanwhile, and what a file system wastes on the last block of each file.
fn headers(files: &[layout::OutFile], due: &[&layout::OutFile]) -> Result<u64> {
    let mut bytes = 0;
    for file in due {
        let len = Writer::file_len(&file.tensors, &write::metadata(), file.align)?;
        bytes += len - file.data_bytes();
    }
    for file in files {
        bytes += BLOCK;
        if files.len() == 1 {
            continue;
        }
        bytes += match &file.experts {
            // The manifest, and two journals, since one takes the place of the other: the same of each layer, indented further, and errors and notes.
            Some((_, experts)) => 3 * (2048 + 2 * serde_json::to_vec_pretty(experts)?.len() as u64),
            // A line of the index for each tensor.
            None => 2048 + file.tensors.iter().map(|t| (t.name.len() + file.name.len() + 16) as u64).sum::<u64>(),
        };
    }
    Ok(bytes)
}

/// Reads every file back: its bytes, and whether its tensors are those of the plan.
fn verify(folder: &Path, files: &[layout::OutFile], journal: &Journal) -> Result<()> {
    for file in files {
        let path = folder.join(&file.name);
        let (expected, found) = (&journal.done[&file.name].entry.xxh3, xxh3_of(&path, &mut |_| {})?);
        ensure!(found == *expected, "{}: damaged: XXH3 {found} instead of {expected}", path.display());
        let len = std::fs::metadata(&path)?.len();
        let header = Header::read(&std::fs::File::open(&path)?, len, &path)?;
        let same = |(t, e): (&sluice_store::TensorPlan, &sluice_store::safetensors::Entry)| {
            t.name == e.name && t.dtype == e.dtype && t.shape == e.shape
        };
        // Empty tensors may change places among themselves.
        let all = header.tensors.len() == file.tensors.len() && file.tensors.iter().zip(&header.tensors).all(same);
        ensure!(all, "{}: its tensors are not those that were planned", path.display());
    }
    Ok(())
}
