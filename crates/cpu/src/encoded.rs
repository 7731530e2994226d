//! Activations, encoded once for all matrices that share them.

use sluice_kernels::format::ActivationFormat;
use sluice_kernels::input::{Input, Int11};
use sluice_kernels::int11_tiles::{self, TokenTile};
use sluice_kernels::{Isa, activations, int11};

use crate::memory::{Parts, grow};
use crate::threads::Pool;

/// A set of encodings of activations.
#[derive(Clone, Copy, Default)]
pub struct Needs {
    pub f32: bool,
    pub bf16: bool,
    pub int8: bool,
    pub int11: bool,
}

impl Needs {
    pub fn add(&mut self, encoding: ActivationFormat) {
        match encoding {
            ActivationFormat::F32 => self.f32 = true,
            ActivationFormat::Bf16 => self.bf16 = true,
            ActivationFormat::Int8 => self.int8 = true,
            ActivationFormat::Int11 => self.int11 = true,
        }
    }

    /// What can be written by parts of a row: integers of 11 bits need all of it, so that floats stand for them until [`EncodedWriter::encode_row`].
    pub fn by_parts(self) -> Needs {
        Needs { f32: self.f32 || self.int11, int11: false, ..self }
    }

    pub fn of(encodings: impl IntoIterator<Item = ActivationFormat>) -> Needs {
        let mut needs = Needs::default();
        encodings.into_iter().for_each(|e| needs.add(e));
        needs
    }
}

/// Activations `[rows, cols]` in the encodings that were needed. Grows to the largest use and then stays.
#[derive(Default)]
pub struct Encoded {
    rows: usize,
    cols: usize,
    f32: Vec<f32>,
    bf16: Vec<u16>,
    q: Vec<i8>,
    scales: Vec<f32>,
    sums: Vec<f32>,
    int11: Vec<i16>,
    int11_steps: Vec<f32>,
    int11_sums: Vec<f32>,
    int11_scales: Vec<f32>,
    int11_tiles: Vec<TokenTile>,
    /// Rows are laid out as tiles.
    tiled: bool,
}

/// Elements per scale of int8 activations.
pub const GROUP: usize = 32;

impl Encoded {
    /// Makes room for `[rows, cols]` in these encodings.
    pub fn reset(&mut self, rows: usize, cols: usize, needs: Needs) {
        (self.rows, self.cols, self.tiled) = (rows, cols, false);
        if needs.f32 || needs.int11 {
            grow(&mut self.f32, rows * cols);
        }
        if needs.bf16 {
            grow(&mut self.bf16, rows * cols);
        }
        if needs.int8 {
            grow(&mut self.q, rows * cols);
            grow(&mut self.scales, rows * cols / GROUP);
            grow(&mut self.sums, rows * cols / GROUP);
        }
        if needs.int11 {
            grow(&mut self.int11, rows * cols);
            grow(&mut self.int11_steps, rows * cols.div_ceil(int11::GROUP));
            grow(&mut self.int11_sums, rows * (cols / int11::HALF));
            grow(&mut self.int11_scales, rows);
        }
    }

    /// Columns.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    pub fn bytes(&self) -> usize {
        let floats = [&self.f32, &self.scales, &self.sums, &self.int11_steps, &self.int11_sums, &self.int11_scales];
        let halves = self.bf16.len() + self.int11.len();
        let tiles = size_of_val(&self.int11_tiles[..]);
        4 * floats.iter().map(|f| f.len()).sum::<usize>() + 2 * halves + self.q.len() + tiles
    }

    pub fn input(&self, encoding: ActivationFormat) -> Input<'_> {
        let (n, groups) = (self.rows * self.cols, self.rows * self.cols / GROUP);
        match encoding {
            ActivationFormat::F32 => Input::F32(&self.f32[..n]),
            ActivationFormat::Bf16 => Input::Bf16(&self.bf16[..n]),
            ActivationFormat::Int8 => {
                Input::Int8 { q: &self.q[..n], scales: &self.scales[..groups], sums: &self.sums[..groups] }
            }
            ActivationFormat::Int11 => Input::Int11(Int11 {
                n: &self.int11[..n],
                steps: &self.int11_steps[..self.rows * self.cols.div_ceil(int11::GROUP)],
                sums: &self.int11_sums[..self.rows * (self.cols / int11::HALF)],
                scales: &self.int11_scales[..self.rows],
                tiles: &self.int11_tiles[..if self.tiled { int11_tiles::count(self.rows, self.cols) } else { 0 }],
            }),
        }
    }

    /// Lays out integers of 11 bits, which are written, as tiles where products want them.
    pub fn lay_out(&mut self, isa: Isa, needs: Needs, pool: &mut Pool) {
        if !needs.int11 || !int11_tiles::are_wanted(isa, self.rows) {
            return;
        }
        // Streamed experts come in waves: tiles of the wave before are made anew.
        self.tiled = false;
        let (groups, cols) = (self.cols.div_ceil(int11::GROUP), self.cols);
        let mut tiles = std::mem::take(&mut self.int11_tiles);
        grow(&mut tiles, int11_tiles::count(self.rows, cols));
        let Input::Int11(x) = self.input(ActivationFormat::Int11) else { unreachable!() };
        let to = Parts::new(&mut tiles);
        pool.run(self.rows.div_ceil(int11_tiles::TOKENS), &|block, _| {
            // SAFETY: a task has a block of its own.
            let tiles = unsafe { to.get(block * groups..(block + 1) * groups) };
            int11_tiles::lay_out(isa, &x, cols, block * int11_tiles::TOKENS, tiles);
        });
        (self.int11_tiles, self.tiled) = (tiles, true);
    }

    /// Lets threads encode rows, or whole groups of columns, in parallel.
    pub fn writer(&mut self, needs: Needs) -> EncodedWriter<'_> {
        EncodedWriter {
            needs,
            cols: self.cols,
            f32: Parts::new(&mut self.f32),
            bf16: Parts::new(&mut self.bf16),
            q: Parts::new(&mut self.q),
            scales: Parts::new(&mut self.scales),
            sums: Parts::new(&mut self.sums),
            int11: Parts::new(&mut self.int11),
            int11_steps: Parts::new(&mut self.int11_steps),
            int11_sums: Parts::new(&mut self.int11_sums),
            int11_scales: Parts::new(&mut self.int11_scales),
        }
    }
}

/// See [`Encoded::writer`].
pub struct EncodedWriter<'a> {
    needs: Needs,
    cols: usize,
    f32: Parts<'a, f32>,
    bf16: Parts<'a, u16>,
    q: Parts<'a, i8>,
    scales: Parts<'a, f32>,
    sums: Parts<'a, f32>,
    int11: Parts<'a, i16>,
    int11_steps: Parts<'a, f32>,
    int11_sums: Parts<'a, f32>,
    int11_scales: Parts<'a, f32>,
}

impl EncodedWriter<'_> {
    /// Encodes `x` as columns `from ..` of `row`. For int8, `from` and the length are multiples of 32; integers of 11 bits take a whole row.
    ///
    /// # Safety
    /// Nobody else writes these elements at the same time.
    pub unsafe fn write(&self, isa: Isa, row: usize, from: usize, x: &[f32]) {
        let at = row * self.cols + from;
        assert!(from + x.len() <= self.cols);
        // SAFETY: the caller keeps threads apart.
        unsafe {
            if self.needs.f32 {
                self.f32.get(at..at + x.len()).copy_from_slice(x);
            }
            if self.needs.bf16 {
                activations::encode_bf16(isa, x, self.bf16.get(at..at + x.len()));
            }
            if self.needs.int8 {
                assert!(from.is_multiple_of(GROUP) && x.len().is_multiple_of(GROUP));
                let (g, n) = (at / GROUP, x.len() / GROUP);
                let (scales, sums) = (self.scales.get(g..g + n), self.sums.get(g..g + n));
                activations::encode_int8(isa, x, self.q.get(at..at + x.len()), scales, sums);
            }
            if self.needs.int11 {
                assert!(from == 0 && x.len() == self.cols, "a whole row");
                self.write_int11(isa, row, x);
            }
        }
    }

    /// Encodes a row as integers of 11 bits from its floats, which were written before, by parts.
    ///
    /// # Safety
    /// Nobody else touches this row at the same time.
    pub unsafe fn encode_row(&self, isa: Isa, row: usize) {
        // SAFETY: the caller keeps threads apart.
        unsafe { self.write_int11(isa, row, self.f32.get(row * self.cols..(row + 1) * self.cols)) }
    }

    /// # Safety
    /// Nobody else touches this row at the same time.
    unsafe fn write_int11(&self, isa: Isa, row: usize, x: &[f32]) {
        let (groups, halves) = (self.cols.div_ceil(int11::GROUP), self.cols / int11::HALF);
        // SAFETY: the caller keeps threads apart.
        unsafe {
            let n = self.int11.get(row * self.cols..(row + 1) * self.cols);
            let steps = self.int11_steps.get(row * groups..(row + 1) * groups);
            let sums = self.int11_sums.get(row * halves..(row + 1) * halves);
            int11::encode_int11(isa, x, self.cols, n, steps, sums, self.int11_scales.get(row..row + 1));
        }
    }
}
