//! The tokens of a step: all sequences side by side, on the backend's threads, each with a workspace that all its sequences share.

use std::sync::Mutex;

use sluice_backend::{Backend, DRAWN_TOGETHER, Drawing, Isa, Logits, Scaled, Top};

use crate::constraint::Guide;
use crate::sampler::{Hit, Logprobs, SampleError, Sampler, block_hit, token_hit};
use crate::sequence::Sequence;

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
    near: Near,
}

/// Draws by what looks at logits where they lie.
#[derive(Default)]
struct Near {
    tops: Vec<Top>,
    /// Rows with a temperature, and their places among the draws.
    scaled: Vec<Scaled>,
    places: Vec<usize>,
    hits: Vec<Hit>,
    /// Rows and blocks that are hit.
    blocks: Vec<(usize, usize)>,
}

impl Sampling {
    /// For logits of `vocabulary` tokens and at most `most` sequences, on so many threads.
    pub fn new(isa: Isa, threads: usize, vocabulary: usize, most: usize) -> Sampling {
        let workspace = || Workspace { sampler: Sampler::new(isa, vocabulary), drawn: Vec::with_capacity(most) };
        let workspaces = (0..threads).map(|_| Mutex::new(workspace())).collect();
        Sampling { isa, workspaces, drawn: Vec::with_capacity(most), near: Near::default() }
    }

    /// A token for each draw, in their order.
    pub fn draw(
        &mut self,
        backend: &mut dyn Backend,
        logits: Logits,
        sequences: &[Sequence],
        draws: &[Draw],
    ) -> &mut [Drawn] {
        if let Some(drawing) = backend.drawing()
            && self.draw_near(drawing, logits, sequences, draws).is_some()
        {
            return &mut self.drawn;
        }
        let (isa, workspaces) = (self.isa, &self.workspaces);
        backend.each_logits(logits, &|row, thread, logits| {
            let Some((at, draw)) = draws.iter().enumerate().find(|(_, d)| d.row == row) else { return };
            let s = &sequences[draw.sequence];
            let Some(running) = &s.running else { return };
            let mut workspace = workspaces[thread].lock().unwrap_or_else(|e| e.into_inner());
            let (params, history) = (&running.generation.sampling, running.history.as_ref());
            let mask = running.guide.as_ref().and_then(Guide::mask);
            let token = workspace.sampler.sample(params, logits, history, mask, s.tokens.len() as u64);
            let wanted = running.generation.logprobs;
            let logprobs = wanted.zip(token.as_ref().ok()).map(|(top, token)| Logprobs::of(isa, logits, *token, top));
            workspace.drawn.push((at, Drawn { token, logprobs }));
        });
        self.drawn.clear();
        self.drawn.resize(draws.len(), Drawn { token: Err(SampleError::NothingLeft), logprobs: None });
        for workspace in &mut self.workspaces {
            let workspace = workspace.get_mut().unwrap_or_else(|e| e.into_inner());
            workspace.drawn.drain(..).for_each(|(at, drawn)| self.drawn[at] = drawn);
        }
        &mut self.drawn
    }

    /// The same tokens by what looks at logits where they lie; `None` where that is not enough.
    fn draw_near(
        &mut self,
        drawing: &mut dyn Drawing,
        logits: Logits,
        sequences: &[Sequence],
        draws: &[Draw],
    ) -> Option<()> {
        let Near { tops, scaled, places, hits, blocks } = &mut self.near;
        let plain = |draw: &Draw| {
            let running = sequences[draw.sequence].running.as_ref()?;
            let params = &running.generation.sampling;
            let masked = running.guide.as_ref().and_then(Guide::mask).is_some();
            (params.draws_from_all() && !masked && running.generation.logprobs.is_none()).then_some(params)
        };
        if draws.iter().any(|draw| plain(draw).is_none()) {
            return None;
        }
        tops.clear();
        tops.extend(drawing.tops(logits)?);
        // What is no number, and what has nothing to choose from, is somebody else's to say.
        let sound = |draw: &Draw| tops[draw.row].logit.is_finite();
        if !draws.iter().all(sound) {
            return None;
        }
        self.drawn.clear();
        scaled.clear();
        places.clear();
        hits.clear();
        blocks.clear();
        for (at, draw) in draws.iter().enumerate() {
            let (top, params) = (tops[draw.row], plain(draw)?);
            self.drawn.push(Drawn { token: Ok(top.token), logprobs: None });
            if params.temperature > 0.0 {
                scaled.push(Scaled { row: draw.row, highest: top.logit, scale: params.scale() });
                places.push(at);
            }
        }
        if scaled.is_empty() {
            return Some(());
        }
        let totals = drawing.sums(logits, scaled).chunks_exact(logits.vocabulary.div_ceil(DRAWN_TOGETHER));
        for ((sums, at), of) in totals.zip(&*places).zip(&*scaled) {
            let (draw, seed) = (&draws[*at], plain(&draws[*at])?.seed);
            // The likeliest token alone weighs something.
            let hit = block_hit(seed, sequences[draw.sequence].tokens.len() as u64, sums).ok()?;
            blocks.push((of.row, hit.block));
            hits.push(hit);
        }
        let found = drawing.blocks(logits, blocks).chunks_exact(DRAWN_TOGETHER);
        for (((logits_there, at), of), hit) in found.zip(&*places).zip(&*scaled).zip(&*hits) {
            let there = (logits.vocabulary - hit.block * DRAWN_TOGETHER).min(DRAWN_TOGETHER);
            self.drawn[*at].token = token_hit(self.isa, &logits_there[..there], of.highest, of.scale, *hit);
        }
        Some(())
    }
}
