//! Mamba-2's layers over a pool of recurrent states.

use sluice_backend::{MemoryClass, StateSpaceLayer, StateSpaceShape};

use crate::case::{Case, Placed};
use crate::operations::delta_rule::KEPT;

struct StateSpaceCase {
    inner: StateSpaceLayer,
    out: Placed,
}

impl Case {
    fn state_space_shape(&mut self) -> StateSpaceShape {
        let groups = self.random.usize(1..=3);
        StateSpaceShape {
            heads: groups * self.random.usize(1..=4),
            head_dim: self.one_of(&[4, 8, 16, 24, 64, 72, 128]),
            groups,
            state: self.one_of(&[4, 6, 16, 20, 64, 128]),
            taps: self.random.usize(2..=5),
        }
    }

    /// Recurrent layer `layer`, for steps of at most `tokens` tokens.
    fn state_space_layer(&mut self, shape: StateSpaceShape, layer: usize, tokens: usize) -> StateSpaceCase {
        let (heads, inner, channels) = (shape.heads, shape.inner(), shape.channels());
        let [xbc, z, dt, out] = [channels, inner, heads, inner].map(|cols| self.tensor(tokens, cols));
        let taps = self.small(shape.taps * channels, 1.0);
        let conv = self.backend.alloc(MemoryClass::WeightsCopied, shape.taps, channels).unwrap();
        self.backend.upload(&taps, conv);
        let conv_bias = self.coin().then(|| self.small(channels, 0.5)).map(|bias| self.vector(&bias));
        let decay: Vec<f32> = self.small(heads, 2.0).into_iter().map(|x| 0.0 - x.abs()).collect();
        let decay = self.vector(&decay);
        let [dt_bias, skip] = [1.0, 1.5].map(|size| self.small(heads, size)).map(|values| self.vector(&values));
        let norm = self.norm(inner);
        let [xbc, z, dt] = [xbc, z, dt].map(|p| p.tensor);
        let out_tensor = out.tensor;
        let inner =
            StateSpaceLayer { shape, xbc, z, dt, out: out_tensor, conv, conv_bias, decay, dt_bias, skip, norm, layer };
        StateSpaceCase { inner, out }
    }
}

pub fn state_spaces(c: &mut Case) {
    const TOKENS: usize = 200;
    let shape = c.state_space_shape();
    let (layers, rows) = (c.random.usize(1..=2), c.random.usize(1..=5));
    let len = layers * shape.state_len();
    c.shape(format!("{shape:?}, {layers} layers, {rows} states"));
    c.backend.alloc_states(rows + KEPT, len).unwrap();
    let layers: Vec<StateSpaceCase> = (0..layers).map(|l| c.state_space_layer(shape, l, TOKENS)).collect();
    for _ in 0..c.random.usize(1..=3) {
        let inputs = c.states_going_on((rows, len), rows..rows + KEPT, &[1, 1, 5, 150], TOKENS);
        for layer in &layers {
            let StateSpaceLayer { xbc, z, dt, .. } = layer.inner;
            [xbc, z].into_iter().for_each(|t| c.fill(t));
            let values = c.small(dt.rows * dt.cols, 4.0);
            c.backend.upload(&values, dt);
        }
        c.backend.begin(&inputs);
        layers.iter().for_each(|l| c.backend.state_space(&l.inner));
        c.backend.end();
        for (i, layer) in layers.iter().enumerate() {
            c.see(format!("layer {i}"), layer.out.whole);
        }
        c.see_states(rows + KEPT, len);
    }
}
