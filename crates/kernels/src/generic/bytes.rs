use super::Generic16;
use crate::instructions::bytes::Bytes;

// SAFETY (all): the caller vouches for the pointers, see `Bytes`.
#[allow(clippy::undocumented_unsafe_blocks)]
impl Bytes for Generic16 {
    type Sums = [i32; 16];
    type Quads = [[u8; 4]; 16];
    #[inline(always)]
    unsafe fn start(sum: i32) -> Self::Sums {
        [sum; 16]
    }
    #[inline(always)]
    unsafe fn load_sums(p: *const i32, more: i32) -> Self::Sums {
        unsafe { p.cast::<[i32; 16]>().read_unaligned() }.map(|sum| sum.wrapping_add(more))
    }
    #[inline(always)]
    unsafe fn store_sums(sums: Self::Sums, p: *mut i32) {
        unsafe { p.cast::<[i32; 16]>().write_unaligned(sums) }
    }
    #[inline(always)]
    unsafe fn load_quads(p: *const u8) -> Self::Quads {
        unsafe { p.cast::<[[u8; 4]; 16]>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn multiply_unsigned(mut sums: Self::Sums, a: Self::Quads, b: i32) -> Self::Sums {
        for (sum, a) in sums.iter_mut().zip(a) {
            for (a, b) in a.into_iter().zip(b.to_le_bytes()) {
                *sum = sum.wrapping_add(i32::from(a) * i32::from(b as i8));
            }
        }
        sums
    }
    #[inline(always)]
    unsafe fn multiply_signed(mut sums: Self::Sums, a: Self::Quads, b: i32) -> Self::Sums {
        for (sum, a) in sums.iter_mut().zip(a) {
            for (a, b) in a.into_iter().zip(b.to_le_bytes()) {
                *sum = sum.wrapping_add(i32::from(a as i8) * i32::from(b));
            }
        }
        sums
    }
    #[inline(always)]
    unsafe fn from_sums(sums: Self::Sums) -> Self {
        Generic16(sums.map(|sum| sum as f32))
    }
    #[inline(always)]
    unsafe fn store_flipped(self, p: *mut u8) {
        let bytes = self.0.map(|x| (x.to_bits() ^ 0x8080_8080).to_le_bytes());
        unsafe { p.cast::<[[u8; 4]; 16]>().write_unaligned(bytes) }
    }
    #[inline(always)]
    unsafe fn store_rounded_u8(self, p: *mut u8) {
        unsafe { p.cast::<[u8; 16]>().write_unaligned(self.0.map(|x| x.round_ties_even() as u8)) }
    }
    #[inline(always)]
    unsafe fn store_rounded_u16(self, high: *mut u8, low: *mut u8) {
        let q = self.0.map(|x| x.round_ties_even() as u16);
        unsafe {
            high.cast::<[u8; 16]>().write_unaligned(q.map(|q| (q >> 8) as u8));
            low.cast::<[u8; 16]>().write_unaligned(q.map(|q| q as u8));
        }
    }
    #[inline(always)]
    unsafe fn join_sums(high: Self::Sums, low: Self::Sums) -> Self::Sums {
        std::array::from_fn(|i| high[i].wrapping_mul(256).wrapping_add(low[i]))
    }
    #[inline(always)]
    unsafe fn interleave(rows: [*const u8; 4], p: *mut u8) {
        let rows = rows.map(|row| unsafe { row.cast::<[u8; 16]>().read_unaligned() });
        let quads: [[u8; 4]; 16] = std::array::from_fn(|i| rows.map(|row| row[i]));
        unsafe { p.cast::<[[u8; 4]; 16]>().write_unaligned(quads) }
    }
}
