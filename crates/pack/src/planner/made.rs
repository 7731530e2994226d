//! Matrices that are not in files as kernels take them, because their producer has quantised them another way: planned with bytes that are mapped or made.

use anyhow::Result;
use sluice_backend::MatrixSource;
use sluice_kernels::format::WeightFormat;
use sluice_model::WeightDescription;
use sluice_model::source::MatrixShape;
use sluice_store::{Dtype, Tensor};

use super::Planner;
use crate::conversion::{Rows, Source};

impl Planner<'_> {
    /// The matrix in tensor `t`, if it is not in the file as it is: its bytes, mapped or made.
    pub(super) fn made(&self, t: &Tensor, weight: &WeightDescription) -> Result<Option<MatrixSource>> {
        let Some(name) = self.tensors.layout().values_of(&t.name) else { return Ok(None) };
        let stack = [weight.count];
        let leading = if name.ends_with(".weight") { &[][..] } else { &stack };
        let shape = MatrixShape { leading, rows: weight.rows, cols: weight.cols };
        self.tensors.layout().assembled(self.checkpoint, &name, shape, true)
    }

    /// Plans matrices, of one weight, that are not in files as they are. `leading`: the shape of all without columns.
    pub(super) fn made_matrix(
        &mut self,
        i: usize,
        weight: &WeightDescription,
        t: &Tensor,
        made: Vec<MatrixSource>,
        leading: &[usize],
    ) -> Result<()> {
        let (form, cols, rows) = (made[0].format, made[0].cols, made[0].rows);
        let segments = vec![(0, 0); made.len()];
        let planes = form.planes(cols)?;
        let parts = planes.iter().map(|p| Rows { row_bytes: p.row_bytes, segments: segments.clone() }).collect();
        let source = Source { parts, rows, form: Some(form), cols, made, name: t.name.to_string(), pairs: None };
        if matches!(form, WeightFormat::Affine { .. }) {
            self.found.parameters += source.all_rows() as u64 * cols as u64;
            return self.groups(i, weight, source, leading);
        }
        self.matrix(i, weight, source, &[leading, &[cols]].concat(), Dtype::BF16)
    }
}
