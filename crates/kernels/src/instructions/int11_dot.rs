//! Integers of 11 bits times weights that are integers: sixteen rows at a time, two columns a lane.

use super::unpack::Unpack;

/// Sums of pairs of products in sixteen rows.
///
/// # Safety
/// As for [`Lanes`](super::f32_dot::Lanes).
pub(crate) trait Int11Dot: Unpack {
    /// Sixteen i32.
    type Sums: Copy;
    unsafe fn zero() -> Self::Sums;
    /// 32 bytes from `p` as 32 u16, two in the bits of each lane.
    unsafe fn widen_pairs(p: *const u8) -> Self;
    /// Adds to row r the products of the pair `w[2 r]`, `w[2 r + 1]`, of sixteen bits with a sign, with the pair at `x`.
    unsafe fn add_pairs(sums: Self::Sums, w: Self, x: *const i16) -> Self::Sums;
    /// To the nearest f32, ties to even.
    unsafe fn to_f32(sums: Self::Sums) -> Self;
}
