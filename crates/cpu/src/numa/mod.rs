//! The topology of a machine: processors that share a core, and memory nodes.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

pub mod affinity;
mod replicas;

use affinity::{Mask, MemoryFrom};
pub use replicas::Replicas;

/// How threads and memory are placed on nodes. Changes speed, never the result.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Numa {
    /// Threads and memory are left to the kernel.
    #[default]
    Off,
    /// Pages and threads are placed on all nodes in turn, so that all memory is read at once.
    Spread,
    /// Threads are bound to processors of the current node, and memory is taken from it as long as it lasts.
    Isolate,
    /// As [`Numa::Spread`], but the threads of each node read their own copy of the weights.
    Replicate,
}

/// A core: the processors of it that this process may run on.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Core {
    node: usize,
    processors: Vec<usize>,
    /// Far slower than the fastest: a round of tasks would wait for it.
    is_slow: bool,
}

/// A core with less than this part of the fastest one's speed takes no part. The efficient cores of phones and of Intel's laptops have 0.3 to 0.6; a server's or an AMD's
/// cores, which differ by their best clock, 0.7 and more.
const SLOW: f64 = 0.6;

/// What tells a processor's speed, best first: the kernel's measure on ARM, the firmware's on x86, the best clock.
const SPEEDS: [&str; 3] = ["cpu_capacity", "acpi_cppc/highest_perf", "cpufreq/cpuinfo_max_freq"];

/// The processors that this process may run on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Processors {
    /// By their first processor.
    cores: Vec<Core>,
    /// The current node.
    current: usize,
}

/// The default number of threads: one for each core that this process may run on and that is not far slower than others, limited by the processor time of its control group.
pub fn default_threads(numa: Numa) -> usize {
    let granted = std::thread::available_parallelism().map_or(1, |n| n.get());
    Processors::here().cores(numa).clamp(1, granted)
}

impl Processors {
    /// This machine's.
    pub fn here() -> Processors {
        Processors::told_by(Path::new("/sys/devices/system"))
    }

    /// Reads a folder like `/sys/devices/system`, for the processors that this process may run on.
    pub fn told_by(root: &Path) -> Processors {
        let allowed = Mask::of(0).map_or(vec![], |mask| mask.processors());
        Processors::read(root, &allowed, affinity::current())
    }

    /// A processor that `root` does not describe counts as its own core, on the only node.
    fn read(root: &Path, allowed: &[usize], current: usize) -> Processors {
        let nodes = nodes(root);
        let mut cores: BTreeMap<usize, Core> = BTreeMap::new();
        for &processor in allowed {
            let siblings = root.join(format!("cpu/cpu{processor}/topology/thread_siblings_list"));
            let siblings = fs::read_to_string(siblings).map_or(vec![], |text| list(&text));
            let node = nodes.get(&processor).copied().unwrap_or(0);
            let core = siblings.into_iter().min().unwrap_or(processor);
            let new = Core { node, processors: vec![], is_slow: false };
            cores.entry(core).or_insert(new).processors.push(processor);
        }
        let mut cores: Vec<Core> = cores.into_values().collect();
        compare_speeds(root, &mut cores);
        Processors { cores, current }
    }

    /// Where some cores are far slower than others and there are enough of those: the processors that so many threads share, and a line that says it.
    pub fn fast(&self, threads: usize) -> Option<(Vec<usize>, String)> {
        let fast: Vec<&Core> = self.cores.iter().filter(|c| !c.is_slow).collect();
        let processors: Vec<usize> = fast.iter().flat_map(|c| c.processors.iter().copied()).collect();
        (fast.len() < self.cores.len() && threads <= processors.len()).then(|| {
            let note = format!("{threads} threads stay on the {} fast cores of {}", fast.len(), self.cores.len());
            (processors, note)
        })
    }

    /// The node that a processor is on.
    pub fn node_of(&self, processor: usize) -> Option<usize> {
        self.cores.iter().find(|c| c.processors.contains(&processor)).map(|c| c.node)
    }

    /// The nodes that have any of them, ascending.
    fn nodes(&self) -> Vec<usize> {
        let mut nodes: Vec<usize> = self.cores.iter().map(|c| c.node).collect();
        nodes.sort_unstable();
        nodes.dedup();
        nodes
    }

    /// The nodes that threads are put on.
    fn chosen(&self, numa: Numa) -> Vec<usize> {
        match (numa, self.node_of(self.current)) {
            (Numa::Isolate, Some(node)) => vec![node],
            _ => self.nodes(),
        }
    }

    /// Cores that threads are put on.
    fn cores(&self, numa: Numa) -> usize {
        let nodes = self.chosen(numa);
        self.cores.iter().filter(|c| nodes.contains(&c.node) && !c.is_slow).count()
    }

    /// The processor of each thread: from each node in turn, one processor of each core before the second of any. With more threads than processors it
    /// starts again. `None`: the kernel places threads, because the setting says so or there is only one node.
    pub fn of_threads(&self, numa: Numa, threads: usize) -> Option<Vec<usize>> {
        if numa == Numa::Off || self.nodes().len() < 2 {
            return None;
        }
        let mut of_nodes: Vec<Vec<usize>> = self.chosen(numa).iter().map(|n| self.of_node(*n)).collect();
        let most = of_nodes.iter().map(Vec::len).max()?;
        of_nodes.iter_mut().for_each(|n| n.resize(most, usize::MAX));
        let dealt = (0..most).flat_map(|i| of_nodes.iter().map(move |n| n[i])).filter(|p| *p != usize::MAX);
        Some(dealt.collect::<Vec<_>>().into_iter().cycle().take(threads).collect())
    }

    /// The processors of a node, one of each core before the second of any, fast cores first.
    fn of_node(&self, node: usize) -> Vec<usize> {
        let mut cores: Vec<&Core> = self.cores.iter().filter(|c| c.node == node).collect();
        cores.sort_by_key(|c| c.is_slow);
        let cores: Vec<&Vec<usize>> = cores.into_iter().map(|c| &c.processors).collect();
        let most = cores.iter().map(|c| c.len()).max().unwrap_or(0);
        (0..most).flat_map(|i| cores.iter().filter_map(move |c| c.get(i).copied())).collect()
    }

    /// Sets the memory policy of the calling thread and of threads that it starts later. Pages of files that are in memory already stay where they
    /// are. Returns a line that says what was done, `None` for nothing.
    pub fn place_memory(&self, numa: Numa) -> Option<String> {
        let (nodes, chosen) = (self.nodes(), self.chosen(numa));
        let (from, done) = match numa {
            Numa::Off => return None,
            _ if nodes.len() < 2 => return Some("numa: one node: nothing to do".into()),
            Numa::Spread | Numa::Replicate => {
                (MemoryFrom::Each(&chosen), format!("memory of {} nodes in turn", chosen.len()))
            }
            Numa::Isolate => (MemoryFrom::First(chosen[0]), format!("memory of node {}", chosen[0])),
        };
        let done = from.set().map_or_else(|e| format!("memory as the kernel gives it: {e}"), |()| done);
        Some(format!("numa: {done}"))
    }

    /// Describes the result of [`Processors::of_threads`] in a line.
    pub fn describe(&self, numa: Numa, threads: usize) -> String {
        let chosen = self.chosen(numa);
        let of = |c: &&Core| chosen.contains(&c.node);
        let (cores, processors) = (self.cores(numa), self.cores.iter().filter(of).map(|c| c.processors.len()).sum());
        let shared = match threads {
            n if n > processors => ", more than there are processors",
            n if n > cores => ", siblings too",
            _ => "",
        };
        match chosen[..] {
            [node] => format!("numa: {threads} threads bound to {cores} cores of node {node}{shared}"),
            _ => format!("numa: {threads} threads bound to {cores} cores of {} nodes{shared}", chosen.len()),
        }
    }
}

/// Reads the speed of each core, and finds those that are slow. Of several files the first counts that all cores have.
fn compare_speeds(root: &Path, cores: &mut [Core]) {
    let speed = |core: &Core, file: &str| -> Option<u64> {
        let path = root.join(format!("cpu/cpu{}/{file}", core.processors[0]));
        fs::read_to_string(path).ok()?.trim().parse().ok().filter(|speed| *speed > 0)
    };
    let all = |file| cores.iter().map(|core| speed(core, file)).collect::<Option<Vec<u64>>>();
    let Some(speeds) = SPEEDS.into_iter().find_map(all) else { return };
    let fastest = speeds.iter().copied().max().unwrap_or(0) as f64;
    for (core, speed) in cores.iter_mut().zip(speeds) {
        core.is_slow = (speed as f64) < SLOW * fastest;
    }
}

/// The node of each processor.
fn nodes(root: &Path) -> BTreeMap<usize, usize> {
    let mut of = BTreeMap::new();
    for entry in fs::read_dir(root.join("node")).into_iter().flatten().flatten() {
        let name = entry.file_name().into_string().unwrap_or_default();
        let Some(Ok(node)) = name.strip_prefix("node").map(str::parse) else { continue };
        let processors = fs::read_to_string(entry.path().join("cpulist")).unwrap_or_default();
        of.extend(list(&processors).into_iter().map(|processor| (processor, node)));
    }
    of
}

/// `0-3,8,10-11`; what is written otherwise is left out.
fn list(text: &str) -> Vec<usize> {
    let number = |text: &str| text.parse::<usize>().ok().filter(|n| *n < 1 << 16);
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        Some(number(first)?..=number(last)?)
    };
    text.trim().split(',').filter_map(range).flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A made-up machine: `nodes` nodes of `cores` cores, whose second processors come behind all first ones, as on most servers.
    fn machine(nodes: usize, cores: usize, siblings: usize) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        let all = nodes * cores;
        for node in 0..nodes {
            let of = |i: usize| format!("{}-{}", i * all + node * cores, i * all + (node + 1) * cores - 1);
            let folder = dir.path().join(format!("node/node{node}"));
            fs::create_dir_all(&folder).unwrap();
            let list: Vec<String> = (0..siblings).map(of).collect();
            fs::write(folder.join("cpulist"), list.join(",") + "\n").unwrap();
        }
        // Memory without processors, and files that are no nodes.
        fs::create_dir_all(dir.path().join("node/node9")).unwrap();
        fs::write(dir.path().join("node/node9/cpulist"), "\n").unwrap();
        fs::write(dir.path().join("node/possible"), "0-9\n").unwrap();
        for processor in 0..all * siblings {
            let folder = dir.path().join(format!("cpu/cpu{processor}/topology"));
            fs::create_dir_all(&folder).unwrap();
            let list: Vec<String> = (0..siblings).map(|i| (processor % all + i * all).to_string()).collect();
            fs::write(folder.join("thread_siblings_list"), list.join(",") + "\n").unwrap();
        }
        dir
    }

    fn all(n: usize) -> Vec<usize> {
        (0..n).collect()
    }

    #[test]
    fn lists_of_processors_are_read() {
        assert_eq!(list("0-3,8,10-11\n"), [0, 1, 2, 3, 8, 10, 11]);
        assert_eq!(list("5\n"), [5]);
        for text in ["", "\n", "x", "3-", "99999999999-3", "0-99999999"] {
            assert_eq!(list(text), [] as [usize; 0], "{text}");
        }
    }

    #[test]
    fn siblings_are_one_core() {
        let dir = machine(2, 4, 2);
        let here = Processors::read(dir.path(), &all(16), 0);
        assert_eq!((here.cores(Numa::Off), here.nodes()), (8, vec![0, 1]));
        // Whom the affinity mask leaves one processor of each of three cores, and both of another.
        let here = Processors::read(dir.path(), &[1, 2, 5, 7, 9], 1);
        assert_eq!(here.cores(Numa::Off), 4);
        assert_eq!((here.cores(Numa::Spread), here.cores(Numa::Isolate)), (4, 2));
    }

    #[test]
    fn spread_threads_take_nodes_in_turn_and_siblings_last() {
        let dir = machine(2, 4, 2);
        let here = Processors::read(dir.path(), &all(16), 0);
        let threads = |n| here.of_threads(Numa::Spread, n).unwrap();
        assert_eq!(threads(3), [0, 4, 1]);
        assert_eq!(threads(8), [0, 4, 1, 5, 2, 6, 3, 7]);
        assert_eq!(threads(16)[8..], [8, 12, 9, 13, 10, 14, 11, 15]);
        assert_eq!(threads(18)[16..], [0, 4]);
        // More of one node than of the other.
        let here = Processors::read(dir.path(), &[0, 1, 2, 4, 8], 0);
        assert_eq!(here.of_threads(Numa::Spread, 5).unwrap(), [0, 4, 1, 2, 8]);
        assert_eq!(here.of_threads(Numa::Replicate, 5), here.of_threads(Numa::Spread, 5));
        assert_eq!([0, 4, 2, 8, 3].map(|p| here.node_of(p)), [Some(0), Some(1), Some(0), Some(0), None]);
    }

    #[test]
    fn isolated_threads_stay_on_the_node_that_was_asked_on() {
        let dir = machine(2, 4, 2);
        let here = Processors::read(dir.path(), &all(16), 14);
        assert_eq!(here.cores(Numa::Isolate), 4);
        assert_eq!(here.of_threads(Numa::Isolate, 6).unwrap(), [4, 5, 6, 7, 12, 13]);
        assert_eq!(here.of_threads(Numa::Isolate, 9).unwrap()[8..], [4]);
    }

    #[test]
    fn on_one_node_and_where_nothing_is_asked_threads_are_left_to_the_kernel() {
        let one = machine(1, 4, 2);
        let here = Processors::read(one.path(), &all(8), 0);
        for numa in [Numa::Spread, Numa::Isolate, Numa::Replicate] {
            assert_eq!((here.of_threads(numa, 4), here.cores(numa)), (None, 4));
            assert_eq!(here.place_memory(numa).unwrap(), "numa: one node: nothing to do");
        }
        let two = machine(2, 4, 2);
        let here = Processors::read(two.path(), &all(16), 0);
        assert_eq!((here.of_threads(Numa::Off, 8), here.place_memory(Numa::Off)), (None, None));
        // All that one node has was taken away by the mask.
        let here = Processors::read(two.path(), &[0, 1, 8], 0);
        assert_eq!(here.of_threads(Numa::Spread, 2), None);
    }

    /// Writes what the system says of each processor's speed.
    fn tell_speeds(dir: &tempfile::TempDir, file: &str, speeds: &[u64]) {
        for (processor, speed) in speeds.iter().enumerate() {
            let path = dir.path().join(format!("cpu/cpu{processor}/{file}"));
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, format!("{speed}\n")).unwrap();
        }
    }

    #[test]
    fn slow_cores_take_no_part() {
        // A phone: one core of the fastest kind, three that are nearly as fast, four that are not.
        let phone = machine(1, 8, 1);
        tell_speeds(&phone, "cpu_capacity", &[320, 320, 320, 320, 740, 740, 740, 1024]);
        // What counts is the kernel's own measure, where it is there.
        tell_speeds(&phone, "cpufreq/cpuinfo_max_freq", &[1; 8]);
        let here = Processors::read(phone.path(), &all(8), 0);
        assert_eq!((here.cores(Numa::Off), here.of_threads(Numa::Off, 4)), (4, None));
        let (processors, note) = here.fast(4).unwrap();
        assert_eq!((processors, &*note), (vec![4, 5, 6, 7], "4 threads stay on the 4 fast cores of 8"));
        // Whoever asks for more threads gets all cores.
        assert_eq!(here.fast(5), None);
        // Without any of the fast ones, the others are as fast as it gets.
        let here = Processors::read(phone.path(), &[0, 1, 2], 0);
        assert_eq!((here.cores(Numa::Off), here.fast(2)), (3, None));
        // A laptop with two processors in each fast core.
        let laptop = machine(1, 4, 2);
        tell_speeds(&laptop, "acpi_cppc/highest_perf", &[70, 70, 40, 40, 70, 70, 40, 40]);
        let here = Processors::read(laptop.path(), &all(8), 0);
        assert_eq!((here.cores(Numa::Off), here.fast(3).unwrap().0), (2, vec![0, 4, 1, 5]));
        // A server whose cores differ by their best clock, and one of which some cores say nothing.
        let server = machine(2, 4, 1);
        tell_speeds(&server, "cpufreq/cpuinfo_max_freq", &[3_700_000, 3_400_000, 3_100_000, 2_900_000]);
        assert_eq!(Processors::read(server.path(), &all(8), 0).cores(Numa::Off), 8);
        tell_speeds(&server, "cpufreq/cpuinfo_max_freq", &[3_700_000; 8]);
        tell_speeds(&server, "cpu_capacity", &[1024, 1]);
        assert_eq!(Processors::read(server.path(), &all(8), 0).cores(Numa::Off), 8);
    }

    #[test]
    fn threads_of_a_node_take_its_fast_cores_first() {
        let dir = machine(2, 4, 1);
        tell_speeds(&dir, "cpu_capacity", &[100, 100, 1000, 1000, 1000, 1000, 100, 100]);
        let here = Processors::read(dir.path(), &all(8), 0);
        assert_eq!(here.cores(Numa::Spread), 4);
        assert_eq!(here.of_threads(Numa::Spread, 8).unwrap(), [2, 4, 3, 5, 0, 6, 1, 7]);
    }

    #[test]
    fn a_machine_that_says_nothing_has_a_core_for_each_processor() {
        let dir = tempfile::tempdir().unwrap();
        let here = Processors::read(dir.path(), &[0, 1, 2], 0);
        assert_eq!((here.cores(Numa::Off), here.nodes()), (3, vec![0]));
        assert_eq!(here.of_threads(Numa::Spread, 3), None);
    }

    #[test]
    fn what_was_done_is_said() {
        let dir = machine(2, 4, 2);
        let here = Processors::read(dir.path(), &all(16), 5);
        for (numa, threads, said) in [
            (Numa::Spread, 8, "numa: 8 threads bound to 8 cores of 2 nodes"),
            (Numa::Spread, 17, "numa: 17 threads bound to 8 cores of 2 nodes, more than there are processors"),
            (Numa::Isolate, 5, "numa: 5 threads bound to 4 cores of node 1, siblings too"),
        ] {
            assert_eq!(here.describe(numa, threads), said);
        }
        // A thread of its own keeps what it was told about memory. Here there may be no second node, or no right to choose.
        let memory = |numa| {
            let here = here.clone();
            std::thread::spawn(move || here.place_memory(numa).unwrap()).join().unwrap()
        };
        let spread = "memory of 2 nodes in turn";
        for (numa, done) in [(Numa::Spread, spread), (Numa::Replicate, spread), (Numa::Isolate, "memory of node 1")] {
            let said = memory(numa);
            let refused = said.starts_with("numa: memory as the kernel gives it: ");
            assert!(refused || said == format!("numa: {done}"), "{said}");
        }
    }

    #[test]
    fn there_is_a_thread_for_this_process() {
        let here = Processors::here();
        let granted = std::thread::available_parallelism().unwrap().get();
        assert!((1..=granted).contains(&default_threads(Numa::Off)));
        assert!(here.cores(Numa::Isolate) <= here.cores(Numa::Spread));
        assert_eq!(
            here.cores.iter().map(|c| c.processors.len()).sum::<usize>(),
            Mask::of(0).unwrap().processors().len()
        );
    }
}
