//! AVX2, FMA, F16C and BMI2; AVX-VNNI for products of many tokens in int8, where it is there.

mod bf16_dot;
mod blocks;
mod bytes;
pub mod encode;
pub mod f32_dot;
mod int11_dot;
pub(crate) use int11_dot::greatest_of_two;
pub(crate) mod int8_dot;
mod int8_products;
mod int8_rows;
pub(crate) mod int8_tile;
mod mxfp4;
pub(crate) mod peak;
mod unpack;

use std::arch::x86_64::__m256;

/// Sixteen lanes in two registers.
#[derive(Clone, Copy)]
pub struct Avx2x16(pub __m256, pub __m256);

/// Whether this machine has AVX-VNNI, too.
pub fn has_vnni() -> bool {
    is_supported() && is_x86_feature_detected!("avxvnni")
}

/// Whether this machine has what the code of this folder needs.
pub fn is_supported() -> bool {
    is_x86_feature_detected!("avx2")
        && is_x86_feature_detected!("fma")
        && is_x86_feature_detected!("f16c")
        && is_x86_feature_detected!("bmi2")
}
