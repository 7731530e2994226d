//! A packing from beginning to end.

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use sluice_kernels::Isa;
use sluice_kernels::quantize::Rounding;
use sluice_model::{Options, source};
use sluice_store::safetensors::{Entry, Header};
use sluice_store::{Checkpoint, TensorPlan, bundle, free_space, open_regular, read_small, write_index, xxh3_of};
use xxhash_rust::xxh3::Xxh3;

use crate::calibrate::{self, Calibration, Calibrator, MAX_TEXT};
use crate::config;
use crate::conversion::{Conversion, OPTIONS, Treatment};
use crate::folder::{self, Lock, Output};
use crate::input::Input;
use crate::journal::{self, Journal};
use crate::layout::{self, Layout, OutFile};
use crate::planner::convert;
use crate::quantize::{Quantizer, SquaredError};
use crate::rules::Rules;
use crate::space::{self, Space};
use crate::watch::{Event, Stopped, Watch};
use crate::write::FileWriter;

/// Where the weights' index of a checkpoint in shards is.
const INDEX: &str = "model.safetensors.index.json";

/// How to pack.
#[derive(Clone, Debug)]
pub struct PackOptions {
    /// The width of each module.
    pub rules: Rules,
    /// How the output is laid out.
    pub layout: Layout,
    /// The first and the last layer whose experts are packed now, where a bundle is packed in several runs.
    pub layers: Option<(usize, usize)>,
    /// How scale and bias of a group are found. A calibration begins with it.
    pub rounding: Rounding,
    /// Fits routed experts to their inputs, if given.
    pub calibration: Option<Calibration>,
    /// Reads all files back at the end and compares them with what was written.
    pub verify: bool,
    /// Writes over what is in the folder.
    pub force: bool,
    /// Threads that quantise.
    pub threads: usize,
    /// Bytes of tensors in one file at most; a layer's experts stay together.
    pub shard_bytes: u64,
}

/// The result of a packing.
#[derive(Debug)]
pub enum Outcome {
    /// A model.
    Whole(Report),
    /// Other layers are still to be packed: `missing` of `files` files.
    Partly { missing: usize, files: usize },
}

/// Figures of a packed model.
#[derive(Debug)]
pub struct Report {
    /// Weights of the model.
    pub parameters: u64,
    /// Bytes of the input's files of weights.
    pub input_bytes: u64,
    /// Bytes of the output's files of weights.
    pub output_bytes: u64,
    /// What was quantised, by class of module.
    pub classes: BTreeMap<String, ClassReport>,
    /// Files that were read back.
    pub verified: Option<usize>,
}

/// Totals over the quantised modules of a class.
#[derive(Clone, Copy, Debug, Default)]
pub struct ClassReport {
    /// Their quantisation error.
    pub error: SquaredError,
    /// Bytes, with scales and biases.
    pub bytes: u64,
}

/// Why there is no packed model. `kept`: complete files of weights stay in the folder, and the same packing can continue from there.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// [`Watch::is_stopped`] said so.
    #[error("interrupted")]
    Interrupted { kept: bool },
    #[error("{cause:#}")]
    Failed { kept: bool, cause: anyhow::Error },
}

/// Packs the model `input` into the folder `output`, which is locked meanwhile and looks like a model only when it is complete.
///
/// # Errors
/// [`Error::Interrupted`] where `watch` ended it. All else is [`Error::Failed`]: another packing holds the folder, or something is in it (and no
/// [`PackOptions::force`]); a checkpoint that cannot be packed; a rule that no module matches; a disk that is full.
pub fn pack(input: &Path, output: &Path, options: &PackOptions, watch: &dyn Watch) -> Result<Outcome, Error> {
    let mut kept = false;
    let result = whole(input, output, options, watch, &mut kept);
    result.map_err(|cause| match cause.is::<Stopped>() {
        true => Error::Interrupted { kept },
        false => Error::Failed { kept, cause },
    })
}

fn whole(input: &Path, output: &Path, options: &PackOptions, watch: &dyn Watch, kept: &mut bool) -> Result<Outcome> {
    // 1. the input, and the plan
    let lock = Lock::take(output)?;
    lock.unlocked.iter().for_each(|line| watch.note(line));
    let unfinished = if options.force { None } else { Journal::read(output)? };
    folder::check(input, output, options.force, unfinished.is_some())?;
    let (source, tensors) = source::open_with_tensors(input)?;
    let checkpoint = tensors.checkpoint();
    // Calibration runs the model's layers alone, so an MTP head cannot be calibrated.
    let of_model = Options { mtp: options.calibration.is_none(), ..OPTIONS };
    let description = sluice_model::describe_stored(&tensors, &of_model)?;
    description.notes.iter().for_each(|line| watch.note(line));
    let mut rules = options.rules.clone();
    let conversion = convert(&tensors, &description, &mut rules)?;
    let files = layout::files(options.layout, &conversion.units, options.shard_bytes)?;
    let config = config::packed(tensors.config(), &description, &conversion, &rules)?;
    let others = folder::other_files(&*source)?;
    watch.event(Event::Planned(&conversion));
    let isa = Isa::from_env()?;
    let fingerprint = fingerprint(options, checkpoint, &conversion, &files)?;
    let mut journal = match unfinished {
        Some(journal) => {
            let same = journal.fingerprint == fingerprint;
            let whose = "holds an unfinished packing of another kind or input (--force begins anew)";
            ensure!(same, "{}: {whose}", output.display());
            journal
        }
        None => Journal { fingerprint, ..Journal::default() },
    };
    let going_on = !journal.done.is_empty();
    let is_due = |file: &OutFile| match (&file.experts, options.layers) {
        (Some((layer, _)), Some((first, last))) => (first..=last).contains(layer),
        _ => true,
    };
    let due: Vec<&OutFile> = files.iter().filter(|f| is_due(f) && !journal.done.contains_key(&f.name)).collect();
    if going_on {
        watch.event(Event::GoesOn { whole: journal.done.len(), files: files.len() });
    }

    // 2. whether it fits
    let done = journal.done.values().map(|f| f.entry.bytes).sum();
    let needed = Space {
        weights: due.iter().map(|f| f.data_bytes()).sum::<u64>() + done,
        headers: space::headers(&files, &due)?,
        others: others.iter().map(|(_, len)| len).sum::<u64>() + config.len() as u64,
        done,
    };
    let free = free_space(output).with_context(|| output.display().to_string())?;
    let free = free.saturating_add(if options.force { folder::freed(output) } else { 0 });
    watch.event(Event::Space { needed: &needed, free });
    ensure!(needed.needed() <= free, "{}: not enough space", output.display());

    // 3. weights
    let threads = options.threads;
    let rows = Input::open(checkpoint)?;
    let mut calibrator = match &options.calibration {
        Some(calibration) if !due.is_empty() => {
            let settings = calibrate::Settings { calibration, threads, isa, watch };
            Some(Calibrator::open(&*source, &tensors, settings)?)
        }
        _ => None,
    };
    let mut out = Output::create(output, going_on)?;
    *kept = out.is_kept();
    if files.len() > 1 && !going_on {
        // From here on the folder is recognisably ours, whatever ends the packing.
        out.written(journal::NAME);
        journal.write(output)?;
    }
    let input_bytes: u64 = due.iter().flat_map(|f| &f.units).map(|p| conversion.units[p.unit].source.bytes()).sum();
    watch.event(Event::Progress { done: 0, all: input_bytes });
    let quantizer = Quantizer { isa, rounding: options.rounding };
    let units = &conversion.units;
    let mut writer =
        FileWriter { input: &rows, units, folder: output, quantizer, threads, watch, input_bytes, read: 0 };
    let calibrates = calibrator.is_some();
    for file in files.iter().filter(|f| is_due(f) || calibrates) {
        if !due.iter().any(|d| d.name == file.name) {
            // A calibration goes through all layers, also those packed before.
            let Some(calibrator) = &mut calibrator else { continue };
            if journal.done.contains_key(&file.name) {
                writer.pass(file, calibrator)?;
                continue;
            }
            let position = |name: &str| files.iter().position(|f| f.name == name);
            let last = due.last().is_some_and(|last| position(&last.name) < position(&file.name));
            ensure!(last, "{} is not packed yet, and a calibration takes the layers in order", file.name);
            break;
        }
        out.written(&file.name);
        let finished = writer.file(file, calibrator.as_mut())?;
        finished.notes.iter().for_each(|line| watch.note(line));
        journal.done.insert(file.name.clone(), finished);
        // A model of one file has nothing to continue from.
        if files.len() > 1 {
            journal.write(output)?;
            out.keep();
            *kept = true;
        }
    }
    ensure!(!watch.is_stopped(), Stopped);
    let missing = files.iter().filter(|f| !journal.done.contains_key(&f.name)).count();
    if missing > 0 {
        return Ok(Outcome::Partly { missing, files: files.len() });
    }

    // 4. verification
    if options.verify {
        verify(output, &files, &journal)?;
    }

    // 5. other files, and last the file that makes it a model
    match options.layout {
        Layout::Bundle => {
            out.written(bundle::MANIFEST);
            manifest(&journal).write(output)?;
        }
        Layout::Mlx if files.len() > 1 => {
            out.written(INDEX);
            let tensors = files.iter().flat_map(|f| f.tensors.iter().map(|t| (t.name.clone(), f.name.clone())));
            write_index(output, &tensors.collect(), files.iter().map(|f| f.data_bytes()).sum())?;
        }
        Layout::Mlx => {}
    }
    for (name, _) in &others {
        out.copy(&*source, name)?;
    }
    ensure!(!watch.is_stopped(), Stopped);
    out.complete(&config)?;
    *kept = false;

    // 6. the report
    let input_bytes = checkpoint.file_sizes().iter().map(|(_, len)| len).sum();
    let mut report = Report {
        parameters: conversion.parameters,
        input_bytes,
        output_bytes: journal.done.values().map(|f| f.entry.bytes).sum(),
        classes: BTreeMap::new(),
        verified: options.verify.then_some(files.len()),
    };
    for (class, error) in journal.done.values().flat_map(|f| &f.errors) {
        report.classes.entry(class.clone()).or_default().error.add(*error);
    }
    for unit in units.iter().filter(|u| matches!(u.treatment, Treatment::Quantize { .. })) {
        report.classes.entry(unit.weight.class.name().to_owned()).or_default().bytes += unit.size();
    }
    Ok(Outcome::Whole(report))
}

/// A hash of everything that decides the files' bytes.
fn fingerprint(
    options: &PackOptions,
    checkpoint: &Checkpoint,
    conversion: &Conversion,
    files: &[OutFile],
) -> Result<String> {
    let mut hash = Xxh3::new();
    let version = env!("CARGO_PKG_VERSION");
    hash.update(format!("{version} {:?} {:?} {files:?}", options.rounding, conversion.units).as_bytes());
    for (name, len) in checkpoint.file_sizes() {
        let path = checkpoint.folder().join(name);
        let found = std::fs::metadata(&path).with_context(|| path.display().to_string())?;
        let times = [(found.mtime(), found.mtime_nsec()), (found.ctime(), found.ctime_nsec())];
        // Any change updates ctime, which cannot be set back.
        hash.update(format!("{name} {len} {times:?}").as_bytes());
    }
    if let Some(calibration) = &options.calibration {
        hash.update(&read_small(&calibration.text, MAX_TEXT)?);
        hash.update(&calibration.tokens.to_le_bytes());
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

/// Reads every file back: its bytes, and whether its tensors are those that were planned.
fn verify(folder: &Path, files: &[OutFile], journal: &Journal) -> Result<()> {
    for file in files {
        let path = folder.join(&file.name);
        let (expected, found) = (&journal.done[&file.name].entry.xxh3, xxh3_of(&path, &mut |_| {})?);
        ensure!(found == *expected, "{}: damaged: XXH3 {found} instead of {expected}", path.display());
        let len = std::fs::metadata(&path)?.len();
        let header = Header::read(&open_regular(&path)?, len, &path)?;
        let same = |(t, e): (&TensorPlan, &Entry)| t.name == e.name && t.dtype == e.dtype && t.shape == e.shape;
        // Only the order of empty tensors may differ.
        let all = header.tensors.len() == file.tensors.len() && file.tensors.iter().zip(&header.tensors).all(same);
        ensure!(all, "{}: its tensors are not those that were planned", path.display());
    }
    Ok(())
}
