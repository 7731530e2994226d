//! AVX-512 F, BW, DQ, VL, VNNI, VBMI and BF16 (Intel from Sapphire Rapids, AMD from Zen 4), and what AVX2 has.

pub mod affine_int11;
pub mod amx;
mod bf16_dot;
mod bf16_prefill;
mod block_decode;
pub mod block_int11;
mod block_rows;
mod bytes;
mod codebooks;
mod encode;
mod f32_dot;
mod four_rows;
pub mod int11_amx;
mod int11_dot;
pub mod int8_amx;
pub mod int8_batch;
mod int8_decode;
pub mod int8_dot;
mod int8_prefill;
mod peak;
mod scale_stream;
mod spread;
mod unpack;

use std::arch::x86_64::__m512;

/// Sixteen lanes in one register.
#[derive(Clone, Copy)]
pub struct Avx512x16(pub __m512);

/// Whether this machine has what the code of this folder needs.
pub fn is_supported() -> bool {
    crate::avx2::is_supported()
        && is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("avx512vnni")
        && is_x86_feature_detected!("avx512vbmi")
        && is_x86_feature_detected!("avx512bf16")
}
