//! Integer groups: weights in groups times activations in int8.
//!
//! The integer sum of an activation group (32 columns) is exact in any order, so an instruction set may arrange the bytes freely. The float
//! sequence over the groups is fixed. The sums of a weight group are combined with their activations' scales, followed by one fma with the
//! weight group's scale and one with its bias. An output has four accumulators; weight group w goes to accumulator w mod 4. [`row_by_row`] is the plain
//! algorithm, for an instruction set that only has its own dot product.

use super::unpack::{Unpack, unpack_columns, unpack_lanes, widen};
use crate::format::Grouped;
use crate::input::{GROUP, ORDER};
use crate::matrix::Matrix;
use crate::scratch::{Scratch, cut_bytes};

/// Activations of n tokens in groups of 32.
#[derive(Clone, Copy)]
pub(crate) struct Groups<'a> {
    /// [n, cols]
    pub q: &'a [i8],
    /// `sx`: [n, cols / 32]
    pub scales: &'a [f32],
    /// `mx`: [n, cols / 32]
    pub sums: &'a [f32],
}

/// The instruction set's matrix product of integers.
///
/// # Safety
/// As for [`Lanes`](super::f32_dot::Lanes).
pub(crate) trait Int8Dot: Unpack {
    /// Bytes of scratch that [`Int8Dot::product`] takes.
    fn scratch_bytes(cols: usize, tokens: usize, _format: Grouped) -> usize {
        row_scratch_bytes(cols, tokens)
    }
    unsafe fn product(w: &Matrix, x: Groups, tokens: &[u32], tile: &mut [f32], scratch: &mut Scratch);
}

/// One token's scales, by part of a weight group and then by weight group.
#[derive(Clone, Copy)]
pub(crate) struct TokenScales<'a> {
    /// [parts, weight groups]
    pub sx: &'a [f32],
    /// `mx` summed over each weight group: [weight groups]
    pub mx: &'a [f32],
}

impl Groups<'_> {
    /// Calls `each(i, sx, mx)` for each part i of a token's weight groups. A part is an activation group, or half of one: then both halves have its `sx`,
    /// and `mx` is `sx * f32(sum of the half's q)`.
    #[inline(always)]
    pub fn parts(&self, token: usize, cols: usize, part_columns: usize, mut each: impl FnMut(usize, f32, f32)) {
        let groups = cols / GROUP;
        let at = token * groups;
        let (scales, sums) = (&self.scales[at..][..groups], &self.sums[at..][..groups]);
        // The order inside of eights keeps halves apart.
        let halves = self.q[token * cols..][..cols].as_chunks::<{ GROUP / 2 }>().0;
        let whole = part_columns == GROUP;
        for i in 0..cols / part_columns {
            let (sx, mx) = if whole {
                (scales[i], sums[i])
            } else {
                let (sx, sum) = (scales[i / 2], halves[i].iter().map(|&q| i32::from(q)).sum::<i32>());
                (sx, sx * sum as f32)
            };
            // Called at one place, so that it is inlined.
            each(i, sx, mx);
        }
    }

    /// Writes a token's scales for weights in such groups, which [`TokenScales::of`] reads: `(parts + 1) * cols / group` numbers.
    #[inline(always)]
    pub fn write_scales(&self, token: usize, cols: usize, format: Grouped, out: &mut [f32]) {
        let (parts, groups) = (format.parts(), cols / format.group);
        self.parts(token, cols, format.part_columns(), |i, sx, mx| {
            let (g, part) = (i / parts, i % parts);
            out[part * groups + g] = sx;
            let sum = &mut out[parts * groups + g];
            *sum = if part == 0 { mx } else { *sum + mx };
        });
    }
}

impl<'a> TokenScales<'a> {
    /// What [`Groups::write_scales`] has written.
    #[inline(always)]
    pub fn of(scales: &'a [f32], groups: usize) -> TokenScales<'a> {
        let (sx, mx) = scales.split_at(scales.len() - groups);
        TokenScales { sx, mx }
    }
}

/// One unpacked row, its scales and its biases, and all tokens' scales: two for each group of 16 columns at most.
fn row_sizes(cols: usize, tokens: usize) -> [usize; 4] {
    [cols, cols / 4, cols / 4, tokens * cols / 2]
}

/// Bytes of scratch that [`row_by_row`] takes.
pub(crate) fn row_scratch_bytes(cols: usize, tokens: usize) -> usize {
    cut_bytes(row_sizes(cols, tokens))
}

/// The bytes of each eight in the order of the activations.
#[inline(always)]
fn reorder(q: &mut [u8]) {
    const { assert!(matches!(ORDER, [0, 2, 4, 6, 1, 3, 5, 7])) };
    // By hand: as a map of an array it took four fifths of a product's time where that is not inlined.
    for eight in q.as_chunks_mut::<8>().0 {
        let [a, b, c, d, e, f, g, h] = *eight;
        *eight = [a, c, e, g, b, d, f, h];
    }
}

/// Unpacks row after row and hands each to `dot(q, s, b, xq, scales)`, token after token. `s`, `b`: [weight groups].
#[inline(always)]
pub(crate) unsafe fn row_by_row<V: Unpack>(
    w: &Matrix,
    x: Groups,
    tokens: &[u32],
    tile: &mut [f32],
    scratch: &mut Scratch,
    dot: impl Fn(&[u8], &[f32], &[f32], &[i8], TokenScales) -> f32,
) {
    let format = w.grouped();
    let (parts, groups) = (format.parts(), w.cols / format.group);
    let [q, s, b, scales] = scratch.cut(row_sizes(w.cols, tokens.len()));
    // SAFETY: the scratch holds a row of q with its scales and biases, and up to two numbers per 32 columns of each token.
    let (q, s, b, scales) = unsafe {
        (
            std::slice::from_raw_parts_mut(q, w.cols),
            std::slice::from_raw_parts_mut(s.cast::<f32>(), groups),
            std::slice::from_raw_parts_mut(b.cast::<f32>(), groups),
            std::slice::from_raw_parts_mut(scales.cast::<f32>(), tokens.len() * (parts + 1) * groups),
        )
    };
    for (out, &token) in scales.chunks_exact_mut((parts + 1) * groups).zip(tokens) {
        x.write_scales(token as usize, w.cols, format, out);
    }
    for r in 0..w.rows {
        if w.format.is_unpacked() {
            // SAFETY: a row of q and its groups; the caller vouches for the instruction set.
            unsafe { unpack_columns::<V>(w, r, (0, w.cols), q.as_mut_ptr(), s.as_mut_ptr(), b.as_mut_ptr()) };
        } else {
            // SAFETY: a row of q; the caller vouches for the instruction set.
            unsafe { unpack_lanes::<V>(format.packing, w.row(r).as_ptr(), q.as_mut_ptr(), w.cols) };
            let (row_s, row_b) = w.row_scales(r);
            // SAFETY: a row's groups; as above.
            unsafe {
                widen::<V>(format.scale, row_s, s.as_mut_ptr());
                widen::<V>(format.scale, row_b, b.as_mut_ptr());
            }
        }
        reorder(q);
        for (i, &token) in tokens.iter().enumerate() {
            let xq = &x.q[token as usize * w.cols..][..w.cols];
            let scales = TokenScales::of(&scales[i * (parts + 1) * groups..][..(parts + 1) * groups], groups);
            tile[i * w.rows + r] = dot(q, s, b, xq, scales);
        }
    }
}

/// Weight group g of a row, added to its accumulator.
#[inline(always)]
pub(crate) fn add_group(
    acc: &mut f32,
    g: usize,
    s: &[f32],
    b: &[f32],
    scales: TokenScales,
    sum: impl Fn(usize) -> i32,
) {
    let (groups, parts) = (s.len(), scales.sx.len() / s.len());
    let mut t = scales.sx[g] * sum(g * parts) as f32;
    for i in 1..parts {
        t = scales.sx[i * groups + g].mul_add(sum(g * parts + i) as f32, t);
    }
    *acc = s[g].mul_add(t, *acc);
    *acc = b[g].mul_add(scales.mx[g], *acc);
}
