//! Softmax attention with grouped queries, and what Qwen adds: norms on q and k, partial rotation, a gate on the output.

use anyhow::{Result, ensure};
use sluice_backend::{AttentionStep, Backend, Batch, Linear, Norm, Projection};

use crate::config::Config;
use crate::decoder::{Caches, Scratch};
use crate::weights::Weights;

/// The sizes of an attention layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionShape {
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    /// Each query head comes with a gate of its size.
    pub gated: bool,
}

impl AttentionShape {
    pub fn read(config: &Config, gated: bool) -> Result<AttentionShape> {
        let heads = config.size("num_attention_heads")?;
        let kv_heads = config.size_or("num_key_value_heads", heads)?;
        let hidden = config.size("hidden_size")?;
        let path = config.path().display();
        ensure!(
            config.get("head_dim").is_some() || hidden >= heads,
            "{path}: `num_attention_heads` is {heads}, more than `hidden_size`, and there is no `head_dim`"
        );
        let head_dim = config.size_or("head_dim", hidden / heads)?;
        config.product("`num_attention_heads` and `head_dim`", &[heads, head_dim])?;
        ensure!(heads.is_multiple_of(kv_heads), "{path}: {heads} query heads cannot share {kv_heads} key/value heads");
        Ok(AttentionShape { heads, kv_heads, head_dim, gated })
    }

    /// Columns of the query projection.
    pub fn q_cols(&self) -> usize {
        self.heads * self.head_dim * if self.gated { 2 } else { 1 }
    }
}

/// One attention layer.
pub struct Attention {
    shape: AttentionShape,
    norm: Norm,
    qkv: Vec<Projection>,
    q_norm: Norm,
    k_norm: Norm,
    out: Linear,
    window: Option<usize>,
    group: usize,
    layer: usize,
}

impl Attention {
    /// Layer `layers.N` of the checkpoint, which is number `layer` of cache group `group`.
    #[allow(clippy::too_many_arguments)]
    pub fn load(
        w: &mut Weights,
        scratch: &Scratch,
        module: &str,
        shape: AttentionShape,
        eps: f64,
        centred: bool,
        window: Option<usize>,
        (group, layer): (usize, usize),
    ) -> Result<Attention> {
        let hidden = scratch.x.cols;
        let kv_cols = shape.kv_heads * shape.head_dim;
        let mut projection = |part: &str, rows: usize, out| -> Result<Projection> {
            Ok(Projection { linear: w.linear(&format!("{module}.self_attn.{part}"), rows, hidden)?, out })
        };
        let qkv = vec![
            projection("q_proj", shape.q_cols(), scratch.q)?,
            projection("k_proj", kv_cols, scratch.k)?,
            projection("v_proj", kv_cols, scratch.v)?,
        ];
        Ok(Attention {
            shape,
            norm: w.norm(&format!("{module}.input_layernorm"), hidden, eps, centred)?,
            qkv,
            q_norm: w.norm(&format!("{module}.self_attn.q_norm"), shape.head_dim, eps, centred)?,
            k_norm: w.norm(&format!("{module}.self_attn.k_norm"), shape.head_dim, eps, centred)?,
            out: w.linear(&format!("{module}.self_attn.o_proj"), hidden, shape.heads * shape.head_dim)?,
            window,
            group,
            layer,
        })
    }

    /// `x += attention(norm(x))`
    pub fn forward(&self, backend: &mut dyn Backend, s: &Scratch, caches: &Caches, batch: &Batch) {
        let tokens = batch.tokens.len();
        let x = s.x.first_rows(tokens);
        // 1. q (and gate), k, v
        backend.project(x, Some(self.norm), &self.qkv);
        // 2. norms, rotation, cache, softmax(q k) v, gate
        backend.attention(&AttentionStep {
            q: s.q,
            k: s.k,
            v: s.v,
            out: s.mixed,
            heads: self.shape.heads,
            gated: self.shape.gated,
            q_norm: Some(self.q_norm),
            k_norm: Some(self.k_norm),
            rotary: s.rotary,
            pool: caches.kv[self.group],
            group: self.group,
            layer: self.layer,
            scale: (1.0 / (self.shape.head_dim as f64).sqrt()) as f32,
            window: self.window,
            batch,
        });
        // 3. back to the residual stream
        let mixed = s.mixed.columns(0..self.shape.heads * self.shape.head_dim).first_rows(tokens);
        backend.project_add(mixed, &self.out, x);
    }
}
