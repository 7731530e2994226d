//! The disk's own speed: direct reads of one size from a model's files, with a given number in flight.

use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::ValueEnum;
use sluice_store::host_memory;
use sluice_store::load::{Chunk, Filled, LoadOptions, Staging};

/// Alignment that direct reads need for offsets and lengths.
pub const PAGE: u64 = 4096;

/// The order of requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Order {
    Random,
    Sequential,
}

/// How to read.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    /// Bytes of a request; a multiple of the page size.
    pub request: u64,
    /// Requests in flight at once.
    pub depth: usize,
    pub order: Order,
    /// In random order, requests start at multiples of this many bytes.
    pub align: u64,
}

/// At most `wanted` requests for parts of files of these lengths. Another `round` requests other parts.
fn requests(lens: &[u64], case: Case, wanted: u64, round: u64) -> Vec<Chunk> {
    let places: Vec<u64> = lens.iter().map(|len| len / case.request).collect();
    let all: u64 = places.iter().sum();
    // The index of a place among all.
    let place = |number: u64| {
        let (mut file, mut left) = (0, number);
        while left >= places[file] {
            left -= places[file];
            file += 1;
        }
        (file, left * case.request)
    };
    let one = |i: u64| {
        let (file, offset) = match case.order {
            Order::Sequential => place((round * wanted + i) % all),
            Order::Random => {
                // A file with a probability that grows with its length, and any place in it.
                let r = mix((round << 40) + i);
                let (file, _) = place(r % all);
                (file, mix(r) % ((lens[file] - case.request) / case.align + 1) * case.align)
            }
        };
        Chunk { file, offset, len: case.request as usize }
    };
    (0..wanted.min(all)).map(one).collect()
}

/// Bytes per second of one case over about `span`, from files of these lengths. Another `round` reads other parts.
///
/// # Errors
/// Files that are too small for such requests, or cannot be read, or only through the page cache.
pub fn measure(files: &[(PathBuf, u64)], case: Case, span: Duration, round: u64) -> Result<f64> {
    // 1. More requests than can be read in the time
    let lens: Vec<u64> = files.iter().map(|(_, len)| *len).collect();
    let all: u64 = lens.iter().map(|len| len / case.request).sum();
    ensure!(all >= 2 * case.depth as u64, "the files are too small for requests of {} bytes", case.request);
    let fastest = (span.as_secs_f64() * 32e9) as u64 / case.request;
    let wanted = fastest.min((span.as_secs_f64() * 2e6) as u64) + 1;
    let chunks = requests(&lens, case, wanted, round);

    // 2. The first few by themselves: touching memory and registering buffers take time that is not the disk's
    let begun = Instant::now();
    read(files, chunks[..case.depth.min(chunks.len())].to_vec(), case, begun + Duration::from_secs(60))?;
    let preparing = begun.elapsed();

    // 3. As many as can be read in the time, counted from when the queue is full
    let times = read(files, chunks, case, Instant::now() + preparing + span)?;
    let steady = &times[case.depth.min(times.len() / 2)..];
    ensure!(steady.len() > 1, "no two requests in {span:?}");
    let time = steady[steady.len() - 1] - steady[0];
    Ok((steady.len() - 1) as f64 * case.request as f64 / time.as_secs_f64())
}

/// Reads `chunks` until they are done or the time is up. Returns when each arrived, in order.
fn read(files: &[(PathBuf, u64)], chunks: Vec<Chunk>, case: Case, until: Instant) -> Result<Vec<Instant>> {
    let times = Mutex::new(Vec::with_capacity(chunks.len()));
    let note = |_: Filled| times.lock().unwrap_or_else(|e| e.into_inner()).push(Instant::now());
    let staging = Staging::new(chunks, case.depth, case.request as usize, &mut host_memory, note);
    let staging = staging.context("no memory for the reads")?;
    let paths: Vec<&Path> = files.iter().map(|(path, _)| path.as_path()).collect();
    let options = LoadOptions { depth: case.depth, threads: case.depth, ..LoadOptions::default() };
    let notes = staging.until(until).read(&paths, &options)?;
    ensure!(!notes.iter().any(|n| n.contains("buffered")), "{}", notes.join("; "));
    Ok(times.into_inner().unwrap_or_else(|e| e.into_inner()))
}

/// A hash of `i` for pseudo-random places: splitmix64 of Steele, Lea and Flood 2014.
pub fn mix(i: u64) -> u64 {
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
            for order in [Order::Random, Order::Sequential] {
                let case = Case { request: 12288, depth: 4, align, order };
                let [one, two] = [0, 1].map(|round| requests(&lens, case, 50, round));
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
        let case = Case { request: 4096, depth: 1, align: 4096, order: Order::Sequential };
        let found: Vec<(usize, u64)> = requests(&[8192, 4096], case, 2, 1).iter().map(|c| (c.file, c.offset)).collect();
        assert_eq!(found, [(1, 0), (0, 0)]);
    }
}
