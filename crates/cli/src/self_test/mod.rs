//! `sluice self-test`: whether this machine computes the right bits, on each of its instruction sets and on its GPU. The cases are those of `crates/conformance`: random weights and
//! inputs of every operation, compared with the generic code.

mod table;

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use clap::Args;
use serde_json::json;
use sluice_backend::{Backend, Isa, NUMERICS_VERSION};
use sluice_conformance::{Candidate, FAMILIES, Setup, compare};
use sluice_cpu::{Cpu, Numa, default_threads};
use sluice_cuda::{Cuda, HostOffload};

use crate::terminal::shown_json;
use crate::version::version;
use table::{Found, Table};

#[derive(Args)]
pub struct SelfTestArgs {
    /// Time to test for; each kind of operation is tested at least once
    #[arg(long, value_name = "SECONDS", default_value_t = 20)]
    seconds: u32,
    /// Test the GPU too, if there is one
    #[arg(long, value_name = "auto|yes|no", default_value = "auto", value_parser = ["auto", "yes", "no"])]
    gpu: String,
    /// Begin with this case, to repeat one that failed
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// What computes, by its name in the report. GPUs come last.
fn names(gpus: &[u32]) -> Vec<String> {
    let sets = Isa::supported().into_iter().map(|isa| isa.to_string());
    sets.chain(gpus.iter().map(|n| format!("cuda:{n}"))).collect()
}

/// The backends of these names. Each thread that tests makes its own.
fn candidates(gpus: &[u32]) -> Vec<Candidate> {
    // The instruction sets compute on one, two and three threads in turn.
    let of_isa = |isa: Isa| {
        let make = move |setup: &Setup| -> Result<Box<dyn Backend>> {
            Ok(Box::new(Cpu::new(isa, 1 + (setup.seed % 3) as usize, setup.activations)?))
        };
        Candidate::new(isa.to_string(), make)
    };
    let of_gpu = |&number: &u32| {
        let make = move |setup: &Setup| -> Result<Box<dyn Backend>> {
            let gpu = Cuda::new(number, setup.activations)?;
            // In half of the cases the host computes some experts.
            let host = HostOffload { isa: Isa::from_env()?, threads: 2, always: true };
            Ok(Box::new(if setup.seed.is_multiple_of(2) { gpu } else { gpu.with_host_experts(host) }))
        };
        Candidate::new(format!("cuda:{number}"), make).in_turns()
    };
    Isa::supported().into_iter().map(of_isa).chain(gpus.iter().map(of_gpu)).collect()
}

/// The GPUs that can be used, or why there is none.
fn gpus(wanted: &str) -> Result<Result<Vec<u32>, String>> {
    if wanted == "no" {
        return Ok(Err("it was not asked for".into()));
    }
    match sluice_cuda::open(0) {
        Ok(_) => Ok(Ok((0..sluice_cuda::count()?).filter(|n| sluice_cuda::open(*n).is_ok()).collect())),
        Err(why) if wanted == "yes" => Err(why.context("--gpu yes")),
        Err(why) => Ok(Err(format!("{why:#}"))),
    }
}

/// Tests, and prints a line for each instruction set and device.
///
/// # Errors
/// A GPU that was asked for and cannot be used; bits that are wrong.
pub fn run(args: &SelfTestArgs) -> Result<()> {
    let begun = Instant::now();
    let found = gpus(&args.gpu)?;
    let gpus = found.as_deref().unwrap_or_default();
    let names = names(gpus);
    let table = Mutex::new(Table::new(&names));
    let until = begun + Duration::from_secs(args.seconds.into());
    // Seed by seed, so that every kind of operation is reached before the first is tested twice.
    let seeds = args.seed..args.seed + FAMILIES.iter().map(|family| family.cases).max().unwrap_or(0);
    let jobs = seeds.flat_map(|seed| {
        FAMILIES.iter().filter(move |family| seed < args.seed + family.cases).map(move |family| (*family, seed))
    });
    let jobs = Mutex::new(jobs.enumerate());
    thread::scope(|scope| {
        for _ in 0..default_threads(Numa::Off) {
            scope.spawn(|| {
                let candidates = candidates(gpus);
                loop {
                    let next = jobs.lock().unwrap_or_else(|e| e.into_inner()).next();
                    let Some((number, (family, seed))) = next else { break };
                    if number >= FAMILIES.len() && Instant::now() >= until {
                        break;
                    }
                    let outcomes = compare(family, seed, &candidates);
                    table.lock().unwrap_or_else(|e| e.into_inner()).note(family.name, seed, outcomes);
                }
            });
        }
    });
    let table = table.into_inner().unwrap_or_else(|e| e.into_inner());
    let without_gpu = found.as_ref().err();
    report(args, &table, without_gpu.map(String::as_str), begun.elapsed())?;
    let wrong = table.rows.iter().map(|row| row.wrong.len()).sum::<usize>();
    ensure!(
        wrong == 0,
        "{wrong} cases have wrong bits: please report this with what `sluice self-test` and `sluice doctor` print"
    );
    Ok(())
}

fn report(args: &SelfTestArgs, table: &Table, without_gpu: Option<&str>, took: Duration) -> Result<()> {
    let out = &mut io::stdout().lock();
    if args.json {
        let rows: Vec<_> = table.rows.iter().map(Found::to_json).collect();
        let families: BTreeMap<&str, u64> = table.families.clone();
        let object = json!({
            "version": version(), "numerics": NUMERICS_VERSION, "seconds": took.as_secs_f64(),
            "results": rows, "cases": families, "no_gpu": without_gpu,
        });
        writeln!(out, "{}", shown_json(&format!("{object:#}")))?;
        return Ok(out.flush()?);
    }
    writeln!(out, "{:<12}{}", "sluice", version())?;
    for row in &table.rows {
        writeln!(out, "{:<12}{}", row.name, row.line())?;
        for (family, seed, what) in row.wrong.iter().take(3) {
            writeln!(out, "{:<12}{family}, --seed {seed}: {what}", "")?;
        }
    }
    if let Some(why) = without_gpu {
        writeln!(out, "{:<12}not tested: {why}", "gpu")?;
    }
    writeln!(
        out,
        "{:<12}{} kinds of operations in {:.0} s, beside the generic code",
        "cases",
        table.families.len(),
        took.as_secs_f64()
    )?;
    Ok(out.flush()?)
}
