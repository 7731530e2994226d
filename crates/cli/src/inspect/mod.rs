//! `sluice inspect MODEL`: what a checkpoint is, how large it is, and whether it fits this machine. Reads config and headers only, so any size takes a moment.

pub mod breakdown;
mod fit;
mod quality;

use std::io::{self, Write};
use std::path::PathBuf;

use anyhow::{Result, bail};
use clap::Args;
use serde_json::{Value, json};
use sluice_model::{Description, ModelTensors, source};
use sluice_store::Checkpoint;

use crate::engine_args::model_or_demo;
use crate::progress::Progress;
use crate::terminal::{note, shown, shown_json};
use crate::{hub, load, units};
use breakdown::{Anatomy, Component};
use fit::Fit;

#[derive(Args)]
pub struct InspectArgs {
    /// The model's folder (default: the demo model)
    #[arg(value_name = "MODEL")]
    folder: Option<PathBuf>,
    /// The model's folder
    #[arg(short, long, value_name = "MODEL", conflicts_with = "folder")]
    model: Option<PathBuf>,
    /// List every tensor: name, type, shape, bytes, file and offset
    #[arg(long)]
    tensors: bool,
    /// Read every file of a bundle and compare it with the sums in its manifest
    #[arg(long)]
    verify: bool,
    /// Compare with the model that this one was packed from, weight by weight: errors by layers and projection
    #[arg(long, value_name = "ORIGINAL", conflicts_with = "tensors")]
    quality: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub fn run(args: InspectArgs) -> Result<()> {
    let folder = model_or_demo(args.folder.or(args.model).as_deref())?;
    let source = source::open(&folder).map_err(|e| load::naming(&folder, e))?;
    if let Some(original) = &args.quality {
        return quality::run(&folder, &hub::resolved(original)?, args.json);
    }
    let tensors = source.tensors()?;
    let checkpoint = tensors.checkpoint();
    let bundle = checkpoint.manifest();
    if args.verify {
        let Some(manifest) = bundle else {
            bail!("{}: --verify is for bundles, which have the sums of their files in bundle.json", folder.display())
        };
        let all: u64 = manifest.files.values().map(|f| f.bytes).sum();
        let mut progress = Progress::new("verifying", "MB", (all / 1_000_000) as usize);
        let mut read = 0;
        manifest.verify(&folder, |bytes| {
            read += bytes;
            progress.set((read / 1_000_000) as usize, (all / 1_000_000) as usize);
        })?;
        progress.finish();
    }
    let anatomy = Anatomy::read(&tensors).map_err(|e| load::naming(&folder, e))?;
    if anatomy.unsupported.is_none() {
        load::check(&*source, &tensors)?;
    }
    anatomy.model.iter().flat_map(|m| &m.notes).for_each(|line| note(line));
    let fit = Fit::of_this_machine(&anatomy);
    let tokenizer = source.tokenizer_name();
    let out = &mut io::stdout().lock();
    if args.json {
        let mut object = to_json(&folder.display().to_string(), checkpoint, &anatomy, fit.as_ref());
        object["tokenizer"] = tokenizer.into();
        if args.tensors {
            object["tensors"] = checkpoint.tensors().iter().map(|t| tensor_json(&tensors, t)).collect();
        }
        writeln!(out, "{}", shown_json(&format!("{object:#}")))?;
    } else {
        write!(out, "{}", to_text(&folder.display().to_string(), checkpoint, &anatomy, fit.as_ref(), tokenizer))?;
        if args.tensors {
            list(out, &tensors)?;
        }
    }
    if let (true, false, Some(manifest)) = (args.verify, args.json, bundle) {
        writeln!(out, "verified    {} files, every byte as it was written", manifest.files.len())?;
    }
    Ok(out.flush()?)
}

fn tensor_json(tensors: &ModelTensors, t: &sluice_store::Tensor) -> Value {
    let (checkpoint, dtype) = (tensors.checkpoint(), tensors.layout().stored(t).0);
    let (file, offset) = checkpoint.place(&t.name).unwrap_or(("", 0));
    json!({
        "name": &*t.name, "dtype": dtype, "shape": t.shape, "bytes": t.bytes.len(), "file": file, "offset": offset,
    })
}

fn list(out: &mut impl Write, tensors: &ModelTensors) -> io::Result<()> {
    let checkpoint = tensors.checkpoint();
    let width = checkpoint.names().map(|name| shown(name).len()).max().unwrap_or(0);
    writeln!(out)?;
    for t in checkpoint.tensors() {
        let (file, offset) = checkpoint.place(&t.name).unwrap_or(("", 0));
        let shape = format!("{:?}", t.shape);
        let size = units::bytes(t.bytes.len() as u64);
        let (name, file) = (shown(&t.name), shown(file));
        writeln!(out, "{name:<width$}  {:<4}  {shape:<20}  {size:>9}  {file} @{offset}", tensors.layout().stored(t).0)?;
    }
    Ok(())
}

fn to_json(model: &str, checkpoint: &Checkpoint, a: &Anatomy, fit: Option<&Fit>) -> Value {
    let files = checkpoint.file_sizes();
    let m = a.model.as_ref();
    json!({
        "model": model,
        "model_type": a.model_type,
        "supported": a.unsupported.is_none(),
        "files": files.len(),
        "file_bytes": files.iter().map(|(_, n)| n).sum::<u64>(),
        "parameters": {"all": a.parameters(), "experts": a.part(Component::Experts).parameters},
        "layers": m.map(|m| json!({
            "all": m.layers.len(),
            "attention": m.attention_layers().count(),
            "recurrent": m.recurrent_layers().count(),
            "experts": a.expert_layers(),
        })),
        "hidden": m.map(|m| m.hidden),
        "vocabulary": m.map(|m| m.vocabulary),
        "max_context": m.map(|m| m.max_context),
        "experts": m.and_then(Description::experts).map(|(count, k)| json!({"count": count, "per_token": k})),
        "bytes": {
            "resident": a.resident_bytes(),
            "embedding": a.part(Component::Embedding).bytes,
            "experts": a.part(Component::Experts).bytes,
            "tables": a.part(Component::Tables).bytes,
            "per_expert": a.per_expert().map(|(low, high)| json!({"low": low, "high": high})),
            "left_out": a.part(Component::LeftOut).bytes,
        },
        "left_out": a.left_out,
        "dtypes": a.dtypes.iter().map(|(d, n)| ((*d).to_owned(), Value::from(*n))).collect::<serde_json::Map<_, _>>(),
        "quantization": quantization_json(a),
        "bytes_per_token": {
            "weights": a.read_per_token(),
            "kv": {"bf16": a.kv_per_token(2), "f32": a.kv_per_token(4)},
            "state": a.state_bytes(),
        },
        "memory": fit.map(|fit| json!({
            "available": fit.available,
            "cgroup_limit": fit.cgroup.map(|l| l.limit),
            "room": fit.room,
            "full_context": fit.full_context,
            "fits": fit.verdict.name(),
            "context_that_fits": fit.context,
        })),
    })
}

fn to_text(model: &str, checkpoint: &Checkpoint, a: &Anatomy, fit: Option<&Fit>, tokenizer: Option<String>) -> String {
    let files = checkpoint.file_sizes();
    let all: u64 = files.iter().map(|(_, n)| n).sum();
    let mut lines = vec![("model", model.to_owned())];
    lines.push(match &a.unsupported {
        None => ("type", a.model_type.clone()),
        Some(why) => ("type", format!("{}: NOT SUPPORTED ({why})", a.model_type)),
    });
    lines.push(("files", format!("{} of weights, {}", files.len(), units::bytes(all))));
    let experts = a.part(Component::Experts);
    let of_experts = if experts.parameters > 0 {
        format!(", of them {} in routed experts", units::count(experts.parameters))
    } else {
        String::new()
    };
    lines.push(("parameters", format!("{}{of_experts}", units::count(a.parameters()))));
    if let Some(m) = &a.model {
        lines.push(("layers", layers(m)));
        lines.push(("width", format!("hidden {}, vocabulary {}", m.hidden, m.vocabulary)));
        lines.push(("context", format!("{} tokens", m.max_context)));
        if let Some((count, k)) = m.experts() {
            lines.push(("experts", format!("{count} per layer in {} layers, {k} per token", a.expert_layers())));
        }
    }
    let dtypes: Vec<String> = a.dtypes.iter().map(|(d, n)| format!("{d} {}", units::bytes(*n))).collect();
    lines.push(("types", dtypes.join(", ")));
    lines.push(("quantised", quantised(a)));
    if a.model.is_some() {
        lines.push(("resident", units::bytes(a.resident_bytes())));
    }
    let tables = a.part(Component::Tables).bytes;
    if tables > 0 {
        lines.push(("in tables", format!("{}, of which a token reads a row", units::bytes(tables))));
    }
    if let Some((low, high)) = a.per_expert() {
        let each =
            if low == high { units::bytes(low) } else { format!("{} to {}", units::bytes(low), units::bytes(high)) };
        lines.push(("in experts", format!("{}, {each} each", units::bytes(experts.bytes))));
    }
    if !a.left_out.is_empty() {
        let bytes = units::bytes(a.part(Component::LeftOut).bytes);
        lines.push(("left out", format!("{bytes}: {}", a.left_out.join(", "))));
    }
    if let Some(read) = a.read_per_token() {
        lines.push(("a token", format!("reads {} of weights", units::bytes(read))));
    }
    if let (Some(bf16), Some(f32)) = (a.kv_per_token(2), a.kv_per_token(4)) {
        lines.push(("KV", format!("{} per token in bf16, {} in f32", units::bytes(bf16), units::bytes(f32))));
    }
    if let Some(state) = a.state_bytes().filter(|n| *n > 0) {
        lines.push(("state", format!("{} per conversation", units::bytes(state))));
    }
    lines.extend(tokenizer.map(|name| ("tokenizer", name)));
    lines.extend(fit.map(|fit| ("memory", fit.to_text())));
    // Names and types come from the checkpoint: control characters are escaped.
    lines.iter().map(|(name, value)| format!("{name:<12}{}\n", shown(value))).collect()
}

fn layers(m: &Description) -> String {
    match (m.attention_layers().count(), m.recurrent_layers().count()) {
        (_, 0) => format!("{}, all attention", m.layers.len()),
        (attention, recurrent) => format!("{}: {attention} attention, {recurrent} recurrent", m.layers.len()),
    }
}

fn quantization_json(a: &Anatomy) -> Option<Value> {
    let mut object = match (a.quantization, &a.form) {
        (Some((bits, group)), _) => json!({"bits": bits, "group_size": group, "exceptions": a.exceptions}),
        (None, Some(_)) => json!({}),
        (None, None) => return None,
    };
    if let Some(form) = &a.form {
        object["form"] = json!(form);
    }
    Some(object)
}

fn quantised(a: &Anatomy) -> String {
    let is_of_blocks = |kind: &&str| ["Q", "IQ", "MXFP", "NVFP"].iter().any(|family| kind.starts_with(family));
    if let Some(form) = &a.form {
        return match a.exceptions {
            0 => form.clone(),
            n => format!("{form}, {n} modules otherwise"),
        };
    }
    match (a.quantization, a.exceptions) {
        (None, _) if a.dtypes.keys().any(is_of_blocks) => "in blocks of these types".to_owned(),
        (None, _) => "no".to_owned(),
        (Some((bits, group)), 0) => format!("{bits} bits in groups of {group} (affine)"),
        (Some((bits, group)), n) => format!("{bits} bits in groups of {group} (affine), {n} modules otherwise"),
    }
}
