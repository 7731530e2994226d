//! Activations in the encodings that kernels multiply with: f32, bf16, or int8 with a scale and a mean for each group.

use std::cell::RefCell;

use anyhow::Result;

use crate::device::memory::Scratch;
use crate::device::stream::Gpu;
use crate::device::sys::Address;
use crate::kernels::Kernel;
use crate::parameters::{self as p, number};
use crate::weights::Needs;

/// Elements per scale of int8 activations.
pub const GROUP: usize = 32;
/// Columns that share an exponent of integers of 11 bits, and rows of a tile of them: `TILE_ROWS` of `kernels/format/int11.cuh`.
pub const INT11_GROUP: usize = 64;
const INT11_TILE_ROWS: usize = 128;
/// Columns whose squares are summed together where one token is normed.
pub const NORMED: usize = 256;
/// The most bytes of a row that a block keeps while it encodes integers of 11 bits.
const KEPT: usize = 64 << 10;
/// Fewer rows than these do not keep the device busy.
const FEW_ROWS: usize = 64;

/// Activations `[rows, cols]` in the encodings that were needed.
#[derive(Default)]
pub struct EncodedActivations {
    f32: Scratch,
    bf16: Scratch,
    int8: Scratch,
    /// `[rows, cols / GROUP]` f32 each
    scales: Scratch,
    means: Scratch,
    /// As `kernels/format/int11.cuh` has them.
    int11: Scratch,
    int11_sums: Scratch,
    int11_scales: Scratch,
    /// Integers that were made of weights, for the kernel behind the one that made them.
    slices: RefCell<Scratch>,
    pub rows: usize,
    pub cols: usize,
    /// Addresses of the encodings, for kernels.
    pub view: p::Encoded,
    /// The tensor whose int8 encoding is here already, because the kernel that computed it wrote it. Valid until the next operation.
    pub encoded_from: Option<p::Tensor>,
}

impl EncodedActivations {
    /// Makes room for `[rows, cols]` in these encodings and returns their addresses.
    pub fn reserve(&mut self, gpu: &Gpu, rows: usize, cols: usize, needs: Needs) -> Result<p::Encoded> {
        let n = rows * cols;
        (self.rows, self.cols, self.view, self.encoded_from) = (rows, cols, p::Encoded::default(), None);
        if needs.f32 {
            self.view.f = self.f32.reserve(gpu, 4 * n)?;
        }
        if needs.bf16 {
            self.view.h = self.bf16.reserve(gpu, 2 * n)?;
        }
        if needs.int8 {
            assert!(cols.is_multiple_of(GROUP), "int8 activations come in groups of {GROUP}");
            self.view.q = self.int8.reserve(gpu, n)?;
            self.view.sx = self.scales.reserve(gpu, 4 * n / GROUP)?;
            self.view.mx = self.means.reserve(gpu, 4 * n / GROUP)?;
        }
        if needs.int11 {
            let [n, sums, scales] = int11_bytes(rows, cols);
            self.view.n = self.int11.reserve(gpu, n)?;
            self.view.sn = self.int11_sums.reserve(gpu, sums)?;
            self.view.tn = self.int11_scales.reserve(gpu, scales)?;
            self.view.padded = number(rows.next_multiple_of(INT11_TILE_ROWS));
        }
        Ok(self.view)
    }

    /// Makes room for integers that are made of weights, which only the next kernel needs.
    pub fn reserve_slices(&self, gpu: &Gpu, bytes: usize) -> Result<Address> {
        self.slices.borrow_mut().reserve(gpu, bytes)
    }

    /// Whether the int8 encoding of these rows is here already.
    pub fn holds(&self, x: p::Tensor, rows: usize, cols: usize) -> bool {
        self.encoded_from == Some(x) && (self.rows, self.cols) == (rows, cols)
    }

    /// The address of the rows as f32; 0 if that encoding was not needed.
    pub fn floats(&self) -> Address {
        self.view.f
    }

    pub fn bytes(&self) -> usize {
        let int11 = [&self.int11, &self.int11_sums, &self.int11_scales];
        let all = [&self.f32, &self.bf16, &self.int8, &self.scales, &self.means].into_iter().chain(int11);
        all.map(Scratch::bytes).sum::<usize>() + self.slices.borrow().bytes()
    }
}

/// Bytes of integers of 11 bits, of their sums and of their scales.
pub fn int11_bytes(rows: usize, cols: usize) -> [usize; 3] {
    let (padded, groups) = (rows.next_multiple_of(INT11_TILE_ROWS), cols.div_ceil(INT11_GROUP));
    [2 * padded * groups * INT11_GROUP, 4 * padded * groups, 4 * padded]
}

/// What [`encode`] reads: rows of `x`, all of them or those listed in `taken`, either normed or as `silu(x) * up`.
#[derive(Clone, Copy, Default)]
pub struct EncodeInput {
    pub x: p::Tensor,
    /// 0 address: none
    pub up: p::Tensor,
    pub norm: p::Norm,
    /// `[rows]` u32, or 0 for all rows
    pub taken: Address,
    pub rows: usize,
    pub cols: usize,
}

/// Encodes rows of activations.
pub fn encode(gpu: &Gpu, from: EncodeInput, needs: Needs, to: &mut EncodedActivations) -> Result<()> {
    let EncodeInput { x, up, norm, taken, rows, cols } = from;
    let to = to.reserve(gpu, rows, cols, needs)?;
    if needs.int11 {
        encode_int11(gpu, from, to)?;
    }
    if needs == Needs::INT11 {
        return Ok(());
    }
    let parameters = p::Quantize { x, up, norm, taken, rows: number(rows), cols: number(cols), to };
    // A few rows that are normed have one large block each. Otherwise a row has several blocks, whose threads take four columns at a time.
    let threads =
        if rows < FEW_ROWS && norm.weight != 0 { cols.div_ceil(4).next_multiple_of(32).min(1024) } else { 256 };
    let parts = if norm.weight == 0 { cols.div_ceil(4 * threads) } else { 1 };
    // SAFETY: tensors were checked against their buffers, and the scratch was just reserved.
    unsafe { gpu.launch(Kernel::QUANTIZE, [number(rows), number(parts), 1], number(threads), 0, &parameters)? };
    Ok(())
}

/// Encodes rows of activations as integers of 11 bits alone, into room that [`EncodedActivations::reserve`] made.
pub fn encode_int11(gpu: &Gpu, from: EncodeInput, to: p::Encoded) -> Result<()> {
    let EncodeInput { x, up, norm, taken, rows, cols } = from;
    let keeps = 4 * cols <= KEPT;
    let to = p::Encoded { unused: keeps.into(), ..to };
    let parameters = p::Quantize { x, up, norm, taken, rows: number(rows), cols: number(cols), to };
    // A few rows have one large block each, whose threads take four columns at a time at first.
    let (of_thread, most) = if rows < FEW_ROWS { (4, 1024) } else { (8, 256) };
    let threads = cols.div_ceil(of_thread).next_multiple_of(32).min(most);
    let shared = if keeps { 4 * cols } else { 0 };
    // SAFETY: the caller checked the tensors against their buffers and made the room.
    unsafe { gpu.launch(Kernel::ENCODE_INT11, [number(rows), 1, 1], number(threads), number(shared), &parameters)? };
    Ok(())
}
