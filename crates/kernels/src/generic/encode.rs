use super::Generic16;
use crate::input::ORDER;
use crate::instructions::encode::Encode;
use crate::instructions::f32_dot::Lanes;

impl Encode for Generic16 {
    #[inline(always)]
    unsafe fn greatest_size(p: *const f32) -> f32 {
        // SAFETY: the caller vouches for 32 values.
        let x = unsafe { p.cast::<[f32; 32]>().read_unaligned() };
        f32::from_bits(x.iter().fold(0, |m, x| m.max(x.to_bits() & 0x7fff_ffff)))
    }
    #[inline(always)]
    unsafe fn store_i8(self, p: *mut i8) -> i32 {
        // SAFETY: the caller vouches for sixteen bytes.
        unsafe {
            let q = self.to_array().map(|x| x.round_ties_even() as i8);
            p.cast::<[i8; 16]>().write_unaligned(std::array::from_fn(|j| q[j / 8 * 8 + ORDER[j % 8]]));
            q.iter().map(|&q| q as i32).sum()
        }
    }
}
