//! Which experts a token takes, and with what weight. One token at a time; allocates nothing.
//!
//! Of experts with equal scores the lower number wins. The chosen come out in ascending number, the order in which their outputs are
//! summed; sums over the chosen run in rank order (best first), as a lane sum.

use std::ops::Range;
use std::sync::Arc;

use crate::dispatch::simd;
use crate::instructions::f32_dot::Lanes;
use crate::math::{exp, sigmoid, softplus};

/// How router logits become a choice.
#[derive(Clone, Debug, PartialEq)]
pub enum Scoring {
    /// Softmax over all experts, then the best `k`, whose weights are divided by their sum with `renormalise` (Qwen3-MoE, Qwen3-Next), and then multiplied by
    /// `scales` (`[experts]`, or empty), each by its expert's (Gemma 4).
    SoftmaxTopK { k: usize, renormalise: bool, scales: Vec<f32> },
    /// The best `k` logits, then softmax over them (gpt-oss, Mixtral).
    TopKSoftmax { k: usize },
    /// DeepSeek-V3: sigmoid scores choose with `bias` (`[experts]`, or empty) added, weigh without. The experts are divided into `groups` of
    /// consecutive ones (1: no groups), of which the `top_groups` with the greatest sum of two best take part. With `renormalise`
    /// weights are divided by (their sum + 1e-20); then they are multiplied by `scale`.
    Sigmoid { k: usize, bias: Vec<f32>, groups: usize, top_groups: usize, renormalise: bool, scale: f32 },
    /// DeepSeek-V4: scores are roots of softplus; they choose with `bias` added, weigh without. Weights are divided by (their sum + 1e-20), and multiplied by `scale`.
    RootSoftplus { k: usize, bias: Vec<f32>, scale: f32 },
    /// The same scores and weights, of experts that depend on the token's number alone: `table` has `k` of each token.
    ByToken { k: usize, table: Arc<[u32]>, scale: f32 },
}

/// The greatest number of expert groups.
pub const MAX_GROUPS: usize = 64;

impl Scoring {
    /// Experts per token.
    pub fn k(&self) -> usize {
        match self {
            Scoring::SoftmaxTopK { k, .. }
            | Scoring::TopKSoftmax { k }
            | Scoring::Sigmoid { k, .. }
            | Scoring::RootSoftplus { k, .. }
            | Scoring::ByToken { k, .. } => *k,
        }
    }

    /// Whether it can choose among so many experts; says why not. [`route`] panics where this is an error.
    pub fn check(&self, experts: usize) -> Result<(), String> {
        let k = self.k();
        if k == 0 || k > experts {
            return Err(format!("{k} experts per token of {experts}"));
        }
        if let Scoring::SoftmaxTopK { scales, .. } = self
            && !scales.is_empty()
            && scales.len() != experts
        {
            return Err(format!("scales of {} experts for {experts}", scales.len()));
        }
        if let Scoring::RootSoftplus { bias, .. } = self
            && !bias.is_empty()
            && bias.len() != experts
        {
            return Err(format!("a correction bias of {} for {experts} experts", bias.len()));
        }
        if let Scoring::ByToken { table, .. } = self {
            if table.is_empty() || !table.len().is_multiple_of(k) {
                return Err(format!("a table of {} experts, {k} of each token", table.len()));
            }
            let is_wrong =
                |own: &[u32]| own.iter().enumerate().any(|(i, e)| *e as usize >= experts || own[..i].contains(e));
            if let Some(token) = table.chunks_exact(k).position(is_wrong) {
                return Err(format!("experts of token {token} that are none of {experts}, or are named twice"));
            }
        }
        if let Scoring::Sigmoid { bias, groups, top_groups, .. } = self {
            if !bias.is_empty() && bias.len() != experts {
                return Err(format!("a correction bias of {} for {experts} experts", bias.len()));
            }
            if *groups == 0
                || *groups > MAX_GROUPS
                || !experts.is_multiple_of(*groups)
                || *top_groups == 0
                || top_groups > groups
            {
                return Err(format!("{top_groups} of {groups} groups of {experts} experts"));
            }
            if k > experts / groups * top_groups {
                return Err(format!("{k} experts per token of {top_groups} groups of {}", experts / groups));
            }
        }
        Ok(())
    }
}

/// `x = softmax(x)`, `[n]`, as `docs/numerics.md` defines it: the sum is a wide one.
// No iterator adapters: their closures may be compiled without the instruction set of the kernel around them.
#[allow(clippy::needless_range_loop)]
#[inline(always)]
unsafe fn softmax_lanes<V: Lanes>(x: &mut [f32]) {
    let (n, whole, p) = (x.len(), x.len() / 16 * 16, x.as_mut_ptr());
    // SAFETY: loads and stores stay inside `x`; the caller vouches for the instruction set.
    unsafe {
        let mut top = V::splat(f32::NEG_INFINITY);
        for i in (0..whole).step_by(16) {
            top = V::load(p.add(i)).max(top);
        }
        let mut m = top.max_lane();
        for x in &x[whole..] {
            m = if *x > m { *x } else { m };
        }
        let m = V::splat(m);
        let mut sum = [V::splat(0.0); 4];
        let wide = n / 64 * 64;
        for i in (0..wide).step_by(64) {
            for j in 0..4 {
                let e = exp(V::load(p.add(i + 16 * j)).sub(m));
                e.store(p.add(i + 16 * j));
                sum[j] = sum[j].add(e);
            }
        }
        for j in 0..4 {
            let i = wide + 16 * j;
            if i < n {
                let left = 16.min(n - i);
                exp(V::load_first(p.add(i), left).sub(m)).store_first(p.add(i), left);
                // Loaded again, so that missing lanes are zero.
                sum[j] = sum[j].add(V::load_first(p.add(i), left));
            }
        }
        divide::<V>(x, V::sum64(sum));
    }
}

/// `x = x / by`
#[inline(always)]
unsafe fn divide<V: Lanes>(x: &mut [f32], by: f32) {
    let (n, whole, p) = (x.len(), x.len() / 16 * 16, x.as_mut_ptr());
    // SAFETY: loads and stores stay inside `x`; the caller vouches for the instruction set.
    unsafe {
        let by = V::splat(by);
        for i in (0..whole).step_by(16) {
            V::load(p.add(i)).div(by).store(p.add(i));
        }
        if whole < n {
            V::load_first(p.add(whole), n - whole).div(by).store_first(p.add(whole), n - whole);
        }
    }
}

/// The lane sum of `x`.
#[inline(always)]
unsafe fn lane_sum<V: Lanes>(x: &[f32]) -> f32 {
    // SAFETY: loads stay inside `x`; the caller vouches for the instruction set.
    unsafe {
        let mut sum = V::splat(0.0);
        for c in x.chunks(16) {
            sum = sum.add(V::load_first(c.as_ptr(), c.len()));
        }
        sum.sum()
    }
}

/// The best so far, best first.
struct Ranking<'a> {
    ids: &'a mut [u32],
    scores: &'a mut [f32],
    taken: usize,
}

impl Ranking<'_> {
    /// Offers the experts of `range`, higher numbers than before, with their scores (plus `bias`, where there is one). A NaN
    /// counts as the least score.
    #[inline(always)]
    unsafe fn offer<V: Lanes>(&mut self, score: &[f32], bias: &[f32], range: Range<usize>) {
        let k = self.ids.len();
        for from in range.clone().step_by(16) {
            let n = (range.end - from).min(16);
            let mut chunk = [f32::NEG_INFINITY; 16];
            // SAFETY: `n` elements from `from` on are inside the slices; the caller vouches for the instruction set.
            unsafe {
                let mut v = V::load_first(score[from..from + n].as_ptr(), n);
                if !bias.is_empty() {
                    v = v.add(V::load_first(bias[from..from + n].as_ptr(), n));
                }
                // Most chunks hold nothing that is good enough.
                if self.taken == k && n == 16 && v.max_lane() <= self.scores[k - 1] {
                    continue;
                }
                v.store_first(chunk.as_mut_ptr(), n);
            }
            for (i, s) in chunk[..n].iter().enumerate() {
                self.offer_one((from + i) as u32, if s.is_nan() { f32::NEG_INFINITY } else { *s });
            }
        }
    }

    #[inline(always)]
    fn offer_one(&mut self, id: u32, score: f32) {
        let k = self.ids.len();
        if self.taken == k && score <= self.scores[k - 1] {
            return;
        }
        // Behind those that are as good, since their numbers are lower.
        let mut at = self.taken.min(k - 1);
        while at > 0 && self.scores[at - 1] < score {
            (self.scores[at], self.ids[at]) = (self.scores[at - 1], self.ids[at - 1]);
            at -= 1;
        }
        (self.scores[at], self.ids[at]) = (score, id);
        self.taken = (self.taken + 1).min(k);
    }
}

/// The sum of the two best of a group (or the only one), with their bias.
fn group_rank(score: &[f32], bias: &[f32], group: Range<usize>) -> f32 {
    let (mut first, mut second) = (f32::NEG_INFINITY, f32::NEG_INFINITY);
    for i in group.clone() {
        let s = if bias.is_empty() { score[i] } else { score[i] + bias[i] };
        if s > first {
            (first, second) = (s, first);
        } else if s > second {
            second = s;
        }
    }
    if group.len() == 1 { first } else { first + second }
}

/// Ascending by expert number.
fn sort(experts: &mut [u32], weights: &mut [f32]) {
    for i in 1..experts.len() {
        let mut at = i;
        while at > 0 && experts[at - 1] > experts[at] {
            experts.swap(at - 1, at);
            weights.swap(at - 1, at);
            at -= 1;
        }
    }
}

/// `x = sqrt(softplus(x))`
#[inline(always)]
unsafe fn root_softplus<V: Lanes>(x: &mut [f32]) {
    for c in x.chunks_mut(16) {
        // SAFETY: as many elements as the chunk has; the caller vouches for the instruction set.
        unsafe { softplus(V::load_first(c.as_ptr(), c.len())).sqrt().store_first(c.as_mut_ptr(), c.len()) };
    }
}

/// The weights of those that are chosen, by their scores.
#[inline(always)]
unsafe fn weigh_scores<V: Lanes>(best: &mut Ranking, scores: &[f32], scale: f32) {
    best.ids.iter().zip(best.scores.iter_mut()).for_each(|(e, w)| *w = scores[*e as usize]);
    // SAFETY: the caller vouches for the instruction set.
    unsafe {
        let sum = lane_sum::<V>(best.scores) + 1e-20;
        divide::<V>(best.scores, sum);
    }
    best.scores.iter_mut().for_each(|w| *w *= scale);
}

#[inline(always)]
unsafe fn route_lanes<V: Lanes>(
    scoring: &Scoring,
    token: u32,
    logits: &mut [f32],
    experts: &mut [u32],
    weights: &mut [f32],
) {
    let n = logits.len();
    if !matches!(scoring, Scoring::ByToken { .. }) {
        scoring.check(n).unwrap_or_else(|e| panic!("{e}"));
    }
    let k = scoring.k();
    assert!(experts.len() == k && weights.len() == k, "room for {} and {} of {k}", experts.len(), weights.len());
    let mut best = Ranking { ids: experts, scores: weights, taken: 0 };
    // SAFETY: each stays inside its slices; the shell has the instruction set.
    unsafe {
        match scoring {
            Scoring::SoftmaxTopK { renormalise, scales, .. } => {
                softmax_lanes::<V>(logits);
                best.offer::<V>(logits, &[], 0..n);
                if *renormalise {
                    let sum = lane_sum::<V>(best.scores);
                    divide::<V>(best.scores, sum);
                }
                if !scales.is_empty() {
                    best.ids.iter().zip(best.scores.iter_mut()).for_each(|(e, w)| *w *= scales[*e as usize]);
                }
            }
            Scoring::TopKSoftmax { .. } => {
                best.offer::<V>(logits, &[], 0..n);
                softmax_lanes::<V>(best.scores);
            }
            Scoring::Sigmoid { bias, groups, top_groups, renormalise, scale, .. } => {
                for c in logits.chunks_mut(16) {
                    sigmoid(V::load_first(c.as_ptr(), c.len())).store_first(c.as_mut_ptr(), c.len());
                }
                let group = |g: usize| g * (n / groups)..(g + 1) * (n / groups);
                let mut ranks = [0.0; MAX_GROUPS];
                let ranks = &mut ranks[..*groups];
                ranks.iter_mut().enumerate().for_each(|(g, r)| *r = group_rank(logits, bias, group(g)));
                for (g, rank) in ranks.iter().enumerate() {
                    let ahead = |(other, r): &(usize, &f32)| *r > rank || *r == rank && *other < g;
                    if ranks.iter().enumerate().filter(ahead).count() < *top_groups {
                        best.offer::<V>(logits, bias, group(g));
                    }
                }
                // The bias chooses; it does not weigh.
                best.ids.iter().zip(best.scores.iter_mut()).for_each(|(e, w)| *w = logits[*e as usize]);
                if *renormalise {
                    let sum = lane_sum::<V>(best.scores) + 1e-20;
                    divide::<V>(best.scores, sum);
                }
                best.scores.iter_mut().for_each(|w| *w *= scale);
            }
            Scoring::RootSoftplus { bias, scale, .. } => {
                root_softplus::<V>(logits);
                best.offer::<V>(logits, bias, 0..n);
                weigh_scores::<V>(&mut best, logits, *scale);
            }
            Scoring::ByToken { table, scale, .. } => {
                root_softplus::<V>(logits);
                best.ids.copy_from_slice(&table[token as usize * k..][..k]);
                weigh_scores::<V>(&mut best, logits, *scale);
            }
        }
    }
    sort(experts, weights);
}

simd! {
    /// Chooses the experts of the token of this number. `logits`: `[experts]`, overwritten with scores; `experts` and `weights`: `[k]`, ascending by
    /// expert number. Panics where [`Scoring::check`] is an error, and for a token that a table does not have.
    pub fn route(scoring: &Scoring, token: u32, logits: &mut [f32], experts: &mut [u32], weights: &mut [f32]) = route_lanes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Isa;
    use crate::math::{exp1, sigmoid1};
    use crate::test_random::{assert_close, bits, random};
    use proptest::prelude::*;

    fn run(isa: Isa, scoring: &Scoring, logits: &[f32]) -> (Vec<u32>, Vec<f32>) {
        let (mut ids, mut weights) = (vec![0; scoring.k()], vec![0.0; scoring.k()]);
        route(isa, scoring, 1, &mut logits.to_vec(), &mut ids, &mut weights);
        (ids, weights)
    }

    /// The softmax as `docs/numerics.md` has it, one element at a time.
    #[test]
    fn a_softmax_is_summed_over_64_lanes() {
        for experts in [5, 64, 100, 128, 512] {
            let logits = random(experts, experts as u64);
            let greatest = logits.iter().fold(f32::NEG_INFINITY, |m, x| m.max(*x));
            let e: Vec<f32> = logits.iter().map(|x| exp1(x - greatest)).collect();
            let mut lanes = [0f32; 64];
            e.iter().enumerate().for_each(|(i, e)| lanes[i % 64] += e);
            for half in [32, 16, 8, 4, 2, 1] {
                (0..half).for_each(|i| lanes[i] += lanes[i + half]);
            }
            let wanted: Vec<u32> = e.iter().map(|e| (e / lanes[0]).to_bits()).collect();
            let scoring = Scoring::SoftmaxTopK { k: experts, renormalise: false, scales: vec![] };
            for isa in Isa::supported() {
                assert_eq!(bits(&run(isa, &scoring, &logits).1), wanted, "{isa}, {experts}");
            }
        }
    }

    /// The best `k` by sorting, ascending by number.
    fn sorted_best(score: &[f32], k: usize) -> Vec<u32> {
        let mut all: Vec<u32> = (0..score.len() as u32).collect();
        all.sort_by(|a, b| score[*b as usize].partial_cmp(&score[*a as usize]).unwrap().then(a.cmp(b)));
        all.truncate(k);
        all.sort();
        all
    }

    fn scorings(k: usize, experts: usize, seed: u64) -> Vec<Scoring> {
        let groups = if experts.is_multiple_of(4) { 4 } else { 1 };
        let sigmoid = |bias, groups, top_groups| Scoring::Sigmoid {
            k: k.min(experts / groups * top_groups),
            bias,
            groups,
            top_groups,
            renormalise: true,
            scale: 2.5,
        };
        vec![
            Scoring::SoftmaxTopK { k, renormalise: true, scales: vec![] },
            Scoring::SoftmaxTopK { k, renormalise: false, scales: vec![] },
            Scoring::TopKSoftmax { k },
            sigmoid(vec![], 1, 1),
            sigmoid(random(experts, seed), groups, groups.min(2)),
            Scoring::RootSoftplus { k, bias: random(experts, seed + 1), scale: 1.5 },
            Scoring::ByToken { k, table: (0..2 * k).map(|i| (experts - 1 - i % k) as u32).collect(), scale: 1.5 },
        ]
    }

    proptest! {
        #[test]
        fn choices_have_the_same_bits_in_every_instruction_set(
            experts in 1usize..140, k in 1usize..20, seed in any::<u64>(), coarse in any::<bool>()
        ) {
            let mut logits = random(experts, seed);
            if coarse {
                logits.iter_mut().for_each(|x| *x = x.round()); // many ties
            }
            for scoring in scorings(k.min(experts), experts, seed + 1) {
                let oracle = run(Isa::GENERIC, &scoring, &logits);
                prop_assert!(oracle.0.windows(2).all(|w| w[0] < w[1]));
                for isa in Isa::supported() {
                    let got = run(isa, &scoring, &logits);
                    prop_assert_eq!((&got.0, bits(&got.1)), (&oracle.0, bits(&oracle.1)));
                }
                if matches!(scoring, Scoring::SoftmaxTopK { .. } | Scoring::TopKSoftmax { .. }) && (coarse || matches!(scoring, Scoring::TopKSoftmax { .. })) {
                    prop_assert_eq!(&oracle.0, &sorted_best(&logits, scoring.k()));
                }
            }
        }
    }

    #[test]
    fn weights_are_close_to_f64() {
        let logits = random(160, 3);
        let exps: Vec<f64> = logits.iter().map(|x| (*x as f64).exp()).collect();
        let all: f64 = exps.iter().sum();
        let ids = sorted_best(&logits, 8);
        let chosen: Vec<f64> = ids.iter().map(|e| exps[*e as usize]).collect();
        let sum: f64 = chosen.iter().sum();
        let normed: Vec<f64> = chosen.iter().map(|x| x / sum).collect();
        let plain: Vec<f64> = chosen.iter().map(|x| x / all).collect();
        let isa = *Isa::supported().last().unwrap();
        for (scoring, exact) in [
            (Scoring::SoftmaxTopK { k: 8, renormalise: true, scales: vec![] }, &normed),
            (Scoring::SoftmaxTopK { k: 8, renormalise: false, scales: vec![] }, &plain),
            (Scoring::TopKSoftmax { k: 8 }, &normed),
        ] {
            let got = run(isa, &scoring, &logits);
            assert_eq!(got.0, ids);
            assert_close(&got.1, exact, 1e-6);
        }
        let scales: Vec<f32> = random(logits.len(), 5);
        let scaled = Scoring::SoftmaxTopK { k: 8, renormalise: true, scales: scales.clone() };
        let wanted: Vec<f64> = ids.iter().zip(&normed).map(|(e, w)| w * f64::from(scales[*e as usize])).collect();
        let got = run(isa, &scaled, &logits);
        assert_eq!(got.0, ids);
        assert_close(&got.1, &wanted, 1e-6);
    }

    #[test]
    fn groups_and_bias_choose_but_do_not_weigh() {
        // Groups of two: sums of biased scores rank them 2, 0, 1.
        let logits = [0.0, 1.0, -1.0, 0.5, 3.0, -2.0];
        let bias = vec![0.5, 0.0, 0.0, 0.0, 0.0, 1.0];
        let scoring = Scoring::Sigmoid { k: 3, bias, groups: 3, top_groups: 2, renormalise: false, scale: 2.0 };
        let (ids, weights) = run(Isa::GENERIC, &scoring, &logits);
        assert_eq!(ids, [0, 4, 5]);
        assert_eq!(weights, [0.0, 3.0, -2.0].map(|x| 2.0 * sigmoid1(x)));
    }

    #[test]
    fn a_nan_is_no_crash() {
        let mut logits = random(32, 9);
        logits[7] = f32::NAN;
        for scoring in scorings(4, 32, 1) {
            let (ids, _) = run(Isa::GENERIC, &scoring, &logits);
            assert!(ids.windows(2).all(|w| w[0] < w[1]) && ids[3] < 32);
        }
    }

    #[test]
    fn what_cannot_be_chosen_is_refused() {
        assert!(Scoring::TopKSoftmax { k: 5 }.check(4).is_err());
        assert!(Scoring::SoftmaxTopK { k: 2, renormalise: true, scales: vec![1.0; 3] }.check(4).is_err());
        let groups =
            |groups, k| Scoring::Sigmoid { k, bias: vec![], groups, top_groups: 1, renormalise: true, scale: 1.0 };
        assert!(groups(3, 1).check(8).is_err());
        assert!(groups(4, 3).check(8).is_err());
        assert!(groups(4, 2).check(8).is_ok());
    }
}
