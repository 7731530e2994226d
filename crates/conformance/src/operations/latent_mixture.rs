//! Mixtures whose experts take another input than their router (Nemotron 3 Super, Kimi-K3).

use sluice_backend::{ExpertKind, Float, MatrixId, Moe, MoeId, WeightFormat};

use super::mixture::Drawn;
use super::streamed::{layers, on_disk, stream};
use crate::case::{Case, Placed};
use crate::setup::CAPACITY;

/// Draws what experts compute, a kind for each layer.
fn draw_kinds(c: &mut Case, drawn: &mut [Drawn]) {
    for drawn in drawn {
        match c.random.u8(..5) {
            0 => {}
            1 => drawn.experts.kind = ExpertKind::GeGlu,
            2 => drawn.make_ungated(),
            _ => drawn.experts.kind = ExpertKind::SiTu { beta: 0.6, linear: 1.1 },
        }
        c.shape(format!("{:?}", drawn.experts.kind));
    }
}

/// Makes a chain of mixtures known, whose routers take `hidden` columns, and what their experts take.
fn known(
    c: &mut Case,
    drawn: &[Drawn],
    ids: &[Vec<MatrixId>],
    (hidden, small): (usize, usize),
) -> (Vec<MoeId>, Placed) {
    let taken = c.tensor(CAPACITY.tokens, small);
    let (mut all, mut before) = (Vec::new(), None);
    for (drawn, ids) in drawn.iter().zip(ids) {
        let moe = c.mixture(drawn.known(ids));
        let norm = moe.norm.map(|_| c.norm(hidden));
        let router = c.router(moe.experts.count, hidden);
        let moe = Moe { norm, router, latent: Some(taken.tensor), shared: None, ..moe };
        before = Some(c.backend.moe(moe, before).expect("a mixture"));
        all.extend(before);
    }
    (all, taken)
}

/// Steps of one, a few or many tokens.
fn compute(c: &mut Case, moes: &[MoeId], taken: Placed, (hidden, small): (usize, usize)) {
    for _ in 0..3 {
        let few = c.one_of(&[1, 1, 2, 5]);
        let tokens = if c.coin() { few } else { c.tokens() };
        let (x, out) = (c.tensor(tokens, hidden), c.tensor(tokens, small));
        c.fill(taken.whole);
        c.shape(format!("{tokens} tokens, x {x}, experts take {taken} and add to {out}"));
        let outcome = c.step(tokens, |b| moes.iter().for_each(|moe| b.mixture(x.tensor, *moe, out.tensor)));
        c.see("what experts add", out.whole);
        c.see_routing(&outcome);
    }
}

pub fn mapped(c: &mut Case) {
    // Now and then as in real checkpoints, for which backends have faster kernels.
    let usual = c.once_in(3);
    if usual {
        c.uniform = Some(WeightFormat::Affine { bits: c.one_of(&[4, 8]), group: 64, scale: Float::Bf16 });
    }
    let sizes = if usual { (256, 128) } else { (c.cols().min(256), c.cols().min(160)) };
    let mut drawn = Vec::new();
    for _ in 0..c.random.usize(1..=2) {
        let (count, stacked) = (c.random.usize(1..=12), c.coin());
        let intermediate = if usual { 64 } else { c.cols().min(160) };
        drawn.push(c.experts(count, sizes.1, intermediate, stacked));
    }
    draw_kinds(c, &mut drawn);
    let ids: Vec<Vec<MatrixId>> =
        drawn.iter().map(|d| d.matrices.iter().map(|parts| c.register(parts)).collect()).collect();
    let (moes, taken) = known(c, &drawn, &ids, sizes);
    c.uniform = None;
    if c.once_in(3) {
        c.backend.record_routing();
    }
    compute(c, &moes, taken, sizes);
}

/// The same with experts that stay on disk.
pub fn streamed(c: &mut Case) {
    let sizes = (c.cols().min(256), c.cols().min(256));
    let stacked = c.coin();
    let mut drawn = layers(c, sizes.1, stacked);
    draw_kinds(c, &mut drawn);
    let runs: Vec<_> = drawn.iter().enumerate().map(|(l, d)| (l, (0..d.matrices.len()).collect())).collect();
    let ids = on_disk(c, &drawn, &runs).matrices;
    let (moes, taken) = known(c, &drawn, &ids, sizes);
    stream(c, vec![], drawn.len(), 1 << 19);
    compute(c, &moes, taken, sizes);
}
