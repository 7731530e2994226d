//! Writes a file of the output: rows are read, quantised on all cores, and written to their places, a few megabytes at a time.

use std::borrow::Cow;
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use sluice_backend::decay_rates;
use sluice_kernels::Isa;
use sluice_kernels::format::{Float, WeightFormat};
use sluice_kernels::matrix::Matrix;
use sluice_store::bundle::FileEntry;
use sluice_store::{Writer, open_regular, xxh3_of};

use crate::calibrate::Calibrator;
use crate::conversion::{ConversionUnit, Rows, Source, Treatment};
use crate::input::{Input, matrix};
use crate::journal::Finished;
use crate::layout::{self, Extents, OutFile, UnitExtents};
use crate::ordered::ordered;
use crate::quantize::{Quantizer, SquaredError, values};
use crate::watch::{Event, Stopped, Watch};

/// Bytes of input that a thread quantises at a time.
const BLOCK: usize = 1 << 20;

/// Writes files of weights.
pub struct FileWriter<'a> {
    pub input: &'a Input,
    pub units: &'a [ConversionUnit],
    pub folder: &'a Path,
    pub quantizer: Quantizer,
    pub threads: usize,
    pub watch: &'a dyn Watch,
    /// Bytes of all units, for the progress.
    pub input_bytes: u64,
    /// Bytes of the input read so far.
    pub read: u64,
}

/// Rows of one expert of a unit, or of a unit without experts.
struct Block<'a> {
    placed: &'a UnitExtents,
    expert: usize,
    /// Rows within the expert.
    rows: Range<usize>,
}

/// Experts of a unit (1 if it has none), and the rows of each.
fn experts_and_rows(unit: &ConversionUnit) -> (usize, usize) {
    let experts = unit.stack.as_ref().map_or(1, |s| s.count);
    (experts, unit.source.all_rows() / experts)
}

impl FileWriter<'_> {
    /// Writes one file of weights. With a calibration, that quantises the experts.
    pub fn file(&mut self, out: &OutFile, mut calibrator: Option<&mut Calibrator>) -> Result<Finished> {
        let path = self.folder.join(&out.name);
        let mut writer = Writer::aligned(&path, &out.tensors, &layout::metadata(), out.align)?;
        let mut errors = BTreeMap::new();
        let mut notes = Vec::new();

        // 1. units that are quantised without calibration, or copied
        let (layers, alone) = match calibrator {
            Some(_) => self.calibrated(out),
            None => (BTreeMap::new(), out.units.iter().collect()),
        };
        self.units(&alone, &mut writer, &mut errors)?;

        // 2. calibrated experts
        for (layer, placed) in &layers {
            let calibrator = calibrator.as_deref_mut().expect("there are such layers only then");
            let stacks: Vec<&ConversionUnit> = placed.iter().map(|p| &self.units[p.unit]).collect();
            let (input, threads) = (self.input, self.threads);
            let bytes = stacks.iter().map(|u| u.source.bytes()).sum::<u64>();
            let experts = stacks.first().map_or(1, |u| experts_and_rows(u).0 as u64);
            let (read, all, watch) = (self.read, self.input_bytes, self.watch);
            let line = calibrator.layer(*layer, &stacks, input, threads, |expert, parts| {
                ensure!(!watch.is_stopped(), Stopped);
                for (placed, (part, error)) in placed.iter().zip(parts) {
                    put(&mut writer, &placed.extents, expert, part)?;
                    errors
                        .entry(self.units[placed.unit].weight.class.name().to_owned())
                        .or_insert_with(SquaredError::default)
                        .add(error);
                }
                let done = read + bytes * (expert as u64 + 1) / experts;
                watch.event(Event::Progress { done, all });
                Ok(())
            })?;
            notes.extend(line);
            self.read += bytes;
        }

        // 3. padding
        if let Some((extents, bytes, count)) = out.padding {
            let zeros = vec![0; bytes as usize];
            for e in 0..count as u64 {
                writer.write_at(&zeros, extents.base + e * extents.stride)?;
            }
        }
        let data_start = writer.data_start();
        writer.finish()?;

        // 4. its checksum, read back from disk
        let bytes = std::fs::metadata(&path).with_context(|| path.display().to_string())?.len();
        let entry = FileEntry { bytes, xxh3: xxh3_of(&path, &mut |_| {})? };
        let mut experts = out.experts.clone();
        if let Some((_, layer)) = &mut experts {
            layer.base = data_start;
        }
        Ok(Finished { entry, experts, errors, notes })
    }

    /// Takes a calibration through a file that is complete already; its header has `data_start` bytes.
    pub fn pass(&self, out: &OutFile, calibrator: &mut Calibrator) -> Result<()> {
        let path = self.folder.join(&out.name);
        let file = open_regular(&path)?;
        let failed = || format!("{}: cannot read", path.display());
        let mut header = [0; 8];
        file.read_exact_at(&mut header, 0).with_context(failed)?;
        let data_start = 8 + u64::from_le_bytes(header);
        for (layer, placed) in self.calibrated(out).0 {
            let stacks: Vec<&ConversionUnit> = placed.iter().map(|p| &self.units[p.unit]).collect();
            let stored = |expert: usize| {
                let of_unit = |placed: &&UnitExtents| {
                    let unit = &self.units[placed.unit];
                    let (_, rows) = experts_and_rows(unit);
                    let Treatment::Quantize { bits, group, float } = unit.treatment else { bail!("not quantised") };
                    let mut parts = Vec::new();
                    for (extents, tensor) in placed.extents.iter().zip(&unit.tensors) {
                        let count = unit.stack.as_ref().map_or(1, |s| s.count);
                        let mut bytes = vec![0; tensor.size().unwrap_or(0) as usize / count];
                        let at = data_start + extents.base + expert as u64 * extents.stride;
                        file.read_exact_at(&mut bytes, at).with_context(failed)?;
                        parts.push(bytes);
                    }
                    let form = WeightFormat::Affine { bits, group, scale: float };
                    let m = Matrix::new(form, rows, unit.source.cols, parts.iter().map(Vec::as_slice))?;
                    values(self.quantizer.isa, &m)
                };
                placed.iter().map(of_unit).collect()
            };
            calibrator.again(layer, &stacks, self.input, self.threads, stored)?;
        }
        Ok(())
    }

    /// The units that a calibration quantises, by layer, and the others.
    fn calibrated<'b>(&self, out: &'b OutFile) -> (BTreeMap<usize, Vec<&'b UnitExtents>>, Vec<&'b UnitExtents>) {
        let (mut layers, mut alone) = (BTreeMap::<usize, Vec<&UnitExtents>>::new(), Vec::new());
        for placed in &out.units {
            match &self.units[placed.unit].stack {
                Some(stack) => layers.entry(stack.layer).or_default().push(placed),
                None => alone.push(placed),
            }
        }
        // A layer is calibrated only if all three projections are quantised.
        let quantized = |p: &&UnitExtents| matches!(self.units[p.unit].treatment, Treatment::Quantize { .. });
        layers.retain(|_, placed| {
            let all = placed.iter().all(quantized);
            if !all {
                alone.append(placed);
            }
            all
        });
        (layers, alone)
    }

    /// Streams units to their places.
    fn units(
        &mut self,
        placed: &[&UnitExtents],
        writer: &mut Writer,
        errors: &mut BTreeMap<String, SquaredError>,
    ) -> Result<()> {
        let (units, input, quantizer) = (self.units, self.input, self.quantizer);
        let blocks = placed.iter().flat_map(|placed| {
            let (experts, rows) = experts_and_rows(&units[placed.unit]);
            let row_bytes = units[placed.unit].source.row_bytes();
            let step = (BLOCK / row_bytes.max(1)).max(1);
            (0..experts).flat_map(move |expert| {
                let block = move |row| Block { placed, expert, rows: row..(row + step).min(rows) };
                (0..rows).step_by(step).map(block)
            })
        });
        let work = |b: &Block| {
            let unit = &units[b.placed.unit];
            let from = b.expert * experts_and_rows(unit).1;
            let parts = input.read(&unit.source, from + b.rows.start..from + b.rows.end)?;
            let (source, parts) = in_order(quantizer.isa, &unit.source, parts)?;
            let packed = match unit.treatment {
                Treatment::Logarithm => logarithms(&parts[0]).map(|bytes| (vec![bytes], SquaredError::default())),
                Treatment::Copy => Ok((parts, SquaredError::default())),
                Treatment::AddOne(float) => Ok((vec![plus_one(&parts[0], float)], SquaredError::default())),
                Treatment::Widen => matrix(&source, &parts).and_then(|m| {
                    let bytes = values(quantizer.isa, &m)?.iter().flat_map(|x| x.to_le_bytes()).collect();
                    Ok((vec![bytes], SquaredError::default()))
                }),
                Treatment::Quantize { bits, group, float } => matrix(&source, &parts)
                    .and_then(|m| quantizer.block(&m, float, bits, group))
                    .map(|p| (vec![p.data, p.scales, p.biases], p.error)),
            };
            packed.with_context(|| format!("tensor {:?}", unit.source.name))
        };
        let (read, all, watch) = (&mut self.read, self.input_bytes, self.watch);
        let take = |b: Block, (parts, error): (Vec<Vec<u8>>, SquaredError)| {
            ensure!(!watch.is_stopped(), Stopped);
            let unit = &units[b.placed.unit];
            for (extents, part) in b.placed.extents.iter().zip(&parts) {
                let row_bytes = part.len() / b.rows.len();
                let at = extents.base + b.expert as u64 * extents.stride + (b.rows.start * row_bytes) as u64;
                writer.write_at(part, at)?;
            }
            if let Treatment::Quantize { .. } = unit.treatment {
                errors.entry(unit.weight.class.name().to_owned()).or_default().add(error);
            }
            *read += b.rows.len() as u64 * unit.source.row_bytes() as u64;
            watch.event(Event::Progress { done: *read, all });
            Ok(())
        };
        ordered(self.threads, blocks, work, take)
    }
}

/// Writes the parts of a whole expert to their places.
fn put(writer: &mut Writer, extents: &[Extents], expert: usize, parts: Vec<Vec<u8>>) -> Result<()> {
    ensure!(extents.len() == parts.len(), "{} parts for {} extents", parts.len(), extents.len());
    for (extents, part) in extents.iter().zip(parts) {
        writer.write_at(&part, extents.base + expert as u64 * extents.stride)?;
    }
    Ok(())
}

/// Rows in the output's order of columns: as f32, where they were quantised.
fn in_order(isa: Isa, source: &Source, parts: Vec<Vec<u8>>) -> Result<(Cow<'_, Source>, Vec<Vec<u8>>)> {
    let Some(columns) = &source.columns else { return Ok((Cow::Borrowed(source), parts)) };
    if let Some(WeightFormat::Float(float)) = source.form {
        return Ok((Cow::Borrowed(source), vec![columns.put(&parts[0], float.size())]));
    }
    let values = matrix(source, &parts).and_then(|m| values(isa, &m));
    let values = values.with_context(|| format!("tensor {:?}", source.name))?;
    let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
    let rows = Rows { row_bytes: 4 * source.cols, segments: source.parts[0].segments.clone() };
    let form = Some(WeightFormat::Float(Float::F32));
    Ok((Cow::Owned(Source { parts: vec![rows], form, ..source.clone() }), vec![columns.put(&bytes, 4)]))
}

/// Numbers a with `-exp(a)` as near to each f32 as there are: mostly exactly it. Of several, the one with the fewest digits, which checkpoints have.
fn logarithms(rates: &[u8]) -> Result<Vec<u8>> {
    let of = |bytes: &[u8; 4]| -> Result<[u8; 4]> {
        let rate = f32::from_le_bytes(*bytes);
        ensure!(rate < 0.0 && rate.is_finite(), "{rate} is no decay rate, which is negative");
        let first = (f64::from(-rate)).ln() as f32;
        let near = (-8..=8i32).map(|steps| f32::from_bits(first.to_bits().wrapping_add_signed(steps)));
        let off = |a: f32| (f64::from(decay_rates(&[a])[0]) - f64::from(rate)).abs();
        // Distances are not negative, so that their bits are in their order.
        let key = |a: &f32| (off(*a).to_bits(), Reverse(a.to_bits().trailing_zeros()));
        let best = near.filter(|a| a.is_finite()).min_by_key(key);
        Ok(best.unwrap_or(first).to_le_bytes())
    };
    let all: Vec<[u8; 4]> = rates.as_chunks::<4>().0.iter().map(of).collect::<Result<_>>()?;
    Ok(all.as_flattened().to_vec())
}

/// f32 values with 1 added to each.
fn plus_one(bytes: &[u8], float: Float) -> Vec<u8> {
    (0..bytes.len() / float.size()).flat_map(|i| (float.read(bytes, i) + 1.0).to_le_bytes()).collect()
}
