//! From f32 to small integers.

use super::f32_dot::Lanes;

/// Conversions to small integers.
///
/// # Safety
/// As for [`Lanes`].
pub(crate) trait Encode: Lanes {
    /// The greatest `bits & 0x7fff_ffff` of 32 f32 at `p`, as f32: the greatest size, or a NaN if there is one.
    unsafe fn greatest_size(p: *const f32) -> f32;
    /// Rounds sixteen lanes of size at most 127 (or NaN, which gives 0) to i8 and writes them in [`ORDER`](crate::input::ORDER); their sum.
    unsafe fn store_i8(self, p: *mut i8) -> i32;
}
