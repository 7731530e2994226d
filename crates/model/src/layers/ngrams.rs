//! Embeddings of n-grams (Qwen4-Exp): rows of a large table go into the residual streams in front of some layers.

use anyhow::Result;
use sluice_backend::{Elementwise, NgramLayer, NgramTable, Norm, Operations, Projection, Tensor};

use crate::description::{Description, NGRAM_CONVOLUTION, NGRAM_KEYS, NGRAM_NORMS, NGRAM_VALUE, NgramsDescription};
use crate::weights::Weights;

/// Activations shared by all such layers: `[max_tokens, ..]` each.
#[derive(Clone, Copy)]
pub struct NgramScratch {
    /// A token's rows.
    rows: Tensor,
    /// A key for each stream.
    keys: Tensor,
    /// The streams, normed.
    queries: Tensor,
    value: Tensor,
}

impl NgramScratch {
    /// For layers like these, between streams of `all` elements.
    pub fn alloc(w: &mut Weights, d: &NgramsDescription, (hidden, all): (usize, usize)) -> Result<NgramScratch> {
        Ok(NgramScratch {
            rows: w.scratch(d.width)?,
            keys: w.scratch(all)?,
            queries: w.scratch(all)?,
            value: w.scratch(hidden)?,
        })
    }
}

/// What stands in front of a layer's first half.
pub struct Ngrams {
    table: NgramTable,
    rows: Tensor,
    /// Keys and the value.
    inputs: [Projection; 2],
    /// Of keys and of streams.
    norms: [Norm; 2],
    inner: NgramLayer,
}

impl Ngrams {
    /// Those of layer `at`, between `streams`; `None` where it has none.
    pub fn load(
        w: &mut Weights,
        d: &Description,
        (s, streams): (&NgramScratch, Tensor),
        at: usize,
    ) -> Result<Option<Ngrams>> {
        let Some(own) = d.ngrams.as_ref() else { return Ok(None) };
        let Some(number) = own.layers.iter().position(|(layer, _)| *layer == at) else { return Ok(None) };
        let [of_keys, of_streams, of_convolution] = NGRAM_NORMS;
        let len = d.ngram_state_len();
        let inner = NgramLayer {
            keys: s.keys,
            queries: s.queries,
            value: s.value,
            streams,
            norm: w.norm(at, of_convolution)?,
            conv: w.dilated_convolution(at, NGRAM_CONVOLUTION, own.size())?,
            state_at: d.state_len() - (own.layers.len() - number) * len,
        };
        Ok(Some(Ngrams {
            table: w.ngram_table(at, own)?,
            rows: s.rows,
            inputs: [
                Projection { linear: w.linear(at, NGRAM_KEYS)?, out: s.keys },
                Projection { linear: w.linear(at, NGRAM_VALUE)?, out: s.value },
            ],
            norms: [w.norm(at, of_keys)?, w.norm(at, of_streams)?],
            inner,
        }))
    }

    /// Adds to the streams of the step's tokens.
    pub fn forward(&self, backend: &mut dyn Operations, tokens: usize) {
        let NgramLayer { keys, queries, streams, value, .. } = self.inner;
        let [rows, keys, queries, streams] = [self.rows, keys, queries, streams].map(|t| t.first_rows(tokens));
        let [of_keys, of_streams] = self.norms;
        // 1. Rows of the table, keys and the value
        backend.embed_ngrams(&self.table, rows);
        backend.project(rows, None, &self.inputs);
        // 2. Norms of keys and streams
        let group = value.cols;
        backend.elementwise(&Elementwise::NormGroups { x: keys, norm: of_keys, group, out: keys });
        backend.elementwise(&Elementwise::NormGroups { x: streams, norm: of_streams, group, out: queries });
        // 3. Gates, convolution, and their sum
        backend.add_ngrams(&self.inner);
    }
}
