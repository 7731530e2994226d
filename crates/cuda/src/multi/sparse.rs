//! Indexers and compressed attention on several devices: all of a layer is on one of them.

use sluice_backend::{
    CacheLayer, CompressLayer, CompressedLayer, Entries, IndexLayer, IndexNorm, Operations, SelectLayer, Tensor,
};

use crate::multi::partition::OperationKey;
use crate::multi::pipeline::Pipeline;

impl Pipeline {
    /// The place of a layer of a cache group on its device.
    fn own_layer(&self, CacheLayer { group, layer }: CacheLayer) -> CacheLayer {
        CacheLayer { group, layer: self.groups[group].layers[layer].1 }
    }

    /// On the device of the rows that are selected: the plan cuts nothing between.
    pub(super) fn select_positions(&mut self, layer: &IndexLayer) {
        let home = self.home(OperationKey::Attention(layer.group, layer.layer));
        let tokens = self.devices[0].context.inputs.tokens().len();
        let changed = [layer.q, layer.k].into_iter().chain(layer.weights);
        let changed: Vec<Tensor> = changed.map(|t| t.first_rows(tokens)).collect();
        let of_pool = layer.pool_logits().into_iter().flat_map(|of| [of.logits.first_rows(tokens), of.bias]);
        let norm = match layer.norm {
            IndexNorm::Tokens(norm) => vec![norm.scale.weight, norm.bias],
            IndexNorm::Pools(norm) => vec![norm.weight],
        };
        let reads: Vec<Tensor> = changed.iter().copied().chain(norm).chain(of_pool).collect();
        let there = self.groups[layer.group].layers[layer.layer].1;
        self.prepare(home, &reads, &changed).index(&IndexLayer { layer: there, ..layer.clone() });
    }

    /// With what follows up to the attention, on the device of its rows: the plan cuts nothing between.
    pub(super) fn make_entries(&mut self, layer: &CompressLayer) {
        let home = self.home(OperationKey::Attention(layer.rows.group, layer.rows.layer));
        let tokens = self.devices[0].context.inputs.tokens().len();
        let [values, logits] = [layer.values, layer.logits].map(|t| t.first_rows(tokens));
        let [rows, entries] = [layer.rows, layer.entries].map(|at| self.own_layer(at));
        self.prepare(home, &[values, logits, layer.bias, layer.norm.weight], &[]).compress(&CompressLayer {
            rows,
            entries,
            ..layer.clone()
        });
    }

    /// The entries that tokens see.
    pub(super) fn select_entries(&mut self, layer: &SelectLayer) {
        let home = self.home(OperationKey::Attention(layer.keys.group, layer.keys.layer));
        let tokens = self.devices[0].context.inputs.tokens().len();
        let [q, weights] = [layer.q, layer.weights].map(|t| t.first_rows(tokens));
        let keys = self.own_layer(layer.keys);
        self.prepare(home, &[q, weights], &[]).select(&SelectLayer { keys, ..layer.clone() });
    }

    /// Attention over windows and entries.
    pub(super) fn attend_compressed(&mut self, layer: &CompressedLayer) {
        let home = self.home(OperationKey::Attention(layer.rows.group, layer.rows.layer));
        let tokens = self.devices[0].context.inputs.tokens().len();
        let [q, row, out] = [layer.q, layer.row, layer.out].map(|t| t.first_rows(tokens));
        let rows = self.own_layer(layer.rows);
        let entries = layer.entries.map(|of| Entries { cache: self.own_layer(of.cache), ..of });
        self.prepare(home, &[q, row, layer.sinks], &[out]).compressed_attention(&CompressedLayer {
            rows,
            entries,
            ..layer.clone()
        });
    }
}
