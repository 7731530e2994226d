//! What the kernels of integers of 11 bits are given.

use super::{Encoded, Matmul, Norm, PARTS, Parameters, Tensor};
use crate::device::sys::Address;

parameters! {
    /// Matrices of which integers are made, and where these go.
    Split {
        parts: [Matmul; PARTS],
        to: [Address; PARTS],
    }
    /// Matrices of which records are made, and where these go.
    Records {
        parts: [Matmul; PARTS],
        to: [Address; PARTS],
        sliced: u32,
        first: u32,
    }
    /// Integers of 11 bits that are put in the order of their columns.
    Arrange {
        x: Encoded,
        to: Address,
        tiles: Address,
        order: Address,
        groups: u32,
        piece: u32,
        per_row: u32,
        unused: u32,
    }
    /// Products of some of a mixture's experts.
    ExpertProducts {
        parts: [Matmul; PARTS],
        first: u32,
        experts: u32,
    }
    /// One token as floats, for products of integers of 11 bits.
    OneToken {
        parts: [Matmul; PARTS],
        x: Tensor,
        norm: Norm,
        gated: u32,
        keeps: u32,
    }
}
