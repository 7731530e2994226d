//! Weight matrices.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Result, ensure};
use sluice_backend::MatrixSource;
use sluice_kernels::format::{Activations, MAX_PLANES, MatrixError, WeightFormat};
use sluice_kernels::matrix::Matrix;
use sluice_kernels::{Isa, affine, matmul};
use sluice_store::Bytes;

/// A weight matrix in its checkpoint's bytes, which may not have been read yet.
pub struct Weight {
    source: MatrixSource,
    /// The planes on each memory node that threads are bound to. Empty: all threads read the source.
    copies: Vec<Vec<Bytes>>,
    /// All of it is known to have been read.
    ready: AtomicBool,
    /// It stays on disk, and the expert store reads the rows that are used.
    pub streamed: bool,
}

impl Weight {
    /// Checks shape and lengths; reads no byte.
    pub fn new(source: MatrixSource) -> Result<Weight> {
        let (rows, cols) = (source.rows, source.cols);
        let planes = source.format.planes(cols)?;
        let (got, wanted) = (source.planes.len(), planes.len());
        ensure!(got == wanted, MatrixError::Parts { got, wanted });
        for (plane, bytes) in planes.iter().zip(&source.planes) {
            let wanted = rows.checked_mul(plane.row_bytes).ok_or(MatrixError::TooBig { rows, cols })?;
            ensure!(bytes.len() == wanted, MatrixError::Length { part: plane.name, got: bytes.len(), wanted });
        }
        Ok(Weight { source, copies: Vec::new(), ready: AtomicBool::new(false), streamed: false })
    }

    /// The matrix for a thread of node `node` (an index into the nodes that have copies). Waits until it has been read.
    pub fn matrix(&self, node: usize) -> Matrix<'_> {
        let s = &self.source;
        Matrix::new(s.format, s.rows, s.cols, self.planes_on(node).iter().map(|b| &b[..]))
            .expect("checked when it was made")
    }

    /// Its planes for a thread of this node.
    pub fn planes_on(&self, node: usize) -> &[Bytes] {
        self.copies.get(node).unwrap_or(&self.source.planes)
    }

    pub fn source(&self) -> &MatrixSource {
        &self.source
    }

    /// Its planes where they were loaded.
    pub fn planes(&self) -> &[Bytes] {
        &self.source.planes
    }

    /// From here on threads read the copy of their node. `copies`: `[nodes, planes]`, of the same lengths as the source.
    pub fn set_copies(&mut self, copies: Vec<Vec<Bytes>>) {
        let lengths = |arrays: &[Bytes]| arrays.iter().map(Bytes::len).collect::<Vec<_>>();
        assert!(copies.iter().all(|copy| lengths(copy) == lengths(self.planes())), "a copy has the source's arrays");
        self.copies = copies;
    }

    /// Whether nodes have copies of it.
    pub fn is_copied(&self) -> bool {
        !self.copies.is_empty()
    }

    /// Waits until all of it has been read, or reading has failed.
    pub fn wait(&self) {
        if !self.is_ready() {
            self.source.planes.iter().for_each(Bytes::wait);
        }
    }

    /// Whether all of it has been read.
    pub fn is_ready(&self) -> bool {
        self.ready.load(Ordering::Relaxed) || {
            let ready = self.source.planes.iter().all(Bytes::is_ready);
            self.ready.store(ready, Ordering::Relaxed);
            ready
        }
    }

    /// One row as f32, read from the file now. If that fails, so has the load, and the row is zeros.
    pub fn read_row_now(&self, isa: Isa, row: usize, out: &mut [f32]) {
        let read = |bytes: &Bytes| {
            let len = bytes.len() / self.source.rows;
            let mut copy = vec![0; len];
            bytes.slice(row * len..(row + 1) * len).read_now(&mut copy).map(|()| copy)
        };
        let Ok(planes) = self.source.planes.iter().map(read).collect::<Result<Vec<_>, _>>() else {
            return out.fill(0.0);
        };
        let matrix = Matrix::new(self.source.format, 1, self.source.cols, planes.iter().map(|p| &p[..]));
        affine::dequantize_row(isa, &matrix.expect("the planes of a row"), 0, out);
    }

    /// The planes of some rows, read or not. Planes that the format does not have are empty.
    pub fn rows_bytes(&self, rows: Range<usize>) -> [Bytes; MAX_PLANES] {
        std::array::from_fn(|i| match self.source.planes.get(i) {
            None => Bytes::from(Vec::new()),
            Some(bytes) => {
                let row = bytes.len() / self.rows();
                bytes.slice(rows.start * row..rows.end * row)
            }
        })
    }

    /// The number of its planes.
    pub fn arrays(&self) -> usize {
        self.source.planes.len()
    }

    pub fn format(&self) -> WeightFormat {
        self.source.format
    }

    pub fn rows(&self) -> usize {
        self.source.rows
    }

    pub fn cols(&self) -> usize {
        self.source.cols
    }

    /// Bytes of the whole matrix.
    pub fn bytes(&self) -> usize {
        self.source.planes.iter().map(|b| b.len()).sum()
    }

    /// Kernel scratch for `rows` of it times `tokens`.
    pub fn scratch_bytes(&self, rows: usize, tokens: usize, mode: Activations) -> usize {
        matmul::scratch_bytes(self.format(), self.cols(), rows, tokens, mode)
    }

    pub fn bytes_per_row(&self) -> usize {
        if self.rows() == 0 { 0 } else { self.bytes() / self.rows() }
    }

    pub fn is_mapped(&self) -> bool {
        self.source.planes[0].is_mapped()
    }
}
