//! One token's layers: the device asks in the middle of a step that is enqueued whole, and the host answers once all experts are there, or computed.

use anyhow::Result;

use super::Streaming;
use crate::driver::{Address, Gpu};
use crate::questions::Question;
use crate::weights::Weights;

impl Streaming {
    /// Has the device ask for the experts that the one token takes: where it asks, and where the table of their matrices is.
    pub fn ask(&mut self, layer: usize) -> (Question, Address) {
        (self.questions.ask(layer), self.tables.at(layer))
    }

    /// Whether the device asks, or will once what is held back is carried out.
    pub fn is_asked(&self) -> bool {
        self.questions.next().is_some()
    }

    /// Lets the device go on without what it has asked for: a step that went wrong.
    pub fn ask_no_more(&mut self) {
        self.questions.open_all();
    }

    /// Answers all that the device asks: what was held back is carried out by now. `k`: experts of a token, by layer. How many questions there were.
    pub fn answer(&mut self, gpu: &Gpu, weights: &Weights, k: impl Fn(usize) -> usize) -> Result<usize> {
        let mut answered = 0;
        while let Some(layer) = self.questions.next() {
            if let Err(error) = self.answer_next(gpu, weights, layer, k(layer)) {
                self.questions.open_all();
                return Err(error);
            }
            answered += 1;
        }
        Ok(answered)
    }

    fn answer_next(&mut self, gpu: &Gpu, weights: &Weights, layer: usize, k: usize) -> Result<()> {
        let chosen = self.questions.wait(gpu, k)?;
        // What is written down can wait, where nothing of it moves what the device reads meanwhile.
        let has_all = self.tables.is_told(layer)
            && self.present.as_ref().is_none_or(|p| p.passing.is_empty() && p.aside.held.is_empty())
            && chosen.iter().all(|e| self.store.is_there_fast(layer, *e as usize));
        if has_all {
            self.questions.open(0);
        }
        self.settle(gpu, weights)?;
        let copies = self.bring(weights, layer, (k, &chosen))?;
        let by_host = self.compute_for_one();
        if copies {
            self.up.wait()?;
        }
        if !has_all {
            self.questions.open(by_host);
        }
        Ok(())
    }

    /// Computes the host's part of what one token takes, while the rest is copied. Which experts, a bit each by their places in what is wanted.
    fn compute_for_one(&mut self) -> u32 {
        let (Some(sharing), Some(present)) = (&mut self.sharing, &self.present) else { return 0 };
        let (wanted, rows) = (&present.aside.wanted[..], &present.aside.rows[..]);
        if wanted.is_empty() {
            return 0;
        }
        let experts = &self.layers[present.layer].experts;
        let (array, bytes) = present.arrays_aside(&self.store);
        self.stats.aside += wanted.len() as u64;
        sharing.compute(experts, (wanted, rows), bytes, array, self.questions.for_host(experts.hidden(), wanted.len()));
        present.aside.held.iter().fold(0, |bits, place| bits | 1 << place)
    }
}
