//! `sluice inspect PACKED --quality ORIGINAL`: the error that packing adds to weights, by layers and projection. Its effect on answers is what `eval ppl` measures.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::path::Path;

use anyhow::Result;
use serde_json::json;
use sluice_backend::Isa;
use sluice_pack::{SquaredError, compare};

use crate::progress::Progress;
use crate::terminal::{shown, shown_json};

/// Ranges of layers in the table.
const RANGES: usize = 4;

pub fn run(packed: &Path, original: &Path, as_json: bool) -> Result<()> {
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get());
    let mut progress = Progress::new("comparing", "MB", 0);
    let megabytes = |bytes: u64| (bytes / 1_000_000) as usize;
    let show = |done, all| progress.set(megabytes(done), megabytes(all));
    let found = compare(packed, original, threads, Isa::from_env()?, show)?;
    progress.finish();
    let out = &mut io::stdout().lock();
    if as_json {
        let rows = found.iter().map(|(compared, e)| {
            json!({"layer": compared.layer, "module": compared.module, "weights": e.count, "rmse": e.rmse(), "of_rms": e.relative()})
        });
        writeln!(out, "{}", shown_json(&format!("{:#}", json!({"quality": rows.collect::<Vec<_>>()}))))?;
        return Ok(out.flush()?);
    }
    // Modules by ranges of layers; those outside of layers, and all layers together, last.
    let layers = found.keys().filter_map(|p| p.layer).max().map_or(0, |l| l + 1);
    let step = layers.div_ceil(RANGES).max(1);
    let ranges: Vec<_> = (0..layers).step_by(step).map(|l| l..(l + step).min(layers)).collect();
    let mut table = BTreeMap::<&str, (Vec<SquaredError>, SquaredError)>::new();
    for (compared, error) in &found {
        let (by_range, all) = table
            .entry(compared.module)
            .or_insert_with(|| (vec![SquaredError::default(); ranges.len()], SquaredError::default()));
        if let Some(layer) = compared.layer {
            by_range[layer / step].add(*error);
        }
        all.add(*error);
    }
    let width = table.keys().map(|m| shown(m).len()).max().unwrap_or(0).max("RMSE of layers".len());
    write!(out, "{:<width$}", "RMSE of layers")?;
    for r in &ranges {
        write!(out, "{:>11}", format!("{}-{}", r.start, r.end - 1))?;
    }
    writeln!(out, "{:>11}{:>9}", "all", "of RMS")?;
    for (module, (by_range, all)) in &table {
        write!(out, "{:<width$}", shown(module))?;
        for e in by_range {
            write!(out, "{:>11}", if e.count > 0 { format!("{:.6}", e.rmse()) } else { "-".into() })?;
        }
        writeln!(out, "{:>11.6}{:>8.2}%", all.rmse(), 100.0 * all.relative())?;
    }
    Ok(out.flush()?)
}
