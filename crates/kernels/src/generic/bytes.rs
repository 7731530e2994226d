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
    unsafe fn load_flipped(p: *const u8) -> Self::Quads {
        unsafe { Self::load_quads(p) }.map(|quad| quad.map(|byte| byte ^ 0x80))
    }
    #[inline(always)]
    unsafe fn multiply_quads(mut sums: Self::Sums, a: Self::Quads, b: Self::Quads) -> Self::Sums {
        for (sum, (a, b)) in sums.iter_mut().zip(a.into_iter().zip(b)) {
            for (a, b) in a.into_iter().zip(b) {
                *sum = sum.wrapping_add(i32::from(a) * i32::from(b as i8));
            }
        }
        sums
    }
    #[inline(always)]
    unsafe fn total16(v: [Self::Sums; 16]) -> Self::Sums {
        v.map(|sums| sums.into_iter().fold(0, i32::wrapping_add))
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
    unsafe fn add_sums(a: Self::Sums, b: Self::Sums) -> Self::Sums {
        std::array::from_fn(|i| a[i].wrapping_add(b[i]))
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
    unsafe fn interleave(rows: [*const u8; 4]) -> Self::Quads {
        let rows = rows.map(|row| unsafe { row.cast::<[u8; 16]>().read_unaligned() });
        std::array::from_fn(|i| rows.map(|row| row[i]))
    }
    #[inline(always)]
    unsafe fn interleave64([a, b, c, d]: [*const u8; 4]) -> [Self::Quads; 4] {
        unsafe {
            [
                Self::interleave([a, b, c, d]),
                Self::interleave([a.add(16), b.add(16), c.add(16), d.add(16)]),
                Self::interleave([a.add(32), b.add(32), c.add(32), d.add(32)]),
                Self::interleave([a.add(48), b.add(48), c.add(48), d.add(48)]),
            ]
        }
    }
    #[inline(always)]
    unsafe fn interleave_quarters(rows: [*const u8; 4]) -> [Self::Quads; 4] {
        unsafe { Self::interleave64(rows) }
    }
    #[inline(always)]
    unsafe fn in_order(sums: [Self::Sums; 4]) -> [Self::Sums; 4] {
        sums
    }
    #[inline(always)]
    unsafe fn store_quads(quads: Self::Quads, p: *mut u8) {
        unsafe { p.cast::<[[u8; 4]; 16]>().write_unaligned(quads) }
    }
}
