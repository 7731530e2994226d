//! One case in a process of its own: this program again, with the same arguments and a hidden one that says which case. So that each
//! starts as a user's would, and its peak of memory is its own.

use std::env;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

/// Runs `case`; the one line of JSON that it prints, and its time from start to end.
pub fn run(case: &str) -> Result<(Value, Duration)> {
    let program = env::current_exe().context("where this program lies")?;
    let begun = Instant::now();
    let done = Command::new(program)
        .args(env::args_os().skip(1))
        .args(["--case", case])
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .context("cannot start this program again")?;
    let time = begun.elapsed();
    ensure!(done.status.success(), "case {case}: {}", done.status);
    let value = serde_json::from_slice(&done.stdout).with_context(|| format!("what case {case} printed"))?;
    Ok((value, time))
}

/// A figure of a case.
pub fn figure(case: &Value, name: &str) -> f64 {
    case[name].as_f64().unwrap_or(f64::NAN)
}
