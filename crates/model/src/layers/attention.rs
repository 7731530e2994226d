//! Softmax attention with grouped queries, and what Qwen adds: norms on q and k, partial rotation, a gate on the output.

use anyhow::Result;
use sluice_backend::{AttentionLayer, Backend, Linear, Norm, Projection, RotaryId, Tensor};

use crate::description::AttentionDescription;
use crate::weights::Weights;

/// Activations that the attention layers of a model take turns with: `[max_tokens, ..]` each.
#[derive(Clone, Copy)]
pub struct AttentionScratch {
    q: Tensor,
    k: Tensor,
    v: Tensor,
    /// Before the output projection: `[max_tokens, heads * head_dim]`.
    mixed: Tensor,
}

impl AttentionScratch {
    pub fn alloc(w: &mut Weights, d: &AttentionDescription) -> Result<AttentionScratch> {
        Ok(AttentionScratch {
            q: w.scratch(d.q_cols())?,
            k: w.scratch(d.kv_cols())?,
            v: w.scratch(d.kv_cols())?,
            mixed: w.scratch(d.heads * d.head_dim)?,
        })
    }
}

/// One attention layer.
pub struct Attention {
    norm: Norm,
    qkv: Vec<Projection>,
    inner: AttentionLayer,
    out: Linear,
}

impl Attention {
    /// Layer `module` (`layers.N`) of the checkpoint, which is number `layer` of cache group `group`.
    pub fn load(
        w: &mut Weights,
        d: &AttentionDescription,
        s: &AttentionScratch,
        rotary: RotaryId,
        module: &str,
        (group, layer): (usize, usize),
    ) -> Result<Attention> {
        let hidden = w.hidden();
        let mut projection = |part: &str, rows: usize, out| -> Result<Projection> {
            Ok(Projection { linear: w.linear(&format!("{module}.self_attn.{part}"), rows, hidden)?, out })
        };
        let qkv = vec![
            projection("q_proj", d.q_cols(), s.q)?,
            projection("k_proj", d.kv_cols(), s.k)?,
            projection("v_proj", d.kv_cols(), s.v)?,
        ];
        let norm = w.norm(&format!("{module}.input_layernorm"), hidden)?;
        let mut head_norm = |part: &str| -> Result<Option<Norm>> {
            let mut norm = || w.norm(&format!("{module}.self_attn.{part}"), d.head_dim);
            if d.normed { norm().map(Some) } else { Ok(None) }
        };
        let inner = AttentionLayer {
            q: s.q,
            k: s.k,
            v: s.v,
            out: s.mixed,
            heads: d.heads,
            gated: d.gated,
            q_norm: head_norm("q_norm")?,
            k_norm: head_norm("k_norm")?,
            rotary,
            group,
            layer,
            scale: (1.0 / (d.head_dim as f64).sqrt()) as f32,
            window: d.window,
            softcap: None,
            sinks: None,
        };
        let out = w.linear(&format!("{module}.self_attn.o_proj"), hidden, d.heads * d.head_dim)?;
        Ok(Attention { norm, qkv, inner, out })
    }

    /// `x += attention(norm(x))`
    pub fn forward(&self, backend: &mut dyn Backend, x: Tensor) {
        // 1. q (and gate), k, v
        backend.project(x, Some(self.norm), &self.qkv);
        // 2. norms, rotation, cache, softmax(q k) v, gate
        backend.attention(&self.inner);
        // 3. back to the residual stream
        backend.project_add(self.inner.out.first_rows(x.rows), &self.out, x);
    }
}
