//! Mixtures whose experts stay on disk: the same bits as in memory for any residency and prediction, and the failed rows when the disk fails.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, Mutex};

use fastrand::Rng;
use sluice_backend::{ExpertKind, ExpertOptions, Float, Lookahead, MatrixId, MatrixSource, MoeId, WeightFormat};
use sluice_experts::{Error, Keep, Policy, ReadFaults};
use sluice_store::load::{self, LoadOptions};
use sluice_store::{Bytes, Checkpoint, Dtype, TensorPlan, Writer};

use super::mixture::{CLAMPED_COLS, Drawn};
use crate::case::Case;
use crate::weights::{Parts, unit};

/// A disk that is sometimes slow and has unreadable places.
#[derive(Debug)]
struct Disk {
    late: Mutex<Rng>,
    dead: Vec<Range<u64>>,
}

/// A disk's error, on Linux.
const EIO: i32 = 5;

impl ReadFaults for Disk {
    fn intercept(&self, _: &Path, at: u64, memory: &mut [u8], came: io::Result<usize>) -> Option<io::Result<usize>> {
        if self.late.lock().unwrap().u8(..3) == 0 {
            return None;
        }
        let end = at + memory.len() as u64;
        if self.dead.iter().any(|dead| dead.start < end && at < dead.end) {
            memory.fill(0xee);
            return Some(Err(io::Error::from_raw_os_error(EIO)));
        }
        Some(came)
    }
}

const PAGE: usize = 4096;

/// The matrices of a file, and the place of each run of them on disk.
pub struct OnDisk {
    pub matrices: Vec<Vec<MatrixId>>,
    runs: Vec<Range<u64>>,
}

/// The place of a matrix: its blob, and the ranges of its planes.
type InBlob = (usize, [Range<usize>; 3]);

/// Which arrays of matrices are not taken from the file, but were made in memory.
#[derive(Clone, Copy, Debug, PartialEq)]
enum InMemory {
    None,
    /// Scales and biases.
    Scales,
    All,
}

/// Writes matrices to a file, each of `runs` (layer and numbers of matrices) in its own pages, and registers them from there.
pub fn on_disk(c: &mut Case, drawn: &[Drawn], runs: &[(usize, Vec<usize>)]) -> OnDisk {
    with_some_in_memory(c, drawn, runs, |_| InMemory::None)
}

/// The same, where some arrays are in memory. `which`: by layer.
fn with_some_in_memory(
    c: &mut Case,
    drawn: &[Drawn],
    runs: &[(usize, Vec<usize>)],
    which: impl Fn(usize) -> InMemory,
) -> OnDisk {
    // 1. The file
    let mut blobs: Vec<Vec<u8>> = Vec::new();
    let mut places: BTreeMap<(usize, usize), InBlob> = BTreeMap::new();
    for (layer, numbers) in runs {
        let mut blob = vec![0; c.random.usize(..50)];
        for &number in numbers {
            let ranges = [0, 1, 2].map(|i| {
                blob.extend((0..c.random.usize(..9)).map(|_| 0));
                let from = blob.len();
                blob.extend_from_slice(&drawn[*layer].matrices[number].bytes[i]);
                from..blob.len()
            });
            places.insert((*layer, number), (blobs.len(), ranges));
        }
        blob.resize(blob.len().next_multiple_of(PAGE), 0);
        blobs.push(blob);
    }
    let folder = tempfile::tempdir().expect("a folder for experts");
    let name = |i: usize| format!("run.{i:04}");
    let plans: Vec<TensorPlan> =
        (0..blobs.len()).map(|i| TensorPlan { name: name(i), dtype: Dtype::U8, shape: vec![blobs[i].len()] }).collect();
    let path = folder.path().join("model.safetensors");
    let mut writer = Writer::aligned(&path, &plans, &BTreeMap::new(), PAGE).expect("a new file");
    blobs.iter().enumerate().for_each(|(i, blob)| writer.append(&name(i), blob).expect("room on the disk"));
    writer.finish().expect("a whole file");
    // 2. Its views
    let all = |checkpoint: &Checkpoint| checkpoint.tensors().iter().map(|t| t.name.to_string()).collect();
    let (checkpoint, loading) = load::open_except(folder.path(), &LoadOptions::default(), all).expect("a sound file");
    let mut matrices = vec![Vec::new(); drawn.len()];
    for (&(layer, number), (blob, ranges)) in &places {
        let Parts { form, rows, cols, .. } = drawn[layer].matrices[number];
        let bytes: Bytes = checkpoint.tensor(&name(*blob)).expect("as written").bytes;
        let arrays = form.planes(cols).expect("a form that there is").len();
        let plane = |(i, range): (usize, &Range<usize>)| {
            let stored = bytes.slice(range.clone());
            match which(layer) {
                InMemory::All => Bytes::from(stored.to_vec()),
                InMemory::Scales if i > 0 => Bytes::from(stored.to_vec()),
                _ => stored,
            }
        };
        let parts = ranges.iter().take(arrays).enumerate().map(plane).collect();
        let source = MatrixSource { format: form, rows, cols, planes: parts };
        assert_eq!(matrices[layer].len(), number);
        matrices[layer].push(c.backend.matrix(source).expect("a matrix of a known form"));
    }
    let place = |i: usize| checkpoint.place(&name(i)).expect("as written").1;
    let runs = (0..blobs.len()).map(|i| place(i)..place(i) + blobs[i].len() as u64).collect();
    c.keep((checkpoint, loading, folder));
    OnDisk { matrices, runs }
}

/// Starts to stream with random options, and up to `most` bytes on a device.
pub fn stream(c: &mut Case, dead: Vec<Range<u64>>, layers: usize, most: u64) {
    let pinned = (0..c.random.usize(..4)).map(|_| (c.random.usize(..layers), c.random.usize(..4))).collect();
    let disk = Disk { late: Mutex::new(c.random.fork()), dead };
    let (parts, all) = (c.random.u64(..8), c.once_in(3));
    // Device memory beyond what a layer needs: none, some, or all.
    let some = c.random.u64(..most);
    let device_budget = c.one_of(&[Some(0), Some(some), Some(some), None]);
    let lookahead = c.one_of(&[Lookahead::Off, Lookahead::On, Lookahead::Auto]);
    let options = ExpertOptions {
        device_budget,
        keep: c.one_of(&[Keep::Slots, Keep::Slots, Keep::PageCache]),
        policy: c.one_of(&Policy::ALL),
        pinned,
        request: PAGE * c.random.usize(1..5),
        depth: Some(c.random.usize(1..20)),
        io_uring: c.coin(),
        threads: c.random.usize(1..4),
        faults: Some(Arc::new(disk)),
        ..ExpertOptions::default()
    };
    let ExpertOptions { keep, policy, request, depth, io_uring, .. } = &options;
    c.shape(format!(
        "{keep:?}, {policy:?}, requests of {request}, depth {depth:?}, io_uring {io_uring}, {lookahead:?}, {device_budget:?} on a device, room for all {all}, or {parts} parts more"
    ));
    if c.is_reference {
        return;
    }
    // The least that will do is in the refusal of nothing.
    let refused = c.backend.stream_experts(&ExpertOptions { budget: 0, ..options.clone() }, lookahead).unwrap_err();
    let Some(Error::ExpertBudget { needed, .. }) = refused.downcast_ref::<Error>() else { panic!("{refused:#}") };
    let budget = if all { u64::MAX } else { needed + needed * parts / 8 };
    c.backend.stream_experts(&ExpertOptions { budget, ..options }, lookahead).expect("room for what a token wants");
}

pub fn layers(c: &mut Case, hidden: usize, stacked: bool) -> Vec<Drawn> {
    let mut drawn = Vec::new();
    let group = c.uniform.map_or(32, |format| unit(format).max(64));
    for _ in 0..c.random.usize(1..=3) {
        let (count, intermediate) = (c.random.usize(4..=12), group * c.random.usize(1..=3));
        drawn.push(c.experts(count, hidden, intermediate, stacked));
    }
    drawn
}

pub fn streamed(c: &mut Case) {
    // Half of the cases are like real checkpoints, for which backends may have faster kernels: matrices of one format with groups of 64 or with blocks, and mostly one
    // or a few tokens.
    let usual = c.coin();
    let in_blocks = usual && c.once_in(3);
    if in_blocks {
        c.uniform = Some(c.blocks(256));
    } else if usual {
        let (bits, scale) = (c.one_of(&[2, 3, 4, 4, 4, 5, 6, 8]), c.one_of(&[Float::F16, Float::Bf16]));
        c.uniform = Some(WeightFormat::Affine { bits, group: 64, scale });
    }
    let (hidden, stacked) = (if usual { 256 } else { 32 } * c.random.usize(1..=4), c.coin());
    let hidden = if in_blocks { 256 } else { hidden };
    let drawn = layers(c, hidden, stacked);
    let runs: Vec<_> = drawn.iter().enumerate().map(|(l, d)| (l, (0..d.matrices.len()).collect())).collect();
    let moes = c.mixtures(&drawn, |c| on_disk(c, &drawn, &runs).matrices);
    c.uniform = None;
    // Blocks have more columns. Steps enough that experts come to a device and go again.
    let (most, steps) = if in_blocks { (1 << 22, 16) } else { (1 << 19, 5) };
    stream(c, vec![], drawn.len(), most);
    if !usual && c.coin() {
        c.backend.record_routing();
    }
    for _ in 0..steps {
        let few = c.one_of(&[1, 1, 2, 5]);
        let tokens = if usual && !c.once_in(4) { few } else { c.tokens() };
        let x = c.tensor(tokens, hidden);
        c.shape(format!("{tokens} tokens"));
        let outcome = c.step(tokens, |b| moes.iter().for_each(|moe| b.mixture(x.tensor, *moe, x.tensor)));
        c.see("residual", x.whole);
        c.see_routing(&outcome);
        c.see_text("failed rows", format!("{}", outcome.failed.len()));
    }
    let streams = c.is_reference || c.backend.take_streamed().is_some();
    c.see_text("streams", format!("{streams}"));
}

pub fn clamped(c: &mut Case) {
    c.draw_clamped_format();
    let (hidden, stacked) = (c.one_of(&CLAMPED_COLS), !c.once_in(4));
    let mut drawn = layers(c, hidden, stacked);
    drawn.iter_mut().for_each(|drawn| c.make_clamped(drawn));
    let runs: Vec<_> = drawn.iter().enumerate().map(|(l, d)| (l, (0..d.matrices.len()).collect())).collect();
    c.uniform = None;
    let moes = c.mixtures(&drawn, |c| on_disk(c, &drawn, &runs).matrices);
    stream(c, vec![], drawn.len(), 1 << 19);
    for _ in 0..4 {
        let tokens = c.tokens();
        let x = c.tensor(tokens, hidden);
        c.shape(format!("{tokens} tokens"));
        c.step(tokens, |b| moes.iter().for_each(|moe| b.mixture(x.tensor, *moe, x.tensor)));
        c.see("residual", x.whole);
    }
}

/// Experts without gates, with GELU, or as most have them, a kind for each layer.
pub fn ungated(c: &mut Case) {
    let (hidden, stacked) = (c.cols().min(256), c.coin());
    let mut drawn = layers(c, hidden, stacked);
    for drawn in &mut drawn {
        match c.random.u8(..4) {
            0 => {}
            1 => drawn.experts.kind = ExpertKind::GeGlu,
            _ => drawn.make_ungated(),
        }
        c.shape(format!("{:?}", drawn.experts.kind));
    }
    let runs: Vec<_> = drawn.iter().enumerate().map(|(l, d)| (l, (0..d.matrices.len()).collect())).collect();
    let moes = c.mixtures(&drawn, |c| on_disk(c, &drawn, &runs).matrices);
    stream(c, vec![], drawn.len(), 1 << 19);
    for _ in 0..4 {
        let few = c.one_of(&[1, 1, 2, 5]);
        let tokens = if c.coin() { few } else { c.tokens() };
        let x = c.tensor(tokens, hidden);
        c.shape(format!("{tokens} tokens"));
        c.step(tokens, |b| moes.iter().for_each(|moe| b.mixture(x.tensor, *moe, x.tensor)));
        c.see("residual", x.whole);
    }
}

/// As where columns are in the order of activations: experts take their inputs in orders of their own, and what of their matrices was made at load is in memory.
pub fn ordered(c: &mut Case) {
    let in_blocks = c.once_in(4);
    if in_blocks {
        c.uniform = Some(c.blocks(256));
    } else if c.coin() {
        c.uniform = Some(WeightFormat::Affine { bits: c.one_of(&[4, 8]), group: 64, scale: Float::F16 });
    }
    let (hidden, stacked) = (if c.uniform.is_some() { 256 } else { 32 } * c.random.usize(1..=3), c.coin());
    let hidden = if in_blocks { 256 } else { hidden };
    let mut drawn = layers(c, hidden, stacked);
    let mut in_memory = Vec::new();
    for drawn in &mut drawn {
        if !c.once_in(4) {
            c.make_ordered(drawn);
        }
        in_memory.push(c.one_of(&[InMemory::None, InMemory::Scales, InMemory::All]));
    }
    let is_ordered: Vec<bool> = drawn.iter().map(|drawn| drawn.experts.order.is_some()).collect();
    c.shape(format!("orders {is_ordered:?}, in memory {in_memory:?}"));
    let runs: Vec<_> = drawn.iter().enumerate().map(|(l, d)| (l, (0..d.matrices.len()).collect())).collect();
    let moes = c.mixtures(&drawn, |c| with_some_in_memory(c, &drawn, &runs, |layer| in_memory[layer]).matrices);
    c.uniform = None;
    stream(c, vec![], drawn.len(), if in_blocks { 1 << 22 } else { 1 << 19 });
    for _ in 0..6 {
        let few = c.one_of(&[1, 1, 2, 5]);
        let tokens = if c.coin() { few } else { c.tokens() };
        let x = c.tensor(tokens, hidden);
        c.shape(format!("{tokens} tokens"));
        c.step(tokens, |b| moes.iter().for_each(|moe| b.mixture(x.tensor, *moe, x.tensor)));
        c.see("residual", x.whole);
    }
}

pub fn failed_rows(c: &mut Case) {
    let hidden = 32 * c.random.usize(1..=4);
    let drawn = layers(c, hidden, false);
    // Each expert in pages of its own.
    let mut runs = Vec::new();
    for (layer, d) in drawn.iter().enumerate() {
        for expert in 0..d.experts.count {
            let own = |n: usize| n % d.experts.count == expert;
            runs.push((layer, (0..d.matrices.len()).filter(|n| own(*n)).collect::<Vec<_>>()));
        }
    }
    let mut dead = BTreeSet::new();
    let mut places = Vec::new();
    let moes: Vec<MoeId> = c.mixtures(&drawn, |c| {
        let on_disk = on_disk(c, &drawn, &runs);
        for (i, run) in on_disk.runs.iter().enumerate() {
            if c.once_in(10) {
                let first = runs.iter().position(|(layer, _)| *layer == runs[i].0).expect("its own");
                dead.insert((runs[i].0, (i - first) as u32));
                places.push(run.clone());
            }
        }
        on_disk.matrices
    });
    c.shape(format!("(layer, expert) that cannot be read: {dead:?}"));
    stream(c, places, drawn.len(), 1 << 19);
    c.backend.record_routing();
    for _ in 0..4 {
        let tokens = c.tokens();
        let x = c.tensor(tokens, hidden);
        c.shape(format!("{tokens} tokens"));
        let outcome = c.step(tokens, |b| moes.iter().for_each(|moe| b.mixture(x.tensor, *moe, x.tensor)));
        // Rows that want such an expert, in whatever layer, are lost; all others are what they should be.
        let mut lost: BTreeSet<usize> = BTreeSet::new();
        if c.is_reference {
            for routed in &outcome.routed {
                let wants = |row: &&[u32]| row.iter().any(|e| dead.contains(&(routed.layer, *e)));
                let rows = routed.experts.chunks_exact(routed.k).enumerate();
                lost.extend(rows.filter(|(_, row)| wants(row)).map(|(t, _)| t));
            }
        } else {
            for failed in &outcome.failed {
                assert!(failed.rows.is_sorted(), "rows in ascending order");
                assert!(!failed.why.to_string().is_empty(), "a reason");
                lost.extend(failed.rows.iter().map(|row| *row as usize));
            }
        }
        c.see_rows("residual", x.tensor, (0..tokens).filter(|row| !lost.contains(row)));
        c.see_text("failed rows", format!("{lost:?}"));
    }
}
