//! Tokens are drawn where their logits lie: the device finds the likeliest of each row as a step ends, and sums weights when it is asked to. What comes to the host are some
//! hundreds of bytes of each row instead of all of it.

use anyhow::Result;
use sluice_backend::{Best, DRAWN_TOGETHER, DeviceSampling, Logits, MOST_RANKS, Ranked, Scaled, Top};

use crate::backend::{Cuda, must};
use crate::driver::{Address, Gpu};
use crate::kernels::Kernel;
use crate::memory::{Pinned, Scratch};
use crate::parameters::{self as p, MOST_DRAWN, number};

/// Blocks that look for a row's highest logit, their threads, and bytes that each leaves: `Top` of `kernels/sampling/sample.cu`.
const TOPS_BLOCKS: usize = 16;
const TOPS_THREADS: u32 = 512;
const TOP_BYTES: usize = 16;
/// Groups of a row's logits whose highest each is known, and tokens that there is room for of those that are as high as one of them.
const GROUPS: usize = 256;
const MOST_BEST: usize = 512;
const BEST_THREADS: u32 = 1024;
/// Bytes of a row's likeliest tokens: of each its logit and its number, behind the bar and how many reach it.
const BEST_BYTES: usize = 8 * (1 + MOST_BEST);
const _: () = assert!(MOST_RANKS <= GROUPS);
/// More rows than that are nobody's that draws: a prompt's, all of which are looked at.
const MOST_ROWS: usize = 256;
const SUM_THREADS: u32 = 256;
/// Sums that are asked for of each row: at its temperature, and at 1 for log-probabilities.
const MOST_SUMS: usize = 2;

#[derive(Default)]
pub struct SamplingWork {
    tops: Scratch,
    host_tops: Pinned,
    /// Rows that were looked at in this step.
    rows: usize,
    found: Vec<Top>,
    groups: Scratch,
    best: Scratch,
    host_best: Pinned,
    likeliest: Vec<Best>,
    sums: Scratch,
    host_sums: Pinned,
    totals: Vec<u64>,
    host_blocks: Pinned,
}

/// Bytes of the device for so many rows.
pub fn bytes(rows: usize, vocabulary: usize) -> usize {
    let rows = if rows <= MOST_ROWS { rows } else { 0 };
    rows * (TOPS_BLOCKS * TOP_BYTES + 4 * GROUPS + BEST_BYTES + MOST_SUMS * 8 * vocabulary.div_ceil(DRAWN_TOGETHER))
}

impl SamplingWork {
    pub fn bytes(&self) -> usize {
        self.tops.bytes() + self.groups.bytes() + self.best.bytes() + self.sums.bytes()
    }

    /// Pinned memory of the host.
    pub fn host_bytes(&self) -> usize {
        self.host_tops.bytes() + self.host_best.bytes() + self.host_sums.bytes() + self.host_blocks.bytes()
    }

    /// Looks for the likeliest token of each row.
    pub fn look(&mut self, gpu: &Gpu, at: Address, logits: Logits) -> Result<()> {
        self.rows = if logits.rows <= MOST_ROWS { logits.rows } else { 0 };
        let (rows, blocks) = (self.rows, logits.vocabulary.div_ceil(DRAWN_TOGETHER));
        // All room that there may have to be, here, where a step can still fail.
        self.host_tops.room(gpu, rows * TOPS_BLOCKS * TOP_BYTES)?;
        self.best.room(gpu, BEST_BYTES * rows)?;
        self.host_best.room(gpu, BEST_BYTES * rows)?;
        self.sums.room(gpu, MOST_SUMS * 8 * rows * blocks)?;
        self.host_sums.room(gpu, MOST_SUMS * 8 * rows * blocks)?;
        self.host_blocks.room(gpu, 4 * DRAWN_TOGETHER * rows)?;
        let out = self.tops.room(gpu, rows * TOPS_BLOCKS * TOP_BYTES)?;
        let groups = self.groups.room(gpu, rows * 4 * GROUPS)?;
        let parameters = p::Tops { logits: at, out, groups, vocabulary: number(logits.vocabulary), unused: 0 };
        let grid = [number(TOPS_BLOCKS), number(rows), 1];
        // SAFETY: the head leaves so many logits; the room was just made.
        unsafe { Ok(gpu.launch(Kernel::SAMPLE_TOPS, grid, TOPS_THREADS, 0, &parameters)?) }
    }

    /// Forgets the step before.
    pub fn forget(&mut self) {
        self.rows = 0;
        self.found.clear();
    }

    /// Has what was found brought to the host; it is there once the stream has come so far.
    pub fn bring(&mut self, gpu: &Gpu) -> Result<()> {
        let bytes = self.rows * TOPS_BLOCKS * TOP_BYTES;
        let host = self.host_tops.room(gpu, bytes)?;
        // SAFETY: as many were just written; looked at after the step.
        unsafe { Ok(gpu.read_later(self.tops.at(), host)?) }
    }

    /// The likeliest of each row, of what its parts' are.
    fn joined(&mut self) -> Option<&[Top]> {
        if self.found.is_empty() {
            let bytes = &self.host_tops.bytes_mut()[..self.rows * TOPS_BLOCKS * TOP_BYTES];
            for parts in bytes.chunks_exact(TOPS_BLOCKS * TOP_BYTES) {
                let mut top = Top { logit: f32::NEG_INFINITY, token: u32::MAX };
                for part in parts.chunks_exact(TOP_BYTES) {
                    let word = |i: usize| u32::from_le_bytes(part[4 * i..4 * i + 4].try_into().expect("four bytes"));
                    if word(2) != 0 {
                        self.found.clear();
                        return None;
                    }
                    let logit = f32::from_bits(word(0));
                    if logit > top.logit {
                        top = Top { logit, token: word(1) };
                    }
                }
                self.found.push(top);
            }
        }
        (self.rows > 0).then_some(&self.found)
    }
}

impl DeviceSampling for Cuda {
    fn tops(&mut self, logits: Logits) -> Option<&[Top]> {
        assert_eq!(logits, self.left, "logits of the last step");
        self.drawing.joined()
    }

    fn best(&mut self, logits: Logits, of: &[Ranked]) -> &[Best] {
        assert_eq!(logits, self.left, "logits of the last step");
        let (gpu, work, at) = (&self.gpu, &mut self.drawing, self.logits.at());
        assert!(of.iter().all(|r| r.row < work.rows && (1..=MOST_RANKS).contains(&r.rank)), "rows that were looked at");
        work.likeliest.resize_with(work.likeliest.len().max(of.len()), Best::default);
        let mut look = || -> Result<()> {
            let (out, groups) = (work.best.room(gpu, BEST_BYTES * of.len())?, work.groups.at());
            for (n, some) in of.chunks(MOST_DRAWN).enumerate() {
                let (out, vocabulary) = (out + (n * MOST_DRAWN * BEST_BYTES) as u64, number(logits.vocabulary));
                let mut parameters = p::Best { logits: at, groups, out, vocabulary, ..p::Best::default() };
                for (to, ranked) in parameters.of.iter_mut().zip(some) {
                    *to = p::Ranked { row: number(ranked.row), rank: number(ranked.rank) };
                }
                // SAFETY: rows were checked; the room was just made.
                unsafe { gpu.launch(Kernel::SAMPLE_BEST, [number(some.len()), 1, 1], BEST_THREADS, 0, &parameters)? };
            }
            let host = work.host_best.room(gpu, BEST_BYTES * of.len())?;
            // SAFETY: as many were just asked for; waited for right here.
            unsafe { gpu.read(out, host, gpu.quiet()?)? };
            for (row, best) in host.chunks_exact(BEST_BYTES).zip(&mut work.likeliest) {
                let pair = |at: &[u8; 8]| {
                    let [a, b, c, d, e, f, g, h] = *at;
                    (f32::from_le_bytes([a, b, c, d]), u32::from_le_bytes([e, f, g, h]))
                };
                let (bar, count) = pair(&row.as_chunks().0[0]);
                let there = if count as usize <= MOST_BEST { count as usize } else { 0 };
                best.bar = bar;
                best.found.clear();
                best.found.extend(row.as_chunks().0[1..=there].iter().map(|at| {
                    let (logit, token) = pair(at);
                    Top { logit, token }
                }));
            }
            Ok(())
        };
        must(look());
        &self.drawing.likeliest[..of.len()]
    }

    fn sums(&mut self, logits: Logits, of: &[Scaled]) -> &[u64] {
        assert_eq!(logits, self.left, "logits of the last step");
        assert!(of.iter().all(|scaled| scaled.row < logits.rows), "rows of the last step");
        assert!(of.len() <= MOST_SUMS * logits.rows, "more than there is room for");
        let blocks = logits.vocabulary.div_ceil(DRAWN_TOGETHER);
        let (gpu, work, at) = (&self.gpu, &mut self.drawing, self.logits.at());
        let mut sum = || -> Result<()> {
            let out = work.sums.room(gpu, 8 * of.len() * blocks)?;
            for (n, some) in of.chunks(MOST_DRAWN).enumerate() {
                let mut parameters = p::Sums {
                    logits: at,
                    out: out + (8 * n * MOST_DRAWN * blocks) as u64,
                    vocabulary: number(logits.vocabulary),
                    ..p::Sums::default()
                };
                for (to, scaled) in parameters.of.iter_mut().zip(some) {
                    *to = p::Scaled { scale: scaled.scale, highest: scaled.highest, row: number(scaled.row) };
                }
                let grid = [number(blocks), number(some.len()), 1];
                // SAFETY: rows were checked; the room was just made.
                unsafe { gpu.launch(Kernel::SAMPLE_SUMS, grid, SUM_THREADS, 0, &parameters)? };
            }
            let host = work.host_sums.room(gpu, 8 * of.len() * blocks)?;
            // SAFETY: as many were just asked for; waited for right here.
            unsafe { gpu.read(out, host, gpu.quiet()?)? };
            work.totals.clear();
            work.totals.extend(host.as_chunks().0.iter().map(|bytes| u64::from_le_bytes(*bytes)));
            Ok(())
        };
        must(sum());
        &self.drawing.totals
    }

    fn blocks(&mut self, logits: Logits, of: &[(usize, usize)]) -> &[f32] {
        assert_eq!(logits, self.left, "logits of the last step");
        let (gpu, at) = (&self.gpu, self.logits.at());
        let mut bring = || -> Result<()> {
            let host = self.drawing.host_blocks.room(gpu, 4 * DRAWN_TOGETHER * of.len())?;
            for ((row, block), to) in of.iter().zip(host.chunks_exact_mut(4 * DRAWN_TOGETHER)) {
                let first = block * DRAWN_TOGETHER;
                assert!(*row < logits.rows && first < logits.vocabulary, "a block of the last step's logits");
                let len = 4 * DRAWN_TOGETHER.min(logits.vocabulary - first);
                // SAFETY: the row has so many logits; waited for below.
                unsafe { gpu.read_later(at + 4 * (row * logits.vocabulary + first) as u64, &mut to[..len])? };
            }
            Ok(gpu.wait(gpu.quiet()?)?)
        };
        must(bring());
        self.drawing.host_blocks.floats(DRAWN_TOGETHER * of.len())
    }
}
