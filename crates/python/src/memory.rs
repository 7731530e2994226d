//! Memory of this process and of its control group, for engines that are opened within a budget.

use std::fs;
use std::path::{Path, PathBuf};

use sluice_engine::AdmittedMemory;

/// What this process and its control group hold now. Libraries of Python count as far as they are not files.
pub fn held() -> AdmittedMemory {
    sluice_store::return_freed();
    let rollup = fs::read_to_string("/proc/self/smaps_rollup").unwrap_or_default();
    AdmittedMemory { program: kilobytes(&rollup, "Anonymous").unwrap_or(0), group: group() }
}

/// Bytes that this process may still take.
pub fn room() -> Option<u64> {
    let machine = fs::read_to_string("/proc/meminfo").ok().and_then(|text| kilobytes(&text, "MemAvailable"));
    machine.into_iter().chain(group().map(|(limit, held)| limit.saturating_sub(held))).min()
}

fn kilobytes(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|l| l.strip_prefix(name)?.strip_prefix(':'))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// Limit and use of the tightest control group of version 2 that this process is in. Page cache does not count: the kernel drops it.
fn group() -> Option<(u64, u64)> {
    let own = fs::read_to_string("/proc/self/cgroup").ok()?;
    let path = PathBuf::from(own.lines().find_map(|line| line.strip_prefix("0::"))?.trim_start_matches('/'));
    let root = Path::new("/sys/fs/cgroup");
    let of = |group: &Path| {
        let read = |name: &str| fs::read_to_string(root.join(group).join(name)).ok();
        let limit: u64 = read("memory.max")?.trim().parse().ok()?;
        let used: u64 = read("memory.current")?.trim().parse().ok()?;
        let stat = read("memory.stat").unwrap_or_default();
        let line = |name: &str| stat.lines().find_map(|l| l.strip_prefix(name)?.trim().parse::<u64>().ok());
        let cached = ["inactive_file ", "active_file "].iter().filter_map(|name| line(name)).sum();
        Some((limit, used.saturating_sub(cached)))
    };
    path.ancestors().filter_map(of).min_by_key(|(limit, used)| limit.saturating_sub(*used))
}
