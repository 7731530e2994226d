//! The operations that a model is written in.

use crate::{
    AttentionLayer, ChannelDeltaLayer, CompressLayer, CompressedLayer, DeltaLayer, Elementwise, IndexLayer,
    LatentLayer, Linear, MatrixId, Mlp, MoeId, NgramLayer, NgramTable, Norm, Projection, Routing, SelectLayer,
    StateSpaceLayer, StreamLayer, Tensor,
};

/// What a step computes, one method per fused operation. Shapes stand at the arguments; `tokens` is the number of rows of the step.
///
/// An operation only enqueues work. Tensors may be parts of larger ones, at any offset and stride; the rest of the larger tensor stays as it is. A tensor that
/// is written may have more rows than the step. Results do not depend on how tokens are divided among steps (`docs/numerics.md`).
///
/// Devices implement this trait together with [`crate::Backend`]. A type that only measures a step (how much scratch memory it needs, say) implements this
/// trait alone; [`crate::Resources::step_scratch`] takes a model through one.
pub trait Operations {
    /// `out[t] = table[tokens[t]]`. `out`: `[tokens, table's columns]`.
    fn embed(&mut self, table: MatrixId, out: Tensor);
    /// The rows of each token's n-grams, one after the other. `out`: `[tokens, heads * table's columns]`. Once in a step for each table.
    fn embed_ngrams(&mut self, table: &NgramTable, out: Tensor);
    /// `out = linear(norm(x))` for each projection. They share the norm and the encoding of `x`, `[tokens, cols]`.
    fn project(&mut self, x: Tensor, norm: Option<Norm>, projections: &[Projection]);
    /// `out += linear(x)`. `x`: `[tokens, cols]`, `out`: `[tokens, linear.rows]`.
    fn project_add(&mut self, x: Tensor, linear: &Linear, out: Tensor);
    /// Normalises and rotates queries and keys, stores keys and values in their slots, attends over the block tables and applies the output gate.
    fn attention(&mut self, layer: &AttentionLayer);
    /// Norms and rotates a token's latent row and stores it in its slot; takes each head's queries to the rows' space, attends over the block tables, and projects
    /// each head's result.
    fn latent_attention(&mut self, layer: &LatentLayer);
    /// Norms and turns an indexer's keys and stores them in their slots; scores what each token may see, and selects what the latent attention behind sees.
    fn index(&mut self, layer: &IndexLayer);
    /// Stores rows and their logits in their slots, and makes the entries of windows that end with a token of the step.
    fn compress(&mut self, layer: &CompressLayer);
    /// Scores the entries that each token may see, and selects what the compressed attention behind sees.
    fn select(&mut self, layer: &SelectLayer);
    /// Stores rows in their slots, and attends over those of windows and over entries.
    fn compressed_attention(&mut self, layer: &CompressedLayer);
    /// Short convolution, gates, delta rule and gated norm.
    fn delta_net(&mut self, layer: &DeltaLayer);
    /// Kimi Delta Attention: short convolution, gates, delta rule and gated norm.
    fn channel_delta(&mut self, layer: &ChannelDeltaLayer);
    /// Mamba-2: short convolution, time steps, recurrence and gated norm.
    fn state_space(&mut self, layer: &StateSpaceLayer);
    /// The weights by which a block takes its input from several residual streams, and that input.
    fn collapse(&mut self, layer: &StreamLayer);
    /// Adds to each residual stream what its gate lets through of a token's n-grams, and a short convolution of that.
    fn add_ngrams(&mut self, layer: &NgramLayer);
    /// `residual += mlp(norm(x))`, both `[tokens, hidden]`.
    fn mlp(&mut self, x: Tensor, norm: Norm, mlp: &Mlp, residual: Tensor);
    /// `residual += mixture(norm(x))`, both `[tokens, hidden]`: routes tokens, fetches experts, looks ahead, computes and combines.
    fn mixture(&mut self, x: Tensor, moe: MoeId, residual: Tensor);
    /// Work between the fused operations.
    fn elementwise(&mut self, operation: &Elementwise);
    /// `head(norm(x[row]))` for each row whose logits are wanted; without a norm `head(x[row])`. The step's [`crate::Outcome`] names the result. With a soft cap logits become
    /// `cap * tanh(logit / cap)`.
    fn logits(&mut self, x: Tensor, norm: Option<Norm>, head: MatrixId, softcap: Option<f32>);
    /// Like [`Operations::mixture`], but leaves out what routed experts add. Writes their input to `normed` and returns their routing. Only calibration calls
    /// it. A stand-in, which does not compute, returns no routing.
    fn mixture_but_experts(&mut self, x: Tensor, moe: MoeId, normed: Tensor, residual: Tensor) -> Routing;
}
