//! Products of bytes: lane l of four sums gets those of bytes 4l to 4l + 3, exact in 32 bits.
//!
//! The compiler has no stable functions for these instructions yet, hence their names in assembler.

use std::arch::aarch64::*;
use std::arch::asm;

/// How bytes are multiplied.
///
/// # Safety
/// Functions may be called only where the machine has the instructions.
#[allow(clippy::missing_safety_doc)]
pub trait Products: Copy {
    /// Whether there is [`Products::matrices`].
    const MATRICES: bool = false;
    /// Adds to lane l the products of bytes 4l to 4l + 3, both signed.
    unsafe fn signed(sums: int32x4_t, a: int8x16_t, b: int8x16_t) -> int32x4_t;
    /// The same with `a` unsigned and `b` signed.
    #[inline(always)]
    unsafe fn mixed(sums: int32x4_t, a: uint8x16_t, b: int8x16_t) -> int32x4_t {
        // SAFETY: the caller's.
        unsafe {
            // `a - 128` is a signed byte. That takes 128 times the sum of `b` away, which is added first.
            let missing = Self::signed(vdupq_n_s32(0), b, vdupq_n_s8(1));
            let a = vreinterpretq_s8_u8(veorq_u8(a, vdupq_n_u8(0x80)));
            Self::signed(vaddq_s32(sums, vshlq_n_s32::<7>(missing)), a, b)
        }
    }
    /// Rows of eight bytes, two in each: lane 2i + j gets the products of row i of `a` (unsigned) with row j of `b` (signed).
    #[inline(always)]
    unsafe fn matrices(sums: int32x4_t, a: uint8x16_t, b: int8x16_t) -> int32x4_t {
        let _ = (a, b);
        sums
    }
}

/// Every aarch64 processor.
#[derive(Clone, Copy)]
pub struct Plain;

impl Products for Plain {
    #[inline(always)]
    unsafe fn signed(sums: int32x4_t, a: int8x16_t, b: int8x16_t) -> int32x4_t {
        // SAFETY: NEON is there.
        unsafe {
            let low = vmull_s8(vget_low_s8(a), vget_low_s8(b));
            let high = vmull_high_s8(a, b);
            vaddq_s32(sums, vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high)))
        }
    }
}

/// `sdot`.
#[derive(Clone, Copy)]
pub struct DotProd;

impl Products for DotProd {
    #[inline(always)]
    unsafe fn signed(mut sums: int32x4_t, a: int8x16_t, b: int8x16_t) -> int32x4_t {
        // SAFETY: the caller has `dotprod`; the instruction works on registers alone.
        unsafe {
            asm!(".arch_extension dotprod", "sdot {0:v}.4s, {1:v}.16b, {2:v}.16b", inout(vreg) sums, in(vreg) a, in(vreg) b, options(pure, nomem, nostack, preserves_flags));
        }
        sums
    }
}

/// `sdot`, `usdot` and `usmmla`.
#[derive(Clone, Copy)]
pub struct I8mm;

impl Products for I8mm {
    const MATRICES: bool = true;
    #[inline(always)]
    unsafe fn signed(sums: int32x4_t, a: int8x16_t, b: int8x16_t) -> int32x4_t {
        // SAFETY: the caller's.
        unsafe { DotProd::signed(sums, a, b) }
    }
    #[inline(always)]
    unsafe fn mixed(mut sums: int32x4_t, a: uint8x16_t, b: int8x16_t) -> int32x4_t {
        // SAFETY: the caller has `i8mm`; the instruction works on registers alone.
        unsafe {
            asm!(".arch_extension i8mm", "usdot {0:v}.4s, {1:v}.16b, {2:v}.16b", inout(vreg) sums, in(vreg) a, in(vreg) b, options(pure, nomem, nostack, preserves_flags));
        }
        sums
    }
    #[inline(always)]
    unsafe fn matrices(mut sums: int32x4_t, a: uint8x16_t, b: int8x16_t) -> int32x4_t {
        // SAFETY: as above.
        unsafe {
            asm!(".arch_extension i8mm", "usmmla {0:v}.4s, {1:v}.16b, {2:v}.16b", inout(vreg) sums, in(vreg) a, in(vreg) b, options(pure, nomem, nostack, preserves_flags));
        }
        sums
    }
}

/// Prefetches the line at `p`, any address, into the second-level cache: a prefetch does not fault.
#[inline(always)]
pub unsafe fn prefetch(p: *const u8) {
    // SAFETY: it has no effect but on speed.
    unsafe { asm!("prfm pldl2keep, [{0}]", in(reg) p, options(nostack, preserves_flags, readonly)) }
}

/// Keeps the compiler from mixing what comes before with what comes after, which would take more registers than there are.
#[inline(always)]
pub fn apart() {
    // SAFETY: nothing is executed.
    unsafe { asm!("", options(nostack, preserves_flags)) }
}
