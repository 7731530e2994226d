//! Softmax attention with grouped queries, and what Qwen adds where it is described: norms on q and k, partial rotation, a gate on the output.

use anyhow::Result;
use sluice_backend::{AttentionLayer, Linear, Norm, Operations, Projection, RotaryId, Tensor};

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
    /// Layer `at` of the model, which is number `layer` of cache group `group`.
    pub fn load(
        w: &mut Weights,
        d: &AttentionDescription,
        s: &AttentionScratch,
        rotary: RotaryId,
        at: usize,
        (group, layer): (usize, usize),
    ) -> Result<Attention> {
        let mut projection =
            |part: &str, out| -> Result<Projection> { Ok(Projection { linear: w.linear(at, part)?, out }) };
        let qkv = vec![
            projection("self_attn.q_proj", s.q)?,
            projection("self_attn.k_proj", s.k)?,
            projection("self_attn.v_proj", s.v)?,
        ];
        let norm = w.norm(at, "input_layernorm")?;
        let mut head_norm = |part: &str| if d.normed { w.norm(at, part).map(Some) } else { Ok(None) };
        let inner = AttentionLayer {
            q: s.q,
            k: s.k,
            v: s.v,
            out: s.mixed,
            heads: d.heads,
            gated: d.gated,
            q_norm: head_norm("self_attn.q_norm")?,
            k_norm: head_norm("self_attn.k_norm")?,
            rotary,
            group,
            layer,
            scale: (1.0 / (d.head_dim as f64).sqrt()) as f32,
            window: d.window,
            softcap: None,
            sinks: None,
        };
        let out = w.linear(at, "self_attn.o_proj")?;
        Ok(Attention { norm, qkv, inner, out })
    }

    /// `x += attention(norm(x))`
    pub fn forward(&self, backend: &mut dyn Operations, x: Tensor) {
        // 1. q (and gate), k, v
        backend.project(x, Some(self.norm), &self.qkv);
        // 2. norms, rotation, cache, softmax(q k) v, gate
        backend.attention(&self.inner);
        // 3. back to the residual stream
        backend.project_add(self.inner.out.first_rows(x.rows), &self.out, x);
    }
}
