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

    /// [`Place::copy_from`] past the caches, for what is not read soon: a line is written without being read first, and pushes out nothing.
    ///
    /// # Safety
    /// As for [`Place::copy_from`]; the two do not overlap.
    pub unsafe fn stream_from(self, from: Place) {
        assert_eq!((self.rows, self.cols), (from.rows, from.cols));
        for row in 0..self.rows {
            // SAFETY: rows of `cols` elements, inside their matrices, and used by nobody else.
            let (to, from) = unsafe {
                (
                    std::slice::from_raw_parts_mut(self.start.add(row * self.stride), self.cols),
                    std::slice::from_raw_parts(from.start.add(row * from.stride), self.cols),
                )
            };
            stream(to, from);
        }
        #[cfg(target_arch = "x86_64")]
        // SAFETY: SSE belongs to every x86-64. Such stores are not ordered with others: the fence lets no thread learn that the copy is done before it sees it.
        unsafe {
            std::arch::x86_64::_mm_sfence();
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

/// Copies `from` past the caches, where the processor has stores that do.
fn stream(to: &mut [f32], from: &[f32]) {
    #[cfg(target_arch = "x86_64")]
    if (to.as_ptr() as usize).is_multiple_of(16) && to.len().is_multiple_of(4) {
        use std::arch::x86_64::{_mm_loadu_ps, _mm_stream_ps};
        for (to, from) in to.chunks_exact_mut(4).zip(from.chunks_exact(4)) {
            // SAFETY: SSE belongs to every x86-64; four floats each, the written ones aligned.
            unsafe { _mm_stream_ps(to.as_mut_ptr(), _mm_loadu_ps(from.as_ptr())) };
        }
        return;
    }
    to.copy_from_slice(from);
}
