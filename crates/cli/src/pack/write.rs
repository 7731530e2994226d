//! Carrying a plan out: rows are read, quantised on all cores, and appended in order, a few megabytes at a time.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use sluice_kernels::matmul::Float;
use sluice_store::{Checkpoint, TensorPlan, Writer, shard_name, write_index};
use tempfile::SpooledTempFile;

use crate::interrupt;
use crate::progress::Progress;

use super::Interrupted;
use super::folder::Output;
use super::ordered::ordered;
use super::plan::{Source, Treatment, Unit};
use super::quantize::{Error, Packed, Quantizer};

/// Bytes of input that one thread takes at a time.
const BLOCK: usize = 1 << 20;
/// Scales and biases of a tensor wait in memory up to here, and beyond it in a file without a name, until its weights are written.
const SPOOL: usize = 8 << 20;

/// What was done.
#[derive(Debug, Default)]
pub struct Done {
    /// By class of module: weights and their error.
    pub errors: BTreeMap<&'static str, Error>,
    /// Of the files of weights.
    pub bytes: u64,
    /// Of the input, read so far.
    read: u64,
}

/// Everything that carrying out needs to know.
pub struct Job<'a> {
    pub checkpoint: &'a Checkpoint,
    pub quantizer: Quantizer,
    pub threads: usize,
    /// Bytes of tensors in a file, at most (but at least one module).
    pub shard: u64,
    pub progress: &'a Progress,
    /// That all units have: what the progress is measured by.
    pub input_bytes: u64,
}

/// Divides `units` into files of at most `limit` bytes of tensors, as MLX does: greedily, in order.
pub fn shards(units: &[Unit], limit: u64) -> Vec<Range<usize>> {
    let mut shards = Vec::new();
    let (mut start, mut size) = (0, 0u64);
    for (i, unit) in units.iter().enumerate() {
        if i > start && size + unit.size() > limit {
            shards.push(start..i);
            (start, size) = (i, 0);
        }
        size += unit.size();
    }
    shards.push(start..units.len());
    shards
}

/// Bytes of scales and biases that wait for their tensor's weights, at most.
pub fn spooled(units: &[Unit]) -> u64 {
    let of = |unit: &Unit| unit.tensors.iter().skip(1).filter_map(TensorPlan::size).sum();
    units.iter().map(of).max().unwrap_or(0)
}

impl Job<'_> {
    /// Writes all files of weights, and their index where there are several.
    pub fn run(&self, units: &[Unit], folder: &Path, output: &mut Output) -> Result<Done> {
        let files: Vec<(PathBuf, File)> = self.open_files()?;
        let shards = shards(units, self.shard);
        let (mut done, mut index, mut total) = (Done::default(), BTreeMap::new(), 0);
        let metadata = BTreeMap::from([("format".to_owned(), "mlx".to_owned())]);
        for (number, range) in shards.iter().enumerate() {
            let name = match shards.len() {
                1 => "model.safetensors".to_owned(),
                count => shard_name(number + 1, count),
            };
            let path = output.file(&name);
            let units = &units[range.clone()];
            let plan: Vec<TensorPlan> = units.iter().flat_map(|u| u.tensors.iter().cloned()).collect();
            let mut writer = Writer::create(&path, &plan, &metadata)?;
            self.units(units, folder, &files, &mut writer, &mut done)?;
            writer.finish()?;
            done.bytes += std::fs::metadata(&path).with_context(|| path.display().to_string())?.len();
            total += plan.iter().filter_map(TensorPlan::size).sum::<u64>();
            index.extend(plan.into_iter().map(|t| (t.name, name.clone())));
        }
        if shards.len() > 1 {
            output.file("model.safetensors.index.json");
            write_index(folder, &index, total)?;
        }
        Ok(done)
    }

    fn open_files(&self) -> Result<Vec<(PathBuf, File)>> {
        let open = |(name, _): &(String, u64)| {
            let path = self.checkpoint.folder().join(name);
            let file = File::open(&path).with_context(|| format!("{}: cannot open", path.display()))?;
            Ok((path, file))
        };
        self.checkpoint.file_sizes().iter().map(open).collect()
    }

    /// Streams the units of one file.
    fn units(
        &self,
        units: &[Unit],
        folder: &Path,
        files: &[(PathBuf, File)],
        writer: &mut Writer,
        done: &mut Done,
    ) -> Result<()> {
        let blocks = units.iter().flat_map(|unit| {
            let step = (BLOCK / unit.source.row_bytes.max(1)).max(1);
            let rows = unit.source.all_rows();
            (0..rows).step_by(step).map(move |row| (unit, row..(row + step).min(rows)))
        });
        let work = |(unit, rows): &(&Unit, Range<usize>)| {
            let bytes = read(&unit.source, rows.clone(), files)?;
            let packed = match unit.treatment {
                Treatment::Copy => Ok(Packed { data: bytes, ..Packed::default() }),
                Treatment::AddOne(float) => Ok(Packed { data: plus_one(&bytes, float), ..Packed::default() }),
                Treatment::Quantize { bits, group, float, cols } => {
                    self.quantizer.block(&bytes, float, cols, bits, group)
                }
            };
            packed.with_context(|| format!("tensor {:?}", unit.source.name))
        };
        let mut waiting = [Spool::new(folder), Spool::new(folder)];
        let take = |(unit, rows): (&Unit, Range<usize>), packed: Packed| {
            if interrupt::pressed() {
                bail!(Interrupted);
            }
            writer.append(&unit.tensors[0].name, &packed.data)?;
            if let Treatment::Quantize { .. } = unit.treatment {
                waiting[0].push(&packed.scales)?;
                waiting[1].push(&packed.biases)?;
                done.errors.entry(unit.class).or_default().add(packed.error);
                if rows.end == unit.source.all_rows() {
                    for (spool, tensor) in waiting.iter_mut().zip(&unit.tensors[1..]) {
                        spool.drain(|bytes| Ok(writer.append(&tensor.name, bytes)?))?;
                    }
                }
            }
            done.read += rows.len() as u64 * unit.source.row_bytes as u64;
            self.progress.set((done.read / 1_000_000) as usize, (self.input_bytes / 1_000_000) as usize);
            Ok(())
        };
        ordered(self.threads, blocks, work, take)
    }
}

/// Rows of a source, wherever their segments lie.
fn read(source: &Source, rows: Range<usize>, files: &[(PathBuf, File)]) -> Result<Vec<u8>> {
    let mut bytes = vec![0; rows.len() * source.row_bytes];
    let (mut row, mut rest) = (rows.start, &mut bytes[..]);
    while row < rows.end {
        let (segment, within) = (row / source.rows, row % source.rows);
        let count = (source.rows - within).min(rows.end - row);
        let (part, after) = rest.split_at_mut(count * source.row_bytes);
        let (file, offset) = source.segments[segment];
        let (path, file) = &files[file];
        file.read_exact_at(part, offset + (within * source.row_bytes) as u64)
            .with_context(|| format!("{}: cannot read tensor {:?}", path.display(), source.name))?;
        (row, rest) = (row + count, after);
    }
    Ok(bytes)
}

/// f32 values, each one more.
fn plus_one(bytes: &[u8], float: Float) -> Vec<u8> {
    let value = |b: &[u8]| match float {
        Float::F32 => f32::from_le_bytes([b[0], b[1], b[2], b[3]]),
        Float::F16 => half::f16::from_le_bytes([b[0], b[1]]).to_f32(),
        Float::Bf16 => half::bf16::from_le_bytes([b[0], b[1]]).to_f32(),
    };
    bytes.chunks_exact(float.size()).flat_map(|b| (value(b) + 1.0).to_le_bytes()).collect()
}

/// Bytes that wait, in memory while they are few and otherwise in a nameless file of the output's disk.
struct Spool(SpooledTempFile);

impl Spool {
    fn new(folder: &Path) -> Spool {
        Spool(tempfile::spooled_tempfile_in(SPOOL, folder))
    }

    fn push(&mut self, bytes: &[u8]) -> Result<()> {
        self.0.write_all(bytes).context("cannot write a temporary file")
    }

    /// Hands everything to `take`, piece by piece, and starts anew.
    fn drain(&mut self, mut take: impl FnMut(&[u8]) -> Result<()>) -> Result<()> {
        let failed = "cannot read a temporary file";
        self.0.seek(SeekFrom::Start(0)).context(failed)?;
        let mut piece = vec![0; BLOCK];
        loop {
            match self.0.read(&mut piece).context(failed)? {
                0 => break,
                n => take(&piece[..n])?,
            }
        }
        self.0.set_len(0).context(failed)?;
        self.0.seek(SeekFrom::Start(0)).context(failed)?;
        Ok(())
    }
}
