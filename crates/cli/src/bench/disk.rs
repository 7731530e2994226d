//! `sluice bench disk`: bytes per second past the page cache, by size of a request, requests under way, order and alignment. What streaming experts can be held against.

use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::{Args, ValueEnum};
use serde_json::json;
use sluice_store::load::{Chunk, LoadOptions, Staging};

use super::figures::Figures;
use crate::units;

/// What direct reads want of offsets and lengths.
const PAGE: u64 = 4096;

#[derive(Args, Debug)]
pub struct DiskArgs {
    /// Files to read from, or folders of safetensors
    #[arg(required = true)]
    paths: Vec<PathBuf>,
    /// Bytes that one request reads, one number or several; rounded up to whole pages
    #[arg(long, value_delimiter = ',', default_value = "4194304", value_name = "BYTES,..")]
    request: Vec<u64>,
    /// Requests under way at once, one number or several
    #[arg(long, value_delimiter = ',', default_value = "8", value_name = "N,..")]
    depth: Vec<usize>,
    /// Where one request begins after another
    #[arg(long, value_enum, default_value = "random")]
    order: Order,
    /// Requests in random order begin at multiples of so many bytes, one number or several
    #[arg(long, value_delimiter = ',', default_value = "4096", value_name = "BYTES,..")]
    align: Vec<u64>,
    /// Time of each measurement
    #[arg(long, default_value_t = 1.5, value_name = "SECONDS")]
    seconds: f64,
    /// Measurements, of which the median counts
    #[arg(long, default_value_t = 3, value_name = "N")]
    rounds: usize,
    /// One line of JSON for each combination
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Order {
    Random,
    Sequential,
}

#[derive(Clone, Copy, Debug)]
struct Case {
    request: u64,
    depth: usize,
    align: u64,
}

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
            cases.extend(args.align.iter().map(|&align| Case { request, depth, align }));
        }
    }
    let mut figures = vec![Figures::default(); cases.len()];
    for round in 0..args.rounds {
        for (i, case) in cases.iter().enumerate() {
            // Other places each time: what a layer below has kept should not be met again.
            figures[i].push(measure(args, &files, *case, (round * cases.len() + i) as u64)?);
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

/// (Path, bytes) of each file to read.
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

/// At most `wanted` requests for parts of files of these lengths; another `round` asks for other parts.
fn requests(lens: &[u64], case: Case, order: Order, wanted: u64, round: u64) -> Vec<Chunk> {
    let places: Vec<u64> = lens.iter().map(|len| len / case.request).collect();
    let all: u64 = places.iter().sum();
    // A place by its number among all.
    let place = |number: u64| {
        let (mut file, mut left) = (0, number);
        while left >= places[file] {
            left -= places[file];
            file += 1;
        }
        (file, left * case.request)
    };
    let one = |i: u64| {
        let (file, offset) = match order {
            Order::Sequential => place((round * wanted + i) % all),
            Order::Random => {
                // A file by its length, and anywhere in it.
                let r = mix((round << 40) + i);
                let (file, _) = place(r % all);
                (file, mix(r) % ((lens[file] - case.request) / case.align + 1) * case.align)
            }
        };
        Chunk { file, offset, len: case.request as usize }
    };
    (0..wanted.min(all)).map(one).collect()
}

/// Bytes per second of one case.
fn measure(args: &DiskArgs, files: &[(PathBuf, u64)], case: Case, round: u64) -> Result<f64> {
    // 1. more requests than the time will be enough for
    let lens: Vec<u64> = files.iter().map(|(_, len)| *len).collect();
    let all: u64 = lens.iter().map(|len| len / case.request).sum();
    ensure!(all >= 2 * case.depth as u64, "the files are too small for requests of {} bytes", case.request);
    let fastest = (args.seconds * 32e9) as u64 / case.request;
    let wanted = fastest.min((args.seconds * 2e6) as u64) + 1;
    let chunks = requests(&lens, case, args.order, wanted, round);

    // 2. the first few alone: memory that was never touched, and buffers to be made known to the kernel, take time that is not the disk's
    let begun = Instant::now();
    read(files, chunks[..case.depth.min(chunks.len())].to_vec(), case, begun + Duration::from_secs(60))?;
    let preparing = begun.elapsed();

    // 3. as many as the time is enough for, from when as many as are under way at once have come
    let times = read(files, chunks, case, Instant::now() + preparing + Duration::from_secs_f64(args.seconds))?;
    let steady = &times[case.depth.min(times.len() / 2)..];
    ensure!(steady.len() > 1, "no two requests in {} seconds", args.seconds);
    let time = steady[steady.len() - 1] - steady[0];
    Ok((steady.len() - 1) as f64 * case.request as f64 / time.as_secs_f64())
}

/// Reads `chunks` until they or the time come to an end; when each had come, in order.
fn read(files: &[(PathBuf, u64)], chunks: Vec<Chunk>, case: Case, until: Instant) -> Result<Vec<Instant>> {
    let times = Mutex::new(Vec::with_capacity(chunks.len()));
    let note = |_: &Chunk, _: &[u8]| times.lock().unwrap_or_else(|e| e.into_inner()).push(Instant::now());
    let staging = Staging::new(chunks, case.depth, case.request as usize, note).context("no memory for the reads")?;
    let paths: Vec<&Path> = files.iter().map(|(path, _)| path.as_path()).collect();
    let options = LoadOptions { depth: case.depth, threads: case.depth, ..LoadOptions::default() };
    let notes = staging.until(until).read(&paths, &options)?;
    ensure!(!notes.iter().any(|n| n.contains("buffered")), "{}", notes.join("; "));
    Ok(times.into_inner().unwrap_or_else(|e| e.into_inner()))
}

/// splitmix64 of Steele, Lea and Flood 2014: places far from each other.
fn mix(i: u64) -> u64 {
    let mut z = i.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_lie_inside_their_files_and_rounds_differ() {
        let lens = [10_000, 3 << 20, 100, (1 << 20) + 5000];
        for align in [4096, 65536] {
            let case = Case { request: 12288, depth: 4, align };
            for order in [Order::Random, Order::Sequential] {
                let [one, two] = [0, 1].map(|round| requests(&lens, case, order, 50, round));
                assert_eq!((one.len(), two.len()), (50, 50));
                assert_ne!(one, two);
                for c in one.iter().chain(&two) {
                    assert!(c.offset + c.len as u64 <= lens[c.file] && c.offset.is_multiple_of(PAGE), "{c:?}");
                    assert!(order == Order::Sequential || c.offset.is_multiple_of(align), "{c:?}");
                }
            }
        }
    }

    #[test]
    fn in_order_is_from_the_first_byte_to_the_last_and_on() {
        let case = Case { request: 4096, depth: 1, align: 4096 };
        let found: Vec<(usize, u64)> =
            requests(&[8192, 4096], case, Order::Sequential, 2, 1).iter().map(|c| (c.file, c.offset)).collect();
        assert_eq!(found, [(1, 0), (0, 0)]);
    }
}
