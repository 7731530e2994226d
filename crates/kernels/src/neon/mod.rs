//! NEON, which every aarch64 processor has, and two more instruction sets: dot products of bytes (`dotprod`), and those with products of small matrices (`i8mm`).
//!
//! All share this folder's code: [`Products`] is how bytes are multiplied. `bfdot` and `bfmmla` add with roundings of their own, so that bf16 pairs are fused multiply-adds.

mod bf16_dot;
mod bytes;
mod encode;
mod f32_dot;
mod int11_dot;
mod int8_dot;
mod int8_rows;
mod int8_tile;
mod peak;
mod products;
mod record;
mod rows;
mod sources;
mod unpack;

use std::arch::aarch64::float32x4_t;
use std::arch::is_aarch64_feature_detected;
use std::marker::PhantomData;

pub use products::{DotProd, I8mm, Plain, Products};

/// Sixteen lanes in four registers.
#[derive(Clone, Copy)]
pub struct Neon16<P>([float32x4_t; 4], PhantomData<P>);

/// Whether this machine has what [`DotProd`] needs.
pub fn has_dotprod() -> bool {
    is_aarch64_feature_detected!("dotprod")
}

/// Whether this machine has what [`I8mm`] needs.
pub fn has_i8mm() -> bool {
    has_dotprod() && is_aarch64_feature_detected!("i8mm")
}
