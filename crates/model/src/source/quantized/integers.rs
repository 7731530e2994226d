//! Integers of compressed-tensors: `w = (q - z) s`. Rows are streams of bits, as kernels have them. What is made are biases, `-z s`, each exactly.

use anyhow::{Context, Result, bail, ensure};
use sluice_backend::{Float, WeightFormat};
use sluice_store::{Buffer, Bytes, Dtype, Tensor};

use super::by_rows::copy_by_rows;
use super::module::{check_columns, read};
use crate::source::layout::{MatrixShape, float_type};

/// Columns of groups that kernels have.
const GROUPS: [usize; 3] = [128, 64, 32];

/// Groups of columns: as a file has them, and as kernels do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Groups {
    /// Groups of a row in the file.
    pub stored: usize,
    /// Columns of a group for kernels.
    pub columns: usize,
    /// How often each scale is repeated.
    pub times: usize,
}

impl Groups {
    /// # Errors
    /// Groups that are not whole, or not of whole 32 columns.
    pub fn new(name: &str, cols: usize, stored: usize) -> Result<Groups> {
        ensure!(stored > 0 && cols.is_multiple_of(stored), "tensor {name:?}: {stored} groups of {cols} columns");
        let of_file = cols / stored;
        match GROUPS.into_iter().find(|columns| of_file.is_multiple_of(*columns)) {
            Some(columns) => Ok(Groups { stored, columns, times: of_file / columns }),
            None => bail!("tensor {name:?}: groups of {of_file} columns are not supported (multiples of 32 are)"),
        }
    }

    /// Groups of a row for kernels.
    pub fn count(self) -> usize {
        self.stored * self.times
    }
}

/// Makes the planes of scales and biases: `[rows, groups]` of `float`. `of(row, group of the file)` gives a scale and a zero point.
///
/// # Errors
/// A product of both that `float` does not hold exactly, or that is not finite.
pub(super) fn make(
    name: &str,
    rows: usize,
    groups: Groups,
    float: Float,
    of: impl Fn(usize, usize) -> (f32, f32),
) -> Result<[Buffer; 2]> {
    let (size, mut planes) = (float.size(), buffers(name, rows, groups, float)?);
    let [scales, biases] = &mut planes;
    let row = groups.count() * size;
    for (r, (scales, biases)) in scales.chunks_exact_mut(row).zip(biases.chunks_exact_mut(row)).enumerate() {
        let each = scales.chunks_exact_mut(size * groups.times).zip(biases.chunks_exact_mut(size * groups.times));
        for (g, (scales, biases)) in each.enumerate() {
            let (scale, zero) = of(r, g);
            let bias = -(zero * scale);
            for (scale_to, bias_to) in scales.chunks_exact_mut(size).zip(biases.chunks_exact_mut(size)) {
                float.write(scale, scale_to);
                float.write(bias, bias_to);
            }
            // A product of at most 8 and 24 bits.
            let is_exact = f64::from(bias) == -(f64::from(zero) * f64::from(scale));
            ensure!(
                is_exact && bias.is_finite() && float.read(biases, 0) == bias,
                "tensor {name:?}: row {r}: {zero} times {scale} is not exact in {float:?}"
            );
        }
    }
    Ok(planes)
}

/// The same without values.
pub(super) fn buffers(name: &str, rows: usize, groups: Groups, float: Float) -> Result<[Buffer; 2]> {
    let len = rows.checked_mul(groups.count()).and_then(|n| n.checked_mul(float.size()));
    let len = len.with_context(|| format!("tensor {name:?}: too large"))?;
    let buffer = || Buffer::zeroed(len).with_context(|| format!("tensor {name:?}: no memory"));
    Ok([buffer()?, buffer()?])
}

/// The format and the planes of a matrix. `order`: the column of the file that belongs at each place, if not its own.
pub(super) fn assemble(
    packed: &Tensor,
    scales: &Tensor,
    zeros: Option<&Tensor>,
    order: Option<&[u32]>,
    shape: MatrixShape,
    reads: bool,
) -> Result<(WeightFormat, Vec<Bytes>)> {
    let MatrixShape { leading, rows, cols } = shape;
    ensure!(leading.is_empty(), "tensor {:?}: stacked experts of integers are not supported", packed.name);
    // 1. bits, from the words of a row
    let bits = match packed.shape[..] {
        [r, words] if r == rows && words.checked_mul(32).is_some_and(|n| n.is_multiple_of(cols)) => words * 32 / cols,
        _ => 0,
    };
    ensure!(
        [2, 3, 4, 5, 6, 8].contains(&bits),
        "tensor {:?} has shape {:?}, which is no packed matrix of {rows} x {cols}",
        packed.name,
        packed.shape
    );
    let bits = bits as u8;
    // 2. groups, from the scales of a row
    let (stored, per_row) = match scales.shape[..] {
        [r, n] if r == rows => (n, true),
        [r] if r == rows => (1, true),
        [] | [1] | [1, 1] => (1, false),
        _ => bail!("tensor {:?} has shape {:?}, expected scales of {rows} rows", scales.name, scales.shape),
    };
    let of_columns = Groups::new(&scales.name, cols, stored)?;
    let float = float_type(&scales.name, scales.dtype)?;
    // 3. zero points, and with them biases. Where all are half of the range, biases are as short as scales.
    let values = if reads { read(scales)? } else { Vec::new() };
    let of_scale = |row: usize, group: usize| float.read(&values, if per_row { row * stored + group } else { 0 });
    let (made, planes) = match zeros {
        None => {
            let half = (1u32 << (bits - 1)) as f32;
            let of = |row, group| (of_scale(row, group), half);
            (float, reads.then(|| make(&scales.name, rows, of_columns, float, of)).transpose()?)
        }
        Some(zeros) => {
            let bytes = if reads { read(zeros)? } else { Vec::new() };
            let zero_of = zero_points(zeros, bytes, rows, stored, bits)?;
            let of = |row, group| (of_scale(row, group), zero_of(row, group));
            (Float::F32, reads.then(|| make(&scales.name, rows, of_columns, Float::F32, of)).transpose()?)
        }
    };
    let [made_scales, biases] = match planes {
        Some(planes) => planes,
        None => buffers(&scales.name, rows, of_columns, made)?,
    };
    // Scales of the file's own are used where they are.
    let is_stored = made == float && of_columns.times == 1 && per_row;
    let scale_plane = if is_stored { scales.bytes.clone() } else { made_scales.into() };
    let format = WeightFormat::Affine { bits, group: of_columns.columns as u16, scale: made };
    check_columns(format, shape, &packed.name)?;
    let values = match order {
        Some(order) => in_order(packed, bits, order, reads)?,
        None => packed.bytes.clone(),
    };
    Ok((format, vec![values, scale_plane, biases.into()]))
}

/// A copy of the integers whose columns are in this order: each row one stream of bits, as before.
fn in_order(packed: &Tensor, bits: u8, order: &[u32], reads: bool) -> Result<Bytes> {
    let (len, bits) = (packed.bytes.len(), usize::from(bits));
    // Of whole pages.
    let mut moved = Buffer::large(len).with_context(|| format!("tensor {:?}: no memory", packed.name))?;
    if reads {
        let (stored, row_bytes) = (read(packed)?, order.len() * bits / 8);
        let copy = |first: usize, to: &mut [u8]| {
            for (row, to) in to.chunks_exact_mut(row_bytes).enumerate() {
                let from = &stored[(first + row) * row_bytes..][..row_bytes];
                for (place, column) in order.iter().enumerate() {
                    let at = *column as usize * bits;
                    // An integer of at most eight bits lies in two bytes.
                    let next = from.get(at / 8 + 1).copied().unwrap_or(0);
                    let q = u16::from_le_bytes([from[at / 8], next]) >> (at % 8) & ((1 << bits) - 1);
                    let [low, high] = (q << (place * bits % 8)).to_le_bytes();
                    to[place * bits / 8] |= low;
                    if let Some(to) = to.get_mut(place * bits / 8 + 1) {
                        *to |= high;
                    }
                }
            }
        };
        copy_by_rows(&mut moved[..len], packed.shape[0], copy);
    }
    Ok(Bytes::from(moved).slice(..len))
}

/// The zero point of a row's group, counted as integers are: from 0.
fn zero_points(
    zeros: &Tensor,
    bytes: Vec<u8>,
    rows: usize,
    stored: usize,
    bits: u8,
) -> Result<Box<dyn Fn(usize, usize) -> f32>> {
    let (name, bits) = (&zeros.name, usize::from(bits));
    let words = (rows * bits).div_ceil(32);
    match (zeros.dtype, &zeros.shape[..]) {
        // Packed along rows: each column is one stream of bits.
        (Dtype::I32, shape) if shape == [words, stored] => Ok(Box::new(move |row, group| {
            let word = |i: usize| {
                let at = (i * stored + group) * 4;
                u64::from(u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]))
            };
            let (first, shift) = (row * bits / 32, row * bits % 32);
            let next = if shift + bits > 32 { word(first + 1) << 32 } else { 0 };
            ((word(first) | next) >> shift & ((1 << bits) - 1)) as f32
        })),
        // Signed, one byte each.
        (Dtype::I8, shape) if shape == [rows, stored] => {
            Ok(Box::new(move |row, group| f32::from(bytes[row * stored + group] as i8) + (1u32 << (bits - 1)) as f32))
        }
        (dtype, shape) => {
            bail!("tensor {name:?}: {dtype} {shape:?} are no zero points of {rows} rows and {stored} groups")
        }
    }
}
