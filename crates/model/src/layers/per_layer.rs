//! Embeddings for each layer (Gemma 3n, Gemma 4). They are the sum of a token's row in a large table, and of a projection of the token's embedding.

use anyhow::Result;
use sluice_backend::{Elementwise, MatrixId, Norm, Operations, Projection, Tensor};

use super::ordered::Output;
use crate::description::{Description, PER_LAYER_TABLE, PerLayerDescription};
use crate::weights::Weights;

/// The embeddings of a step's tokens for all layers.
pub struct PerLayer {
    table: MatrixId,
    /// What rows of the table are multiplied by.
    scale: f32,
    /// From a token's embedding to the projected part for all layers, `[tokens, layers * width]`.
    projection: Projection,
    /// The norm of the projected part, layer by layer.
    norm: Norm,
    /// The sum of both: `[tokens, layers * width]`.
    rows: Tensor,
    width: usize,
    /// The output of a layer's gate: `[tokens, width]`.
    gated: Tensor,
}

impl PerLayer {
    /// Loads what is outside of layers, for a model that has such embeddings.
    pub fn load(w: &mut Weights, d: &Description, own: PerLayerDescription) -> Result<PerLayer> {
        let PerLayerDescription { width, .. } = own;
        let all = width * d.layers.len();
        // Both parts are divided by the root of 2. The table's scale and the norm's weights include that factor.
        let half = std::f64::consts::FRAC_1_SQRT_2;
        let scale = (f64::from(w.rounded((width as f64).sqrt())?) * half) as f32;
        let linear = w.linear(None, "per_layer_model_projection")?;
        let norm = w.scaled_norm(None, "per_layer_projection_norm", Some(half))?;
        // The reference divides the projected part by the root of the width before the norm. That changes nothing but the epsilon.
        let norm = Norm { eps: (d.eps * d.hidden as f64) as f32, ..norm };
        let [context, rows, gated] = [w.scratch(all)?, w.scratch(all)?, w.scratch(width)?];
        let projection = Projection { linear, out: context };
        Ok(PerLayer { table: w.table(PER_LAYER_TABLE)?, scale, projection, norm, rows, width, gated })
    }

    /// Enqueues what needs the tokens' embeddings `x`, `[tokens, hidden]`.
    pub fn project(&self, backend: &mut dyn Operations, x: Tensor) {
        backend.project(x, None, std::slice::from_ref(&self.projection));
    }

    /// Enqueues what needs the table, after [`PerLayer::project`]. It may come from a disk, so this is called as late as possible.
    pub fn embed(&self, backend: &mut dyn Operations, tokens: usize) {
        let [rows, context] = [self.rows, self.projection.out].map(|t| t.first_rows(tokens));
        backend.embed(self.table, rows);
        backend.elementwise(&Elementwise::Scale { x: rows, by: self.scale });
        backend.elementwise(&Elementwise::AddNormed { x: context, norm: self.norm, residual: rows });
    }

    /// What layer `at` does with its part.
    pub fn layer(&self, w: &mut Weights, at: usize, branch: Tensor) -> Result<PerLayerBlock> {
        let out = w.ordered_linear(at, "per_layer_projection")?;
        let branch = (branch, w.norm(at, "post_per_layer_input_norm")?);
        Ok(PerLayerBlock {
            gate: Projection { linear: w.linear(at, "per_layer_input_gate")?, out: self.gated },
            rows: self.rows.columns(at * self.width..(at + 1) * self.width),
            out: Output::new(w, out, Some(branch))?,
        })
    }
}

/// The end of a layer, which adds the layer's own embedding.
pub struct PerLayerBlock {
    gate: Projection,
    /// `[tokens, width]`
    rows: Tensor,
    out: Output,
}

impl PerLayerBlock {
    /// `x += norm(out(gelu(gate(x)) * own embedding))`
    pub fn forward(&self, backend: &mut dyn Operations, x: Tensor) {
        backend.project(x, None, std::slice::from_ref(&self.gate));
        let [gate, up] = [self.gate.out, self.rows].map(|t| t.first_rows(x.rows));
        backend.elementwise(&Elementwise::GeGlu { gate, up });
        self.out.add(backend, gate, x);
    }
}
