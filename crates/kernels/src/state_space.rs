//! Mamba-2 (Dao and Gu 2024): the time steps of its heads, and the recurrence of their states. Its short convolution is [`crate::delta::conv_step`], its gated norm
//! [`crate::norm::rms_norm_of_gated_in_place`].
//!
//! Everything runs token by token and carries its state, so that a run of tokens gives the same bits as one token at a time. A head's state is a matrix with a row for each
//! element of B and C, and a column for each of the head's elements, as a delta rule's: callers split heads and columns.

// No iterator adapters: their closures may be compiled without the instruction set of the kernel around them.
#![allow(clippy::needless_range_loop)]

use std::mem::MaybeUninit;

use crate::delta::{Block, COPIED_ROWS, Joined, LANES, first_row, joined, load, store};
use crate::dispatch::simd;
use crate::instructions::f32_dot::Lanes;
use crate::math::{exp1, softplus};
use crate::rows::{Rows, RowsMut};

#[inline(always)]
unsafe fn steps_lanes<V: Lanes>(dt: &[f32], bias: &[f32], decay: &[f32], step: &mut [f32], g: &mut [f32]) {
    let n = dt.len();
    assert!([bias.len(), decay.len(), step.len(), g.len()] == [n; 4], "all have {n} heads");
    for i in (0..n).step_by(16) {
        let left = (n - i).min(16);
        // SAFETY: `left` elements from `i` on are inside all five; the shell has the instruction set.
        unsafe {
            let dt = V::load_first(dt.as_ptr().add(i), left).add(V::load_first(bias.as_ptr().add(i), left));
            let dt = softplus(dt);
            dt.store_first(step.as_mut_ptr().add(i), left);
            V::load_first(decay.as_ptr().add(i), left).mul(dt).store_first(g.as_mut_ptr().add(i), left);
        }
    }
}

/// One head's inputs of a run of tokens.
#[derive(Clone, Copy)]
pub struct HeadInputs<'a> {
    /// `[tokens, columns]`
    pub x: Rows<'a>,
    /// What is written, `[tokens, rows of the state]`.
    pub b: Rows<'a>,
    /// What is read, `[tokens, rows of the state]`.
    pub c: Rows<'a>,
    /// Time steps, `[tokens, 1]`.
    pub step: Rows<'a>,
    /// Log decay, `[tokens, 1]`.
    pub g: Rows<'a>,
    /// What of x goes to the output past the state.
    pub skip: f32,
}

#[inline(always)]
unsafe fn recurrence_lanes<V: Lanes>(state: &mut RowsMut, inputs: &HeadInputs, out: &mut RowsMut) {
    let (tokens, rows, columns) = (inputs.x.rows(), state.rows(), state.cols());
    assert!(rows > 0, "a state of no rows");
    assert!(inputs.b.cols() == rows && inputs.c.cols() == rows, "B of {} for {rows} rows", inputs.b.cols());
    assert!(inputs.x.cols() == columns && out.cols() == columns, "x of {} for {columns} columns", inputs.x.cols());
    assert!(
        [inputs.b.rows(), inputs.c.rows(), inputs.step.rows(), inputs.g.rows(), out.rows()] == [tokens; 5],
        "{tokens} tokens"
    );
    assert!(inputs.step.cols() == 1 && inputs.g.cols() == 1, "one step per token");
    if tokens == 0 || columns == 0 {
        return;
    }
    let mut c = 0;
    // SAFETY: the blocks divide the columns; the shell has the instruction set.
    unsafe {
        if tokens == 1 {
            // The state is read from memory once, in storage order.
            while V::WIDE && c + 64 <= columns {
                one_token::<V, 4>(state, inputs, out, c, 16);
                c += 64;
            }
            while c + 32 <= columns {
                one_token::<V, 2>(state, inputs, out, c, 16);
                c += 32;
            }
            while c < columns {
                let n = (columns - c).min(16);
                one_token::<V, 1>(state, inputs, out, c, n);
                c += n;
            }
        } else {
            while V::WIDE && c + 64 <= columns {
                copied::<V, 4>(state, inputs, out, c, 16);
                c += 64;
            }
            while c + 32 <= columns {
                copied::<V, 2>(state, inputs, out, c, 16);
                c += 32;
            }
            while c < columns {
                let n = (columns - c).min(16);
                block::<V, 1>(first_row(state, c), inputs, out, c, n);
                c += n;
            }
        }
    }
}

/// `x * step`, of `N` registers of columns.
#[inline(always)]
unsafe fn written<V: Lanes, const N: usize>(inputs: &HeadInputs, t: usize, c: usize, n: usize) -> [V; N] {
    // SAFETY: as the caller vouches.
    unsafe {
        let (x, step) = (inputs.x.row(t).as_ptr().add(c), V::splat(inputs.step.row(t)[0]));
        let mut all = [step; N];
        for j in 0..N {
            all[j] = load::<V>(x, j, n).mul(step);
        }
        all
    }
}

/// `out = fma(skip, x, sums)`
#[inline(always)]
unsafe fn put<V: Lanes, const N: usize>(
    sums: [V; N],
    inputs: &HeadInputs,
    out: &mut RowsMut,
    (t, c): (usize, usize),
    n: usize,
) {
    // SAFETY: as the caller vouches.
    unsafe {
        let (x, to) = (inputs.x.row(t).as_ptr().add(c), out.row(t).as_mut_ptr().add(c));
        for j in 0..N {
            store(V::splat(inputs.skip).fma(load::<V>(x, j, n), sums[j]), to, j, n);
        }
    }
}

/// A single token, in the order of the state's rows.
#[inline(always)]
unsafe fn one_token<V: Lanes, const N: usize>(
    state: &mut RowsMut,
    inputs: &HeadInputs,
    out: &mut RowsMut,
    column: usize,
    n: usize,
) {
    let s = first_row(state, column);
    // SAFETY: as for `block`.
    unsafe {
        let decay = V::splat(exp1(inputs.g.row(0)[0]));
        let u = written::<V, N>(inputs, 0, column, n);
        let (b, c) = (inputs.b.row(0), inputs.c.row(0));
        let mut sums = [[V::splat(0.0); N]; 4];
        for first in (0..s.key_dim).step_by(4) {
            for lane in 0..4 {
                if first + lane >= s.key_dim {
                    break;
                }
                let i = first + lane;
                let p = s.at.add(i * s.stride);
                let (b, c) = (V::splat(*b.get_unchecked(i)), V::splat(*c.get_unchecked(i)));
                for j in 0..N {
                    let v = b.fma(u[j], load::<V>(p, j, n).mul(decay));
                    store(v, p, j, n);
                    sums[lane][j] = v.fma(c, sums[lane][j]);
                }
            }
        }
        put(joined(sums), inputs, out, (0, column), n);
    }
}

/// [`block`] on a dense copy: rows a power of two apart map to too few sets of the first-level cache.
#[inline(always)]
unsafe fn copied<V: Lanes, const N: usize>(
    state: &mut RowsMut,
    inputs: &HeadInputs,
    out: &mut RowsMut,
    column: usize,
    n: usize,
) {
    let s = first_row(state, column);
    if s.key_dim > COPIED_ROWS {
        // SAFETY: as the caller vouches.
        return unsafe { block::<V, N>(s, inputs, out, column, n) };
    }
    #[repr(align(64))]
    struct StateCopy<const N: usize>([[[f32; 16]; N]; COPIED_ROWS]);
    let mut room = MaybeUninit::<StateCopy<N>>::uninit();
    let at = room.as_mut_ptr().cast::<f32>();
    // SAFETY: `16 N` columns of each row at both ends; the copy's rows are written before they are read.
    unsafe {
        for i in 0..s.key_dim {
            std::ptr::copy_nonoverlapping(s.at.add(i * s.stride), at.add(i * 16 * N), 16 * N);
        }
        block::<V, N>(Block { at, stride: 16 * N, ..s }, inputs, out, column, n);
        for i in 0..s.key_dim {
            std::ptr::copy_nonoverlapping(at.add(i * 16 * N), s.at.add(i * s.stride), 16 * N);
        }
    }
}

/// `N` registers of columns from `column` on; `n` is 16, or fewer where `N` is 1. A token takes its rows lane by lane.
#[inline(always)]
unsafe fn block<V: Lanes, const N: usize>(s: Block, inputs: &HeadInputs, out: &mut RowsMut, column: usize, n: usize) {
    // SAFETY: `N` registers (or `n` lanes) are inside each row; the caller vouches for the instruction set.
    unsafe {
        for t in 0..inputs.x.rows() {
            let decay = V::splat(exp1(inputs.g.row(t)[0]));
            let u = written::<V, N>(inputs, t, column, n);
            let (b, c) = (inputs.b.row(t), inputs.c.row(t));
            let mut sums = Joined::<V, N>::new();
            for lane in LANES {
                let mut o = [V::splat(0.0); N];
                for i in (lane..s.key_dim).step_by(4) {
                    let p = s.at.add(i * s.stride);
                    let (b, c) = (V::splat(*b.get_unchecked(i)), V::splat(*c.get_unchecked(i)));
                    for j in 0..N {
                        let v = b.fma(u[j], load::<V>(p, j, n).mul(decay));
                        store(v, p, j, n);
                        o[j] = v.fma(c, o[j]);
                    }
                }
                sums.take(lane, o);
            }
            put(sums.even, inputs, out, (t, column), n);
        }
    }
}

simd! {
    /// One token's time steps and log decays, all `[heads]`: `step = softplus(dt + bias)`, `g = decay * step`.
    pub fn steps(dt: &[f32], bias: &[f32], decay: &[f32], step: &mut [f32], g: &mut [f32]) = steps_lanes
}

simd! {
    /// The recurrence of one head, or some columns of it, over a run of tokens; `docs/numerics.md` has the formulas. `state`: `[rows, columns]`, in place; `out`:
    /// `[tokens, columns]`. Columns do not depend on each other.
    pub fn recurrence(state: &mut RowsMut, inputs: &HeadInputs, out: &mut RowsMut) = recurrence_lanes
}
