//! Chooses tokens from the likeliest logits alone, while the others stay on a device.
//!
//! The logits that were not fetched are below a bar. Penalties and masks that raise no logit keep them there. Where the known logits do not decide a token, it is drawn
//! from all of them.

use sluice_backend::sample::ONE;
use sluice_backend::{Best, MAX_RANKS};

use super::filters::{Candidate, by_rank, keep_nucleus, needed};
use super::params::{History, SamplingParams};
use super::sampler::{Logprobs, Mask, Sampler, allows, draw_from, keep_heavy, weigh};

/// How many of the likeliest tokens to ask for when it is not known how many it takes. Nuclei are seldom larger, and penalties seldom leave fewer.
const USUAL_RANKS: usize = 128;

/// Which logits have to be known to choose a token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Needs {
    /// The highest.
    Top,
    /// The sums of all weights, and the logits of the block that is drawn.
    Sums,
    /// This many of the highest, and the sum of all weights if `total`.
    Best { ranks: usize, total: bool },
    /// All logits.
    All,
}

impl Needs {
    /// For these parameters. `masked`: a mask rules tokens out.
    pub fn new(params: &SamplingParams, vocabulary: usize, masked: bool) -> Needs {
        let changed = params.has_penalty() || masked;
        let best = |ranks, total| Needs::Best { ranks, total };
        if !params.lowers_only() {
            return Needs::All;
        }
        if params.temperature == 0.0 {
            return if changed { best(USUAL_RANKS, false) } else { Needs::Top };
        }
        match params.top_k_of(vocabulary) {
            Some(k) if k > MAX_RANKS => Needs::All,
            Some(k) if changed => best((k + USUAL_RANKS).min(MAX_RANKS), false),
            Some(k) => best(k, false),
            None if params.top_p < 1.0 && changed => Needs::All,
            None if params.top_p < 1.0 => best(USUAL_RANKS, true),
            None if params.min_p > 0.0 => best(USUAL_RANKS, false),
            None if changed => Needs::All,
            None => Needs::Sums,
        }
    }
}

impl Sampler {
    /// [`Sampler::sample`] from the likeliest tokens. `total`: the sum of all weights, if [`Needs::Best`] asks for it. `None`: they do not decide it.
    pub(crate) fn sample_best(
        &mut self,
        params: &SamplingParams,
        best: &Best,
        total: Option<u64>,
        history: Option<&History>,
        mask: Option<&Mask>,
        position: u64,
    ) -> Option<u32> {
        let candidates = &mut self.scratch.candidates;
        candidates.clear();
        // 1. Penalties and mask. Unknown logits are below the bar, so a candidate that falls below it may rank after them and is dropped
        let history = history.filter(|_| params.has_penalty());
        candidates.extend(best.found.iter().filter(|top| mask.is_none_or(|mask| allows(mask, top.token))).map(|top| {
            let count = history.and_then(|history| history.count(top.token));
            let logit = count.map_or(top.logit, |count| params.penalised(top.logit, count));
            Candidate { logit, token: top.token, weight: 0 }
        }));
        candidates.retain(|c| c.logit >= best.bar);
        // A mask that leaves only tokens of -inf is an error, which sampling from all logits reports
        let likeliest = *candidates.iter().min_by(|a, b| by_rank(a, b)).filter(|c| c.logit > f32::NEG_INFINITY)?;
        if params.temperature == 0.0 {
            return Some(likeliest.token);
        }
        // 2. temperature, 3. top-k
        let cut = params.top_k_of(self.vocab);
        if let Some(k) = cut {
            if candidates.len() < k {
                return None;
            }
            candidates.select_nth_unstable_by(k - 1, by_rank);
            candidates.truncate(k);
        }
        let scale = params.scale();
        weigh(self.isa, candidates, likeliest.logit, scale);
        // 4. top-p
        let known = candidates.iter().map(|c| c.weight).sum();
        if params.top_p < 1.0 {
            let all = if cut.is_some() { known } else { total? };
            let need = needed(all, f64::from(params.top_p));
            if known < need {
                return None;
            }
            keep_nucleus(candidates, need);
        } else if cut.is_none() {
            // No other token weighs more than the bar does, except for rounding.
            let mut bar = [Candidate { logit: best.bar, token: 0, weight: 0 }];
            weigh(self.isa, &mut bar, likeliest.logit, scale);
            if bar[0].weight as f64 * (1.0 + 1e-9) + 1.0 >= f64::from(params.min_p) * ONE {
                return None;
            }
        }
        // 5. min-p, 6. draw
        keep_heavy(candidates, params);
        draw_from(candidates, params.seed, position).ok()
    }
}

impl Logprobs {
    /// [`Logprobs::new`] of a token with this `logit`, from the likeliest tokens, which are `top` or more, and the sum of all weights at temperature 1.
    pub(crate) fn from_best(logit: f32, highest: f32, total: u64, best: Option<&Best>, top: usize) -> Logprobs {
        let found = best.map_or(&[][..], |best| &best.found).iter().filter(|top| top.logit > f32::NEG_INFINITY);
        let mut best: Vec<Candidate> =
            found.map(|top| Candidate { logit: top.logit, token: top.token, weight: 0 }).collect();
        best.sort_unstable_by(by_rank);
        best.truncate(top);
        Logprobs::from_total(total, highest, logit, &best)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use sluice_backend::{Isa, Top, sample};

    use super::*;
    use crate::sampling::random::uniform;

    /// What a device returns: all logits that reach the `rank`th of the groups' highest.
    fn best_of(logits: &[f32], groups: usize, rank: usize) -> Best {
        let mut highest = vec![f32::NEG_INFINITY; groups];
        logits.iter().enumerate().for_each(|(i, logit)| highest[i % groups] = highest[i % groups].max(*logit));
        highest.sort_by(|a, b| b.total_cmp(a));
        let bar = highest[rank - 1];
        let found = (0..).zip(logits).filter(|(_, logit)| **logit >= bar);
        Best { bar, found: found.map(|(token, logit)| Top { logit: *logit, token }).collect() }
    }

    /// Whether the likeliest tokens decide. Checks that the token and its log-probability are those of all logits.
    fn decided(params: &SamplingParams, logits: &[f32], history: &History, mask: Option<&Mask>, position: u64) -> bool {
        params.validate().unwrap();
        let isa = *Isa::supported().last().unwrap();
        let mut sampler = Sampler::new(isa, logits.len());
        let Needs::Best { ranks, total } = Needs::new(params, logits.len(), mask.is_some()) else { return false };
        let highest = sample::highest(isa, logits).0;
        let best = best_of(logits, 256, ranks.max(5));
        let all = total.then(|| sample::total(isa, logits, highest, params.scale()));
        let Some(token) = sampler.sample_best(params, &best, all, Some(history), mask, position) else { return false };
        assert_eq!(sampler.sample(params, logits, Some(history), mask, position), Ok(token));
        let plain = sample::total(isa, logits, highest, 1.0);
        let own = Logprobs::from_best(logits[token as usize], highest, plain, Some(&best), 5);
        assert_eq!(own, Logprobs::new(isa, logits, token, 5));
        true
    }

    /// Logits of a confident model: few tokens are likely.
    fn peaked(seed: u64) -> Vec<f32> {
        (0..3000).map(|i| ((uniform(seed, i) >> 20) as f32 / (1u64 << 33) as f32).powi(9) * 30.0 - 10.0).collect()
    }

    #[test]
    fn usual_settings_are_decided_by_the_likeliest() {
        let with = SamplingParams::default;
        let mut history = History::default();
        history.add_prompt(&(0..1500).collect::<Vec<_>>());
        (1000..1400).for_each(|token| history.add_generated(token));
        let mask = vec![0x3fff_ffff; 94];
        for position in 0..50 {
            let logits = peaked(position);
            let decided =
                |params: SamplingParams, mask: Option<&Mask>| decided(&params, &logits, &history, mask, position);
            assert!(decided(SamplingParams { top_k: 20, top_p: 0.95, temperature: 0.6, ..with() }, None));
            assert!(decided(SamplingParams { top_k: 40, top_p: 0.95, min_p: 0.05, ..with() }, None));
            assert!(decided(SamplingParams { top_k: 20, presence_penalty: 1.5, ..with() }, Some(&mask)));
            assert!(decided(SamplingParams { temperature: 0.0, repetition_penalty: 1.1, ..with() }, None));
            assert!(decided(SamplingParams { temperature: 0.0, ..with() }, Some(&mask)));
            assert!(decided(SamplingParams { min_p: 0.1, ..with() }, None));
            assert!(decided(SamplingParams { top_p: 0.5, temperature: 0.5, ..with() }, None));
        }
    }

    #[test]
    fn what_the_likeliest_cannot_decide_is_not() {
        let even = vec![0.0; 3000];
        let with = SamplingParams::default;
        let decided =
            |params: SamplingParams, mask: Option<&Mask>| decided(&params, &even, &History::default(), mask, 1);
        assert!(!decided(SamplingParams { top_k: 500, ..with() }, None));
        assert!(!decided(SamplingParams { repetition_penalty: 0.9, top_k: 5, ..with() }, None));
        assert!(!decided(SamplingParams { top_k: 5, ..with() }, Some(&[7])));
        assert!(!decided(SamplingParams { temperature: 0.0, ..with() }, Some(&[0; 94])));
    }

    #[test]
    fn a_mask_that_leaves_only_what_is_ruled_out_is_an_error() {
        for temperature in [0.0, 1.0] {
            let params = SamplingParams { temperature, top_k: 1, ..Default::default() };
            let logits = [0.5, f32::NEG_INFINITY];
            assert!(!decided(&params, &logits, &History::default(), Some(&[0b10]), 1));
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(500))]
        #[test]
        fn tokens_are_those_of_all_logits(
            // Few different values, so that ties are everywhere.
            logits in prop::collection::vec(prop_oneof![(-12i32..12).prop_map(|x| x as f32 * 0.5), -30.0f32..30.0, Just(f32::NEG_INFINITY)], 1..3000),
            temperature in prop_oneof![Just(0.0f32), Just(1.0), 0.2f32..4.0],
            top_k in prop_oneof![Just(0u32), 1u32..50, 1u32..4000],
            top_p in prop_oneof![Just(1.0f32), 0.01f32..1.0],
            min_p in prop_oneof![Just(0.0f32), 0.0f32..1.0],
            (repetition_penalty, presence_penalty) in prop_oneof![Just((1.0f32, 0.0f32)), (0.8f32..2.0, -1.0f32..2.0)],
            masked in any::<bool>(),
            seed in any::<u64>(),
            position in any::<u64>(),
        ) {
            let params = SamplingParams { temperature, top_k, top_p, min_p, seed, repetition_penalty, presence_penalty, ..Default::default() };
            let mut history = History::default();
            history.add_prompt(&(0..1000).map(|i| (uniform(seed, i) % 3000) as u32).collect::<Vec<_>>());
            (0..500).for_each(|i| history.add_generated((uniform(seed, i) % 3000) as u32));
            let mask: Vec<u32> = (0..94).map(|i| uniform(position, i) as u32).collect();
            if logits.iter().any(|logit| logit.is_finite()) {
                decided(&params, &logits, &history, masked.then_some(&mask[..]), position);
            }
        }
    }
}
