//! Compares two checkpoints of one model, weight by weight. They may differ in names, layout and quantisation.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use sluice_kernels::Isa;
use sluice_model::source;

use crate::conversion::{ConversionUnit, OPTIONS};
use crate::input::{Input, matrix};
use crate::ordered::ordered;
use crate::planner::convert;
use crate::quantize::{SquaredError, squares, values};
use crate::rules::Rules;

/// Bytes of one side that a thread compares at a time.
const BLOCK: usize = 1 << 20;

/// A matrix that both models have.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Compared {
    /// `None` for embedding and head.
    pub layer: Option<usize>,
    /// `experts.gate_proj`, `self_attn.q_proj`, `embed_tokens`, ...
    pub module: &'static str,
}

struct Side {
    units: Vec<ConversionUnit>,
    input: Input,
}

impl Side {
    fn open(folder: &Path) -> Result<Side> {
        let (_, tensors) = source::open_with_tensors(folder)?;
        let mut rules = Rules::new(4, 64, vec!["*=none".parse().expect("a rule")]);
        let description = sluice_model::describe_stored(&tensors, &OPTIONS)?;
        let units = convert(&tensors, &description, &mut rules)?.units;
        Ok(Side { units, input: Input::open(tensors.checkpoint())? })
    }
}

/// The quantisation error of each quantised matrix of `packed` against `original`. `progress` gets the bytes compared so far, and all.
///
/// # Errors
/// Checkpoints of different models, or with nothing quantised.
pub fn compare(
    packed: &Path,
    original: &Path,
    threads: usize,
    isa: Isa,
    mut progress: impl FnMut(u64, u64),
) -> Result<BTreeMap<Compared, SquaredError>> {
    let (a, b) = (Side::open(packed)?, Side::open(original)?);
    let by_name: HashMap<&str, &ConversionUnit> = b.units.iter().map(|u| (u.tensors[0].name.as_str(), u)).collect();
    let mut pairs = Vec::new();
    for unit in a.units.iter().filter(|u| u.source.parts.len() == 3) {
        let name = unit.tensors[0].name.as_str();
        let other = by_name.get(name).with_context(|| format!("{}: no tensor {name:?}", original.display()))?;
        let same = other.source.all_rows() == unit.source.all_rows() && other.source.cols == unit.source.cols;
        ensure!(same, "tensor {name:?}: not of the same shape in {} and {}", packed.display(), original.display());
        pairs.push((unit, *other));
    }
    ensure!(!pairs.is_empty(), "{}: nothing in it is quantised", packed.display());

    let all: u64 = pairs.iter().map(|(_, other)| other.source.bytes()).sum();
    progress(0, all);
    let blocks = pairs.iter().flat_map(|&(unit, other)| {
        let step = (BLOCK / other.source.row_bytes().max(1)).max(1);
        let rows = unit.source.all_rows();
        (0..rows).step_by(step).map(move |row| (unit, other, row..(row + step).min(rows)))
    });
    let work = |(unit, other, rows): &(&ConversionUnit, &ConversionUnit, Range<usize>)| {
        let read = |side: &Side, unit: &ConversionUnit| -> Result<Vec<f32>> {
            let parts = side.input.read(&unit.source, rows.clone())?;
            values(isa, &matrix(&unit.source, &parts)?).with_context(|| format!("tensor {:?}", unit.source.name))
        };
        let (new, old) = (read(&a, unit)?, read(&b, other)?);
        let (weight, error) = squares(&old, &new);
        Ok(SquaredError { count: old.len() as u64, weight, error })
    };
    let (mut found, mut read) = (BTreeMap::<Compared, SquaredError>::new(), 0);
    ordered(threads, blocks, work, |(unit, other, rows), error| {
        found.entry(Compared { layer: unit.weight.layer, module: unit.weight.label() }).or_default().add(error);
        read += rows.len() as u64 * other.source.row_bytes() as u64;
        progress(read, all);
        Ok(())
    })?;
    Ok(found)
}
