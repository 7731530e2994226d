//! Chooses the tokens of a step, for all sequences together.
//!
//! Where a device has the logits, it is asked for the few numbers that a draw needs. Rows that these do not decide are sampled from all logits, as are all rows of a
//! backend that cannot answer such questions. That happens on the backend's threads, each with a workspace of its own.

use std::sync::Mutex;

use sluice_backend::{Backend, DRAWN_TOGETHER, DeviceSampling, Isa, Logits, MAX_RANKS, Ranked, Scaled};

use super::candidates::Needs;
use super::processor::ProcessorFailed;
use super::sampler::{Hit, Logprobs, SampleError, Sampler, block_hit, token_hit};
use crate::constraint::Guide;
use crate::schedule::sequence::{Generation, Running, Sequence};

/// A sequence whose next token is due.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Draw {
    /// Its index.
    pub sequence: usize,
    /// Its row of the logits.
    pub row: usize,
    /// The first row that it has in this step. Those behind it are of drafted tokens.
    pub first_row: usize,
    /// Its place in the plan.
    pub scheduled: usize,
}

/// The result of a draw.
#[derive(Clone, Debug)]
pub(crate) struct Drawn {
    pub token: Result<u32, SampleError>,
    /// If the generation asked for them.
    pub logprobs: Option<Logprobs>,
}

const UNDECIDED: Drawn = Drawn { token: Err(SampleError::NothingLeft), logprobs: None };

/// What a thread needs to sample.
struct Workspace {
    sampler: Sampler,
    /// Logits that a processor changes: `[vocabulary]`. Empty until there is one.
    changed: Vec<f32>,
    /// (index of the draw, its result)
    drawn: Vec<(usize, Drawn)>,
}

/// Chooses the tokens of steps.
pub(crate) struct BatchSampler {
    isa: Isa,
    /// One for each thread, which alone locks it.
    workspaces: Vec<Mutex<Workspace>>,
    /// `[draws]`
    drawn: Vec<Drawn>,
    /// The draws whose tokens are known: `[draws]`.
    decided: Vec<bool>,
    questions: DeviceQuestions,
}

/// Questions to a device that has the logits, by kind.
#[derive(Default)]
struct DeviceQuestions {
    rows: Vec<RowQuestions>,
    scaled: Vec<Scaled>,
    ranked: Vec<Ranked>,
    /// (row, block) of blocks that were drawn.
    blocks: Vec<(usize, usize)>,
}

/// The questions about a draw's row: indices into the lists of [`DeviceQuestions`].
struct RowQuestions {
    /// Index of the draw.
    draw: usize,
    needs: Needs,
    highest: f32,
    /// The sum of its weights at its temperature.
    weights: Option<usize>,
    /// The sum of its weights at temperature 1, for log-probabilities.
    plain: Option<usize>,
    /// Its likeliest tokens.
    best: Option<usize>,
    /// The block that was drawn.
    hit: Option<(usize, Hit)>,
    /// Sums of all weights: at its temperature, and at 1.
    totals: [Option<u64>; 2],
    /// The logit of the chosen token.
    logit: f32,
}

impl BatchSampler {
    /// For logits of `vocabulary` tokens and `max` sequences at most, on `threads` threads.
    pub fn new(isa: Isa, threads: usize, vocabulary: usize, max: usize) -> BatchSampler {
        let workspace = || Workspace {
            sampler: Sampler::new(isa, vocabulary),
            changed: Vec::new(),
            drawn: Vec::with_capacity(max),
        };
        let workspaces = (0..threads).map(|_| Mutex::new(workspace())).collect();
        let (drawn, decided) = (Vec::with_capacity(max), Vec::with_capacity(max));
        BatchSampler { isa, workspaces, drawn, decided, questions: DeviceQuestions::default() }
    }

    /// Chooses a token for each draw. Returns them in the same order.
    pub fn draw(
        &mut self,
        backend: &mut dyn Backend,
        logits: Logits,
        sequences: &[Sequence],
        draws: &[Draw],
    ) -> &mut [Drawn] {
        self.drawn.clear();
        self.drawn.resize(draws.len(), UNDECIDED);
        self.decided.clear();
        self.decided.resize(draws.len(), false);
        if let Some(device) = backend.device_sampling() {
            self.draw_on_device(device, logits, sequences, draws);
        }
        if self.decided.iter().all(|decided| *decided) {
            return &mut self.drawn;
        }
        let (isa, workspaces, decided) = (self.isa, &self.workspaces, &self.decided);
        backend.each_logits(logits, &|row, thread, logits| {
            let Some((at, draw)) = draws.iter().enumerate().find(|(at, d)| d.row == row && !decided[*at]) else {
                return;
            };
            let s = &sequences[draw.sequence];
            let Some(running) = &s.running else { return };
            let mut workspace = workspaces[thread].lock().unwrap_or_else(|e| e.into_inner());
            let (params, history) = (&running.generation.sampling, running.history.as_ref());
            let Workspace { sampler, changed, drawn } = &mut *workspace;
            let token = processed(&running.generation, &s.tokens, logits, changed)
                .and_then(|logits| sampler.sample(params, logits, history, mask_of(running), s.tokens.len() as u64));
            let wanted = running.generation.logprobs;
            let logprobs = wanted.zip(token.as_ref().ok()).map(|(top, token)| Logprobs::new(isa, logits, *token, top));
            drawn.push((at, Drawn { token, logprobs }));
        });
        for workspace in &mut self.workspaces {
            let workspace = workspace.get_mut().unwrap_or_else(|e| e.into_inner());
            workspace.drawn.drain(..).for_each(|(at, drawn)| self.drawn[at] = drawn);
        }
        &mut self.drawn
    }

    /// Chooses the same tokens by questions to the device that has the logits, as far as these decide them.
    fn draw_on_device(
        &mut self,
        device: &mut dyn DeviceSampling,
        logits: Logits,
        sequences: &[Sequence],
        draws: &[Draw],
    ) {
        let questions = &mut self.questions;
        let Some(tops) = device.tops(logits) else { return };
        questions.rows.clear();
        questions.scaled.clear();
        questions.ranked.clear();
        questions.blocks.clear();
        // 1. Collect what each draw needs. Rows without a finite logit are left to the other way, which reports them
        for (at, draw) in draws.iter().enumerate() {
            let (top, Some(running)) = (tops[draw.row], &sequences[draw.sequence].running) else { continue };
            if top.logit.is_finite() {
                self.drawn[at].token = Ok(top.token);
                questions.add(at, draw.row, top.logit, running, logits.vocabulary);
            }
        }
        // 2. Ask for sums of weights, and draw blocks by them
        if !questions.scaled.is_empty() {
            let sums = device.sums(logits, &questions.scaled);
            let sums_of = |place: usize| {
                let blocks = logits.vocabulary.div_ceil(DRAWN_TOGETHER);
                &sums[place * blocks..(place + 1) * blocks]
            };
            for question in &mut questions.rows {
                let draw = &draws[question.draw];
                question.totals =
                    [question.weights, question.plain].map(|place| place.map(|place| sums_of(place).iter().sum()));
                if let (Needs::Sums, Some(place), Some(running)) =
                    (question.needs, question.weights, &sequences[draw.sequence].running)
                {
                    let position = sequences[draw.sequence].tokens.len() as u64;
                    // Without a hit, only the likeliest token has a weight.
                    let hit = block_hit(running.generation.sampling.seed, position, sums_of(place)).ok();
                    question.hit = hit.map(|hit| (questions.blocks.len(), hit));
                    questions.blocks.extend(hit.map(|hit| (draw.row, hit.block)));
                }
            }
        }
        if !questions.blocks.is_empty() {
            let found = device.blocks(logits, &questions.blocks);
            for question in &mut questions.rows {
                let Some((place, hit)) = question.hit else { continue };
                let from = hit.block * DRAWN_TOGETHER;
                let block = &found[place * DRAWN_TOGETHER..][..(logits.vocabulary - from).min(DRAWN_TOGETHER)];
                let scale = question.weights.map_or(1.0, |place| questions.scaled[place].scale);
                let token = token_hit(self.isa, block, question.highest, scale, hit);
                question.logit = token.as_ref().map_or(question.highest, |token| block[*token as usize - from]);
                self.drawn[question.draw].token = token;
            }
        }
        // 3. Ask for the likeliest tokens, and draw from them
        let best = if questions.ranked.is_empty() { &[] } else { device.best(logits, &questions.ranked) };
        for question in &questions.rows {
            let sequence = &sequences[draws[question.draw].sequence];
            let (drawn, Some(running)) = (&mut self.drawn[question.draw], &sequence.running) else { continue };
            let best = question.best.map(|place| &best[place]);
            // More tokens are needed than the device returns.
            if best.is_some_and(|best| best.found.is_empty()) {
                continue;
            }
            let mut logit = question.logit;
            if let (Needs::Best { .. }, Some(best)) = (question.needs, best) {
                let workspace = self.workspaces[0].get_mut().unwrap_or_else(|e| e.into_inner());
                let (params, history) = (&running.generation.sampling, running.history.as_ref());
                let (mask, position) = (mask_of(running), sequence.tokens.len() as u64);
                let token = workspace.sampler.sample_best(params, best, question.totals[0], history, mask, position);
                let Some(found) = best.found.iter().find(|top| Some(top.token) == token) else { continue };
                drawn.token = Ok(found.token);
                logit = found.logit;
            }
            let wanted = running.generation.logprobs.zip(question.totals[1]);
            drawn.logprobs = wanted.map(|(top, total)| Logprobs::from_best(logit, question.highest, total, best, top));
            self.decided[question.draw] = true;
        }
    }
}

impl DeviceQuestions {
    /// Adds the questions of a draw, whose row has this `highest` logit; none if it needs all logits.
    fn add(&mut self, draw: usize, row: usize, highest: f32, running: &Running, vocabulary: usize) {
        let Generation { sampling, logprobs, processor, .. } = &running.generation;
        let needs = Needs::new(sampling, vocabulary, mask_of(running).is_some());
        let listed = logprobs.unwrap_or(0);
        if needs == Needs::All || listed > MAX_RANKS || processor.is_some() {
            return;
        }
        let (ranks, sums) = match needs {
            Needs::Best { ranks, total } => (ranks, total),
            _ => (0, needs == Needs::Sums),
        };
        let mut summed = |scale| {
            self.scaled.push(Scaled { row, highest, scale });
            self.scaled.len() - 1
        };
        let weights = sums.then(|| summed(sampling.scale()));
        let plain = logprobs.map(|_| summed(1.0));
        let rank = ranks.max(listed);
        let best = (rank > 0).then(|| {
            self.ranked.push(Ranked { row, rank });
            self.ranked.len() - 1
        });
        let (hit, totals, logit) = (None, [None; 2], highest);
        self.rows.push(RowQuestions { draw, needs, highest, weights, plain, best, hit, totals, logit });
    }
}

/// The logits after the generation's processor, if it has one, in `changed`.
fn processed<'a>(
    generation: &Generation,
    tokens: &[u32],
    logits: &'a [f32],
    changed: &'a mut Vec<f32>,
) -> Result<&'a [f32], SampleError> {
    let Some(processor) = &generation.processor else { return Ok(logits) };
    changed.clear();
    changed.extend_from_slice(logits);
    processor.process(tokens, changed).map_err(|ProcessorFailed| SampleError::Processor)?;
    Ok(changed)
}

fn mask_of(running: &Running) -> Option<&[u32]> {
    running.guide.as_ref().and_then(Guide::mask)
}
