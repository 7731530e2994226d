//! The output files, and the place of each tensor in them.
//!
//! *mlx*: `model.safetensors` or shards, with stacked experts, as `mlx_lm` reads them. *bundle*: one file with everything but routed experts, and one file for each
//! layer's experts, in which an expert is one aligned run (see `sluice_store::bundle`). A module's bytes are the same in both.

use std::collections::BTreeMap;
use std::ops::Range;

use anyhow::{Result, ensure};
use sluice_store::bundle::{self, BundlePart, ExpertLayer, PAGE};
use sluice_store::{Dtype, TensorPlan, shard_name};

use crate::conversion::ConversionUnit;

/// How the output is laid out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// Experts stacked, in shards: what `mlx_lm` reads.
    Mlx,
    /// One file per layer of experts, each expert one aligned run: what streams best.
    Bundle,
}

/// Where a tensor's bytes go: those of expert e to `base + e * stride` of the data section (e is 0 for other tensors).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Extents {
    pub base: u64,
    pub stride: u64,
}

/// A unit and where its tensors go.
#[derive(Clone, Debug)]
pub struct UnitExtents {
    /// Its position among the units.
    pub unit: usize,
    pub extents: Vec<Extents>,
}

/// A file to be written.
#[derive(Clone, Debug)]
pub struct OutFile {
    pub name: String,
    /// In the order of their offsets.
    pub tensors: Vec<TensorPlan>,
    /// Bytes of the data section.
    pub align: usize,
    pub units: Vec<UnitExtents>,
    /// Padding after each expert: offset of the first, bytes of each, stride and count.
    pub padding: Option<(Extents, u64, usize)>,
    /// For the manifest; `base` counts from the data section.
    pub experts: Option<(usize, ExpertLayer)>,
}

impl OutFile {
    /// Bytes of its tensors and padding.
    pub fn data_bytes(&self) -> u64 {
        self.tensors.iter().filter_map(TensorPlan::size).sum()
    }
}

/// Metadata of every file of weights.
pub fn metadata() -> BTreeMap<String, String> {
    BTreeMap::from([("format".to_owned(), "mlx".to_owned())])
}

/// The files of `units`. Shards have at most `limit` bytes of tensors (but at least one module, and all of a layer's experts together).
pub fn files(layout: Layout, units: &[ConversionUnit], limit: u64) -> Result<Vec<OutFile>> {
    match layout {
        Layout::Mlx => Ok(mlx(units, limit)),
        Layout::Bundle => bundled(units),
    }
}

fn mlx(units: &[ConversionUnit], limit: u64) -> Vec<OutFile> {
    let shards = shards(units, limit);
    let name = |number: usize| match shards.len() {
        1 => "model.safetensors".to_owned(),
        count => shard_name(number + 1, count),
    };
    let file = |(number, range): (usize, &Range<usize>)| plain(name(number), units, range.clone());
    shards.iter().enumerate().map(file).collect()
}

/// A file of whole tensors, one after the other.
fn plain(name: String, units: &[ConversionUnit], which: impl Iterator<Item = usize>) -> OutFile {
    let (mut tensors, mut placed, mut at) = (Vec::new(), Vec::new(), 0);
    for unit in which {
        let u = &units[unit];
        let experts = u.stack.as_ref().map_or(1, |s| s.count) as u64;
        let mut extents = Vec::new();
        for t in &u.tensors {
            let size = t.size().unwrap_or(0);
            extents.push(Extents { base: at, stride: size / experts });
            at += size;
            tensors.push(t.clone());
        }
        placed.push(UnitExtents { unit, extents });
    }
    // Devices that read mapped files take words of 16 bytes.
    OutFile { name, tensors, align: 64, units: placed, padding: None, experts: None }
}

/// Divides `units` into files of at most `limit` bytes of tensors, as MLX does: greedily, in order.
fn shards(units: &[ConversionUnit], limit: u64) -> Vec<Range<usize>> {
    let mut shards = Vec::new();
    let (mut start, mut size) = (0, 0u64);
    let layer = |unit: &ConversionUnit| unit.stack.as_ref().map(|s| s.layer);
    for (i, unit) in units.iter().enumerate() {
        let together = i > 0 && layer(unit).is_some() && layer(unit) == layer(&units[i - 1]);
        if i > start && !together && size + unit.size() > limit {
            shards.push(start..i);
            (start, size) = (i, 0);
        }
        size += unit.size();
    }
    shards.push(start..units.len());
    shards
}

fn bundled(units: &[ConversionUnit]) -> Result<Vec<OutFile>> {
    let mut layers = BTreeMap::<usize, Vec<usize>>::new();
    // An MTP head is not streamed. Where its names have no layer number, its experts go into the file of everything else.
    let apart = |unit: &ConversionUnit| unit.stack.as_ref().is_some_and(|s| !s.prefix.contains("mtp."));
    for (i, unit) in units.iter().enumerate() {
        if let Some(stack) = unit.stack.as_ref().filter(|_| apart(unit)) {
            layers.entry(stack.layer).or_default().push(i);
        }
    }
    ensure!(!layers.is_empty(), "a bundle is for models with routed experts, and this one has none (--layout mlx)");
    let resident = (0..units.len()).filter(|&i| !apart(&units[i]));
    let mut files = vec![plain(bundle::RESIDENT.to_owned(), units, resident)];
    for (layer, of_layer) in layers {
        files.push(experts(layer, units, &of_layer)?);
    }
    Ok(files)
}

/// The file of one layer's experts.
fn experts(layer: usize, units: &[ConversionUnit], of_layer: &[usize]) -> Result<OutFile> {
    let stack = |i: usize| units[i].stack.as_ref().expect("chosen for it");
    let (count, prefix) = (stack(of_layer[0]).count, &stack(of_layer[0]).prefix);
    let same = of_layer.iter().all(|&i| stack(i).count == count && stack(i).prefix == *prefix);
    ensure!(same && count > 0, "layer {layer}: its projections differ in their number of experts");

    // 1. one expert: its parts in order of projection
    let (mut parts, mut at) = (Vec::new(), 0u64);
    let mut offsets = Vec::new();
    for &i in of_layer {
        let mut of_unit = Vec::new();
        for t in &units[i].tensors {
            let leaf = t.name.rsplit('.').next().unwrap_or_default();
            let bytes = t.size().unwrap_or(0) / count as u64;
            parts.push(BundlePart {
                name: format!("{}.{leaf}", stack(i).part),
                dtype: t.dtype.name().to_owned(),
                shape: t.shape[1..].to_vec(),
                offset: at,
                bytes,
            });
            of_unit.push(at);
            at += bytes;
        }
        offsets.push(of_unit);
    }
    let stride = at.next_multiple_of(PAGE);

    // 2. all of them
    let mut tensors = Vec::with_capacity(count * (parts.len() + 1));
    for e in 0..count {
        for p in &parts {
            let dtype = Dtype::from_name(&p.dtype).expect("named by us");
            tensors.push(TensorPlan { name: format!("{prefix}.{e}.{}", p.name), dtype, shape: p.shape.clone() });
        }
        if stride > at {
            let shape = vec![(stride - at) as usize];
            tensors.push(TensorPlan { name: format!("{prefix}.{e}.padding"), dtype: Dtype::U8, shape });
        }
    }
    let placed = of_layer.iter().zip(offsets).map(|(&unit, offsets)| UnitExtents {
        unit,
        extents: offsets.into_iter().map(|base| Extents { base, stride }).collect(),
    });
    let name = bundle::experts_name(layer);
    let manifest = ExpertLayer { file: name.clone(), base: 0, stride, count, parts };
    Ok(OutFile {
        name,
        tensors,
        align: PAGE as usize,
        units: placed.collect(),
        padding: (stride > at).then_some((Extents { base: at, stride }, stride - at, count)),
        experts: Some((layer, manifest)),
    })
}
