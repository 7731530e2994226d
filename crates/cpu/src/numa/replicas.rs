//! A copy of the weights on each memory node, so that every thread reads from its own. Only addresses differ, so results have the same bits.
//!
//! Copies are made between steps, a portion at a time, so that no step waits for more than one portion. Weights without copies are read where they were
//! loaded. A weight stores its copies and a thread its node.

use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use sluice_store::{Buffer, Bytes, Loading};

use crate::exec::Worker;
use crate::memory::{Parts, PerThread, Weight};
use crate::threads::Pool;

/// Bytes of weights that are copied before a step, some ten milliseconds' worth. At least one matrix is copied.
const PORTION: usize = 256 << 20;
/// Bytes that a thread copies at once.
const PIECE: usize = 1 << 20;
/// Alignment of a plane in a copy: a cache line.
const ALIGNED: usize = 64;

/// The copies made so far.
pub struct Replicas {
    /// The nodes that threads are bound to, ascending: at least two.
    nodes: Vec<usize>,
    /// Weights before this one have copies. `None`: none are wanted yet, or no more.
    next: Option<usize>,
    /// Bytes of all copies, without the weights that the first node uses where they were read to.
    bytes: usize,
    /// The error that ended copying.
    failed: Option<String>,
}

impl Replicas {
    /// For threads on these nodes. `None`: all are on one.
    pub fn new(of_threads: &[usize]) -> Option<Replicas> {
        let mut nodes = of_threads.to_vec();
        nodes.sort_unstable();
        nodes.dedup();
        (nodes.len() > 1).then_some(Replicas { nodes, next: None, bytes: 0, failed: None })
    }

    pub fn nodes(&self) -> &[usize] {
        &self.nodes
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }

    pub fn failed(&self) -> Option<&String> {
        self.failed.as_ref()
    }

    /// From here on copies weights once they are read. Weights that `loading` reads into our own memory go to the first node and need no other copy there.
    /// Returns a line that says what will be done.
    pub fn begin(&mut self, loading: Option<&Loading>) -> String {
        self.next = Some(0);
        let first = loading.map_or(Ok(()), |loading| loading.prefer_node(self.nodes[0]));
        let refused = self.nodes.iter().try_for_each(|node| Buffer::large(1)?.prefer_node(*node)).and(first);
        let of = format!("numa: a copy of the weights for each of {} nodes", self.nodes.len());
        match refused {
            Ok(()) => of,
            Err(e) => format!("{of}, in memory as the kernel gives it: {e}"),
        }
    }

    /// Copies a portion of the weights that have been read and have no copies. Returns whether there were any.
    pub fn copy_some(&mut self, weights: &mut [Weight], pool: &mut Pool, workers: &PerThread<Worker>) -> bool {
        let Some(next) = self.next else { return false };
        let portion = Portion::of(weights, next);
        if portion.weights.is_empty() {
            return false;
        }
        match self.copy(&portion, weights, pool, workers) {
            Ok(()) => self.next = Some(portion.end),
            Err(e) => {
                self.next = None;
                self.failed = Some(format!("numa: not all weights are copied for each node: {e}"));
            }
        }
        true
    }

    fn copy(
        &mut self,
        portion: &Portion,
        weights: &mut [Weight],
        pool: &mut Pool,
        workers: &PerThread<Worker>,
    ) -> io::Result<()> {
        // 1. Allocate on each node. Weights that were read into our own memory are already on the first.
        let there = usize::from(!portion.mapped);
        let memory = |node: &usize| {
            let buffer = Buffer::large(portion.len)?;
            // A refusal was reported at the beginning.
            let _ = buffer.prefer_node(*node);
            Ok(buffer)
        };
        let mut buffers = self.nodes[there..].iter().map(memory).collect::<io::Result<Vec<_>>>()?;
        // 2. Each thread copies to its own node and then helps others, since a thread may be late.
        let pieces = portion.pieces(weights);
        let to: Vec<_> = buffers.iter_mut().map(|buffer| (AtomicUsize::new(0), Parts::new(&mut buffer[..]))).collect();
        pool.use_threads(pool.threads());
        pool.run(pool.threads(), &|_, thread| {
            // SAFETY: one borrow, by the task that runs as this thread.
            let own = unsafe { workers.get(thread) }.node + to.len() - there;
            for i in 0..to.len() {
                let (next, to) = &to[(own + i) % to.len()];
                while let Some((at, piece)) = pieces.get(next.fetch_add(1, Ordering::Relaxed)) {
                    // SAFETY: this task alone has taken this piece of this node's copy.
                    unsafe { to.get(*at..at + piece.len()) }.copy_from_slice(piece);
                }
            }
        });
        // 3. Use the copies from the next step on. The page cache may drop mapped files.
        self.bytes += buffers.len() * portion.len;
        let copies: Vec<Bytes> = buffers.into_iter().map(Bytes::from).collect();
        for (number, arrays) in &portion.weights {
            let weight = &mut weights[*number];
            let copy = |copy: &Bytes| arrays.iter().map(|array| copy.slice(array.clone())).collect();
            let source = std::iter::repeat_n(weight.planes().to_vec(), there);
            let all = source.chain(copies.iter().map(copy)).collect();
            weight.set_copies(all);
            // Where the kernel refuses, it counts until somebody needs its pages.
            weight.planes().iter().for_each(|bytes| _ = bytes.leave());
        }
        Ok(())
    }
}

/// Weights that are copied together: all mapped, or all read to memory of our own.
struct Portion {
    /// Weight numbers, and the offset of each plane in the copy.
    weights: Vec<(usize, Vec<Range<usize>>)>,
    /// The weight after the last.
    end: usize,
    /// Bytes of a copy.
    len: usize,
    mapped: bool,
}

impl Portion {
    /// The weights from `next` on that have been read.
    fn of(all: &[Weight], next: usize) -> Portion {
        let mut portion = Portion { weights: Vec::new(), end: next, len: 0, mapped: false };
        for (number, weight) in all.iter().enumerate().skip(next).filter(|(_, w)| !w.streamed) {
            if portion.weights.is_empty() {
                portion.mapped = weight.is_mapped();
            }
            if portion.len >= PORTION || weight.is_mapped() != portion.mapped || !weight.is_ready() {
                break;
            }
            let mut place = |bytes: &Bytes| {
                let at = portion.len.next_multiple_of(ALIGNED);
                portion.len = at + bytes.len();
                at..portion.len
            };
            let arrays = weight.planes().iter().map(&mut place).collect();
            portion.weights.push((number, arrays));
            portion.end = number + 1;
        }
        portion
    }

    /// Sources, and their offsets in the copy.
    fn pieces<'a>(&self, weights: &'a [Weight]) -> Vec<(usize, &'a [u8])> {
        let arrays = self.weights.iter().flat_map(|(number, arrays)| arrays.iter().zip(weights[*number].planes()));
        arrays.flat_map(|(to, from)| (to.start..).step_by(PIECE).zip(from.chunks(PIECE))).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use sluice_kernels::Isa;
    use sluice_kernels::format::{Activations, Float, WeightFormat};

    use super::*;
    use crate::Cpu;
    use crate::numa::affinity::Mask;
    use crate::numa::{Numa, Processors};
    use sluice_backend::{
        Backend, Capacity, Linear, MatrixId, MatrixSource, MemoryClass, Operations, Projection, Resources, StepInputs,
        Tensor,
    };

    const ROWS: usize = 4096;
    const COLS: usize = 256;

    /// The processors of this process, every second of which is said to be on another node. `None`: it has one.
    fn two_nodes() -> Option<Processors> {
        let all = Mask::of(0).unwrap().processors();
        if all.len() < 2 {
            println!("SKIPPED: there is one processor");
            return None;
        }
        let root = tempfile::tempdir().unwrap();
        for node in 0..2 {
            let folder = root.path().join(format!("node/node{node}"));
            fs::create_dir_all(&folder).unwrap();
            let processors: Vec<String> = all.iter().skip(node).step_by(2).map(usize::to_string).collect();
            fs::write(folder.join("cpulist"), processors.join(",")).unwrap();
        }
        Some(Processors::told_by(root.path()))
    }

    fn weight(seed: u64) -> Vec<u8> {
        let value = |i: u64| (i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as f32 / (1 << 24) as f32 - 0.5;
        (0..(ROWS * COLS) as u64).flat_map(|i| value(i + (seed << 32)).to_le_bytes()).collect()
    }

    /// Four threads on two nodes, and two matrices.
    struct Case {
        cpu: Cpu,
        x: Tensor,
        out: Tensor,
    }

    impl Case {
        fn new() -> Option<Case> {
            let mut cpu = Cpu::new(Isa::GENERIC, 4, Activations::F32).unwrap();
            cpu.bind(&two_nodes()?, Numa::Replicate).unwrap();
            let form = WeightFormat::Float(Float::F32);
            for seed in 0..2 {
                let parts = vec![Bytes::from(weight(seed))];
                cpu.matrix(MatrixSource { format: form, rows: ROWS, cols: COLS, planes: parts }).unwrap();
            }
            let [x, out] = [COLS, ROWS].map(|cols| cpu.alloc(MemoryClass::Scratch, 1, cols).unwrap());
            cpu.upload(&(0..COLS).map(|i| i as f32).collect::<Vec<_>>(), x);
            Some(Case { cpu, x, out })
        }

        /// A step: the product with the first matrix.
        fn step(&mut self) -> Vec<f32> {
            let linear = Linear { matrix: MatrixId::new(0), rows: 0..ROWS, bias: None };
            self.cpu.begin(&StepInputs::new(&[], Capacity { tokens: 0, sequences: 0, blocks: 0 }));
            self.cpu.project(self.x, None, &[Projection { linear, out: self.out }]);
            self.cpu.end();
            let mut values = vec![0.0; ROWS];
            self.cpu.download(self.out, &mut values);
            values
        }

        fn copied(&mut self) -> usize {
            let uses = self.cpu.memory();
            uses.iter().find(|m| m.class == MemoryClass::WeightsCopied).unwrap().bytes
        }
    }

    #[test]
    fn a_copy_lies_elsewhere_and_gives_the_same() {
        let Some(mut case) = Case::new() else { return };
        assert_eq!(case.cpu.weight_copies(), 2);
        assert_eq!(case.cpu.workers.iter_mut().map(|w| w.node).collect::<Vec<_>>(), [0, 1, 0, 1]);
        let (plain, size) = (case.step(), 4 * ROWS * COLS);
        assert!(!case.cpu.copy_weights() && case.copied() == 2 * size, "nobody has asked for copies");
        let said = case.cpu.replicate_weights(None).unwrap();
        assert!(said.starts_with("numa: a copy of the weights for each of 2 nodes"), "{said}");
        assert_eq!(case.step(), plain);
        // Weights in memory of our own are the first node's copy.
        assert_eq!(case.copied(), 4 * size);
        for weight in &case.cpu.weights {
            let [first, second] = [0, 1].map(|node| &weight.planes_on(node)[0]);
            assert_eq!(first.as_ptr(), weight.planes()[0].as_ptr());
            assert!(first.as_ptr() != second.as_ptr() && first[..] == second[..]);
        }
        assert!(!case.cpu.copy_weights() && case.cpu.notes().iter().all(|note| !note.contains("copied")));
    }

    #[test]
    fn a_thread_reads_the_copy_of_its_node() {
        let Some(mut case) = Case::new() else { return };
        let plain = case.step();
        case.cpu.replicate_weights(None).unwrap();
        assert!(case.cpu.copy_weights());
        assert_eq!(case.step(), plain);
        let first = case.cpu.weights[0].planes().to_vec();
        let zeros = || vec![Bytes::from(vec![0; 4 * ROWS * COLS])];
        case.cpu.weights[0].set_copies(vec![zeros(), zeros()]);
        assert!(case.step().iter().all(|y| *y == 0.0), "the source is read by nobody");
        case.cpu.weights[0].set_copies(vec![first, zeros()]);
        // Which thread computes which rows differs from step to step.
        let mut seen = [false; 2];
        for _ in 0..1000 {
            for (y, plain) in case.step().iter().zip(&plain) {
                assert!(y == plain || *y == 0.0);
                seen[usize::from(y != plain)] = true;
            }
            if seen == [true; 2] {
                return;
            }
        }
        panic!("only threads of one node have computed anything");
    }

    #[test]
    fn what_stays_on_disk_is_not_copied() {
        let Some(mut case) = Case::new() else { return };
        case.cpu.weights[0].streamed = true;
        case.cpu.replicate_weights(None).unwrap();
        while case.cpu.copy_weights() {}
        assert_eq!(case.cpu.weights.iter().map(Weight::is_copied).collect::<Vec<_>>(), [false, true]);
    }

    #[test]
    fn threads_of_one_node_need_no_copies() {
        assert!(Replicas::new(&[3, 3, 3]).is_none());
        assert_eq!(Replicas::new(&[4, 1, 4, 1]).unwrap().nodes(), [1, 4]);
    }
}
