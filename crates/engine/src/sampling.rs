//! The tokens of a step: all sequences side by side. Where a device has the logits, what a draw needs of them is asked for; rows that this does not decide, and all rows where
//! nobody looks at them there, are looked at as a whole, on the backend's threads, each with a workspace that all its sequences share.

use std::sync::Mutex;

use sluice_backend::{Backend, DRAWN_TOGETHER, DeviceSampling, Isa, Logits, MOST_RANKS, Ranked, Scaled};

use crate::constraint::Guide;
use crate::sampler::{Hit, Logprobs, Needs, SampleError, Sampler, block_hit, token_hit};
use crate::sequence::{Generation, Running, Sequence};

/// A sequence whose next token is due, and which row of the logits it is drawn from.
#[derive(Clone, Copy, Debug)]
pub struct Draw {
    pub sequence: usize,
    pub row: usize,
}

/// What came of a draw: a token, and how likely it was where that is wanted.
#[derive(Clone, Debug)]
pub struct Drawn {
    pub token: Result<u32, SampleError>,
    pub logprobs: Option<Logprobs>,
}

const UNDECIDED: Drawn = Drawn { token: Err(SampleError::NothingLeft), logprobs: None };

struct Workspace {
    sampler: Sampler,
    /// (Place among the draws, what came of it)
    drawn: Vec<(usize, Drawn)>,
}

/// Draws the tokens of steps.
pub struct Sampling {
    isa: Isa,
    /// One for each thread, which alone locks it.
    workspaces: Vec<Mutex<Workspace>>,
    drawn: Vec<Drawn>,
    /// The draws whose tokens are known.
    decided: Vec<bool>,
    near: Near,
}

/// What is asked of a device that has the logits.
#[derive(Default)]
struct Near {
    asked: Vec<Asked>,
    scaled: Vec<Scaled>,
    ranked: Vec<Ranked>,
    /// Rows and blocks that are hit.
    blocks: Vec<(usize, usize)>,
}

/// What is asked of a draw's row: places in the lists of [`Near`].
struct Asked {
    /// Among the draws.
    at: usize,
    needs: Needs,
    highest: f32,
    /// Where its weights are summed, at its temperature.
    weights: Option<usize>,
    /// And at temperature 1, for log-probabilities.
    plain: Option<usize>,
    best: Option<usize>,
    hit: Option<(usize, Hit)>,
    /// What all weigh: at its temperature and at 1.
    totals: [Option<u64>; 2],
    /// The logit of the token that was chosen.
    logit: f32,
}

impl Sampling {
    /// For logits of `vocabulary` tokens and at most `most` sequences, on so many threads.
    pub fn new(isa: Isa, threads: usize, vocabulary: usize, most: usize) -> Sampling {
        let workspace = || Workspace { sampler: Sampler::new(isa, vocabulary), drawn: Vec::with_capacity(most) };
        let workspaces = (0..threads).map(|_| Mutex::new(workspace())).collect();
        let (drawn, decided) = (Vec::with_capacity(most), Vec::with_capacity(most));
        Sampling { isa, workspaces, drawn, decided, near: Near::default() }
    }

    /// A token for each draw, in their order.
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
        if let Some(drawing) = backend.drawing() {
            self.draw_near(drawing, logits, sequences, draws);
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
            let token = workspace.sampler.sample(params, logits, history, mask_of(running), s.tokens.len() as u64);
            let wanted = running.generation.logprobs;
            let logprobs = wanted.zip(token.as_ref().ok()).map(|(top, token)| Logprobs::of(isa, logits, *token, top));
            workspace.drawn.push((at, Drawn { token, logprobs }));
        });
        for workspace in &mut self.workspaces {
            let workspace = workspace.get_mut().unwrap_or_else(|e| e.into_inner());
            workspace.drawn.drain(..).for_each(|(at, drawn)| self.drawn[at] = drawn);
        }
        &mut self.drawn
    }

    /// The same tokens by what looks at logits where they lie, as far as that decides them.
    fn draw_near(&mut self, drawing: &mut dyn DeviceSampling, logits: Logits, sequences: &[Sequence], draws: &[Draw]) {
        let near = &mut self.near;
        let Some(tops) = drawing.tops(logits) else { return };
        near.asked.clear();
        near.scaled.clear();
        near.ranked.clear();
        near.blocks.clear();
        // 1. What each needs. Who has nothing to choose from has it said by who looks at all
        for (at, draw) in draws.iter().enumerate() {
            let (top, Some(running)) = (tops[draw.row], &sequences[draw.sequence].running) else { continue };
            if top.logit.is_finite() {
                self.drawn[at].token = Ok(top.token);
                near.ask(at, draw.row, top.logit, running, logits.vocabulary);
            }
        }
        // 2. Sums of weights, and what is hit of them
        if !near.scaled.is_empty() {
            let sums = drawing.sums(logits, &near.scaled);
            let of = |place: usize| {
                let blocks = logits.vocabulary.div_ceil(DRAWN_TOGETHER);
                &sums[place * blocks..(place + 1) * blocks]
            };
            for asked in &mut near.asked {
                let draw = &draws[asked.at];
                asked.totals = [asked.weights, asked.plain].map(|place| place.map(|place| of(place).iter().sum()));
                if let (Needs::Sums, Some(place), Some(running)) =
                    (asked.needs, asked.weights, &sequences[draw.sequence].running)
                {
                    let position = sequences[draw.sequence].tokens.len() as u64;
                    // The likeliest token alone weighs something.
                    let hit = block_hit(running.generation.sampling.seed, position, of(place)).ok();
                    asked.hit = hit.map(|hit| (near.blocks.len(), hit));
                    near.blocks.extend(hit.map(|hit| (draw.row, hit.block)));
                }
            }
        }
        if !near.blocks.is_empty() {
            let found = drawing.blocks(logits, &near.blocks);
            for asked in &mut near.asked {
                let Some((place, hit)) = asked.hit else { continue };
                let from = hit.block * DRAWN_TOGETHER;
                let block = &found[place * DRAWN_TOGETHER..][..(logits.vocabulary - from).min(DRAWN_TOGETHER)];
                let scale = asked.weights.map_or(1.0, |place| near.scaled[place].scale);
                let token = token_hit(self.isa, block, asked.highest, scale, hit);
                asked.logit = token.as_ref().map_or(asked.highest, |token| block[*token as usize - from]);
                self.drawn[asked.at].token = token;
            }
        }
        // 3. The likeliest, and what is drawn from them
        let best = if near.ranked.is_empty() { &[] } else { drawing.best(logits, &near.ranked) };
        for asked in &near.asked {
            let sequence = &sequences[draws[asked.at].sequence];
            let (drawn, Some(running)) = (&mut self.drawn[asked.at], &sequence.running) else { continue };
            let best = asked.best.map(|place| &best[place]);
            // There are more than could be brought.
            if best.is_some_and(|best| best.found.is_empty()) {
                continue;
            }
            let mut logit = asked.logit;
            if let (Needs::Best { .. }, Some(best)) = (asked.needs, best) {
                let workspace = self.workspaces[0].get_mut().unwrap_or_else(|e| e.into_inner());
                let (params, history) = (&running.generation.sampling, running.history.as_ref());
                let (mask, position) = (mask_of(running), sequence.tokens.len() as u64);
                let token = workspace.sampler.sample_best(params, best, asked.totals[0], history, mask, position);
                let Some(found) = best.found.iter().find(|top| Some(top.token) == token) else { continue };
                drawn.token = Ok(found.token);
                logit = found.logit;
            }
            let wanted = running.generation.logprobs.zip(asked.totals[1]);
            drawn.logprobs = wanted.map(|(top, total)| Logprobs::of_best(logit, asked.highest, total, best, top));
            self.decided[asked.at] = true;
        }
    }
}

impl Near {
    /// Asks for what a draw needs, whose row has this `highest` logit; where that is all of it, for nothing.
    fn ask(&mut self, at: usize, row: usize, highest: f32, running: &Running, vocabulary: usize) {
        let Generation { sampling, logprobs, .. } = &running.generation;
        let needs = Needs::of(sampling, vocabulary, mask_of(running).is_some());
        let listed = logprobs.unwrap_or(0);
        if needs == Needs::All || listed > MOST_RANKS {
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
        self.asked.push(Asked { at, needs, highest, weights, plain, best, hit, totals, logit });
    }
}

fn mask_of(running: &Running) -> Option<&[u32]> {
    running.guide.as_ref().and_then(Guide::mask)
}
