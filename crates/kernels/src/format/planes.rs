//! The planes of a matrix: separate arrays of integers, scales and biases.

use std::ops::Deref;

use super::float::Float;

/// What a plane consists of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Element {
    /// Floats.
    Float(Float),
    /// Words of 32 bits. A row is one little-endian bit stream.
    Packed,
    /// Bytes.
    Byte,
}

impl Element {
    /// Bytes per element.
    pub const fn size(self) -> usize {
        match self {
            Element::Float(float) => float.size(),
            Element::Packed => 4,
            Element::Byte => 1,
        }
    }
}

/// One array of a matrix, row by row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plane {
    /// The name that checkpoints append to the module's name.
    pub name: &'static str,
    /// What it consists of.
    pub element: Element,
    /// Bytes of one row.
    pub row_bytes: usize,
}

/// The most planes that a format has.
pub const MAX_PLANES: usize = 3;

/// The planes of a format: a slice of [`Plane`].
#[derive(Clone, Copy, Debug)]
pub struct Planes {
    all: [Plane; MAX_PLANES],
    len: usize,
}

impl Default for Planes {
    fn default() -> Planes {
        Planes { all: [Plane { name: "weight", element: Element::Packed, row_bytes: 0 }; MAX_PLANES], len: 0 }
    }
}

impl Planes {
    pub(super) fn add(&mut self, name: &'static str, element: Element, row_bytes: usize) {
        self.all[self.len] = Plane { name, element, row_bytes };
        self.len += 1;
    }

    /// Bytes of a row in all planes together.
    pub fn row_bytes(&self) -> usize {
        self.iter().map(|plane| plane.row_bytes).sum()
    }
}

impl Deref for Planes {
    type Target = [Plane];
    fn deref(&self) -> &[Plane] {
        &self.all[..self.len]
    }
}

/// Why bytes are not a matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MatrixError {
    /// Affine weights have no such width.
    #[error("{0} bits per weight: expected 2, 3, 4, 5, 6 or 8")]
    Bits(u8),
    /// Affine weights have no such groups.
    #[error("quantisation groups of {0}: expected 32, 64 or 128")]
    Group(u16),
    /// The last group of a row would not be whole.
    #[error("{cols} columns do not divide into groups of {group}")]
    Columns {
        /// Columns of the matrix.
        cols: usize,
        /// Columns of a group.
        group: u16,
    },
    /// The bytes could not be counted.
    #[error("{rows} x {cols} elements do not fit in memory")]
    TooBig {
        /// Rows of the matrix.
        rows: usize,
        /// Columns of the matrix.
        cols: usize,
    },
    /// There are more or fewer planes than the format has.
    #[error("{got} arrays, where its form has {wanted}")]
    Parts {
        /// Planes that were given.
        got: usize,
        /// Planes of the format.
        wanted: usize,
    },
    /// A plane has the wrong length.
    #[error("{part} has {got} bytes, the shape needs {wanted}")]
    Length {
        /// The plane's name.
        part: &'static str,
        /// Bytes that were given.
        got: usize,
        /// Bytes that the shape needs.
        wanted: usize,
    },
}
