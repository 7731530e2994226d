//! Buffers of the CPU backend, and how threads write into them.

use std::cell::UnsafeCell;
use std::io::ErrorKind;
use std::ops::Range;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result, ensure};
use memmap2::{Advice, MmapMut, MmapOptions};
use sluice_kernels::format::{Activations, MAX_PLANES, MatrixError, WeightFormat};
use sluice_kernels::matmul;
use sluice_kernels::matrix::Matrix;
use sluice_kernels::rotary::RotaryFrequencies;
use sluice_kernels::rows::{Rows, RowsMut};
use sluice_kernels::{Isa, affine};
use sluice_store::Bytes;

use crate::pool::Pool;
use crate::{MatrixSource, MemoryClass, Tensor};

/// Zeroed anonymous memory that never moves.
pub struct Buffer {
    map: MmapMut,
    start: *mut u8,
    pub class: MemoryClass,
    pub bytes: usize,
    /// What counts as taken: everything, or of a buffer that is committed in steps, what was committed.
    pub committed: usize,
}

// SAFETY: the address is that of the buffer's own memory; every access through it goes by `Place`, whose callers keep threads apart.
unsafe impl Send for Buffer {}
// SAFETY: as above.
unsafe impl Sync for Buffer {}

/// What a buffer that is committed in steps takes at once, at least: a large page.
const STEP: usize = 2 << 20;
/// Steps from which on the next ones are taken together, one for each thread; and threads that have one, at most.
const MANY: usize = 8;

impl Buffer {
    /// Committed page by page when touched.
    pub fn zeroed(class: MemoryClass, bytes: usize) -> Result<Buffer> {
        // A map of nothing is refused by the system; a page that is never touched costs nothing.
        let map = MmapOptions::new().len(bytes.max(1)).map_anon();
        let mut map = map.with_context(|| format!("cannot reserve {bytes} bytes for {}", class.name()))?;
        if class == MemoryClass::State && bytes >= STEP {
            // A copy of a state is mostly the clearing of pages, which large ones take a tenth of the time for. Without them, small ones are used.
            let _ = map.advise(Advice::HugePage);
        }
        Ok(Buffer { start: map.as_mut_ptr(), map, class, bytes, committed: bytes })
    }

    /// Address space, of which nothing may be touched before it is committed.
    pub fn reserved(class: MemoryClass, bytes: usize) -> Result<Buffer> {
        let map = MmapOptions::new().len(bytes.max(1)).no_reserve_swap().map_anon();
        let mut map = map.with_context(|| format!("cannot reserve {bytes} bytes of addresses for {}", class.name()))?;
        if bytes >= STEP {
            // Without large pages, small ones are used.
            let _ = map.advise(Advice::HugePage);
        }
        Ok(Buffer { start: map.as_mut_ptr(), map, class, bytes, committed: 0 })
    }

    /// Makes the first `bytes` bytes resident; what is resident already stays as it is, where it is. The threads of `pool` clear pages side by side: a page that
    /// nobody has had yet may cost as much time as reading what it will hold.
    ///
    /// # Errors
    /// When the system has no more memory, or this process may have none.
    pub fn commit(&mut self, bytes: usize, pool: &mut Pool) -> Result<()> {
        if bytes <= self.committed {
            return Ok(());
        }
        // Where so much is there already, a page for each thread is not much more.
        let step = if self.committed >= MANY * STEP { STEP * pool.threads().min(MANY) } else { STEP };
        let to = bytes.next_multiple_of(step).min(self.bytes);
        let (from, more) = (self.committed, to - self.committed);
        let (map, start, refused) = (&self.map, Addresses(self.start), OnceLock::new());
        pool.run(more.div_ceil(STEP), &|piece, _| {
            let at = from + piece * STEP;
            let len = STEP.min(to - at);
            match map.advise_range(Advice::PopulateWrite, at, len) {
                // Kernels before 5.14: a write to each page does it.
                // SAFETY: inside the map, zeros as yet, and of this piece alone: the buffer is borrowed as one that changes.
                Err(e) if e.kind() == ErrorKind::InvalidInput => unsafe { start.touch(at, len) },
                Err(e) => _ = refused.set(e),
                Ok(()) => {}
            }
        });
        if let Some(e) = refused.into_inner() {
            return Err(e).with_context(|| format!("cannot commit {more} more bytes for {}", self.class.name()));
        }
        self.committed = to;
        Ok(())
    }

    pub fn as_bytes_mut(&mut self) -> &mut [u8] {
        &mut self.map[..self.bytes]
    }
}

/// Where a buffer begins, for threads that each have their own part of it.
struct Addresses(*mut u8);

// SAFETY: an address; whoever goes there answers for it.
unsafe impl Sync for Addresses {}

impl Addresses {
    /// Writes zeros, one to each page.
    ///
    /// # Safety
    /// So many bytes from there on are mapped, hold zeros, and are nobody else's meanwhile.
    unsafe fn touch(&self, from: usize, len: usize) {
        // SAFETY: as the caller guarantees.
        (from..from + len).step_by(4096).for_each(|at| unsafe { self.0.add(at).write_volatile(0) });
    }
}

/// A row-major f32 matrix that several threads write, each its own part.
#[derive(Clone, Copy)]
pub struct Place {
    start: *mut f32,
    pub rows: usize,
    pub cols: usize,
    pub stride: usize,
}

// SAFETY: a `Place` is only an address; every access goes through its unsafe methods, whose callers keep threads apart.
unsafe impl Send for Place {}
// SAFETY: as above.
unsafe impl Sync for Place {}

impl Place {
    /// Where `t` lies in its buffer.
    pub fn new(buffer: &Buffer, t: Tensor) -> Place {
        let end = if t.rows == 0 { t.offset } else { t.offset + (t.rows - 1) * t.stride + t.cols };
        assert!(end * size_of::<f32>() <= buffer.bytes, "a tensor reaches beyond its buffer");
        // SAFETY: the offset lies inside the buffer, as just checked.
        let start = unsafe { buffer.start.cast::<f32>().add(t.offset) };
        Place { start, rows: t.rows, cols: t.cols, stride: t.stride }
    }

    /// Host memory, `[rows, cols]` dense.
    pub fn of_slice(slice: &mut [f32], cols: usize) -> Place {
        assert!(cols > 0 && slice.len().is_multiple_of(cols));
        Place { start: slice.as_mut_ptr(), rows: slice.len() / cols, cols, stride: cols }
    }

    /// Columns `cols` of row `row`.
    ///
    /// # Safety
    /// The buffer is alive and nobody else writes these elements during the borrow.
    pub unsafe fn get<'a>(self, row: usize, cols: Range<usize>) -> &'a [f32] {
        assert!(row < self.rows && cols.start <= cols.end && cols.end <= self.cols);
        // SAFETY: inside the matrix, as just checked, and not written meanwhile, as the caller guarantees.
        unsafe { std::slice::from_raw_parts(self.start.add(row * self.stride + cols.start), cols.len()) }
    }

    /// Columns `cols` of row `row`, to write.
    ///
    /// # Safety
    /// The buffer is alive and nobody else uses these elements during the borrow.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn get_mut<'a>(self, row: usize, cols: Range<usize>) -> &'a mut [f32] {
        assert!(row < self.rows && cols.start <= cols.end && cols.end <= self.cols);
        // SAFETY: inside the matrix, as just checked, and used by nobody else, as the caller guarantees.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(row * self.stride + cols.start), cols.len()) }
    }

    /// Copies a matrix of this shape.
    ///
    /// # Safety
    /// Both buffers are alive, and nobody else uses these elements meanwhile.
    pub unsafe fn copy_from(self, from: Place) {
        assert_eq!((self.rows, self.cols), (from.rows, from.cols));
        for row in 0..self.rows {
            // SAFETY: rows of `cols` elements, inside their matrices.
            unsafe { std::ptr::copy(from.start.add(row * from.stride), self.start.add(row * self.stride), self.cols) };
        }
    }

    /// Some rows and columns of it.
    pub fn part(self, rows: Range<usize>, cols: Range<usize>) -> Place {
        assert!(rows.start <= rows.end && rows.end <= self.rows && cols.start <= cols.end && cols.end <= self.cols);
        // SAFETY: the offset stays inside the matrix (or at its end, when nothing is left), as just checked.
        let start = unsafe { self.start.add(rows.start * self.stride + cols.start) };
        Place { start, rows: rows.len(), cols: cols.len(), stride: self.stride }
    }

    /// The matrix as kernels read it.
    ///
    /// # Safety
    /// As for [`Place::get`].
    pub unsafe fn as_rows<'a>(self) -> Rows<'a> {
        // SAFETY: every `Place` lies inside its buffer; not written meanwhile, as the caller guarantees.
        unsafe { Rows::from_raw(self.start, self.rows, self.cols, self.stride) }
    }

    /// The matrix as kernels write it.
    ///
    /// # Safety
    /// As for [`Place::get_mut`].
    pub unsafe fn as_rows_mut<'a>(self) -> RowsMut<'a> {
        // SAFETY: every `Place` lies inside its buffer; used by nobody else, as the caller guarantees.
        unsafe { RowsMut::from_raw(self.start, self.rows, self.cols, self.stride) }
    }

    /// `len` elements of row `row` from column `from` as a dense matrix `[len / cols, cols]`.
    pub fn fold(self, row: usize, from: usize, rows: usize, cols: usize) -> Place {
        assert!(row < self.rows && from + rows * cols <= self.cols);
        let part = self.part(row..row + 1, from..from + rows * cols);
        Place { rows, cols, stride: cols, ..part }
    }
}

/// Cosines and then sines of each position's angles, `[positions, 2 * frequencies]`: addresses for all positions, of which those are filled that steps came to.
pub struct RotaryTable {
    pub frequencies: RotaryFrequencies,
    buffer: Buffer,
    positions: usize,
    /// For each [`FILLED`] positions.
    filled: Vec<bool>,
    /// Those that are being filled.
    new: Vec<usize>,
}

/// Positions that are filled at once: few, since a step may begin far behind the first, where a prompt's keys and values were there.
const FILLED: usize = 64;

impl RotaryTable {
    pub fn new(frequencies: &RotaryFrequencies, positions: usize) -> Result<RotaryTable> {
        let bytes = positions.checked_mul(frequencies.inv_freq.len() * 2 * size_of::<f32>());
        let bytes = bytes.with_context(|| format!("{positions} positions are too many"))?;
        let buffer = Buffer::zeroed(MemoryClass::Scratch, bytes)?;
        let parts = positions.div_ceil(FILLED);
        let (filled, new) = (vec![false; parts], Vec::with_capacity(parts));
        Ok(RotaryTable { frequencies: frequencies.clone(), buffer, positions, filled, new })
    }

    /// Bytes that are filled.
    pub fn bytes(&self) -> usize {
        let filled = self.filled.iter().filter(|filled| **filled).count() * FILLED;
        filled * 2 * self.frequencies.inv_freq.len() * size_of::<f32>()
    }

    pub fn place(&self) -> Place {
        let cols = 2 * self.frequencies.inv_freq.len();
        Place { start: self.buffer.start.cast(), rows: self.positions, cols, stride: cols }
    }

    /// Computes the angles of these positions that are not there yet.
    pub fn fill(&mut self, positions: &[u32], pool: &mut Pool) {
        self.new.clear();
        for position in positions.iter().map(|p| *p as usize) {
            assert!(position < self.positions, "position {position} of {}", self.positions);
            if !std::mem::replace(&mut self.filled[position / FILLED], true) {
                self.new.push(position / FILLED);
            }
        }
        let (place, half, frequencies, new) =
            (self.place(), self.frequencies.inv_freq.len(), &self.frequencies, &self.new);
        const TASK: usize = 16;
        pool.run(new.len() * FILLED / TASK, &|task, _| {
            let from = new[task * TASK / FILLED] * FILLED + task * TASK % FILLED;
            for row in (from..place.rows).take(TASK) {
                // SAFETY: this task alone writes this row.
                let (cos, sin) = unsafe { place.get_mut(row, 0..2 * half) }.split_at_mut(half);
                frequencies.angles(row as u32, cos, sin);
            }
        });
    }
}

/// A slice that several threads write, each its own part.
pub struct Parts<'a, T>(*mut T, usize, std::marker::PhantomData<&'a mut [T]>);

// SAFETY: access goes through `get`, whose callers keep threads apart.
unsafe impl<T: Send> Sync for Parts<'_, T> {}

impl<'a, T> Parts<'a, T> {
    pub fn new(slice: &'a mut [T]) -> Parts<'a, T> {
        Parts(slice.as_mut_ptr(), slice.len(), std::marker::PhantomData)
    }

    /// Elements `range`, to write.
    ///
    /// # Safety
    /// Nobody else uses these elements during the borrow.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn get(&self, range: Range<usize>) -> &mut [T] {
        assert!(range.start <= range.end && range.end <= self.1);
        // SAFETY: inside the slice, as just checked, and used by nobody else, as the caller guarantees.
        unsafe { std::slice::from_raw_parts_mut(self.0.add(range.start), range.len()) }
    }
}

/// One `T` for each thread of the pool.
pub struct PerThread<T>(Vec<UnsafeCell<T>>);

// SAFETY: `get` hands each thread its own.
unsafe impl<T: Send> Sync for PerThread<T> {}

impl<T: Default> PerThread<T> {
    pub fn new(threads: usize) -> Self {
        PerThread((0..threads).map(|_| UnsafeCell::default()).collect())
    }

    /// The given thread's own.
    ///
    /// # Safety
    /// Only the task that runs as `thread` calls this, and it keeps one borrow at a time.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn get(&self, thread: usize) -> &mut T {
        // SAFETY: the pool never runs two tasks as the same thread at once.
        unsafe { &mut *self.0[thread].get() }
    }

    /// Every thread's own. `&mut`: no task is running.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.0.iter_mut().map(UnsafeCell::get_mut)
    }
}

/// A weight matrix where its checkpoint has it, which may not be there yet.
pub struct Weight {
    source: MatrixSource,
    /// For each node of memory that threads are bound to: the same arrays there. Empty: all threads read the source.
    copies: Vec<Vec<Bytes>>,
    /// All of it is known to be there.
    ready: AtomicBool,
    /// It stays on disk; the expert store reads the parts that are used.
    pub streamed: bool,
}

impl Weight {
    /// Checks shape and lengths; reads no byte.
    pub fn new(source: MatrixSource) -> Result<Weight> {
        let (rows, cols) = (source.rows, source.cols);
        let parts = source.form.planes(cols)?;
        let (got, wanted) = (source.parts.len(), parts.len());
        ensure!(got == wanted, MatrixError::Parts { got, wanted });
        for (part, bytes) in parts.iter().zip(&source.parts) {
            let wanted = rows.checked_mul(part.row_bytes).ok_or(MatrixError::TooBig { rows, cols })?;
            ensure!(bytes.len() == wanted, MatrixError::Length { part: part.name, got: bytes.len(), wanted });
        }
        Ok(Weight { source, copies: Vec::new(), ready: AtomicBool::new(false), streamed: false })
    }

    /// The matrix for a thread of node `node`, by its place among those that threads are bound to; waits for what is not there.
    pub fn matrix(&self, node: usize) -> Matrix<'_> {
        let s = &self.source;
        Matrix::new(s.form, s.rows, s.cols, self.on(node).iter().map(|b| &b[..])).expect("checked when it was made")
    }

    /// Its arrays for a thread of this node.
    pub fn on(&self, node: usize) -> &[Bytes] {
        self.copies.get(node).unwrap_or(&self.source.parts)
    }

    /// Its arrays where it was loaded to.
    pub fn source(&self) -> &[Bytes] {
        &self.source.parts
    }

    /// From here on threads read the copy of their node: `[nodes, arrays]`, as long as those of the source.
    pub fn set_copies(&mut self, copies: Vec<Vec<Bytes>>) {
        let lengths = |arrays: &[Bytes]| arrays.iter().map(Bytes::len).collect::<Vec<_>>();
        assert!(copies.iter().all(|copy| lengths(copy) == lengths(self.source())), "a copy has the source's arrays");
        self.copies = copies;
    }

    /// Whether nodes have copies of it.
    pub fn is_copied(&self) -> bool {
        !self.copies.is_empty()
    }

    /// Waits until all of it is there, or can never be.
    pub fn wait(&self) {
        if !self.is_ready() {
            self.source.parts.iter().for_each(Bytes::wait);
        }
    }

    /// Whether all of it is there.
    pub fn is_ready(&self) -> bool {
        self.ready.load(Ordering::Relaxed) || {
            let ready = self.source.parts.iter().all(Bytes::is_ready);
            self.ready.store(ready, Ordering::Relaxed);
            ready
        }
    }

    /// One row as f32, read at once where the matrix is not there yet. Where that fails the load has failed, and the row is zeros.
    pub fn row_now(&self, isa: Isa, row: usize, out: &mut [f32]) {
        let read = |bytes: &Bytes| {
            let len = bytes.len() / self.source.rows;
            let mut copy = vec![0; len];
            bytes.slice(row * len..(row + 1) * len).read_now(&mut copy).map(|()| copy)
        };
        let Ok(parts) = self.source.parts.iter().map(read).collect::<Result<Vec<_>, _>>() else { return out.fill(0.0) };
        let matrix = Matrix::new(self.source.form, 1, self.source.cols, parts.iter().map(|p| &p[..]));
        affine::dequantize_row(isa, &matrix.expect("the parts of a row"), 0, out);
    }

    /// The arrays of some rows, whether they are there or not; those that its form does not have are empty.
    pub fn rows_bytes(&self, rows: Range<usize>) -> [Bytes; MAX_PLANES] {
        std::array::from_fn(|i| match self.source.parts.get(i) {
            None => Bytes::from(Vec::new()),
            Some(bytes) => {
                let row = bytes.len() / self.rows();
                bytes.slice(rows.start * row..rows.end * row)
            }
        })
    }

    /// Arrays that it lies in.
    pub fn arrays(&self) -> usize {
        self.source.parts.len()
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

    /// Bytes of the whole matrix, and whether they lie in a mapped file.
    pub fn bytes(&self) -> usize {
        self.source.parts.iter().map(|b| b.len()).sum()
    }

    /// Kernel scratch for `rows` of it times `tokens`.
    pub fn scratch_bytes(&self, rows: usize, tokens: usize, mode: Activations) -> usize {
        matmul::scratch_bytes(self.form(), self.cols(), rows, tokens, mode)
    }

    pub fn bytes_per_row(&self) -> usize {
        if self.rows() == 0 { 0 } else { self.bytes() / self.rows() }
    }

    pub fn is_mapped(&self) -> bool {
        self.source.parts[0].is_mapped()
    }
}
