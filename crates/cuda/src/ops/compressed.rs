//! Compressed attention: rows and what entries are made of into their slots, entries, and attention over the rows of windows and over entries.

use anyhow::Result;
use sluice_backend::{AttentionMode, CacheLayer, CompressLayer, CompressedLayer, KvLayout};

use crate::device::sys::Address;
use crate::kernels::Kernel;
use crate::ops::attention;
use crate::ops::context::Context;
use crate::parameters::{self as p, number};

/// Threads of a block that makes an entry or attends.
const THREADS: u32 = 128;
/// Query heads of a block that attends.
const TILES: [(usize, Kernel); 2] = [(1, Kernel::COMPRESSED_ATTEND_1), (4, Kernel::COMPRESSED_ATTEND_4)];

/// A layer of rows that are keys and values.
fn rows_of(context: &Context, CacheLayer { group, layer }: CacheLayer) -> (p::Cache, KvLayout) {
    let layout = context.kv[group].layout;
    assert!(layout.v_dim == 0 && layer < layout.layers, "layer {layer} of rows in {layout:?}");
    let cache = attention::cache(context.kv[group].memory.at, &layout, layer);
    (p::Cache { v: cache.k, v_scales: cache.k_scales, v_dim: cache.k_dim, ..cache }, layout)
}

/// Stores rows and their logits, and makes the entries of windows that end with a token of the step.
pub fn compress(context: &Context, layer: &CompressLayer) -> Result<()> {
    let (gpu, tokens, dim) = (&context.gpu, context.inputs.tokens().len(), layer.dim());
    let ((rows, of_rows), (entries, of_entries)) = (rows_of(context, layer.rows), rows_of(context, layer.entries));
    let (series, rate) = (layer.series(), layer.rate);
    assert!(of_rows.kv_heads == 2 * series && of_rows.k_dim == dim, "{series} series of {dim} in {of_rows:?}");
    assert!(of_entries.kv_heads == 1 && of_entries.k_dim == dim, "entries of {dim} in {of_entries:?}");
    assert!((1..=2).contains(&series) && rate > 0 && rate.is_multiple_of(of_entries.every), "entries of {rate}");
    assert!([layer.values, layer.logits].iter().all(|t| t.rows >= tokens && t.cols == series * dim), "{tokens} tokens");
    assert_eq!(layer.bias.cols, layer.rows_of_entry() * dim, "a bias for each row");
    let rotary = &context.rotary[layer.rotary.number()];
    assert!(2 * rotary.half() <= dim, "{} pairs in an entry of {dim}", rotary.half());
    if tokens == 0 {
        return Ok(());
    }
    let [of_rows, to] = [layer.rows.group, layer.entries.group].map(|group| context.step.groups[group]);
    let parameters = p::Compress {
        rows,
        entries,
        values: context.place(layer.values),
        logits: context.place(layer.logits),
        norm: context.norm(&layer.norm),
        bias: context.place(layer.bias).at,
        angles: rotary.memory.at,
        positions: context.step.positions,
        sequences: context.step.sequences,
        slots: of_rows.slots,
        entry_slots: to.slots,
        tables: of_rows.tables,
        table_starts: of_rows.table_starts,
        tokens: number(tokens),
        half: number(rotary.half()),
        rate: number(rate),
        series: number(series),
        every: number(of_entries.every),
        unused: 0,
    };
    let grid = [number(tokens), 1, 1];
    // SAFETY: tensors and angles were checked; slots are of committed blocks, and tables reach as far as positions.
    unsafe {
        gpu.launch(Kernel::COMPRESS_STORE, grid, THREADS, 0, &parameters)?;
        gpu.launch(Kernel::COMPRESS_ENTRY, grid, THREADS, number(4 * dim), &parameters)?;
    }
    Ok(())
}

/// Stores rows, and attends over those of windows and over entries. `selected`: rows of entries that were selected, if not all are seen.
pub fn attend(context: &Context, layer: &CompressedLayer, selected: Option<Address>) -> Result<()> {
    let (gpu, tokens, dim, heads) = (&context.gpu, context.inputs.tokens().len(), layer.dim(), layer.heads);
    let (rows, layout) = rows_of(context, layer.rows);
    assert!(layout.kv_heads == 1 && layout.k_dim == dim && layout.every == 1, "rows of {dim} in {layout:?}");
    assert!(layout.mode.takes(layout.kv_type), "attention in mode {:?} of {:?}", layout.mode, layout.kv_type);
    assert!(layer.q.cols == heads * dim && layer.out.cols == heads * dim && layer.sinks.cols == heads, "{heads} heads");
    assert!([layer.q, layer.row, layer.out].iter().all(|t| t.rows >= tokens) && layer.window > 0, "{tokens} tokens");
    if tokens == 0 {
        return Ok(());
    }
    let of_rows = context.step.groups[layer.rows.group];
    let mut parameters = p::Compressed {
        rows,
        entries: rows,
        q: context.place(layer.q),
        row: context.place(layer.row),
        out: context.place(layer.out),
        sinks: context.place(layer.sinks).at,
        positions: context.step.positions,
        sequences: context.step.sequences,
        slots: of_rows.slots,
        tables: of_rows.tables,
        table_starts: of_rows.table_starts,
        tokens: number(tokens),
        heads: number(heads),
        window: number(layer.window.min(u32::MAX as usize)),
        scale: layer.scale,
        integers: (layout.mode != AttentionMode::F32).into(),
        ..p::Compressed::default()
    };
    if let Some(of) = layer.entries {
        let (entries, own) = rows_of(context, of.cache);
        let alike = (own.kv_heads, own.k_dim, own.kv_type, own.mode) == (1, dim, layout.kv_type, layout.mode);
        assert!(alike && of.rate > 0 && of.rate.is_multiple_of(own.every), "entries of {} in {own:?}", of.rate);
        let tables = context.step.groups[of.cache.group];
        (parameters.entries, parameters.rate) = (entries, number(of.rate));
        parameters.entry_rows = number(of.rate / own.every);
        (parameters.entry_tables, parameters.entry_starts) = (tables.tables, tables.table_starts);
        if let Some((top, selected)) = of.top.zip(selected) {
            (parameters.top, parameters.selected) = (number(top), selected);
        }
    }
    let (tile, kernel) = TILES.into_iter().find(|(n, _)| *n >= heads).unwrap_or(TILES[TILES.len() - 1]);
    let shared = number(4 * tile * (dim.next_multiple_of(16) + dim));
    // SAFETY: tensors were checked; slots are of committed blocks, and tables reach as far as positions.
    unsafe {
        gpu.launch(Kernel::COMPRESSED_STORE, [number(tokens), 1, 1], 32, 0, &parameters)?;
        gpu.launch(kernel, [number(tokens), number(heads.div_ceil(tile)), 1], THREADS, shared, &parameters)?;
    }
    Ok(())
}
