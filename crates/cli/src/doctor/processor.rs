//! The processor: its name, how much of it this process may use, and its instruction sets.

use std::fs;
use std::path::Path;

use serde::Serialize;
use sluice_backend::Isa;
use sluice_cpu::{Numa, default_threads};

/// What each instruction set needs, in the words of `/proc/cpuinfo`.
#[cfg(not(target_arch = "aarch64"))]
const NEEDS: [(&str, &[&str]); 4] = [
    ("avx2", &["avx2", "fma", "f16c", "bmi2"]),
    ("avxvnni", &["avx_vnni"]),
    ("avx512", &["avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "avx512vbmi", "avx512_bf16"]),
    ("amx", &["amx_tile", "amx_int8"]),
];
#[cfg(target_arch = "aarch64")]
const NEEDS: [(&str, &[&str]); 3] = [("neon", &["asimd"]), ("dotprod", &["asimddp"]), ("i8mm", &["asimddp", "i8mm"])];

/// An instruction set that kernels are written for.
#[derive(Serialize)]
pub struct InstructionSet {
    pub name: String,
    pub is_supported: bool,
    /// Features that the kernel does not report, of one that is not supported. It may report none at all: macOS has no such file, and qemu shows the host's.
    pub missing: Vec<String>,
}

#[derive(Serialize)]
pub struct Processor {
    pub name: Option<String>,
    /// Logical processors of the machine.
    pub processors: usize,
    /// Those that this process may run on at once, by affinity and its control group's time.
    pub granted: usize,
    /// Threads that a command uses by default.
    pub threads: usize,
    /// Processors' worth of time that the control group grants, if it has a limit.
    pub group_limit: Option<f64>,
    pub nodes: usize,
    pub governor: Option<String>,
    pub instruction_sets: Vec<InstructionSet>,
    /// The one in use, or why there is none.
    pub in_use: String,
}

impl Processor {
    pub fn find() -> Processor {
        let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        // The names of the field on x86 and on ARM.
        let flags = field(&info, "flags").or_else(|| field(&info, "Features")).unwrap_or_default();
        let flags: Vec<&str> = flags.split_ascii_whitespace().collect();
        let supported: Vec<String> = Isa::supported().iter().map(ToString::to_string).collect();
        let one = |(name, needs): (&str, &[&str])| {
            let is_supported = supported.iter().any(|known| known == name);
            let missing = needs.iter().filter(|flag| !is_supported && !flags.contains(flag));
            InstructionSet {
                name: name.to_owned(),
                is_supported,
                missing: missing.map(|flag| (*flag).to_owned()).collect(),
            }
        };
        let processors = info.lines().filter(|line| line.starts_with("processor")).count();
        let granted = std::thread::available_parallelism().map_or(1, |n| n.get());
        let own = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        Processor {
            name: field(&info, "model name").map(str::to_owned).or_else(|| arm_name(&info)),
            processors: processors.max(granted),
            granted,
            threads: default_threads(Numa::Off),
            group_limit: group_limit(Path::new("/sys/fs/cgroup"), &own),
            nodes: nodes(Path::new("/sys/devices/system/node")),
            governor: word("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
            instruction_sets: NEEDS.into_iter().map(one).collect(),
            in_use: Isa::from_env().map_or_else(|e| e.to_string(), |isa| isa.to_string()),
        }
    }

    pub fn lines(&self) -> Vec<(&'static str, String)> {
        let mut text =
            format!("{}, {}", self.name.as_deref().unwrap_or("unknown"), counted(self.processors, "processor"));
        if self.granted < self.processors {
            text += &format!(", of which this process may use {}", self.granted);
        }
        text += &format!("; {} by default", counted(self.threads, "thread"));
        if self.nodes > 1 {
            text += &format!("; {} memory nodes", self.nodes);
        }
        let sets = self.instruction_sets.iter().map(|set| match (set.is_supported, &set.missing[..]) {
            (true, _) => set.name.clone(),
            (false, []) => format!("no {} (the system does not permit it)", set.name),
            (false, missing) => format!("no {} (lacks {})", set.name, missing.join(", ")),
        });
        let sets = format!("{}; in use: {}", sets.collect::<Vec<_>>().join(", "), self.in_use);
        vec![("processor", text), ("", sets)]
    }
}

/// `3 nodes`, `1 node`.
fn counted(n: usize, one: &str) -> String {
    format!("{n} {one}{}", if n == 1 { "" } else { "s" })
}

/// `flags : fpu vme`, of the first processor.
fn field<'a>(info: &'a str, name: &str) -> Option<&'a str> {
    info.lines().find_map(|line| {
        let (key, value) = line.split_once(':')?;
        (key.trim() == name).then(|| value.trim())
    })
}

/// ARM gives numbers instead of a name: the maker of the design, and which of them it is.
fn arm_name(info: &str) -> Option<String> {
    let (maker, part) = (field(info, "CPU implementer")?, field(info, "CPU part")?);
    let maker = match maker {
        "0x41" => "ARM",
        "0x4e" => "NVIDIA",
        "0x51" => "Qualcomm",
        "0x61" => "Apple",
        "0xc0" => "Ampere",
        other => other,
    };
    Some(format!("{maker} part {part}"))
}

/// The first word of a small file.
pub fn word(path: &str) -> Option<String> {
    Some(fs::read_to_string(path).ok()?.split_ascii_whitespace().next()?.to_owned())
}

fn nodes(folder: &Path) -> usize {
    let is_node = |name: &str| name.strip_prefix("node").is_some_and(|n| n.parse::<u32>().is_ok());
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.filter(|entry| entry.file_name().to_str().is_some_and(is_node)).count().max(1)
}

/// Processors' worth of time: the least of the group and those above it. `own`: the text of `/proc/self/cgroup`.
fn group_limit(root: &Path, own: &str) -> Option<f64> {
    let of = |folder: &Path, path: &str, read: &dyn Fn(&Path) -> Option<f64>| {
        Path::new(path.trim_start_matches('/'))
            .ancestors()
            .filter_map(|group| read(&folder.join(group)))
            .collect::<Vec<_>>()
    };
    let text = |folder: &Path, name: &str| fs::read_to_string(folder.join(name)).ok();
    let found = own.lines().flat_map(|line| {
        let mut fields = line.splitn(3, ':').skip(1);
        let (controllers, path) = (fields.next().unwrap_or(""), fields.next().unwrap_or(""));
        match controllers {
            "" => of(root, path, &|folder| quota(&text(folder, "cpu.max")?)),
            c if c.split(',').any(|c| c == "cpu") => of(&root.join("cpu"), path, &|folder| {
                quota(&format!("{} {}", text(folder, "cpu.cfs_quota_us")?.trim(), text(folder, "cpu.cfs_period_us")?))
            }),
            _ => vec![],
        }
    });
    found.min_by(f64::total_cmp)
}

/// `150000 100000`: microseconds of time in each period; `max` or -1 is no limit.
fn quota(text: &str) -> Option<f64> {
    let mut numbers = text.split_ascii_whitespace().map(str::parse::<f64>);
    let (time, period) = (numbers.next()?.ok()?, numbers.next()?.ok()?);
    (time > 0.0 && period > 0.0).then_some(time / period)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tightest_group_limits_the_time() {
        let root = tempfile::tempdir().unwrap();
        let group = root.path().join("a/b");
        fs::create_dir_all(&group).unwrap();
        fs::write(root.path().join("a/cpu.max"), "150000 100000\n").unwrap();
        fs::write(group.join("cpu.max"), "max 100000\n").unwrap();
        assert_eq!(group_limit(root.path(), "0::/a/b\n"), Some(1.5));
        assert_eq!(group_limit(root.path(), "0::/\n"), None);
        assert_eq!((quota("-1 100000"), quota("max"), quota("")), (None, None, None));
    }

    #[test]
    fn a_processor_without_a_name_is_told_by_numbers() {
        let info = "processor\t: 0\nFeatures\t: fp asimd asimddp\nCPU implementer\t: 0x41\nCPU part\t: 0xd0c\n";
        assert_eq!(arm_name(info).as_deref(), Some("ARM part 0xd0c"));
        assert_eq!(arm_name("processor : 0\n"), None);
    }

    #[test]
    fn instruction_sets_of_this_machine_are_told() {
        let found = Processor::find();
        assert!(found.granted >= 1 && found.processors >= found.granted && found.nodes >= 1);
        for isa in Isa::supported().iter().filter(|isa| **isa != Isa::GENERIC) {
            let told = found.instruction_sets.iter().find(|set| set.name == isa.to_string());
            assert!(told.is_some_and(|set| set.is_supported && set.missing.is_empty()), "{isa}");
        }
    }
}
