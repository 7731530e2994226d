//! `sluice doctor`: what this machine is, how fast its memory and disks are, what limits this process, and what would make it quicker. It changes nothing; to measure a disk that
//! has no large file it writes a temporary one.

mod advice;
mod disk;
mod folders;
mod graphics;
mod limits;
mod memory;
mod processor;
mod report;

use std::io::{self, Write};

use anyhow::Result;
use clap::Args;
use serde::Serialize;

use crate::terminal::{shown, shown_json};
use advice::Advice;
use report::Report;

#[derive(Args)]
pub struct DoctorArgs {
    /// Do not measure memory and disks, which takes a few seconds
    #[arg(long)]
    no_measure: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// What is found, and what to do about it.
#[derive(Serialize)]
struct Findings {
    #[serde(flatten)]
    report: Report,
    advice: Vec<Advice>,
}

/// Prints what is found, and last what to do about it.
pub fn run(args: &DoctorArgs) -> Result<()> {
    let report = Report::gather(!args.no_measure);
    let found = Findings { advice: advice::give(&report), report };
    let out = &mut io::stdout().lock();
    if args.json {
        writeln!(out, "{}", shown_json(&serde_json::to_string_pretty(&found)?))?;
        return Ok(out.flush()?);
    }
    for (name, text) in found.report.lines() {
        writeln!(out, "{name:<14}{}", shown(&text))?;
    }
    writeln!(out)?;
    match &found.advice[..] {
        [] => writeln!(out, "Nothing stands in the way.")?,
        advice => {
            writeln!(out, "What would help:")?;
            for one in advice {
                writeln!(out, "- {}: {}", shown(&one.found), shown(&one.remedy))?;
            }
        }
    }
    Ok(out.flush()?)
}
