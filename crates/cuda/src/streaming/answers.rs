//! One token's layers: the device asks in the middle of a step that is enqueued whole, and the host answers once all experts are there, or computed.
//!
//! Where the device has all that the token takes, it goes on and the host learns of it later. So what a device that goes on may still use stays as it is until it waits
//! for an answer again, or has done all: the buffers of experts that fall or pass ([`Streaming::part`]), and what tables and bits say of them. What rises and falls is decided
//! behind an answer, while the device computes.

use anyhow::Result;
use sluice_experts::Next;

use super::{Present, Streaming, Wanted};
use crate::driver::{Address, Gpu};
use crate::mailbox::{Choice, Question};
use crate::weights::Weights;

impl Streaming {
    /// Has the device ask for the experts that the one token takes: where it asks, and where the table of their matrices is.
    pub fn ask(&mut self, layer: usize) -> Result<(Question, Address)> {
        if std::mem::take(&mut self.is_idle) {
            self.tables.tell(&self.up)?;
            // Most often it was told while it was idle.
            self.up.wait()?;
        }
        Ok((self.questions.ask(layer, self.tables.here(layer)), self.tables.at(layer)))
    }

    /// Whether the device asks, or will once what is held back is carried out.
    pub fn is_asked(&self) -> bool {
        self.questions.next().is_some()
    }

    /// Lets the device go on without what it has asked for: a step that went wrong.
    pub fn ask_no_more(&mut self) {
        self.questions.open_all();
    }

    /// Answers all that the device asks: what was held back is carried out by now. `k`: experts of a token, by layer. How many questions it waited for.
    pub fn answer(&mut self, gpu: &Gpu, weights: &Weights, k: impl Fn(usize) -> usize) -> Result<usize> {
        let mut answered = 0;
        while let Some(layer) = self.questions.next() {
            match self.answer_next(gpu, weights, layer, k(layer)) {
                Ok(waited) => answered += usize::from(waited),
                Err(error) => {
                    self.questions.open_all();
                    return Err(error);
                }
            }
        }
        Ok(answered)
    }

    /// Whether the device waited.
    fn answer_next(&mut self, gpu: &Gpu, weights: &Weights, layer: usize, k: usize) -> Result<bool> {
        let Choice { experts, goes_on } = self.questions.wait(gpu, k)?;
        // There is something where the layer before did not ask.
        self.settle_layer(gpu, weights, true)?;
        let lingering = &self.classes[self.store.class_of_layer(layer)].lingering;
        let is_there = |e: &u32| {
            self.store.is_in_fast_tier(layer, *e as usize)
                || lingering.iter().any(|(of, p)| (*of, p.expert) == (layer, *e))
        };
        let has_all = self.tables.is_told(layer) && experts.iter().all(is_there);
        if goes_on || has_all {
            // What is written down can wait.
            if !goes_on {
                self.questions.open(0);
            }
            self.visit(gpu, weights, layer, &experts)?;
            return Ok(!goes_on);
        }
        let copies = self.bring(weights, layer, (k, &experts))?;
        let by_host = self.compute_for_one();
        if copies {
            self.up.wait()?;
        }
        self.questions.open(by_host);
        self.settle_layer(gpu, weights, true)?;
        Ok(true)
    }

    /// Takes down that a layer's experts were wanted, all of which the device had. It may be computing with them.
    fn visit(&mut self, gpu: &Gpu, weights: &Weights, layer: usize, experts: &[u32]) -> Result<()> {
        let wanted = Wanted::new(self.layers[layer].experts.count, experts);
        self.land_wanted(layer, &wanted)?;
        let passing = self.found(layer, &wanted.experts);
        let fetch = self.store.fetch(layer, &wanted.experts, &wanted.tokens, false);
        loop {
            match self.store.next(fetch, true) {
                Next::Expert(i) => self.store.release(fetch, i),
                // Nobody needs it any more.
                Next::Failed(i) => drop(self.store.take_error(fetch, i)),
                Next::Later => {}
                Next::Over => break,
            }
        }
        if !passing.is_empty() {
            let (held, borrowed, aside) = Default::default();
            self.present =
                Some(Present { layer, fetch, tokens: None, nearly_all: false, held, borrowed, passing, aside });
            self.settle_layer(gpu, weights, true)?;
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
        self.stats.computed_on_host += wanted.len() as u64;
        sharing.compute(experts, (wanted, rows), bytes, array, self.questions.for_host(experts.hidden(), wanted.len()));
        present.aside.held.iter().fold(0, |bits, place| bits | 1 << place)
    }
}
