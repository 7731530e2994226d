//! GatedDeltaNet (Yang et al. 2024, as in Qwen3-Next): the short convolution, the gates and the delta rule.
//!
//! Everything runs token by token and carries its state, so that a run of tokens gives the same bits as one token at a time. Callers
//! split channels, heads and columns of a head's state; the kernels keep a block of the state in cache through a whole run.

// No iterator adapters: their closures may be compiled without the instruction set of the kernel around them.
#![allow(clippy::needless_range_loop)]

mod channels;

pub use channels::{ChannelInputs, channel_decays, channel_recurrence};

use crate::dispatch::simd;
use crate::instructions::f32_dot::Lanes;
use crate::math::{exp1, sigmoid, silu, softplus};
use crate::rows::{Rows, RowsMut};

/// Channels whose weights and inputs stay in the first-level cache from one token to the next.
const CONV_BLOCK: usize = 512;

#[inline(always)]
unsafe fn conv_lanes<V: Lanes>(x: Rows, weight: Rows, bias: Option<&[f32]>, window: &mut RowsMut, out: &mut RowsMut) {
    let (tokens, channels, taps) = (x.rows(), x.cols(), weight.rows());
    assert!(taps >= 1 && weight.cols() == channels, "weights of {taps} x {} for {channels} channels", weight.cols());
    assert!(window.rows() == taps - 1 && window.cols() == channels, "window of {} x {}", window.rows(), window.cols());
    assert!(out.rows() == tokens && out.cols() == channels, "output of {} x {}", out.rows(), out.cols());
    assert!(bias.is_none_or(|b| b.len() == channels), "one bias per channel");
    for from in (0..channels).step_by(CONV_BLOCK) {
        let to = (from + CONV_BLOCK).min(channels);
        for t in 0..tokens {
            let y = &mut out.row(t)[from..to];
            match bias {
                Some(b) => y.copy_from_slice(&b[from..to]),
                None => y.fill(0.0),
            }
            for tap in 0..taps {
                let input = conv_input(&x, window, t + tap);
                // SAFETY: three slices of the same length; the shell has the instruction set.
                unsafe { multiply_add::<V>(&weight.row(tap)[from..to], &input[from..to], y, tap + 1 == taps) };
            }
        }
    }
    // The last inputs become the window; ascending, so that what is read was not written.
    for t in 0..taps - 1 {
        let from = conv_input(&x, window, t + tokens).as_ptr();
        // SAFETY: two rows of `channels` elements; `from` is another one unless there are no tokens.
        unsafe { std::ptr::copy(from, window.row(t).as_mut_ptr(), channels) };
    }
}

/// Row t of the window and then the inputs.
#[inline(always)]
fn conv_input<'a>(x: &Rows<'a>, window: &'a RowsMut, t: usize) -> &'a [f32] {
    match t.checked_sub(window.rows()) {
        Some(t) => x.row(t),
        None => window.as_rows().row(t),
    }
}

/// `y = fma(w, x, y)`, and then silu after the last tap.
#[inline(always)]
unsafe fn multiply_add<V: Lanes>(w: &[f32], x: &[f32], y: &mut [f32], last: bool) {
    assert!(w.len() == y.len() && x.len() == y.len());
    let (n, whole) = (y.len(), y.len() / 16 * 16);
    let (w, x, y) = (w.as_ptr(), x.as_ptr(), y.as_mut_ptr());
    // SAFETY: `n` elements of each; the caller vouches for the instruction set.
    unsafe {
        for i in (0..whole).step_by(16) {
            let v = V::load(w.add(i)).fma(V::load(x.add(i)), V::load(y.add(i)));
            if last { silu(v) } else { v }.store(y.add(i));
        }
        let (i, left) = (whole, n - whole);
        if left > 0 {
            let v = V::load_first(w.add(i), left).fma(V::load_first(x.add(i), left), V::load_first(y.add(i), left));
            if last { silu(v) } else { v }.store_first(y.add(i), left);
        }
    }
}

#[inline(always)]
unsafe fn gates_lanes<V: Lanes>(a: &[f32], b: &[f32], decay: &[f32], dt_bias: &[f32], g: &mut [f32], beta: &mut [f32]) {
    let n = a.len();
    assert!([b.len(), decay.len(), dt_bias.len(), g.len(), beta.len()] == [n; 5], "all have {n} heads");
    for i in (0..n).step_by(16) {
        let left = (n - i).min(16);
        // SAFETY: `left` elements from `i` on are inside all six; the shell has the instruction set.
        unsafe {
            let (a, dt) = (V::load_first(a.as_ptr().add(i), left), V::load_first(dt_bias.as_ptr().add(i), left));
            let rate = V::load_first(decay.as_ptr().add(i), left);
            rate.mul(softplus(a.add(dt))).store_first(g.as_mut_ptr().add(i), left);
            sigmoid(V::load_first(b.as_ptr().add(i), left)).store_first(beta.as_mut_ptr().add(i), left);
        }
    }
}

/// One head's inputs of a run of tokens.
#[derive(Clone, Copy)]
pub struct HeadInputs<'a> {
    /// `[tokens, key_dim]`, L2-normed and scaled.
    pub q: Rows<'a>,
    /// `[tokens, key_dim]`, L2-normed.
    pub k: Rows<'a>,
    /// `[tokens, columns]`
    pub v: Rows<'a>,
    /// Log decay, `[tokens, 1]`.
    pub g: Rows<'a>,
    /// `[tokens, 1]`
    pub beta: Rows<'a>,
}

#[inline(always)]
unsafe fn recurrence_lanes<V: Lanes>(state: &mut RowsMut, inputs: &HeadInputs, out: &mut RowsMut) {
    let (tokens, key_dim, columns) = (inputs.q.rows(), state.rows(), state.cols());
    assert!(inputs.q.cols() == key_dim && inputs.k.cols() == key_dim, "keys of {} for {key_dim} rows", inputs.k.cols());
    assert!(inputs.v.cols() == columns && out.cols() == columns, "values of {} for {columns} columns", inputs.v.cols());
    assert!(
        [inputs.k.rows(), inputs.v.rows(), inputs.g.rows(), inputs.beta.rows(), out.rows()] == [tokens; 5],
        "{tokens} tokens"
    );
    assert!(inputs.g.cols() == 1 && inputs.beta.cols() == 1, "one gate per token");
    if tokens == 0 || key_dim == 0 {
        // Without keys nothing is remembered.
        (0..tokens).for_each(|t| out.row(t).fill(0.0));
        return;
    }
    let mut c = 0;
    // SAFETY: the blocks divide the columns; the shell has the instruction set.
    unsafe {
        if tokens == 1 {
            // The state is read from memory once, in storage order.
            while V::WIDE && c + 128 <= columns {
                one_token::<V, 8>(state, inputs, out, c, 16);
                c += 128;
            }
            while c + 64 <= columns {
                one_token::<V, 4>(state, inputs, out, c, 16);
                c += 64;
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

/// A block of a state: rows `stride` elements apart.
#[derive(Clone, Copy)]
pub(crate) struct Block {
    pub at: *mut f32,
    pub stride: usize,
    pub key_dim: usize,
}

#[inline(always)]
pub(crate) fn first_row(state: &mut RowsMut, c: usize) -> Block {
    let (stride, key_dim) = (state.stride(), state.rows());
    Block { at: state.row(0)[c..].as_mut_ptr(), stride, key_dim }
}

#[inline(always)]
pub(crate) unsafe fn load<V: Lanes>(p: *const f32, j: usize, n: usize) -> V {
    // SAFETY: as the caller vouches.
    unsafe { if n == 16 { V::load(p.add(16 * j)) } else { V::load_first(p, n) } }
}

#[inline(always)]
pub(crate) unsafe fn store<V: Lanes>(v: V, p: *mut f32, j: usize, n: usize) {
    // SAFETY: as the caller vouches.
    unsafe { if n == 16 { v.store(p.add(16 * j)) } else { v.store_first(p, n) } }
}

/// The sums over the key dimension have four lanes, element i in lane i mod 4, joined as (0 + 2) + (1 + 3).
#[inline(always)]
pub(crate) unsafe fn joined<V: Lanes, const N: usize>(lanes: [[V; N]; 4]) -> [V; N] {
    let mut sums = lanes[0];
    for j in 0..N {
        // SAFETY: the caller vouches for the instruction set.
        sums[j] = unsafe { lanes[0][j].add(lanes[2][j]).add(lanes[1][j].add(lanes[3][j])) };
    }
    sums
}

/// The order of lanes in which each is joined when it is complete, so that one lane's registers are live at a time: for a state in cache, where the order of rows does not matter.
pub(crate) const LANES: [usize; 4] = [0, 2, 1, 3];

/// Four lanes' sums on their way: what of them is joined already.
#[derive(Clone, Copy)]
pub(crate) struct Joined<V, const N: usize> {
    pub even: [V; N],
    pub odd: [V; N],
}

impl<V: Lanes, const N: usize> Joined<V, N> {
    #[inline(always)]
    pub unsafe fn new() -> Self {
        // SAFETY: the caller vouches for the instruction set.
        let zero = unsafe { V::splat(0.0) };
        Joined { even: [zero; N], odd: [zero; N] }
    }

    /// Takes the sums of a lane, in the order of [`LANES`].
    #[inline(always)]
    pub unsafe fn take(&mut self, lane: usize, sums: [V; N]) {
        // SAFETY: the caller vouches for the instruction set.
        unsafe {
            for j in 0..N {
                match lane {
                    0 => self.even[j] = sums[j],
                    1 => self.odd[j] = sums[j],
                    2 => self.even[j] = self.even[j].add(sums[j]),
                    _ => self.even[j] = self.even[j].add(self.odd[j].add(sums[j])),
                }
            }
        }
    }
}

/// What the state holds for `k` after `decay`, less the value: `(v - r) * beta`. Registers of columns as for [`block`].
#[inline(always)]
unsafe fn correction<V: Lanes, const N: usize>(s: Block, inputs: &HeadInputs, c: usize, n: usize, decay: V) -> [V; N] {
    // SAFETY: as the caller vouches.
    unsafe {
        let k = inputs.k.row(0);
        let mut held = [[V::splat(0.0); N]; 4];
        for first in (0..s.key_dim).step_by(4) {
            for lane in 0..4 {
                if first + lane >= s.key_dim {
                    break;
                }
                let p = s.at.add((first + lane) * s.stride);
                let k = V::splat(*k.get_unchecked(first + lane));
                for j in 0..N {
                    held[lane][j] = load::<V>(p, j, n).mul(decay).fma(k, held[lane][j]);
                }
            }
        }
        corrected(joined(held), inputs, 0, c, n)
    }
}

#[inline(always)]
unsafe fn corrected<V: Lanes, const N: usize>(
    mut held: [V; N],
    inputs: &HeadInputs,
    t: usize,
    c: usize,
    n: usize,
) -> [V; N] {
    // SAFETY: as the caller vouches.
    unsafe {
        let beta = V::splat(inputs.beta.row(t)[0]);
        let v = inputs.v.row(t).as_ptr().add(c);
        for j in 0..N {
            held[j] = load::<V>(v, j, n).sub(held[j]).mul(beta);
        }
        held
    }
}

/// A single token: the state is read, and then updated.
#[inline(always)]
unsafe fn one_token<V: Lanes, const N: usize>(
    state: &mut RowsMut,
    inputs: &HeadInputs,
    out: &mut RowsMut,
    c: usize,
    n: usize,
) {
    let s = first_row(state, c);
    // SAFETY: as for `block`.
    unsafe {
        let decay = V::splat(exp1(inputs.g.row(0)[0]));
        let d = correction::<V, N>(s, inputs, c, n, decay);
        let (q, k) = (inputs.q.row(0), inputs.k.row(0));
        let mut sums = [[V::splat(0.0); N]; 4];
        for first in (0..s.key_dim).step_by(4) {
            for lane in 0..4 {
                if first + lane >= s.key_dim {
                    break;
                }
                let i = first + lane;
                let p = s.at.add(i * s.stride);
                let (q, k) = (V::splat(*q.get_unchecked(i)), V::splat(*k.get_unchecked(i)));
                for j in 0..N {
                    let v = k.fma(d[j], load::<V>(p, j, n).mul(decay));
                    store(v, p, j, n);
                    sums[lane][j] = v.fma(q, sums[lane][j]);
                }
            }
        }
        let o = joined(sums);
        let p = out.row(0).as_mut_ptr().add(c);
        for j in 0..N {
            store(o[j], p, j, n);
        }
    }
}

/// The greatest key dimension whose blocks are copied.
pub(crate) const COPIED_ROWS: usize = 256;

/// [`block`] on a dense copy: rows a power of two apart map to too few sets of the first-level cache.
#[inline(always)]
unsafe fn copied<V: Lanes, const N: usize>(
    state: &mut RowsMut,
    inputs: &HeadInputs,
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
    let mut room = std::mem::MaybeUninit::<StateCopy<N>>::uninit();
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

/// `N` registers of columns from `c` on; `n` is 16, or fewer where `N` is 1.
///
/// Per token there are two passes over the state's rows: what it holds for the key, and then its update and output. The second pass
/// of a token is also the first of the next: the rows are decayed as they are stored, so each is loaded and stored once.
#[inline(always)]
unsafe fn block<V: Lanes, const N: usize>(s: Block, inputs: &HeadInputs, out: &mut RowsMut, c: usize, n: usize) {
    let tokens = inputs.q.rows();
    // SAFETY: `N` registers (or `n` lanes) are inside each row; the caller vouches for the instruction set.
    unsafe {
        let decay = V::splat(exp1(inputs.g.row(0)[0]));
        let mut d = correction::<V, N>(s, inputs, c, n, decay);
        for i in 0..s.key_dim {
            let p = s.at.add(i * s.stride);
            for j in 0..N {
                store(load::<V>(p, j, n).mul(decay), p, j, n);
            }
        }
        for t in 0..tokens {
            let (q, k) = (inputs.q.row(t), inputs.k.row(t));
            let mut sums = Joined::<V, N>::new();
            if t + 1 < tokens {
                let decay = V::splat(exp1(inputs.g.row(t + 1)[0]));
                let next = inputs.k.row(t + 1);
                let mut next_held = Joined::<V, N>::new();
                for lane in LANES {
                    let (mut o, mut held) = ([V::splat(0.0); N], [V::splat(0.0); N]);
                    for i in (lane..s.key_dim).step_by(4) {
                        let p = s.at.add(i * s.stride);
                        let (q, k) = (V::splat(*q.get_unchecked(i)), V::splat(*k.get_unchecked(i)));
                        let next = V::splat(*next.get_unchecked(i));
                        for j in 0..N {
                            let v = k.fma(d[j], load::<V>(p, j, n));
                            o[j] = v.fma(q, o[j]);
                            let v = v.mul(decay);
                            store(v, p, j, n);
                            held[j] = v.fma(next, held[j]);
                        }
                    }
                    sums.take(lane, o);
                    next_held.take(lane, held);
                }
                d = corrected(next_held.even, inputs, t + 1, c, n);
            } else {
                for lane in LANES {
                    let mut o = [V::splat(0.0); N];
                    for i in (lane..s.key_dim).step_by(4) {
                        let p = s.at.add(i * s.stride);
                        let (q, k) = (V::splat(*q.get_unchecked(i)), V::splat(*k.get_unchecked(i)));
                        for j in 0..N {
                            let v = k.fma(d[j], load::<V>(p, j, n));
                            store(v, p, j, n);
                            o[j] = v.fma(q, o[j]);
                        }
                    }
                    sums.take(lane, o);
                }
            }
            let p = out.row(t).as_mut_ptr().add(c);
            for j in 0..N {
                store(sums.even[j], p, j, n);
            }
        }
    }
}

simd! {
    /// Causal depthwise convolution and silu: `out[t, c] = silu(sum over taps j ascending of weight[j, c] * input[t + j - (taps - 1), c])`, from
    /// `bias` or +0, by fma. `x`, `out`: `[tokens, channels]`; `weight`: `[taps, channels]`, oldest tap first (a checkpoint's
    /// `[channels, 1, taps]` transposed); `window`: the `taps - 1` inputs before the first, oldest first, `[taps - 1, channels]`, which
    /// become the last ones. Split by channels.
    pub fn conv_step(x: Rows, weight: Rows, bias: Option<&[f32]>, window: &mut RowsMut, out: &mut RowsMut) = conv_lanes
}

simd! {
    /// One token's gates, all `[value_heads]`: `g = decay * softplus(a + dt_bias)`, the log decay, and `beta = sigmoid(b)`.
    pub fn gates(a: &[f32], b: &[f32], decay: &[f32], dt_bias: &[f32], g: &mut [f32], beta: &mut [f32]) = gates_lanes
}

simd! {
    /// The delta rule for one value head, or some columns of it, over a run of tokens; `docs/numerics.md` has the formulas. `state`:
    /// `[key_dim, columns]`, in place; `out`: `[tokens, columns]`. Columns do not depend on each other; blocks of 64 suit the kernel best.
    pub fn recurrence(state: &mut RowsMut, inputs: &HeadInputs, out: &mut RowsMut) = recurrence_lanes
}
