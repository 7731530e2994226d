//! Steps of a small random model: each operation sees the results of those before it, without synchronisation in between.

use sluice_backend::{AttentionLayer, DeltaLayer, Linear, MatrixId, Mlp, MoeId, Norm, Projection, Tensor, Wanted};

use super::attention::{POSITIONS, inputs_for};
use super::{attention, delta_rule};
use crate::case::Case;

enum Mixer {
    Attention(Box<AttentionLayer>),
    Delta(Box<DeltaLayer>),
}

enum FeedForward {
    Dense(Norm, Box<Mlp>),
    Moe(MoeId),
}

struct ModelLayer {
    norm: Norm,
    projections: Vec<Projection>,
    mixer: Mixer,
    mixed: Tensor,
    out: Linear,
    feed_forward: FeedForward,
}

impl Case {
    /// Projections of `hidden` columns that fill these tensors.
    fn projections(&mut self, hidden: usize, outs: &[Tensor]) -> Vec<Projection> {
        outs.iter().map(|&out| Projection { linear: self.linear(out.cols, hidden, false), out }).collect()
    }

    /// A dense or a mixed second half; `before`: the mixture of the layer right before.
    fn feed_forward(&mut self, hidden: usize, before: Option<MoeId>) -> FeedForward {
        let intermediate = 32 * self.random.usize(1..=5);
        if self.coin() {
            return FeedForward::Dense(self.norm(hidden), Box::new(self.mlp(hidden, intermediate)));
        }
        let (count, stacked) = (self.random.usize(2..=12), self.coin());
        let drawn = self.experts(count, hidden, intermediate, stacked);
        let ids: Vec<MatrixId> = drawn.matrices.iter().map(|parts| self.register(parts)).collect();
        let moe = self.mixture(drawn.known(&ids));
        FeedForward::Moe(self.backend.moe(moe, before).expect("a mixture"))
    }
}

pub fn whole_steps(c: &mut Case) {
    const TOKENS: usize = 48;
    const SEQUENCES: usize = 3;
    let (hidden, vocabulary) = (32 * c.random.usize(1..=5), c.random.usize(2..150));
    // 1. The model
    let mut groups = Vec::new();
    for number in 0..c.random.usize(..=2) {
        let group = c.group(number, (SEQUENCES + 1) * POSITIONS, TOKENS);
        groups.push(group);
    }
    let mut mixers: Vec<(Mixer, Tensor)> = Vec::new();
    for attention::AttentionCase { inner, out } in groups.iter_mut().flat_map(|g| g.layers.drain(..)) {
        mixers.push((Mixer::Attention(Box::new(inner)), out.tensor));
    }
    let recurrent = if mixers.is_empty() { 2 } else { c.random.usize(..=2) };
    if recurrent > 0 {
        let shape = c.delta_shape();
        c.shape(format!("{recurrent} layers of {shape:?}"));
        c.backend.alloc_states(SEQUENCES, recurrent * shape.state_len()).unwrap();
        for layer in 0..recurrent {
            let delta_rule::DeltaCase { inner, out } = c.delta_layer(shape, layer, TOKENS);
            mixers.push((Mixer::Delta(Box::new(inner)), out.tensor));
        }
    }
    c.random.shuffle(&mut mixers);
    let (mut layers, mut before) = (Vec::new(), None);
    for (mixer, mixed) in mixers {
        let ins = match &mixer {
            Mixer::Attention(a) => vec![a.q, a.k, a.v],
            Mixer::Delta(d) => vec![d.qkv, d.z, d.b, d.a],
        };
        let projections = c.projections(hidden, &ins);
        let (norm, out) = (c.norm(hidden), c.linear(hidden, mixed.cols, false));
        let feed_forward = c.feed_forward(hidden, before);
        before = if let FeedForward::Moe(moe) = &feed_forward { Some(*moe) } else { None };
        layers.push(ModelLayer { norm, projections, mixer, mixed, out, feed_forward });
    }
    let (table, head, last) = (c.matrix(vocabulary, hidden), c.matrix(vocabulary, hidden), c.norm(hidden));
    let x = c.tensor(TOKENS, hidden);
    // 2. Steps of several sequences
    let mut sequences = Vec::new();
    for state in 0..SEQUENCES as u32 {
        let mut sequence = c.begun(&mut groups, 0);
        sequence.state = state;
        sequences.push(sequence);
    }
    for _ in 0..4 {
        let mut inputs = inputs_for(&groups);
        let mut left = TOKENS;
        for s in &mut sequences {
            let most = c.one_of(&[0, 1, 1, 20]).min(left);
            let n = if most > 1 { c.random.usize(1..=most) } else { most };
            if n > 0 {
                c.shape(format!("{n} tokens from {}", s.len));
                c.take(&mut groups, s, n, vocabulary as u32, Wanted::All, &mut inputs);
                left -= n;
            }
        }
        let tokens = inputs.tokens().len();
        if tokens == 0 {
            continue;
        }
        let b = &mut *c.backend;
        let x = x.tensor.first_rows(tokens);
        b.begin(&inputs);
        b.embed(table, x);
        for layer in &layers {
            b.project(x, Some(layer.norm), &layer.projections);
            match &layer.mixer {
                Mixer::Attention(attention) => b.attention(attention),
                Mixer::Delta(delta) => b.delta_net(delta),
            }
            b.project_add(layer.mixed.first_rows(tokens), &layer.out, x);
            match &layer.feed_forward {
                FeedForward::Dense(norm, mlp) => b.mlp(x, *norm, mlp, x),
                FeedForward::Moe(moe) => b.mixture(x, *moe, x),
            }
        }
        b.logits(x, Some(last), head, None);
        let logits = b.end().logits;
        let rows = b.read_logits(logits).to_vec();
        c.see_floats("logits", vocabulary, rows);
    }
}
