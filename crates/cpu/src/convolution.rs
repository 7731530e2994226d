//! The short convolution before recurrent layers, over each sequence's tokens, by blocks of channels.

use sluice_backend::{Isa, StepInputs};
use sluice_kernels::delta;

use crate::memory::Place;
use crate::threads::Pool;

/// Channels that one task convolves.
const CHANNELS: usize = 256;

/// Where states have the last inputs: `[taps - 1, channels]` from element `from` of each row on.
#[derive(Clone, Copy)]
pub struct Window {
    pub states: Place,
    pub from: usize,
    pub taps: usize,
    pub channels: usize,
}

/// `out = silu(convolution(input))`, for the tokens of `inputs`; windows move on. `weight`: `[taps, channels]`; `bias`: `[1, channels]`.
pub fn convolve(
    isa: Isa,
    pool: &mut Pool,
    inputs: &StepInputs,
    window: Window,
    (input, weight, bias): (Place, Place, Option<Place>),
    out: Place,
) {
    let Window { states, from: at, taps, channels } = window;
    let blocks = channels.div_ceil(CHANNELS);
    pool.run(inputs.sequences() * blocks, &|task, _| {
        let s = task / blocks;
        let from = task % blocks * CHANNELS;
        let cols = from..(from + CHANNELS).min(channels);
        let window_of = |row: usize| states.fold(row, at, taps - 1, channels).part(0..taps - 1, cols.clone());
        let window = window_of(inputs.state(s));
        for (rows, kept) in inputs.pieces(s) {
            // SAFETY: this task alone uses these channels of this sequence, and of the rows that keep its states; weights are never written.
            unsafe {
                let x = input.part(rows.clone(), cols.clone()).as_rows();
                let weight = weight.part(0..taps, cols.clone()).as_rows();
                let bias = bias.map(|b| b.get(0, cols.clone()));
                let mut out = out.part(rows, cols.clone()).as_rows_mut();
                delta::conv_step(isa, x, weight, bias, &mut window.as_rows_mut(), &mut out);
                kept.into_iter().for_each(|row| window_of(row).copy_from(window));
            }
        }
    });
}
