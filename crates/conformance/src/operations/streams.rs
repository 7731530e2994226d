//! Several residual streams: what a block takes of them, and what becomes of them behind it.

use sluice_backend::{Elementwise, StreamLayer};

use crate::case::Case;

pub fn streams(c: &mut Case) {
    let (tokens, n, hidden) = (c.tokens(), c.one_of(&[1, 2, 3, 4, 4, 8]), c.one_of(&[1, 7, 32, 64, 100, 300]));
    let (all, logits) = (n * hidden, (2 + n) * n);
    let [streams, weights, out, mean] =
        [all, logits, hidden, hidden].map(|cols| c.tensor(tokens + usize::from(cols > 30), cols));
    let (norm, mix, bias) = (c.norm(all), c.linear(logits, all, false), c.small(logits, 1.0));
    let scales = c.small(3, 2.0);
    let layer = StreamLayer {
        streams: streams.tensor,
        norm,
        mix,
        bias: c.vector(&bias),
        scales: [scales[0], scales[1], scales[2]],
        eps: 1e-6,
        rounds: c.one_of(&[1, 2, 20]),
        weights: weights.tensor,
        out: out.tensor,
    };
    c.shape(format!("{tokens} tokens, {n} streams {streams} of {hidden}, {} rounds", layer.rounds));
    c.step(tokens, |backend| backend.collapse(&layer));
    c.see("weights", weights.whole);
    c.see("input", out.whole);
    let (x, weights) = (layer.out, layer.weights);
    c.step(tokens, |backend| {
        backend.elementwise(&Elementwise::Expand { x, weights, streams: layer.streams });
        backend.elementwise(&Elementwise::Mean { streams: layer.streams, out: mean.tensor });
    });
    c.see("streams", streams.whole);
    c.see("mean", mean.whole);
    // One mixture of them, and nothing back.
    let (inward, mix, bias) = (c.tensor(tokens, n), c.linear(n, all, false), c.small(n, 1.0));
    let head = StreamLayer { mix, bias: c.vector(&bias), weights: inward.tensor, ..layer };
    c.step(tokens, |backend| backend.collapse(&head));
    c.see("weights of the last", inward.whole);
    c.see("the last", out.whole);
}
