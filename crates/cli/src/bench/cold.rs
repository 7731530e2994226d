//! Files cold and warm: taken out of the page cache or brought into it, and looked at to be sure.

use std::fs::{self, File};
use std::io::Read;
use std::path::PathBuf;

use anyhow::{Context, Result};
use sluice_store::{Buffer, drop_cached, resident_bytes};

/// Which of the two.
#[derive(Clone, Copy, Debug, PartialEq, clap::ValueEnum)]
pub enum State {
    Cold,
    Warm,
}

impl State {
    pub fn name(self) -> &'static str {
        match self {
            State::Cold => "cold",
            State::Warm => "warm",
        }
    }

    /// Brings the files into this state, and says how much of them is in the page cache then, of 1: what a caller should print, since
    /// others may hold pages that cannot be dropped. As much free memory as loading will take is taken and given back, so that what
    /// follows does not depend on how much of it a hypervisor had reclaimed.
    pub fn prepare(self, files: &[PathBuf]) -> Result<f64> {
        match self {
            State::Cold => {
                for path in files {
                    let file = open(path)?;
                    // Pages that were just written are dropped only when they are on the disk.
                    let _ = file.sync_all();
                    let _ = drop_cached(&file, 0, 0);
                }
                if resident(files)? > 0.0 {
                    // What the polite way left (pages on their way between lists), if we may.
                    let _ = fs::write("/proc/sys/vm/drop_caches", "1");
                }
            }
            State::Warm => {
                let mut buffer = vec![0; 4 << 20];
                for path in files {
                    let mut file = open(path)?;
                    while file.read(&mut buffer).with_context(|| path.display().to_string())? > 0 {}
                }
            }
        }
        let mut bytes = 0;
        for path in files {
            bytes += open(path)?.metadata()?.len();
        }
        if bytes > SMALL {
            touch_memory(bytes)?;
        }
        resident(files)
    }
}

/// Models below this many bytes take too little memory for it to matter where it comes from.
const SMALL: u64 = 256 << 20;

/// Takes free memory for a model of so many bytes, and for keys, values and scratch, and gives it back.
fn touch_memory(bytes: u64) -> Result<()> {
    let free = crate::machine::free().unwrap_or(0);
    let wanted = (bytes + bytes / 4 + SMALL).min(free / 4 * 3);
    let mut buffer = Buffer::large(wanted as usize).context("memory to touch")?;
    buffer.iter_mut().step_by(4096).for_each(|byte| *byte = 1);
    Ok(())
}

fn open(path: &PathBuf) -> Result<File> {
    File::open(path).with_context(|| path.display().to_string())
}

/// Of all bytes, how many are in the page cache, of 1.
fn resident(files: &[PathBuf]) -> Result<f64> {
    let (mut cached, mut all) = (0, 0);
    for path in files {
        let file = open(path)?;
        let len = file.metadata()?.len();
        cached += resident_bytes(&file, 0, len).with_context(|| path.display().to_string())?.min(len);
        all += len;
    }
    Ok(if all == 0 { 0.0 } else { cached as f64 / all as f64 })
}
