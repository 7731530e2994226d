//! `sluice bench disk`: bytes per second past the page cache, by request size, requests in flight, order and alignment. These are upper bounds for streaming experts.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::{Args, ValueEnum};
use serde_json::json;

use super::figures::Figures;
use crate::disk::{Case, Order, PAGE, measure};
use crate::units;

#[derive(Args, Debug)]
pub struct DiskArgs {
    /// Files to read from, or folders of safetensors
    #[arg(required = true)]
    paths: Vec<PathBuf>,
    /// Bytes per request, one number or several; rounded up to whole pages
    #[arg(long, value_delimiter = ',', default_value = "4194304", value_name = "BYTES,..")]
    request: Vec<u64>,
    /// Requests in flight at once, one number or several
    #[arg(long, value_delimiter = ',', default_value = "8", value_name = "N,..")]
    depth: Vec<usize>,
    /// Order of requests
    #[arg(long, value_enum, default_value = "random")]
    order: Order,
    /// In random order, requests start at multiples of this many bytes; one number or several
    #[arg(long, value_delimiter = ',', default_value = "4096", value_name = "BYTES,..")]
    align: Vec<u64>,
    /// Time of each measurement
    #[arg(long, default_value_t = 1.5, value_name = "SECONDS")]
    seconds: f64,
    /// Number of measurements; the median counts
    #[arg(long, default_value_t = 3, value_name = "N")]
    rounds: usize,
    /// Print one line of JSON for each combination
    #[arg(long)]
    json: bool,
}

/// Runs the benchmark and prints a row for each combination.
pub fn run(args: &DiskArgs) -> Result<()> {
    ensure!(args.rounds > 0, "--rounds must be at least 1");
    ensure!(args.seconds.is_finite() && args.seconds > 0.0, "--seconds must be above 0");
    ensure!(args.depth.iter().all(|d| (1..=1024).contains(d)), "--depth must be 1 to 1024");
    ensure!(args.request.iter().all(|r| (1..=1 << 30).contains(r)), "--request must be 1 byte to 1 GiB");
    let aligned = args.align.iter().all(|a| *a > 0 && a.is_multiple_of(PAGE));
    ensure!(aligned, "--align must be whole pages of {PAGE} bytes");
    let files = files(&args.paths)?;
    let mut cases = Vec::new();
    for &request in &args.request {
        let request = request.next_multiple_of(PAGE);
        for &depth in &args.depth {
            cases.extend(args.align.iter().map(|&align| Case { request, depth, align, order: args.order }));
        }
    }
    let span = Duration::from_secs_f64(args.seconds);
    let mut figures = vec![Figures::default(); cases.len()];
    for round in 0..args.rounds {
        for (i, case) in cases.iter().enumerate() {
            // Other places each time, so that caches below the kernel do not help.
            figures[i].push(measure(&files, *case, span, (round * cases.len() + i) as u64)?);
        }
    }
    if !args.json {
        println!("{:>12}{:>8}{:>12}{:>12}{:>24}", "request", "depth", "order", "align", "GB/s");
    }
    for (case, found) in cases.iter().zip(&figures) {
        let order = args.order.to_possible_value().expect("none is hidden").get_name().to_owned();
        if args.json {
            println!(
                "{}",
                json!({
                    "bench": "disk", "request_bytes": case.request, "depth": case.depth, "order": order, "align": case.align,
                    "bytes_per_second": found.median(), "all": found.to_json()["all"],
                })
            );
        } else {
            let (request, align) = (units::bytes(case.request), units::bytes(case.align));
            let speed = found.map(|x| x / 1e9).to_text(2);
            println!("{request:>12}{:>8}{order:>12}{align:>12}{speed:>24}", case.depth);
        }
    }
    Ok(())
}

/// Path and length in bytes of each file to read.
fn files(paths: &[PathBuf]) -> Result<Vec<(PathBuf, u64)>> {
    let mut files = Vec::new();
    for path in paths {
        let look = || path.display().to_string();
        if path.is_dir() {
            for entry in std::fs::read_dir(path).with_context(look)? {
                let file = entry.with_context(look)?.path();
                if file.extension().is_some_and(|e| e == "safetensors") {
                    files.push(file);
                }
            }
        } else {
            files.push(path.clone());
        }
    }
    files.sort();
    let len = |file: PathBuf| -> Result<(PathBuf, u64)> {
        let len = std::fs::metadata(&file).with_context(|| file.display().to_string())?.len();
        Ok((file, len))
    };
    files.into_iter().map(len).collect()
}
