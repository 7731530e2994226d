//! What the kernels of compressed attention are given.

use super::{Cache, Norm, Parameters, Tensor};
use crate::device::sys::Address;

parameters! {
    /// What makes entries.
    Compress {
        rows: Cache,
        entries: Cache,
        values: Tensor,
        logits: Tensor,
        norm: Norm,
        bias: Address,
        angles: Address,
        positions: Address,
        sequences: Address,
        slots: Address,
        entry_slots: Address,
        tables: Address,
        table_starts: Address,
        tokens: u32,
        half: u32,
        rate: u32,
        series: u32,
        every: u32,
        unused: u32,
    }
    /// Attention over the rows of windows and over entries.
    Compressed {
        rows: Cache,
        entries: Cache,
        q: Tensor,
        row: Tensor,
        out: Tensor,
        sinks: Address,
        positions: Address,
        sequences: Address,
        slots: Address,
        tables: Address,
        table_starts: Address,
        entry_tables: Address,
        entry_starts: Address,
        selected: Address,
        tokens: u32,
        heads: u32,
        window: u32,
        rate: u32,
        entry_rows: u32,
        top: u32,
        scale: f32,
        cap: f32,
        capped: u32,
        integers: u32,
    }
}
