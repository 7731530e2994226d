//! The delta rule against its definition in `docs/numerics.md`.

use proptest::prelude::*;
use sluice_kernels::Isa;
use sluice_kernels::delta::*;
use sluice_kernels::math::{exp1, sigmoid1, softplus1};
use sluice_kernels::rows::{Rows, RowsMut};

use crate::random::{assert_close, bits, random};

/// Feeds `tokens` in runs whose lengths `chunk` gives.
fn conv(
    isa: Isa,
    x: &[f32],
    w: &[f32],
    taps: usize,
    channels: usize,
    chunk: usize,
    split: usize,
) -> (Vec<u32>, Vec<u32>) {
    let tokens = x.len() / channels;
    let mut window = random((taps - 1) * channels, 99);
    let mut out = vec![0.0; x.len()];
    for from in (0..tokens).step_by(chunk) {
        let n = chunk.min(tokens - from);
        let x = Rows::dense(x, channels).part(from..from + n);
        let w = Rows::dense(w, channels);
        let window = RowsMut::new(&mut window, taps - 1, channels, channels);
        let out = RowsMut::dense(&mut out[from * channels..(from + n) * channels], channels);
        let (mut left, mut right) = window.split_columns(split);
        let (mut out_left, mut out_right) = out.split_columns(split);
        conv_step(isa, x.columns(0..split), w.columns(0..split), None, &mut left, &mut out_left);
        let rest = split..channels;
        conv_step(isa, x.columns(rest.clone()), w.columns(rest), None, &mut right, &mut out_right);
    }
    (bits(&out), bits(&window))
}

fn recur(isa: Isa, tokens: usize, dk: usize, dv: usize, chunk: usize, split: usize) -> (Vec<f32>, Vec<f32>) {
    // q and k are adjacent, as the convolution leaves them.
    let qk = random(tokens * 2 * dk, 1).iter().map(|x| x / (dk as f32).sqrt()).collect::<Vec<_>>();
    let v = random(tokens * dv, 2);
    let g: Vec<f32> = random(tokens, 3).iter().map(|x| -x.abs()).collect();
    let beta: Vec<f32> = random(tokens, 4).iter().map(|x| sigmoid1(*x)).collect();
    let mut state = random(dk * dv, 5);
    let mut out = vec![0.0; tokens * dv];
    for from in (0..tokens).step_by(chunk) {
        let rows = from..from + chunk.min(tokens - from);
        let n = rows.len();
        let qk = Rows::dense(&qk, 2 * dk).part(rows.clone());
        let inputs = HeadInputs {
            q: qk.columns(0..dk),
            k: qk.columns(dk..2 * dk),
            v: Rows::dense(&v, dv).part(rows.clone()),
            g: Rows::dense(&g, 1).part(rows.clone()),
            beta: Rows::dense(&beta, 1).part(rows.clone()),
        };
        let (mut left, mut right) = RowsMut::dense(&mut state, dv).split_columns(split);
        let out = RowsMut::new(&mut out[from * dv..], n, dv, dv);
        let (mut out_left, mut out_right) = out.split_columns(split);
        recurrence(isa, &mut left, &HeadInputs { v: inputs.v.columns(0..split), ..inputs }, &mut out_left);
        recurrence(isa, &mut right, &HeadInputs { v: inputs.v.columns(split..dv), ..inputs }, &mut out_right);
    }
    (out, state)
}

/// The recurrence as `docs/numerics.md` has it, one rounding per operation, one element at a time.
fn plain(tokens: usize, dk: usize, dv: usize) -> (Vec<f32>, Vec<f32>) {
    let qk = random(tokens * 2 * dk, 1).iter().map(|x| x / (dk as f32).sqrt()).collect::<Vec<_>>();
    let v = random(tokens * dv, 2);
    let g: Vec<f32> = random(tokens, 3).iter().map(|x| -x.abs()).collect();
    let beta: Vec<f32> = random(tokens, 4).iter().map(|x| sigmoid1(*x)).collect();
    let mut state = random(dk * dv, 5);
    let mut out = vec![0.0f32; tokens * dv];
    for t in 0..tokens {
        let (q, k) = qk[t * 2 * dk..][..2 * dk].split_at(dk);
        for j in 0..dv {
            let mut held = [0f32; 4];
            for i in 0..dk {
                let s = &mut state[i * dv + j];
                *s *= exp1(g[t]);
                held[i % 4] = s.mul_add(k[i], held[i % 4]);
            }
            let d = (v[t * dv + j] - ((held[0] + held[2]) + (held[1] + held[3]))) * beta[t];
            let mut o = [0f32; 4];
            for i in 0..dk {
                let s = &mut state[i * dv + j];
                *s = k[i].mul_add(d, *s);
                o[i % 4] = s.mul_add(q[i], o[i % 4]);
            }
            out[t * dv + j] = (o[0] + o[2]) + (o[1] + o[3]);
        }
    }
    (out, state)
}

/// With a decay for each row of the state: by the kernel, `tokens` in runs of `chunk`, or element by element.
fn by_channels(isa: Option<(Isa, usize)>, tokens: usize, dk: usize, dv: usize) -> (Vec<u32>, Vec<u32>) {
    let [q, k] =
        [1, 2].map(|seed| -> Vec<f32> { random(tokens * dk, seed).iter().map(|x| x / (dk as f32).sqrt()).collect() });
    let v = random(tokens * dv, 3);
    let decays: Vec<f32> = random(tokens * dk, 4).iter().map(|x| exp1(-x.abs())).collect();
    let beta: Vec<f32> = random(tokens, 5).iter().map(|x| sigmoid1(*x)).collect();
    let (mut state, mut out) = (random(dk * dv, 6), vec![0.0f32; tokens * dv]);
    let Some((isa, chunk)) = isa else {
        let sum = |lanes: [f32; 4]| (lanes[0] + lanes[2]) + (lanes[1] + lanes[3]);
        for (t, j) in (0..tokens).flat_map(|t| (0..dv).map(move |j| (t, j))) {
            let (mut held, mut read) = ([0f32; 4], [0f32; 4]);
            for i in 0..dk {
                state[i * dv + j] *= decays[t * dk + i];
                held[i % 4] = state[i * dv + j].mul_add(k[t * dk + i], held[i % 4]);
            }
            let d = (v[t * dv + j] - sum(held)) * beta[t];
            for i in 0..dk {
                state[i * dv + j] = k[t * dk + i].mul_add(d, state[i * dv + j]);
                read[i % 4] = state[i * dv + j].mul_add(q[t * dk + i], read[i % 4]);
            }
            out[t * dv + j] = sum(read);
        }
        return (bits(&out), bits(&state));
    };
    for from in (0..tokens).step_by(chunk) {
        let rows = from..from + chunk.min(tokens - from);
        let part = |values, columns| Rows::dense(values, columns).part(rows.clone());
        let inputs = ChannelInputs {
            q: part(&q, dk),
            k: part(&k, dk),
            v: part(&v, dv),
            decays: part(&decays, dk),
            beta: part(&beta, 1),
        };
        let mut to = RowsMut::dense(&mut out[from * dv..rows.end * dv], dv);
        channel_recurrence(isa, &mut RowsMut::dense(&mut state, dv), &inputs, &mut to);
    }
    (bits(&out), bits(&state))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn decays_by_channels_ignore_chunks_and_instruction_set(dk in 1usize..40, dv in 1usize..140, tokens in 1usize..6) {
        let expect = by_channels(None, tokens, dk, dv);
        for isa in Isa::supported() {
            for chunk in [1, 2, tokens] {
                prop_assert_eq!(&by_channels(Some((isa, chunk)), tokens, dk, dv), &expect);
            }
            let (f, bias) = (random(dv, 7), random(dv, 8));
            let mut decays = vec![0.0; dv];
            channel_decays(isa, &f, &bias, -1.5, None, &mut decays);
            let expect: Vec<f32> = f.iter().zip(&bias).map(|(f, b)| exp1(-1.5 * softplus1(f + b))).collect();
            prop_assert_eq!(bits(&decays), bits(&expect));
        }
    }

    #[test]
    fn convolution_ignores_chunks_splits_and_instruction_set(
        channels in 1usize..50, tokens in 1usize..9, taps in 1usize..6, split in 0usize..50, seed in any::<u64>()
    ) {
        let (x, w) = (random(tokens * channels, seed), random(taps * channels, seed + 1));
        let oracle = conv(Isa::GENERIC, &x, &w, taps, channels, tokens, 0);
        for isa in Isa::supported() {
            for chunk in [1, 2, tokens] {
                prop_assert_eq!(&conv(isa, &x, &w, taps, channels, chunk, split.min(channels)), &oracle);
            }
        }
    }

    #[test]
    fn recurrence_ignores_chunks_splits_and_instruction_set(
        dk in 1usize..40, dv in 1usize..140, tokens in 1usize..6, split in 0usize..140
    ) {
        let (out, state) = plain(tokens, dk, dv);
        for isa in Isa::supported() {
            for chunk in [1, 2, tokens] {
                let got = recur(isa, tokens, dk, dv, chunk, split.min(dv));
                prop_assert_eq!(bits(&got.0), bits(&out));
                prop_assert_eq!(bits(&got.1), bits(&state));
            }
        }
    }

    #[test]
    fn gates_are_the_scalar_formula(n in 1usize..40, seed in any::<u64>()) {
        let [a, b, decay, dt] = [0, 1, 2, 3].map(|i| random(n, seed + i));
        for isa in Isa::supported() {
            let (mut g, mut beta) = (vec![0.0; n], vec![0.0; n]);
            gates(isa, &a, &b, &decay, &dt, &mut g, &mut beta);
            let expect: Vec<f32> = (0..n).map(|i| decay[i] * softplus1(a[i] + dt[i])).collect();
            prop_assert_eq!(bits(&g), bits(&expect));
            prop_assert_eq!(bits(&beta), bits(&b.iter().map(|b| sigmoid1(*b)).collect::<Vec<_>>()));
        }
    }
}

#[test]
fn convolution_is_close_to_f64() {
    let (channels, tokens, taps) = (33, 10, 4);
    let (x, w) = (random(tokens * channels, 7), random(taps * channels, 8));
    let padded: Vec<f32> = [random((taps - 1) * channels, 99), x.clone()].concat();
    let (out, window) = conv(*Isa::supported().last().unwrap(), &x, &w, taps, channels, 3, 16);
    let exact: Vec<f64> = (0..tokens * channels)
        .map(|i| {
            let tap = |j: usize| padded[i + j * channels] as f64 * w[j * channels + i % channels] as f64;
            let sum: f64 = (0..taps).map(tap).sum();
            sum / (1.0 + (-sum).exp())
        })
        .collect();
    assert_close(&out.iter().map(|b| f32::from_bits(*b)).collect::<Vec<_>>(), &exact, 1e-6);
    assert_eq!(window, bits(&padded[tokens * channels..]));
}
