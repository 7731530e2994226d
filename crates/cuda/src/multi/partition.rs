//! Partitioning a model's layers over several devices: each gets a run of a step's operations. Runs are cut where only the residual stream is passed on.

use std::collections::HashMap;
use std::ops::Range;

use sluice_backend::{BufferId, ExpertMatrix, KvLayout, Linear, Moe, Projection};

use crate::weights::{Weight, Weights};

/// Identifies an operation of every step by what it computes with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum OperationKey {
    Embed(usize),
    Project(usize),
    Add(usize),
    /// The cache group, and the layer of it.
    Attention(usize, usize),
    /// The recurrent layer, of any kind.
    Recurrent(usize),
    Mlp(usize),
    /// The beginning of a block between residual streams.
    Collapse(usize),
    /// Where n-grams go into residual streams, by the place of its state.
    Ngrams(usize),
    /// Runs where the operation before it ran.
    AddNormed,
    Mixture(usize),
    Logits(usize),
}

impl OperationKey {
    /// Projections are identified by the first of them.
    pub fn project(projections: &[Projection]) -> OperationKey {
        OperationKey::Project(projections.first().map_or(usize::MAX, |p| p.linear.matrix.number()))
    }
}

/// An operation of a step and the matrices that it takes.
pub struct PlannedOperation {
    pub key: OperationKey,
    pub matrices: Vec<usize>,
    /// The buffer that it writes, if that may be the residual stream.
    pub out: Option<BufferId>,
}

/// All matrices of a mixture.
pub fn matrices(moe: &Moe) -> Vec<usize> {
    let of = |matrix: &ExpertMatrix| match matrix {
        ExpertMatrix::Stacked { matrix, .. } => vec![matrix.number()],
        ExpertMatrix::Single(all) => all.iter().map(|m| m.number()).collect(),
    };
    let shared = moe.shared.iter().flat_map(|s| [&s.mlp.gate, &s.mlp.up, &s.mlp.down].into_iter().chain(&s.gate));
    let linears = std::iter::once(&moe.router).chain(shared).map(|l: &Linear| l.matrix.number());
    moe.experts.parts.iter().flat_map(|part| of(&part.matrix)).chain(linears).collect()
}

/// Which device has what.
pub struct Partition {
    homes: HashMap<OperationKey, usize>,
    /// The devices that have each matrix, ascending.
    pub weights: Vec<Vec<usize>>,
    /// Bytes of all matrices of the device that has most.
    pub max_weights: u64,
    /// Bytes of a block of keys and values, over all cache groups, of the device that has most.
    pub max_block: usize,
}

impl Partition {
    /// Divides a step's operations over `count` devices, which have `free` bytes in all, so that each has about the same bytes of weights and of keys and values. It assumes
    /// that keys and values take all memory beside the weights.
    pub fn new(
        operations: &[PlannedOperation],
        weights: &[Weight],
        layouts: &[KvLayout],
        (count, free): (usize, u64),
    ) -> Partition {
        // 1. What each operation takes
        let of = |operation: &PlannedOperation| {
            operation.matrices.iter().map(|m| Weights::padded(&weights[*m]) as u64).sum::<u64>()
        };
        let cached = |operation: &PlannedOperation| match operation.key {
            OperationKey::Attention(group, _) => layouts[group].layer_bytes() as u64,
            _ => 0,
        };
        let (all, block): (u64, u64) = (operations.iter().map(of).sum(), operations.iter().map(cached).sum());
        let blocks = free.saturating_sub(all) / block.max(1);
        let costs: Vec<u64> = operations.iter().map(|operation| of(operation) + blocks * cached(operation)).collect();
        let residual = operations.first().and_then(|operation| operation.out);
        let cuts: Vec<usize> = (1..operations.len()).filter(|at| operations[at - 1].out == residual).collect();
        // 2. Which device has which
        let runs = runs(&costs, &cuts, count);
        let mut partition =
            Partition { homes: HashMap::new(), weights: vec![Vec::new(); weights.len()], max_weights: 0, max_block: 0 };
        for (device, run) in runs.into_iter().enumerate() {
            for operation in &operations[run] {
                let home = *partition.homes.entry(operation.key).or_insert(device);
                for matrix in &operation.matrices {
                    let on = &mut partition.weights[*matrix];
                    if !on.contains(&home) {
                        on.push(home);
                    }
                }
            }
        }
        for device in 0..count {
            let own = weights.iter().zip(&partition.weights).filter(|(_, on)| on.contains(&device));
            partition.max_weights = partition.max_weights.max(own.map(|(w, _)| Weights::padded(w) as u64).sum());
            let layers =
                |group: usize, l: &KvLayout| (0..l.layers).filter(|i| partition.kv(group, *i) == device).count();
            let bytes = |(group, l)| KvLayout { layers: layers(group, l), ..*l }.block_bytes();
            partition.max_block = partition.max_block.max(layouts.iter().enumerate().map(bytes).sum());
        }
        partition
    }

    /// The device of an operation.
    pub fn home(&self, key: OperationKey) -> Option<usize> {
        self.homes.get(&key).copied()
    }

    /// The device of the keys and values of a layer of a cache group.
    pub fn kv(&self, group: usize, layer: usize) -> usize {
        self.home(OperationKey::Attention(group, layer)).unwrap_or(0)
    }
}

/// `count` runs of about the same cost, cut at some of `cuts`. With too few cuts, the last runs are empty.
fn runs(costs: &[u64], cuts: &[usize], count: usize) -> Vec<Range<usize>> {
    let mut before = vec![0u128];
    costs.iter().for_each(|cost| before.push(before[before.len() - 1] + u128::from(*cost)));
    let all = before[costs.len()];
    let (mut runs, mut from, mut cuts) = (Vec::new(), 0, cuts);
    for i in 1..count {
        let wanted = all * i as u128 / count as u128;
        // Leaves a cut for every later device, if there are enough.
        let choice = &cuts[..cuts.len().saturating_sub(count - 1 - i).max(1).min(cuts.len())];
        let Some((n, at)) = choice.iter().enumerate().min_by_key(|(_, at)| before[**at].abs_diff(wanted)) else {
            break;
        };
        runs.push(from..*at);
        from = *at;
        cuts = &cuts[n + 1..];
    }
    runs.push(from..costs.len());
    runs.resize(count, costs.len()..costs.len());
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_contiguous_and_as_even_as_cuts_allow() {
        let even = [10, 0, 10, 0, 10, 0, 10, 0];
        assert_eq!(runs(&even, &[2, 4, 6], 2), [0..4, 4..8]);
        assert_eq!(runs(&even, &[2, 4, 6], 4), [0..2, 2..4, 4..6, 6..8]);
        // A head that is larger than all layers.
        assert_eq!(runs(&[1, 1, 1, 1, 100], &[1, 2, 3, 4], 2), [0..4, 4..5]);
        assert_eq!(runs(&[100, 1, 1, 1, 1], &[1, 2, 3, 4], 3), [0..1, 1..2, 2..5]);
        // More devices than runs.
        assert_eq!(runs(&[1, 1], &[1], 4), [0..1, 1..2, 2..2, 2..2]);
        assert_eq!(runs(&[1, 1], &[], 2), [0..2, 2..2]);
        let mut random = fastrand::Rng::with_seed(1);
        for _ in 0..500 {
            let costs: Vec<u64> = (0..random.usize(1..60)).map(|_| random.u64(..1000)).collect();
            let cuts: Vec<usize> = (1..costs.len()).filter(|_| random.bool()).collect();
            let count = random.usize(1..6);
            let runs = runs(&costs, &cuts, count);
            assert_eq!(runs.len(), count);
            assert_eq!((runs[0].start, runs[count - 1].end), (0, costs.len()));
            assert!(runs.windows(2).all(|two| two[0].end == two[1].start));
            assert!(runs[1..].iter().all(|run| run.start == costs.len() || cuts.contains(&run.start)));
            let used = runs.iter().filter(|run| !run.is_empty()).count();
            assert_eq!(used, count.min(cuts.len() + 1));
        }
    }
}
