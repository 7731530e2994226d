//! Gated delta rules over a pool of recurrent states.

use std::ops::Range;

use sluice_backend::{DeltaLayer, DeltaShape, SequenceInput, StepInputs, Wanted};

use super::attention::inputs_for;
use crate::case::Case;
use crate::case::Placed;

/// A recurrent layer with its own tensors.
pub struct DeltaCase {
    pub inner: DeltaLayer,
    pub out: Placed,
}

impl Case {
    pub fn delta_shape(&mut self) -> DeltaShape {
        let key_heads = self.random.usize(1..=3);
        DeltaShape {
            key_heads,
            value_heads: key_heads * self.random.usize(1..=3),
            key_dim: self.one_of(&[4, 8, 16, 20, 64, 128]),
            value_dim: self.one_of(&[4, 16, 24, 64, 72, 128]),
            taps: self.random.usize(2..=5),
            tiled: self.random.bool(),
        }
    }

    /// Recurrent layer `layer`, for steps of at most `tokens` tokens.
    pub fn delta_layer(&mut self, shape: DeltaShape, layer: usize, tokens: usize) -> DeltaCase {
        let (heads, values) = (shape.value_heads, shape.value_heads * shape.value_dim);
        let [qkv, z, b, a, out] =
            [shape.channels(), values, heads, heads, values].map(|cols| self.tensor(tokens, cols));
        let taps = self.small(shape.taps * shape.channels(), 1.0);
        let conv =
            self.backend.alloc(sluice_backend::MemoryClass::WeightsCopied, shape.taps, shape.channels()).unwrap();
        self.backend.upload(&taps, conv);
        let decay: Vec<f32> = self.small(heads, 2.0).into_iter().map(|x| 0.0 - x.abs()).collect();
        let (decay, dt_bias) = (self.vector(&decay), self.small(heads, 1.0));
        let dt_bias = self.vector(&dt_bias);
        let norm = self.norm(shape.value_dim);
        let [qkv, z, b, a] = [qkv, z, b, a].map(|p| p.tensor);
        let (to, sigmoid_gate) = (out.tensor, self.once_in(3));
        let inner = DeltaLayer { shape, qkv, z, b, a, out: to, conv, decay, dt_bias, norm, sigmoid_gate, layer };
        DeltaCase { inner, out }
    }
}

pub fn delta_rules(c: &mut Case) {
    let shape = c.delta_shape();
    steps(c, shape, &[1, 1, 5, 150]);
}

/// Heads as checkpoints have them, and no sequence with more than one token.
pub fn delta_rules_of_one_token(c: &mut Case) {
    let key_dim = c.one_of(&[64, 128]);
    let shape = DeltaShape { key_dim, ..c.delta_shape() };
    steps(c, shape, &[0, 1, 1, 1]);
}

/// Rows behind those of sequences, which keep states between tokens.
pub const KEPT: usize = 6;

impl Case {
    /// The inputs of a step of at most `most` tokens, which some of `rows` states of `len` elements go on with, each with up to one of `tokens` tokens. Rows of `kept` take states after
    /// some of these tokens.
    pub fn states_going_on(
        &mut self,
        (rows, len): (usize, usize),
        mut kept: Range<usize>,
        tokens: &[usize],
        most: usize,
    ) -> StepInputs {
        // 1. States come from somewhere
        let (from, to) = (self.random.u32(..rows as u32), self.random.u32(..rows as u32));
        match self.random.u8(..4) {
            0 => self.backend.zero_state(to),
            1 => self.backend.copy_state(from, to),
            2 => {
                let state = self.small(len, 1.0);
                self.backend.write_state(to, &state);
            }
            _ => {}
        }
        // 2. Some of them go on, in any order
        let mut states: Vec<u32> = (0..rows as u32).collect();
        self.random.shuffle(&mut states);
        states.truncate(self.random.usize(1..=rows));
        let mut inputs = inputs_for(&[]);
        let mut left = most;
        for state in states {
            let most = self.one_of(tokens).min(left);
            let n = if most > 1 { self.random.usize(1..=most) } else { most };
            self.shape(format!("{n} tokens of state {state}"));
            let tables: &[Vec<u32>] = &[];
            let (tokens, position) = (vec![0; n], self.random.usize(..50));
            inputs.push(&SequenceInput { tokens: &tokens, position, state, tables, wanted: Wanted::None });
            left -= n;
            // 3. States after its first tokens are kept too
            let most = kept.len().min(n.saturating_sub(1));
            if most > 0 && self.random.bool() {
                let end = kept.start + self.random.usize(1..=most);
                inputs.keep_states(kept.start as u32..end as u32);
                self.shape(format!("{} states kept", end - kept.start));
                kept.start = end;
            }
        }
        inputs
    }
}

/// Steps of sequences with up to so many tokens, one of these each.
fn steps(c: &mut Case, shape: DeltaShape, tokens: &[usize]) {
    const TOKENS: usize = 200;
    let (layers, rows) = (c.random.usize(1..=2), c.random.usize(1..=5));
    let len = layers * shape.state_len();
    c.shape(format!("{shape:?}, {layers} layers, {rows} states"));
    c.backend.alloc_states(rows + KEPT, len).unwrap();
    let layers: Vec<DeltaCase> = (0..layers).map(|l| c.delta_layer(shape, l, TOKENS)).collect();
    for _ in 0..c.random.usize(1..=3) {
        let inputs = c.states_going_on((rows, len), rows..rows + KEPT, tokens, TOKENS);
        if inputs.tokens().is_empty() {
            continue;
        }
        for layer in &layers {
            let DeltaLayer { qkv, z, b, a, .. } = layer.inner;
            [qkv, z].into_iter().for_each(|t| c.fill(t));
            for gates in [b, a] {
                let values = c.small(gates.rows * gates.cols, 4.0);
                c.backend.upload(&values, gates);
            }
        }
        c.backend.begin(&inputs);
        layers.iter().for_each(|l| c.backend.delta_net(&l.inner));
        c.backend.end();
        for (i, layer) in layers.iter().enumerate() {
            c.see(format!("layer {i}"), layer.out.whole);
        }
        c.see_states(rows + KEPT, len);
    }
}
