//! A weight matrix in a checkpoint's own bytes: checked once, when it is made.

use std::ops::Range;

use crate::form::Form;

/// Why bytes are not a matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MatrixError {
    #[error("{0} bits per weight: expected 2, 3, 4, 5, 6 or 8")]
    Bits(u8),
    #[error("quantisation groups of {0}: expected 32, 64 or 128")]
    Group(u16),
    #[error("{cols} columns do not divide into groups of {group}")]
    Columns { cols: usize, group: u16 },
    #[error("{rows} x {cols} elements do not fit in memory")]
    TooBig { rows: usize, cols: usize },
    #[error("{part} has {got} bytes, the shape needs {wanted}")]
    Length { part: &'static str, got: usize, wanted: usize },
}

/// A weight matrix [rows, cols], row-major, in the checkpoint's own bytes, at any alignment.
#[derive(Clone, Copy)]
pub struct Matrix<'a> {
    pub(crate) form: Form,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    /// [rows, row_bytes]
    pub(crate) data: &'a [u8],
    /// [rows, cols / group] of the form's scale type; empty for floats.
    pub(crate) scales: &'a [u8],
    /// As `scales`.
    pub(crate) biases: &'a [u8],
}

impl<'a> Matrix<'a> {
    /// Checks that the three parts have exactly the lengths of the shape (`scales` and `biases` are empty for float forms).
    pub fn new(
        form: Form,
        rows: usize,
        cols: usize,
        data: &'a [u8],
        scales: &'a [u8],
        biases: &'a [u8],
    ) -> Result<Self, MatrixError> {
        let too_big = MatrixError::TooBig { rows, cols };
        let mut scale_row = 0;
        if let Form::Affine { bits, group, scale } = form {
            if !matches!(bits, 2 | 3 | 4 | 5 | 6 | 8) {
                return Err(MatrixError::Bits(bits));
            }
            if !matches!(group, 32 | 64 | 128) {
                return Err(MatrixError::Group(group));
            }
            if !cols.is_multiple_of(group as usize) {
                return Err(MatrixError::Columns { cols, group });
            }
            scale_row = (cols / group as usize).checked_mul(scale.size()).ok_or(too_big)?;
        }
        let row = form.row_bytes(cols).ok_or(too_big)?;
        for (part, bytes, row) in [("data", data, row), ("scales", scales, scale_row), ("biases", biases, scale_row)] {
            let (got, wanted) = (bytes.len(), rows.checked_mul(row).ok_or(too_big)?);
            if got != wanted {
                return Err(MatrixError::Length { part, got, wanted });
            }
        }
        Ok(Matrix { form, rows, cols, data, scales, biases })
    }

    pub fn form(&self) -> Form {
        self.form
    }

    pub fn rows(&self) -> usize {
        self.rows
    }

    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Bytes of one row, without scales and biases.
    pub fn row_bytes(&self) -> usize {
        self.form.row_bytes(self.cols).expect("checked when the matrix was made")
    }

    /// Bytes of one row's scales, or biases.
    pub(crate) fn scale_row_bytes(&self) -> usize {
        match self.form {
            Form::Float(_) => 0,
            Form::Affine { group, scale, .. } => self.cols / group as usize * scale.size(),
        }
    }

    /// All bytes that a product with this matrix reads.
    pub fn bytes(&self) -> usize {
        self.data.len() + self.scales.len() + self.biases.len()
    }

    /// The matrix of some of the rows (one expert of a stack, for example).
    pub fn rows_slice(&self, rows: Range<usize>) -> Matrix<'a> {
        assert!(rows.start <= rows.end && rows.end <= self.rows, "rows {rows:?} of {}", self.rows);
        let (row, scale_row) = (self.row_bytes(), self.scale_row_bytes());
        Matrix {
            rows: rows.len(),
            data: &self.data[rows.start * row..rows.end * row],
            scales: &self.scales[rows.start * scale_row..rows.end * scale_row],
            biases: &self.biases[rows.start * scale_row..rows.end * scale_row],
            ..*self
        }
    }

    /// The packed bytes of row `r`.
    pub(crate) fn row(&self, r: usize) -> &'a [u8] {
        let n = self.row_bytes();
        &self.data[r * n..(r + 1) * n]
    }

    /// The scales and the biases of row `r`.
    pub(crate) fn row_scales(&self, r: usize) -> (&'a [u8], &'a [u8]) {
        let n = self.scale_row_bytes();
        (&self.scales[r * n..(r + 1) * n], &self.biases[r * n..(r + 1) * n])
    }
}
