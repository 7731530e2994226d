use super::Generic16;
use crate::instructions::int11_dot::Int11Dot;

// SAFETY (all): the caller vouches for the pointers.
#[allow(clippy::undocumented_unsafe_blocks)]
impl Int11Dot for Generic16 {
    type Sums = [i32; 16];
    #[inline(always)]
    unsafe fn zero() -> [i32; 16] {
        [0; 16]
    }
    #[inline(always)]
    unsafe fn widen_pairs(p: *const u8) -> Self {
        let b = unsafe { p.cast::<[u8; 32]>().read_unaligned() };
        Generic16(std::array::from_fn(|r| f32::from_bits(b[2 * r] as u32 | (b[2 * r + 1] as u32) << 16)))
    }
    #[inline(always)]
    unsafe fn add_pairs(sums: [i32; 16], w: Self, x: *const i16) -> [i32; 16] {
        let [x0, x1] = unsafe { x.cast::<[i16; 2]>().read_unaligned() };
        std::array::from_fn(|r| {
            let w = w.0[r].to_bits();
            // Of weights that are no numbers anything may come, since their unit is none.
            sums[r].wrapping_add(w as i16 as i32 * x0 as i32).wrapping_add((w >> 16) as i16 as i32 * x1 as i32)
        })
    }
    #[inline(always)]
    unsafe fn row_sums(rows: *const u8, stride: usize, x: *const i16, n: usize) -> [i32; 16] {
        let mut sums = [0; 16];
        for (r, sum) in sums.iter_mut().enumerate() {
            for i in 0..n {
                *sum += unsafe { i32::from(*rows.add(stride * r + i)) * i32::from(x.add(i).read_unaligned()) };
            }
        }
        sums
    }
    #[inline(always)]
    unsafe fn add_to_all(sums: [i32; 16], n: i32) -> [i32; 16] {
        sums.map(|s| s + n)
    }
    #[inline(always)]
    unsafe fn less(pairs: Self, zero: i16) -> Self {
        let less = |w: u32| (w as u16).wrapping_sub(zero as u16) as u32;
        Generic16(pairs.0.map(|w| f32::from_bits(less(w.to_bits()) | less(w.to_bits() >> 16) << 16)))
    }
    #[inline(always)]
    unsafe fn to_f32(sums: [i32; 16]) -> Self {
        Generic16(sums.map(|s| s as f32))
    }
}
