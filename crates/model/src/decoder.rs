//! A decoder-only transformer: embedding, layers of a token mixer and a feed-forward part, head. Every architecture here is one of these,
//! put together by its own file.

use anyhow::Result;
use sluice_backend::{
    Backend, Batch, DeltaShape, Experts, Float, KvLayout, KvPool, KvType, MatrixId, MemoryClass, Norm,
    RotaryFrequencies, Routing, Tensor,
};

use crate::config::Config;
use crate::layers::{Attention, AttentionShape, DeltaNet, FeedForward};
use crate::weights::Weights;

/// Which positions a cache group keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheKind {
    /// Every position.
    Full,
    /// The last so many.
    Window(usize),
}

/// Layers whose keys and values are cached alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheGroup {
    pub kind: CacheKind,
    pub layers: usize,
    pub kv_heads: usize,
    pub k_dim: usize,
    pub v_dim: usize,
}

impl CacheGroup {
    pub fn layout(&self, kv_type: KvType, block_tokens: usize) -> KvLayout {
        let CacheGroup { layers, kv_heads, k_dim, v_dim, .. } = *self;
        KvLayout { layers, kv_heads, k_dim, v_dim, kv_type, block_tokens }
    }
}

/// What the engine must know of a model.
#[derive(Clone, Debug)]
pub struct Spec {
    pub architecture: &'static str,
    pub vocabulary: usize,
    pub layers: usize,
    /// The longest context that the model was made for.
    pub max_context: usize,
    pub groups: Vec<CacheGroup>,
    /// f32 elements of a sequence's recurrent state, all layers together; 0 without recurrent layers.
    pub state_len: usize,
    /// Experts per layer and per token, for a mixture.
    pub experts: Option<(usize, usize)>,
    /// The type that the checkpoint works in.
    pub working_type: Float,
}

/// The pools that the engine allocated, one for each of [`Spec::groups`], and the recurrent states `[slots, state_len]`.
#[derive(Clone, Debug)]
pub struct Caches {
    pub kv: Vec<KvPool>,
    pub states: Option<Tensor>,
}

/// The activations of a step, allocated once: `[max_tokens, ..]` each.
#[derive(Clone, Copy)]
pub struct Scratch {
    /// The residual stream: hidden.
    pub x: Tensor,
    /// Norm of it: hidden.
    pub normed: Tensor,
    pub q: Tensor,
    pub k: Tensor,
    pub v: Tensor,
    /// What a token mixer gives, before its output projection.
    pub mixed: Tensor,
    /// Cosines and sines.
    pub rotary: Tensor,
    pub delta_qkv: Tensor,
    pub delta_z: Tensor,
    pub delta_b: Tensor,
    pub delta_a: Tensor,
}

impl Scratch {
    pub fn alloc(
        backend: &mut dyn Backend,
        max_tokens: usize,
        hidden: usize,
        attention: AttentionShape,
        rotated: usize,
        delta: Option<DeltaShape>,
    ) -> Result<Scratch> {
        let mut tensor = |cols: usize| backend.alloc(MemoryClass::Scratch, max_tokens, cols);
        let kv_cols = attention.kv_heads * attention.head_dim;
        let values = delta.map_or(0, |d| d.value_heads * d.value_dim);
        let value_heads = delta.map_or(0, |d| d.value_heads);
        Ok(Scratch {
            x: tensor(hidden)?,
            normed: tensor(hidden)?,
            q: tensor(attention.q_cols())?,
            k: tensor(kv_cols)?,
            v: tensor(kv_cols)?,
            mixed: tensor(values.max(attention.heads * attention.head_dim))?,
            rotary: tensor(rotated)?,
            delta_qkv: tensor(delta.map_or(0, |d| d.channels()))?,
            delta_z: tensor(values)?,
            delta_b: tensor(value_heads)?,
            delta_a: tensor(value_heads)?,
        })
    }
}

/// What mixes tokens in a layer.
pub enum Mixer {
    Attention(Attention),
    DeltaNet(DeltaNet),
}

/// A layer.
pub struct Layer {
    pub mixer: Mixer,
    pub feed_forward: FeedForward,
}

/// A loaded model.
pub struct Decoder {
    pub spec: Spec,
    pub scratch: Scratch,
    pub embedding: MatrixId,
    pub rotary: RotaryFrequencies,
    pub layers: Vec<Layer>,
    pub norm: Norm,
    pub head: MatrixId,
    pub routing: Routing,
}

impl Decoder {
    /// One step: the new tokens of `batch` go through all layers, their keys, values and states into `caches`.
    /// Writes the logits after each of the batch's rows `wanted` to `logits`, `[wanted, vocabulary]`.
    pub fn step(
        &mut self,
        backend: &mut dyn Backend,
        batch: &Batch,
        caches: &Caches,
        wanted: &[u32],
        logits: &mut [f32],
    ) {
        let (s, tokens) = (&self.scratch, batch.tokens.len());
        assert!(tokens <= s.x.rows, "a step of {tokens} tokens, but scratch for {}", s.x.rows);
        // 1. embed, and the angles that all layers share
        backend.embed(self.embedding, &batch.tokens, s.x);
        backend.rotary(&self.rotary, &batch.positions, s.rotary);
        // 2. layers
        for (number, layer) in self.layers.iter().enumerate() {
            match &layer.mixer {
                Mixer::Attention(attention) => attention.forward(backend, s, caches, batch),
                Mixer::DeltaNet(delta_net) => delta_net.forward(backend, s, caches, batch),
            }
            let next = self.layers.get(number + 1).map(|l| &l.feed_forward);
            layer.feed_forward.forward(backend, s, &mut self.routing, tokens, next);
        }
        // 3. logits of the rows that somebody wants
        if !wanted.is_empty() {
            backend.logits(s.x, self.norm, self.head, wanted, logits);
        }
    }
}

impl Decoder {
    /// The experts of each layer that has some, in order.
    pub fn experts<'a>(&'a self) -> Vec<&'a Experts> {
        let of = |layer: &'a Layer| match &layer.feed_forward {
            FeedForward::Moe { moe, .. } => Some(&moe.experts),
            FeedForward::Dense { .. } => None,
        };
        self.layers.iter().filter_map(of).collect()
    }
}

/// A step in pieces, for whoever looks at what flows between them (calibration). The residual stream is `scratch.x`.
impl Decoder {
    /// Writes the batch's embeddings to the residual stream.
    pub fn embed(&self, backend: &mut dyn Backend, batch: &Batch) {
        backend.embed(self.embedding, &batch.tokens, self.scratch.x);
    }

    /// Adds what the token mixer of layer `layer` makes of the residual stream.
    pub fn mix(&self, layer: usize, backend: &mut dyn Backend, batch: &Batch, caches: &Caches) {
        let s = &self.scratch;
        backend.rotary(&self.rotary, &batch.positions, s.rotary);
        match &self.layers[layer].mixer {
            Mixer::Attention(attention) => attention.forward(backend, s, caches, batch),
            Mixer::DeltaNet(delta_net) => delta_net.forward(backend, s, caches, batch),
        }
    }

    /// Adds what the second half of layer `layer` makes of the residual stream's first `tokens` rows.
    pub fn feed_forward(&mut self, layer: usize, backend: &mut dyn Backend, tokens: usize) {
        self.layers[layer].feed_forward.forward(backend, &self.scratch, &mut self.routing, tokens, None);
    }

    /// As [`Decoder::feed_forward`], without what the routed experts add. In a mixture of experts `scratch.normed` is then what they would have been given, and
    /// `routing` says to whom it would have gone.
    pub fn feed_forward_but_experts(&mut self, layer: usize, backend: &mut dyn Backend, tokens: usize) {
        self.layers[layer].feed_forward.forward_but_experts(backend, &self.scratch, &mut self.routing, tokens);
    }
}

/// What every architecture's file begins and ends with: embedding and scratch first, layers by the file, final norm and head last.
pub struct Outline {
    pub hidden: usize,
    pub eps: f64,
    /// Norm weights are stored minus one.
    pub centred: bool,
    pub tied: bool,
}

impl Outline {
    pub fn read(config: &Config, centred: bool) -> Result<Outline> {
        config.require("hidden_act", "silu")?;
        Ok(Outline {
            hidden: config.size("hidden_size")?,
            eps: config.norm_eps()?,
            centred,
            tied: config.tied_embeddings()?,
        })
    }

    /// Puts the loaded layers together.
    #[allow(clippy::too_many_arguments)]
    pub fn finish(
        &self,
        w: &mut Weights,
        spec: Spec,
        scratch: Scratch,
        rotary: RotaryFrequencies,
        layers: Vec<Layer>,
    ) -> Result<Decoder> {
        let (vocabulary, hidden) = (spec.vocabulary, self.hidden);
        let embedding = w.matrix("embed_tokens", vocabulary, hidden)?;
        let norm = w.norm("norm", hidden, self.eps, self.centred)?;
        let head = w.head(self.tied, vocabulary, hidden, embedding)?;
        let k = spec.experts.map_or(0, |(_, k)| k);
        let mut routing = Routing { k, ..Default::default() };
        routing.experts.reserve(scratch.x.rows * k);
        routing.weights.reserve(scratch.x.rows * k);
        Ok(Decoder { spec, scratch, embedding, rotary, layers, norm, head, routing })
    }
}
