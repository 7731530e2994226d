//! Weights that files have in blocks on their way to the device, where they are rearranged, and back.
//!
//! What a file has begins at any byte, and its blocks have integers and scales side by side. Kernels take rows as [`RowLayout`] has them.

use anyhow::Result;
use sluice_backend::{BlockFormat, E2m1, WeightFormat};

use crate::device::copies::CopyStream;
use crate::device::memory::DeviceBuffer;
use crate::device::stream::Gpu;
use crate::device::sys::{Address, DriverError};
use crate::kernels::{Kernel, RowLayout};
use crate::parameters::{self as p, number};

/// Bytes that are rearranged at a time.
const CHUNK: usize = 32 << 20;
/// Threads of a block, and the most blocks.
const THREADS: u32 = 256;
const BLOCKS: usize = 1 << 16;

/// What the kernel calls a format: `BLOCK_...` of `kernels/elementwise/rearrange.cu`.
fn block_number(format: WeightFormat) -> u32 {
    let position = |blocks| BlockFormat::ALL.iter().position(|of| *of == blocks).expect("one of all");
    match format {
        WeightFormat::Blocks(blocks) => number(position(blocks)),
        WeightFormat::E2m1(E2m1::Power) => number(BlockFormat::ALL.len()),
        _ => number(BlockFormat::ALL.len() + 1),
    }
}

/// Rows of a matrix that a file has in blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockRows {
    pub format: WeightFormat,
    pub rows: usize,
    pub cols: usize,
    /// Bytes of a row of each of the file's arrays.
    pub row_bytes: [usize; 2],
}

/// Where rows are: the file's arrays, and the rows for kernels.
#[derive(Clone, Copy)]
struct Places {
    file: Address,
    scales: Address,
    own: Address,
}

impl BlockRows {
    fn layout(&self) -> RowLayout {
        RowLayout::of(self.format).expect("it has blocks")
    }

    /// Bytes of the file's arrays.
    pub fn file_bytes(&self) -> [usize; 2] {
        self.row_bytes.map(|row| row * self.rows)
    }

    /// Bytes of the rows for kernels.
    pub fn own_bytes(&self) -> usize {
        self.rows * self.layout().row_bytes(self.cols)
    }

    /// A launch of [`Kernel::REARRANGE`] or [`Kernel::RESTORE`] for some of the rows: how many blocks, and what they are given.
    fn launch(&self, kernel: Kernel, rows: usize, at: Places, codebook: Address) -> (u32, p::Rearrange) {
        let (layout, cols) = (self.layout(), self.cols);
        let [codes_at, units_at] = layout.starts(cols);
        let parameters = p::Rearrange {
            file: at.file,
            scales: at.scales,
            own: at.own,
            codebook,
            own_bytes: layout.row_bytes(cols) as u64,
            rows: number(rows),
            cols: number(cols),
            format: block_number(self.format),
            codes_at: number(codes_at),
            units_at: if layout.has_units() { number(units_at) } else { 0 },
            global: match self.format {
                WeightFormat::E2m1(E2m1::E4m3 { global, .. }) => global,
                _ => 0,
            },
        };
        // A thread takes 32 columns, or a byte.
        let work = rows * if kernel == Kernel::REARRANGE { cols / 32 } else { self.row_bytes.iter().sum() };
        (number(work.div_ceil(THREADS as usize).min(BLOCKS)), parameters)
    }
}

/// The codebook of a format on the device; `None` where it has none.
fn codebook(gpu: &Gpu, format: WeightFormat) -> Result<Option<DeviceBuffer>> {
    let WeightFormat::Blocks(blocks) = format else { return Ok(None) };
    let entries = blocks.codebook();
    if entries.is_empty() {
        return Ok(None);
    }
    let memory = DeviceBuffer::new(gpu, entries.len(), "a codebook")?;
    // SAFETY: it was just allocated with this length.
    unsafe { gpu.write(memory.at, &entries, gpu.wait_permit()?)? };
    Ok(Some(memory))
}

/// Numbers that name the values of an entry of a codebook, at most: 2 bits for each of eight values, or 3 for each of four.
const ENTRY_KEYS: usize = 1 << 16;

/// For what the values of an entry are numbered ([`Kernel::REARRANGE`]), the entry: `[ENTRY_KEYS]`. Empty where a format has no codebook.
fn entries(blocks: BlockFormat) -> Vec<u16> {
    // Values of an entry, what is taken from each, and bits that then tell nothing.
    let (values, offset, shift) = match blocks {
        BlockFormat::Iq3Xxs => (4, 4, 3),
        BlockFormat::Iq3S => (4, 0, 1),
        BlockFormat::Iq2Xxs | BlockFormat::Iq2Xs | BlockFormat::Iq2S => (8, 0, 4),
        BlockFormat::Iq1S | BlockFormat::Iq1M => (8, 0, 3),
        _ => return Vec::new(),
    };
    let mut entries = vec![0; ENTRY_KEYS];
    for (number, entry) in (0..).zip(blocks.codebook().chunks_exact(values)) {
        let named = entry
            .iter()
            .rev()
            .fold(0, |key, value| key << if values == 8 { 2 } else { 3 } | usize::from((value - offset) >> shift));
        entries[named] = number;
    }
    entries
}

/// A codebook on the device, and the table that finds an entry by the key of its values.
struct Codebook {
    format: WeightFormat,
    book: DeviceBuffer,
    entries: DeviceBuffer,
}

impl Codebook {
    /// That of a format; `None` where it has none.
    fn of(gpu: &Gpu, format: WeightFormat) -> Result<Option<Codebook>> {
        let (WeightFormat::Blocks(blocks), Some(book)) = (format, codebook(gpu, format)?) else { return Ok(None) };
        let bytes: Vec<u8> = entries(blocks).into_iter().flat_map(u16::to_le_bytes).collect();
        let entries = DeviceBuffer::new(gpu, bytes.len(), "a codebook")?;
        // SAFETY: it was just allocated with this length.
        unsafe { gpu.write(entries.at, &bytes, gpu.wait_permit()?)? };
        Ok(Some(Codebook { format, book, entries }))
    }
}

/// Rearranges matrices where they are. Their arrays have arrived as the file has them, one behind the other.
///
/// # Errors
/// If there is no memory for a chunk of rows.
pub fn rearrange(gpu: &Gpu, all: &[(BlockRows, Address)]) -> Result<()> {
    let chunk_rows = |of: &BlockRows| (CHUNK / of.row_bytes[0].max(1)).clamp(1, of.rows);
    let scratch = |(of, _): &(BlockRows, Address)| chunk_rows(of) * of.row_bytes[0] + of.file_bytes()[1];
    let Some(most) = all.iter().map(scratch).max() else { return Ok(()) };
    let scratch = DeviceBuffer::new(gpu, most, "the rearrangement of weights")?;
    for (of, at) in all {
        let BlockRows { rows, cols, row_bytes: [row, scale_row], .. } = *of;
        let (chunk, book) = (chunk_rows(of), codebook(gpu, of.format)?);
        let scales = scratch.at + (chunk * row) as u64;
        // SAFETY: the arrays lie behind one another; the scratch is as large as the largest.
        unsafe { gpu.copy(at + (rows * row) as u64, scales, rows * scale_row)? };
        // From the last rows on: a row is longer than the file's, and goes where later ones were.
        for first in (0..rows).step_by(chunk).collect::<Vec<_>>().into_iter().rev() {
            let count = chunk.min(rows - first);
            let places = Places {
                file: scratch.at,
                scales: scales + (first * scale_row) as u64,
                own: at + (first * of.layout().row_bytes(cols)) as u64,
            };
            let (blocks, parameters) =
                of.launch(Kernel::REARRANGE, count, places, book.as_ref().map_or(0, |book| book.at));
            // SAFETY: as many rows as are there are copied, and as many written where this matrix has its place.
            unsafe {
                gpu.copy(at + (first * row) as u64, scratch.at, count * row)?;
                gpu.launch(Kernel::REARRANGE, [blocks, 1, 1], THREADS, 0, &parameters)?;
            }
        }
    }
    // Before the scratch goes.
    gpu.wait(gpu.wait_permit()?)?;
    Ok(())
}

/// Copies rows between a file's arrays on the host and rows for kernels on the device, in streams that only copy.
pub struct BlockCopies {
    /// A file's arrays on their way, up and down.
    staging: [DeviceBuffer; 2],
    codebooks: Vec<Codebook>,
}

impl BlockCopies {
    /// For all these rows; `None` where there are none.
    pub fn new<'a>(gpu: &Gpu, all: impl Iterator<Item = &'a BlockRows>) -> Result<Option<BlockCopies>> {
        let (mut most, mut codebooks) = (None, Vec::<Codebook>::new());
        let mut seen = Vec::new();
        for rows in all {
            most = most.max(Some(rows.file_bytes().iter().sum::<usize>()));
            if !seen.contains(&rows.format) {
                seen.push(rows.format);
                codebooks.extend(Codebook::of(gpu, rows.format)?);
            }
        }
        let Some(bytes) = most else { return Ok(None) };
        let staging = || DeviceBuffer::new(gpu, bytes, "experts on their way");
        Ok(Some(BlockCopies { staging: [staging()?, staging()?], codebooks }))
    }

    fn codebook(&self, format: WeightFormat) -> Option<&Codebook> {
        self.codebooks.iter().find(|book| book.format == format)
    }

    /// Enqueues the copy of a file's arrays to `own`, as rows for kernels.
    ///
    /// # Safety
    /// As for [`CopyStream::write`], with the bytes that the rows have.
    pub unsafe fn write(
        &self,
        stream: &CopyStream,
        of: &BlockRows,
        own: Address,
        arrays: [&[u8]; 2],
    ) -> Result<(), DriverError> {
        let [file, scales] = [self.staging[0].at, self.staging[0].at + of.file_bytes()[0] as u64];
        let codebook = self.codebook(of.format).map_or(0, |codebook| codebook.book.at);
        let (blocks, parameters) = of.launch(Kernel::REARRANGE, of.rows, Places { file, scales, own }, codebook);
        // SAFETY: the staging has room for an expert's largest matrix, and the stream is in order; for the rest the caller vouches.
        unsafe {
            stream.write(file, arrays[0])?;
            stream.write(scales, arrays[1])?;
            stream.launch(Kernel::REARRANGE, blocks, THREADS, &parameters)
        }
    }

    /// Enqueues the way back of rows at `own`; [`BlockCopies::read`] follows for each of the arrays.
    ///
    /// # Safety
    /// The rows are there, and stay until the copies are done.
    pub unsafe fn restore(&self, stream: &CopyStream, of: &BlockRows, own: Address) -> Result<(), DriverError> {
        let [file, scales] = [self.staging[1].at, self.staging[1].at + of.file_bytes()[0] as u64];
        let entries = self.codebook(of.format).map_or(0, |codebook| codebook.entries.at);
        let (blocks, parameters) = of.launch(Kernel::RESTORE, of.rows, Places { file, scales, own }, entries);
        // SAFETY: as above.
        unsafe { stream.launch(Kernel::RESTORE, blocks, THREADS, &parameters) }
    }

    /// Enqueues the copy of one of the arrays that were restored last.
    ///
    /// # Safety
    /// As for [`CopyStream::read`].
    pub unsafe fn read(
        &self,
        stream: &CopyStream,
        of: &BlockRows,
        array: usize,
        to: &mut [u8],
    ) -> Result<(), DriverError> {
        let at = self.staging[1].at + if array == 0 { 0 } else { of.file_bytes()[0] as u64 };
        // SAFETY: as the caller vouches.
        unsafe { stream.read(at, to) }
    }
}

#[cfg(test)]
mod tests {
    use sluice_backend::Activations;

    use super::*;
    use crate::cuda::Cuda;

    #[test]
    fn what_values_are_numbered_names_one_entry() {
        for blocks in BlockFormat::ALL {
            let (entries, book) = (entries(blocks), blocks.codebook());
            assert_eq!(entries.is_empty(), book.is_empty(), "{}", blocks.name());
            let values = if blocks.name().starts_with("IQ3") { 4 } else { 8 };
            let mut found: Vec<u16> = entries.into_iter().filter(|entry| *entry != 0).collect();
            found.sort_unstable();
            // The first has the number that all others have, too.
            let all: Vec<u16> = (1..(book.len() / values) as u16).collect();
            assert!(found == all, "{}: {} of {}", blocks.name(), found.len(), all.len());
        }
    }

    #[test]
    fn rows_come_back_as_the_file_has_them() {
        let asked: Option<u32> = std::env::var("SLUICE_GPU").ok().map(|n| n.parse().expect("SLUICE_GPU: a number"));
        if asked.is_none() && crate::describe(0).is_err() {
            eprintln!("SKIPPED: there is no GPU");
            return;
        }
        let cuda = Cuda::new(asked.unwrap_or(0), Activations::Int8).unwrap();
        let (gpu, mut random) = (&cuda.context.gpu, fastrand::Rng::with_seed(3));
        let numbers = E2m1::E4m3 { global: 1.5f32.to_bits(), divides: false };
        let all = BlockFormat::ALL
            .map(WeightFormat::Blocks)
            .into_iter()
            .chain([E2m1::Power, numbers].map(WeightFormat::E2m1));
        for format in all {
            let (rows, cols) = (5, 768);
            let planes = format.planes(cols).unwrap();
            let mut row_bytes = planes.iter().map(|plane| plane.row_bytes);
            let row_bytes = [0, 1].map(|_| row_bytes.next().unwrap_or(0));
            let of = BlockRows { format, rows, cols, row_bytes };
            let mut file = of.file_bytes().map(|n| (0..n).map(|_| random.u8(..)).collect::<Vec<u8>>());
            if let WeightFormat::Blocks(blocks) = format {
                // No unit may be NaN: it comes back as another NaN.
                blocks.set_size(&mut file[0], 1.0);
            }
            let own = DeviceBuffer::new(gpu, of.own_bytes(), "rows").unwrap();
            let copies = BlockCopies::new(gpu, std::iter::once(&of)).unwrap().expect("there are rows");
            let stream = CopyStream::new(&gpu.device).unwrap();
            let mut back = of.file_bytes().map(|n| vec![0; n]);
            // SAFETY: memory of its own, which stays until the copies are done.
            unsafe {
                copies.write(&stream, &of, own.at, [&file[0], &file[1]]).unwrap();
                copies.restore(&stream, &of, own.at).unwrap();
                for (array, to) in back.iter_mut().enumerate() {
                    copies.read(&stream, &of, array, to).unwrap();
                }
            }
            stream.wait().unwrap();
            let differ = |i: usize| file[i].iter().zip(&back[i]).position(|(a, b)| a != b);
            assert_eq!([0, 1].map(differ), [None; 2], "{format:?}");
        }
    }
}
