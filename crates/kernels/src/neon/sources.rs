//! Sources of a row's integers and scales: packed bytes as the matrix has them, or rows that were unpacked to scratch.

use std::arch::aarch64::*;

use super::record::Columns;

/// A row of a matrix: pointers into the matrix, or into scratch.
#[derive(Clone, Copy)]
pub struct Row {
    /// Integers, or blocks.
    pub q: *const u8,
    /// The scale and the bias of each weight group; unused if blocks hold them.
    pub s: *const f32,
    pub b: *const f32,
}

/// The integers of a part of a weight group: the first register alone where it has 16 columns.
pub type Part = [uint8x16_t; 2];
/// The scales and the biases of four weight groups.
pub type Scales = [float32x4_t; 2];

/// A layout of rows.
///
/// # Safety
/// Rows have the groups that are asked for.
#[allow(clippy::missing_safety_doc)]
pub trait Source {
    /// Parts of a weight group.
    const PARTS: usize;
    /// Columns of a part: 16 or 32.
    const COLUMNS: usize = 32;
    /// Integers have seven bits at most.
    const NARROW: bool = true;
    /// The order of a part's columns.
    const ORDER: Columns = Columns::Natural;
    /// Weight groups whose scales are read at once: 4 or 8.
    const STEP: usize = 4;
    /// Part `i` of the four weight groups from `g` on.
    unsafe fn four(row: Row, g: usize, i: usize) -> [Part; 4];
    /// Part `i` of weight group `g`.
    unsafe fn one(row: Row, g: usize, i: usize) -> Part;
    /// Scales and biases of the eight weight groups from `g` on; used where [`Source::STEP`] is 8.
    #[inline(always)]
    unsafe fn scales(row: Row, g: usize) -> [Scales; 2] {
        // SAFETY: the caller's.
        unsafe { [Self::four_scales(row, g), Self::four_scales(row, g + 4)] }
    }
    unsafe fn four_scales(row: Row, g: usize) -> Scales;
    unsafe fn scale(row: Row, g: usize) -> (f32, f32);
}

/// The low halves of sixteen bytes, and the high ones.
#[inline(always)]
unsafe fn halves(bytes: uint8x16_t) -> Part {
    // SAFETY: NEON is there.
    unsafe { [vandq_u8(bytes, vdupq_n_u8(15)), vshrq_n_u8::<4>(bytes)] }
}

#[inline(always)]
unsafe fn numbers(row: Row, g: usize) -> Scales {
    // SAFETY: the caller's.
    unsafe { [vld1q_f32(row.s.add(g)), vld1q_f32(row.b.add(g))] }
}

/// 4-bit integers of one stream, with scales as f32.
pub struct Nibbles<const PARTS: usize>;

impl<const PARTS: usize> Source for Nibbles<PARTS> {
    const PARTS: usize = PARTS;
    const ORDER: Columns = Columns::EvenOdd;
    #[inline(always)]
    unsafe fn four(row: Row, g: usize, i: usize) -> [Part; 4] {
        let at = |l: usize| unsafe { Self::one(row, g + l, i) };
        [at(0), at(1), at(2), at(3)]
    }
    #[inline(always)]
    unsafe fn one(row: Row, g: usize, i: usize) -> Part {
        // SAFETY: a part has sixteen bytes.
        unsafe { halves(vld1q_u8(row.q.add((g * PARTS + i) * 16))) }
    }
    #[inline(always)]
    unsafe fn four_scales(row: Row, g: usize) -> Scales {
        // SAFETY: the caller's.
        unsafe { numbers(row, g) }
    }
    #[inline(always)]
    unsafe fn scale(row: Row, g: usize) -> (f32, f32) {
        // SAFETY: the caller's.
        unsafe { (*row.s.add(g), *row.b.add(g)) }
    }
}

/// A byte for each integer, with scales as f32.
pub struct Unpacked<const PARTS: usize, const COLUMNS: usize, const NARROW: bool>;

impl<const PARTS: usize, const COLUMNS: usize, const NARROW: bool> Source for Unpacked<PARTS, COLUMNS, NARROW> {
    const PARTS: usize = PARTS;
    const COLUMNS: usize = COLUMNS;
    const NARROW: bool = NARROW;
    #[inline(always)]
    unsafe fn four(row: Row, g: usize, i: usize) -> [Part; 4] {
        let at = |l: usize| unsafe { Self::one(row, g + l, i) };
        [at(0), at(1), at(2), at(3)]
    }
    #[inline(always)]
    unsafe fn one(row: Row, g: usize, i: usize) -> Part {
        // SAFETY: a part has COLUMNS bytes.
        unsafe {
            let p = row.q.add((g * PARTS + i) * COLUMNS);
            let first = vld1q_u8(p);
            [first, if COLUMNS > 16 { vld1q_u8(p.add(16)) } else { first }]
        }
    }
    #[inline(always)]
    unsafe fn four_scales(row: Row, g: usize) -> Scales {
        // SAFETY: the caller's.
        unsafe { numbers(row, g) }
    }
    #[inline(always)]
    unsafe fn scale(row: Row, g: usize) -> (f32, f32) {
        // SAFETY: the caller's.
        unsafe { (*row.s.add(g), *row.b.add(g)) }
    }
}

/// The f16 at four places as f32.
#[inline(always)]
unsafe fn four_f16(at: [*const u8; 4]) -> float32x4_t {
    // SAFETY: the caller's.
    unsafe {
        let mut all = vld1_dup_u16(at[0].cast());
        all = vld1_lane_u16::<1>(at[1].cast(), all);
        all = vld1_lane_u16::<2>(at[2].cast(), all);
        all = vld1_lane_u16::<3>(at[3].cast(), all);
        vcvt_f32_f16(vreinterpret_f16_u16(all))
    }
}

/// The f16 at a place, as f32 in the first lane.
#[inline(always)]
unsafe fn one_f16(p: *const u8) -> f32 {
    // SAFETY: the caller's.
    unsafe { vgetq_lane_f32::<0>(vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(p.cast::<u16>().read_unaligned())))) }
}

/// Q4_0 and Q4_1: blocks of 32 columns. BIASED: Q4_1.
pub struct Blocks32<const BIASED: bool>;

impl<const BIASED: bool> Blocks32<BIASED> {
    const BYTES: usize = if BIASED { 20 } else { 18 };
}

impl<const BIASED: bool> Source for Blocks32<BIASED> {
    const PARTS: usize = 1;
    #[inline(always)]
    unsafe fn four(row: Row, g: usize, i: usize) -> [Part; 4] {
        let at = |l: usize| unsafe { Self::one(row, g + l, i) };
        [at(0), at(1), at(2), at(3)]
    }
    #[inline(always)]
    unsafe fn one(row: Row, g: usize, _: usize) -> Part {
        // SAFETY: the integers are the last sixteen bytes of a block.
        unsafe { halves(vld1q_u8(row.q.add((g + 1) * Self::BYTES - 16))) }
    }
    #[inline(always)]
    unsafe fn four_scales(row: Row, g: usize) -> Scales {
        // SAFETY: the caller's.
        unsafe {
            let block = |i: usize| row.q.add((g + i) * Self::BYTES);
            if BIASED {
                // A scale and a bias side by side.
                let pair = |i: usize| block(i).cast::<u32>().read_unaligned();
                let two = |a, b| vcvt_f32_f16(vreinterpret_f16_u32(vset_lane_u32::<1>(b, vdup_n_u32(a))));
                let (a, b) = (two(pair(0), pair(1)), two(pair(2), pair(3)));
                [vuzp1q_f32(a, b), vuzp2q_f32(a, b)]
            } else {
                let s = four_f16([block(0), block(1), block(2), block(3)]);
                [s, vmulq_n_f32(s, -8.0)]
            }
        }
    }
    #[inline(always)]
    unsafe fn scale(row: Row, g: usize) -> (f32, f32) {
        // SAFETY: the caller's.
        unsafe {
            let block = row.q.add(g * Self::BYTES);
            let s = one_f16(block);
            (s, if BIASED { one_f16(block.add(2)) } else { -8.0 * s })
        }
    }
}

/// Q4_K: blocks of eight groups of 32 columns.
pub struct Q4K;

impl Q4K {
    const BYTES: usize = 144;
}

impl Source for Q4K {
    const PARTS: usize = 1;
    const STEP: usize = 8;
    #[inline(always)]
    unsafe fn four(row: Row, g: usize, _: usize) -> [Part; 4] {
        // SAFETY: two groups share 32 bytes.
        unsafe {
            let p = row.q.add(g / 8 * Self::BYTES + 16 + g % 8 * 16);
            let at = |i: usize| halves(vld1q_u8(p.add(16 * i)));
            let (a, b, c, d) = (at(0), at(1), at(2), at(3));
            [[a[0], b[0]], [a[1], b[1]], [c[0], d[0]], [c[1], d[1]]]
        }
    }
    #[inline(always)]
    unsafe fn one(row: Row, g: usize, i: usize) -> Part {
        // SAFETY: groups come in eights.
        unsafe { Self::four(row, g / 4 * 4, i)[g % 4] }
    }
    #[inline(always)]
    unsafe fn scales(row: Row, g: usize) -> [Scales; 2] {
        // SAFETY: a block begins with two f16 and twelve bytes of scales and minima.
        unsafe {
            let block = row.q.add(g / 8 * Self::BYTES);
            let units = vcvt_f32_f16(vreinterpret_f16_u32(vdup_n_u32(block.cast::<u32>().read_unaligned())));
            let least = vnegq_f32(units);
            // Four scales and four minima of six bits; of the other eight four bits, whose high bits are above the first ones.
            let first = vld1_u8(block.add(4));
            let rest = vdup_n_u32(block.add(12).cast::<u32>().read_unaligned());
            let rest = vreinterpret_u8_u32(vshl_u32(rest, vcreate_s32(0xffff_fffc_0000_0000)));
            let high = vand_u8(vshr_n_u8::<2>(first), vdup_n_u8(0x30));
            let second = vorr_u8(vand_u8(rest, vdup_n_u8(15)), high);
            let (first, second) = (vmovl_u8(vand_u8(first, vdup_n_u8(63))), vmovl_u8(second));
            let scales = |v: uint16x8_t| vmulq_laneq_f32::<0>(vcvtq_f32_u32(vmovl_u16(vget_low_u16(v))), units);
            let minima = |v: uint16x8_t| vmulq_laneq_f32::<1>(vcvtq_f32_u32(vmovl_high_u16(v)), least);
            [[scales(first), minima(first)], [scales(second), minima(second)]]
        }
    }
    #[inline(always)]
    unsafe fn four_scales(row: Row, g: usize) -> Scales {
        // SAFETY: groups come in eights.
        unsafe { Self::scales(row, g)[g % 8 / 4] }
    }
    #[inline(always)]
    unsafe fn scale(row: Row, g: usize) -> (f32, f32) {
        // SAFETY: as above.
        unsafe {
            let [s, b] = Self::four_scales(row, g);
            let (mut scales, mut biases) = ([0.0; 4], [0.0; 4]);
            vst1q_f32(scales.as_mut_ptr(), s);
            vst1q_f32(biases.as_mut_ptr(), b);
            (scales[g % 4], biases[g % 4])
        }
    }
}
