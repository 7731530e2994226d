//! One expert of a calibration: its inputs in both models, the moments of them, and the weights that fit.

use anyhow::{Context, Result, bail};
use sluice_kernels::Isa;
use sluice_kernels::dense::{self, Buffer, Panels, RIGHT, product};
use sluice_kernels::elementwise::swiglu_in_place;
use sluice_kernels::quantize::descent::{self, Params};

use crate::conversion::{ConversionUnit, Treatment};
use crate::input::{Input, matrix};
use crate::quantize::{SquaredError, squares, values};

/// Tokens that an expert must have seen; where it saw fewer, tokens of others stand in.
pub const ENOUGH: usize = 512;
/// The weight of a stand-in, where a token of the expert's own has 1.
const STAND_IN: f32 = 0.1;
/// Added to H's diagonal, in parts of its mean: it keeps weights near the original in directions that the text did not show.
const DAMPING: f32 = 0.01;
/// Visits of the descent to each group, and passes over it at each.
const SWEEPS: usize = 2;
const ROUNDS: usize = 2;

/// What the experts of a layer see.
pub struct Seen {
    /// Their inputs, normed: `[tokens, hidden]`.
    pub h: Vec<f32>,
    /// The weight of a token's error, before the router's weight: 1 / mean square of its residual stream.
    pub importance: Vec<f32>,
    /// Their inputs in the unquantised model.
    pub original: Vec<f32>,
    /// For each expert its tokens, ascending, with the router's weights.
    pub takers: Vec<Takers>,
    /// Those of the unquantised model.
    pub original_takers: Vec<Takers>,
}

pub type Takers = Vec<(u32, f32)>;

/// The parts (q, scales, biases) of one projection and their error.
pub type Packed = (Vec<Vec<u8>>, SquaredError);

/// What an expert puts out for its takers: `[takers, hidden]`, quantised in the packed model, as it was in the plain one.
pub struct Outputs {
    pub packed: Vec<f32>,
    pub plain: Vec<f32>,
}

/// One expert and its inputs.
pub struct Expert<'a> {
    pub isa: Isa,
    pub seen: &'a Seen,
    pub hidden: usize,
    pub number: usize,
}

/// What an expert is given.
struct Inputs {
    /// In the packed model, its own takers' first: `[tokens, hidden]`.
    x: Buffer,
    /// `[tokens]`, of a sum of one.
    importance: Vec<f32>,
    /// In the unquantised model, those of the same tokens first.
    original: Buffer,
    /// Which of them each taker of the unquantised model has.
    original_rows: Vec<usize>,
}

impl Expert<'_> {
    /// Its parts, and what it then puts out.
    pub fn quantize(&self, input: &Input, units: [&ConversionUnit; 3]) -> Result<(Vec<Packed>, Outputs)> {
        let (isa, hidden) = (self.isa, self.hidden);
        let old = self.weights(input, units)?;
        let width = old[0].len() / hidden;
        let own = self.seen.takers[self.number].len();
        let Inputs { x, importance, original, original_rows } = self.inputs();
        let tokens = importance.len();
        // 1. gate and up
        let (now, before) = (Panels::of_rows(&x, hidden), Panels::of_rows(&original, hidden));
        let h = damped(isa, &x, hidden, &importance);
        let columns = Panels::of_columns(&x, hidden, &importance);
        let project = |i: usize| -> Result<_> {
            let w = Panels::of_rows(&old[i], hidden);
            let wanted = product(isa, &w, &before);
            let pull = pull(isa, &wanted[..tokens * width], product(isa, &w, &now), width, &columns);
            let (part, new) = self.projection(units[i], &old[i], &h, &pull)?;
            Ok((part, product(isa, &Panels::of_rows(&new, hidden), &now), wanted))
        };
        let (gate_part, mut inner, mut original_inner) = project(0)?;
        let (up_part, up, original_up) = project(1)?;
        swiglu_in_place(isa, &mut inner, &up);
        swiglu_in_place(isa, &mut original_inner, &original_up);
        drop((h, columns, now, before, up, original_up));
        // 2. down, from the outputs of gate and up: the quantised ones now, and the original ones
        let w = Panels::of_rows(&old[2], width);
        let outputs = product(isa, &w, &Panels::of_rows(&original_inner, width));
        let now = Panels::of_rows(&inner, width);
        let columns = Panels::of_columns(&inner, width, &importance);
        let pull = pull(isa, &outputs[..tokens * hidden], product(isa, &w, &now), hidden, &columns);
        let h = damped(isa, &inner, width, &importance);
        let (down_part, new) = self.projection(units[2], &old[2], &h, &pull)?;
        // 3. what comes of it, as memory that other threads may have
        let packed = product(isa, &Panels::of_rows(&new, width), &now)[..own * hidden].to_vec();
        let plain = original_rows.iter().flat_map(|r| &outputs[r * hidden..(r + 1) * hidden]).copied().collect();
        Ok((vec![gate_part, up_part, down_part], Outputs { packed, plain }))
    }

    /// `down(silu(gate x) * up x)`, `[tokens, hidden]`.
    pub fn output(&self, weights: &[Vec<f32>], x: &[f32]) -> Vec<f32> {
        let x = Panels::of_rows(x, self.hidden);
        let [mut gate, up] = [0, 1].map(|i| product(self.isa, &Panels::of_rows(&weights[i], self.hidden), &x));
        swiglu_in_place(self.isa, &mut gate, &up);
        let width = weights[0].len() / self.hidden;
        product(self.isa, &Panels::of_rows(&weights[2], width), &Panels::of_rows(&gate, width)).to_vec()
    }

    /// The weights of its projections, `[rows, cols]` each.
    pub fn weights(&self, input: &Input, units: [&ConversionUnit; 3]) -> Result<Vec<Vec<f32>>> {
        let of_unit = |unit: &ConversionUnit| {
            let count = unit.stack.as_ref().map_or(1, |s| s.count);
            let rows = unit.source.all_rows() / count;
            let parts = input.read(&unit.source, self.number * rows..(self.number + 1) * rows)?;
            let name = || format!("tensor {:?}, expert {}", unit.source.name, self.number);
            values(self.isa, &matrix(&unit.source, &parts)?).with_context(name)
        };
        units.into_iter().map(of_unit).collect()
    }

    /// Some tokens' inputs in one of the models.
    pub fn rows(&self, h: &[f32], tokens: impl ExactSizeIterator<Item = usize>) -> Buffer {
        let mut rows = Buffer::zeros(tokens.len() * self.hidden);
        for (row, t) in rows.chunks_exact_mut(self.hidden).zip(tokens) {
            row.copy_from_slice(&h[t * self.hidden..][..self.hidden]);
        }
        rows
    }

    /// Inputs, and what each token counts.
    fn inputs(&self) -> Inputs {
        let seen = self.seen;
        let own = &seen.takers[self.number];
        // 1. its own, and stand-ins where they are few
        let mut tokens: Vec<(usize, f32)> = own.iter().map(|&(t, weight)| (t as usize, weight)).collect();
        if own.len() < ENOUGH {
            let all = seen.importance.len();
            let wanted = (ENOUGH - own.len()).min(all);
            let mean = match own.len() {
                0 => 1.0,
                n => own.iter().map(|(_, w)| w * w).sum::<f32>() / n as f32,
            };
            tokens.extend((0..wanted).map(|i| (i * all / wanted, (STAND_IN * mean).sqrt())));
        }
        let mut importance: Vec<f32> = tokens.iter().map(|&(t, weight)| weight * weight * seen.importance[t]).collect();
        let sum = importance.iter().map(|&i| i as f64).sum::<f64>().max(f64::MIN_POSITIVE);
        importance.iter_mut().for_each(|i| *i = (*i as f64 / sum) as f32);
        // 2. whoever takes it in the unquantised model alone
        let mut originals: Vec<usize> = tokens.iter().map(|t| t.0).collect();
        let mut original_rows = Vec::new();
        for &(t, _) in &seen.original_takers[self.number] {
            let row = own.binary_search_by_key(&t, |own| own.0).unwrap_or(originals.len());
            if row == originals.len() {
                originals.push(t as usize);
            }
            original_rows.push(row);
        }
        Inputs {
            x: self.rows(&seen.h, tokens.iter().map(|t| t.0)),
            importance,
            original: self.rows(&seen.original, originals.into_iter()),
            original_rows,
        }
    }

    /// Quantises one projection for inputs of moments `h` and a pull; returns its parts and its new values.
    fn projection(&self, unit: &ConversionUnit, w: &[f32], h: &[f32], pull: &[f32]) -> Result<(Packed, Vec<f32>)> {
        let Treatment::Quantize { bits, group, float } = unit.treatment else {
            bail!("tensor {:?} is not to be quantised", unit.source.name)
        };
        let params = Params { bits, group: group as usize, scale: float, sweeps: SWEEPS, rounds: ROUNDS };
        let found = descent::quantize(self.isa, w, unit.source.cols, h, pull, params);
        let new = found.values(group as usize);
        let (weight, error) = squares(w, &new);
        let (q, scales, biases) = found.pack(bits, float);
        let error = SquaredError { count: w.len() as u64, weight, error };
        Ok(((vec![q, scales, biases], error), new))
    }
}

/// `sum of importance x x^T` over the rows of `x: [tokens, cols]`, damped.
fn damped(isa: Isa, x: &[f32], cols: usize, importance: &[f32]) -> Buffer {
    let mut h = dense::moments(isa, x, cols, importance);
    let mean = (0..cols).map(|i| h[i * cols + i]).sum::<f32>() / cols as f32;
    // A diagonal of zeros would leave nothing to divide by.
    let floor = (DAMPING * mean).max(1e-20);
    (0..cols).for_each(|i| h[i * cols + i] += floor);
    h
}

/// `sum of (wanted - got) x^T` over tokens, `wanted, got: [tokens, rows]` and `x` the columns of the inputs, each times its importance: `[cols, rows]`.
fn pull(isa: Isa, wanted: &[f32], mut got: Buffer, rows: usize, x: &Panels<RIGHT>) -> Buffer {
    got.iter_mut().zip(wanted).for_each(|(got, wanted)| *got = wanted - *got);
    product(isa, &Panels::of_columns(&got, rows, &vec![1.0; x.depth]), x)
}

#[cfg(test)]
mod tests {
    use sluice_kernels::format::Float;

    use super::*;

    /// Inputs that are correlated, and the same with an error in one direction.
    fn inputs(tokens: usize, cols: usize) -> (Vec<f32>, Vec<f32>) {
        let value = |i: usize| ((i * 7919 + i * i % 104_729) % 1009) as f32 / 504.5 - 1.0;
        let x: Vec<f32> = (0..tokens * cols).map(|i| value(i) + value(i / cols + 13)).collect();
        let off = x.iter().enumerate().map(|(i, v)| v + 0.3 * value(i / cols + 13) * value(i % cols + 77)).collect();
        (x, off)
    }

    #[test]
    fn a_pull_brings_outputs_of_changed_inputs_back() {
        let (tokens, cols, rows) = (300, 64, 5);
        let (original, x) = inputs(tokens, cols);
        let importance: Vec<f32> = (0..tokens).map(|t| (1.0 + (t % 3) as f32) / 600.0).collect();
        let w: Vec<f32> = (0..rows * cols).map(|i| ((i * 31) % 17) as f32 / 17.0 - 0.5).collect();
        let isa = Isa::GENERIC;
        let outputs = |w: &[f32], x: &[f32]| product(isa, &Panels::of_rows(w, cols), &Panels::of_rows(x, cols));
        let h = damped(isa, &x, cols, &importance);
        let columns = Panels::of_columns(&x, cols, &importance);
        let quantized = |original: &[f32]| {
            let pull = pull(isa, &outputs(&w, original), outputs(&w, &x), rows, &columns);
            let p = Params { bits: 8, group: 64, scale: Float::F32, sweeps: 20, rounds: 2 };
            descent::quantize(isa, &w, cols, &h, &pull, p).values(64)
        };
        let error = |v: &[f32]| -> f64 {
            let (wanted, got) = (outputs(&w, &original), outputs(v, &x));
            let each = wanted.iter().zip(&got[..]).enumerate();
            each.map(|(i, (a, b))| ((a - b) * (a - b) * importance[i / rows]) as f64).sum()
        };
        let (pulled, left) = (error(&quantized(&original)), error(&quantized(&x)));
        assert!(pulled < 0.2 * left, "{pulled} of {left}");
        // With the same inputs there is nothing to correct: the error of eight bits is left.
        assert!((left / error(&w) - 1.0).abs() < 0.02, "{left}, {}", error(&w));
    }

    #[test]
    fn few_tokens_are_filled_up_with_others_that_count_less() {
        let (x, original) = inputs(1000, 8);
        let takers = vec![vec![(3, 0.5), (500, 0.25)], vec![], (0..600).map(|t| (t, 0.1)).collect()];
        let original_takers = vec![vec![(2, 0.5), (500, 0.5)], vec![(9, 0.5)], vec![]];
        let seen =
            Seen { h: x.clone(), original: original.clone(), importance: vec![1.0; 1000], takers, original_takers };
        let inputs = |number| Expert { isa: Isa::GENERIC, seen: &seen, hidden: 8, number }.inputs();
        let few = inputs(0);
        assert_eq!((few.importance.len(), &few.x[..8], &few.x[8..16]), (ENOUGH, &x[24..32], &x[4000..4008]));
        assert_eq!(few.importance[0], 4.0 * few.importance[1]);
        assert!(few.importance[2..].iter().all(|&i| i < few.importance[1]));
        assert!((few.importance.iter().sum::<f32>() - 1.0).abs() < 1e-5);
        // What the unquantised model gives it goes with the same tokens, and once more for the token that it alone sends here.
        assert_eq!(few.original_rows, [ENOUGH, 1]);
        assert_eq!((few.original.len(), &few.original[ENOUGH * 8..]), ((ENOUGH + 1) * 8, &original[16..24]));
        assert_eq!(few.original[8..16], original[4000..4008]);
        assert_eq!((inputs(1).importance.len(), inputs(2).importance.len()), (ENOUGH, 600));
    }
}
