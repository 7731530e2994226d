//! Several residual streams: what a block takes of them, and what becomes of them behind it.

use sluice_backend::{Elementwise, MemoryClass, NgramLayer, Norm, StreamLayer};

use crate::case::Case;

use super::delta_rule::KEPT;

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

/// Streams with gates: their norms, what a block takes, and what it adds.
pub fn gated_streams(c: &mut Case) {
    let (tokens, n, hidden) = (c.tokens(), c.one_of(&[1, 2, 3, 4, 4, 8]), c.one_of(&[1, 7, 32, 64, 100, 300]));
    let all = n * hidden;
    let [streams, normed, gates, logits, x] =
        [all, all, all, n, hidden].map(|cols| c.tensor(tokens + usize::from(cols > 30), cols));
    let norm = c.norm(all);
    c.shape(format!("{tokens} tokens, {n} streams {streams} of {hidden}"));
    let [own, to, of_gates, of_logits, out] = [streams, normed, gates, logits, x].map(|placed| placed.tensor);
    let in_place = c.once_in(4);
    c.step(tokens, |backend| {
        backend.elementwise(&Elementwise::DividedSilu { x: of_gates, by: n as f32 });
        backend.elementwise(&Elementwise::NormGroups { x: own, norm, group: hidden, out: to });
        backend.elementwise(&Elementwise::GatedMean { gates: of_gates, streams: to, out });
        backend.elementwise(&Elementwise::Inject { x: out, logits: of_logits, streams: own });
        if in_place {
            backend.elementwise(&Elementwise::NormGroups { x: own, norm, group: hidden, out: own });
        }
    });
    for (name, placed) in [("normed", normed), ("gates", gates), ("input", x), ("streams", streams)] {
        c.see(name, placed.whole);
    }
}

/// Streams that are attended to.
pub fn attended_streams(c: &mut Case) {
    let (tokens, n, hidden) = (c.tokens(), c.one_of(&[1, 2, 4, 9, 16]), c.one_of(&[1, 7, 32, 64, 100, 300]));
    let [streams, out] = [n * hidden, hidden].map(|cols| c.tensor(tokens + usize::from(cols > 30), cols));
    let norm = c.norm(hidden);
    c.shape(format!("{tokens} tokens, {n} streams {streams} of {hidden}"));
    let (of_all, out_of) = (streams.tensor, out.tensor);
    c.step(tokens, |backend| {
        backend.elementwise(&Elementwise::AttendStreams { streams: of_all, norm, out: out_of });
    });
    c.see("input", out.whole);
}

/// N-grams on their way into streams, over a pool of states that have other layers' in front.
pub fn ngrams(c: &mut Case) {
    const TOKENS: usize = 100;
    let (n, hidden) = (c.one_of(&[1, 2, 4, 4, 8]), c.one_of(&[1, 7, 32, 64, 100]));
    let (all, taps, front) = (n * hidden, c.one_of(&[1, 2, 4, 7, 10]), c.random.usize(..40));
    let (len, rows) = (front + (taps - 1) * all + 3, c.random.usize(1..=5));
    c.shape(format!("{n} streams of {hidden}, {taps} taps from {front} on, {rows} states"));
    c.backend.alloc_states(rows + KEPT, len).unwrap();
    let [keys, queries, value, streams] = [all, all, hidden, all].map(|cols| c.tensor(TOKENS, cols));
    let Norm { weight, eps } = c.norm(all);
    let values = c.small(taps * all, 1.0);
    let conv = c.backend.alloc(MemoryClass::WeightsCopied, taps, all).unwrap();
    c.backend.upload(&values, conv);
    let layer = NgramLayer {
        keys: keys.tensor,
        queries: queries.tensor,
        value: value.tensor,
        streams: streams.tensor,
        norm: Norm { weight, eps },
        conv,
        state_at: front,
    };
    for _ in 0..c.random.usize(1..=3) {
        let inputs = c.states_going_on((rows, len), rows..rows + KEPT, &[1, 1, 5, 60], TOKENS);
        if inputs.tokens().is_empty() {
            continue;
        }
        [layer.keys, layer.queries, layer.value, layer.streams].into_iter().for_each(|t| c.fill(t));
        if c.once_in(3) {
            c.backend.upload(&vec![0.0; TOKENS * all], layer.keys);
        }
        c.backend.begin(&inputs);
        c.backend.add_ngrams(&layer);
        c.backend.end();
        c.see("streams", streams.whole);
        c.see_states(rows + KEPT, len);
    }
}
