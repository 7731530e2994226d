//! Attention over small vectors that keys and values are projections of (DeepSeek-V2): those vectors are cached, and queries come to them.

use anyhow::Result;
use sluice_backend::{
    Elementwise, HeadRows, IndexLayer, IndexNorm, IndexPool, LatentKeys, LatentLayer, Norm, Operations, PoolLogits,
    Projection, RotaryId, RowFactors, Tensor,
};

use super::ordered::{Inputs, Output};
use crate::description::{AttentionDescription, Description, IndexDescription, LatentDescription};
use crate::weights::Weights;

/// Added to the mean of squares in the norm of an indexer's keys, whatever a config says.
const INDEX_EPS: f32 = 1e-6;

/// Activations shared by all latent layers of a model: `[max_tokens, ..]` each.
#[derive(Clone, Copy)]
pub struct LatentScratch {
    q: Tensor,
    /// What queries are projections of.
    q_a: Option<Tensor>,
    kv: Tensor,
    /// Before the output projection: `[max_tokens, heads * v_dim]`.
    mixed: Tensor,
    /// What gates that are: as wide.
    gate: Option<Tensor>,
    index: Option<IndexScratch>,
}

/// Activations of indexers: queries, keys, and the weights of heads.
#[derive(Clone, Copy)]
struct IndexScratch {
    q: Tensor,
    k: Tensor,
    /// What weighs keys within a pool.
    logits: Option<Tensor>,
    weights: Tensor,
}

impl LatentScratch {
    /// As wide as the widest latent layer of the model; `None` if there is none.
    pub fn alloc(w: &mut Weights, d: &Description) -> Result<Option<LatentScratch>> {
        if d.latent_layers().next().is_none() {
            return Ok(None);
        }
        let widest = |cols: fn(&AttentionDescription, LatentDescription) -> usize| {
            d.latent_layers().map(|(a, latent)| cols(a, latent)).max().unwrap_or_default()
        };
        let of_index = |cols: fn(IndexDescription) -> usize| {
            d.latent_layers().filter_map(|(a, _)| a.index).map(cols).max().unwrap_or_default()
        };
        let index = [of_index(|i| i.heads * i.head_dim), of_index(|i| i.head_dim), of_index(|i| i.heads)];
        let pooled = of_index(|i| if i.pool.is_some() { i.head_dim } else { 0 });
        let q_a = widest(|_, latent| latent.q_rank.unwrap_or(0));
        let gate = widest(|a, latent| if latent.gated { a.out_cols() } else { 0 });
        Ok(Some(LatentScratch {
            q: w.scratch(widest(|a, _| a.q_cols()))?,
            q_a: if q_a > 0 { Some(w.scratch(q_a)?) } else { None },
            kv: w.scratch(widest(|_, latent| latent.kv_rank + latent.rotary_dim))?,
            mixed: w.scratch(widest(|a, _| a.out_cols()))?,
            gate: if gate > 0 { Some(w.scratch(gate)?) } else { None },
            index: match index {
                [0, ..] => None,
                [q, k, weights] => Some(IndexScratch {
                    q: w.scratch(q)?,
                    k: w.scratch(k)?,
                    logits: if pooled > 0 { Some(w.scratch(pooled)?) } else { None },
                    weights: w.scratch(weights)?,
                }),
            },
        }))
    }
}

/// One layer of latent attention.
pub struct LatentAttention {
    /// Of the input: the vector of keys and values, and queries or what they are projections of.
    down: Inputs,
    /// Queries, where they are projections of a small vector: that and what is made of it.
    up: Option<(Tensor, Inputs)>,
    /// What selects the positions that tokens see, unless another layer's has.
    index: Option<IndexLayer>,
    /// What queries are multiplied by.
    growth: Option<RowFactors>,
    inner: LatentLayer,
    /// What is put out is multiplied by the sigmoid of this.
    gate: Option<Tensor>,
    out: Output,
}

impl LatentAttention {
    /// Layer `at` of the model, which is number `layer` of cache group `group`.
    pub fn load(
        w: &mut Weights,
        (d, latent): (&AttentionDescription, LatentDescription),
        s: &LatentScratch,
        (rotary, unrotated): (RotaryId, RotaryId),
        at: usize,
        (group, layer): (usize, usize),
        index_slot: Option<(usize, usize)>,
    ) -> Result<LatentAttention> {
        let (LatentDescription { q_rank, kv_rank, rotary_dim, norm_eps, split, gated }, index) = (latent, d.index);
        let (q, kv) = (s.q.columns(0..d.q_cols()), s.kv.columns(0..kv_rank + rotary_dim));
        let norm = w.norm(at, "input_layernorm")?;
        let of = |w: &mut Weights, part: &str, out| -> Result<Projection> {
            Ok(Projection { linear: w.ordered_linear(at, part)?, out })
        };
        // 1. down to the vectors
        let small = q_rank.zip(s.q_a).map(|(rank, all)| all.columns(0..rank));
        let queries = match small {
            Some(q_a) => of(w, "self_attn.q_a_proj", q_a)?,
            None => of(w, "self_attn.q_proj", q)?,
        };
        let mut down = vec![queries, of(w, "self_attn.kv_a_proj_with_mqa", kv)?];
        let gate = s.gate.filter(|_| gated).map(|all| all.columns(0..d.out_cols()));
        if let Some(gate) = gate {
            down.push(of(w, "self_attn.g_proj", gate)?);
        }
        let own_index = match index.zip(index_slot).zip(s.index) {
            None => None,
            Some(((index, slot), all)) => {
                let IndexDescription { heads, head_dim, top, adjacent_pairs, pool, .. } = index;
                let (q, k) = (all.q.columns(0..heads * head_dim), all.k.columns(0..head_dim));
                let weights = all.weights.columns(0..heads);
                down.push(of(w, "self_attn.indexer.wk", k)?);
                down.push(of(w, "self_attn.indexer.weights_proj", weights)?);
                let pool = match pool.zip(all.logits) {
                    None => None,
                    Some((size, logits)) => {
                        let logits = logits.columns(0..head_dim);
                        let linear = w.bare_linear(at, "self_attn.indexer.index_kpool_compress_gate")?;
                        down.push(Projection { linear, out: logits });
                        let bias = w.vector(at, "self_attn.indexer.index_kpool_compress_ape")?;
                        Some(IndexPool { size, logits: Some(PoolLogits { logits, bias }) })
                    }
                };
                let root = |n: usize| (1.0 / (n as f64).sqrt()) as f32;
                Some(IndexLayer {
                    q,
                    k,
                    weights: Some(weights),
                    norm: IndexNorm::Tokens(w.layer_norm(at, "self_attn.indexer.k_norm", INDEX_EPS)?),
                    heads,
                    top,
                    pool,
                    // Where rows have nothing that is rotated, neither have keys of indexers.
                    rotary: if rotary_dim > 0 { rotary } else { unrotated },
                    adjacent_pairs,
                    group: slot.0,
                    layer: slot.1,
                    rows_group: group,
                    scale: root(head_dim),
                    weight_scale: root(heads),
                })
            }
        };
        let down = Inputs::new(w, Some(norm), down)?;
        // 2. up again
        let up = match small {
            None => None,
            Some(q_a) => {
                let norm = Norm { eps: norm_eps as f32, ..w.norm(at, "self_attn.q_a_layernorm")? };
                let mut all = vec![Projection { linear: w.ordered_linear(at, "self_attn.q_b_proj")?, out: q }];
                if let Some(index) = &own_index {
                    let linear = w.ordered_linear(at, "self_attn.indexer.wq_b")?;
                    all.push(Projection { linear, out: index.q });
                }
                Some((q_a, Inputs::new(w, Some(norm), all)?))
            }
        };
        let (heads, plain, v_dim) = (d.heads, d.head_dim - rotary_dim, d.v_dim);
        let (keys, values) = if split {
            let keys = w.head_matrices(at, "self_attn.embed_q", heads)?;
            let values = w.head_matrices(at, "self_attn.unembed_out", heads)?;
            let of = |matrix, rows| HeadRows { matrix, stride: rows, offset: 0, rows };
            (LatentKeys::Columns(of(keys, kv_rank)), of(values, v_dim))
        } else {
            let matrix = w.matrix(at, "self_attn.kv_b_proj")?;
            let of = |offset, rows| HeadRows { matrix, stride: plain + v_dim, offset, rows };
            (LatentKeys::Rows(of(0, plain)), of(plain, v_dim))
        };
        // 3. the rest
        let inner = LatentLayer {
            q,
            kv,
            norm: Norm { eps: norm_eps as f32, ..w.norm(at, "self_attn.kv_a_layernorm")? },
            out: s.mixed.columns(0..d.out_cols()),
            heads,
            rank: kv_rank,
            keys,
            values,
            rotary,
            adjacent_pairs: d.adjacent_pairs,
            group,
            layer,
            scale: d.score_scale(),
            selected: index.is_some(),
        };
        let growth = match d.query_growth {
            Some(growth) => Some(w.row_factors(&growth)?),
            None => None,
        };
        let out = w.ordered_linear(at, "self_attn.o_proj")?;
        Ok(LatentAttention { down, up, index: own_index, growth, inner, gate, out: Output::new(w, out, None)? })
    }

    /// `out += attention(norm(x))`
    pub fn forward(&self, backend: &mut dyn Operations, x: Tensor, out: Tensor) {
        // 1. queries, and what will be cached
        self.down.forward(backend, x);
        if let Some((q_a, up)) = &self.up {
            up.forward(backend, q_a.first_rows(x.rows));
        }
        if let Some(index) = &self.index {
            backend.index(index);
        }
        if let Some(factors) = self.growth {
            backend.elementwise(&Elementwise::ScaleRows { x: self.inner.q.first_rows(x.rows), factors });
        }
        // 2. norm, rotation, cache, softmax(q k) v in the space of what is cached, values of each head
        backend.latent_attention(&self.inner);
        // 3. back to the residual stream
        let mixed = self.inner.out.first_rows(x.rows);
        if let Some(gate) = self.gate {
            backend.elementwise(&Elementwise::SigmoidGate { x: mixed, gate: gate.first_rows(x.rows) });
        }
        self.out.add(backend, mixed, out);
    }
}
