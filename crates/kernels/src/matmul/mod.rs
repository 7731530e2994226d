//! Matrix times vectors: `y = W x` for every weight form, one token or many, straight from the checkpoint's own bytes.
//!
//! A weight form is an unpacker in front of one of three dot cores, chosen by [`Form::encoding`]: lane sums (`float`), bf16
//! pairs (`pairs`) and integer groups (`int8`). `docs/numerics.md` defines each output to the bit; nothing here may let the range
//! of rows, the number or order of tokens, the blocking or the instruction set show in a result. [`matmul`] allocates nothing
//! when its [`Scratch`] was sized ahead, and never reads past the end of a matrix (it may end where a file's map ends).

mod dot;
mod float;
mod int8;
mod pairs;
mod scratch;
#[cfg(test)]
mod tests;

use crate::Isa;
use std::ops::Range;

pub use scratch::Scratch;

pub(crate) use pairs::Pairs;

/// The granularity in which callers best split rows among threads: a multiple of every kernel's row tile.
pub const ROW_BLOCK: usize = 32;

/// An element type of a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Float {
    F32,
    F16,
    Bf16,
}

impl Float {
    /// Bytes per element.
    pub const fn size(self) -> usize {
        match self {
            Float::F32 => 4,
            Float::F16 | Float::Bf16 => 2,
        }
    }

    /// Element `i` of little-endian `bytes`.
    pub fn read(self, bytes: &[u8], i: usize) -> f32 {
        let b = &bytes[i * self.size()..][..self.size()];
        match self {
            Float::F32 => f32::from_le_bytes([b[0], b[1], b[2], b[3]]),
            Float::F16 => half::f16::from_le_bytes([b[0], b[1]]).to_f32(),
            Float::Bf16 => half::bf16::from_le_bytes([b[0], b[1]]).to_f32(),
        }
    }

    /// Rounds `v` to this type, ties to even, and writes its little-endian bytes.
    #[inline(always)]
    pub fn write(self, v: f32, bytes: &mut [u8]) {
        match self {
            Float::F32 => bytes.copy_from_slice(&v.to_le_bytes()),
            Float::F16 => bytes.copy_from_slice(&half::f16::from_f32(v).to_le_bytes()),
            Float::Bf16 => bytes.copy_from_slice(&half::bf16::from_f32(v).to_le_bytes()),
        }
    }

    /// `v` as it will be read back from this type.
    #[inline(always)]
    pub(crate) fn round(self, v: f32) -> f32 {
        match self {
            Float::F32 => v,
            Float::F16 => half::f16::from_f32(v).to_f32(),
            // In arithmetic that the compiler finds vectors for. What overflows becomes infinite, as it should; a NaN may, too.
            Float::Bf16 => {
                let bits = v.to_bits();
                f32::from_bits((bits.wrapping_add(0x7fff + (bits >> 16 & 1))) & 0xffff_0000)
            }
        }
    }
}

/// How a matrix lies in its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Form {
    /// One element after the other.
    Float(Float),
    /// MLX's affine groups: `w = q * s + b`, `bits` per q in one little-endian bit stream per row, one s and one b per `group` columns.
    Affine { bits: u8, group: u16, scale: Float },
}

/// The precision of activations, chosen once at start; part of the numerics version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Activations {
    F32,
    Bf16,
    Int8,
}

/// What a matrix consumes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Encoding {
    F32,
    Bf16,
    Int8,
}

impl Form {
    /// The encoding of activations that a matrix of this form consumes in `mode` (the table in `docs/numerics.md`).
    pub fn encoding(self, mode: Activations) -> Encoding {
        match (self, mode) {
            (_, Activations::F32) | (Form::Float(Float::F32 | Float::F16), _) => Encoding::F32,
            (Form::Float(Float::Bf16), _) | (_, Activations::Bf16) => Encoding::Bf16,
            (Form::Affine { .. }, Activations::Int8) => Encoding::Int8,
        }
    }

    /// Bytes of a row of `cols` elements, without scales and biases; `None` where the number does not fit.
    pub fn row_bytes(self, cols: usize) -> Option<usize> {
        match self {
            Form::Float(float) => cols.checked_mul(float.size()),
            // Columns are a multiple of 32, so the bits are whole bytes.
            Form::Affine { bits, .. } => (cols / 8).checked_mul(bits as usize),
        }
    }
}

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
    form: Form,
    rows: usize,
    cols: usize,
    /// [rows, row_bytes]
    data: &'a [u8],
    /// [rows, cols / group] of the form's scale type; empty for floats.
    scales: &'a [u8],
    /// As `scales`.
    biases: &'a [u8],
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

/// Encoded activations of n tokens, [n, cols] row-major and dense.
#[derive(Clone, Copy)]
pub enum Input<'a> {
    F32(&'a [f32]),
    /// Bits of bf16, from [`encode_bf16`](crate::activations::encode_bf16).
    Bf16(&'a [u16]),
    /// From [`encode_int8`](crate::activations::encode_int8).
    Int8 {
        /// In [`ORDER`](crate::activations::ORDER) inside each eight columns.
        q: &'a [i8],
        /// `sx`: [n, cols / 32]
        scales: &'a [f32],
        /// `mx`: [n, cols / 32]
        sums: &'a [f32],
    },
}

impl Input<'_> {
    /// Elements of all tokens.
    fn len(&self) -> usize {
        match self {
            Input::F32(x) => x.len(),
            Input::Bf16(x) => x.len(),
            Input::Int8 { q, .. } => q.len(),
        }
    }
}

/// `tile[i * rows.len() + r] = dot(w[rows.start + r], x[tokens[i]])`; `tile` has `tokens.len() * rows.len()` elements.
///
/// Panics where a length, a row, a token or the pairing of form and encoding is wrong. Allocates nothing if `scratch` was made with
/// [`scratch_bytes`] of at least these numbers of rows and tokens.
pub fn matmul(
    isa: Isa,
    w: &Matrix,
    rows: Range<usize>,
    x: Input,
    tokens: &[u32],
    tile: &mut [f32],
    scratch: &mut Scratch,
) {
    let w = w.rows_slice(rows);
    assert_eq!(tile.len(), tokens.len() * w.rows, "the tile is [tokens, rows]");
    if tile.is_empty() {
        return;
    }
    if w.cols == 0 {
        return tile.fill(0.0);
    }
    assert!(x.len().is_multiple_of(w.cols), "{} activations for {} columns", x.len(), w.cols);
    let n = x.len() / w.cols;
    assert!(tokens.iter().all(|&t| (t as usize) < n), "a token is not among the {n} of the input");
    match (w.form, x) {
        (Form::Float(_), Input::F32(x)) => float::direct(isa, w, x, tokens, tile),
        (Form::Float(Float::Bf16), Input::Bf16(x)) => pairs::direct(isa, w, x, tokens, tile, scratch),
        (Form::Affine { .. }, Input::F32(x)) => float::affine(isa, w, x, tokens, tile, scratch),
        (Form::Affine { .. }, Input::Bf16(x)) => pairs::affine(isa, w, x, tokens, tile, scratch),
        (Form::Affine { .. }, Input::Int8 { q, scales, sums }) => {
            assert!(scales.len() == q.len() / 32 && sums.len() == q.len() / 32, "one scale and one sum per 32");
            int8::affine(isa, w, int8::Groups { q, scales, sums }, tokens, tile, scratch)
        }
        (form, _) => panic!("{form:?} does not take activations in this encoding"),
    }
}

/// Bytes of [`Scratch`] that [`matmul`] needs for ranges of up to `rows` rows and up to `tokens` tokens.
pub fn scratch_bytes(form: Form, cols: usize, rows: usize, tokens: usize, mode: Activations) -> usize {
    match (form, form.encoding(mode)) {
        (Form::Float(_), Encoding::Bf16) => pairs::direct_scratch_bytes(rows, cols, tokens),
        (Form::Float(_), _) => 0,
        (_, Encoding::F32) => float::scratch_bytes(cols),
        (_, Encoding::Bf16) => pairs::affine_scratch_bytes(cols, tokens),
        (_, Encoding::Int8) => int8::scratch_bytes(cols, tokens),
    }
}
