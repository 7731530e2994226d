//! Values that are read at load: vectors as f32, and tables of integers.

use anyhow::{Context, Result, anyhow, bail, ensure};
use sluice_backend::{WeightFormat, widen_blocks};
use sluice_store::Dtype;

use super::Weights;
use crate::source::float_type;

impl Weights<'_> {
    /// The values of tensor `name` as f32, and its shape, which must have as many elements as `wanted`.
    pub(super) fn values(&self, name: &str, wanted: &[usize]) -> Result<(Vec<f32>, Vec<usize>)> {
        let t = self.tensors.checkpoint().tensor(name);
        let t = t.ok_or_else(|| anyhow!("{}: no tensor {name:?}", self.tensors.checkpoint().named().display()))?;
        let blocks = match self.layout().format(self.tensors.checkpoint(), &t) {
            // Quantising programs do not spare tables of vectors.
            Ok(WeightFormat::Blocks(blocks)) => Some(blocks),
            _ => None,
        };
        if let Some(blocks) = blocks {
            let mut shape = t.shape.clone();
            let last = shape.last_mut().expect("blocks are along rows");
            *last = *last / blocks.block_bytes() * blocks.block_columns();
            ensure!(shape == wanted, "tensor {name} has shape {shape:?}, expected {wanted:?}");
            let count = shape.iter().product();
            let values = if self.reads { widen_blocks(blocks, &t.bytes)? } else { vec![0.0; count] };
            return Ok((values, shape));
        }
        let float = float_type(name, t.dtype)?;
        // Checked before widening: a wrong tensor may be huge.
        let fits = t.shape.iter().product::<usize>() == wanted.iter().product::<usize>();
        ensure!(fits, "tensor {name} has shape {:?}, expected {wanted:?}", t.shape);
        let values = if self.reads {
            sluice_backend::widen(float, &t.bytes)?
        } else {
            vec![0.0; t.bytes.len() / t.dtype.size()]
        };
        Ok((values, t.shape.clone()))
    }

    /// The table of integers `part`, of numbers below 2^32: `[rows, cols]`. Unless values are read, each row is 0, 1, 2, ..
    pub fn numbers(&mut self, layer: usize, part: &str) -> Result<Vec<u32>> {
        let w = self.described(layer, part);
        let (name, checkpoint) = (self.module(&w), self.tensors.checkpoint());
        let t = checkpoint.tensor(&name);
        let t = t.ok_or_else(|| anyhow!("{}: no tensor {name:?}", checkpoint.named().display()))?;
        ensure!(t.shape == [w.rows, w.cols], "tensor {name} has shape {:?}, expected {:?}", t.shape, [w.rows, w.cols]);
        let size = match t.dtype {
            Dtype::I64 | Dtype::U64 => 8,
            Dtype::I32 | Dtype::U32 => 4,
            other => bail!("tensor {name}: {other:?} is no type of a table of numbers (I64 and I32 are)"),
        };
        if !self.reads {
            return Ok((0..w.rows * w.cols).map(|i| (i % w.cols) as u32).collect());
        }
        let mut bytes = vec![0; t.bytes.len()];
        t.bytes.read_now(&mut bytes).with_context(|| format!("tensor {name}"))?;
        let number = |bytes: &[u8]| {
            let mut all = [0; 8];
            all[..size].copy_from_slice(bytes);
            u32::try_from(u64::from_le_bytes(all))
                .map_err(|_| anyhow!("tensor {name}: a number that is negative or too large"))
        };
        bytes.chunks_exact(size).map(number).collect()
    }
}
