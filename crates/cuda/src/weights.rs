//! Weight matrices: their bytes as the checkpoint has them, in the device's memory; which kernel multiplies with which.
//!
//! They are made known before they are read. What was made known goes to the device all together, into one run of memory: as it is read, where a load reads it,
//! or else when the next step begins, so that steps find everything in place. Experts that stay on disk are left out.

use std::sync::Arc;

use anyhow::{Result, ensure};
use sluice_backend::{Activations, Float, MatrixSource, WeightFormat};
use sluice_store::Bytes;
use sluice_store::load::LoadProgress;

use crate::device::memory::{ALIGNMENT, DeviceBuffer};
use crate::device::stream::Gpu;
use crate::device::sys::Address;
use crate::kernels::{Kernel, STATIC_SHARED};
use crate::loading::Arrivals;
use crate::parameters::{self, number};

/// The most arrays that a form has: elements, scales, biases.
pub const ARRAYS: usize = 3;

pub struct Weight {
    source: MatrixSource,
    /// Bytes of a row in each array.
    row_bytes: [usize; ARRAYS],
    /// Where its arrays are, once they are on the device.
    at: Option<[Address; ARRAYS]>,
    /// It does not come here: it stays on disk, or another device has it.
    pub elsewhere: bool,
}

/// Which encodings of the activations some matrices need.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Needs {
    pub f32: bool,
    pub bf16: bool,
    pub int8: bool,
}

impl Needs {
    pub const F32: Needs = Needs { f32: true, bf16: false, int8: false };
    pub const INT8: Needs = Needs { f32: false, bf16: false, int8: true };

    pub fn and(self, other: Needs) -> Needs {
        Needs { f32: self.f32 || other.f32, bf16: self.bf16 || other.bf16, int8: self.int8 || other.int8 }
    }
}

/// How a matrix is multiplied with: `kind` of `kernels/numerics.cuh`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Kind(pub u32);

impl Kind {
    pub const BF16_PAIRS: Kind = Kind(4);

    pub fn of(form: WeightFormat, mode: Activations) -> Kind {
        Kind(match (form, mode) {
            (WeightFormat::Float(Float::F32), _) => 0,
            (WeightFormat::Float(Float::F16), _) => 1,
            (WeightFormat::Float(Float::Bf16), Activations::F32) => 2,
            (WeightFormat::Affine { .. }, Activations::F32) => 3,
            (WeightFormat::Float(Float::Bf16), _) => 4,
            (WeightFormat::Affine { .. }, Activations::Bf16) => 5,
            (WeightFormat::Affine { bits, .. }, Activations::Int8) => {
                6 + if bits == 8 { 5 } else { u32::from(bits) - 2 }
            }
            (WeightFormat::Q8_0, _) => unreachable!("refused when it is made"),
        })
    }

    pub fn needs(self) -> Needs {
        Needs { f32: self.0 < 4, bf16: matches!(self.0, 4 | 5), int8: self.0 > 5 }
    }

    /// Bits of an integer weight.
    pub fn bits(self) -> Option<usize> {
        match self.0 {
            6..=10 => Some(self.0 as usize - 4),
            11 => Some(8),
            _ => None,
        }
    }

    /// The kernels that do it for experts of a few tokens each: one that puts two products through `silu(gate) * up`, and one for one product.
    pub fn few(self) -> Option<[Kernel; 2]> {
        use Kernel::*;
        match self.0 {
            6 => Some([FewGated2, Few2]),
            7 => Some([FewGated3, Few3]),
            8 => Some([FewGated4, Few4]),
            9 => Some([FewGated5, Few5]),
            10 => Some([FewGated6, Few6]),
            11 => Some([FewGated8, Few8]),
            _ => None,
        }
    }

    /// The kernel that does it for 8 or 16 tokens at a time, 16 rows a block.
    pub fn thin(self, tokens: usize) -> Option<Kernel> {
        use Kernel::*;
        match (self.0, tokens) {
            (8, 8) => Some(Thin4For8),
            (8, 16) => Some(Thin4For16),
            (11, 8) => Some(Thin8For8),
            (11, 16) => Some(Thin8For16),
            _ => None,
        }
    }

    /// The kernel that does it for some tens of tokens in groups of 64, by blocks that are an even share.
    pub fn slabs(self) -> Option<Kernel> {
        match self.0 {
            8 => Some(Kernel::Slabs4),
            11 => Some(Kernel::Slabs8),
            _ => None,
        }
    }

    /// The kernel that does it for several tokens on integer tensor cores, where a group is so many of activations, with tiles of so many tokens ([`TILE`] or
    /// [`FEW`]) in blocks that have at most so many bytes of shared memory.
    pub fn tiles(self, of: usize, tokens: usize, most: usize) -> Option<Shape> {
        use Kernel::*;
        let bits = self.bits()?;
        let [all, low, few] = match bits {
            2 => [
                [Tiles2Of1, Tiles2Of2, Tiles2Of4],
                [TilesLow2Of1, TilesLow2Of2, TilesLow2Of4],
                [TilesFew2Of1, TilesFew2Of2, TilesFew2Of4],
            ],
            3 => [
                [Tiles3Of1, Tiles3Of2, Tiles3Of4],
                [TilesLow3Of1, TilesLow3Of2, TilesLow3Of4],
                [TilesFew3Of1, TilesFew3Of2, TilesFew3Of4],
            ],
            4 => [
                [Tiles4Of1, Tiles4Of2, Tiles4Of4],
                [TilesLow4Of1, TilesLow4Of2, TilesLow4Of4],
                [TilesFew4Of1, TilesFew4Of2, TilesFew4Of4],
            ],
            5 => [
                [Tiles5Of1, Tiles5Of2, Tiles5Of4],
                [TilesLow5Of1, TilesLow5Of2, TilesLow5Of4],
                [TilesFew5Of1, TilesFew5Of2, TilesFew5Of4],
            ],
            6 => [
                [Tiles6Of1, Tiles6Of2, Tiles6Of4],
                [TilesLow6Of1, TilesLow6Of2, TilesLow6Of4],
                [TilesFew6Of1, TilesFew6Of2, TilesFew6Of4],
            ],
            _ => [
                [Tiles8Of1, Tiles8Of2, Tiles8Of4],
                [TilesLow8Of1, TilesLow8Of2, TilesLow8Of4],
                [TilesFew8Of1, TilesFew8Of2, TilesFew8Of4],
            ],
        };
        let joined = [1, 2, 4].iter().position(|n| *n == of)?;
        // As `TILES` of `kernels/tiles.cu` has them: rows, and kilobytes that stages may take.
        let ways = match tokens {
            FEW => &[(few, 64, 74)][..],
            _ if of * bits < 20 => &[(all, 128, 212), (low, 64, 87)],
            _ => &[(all, 64, 112), (low, 64, 87)],
        };
        let mut shapes = ways.iter().map(|&(kernels, rows, kilobytes)| {
            let shared = tile_bytes(bits, of, rows, tokens, kilobytes << 10);
            Shape { kernel: kernels[joined], rows, threads: number(4 * rows), shared }
        });
        shapes.find(|shape| shape.shared + STATIC_SHARED <= most)
    }

    /// The kernel that does it with all that comes before it, for so many tokens.
    pub fn rows(self, tokens: usize) -> Option<Kernel> {
        use Kernel::*;
        let all = match self.0 {
            4 => [RowsBf16For1, RowsBf16For2, RowsBf16For4, RowsBf16For8],
            6 => [Rows2For1, Rows2For2, Rows2For4, Rows2For8],
            7 => [Rows3For1, Rows3For2, Rows3For4, Rows3For8],
            8 => [Rows4For1, Rows4For2, Rows4For4, Rows4For8],
            9 => [Rows5For1, Rows5For2, Rows5For4, Rows5For8],
            10 => [Rows6For1, Rows6For2, Rows6For4, Rows6For8],
            11 => [Rows8For1, Rows8For2, Rows8For4, Rows8For8],
            _ => return None,
        };
        all.into_iter().zip([1, 2, 4, 8]).find(|(_, most)| tokens <= *most).map(|(kernel, _)| kernel)
    }

    /// The same for one token with groups of 64: the kernels with small and with large blocks, and with more under way.
    pub fn one(self) -> Option<[Kernel; 3]> {
        use Kernel::*;
        match self.0 {
            6 => Some([One2, One2Wide, One2Deep]),
            7 => Some([One3, One3Wide, One3Deep]),
            8 => Some([One4, One4Wide, One4Deep]),
            9 => Some([One5, One5Wide, One5Deep]),
            10 => Some([One6, One6Wide, One6Deep]),
            11 => Some([One8, One8Wide, One8Deep]),
            _ => None,
        }
    }

    /// The kernels of a mixture for one token: of gate and up, of these where the device may have to ask for experts, and of down.
    pub fn experts_one(self) -> Option<[Kernel; 3]> {
        use Kernel::*;
        match self.0 {
            6 => Some([GateUp2One, GateUp2Asking, Down2One]),
            7 => Some([GateUp3One, GateUp3Asking, Down3One]),
            8 => Some([GateUp4One, GateUp4Asking, Down4One]),
            9 => Some([GateUp5One, GateUp5Asking, Down5One]),
            10 => Some([GateUp6One, GateUp6Asking, Down6One]),
            11 => Some([GateUp8One, GateUp8Asking, Down8One]),
            _ => None,
        }
    }

    /// The kernel of lane sums of many tokens, by squares of [`SQUARE`] rows and as many tokens.
    pub fn squares(self) -> Option<Kernel> {
        use Kernel::*;
        [LanesF32Squares, LanesF16Squares, LanesBf16Squares, LanesAffineSquares].get(self.0 as usize).copied()
    }

    /// The kernel that does it, for one token (or each by itself) or for tiles of several, and how it is launched for so many rows in all.
    pub fn kernel(self, many: bool, rows: usize, cols: usize) -> Shape {
        use Kernel::*;
        if self.0 < 6 {
            let [one, several] = match self.0 {
                0 => [LanesF32One, LanesF32Many],
                1 => [LanesF16One, LanesF16Many],
                2 => [LanesBf16One, LanesBf16Many],
                3 => [LanesAffineOne, LanesAffineMany],
                4 => [PairsBf16One, PairsBf16Many],
                _ => [PairsAffineOne, PairsAffineMany],
            };
            // Few rows, a router's say, are spread over the device.
            let rows = if many && self.0 < 4 {
                4
            } else if many || rows >= WIDE_ROWS || self.0 > 3 {
                16
            } else {
                2
            };
            let kernel = if many { several } else { one };
            let threads = if many || self.0 > 3 { 256 } else { 16 * number(rows) };
            return Shape { kernel, rows, threads, shared: 0 };
        }
        let [one, wide, several] = match self.0 {
            6 => [Integers2One, Integers2OneWide, Integers2Many],
            7 => [Integers3One, Integers3OneWide, Integers3Many],
            8 => [Integers4One, Integers4OneWide, Integers4Many],
            9 => [Integers5One, Integers5OneWide, Integers5Many],
            10 => [Integers6One, Integers6OneWide, Integers6Many],
            _ => [Integers8One, Integers8OneWide, Integers8Many],
        };
        if many {
            return Shape { kernel: several, rows: 8, threads: 256, shared: 0 };
        }
        // Four warps of two rows each, or of four where there are rows enough to keep all of the device busy.
        let (kernel, rows) = if rows < WIDE_ROWS { (one, 8) } else { (wide, 16) };
        let sums = (cols / 32).next_multiple_of(4) * size_of::<f32>();
        Shape { kernel, rows, threads: 128, shared: sums + rows * SLOTS * 4 * size_of::<f32>() }
    }
}

/// Elements of scales of sixteen bits, as kernels know them: `F16` and `BF16` of `kernels/numerics.cuh`.
pub const HALVES: [u32; 2] = [1, 2];

/// Tokens of a block of `kernels/tiles.cu`, and of one where there are few.
pub const TILE: usize = 64;
pub const FEW: usize = 16;

/// Bytes of shared memory of such a block, of whose stages as many as fit into `all` are under way: `Stage` of `kernels/tiles.cu`.
fn tile_bytes(bits: usize, of: usize, rows: usize, tokens: usize, all: usize) -> usize {
    let parts = 4 * of;
    let tile = rows * (4 * bits * parts + 16) + tokens * (32 * parts + 32);
    let raw = 32 * rows + 8 * parts * tokens;
    let floats = 4 * (8 * rows + 4 * of * tokens + 4 * tokens + 64);
    // Words for each thread of the warps of one chain, which are as many as rows.
    let copies = |pieces: usize| pieces.div_ceil(rows).next_multiple_of(4);
    let words = copies(rows * bits * of) + copies(8 * tokens * of) + 2 * 2 + 2 * (2 * tokens * of).div_ceil(rows) + 3;
    let kept = if tokens == FEW { 0 } else { 4 * rows * words.next_multiple_of(4) };
    let stages = ((all - 2 * floats - kept - 16) / (tile + raw)).clamp(2, 4);
    // Chains meet there in the end.
    let meet = 4 * 4 * tokens * (rows + 4);
    meet.max(stages * (tile + raw) + 2 * floats + kept + 16)
}

/// Rows and tokens of a block of `kernels/lanes.cu`, and its threads.
pub const SQUARE: usize = 32;
pub const SQUARE_THREADS: u32 = 256;

/// How a kernel is launched.
pub struct Shape {
    pub kernel: Kernel,
    /// Rows of a block.
    pub rows: usize,
    pub threads: u32,
    /// Bytes of shared memory.
    pub shared: usize,
}

/// From so many rows on four are taken by a warp.
const WIDE_ROWS: usize = 8192;
/// `SLOTS` of `kernels/matmul.cu`.
const SLOTS: usize = 33;

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
        ensure!(source.form != WeightFormat::Q8_0, "Q8_0 weights are not supported on a GPU");
        let parts = source.form.planes(cols)?;
        let (got, wanted) = (source.parts.len(), parts.len());
        ensure!(got == wanted, "{got} arrays, where its form has {wanted}");
        let mut row_bytes = [0; ARRAYS];
        for ((part, bytes), row) in parts.iter().zip(&source.parts).zip(&mut row_bytes) {
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
        Ok(Weight { source, row_bytes, at: None, elsewhere: false })
    }

    pub fn source(&self) -> &MatrixSource {
        &self.source
    }

    pub fn form(&self) -> WeightFormat {
        self.source.form
    }

    pub fn rows(&self) -> usize {
        self.source.rows
    }

    pub fn cols(&self) -> usize {
        self.source.cols
    }

    pub fn kind(&self, mode: Activations) -> Kind {
        Kind::of(self.form(), mode)
    }

    pub fn bytes(&self) -> usize {
        self.source.parts.iter().map(Bytes::len).sum()
    }

    pub fn bytes_per_row(&self) -> usize {
        self.row_bytes.iter().sum()
    }

    /// Bytes of so many rows in each array.
    pub fn bytes_per_array(&self, rows: usize) -> [usize; ARRAYS] {
        self.row_bytes.map(|row| row * rows)
    }

    /// The arrays of some rows, wherever they are; those that its form does not have are empty.
    pub fn rows_bytes(&self, rows: std::ops::Range<usize>) -> [Bytes; ARRAYS] {
        std::array::from_fn(|i| match self.source.parts.get(i) {
            None => Bytes::from(Vec::new()),
            Some(bytes) => bytes.slice(rows.start * self.row_bytes[i]..rows.end * self.row_bytes[i]),
        })
    }

    /// Columns of a group and the type of its scale, where it has groups.
    pub fn groups(&self) -> Option<(u32, u32)> {
        match self.form() {
            WeightFormat::Float(_) | WeightFormat::Q8_0 => None,
            WeightFormat::Affine { group, scale, .. } => Some((u32::from(group), element(scale))),
        }
    }

    /// What a kernel is told of it from row `row` on.
    ///
    /// # Panics
    /// Where it is not on the device.
    pub fn at_row(&self, row: usize, mode: Activations) -> parameters::Matrix {
        let at = self.at.expect("a weight that is used is on the device");
        self.described(std::array::from_fn(|i| at[i] + (row * self.row_bytes[i]) as u64), mode)
    }

    /// The same, of rows whose arrays begin there.
    pub fn described(&self, [data, scales, biases]: [Address; ARRAYS], mode: Activations) -> parameters::Matrix {
        let (float, group, bits) = match self.form() {
            WeightFormat::Float(float) => (float, 0, 0),
            WeightFormat::Affine { bits, group, scale } => (scale, u32::from(group), u32::from(bits)),
            WeightFormat::Q8_0 => unreachable!("refused when it is made"),
        };
        let groups = number(self.cols()).checked_div(group).unwrap_or(0);
        parameters::Matrix {
            data,
            scales,
            biases,
            row_bytes: self.row_bytes[0] as u64,
            groups,
            kind: self.kind(mode).0,
            element: element(float),
            group,
            bits,
            unused: 0,
        }
    }
}

/// All matrices, and the memory that they lie in.
#[derive(Default)]
pub struct Weights {
    pub all: Vec<Weight>,
    memory: Vec<Arc<DeviceBuffer>>,
    /// Matrices before this one have a place on the device or are elsewhere.
    looked_at: usize,
    /// What is on its way here.
    coming: Option<LoadProgress>,
}

impl Weights {
    /// Gives everything a place on the device that has none and is not elsewhere; `None` where that is nothing.
    ///
    /// # Errors
    /// Where there is no memory for it.
    pub fn place(&mut self, gpu: &Gpu) -> Result<Option<Arrivals>> {
        let absent = |w: &&mut Weight| w.at.is_none() && !w.elsewhere;
        let new = &mut self.all[self.looked_at..];
        let total: usize = new.iter_mut().filter(absent).map(|w| Weights::padded(w)).sum();
        let mut placed = None;
        if total > 0 {
            // Zeros until it comes: what cannot be read must not be anything that sends a kernel astray.
            let memory = Arc::new(DeviceBuffer::zeroed(gpu, total, "weights")?);
            gpu.wait(gpu.wait_permit()?)?;
            let (mut at, mut arrays) = (memory.at, Vec::new());
            for weight in new.iter_mut().filter(absent) {
                let mut places = [0; ARRAYS];
                for (bytes, place) in weight.source.parts.iter().zip(&mut places) {
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

    /// What was given a place comes as this load reads it.
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
        Ok(())
    }

    /// Bytes that it takes on the device.
    pub fn padded(weight: &Weight) -> usize {
        weight.source.parts.iter().map(|bytes| bytes.len().next_multiple_of(ALIGNMENT)).sum()
    }

    /// Bytes on the device, or that will be there.
    pub fn bytes(&self) -> usize {
        self.all.iter().filter(|w| !w.elsewhere).map(Weight::bytes).sum()
    }
}
