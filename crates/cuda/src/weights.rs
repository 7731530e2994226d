//! Weight matrices: their bytes as the checkpoint has them, in the device's memory. Those in blocks are rearranged when they have arrived ([`crate::blocks`]).
//!
//! They are made known before they are read. What was made known goes to the device all together, into one run of memory: as it is read, where a load reads it,
//! or else when the next step begins, so that steps find everything in place. Experts that stay on disk are left out.

use std::sync::Arc;

use anyhow::{Result, ensure};
use sluice_backend::{Activations, Float, Fp8, Fp8Scale, MatrixSource, WeightFormat};
use sluice_store::Bytes;
use sluice_store::load::LoadProgress;

use crate::blocks::{BlockRows, rearrange};
use crate::device::device::HostMemory;
use crate::device::memory::{ALIGNMENT, DeviceBuffer};
use crate::device::shared::SharedMemory;
use crate::device::stream::Gpu;
use crate::device::sys::Address;
use crate::kernels::RowLayout;
use crate::loading::Arrivals;
use crate::parameters::{self, number};

pub use crate::kernels::{FEW, KernelFormat, LaunchShape, Needs, SQUARE, SQUARE_THREADS, TILE};

/// Alignment in bytes that kernels need for arrays.
pub const WORD: usize = 16;

/// The most arrays that a form has: elements, scales, biases.
pub const ARRAYS: usize = 3;

pub struct Weight {
    source: MatrixSource,
    /// Bytes of a row in each array, as the checkpoint has it.
    row_bytes: [usize; ARRAYS],
    /// How its rows lie on the device, if it has blocks.
    layout: Option<RowLayout>,
    /// Where its arrays are, once they are on the device.
    at: Option<[Address; ARRAYS]>,
    /// Which of its arrays the device reads where the host has them.
    pub in_place: [bool; ARRAYS],
    /// It does not come here: it stays on disk, or another device has it.
    pub elsewhere: bool,
    /// Its rows are read from disk when a step wants them, so that it takes no memory on any device.
    pub by_rows: bool,
}

/// Elements of scales of sixteen bits, as kernels know them: `F16` and `BF16` of `kernels/prim/numerics.cuh`.
pub const HALVES: [u32; 2] = [1, 2];

/// FP8's scales that are powers of two: the constant of `kernels/format/fp8.cuh`.
const SCALE_EXPONENT: u32 = 13;

fn element(float: Float) -> u32 {
    match float {
        Float::F32 => 0,
        Float::F16 => 1,
        Float::Bf16 => 2,
    }
}

impl Weight {
    /// Checks shape and lengths, without a look at the bytes.
    pub fn new(source: MatrixSource) -> Result<Weight> {
        let (rows, cols) = (source.rows, source.cols);
        ensure!(rows > 0 && cols > 0, "an empty matrix");
        let parts = source.format.planes(cols)?;
        let (got, wanted) = (source.planes.len(), parts.len());
        ensure!(got == wanted, "{got} arrays, where its form has {wanted}");
        let mut row_bytes = [0; ARRAYS];
        for ((part, bytes), row) in parts.iter().zip(&source.planes).zip(&mut row_bytes) {
            let (got, wanted) = (bytes.len(), rows.checked_mul(part.row_bytes));
            ensure!(
                wanted == Some(got),
                "{} has {got} bytes, which are not {rows} rows of {}",
                part.name,
                part.row_bytes
            );
            *row = part.row_bytes;
        }
        ensure!(u32::try_from(cols).is_ok() && cols <= u32::MAX as usize / 8, "{cols} columns are too many");
        let layout = RowLayout::of(source.format);
        Ok(Weight { source, row_bytes, layout, at: None, in_place: [false; ARRAYS], elsewhere: false, by_rows: false })
    }

    pub fn source(&self) -> &MatrixSource {
        &self.source
    }

    pub fn form(&self) -> WeightFormat {
        self.source.format
    }

    pub fn rows(&self) -> usize {
        self.source.rows
    }

    pub fn cols(&self) -> usize {
        self.source.cols
    }

    pub fn kind(&self, mode: Activations) -> KernelFormat {
        KernelFormat::of(self.form(), mode)
    }

    /// Bytes on the device.
    pub fn bytes(&self) -> usize {
        self.rows() * self.bytes_per_row()
    }

    /// Bytes of a row on the device.
    pub fn bytes_per_row(&self) -> usize {
        self.layout.map_or_else(|| self.row_bytes.iter().sum(), |layout| layout.row_bytes(self.cols()))
    }

    /// The arrays that are copied to the device.
    fn copied(&self) -> impl Iterator<Item = &Bytes> {
        self.source.planes.iter().zip(self.in_place).filter(|(_, in_place)| !in_place).map(|(bytes, _)| bytes)
    }

    /// The arrays that the device reads where the host has them.
    pub fn read_in_place(&self) -> impl Iterator<Item = &Bytes> {
        self.source.planes.iter().zip(self.in_place).filter(|(_, in_place)| *in_place).map(|(bytes, _)| bytes)
    }

    /// Whether the device could read rows from `row` on in slots that they are read to from their file.
    pub fn is_in_place_from(&self, row: usize) -> bool {
        let is_there = |(i, bytes): (usize, &Bytes)| {
            self.in_place[i] && bytes.is_of_file() && (row * self.row_bytes[i]).is_multiple_of(WORD)
        };
        self.source.planes.iter().enumerate().all(is_there)
    }

    /// Bytes of so many rows in each array, as the checkpoint has them.
    pub fn bytes_per_array(&self, rows: usize) -> [usize; ARRAYS] {
        self.row_bytes.map(|row| row * rows)
    }

    /// So many of its rows, if they have blocks.
    pub fn block_rows(&self, rows: usize) -> Option<BlockRows> {
        let [row, scale_row, _] = self.row_bytes;
        let (format, cols) = (self.form(), self.cols());
        self.layout.map(|_| BlockRows { format, rows, cols, row_bytes: [row, scale_row] })
    }

    /// The arrays of some rows, wherever they are; those that its form does not have are empty.
    pub fn rows_bytes(&self, rows: std::ops::Range<usize>) -> [Bytes; ARRAYS] {
        std::array::from_fn(|i| match self.source.planes.get(i) {
            None => Bytes::from(Vec::new()),
            Some(bytes) => bytes.slice(rows.start * self.row_bytes[i]..rows.end * self.row_bytes[i]),
        })
    }

    /// Columns of a group and the type of its scale, where it has groups.
    pub fn groups(&self) -> Option<(u32, u32)> {
        match self.form() {
            WeightFormat::Float(_) | WeightFormat::Fp8(_) => None,
            WeightFormat::Blocks(_) | WeightFormat::E2m1(_) => {
                self.layout.map(|layout| (number(layout.group), layout.element))
            }
            WeightFormat::Affine { group, scale, .. } => Some((u32::from(group), element(scale))),
        }
    }

    /// The parameters of a kernel that reads it from row `row` on.
    ///
    /// # Panics
    /// Where it is not on the device.
    pub fn at_row(&self, row: usize, mode: Activations) -> parameters::Matrix {
        let at = self.at.expect("a weight that is used is on the device");
        let row_bytes = match self.layout {
            Some(layout) => [layout.row_bytes(self.cols()); ARRAYS],
            None => self.row_bytes,
        };
        self.described(std::array::from_fn(|i| at[i] + (row * row_bytes[i]) as u64), mode)
    }

    /// The parameters for rows in blocks that begin at `at`.
    fn in_blocks(&self, layout: RowLayout, at: Address, mode: Activations) -> parameters::Matrix {
        let (cols, [codes, units]) = (self.cols(), layout.starts(self.cols()));
        parameters::Matrix {
            data: at,
            scales: at + codes as u64,
            biases: at + units as u64,
            row_bytes: layout.row_bytes(cols) as u64,
            groups: number(cols / layout.group),
            kind: self.kind(mode) as u32,
            element: layout.element,
            group: number(layout.group),
            bits: number(layout.bits),
            unused: 0,
        }
    }

    /// The parameters for rows whose arrays begin there.
    pub fn described(&self, [data, scales, biases]: [Address; ARRAYS], mode: Activations) -> parameters::Matrix {
        if let Some(layout) = self.layout {
            return self.in_blocks(layout, data, mode);
        }
        let (element, group, bits) = match self.form() {
            WeightFormat::Float(float) => (element(float), 0, 0),
            WeightFormat::Blocks(_) | WeightFormat::E2m1(_) => unreachable!("they have blocks"),
            WeightFormat::Affine { bits, group, scale } => (element(scale), u32::from(group), u32::from(bits)),
            WeightFormat::Fp8(Fp8 { group, scale }) => {
                let element = match scale {
                    Fp8Scale::Float(float) => element(float),
                    Fp8Scale::Power => SCALE_EXPONENT,
                };
                (element, if group == 0 { number(self.cols()) } else { u32::from(group) }, 0)
            }
        };
        let groups = if group == 0 { 0 } else { number(self.cols()).div_ceil(group) };
        parameters::Matrix {
            data,
            scales,
            biases,
            row_bytes: self.row_bytes[0] as u64,
            groups,
            kind: self.kind(mode) as u32,
            element,
            group,
            bits,
            unused: 0,
        }
    }
}

/// All matrices, and the memory that they lie in.
#[derive(Default)]
pub struct Weights {
    /// What the device reads where the host has it. Dropped before the bytes themselves.
    shared: Vec<SharedMemory>,
    pub all: Vec<Weight>,
    /// Matrices are read where the host has them, if kernels can take them as they are there: how the device reads the host's memory.
    pub in_place: Option<HostMemory>,
    memory: Vec<Arc<DeviceBuffer>>,
    /// Arrays that the driver has yet to be told of, by matrix and number.
    to_share: Vec<(usize, usize)>,
    /// Matrices in blocks that are not rearranged yet, and where they are.
    as_in_file: Vec<(BlockRows, Address)>,
    /// Matrices before this one have a place on the device or are elsewhere.
    looked_at: usize,
    /// Why nothing is read in place after all.
    refused: Option<String>,
    /// The load that is bringing weights here.
    coming: Option<LoadProgress>,
}

impl Weights {
    /// Adds a matrix.
    pub fn add(&mut self, mut weight: Weight) {
        if let Some(host) = self.in_place.filter(|_| weight.layout.is_none()) {
            // What is made at load lies among other things, which are not to be locked with it.
            let can_be_read = |bytes: &Bytes| host.has_host_pages || bytes.is_of_file();
            for (in_place, bytes) in weight.in_place.iter_mut().zip(&weight.source.planes) {
                let is_aligned = (bytes.address() as usize).is_multiple_of(WORD);
                *in_place = is_aligned && !bytes.is_empty() && can_be_read(bytes);
            }
        }
        self.all.push(weight);
    }

    /// Allocates memory for all weights that have none, are not elsewhere and not read in place. `None` if there are none.
    ///
    /// # Errors
    /// Where there is no memory for it.
    pub fn place(&mut self, gpu: &Gpu) -> Result<Option<Arrivals>> {
        let absent = |w: &&mut Weight| w.at.is_none() && !w.elsewhere && !w.by_rows;
        let new = &mut self.all[self.looked_at..];
        let total: usize = new.iter_mut().filter(absent).map(|w| Weights::padded(w)).sum();
        let mut placed = None;
        for (number, weight) in (self.looked_at..).zip(&mut *new).filter(|(_, w)| absent(w)) {
            self.to_share.extend((0..ARRAYS).filter(|array| weight.in_place[*array]).map(|array| (number, array)));
            if weight.copied().next().is_none() {
                weight.at = Some([0; ARRAYS]);
            }
        }
        if total > 0 {
            // Zeros until it comes: what cannot be read must not be anything that sends a kernel astray.
            let memory = Arc::new(DeviceBuffer::zeroed(gpu, total, "weights")?);
            gpu.wait(gpu.wait_permit()?)?;
            let (mut at, mut arrays) = (memory.at, Vec::new());
            for weight in new.iter_mut().filter(absent) {
                let mut places = [0; ARRAYS];
                if let Some(rows) = weight.block_rows(weight.rows()) {
                    self.as_in_file.push((rows, at));
                    let mut behind = at;
                    for bytes in &weight.source.planes {
                        arrays.push((bytes.clone(), behind));
                        behind += bytes.len() as u64;
                    }
                    weight.at = Some([at; ARRAYS]);
                    at += Weights::padded(weight) as u64;
                    continue;
                }
                let arrays_with_places = weight.source.planes.iter().zip(&mut places).zip(weight.in_place);
                for ((bytes, place), _) in arrays_with_places.filter(|(_, in_place)| !in_place) {
                    arrays.push((bytes.clone(), at));
                    *place = at;
                    at += bytes.len().next_multiple_of(ALIGNMENT) as u64;
                }
                weight.at = Some(places);
            }
            self.memory.push(Arc::clone(&memory));
            placed = Some(Arrivals { device: Arc::clone(&gpu.device), memory, arrays });
        }
        self.looked_at = self.all.len();
        Ok(placed)
    }

    /// What a load is to leave where the host has it: that which is read there.
    pub fn stays(&self) -> Vec<&Bytes> {
        self.to_share.iter().map(|(weight, array)| &self.all[*weight].source.planes[*array]).collect()
    }

    /// Notes the load that brings the weights that were given a place.
    pub fn expect(&mut self, coming: LoadProgress) {
        self.coming = Some(coming);
    }

    /// Brings everything to the device that is not there and is not elsewhere, waiting for what is still being read. What could not be read is of no use, and the
    /// load says so.
    ///
    /// # Errors
    /// Where there is no memory for it.
    pub fn bring(&mut self, gpu: &Gpu) -> Result<()> {
        if let Some(new) = self.place(gpu)? {
            for (bytes, at) in &new.arrays {
                bytes.wait();
                // SAFETY: it was given its place there; waited for below.
                unsafe { gpu.write_async(*at, bytes)? };
            }
            gpu.wait(gpu.wait_permit()?)?;
        }
        if let Some(coming) = self.coming.take() {
            coming.wait();
        }
        self.share(gpu)?;
        rearrange(gpu, &std::mem::take(&mut self.as_in_file))
    }

    /// Lets the device read what is read in place. All of it is there.
    fn share(&mut self, gpu: &Gpu) -> Result<()> {
        let arrays = std::mem::take(&mut self.to_share);
        if arrays.is_empty() {
            return Ok(());
        }
        let range = |(weight, array): &(usize, usize)| {
            let bytes: &[u8] = &self.all[*weight].source.planes[*array];
            let start = bytes.as_ptr() as usize;
            start..start + bytes.len()
        };
        let shared = match SharedMemory::new(&gpu.device, arrays.iter().map(range), true) {
            Ok(shared) => shared,
            Err(why) => {
                self.refused = Some(format!("weights are copied to the device: {why:#}"));
                return self.copy(gpu, &arrays);
            }
        };
        for (weight, array) in arrays {
            let weight = &mut self.all[weight];
            let at = shared.address(weight.source.planes[array].address());
            weight.at.as_mut().expect("it has a place")[array] = at;
        }
        self.shared.push(shared);
        Ok(())
    }

    /// Copies arrays, by matrix and number, that were to be read in place.
    fn copy(&mut self, gpu: &Gpu, arrays: &[(usize, usize)]) -> Result<()> {
        let padded = |bytes: &Bytes| bytes.len().next_multiple_of(ALIGNMENT);
        let total = arrays.iter().map(|(weight, array)| padded(&self.all[*weight].source.planes[*array])).sum();
        let memory = DeviceBuffer::new(gpu, total, "weights")?;
        let mut next = memory.at;
        for (weight, array) in arrays {
            let weight = &mut self.all[*weight];
            let bytes = &weight.source.planes[*array];
            // SAFETY: it has its place there; waited for below.
            unsafe { gpu.write_async(next, bytes)? };
            weight.at.as_mut().expect("it has a place")[*array] = next;
            weight.in_place[*array] = false;
            next += padded(bytes) as u64;
        }
        gpu.wait(gpu.wait_permit()?)?;
        self.memory.push(Arc::new(memory));
        Ok(())
    }

    /// Bytes that it takes on the device.
    pub fn padded(weight: &Weight) -> usize {
        match weight.layout {
            _ if weight.by_rows => 0,
            Some(_) => weight.bytes().next_multiple_of(ALIGNMENT),
            None => weight.copied().map(|bytes| bytes.len().next_multiple_of(ALIGNMENT)).sum(),
        }
    }

    /// Bytes of arrays that were made at load, which the host keeps: they are in no file.
    pub fn made_bytes(&self) -> usize {
        let planes = self.all.iter().flat_map(|weight| &weight.source.planes);
        planes.filter(|bytes| !bytes.is_of_file()).map(Bytes::len).sum()
    }

    /// Bytes on the device, or that will be there.
    pub fn bytes(&self) -> usize {
        let read = |w: &Weight| w.read_in_place().map(Bytes::len).sum::<usize>();
        self.here().map(|w| w.bytes() - read(w)).sum()
    }

    /// Bytes of files that the device reads where the host has them: mapped, and read.
    pub fn bytes_in_place(&self) -> [usize; 2] {
        let mut bytes = [0; 2];
        let of_files = self.here().flat_map(Weight::read_in_place).filter(|b| b.is_of_file());
        of_files.for_each(|b| bytes[usize::from(!b.is_mapped())] += b.len());
        bytes
    }

    /// What a user should know.
    pub fn note(&self) -> Option<String> {
        let is_misplaced = |w: &&Weight| self.in_place.is_some() && w.layout.is_none();
        let misplaced: usize = self.here().filter(is_misplaced).flat_map(Weight::copied).map(Bytes::len).sum();
        let copied = || {
            let mb = misplaced as f64 / 1e6;
            format!(
                "{mb:.1} MB of weights are copied to the device: they begin at no multiple of {WORD} bytes, or were made at load"
            )
        };
        self.refused.clone().or_else(|| (misplaced > 0).then(copied))
    }

    /// Those that this device computes with as a whole.
    fn here(&self) -> impl Iterator<Item = &Weight> {
        self.all.iter().filter(|w| !w.elsewhere && !w.by_rows)
    }
}
