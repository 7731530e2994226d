//! Tensors as addresses, of which each thread uses its own part.

use std::ops::Range;

use sluice_backend::Tensor;
use sluice_kernels::rows::{Rows, RowsMut};

use super::Buffer;

/// A row-major f32 matrix that several threads write, each its own part.
#[derive(Clone, Copy)]
pub struct Place {
    pub(super) start: *mut f32,
    pub rows: usize,
    pub cols: usize,
    pub stride: usize,
}

// SAFETY: a `Place` is only an address; every access goes through its unsafe methods, whose callers keep threads apart.
unsafe impl Send for Place {}
// SAFETY: as above.
unsafe impl Sync for Place {}

impl Place {
    /// The address of `t` in its buffer.
    pub fn new(buffer: &Buffer, t: Tensor) -> Place {
        let end = if t.rows == 0 { t.offset } else { t.offset + (t.rows - 1) * t.stride + t.cols };
        assert!(end * size_of::<f32>() <= buffer.bytes, "a tensor reaches beyond its buffer");
        // SAFETY: the offset lies inside the buffer, as just checked.
        let start = unsafe { buffer.start.cast::<f32>().add(t.offset) };
        Place { start, rows: t.rows, cols: t.cols, stride: t.stride }
    }

    /// Host memory, `[rows, cols]` dense.
    pub fn of_slice(slice: &mut [f32], cols: usize) -> Place {
        assert!(cols > 0 && slice.len().is_multiple_of(cols));
        Place { start: slice.as_mut_ptr(), rows: slice.len() / cols, cols, stride: cols }
    }

    /// Columns `cols` of row `row`.
    ///
    /// # Safety
    /// The buffer is alive and nobody else writes these elements during the borrow.
    pub unsafe fn get<'a>(self, row: usize, cols: Range<usize>) -> &'a [f32] {
        assert!(row < self.rows && cols.start <= cols.end && cols.end <= self.cols);
        // SAFETY: inside the matrix, as just checked, and not written meanwhile, as the caller guarantees.
        unsafe { std::slice::from_raw_parts(self.start.add(row * self.stride + cols.start), cols.len()) }
    }

    /// Columns `cols` of row `row`, to write.
    ///
    /// # Safety
    /// The buffer is alive and nobody else uses these elements during the borrow.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn get_mut<'a>(self, row: usize, cols: Range<usize>) -> &'a mut [f32] {
        assert!(row < self.rows && cols.start <= cols.end && cols.end <= self.cols);
        // SAFETY: inside the matrix, as just checked, and used by nobody else, as the caller guarantees.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(row * self.stride + cols.start), cols.len()) }
    }

    /// Copies a matrix of this shape.
    ///
    /// # Safety
    /// Both buffers are alive, and nobody else uses these elements meanwhile.
    pub unsafe fn copy_from(self, from: Place) {
        assert_eq!((self.rows, self.cols), (from.rows, from.cols));
        for row in 0..self.rows {
            // SAFETY: rows of `cols` elements, inside their matrices.
            unsafe { std::ptr::copy(from.start.add(row * from.stride), self.start.add(row * self.stride), self.cols) };
        }
    }

    /// A block of rows and columns.
    pub fn part(self, rows: Range<usize>, cols: Range<usize>) -> Place {
        assert!(rows.start <= rows.end && rows.end <= self.rows && cols.start <= cols.end && cols.end <= self.cols);
        // SAFETY: the offset stays inside the matrix (or at its end, when nothing is left), as just checked.
        let start = unsafe { self.start.add(rows.start * self.stride + cols.start) };
        Place { start, rows: rows.len(), cols: cols.len(), stride: self.stride }
    }

    /// The matrix as kernels read it.
    ///
    /// # Safety
    /// As for [`Place::get`].
    pub unsafe fn as_rows<'a>(self) -> Rows<'a> {
        // SAFETY: every `Place` lies inside its buffer; not written meanwhile, as the caller guarantees.
        unsafe { Rows::from_raw(self.start, self.rows, self.cols, self.stride) }
    }

    /// The matrix as kernels write it.
    ///
    /// # Safety
    /// As for [`Place::get_mut`].
    pub unsafe fn as_rows_mut<'a>(self) -> RowsMut<'a> {
        // SAFETY: every `Place` lies inside its buffer; used by nobody else, as the caller guarantees.
        unsafe { RowsMut::from_raw(self.start, self.rows, self.cols, self.stride) }
    }

    /// `len` elements of row `row` from column `from` as a dense matrix `[len / cols, cols]`.
    pub fn fold(self, row: usize, from: usize, rows: usize, cols: usize) -> Place {
        assert!(row < self.rows && from + rows * cols <= self.cols);
        let part = self.part(row..row + 1, from..from + rows * cols);
        Place { rows, cols, stride: cols, ..part }
    }
}
