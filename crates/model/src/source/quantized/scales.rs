//! Scales of FP8 as kernels have them: some for each row.

use anyhow::{Context, Result, anyhow, bail};
use sluice_backend::{Float, Fp8Scale};
use sluice_store::{Buffer, Bytes, Dtype, Tensor};

use super::module::read;
use crate::source::layout::MatrixShape;

/// What blocks of a checkpoint are whose config does not say.
const USUAL_BLOCK: [usize; 2] = [128, 128];

/// What the elements of a tensor of scales are.
///
/// # Errors
/// Elements that are no scales.
pub(super) fn kind(scales: &Tensor) -> Result<Fp8Scale> {
    Ok(match scales.dtype {
        Dtype::F32 => Fp8Scale::Float(Float::F32),
        Dtype::F16 => Fp8Scale::Float(Float::F16),
        Dtype::BF16 => Fp8Scale::Float(Float::Bf16),
        Dtype::U8 | Dtype::F8_E8M0 => Fp8Scale::Power,
        other => bail!("tensor {:?}: {other} are no scales of FP8", scales.name),
    })
}

/// Columns that share a scale (0: all of a row), and the scales of each row: the tensor itself if it has them, else a copy in which they are repeated.
///
/// # Errors
/// A shape that is none of scales of such a matrix.
pub(super) fn fp8(scales: &Tensor, shape: MatrixShape, block: Option<[usize; 2]>, reads: bool) -> Result<(u16, Bytes)> {
    let MatrixShape { leading, rows, cols } = shape;
    let unlike = || {
        let block = block.map(|[rows, cols]| format!(" in blocks of {rows} x {cols}")).unwrap_or_default();
        let wanted = [leading, &[rows, cols]].concat();
        anyhow!("tensor {:?} has shape {:?}, which are no scales of {wanted:?}{block}", scales.name, scales.shape)
    };
    let of_one = scales.shape.strip_prefix(leading).ok_or_else(unlike)?;
    // Scales of a row, and how many columns and rows share one.
    let (across, group, per) = match *of_one {
        [] | [1] | [1, 1] => (1, 0, rows),
        [n] | [n, 1] if n == rows => (1, 0, 1),
        [down, across] => {
            let [block_rows, block_cols] = block.unwrap_or(USUAL_BLOCK);
            if (down, across) == (rows.div_ceil(block_rows), cols.div_ceil(block_cols)) {
                (across, block_cols, block_rows)
            } else if down == rows && across > 0 && cols.is_multiple_of(across) && cols / across >= 32 {
                (across, cols / across, 1)
            } else {
                return Err(unlike());
            }
        }
        _ => return Err(unlike()),
    };
    let group = u16::try_from(group).map_err(|_| unlike())?;
    if per == 1 {
        return Ok((group, scales.bytes.clone()));
    }
    let row = across * scales.dtype.size();
    let len = shape.all_rows().checked_mul(row).ok_or_else(unlike)?;
    let mut plane = Buffer::zeroed(len).with_context(|| format!("tensor {:?}: no memory", scales.name))?;
    if reads {
        let (stored, count) = (read(scales)?, rows.div_ceil(per));
        for (r, to) in plane.chunks_exact_mut(row).enumerate() {
            let from = (r / rows * count + r % rows / per) * row;
            to.copy_from_slice(&stored[from..from + row]);
        }
    }
    Ok((group, plane.into()))
}
