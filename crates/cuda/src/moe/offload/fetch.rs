//! Bringing the experts that a layer needs to the device, or dividing them with the host, and prefetching those of the next layer.

use anyhow::Result;
use sluice_backend::Experts;
use sluice_experts::{FetchId, Next, PinnedExpert};

use super::{ActiveLayer, ExpertStreaming, LayerHistory, NeededExperts, StreamedLayer};
use crate::device::stream::Gpu;
use crate::device::sys::Address;
use crate::moe::expert_pool::BufferState;
use crate::moe::host_split::{HostShare, MAX_PAIRS};
use crate::weights::Weights;

/// The most experts of the next layer that are read ahead from disk.
const MAX_READ_AHEAD: usize = 64;
/// From this many pairs of a token and an expert for each expert on, a step predicts what another of as many tokens needs.
const MIN_PREDICTING_PAIRS: usize = 8;

impl ExpertStreaming {
    /// Copies the experts to the device that tokens need and that it does not have; later work of the device waits for that. `chosen`: experts of a token, and those of all
    /// tokens. Returns the address of the layer's table.
    pub fn fetch(&mut self, gpu: &Gpu, weights: &Weights, layer: usize, chosen: (usize, &[u32])) -> Result<Address> {
        if self.start_fetch(weights, layer, chosen)? {
            self.up.record(&self.uploaded)?;
            gpu.wait_for(&self.uploaded)?;
        }
        Ok(self.tables.at(layer))
    }

    /// As [`ExpertStreaming::fetch`], but nothing waits for the copies. Returns whether there are any.
    pub(super) fn start_fetch(
        &mut self,
        weights: &Weights,
        layer: usize,
        (k, chosen): (usize, &[u32]),
    ) -> Result<bool> {
        assert!(self.active.is_none(), "the layer before is settled");
        // 1. What is needed, and none of it on its way back
        let needed = NeededExperts::new(self.layers[layer].experts.count, chosen);
        self.finish_demotions_of(layer, &needed.experts)?;
        let NeededExperts { experts: needed, tokens } = needed;
        // 2. What was prefetched, and what is still in its buffer
        let mut pinned = self.take_prefetched(layer)?;
        for expert in &needed {
            self.pool.reuse(layer, *expert);
        }
        self.pool.cache_retiring();
        if chosen.len() > MAX_PAIRS {
            self.pool.drop_cached();
        }
        // 3. Of the experts in the host's memory, the host computes those with the lowest scores. All others are on their way before anything is noted
        let Experts { biases, order, .. } = &self.layers[layer].experts;
        let only_here = biases.is_some() || order.is_some();
        let mut copies_all = self.split.is_none() || chosen.len() > MAX_PAIRS || only_here;
        if !copies_all {
            pinned.extend(self.copy_at_once(weights, layer, &needed)?);
        }
        // 4. The others as they arrive
        let fetch = self.store.fetch(layer, &needed, &tokens, false);
        let mut held: Vec<usize> = Vec::with_capacity(needed.len());
        let mut missing = Vec::new();
        loop {
            let next = match self.store.next(fetch, false) {
                // Reading takes longest, so the host gains nothing by computing.
                Next::Later if !copies_all => {
                    copies_all = true;
                    for i in missing.drain(..) {
                        self.copy(weights, layer, fetch, (i, needed[i]))?;
                    }
                    continue;
                }
                // The device reads them where they are, so all stay. There are slots for all experts of a layer.
                Next::Later if self.slots.is_some() => self.store.next(fetch, true),
                Next::Later => {
                    // Perhaps slots are missing: give up those that are copied.
                    self.up.wait()?;
                    held.drain(..).for_each(|i| self.store.release(fetch, i));
                    pinned.drain(..).for_each(|of| self.store.unpin(of));
                    self.store.next(fetch, true)
                }
                next => next,
            };
            match next {
                Next::Expert(i) => {
                    held.push(i);
                    if let Some(slots) = &self.slots {
                        let at = slots.address(self.store.slot_bytes_at(fetch, i, 0..0).as_ptr());
                        let layout = self.layout(layer, needed[i] as usize);
                        self.write_table(weights, layer, needed[i] as usize, at, &layout);
                        continue;
                    }
                    let is_transient = self.pool.find_in(layer, needed[i], BufferState::Transient).is_some();
                    if self.store.fast_slot(fetch, i).is_none() && !is_transient {
                        match copies_all {
                            true => self.copy(weights, layer, fetch, (i, needed[i]))?,
                            false => missing.push(i),
                        }
                    }
                }
                Next::Failed(i) => {
                    self.error.get_or_insert(self.store.take_error(fetch, i));
                    let rows = chosen.chunks_exact(k).zip(0..).filter(|(row, _)| row.contains(&needed[i]));
                    self.failed_rows.extend(rows.map(|(_, row)| row));
                    // No kernel computes it. The other results of these rows are not used.
                    let buffer = self.pool.find_in(layer, needed[i], BufferState::Transient);
                    buffer.into_iter().for_each(|buffer| self.pool.release(layer, buffer));
                    self.unpublish(weights, layer, needed[i] as usize);
                }
                Next::Later => {}
                Next::Over => break,
            }
        }
        // The host computes what is left.
        let host = HostShare::new(missing, &needed, (k, chosen));
        held.retain(|i| !host.positions.contains(i));
        // 5. What the device has to wait for
        let is_changed = self.tables.publish(&self.up)?;
        let copies = is_changed || !self.pool.transient(layer).is_empty();
        let StreamedLayer { experts, history, .. } = &mut self.layers[layer];
        let needs_most = 4 * needed.len() > 3 * experts.count;
        let step_tokens = (chosen.len() >= MIN_PREDICTING_PAIRS * experts.count).then_some(chosen.len() / k);
        if let Some(step_tokens) = step_tokens {
            let mut uses = vec![0; experts.count];
            needed.iter().zip(&tokens).for_each(|(expert, tokens)| uses[*expert as usize] = *tokens);
            *history = Some(LayerHistory { tokens: step_tokens, uses });
        }
        self.active = Some(ActiveLayer { layer, fetch, tokens: step_tokens, needs_most, held, pinned, host });
        Ok(copies)
    }

    /// Uses what was prefetched for this layer and frees what was prefetched for others. Returns the slots whose experts are used.
    fn take_prefetched(&mut self, layer: usize) -> Result<Vec<PinnedExpert>> {
        let prefetched = std::mem::take(&mut self.prefetched);
        if prefetched.iter().any(|(_, of)| of.layer != layer) {
            self.up.wait()?;
        }
        let mut pinned = Vec::with_capacity(prefetched.len());
        for (buffer, of) in prefetched {
            if of.layer == layer {
                self.pool.use_prefetched(layer, of.expert as u32, buffer);
                pinned.push(of);
            } else {
                self.pool.release(of.layer, buffer);
                self.store.unpin(of);
            }
        }
        Ok(pinned)
    }

    /// Starts copying the layer's experts in the host's memory that are not the host's share. Returns their slots, which stay as they are.
    fn copy_at_once(&mut self, weights: &Weights, layer: usize, needed: &[u32]) -> Result<Vec<PinnedExpert>> {
        let is_absent = |e: &u32| {
            !self.store.is_in_fast_tier(layer, *e as usize)
                && self.pool.find_in(layer, *e, BufferState::Transient).is_none()
        };
        let absent: Vec<u32> = needed.iter().copied().filter(is_absent).collect();
        let mut here: Vec<PinnedExpert> = absent.iter().filter_map(|e| self.store.pin(layer, *e as usize)).collect();
        // If something has to be read, that takes longest, and the host gains nothing by computing.
        if here.len() == absent.len() && !here.is_empty() {
            let score = |of: &PinnedExpert| self.store.long_term_score(layer, of.expert);
            here.sort_by(|a, b| score(b).total_cmp(&score(a)).then(a.expert.cmp(&b.expert)));
            let bytes = self.layout(layer, here[0].expert).bytes;
            let share = self.split.as_ref().map_or(0, |s| s.share(here.len(), bytes));
            for of in here.split_off(here.len() - share) {
                self.store.unpin(of);
            }
        }
        for of in &here {
            self.copy_pinned(weights, of, BufferState::Transient)?;
        }
        Ok(here)
    }

    /// Starts copying an expert from a pinned slot of the host and returns its buffer. The slot stays pinned until the copy is done.
    fn copy_pinned(&mut self, weights: &Weights, of: &PinnedExpert, state: BufferState) -> Result<u32> {
        let (layer, layout) = (of.layer, self.layout(of.layer, of.expert));
        let buffer = self.take_buffer(layer, of.expert, state)?;
        let slot = |range| self.store.pinned_bytes(of, range);
        // SAFETY: a buffer that nothing else uses; the slot is unpinned only once the copies were waited for.
        unsafe { self.upload((layer, of.expert), self.address(layer, buffer), &layout, slot)? };
        self.publish(weights, layer, of.expert, buffer, &layout);
        Ok(buffer)
    }

    /// Starts copying an expert that a fetch has handed over.
    fn copy(&mut self, weights: &Weights, layer: usize, fetch: FetchId, (i, expert): (usize, u32)) -> Result<()> {
        let buffer = self.take_buffer(layer, expert as usize, BufferState::Transient)?;
        let layout = self.layout(layer, expert as usize);
        let slot = |range| self.store.slot_bytes_at(fetch, i, range);
        // SAFETY: a buffer that nothing else uses; the slot is released only once the copies were waited for.
        unsafe { self.upload((layer, expert as usize), self.address(layer, buffer), &layout, slot)? };
        self.publish(weights, layer, expert as usize, buffer, &layout);
        Ok(())
    }

    /// Computes the host's part of a layer of several tokens and copies it into `outputs`, `[pairs, width]`. The device's kernels for the same pairs are enqueued already.
    pub fn compute_on_host(&mut self, gpu: &Gpu, outputs: Address) -> Result<()> {
        let (Some(split), Some(active)) = (&mut self.split, &self.active) else { return Ok(()) };
        let HostShare { experts, rows, pairs, .. } = &active.host;
        if experts.is_empty() {
            return Ok(());
        }
        let of = &self.layers[active.layer].experts;
        let (array, bytes) = active.host_arrays(&self.store);
        self.stats.computed_on_host += experts.len() as u64;
        let out = split.compute_rows(gpu, of, (experts, rows), bytes, array)?;
        let row = size_of::<f32>() * of.hidden();
        for (from, pair) in out.chunks_exact(row).zip(pairs) {
            // SAFETY: a row of the outputs; the source changes again only after the host has waited.
            unsafe { gpu.write_async(outputs + (pair * row) as u64, from)? };
        }
        Ok(())
    }

    /// Starts copying experts of the next layer that as many tokens are likely to need. If no large step was there yet: all of them, if the present layer needs most of its
    /// experts.
    pub fn prefetch(&mut self, weights: &Weights, next: usize) -> Result<()> {
        let Some(ActiveLayer { tokens, needs_most, .. }) = self.active else { return Ok(()) };
        let StreamedLayer { history, is_complete, experts, .. } = &self.layers[next];
        let is_likely: Vec<bool> = match (history, tokens) {
            (Some(history), Some(tokens)) => (0..experts.count).map(|e| history.is_likely(e, tokens)).collect(),
            _ => vec![needs_most; experts.count],
        };
        if *is_complete || !self.prefetched.is_empty() || !is_likely.contains(&true) {
            return Ok(());
        }
        // Three quarters of the slots are left for reads.
        let most = self.pool.available(next).min(self.store.slots().0 / 4);
        let mut absent = Vec::new();
        for expert in (0..is_likely.len()).filter(|e| is_likely[*e]) {
            if !self.store.is_resident(next, expert) {
                absent.push(expert as u32);
            }
            if self.slots.is_some() || self.prefetched.len() >= most {
                continue;
            }
            let Some(of) = self.store.pin(next, expert) else { continue };
            let buffer = self.copy_pinned(weights, &of, BufferState::Prefetched)?;
            self.stats.uploaded_ahead += 1;
            self.prefetched.push((buffer, of));
        }
        if self.reads_ahead && !absent.is_empty() {
            absent.truncate((self.store.slots().0 / 4).min(MAX_READ_AHEAD));
            self.store.predict(next, &absent);
        }
        Ok(())
    }
}
