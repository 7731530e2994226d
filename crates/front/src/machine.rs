//! Memory of this process and of this machine, as the kernel reports it. All in bytes; `None` if it cannot be read.

use std::fs;
use std::path::{Path, PathBuf};

use sluice_engine::AdmittedMemory;

/// A line of `/proc/self/status`: `VmHWM` (peak resident set), `RssAnon`, `RssFile`.
pub fn own_memory(line: &str) -> Option<u64> {
    kilobytes(&fs::read_to_string("/proc/self/status").ok()?, line)
}

/// A line of `/proc/meminfo`: `MemTotal`, `SwapFree`.
pub fn of_machine(line: &str) -> Option<u64> {
    kilobytes(&fs::read_to_string("/proc/meminfo").ok()?, line)
}

/// Memory that programs can still take without swapping, as the kernel estimates it.
pub fn available() -> Option<u64> {
    of_machine("MemAvailable")
}

/// Memory that is not used at all, not even as page cache.
pub fn free() -> Option<u64> {
    of_machine("MemFree")
}

/// Memory that this process may still take: what is available, or what its control groups leave, whichever is less.
pub fn room() -> Option<u64> {
    available().into_iter().chain(cgroup().map(|l| l.left)).min()
}

/// Memory that this process and its control group hold now. The program's file and its libraries count in full, whether resident or not: how much the kernel maps
/// around a touched page depends on the page cache, and differs by many megabytes between two starts.
pub fn held() -> AdmittedMemory {
    // Freed memory (a tokenizer is built in steps) is not held, and differs from start to start.
    sluice_store::return_freed();
    // The counters in `status` lag behind by what each processor has not added yet; the sum over all maps does not.
    let exact = fs::read_to_string("/proc/self/smaps_rollup").ok().and_then(|text| kilobytes(&text, "Anonymous"));
    let anonymous = exact.or_else(|| own_memory("RssAnon")).unwrap_or(0);
    let code = fs::read_to_string("/proc/self/maps").map_or(0, |maps| code_bytes(&maps));
    // GPU code in the file is read only if there is a GPU, once, when little else is in memory.
    let code = code.saturating_sub(sluice_cuda::embedded_bytes());
    AdmittedMemory { program: anonymous + code, group: cgroup().map(|l| (l.limit, l.limit.saturating_sub(l.left))) }
}

/// Bytes of files in `/proc/self/maps` that have an executable mapping, with all of their mappings.
fn code_bytes(maps: &str) -> u64 {
    // 7f12a000-7f12b000 r-xp 00001000 fe:00 1234   /usr/lib/libc.so.6
    let parsed = maps.lines().filter_map(|line| {
        let mut fields = line.split_ascii_whitespace();
        let (range, permissions, _, _, inode) =
            (fields.next()?, fields.next()?, fields.next(), fields.next(), fields.next()?);
        let (from, to) = range.split_once('-')?;
        let len = u64::from_str_radix(to, 16).ok()?.checked_sub(u64::from_str_radix(from, 16).ok()?)?;
        (inode != "0").then_some((inode, permissions.contains('x'), len))
    });
    let maps: Vec<(&str, bool, u64)> = parsed.collect();
    let is_run = |inode: &str| maps.iter().any(|(of, run, _)| *run && *of == inode);
    maps.iter().filter(|(inode, ..)| is_run(inode)).map(|(.., len)| len).sum()
}

/// `NAME:   123 kB`
fn kilobytes(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|l| l.strip_prefix(name)?.strip_prefix(':'))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// A control group's limit, such as a container's, and how much is left.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MemoryLimit {
    /// The limit in bytes.
    pub limit: u64,
    /// Page cache counts as free, because the kernel drops it.
    pub left: u64,
}

/// The tightest limit among this process's control groups.
pub fn cgroup() -> Option<MemoryLimit> {
    let own = fs::read_to_string("/proc/self/cgroup").ok()?;
    cgroup_in(Path::new("/sys/fs/cgroup"), &own)
}

/// `own`: the text of `/proc/self/cgroup`, with `0::/path` for version 2 and `4:memory:/path` for version 1.
fn cgroup_in(root: &Path, own: &str) -> Option<MemoryLimit> {
    let found = own.lines().flat_map(|line| {
        let mut fields = line.splitn(3, ':').skip(1);
        let (controllers, path) = (fields.next().unwrap_or(""), fields.next().unwrap_or(""));
        match controllers {
            "" => along(root, path, ["memory.max", "memory.current", "inactive_file", "active_file"]),
            c if c.split(',').any(|c| c == "memory") => {
                let names =
                    ["memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "total_active_file"];
                along(&root.join("memory"), path, names)
            }
            _ => vec![],
        }
    });
    // Version 1 writes "no limit" as a huge number.
    found.filter(|l| l.limit < 1 << 60).min_by_key(|l| l.left)
}

/// The limits of a group and its ancestors. In a container the path may be the host's, so missing folders are skipped.
fn along(root: &Path, path: &str, [max, current, inactive, active]: [&str; 4]) -> Vec<MemoryLimit> {
    let group = PathBuf::from(path.trim_start_matches('/'));
    let read = |folder: &Path, name: &str| fs::read_to_string(folder.join(name)).ok();
    let one = |folder: PathBuf| {
        let limit = read(&folder, max)?.trim().parse().ok()?;
        let used: u64 = read(&folder, current)?.trim().parse().ok()?;
        let stat = read(&folder, "memory.stat").unwrap_or_default();
        let line =
            |name: &str| stat.lines().find_map(|l| l.strip_prefix(name)?.trim().parse::<u64>().ok()).unwrap_or(0);
        let cached = line(inactive) + line(active);
        Some(MemoryLimit { limit, left: limit.saturating_sub(used.saturating_sub(cached)) })
    };
    group.ancestors().filter_map(|g| one(root.join(g))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_maps_of_files_that_are_run_are_code() {
        let maps = "1000-3000 r--p 00000000 fe:00 7   /usr/bin/sluice\n3000-7000 r-xp 00002000 fe:00 7   /usr/bin/sluice\n\
                    8000-9000 rw-p 00000000 00:00 0 \na000-c000 r--p 00000000 fe:00 9   /models/model.safetensors\n\
                    d000-e000 r-xp 00000000 00:00 0   [vdso]\nbroken\n";
        assert_eq!(code_bytes(maps), 0x6000);
    }

    #[test]
    fn the_tightest_group_counts_and_its_page_cache_is_free() {
        let dir = tempfile::tempdir().unwrap();
        let group = dir.path().join("a/b");
        fs::create_dir_all(&group).unwrap();
        for (folder, max, current) in [(dir.path().join("a"), "1000\n", "900\n"), (group.clone(), "max\n", "500\n")] {
            fs::write(folder.join("memory.max"), max).unwrap();
            fs::write(folder.join("memory.current"), current).unwrap();
        }
        fs::write(dir.path().join("a/memory.stat"), "anon 300\nfile 600\ninactive_file 500\nactive_file 100\n")
            .unwrap();
        assert_eq!(cgroup_in(dir.path(), "0::/a/b\n"), Some(MemoryLimit { limit: 1000, left: 700 }));
        assert_eq!(cgroup_in(dir.path(), "0::/elsewhere\n"), None);
    }

    #[test]
    fn this_process_has_memory() {
        let (peak, now) = (own_memory("VmHWM").unwrap(), own_memory("RssAnon").unwrap());
        assert!(peak >= now && now > 0 && available().unwrap() > 0);
        // The test program has no GPU code, so its code counts as less than it is.
        assert!((1 << 16..1 << 40).contains(&held().program), "{:?}", held());
    }
}
