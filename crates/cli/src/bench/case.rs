//! Runs one case in a process of its own: this program again, with the same arguments and a hidden one that names the case. So each case starts as a user's program
//! would, and has its own peak of memory.

use std::env;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

/// Runs `case`. Returns the line of JSON that it prints, and its time from start to end.
pub fn run(case: &str) -> Result<(Value, Duration)> {
    let program = env::current_exe().context("the path of this program")?;
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
    let value = serde_json::from_slice(&done.stdout).with_context(|| format!("the output of case {case}"))?;
    Ok((value, time))
}

/// A number in a case's result; `NaN` if it is missing.
pub fn figure(case: &Value, name: &str) -> f64 {
    case[name].as_f64().unwrap_or(f64::NAN)
}
