//! Reads rows of a checkpoint's tensors.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use sluice_kernels::matrix::Matrix;
use sluice_store::{Checkpoint, open_regular};

use crate::conversion::Source;

/// The open files of a checkpoint. Any thread may read at any offset.
pub struct Input(Vec<(PathBuf, File)>);

impl Input {
    /// # Errors
    /// A file that cannot be opened.
    pub fn open(checkpoint: &Checkpoint) -> Result<Input> {
        let open = |(name, _): &(String, u64)| {
            let path = checkpoint.folder().join(name);
            let file = open_regular(&path)?;
            Ok((path, file))
        };
        Ok(Input(checkpoint.file_sizes().iter().map(open).collect::<Result<_>>()?))
    }

    /// Rows of each part of a source, across its segments.
    pub fn read(&self, source: &Source, rows: Range<usize>) -> Result<Vec<Vec<u8>>> {
        let part = |part: usize| {
            let p = &source.parts[part];
            let mut bytes = vec![0; rows.len() * p.row_bytes];
            if source.is_moved() {
                for (row, to) in rows.clone().zip(bytes.chunks_exact_mut(p.row_bytes)) {
                    self.read_piece(source, part, source.row_of(row), to)?;
                }
                return Ok(bytes);
            }
            let (mut row, mut rest) = (rows.start, &mut bytes[..]);
            while row < rows.end {
                let (segment, within) = (row / source.rows, row % source.rows);
                let count = (source.rows - within).min(rows.end - row);
                let (piece, after) = rest.split_at_mut(count * p.row_bytes);
                self.read_piece(source, part, segment * source.rows + within, piece)?;
                (row, rest) = (row + count, after);
            }
            Ok(bytes)
        };
        (0..source.parts.len()).map(part).collect()
    }
}

impl Input {
    /// Whole rows of one segment, from row `from` of all on.
    fn read_piece(&self, source: &Source, part: usize, from: usize, piece: &mut [u8]) -> Result<()> {
        let p = &source.parts[part];
        if let Some(made) = source.made.get(from / source.rows) {
            let at = from % source.rows * p.row_bytes;
            piece.copy_from_slice(&made.planes[part][at..at + piece.len()]);
            return Ok(());
        }
        let (file, offset) = p.segments[from / source.rows];
        let (path, file) = &self.0[file];
        file.read_exact_at(piece, offset + (from % source.rows * p.row_bytes) as u64)
            .with_context(|| format!("{}: cannot read tensor {:?}", path.display(), source.name))
    }
}

/// Rows of a source as a matrix; `parts` are those of [`Input::read`].
pub fn matrix<'a>(source: &Source, parts: &'a [Vec<u8>]) -> Result<Matrix<'a>> {
    let Some(form) = source.form else { bail!("tensor {:?} is no matrix of numbers", source.name) };
    let rows = parts[0].len() / source.parts[0].row_bytes;
    Ok(Matrix::new(form, rows, source.cols, parts.iter().map(Vec::as_slice))?)
}
