//! What the machine can do at best, on so many threads: bytes read per second, multiply-adds per second.

use std::hint::black_box;
use std::sync::Barrier;
use std::thread;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use serde_json::json;
use sluice_backend::Isa;
use sluice_cpu::{Numa, default_threads};
use sluice_kernels::roofline::{self, Arithmetic};
use sluice_store::Buffer;

use super::figures::Figures;
use sluice_front::{Device, DeviceArg, Probes};

/// Large beside any cache: the largest last-level caches have hundreds of megabytes.
const BUFFER: usize = 2 << 30;
/// Read in one measurement; the next one reads the next part, so that nothing is read again before all the rest.
const WINDOW: usize = 512 << 20;
/// Seconds that a measurement of arithmetic should take.
const SPAN: f64 = 0.02;

#[derive(Args, Debug)]
pub struct RooflineArgs {
    /// Threads, one number or several
    #[arg(long, value_delimiter = ',', value_name = "N,..")]
    threads: Vec<usize>,
    /// Measure a GPU instead: reading its memory, copies between its memory and pinned memory here, products of integers, launches
    #[arg(long, default_value_t = DeviceArg::host(), value_name = "cpu|cuda[:N]")]
    device: DeviceArg,
    /// Measurements, of which the median counts
    #[arg(long, default_value_t = 9, value_name = "N")]
    rounds: usize,
    /// One line of JSON for each number of threads
    #[arg(long)]
    json: bool,
}

pub fn run(args: &RooflineArgs) -> Result<()> {
    ensure!(args.rounds > 0, "--rounds must be at least 1");
    let chosen = args.device.chosen(&crate::terminal::note);
    if !chosen.is_host() {
        let [number] = *chosen.numbers() else { bail!("--device {}: one GPU at a time", args.device) };
        let probes = chosen.probes(number).with_context(|| format!("--device {chosen}: nothing to measure"))??;
        return device(args, &chosen, probes);
    }
    let isa = Isa::from_env()?;
    let mut memory = Memory::new()?;
    if !args.json {
        print!("{:<8}{:>24}{:>24}{:>24}{:>24}", "threads", "read GB/s", "f32 TOPS", "bf16 TOPS", "int8 TOPS");
        println!("{:>24}", if has_tiles(isa) { "int8 TOPS, AMX" } else { "" });
    }
    for n in threads(&args.threads)? {
        let mut read = Figures::default();
        let mut peaks = Arithmetic::ALL.map(|a| (a, Figures::default()));
        let mut tiles = Figures::default();
        for _ in 0..args.rounds {
            read.push(memory.read(isa, n));
            for (arithmetic, figures) in &mut peaks {
                figures.push(peak(isa, n, *arithmetic));
            }
            if has_tiles(isa) {
                tiles.push(peak_of_tiles(isa, n));
            }
        }
        if args.json {
            let mut line = json!({"bench": "roofline", "threads": n, "isa": isa.to_string()});
            line["read_bytes_per_second"] = read.to_json();
            for (arithmetic, figures) in &peaks {
                line[format!("{}_operations_per_second", arithmetic.name())] = figures.to_json();
            }
            line["amx_int8_operations_per_second"] = tiles.to_json();
            println!("{line}");
        } else {
            let tera = |f: &Figures| f.map(|x| x / 1e12).to_text(2);
            let [f32, bf16, int8] = &peaks;
            let read = read.map(|x| x / 1e9).to_text(1);
            let tiles = if has_tiles(isa) { tera(&tiles) } else { String::new() };
            println!("{n:<8}{read:>24}{:>24}{:>24}{:>24}{tiles:>24}", tera(&f32.1), tera(&bf16.1), tera(&int8.1));
        }
    }
    Ok(())
}

/// The same of a GPU.
fn device(args: &RooflineArgs, device: &Device, mut probes: Box<dyn Probes>) -> Result<()> {
    let mut found = [(); 6].map(|()| Figures::default());
    // The first of each warms up.
    for round in 0..=args.rounds {
        let all = [
            probes.read()?,
            probes.up()?,
            probes.down()?,
            probes.int8()?,
            probes.launches()?,
            probes.launch_and_wait()?,
        ];
        if round > 0 {
            for (figures, value) in found.iter_mut().zip(all) {
                figures.push(value);
            }
        }
    }
    let [read, up, down, int8, launches, waits] = &found;
    if args.json {
        let line = json!({
            "bench": "roofline",
            "device": device.to_string(),
            "name": probes.name(),
            "read_bytes_per_second": read.to_json(),
            "up_bytes_per_second": up.to_json(),
            "down_bytes_per_second": down.to_json(),
            "int8_operations_per_second": int8.to_json(),
            "launch_seconds": launches.to_json(),
            "launch_and_wait_seconds": waits.to_json(),
        });
        println!("{line}");
        return Ok(());
    }
    println!("{device}, {}", probes.name());
    let (giga, micro) = (|f: &Figures| f.map(|x| x / 1e9).to_text(1), |f: &Figures| f.map(|x| 1e6 * x).to_text(2));
    println!("{:<22}{:>24} GB/s", "memory read", giga(read));
    println!("{:<22}{:>24} GB/s", "from pinned memory", giga(up));
    println!("{:<22}{:>24} GB/s", "to pinned memory", giga(down));
    println!("{:<22}{:>24} TOPS", "int8, tensor cores", int8.map(|x| x / 1e12).to_text(1));
    println!("{:<22}{:>24} us", "launch", micro(launches));
    println!("{:<22}{:>24} us", "launch and wait", micro(waits));
    Ok(())
}

/// The numbers of threads that were asked for: 1 and all cores if none was.
pub fn threads(asked: &[usize]) -> Result<Vec<usize>> {
    ensure!(!asked.contains(&0), "--threads must be at least 1");
    if !asked.is_empty() {
        return Ok(asked.to_vec());
    }
    let all = default_threads(Numa::Off);
    Ok(if all > 1 { vec![1, all] } else { vec![1] })
}

/// A buffer to be read.
pub struct Memory {
    bytes: Buffer,
    next: usize,
}

impl Memory {
    /// # Errors
    /// When there is no memory for it.
    pub fn new() -> Result<Memory> {
        // In large pages, as weights are: with small ones the limit would be that of translating addresses. Not zero, as pages of zeros may be one page.
        let mut bytes = Buffer::large(BUFFER)?;
        bytes.fill(0x5a);
        Ok(Memory { bytes, next: 0 })
    }

    /// Bytes per second that `threads` threads read together: the median of three windows, since one may fall into another's time slice.
    pub fn read(&mut self, isa: Isa, threads: usize) -> f64 {
        let mut three = [(); 3].map(|()| self.read_window(isa, threads));
        three.sort_by(f64::total_cmp);
        three[1]
    }

    fn read_window(&mut self, isa: Isa, threads: usize) -> f64 {
        let window = &self.bytes[self.next..self.next + WINDOW];
        self.next = (self.next + WINDOW) % BUFFER;
        let part = WINDOW / threads;
        let seconds = together(threads, |t| {
            black_box(roofline::read(isa, &window[t * part..(t + 1) * part]));
        });
        (part * threads) as f64 / seconds
    }
}

/// Operations per second of `threads` threads together: a multiply-add is two.
pub fn peak(isa: Isa, threads: usize, arithmetic: Arithmetic) -> f64 {
    fastest(threads, |macs| roofline::multiply_add(isa, arithmetic, macs))
}

/// The same for bytes in AMX's tiles, if `isa` [has](has_tiles) them.
pub fn peak_of_tiles(isa: Isa, threads: usize) -> f64 {
    fastest(threads, |macs| roofline::multiply_add_in_tiles(isa, macs).expect("this machine has tiles"))
}

pub fn has_tiles(isa: Isa) -> bool {
    roofline::multiply_add_in_tiles(isa, 1).is_some()
}

/// `work(n)` does at least n multiply-adds and says how many.
fn fastest(threads: usize, work: impl Fn(u64) -> u64 + Sync) -> f64 {
    // Find a number that takes long enough.
    let mut macs = 1 << 20;
    loop {
        let start = Instant::now();
        let done = work(macs);
        let seconds = start.elapsed().as_secs_f64();
        if seconds > SPAN / 4.0 {
            macs = (done as f64 * SPAN / seconds) as u64;
            break;
        }
        macs *= 4;
    }
    let seconds = together(threads, |_| {
        black_box(work(macs));
    });
    2.0 * macs as f64 * threads as f64 / seconds
}

/// Runs `work(thread)` on each of `threads` threads at once; the longest time.
pub fn together(threads: usize, work: impl Fn(usize) + Sync) -> f64 {
    let barrier = Barrier::new(threads);
    let timed = |t: usize| {
        barrier.wait();
        let start = Instant::now();
        work(t);
        start.elapsed().as_secs_f64()
    };
    thread::scope(|scope| {
        let others: Vec<_> = (1..threads)
            .map(|t| {
                scope.spawn({
                    let timed = &timed;
                    move || timed(t)
                })
            })
            .collect();
        let own = timed(0);
        others.into_iter().map(|o| o.join().expect("a measurement does not panic")).fold(own, f64::max)
    })
}
