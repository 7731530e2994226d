//! Integer groups with NEON: chooses a kernel by the number of tokens and the format.

use super::record::{Shape, token_bytes};
use super::{Neon16, Products, int8_rows, int8_tile};
use crate::format::Grouped;
use crate::instructions::int8_dot::{Groups, Int8Dot};
use crate::matrix::Matrix;
use crate::scratch::{Scratch, cut_bytes};

/// The most tokens that read packed rows. With more, rows are unpacked once.
pub const FEW: usize = 4;

impl<P: Products> Int8Dot for Neon16<P> {
    fn scratch_bytes(cols: usize, tokens: usize, _format: Grouped) -> usize {
        cut_bytes(int8_rows::sizes(cols, tokens)).max(cut_bytes(int8_tile::sizes(cols, tokens)))
    }
    #[inline(always)]
    unsafe fn product(w: &Matrix, x: Groups, tokens: &[u32], tile: &mut [f32], scratch: &mut Scratch) {
        // SAFETY: the caller's.
        unsafe {
            if P::MATRICES && tokens.len() > FEW {
                int8_tile::product::<P>(w, x, tokens, tile, scratch);
            } else {
                int8_rows::product::<P>(w, x, tokens, tile, scratch);
            }
        }
    }
}

/// Bytes of unpacked rows: integers, then scales, then biases.
pub const fn row_bytes(cols: usize) -> [usize; 3] {
    // A scale for each 16 columns at most.
    let scales = (cols / 4).next_multiple_of(64);
    [cols.next_multiple_of(64), scales, scales]
}

/// Bytes of so many tokens.
pub const fn tokens_bytes(cols: usize, tokens: usize) -> usize {
    token_bytes(cols) * tokens
}

/// Unpacks rows to scratch, in natural order.
///
/// # Safety
/// The row is the matrix' own; `q`, `s` and `b` hold [`row_bytes`].
#[inline(always)]
pub unsafe fn unpack_row<P: Products>(w: &Matrix, shape: Shape, r: usize, (q, s, b): (*mut u8, *mut f32, *mut f32)) {
    use crate::instructions::unpack::{unpack_columns, unpack_lanes};
    // SAFETY: the caller's.
    unsafe {
        if w.format.is_unpacked() {
            unpack_columns::<Neon16<P>>(w, r, (0, w.cols), q, s, b);
        } else {
            unpack_lanes::<Neon16<P>>(w.grouped().packing, w.row(r).as_ptr(), q, w.cols);
            unpack_scales::<P>(w, shape, r, (s, b));
        }
    }
}

/// The scales and biases of a row as f32.
///
/// # Safety
/// As for [`unpack_row`].
#[inline(always)]
pub unsafe fn unpack_scales<P: Products>(w: &Matrix, shape: Shape, r: usize, (s, b): (*mut f32, *mut f32)) {
    use crate::format::Float;
    use crate::instructions::f32_dot::Lanes;
    let (scales, biases) = w.row_scales(r);
    let (format, sixteens) = (w.grouped(), shape.groups / 16 * 16);
    for (from, to) in [(scales, s), (biases, b)] {
        for g in (0..sixteens).step_by(16) {
            // SAFETY: sixteen numbers of the row; scratch holds them all.
            unsafe {
                let p = from.as_ptr().add(g * format.scale.size());
                let numbers = match format.scale {
                    Float::F32 => Neon16::<P>::load(p.cast()),
                    Float::Bf16 => Neon16::<P>::load_bf16(p),
                    Float::F16 => Neon16::<P>::load_f16(p),
                };
                numbers.store(to.add(g));
            }
        }
        for g in sixteens..shape.groups {
            // SAFETY: as above.
            unsafe { *to.add(g) = format.scale.read(from, g) };
        }
    }
}
