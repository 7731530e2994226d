//! Row-major matrices with a stride, and column blocks of them: threads share one output this way.
//!
//! A head's columns of `[tokens, heads * dim]` interleave with its neighbours', so they are no slice. [`RowsMut`] is a view
//! of such columns, made safely from a whole matrix or, by a caller that keeps threads apart, from an address.

use std::marker::PhantomData;
use std::ops::Range;

/// `rows` rows of `cols` f32 each, `stride` elements apart, to read.
#[derive(Clone, Copy)]
pub struct Rows<'a> {
    start: *const f32,
    rows: usize,
    cols: usize,
    stride: usize,
    matrix: PhantomData<&'a [f32]>,
}

/// `rows` rows of `cols` f32 each, `stride` elements apart, to write.
pub struct RowsMut<'a> {
    start: *mut f32,
    rows: usize,
    cols: usize,
    stride: usize,
    matrix: PhantomData<&'a mut [f32]>,
}

// SAFETY: a `Rows` is a set of shared slices, a `RowsMut` a set of exclusive ones.
unsafe impl Send for Rows<'_> {}
// SAFETY: as above.
unsafe impl Sync for Rows<'_> {}
// SAFETY: as above.
unsafe impl Send for RowsMut<'_> {}

/// Elements from the first of the first row to the last of the last one.
fn span(rows: usize, cols: usize, stride: usize) -> usize {
    if rows == 0 {
        0
    } else {
        (rows - 1).checked_mul(stride).and_then(|n| n.checked_add(cols)).expect("a size overflows")
    }
}

impl<'a> Rows<'a> {
    /// Panics where the last row would reach beyond `data`.
    pub fn new(data: &'a [f32], rows: usize, cols: usize, stride: usize) -> Self {
        assert!(span(rows, cols, stride) <= data.len(), "{rows} x {cols} at {stride}: only {} elements", data.len());
        Rows { start: data.as_ptr(), rows, cols, stride, matrix: PhantomData }
    }

    /// Dense rows.
    pub fn dense(data: &'a [f32], cols: usize) -> Self {
        assert!(cols > 0 && data.len().is_multiple_of(cols), "{} elements in rows of {cols}", data.len());
        Rows::new(data, data.len() / cols, cols, cols)
    }

    /// # Safety
    /// Every row is valid to read, and nobody writes it, for `'a`.
    pub unsafe fn from_raw(start: *const f32, rows: usize, cols: usize, stride: usize) -> Self {
        Rows { start, rows, cols, stride, matrix: PhantomData }
    }

    /// The number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// The number of columns.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Row `i`, `[cols]`.
    pub fn row(&self, i: usize) -> &'a [f32] {
        assert!(i < self.rows, "row {i} of {}", self.rows);
        // SAFETY: inside the matrix, as just checked, which is quiet for `'a`.
        unsafe { std::slice::from_raw_parts(self.start.add(i * self.stride), self.cols) }
    }

    /// The same rows, of the given columns only.
    pub fn columns(&self, range: Range<usize>) -> Rows<'a> {
        assert!(range.start <= range.end && range.end <= self.cols, "columns {range:?} of {}", self.cols);
        // With no rows there is nothing to point at.
        let offset = if self.rows == 0 { 0 } else { range.start };
        // SAFETY: not beyond the first row.
        Rows { start: unsafe { self.start.add(offset) }, cols: range.len(), ..*self }
    }

    /// Some of the rows.
    pub fn part(&self, range: Range<usize>) -> Rows<'a> {
        assert!(range.start <= range.end && range.end <= self.rows, "rows {range:?} of {}", self.rows);
        // An empty range of rows may start a stride beyond the end.
        let offset = if range.is_empty() { 0 } else { range.start * self.stride };
        // SAFETY: the start of a row.
        Rows { start: unsafe { self.start.add(offset) }, rows: range.len(), ..*self }
    }
}

impl<'a> RowsMut<'a> {
    /// Panics where the last row would reach beyond `data`, or rows overlap.
    pub fn new(data: &'a mut [f32], rows: usize, cols: usize, stride: usize) -> Self {
        assert!(span(rows, cols, stride) <= data.len(), "{rows} x {cols} at {stride}: only {} elements", data.len());
        assert!(stride >= cols || rows < 2, "rows of {cols} overlap at a stride of {stride}");
        RowsMut { start: data.as_mut_ptr(), rows, cols, stride, matrix: PhantomData }
    }

    /// Dense rows.
    pub fn dense(data: &'a mut [f32], cols: usize) -> Self {
        assert!(cols > 0 && data.len().is_multiple_of(cols), "{} elements in rows of {cols}", data.len());
        let rows = data.len() / cols;
        RowsMut::new(data, rows, cols, cols)
    }

    /// # Safety
    /// Every row is valid to read and write, and nobody else touches it, for `'a`; rows do not overlap.
    pub unsafe fn from_raw(start: *mut f32, rows: usize, cols: usize, stride: usize) -> Self {
        RowsMut { start, rows, cols, stride, matrix: PhantomData }
    }

    /// The number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// The number of columns.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Elements from one row's start to the next one's.
    pub fn stride(&self) -> usize {
        self.stride
    }

    /// To read.
    pub fn as_rows(&self) -> Rows<'_> {
        Rows { start: self.start, rows: self.rows, cols: self.cols, stride: self.stride, matrix: PhantomData }
    }

    /// Row `i`, `[cols]`, to write.
    pub fn row(&mut self, i: usize) -> &mut [f32] {
        assert!(i < self.rows, "row {i} of {}", self.rows);
        // SAFETY: inside the matrix, as just checked, and this view's own.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(i * self.stride), self.cols) }
    }

    /// Columns `..at` and columns `at..`, which two threads may write at once.
    pub fn split_columns(self, at: usize) -> (RowsMut<'a>, RowsMut<'a>) {
        assert!(at <= self.cols, "column {at} of {}", self.cols);
        let offset = if self.rows == 0 { 0 } else { at };
        // SAFETY: not beyond the first row.
        let right = RowsMut { start: unsafe { self.start.add(offset) }, cols: self.cols - at, ..self };
        (RowsMut { cols: at, ..self }, right)
    }

    /// The same view for a shorter time.
    pub fn reborrow(&mut self) -> RowsMut<'_> {
        RowsMut { start: self.start, rows: self.rows, cols: self.cols, stride: self.stride, matrix: PhantomData }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_threads_write_interleaved_columns() {
        let mut data = vec![0.0; 12];
        let (mut left, mut right) = RowsMut::dense(&mut data, 4).split_columns(1);
        std::thread::scope(|s| {
            s.spawn(move || (0..3).for_each(|i| left.row(i).fill(1.0)));
            s.spawn(move || (0..3).for_each(|i| right.row(i).fill(2.0)));
        });
        assert_eq!(data, [1.0, 2.0, 2.0, 2.0].repeat(3));
        let all = Rows::dense(&data, 4);
        assert_eq!(all.columns(0..2).part(1..3).row(1), [1.0, 2.0]);
        assert_eq!(all.part(3..3).columns(4..4).rows(), 0);
    }

    #[test]
    #[should_panic(expected = "only 12 elements")]
    fn a_view_beyond_its_data_is_refused() {
        Rows::new(&[0.0; 12], 4, 3, 4);
    }
}
