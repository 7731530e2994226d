//! Steps of one token: the device requests experts in the middle of a step that is enqueued whole, and the host answers once all of them are there or computed.
//!
//! If the device has all experts of the token, it goes on and the host learns of it later. So whatever a running device may still use stays unchanged until it waits for an
//! answer again or has finished: buffers of demoted and transient experts ([`BufferState::Retiring`]), tables and bits. Promotions and demotions are decided behind an
//! answer, while the device computes.

use anyhow::Result;
use sluice_experts::Next;

use super::{ActiveLayer, ExpertStreaming, NeededExperts};
use crate::device::stream::Gpu;
use crate::device::sys::Address;
use crate::moe::expert_pool::BufferState;
use crate::moe::mailbox::{ExpertRequest, MailboxSlot};
use crate::weights::Weights;

impl ExpertStreaming {
    /// Lets the device request the experts of the one token: returns the slot of its request and the address of the layer's table.
    pub fn request(&mut self, layer: usize) -> Result<(MailboxSlot, Address)> {
        if std::mem::take(&mut self.is_idle) {
            self.tables.publish(&self.up)?;
            // Most often this was published while the device was idle.
            self.up.wait()?;
        }
        Ok((self.mailbox.open(layer, self.tables.resident_bits(layer)), self.tables.at(layer)))
    }

    /// Whether there are requests, or will be once the held launches run.
    pub fn has_requests(&self) -> bool {
        self.mailbox.next().is_some()
    }

    /// Lets the device go on without the experts that it requested: the step has failed.
    pub fn cancel(&mut self) {
        self.mailbox.answer_all();
    }

    /// Answers all requests. The held launches run by now. `k`: experts of a token, by layer. Returns for how many the device waited.
    pub fn answer(&mut self, gpu: &Gpu, weights: &Weights, k: impl Fn(usize) -> usize) -> Result<usize> {
        let mut answered = 0;
        while let Some(layer) = self.mailbox.next() {
            match self.answer_next(gpu, weights, layer, k(layer)) {
                Ok(waited) => answered += usize::from(waited),
                Err(error) => {
                    self.mailbox.answer_all();
                    return Err(error);
                }
            }
        }
        Ok(answered)
    }

    /// Answers the request of a layer. Returns whether the device waited for it.
    fn answer_next(&mut self, gpu: &Gpu, weights: &Weights, layer: usize, k: usize) -> Result<bool> {
        let ExpertRequest { experts, goes_on } = self.mailbox.wait(gpu, k)?;
        // A layer before it that requested nothing may be active.
        self.settle_layer(gpu, weights, true)?;
        let is_there = |e: &u32| {
            self.store.is_in_fast_tier(layer, *e as usize)
                || self.pool.find_in(layer, *e, BufferState::Cached).is_some()
        };
        let has_all = self.tables.is_published(layer) && experts.iter().all(is_there);
        if goes_on || has_all {
            // The accounts can wait.
            if !goes_on {
                self.mailbox.answer(0);
            }
            self.account(gpu, weights, layer, &experts)?;
            return Ok(!goes_on);
        }
        let copies = self.start_fetch(weights, layer, (k, &experts))?;
        let by_host = self.compute_for_one();
        if copies {
            self.up.wait()?;
        }
        self.mailbox.answer(by_host);
        // In the host's slots experts stay until the device waits again.
        if self.slots.is_none() {
            self.settle_layer(gpu, weights, true)?;
        }
        Ok(true)
    }

    /// Accounts for a layer's experts that were needed, all of which the device has. It may be computing with them.
    fn account(&mut self, gpu: &Gpu, weights: &Weights, layer: usize, experts: &[u32]) -> Result<()> {
        let needed = NeededExperts::new(self.layers[layer].experts.count, experts);
        self.finish_demotions_of(layer, &needed.experts)?;
        let reused = needed.experts.iter().filter(|expert| self.pool.reuse(layer, **expert)).count();
        let fetch = self.store.fetch(layer, &needed.experts, &needed.tokens, false);
        loop {
            match self.store.next(fetch, true) {
                Next::Expert(i) => self.store.release(fetch, i),
                // The device has it, so nobody needs it from disk.
                Next::Failed(i) => drop(self.store.take_error(fetch, i)),
                Next::Later => {}
                Next::Over => break,
            }
        }
        if reused > 0 {
            let (held, pinned, host) = Default::default();
            self.active = Some(ActiveLayer { layer, fetch, tokens: None, needs_most: false, held, pinned, host });
            self.settle_layer(gpu, weights, true)?;
        }
        Ok(())
    }

    /// Computes the host's part of the one token's experts while the others are copied. Returns a bit for each, by its position in the request.
    fn compute_for_one(&mut self) -> u32 {
        let (Some(split), Some(active)) = (&mut self.split, &self.active) else { return 0 };
        let (experts, rows) = (&active.host.experts[..], &active.host.rows[..]);
        if experts.is_empty() {
            return 0;
        }
        let of = &self.layers[active.layer].experts;
        let (array, bytes) = active.host_arrays(&self.store);
        self.stats.computed_on_host += experts.len() as u64;
        split.compute(of, (experts, rows), bytes, array, self.mailbox.host_io(of.hidden(), experts.len()));
        active.host.positions.iter().fold(0, |bits, place| bits | 1 << place)
    }
}
