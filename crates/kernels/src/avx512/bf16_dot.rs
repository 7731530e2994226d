//! Chooses a kernel by the number of tokens: `bf16_prefill` (many) rearranges tiles of rows in cache, the other streams the rows.

use std::arch::x86_64::*;

use super::{Avx512x16, bf16_prefill};
use crate::instructions::bf16_dot::{Bf16Dot, BothBf16};
use crate::instructions::dot::{Product, multiply};

/// The most tokens that stream the rows. With more, tiles of rows in cache pay.
const FEW: usize = 32;

// SAFETY (all): the caller vouches for the instruction set and for the pointers, see `Lanes`.
#[allow(clippy::undocumented_unsafe_blocks)]
impl Bf16Dot for Avx512x16 {
    type Pair = __m512bh;
    #[inline(always)]
    unsafe fn load_pair(p: *const u8) -> __m512bh {
        unsafe { std::mem::transmute::<__m512i, __m512bh>(_mm512_loadu_si512(p.cast())) }
    }
    #[inline(always)]
    unsafe fn mac_pair(self, a: __m512bh, b: __m512bh) -> Self {
        unsafe { Avx512x16(_mm512_dpbf16_ps(self.0, a, b)) }
    }
    #[inline(always)]
    unsafe fn store_bf16(self, p: *mut u8) {
        unsafe {
            let r = std::mem::transmute::<__m256bh, __m256i>(_mm512_cvtneps_pbh(self.0));
            _mm256_storeu_si256(p.cast(), r);
        }
    }
    fn working_bytes(rows: usize, cols: usize, tokens: usize) -> usize {
        if tokens <= FEW { 0 } else { bf16_prefill::working_bytes(rows, cols) }
    }
    #[inline(always)]
    unsafe fn product(product: Product, working: *mut u8) {
        unsafe {
            if product.tokens.len() <= FEW {
                multiply::<Self, BothBf16>(product);
            } else {
                bf16_prefill::product(product, working);
            }
        }
    }
}
