//! How a model's layers are dealt to several devices: runs of a step's operations, cut where nothing but the residual stream goes on.

use std::collections::HashMap;
use std::ops::Range;

use sluice_backend::{BufferId, ExpertMatrix, KvLayout, Linear, Moe, Projection};

use crate::weights::{Weight, Weights};

/// An operation of every step, by what it computes with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Key {
    Embed(usize),
    Project(usize),
    Add(usize),
    /// Which cache group, and which layer of it.
    Attention(usize, usize),
    Delta(usize),
    Mlp(usize),
    Mixture(usize),
    Logits(usize),
}

impl Key {
    /// Projections are known by the first of them.
    pub fn project(projections: &[Projection]) -> Key {
        Key::Project(projections.first().map_or(usize::MAX, |p| p.linear.matrix.number()))
    }
}

/// An operation of a step.
pub struct MatrixSlice {
    pub key: Key,
    pub matrices: Vec<usize>,
    /// What it adds to or overwrites, where that may be the residual stream.
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

/// Who does what.
pub struct Split {
    homes: HashMap<Key, usize>,
    /// Of each matrix, the devices that have it, ascending.
    pub weights: Vec<Vec<usize>>,
    /// Bytes of all matrices that a device has, of whichever has most.
    pub most_weights: u64,
    /// The same of a block of keys and values of all cache groups.
    pub most_block: usize,
}

impl Split {
    /// Deals the parts of a step to `count` devices, which together have `free` bytes: so that the bytes of weights, and of as many keys and values as there
    /// is room for beside them, are about the same on all.
    pub fn new(parts: &[MatrixSlice], weights: &[Weight], layouts: &[KvLayout], (count, free): (usize, u64)) -> Split {
        // 1. What each part takes
        let of = |part: &MatrixSlice| part.matrices.iter().map(|m| Weights::padded(&weights[*m]) as u64).sum::<u64>();
        let cached = |part: &MatrixSlice| match part.key {
            Key::Attention(group, _) => layouts[group].layer_bytes() as u64,
            _ => 0,
        };
        let (all, block): (u64, u64) = (parts.iter().map(of).sum(), parts.iter().map(cached).sum());
        let blocks = free.saturating_sub(all) / block.max(1);
        let costs: Vec<u64> = parts.iter().map(|part| of(part) + blocks * cached(part)).collect();
        let residual = parts.first().and_then(|part| part.out);
        let cuts: Vec<usize> = (1..parts.len()).filter(|at| parts[at - 1].out == residual).collect();
        // 2. Who has which
        let runs = runs(&costs, &cuts, count);
        let mut split =
            Split { homes: HashMap::new(), weights: vec![Vec::new(); weights.len()], most_weights: 0, most_block: 0 };
        for (device, run) in runs.into_iter().enumerate() {
            for part in &parts[run] {
                let home = *split.homes.entry(part.key).or_insert(device);
                for matrix in &part.matrices {
                    let on = &mut split.weights[*matrix];
                    if !on.contains(&home) {
                        on.push(home);
                    }
                }
            }
        }
        for device in 0..count {
            let own = weights.iter().zip(&split.weights).filter(|(_, on)| on.contains(&device));
            split.most_weights = split.most_weights.max(own.map(|(w, _)| Weights::padded(w) as u64).sum());
            let layers = |group: usize, l: &KvLayout| (0..l.layers).filter(|i| split.kv(group, *i) == device).count();
            let bytes = |(group, l)| KvLayout { layers: layers(group, l), ..*l }.block_bytes();
            split.most_block = split.most_block.max(layouts.iter().enumerate().map(bytes).sum());
        }
        split
    }

    /// Which device carries an operation out.
    pub fn home(&self, key: Key) -> Option<usize> {
        self.homes.get(&key).copied()
    }

    /// Which device has the keys and values of a layer of a cache group.
    pub fn kv(&self, group: usize, layer: usize) -> usize {
        self.home(Key::Attention(group, layer)).unwrap_or(0)
    }
}

/// Runs of about the same cost, one for each of `count`, cut at some of `cuts`. Where there are fewer, the last have nothing.
fn runs(costs: &[u64], cuts: &[usize], count: usize) -> Vec<Range<usize>> {
    let mut before = vec![0u128];
    costs.iter().for_each(|cost| before.push(before[before.len() - 1] + u128::from(*cost)));
    let all = before[costs.len()];
    let (mut runs, mut from, mut cuts) = (Vec::new(), 0, cuts);
    for i in 1..count {
        let wanted = all * i as u128 / count as u128;
        // Every device behind this one is left a cut, where there are so many.
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
