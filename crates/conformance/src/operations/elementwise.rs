//! Work on each element or head between the fused operations.

use sluice_backend::{Elementwise, RowFactors};

use super::attention::POSITIONS;
use crate::case::Case;

pub fn elementwise(c: &mut Case) {
    let tokens = c.tokens();
    let (head, heads) = (2 * c.random.usize(1..=130), c.random.usize(1..=5));
    let cols = head * heads;
    let (x, other, norm) = (c.tensor(tokens, cols), c.tensor(tokens, cols), c.norm(cols));
    c.shape(format!("{tokens} tokens, {heads} heads of {head}, x {x}, other {other}"));
    let (a, b) = (x.tensor, other.tensor);
    let by = c.small(1, 30.0)[0];
    c.step(tokens, |backend| {
        backend.elementwise(&Elementwise::Scale { x: a, by });
        backend.elementwise(&Elementwise::SplitPairs { x: a, head });
        backend.elementwise(&Elementwise::GeGlu { gate: a, up: b });
    });
    c.see("gate", x.whole);
    let pairs = c.random.usize(1..=head / 2);
    let (rotary, back) = (c.rotary(pairs, POSITIONS), c.coin());
    c.step(tokens, |backend| backend.elementwise(&Elementwise::TurnPairs { x: a, head, rotary, back }));
    c.see("turned", x.whole);
    // A norm over all columns, or over each head.
    let of_heads = c.norm(head);
    let norm = if c.coin() { norm } else { of_heads };
    let out = c.tensor(tokens, cols);
    c.step(tokens, |backend| backend.elementwise(&Elementwise::Norm { x: a, norm, out: out.tensor }));
    c.see("normed", out.whole);
    c.step(tokens, |backend| backend.elementwise(&Elementwise::Zero { out: out.tensor }));
    c.see("zeros", out.whole);
    // Columns in any order, of a part of them or with some more than once.
    let gathered = c.random.usize(1..=2 * cols);
    let numbers: Vec<f32> = (0..gathered).map(|_| c.random.usize(0..=cols - 1) as f32).collect();
    let (order, to) = (c.vector(&numbers), c.tensor(tokens, gathered));
    c.step(tokens, |backend| backend.elementwise(&Elementwise::Gather { x: b, order, out: to.tensor }));
    c.see("gathered", to.whole);
    let (steps, period) = (c.random.usize(1..=5), c.random.usize(1..=9));
    let table = c.tensor(1, steps).tensor;
    c.step(tokens, |backend| {
        backend.elementwise(&Elementwise::SwiGlu { gate: a, up: b });
        backend.elementwise(&Elementwise::ClampedSwiGlu { gate: a, up: b, limit: 0.7 });
        backend.elementwise(&Elementwise::SiTu { gate: a, up: b, beta: 0.8, linear: 1.3 });
        backend.elementwise(&Elementwise::SigmoidGate { x: a, gate: b });
        backend.elementwise(&Elementwise::Norm { x: a, norm, out: a });
        backend.elementwise(&Elementwise::ScaleRows { x: a, factors: RowFactors { table, period } });
    });
    c.see("scaled", x.whole);
    // The contents of `x` afterwards are not promised.
    c.step(tokens, |backend| backend.elementwise(&Elementwise::AddNormed { x: a, norm, residual: b }));
    c.see("residual", other.whole);
}
