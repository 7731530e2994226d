//! Rows unpacked to scratch: a byte for each integer, scales and biases as f32.

use super::record::Shape;
use super::{Neon16, Products};
use crate::format::Float;
use crate::instructions::f32_dot::Lanes;
use crate::instructions::unpack::{unpack_columns, unpack_lanes};
use crate::matrix::Matrix;

/// Bytes of unpacked rows: integers, then scales, then biases.
pub const fn row_bytes(cols: usize) -> [usize; 3] {
    // A scale for each 16 columns at most.
    let scales = (cols / 4).next_multiple_of(64);
    [cols.next_multiple_of(64), scales, scales]
}

/// Unpacks rows to scratch, in natural order.
///
/// # Safety
/// The row is the matrix' own; `q`, `s` and `b` hold [`row_bytes`].
#[inline(always)]
pub unsafe fn unpack_row<P: Products>(w: &Matrix, shape: Shape, r: usize, (q, s, b): (*mut u8, *mut f32, *mut f32)) {
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
