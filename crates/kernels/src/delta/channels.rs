//! The delta rule with a decay for each channel of a head's keys (Kimi Delta Attention, Kimi Team 2025): its decays, and its recurrence.

// No iterator adapters: their closures may be compiled without the instruction set of the kernel around them.
#![allow(clippy::needless_range_loop)]

use std::mem::MaybeUninit;

use super::{Block, COPIED_ROWS, Joined, LANES, first_row, load, store};
use crate::dispatch::simd;
use crate::instructions::f32_dot::Lanes;
use crate::math::{exp, sigmoid, softplus};
use crate::rows::{Rows, RowsMut};

#[inline(always)]
unsafe fn decays_lanes<V: Lanes>(f: &[f32], bias: &[f32], rate: f32, bound: Option<f32>, decays: &mut [f32]) {
    let n = f.len();
    assert!([bias.len(), decays.len()] == [n; 2], "all have {n} channels");
    for i in (0..n).step_by(16) {
        let left = (n - i).min(16);
        // SAFETY: `left` elements from `i` on are inside all three; the shell has the instruction set.
        unsafe {
            let f = V::load_first(f.as_ptr().add(i), left).add(V::load_first(bias.as_ptr().add(i), left));
            let logarithm = match bound {
                Some(bound) => V::splat(bound).mul(sigmoid(V::splat(0.0 - rate).mul(f))),
                None => V::splat(rate).mul(softplus(f)),
            };
            exp(logarithm).store_first(decays.as_mut_ptr().add(i), left);
        }
    }
}

/// One head's inputs of a run of tokens.
#[derive(Clone, Copy)]
pub struct ChannelInputs<'a> {
    /// `[tokens, key_dim]`, L2-normed and scaled.
    pub q: Rows<'a>,
    /// `[tokens, key_dim]`, L2-normed.
    pub k: Rows<'a>,
    /// `[tokens, columns]`
    pub v: Rows<'a>,
    /// What is left of each row of the state, `[tokens, key_dim]`.
    pub decays: Rows<'a>,
    /// `[tokens, 1]`
    pub beta: Rows<'a>,
}

#[inline(always)]
unsafe fn recurrence_lanes<V: Lanes>(state: &mut RowsMut, inputs: &ChannelInputs, out: &mut RowsMut) {
    let (tokens, key_dim, columns) = (inputs.q.rows(), state.rows(), state.cols());
    let dims = [inputs.q.cols(), inputs.k.cols(), inputs.decays.cols()];
    assert!(dims == [key_dim; 3] && key_dim > 0, "keys of {} for {key_dim} rows", inputs.k.cols());
    assert!(inputs.v.cols() == columns && out.cols() == columns, "values of {} for {columns} columns", inputs.v.cols());
    let rows = [inputs.k.rows(), inputs.v.rows(), inputs.decays.rows(), inputs.beta.rows(), out.rows()];
    assert!(rows == [tokens; 5] && inputs.beta.cols() == 1, "{tokens} tokens");
    if tokens == 0 || columns == 0 {
        return;
    }
    let mut c = 0;
    // SAFETY: the blocks divide the columns; the shell has the instruction set.
    unsafe {
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

/// [`block`] on a dense copy: rows a power of two apart map to too few sets of the first-level cache.
#[inline(always)]
unsafe fn copied<V: Lanes, const N: usize>(
    state: &mut RowsMut,
    inputs: &ChannelInputs,
    out: &mut RowsMut,
    c: usize,
    n: usize,
) {
    let s = first_row(state, c);
    if s.key_dim > COPIED_ROWS {
        // SAFETY: as the caller vouches.
        return unsafe { block::<V, N>(s, inputs, out, c, n) };
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
        block::<V, N>(Block { at, stride: 16 * N, ..s }, inputs, out, c, n);
        for i in 0..s.key_dim {
            std::ptr::copy_nonoverlapping(at.add(i * 16 * N), s.at.add(i * s.stride), 16 * N);
        }
    }
}

/// `N` registers of columns from `c` on; `n` is 16, or fewer where `N` is 1. A token takes the state's rows twice: to decay them and to see what they hold for its key, and to
/// update and read them.
#[inline(always)]
unsafe fn block<V: Lanes, const N: usize>(s: Block, inputs: &ChannelInputs, out: &mut RowsMut, c: usize, n: usize) {
    // SAFETY: `N` registers (or `n` lanes) are inside each row; the caller vouches for the instruction set.
    unsafe {
        for t in 0..inputs.q.rows() {
            let (q, k, decays) = (inputs.q.row(t), inputs.k.row(t), inputs.decays.row(t));
            let mut held = Joined::<V, N>::new();
            for lane in LANES {
                let mut sums = [V::splat(0.0); N];
                for i in (lane..s.key_dim).step_by(4) {
                    let p = s.at.add(i * s.stride);
                    let (k, decay) = (V::splat(*k.get_unchecked(i)), V::splat(*decays.get_unchecked(i)));
                    for j in 0..N {
                        let v = load::<V>(p, j, n).mul(decay);
                        store(v, p, j, n);
                        sums[j] = v.fma(k, sums[j]);
                    }
                }
                held.take(lane, sums);
            }
            let (beta, v) = (V::splat(inputs.beta.row(t)[0]), inputs.v.row(t).as_ptr().add(c));
            let mut d = held.even;
            for j in 0..N {
                d[j] = load::<V>(v, j, n).sub(d[j]).mul(beta);
            }
            let mut read = Joined::<V, N>::new();
            for lane in LANES {
                let mut sums = [V::splat(0.0); N];
                for i in (lane..s.key_dim).step_by(4) {
                    let p = s.at.add(i * s.stride);
                    let (q, k) = (V::splat(*q.get_unchecked(i)), V::splat(*k.get_unchecked(i)));
                    for j in 0..N {
                        let v = k.fma(d[j], load::<V>(p, j, n));
                        store(v, p, j, n);
                        sums[j] = v.fma(q, sums[j]);
                    }
                }
                read.take(lane, sums);
            }
            let to = out.row(t).as_mut_ptr().add(c);
            for j in 0..N {
                store(read.even[j], to, j, n);
            }
        }
    }
}

simd! {
    /// What is left of each channel of a head's state, all `[key_dim]`: `decays = exp(rate * softplus(f + bias))`, or, where their logarithms have a lower bound,
    /// `exp(bound * sigmoid((0 - rate) * (f + bias)))`.
    pub fn channel_decays(f: &[f32], bias: &[f32], rate: f32, bound: Option<f32>, decays: &mut [f32]) = decays_lanes
}

simd! {
    /// The delta rule for one head, or some columns of it, over a run of tokens, with a decay for each row of the state; `docs/numerics.md` has the formulas. `state`:
    /// `[key_dim, columns]`, in place; `out`: `[tokens, columns]`. Columns do not depend on each other.
    pub fn channel_recurrence(state: &mut RowsMut, inputs: &ChannelInputs, out: &mut RowsMut) = recurrence_lanes
}
