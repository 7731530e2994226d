//! Puts files into the page cache or drops them from it, and checks the result.

use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use sluice_store::{Buffer, drop_cached, open_regular, resident_bytes};

/// Whether files are in the page cache.
#[derive(Clone, Copy, Debug, PartialEq, clap::ValueEnum)]
pub enum State {
    Cold,
    Warm,
}

impl State {
    /// As tables print it.
    pub fn name(self) -> &'static str {
        match self {
            State::Cold => "cold",
            State::Warm => "warm",
        }
    }

    /// Brings files into this state. Returns the fraction that is in the page cache then; callers should print it, since other programs may hold pages that cannot be
    /// dropped. Also takes as much free memory as loading will need, and gives it back, so that results do not depend on how much of it a hypervisor has
    /// reclaimed.
    pub fn prepare(self, files: &[PathBuf]) -> Result<f64> {
        match self {
            State::Cold => {
                for path in files {
                    let file = open(path)?;
                    // Dirty pages are dropped only after they are written to disk.
                    let _ = file.sync_all();
                    let _ = drop_cached(&file, 0, 0);
                }
                if resident(files)? > 0.0 {
                    // What is left (pages that move between lists) needs privileges to drop.
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

/// Below this size in bytes, a model takes too little memory for reclaimed memory to matter.
const SMALL: u64 = 256 << 20;

/// Takes free memory for a model of this many bytes, with keys, values and scratch, and gives it back.
fn touch_memory(bytes: u64) -> Result<()> {
    let free = sluice_front::machine::free().unwrap_or(0);
    let wanted = (bytes + bytes / 4 + SMALL).min(free / 4 * 3);
    let mut buffer = Buffer::large(wanted as usize).context("memory to touch")?;
    buffer.iter_mut().step_by(4096).for_each(|byte| *byte = 1);
    Ok(())
}

fn open(path: &Path) -> Result<File> {
    Ok(open_regular(path)?)
}

/// The fraction of all bytes that is in the page cache.
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
