use super::Generic16;
use crate::instructions::bf16_dot::{Bf16Dot, flushed_fma, to_bf16, widen};
use crate::instructions::f32_dot::Lanes;

// SAFETY (all): the caller vouches for the instruction set and for the pointers, see `Lanes`.
#[allow(clippy::undocumented_unsafe_blocks)]
impl Bf16Dot for Generic16 {
    type Pair = [u16; 32];
    #[inline(always)]
    unsafe fn load_pair(p: *const u8) -> [u16; 32] {
        unsafe { p.cast::<[[u8; 2]; 32]>().read_unaligned() }.map(u16::from_le_bytes)
    }
    #[inline(always)]
    unsafe fn mac_pair(self, a: [u16; 32], b: [u16; 32]) -> Self {
        unsafe {
            let mut acc = self.to_array();
            for (l, acc) in acc.iter_mut().enumerate() {
                for i in [2 * l + 1, 2 * l] {
                    *acc = flushed_fma(widen(a[i]), widen(b[i]), *acc);
                }
            }
            Self::load(acc.as_ptr())
        }
    }
    #[inline(always)]
    unsafe fn store_bf16(self, p: *mut u8) {
        unsafe { p.cast::<[[u8; 2]; 16]>().write_unaligned(self.to_array().map(|x| to_bf16(x).to_le_bytes())) }
    }
}
