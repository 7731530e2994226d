//! Draws tokens for drafts from the logits of an MTP head.

use std::sync::Mutex;

use sluice_backend::{Backend, Isa, Logits};

use super::device_draws::{DeviceDraws, RowDraw};
use super::params::SamplingParams;
use super::sampler::{Logprobs, Sampler};

/// A row of logits to draw from.
#[derive(Clone, Debug)]
pub(crate) struct DraftRow {
    /// The caller's number for the row.
    pub of: usize,
    /// How tokens are chosen.
    pub params: SamplingParams,
    /// The position of the token.
    pub position: u64,
    /// The token, and its probability at temperature 1, once it is drawn.
    pub drawn: Option<(u32, f64)>,
}

impl DraftRow {
    /// Its draw from this row of the logits.
    fn draw(&self, row: usize) -> RowDraw<'_> {
        RowDraw { row, params: &self.params, position: self.position, logprobs: Some(0), is_masked: false }
    }
}

/// Draws for several rows at once.
pub(crate) struct DraftSampler {
    isa: Isa,
    /// One for each thread, which alone locks it.
    samplers: Vec<Mutex<Sampler>>,
    /// One for each row of the logits.
    rows: Vec<Mutex<DraftRow>>,
    device: DeviceDraws,
}

impl DraftSampler {
    /// For logits of `vocabulary` tokens and `most` rows at most, on `threads` threads.
    pub fn new(isa: Isa, threads: usize, vocabulary: usize, most: usize) -> DraftSampler {
        let samplers = (0..threads).map(|_| Mutex::new(Sampler::new(isa, vocabulary))).collect();
        DraftSampler { isa, samplers, rows: Vec::with_capacity(most), device: DeviceDraws::default() }
    }

    /// Forgets all rows.
    pub fn clear(&mut self) {
        self.rows.clear();
    }

    /// Adds the next row.
    pub fn push(&mut self, of: usize, params: &SamplingParams, position: usize) {
        // Penalties would also need the drafted tokens.
        let params =
            SamplingParams { repetition_penalty: 1.0, presence_penalty: 0.0, frequency_penalty: 0.0, ..params.clone() };
        self.rows.push(Mutex::new(DraftRow { of, params, position: position as u64, drawn: None }));
    }

    /// Draws a token for each row, in their order.
    pub fn draw(&mut self, backend: &mut dyn Backend, logits: Logits) -> impl Iterator<Item = &DraftRow> {
        if !self.draw_on_device(backend, logits) {
            let (isa, samplers, rows) = (self.isa, &self.samplers, &self.rows);
            backend.each_logits(logits, &|row, thread, logits| {
                let Some(entry) = rows.get(row) else { return };
                let mut entry = entry.lock().unwrap_or_else(|e| e.into_inner());
                let mut sampler = samplers[thread].lock().unwrap_or_else(|e| e.into_inner());
                let token = sampler.sample(&entry.params, logits, None, None, entry.position);
                entry.drawn = token.ok().map(|token| (token, Logprobs::new(isa, logits, token, 0).chosen.exp()));
            });
        }
        self.rows.iter_mut().map(|row| &*row.get_mut().unwrap_or_else(|e| e.into_inner()))
    }

    /// The same by what a device says that has the logits. Returns whether that decides all rows.
    fn draw_on_device(&mut self, backend: &mut dyn Backend, logits: Logits) -> bool {
        let DraftSampler { isa, samplers, rows, device } = self;
        let Some(sampling) = backend.device_sampling() else { return false };
        let mut rows: Vec<&mut DraftRow> =
            rows.iter_mut().map(|row| row.get_mut().unwrap_or_else(|e| e.into_inner())).collect();
        device.begin_step();
        device.ask(*isa, sampling, logits, rows.iter().enumerate().map(|(row, entry)| entry.draw(row)));
        let sampler = samplers[0].get_mut().unwrap_or_else(|e| e.into_inner());
        rows.iter_mut().enumerate().all(|(row, entry)| {
            let Some(drawn) = device.draw(entry.draw(row), None, None, sampler) else { return false };
            let token = drawn.token.ok().zip(drawn.logprobs);
            entry.drawn = token.map(|(token, logprobs)| (token, logprobs.chosen.exp()));
            true
        })
    }
}
