//! Several residual streams (hyper-connections): what each half of a layer takes of them, and what becomes of them behind it.

use anyhow::Result;
use sluice_backend::{Elementwise, MatrixId, Norm, Operations, StreamLayer, Tensor};

use crate::description::{Description, STREAM_HEAD, STREAM_PARTS, StreamsDescription};
use crate::weights::Weights;

/// The streams of a step, and what all blocks share.
#[derive(Clone, Copy)]
pub struct Streams {
    own: StreamsDescription,
    /// `[max_tokens, count * hidden]`
    x: Tensor,
    /// Over all streams.
    norm: Norm,
    /// What a block takes, and what it puts out: `[max_tokens, hidden]` each.
    inside: [Tensor; 2],
    /// `[max_tokens, logits]`
    weights: Tensor,
}

/// What makes one of the streams behind the last layer.
pub enum StreamsEnd {
    Mean,
    Mixture(Box<StreamLayer>),
}

impl Streams {
    /// `None` for a model with one stream.
    pub fn alloc(w: &mut Weights, d: &Description) -> Result<Option<Streams>> {
        let Some(own) = d.streams else { return Ok(None) };
        let all = own.count * d.hidden;
        let inside = [w.scratch(d.hidden)?, w.scratch(d.hidden)?];
        let (x, weights, norm) = (w.scratch(all)?, w.scratch(own.logits())?, w.norm_without_weights(all)?);
        Ok(Some(Streams { own, x, norm, inside, weights }))
    }

    /// Both halves of layer `at`.
    pub fn blocks(&self, w: &mut Weights, at: usize) -> Result<[StreamBlock; 2]> {
        let [attention, feed_forward] = STREAM_PARTS;
        Ok([self.block(w, at, attention)?, self.block(w, at, feed_forward)?])
    }

    fn block(&self, w: &mut Weights, at: usize, parts: [&str; 3]) -> Result<StreamBlock> {
        let layer = self.layer(w, Some(at), parts, (self.weights, self.inside[0]))?;
        Ok(StreamBlock { layer, out: self.inside[1] })
    }

    fn layer(
        &self,
        w: &mut Weights,
        at: Option<usize>,
        [mix, base, scale]: [&str; 3],
        (weights, out): (Tensor, Tensor),
    ) -> Result<StreamLayer> {
        let scales = w.host_vector(at, scale)?;
        let scale = |i: usize| scales.get(i).copied().unwrap_or(1.0);
        Ok(StreamLayer {
            streams: self.x,
            norm: self.norm,
            mix: w.bare_linear(at, mix)?,
            bias: w.vector(at, base)?,
            scales: [scale(0), scale(1), scale(2)],
            eps: self.own.eps as f32,
            rounds: self.own.rounds,
            weights,
            out,
        })
    }

    /// What makes `x`, `[max_tokens, hidden]`, of them in the end.
    pub fn ending(&self, w: &mut Weights, x: Tensor) -> Result<StreamsEnd> {
        if !self.own.has_head {
            return Ok(StreamsEnd::Mean);
        }
        let weights = self.weights.columns(0..self.own.count);
        Ok(StreamsEnd::Mixture(Box::new(self.layer(w, None, STREAM_HEAD, (weights, x))?)))
    }

    /// The embedding of each of a step's tokens goes into all streams.
    pub fn embed(&self, backend: &mut dyn Operations, (table, scale): (MatrixId, Option<f32>), tokens: usize) {
        let (x, hidden) = (self.x.first_rows(tokens), self.inside[0].cols);
        (0..self.own.count).for_each(|s| backend.embed(table, x.columns(s * hidden..(s + 1) * hidden)));
        if let Some(by) = scale {
            backend.elementwise(&Elementwise::Scale { x, by });
        }
    }

    /// The end of all layers.
    pub fn end(&self, backend: &mut dyn Operations, end: &StreamsEnd, out: Tensor) {
        match end {
            StreamsEnd::Mean => backend.elementwise(&Elementwise::Mean { streams: self.x.first_rows(out.rows), out }),
            StreamsEnd::Mixture(layer) => backend.collapse(layer),
        }
    }
}

/// One half of a layer between the streams.
pub struct StreamBlock {
    layer: StreamLayer,
    /// What the half puts out.
    out: Tensor,
}

impl StreamBlock {
    /// `block` adds to its second tensor what it makes of its first.
    pub fn forward(
        &self,
        backend: &mut dyn Operations,
        tokens: usize,
        block: impl FnOnce(&mut dyn Operations, Tensor, Tensor),
    ) {
        let [x, out] = [self.layer.out, self.out].map(|t| t.first_rows(tokens));
        backend.collapse(&self.layer);
        backend.elementwise(&Elementwise::Zero { out });
        block(backend, x, out);
        let [weights, streams] = [self.layer.weights, self.layer.streams].map(|t| t.first_rows(tokens));
        backend.elementwise(&Elementwise::Expand { x: out, weights, streams });
    }
}
