//! Softmax attention with grouped queries, and the variants that a description may add: norms on q and k, a gate, queries that grow, a window, a soft cap, sinks.

use anyhow::{Result, ensure};
use sluice_backend::{
    AttentionLayer, Elementwise, IndexLayer, IndexNorm, IndexPool, Norm, Operations, Projection, RotaryId, RowFactors,
    Tensor,
};

use super::ordered::{Inputs, Output};
use crate::description::{
    AttentionDescription, AttentionVariant, Description, INDEX_INPUTS, INDEX_NORMS, INDEX_PARTS, IndexDescription,
    ValueSource,
};
use crate::weights::{Weights, rows_of};

/// Activations shared by all attention layers of a model: `[max_tokens, ..]` each.
#[derive(Clone, Copy)]
pub struct AttentionScratch {
    q: Tensor,
    k: Tensor,
    v: Tensor,
    /// Before the output projection: `[max_tokens, heads * v_dim]`.
    mixed: Tensor,
    /// Queries and keys of indexers, where there are any.
    index: Option<[Tensor; 2]>,
}

impl AttentionScratch {
    /// As wide as the widest attention layer of the model.
    pub fn alloc(w: &mut Weights, d: &Description) -> Result<AttentionScratch> {
        let mut widest = |cols: fn(&AttentionDescription) -> usize| {
            let grouped = d.attention_layers().filter(|a| a.variant == AttentionVariant::Grouped);
            w.scratch(grouped.map(cols).max().unwrap_or_default())
        };
        let index = d.attention_layers().filter(|a| a.variant == AttentionVariant::Grouped).any(|a| a.index.is_some());
        Ok(AttentionScratch {
            q: widest(AttentionDescription::q_cols)?,
            k: widest(AttentionDescription::k_cols)?,
            v: widest(AttentionDescription::v_cols)?,
            mixed: widest(AttentionDescription::out_cols)?,
            index: match index {
                true => Some([
                    widest(|a| a.index.map_or(0, |index| index.heads * index.head_dim))?,
                    widest(|a| a.index.map_or(0, |index| index.head_dim))?,
                ]),
                false => None,
            },
        })
    }

    /// As wide as this layer.
    fn sized_for(&self, d: &AttentionDescription) -> AttentionScratch {
        AttentionScratch {
            q: self.q.columns(0..d.q_cols()),
            k: self.k.columns(0..d.k_cols()),
            v: self.v.columns(0..d.v_cols()),
            mixed: self.mixed.columns(0..d.out_cols()),
            index: self
                .index
                .zip(d.index)
                .map(|([q, k], of)| [q.columns(0..of.heads * of.head_dim), k.columns(0..of.head_dim)]),
        }
    }
}

/// One attention layer.
pub struct Attention {
    qkv: Inputs,
    /// What values are made of, and the norm that each of their heads goes through.
    values: Option<(Tensor, Norm)>,
    /// Norms of q and k, each as one vector.
    whole_norms: Option<[Norm; 2]>,
    /// Elements of a run whose rotated pairs are beside each other; `None`: they are half a run apart, as they should be.
    pairs: Option<usize>,
    /// What queries are multiplied by.
    growth: Option<RowFactors>,
    /// The norm of an indexer's queries, and what selects the positions that a token sees.
    index: Option<(Norm, IndexLayer)>,
    inner: AttentionLayer,
    out: Output,
}

impl Attention {
    /// Layer `at` of the model, which is number `layer` of cache group `group`.
    pub fn load(
        w: &mut Weights,
        d: &AttentionDescription,
        (s, branch): (&AttentionScratch, Option<Tensor>),
        (rotary, rotary_dim): (RotaryId, usize),
        (at, input_norm): (usize, bool),
        (group, layer): (usize, usize),
        index_slot: Option<(usize, usize)>,
    ) -> Result<Attention> {
        let s = s.sized_for(d);
        let mut qkv = if d.joined {
            let all = w.ordered_linear(at, "self_attn.qkv_proj")?;
            let mut from = 0;
            let mut next = |out: Tensor| {
                from += out.cols;
                Projection { linear: rows_of(&all, from - out.cols..from), out }
            };
            vec![next(s.q), next(s.k), next(s.v)]
        } else {
            let mut projection =
                |part: &str, out| -> Result<Projection> { Ok(Projection { linear: w.ordered_linear(at, part)?, out }) };
            let mut all = vec![projection("self_attn.q_proj", s.q)?];
            if !d.shared {
                all.push(projection("self_attn.k_proj", s.k)?);
            }
            if !d.shared && d.values == ValueSource::Projected {
                all.push(projection("self_attn.v_proj", s.v)?);
            }
            all
        };
        let index = match d.index.zip(index_slot).zip(s.index) {
            None => None,
            Some(((IndexDescription { heads, head_dim, top, pool, split, .. }, slot), [q, k])) => {
                let of_q = heads * head_dim;
                let parts = if split {
                    [w.ordered_linear(at, INDEX_PARTS[0])?, w.ordered_linear(at, INDEX_PARTS[1])?]
                } else {
                    let both = w.ordered_linear(at, INDEX_INPUTS)?;
                    [0..of_q, of_q..of_q + head_dim].map(|rows| rows_of(&both, rows))
                };
                qkv.extend(parts.into_iter().zip([q, k]).map(|(linear, out)| Projection { linear, out }));
                let [of_queries, of_keys] = INDEX_NORMS;
                let layer = IndexLayer {
                    q,
                    k,
                    weights: None,
                    norm: IndexNorm::Pools(w.norm(at, of_keys)?),
                    heads,
                    top,
                    pool: pool.map(|size| IndexPool { size, logits: None }),
                    rotary,
                    adjacent_pairs: false,
                    group: slot.0,
                    layer: slot.1,
                    rows_group: group,
                    scale: (1.0 / (head_dim as f64).sqrt()) as f32,
                    weight_scale: 1.0,
                };
                Some((w.norm(at, of_queries)?, layer))
            }
        };
        let values = match d.values_normed && !d.shared {
            true => Some((if d.values == ValueSource::Keys { s.k } else { s.v }, w.norm_without_weights(d.v_dim)?)),
            false => None,
        };
        let norm = if input_norm { Some(w.norm(at, "input_layernorm")?) } else { None };
        let qkv = Inputs::new(w, norm, qkv)?;
        let mut norm_of = |part: &str, is_there: bool| is_there.then(|| w.norm(at, part)).transpose();
        let norms = [norm_of("self_attn.q_norm", d.normed)?, norm_of("self_attn.k_norm", d.normed && !d.shared)?];
        let whole_norms = if let ([Some(q), Some(k)], true) = (norms, d.whole_norms) { Some([q, k]) } else { None };
        let [q_norm, k_norm] = if d.whole_norms { [None; 2] } else { norms };
        let sinks = if d.sinks { Some(w.vector(at, "self_attn.sinks")?) } else { None };
        let inner = AttentionLayer {
            q: s.q,
            k: s.k,
            v: s.v,
            out: s.mixed,
            heads: d.heads,
            gated: d.gated,
            q_norm,
            k_norm,
            rotary,
            group,
            layer,
            shared: d.shared,
            scale: d.score_scale(),
            window: d.window,
            softcap: d.softcap,
            sinks,
            selected: index.is_some(),
        };
        let out = w.ordered_linear(at, "self_attn.o_proj")?;
        let branch = match branch {
            Some(to) => Some((to, w.norm(at, "post_attention_layernorm")?)),
            None => None,
        };
        let out = Output::new(w, out, branch)?;
        // Also where nothing is rotated: scores are sums in this order.
        let of_file = w.layout().has_adjacent_pairs().then_some(d.head_dim);
        let pairs = of_file.or(d.adjacent_pairs.then_some(rotary_dim));
        ensure!(pairs.is_none() || !d.gated, "layer {at}: moved rows of queries with gates are not supported");
        ensure!(d.query_growth.is_none() || !d.gated, "layer {at}: growing queries with gates are not supported");
        let growth = match d.query_growth {
            Some(growth) => Some(w.row_factors(&growth)?),
            None => None,
        };
        Ok(Attention { qkv, values, whole_norms, pairs, growth, index, inner, out })
    }

    /// `out += attention(norm(x))`
    pub fn forward(&self, backend: &mut dyn Operations, x: Tensor, out: Tensor) {
        // 1. q (and gate), k, v
        self.qkv.forward(backend, x);
        if let Some((x, norm)) = self.values.map(|(t, norm)| (t.first_rows(x.rows), norm)) {
            backend.elementwise(&Elementwise::Norm { x, norm, out: self.inner.v.first_rows(x.rows) });
        }
        if let Some(norms) = self.whole_norms {
            for (x, norm) in [self.inner.q, self.inner.k].map(|t| t.first_rows(x.rows)).into_iter().zip(norms) {
                backend.elementwise(&Elementwise::Norm { x, norm, out: x });
            }
        }
        if let Some(head) = self.pairs {
            let own = if self.inner.shared { 1 } else { 2 };
            for x in [self.inner.q, self.inner.k].into_iter().take(own).map(|t| t.first_rows(x.rows)) {
                backend.elementwise(&Elementwise::SplitPairs { x, head });
            }
        }
        if let Some(factors) = self.growth {
            backend.elementwise(&Elementwise::ScaleRows { x: self.inner.q.first_rows(x.rows), factors });
        }
        if let Some((norm, index)) = &self.index {
            let q = index.q.first_rows(x.rows);
            backend.elementwise(&Elementwise::Norm { x: q, norm: *norm, out: q });
            backend.index(index);
        }
        // 2. norms, rotation, cache, softmax(q k) v, gate
        backend.attention(&self.inner);
        // 3. back to the residual stream
        self.out.add(backend, self.inner.out.first_rows(x.rows), out);
    }
}
