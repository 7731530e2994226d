//! What would be quicker, and how. Each piece of advice names what was found and one thing to do.

use serde::Serialize;

use super::report::Report;
use crate::units;

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Advice {
    pub found: String,
    pub remedy: String,
}

/// Below so many bytes per second, a disk slows down mixtures that do not fit, and every first load.
const SLOW_DISK: f64 = 1e9;
/// The least locked memory that fixed buffers of io_uring take on older kernels, and that a GPU's pinned memory may need.
const LITTLE_MEMLOCK: u64 = 64 << 20;
const FEW_FILES: u64 = 4096;
/// File systems that are somewhere else.
const REMOTE: [&str; 7] = ["nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs", "ceph"];

pub fn give(report: &Report) -> Vec<Advice> {
    let mut all = Vec::new();
    let mut add = |found: String, remedy: &str| all.push(Advice { found, remedy: remedy.to_owned() });

    // 1. the processor
    let p = &report.processor;
    let has = |name: &str| p.instruction_sets.iter().any(|set| set.name == name && set.is_supported);
    if cfg!(target_arch = "x86_64") && !has("avx2") && !has("avx512") {
        add(
            "the processor has no AVX2, so plain code computes".into(),
            "another processor, or a virtual machine that passes the host's features on (QEMU: -cpu host)",
        );
    }
    for set in p.instruction_sets.iter().filter(|set| !set.is_supported && set.missing.is_empty()) {
        add(
            format!("the processor has {}, and the system does not permit it", set.name),
            "a newer kernel, or a virtual machine that permits it",
        );
    }
    let best = p.instruction_sets.iter().rev().find(|set| set.is_supported).map_or("generic", |set| &set.name);
    if p.in_use != best {
        add(format!("{} is in use instead of {best}", p.in_use), "unset SLUICE_ISA");
    }
    if p.group_limit.is_some_and(|limit| limit < 0.95 * p.processors as f64) {
        let limit = p.group_limit.unwrap_or_default();
        add(
            format!("the control group grants the time of {limit:.1} of {} processors", p.processors),
            "raise it (docker run --cpus, CPUQuota= in systemd) if more are free",
        );
    }

    // 2. memory
    let m = &report.memory;
    if m.large_pages.as_deref() == Some("never") {
        add(
            "large pages are off".into(),
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled: weights are read faster through them",
        );
    }
    if let Some((limit, total)) = m.group_limit.zip(m.total).filter(|(limit, total)| *limit < total / 10 * 9) {
        add(
            format!("the control group limits memory to {} of {}", units::bytes(limit), units::bytes(total)),
            "raise it (docker run --memory, MemoryMax= in systemd): what does not fit is read from disk again and again",
        );
    }
    if m.swap_used.zip(m.total).is_some_and(|(used, total)| used > total / 10) {
        add(
            format!("{} are swapped out", units::bytes(m.swap_used.unwrap_or(0))),
            "end other programs, or give --memory-budget less: weights in swap are slower than weights in their file",
        );
    }

    // 3. the GPU
    let g = &report.gpu;
    let why = g.why_not.as_deref().unwrap_or_default();
    match (g.is_usable, g.has_node || !g.devices.is_empty(), g.kernel_bytes) {
        (false, true, 0) => add(
            "there is a GPU, and this program was built without kernels for one".into(),
            "a release, or a build after scripts/kernels",
        ),
        (false, true, _) => add(
            format!("there is a GPU that cannot be used: {why}"),
            "install or update NVIDIA's driver; in a container, pass the GPU on (docker run --gpus all)",
        ),
        (true, ..) => add("there is a GPU".into(), "--device cuda, or auto, computes on it"),
        _ => {}
    }

    // 4. limits
    let l = &report.limits;
    if let Some(why) = &l.io_uring_refused {
        let remedy = match l.io_uring_disabled {
            Some(n) if n > 0 => "sysctl kernel.io_uring_disabled=0: direct reads need fewer threads through it",
            _ => {
                "a container's filter may refuse it (docker run --security-opt seccomp=..): direct reads need fewer threads through it"
            }
        };
        add(format!("io_uring is refused ({why})"), remedy);
    }
    if g.is_usable && l.memlock.is_some_and(|bytes| bytes < LITTLE_MEMLOCK) {
        add(
            format!("only {} may be locked", units::bytes(l.memlock.unwrap_or(0))),
            "ulimit -l unlimited, LimitMEMLOCK=infinity in systemd",
        );
    }
    if l.nofile.is_some_and(|n| n < FEW_FILES) {
        let most = l.nofile_most.map_or("more".to_owned(), |most| most.to_string());
        add(
            format!("only {} files may be open, which limits a server's connections", l.nofile.unwrap_or(0)),
            &format!("ulimit -n {most}, LimitNOFILE= in systemd"),
        );
    }

    // 5. disks
    for disk in &report.disks {
        let place = disk.mounted.display();
        if REMOTE.contains(&disk.file_system.as_str()) {
            add(
                format!("{place} is on another machine ({})", disk.file_system),
                "HF_HUB_CACHE on a disk of this machine",
            );
        } else if let Some(speed) = disk.speed.as_ref().filter(|speed| speed.bytes_per_second < SLOW_DISK) {
            let slow = units::bytes(speed.bytes_per_second as u64);
            add(
                format!("{place} is read at {slow}/s"),
                "HF_HUB_CACHE on an NVMe disk, for models larger than memory and for every first start",
            );
        }
    }
    for folder in
        report.folders.iter().filter(|f| f.what == "models" && f.free.is_some_and(|free| free < 10_000_000_000))
    {
        add(
            format!("there is room for {} of models", units::bytes(folder.free.unwrap_or(0))),
            "`sluice rm` removes models, HF_HUB_CACHE names another disk",
        );
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_stands_in_the_way_is_named_with_a_remedy() {
        let mut report = Report::gather(false);
        report.memory.large_pages = Some("never".into());
        report.limits.io_uring_refused = Some("Operation not permitted".into());
        report.limits.io_uring_disabled = Some(2);
        report.limits.nofile = Some(256);
        report.processor.group_limit = Some(0.5);
        let advice = give(&report);
        for (found, remedy) in [
            ("large pages are off", "transparent_hugepage"),
            ("io_uring is refused", "kernel.io_uring_disabled"),
            ("only 256 files", "ulimit -n"),
            ("grants the time of 0.5", "--cpus"),
        ] {
            assert!(advice.iter().any(|a| a.found.contains(found) && a.remedy.contains(remedy)), "{found}: {advice:?}");
        }
        report.memory.large_pages = Some("madvise".into());
        assert!(!give(&report).iter().any(|a| a.found.contains("large pages")));
    }
}
