//! What an engine says about itself: settings, memory and measurements.

use sluice_backend::{KvType, Lookahead, MemoryClass, MemoryUse, Profile, Routed, RowStats, Streamed};
use sluice_cache::Evicted;
use sluice_model::Description;
use sluice_store::Loading;

use super::Engine;
use super::drafting::Drafting;
use crate::draft::{DraftCounts, DraftStats};
use crate::options::Options;
use crate::schedule::sequence::SequenceId;
use crate::setup::budget;
use crate::setup::device_share::DeviceUse;
use crate::setup::placement::PlacementChoice;

/// Settings.
impl Engine {
    /// The model's architecture.
    pub fn model(&self) -> &Description {
        &self.model
    }

    /// The options that the engine was opened with.
    pub fn options(&self) -> &Options {
        &self.options
    }

    /// The element type of cached keys and values.
    pub fn kv_type(&self) -> Option<KvType> {
        self.layouts.first().map(|l| l.kv_type)
    }

    /// Tokens that a step takes at most.
    pub fn chunk(&self) -> usize {
        self.scheduler.max_tokens
    }

    /// Tokens that a sequence may have.
    pub fn max_context(&self) -> usize {
        self.setup.max_context
    }

    /// Where experts are stored, and why.
    pub fn placement(&self) -> &PlacementChoice {
        &self.setup.placed
    }

    /// Whether what is computed of a prompt is kept for others with the same beginning.
    pub fn has_prefix_cache(&self) -> bool {
        self.options.prefix_cache
    }

    /// Parts of the checkpoint that were left out (vision, multi-token prediction).
    pub fn skipped(&self) -> &[String] {
        &self.setup.skipped
    }

    /// Notes on how weights are read and where memory and threads were placed, a clause each.
    pub fn fallbacks(&self) -> Vec<String> {
        let loading = self.loading.iter().flat_map(Loading::notes);
        let squeezed = (self.setup.squeezed > 0).then(|| {
            let bytes = budget::bytes(self.setup.squeezed);
            format!(
                "{bytes} of mapped weights do not fit the memory control group: the kernel reads them again and again"
            )
        });
        loading.chain(squeezed).chain(self.setup.numa.clone()).chain(self.runner.backend.notes()).collect()
    }
}

/// Memory, in bytes unless said otherwise.
impl Engine {
    /// The engine's share of a device's own memory; `None` on the CPU.
    pub fn device(&self) -> Option<DeviceUse> {
        self.setup.device
    }

    /// What was reserved for the scratch memory of steps of [`Engine::chunk`] tokens, sampling included. [`MemoryClass::Scratch`] stays below it, except for
    /// what grows with the context.
    pub fn reserved_scratch(&self) -> u64 {
        self.setup.scratch
    }

    /// What is allocated, committed (keys and values) or mapped, by class and device.
    pub fn memory_uses(&mut self) -> Vec<MemoryUse> {
        let own = self.runner.backend.memory();
        let drafters = self.drafting.iter_mut().flat_map(Drafting::drafters).flat_map(|drafter| drafter.memory());
        own.into_iter().chain(drafters).collect()
    }

    /// What is allocated, committed or mapped of a class on all devices.
    pub fn memory(&mut self, class: MemoryClass) -> usize {
        self.memory_uses().iter().filter(|m| m.class == class).map(|m| m.bytes).sum()
    }

    /// Keys and values that sequences hold now.
    pub fn kv_in_use(&self) -> usize {
        self.cache.in_use().zip(&self.layouts).map(|(blocks, l)| blocks * l.block_bytes()).sum()
    }

    /// Keys and values that no sequence holds, kept for prompts with the same beginning.
    pub fn kv_cached(&self) -> usize {
        self.cache.idle().zip(&self.layouts).map(|(blocks, l)| blocks * l.block_bytes()).sum()
    }

    /// The part of all blocks that sequences hold now, in the cache group that is fullest: 0 to 1.
    pub fn kv_usage(&self) -> f64 {
        let shares = self.cache.in_use().zip(self.cache.blocks()).map(|(used, all)| used as f64 / all.max(1) as f64);
        shares.fold(0.0, f64::max)
    }

    /// The number of recurrent states that are kept for later prompts.
    pub fn snapshots(&self) -> usize {
        self.cache.snapshots()
    }

    /// The number of recurrent states that sequences hold now.
    pub fn states_in_use(&self) -> usize {
        self.cache.states_in_use()
    }

    /// What the prefix cache has evicted so far.
    pub fn evicted(&self) -> Evicted {
        self.cache.evicted()
    }
}

/// Weights and experts.
impl Engine {
    /// How the weights come into memory; `None` for a checkpoint that the caller opened. The first steps wait for the weights they need.
    pub fn loading(&self) -> Option<&Loading> {
        self.loading.as_ref()
    }

    /// For some ten milliseconds, copies loaded weights to NUMA nodes that are to have copies of them. Steps do the same when they begin. Returns whether there
    /// were any.
    pub fn copy_weights(&mut self) -> bool {
        self.runner.backend.copy_weights()
    }

    /// For some tens of milliseconds, reads streamed experts that no token has wanted yet, while there is memory for them. Returns whether there may be more.
    /// Does nothing if look-ahead is off.
    pub fn fill_experts(&mut self) -> bool {
        self.options.lookahead != Lookahead::Off && self.runner.backend.fill_experts()
    }

    /// What was read of tables that stay on disk, since the start; `None` if none does.
    pub fn table_stats(&self) -> Option<RowStats> {
        self.runner.backend.table_stats()
    }

    /// What streaming experts took since the last call; `None` if none are streamed.
    pub fn take_streamed(&mut self) -> Option<Streamed> {
        self.runner.backend.take_streamed()
    }
}

/// Measurements.
impl Engine {
    /// Starts or stops measuring time and work by phase. Steps on a GPU are slower meanwhile.
    pub fn profile(&mut self, on: bool) {
        self.runner.backend.profile(on);
    }

    /// Time and work by phase since the last call; empty while profiling is off.
    pub fn take_profile(&mut self) -> Profile {
        self.runner.backend.take_profile()
    }

    /// Tokens that went through the model since the engine was opened: of prompts and answers, and drafted ones that did not come true.
    pub fn computed_tokens(&self) -> u64 {
        self.computed
    }

    /// The context of the smaller model that drafts, behind which it drafts nothing; `None` where there is none.
    pub fn draft_context(&self) -> Option<usize> {
        self.drafting.as_ref().and_then(Drafting::context)
    }

    /// What was drafted since the engine was opened, by drafter; empty if nothing is to be.
    pub fn draft_stats(&self) -> Vec<DraftStats> {
        self.drafting.iter().flat_map(Drafting::stats).collect()
    }

    /// What was drafted for a sequence since its generation was started.
    pub fn drafted(&self, id: SequenceId) -> DraftCounts {
        let sequence = self.sequences.position(id).map(|at| &self.sequences.list[at]);
        sequence.and_then(|s| s.drafts.as_ref()).map_or_else(DraftCounts::default, |drafts| drafts.counts)
    }

    /// Starts to record the choices of routers.
    pub fn record_routing(&mut self) {
        self.runner.backend.record_routing();
    }

    /// Recorded choices of routers since the last call, in the order of steps and layers.
    pub fn take_routing(&mut self) -> Vec<Routed> {
        std::mem::take(&mut self.routed)
    }
}
