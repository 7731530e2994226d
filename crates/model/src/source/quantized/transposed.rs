//! AWQ and GPTQ store a matrix by columns: words of eight rows of a column, or of several columns of a row, one row of words after another for all outputs. Loading
//! copies it by rows, as kernels have it, and the integers stay the same. `w = (q - z) s`, with biases `-z s` as in `integers.rs`.

use std::array::from_fn;

use anyhow::{Context, Result, bail, ensure};
use sluice_backend::{Float, WeightFormat};
use sluice_store::{Buffer, Bytes, Dtype, Tensor};

use super::by_rows::{TOGETHER, copy_by_rows};
use super::integers::{Groups, buffers, make};
use super::module::{WordOrder, check_columns, read};
use crate::source::layout::{MatrixShape, float_type};

/// Rows of an AWQ word: the row that each four bits of it hold.
const AWQ_ROWS: [usize; 8] = [0, 2, 4, 6, 1, 3, 5, 7];
/// Words of a row that are copied together: a cache line.
const TILE: usize = 16;

/// The format and the planes of a matrix. `columns`: the column of the file that belongs at each place, if not its own.
pub(super) fn assemble(
    [packed, scales, zeros]: [&Tensor; 3],
    columns: Option<&[u32]>,
    order: WordOrder,
    shape: MatrixShape,
    reads: bool,
) -> Result<(WeightFormat, Vec<Bytes>)> {
    let MatrixShape { leading, rows, cols } = shape;
    let name = &packed.name;
    ensure!(leading.is_empty(), "tensor {name:?}: stacked experts are not supported");
    // 1. shapes
    let unlike = |t: &Tensor| format!("tensor {:?}: {} {:?} does not fit {rows} x {cols}", t.name, t.dtype, t.shape);
    let are_integers = packed.dtype == Dtype::I32 && zeros.dtype == Dtype::I32;
    ensure!(are_integers, "tensor {name:?}: {}, and {} of zero points, expected I32", packed.dtype, zeros.dtype);
    let &[stored, of_rows] = &scales.shape[..] else { bail!(unlike(scales)) };
    ensure!(of_rows == rows, unlike(scales));
    let bits = match (order, &packed.shape[..]) {
        (WordOrder::Awq, &[inputs, words]) if inputs == cols && words.checked_mul(8) == Some(rows) => 4,
        (WordOrder::Gptq { .. }, &[words, outputs])
            if outputs == rows && words.checked_mul(32).is_some_and(|n| n.is_multiple_of(cols)) =>
        {
            words * 32 / cols
        }
        _ => bail!(unlike(packed)),
    };
    ensure!([2, 4, 8].contains(&bits), "tensor {name:?}: integers of {bits} bits are not supported (2, 4 and 8 are)");
    ensure!((rows * bits).is_multiple_of(32) && zeros.shape == [stored, rows * bits / 32], unlike(zeros));
    let of_columns = Groups::new(&scales.name, cols, stored)?;
    ensure!(
        columns.is_none() || order != WordOrder::Awq,
        "tensor {name:?}: AWQ with columns in the order of activations is not supported"
    );
    let float = float_type(&scales.name, scales.dtype)?;
    let format = WeightFormat::Affine { bits: bits as u8, group: of_columns.columns as u16, scale: Float::F32 };
    check_columns(format, shape, name)?;

    // 2. integers by rows
    let len = packed.bytes.len();
    // Of whole pages.
    let mut by_rows = Buffer::large(len).with_context(|| format!("tensor {name:?}: no memory"))?;
    if !reads {
        let [scales, biases] = buffers(&scales.name, rows, of_columns, Float::F32)?;
        return Ok((format, vec![Bytes::from(by_rows).slice(..len), scales.into(), biases.into()]));
    }
    let (integers, zeros, scale_values) = (read(packed)?, read(zeros)?, read(scales)?);
    let words = integers.as_chunks::<4>().0;
    copy_by_rows(&mut by_rows[..len], rows, |first, to| match columns {
        Some(columns) => copy_columns(columns, bits, words, rows, first, to),
        None => copy_rows(order, words, rows, first, to),
    });

    // 3. scales and biases
    let zeros = zeros.as_chunks::<4>().0;
    let (per_word, mask) = (32 / bits, (1u32 << bits) - 1);
    let of = |row: usize, group: usize| {
        let word = u32::from_le_bytes(zeros[group * (rows / per_word) + row / per_word]);
        let (place, offset) = match order {
            WordOrder::Awq => (AWQ_ROWS.iter().position(|r| *r == row % 8).expect("one of eight"), 0),
            WordOrder::Gptq { zero_offset } => (row % per_word, u32::from(zero_offset)),
        };
        (float.read(&scale_values, group * rows + row), ((word >> (place * bits) & mask) + offset) as f32)
    };
    let [made_scales, biases] = make(&scales.name, rows, of_columns, Float::F32, of)?;
    Ok((format, vec![Bytes::from(by_rows).slice(..len), made_scales.into(), biases.into()]))
}

/// Rows from `first` on of a matrix of `rows`: words of 8 rows of a column, `[cols, rows / 8]`, or of columns of a row, `[words of a row, rows]`. They are put together
/// in a tile first: rows of a matrix often lie so that a cache holds few of them at once.
fn copy_rows(order: WordOrder, words: &[[u8; 4]], rows: usize, first: usize, to: &mut [u8]) {
    let row = words.len() / rows;
    let count = to.len() / (4 * row);
    let mut tile = [[[0; 4]; TILE]; TOGETHER];
    for start in (0..row).step_by(TILE) {
        let width = TILE.min(row - start);
        for k in 0..width {
            match order {
                WordOrder::Gptq { .. } => {
                    let across = &words[(start + k) * rows + first..][..count];
                    across.iter().zip(&mut tile).for_each(|(word, to)| to[k] = *word);
                }
                WordOrder::Awq => {
                    let column = |i: usize| &words[((start + k) * 8 + i) * (rows / 8) + first / 8..][..count / 8];
                    let columns: [&[[u8; 4]]; 8] = from_fn(column);
                    for (w, tile) in tile.chunks_exact_mut(8).take(count / 8).enumerate() {
                        let by_row = transposed(from_fn(|i| u32::from_le_bytes(columns[i][w])));
                        AWQ_ROWS.into_iter().zip(by_row).for_each(|(r, word)| tile[r][k] = word.to_le_bytes());
                    }
                }
            }
        }
        for (to, from) in to.chunks_exact_mut(4 * row).zip(&tile) {
            to[4 * start..][..4 * width].copy_from_slice(from[..width].as_flattened());
        }
    }
}

/// Rows from `first` on of a matrix of `rows` whose words are of several columns of a row, with columns in another order: `columns[place]` of the file belongs at `place`.
fn copy_columns(columns: &[u32], bits: usize, words: &[[u8; 4]], rows: usize, first: usize, to: &mut [u8]) {
    let (per_word, mask) = (32 / bits, (1u32 << bits) - 1);
    let row = words.len() / rows;
    let count = to.len() / (4 * row);
    for (k, columns) in columns.chunks_exact(per_word).enumerate() {
        let mut made = [0u32; TOGETHER];
        for (j, column) in columns.iter().map(|column| *column as usize).enumerate() {
            let across = &words[column / per_word * rows + first..][..count];
            for (word, made) in across.iter().zip(&mut made) {
                *made |= (u32::from_le_bytes(*word) >> (column % per_word * bits) & mask) << (j * bits);
            }
        }
        for (to, made) in to.chunks_exact_mut(4 * row).zip(made) {
            to[4 * k..][..4].copy_from_slice(&made.to_le_bytes());
        }
    }
}

/// Four bits j of word i become four bits i of word j.
fn transposed(mut x: [u32; 8]) -> [u32; 8] {
    for (apart, mask) in [(1, 0x0f0f_0f0f), (2, 0x00ff_00ff), (4, 0x0000_ffff)] {
        for i in (0..8).filter(|i| i & apart == 0) {
            let swapped = (x[i] >> (4 * apart) ^ x[i + apart]) & mask;
            x[i + apart] ^= swapped;
            x[i] ^= swapped << (4 * apart);
        }
    }
    x
}
