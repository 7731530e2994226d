use super::Generic16;
use crate::instructions::int8_dot::{Groups, Int8Dot, TokenScales, add_group, row_by_row};
use crate::matrix::Matrix;
use crate::scratch::Scratch;

impl Int8Dot for Generic16 {
    #[inline(always)]
    unsafe fn product(w: &Matrix, x: Groups, tokens: &[u32], tile: &mut [f32], scratch: &mut Scratch) {
        let dot = |q: &[u8], s: &[f32], b: &[f32], xq: &[i8], scales: TokenScales| {
            let columns = q.len() / scales.sx.len();
            let sum = |g: usize| {
                let group = g * columns..(g + 1) * columns;
                q[group.clone()].iter().zip(&xq[group]).map(|(&q, &x)| q as i32 * x as i32).sum()
            };
            let mut acc = [0f32; 4];
            for g in 0..s.len() {
                add_group(&mut acc[g % 4], g, s, b, scales, sum);
            }
            (acc[0] + acc[2]) + (acc[1] + acc[3])
        };
        // SAFETY: the caller's.
        unsafe { row_by_row::<Self>(w, x, tokens, tile, scratch, dot) }
    }
}
