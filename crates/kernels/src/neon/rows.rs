//! Rows unpacked to scratch: a byte for each integer, scales and biases as f32.

use super::{Neon16, Products};
use crate::instructions::unpack::{unpack_columns, unpack_lanes, widen};
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
pub unsafe fn unpack_row<P: Products>(w: &Matrix, r: usize, (q, s, b): (*mut u8, *mut f32, *mut f32)) {
    // SAFETY: the caller's.
    unsafe {
        if w.format.is_unpacked() {
            unpack_columns::<Neon16<P>>(w, r, (0, w.cols), q, s, b);
        } else {
            unpack_lanes::<Neon16<P>>(w.grouped().packing, w.row(r).as_ptr(), q, w.cols);
            unpack_scales::<P>(w, r, (s, b));
        }
    }
}

/// The scales and biases of a row as f32.
///
/// # Safety
/// As for [`unpack_row`].
#[inline(always)]
pub unsafe fn unpack_scales<P: Products>(w: &Matrix, r: usize, (s, b): (*mut f32, *mut f32)) {
    let ((scales, biases), format) = (w.row_scales(r), w.grouped());
    // SAFETY: the caller's.
    unsafe {
        widen::<Neon16<P>>(format.scale, scales, s);
        widen::<Neon16<P>>(format.scale, biases, b);
    }
}
