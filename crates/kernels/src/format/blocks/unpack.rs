//! What a block holds: its integers as bytes, and the scale and the bias of each group.
//!
//! One function is one type. The integers are unsigned, so that the products of `vpdpbusd` take them; `zero` is the one that stands for 0. A weight is
//! `fma(q - zero, s, b)`, and has exactly the value that its producers define: products of units and scales fit in an f32. Written plainly, so that the
//! compiler vectorises them for the instruction set of the caller.

use super::codebooks::{EVEN_SIGNS, IQ1_S, IQ2_S, IQ2_XS, IQ2_XXS, IQ3_S, IQ3_XXS, SIGNS};

/// A format of blocks, as a Rust type, so that kernels are compiled for each format.
pub(crate) trait Block {
    /// Columns.
    const COLUMNS: usize;
    /// Bytes.
    const BYTES: usize;
    /// Columns that share a scale: 16 or 32.
    const GROUP: usize;
    /// The integer that stands for 0.
    const ZERO: u8;
    /// Biases are the block's own. Otherwise a weight is `(q - ZERO) * s`.
    const BIASED: bool;

    /// Unpacks a block. Biases are written where they are the block's own.
    ///
    /// # Safety
    /// `block` holds [`Block::BYTES`], `q` [`Block::COLUMNS`], `s` and `b` a number for each group, all at any alignment.
    unsafe fn unpack(block: *const u8, q: *mut u8, s: *mut f32, b: *mut f32);
}

/// Makes the list of types: a type for each, and the macro `with_block!` that goes from a [`BlockFormat`](super::BlockFormat) to it.
macro_rules! blocks {
    ($d:tt $($name:ident = $unpack:ident: $columns:literal columns, $bytes:literal bytes, groups of $group:literal, integers of $bits:literal bits, zero $zero:literal, $biased:literal;)+) => {
        $(
            pub(crate) struct $name;

            impl Block for $name {
                const COLUMNS: usize = $columns;
                const BYTES: usize = $bytes;
                const GROUP: usize = $group;
                const ZERO: u8 = $zero;
                const BIASED: bool = $biased;
                #[inline(always)]
                unsafe fn unpack(block: *const u8, q: *mut u8, s: *mut f32, b: *mut f32) {
                    const GROUPS: usize = $columns / $group;
                    let (mut scales, mut biases) = ([0.0; GROUPS], [0.0; GROUPS]);
                    // SAFETY: bytes have no alignment; the caller vouches for the lengths.
                    unsafe {
                        $unpack(&*block.cast::<[u8; $bytes]>(), &mut *q.cast::<[u8; $columns]>(), &mut scales, &mut biases);
                        s.cast::<[f32; GROUPS]>().write_unaligned(scales);
                        if $biased {
                            b.cast::<[f32; GROUPS]>().write_unaligned(biases);
                        }
                    }
                }
            }
        )+

        impl super::BlockFormat {
            /// Columns of a block: 32, 64 or 256. A row has whole blocks.
            pub const fn block_columns(self) -> usize {
                match self {
                    $(super::BlockFormat::$name => $columns),+
                }
            }

            /// Bytes of a block.
            pub const fn block_bytes(self) -> usize {
                match self {
                    $(super::BlockFormat::$name => $bytes),+
                }
            }

            /// Columns that share a scale: 16 or 32.
            pub const fn group(self) -> usize {
                match self {
                    $(super::BlockFormat::$name => $group),+
                }
            }

            /// The unpacked integer that stands for 0, and whether blocks have biases of their own.
            pub const fn zero(self) -> (f32, bool) {
                match self {
                    $(super::BlockFormat::$name => ($zero as f32, $biased)),+
                }
            }

            /// Bits of the greatest unpacked integer.
            pub(crate) const fn bits(self) -> u8 {
                match self {
                    $(super::BlockFormat::$name => $bits),+
                }
            }
        }

        /// `with_block!(format, B => expression)`: the expression with `B` as the type of that format.
        macro_rules! with_block {
            ($d format:expr, $d block:ident => $d body:expr) => {
                match $d format {
                    $($crate::format::BlockFormat::$name => {
                        type $d block = $crate::format::blocks::unpack::$name;
                        $d body
                    })+
                }
            };
        }
        pub(crate) use with_block;
    };
}

blocks! { $
    Q4_0 = q4_0: 32 columns, 18 bytes, groups of 32, integers of 4 bits, zero 8, false;
    Q4_1 = q4_1: 32 columns, 20 bytes, groups of 32, integers of 4 bits, zero 0, true;
    Q5_0 = q5_0: 32 columns, 22 bytes, groups of 32, integers of 5 bits, zero 16, false;
    Q5_1 = q5_1: 32 columns, 24 bytes, groups of 32, integers of 5 bits, zero 0, true;
    Q8_0 = q8_0: 32 columns, 34 bytes, groups of 32, integers of 8 bits, zero 128, false;
    Q2K = q2_k: 256 columns, 84 bytes, groups of 16, integers of 2 bits, zero 0, true;
    Q3K = q3_k: 256 columns, 110 bytes, groups of 16, integers of 3 bits, zero 4, false;
    Q4K = q4_k: 256 columns, 144 bytes, groups of 32, integers of 4 bits, zero 0, true;
    Q5K = q5_k: 256 columns, 176 bytes, groups of 32, integers of 5 bits, zero 0, true;
    Q6K = q6_k: 256 columns, 210 bytes, groups of 16, integers of 6 bits, zero 32, false;
    Iq4Nl = iq4_nl: 32 columns, 18 bytes, groups of 32, integers of 8 bits, zero 128, false;
    Iq4Xs = iq4_xs: 256 columns, 136 bytes, groups of 32, integers of 8 bits, zero 128, false;
    Iq3Xxs = iq3_xxs: 256 columns, 98 bytes, groups of 32, integers of 7 bits, zero 62, false;
    Iq3S = iq3_s: 256 columns, 110 bytes, groups of 32, integers of 5 bits, zero 15, false;
    Iq2Xxs = iq2_xxs: 256 columns, 66 bytes, groups of 32, integers of 7 bits, zero 43, false;
    Iq2Xs = iq2_xs: 256 columns, 74 bytes, groups of 16, integers of 7 bits, zero 43, false;
    Iq2S = iq2_s: 256 columns, 82 bytes, groups of 16, integers of 7 bits, zero 43, false;
    Iq1S = iq1_s: 256 columns, 50 bytes, groups of 32, integers of 5 bits, zero 9, false;
    Iq1M = iq1_m: 256 columns, 56 bytes, groups of 16, integers of 5 bits, zero 9, false;
    Mxfp4 = mxfp4: 32 columns, 17 bytes, groups of 32, integers of 5 bits, zero 12, false;
    Nvfp4 = nvfp4: 64 columns, 36 bytes, groups of 16, integers of 5 bits, zero 12, false;
}

/// The f16 at byte `at`, widened without a call: this is inlined where the compiler may vectorise it.
#[inline(always)]
fn half(block: &[u8], at: usize) -> f32 {
    half_bits(u16::from_le_bytes([block[at], block[at + 1]]))
}

#[inline(always)]
fn half_bits(bits: u16) -> f32 {
    const INFINITE: u32 = 0x7c00;
    let (sign, size) = (u32::from(bits) << 16 & 0x8000_0000, u32::from(bits) & 0x7fff);
    // The exponent's bias is 112 less. The product makes it so for denormals too.
    let finite = (f32::from_bits(size << 13) * f32::from_bits((127 + 112) << 23)).to_bits();
    f32::from_bits(sign | if size < INFINITE { finite } else { finite | 0x7f80_0000 })
}

#[inline(always)]
fn word(block: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([block[at], block[at + 1]])
}

#[inline(always)]
fn long(block: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]])
}

/// Low halves of sixteen bytes, then high halves.
#[inline(always)]
fn nibbles(bytes: &[u8], q: &mut [u8]) {
    for i in 0..16 {
        q[i] = bytes[i] & 15;
        q[16 + i] = bytes[i] >> 4;
    }
}

#[inline(always)]
fn q4_0(block: &[u8; 18], q: &mut [u8; 32], s: &mut [f32; 1], _: &mut [f32; 1]) {
    s[0] = half(block, 0);
    nibbles(&block[2..], q);
}

#[inline(always)]
fn q4_1(block: &[u8; 20], q: &mut [u8; 32], s: &mut [f32; 1], b: &mut [f32; 1]) {
    (s[0], b[0]) = (half(block, 0), half(block, 2));
    nibbles(&block[4..], q);
}

/// Four bits of each, and the fifth bits of all.
#[inline(always)]
fn fives(high: u32, bytes: &[u8], q: &mut [u8; 32]) {
    nibbles(bytes, q);
    for (i, q) in q.iter_mut().enumerate() {
        *q |= (high >> i & 1) as u8 * 16;
    }
}

#[inline(always)]
fn q5_0(block: &[u8; 22], q: &mut [u8; 32], s: &mut [f32; 1], _: &mut [f32; 1]) {
    s[0] = half(block, 0);
    fives(long(block, 2), &block[6..], q);
}

#[inline(always)]
fn q5_1(block: &[u8; 24], q: &mut [u8; 32], s: &mut [f32; 1], b: &mut [f32; 1]) {
    (s[0], b[0]) = (half(block, 0), half(block, 2));
    fives(long(block, 4), &block[8..], q);
}

#[inline(always)]
fn q8_0(block: &[u8; 34], q: &mut [u8; 32], s: &mut [f32; 1], _: &mut [f32; 1]) {
    s[0] = half(block, 0);
    for i in 0..32 {
        q[i] = block[2 + i] ^ 0x80;
    }
}

/// Integers of two bits: the lowest two bits of 32 bytes, then the next two bits of the same bytes, and so on.
#[inline(always)]
fn pairs(bytes: &[u8], q: &mut [u8; 256]) {
    for half in 0..2 {
        for k in 0..4 {
            for i in 0..32 {
                q[128 * half + 32 * k + i] = bytes[32 * half + i] >> (2 * k) & 3;
            }
        }
    }
}

#[inline(always)]
fn q2_k(block: &[u8; 84], q: &mut [u8; 256], s: &mut [f32; 16], b: &mut [f32; 16]) {
    let (unit, least) = (half(block, 80), half(block, 82));
    for g in 0..16 {
        s[g] = unit * f32::from(block[g] & 15);
        b[g] = -(least * f32::from(block[g] >> 4));
    }
    pairs(&block[16..80], q);
}

#[inline(always)]
fn q3_k(block: &[u8; 110], q: &mut [u8; 256], s: &mut [f32; 16], _: &mut [f32; 16]) {
    let unit = half(block, 108);
    let scales = &block[96..108];
    for g in 0..16 {
        let (low, high) = (scales[g % 8] >> (g / 8 * 4) & 15, scales[8 + g % 4] >> (g / 4 * 2) & 3);
        s[g] = unit * f32::from((low | high << 4) as i8 - 32);
    }
    pairs(&block[32..96], q);
    for k in 0..8 {
        for i in 0..32 {
            q[32 * k + i] |= (block[i] >> k & 1) << 2;
        }
    }
}

/// The 6-bit scale and minimum of group `g` of eight.
#[inline(always)]
fn sixes(scales: &[u8], g: usize) -> (u8, u8) {
    if g < 4 {
        (scales[g] & 63, scales[4 + g] & 63)
    } else {
        let low = scales[4 + g];
        (low & 15 | scales[g - 4] >> 2 & 48, low >> 4 | scales[g] >> 2 & 48)
    }
}

#[inline(always)]
fn k_scales(block: &[u8], s: &mut [f32; 8], b: &mut [f32; 8]) {
    let (unit, least) = (half(block, 0), half(block, 2));
    for g in 0..8 {
        let (scale, minimum) = sixes(&block[4..16], g);
        s[g] = unit * f32::from(scale);
        b[g] = -(least * f32::from(minimum));
    }
}

#[inline(always)]
fn q4_k(block: &[u8; 144], q: &mut [u8; 256], s: &mut [f32; 8], b: &mut [f32; 8]) {
    k_scales(block, s, b);
    for k in 0..4 {
        for i in 0..32 {
            let byte = block[16 + 32 * k + i];
            q[64 * k + i] = byte & 15;
            q[64 * k + 32 + i] = byte >> 4;
        }
    }
}

#[inline(always)]
fn q5_k(block: &[u8; 176], q: &mut [u8; 256], s: &mut [f32; 8], b: &mut [f32; 8]) {
    k_scales(block, s, b);
    for k in 0..4 {
        for i in 0..32 {
            let (byte, high) = (block[48 + 32 * k + i], block[16 + i] >> (2 * k));
            q[64 * k + i] = byte & 15 | (high & 1) << 4;
            q[64 * k + 32 + i] = byte >> 4 | (high & 2) << 3;
        }
    }
}

#[inline(always)]
fn q6_k(block: &[u8; 210], q: &mut [u8; 256], s: &mut [f32; 16], _: &mut [f32; 16]) {
    let unit = half(block, 208);
    for g in 0..16 {
        s[g] = unit * f32::from(block[192 + g] as i8);
    }
    for half in 0..2 {
        for i in 0..32 {
            let (first, second, high) = (block[64 * half + i], block[64 * half + 32 + i], block[128 + 32 * half + i]);
            let q = &mut q[128 * half..];
            q[i] = first & 15 | (high & 3) << 4;
            q[32 + i] = second & 15 | (high >> 2 & 3) << 4;
            q[64 + i] = first >> 4 | (high >> 4 & 3) << 4;
            q[96 + i] = second >> 4 | high >> 6 << 4;
        }
    }
}

/// The sixteen values of IQ4, and 128.
pub(crate) static IQ4: [u8; 16] = [1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241];
/// Twice the values of e2m1, and 12.
pub(crate) static E2M1: [u8; 16] = [12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0];

/// Values by their 4-bit numbers: low halves of the bytes, then high halves.
#[inline(always)]
fn looked_up(values: &[u8; 16], bytes: &[u8], q: &mut [u8]) {
    let n = bytes.len();
    for i in 0..n {
        q[i] = values[usize::from(bytes[i] & 15)];
        q[n + i] = values[usize::from(bytes[i] >> 4)];
    }
}

#[inline(always)]
fn iq4_nl(block: &[u8; 18], q: &mut [u8; 32], s: &mut [f32; 1], _: &mut [f32; 1]) {
    s[0] = half(block, 0);
    looked_up(&IQ4, &block[2..], q);
}

#[inline(always)]
fn iq4_xs(block: &[u8; 136], q: &mut [u8; 256], s: &mut [f32; 8], _: &mut [f32; 8]) {
    let (unit, high) = (half(block, 0), word(block, 2));
    for g in 0..8 {
        let scale = block[4 + g / 2] >> (g % 2 * 4) & 15 | ((high >> (2 * g) & 3) as u8) << 4;
        s[g] = unit * f32::from(scale as i8 - 32);
        looked_up(&IQ4, &block[8 + 16 * g..][..16], &mut q[32 * g..][..32]);
    }
}

#[inline(always)]
fn mxfp4(block: &[u8; 17], q: &mut [u8; 32], s: &mut [f32; 1], _: &mut [f32; 1]) {
    s[0] = half_of_power(block[0]);
    looked_up(&E2M1, &block[1..], q);
}

/// `2^(exponent - 128)`: half of the power that a byte is, since the values are doubled. The two least are denormal.
#[inline(always)]
pub(crate) fn half_of_power(exponent: u8) -> f32 {
    let exponent = u32::from(exponent);
    f32::from_bits(if exponent < 2 { 0x0020_0000 << exponent } else { (exponent - 1) << 23 })
}

#[inline(always)]
fn nvfp4(block: &[u8; 36], q: &mut [u8; 64], s: &mut [f32; 4], _: &mut [f32; 4]) {
    for g in 0..4 {
        s[g] = unsigned_e4m3(block[g]);
        looked_up(&E2M1, &block[4 + 8 * g..][..8], &mut q[16 * g..][..16]);
    }
}

/// Half of an e4m3 number without its sign, since the values are doubled. The pattern of NaN is 0, as the producer has it.
#[inline(always)]
fn unsigned_e4m3(bits: u8) -> f32 {
    let (exponent, mantissa) = (u32::from(bits >> 3 & 15), u32::from(bits & 7));
    if exponent == 0 {
        // A multiple of 2^-9, halved.
        mantissa as f32 * f32::from_bits((127 - 10) << 23)
    } else if bits == 0x7f {
        0.0
    } else {
        f32::from_bits((exponent + 127 - 7 - 1) << 23 | mantissa << 20)
    }
}

/// Eight values around `zero`, with ones in the bytes of `signs` for negative ones.
#[inline(always)]
fn signed(q: &mut [u8], zero: u8, values: u64, signs: u64) {
    // No byte carries or borrows: values are at most `zero`.
    let zero = u64::from(zero) * 0x0101_0101_0101_0101;
    q.copy_from_slice(&(zero + (values & !signs) - (values & signs)).to_le_bytes());
}

/// `unit * (2n + 1) * part`, which is exact.
#[inline(always)]
fn odd(unit: f32, n: u8, part: f32) -> f32 {
    unit * (f32::from(2 * n + 1) * part)
}

#[inline(always)]
fn iq3_xxs(block: &[u8; 98], q: &mut [u8; 256], s: &mut [f32; 8], _: &mut [f32; 8]) {
    let unit = half(block, 0);
    for g in 0..8 {
        let signs = long(block, 66 + 4 * g);
        s[g] = odd(unit, (signs >> 28) as u8, 0.25);
        for i in 0..4 {
            let two = [0, 1].map(|k| u64::from(IQ3_XXS[usize::from(block[2 + 8 * g + 2 * i + k])]));
            let signs = EVEN_SIGNS[(signs >> (7 * i) & 127) as usize];
            signed(&mut q[32 * g + 8 * i..][..8], 62, two[0] | two[1] << 32, signs);
        }
    }
}

#[inline(always)]
fn iq3_s(block: &[u8; 110], q: &mut [u8; 256], s: &mut [f32; 8], _: &mut [f32; 8]) {
    let unit = half(block, 0);
    for g in 0..8 {
        s[g] = odd(unit, block[106 + g / 2] >> (g % 2 * 4) & 15, 1.0);
        let high = usize::from(block[66 + g]);
        for i in 0..4 {
            let two =
                [2 * i, 2 * i + 1].map(|k| u64::from(IQ3_S[usize::from(block[2 + 8 * g + k]) | (high >> k & 1) << 8]));
            let signs = SIGNS[usize::from(block[74 + 4 * g + i])];
            signed(&mut q[32 * g + 8 * i..][..8], 15, two[0] | two[1] << 32, signs);
        }
    }
}

#[inline(always)]
fn iq2_xxs(block: &[u8; 66], q: &mut [u8; 256], s: &mut [f32; 8], _: &mut [f32; 8]) {
    let unit = half(block, 0);
    for g in 0..8 {
        let (numbers, signs) = (&block[2 + 8 * g..][..4], long(block, 6 + 8 * g));
        s[g] = odd(unit, (signs >> 28) as u8, 0.125);
        for i in 0..4 {
            let signs = EVEN_SIGNS[(signs >> (7 * i) & 127) as usize];
            signed(&mut q[32 * g + 8 * i..][..8], 43, IQ2_XXS[usize::from(numbers[i])], signs);
        }
    }
}

#[inline(always)]
fn iq2_xs(block: &[u8; 74], q: &mut [u8; 256], s: &mut [f32; 16], _: &mut [f32; 16]) {
    let unit = half(block, 0);
    for g in 0..16 {
        s[g] = odd(unit, block[66 + g / 2] >> (g % 2 * 4) & 15, 0.125);
    }
    for i in 0..32 {
        let number = usize::from(word(block, 2 + 2 * i));
        signed(&mut q[8 * i..][..8], 43, IQ2_XS[number & 511], EVEN_SIGNS[number >> 9]);
    }
}

#[inline(always)]
fn iq2_s(block: &[u8; 82], q: &mut [u8; 256], s: &mut [f32; 16], _: &mut [f32; 16]) {
    let unit = half(block, 0);
    for g in 0..16 {
        s[g] = odd(unit, block[74 + g / 2] >> (g % 2 * 4) & 15, 0.125);
    }
    for i in 0..32 {
        let high = usize::from(block[66 + i / 4] >> (i % 4 * 2) & 3);
        let number = usize::from(block[2 + i]) | high << 8;
        signed(&mut q[8 * i..][..8], 43, IQ2_S[number], SIGNS[usize::from(block[34 + i])]);
    }
}

/// Eight values of IQ1, in eighths and around 9: each is shifted by one up or down.
#[inline(always)]
fn shifted(q: &mut [u8], number: usize, down: bool) {
    const ONES: u64 = 0x0101_0101_0101_0101;
    let values = IQ1_S[number];
    q.copy_from_slice(&(if down { values - ONES } else { values + ONES }).to_le_bytes());
}

#[inline(always)]
fn iq1_s(block: &[u8; 50], q: &mut [u8; 256], s: &mut [f32; 8], _: &mut [f32; 8]) {
    let unit = half(block, 0);
    for g in 0..8 {
        let high = usize::from(word(block, 34 + 2 * g));
        s[g] = odd(unit, (high >> 12 & 7) as u8, 0.125);
        for i in 0..4 {
            let number = usize::from(block[2 + 4 * g + i]) | (high >> (3 * i) & 7) << 8;
            shifted(&mut q[32 * g + 8 * i..][..8], number, high & 0x8000 != 0);
        }
    }
}

#[inline(always)]
fn iq1_m(block: &[u8; 56], q: &mut [u8; 256], s: &mut [f32; 16], _: &mut [f32; 16]) {
    let words = [0, 1, 2, 3].map(|i| word(block, 48 + 2 * i));
    let unit = half_bits((0..4).fold(0, |bits, i| bits | words[i] >> 12 << (4 * i)));
    for g in 0..16 {
        s[g] = odd(unit, (words[g / 4] >> (g % 4 * 3) & 7) as u8, 0.125);
    }
    for i in 0..32 {
        let high = block[32 + i / 2] >> (i % 2 * 4) & 15;
        let number = usize::from(block[i]) | usize::from(high & 7) << 8;
        shifted(&mut q[8 * i..][..8], number, high & 8 != 0);
    }
}
