//! Compressed attention (DeepSeek-V4): one row of each token is key and value of all heads; behind a window, entries are seen that are made of several tokens' rows each.

use anyhow::Result;
use sluice_backend::{
    CacheLayer, CompressLayer, CompressedLayer, Elementwise, Entries, Norm, Operations, Projection, RotaryId,
    SelectLayer, Tensor,
};

use super::ordered::{Inputs, Output};
use crate::description::{
    AttentionDescription, COMPRESSORS, CompressedDescription, CompressionDescription, Description,
};
use crate::weights::{Weights, rows_of};

/// Activations shared by all such layers of a model: `[max_tokens, ..]` each.
#[derive(Clone, Copy)]
pub struct CompressedScratch {
    q: Tensor,
    /// What queries are projections of.
    q_a: Tensor,
    row: Tensor,
    /// Rows that entries are made of, and their logits.
    series: Option<[Tensor; 2]>,
    index: Option<IndexScratch>,
    /// What heads put out, and what is made of it by groups.
    mixed: Tensor,
    grouped: Tensor,
}

/// Activations of indexers.
#[derive(Clone, Copy)]
struct IndexScratch {
    q: Tensor,
    weights: Tensor,
    series: [Tensor; 2],
}

impl CompressedScratch {
    /// As wide as the widest such layer of the model; `None` if there is none.
    pub fn alloc(w: &mut Weights, d: &Description) -> Result<Option<CompressedScratch>> {
        if d.compressed_layers().next().is_none() {
            return Ok(None);
        }
        let widest = |cols: fn(&AttentionDescription, CompressedDescription) -> usize| {
            d.compressed_layers().map(|(a, of)| cols(a, of)).max().unwrap_or_default()
        };
        let of_index = |cols: fn(CompressionDescription) -> Option<usize>| {
            d.compressed_layers().filter_map(|(_, of)| cols(of.compression?)).max().unwrap_or_default()
        };
        let series = widest(|a, of| of.compression.map_or(0, |of| of.series() * a.head_dim));
        let index = of_index(|of| Some(of.series() * of.index?.head_dim));
        Ok(Some(CompressedScratch {
            q: w.scratch(widest(|a, _| a.q_cols()))?,
            q_a: w.scratch(widest(|_, of| of.q_rank))?,
            row: w.scratch(widest(|a, _| a.head_dim))?,
            series: if series > 0 { Some([w.scratch(series)?, w.scratch(series)?]) } else { None },
            index: match index {
                0 => None,
                index => Some(IndexScratch {
                    q: w.scratch(of_index(|of| of.index.map(|of| of.heads * of.head_dim)))?,
                    weights: w.scratch(of_index(|of| of.index.map(|of| of.heads)))?,
                    series: [w.scratch(index)?, w.scratch(index)?],
                }),
            },
            mixed: w.scratch(widest(|a, _| a.out_cols()))?,
            grouped: w.scratch(widest(|_, of| of.out_groups * of.out_rank))?,
        }))
    }
}

/// An indexer of entries.
struct EntryIndex {
    keys: CompressLayer,
    select: SelectLayer,
    weight_scale: f32,
}

/// One layer of compressed attention.
pub struct CompressedAttention {
    /// Of the input: what queries are made of, the row, and what entries are made of.
    down: Inputs,
    q_a: Tensor,
    /// Queries.
    up: Inputs,
    /// Of each query head, and of the row.
    norms: [Norm; 2],
    rotary: RotaryId,
    entries: Option<CompressLayer>,
    index: Option<EntryIndex>,
    inner: CompressedLayer,
    /// What heads put out, by groups: each group's part and its projection.
    groups: Vec<(Tensor, Projection)>,
    grouped: Tensor,
    out: Output,
}

impl CompressedAttention {
    /// Layer `at` of the model. `slots`: its layers of [`AttentionDescription::cache_groups`].
    pub fn load(
        w: &mut Weights,
        (d, of): (&AttentionDescription, CompressedDescription),
        s: &CompressedScratch,
        rotary: RotaryId,
        at: usize,
        slots: &[CacheLayer],
    ) -> Result<CompressedAttention> {
        let (dim, heads) = (d.head_dim, d.heads);
        let (q, q_a, row) = (s.q.columns(0..d.q_cols()), s.q_a.columns(0..of.q_rank), s.row.columns(0..dim));
        let projection = |w: &mut Weights, part: &str, out| -> Result<Projection> {
            Ok(Projection { linear: w.ordered_linear(at, part)?, out })
        };
        let mut down = vec![projection(w, "self_attn.wq_a", q_a)?, projection(w, "self_attn.wkv", row)?];
        let mut up = vec![projection(w, "self_attn.wq_b", q)?];
        // 1. entries, and what selects them
        let mut compressor = |w: &mut Weights,
                              which: usize,
                              compression: CompressionDescription,
                              (dim, series): (usize, [Tensor; 2])|
         -> Result<CompressLayer> {
            let [values_part, logits_part, bias, norm] = COMPRESSORS[which];
            let [values, logits] = series.map(|t| t.columns(0..compression.series() * dim));
            down.push(projection(w, values_part, values)?);
            down.push(projection(w, logits_part, logits)?);
            let bias = by_rows(&w.host_rows(at, bias)?, compression, dim);
            Ok(CompressLayer {
                values,
                logits,
                bias: w.made_vector(&bias)?,
                norm: w.norm(at, norm)?,
                rotary,
                rate: compression.rate,
                rows: slots[1 + 2 * which],
                entries: slots[2 + 2 * which],
            })
        };
        let (mut entries, mut index) = (None, None);
        if let Some((compression, series)) = of.compression.zip(s.series) {
            entries = Some(compressor(w, 0, compression, (dim, series))?);
            if let Some((own, all)) = compression.index.zip(s.index) {
                let root = |n: usize| (1.0 / (n as f64).sqrt()) as f32;
                let keys = compressor(w, 1, compression, (own.head_dim, all.series))?;
                let select = SelectLayer {
                    q: all.q.columns(0..own.heads * own.head_dim),
                    weights: all.weights.columns(0..own.heads),
                    heads: own.heads,
                    top: own.top,
                    rate: compression.rate,
                    keys: keys.entries,
                    entries_group: slots[2].group,
                    scale: root(own.head_dim),
                };
                down.push(projection(w, "self_attn.indexer.weights_proj", select.weights)?);
                up.push(projection(w, "self_attn.indexer.wq_b", select.q)?);
                index = Some(EntryIndex { keys, select, weight_scale: root(own.heads) });
            }
        }
        let seen = of.compression.map(|compression| Entries {
            cache: slots[2],
            rate: compression.rate,
            top: compression.index.map(|index| index.top),
        });
        let norm = w.norm(at, "input_layernorm")?;
        let down = Inputs::new(w, Some(norm), down)?;
        let norm = w.norm(at, "self_attn.q_norm")?;
        let up = Inputs::new(w, Some(norm), up)?;
        // 2. attention
        let mixed = s.mixed.columns(0..d.out_cols());
        let inner = CompressedLayer {
            q,
            row,
            out: mixed,
            heads,
            rows: slots[0],
            window: d.window.expect("of such layers"),
            entries: seen,
            sinks: w.vector(at, "self_attn.attn_sink")?,
            scale: d.score_scale(),
        };
        // 3. out, by groups
        let (width, rank) = (d.out_cols() / of.out_groups, of.out_rank);
        let (all, grouped) = (w.linear(at, "self_attn.wo_a")?, s.grouped.columns(0..of.out_groups * rank));
        let group = |g: usize| {
            let linear = rows_of(&all, g * rank..(g + 1) * rank);
            (
                mixed.columns(g * width..(g + 1) * width),
                Projection { linear, out: grouped.columns(g * rank..(g + 1) * rank) },
            )
        };
        let groups = (0..of.out_groups).map(group).collect();
        let out = w.ordered_linear(at, "self_attn.wo_b")?;
        let norms = [w.norm_without_weights(dim)?, w.norm(at, "self_attn.norm")?];
        let out = Output::new(w, out, None)?;
        Ok(CompressedAttention { down, q_a, up, norms, rotary, entries, index, inner, groups, grouped, out })
    }

    /// `out += attention(norm(x))`
    pub fn forward(&self, backend: &mut dyn Operations, x: Tensor, out: Tensor) {
        let rows = |t: Tensor| t.first_rows(x.rows);
        let turn = |x: Tensor, head: usize, back: bool| Elementwise::TurnPairs { x, head, rotary: self.rotary, back };
        // 1. queries and rows
        self.down.forward(backend, x);
        self.up.forward(backend, rows(self.q_a));
        for (x, norm) in [self.inner.q, self.inner.row].map(rows).into_iter().zip(self.norms) {
            backend.elementwise(&Elementwise::Norm { x, norm, out: x });
            backend.elementwise(&turn(x, self.inner.dim(), false));
        }
        // 2. entries, and which of them tokens see
        if let Some(entries) = &self.entries {
            backend.compress(entries);
        }
        if let Some(EntryIndex { keys, select, weight_scale }) = &self.index {
            backend.compress(keys);
            backend.elementwise(&turn(rows(select.q), keys.dim(), false));
            backend.elementwise(&Elementwise::Scale { x: rows(select.weights), by: *weight_scale });
            backend.select(select);
        }
        // 3. attention, whose values are turned back
        backend.compressed_attention(&self.inner);
        backend.elementwise(&turn(rows(self.inner.out), self.inner.dim(), true));
        // 4. back to the residual stream
        for (x, projection) in &self.groups {
            backend.project(rows(*x), None, std::slice::from_ref(projection));
        }
        self.out.add(backend, rows(self.grouped), out);
    }
}

/// What is added to the logits of an entry's rows, of `bias`, `[rate, series * dim]`: series by series.
fn by_rows(bias: &[f32], compression: CompressionDescription, dim: usize) -> Vec<f32> {
    let width = compression.series() * dim;
    let of_series = |i: usize| bias.chunks_exact(width).flat_map(move |row| &row[i * dim..(i + 1) * dim]);
    (0..compression.series()).flat_map(of_series).copied().collect()
}
