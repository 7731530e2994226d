//! Compressed attention on the CPU: which caches and tensors its parts take.

use std::time::Instant;

use sluice_backend::{CompressLayer, CompressedLayer, Phase, SelectLayer};

use crate::attention;
use crate::cpu::Cpu;
use crate::exec::context;

impl Cpu {
    /// Rows into their slots, and entries.
    pub(crate) fn make_entries(&mut self, layer: &CompressLayer) {
        let t0 = Instant::now();
        let operands = attention::CompressOperands {
            values: self.place(layer.values),
            logits: self.place(layer.logits),
            bias: self.place(layer.bias),
            norm: (self.place(layer.norm.weight), layer.norm.eps),
            frequencies: &self.rotary[layer.rotary.number()].frequencies,
        };
        let [rows, entries] = [layer.rows.group, layer.entries.group].map(|group| self.kv[group]);
        let [of_rows, of_entries] = self
            .buffers
            .get_disjoint_mut([rows.buffer.number(), entries.buffer.number()])
            .expect("rows and entries are two groups");
        let rows = attention::Blocks { layout: rows.layout, bytes: of_rows.as_bytes_mut() };
        let entries = attention::Blocks { layout: entries.layout, bytes: of_entries.as_bytes_mut() };
        attention::compress(context!(self, &[]), &self.inputs, (rows, entries), &operands, layer);
        self.record(Phase::Attention, t0, std::iter::empty(), 0);
    }

    /// The entries that tokens see.
    pub(crate) fn select_entries(&mut self, layer: &SelectLayer) {
        let t0 = Instant::now();
        let operands = [layer.q, layer.weights].map(|t| self.place(t));
        let (keys, entries) = (self.kv[layer.keys.group], self.kv[layer.entries_group].layout);
        let bytes = self.buffers[keys.buffer.number()].as_bytes_mut();
        let blocks = (&keys.layout, &*bytes, &entries);
        self.index.select_entries(context!(self, &[]), &self.inputs, blocks, operands, layer);
        self.record(Phase::Attention, t0, std::iter::empty(), 0);
    }

    /// Attention over windows and entries.
    pub(crate) fn attend_compressed(&mut self, layer: &CompressedLayer) {
        let t0 = Instant::now();
        let [q, row, out, sinks] = [layer.q, layer.row, layer.out, layer.sinks].map(|t| self.place(t));
        let operands = attention::AttendOperands { q, row, out, sinks };
        let rows = self.kv[layer.rows.group];
        let of = rows.buffer.number();
        let (rows, entries) = match layer.entries.map(|of| self.kv[of.cache.group]) {
            None => (attention::Blocks { layout: rows.layout, bytes: self.buffers[of].as_bytes_mut() }, None),
            Some(entries) => {
                let both = self.buffers.get_disjoint_mut([of, entries.buffer.number()]);
                let [of_rows, of_entries] = both.expect("rows and entries are two groups");
                let rows = attention::Blocks { layout: rows.layout, bytes: of_rows.as_bytes_mut() };
                (rows, Some((entries.layout, &*of_entries.as_bytes_mut())))
            }
        };
        let context = context!(self, &[]);
        self.compressed.attend(context, &self.inputs, (rows, entries), &operands, (layer, &self.index));
        self.record(Phase::Attention, t0, std::iter::empty(), 0);
    }
}
