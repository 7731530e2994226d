//! Several residual streams (hyper-connections, attention residuals): what each half of a layer takes of them, and what becomes of them behind it.

use anyhow::Result;
use sluice_backend::{Elementwise, Linear, MatrixId, Norm, Operations, Projection, StreamLayer, Tensor};

use super::attended::AttendedBlock;
use crate::description::{
    ATTENDED_SCORES, ATTENDED_STREAM_PARTS, Description, GATED_STREAM_PARTS, LAST_ATTENDED_PARTS, LAST_ATTENDED_SCORE,
    LAST_STREAM_PARTS, STREAM_HEAD, STREAM_PARTS, StreamMixing, StreamsDescription,
};
use crate::weights::Weights;

/// The streams of a step, and what all blocks share.
#[derive(Clone, Copy)]
pub struct Streams {
    count: usize,
    /// `[max_tokens, count * hidden]`
    x: Tensor,
    /// What a block takes, and what it puts out: `[max_tokens, hidden]` each.
    inside: [Tensor; 2],
    shared: Shared,
}

/// What is between streams and blocks.
#[derive(Clone, Copy)]
enum Shared {
    /// The norm over all streams, and `[max_tokens, logits]`.
    Exchanged { norm: Norm, weights: Tensor, eps: f32, rounds: usize, has_head: bool },
    /// Streams, normed, and their gates: `[max_tokens, count * hidden]` each; what gates are made of, `[max_tokens, rank]`; and the logits of what is added, `[max_tokens, count]`.
    Gated { normed: Tensor, gates: Tensor, low: Tensor, logits: Tensor },
    /// One more begins in every so-manieth layer. `fused`: what makes scores is one vector.
    Attended { every: usize, fused: bool },
}

impl Streams {
    /// `None` for a model with one stream.
    pub fn alloc(w: &mut Weights, d: &Description) -> Result<Option<Streams>> {
        let Some(StreamsDescription { count, mixing }) = d.streams else { return Ok(None) };
        let all = count * d.hidden;
        let inside = [w.scratch(d.hidden)?, w.scratch(d.hidden)?];
        let x = w.scratch(all)?;
        let shared = match mixing {
            StreamMixing::Exchanged { eps, rounds, has_head } => {
                let (weights, norm) = (w.scratch((2 + count) * count)?, w.norm_without_weights(all)?);
                Shared::Exchanged { norm, weights, eps: eps as f32, rounds, has_head }
            }
            StreamMixing::Gated { rank } => Shared::Gated {
                normed: w.scratch(all)?,
                gates: w.scratch(all)?,
                low: w.scratch(rank)?,
                logits: w.scratch(count)?,
            },
            StreamMixing::Attended { every, fused } => Shared::Attended { every, fused },
        };
        Ok(Some(Streams { count, x, inside, shared }))
    }

    /// All streams: `[max_tokens, count * hidden]`.
    pub fn all(&self) -> Tensor {
        self.x
    }

    /// Both halves of layer `at`.
    pub fn blocks(&self, w: &mut Weights, at: usize) -> Result<[StreamBlock; 2]> {
        Ok([self.block(w, at, 0)?, self.block(w, at, 1)?])
    }

    fn block(&self, w: &mut Weights, at: usize, half: usize) -> Result<StreamBlock> {
        let mixture = match self.shared {
            Shared::Exchanged { weights, .. } => {
                Mixture::Exchanged(self.exchanged(w, Some(at), STREAM_PARTS[half], (weights, self.inside[0]))?)
            }
            Shared::Gated { logits, .. } => {
                let [norm, down, up, inject] = GATED_STREAM_PARTS[half];
                let inject = Projection { linear: w.linear(at, inject)?, out: logits };
                Mixture::Gated(self.gated(w, Some(at), [norm, down, up], Some(inject))?)
            }
            Shared::Attended { every, fused } => {
                let norm = match fused {
                    true => w.norm(at, ATTENDED_SCORES[half])?,
                    false => w.score_norm(Some(at), ATTENDED_STREAM_PARTS[half])?,
                };
                Mixture::Attended(AttendedBlock::new(norm, every, (at, half)))
            }
        };
        Ok(StreamBlock { mixture, streams: self.x, inside: self.inside })
    }

    /// What makes `x`, `[max_tokens, hidden]`, of them in the end.
    pub fn last(&self, w: &mut Weights, x: Tensor) -> Result<LastMixture> {
        Ok(match self.shared {
            Shared::Exchanged { has_head: false, .. } => LastMixture::Mean(self.x),
            Shared::Exchanged { weights, .. } => {
                let weights = weights.columns(0..self.count);
                LastMixture::Weighed(Box::new(self.exchanged(w, None, STREAM_HEAD, (weights, x))?))
            }
            Shared::Gated { .. } => LastMixture::Gated(Box::new(self.gated(w, None, LAST_STREAM_PARTS, None)?)),
            Shared::Attended { fused: true, .. } => LastMixture::Attended(self.x, w.norm(None, LAST_ATTENDED_SCORE)?),
            Shared::Attended { .. } => LastMixture::Attended(self.x, w.score_norm(None, LAST_ATTENDED_PARTS)?),
        })
    }

    fn exchanged(
        &self,
        w: &mut Weights,
        at: Option<usize>,
        [mix, base, scale]: [&str; 3],
        (weights, out): (Tensor, Tensor),
    ) -> Result<StreamLayer> {
        let Shared::Exchanged { norm, eps, rounds, .. } = self.shared else { unreachable!("streams that exchange") };
        let scales = w.host_vector(at, scale)?;
        let scale = |i: usize| scales.get(i).copied().unwrap_or(1.0);
        Ok(StreamLayer {
            streams: self.x,
            norm,
            mix: w.bare_linear(at, mix)?,
            bias: w.vector(at, base)?,
            scales: [scale(0), scale(1), scale(2)],
            eps,
            rounds,
            weights,
            out,
        })
    }

    fn gated(
        &self,
        w: &mut Weights,
        at: Option<usize>,
        [norm, down, up]: [&str; 3],
        inject: Option<Projection>,
    ) -> Result<GatedMixture> {
        let Shared::Gated { normed, gates, low, .. } = self.shared else { unreachable!("streams with gates") };
        let down = Projection { linear: w.linear(at, down)?, out: low };
        Ok(GatedMixture {
            count: self.count,
            streams: self.x,
            norm: w.norm(at, norm)?,
            normed,
            inputs: std::iter::once(down).chain(inject).collect(),
            up: w.linear(at, up)?,
            gates,
        })
    }

    /// The embedding of each of a step's tokens goes into all streams that there are at first.
    pub fn embed(&self, backend: &mut dyn Operations, (table, scale): (MatrixId, Option<f32>), tokens: usize) {
        let (x, hidden) = (self.x.first_rows(tokens), self.inside[0].cols);
        let count = if matches!(self.shared, Shared::Attended { .. }) { 1 } else { self.count };
        let x = x.columns(0..count * hidden);
        (0..count).for_each(|s| backend.embed(table, x.columns(s * hidden..(s + 1) * hidden)));
        if let Some(by) = scale {
            backend.elementwise(&Elementwise::Scale { x, by });
        }
    }
}

/// What a block takes of streams with gates.
pub struct GatedMixture {
    count: usize,
    streams: Tensor,
    /// Over each stream.
    norm: Norm,
    normed: Tensor,
    /// To what gates are made of, and to the logits of what is added to each stream.
    inputs: Vec<Projection>,
    up: Linear,
    gates: Tensor,
}

impl GatedMixture {
    fn forward(&self, backend: &mut dyn Operations, out: Tensor) {
        let [streams, normed, gates] = [self.streams, self.normed, self.gates].map(|t| t.first_rows(out.rows));
        let low = self.inputs[0].out.first_rows(out.rows);
        // 1. Normed streams
        backend.elementwise(&Elementwise::NormGroups { x: streams, norm: self.norm, group: out.cols, out: normed });
        // 2. Their gates
        backend.project(normed, None, &self.inputs);
        backend.elementwise(&Elementwise::DividedSilu { x: low, by: self.count as f32 });
        backend.project(low, None, &[Projection { linear: self.up.clone(), out: gates }]);
        // 3. The mean of what they let through
        backend.elementwise(&Elementwise::GatedMean { gates, streams: normed, out });
    }
}

/// What makes the head's input of the streams.
pub enum LastMixture {
    Mean(Tensor),
    Weighed(Box<StreamLayer>),
    Gated(Box<GatedMixture>),
    /// Streams that are attended to, and the norm that makes scores of them.
    Attended(Tensor, Norm),
}

impl LastMixture {
    /// The end of all layers.
    pub fn forward(&self, backend: &mut dyn Operations, out: Tensor) {
        match self {
            LastMixture::Mean(streams) => {
                backend.elementwise(&Elementwise::Mean { streams: streams.first_rows(out.rows), out });
            }
            LastMixture::Weighed(layer) => backend.collapse(layer),
            LastMixture::Gated(gated) => gated.forward(backend, out),
            LastMixture::Attended(streams, norm) => {
                let (streams, norm) = (streams.first_rows(out.rows), *norm);
                backend.elementwise(&Elementwise::AttendStreams { streams, norm, out });
            }
        }
    }
}

/// What a block takes of the streams.
enum Mixture {
    Exchanged(StreamLayer),
    Gated(GatedMixture),
    Attended(AttendedBlock),
}

/// One half of a layer between the streams.
pub struct StreamBlock {
    mixture: Mixture,
    streams: Tensor,
    /// What the half takes, and what it puts out.
    inside: [Tensor; 2],
}

impl StreamBlock {
    /// `block` adds to its second tensor what it makes of its first.
    pub fn forward(
        &self,
        backend: &mut dyn Operations,
        tokens: usize,
        block: impl FnOnce(&mut dyn Operations, Tensor, Tensor),
    ) {
        let [x, out] = self.inside.map(|t| t.first_rows(tokens));
        match &self.mixture {
            Mixture::Attended(own) => return own.forward(backend, self.streams.first_rows(tokens), x, block),
            Mixture::Exchanged(layer) => backend.collapse(layer),
            Mixture::Gated(gated) => gated.forward(backend, x),
        }
        backend.elementwise(&Elementwise::Zero { out });
        block(backend, x, out);
        let streams = self.streams.first_rows(tokens);
        match &self.mixture {
            Mixture::Exchanged(layer) => {
                let weights = layer.weights.first_rows(tokens);
                backend.elementwise(&Elementwise::Expand { x: out, weights, streams });
            }
            Mixture::Gated(gated) => {
                let logits = gated.inputs[1].out.first_rows(tokens);
                backend.elementwise(&Elementwise::Inject { x: out, logits, streams });
            }
            Mixture::Attended(_) => unreachable!("it adds to the last stream by itself"),
        }
    }
}
