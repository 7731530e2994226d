//! `sluice doctor`: what this machine is, how fast its memory and disks are, what limits this process, and what would make it quicker. It changes nothing; to measure a disk that
//! has no large file it writes a temporary one.

mod advice;
mod disk;
mod folders;
mod graphics;
mod limits;
mod memory;
mod processor;

use std::io::{self, Write};

use anyhow::Result;
use clap::Args;
use serde::Serialize;

use crate::terminal::{shown, shown_json};
use advice::Advice;
use folders::{Disk, Folder};
use graphics::Graphics;
use limits::Limits;
use memory::Memory;
use processor::Processor;

#[derive(Args)]
pub struct DoctorArgs {
    /// Do not measure memory and disks, which takes a few seconds
    #[arg(long)]
    no_measure: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// All that is found.
#[derive(Serialize)]
struct Report {
    version: String,
    program: Option<String>,
    processor: Processor,
    memory: Memory,
    gpu: Graphics,
    limits: Limits,
    disks: Vec<Disk>,
    folders: Vec<Folder>,
    advice: Vec<Advice>,
}

impl Report {
    fn gather(measures: bool) -> Report {
        let (folders, disks) = folders::find(measures);
        let mut report = Report {
            version: crate::version(),
            program: std::env::current_exe().ok().map(|path| path.display().to_string()),
            processor: Processor::find(),
            memory: Memory::find(measures),
            gpu: Graphics::find(),
            limits: Limits::find(),
            disks,
            folders,
            advice: Vec::new(),
        };
        report.advice = advice::give(&report);
        report
    }

    /// Name and text of each line.
    fn lines(&self) -> Vec<(&'static str, String)> {
        let mut lines = vec![("sluice", self.version.clone())];
        lines.extend(self.program.iter().map(|path| ("", path.clone())));
        lines.extend(self.processor.lines());
        lines.extend(self.memory.lines());
        lines.extend(self.gpu.lines());
        lines.extend(self.limits.lines());
        lines.extend(self.disks.iter().flat_map(Disk::lines));
        lines.extend(self.folders.iter().map(Folder::line));
        lines
    }
}

/// Prints what is found, and last what to do about it.
pub fn run(args: &DoctorArgs) -> Result<()> {
    let report = Report::gather(!args.no_measure);
    let out = &mut io::stdout().lock();
    if args.json {
        writeln!(out, "{}", shown_json(&serde_json::to_string_pretty(&report)?))?;
        return Ok(out.flush()?);
    }
    for (name, text) in report.lines() {
        writeln!(out, "{name:<14}{}", shown(&text))?;
    }
    writeln!(out)?;
    match &report.advice[..] {
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

/// `3 nodes`, `1 node`.
fn counted(n: usize, one: &str) -> String {
    format!("{n} {one}{}", if n == 1 { "" } else { "s" })
}
