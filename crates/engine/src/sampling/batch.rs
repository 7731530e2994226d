//! Chooses the tokens of a step, for all sequences together.
//!
//! Where a device has the logits, it is asked for the few numbers that draws need ([`super::device_draws`]). Rows that these do not decide are sampled from all logits, as are all
//! rows of a backend that cannot answer such questions. That happens on the backend's threads, each with a workspace of its own.

use std::sync::Mutex;

use sluice_backend::{Backend, DeviceSampling, Isa, Logits};

use super::device_draws::{DeviceDraws, Drawn, RowDraw};
use super::processor::ProcessorFailed;
use super::sampler::{Logprobs, SampleError, Sampler};
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
    /// The last of these.
    pub last_row: usize,
    /// Its place in the plan.
    pub scheduled: usize,
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
    device: DeviceDraws,
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
        BatchSampler { isa, workspaces, drawn, decided, device: DeviceDraws::default() }
    }

    /// Forgets the logits of the step before.
    pub fn begin_step(&mut self) {
        self.device.begin_step();
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

    /// Chooses the same tokens by what the device says, as far as that decides them. It is asked for a sequence's rows of drafted tokens, too; where each has a mask of its own,
    /// when they are reached.
    fn draw_on_device(
        &mut self,
        device: &mut dyn DeviceSampling,
        logits: Logits,
        sequences: &[Sequence],
        draws: &[Draw],
    ) {
        let generating = |draw: &Draw| {
            let s = &sequences[draw.sequence];
            s.running.as_ref().filter(|running| running.generation.processor.is_none()).map(|running| (s, running))
        };
        let new = draws.iter().filter(|draw| !self.device.has(draw.row)).filter_map(|draw| {
            let (s, running) = generating(draw)?;
            let last = if running.guide.is_some() { draw.row } else { draw.last_row };
            Some((draw.row..=last).map(move |row| row_draw(s, running, row, row - draw.row)))
        });
        let new: Vec<RowDraw> = new.flatten().collect();
        self.device.ask(self.isa, device, logits, new.into_iter());
        for (at, draw) in draws.iter().enumerate() {
            let Some((s, running)) = generating(draw) else { continue };
            let workspace = self.workspaces[0].get_mut().unwrap_or_else(|e| e.into_inner());
            let (row, history, mask) = (row_draw(s, running, draw.row, 0), running.history.as_ref(), mask_of(running));
            if let Some(drawn) = self.device.draw(row, history, mask, &mut workspace.sampler) {
                self.drawn[at] = drawn;
                self.decided[at] = true;
            }
        }
    }
}

/// The draw of a token that is `ahead` tokens behind a sequence's next one.
fn row_draw<'a>(s: &Sequence, running: &'a Running, row: usize, ahead: usize) -> RowDraw<'a> {
    let Generation { sampling: params, logprobs, .. } = &running.generation;
    let (position, is_masked) = ((s.tokens.len() + ahead) as u64, mask_of(running).is_some());
    RowDraw { row, params, position, logprobs: *logprobs, is_masked }
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
