//! The tokens of a step: all sequences side by side, on the backend's threads, each with a workspace that all its sequences share.

use std::sync::Mutex;

use sluice_backend::{Backend, Isa, Logits};

use crate::constraint::Guide;
use crate::sampler::{Logprobs, SampleError, Sampler};
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
}

impl Sampling {
    /// For logits of `vocabulary` tokens and at most `most` sequences, on so many threads.
    pub fn new(isa: Isa, threads: usize, vocabulary: usize, most: usize) -> Sampling {
        let workspace = || Workspace { sampler: Sampler::new(isa, vocabulary), drawn: Vec::with_capacity(most) };
        let workspaces = (0..threads).map(|_| Mutex::new(workspace())).collect();
        Sampling { isa, workspaces, drawn: Vec::with_capacity(most) }
    }

    /// A token for each draw, in their order.
    pub fn draw(
        &mut self,
        backend: &mut dyn Backend,
        logits: Logits,
        sequences: &[Sequence],
        draws: &[Draw],
    ) -> &mut [Drawn] {
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
}
