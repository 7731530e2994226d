//! Products of bytes: sixteen sums of four products each, exact in 32 bits. Attention on integers is made of them.

use super::f32_dot::Lanes;

/// Sixteen sums of products of bytes.
///
/// # Safety
/// As for [`Lanes`]; pointers are valid for the bytes read or written, at any address.
#[allow(clippy::missing_safety_doc)]
pub trait Bytes: Lanes {
    /// Sixteen i32.
    type Sums: Copy;
    /// Sixteen times four bytes.
    type Quads: Copy;
    unsafe fn start(sum: i32) -> Self::Sums;
    /// Sixteen sums from `p`, plus `more`.
    unsafe fn load_sums(p: *const i32, more: i32) -> Self::Sums;
    unsafe fn store_sums(sums: Self::Sums, p: *mut i32);
    unsafe fn load_quads(p: *const u8) -> Self::Quads;
    /// The same with the highest bit of each byte turned: what was signed is 128 more, unsigned.
    unsafe fn load_flipped(p: *const u8) -> Self::Quads;
    /// `sums[l] + a[l] * b`, the four products of lane l: `a` unsigned, `b` four signed bytes.
    unsafe fn multiply_unsigned(sums: Self::Sums, a: Self::Quads, b: i32) -> Self::Sums;
    /// The same with `a` signed and `b` four unsigned bytes.
    unsafe fn multiply_signed(sums: Self::Sums, a: Self::Quads, b: i32) -> Self::Sums;
    /// `sums[l] + a[l] * b[l]`, the four products of lane l: `a` unsigned, `b` signed.
    unsafe fn multiply_quads(sums: Self::Sums, a: Self::Quads, b: Self::Quads) -> Self::Sums;
    /// Lane i is the sum of the lanes of `v[i]`.
    unsafe fn total16(v: [Self::Sums; 16]) -> Self::Sums;
    /// Modulo 2^32.
    unsafe fn add_sums(a: Self::Sums, b: Self::Sums) -> Self::Sums;
    /// As floats, rounded to nearest even: exact below 2^24.
    unsafe fn from_sums(sums: Self::Sums) -> Self;
    /// Writes the 64 bytes of the register with the highest bit of each turned: what was signed is 128 more, unsigned.
    unsafe fn store_flipped(self, p: *mut u8);
    /// Writes lanes of 0 to 255, rounded to the nearest integer, ties to even, as unsigned bytes.
    unsafe fn store_rounded_u8(self, p: *mut u8);
    /// Writes lanes of 0 to 65535, rounded to the nearest integer, ties to even: 256 times the unsigned bytes at `high` plus those at `low`.
    unsafe fn store_rounded_u16(self, high: *mut u8, low: *mut u8);
    /// `256 * high + low`, modulo 2^32.
    unsafe fn join_sums(high: Self::Sums, low: Self::Sums) -> Self::Sums;
    /// Sixteen bytes of each of four rows become sixteen times four, one of each row.
    unsafe fn interleave(rows: [*const u8; 4]) -> Self::Quads;
    /// The same of 64 bytes of each row.
    unsafe fn interleave64(rows: [*const u8; 4]) -> [Self::Quads; 4];
    /// The same, in an order that is quicker to make.
    unsafe fn interleave_quarters(rows: [*const u8; 4]) -> [Self::Quads; 4];
    /// Sums of what [`Bytes::interleave_quarters`] made, in order.
    unsafe fn in_order(sums: [Self::Sums; 4]) -> [Self::Sums; 4];
    unsafe fn store_quads(quads: Self::Quads, p: *mut u8);
}
