//! Matrices that are not in files as kernels take them, because their producer has quantised them another way: planned with bytes that are mapped or made.

use anyhow::{Result, ensure};
use sluice_backend::{E2m1, MatrixSource, widen};
use sluice_kernels::format::WeightFormat;
use sluice_model::source::MatrixShape;
use sluice_model::{StackOrder, WeightClass, WeightDescription};
use sluice_store::{Bytes, Dtype, Tensor, TensorPlan};

use super::{Planner, float};
use crate::conversion::{Rows, Source, Treatment};
use crate::rules::{Module, Width};

impl Planner<'_> {
    /// The matrix in tensor `t`, if it is not in the file as it is: its bytes, mapped or made. `with`: the second weight of a tensor that holds two.
    pub(super) fn made(
        &self,
        t: &Tensor,
        weight: &WeightDescription,
        with: Option<&WeightDescription>,
    ) -> Result<Option<MatrixSource>> {
        let Some(name) = self.tensors.layout().values_of(&t.name) else { return Ok(None) };
        let stack = [weight.count];
        let leading = if name.ends_with(".weight") { &[][..] } else { &stack };
        let rows = weight.rows + with.map_or(0, |with| with.rows);
        let shape = MatrixShape { leading, rows, cols: weight.cols };
        let made = self.tensors.layout().assembled(self.checkpoint, &name, shape, true)?;
        made.map(|made| made.in_order(&t.name)).transpose()
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
        let source = Source { made, ..Source::of_files(parts, rows, Some(form), cols, &t.name) };
        if matches!(form, WeightFormat::Affine { .. }) {
            self.found.parameters += source.all_rows() as u64 * cols as u64;
            return self.groups(i, weight, source, leading);
        }
        self.matrix(i, weight, source, &[leading, &[cols]].concat(), Dtype::BF16)
    }

    /// Whether rows of gate and up take turns in stacks of this weight's layer.
    pub(super) fn takes_turns(&self, weight: &WeightDescription) -> bool {
        let layer = weight.layer.and_then(|layer| self.description.layers.get(layer));
        let turns =
            layer.is_some_and(|layer| layer.feed_forward.moe().is_some_and(|moe| moe.stacks == StackOrder::Turns));
        turns && self.tensors.layout().has_own_stacks()
    }

    /// Plans a stack of experts that their producer has quantised, of one weight or of two whose rows take turns. MXFP4 stays as it is unless a rule asks for something else.
    pub(super) fn made_stack(
        &mut self,
        i: usize,
        t: &Tensor,
        weights: impl Iterator<Item = WeightDescription>,
        made: MatrixSource,
    ) -> Result<()> {
        let weights: Vec<WeightDescription> = weights.collect();
        let takes_turns = weights.len() == 2 && self.takes_turns(&weights[0]);
        let is_known = made.format == WeightFormat::E2m1(E2m1::Power) && (takes_turns || weights.len() == 1);
        ensure!(is_known, "tensor {:?}: stacks of this form cannot be packed", t.name);
        let planes = made.format.planes(made.cols)?;
        for (turn, weight) in weights.iter().enumerate() {
            let parts = planes.iter().map(|p| Rows { row_bytes: p.row_bytes, segments: vec![(0, 0)] }).collect();
            let source = Source {
                parts,
                rows: made.rows,
                form: Some(made.format),
                cols: made.cols,
                made: vec![made.clone()],
                name: t.name.to_string(),
                pairs: None,
                turn: takes_turns.then_some(turn),
                columns: None,
            };
            let (in_layers, mlx) = (weight.name(), self.description.mlx_name(weight));
            let out = self.description.mlx.full(&mlx);
            if self.rules.asked_for(Module::of(self.description, weight, &[&in_layers, &mlx, &out])).is_some() {
                let shape = [weight.count, weight.rows, weight.cols];
                self.matrix(i, weight, source, &shape, Dtype::BF16)?;
                continue;
            }
            let tensor = |leaf: &str, dtype, last| TensorPlan {
                name: format!("{out}.{leaf}"),
                dtype,
                shape: vec![weight.count, weight.rows, last],
            };
            let tensors =
                vec![tensor("weight", Dtype::U32, weight.cols / 8), tensor("scales", Dtype::U8, weight.cols / 32)];
            self.found.parameters += weight.elements();
            self.found.copied += 1;
            self.found.overrides.insert(out, Width::Mxfp4);
            self.push(i, weight, source, Treatment::Copy, tensors);
        }
        Ok(())
    }

    /// Plans what is added to the results of a layer's experts: a row for each, with those of gate and up apart. They are vectors, which stay in memory.
    pub(super) fn expert_biases(
        &mut self,
        i: usize,
        t: &Tensor,
        weights: impl Iterator<Item = WeightDescription>,
    ) -> Result<()> {
        let weights: Vec<WeightDescription> = weights.collect();
        let rows: usize = weights.iter().map(|w| w.rows).sum();
        let (count, takes_turns) = (weights[0].count, self.takes_turns(&weights[0]));
        let float = float(t.dtype).filter(|_| t.shape == [count, rows]);
        let Some(float) = float else {
            anyhow::bail!("tensor {:?}: {} {:?}, expected floats [{count}, {rows}]", t.name, t.dtype, t.shape)
        };
        let mut bytes = vec![0; t.bytes.len()];
        t.bytes.read_now(&mut bytes)?;
        let values = widen(float, &bytes)?;
        let mut first = 0;
        for (turn, weight) in weights.iter().enumerate() {
            let of_expert = |row: &[f32]| -> Vec<f32> {
                match takes_turns && weights.len() == 2 {
                    true => row.iter().skip(turn).step_by(2).copied().collect(),
                    false => row[first..first + weight.rows].to_vec(),
                }
            };
            let own: Vec<u8> =
                values.chunks_exact(rows).flat_map(of_expert).flat_map(|x: f32| x.to_le_bytes()).collect();
            first += weight.rows;
            let form = WeightFormat::Float(sluice_backend::Float::F32);
            let made = MatrixSource { format: form, rows: count, cols: weight.rows, planes: vec![Bytes::from(own)] };
            let source = Source {
                parts: vec![Rows { row_bytes: 4 * weight.rows, segments: vec![(0, 0)] }],
                rows: count,
                form: Some(form),
                cols: weight.rows,
                made: vec![made],
                name: t.name.to_string(),
                pairs: None,
                turn: None,
                columns: None,
            };
            let name = format!("{}.bias", self.description.mlx.full(&self.description.mlx_name(weight)));
            let tensors = vec![TensorPlan { name, dtype: Dtype::F32, shape: vec![count, weight.rows] }];
            self.found.parameters += (count * weight.rows) as u64;
            let vector = WeightDescription { class: WeightClass::Vector, ..*weight };
            self.push(i, &vector, source, Treatment::Copy, tensors);
        }
        Ok(())
    }
}
