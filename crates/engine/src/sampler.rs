//! Logits to one token.
//!
//! The order is: penalties, temperature, top-k, top-p, min-p, draw. Each cut looks at the tokens that the one before it left. Ties are
//! broken towards the lower id everywhere. Weights are whole numbers, so that their sums are exact in any order, and the draw comes from a
//! counter-based generator of (seed, position): the token depends on nothing else, not on the machine, on other sequences, or on what
//! was drawn before. Nothing is allocated per token.

use std::cmp::Ordering;
use std::collections::HashMap;

use sluice_backend::draw::{self, ONE};
use sluice_backend::{DRAWN_TOGETHER as BLOCK, Isa};

use crate::draw::uniform;

/// How to choose a token. `Default` is the model's own distribution: temperature 1, no cut, no penalty, seed 0.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    /// Divides the logits; 0 takes the most likely token.
    pub temperature: f32,
    /// Keep the k most likely tokens; 0 keeps all.
    pub top_k: u32,
    /// Keep the fewest most likely tokens whose probabilities reach this sum; 1 keeps all.
    pub top_p: f32,
    /// Keep tokens at least this fraction as likely as the most likely one; 0 keeps all.
    pub min_p: f32,
    /// Divides the positive logits, and multiplies the negative ones, of all tokens seen in prompt and answer; 1 is none
    /// (CTRL, <https://arxiv.org/abs/1909.05858>, as in Hugging Face).
    pub repetition_penalty: f32,
    /// Taken once off the logit of every token that the answer already has; 0 is none (as in OpenAI and vLLM).
    pub presence_penalty: f32,
    /// Taken off the logit once for every time that the answer already has the token; 0 is none (as in OpenAI and vLLM).
    pub frequency_penalty: f32,
    pub seed: u64,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            seed: 0,
        }
    }
}

/// A sampling parameter outside its range.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{field} must be {expected}, found {value}")]
pub struct ParamError {
    pub field: &'static str,
    pub value: f32,
    pub expected: &'static str,
}

impl SamplingParams {
    /// # Errors
    /// The first field that is outside its range.
    pub fn validate(&self) -> Result<(), ParamError> {
        let check = |field, value: f32, expected, ok: bool| {
            if ok { Ok(()) } else { Err(ParamError { field, value, expected }) }
        };
        let at_least = |x: f32, low: f32| x.is_finite() && x >= low;
        let penalty = "between -2 and 2";
        check("temperature", self.temperature, "0 or more", at_least(self.temperature, 0.0))?;
        check("top_p", self.top_p, "above 0, at most 1", self.top_p > 0.0 && self.top_p <= 1.0)?;
        check("min_p", self.min_p, "between 0 and 1", (0.0..=1.0).contains(&self.min_p))?;
        let repetition = self.repetition_penalty;
        check("repetition_penalty", repetition, "above 0", repetition.is_finite() && repetition > 0.0)?;
        check("presence_penalty", self.presence_penalty, penalty, (-2.0..=2.0).contains(&self.presence_penalty))?;
        check("frequency_penalty", self.frequency_penalty, penalty, (-2.0..=2.0).contains(&self.frequency_penalty))
    }

    /// Whether the tokens seen so far matter.
    pub fn has_penalty(&self) -> bool {
        self.repetition_penalty != 1.0 || self.presence_penalty != 0.0 || self.frequency_penalty != 0.0
    }

    /// Whether a token is the likeliest, or drawn from all by their weights.
    pub(crate) fn draws_from_all(&self) -> bool {
        let cuts = self.top_k > 0 || self.top_p < 1.0 || self.min_p > 0.0;
        !self.has_penalty() && (self.temperature == 0.0 || !cuts)
    }

    /// What logits are multiplied by.
    pub(crate) fn scale(&self) -> f64 {
        1.0 / f64::from(self.temperature)
    }
}

/// Logits that no token can be chosen from.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
pub enum SampleError {
    #[error("the logit of token {token} is {value}")]
    NotANumber { token: u32, value: f32 },
    #[error("every token is ruled out: all logits are -inf")]
    NothingLeft,
    #[error("expected {expected} logits, found {found}")]
    WrongLength { expected: usize, found: usize },
}

/// The tokens that a sequence has seen, as the penalties need them. Without penalties it can stay empty.
#[derive(Clone, Debug, Default)]
pub struct History {
    /// token -> times in the answer; a token of the prompt alone has 0.
    seen: HashMap<u32, u32>,
}

impl History {
    /// A history with room for `tokens` different ones, so that it never grows while generating.
    pub fn with_capacity(tokens: usize) -> Self {
        Self { seen: HashMap::with_capacity(tokens) }
    }

    /// Tokens of the prompt: they count for the repetition penalty only.
    pub fn add_prompt(&mut self, tokens: &[u32]) {
        for token in tokens {
            self.seen.entry(*token).or_insert(0);
        }
    }

    /// A token of the answer.
    pub fn add_generated(&mut self, token: u32) {
        *self.seen.entry(token).or_insert(0) += 1;
    }

    pub fn clear(&mut self) {
        self.seen.clear();
    }
}

/// A token that is still in the running.
#[derive(Clone, Copy, Debug)]
struct Candidate {
    logit: f32,
    token: u32,
    /// exp((logit - highest) / temperature) in units of 1 / `ONE`.
    weight: u64,
}

/// Most likely first, then lower id first.
fn by_rank(a: &Candidate, b: &Candidate) -> Ordering {
    // No logit is NaN here, and -0 equals 0.
    b.logit.partial_cmp(&a.logit).unwrap_or(Ordering::Equal).then(a.token.cmp(&b.token))
}

/// Tokens that may be chosen: bit `token % 32` of word `token / 32`. Those beyond its end may not.
pub type Mask = [u32];

/// Chooses tokens, for any sequences one after the other.
pub struct Sampler {
    /// Changes speed, never a token.
    isa: Isa,
    vocab: usize,
    /// The logits after penalties and mask: [vocab]. Memory that is not used is not committed.
    changed: Vec<f32>,
    room: Room,
}

#[derive(Default)]
struct Room {
    /// All that a cut may look at at once.
    candidates: Vec<Candidate>,
    /// Weights of blocks of logits.
    sums: Vec<u64>,
}

impl Sampler {
    /// A sampler for logits of `vocab` tokens.
    pub fn new(isa: Isa, vocab: usize) -> Sampler {
        let room = Room { candidates: Vec::with_capacity(vocab), sums: Vec::with_capacity(vocab.div_ceil(BLOCK)) };
        Sampler { isa, vocab, changed: Vec::with_capacity(vocab), room }
    }

    /// The token for `position`, from its `logits`: [vocab]. `params` are valid; `history` is looked at where they have penalties.
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
            return choose(self.isa, params, logits, &mut self.room, position);
        }
        // 1. penalties and mask, on a copy. What is ruled out must be a number all the same
        highest(self.isa, logits)?;
        self.changed.clear();
        self.changed.extend_from_slice(logits);
        if let Some(history) = history {
            penalise(params, &mut self.changed, history);
        }
        if let Some(mask) = mask {
            for (i, logits) in self.changed.chunks_mut(32).enumerate() {
                let allowed = mask.get(i).copied().unwrap_or(0);
                for (bit, logit) in logits.iter_mut().enumerate() {
                    *logit = if allowed >> bit & 1 == 1 { *logit } else { f32::NEG_INFINITY };
                }
            }
        }
        choose(self.isa, params, &self.changed, &mut self.room, position)
    }
}

/// How likely the model held a token: natural logarithms of probabilities, before temperature, cuts and penalties.
#[derive(Clone, Debug, PartialEq)]
pub struct Logprobs {
    /// Of the token that was chosen.
    pub chosen: f64,
    /// The likeliest tokens, best first.
    pub top: Vec<(u32, f64)>,
}

impl Logprobs {
    /// Of `token` and the `top` likeliest, from logits that a token was chosen from.
    pub fn of(isa: Isa, logits: &[f32], token: u32, top: usize) -> Logprobs {
        let highest = draw::highest(isa, logits).0;
        let total = draw::total(isa, logits, highest, 1.0);
        let log_total = libm::log(total as f64 / ONE);
        let of = |logit: f32| f64::from(logit) - f64::from(highest) - log_total;
        let mut best = Vec::new();
        if top > 0 {
            keep_top_k(&mut best, logits, top);
            best.sort_unstable_by(by_rank);
        }
        let top = best.iter().map(|c| (c.token, of(c.logit))).collect();
        Logprobs { chosen: of(logits[token as usize]), top }
    }
}

fn penalise(params: &SamplingParams, logits: &mut [f32], history: &History) {
    // Each token is changed on its own, so the order in which the map gives them does not matter.
    for (token, count) in &history.seen {
        let Some(logit) = logits.get_mut(*token as usize) else { continue };
        *logit = if *logit > 0.0 { *logit / params.repetition_penalty } else { *logit * params.repetition_penalty };
        if *count > 0 {
            *logit -= *count as f32 * params.frequency_penalty;
            *logit -= params.presence_penalty;
        }
    }
}

fn choose(
    isa: Isa,
    params: &SamplingParams,
    logits: &[f32],
    room: &mut Room,
    position: u64,
) -> Result<u32, SampleError> {
    let highest = highest(isa, logits)?;
    if params.temperature == 0.0 {
        let token = logits.iter().position(|x| *x == highest);
        return token.map(|t| t as u32).ok_or(SampleError::NothingLeft);
    }

    // 2. temperature, 3. top-k
    let scale = params.scale();
    let k = params.top_k as usize;
    let cuts_top_k = k > 0 && k < logits.len();
    if !cuts_top_k && params.top_p >= 1.0 && params.min_p == 0.0 {
        return draw_from_all(isa, params.seed, logits, highest, scale, &mut room.sums, position);
    }
    let candidates = &mut room.candidates;
    if cuts_top_k {
        keep_top_k(candidates, logits, k);
    } else {
        candidates.clear();
        candidates.extend((0..).zip(logits).map(|(token, logit)| Candidate { logit: *logit, token, weight: 0 }));
    }
    let (mut chosen, mut weights) = ([0.0; 256], [0; 256]);
    for group in candidates.chunks_mut(chosen.len()) {
        let n = group.len();
        chosen.iter_mut().zip(&*group).for_each(|(logit, candidate)| *logit = candidate.logit);
        draw::weights(isa, &chosen[..n], highest, scale, &mut weights[..n]);
        group.iter_mut().zip(weights).for_each(|(candidate, weight)| candidate.weight = weight);
    }

    // 4. top-p, 5. min-p
    if params.top_p < 1.0 {
        keep_nucleus(candidates, f64::from(params.top_p));
    }
    if params.min_p > 0.0 {
        let lightest = f64::from(params.min_p) * ONE;
        candidates.retain(|c| c.weight as f64 >= lightest);
    }

    // 6. draw: by weight, in the order of ids
    candidates.sort_unstable_by_key(|c| c.token);
    let mut below = drawn(params.seed, position, candidates.iter().map(|c| c.weight).sum());
    let hit = candidates.iter().find(|c| falls_on(c.weight, &mut below));
    hit.map(|c| c.token).ok_or(SampleError::NothingLeft)
}

/// A number below `total`, each as likely as any other.
fn drawn(seed: u64, position: u64, total: u64) -> u64 {
    ((u128::from(uniform(seed, position)) * u128::from(total)) >> 53) as u64
}

/// Whether what is left of a drawn number is within this weight; else it is taken off.
fn falls_on(weight: u64, below: &mut u64) -> bool {
    let hit = *below < weight;
    *below -= if hit { 0 } else { weight };
    hit
}

/// The draw where nothing is cut off: a block's weights are looked at one by one where it is the block that is hit.
fn draw_from_all(
    isa: Isa,
    seed: u64,
    logits: &[f32],
    highest: f32,
    scale: f64,
    sums: &mut Vec<u64>,
    position: u64,
) -> Result<u32, SampleError> {
    sums.clear();
    sums.extend(logits.chunks(BLOCK).map(|block| draw::total(isa, block, highest, scale)));
    let hit = block_hit(seed, position, sums)?;
    let from = hit.block * BLOCK;
    let logits = &logits[from..logits.len().min(from + BLOCK)];
    token_hit(isa, logits, highest, scale, hit)
}

/// A block that a drawn number falls on, and how far into its weights.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Hit {
    pub block: usize,
    below: u64,
}

/// Draws a block of logits by the sums of their weights.
pub(crate) fn block_hit(seed: u64, position: u64, sums: &[u64]) -> Result<Hit, SampleError> {
    let mut below = drawn(seed, position, sums.iter().sum());
    let block = sums.iter().position(|sum| falls_on(*sum, &mut below)).ok_or(SampleError::NothingLeft)?;
    Ok(Hit { block, below })
}

/// The token that is hit, of the block's `logits`.
pub(crate) fn token_hit(
    isa: Isa,
    logits: &[f32],
    highest: f32,
    scale: f64,
    Hit { block, mut below }: Hit,
) -> Result<u32, SampleError> {
    let mut weights = [0; BLOCK];
    let weights = &mut weights[..logits.len()];
    draw::weights(isa, logits, highest, scale, weights);
    let at = weights.iter().position(|weight| falls_on(*weight, &mut below)).ok_or(SampleError::NothingLeft)?;
    Ok((block * BLOCK + at) as u32)
}

/// Leaves the fewest of the most likely `candidates` whose weights reach the fraction `p` of all weights.
fn keep_nucleus(candidates: &mut Vec<Candidate>, p: f64) {
    let total: u64 = candidates.iter().map(|c| c.weight).sum();
    let mut need = ((p * total as f64) as u64).clamp(1, total);
    // All tokens lighter than this weigh less than 1 - p together, so the nucleus needs none of them.
    let lightest = (total - need) / candidates.len() as u64;
    candidates.retain(|c| c.weight >= lightest);

    // Halve the range that the nucleus ends in. Sums are exact, so the halves need no order inside.
    let (mut from, mut to) = (0, candidates.len());
    while to - from > 1 {
        let half = (to - from) / 2;
        candidates[from..to].select_nth_unstable_by(half, by_rank);
        let better: u64 = candidates[from..from + half].iter().map(|c| c.weight).sum();
        if better >= need {
            to = from + half;
        } else {
            need -= better;
            from += half;
        }
    }
    candidates.truncate(from + 1);
}

/// The highest logit; NaN and +inf are errors, as is a vocabulary of -inf.
fn highest(isa: Isa, logits: &[f32]) -> Result<f32, SampleError> {
    let (highest, has_nan) = draw::highest(isa, logits);
    if has_nan || highest == f32::INFINITY {
        let bad = logits.iter().position(|x| x.is_nan() || *x == f32::INFINITY).unwrap_or(0);
        return Err(SampleError::NotANumber { token: bad as u32, value: logits[bad] });
    }
    if highest == f32::NEG_INFINITY { Err(SampleError::NothingLeft) } else { Ok(highest) }
}

/// Candidates held while looking for the k best: enough that throwing out the worse ones is rare.
fn top_k_room(k: usize) -> usize {
    4 * k + 1024
}

/// Leaves the `k` best of `logits` in `candidates`, in no order.
fn keep_top_k(candidates: &mut Vec<Candidate>, logits: &[f32], k: usize) {
    let room = top_k_room(k).min(logits.len());
    candidates.clear();
    // Once k candidates are known, a later token needs more than the worst of them has: an equal logit loses to the lower id.
    let mut bar = f32::NEG_INFINITY;
    let mut base = 0;
    for chunk in logits.chunks(16) {
        if chunk.iter().fold(false, |any, x| any | (*x > bar)) {
            for (i, logit) in chunk.iter().enumerate() {
                if *logit > bar {
                    if candidates.len() == room {
                        candidates.select_nth_unstable_by(k - 1, by_rank);
                        candidates.truncate(k);
                        bar = candidates[k - 1].logit;
                        if *logit <= bar {
                            continue;
                        }
                    }
                    candidates.push(Candidate { logit: *logit, token: (base + i) as u32, weight: 0 });
                }
            }
        }
        base += chunk.len();
    }
    if candidates.len() > k {
        candidates.select_nth_unstable_by(k - 1, by_rank);
        candidates.truncate(k);
    }
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
        let weight_of = |i: &usize| draw::weight((f64::from(logits[*i]) - highest) * scale);
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
        penalise(&params, &mut logits, &history);
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
        let found = Logprobs::of(Isa::GENERIC, &logits, 0, 3);
        assert!((found.chosen - of(0.5)).abs() < 1e-9);
        assert_eq!(found.top.iter().map(|t| t.0).collect::<Vec<_>>(), [2, 3, 0]);
        assert!(found.top.iter().all(|(token, p)| (p - of(logits[*token as usize])).abs() < 1e-9));
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
            let room = sampler.1.room.candidates.capacity();
            let token = sampler.sample(&logits, position).unwrap();
            prop_assert_eq!(token, oracle(&params, &logits, position));
            prop_assert_eq!(sampler.1.room.candidates.capacity(), room, "a step allocates nothing");
        }
    }
}
