//! Chooses one token from its logits.
//!
//! The order is: penalties, temperature, top-k, top-p, min-p, draw. Each filter sees the tokens that the one before it left. Ties go to the lower id. Weights
//! are whole numbers, so that their sums are exact in any order. The draw comes from a counter-based generator of (seed, position). So the token depends on
//! nothing else: not on the machine, on other sequences, or on earlier draws. Nothing is allocated per token.

use sluice_backend::sample::{self, ONE};
use sluice_backend::{DRAWN_TOGETHER as BLOCK, Isa};

use super::filters::{Candidate, by_rank, keep_nucleus, keep_top_k, needed};
use super::params::{History, SamplingParams};
use super::random::uniform;

/// Why no token can be chosen.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
pub enum SampleError {
    /// A logit is NaN or +inf.
    #[error("the logit of token {token} is {value}")]
    NotANumber {
        /// The token.
        token: u32,
        /// Its logit.
        value: f32,
    },
    /// All logits are -inf, or ruled out.
    #[error("every token is ruled out: all logits are -inf")]
    NothingLeft,
    /// The generation's own processor of logits failed.
    #[error("the logits processor failed")]
    Processor,
    /// The logits are not of this vocabulary.
    #[error("expected {expected} logits, found {found}")]
    WrongLength {
        /// Tokens of the vocabulary.
        expected: usize,
        /// Logits that were given.
        found: usize,
    },
}

/// The tokens that may be chosen: bit `token % 32` of word `token / 32`. Tokens beyond its end may not.
pub type Mask = [u32];

pub(super) fn allows(mask: &Mask, token: u32) -> bool {
    mask.get(token as usize / 32).is_some_and(|word| word >> (token % 32) & 1 == 1)
}

/// Chooses tokens, for any number of sequences.
pub struct Sampler {
    /// Changes speed, never a token.
    pub(super) isa: Isa,
    pub(super) vocab: usize,
    /// The logits after penalties and mask: `[vocab]`. Memory is committed when it is first used.
    changed: Vec<f32>,
    pub(super) scratch: SamplerScratch,
}

/// Buffers of a [`Sampler`].
#[derive(Default)]
pub(super) struct SamplerScratch {
    /// `[vocab]` at most.
    pub candidates: Vec<Candidate>,
    /// Sums of the weights of blocks of logits.
    sums: Vec<u64>,
}

impl Sampler {
    /// A sampler for logits of `vocab` tokens.
    pub fn new(isa: Isa, vocab: usize) -> Sampler {
        let scratch =
            SamplerScratch { candidates: Vec::with_capacity(vocab), sums: Vec::with_capacity(vocab.div_ceil(BLOCK)) };
        Sampler { isa, vocab, changed: Vec::with_capacity(vocab), scratch }
    }

    /// Chooses the token for `position` from `logits`: `[vocab]`. `params` are valid. `history` is used if they have penalties.
    ///
    /// # Errors
    /// Logits that are NaN or +inf, or all -inf, or of which the mask allows none.
    pub fn sample(
        &mut self,
        params: &SamplingParams,
        logits: &[f32],
        history: Option<&History>,
        mask: Option<&Mask>,
        position: u64,
    ) -> Result<u32, SampleError> {
        if logits.len() != self.vocab {
            return Err(SampleError::WrongLength { expected: self.vocab, found: logits.len() });
        }
        let history = history.filter(|_| params.has_penalty());
        if history.is_none() && mask.is_none() {
            return choose(self.isa, params, logits, &mut self.scratch, position);
        }
        // 1. penalties and mask, on a copy. Logits that are ruled out must be numbers too
        highest(self.isa, logits)?;
        self.changed.clear();
        self.changed.extend_from_slice(logits);
        if let Some(history) = history {
            // Each token is changed on its own, so the order in which they come does not matter.
            for (token, count) in history.all() {
                if let Some(logit) = self.changed.get_mut(token as usize) {
                    *logit = params.penalised(*logit, count);
                }
            }
        }
        if let Some(mask) = mask {
            for (token, logit) in (0..).zip(&mut self.changed) {
                *logit = if allows(mask, token) { *logit } else { f32::NEG_INFINITY };
            }
        }
        choose(self.isa, params, &self.changed, &mut self.scratch, position)
    }
}

/// Log-probabilities: natural logarithms, before temperature, filters and penalties.
#[derive(Clone, Debug, PartialEq)]
pub struct Logprobs {
    /// The log-probability of the chosen token.
    pub chosen: f64,
    /// The likeliest tokens and their log-probabilities, best first.
    pub top: Vec<(u32, f64)>,
}

impl Logprobs {
    /// The log-probabilities of `token` and the `top` likeliest tokens, from `logits`: `[vocab]`.
    pub fn new(isa: Isa, logits: &[f32], token: u32, top: usize) -> Logprobs {
        let highest = sample::highest(isa, logits).0;
        let total = sample::total(isa, logits, highest, 1.0);
        let mut best = Vec::new();
        if top > 0 {
            keep_top_k(&mut best, logits, top);
            best.sort_unstable_by(by_rank);
        }
        Logprobs::from_total(total, highest, logits[token as usize], &best)
    }

    /// Of a token with this `logit` and of the `best`. `total`: the sum of all weights at temperature 1.
    pub(super) fn from_total(total: u64, highest: f32, logit: f32, best: &[Candidate]) -> Logprobs {
        let log_total = libm::log(total as f64 / ONE);
        let logprob = |logit: f32| f64::from(logit) - f64::from(highest) - log_total;
        Logprobs { chosen: logprob(logit), top: best.iter().map(|c| (c.token, logprob(c.logit))).collect() }
    }
}

fn choose(
    isa: Isa,
    params: &SamplingParams,
    logits: &[f32],
    scratch: &mut SamplerScratch,
    position: u64,
) -> Result<u32, SampleError> {
    let highest = highest(isa, logits)?;
    if params.temperature == 0.0 {
        let token = logits.iter().position(|x| *x == highest);
        return token.map(|t| t as u32).ok_or(SampleError::NothingLeft);
    }

    // 2. temperature, 3. top-k
    let cut = params.top_k_of(logits.len());
    if cut.is_none() && params.top_p >= 1.0 && params.min_p == 0.0 {
        return draw_from_all(isa, params, logits, highest, &mut scratch.sums, position);
    }
    let candidates = &mut scratch.candidates;
    if let Some(k) = cut {
        keep_top_k(candidates, logits, k);
    } else {
        candidates.clear();
        candidates.extend((0..).zip(logits).map(|(token, logit)| Candidate { logit: *logit, token, weight: 0 }));
    }
    weigh(isa, candidates, highest, params.scale());
    // 4. top-p, 5. min-p, 6. draw
    if params.top_p < 1.0 {
        let all = candidates.iter().map(|c| c.weight).sum();
        keep_nucleus(candidates, needed(all, f64::from(params.top_p)));
    }
    keep_heavy(candidates, params);
    draw_from(candidates, params.seed, position)
}

/// Computes the weights of candidates.
pub(super) fn weigh(isa: Isa, candidates: &mut [Candidate], highest: f32, scale: f64) {
    let (mut chosen, mut weights) = ([0.0; 256], [0; 256]);
    for group in candidates.chunks_mut(chosen.len()) {
        let n = group.len();
        chosen.iter_mut().zip(&*group).for_each(|(logit, candidate)| *logit = candidate.logit);
        sample::weights(isa, &chosen[..n], highest, scale, &mut weights[..n]);
        group.iter_mut().zip(weights).for_each(|(candidate, weight)| candidate.weight = weight);
    }
}

/// Applies min-p.
pub(super) fn keep_heavy(candidates: &mut Vec<Candidate>, params: &SamplingParams) {
    if params.min_p > 0.0 {
        let lightest = f64::from(params.min_p) * ONE;
        candidates.retain(|c| c.weight as f64 >= lightest);
    }
}

/// Draws a candidate by weight. Candidates are ordered by id for it.
pub(super) fn draw_from(candidates: &mut [Candidate], seed: u64, position: u64) -> Result<u32, SampleError> {
    candidates.sort_unstable_by_key(|c| c.token);
    let mut below = drawn(seed, position, candidates.iter().map(|c| c.weight).sum());
    let hit = candidates.iter().find(|c| falls_on(c.weight, &mut below));
    hit.map(|c| c.token).ok_or(SampleError::NothingLeft)
}

/// A uniformly distributed number below `total`.
fn drawn(seed: u64, position: u64, total: u64) -> u64 {
    ((u128::from(uniform(seed, position)) * u128::from(total)) >> 53) as u64
}

/// Whether the rest of a drawn number falls on this weight. If not, the weight is subtracted from it.
fn falls_on(weight: u64, below: &mut u64) -> bool {
    let hit = *below < weight;
    *below -= if hit { 0 } else { weight };
    hit
}

/// Draws from all tokens, without filters. Only the weights of the block that is drawn are looked at one by one.
fn draw_from_all(
    isa: Isa,
    params: &SamplingParams,
    logits: &[f32],
    highest: f32,
    sums: &mut Vec<u64>,
    position: u64,
) -> Result<u32, SampleError> {
    let scale = params.scale();
    sums.clear();
    sums.extend(logits.chunks(BLOCK).map(|block| sample::total(isa, block, highest, scale)));
    let hit = block_hit(params.seed, position, sums)?;
    let from = hit.block * BLOCK;
    let logits = &logits[from..logits.len().min(from + BLOCK)];
    token_hit(isa, logits, highest, scale, hit)
}

/// The block of logits that a drawn number falls on.
#[derive(Clone, Copy, Debug)]
pub(super) struct Hit {
    pub block: usize,
    /// The rest of the number, within the block's weights.
    below: u64,
}

/// Draws a block of logits by the sums of their weights.
pub(super) fn block_hit(seed: u64, position: u64, sums: &[u64]) -> Result<Hit, SampleError> {
    let mut below = drawn(seed, position, sums.iter().sum());
    let block = sums.iter().position(|sum| falls_on(*sum, &mut below)).ok_or(SampleError::NothingLeft)?;
    Ok(Hit { block, below })
}

/// The token of a drawn block. `logits`: those of the block.
pub(super) fn token_hit(
    isa: Isa,
    logits: &[f32],
    highest: f32,
    scale: f64,
    Hit { block, mut below }: Hit,
) -> Result<u32, SampleError> {
    let mut weights = [0; BLOCK];
    let weights = &mut weights[..logits.len()];
    sample::weights(isa, logits, highest, scale, weights);
    let at = weights.iter().position(|weight| falls_on(*weight, &mut below)).ok_or(SampleError::NothingLeft)?;
    Ok((block * BLOCK + at) as u32)
}

/// The highest logit. NaN, +inf, and nothing but -inf are errors.
fn highest(isa: Isa, logits: &[f32]) -> Result<f32, SampleError> {
    let (highest, has_nan) = sample::highest(isa, logits);
    if has_nan || highest == f32::INFINITY {
        let bad = logits.iter().position(|x| x.is_nan() || *x == f32::INFINITY).unwrap_or(0);
        return Err(SampleError::NotANumber { token: bad as u32, value: logits[bad] });
    }
    if highest == f32::NEG_INFINITY { Err(SampleError::NothingLeft) } else { Ok(highest) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A sampler of one sequence.
    struct One(SamplingParams, Sampler);

    impl One {
        fn sample(&mut self, logits: &[f32], position: u64) -> Result<u32, SampleError> {
            self.1.sample(&self.0, logits, None, None, position)
        }
    }

    fn sampler(params: SamplingParams, vocab: usize) -> One {
        params.validate().unwrap();
        One(params, Sampler::new(*Isa::supported().last().unwrap(), vocab))
    }

    /// The definition, slowly: a full sort, then one cut after the other.
    fn oracle(params: &SamplingParams, logits: &[f32], position: u64) -> u32 {
        let mut order: Vec<usize> = (0..logits.len()).collect();
        order.sort_by(|a, b| logits[*b].partial_cmp(&logits[*a]).unwrap().then(a.cmp(b)));
        if params.top_k > 0 {
            order.truncate(params.top_k as usize);
        }
        let highest = f64::from(logits[order[0]]);
        let scale = 1.0 / f64::from(params.temperature);
        let weight_of = |i: &usize| sample::weight((f64::from(logits[*i]) - highest) * scale);
        if params.top_p < 1.0 {
            let total: u64 = order.iter().map(weight_of).sum();
            let need = ((f64::from(params.top_p) * total as f64) as u64).max(1);
            let mut sum = 0;
            let last = order.iter().position(|i| {
                sum += weight_of(i);
                sum >= need
            });
            order.truncate(last.unwrap() + 1);
        }
        order.retain(|i| weight_of(i) as f64 >= f64::from(params.min_p) * ONE);
        order.sort_unstable();
        let total: u64 = order.iter().map(weight_of).sum();
        let target = (u128::from(uniform(params.seed, position)) * u128::from(total)) >> 53;
        let mut sum = 0;
        let drawn = order.iter().find(|i| {
            sum += u128::from(weight_of(i));
            sum > target
        });
        *drawn.unwrap() as u32
    }

    #[test]
    fn temperature_zero_is_greedy_and_the_lowest_id_wins() {
        let mut sampler = sampler(SamplingParams { temperature: 0.0, ..Default::default() }, 5);
        assert_eq!(sampler.sample(&[1.0, 3.0, 3.0, -1.0, 3.0], 9), Ok(1));
    }

    #[test]
    fn logits_without_a_choice_are_errors() {
        for temperature in [0.0, 1.0] {
            let mut sampler = sampler(SamplingParams { temperature, ..Default::default() }, 3);
            let mut sample = |logits: &[f32]| sampler.sample(logits, 0);
            assert!(matches!(sample(&[0.0, f32::NAN, 0.0]), Err(SampleError::NotANumber { token: 1, .. })));
            assert!(matches!(sample(&[0.0, 1.0, f32::INFINITY]), Err(SampleError::NotANumber { token: 2, .. })));
            assert_eq!(sample(&[f32::NEG_INFINITY; 3]), Err(SampleError::NothingLeft));
            assert_eq!(sample(&[0.0; 2]), Err(SampleError::WrongLength { expected: 3, found: 2 }));
            assert_eq!(sample(&[f32::NEG_INFINITY, 0.5, f32::NEG_INFINITY]), Ok(1));
        }
    }

    #[test]
    fn parameters_outside_their_range_are_named() {
        let field = |params: SamplingParams| params.validate().err().map(|e| e.field);
        let with = SamplingParams::default;
        assert_eq!(field(with()), None);
        assert_eq!(field(SamplingParams { temperature: -0.1, ..with() }), Some("temperature"));
        assert_eq!(field(SamplingParams { temperature: f32::NAN, ..with() }), Some("temperature"));
        assert_eq!(field(SamplingParams { top_p: 0.0, ..with() }), Some("top_p"));
        assert_eq!(field(SamplingParams { min_p: 1.5, ..with() }), Some("min_p"));
        assert_eq!(field(SamplingParams { repetition_penalty: 0.0, ..with() }), Some("repetition_penalty"));
        assert_eq!(field(SamplingParams { presence_penalty: 2.5, ..with() }), Some("presence_penalty"));
        assert_eq!(field(SamplingParams { frequency_penalty: f32::INFINITY, ..with() }), Some("frequency_penalty"));
    }

    #[test]
    fn penalties_are_those_of_hugging_face_and_openai() {
        let params = SamplingParams {
            repetition_penalty: 2.0,
            presence_penalty: 0.5,
            frequency_penalty: 0.25,
            ..Default::default()
        };
        let mut history = History::with_capacity(4);
        history.add_prompt(&[0, 1, 2]);
        history.add_generated(2);
        history.add_generated(2);
        history.add_generated(3);
        history.add_generated(99); // beyond the logits: nothing to penalise
        let mut logits = [4.0, -4.0, 4.0, -4.0, 1.0];
        for (token, logit) in (0..).zip(&mut logits) {
            if let Some(count) = history.count(token) {
                *logit = params.penalised(*logit, count);
            }
        }
        assert_eq!(logits, [2.0, -8.0, 2.0 - 0.5 - 0.5, -8.0 - 0.25 - 0.5, 1.0]);
    }

    #[test]
    fn a_mask_leaves_what_it_allows() {
        let logits: Vec<f32> = (0..70).map(|i| i as f32).collect();
        let mut sampler = Sampler::new(Isa::GENERIC, 70);
        for temperature in [0.0, 1.0] {
            let params = SamplingParams { temperature, ..Default::default() };
            let mut sample = |mask: &[u32]| sampler.sample(&params, &logits, None, Some(mask), 1);
            assert_eq!(sample(&[1 << 7, 0]), Ok(7), "what is beyond its end is not allowed");
            assert_eq!(sample(&[0, 1 << 31, 0]), Ok(63));
            assert_eq!(sample(&[0, 0, 0]), Err(SampleError::NothingLeft));
        }
        // The greedy one of those that are allowed.
        let params = SamplingParams { temperature: 0.0, ..Default::default() };
        assert_eq!(sampler.sample(&params, &logits, None, Some(&[u32::MAX, 3, 1 << 2]), 0), Ok(66));
    }

    #[test]
    fn logprobs_are_logarithms_of_a_softmax() {
        let logits = [0.5f32, -1.0, 3.0, 3.0, f32::NEG_INFINITY];
        let total: f64 = logits.iter().map(|x| libm::exp(f64::from(*x))).sum();
        let of = |x: f32| f64::from(x) - libm::log(total);
        let found = Logprobs::new(Isa::GENERIC, &logits, 0, 3);
        assert!((found.chosen - of(0.5)).abs() < 1e-9);
        assert_eq!(found.top.iter().map(|t| t.0).collect::<Vec<_>>(), [2, 3, 0]);
        assert!(found.top.iter().all(|(token, p)| (p - of(logits[*token as usize])).abs() < 1e-9));
    }

    #[test]
    fn no_number_of_logprobs_is_too_large() {
        let logits: Vec<f32> = (0..5000).map(|i| (i * 7919 % 5000) as f32 / 500.0).collect();
        let all = Logprobs::new(Isa::GENERIC, &logits, 0, logits.len()).top;
        assert_eq!(all.len(), logits.len());
        for top in [logits.len() + 1, 1 << 62, usize::MAX / 4, usize::MAX] {
            assert_eq!(Logprobs::new(Isa::GENERIC, &logits, 0, top).top, all, "{top}");
        }
    }

    #[test]
    fn draws_follow_the_distribution() {
        let logits = [0.0f32, 1.0, 2.0, 3.0];
        let mut sampler = sampler(SamplingParams { temperature: 2.0, seed: 7, ..Default::default() }, 4);
        let mut counts = [0u32; 4];
        for position in 0..40_000 {
            counts[sampler.sample(&logits, position).unwrap() as usize] += 1;
        }
        let total: f64 = logits.iter().map(|x| libm::exp(f64::from(*x) / 2.0)).sum();
        for (logit, count) in logits.iter().zip(counts) {
            let expected = libm::exp(f64::from(*logit) / 2.0) / total;
            assert!((f64::from(count) / 40_000.0 - expected).abs() < 0.01, "{counts:?}");
        }
    }

    #[test]
    fn a_draw_depends_on_nothing_but_logits_seed_and_position() {
        let logits: Vec<f32> = (0..5000).map(|i| (uniform(1, i) >> 33) as f32 / 65536.0).collect();
        let params = SamplingParams { top_p: 0.9, seed: 3, ..Default::default() };
        let mut one = sampler(params.clone(), 5000);
        let forwards: Vec<u32> = (0..50).map(|p| one.sample(&logits, p).unwrap()).collect();
        let mut two = sampler(params, 5000);
        let mut backwards: Vec<u32> = (0..50).rev().map(|p| two.sample(&logits, p).unwrap()).collect();
        backwards.reverse();
        assert_eq!(forwards, backwards);
        assert!(forwards.iter().any(|t| t != &forwards[0]));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(500))]
        #[test]
        fn cuts_are_those_of_a_full_sort(
            // Few different values, so that ties are everywhere.
            logits in prop::collection::vec(prop_oneof![(-12i32..12).prop_map(|x| x as f32 * 0.5), Just(-0.0f32)], 1..3000),
            temperature in prop_oneof![Just(0.1f32), Just(1.0), 0.2f32..4.0],
            top_k in prop_oneof![Just(0u32), 1u32..50, 1u32..4000],
            top_p in prop_oneof![Just(1.0f32), 0.01f32..1.0],
            min_p in prop_oneof![Just(0.0f32), 0.0f32..1.0],
            seed in any::<u64>(),
            position in any::<u64>(),
        ) {
            let params = SamplingParams { temperature, top_k, top_p, min_p, seed, ..Default::default() };
            let mut sampler = sampler(params.clone(), logits.len());
            let room = sampler.1.scratch.candidates.capacity();
            let token = sampler.sample(&logits, position).unwrap();
            prop_assert_eq!(token, oracle(&params, &logits, position));
            prop_assert_eq!(sampler.1.scratch.candidates.capacity(), room, "a step allocates nothing");
        }
    }
}
