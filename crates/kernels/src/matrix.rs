//! A weight matrix in a checkpoint's own bytes: checked once, when it is made.

use std::ops::Range;

use crate::format::{Grouped, MAX_PLANES, MatrixError, WeightFormat};

/// A weight matrix [rows, cols], row-major, in the checkpoint's own bytes, at any alignment.
#[derive(Clone, Copy)]
pub struct Matrix<'a> {
    pub(crate) format: WeightFormat,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    /// [rows, row_bytes]: floats or packed integers.
    pub(crate) data: &'a [u8],
    /// [rows, cols / group] of the format's scale type; empty for floats.
    pub(crate) scales: &'a [u8],
    /// As `scales`; empty where the format has no such plane.
    pub(crate) biases: &'a [u8],
    row_bytes: usize,
    scale_row_bytes: usize,
    bias_row_bytes: usize,
}

impl<'a> Matrix<'a> {
    /// Checks that the planes, in the order of [`WeightFormat::planes`], have exactly the lengths of the shape.
    ///
    /// # Errors
    /// Where one has not, or there are more or fewer.
    pub fn new(
        format: WeightFormat,
        rows: usize,
        cols: usize,
        planes: impl IntoIterator<Item = &'a [u8]>,
    ) -> Result<Self, MatrixError> {
        let wanted = format.planes(cols)?;
        let (mut all, mut row_bytes, mut got) = ([&[][..]; MAX_PLANES], [0; MAX_PLANES], 0);
        for bytes in planes {
            if let Some(plane) = wanted.get(got) {
                let wanted = rows.checked_mul(plane.row_bytes).ok_or(MatrixError::TooBig { rows, cols })?;
                if bytes.len() != wanted {
                    return Err(MatrixError::Length { part: plane.name, got: bytes.len(), wanted });
                }
                (all[got], row_bytes[got]) = (bytes, plane.row_bytes);
            }
            got += 1;
        }
        if got != wanted.len() {
            return Err(MatrixError::Parts { got, wanted: wanted.len() });
        }
        let ([data, scales, biases], [row_bytes, scale_row_bytes, bias_row_bytes]) = (all, row_bytes);
        Ok(Matrix { format, rows, cols, data, scales, biases, row_bytes, scale_row_bytes, bias_row_bytes })
    }

    /// The format of its weights.
    pub fn format(&self) -> WeightFormat {
        self.format
    }

    /// Rows that were unpacked: `q`: [rows, cols]; `s`, `b`: [rows, cols / group] of f32.
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn unpacked(
        format: WeightFormat,
        (rows, cols): (usize, usize),
        q: &'a [u8],
        s: &'a [u8],
        b: &'a [u8],
    ) -> Matrix<'a> {
        let scale_row_bytes = cols / format.grouped().map_or(1, |grouped| grouped.group) * 4;
        Matrix {
            format,
            rows,
            cols,
            data: q,
            scales: s,
            biases: b,
            row_bytes: cols,
            scale_row_bytes,
            bias_row_bytes: scale_row_bytes,
        }
    }

    /// How its groups are packed.
    ///
    /// # Panics
    /// If its format has no groups.
    pub(crate) fn grouped(&self) -> Grouped {
        self.format.grouped().expect("a format in groups")
    }

    /// Rows: outputs of a product.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Columns: inputs of a product.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Bytes of one row, without scales and biases.
    pub fn row_bytes(&self) -> usize {
        self.row_bytes
    }

    /// Bytes of one row's scales.
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn scale_row_bytes(&self) -> usize {
        self.scale_row_bytes
    }

    /// All bytes that a product with this matrix reads.
    pub fn bytes(&self) -> usize {
        self.data.len() + self.scales.len() + self.biases.len()
    }

    /// The matrix of some of the rows (one expert of a stack, for example).
    pub fn rows_slice(&self, rows: Range<usize>) -> Matrix<'a> {
        assert!(rows.start <= rows.end && rows.end <= self.rows, "rows {rows:?} of {}", self.rows);
        let (row, scale_row, bias_row) = (self.row_bytes, self.scale_row_bytes, self.bias_row_bytes);
        Matrix {
            rows: rows.len(),
            data: &self.data[rows.start * row..rows.end * row],
            scales: &self.scales[rows.start * scale_row..rows.end * scale_row],
            biases: &self.biases[rows.start * bias_row..rows.end * bias_row],
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
        let (n, biases) = (self.scale_row_bytes, self.bias_row_bytes);
        (&self.scales[r * n..(r + 1) * n], &self.biases[r * biases..(r + 1) * biases])
    }
}
