//! Stacks of floats that are stored by columns, as gpt-oss has its experts before they are quantised. Loading copies them by rows.

use std::num::NonZero;
use std::thread;

use anyhow::{Context, Result, anyhow, ensure};
use sluice_backend::{MatrixSource, WeightFormat};
use sluice_store::{Buffer, Bytes};

use super::layout::{MatrixShape, float_type};
use super::tensors::ModelTensors;

/// Rows and columns that are copied together.
const TILE: usize = 32;
/// Threads that copy, at most.
const MAX_THREADS: usize = 16;

impl ModelTensors {
    /// The matrices of a tensor `[leading.., cols, rows]`. Unless it `reads`, their values are zeros.
    ///
    /// # Errors
    /// A tensor that is missing, has another shape or no floats; those of the disk.
    pub fn stack_by_columns(&self, name: &str, shape: MatrixShape, reads: bool) -> Result<MatrixSource> {
        let MatrixShape { leading, rows, cols } = shape;
        let folder = self.checkpoint().named().display();
        let t = self.checkpoint().tensor(name).ok_or_else(|| anyhow!("{folder}: no tensor {name:?}"))?;
        MatrixShape { leading, rows: cols, cols: rows }.check(&t, rows)?;
        let float = float_type(name, t.dtype)?;
        let (len, size) = (t.bytes.len(), float.size());
        ensure!(len == shape.all_rows() * cols * size, "tensor {name:?}: {len} bytes");
        let mut by_rows = Buffer::large(len).with_context(|| format!("tensor {name:?}: no memory"))?;
        if reads && len > 0 {
            let mut stored = vec![0; len];
            t.bytes.read_now(&mut stored).with_context(|| format!("tensor {name:?}"))?;
            let each = rows * cols * size;
            let matrices = by_rows[..len].chunks_exact_mut(each).zip(stored.chunks_exact(each));
            let mut all: Vec<(&mut [u8], &[u8])> = matrices.collect();
            let threads = thread::available_parallelism().map_or(1, NonZero::get).min(MAX_THREADS);
            let per_thread = all.len().div_ceil(threads);
            thread::scope(|scope| {
                for part in all.chunks_mut(per_thread) {
                    scope.spawn(move || part.iter_mut().for_each(|(to, from)| turn(from, to, rows, cols, size)));
                }
            });
        }
        let planes = vec![Bytes::from(by_rows).slice(..len)];
        Ok(MatrixSource { format: WeightFormat::Float(float), rows: shape.all_rows(), cols, planes })
    }
}

/// `to[row, col] = from[col, row]`, elements of `size` bytes.
fn turn(from: &[u8], to: &mut [u8], rows: usize, cols: usize, size: usize) {
    for first_row in (0..rows).step_by(TILE) {
        for first_col in (0..cols).step_by(TILE) {
            for row in first_row..(first_row + TILE).min(rows) {
                for col in first_col..(first_col + TILE).min(cols) {
                    let (at, place) = ((row * cols + col) * size, (col * rows + row) * size);
                    to[at..at + size].copy_from_slice(&from[place..place + size]);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_become_columns_whatever_their_number() {
        let (rows, cols) = (TILE + 5, 2 * TILE + 1);
        let from: Vec<u8> = (0..rows * cols).flat_map(|i| (i as u16).to_le_bytes()).collect();
        let mut to = vec![0; from.len()];
        turn(&from, &mut to, rows, cols, 2);
        for (i, bytes) in to.as_chunks::<2>().0.iter().enumerate() {
            assert_eq!(usize::from(u16::from_le_bytes(*bytes)), i % cols * rows + i / cols);
        }
    }
}
