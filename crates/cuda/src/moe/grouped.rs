//! The experts of a mixture's tokens, the shared expert, and their sum.

use anyhow::Result;
use sluice_backend::{Activations, ExpertPart, SharedExpert, Tensor};

use crate::device::memory::Scratch;
use crate::device::sys::Address;
use crate::kernels::Kernel;
use crate::moe::activate::{GatesAndUps, activate};
use crate::moe::experts::part;
use crate::moe::gather::GatheredInputs;
use crate::moe::layer::MoeLayer;
use crate::moe::pairs::{sort_pairs, tile_choice};
use crate::moe::route::{RoutedOutputs, RouterScratch};
use crate::ops::activations::{EncodeInput, EncodedActivations, encode};
use crate::ops::context::Context;
use crate::ops::gemv_fused::gemv_fused;
use crate::ops::grouped_gemm::{GroupedOutput, GroupedProduct, grouped_gemm};
use crate::ops::matmul::{encode_and_matmul, gated_matmul, matmul, needs_of};
use crate::ops::product::{ExpertTable, MAX_GRID_Y, MatmulInput, Product};
use crate::parameters::{self as p, number};

/// Scratch of a mixture's experts.
#[derive(Default)]
pub struct ExpertScratch {
    /// `[pairs, intermediate]` f32 each
    gates: Scratch,
    ups: Scratch,
    /// `[pairs, 2 * intermediate]` f32: gates and ups that take turns
    both: Scratch,
    hidden: EncodedActivations,
    /// Of experts that take their input in orders of their own.
    gathered: GatheredInputs,
    /// `[pairs, width]` f32
    outputs: Scratch,
    /// `[tokens, width]` and `[tokens]` f32
    shared: Scratch,
    shared_gates: Scratch,
    shared_hidden: EncodedActivations,
}

impl ExpertScratch {
    pub fn bytes(&self) -> usize {
        let scratch = [&self.gates, &self.ups, &self.both, &self.outputs, &self.shared, &self.shared_gates];
        scratch.iter().map(|s| s.bytes()).sum::<usize>()
            + self.hidden.bytes()
            + self.gathered.bytes()
            + self.shared_hidden.bytes()
    }

    /// Computes the routed experts of each pair and returns the address of their outputs, `[pairs, width]`. `table`: `[PROJECTIONS, experts]` [`p::Matrix`].
    /// `is_complete`: whether every expert could be read.
    pub fn routed(
        &mut self,
        context: &Context,
        layer: &MoeLayer,
        router: &mut RouterScratch,
        x: &EncodedActivations,
        table: Address,
        is_complete: bool,
    ) -> Result<Address> {
        let gpu = &context.gpu;
        let MoeLayer { moe, kinds, groups, .. } = layer;
        let (tokens, k, count) = (x.rows, moe.scoring.k(), moe.experts.count);
        let (pairs, intermediate, width) = (tokens * k, moe.experts.intermediate(), moe.experts.hidden());
        let chosen = router.chosen.at();
        let (gates, ups) = if layer.is_interleaved {
            let both = self.both.reserve(gpu, 8 * pairs * intermediate)?;
            (p::Tensor::dense(both, 2 * intermediate), p::Tensor::default())
        } else if layer.is_ungated {
            let ups = self.gates.reserve(gpu, 4 * pairs * intermediate)?;
            (p::Tensor::dense(ups, intermediate), p::Tensor::default())
        } else {
            let [gates, ups] = [&mut self.gates, &mut self.ups].map(|s| s.reserve(gpu, 4 * pairs * intermediate));
            (p::Tensor::dense(gates?, intermediate), p::Tensor::dense(ups?, intermediate))
        };
        let outputs = self.outputs.reserve(gpu, 4 * pairs * width)?;
        let tiles = match tile_choice(gpu, layer, pairs).filter(|_| tokens > 1) {
            Some(choice) => Some(match router.tiles {
                Some(tiles) => tiles,
                None => sort_pairs(gpu, &mut router.pairs, (chosen, pairs), count, choice)?,
            }),
            None => None,
        };
        let matrices = |projection: usize| table + (projection * count * size_of::<p::Matrix>()) as u64;
        let (x, per_input) = match moe.experts.order {
            Some(order) => (self.gathered.gather(context, layer, order, (chosen, k), x)?, 1),
            None => (x, k),
        };
        // Gate and up take the token's row, or the pair's if it was gathered; down takes the pair's.
        let per_row = |projection: usize| if projection < 2 { per_input } else { 1 };
        let product = |projection: usize, out| {
            let ExpertPart { rows, cols, .. } = *part(&moe.experts, projection);
            let rows = if projection == 0 && layer.is_interleaved { 2 * rows } else { rows };
            let table = ExpertTable {
                matrices: matrices(projection),
                count,
                experts: chosen,
                per_row: per_row(projection),
                kinds: &kinds[projection],
                groups: groups[projection],
                tiles,
                in_runs: false,
            };
            let (matrix, table) = (p::Matrix::default(), Some(table));
            Product { matrix, table, rows, cols, outputs: pairs, out, bias: 0, accumulate: false, runs: None }
        };
        if !is_complete {
            // Pairs of an expert that could not be read are not computed, but later kernels read their rows.
            let all = [(gates.at, gates.stride as usize), (ups.at, ups.stride as usize), (outputs, width)];
            for (at, len) in all.into_iter().filter(|(at, _)| *at != 0) {
                // SAFETY: the scratch was just reserved.
                unsafe { gpu.zero(at, 4 * pairs * len)? };
            }
        }
        let (both, last) = ([product(0, gates), product(1, ups)], [product(2, p::Tensor::dense(outputs, width))]);
        if !layer.is_plain {
            let is_one = layer.is_interleaved || layer.is_ungated;
            matmul(gpu, if is_one { &both[..1] } else { &both }, x)?;
            let from = GatesAndUps { gates, ups, experts: chosen, pairs };
            activate(context, &moe.experts, from, needs_of(&last), &mut self.hidden)?;
            matmul(gpu, &last, &self.hidden)?;
            return Ok(outputs);
        }
        if let (true, Some(tiles)) = (is_complete, tiles.filter(|t| t.few)) {
            let grouped = |projection: usize| GroupedProduct {
                tables: [projection, 1].map(matrices),
                kinds: &kinds[projection],
                groups: groups[projection],
                tiles,
                per_row: per_row(projection),
                rows: part(&moe.experts, projection).rows,
                pairs,
                experts: count,
            };
            grouped_gemm(gpu, grouped(0), x, GroupedOutput::Hidden(&mut self.hidden))?;
            let out = GroupedOutput::Floats(p::Tensor::dense(outputs, width));
            grouped_gemm(gpu, grouped(2), &self.hidden, out)?;
        } else if is_complete && tiles.is_none() && gemv_fused(gpu, MatmulInput::Encoded(x), &both, true)? {
            let input = MatmulInput::Floats { x: gates, norm: p::Norm::default(), rows: pairs };
            if !gemv_fused(gpu, input, &last, false)? {
                let input = EncodeInput { x: gates, rows: pairs, cols: intermediate, ..EncodeInput::default() };
                encode(gpu, input, needs_of(&last), &mut self.hidden)?;
                matmul(gpu, &last, &self.hidden)?;
            }
        } else {
            gated_matmul(gpu, &both, &last, x, &mut self.hidden)?;
        }
        Ok(outputs)
    }

    /// `residual +=` the weighted sum of the routed experts' outputs, and the shared expert of `x`.
    pub fn combine(
        &mut self,
        context: &Context,
        layer: &MoeLayer,
        x: &EncodedActivations,
        RoutedOutputs { outputs, weights, experts, k }: RoutedOutputs,
        residual: Tensor,
    ) -> Result<()> {
        let (gpu, tokens, width) = (&context.gpu, residual.rows, residual.cols);
        let mut combine = p::Combine {
            outputs,
            weights,
            shared: 0,
            gates: 0,
            residual: context.place(residual),
            tokens: number(tokens),
            cols: number(width),
            k: number(k),
            unused: 0,
            experts,
            bias: layer.moe.experts.biases.as_ref().map_or(p::Tensor::default(), |all| context.place(all.down)),
        };
        if let Some(SharedExpert { mlp, gate }) = &layer.moe.shared {
            let intermediate = mlp.gate.rows.len();
            let [gates, ups] = [&mut self.gates, &mut self.ups].map(|s| s.reserve(gpu, 4 * tokens * intermediate));
            let [gates, ups] = [gates?, ups?].map(|at| p::Tensor::dense(at, intermediate));
            combine.shared = self.shared.reserve(gpu, 4 * tokens * width)?;
            let out = p::Tensor::dense(combine.shared, width);
            let both = [(&mlp.gate, gates), (&mlp.up, ups)]
                .map(|(l, out)| context.product(l, tokens, out, false, context.mode));
            let last = context.product(&mlp.down, tokens, out, false, context.mode);
            if gemv_fused(gpu, MatmulInput::Encoded(x), &both, true)? {
                encode_and_matmul(gpu, gates, p::Norm::default(), &[last], &mut self.shared_hidden)?;
            } else {
                gated_matmul(gpu, &both, &[last], x, &mut self.shared_hidden)?;
            }
            if let Some(gate) = gate {
                combine.gates = self.shared_gates.reserve(gpu, 4 * tokens)?;
                let out = p::Tensor::dense(combine.gates, 1);
                matmul(gpu, &[context.product(gate, tokens, out, false, Activations::F32)], x)?;
            }
        }
        let grid = [number(width.div_ceil(256)), number(tokens.min(MAX_GRID_Y)), 1];
        // SAFETY: the scratch was just reserved; the residual was checked against its buffer.
        unsafe { gpu.launch(Kernel::MOE_COMBINE, grid, 256, 0, &combine)? };
        Ok(())
    }
}
