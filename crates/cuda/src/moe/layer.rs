//! A mixture as it is registered: what its kernels need to know of the router and the experts.

use anyhow::{Error, Result};
use sluice_backend::{Activations, ExpertKind, Moe, Scoring, SharedExpert};

use crate::device::memory::{DeviceBuffer, bytes_of};
use crate::device::stream::Gpu;
use crate::device::sys::Address;
use crate::moe::experts::operands;
use crate::ops::context::Context;
use crate::parameters::{self as p, PROJECTIONS, number};
use crate::weights::{KernelFormat, Needs, Weights};

pub struct MoeLayer {
    pub moe: Moe,
    /// The mixture of the next layer.
    pub next: Option<usize>,
    /// Experts are plain `silu(gate) * up`, which most kernels need: no bias, no clamp, and a matrix for each projection.
    pub is_plain: bool,
    /// Rows of gate and up take turns: the first projection has both, and the second none.
    pub is_interleaved: bool,
    /// Experts have no gates: the first projection is up, and there is no second.
    pub is_ungated: bool,
    /// The kinds that each projection has over all experts.
    pub kinds: [Vec<KernelFormat>; PROJECTIONS],
    /// Columns of a group and type of its scale, if all experts have the same in a projection.
    pub groups: [Option<(u32, u32)>; PROJECTIONS],
    /// `[PROJECTIONS, experts]` [`p::Matrix`], once all experts are on the device.
    pub table: Option<DeviceBuffer>,
    /// What a router's scoring has for each expert, `[experts]` f32: a bias of its score, or a factor of its weight.
    pub of_scoring: Option<DeviceBuffer>,
    /// The experts of each token's number, `[numbers, k]` u32, where they depend on that alone.
    pub of_tokens: Option<DeviceBuffer>,
}

impl MoeLayer {
    pub fn new(gpu: &Gpu, weights: &Weights, mode: Activations, moe: Moe) -> Result<MoeLayer> {
        let is_interleaved = moe.experts.interleaved().map_err(Error::msg)?.is_some();
        let is_ungated = moe.experts.kind == ExpertKind::SquaredRelu;
        let is_plain = moe.experts.kind == ExpertKind::SwiGlu && moe.experts.biases.is_none() && !is_interleaved;
        let mut kinds: [Vec<KernelFormat>; PROJECTIONS] = Default::default();
        let mut groups = operands(&moe.experts, 0).map(|o| weights.all[o.weight].groups());
        for expert in 0..moe.experts.count {
            for (groups, operand) in groups.iter_mut().zip(operands(&moe.experts, expert)) {
                *groups = groups.filter(|g| weights.all[operand.weight].groups() == Some(*g));
            }
            for (kinds, operand) in kinds.iter_mut().zip(operands(&moe.experts, expert)) {
                let kind = weights.all[operand.weight].kind(mode);
                if !kinds.contains(&kind) {
                    kinds.push(kind);
                }
            }
        }
        let numbers_of_experts = match &moe.scoring {
            Scoring::Sigmoid { bias, .. } => bias,
            Scoring::SoftmaxTopK { scales, .. } => scales,
            Scoring::TopKSoftmax { .. } => &Vec::new(),
            Scoring::RootSoftplus { bias, .. } => bias,
            Scoring::ByToken { .. } => &Vec::new(),
        };
        let of_scoring = match numbers_of_experts.is_empty() {
            true => None,
            false => {
                let memory = DeviceBuffer::new(gpu, 4 * numbers_of_experts.len(), "a router's numbers of experts")?;
                // SAFETY: it was just allocated with this length.
                unsafe { gpu.write(memory.at, bytes_of(numbers_of_experts), gpu.wait_permit()?)? };
                Some(memory)
            }
        };
        let of_tokens = match &moe.scoring {
            Scoring::ByToken { table, .. } => {
                let memory = DeviceBuffer::new(gpu, 4 * table.len(), "the experts of tokens")?;
                // SAFETY: it was just allocated with this length.
                unsafe { gpu.write(memory.at, bytes_of(table), gpu.wait_permit()?)? };
                Some(memory)
            }
            _ => None,
        };
        Ok(MoeLayer {
            moe,
            next: None,
            is_plain,
            is_interleaved,
            is_ungated,
            kinds,
            groups,
            table: None,
            of_scoring,
            of_tokens,
        })
    }

    /// Writes the table of the experts' matrices, unless there is one.
    pub fn write_table(&mut self, gpu: &Gpu, weights: &Weights, mode: Activations) -> Result<()> {
        if self.table.is_some() {
            return Ok(());
        }
        let count = self.moe.experts.count;
        let mut matrices = vec![p::Matrix::default(); PROJECTIONS * count];
        for expert in 0..count {
            for (i, o) in operands(&self.moe.experts, expert).into_iter().enumerate() {
                let weight = &weights.all[o.weight];
                assert!(o.row + o.rows <= weight.rows(), "expert {expert} in {} rows", weight.rows());
                matrices[i * count + expert] = weight.at_row(o.row, mode);
            }
        }
        let table = DeviceBuffer::new(gpu, size_of_val(&matrices[..]), "tables of experts")?;
        // SAFETY: it was just allocated with this length.
        unsafe { gpu.write(table.at, p::Matrix::bytes(&matrices), gpu.wait_permit()?)? };
        self.table = Some(table);
        Ok(())
    }

    /// The encodings that gate and up of the routed experts take.
    pub fn input_needs(&self) -> Needs {
        self.kinds[..2].iter().flatten().fold(Needs::default(), |needs, kind| needs.and(kind.needs()))
    }

    /// The encodings that the mixture needs of its normed input. Routers and gates take f32, and so do gathers.
    pub fn needs(&self, context: &Context) -> Needs {
        if self.moe.latent.is_some() {
            return Needs::F32;
        }
        let needs = self.needs_of_experts();
        match &self.moe.shared {
            Some(SharedExpert { mlp, .. }) => {
                needs.and(context.needs(&mlp.gate, context.mode)).and(context.needs(&mlp.up, context.mode))
            }
            None => needs,
        }
    }

    /// The encodings that routed experts need of their input. What the host takes of it is f32.
    pub fn needs_of_experts(&self) -> Needs {
        match self.moe.experts.order {
            Some(_) => Needs::F32,
            None => self.input_needs().and(Needs::F32),
        }
    }

    /// The parameters of the choice by `logits`: experts and their weights are written to `chosen` and `weights`. `numbers`: of the tokens.
    pub fn route_parameters(
        &self,
        (tokens, numbers): (usize, Address),
        logits: Address,
        chosen: Address,
        weights: Address,
    ) -> p::Route {
        let scoring = &self.moe.scoring;
        let of_scoring = self.of_scoring.as_ref().map_or(0, |memory| memory.at);
        let mut parameters = p::Route {
            logits,
            chosen,
            weights,
            tokens: number(tokens),
            experts: number(self.moe.router.rows.len()),
            k: number(scoring.k()),
            groups: 1,
            top_groups: 1,
            scale: 1.0,
            ..p::Route::default()
        };
        match scoring {
            Scoring::SoftmaxTopK { renormalise, .. } => {
                (parameters.scoring, parameters.renormalise) = (0, (*renormalise).into());
                parameters.scales = of_scoring;
            }
            Scoring::TopKSoftmax { .. } => parameters.scoring = 1,
            Scoring::Sigmoid { groups, top_groups, renormalise, scale, .. } => {
                (parameters.scoring, parameters.renormalise, parameters.scale) = (2, (*renormalise).into(), *scale);
                parameters.bias = of_scoring;
                (parameters.groups, parameters.top_groups) = (number(*groups), number(*top_groups));
            }
            Scoring::RootSoftplus { scale, .. } | Scoring::ByToken { scale, .. } => {
                (parameters.scoring, parameters.renormalise, parameters.scale) = (3, 1, *scale);
                parameters.bias = of_scoring;
                if let Some(table) = &self.of_tokens {
                    (parameters.table, parameters.numbers) = (table.at, numbers);
                }
            }
        }
        parameters
    }
}
