//! Mamba-2's recurrence against its definition in `docs/numerics.md`.

use proptest::prelude::*;
use sluice_kernels::Isa;
use sluice_kernels::math::{exp1, softplus1};
use sluice_kernels::rows::{Rows, RowsMut};
use sluice_kernels::state_space::*;

use crate::random::{bits, random};

const SKIP: f32 = 0.7;

/// x, B beside C as the convolution leaves them, time steps, log decays, and the state.
fn drawn(tokens: usize, rows: usize, cols: usize) -> [Vec<f32>; 5] {
    let steps: Vec<f32> = random(tokens, 3).iter().map(|x| softplus1(*x)).collect();
    let g = steps.iter().map(|x| -0.8 * x).collect();
    [random(tokens * cols, 1), random(tokens * 2 * rows, 2), steps, g, random(rows * cols, 5)]
}

fn recur(isa: Isa, (tokens, rows, cols): (usize, usize, usize), chunk: usize, split: usize) -> [Vec<u32>; 2] {
    let [x, bc, step, g, mut state] = drawn(tokens, rows, cols);
    let mut out = vec![0.0; tokens * cols];
    for from in (0..tokens).step_by(chunk) {
        let run = from..from + chunk.min(tokens - from);
        let bc = Rows::dense(&bc, 2 * rows).part(run.clone());
        let inputs = HeadInputs {
            x: Rows::dense(&x, cols).part(run.clone()),
            b: bc.columns(0..rows),
            c: bc.columns(rows..2 * rows),
            step: Rows::dense(&step, 1).part(run.clone()),
            g: Rows::dense(&g, 1).part(run.clone()),
            skip: SKIP,
        };
        let (mut left, mut right) = RowsMut::dense(&mut state, cols).split_columns(split);
        let out = RowsMut::new(&mut out[from * cols..], run.len(), cols, cols);
        let (mut out_left, mut out_right) = out.split_columns(split);
        recurrence(isa, &mut left, &HeadInputs { x: inputs.x.columns(0..split), ..inputs }, &mut out_left);
        recurrence(isa, &mut right, &HeadInputs { x: inputs.x.columns(split..cols), ..inputs }, &mut out_right);
    }
    [bits(&out), bits(&state)]
}

/// One rounding per operation, one element at a time.
fn plain(tokens: usize, rows: usize, cols: usize) -> [Vec<u32>; 2] {
    let [x, bc, step, g, mut state] = drawn(tokens, rows, cols);
    let mut out = vec![0.0f32; tokens * cols];
    for t in 0..tokens {
        let (b, c) = bc[t * 2 * rows..][..2 * rows].split_at(rows);
        for j in 0..cols {
            let x = x[t * cols + j];
            let mut y = [0f32; 4];
            for i in 0..rows {
                let s = &mut state[i * cols + j];
                *s = b[i].mul_add(x * step[t], *s * exp1(g[t]));
                y[i % 4] = s.mul_add(c[i], y[i % 4]);
            }
            out[t * cols + j] = SKIP.mul_add(x, (y[0] + y[2]) + (y[1] + y[3]));
        }
    }
    [bits(&out), bits(&state)]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn state_spaces_ignore_chunks_splits_and_instruction_set(
        rows in 1usize..40, cols in 1usize..140, tokens in 1usize..6, split in 0usize..140
    ) {
        let wanted = plain(tokens, rows, cols);
        for isa in Isa::supported() {
            for chunk in [1, 2, tokens] {
                prop_assert_eq!(&recur(isa, (tokens, rows, cols), chunk, split.min(cols)), &wanted);
            }
        }
    }

    #[test]
    fn time_steps_are_the_scalar_formula(n in 1usize..40, seed in any::<u64>()) {
        let [dt, bias, decay] = [0, 1, 2].map(|i| random(n, seed + i));
        for isa in Isa::supported() {
            let (mut step, mut g) = (vec![0.0; n], vec![0.0; n]);
            steps(isa, &dt, &bias, &decay, &mut step, &mut g);
            let wanted: Vec<f32> = (0..n).map(|i| softplus1(dt[i] + bias[i])).collect();
            prop_assert_eq!(bits(&step), bits(&wanted));
            prop_assert_eq!(bits(&g), bits(&(0..n).map(|i| decay[i] * wanted[i]).collect::<Vec<_>>()));
        }
    }
}

/// States larger than what is copied, of checkpoints' sizes.
#[test]
fn large_states_are_the_same() {
    for (tokens, rows, cols) in [(3, 300, 64), (2, 128, 64), (1, 256, 80)] {
        let wanted = plain(tokens, rows, cols);
        for isa in Isa::supported() {
            assert_eq!(recur(isa, (tokens, rows, cols), tokens, 0), wanted);
        }
    }
}
