//! The matrices of an expert.

use sluice_backend::{ExpertKind, ExpertMatrix, ExpertPart, Experts, Moe};

use crate::parameters::PROJECTIONS;
use crate::weights::Weights;

/// The most experts of a token that the kernels for one token take (a constant of the kernels, too).
pub const MAX_CHOSEN: usize = 16;
/// The most experts of a layer that the kernels for few tokens take (a constant of the kernels, too).
pub const MAX_EXPERTS: usize = 512;

/// Rows of a weight that are one projection of an expert.
#[derive(Clone, Copy)]
pub struct Operand {
    pub weight: usize,
    pub row: usize,
    pub rows: usize,
}

fn operand(part: &ExpertPart, expert: usize) -> Operand {
    match &part.matrix {
        ExpertMatrix::Stacked { matrix, stride, offset, .. } => {
            Operand { weight: matrix.number(), row: expert * stride + offset, rows: part.rows }
        }
        ExpertMatrix::Single(all) => Operand { weight: all[expert].number(), row: 0, rows: part.rows },
    }
}

/// The gate (0), up (1) or down projection (2). Experts without gates have their up projection in both of the first places.
pub fn part(experts: &Experts, projection: usize) -> &ExpertPart {
    &experts.parts[if experts.parts.len() < PROJECTIONS { projection / 2 } else { projection }]
}

/// Gate, up and down projection of an expert. Where rows of gate and up take turns, the first has both and the second none; without gates the first is up, and the second has no rows.
pub fn operands(experts: &Experts, expert: usize) -> [Operand; PROJECTIONS] {
    let [gate, up, down] = [0, 1, 2].map(|projection| part(experts, projection));
    if experts.kind == ExpertKind::SquaredRelu {
        let up = operand(up, expert);
        return [up, Operand { rows: 0, ..up }, operand(down, expert)];
    }
    match experts.interleaved().expect("checked when it was registered") {
        Some((matrix, rows)) => {
            let both = Operand { weight: matrix.number(), row: expert * rows, rows };
            [both, Operand { rows: 0, ..both }, operand(down, expert)]
        }
        None => [gate, up, down].map(|part| operand(part, expert)),
    }
}

/// For each weight, whether it belongs to experts.
pub fn is_of_experts<'a>(weights: &Weights, mixtures: impl Iterator<Item = &'a Moe>) -> Vec<bool> {
    let mut is_of_experts = vec![false; weights.all.len()];
    for moe in mixtures {
        let all = (0..moe.experts.count).flat_map(|e| operands(&moe.experts, e));
        all.for_each(|operand| is_of_experts[operand.weight] = true);
    }
    is_of_experts
}

/// Bytes on the device of all experts of these mixtures.
pub fn bytes_of_experts<'a>(weights: &Weights, mixtures: impl Iterator<Item = &'a Moe>) -> u64 {
    let of_experts = weights.all.iter().zip(is_of_experts(weights, mixtures)).filter(|(_, of_experts)| *of_experts);
    of_experts.map(|(weight, _)| Weights::padded(weight) as u64).sum()
}
