//! Delta rules with a decay for each channel, over a pool of recurrent states.

use sluice_backend::{ChannelDeltaLayer, DeltaShape, MemoryClass};

use crate::case::{Case, Placed};
use crate::operations::delta_rule::KEPT;

struct ChannelDeltaCase {
    inner: ChannelDeltaLayer,
    out: Placed,
}

impl Case {
    /// Recurrent layer `layer`, for steps of at most `tokens` tokens.
    fn channel_delta_layer(&mut self, shape: DeltaShape, layer: usize, tokens: usize) -> ChannelDeltaCase {
        let (heads, values, keys) =
            (shape.value_heads, shape.value_heads * shape.value_dim, shape.value_heads * shape.key_dim);
        let [qkv, z, b, f, out] = [shape.channels(), values, heads, keys, values].map(|cols| self.tensor(tokens, cols));
        let taps = self.small(shape.taps * shape.channels(), 1.0);
        let conv = self.backend.alloc(MemoryClass::WeightsCopied, shape.taps, shape.channels()).unwrap();
        self.backend.upload(&taps, conv);
        let rates: Vec<f32> = self.small(heads, 2.0).into_iter().map(|x| 0.0 - x.abs()).collect();
        let (rates, dt_bias) = (self.vector(&rates), self.small(keys, 1.0));
        let dt_bias = self.vector(&dt_bias);
        let bound = self.coin().then_some(-5.0);
        let norm = self.norm(shape.value_dim);
        let [qkv, z, b, f] = [qkv, z, b, f].map(|p| p.tensor);
        let inner =
            ChannelDeltaLayer { shape, qkv, z, b, f, out: out.tensor, conv, rates, dt_bias, bound, norm, layer };
        ChannelDeltaCase { inner, out }
    }
}

pub fn channel_deltas(c: &mut Case) {
    const TOKENS: usize = 200;
    let drawn = c.delta_shape();
    let shape = DeltaShape { value_heads: drawn.key_heads, tiled: false, ..drawn };
    let (layers, rows) = (c.random.usize(1..=2), c.random.usize(1..=5));
    let len = layers * shape.state_len();
    c.shape(format!("{shape:?}, {layers} layers, {rows} states"));
    c.backend.alloc_states(rows + KEPT, len).unwrap();
    let layers: Vec<ChannelDeltaCase> = (0..layers).map(|l| c.channel_delta_layer(shape, l, TOKENS)).collect();
    for _ in 0..c.random.usize(1..=3) {
        let inputs = c.states_going_on((rows, len), rows..rows + KEPT, &[1, 1, 5, 150], TOKENS);
        if inputs.tokens().is_empty() {
            continue;
        }
        for layer in &layers {
            let ChannelDeltaLayer { qkv, z, b, f, .. } = layer.inner;
            [qkv, z].into_iter().for_each(|t| c.fill(t));
            for gates in [b, f] {
                let values = c.small(gates.rows * gates.cols, 4.0);
                c.backend.upload(&values, gates);
            }
        }
        c.backend.begin(&inputs);
        layers.iter().for_each(|l| c.backend.channel_delta(&l.inner));
        c.backend.end();
        for (i, layer) in layers.iter().enumerate() {
            c.see(format!("layer {i}"), layer.out.whole);
        }
        c.see_states(rows + KEPT, len);
    }
}
