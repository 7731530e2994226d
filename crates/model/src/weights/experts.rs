//! The experts of a layer, however a checkpoint stores them.

use anyhow::{Context, Result, ensure};
use sluice_backend::{ExpertBiases, ExpertKind, ExpertMatrix, ExpertPart, Experts, MatrixId, MatrixSource, Tensor};
use sluice_store::{Buffer, Bytes};

use super::{UsedBy, Weights};
use crate::description::{ExpertActivation, FeedForwardDescription, MoeDescription, StackOrder, WeightDescription};
use crate::source::{ExpertStorage, MatrixShape};

/// A copy of the matrix with row `order[i]` at `i`. Unless it `reads`, values are zeros.
fn rows_in_order(source: MatrixSource, order: &[u32], name: &str, reads: bool) -> Result<MatrixSource> {
    ensure!(order.len() == source.rows, "tensor {name:?}: {} rows, expected {}", source.rows, order.len());
    let moved = |plane: &Bytes| -> Result<Bytes> {
        let (len, row) = (plane.len(), plane.len() / source.rows.max(1));
        // Of whole pages.
        let mut to = Buffer::large(len).with_context(|| format!("tensor {name:?}: no memory"))?;
        if reads {
            let mut stored = vec![0; len];
            plane.read_now(&mut stored).with_context(|| format!("tensor {name:?}"))?;
            for (to, from) in to[..len].chunks_exact_mut(row).zip(order) {
                to.copy_from_slice(&stored[*from as usize * row..][..row]);
            }
        }
        Ok(Bytes::from(to).slice(..len))
    };
    let planes = source.planes.iter().map(moved).collect::<Result<_>>()?;
    Ok(MatrixSource { planes, ..source })
}

impl<'a> Weights<'a> {
    /// The mixture of a layer.
    fn mixture(&self, layer: usize) -> &'a MoeDescription {
        match self.description.layer(layer).map(|layer| &layer.feed_forward) {
            Some(FeedForwardDescription::Moe(moe) | FeedForwardDescription::Beside { moe, .. }) => moe,
            _ => panic!("layer {layer} has no experts"),
        }
    }

    /// The routed experts of a layer, however the checkpoint stores them.
    pub fn experts(&mut self, layer: usize) -> Result<Experts> {
        let moe = self.mixture(layer);
        self.by = UsedBy::Experts;
        if !moe.activation.is_gated() {
            return self.ungated_experts(layer);
        }
        let parts = ["gate_proj", "up_proj", "down_proj"].map(|p| self.described(layer, &format!("mlp.experts.{p}")));
        let [gate, up, down] = parts;
        let (count, mut order) = (gate.count, None);
        let layout = self.tensors.layout();
        let storage = self
            .own_stacks(layer)
            .unwrap_or_else(|| layout.experts(self.tensors.checkpoint(), &self.description.stored_name(&gate)));
        let matrices = match &storage {
            ExpertStorage::FusedGateUp { gate_up, down: name } => {
                let stride = gate.rows + up.rows;
                let takes_turns = self.takes_turns(moe);
                let mut stack = |name: &str, rows: usize, cols: usize| -> Result<MatrixId> {
                    // The floats of such stacks are stored by columns.
                    if takes_turns && self.tensors.checkpoint().tensor(name).is_some() {
                        let shape = MatrixShape { leading: &[count], rows, cols };
                        let source = self.tensors.stack_by_columns(name, shape, self.reads)?;
                        return self.register(name, source);
                    }
                    self.load(name, &[count], rows, cols)
                };
                let both = stack(gate_up, stride, gate.cols)?;
                let matrix = stack(name, down.rows, down.cols)?;
                let (offset, step) = if takes_turns { (1, 2) } else { (gate.rows, 1) };
                [
                    ExpertMatrix::Stacked { matrix: both, stride, offset: 0, step },
                    ExpertMatrix::Stacked { matrix: both, stride, offset, step },
                    ExpertMatrix::Stacked { matrix, stride: down.rows, offset: 0, step: 1 },
                ]
            }
            ExpertStorage::Stacked => {
                let mut stacked = |w: WeightDescription| -> Result<ExpertMatrix> {
                    let name = format!("{}.weight", layout.stacked_experts(&self.description.stored_name(&w)));
                    let matrix = self.load(&name, &[count], w.rows, w.cols)?;
                    Ok(ExpertMatrix::Stacked { matrix, stride: w.rows, offset: 0, step: 1 })
                };
                [stacked(gate)?, stacked(up)?, stacked(down)?]
            }
            ExpertStorage::Single => {
                let (matrices, of_inputs) = self.single_experts([gate, up, down], moe.biased)?;
                order = of_inputs;
                matrices
            }
        };
        self.by = UsedBy::All;
        let biases = if moe.biased { Some(self.expert_biases(parts, &storage, moe)?) } else { None };
        let part = |(matrix, w): (ExpertMatrix, WeightDescription)| ExpertPart { matrix, rows: w.rows, cols: w.cols };
        let parts = matrices.into_iter().zip(parts).map(part).collect();
        let kind = match moe.activation {
            ExpertActivation::SwiGlu => ExpertKind::SwiGlu,
            ExpertActivation::ClampedSwiGlu { alpha, limit, added } => {
                ExpertKind::ClampedSwiGlu { alpha, limit, added }
            }
            ExpertActivation::GeGlu => ExpertKind::GeGlu,
            ExpertActivation::SiTu { beta, linear } => ExpertKind::SiTu { beta, linear },
            ExpertActivation::SquaredRelu => ExpertKind::SquaredRelu,
        };
        Ok(Experts { count, kind, parts, biases, order })
    }

    /// The stacks of a layer's experts, where they have names that only this architecture's checkpoints have.
    fn own_stacks(&self, layer: usize) -> Option<ExpertStorage> {
        let name = |module: &str| self.tensors.layout().full(&format!("layers.{layer}.{module}.weight"));
        let [gate_up, down] = self.description.stack_spelling?.map(name);
        let is_there = self.tensors.checkpoint().tensor(&gate_up).is_some();
        is_there.then_some(ExpertStorage::FusedGateUp { gate_up, down })
    }

    /// The routed experts of a layer that have no gates.
    fn ungated_experts(&mut self, layer: usize) -> Result<Experts> {
        let parts = ["up_proj", "down_proj"].map(|p| self.described(layer, &format!("mlp.experts.{p}")));
        let count = parts[0].count;
        let (layout, checkpoint) = (self.tensors.layout(), self.tensors.checkpoint());
        let mut experts = Vec::new();
        for w in parts {
            let stored = self.description.stored_name(&w);
            let names = [format!("{}.weight", layout.stacked_experts(&stored)), layout.full(&stored)];
            let matrix = match names.iter().find(|name| checkpoint.tensor(name).is_some()) {
                Some(stack) => {
                    let matrix = self.load(stack, &[count], w.rows, w.cols)?;
                    ExpertMatrix::Stacked { matrix, stride: w.rows, offset: 0, step: 1 }
                }
                None => {
                    let names: Vec<_> = (0..count).map(|e| format!("{}.weight", self.single_expert(&w, e))).collect();
                    let each = names.iter().map(|name| self.load(name, &[], w.rows, w.cols));
                    ExpertMatrix::Single(each.collect::<Result<_>>()?)
                }
            };
            experts.push(ExpertPart { matrix, rows: w.rows, cols: w.cols });
        }
        self.by = UsedBy::All;
        Ok(Experts { count, kind: ExpertKind::SquaredRelu, parts: experts, biases: None, order: None })
    }

    /// Gate, up and down of experts that have a tensor for each, and the order in which the first two take the input: `[experts, hidden]`, if it is not its own.
    ///
    /// Where columns of down are in the order of activations, rows of gate and up are put in the same order, so that what they put out is. Orders of their own inputs are
    /// others for each expert.
    fn single_experts(
        &mut self,
        parts: [WeightDescription; 3],
        biased: bool,
    ) -> Result<([ExpertMatrix; 3], Option<Tensor>)> {
        let [gate, _, down] = parts;
        let count = gate.count;
        let names = parts.map(|w| (0..count).map(|e| format!("{}.weight", self.single_expert(&w, e))).collect());
        let names: [Vec<String>; 3] = names;
        // 1. orders, which only the producers of quantised checkpoints have
        let order = |name: &String, w: &WeightDescription| -> Result<Option<Vec<u32>>> {
            let shape = MatrixShape { leading: &[], rows: w.rows, cols: w.cols };
            Ok(self.tensors.ordered_matrix(name, shape, false)?.order)
        };
        let (mut of_inputs, mut of_hidden) = (vec![None; count], vec![None; count]);
        if self.layout().quantized_form().is_some() {
            let [gates, ups, downs] = &names;
            let each = of_inputs.iter_mut().zip(&mut of_hidden).zip(gates).zip(ups).zip(downs);
            for ((((of_input, of_hidden), gate_name), up_name), down_name) in each {
                *of_hidden = order(down_name, &down)?;
                let [of_gate, of_up] = [order(gate_name, &gate)?, order(up_name, &parts[1])?];
                ensure!(of_gate == of_up, "tensors {gate_name:?} and {up_name:?}: columns in two orders");
                *of_input = of_gate;
            }
        }
        let is_ordered = of_hidden.iter().any(Option::is_some);
        ensure!(!is_ordered || !biased, "{}: biases of experts in the order of activations", names[2][0]);
        // 2. matrices
        let mut matrices = Vec::new();
        for (part, (w, names)) in parts.iter().zip(&names).enumerate() {
            let mut each = Vec::with_capacity(count);
            for (e, name) in names.iter().enumerate() {
                let shape = MatrixShape { leading: &[], rows: w.rows, cols: w.cols };
                let mut matrix = self.tensors.ordered_matrix(name, shape, self.reads)?.matrix;
                if let (0 | 1, Some(order)) = (part, &of_hidden[e]) {
                    matrix = rows_in_order(matrix, order, name, self.reads)?;
                }
                each.push(self.register(name, matrix)?);
            }
            matrices.push(ExpertMatrix::Single(each));
        }
        let matrices = <[ExpertMatrix; 3]>::try_from(matrices).expect("three projections");
        if of_inputs.iter().all(Option::is_none) {
            return Ok((matrices, None));
        }
        let numbers = |order: &Option<Vec<u32>>| -> Vec<f32> {
            match order {
                Some(order) => order.iter().map(|column| *column as f32).collect(),
                None => (0..gate.cols).map(|column| column as f32).collect(),
            }
        };
        let numbers: Vec<f32> = of_inputs.iter().flat_map(numbers).collect();
        Ok((matrices, Some(self.upload(&numbers, count, gate.cols)?)))
    }

    /// Whether rows of gate and up take turns where they are in one stack.
    fn takes_turns(&self, moe: &MoeDescription) -> bool {
        moe.stacks == StackOrder::Turns && self.layout().has_own_stacks()
    }

    /// The module of one expert's projection. The layout places its number, which is not always behind `experts`.
    fn single_expert(&self, w: &WeightDescription, expert: usize) -> String {
        // The layout places an expert's number, which is not always behind `experts`.
        let (short, usual) = (self.description.stored_name(w), w.projection());
        let module = short.strip_suffix(usual).unwrap_or(&short);
        let of = |e: usize, part: &str| self.layout().full(&format!("{module}{e}.{part}"));
        // A bundle's experts have the usual names.
        let has_usual = self.tensors.checkpoint().tensor(&format!("{}.weight", of(0, usual))).is_some();
        of(expert, if has_usual { usual } else { self.description.own_projection(usual) })
    }

    /// What is added to the projections of a layer's experts, stored as their matrices are.
    fn expert_biases(
        &mut self,
        [gate, up, down]: [WeightDescription; 3],
        storage: &ExpertStorage,
        moe: &MoeDescription,
    ) -> Result<ExpertBiases> {
        let count = gate.count;
        let of_stack = |matrix: &str| match matrix.strip_suffix(".weight") {
            Some(module) => format!("{module}.bias"),
            None => format!("{matrix}_bias"),
        };
        let stacked = |w: &WeightDescription| {
            let module = self.layout().stacked_experts(&self.description.stored_name(w));
            format!("{module}.bias")
        };
        // In bundles experts are single, and vectors are not.
        let are_stacked = self.tensors.checkpoint().tensor(&stacked(&gate)).is_some();
        let values = match storage {
            ExpertStorage::FusedGateUp { gate_up, down: of_down } => {
                let (both, _) = self.values(&of_stack(gate_up), &[count, gate.rows + up.rows])?;
                let rows = both.chunks_exact(gate.rows + up.rows);
                let pick = |second: bool| -> Vec<f32> {
                    let of_row = |row: &[f32]| -> Vec<f32> {
                        match (self.takes_turns(moe), second) {
                            (true, _) => row.iter().skip(usize::from(second)).step_by(2).copied().collect(),
                            (false, false) => row[..gate.rows].to_vec(),
                            (false, true) => row[gate.rows..].to_vec(),
                        }
                    };
                    rows.clone().flat_map(of_row).collect()
                };
                [pick(false), pick(true), self.values(&of_stack(of_down), &[count, down.rows])?.0]
            }
            ExpertStorage::Single if !are_stacked => {
                let of = |w: &WeightDescription| -> Result<Vec<f32>> {
                    let mut all = Vec::with_capacity(count * w.rows);
                    for expert in 0..count {
                        all.extend(self.values(&format!("{}.bias", self.single_expert(w, expert)), &[w.rows])?.0);
                    }
                    Ok(all)
                };
                [of(&gate)?, of(&up)?, of(&down)?]
            }
            ExpertStorage::Stacked | ExpertStorage::Single => {
                let of = |w: &WeightDescription| self.values(&stacked(w), &[count, w.rows]).map(|(values, _)| values);
                [of(&gate)?, of(&up)?, of(&down)?]
            }
        };
        let [of_gate, of_up, of_down] = values;
        Ok(ExpertBiases {
            gate: self.upload(&of_gate, count, gate.rows)?,
            up: self.upload(&of_up, count, up.rows)?,
            down: self.upload(&of_down, count, down.rows)?,
        })
    }
}
