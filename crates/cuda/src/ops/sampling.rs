//! Sampling on the device: it finds the likeliest tokens of each row at the end of a step and sums weights on request. So only some hundreds of bytes of each row are copied
//! to the host.

use anyhow::Result;
use sluice_backend::{Best, DRAWN_TOGETHER, Logits, MAX_RANKS, Ranked, Scaled, Top};

use crate::device::memory::Scratch;
use crate::device::pinned::PinnedBuffer;
use crate::device::stream::Gpu;
use crate::device::sys::Address;
use crate::kernels::Kernel;
use crate::parameters::{self as p, MOST_DRAWN, number};

/// Blocks that look for a row's highest logit, their threads, and the bytes that each writes.
const TOPS_BLOCKS: usize = 16;
const TOPS_THREADS: u32 = 512;
const TOP_BYTES: usize = 16;
/// Groups of a row's logits whose maxima are computed, and the most tokens that are returned of those that reach a given maximum.
const GROUPS: usize = 256;
const MAX_BEST: usize = 512;
const BEST_THREADS: u32 = 1024;
/// Bytes of a row's likeliest tokens: the threshold and how many reach it, then logit and token of each.
const BEST_BYTES: usize = 8 * (1 + MAX_BEST);
const _: () = assert!(MAX_RANKS <= GROUPS);
/// A step with more rows of logits samples none on the device: it scores a prompt.
const MAX_ROWS: usize = 256;
const SUM_THREADS: u32 = 256;
/// The most sums of each row: at its temperature, and at 1 for log-probabilities.
const MAX_SUMS: usize = 2;

/// Scratch and results of sampling.
#[derive(Default)]
pub struct SamplingScratch {
    tops: Scratch,
    host_tops: PinnedBuffer,
    /// Rows whose likeliest tokens were computed in this step.
    rows: usize,
    likeliest: Vec<Top>,
    groups: Scratch,
    best: Scratch,
    host_best: PinnedBuffer,
    candidates: Vec<Best>,
    sums: Scratch,
    host_sums: PinnedBuffer,
    totals: Vec<u64>,
    host_blocks: PinnedBuffer,
}

/// Bytes of scratch on the device for `rows` rows of logits.
pub fn bytes(rows: usize, vocabulary: usize) -> usize {
    let rows = if rows <= MAX_ROWS { rows } else { 0 };
    rows * (TOPS_BLOCKS * TOP_BYTES + 4 * GROUPS + BEST_BYTES + MAX_SUMS * 8 * vocabulary.div_ceil(DRAWN_TOGETHER))
}

impl SamplingScratch {
    pub fn bytes(&self) -> usize {
        self.tops.bytes() + self.groups.bytes() + self.best.bytes() + self.sums.bytes()
    }

    /// Pinned memory of the host.
    pub fn host_bytes(&self) -> usize {
        self.host_tops.bytes() + self.host_best.bytes() + self.host_sums.bytes() + self.host_blocks.bytes()
    }

    /// Computes the likeliest token of each row.
    pub fn find_tops(&mut self, gpu: &Gpu, at: Address, logits: Logits) -> Result<()> {
        self.rows = if logits.rows <= MAX_ROWS { logits.rows } else { 0 };
        let (rows, blocks) = (self.rows, logits.vocabulary.div_ceil(DRAWN_TOGETHER));
        // Reserves everything that sampling may need now, while the step can still fail.
        self.host_tops.reserve(gpu, rows * TOPS_BLOCKS * TOP_BYTES)?;
        self.best.reserve(gpu, BEST_BYTES * rows)?;
        self.host_best.reserve(gpu, BEST_BYTES * rows)?;
        self.sums.reserve(gpu, MAX_SUMS * 8 * rows * blocks)?;
        self.host_sums.reserve(gpu, MAX_SUMS * 8 * rows * blocks)?;
        self.host_blocks.reserve(gpu, 4 * DRAWN_TOGETHER * rows)?;
        let out = self.tops.reserve(gpu, rows * TOPS_BLOCKS * TOP_BYTES)?;
        let groups = self.groups.reserve(gpu, rows * 4 * GROUPS)?;
        let parameters = p::Tops { logits: at, out, groups, vocabulary: number(logits.vocabulary), unused: 0 };
        let grid = [number(TOPS_BLOCKS), number(rows), 1];
        // SAFETY: the head writes this many logits; the scratch was just reserved.
        unsafe { Ok(gpu.launch(Kernel::SAMPLE_TOPS, grid, TOPS_THREADS, 0, &parameters)?) }
    }

    /// Forgets the step before.
    pub fn reset(&mut self) {
        self.rows = 0;
        self.likeliest.clear();
    }

    /// Copies the results of [`SamplingScratch::find_tops`] to the host, behind all enqueued work.
    pub fn copy_tops(&mut self, gpu: &Gpu) -> Result<()> {
        let bytes = self.rows * TOPS_BLOCKS * TOP_BYTES;
        let host = self.host_tops.reserve(gpu, bytes)?;
        // SAFETY: the kernel writes this many; they are read after the step.
        unsafe { Ok(gpu.read_async(self.tops.at(), host)?) }
    }

    /// The likeliest token of each row. `None` if the device has not computed them, or a logit is not a number.
    pub fn tops(&mut self) -> Option<&[Top]> {
        if self.likeliest.is_empty() {
            let bytes = &self.host_tops.bytes_mut()[..self.rows * TOPS_BLOCKS * TOP_BYTES];
            for parts in bytes.chunks_exact(TOPS_BLOCKS * TOP_BYTES) {
                let mut top = Top { logit: f32::NEG_INFINITY, token: u32::MAX };
                for part in parts.chunks_exact(TOP_BYTES) {
                    let word = |i: usize| u32::from_le_bytes(part[4 * i..4 * i + 4].try_into().expect("four bytes"));
                    if word(2) != 0 {
                        self.likeliest.clear();
                        return None;
                    }
                    let logit = f32::from_bits(word(0));
                    if logit > top.logit {
                        top = Top { logit, token: word(1) };
                    }
                }
                self.likeliest.push(top);
            }
        }
        (self.rows > 0).then_some(&self.likeliest)
    }

    /// The tokens of rows whose logits are at least the row's `rank`-th group maximum; none for a row that has too many.
    pub fn best(&mut self, gpu: &Gpu, logits: (Address, Logits), of: &[Ranked]) -> Result<&[Best]> {
        let (at, logits) = logits;
        assert!(of.iter().all(|r| r.row < self.rows && (1..=MAX_RANKS).contains(&r.rank)), "rows of this step");
        self.candidates.resize_with(self.candidates.len().max(of.len()), Best::default);
        let (out, groups) = (self.best.reserve(gpu, BEST_BYTES * of.len())?, self.groups.at());
        for (n, some) in of.chunks(MOST_DRAWN).enumerate() {
            let (out, vocabulary) = (out + (n * MOST_DRAWN * BEST_BYTES) as u64, number(logits.vocabulary));
            let mut parameters = p::Best { logits: at, groups, out, vocabulary, ..p::Best::default() };
            for (to, ranked) in parameters.of.iter_mut().zip(some) {
                *to = p::Ranked { row: number(ranked.row), rank: number(ranked.rank) };
            }
            // SAFETY: rows were checked; the scratch was just reserved.
            unsafe { gpu.launch(Kernel::SAMPLE_BEST, [number(some.len()), 1, 1], BEST_THREADS, 0, &parameters)? };
        }
        let host = self.host_best.reserve(gpu, BEST_BYTES * of.len())?;
        // SAFETY: the kernels write this many; `read` waits.
        unsafe { gpu.read(out, host, gpu.wait_permit()?)? };
        for (row, best) in host.chunks_exact(BEST_BYTES).zip(&mut self.candidates) {
            let pair = |at: &[u8; 8]| {
                let [a, b, c, d, e, f, g, h] = *at;
                (f32::from_le_bytes([a, b, c, d]), u32::from_le_bytes([e, f, g, h]))
            };
            let (bar, count) = pair(&row.as_chunks().0[0]);
            let there = if count as usize <= MAX_BEST { count as usize } else { 0 };
            best.bar = bar;
            best.found.clear();
            best.found.extend(row.as_chunks().0[1..=there].iter().map(|at| {
                let (logit, token) = pair(at);
                Top { logit, token }
            }));
        }
        Ok(&self.candidates[..of.len()])
    }

    /// Sums of weights of rows, `[of, blocks]`, in fixed point.
    pub fn sums(&mut self, gpu: &Gpu, logits: (Address, Logits), of: &[Scaled]) -> Result<&[u64]> {
        let (at, logits) = logits;
        assert!(of.iter().all(|scaled| scaled.row < logits.rows), "rows of the last step");
        assert!(of.len() <= MAX_SUMS * logits.rows, "more sums than there is room for");
        let blocks = logits.vocabulary.div_ceil(DRAWN_TOGETHER);
        let out = self.sums.reserve(gpu, 8 * of.len() * blocks)?;
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
            // SAFETY: rows were checked; the scratch was just reserved.
            unsafe { gpu.launch(Kernel::SAMPLE_SUMS, grid, SUM_THREADS, 0, &parameters)? };
        }
        let host = self.host_sums.reserve(gpu, 8 * of.len() * blocks)?;
        // SAFETY: the kernels write this many; `read` waits.
        unsafe { gpu.read(out, host, gpu.wait_permit()?)? };
        self.totals.clear();
        self.totals.extend(host.as_chunks().0.iter().map(|bytes| u64::from_le_bytes(*bytes)));
        Ok(&self.totals)
    }

    /// Logits of blocks of rows, `[of, DRAWN_TOGETHER]`; `of`: rows and blocks.
    pub fn blocks(&mut self, gpu: &Gpu, logits: (Address, Logits), of: &[(usize, usize)]) -> Result<&[f32]> {
        let (at, logits) = logits;
        let host = self.host_blocks.reserve(gpu, 4 * DRAWN_TOGETHER * of.len())?;
        for ((row, block), to) in of.iter().zip(host.chunks_exact_mut(4 * DRAWN_TOGETHER)) {
            let first = block * DRAWN_TOGETHER;
            assert!(*row < logits.rows && first < logits.vocabulary, "a block of the last step's logits");
            let len = 4 * DRAWN_TOGETHER.min(logits.vocabulary - first);
            // SAFETY: the row has this many logits; waited for below.
            unsafe { gpu.read_async(at + 4 * (row * logits.vocabulary + first) as u64, &mut to[..len])? };
        }
        gpu.wait(gpu.wait_permit()?)?;
        Ok(self.host_blocks.floats(DRAWN_TOGETHER * of.len()))
    }
}
