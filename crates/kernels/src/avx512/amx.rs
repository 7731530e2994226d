//! Integer groups with AMX, for many tokens: tiles of 16 tokens by 16 rows, an activation group (32 columns) deep, whose sums are exact; then the float sequence with
//! AVX-512, as everywhere.
//!
//! Weights lie in cache as for [`super::integers_prefill`]: sixteen rows of four columns each are what a tile of the second factor takes. While one weight group's
//! sums are turned to floats, the tiles of the next one multiply.

use std::arch::asm;
use std::arch::x86_64::*;
use std::sync::OnceLock;

use super::integers_prefill::{ACC, COLS, ROWS, Scales, Tile, fill, fill_scales, finish, prefetch};
use crate::input::GROUP;
use crate::instructions::integers::{Groups, affine_of, weight_group_sum};
use crate::instructions::peak::CHAINS;
use crate::matrix::Matrix;
use crate::scratch::{Scratch, cut_bytes};

/// From so many tokens on, tiles are quicker than what streams or packs rows, though some of their rows multiply nothing.
pub const FROM: usize = 16;
/// Rows of a tile register, and its columns of 32 bits.
const SIDE: usize = 16;
/// Tokens of a pass: two tiles, by two tiles of weight rows.
const TOKENS: usize = 2 * SIDE;
/// Tokens that do not lie one after the other are copied, at most so many at once.
const COPIED: usize = 64;
/// Sums of a pass and activation group.
const SUMS: usize = TOKENS * ROWS;
/// Activation groups of a weight group, at most.
const PARTS: usize = 4;

/// Whether this machine has what the code here needs, and the kernel lets this process use it, which it is asked for once.
pub fn is_supported() -> bool {
    static SUPPORTED: OnceLock<bool> = OnceLock::new();
    *SUPPORTED.get_or_init(|| has_tiles() && is_permitted())
}

fn has_tiles() -> bool {
    const AMX_TILE: u32 = 1 << 24;
    const AMX_INT8: u32 = 1 << 25;
    // The leaf is there: AVX-512 was found in it.
    let features = __cpuid_count(7, 0).edx;
    features & AMX_TILE != 0 && features & AMX_INT8 != 0
}

#[cfg(target_os = "linux")]
fn is_permitted() -> bool {
    const ARCH_REQ_XCOMP_PERM: i32 = 0x1023;
    const XFEATURE_XTILEDATA: i32 = 18;
    // SAFETY: it takes two numbers and touches no memory; a kernel that does not know it answers with an error.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0 }
}

#[cfg(not(target_os = "linux"))]
fn is_permitted() -> bool {
    false
}

/// How the eight tile registers are cut.
#[repr(C, align(64))]
struct Shapes {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    /// Bytes of a row.
    bytes: [u16; 16],
    rows: [u8; 16],
}

/// Registers 0 to 3: sums. 4 and 5: 16 rows of `deep` bytes. 6 and 7: as many bytes of 16 columns, four to a row of the register.
const fn shapes(deep: usize) -> Shapes {
    let (sum, side) = (SIDE as u16 * 4, SIDE as u8);
    let (a, b) = (deep as u16, deep as u8 / 4);
    Shapes {
        palette: 1,
        start_row: 0,
        reserved: [0; 14],
        bytes: [sum, sum, sum, sum, a, a, sum, sum, 0, 0, 0, 0, 0, 0, 0, 0],
        rows: [side, side, side, side, side, side, b, b, 0, 0, 0, 0, 0, 0, 0, 0],
    }
}

/// An activation group deep, for weights; a whole register deep, for keys and values.
static OF_GROUPS: Shapes = shapes(GROUP);
static WHOLE: Shapes = shapes(DEEP);

/// Bytes of a row of a whole register.
pub const DEEP: usize = 64;

/// Tile registers that are cut to shape; released when it goes.
pub struct Tiles;

impl Tiles {
    /// # Safety
    /// [`is_supported`].
    unsafe fn shaped(shapes: &'static Shapes) -> Tiles {
        // SAFETY: the shapes are 64 bytes of palette 1.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const *shapes, options(nostack, preserves_flags)) };
        Tiles
    }

    /// Shaped for [`Tiles::products`].
    ///
    /// # Safety
    /// [`is_supported`].
    pub unsafe fn whole() -> Tiles {
        // SAFETY: the caller's.
        unsafe { Tiles::shaped(&WHOLE) }
    }

    /// `to[r][c] = sum over i of a[r][i] * b[i][c]`, of 32 rows and 32 columns and `deep` registers' depth. `a`: rows of bytes, `a_stride` apart, signed or not; `b`: four bytes
    /// of each of 32 columns together, of the other kind; `to`: rows of i32, `to_stride` bytes apart.
    ///
    /// # Safety
    /// All of it can be read and written.
    #[inline(always)]
    pub unsafe fn products<const SIGNED: bool>(
        &self,
        (a, a_stride): (*const u8, usize),
        b: *const u8,
        deep: usize,
        (to, to_stride): (*mut i32, usize),
    ) {
        const B_STRIDE: usize = 4 * 2 * SIDE;
        // SAFETY: the caller's, and the tiles are shaped.
        unsafe {
            asm!(
                "tilezero tmm0",
                "tilezero tmm1",
                "tilezero tmm2",
                "tilezero tmm3",
                options(nostack, nomem, preserves_flags)
            );
            for i in 0..deep {
                let (a, b) = (a.add(DEEP * i), b.add(B_STRIDE * DEEP / 4 * i));
                let a_2 = a.wrapping_add(SIDE * a_stride);
                // The sign is part of the instruction's name.
                macro_rules! multiply {
                    ($instruction:literal) => {
                        asm!(
                            "tileloadd tmm6, [{b} + {b_stride}*1]",
                            "tileloadd tmm4, [{a} + {a_stride}*1]",
                            concat!($instruction, " tmm0, tmm4, tmm6"),
                            "tileloadd tmm7, [{b} + {b_stride}*1 + 64]",
                            concat!($instruction, " tmm1, tmm4, tmm7"),
                            "tileloadd tmm5, [{a_2} + {a_stride}*1]",
                            concat!($instruction, " tmm2, tmm5, tmm6"),
                            concat!($instruction, " tmm3, tmm5, tmm7"),
                            a = in(reg) a,
                            a_2 = in(reg) a_2,
                            a_stride = in(reg) a_stride,
                            b = in(reg) b,
                            b_stride = in(reg) B_STRIDE,
                            options(nostack, readonly, preserves_flags)
                        )
                    };
                }
                if SIGNED {
                    multiply!("tdpbsud");
                } else {
                    multiply!("tdpbusd");
                }
            }
            asm!(
                "tilestored [{to} + {stride}*1], tmm0",
                "tilestored [{to} + {stride}*1 + 64], tmm1",
                "tilestored [{to_2} + {stride}*1], tmm2",
                "tilestored [{to_2} + {stride}*1 + 64], tmm3",
                to = in(reg) to,
                to_2 = in(reg) to.wrapping_byte_add(SIDE * to_stride),
                stride = in(reg) to_stride,
                options(nostack, preserves_flags)
            );
        }
    }
}

impl Drop for Tiles {
    fn drop(&mut self) {
        // SAFETY: whoever made it has AMX.
        unsafe { asm!("tilerelease", options(nostack, preserves_flags)) };
    }
}

/// Tokens of a pass.
#[derive(Clone, Copy)]
struct Some32 {
    /// `TOKENS` rows of integers, so many bytes apart, and their scales, so many floats apart.
    q: *const i8,
    q_stride: usize,
    sx: *const f32,
    sx_stride: usize,
    /// Per weight group; of the tokens that there are.
    mx: *const f32,
    mx_stride: usize,
    /// [TOKENS, 4, ROWS]
    acc: *mut f32,
    tokens: usize,
}

fn sizes(cols: usize, tokens: usize) -> [usize; 8] {
    let (scales, groups) = (COLS / GROUP * ROWS * 4, cols / GROUP);
    let (padded, copied) = (tokens.next_multiple_of(TOKENS), tokens.min(COPIED).next_multiple_of(TOKENS));
    [
        ROWS * COLS,
        scales,
        scales,
        padded * ACC * 4,
        padded * groups * 4,
        2 * PARTS * SUMS * 4,
        copied * cols,
        copied * groups * 4,
    ]
}

pub(super) fn scratch_bytes(cols: usize, tokens: usize) -> usize {
    cut_bytes(sizes(cols, tokens))
}

/// As [`Integers::product`](crate::instructions::integers::Integers::product).
///
/// # Safety
/// `matmul` checked the lengths, and [`is_supported`].
#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi")]
pub unsafe fn product(w: &Matrix, x: Groups, tokens: &[u32], out: &mut [f32], scratch: &mut Scratch) {
    // SAFETY: the caller's.
    unsafe {
        let tiles = Tiles::shaped(&OF_GROUPS);
        let consecutive = tokens.windows(2).all(|pair| pair[0] + 1 == pair[1]);
        let at_once = if consecutive { tokens.len() } else { COPIED };
        for (tokens, out) in tokens.chunks(at_once).zip(out.chunks_mut(at_once * w.rows)) {
            match affine_of(w).bits {
                2 => width::<2>(w, x, tokens, consecutive, out, scratch),
                3 => width::<3>(w, x, tokens, consecutive, out, scratch),
                4 => width::<4>(w, x, tokens, consecutive, out, scratch),
                5 => width::<5>(w, x, tokens, consecutive, out, scratch),
                6 => width::<6>(w, x, tokens, consecutive, out, scratch),
                _ => width::<8>(w, x, tokens, consecutive, out, scratch),
            }
        }
        drop(tiles);
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi")]
unsafe fn width<const BITS: usize>(
    w: &Matrix,
    x: Groups,
    tokens: &[u32],
    consecutive: bool,
    out: &mut [f32],
    scratch: &mut Scratch,
) {
    let form = affine_of(w);
    let (parts, groups, x_groups) = (form.parts(), w.cols / form.group, w.cols / GROUP);
    let [q, s, b, acc, sums, dots, copied, copied_scales] = scratch.cut(sizes(w.cols, tokens.len()));
    let cached = Tile { q, scales: Scales { s: s.cast(), b: b.cast() } };
    let (acc, sums, dots) = (acc.cast::<f32>(), sums.cast::<f32>(), dots.cast::<i32>());
    let (copied, copied_scales) = (copied.cast::<i8>(), copied_scales.cast::<f32>());
    for (i, &token) in tokens.iter().enumerate() {
        let mx = &x.sums[token as usize * x_groups..][..x_groups];
        for (g, mx) in mx.chunks_exact(parts).enumerate() {
            // SAFETY: the scratch holds one number per weight group of each token.
            unsafe { *sums.add(i * groups + g) = weight_group_sum(mx) };
        }
    }
    // Tokens that do not lie one after the other, or are too few for two tiles, are copied.
    let direct = if consecutive { tokens.len() / TOKENS * TOKENS } else { 0 };
    for (i, &token) in tokens.iter().enumerate().skip(direct) {
        let (token, to) = (token as usize, i - direct);
        // SAFETY: at most `COPIED` are left, for which there is room.
        unsafe {
            copied.add(to * w.cols).copy_from_nonoverlapping(x.q[token * w.cols..][..w.cols].as_ptr(), w.cols);
            let scales = x.scales[token * x_groups..][..x_groups].as_ptr();
            copied_scales.add(to * x_groups).copy_from_nonoverlapping(scales, x_groups);
        }
    }
    let some = |i: usize, k: usize| {
        let (q, sx) = if i < direct {
            let token = tokens[i] as usize;
            (x.q.as_ptr().wrapping_add(token * w.cols), x.scales.as_ptr().wrapping_add(token * x_groups))
        } else {
            let from = i - direct;
            (copied.wrapping_add(from * w.cols).cast_const(), copied_scales.wrapping_add(from * x_groups).cast_const())
        };
        Some32 {
            q: q.wrapping_add(k),
            q_stride: w.cols,
            sx: sx.wrapping_add(k / GROUP),
            sx_stride: x_groups,
            mx: sums.wrapping_add(i * groups + k / form.group),
            mx_stride: groups,
            acc: acc.wrapping_add(i * ACC),
            tokens: (tokens.len() - i).min(TOKENS),
        }
    };
    // SAFETY: the shell has the instruction set.
    unsafe { prefetch::<BITS>(w, form, 0, 0, 0..ROWS) };
    let passes = tokens.len().div_ceil(TOKENS);
    for r in (0..w.rows).step_by(ROWS) {
        for k in (0..w.cols).step_by(COLS) {
            let cols = COLS.min(w.cols - k);
            let (next_r, next_k) = if k + COLS < w.cols { (r, k + COLS) } else { (r + ROWS, 0) };
            // SAFETY: rows, columns and tokens are inside their arrays, the tile, the sums and the accumulators in scratch; the copies of tokens that are
            // not there are room that belongs to nobody else.
            unsafe {
                fill::<BITS>(w, r, k, cols, &cached);
                fill_scales(w, form, r, k / form.group, cols / form.group, &cached.scales);
                for p in 0..passes {
                    prefetch::<BITS>(w, form, next_r, next_k, ROWS * p / passes..ROWS * (p + 1) / passes);
                    let some = some(p * TOKENS, k);
                    match parts {
                        1 => pass::<1>(cols, &cached, &some, k == 0, dots),
                        2 => pass::<2>(cols, &cached, &some, k == 0, dots),
                        _ => pass::<PARTS>(cols, &cached, &some, k == 0, dots),
                    }
                }
            }
        }
        // SAFETY: as above.
        unsafe { finish(w, r, groups, tokens.len(), acc, out) };
    }
}

/// The tile times `cols` columns of a pass's tokens, added to their accumulators.
#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi")]
unsafe fn pass<const N: usize>(cols: usize, tile: &Tile, x: &Some32, first: bool, dots: *mut i32) {
    let groups = cols / (N * GROUP);
    let dots_of = |w: usize, part: usize| dots.wrapping_add((w % 2 * N + part) * SUMS);
    // SAFETY: the caller vouches for the tokens' columns, the tile, the accumulators, the room for sums and the shape of the tiles.
    unsafe {
        let multiply = |w: usize, part: usize| {
            let g = w * N + part;
            multiply(x.q.add(g * GROUP), x.q_stride, tile.q.add(g * GROUP * ROWS), dots_of(w, part));
        };
        for part in 0..N {
            multiply(0, part);
        }
        for w in 0..groups {
            let start = first && w < 4;
            for half in 0..2 {
                // Half of the next weight group's products, and what becomes of half of this one's meanwhile.
                if w + 1 < groups {
                    for part in half * N / 2..(half + 1) * N / 2 {
                        multiply(w + 1, part);
                    }
                }
                add::<N>(w, half * SIDE, tile, x, start, dots_of(w, 0));
            }
        }
    }
}

/// An activation group of 32 tokens times 32 rows: `to` is [2, 2, 16, 16], tokens first.
#[inline(always)]
unsafe fn multiply(q: *const i8, stride: usize, w: *const u8, to: *mut i32) {
    // SAFETY: 32 tokens of 32 bytes, `stride` apart; 8 quads of `ROWS` rows; the caller has shaped the tiles for groups.
    unsafe {
        asm!(
            "tilezero tmm0",
            "tilezero tmm1",
            "tilezero tmm2",
            "tilezero tmm3",
            "tileloadd tmm6, [{w} + {w_stride}*1]",
            "tileloadd tmm4, [{q} + {stride}*1]",
            "tdpbsud tmm0, tmm4, tmm6",
            "tileloadd tmm7, [{w} + {w_stride}*1 + 64]",
            "tdpbsud tmm1, tmm4, tmm7",
            "tileloadd tmm5, [{q_2} + {stride}*1]",
            "tdpbsud tmm2, tmm5, tmm6",
            "tdpbsud tmm3, tmm5, tmm7",
            "tilestored [{to} + {to_stride}*1], tmm0",
            "tilestored [{to} + {to_stride}*1 + 1024], tmm1",
            "tilestored [{to} + {to_stride}*1 + 2048], tmm2",
            "tilestored [{to} + {to_stride}*1 + 3072], tmm3",
            w = in(reg) w,
            w_stride = in(reg) 4 * ROWS,
            q = in(reg) q,
            q_2 = in(reg) q.wrapping_add(SIDE * stride),
            stride = in(reg) stride,
            to = in(reg) to,
            to_stride = in(reg) 4 * SIDE,
            options(nostack, preserves_flags)
        );
    }
}

/// The sums of weight group `w`, of sixteen tokens from `from` on, added to their accumulators.
#[allow(clippy::needless_range_loop)]
#[inline(always)]
unsafe fn add<const N: usize>(w: usize, from: usize, tile: &Tile, x: &Some32, start: bool, dots: *const i32) {
    // SAFETY: as the caller vouches.
    unsafe {
        for half in 0..2 {
            let s = _mm512_loadu_ps(tile.scales.s.add(w * ROWS + 16 * half));
            let b = _mm512_loadu_ps(tile.scales.b.add(w * ROWS + 16 * half));
            for t in from..(from + SIDE).min(x.tokens) {
                let sx = x.sx.add(t * x.sx_stride + w * N);
                let dots = dots.add(from * ROWS + half * SIDE * SIDE + (t - from) * SIDE);
                let dot = |part: usize| _mm512_cvtepi32_ps(_mm512_loadu_si512(dots.add(part * SUMS).cast()));
                let mut scaled = _mm512_mul_ps(_mm512_set1_ps(*sx), dot(0));
                for part in 1..N {
                    scaled = _mm512_fmadd_ps(_mm512_set1_ps(*sx.add(part)), dot(part), scaled);
                }
                let at = x.acc.add(t * ACC + w % 4 * ROWS + 16 * half);
                let acc = if start { _mm512_setzero_ps() } else { _mm512_loadu_ps(at) };
                let acc = _mm512_fmadd_ps(s, scaled, acc);
                let mx = _mm512_set1_ps(*x.mx.add(t * x.mx_stride + w));
                _mm512_storeu_ps(at, _mm512_fmadd_ps(b, mx, acc));
            }
        }
    }
}

/// At least `macs` multiply-adds an activation group deep, as [`multiply`] makes them but for its loads and stores.
///
/// # Safety
/// [`is_supported`].
pub unsafe fn int8s(macs: u64) -> u64 {
    const MACS: u64 = (4 * SIDE * SIDE * GROUP) as u64;
    let rounds = macs.div_ceil(MACS * CHAINS as u64);
    // SAFETY: the caller's; nothing is loaded or stored.
    unsafe {
        let tiles = Tiles::shaped(&OF_GROUPS);
        for _ in 0..rounds * CHAINS as u64 {
            asm!(
                "tdpbsud tmm0, tmm4, tmm6",
                "tdpbsud tmm1, tmm4, tmm7",
                "tdpbsud tmm2, tmm5, tmm6",
                "tdpbsud tmm3, tmm5, tmm7",
                options(nostack, nomem, preserves_flags)
            );
        }
        drop(tiles);
    }
    rounds * CHAINS as u64 * MACS
}
