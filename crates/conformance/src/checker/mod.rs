//! A backend that checks its caller. It has its own handles, checks the arguments of each call, records steps, and
//! passes calls on to a backend inside.
//!
//! It panics when the caller breaks the order of calls (`begin`, operations, `end`; nothing is allocated, written or read back in between), uses an unknown
//! handle, or exceeds what was allocated or committed.

mod log;
mod names;
mod operations;
mod recording;
mod replay;
mod resources;

use std::collections::HashSet;
use std::sync::{Arc, Mutex, MutexGuard};

use sluice_backend::{
    AttentionLayer, Backend, Capacity, ChannelDeltaLayer, CompressLayer, CompressedLayer, DeltaLayer, DeviceSampling,
    Elementwise, Failed, IndexLayer, KvPool, LatentLayer, Linear, Logits, MatrixId, MemoryUse, Mlp, MoeId, NgramLayer,
    NgramTable, Norm, Operations, Outcome, Profile, Projection, Routing, RowStats, SelectLayer, StateSpaceLayer,
    StepInputs, StreamLayer, Streamed, Tensor,
};

pub use log::{Log, Spoil, Spoilt};
use names::Names;
use operations::{CheckedStep, Step};
pub use recording::{CacheContents, Made, Operation, Recording};

/// A backend that checks its caller: see the module.
pub struct Checker {
    inner: Box<dyn Backend>,
    names: Names,
    log: Arc<Mutex<Log>>,
    step: Option<Step>,
    /// The logits of the last step.
    left: Option<Logits>,
    not_numbers: Vec<usize>,
    /// Logits with rows of NaN.
    spoilt: Vec<f32>,
}

impl Checker {
    pub fn new(inner: Box<dyn Backend>) -> Checker {
        Checker {
            inner,
            names: Names::default(),
            log: Arc::default(),
            step: None,
            left: None,
            not_numbers: Vec::new(),
            spoilt: Vec::new(),
        }
    }

    /// The log, to read while the checker is owned elsewhere.
    pub fn log(&self) -> Arc<Mutex<Log>> {
        Arc::clone(&self.log)
    }

    fn locked(&self) -> MutexGuard<'_, Log> {
        self.log.lock().unwrap_or_else(|e| e.into_inner())
    }

    fn made(&self, made: Made) {
        self.locked().made.push(made);
    }

    /// Panics inside of a step.
    fn outside(&self, what: &str) {
        assert!(self.step.is_none(), "{what} inside of a step");
    }

    /// The checker's own handle of a cache group's pool.
    fn pool_of(&self, group: usize) -> KvPool {
        self.names.pools.all()[group].outer
    }

    /// The contents of the caches that a step uses.
    pub(crate) fn caches(&mut self, inputs: &StepInputs) -> CacheContents {
        let mut caches = CacheContents::default();
        for (group, pool) in self.names.pools.all().to_vec().into_iter().enumerate() {
            let mut seen = HashSet::new();
            for s in 0..inputs.sequences() {
                for &block in inputs.table(group, s).iter().filter(|b| (**b as usize) < pool.committed) {
                    if seen.insert(block) {
                        let mut bytes = vec![0; pool.inner.layout.block_bytes()];
                        self.inner.read_block(&pool.inner, block, &mut bytes);
                        caches.blocks.push((group, block, bytes));
                    }
                }
            }
        }
        if let Some((_, len)) = self.names.states {
            for s in 0..inputs.sequences() {
                let mut state = vec![0.0; len];
                self.inner.read_state(inputs.state(s) as u32, &mut state);
                caches.states.push((inputs.state(s) as u32, state.iter().map(|x| x.to_bits()).collect()));
            }
        }
        caches
    }

    /// Makes rows of a step fail as the log says.
    fn spoil(&mut self, inputs: &StepInputs, outcome: &mut Outcome) {
        let spoil = self.locked().spoil.take();
        let Some(mut spoil) = spoil else { return };
        let Spoilt { mut failed, not_numbers } = spoil(inputs);
        self.locked().spoil = Some(spoil);
        self.not_numbers = not_numbers;
        if failed.is_empty() {
            return;
        }
        if let Some((_, len)) = self.names.states {
            let sequences: HashSet<usize> = failed.iter().map(|row| inputs.sequence_of(*row as usize)).collect();
            sequences.into_iter().for_each(|s| self.inner.write_state(inputs.state(s) as u32, &vec![f32::NAN; len]));
        }
        failed.sort_unstable();
        outcome.failed.push(Failed { rows: failed, why: Arc::new(anyhow::anyhow!("spoilt by the checker")) });
    }
}

impl Backend for Checker {
    fn keeps_states(&self) -> bool {
        self.inner.keeps_states()
    }

    fn takes_other_steps(&self) -> bool {
        self.inner.takes_other_steps()
    }

    fn begin(&mut self, inputs: &StepInputs) {
        self.outside("begin");
        let Capacity { tokens, sequences, .. } = inputs.capacity();
        assert!(inputs.tokens().len() <= tokens && inputs.sequences() <= sequences, "more than the inputs' capacity");
        let record = self.locked().record;
        let before = if record { self.caches(inputs) } else { CacheContents::default() };
        self.left = None;
        self.not_numbers.clear();
        let inputs = inputs.clone();
        self.inner.begin(&inputs);
        self.step = Some(Step::new(inputs, before));
    }

    fn end(&mut self) -> Outcome {
        let Step { inputs, operations, before, .. } = self.step.take().expect("end of a step that began");
        let mut outcome = self.inner.end();
        let asked = operations.iter().any(|o| matches!(o, Operation::Logits { .. }));
        let rows = if asked { inputs.wanted().len() } else { 0 };
        assert_eq!(outcome.logits.rows, rows, "a row of logits for each that is wanted");
        if self.locked().record {
            let after = self.caches(&inputs);
            let logits = self.inner.read_logits(outcome.logits).iter().map(|x| x.to_bits()).collect();
            let (made, inputs, operations) = (self.locked().made.clone(), inputs.clone(), operations.clone());
            self.locked().recordings.push(Recording { made, inputs, operations, before, after, logits });
        }
        let names = operations.iter().map(Operation::name).collect();
        self.locked().steps.push((names, outcome.synchronisations));
        self.spoil(&inputs, &mut outcome);
        self.left = Some(outcome.logits);
        outcome
    }

    fn read_logits(&mut self, logits: Logits) -> &[f32] {
        self.outside("read_logits");
        assert_eq!(Some(logits), self.left, "logits of the last step");
        if self.not_numbers.is_empty() {
            return self.inner.read_logits(logits);
        }
        self.spoilt = self.inner.read_logits(logits).to_vec();
        for &row in &self.not_numbers {
            self.spoilt[row * logits.vocabulary..(row + 1) * logits.vocabulary].fill(f32::NAN);
        }
        &self.spoilt
    }

    fn each_logits(&mut self, logits: Logits, each: &(dyn Fn(usize, usize, &[f32]) + Sync)) {
        self.outside("each_logits");
        assert_eq!(Some(logits), self.left, "logits of the last step");
        let (not_numbers, nan) = (&self.not_numbers, vec![f32::NAN; logits.vocabulary]);
        self.inner.each_logits(logits, &|row, thread, logits| {
            each(row, thread, if not_numbers.contains(&row) { &nan } else { logits });
        });
    }

    fn device_sampling(&mut self) -> Option<&mut dyn DeviceSampling> {
        self.outside("device_sampling");
        if self.not_numbers.is_empty() { self.inner.device_sampling() } else { None }
    }

    fn threads(&self) -> usize {
        self.inner.threads()
    }

    fn take_profile(&mut self) -> Profile {
        self.outside("take_profile");
        self.inner.take_profile()
    }

    fn take_streamed(&mut self) -> Option<Streamed> {
        self.outside("take_streamed");
        self.inner.take_streamed()
    }

    fn table_stats(&self) -> Option<RowStats> {
        self.inner.table_stats()
    }

    fn notes(&self) -> Vec<String> {
        self.inner.notes()
    }

    fn memory(&mut self) -> Vec<MemoryUse> {
        self.outside("memory");
        self.inner.memory()
    }
}

impl Checker {
    /// The step in progress.
    fn checked(&mut self, what: &str) -> CheckedStep<'_> {
        let fault = self.locked().fault;
        let step = self.step.as_mut().unwrap_or_else(|| panic!("{what} outside of a step"));
        CheckedStep { names: &self.names, step, fault, inner: &mut *self.inner }
    }
}

impl Operations for Checker {
    fn embed(&mut self, table: MatrixId, out: Tensor) {
        self.checked("embed").embed(table, out);
    }

    fn project(&mut self, x: Tensor, norm: Option<Norm>, projections: &[Projection]) {
        self.checked("project").project(x, norm, projections);
    }

    fn project_add(&mut self, x: Tensor, linear: &Linear, out: Tensor) {
        self.checked("project_add").project_add(x, linear, out);
    }

    fn attention(&mut self, layer: &AttentionLayer) {
        self.checked("attention").attention(layer);
    }

    fn latent_attention(&mut self, layer: &LatentLayer) {
        self.checked("latent_attention").latent_attention(layer);
    }

    fn index(&mut self, layer: &IndexLayer) {
        self.checked("index").index(layer);
    }

    fn compress(&mut self, layer: &CompressLayer) {
        self.checked("compress").compress(layer);
    }

    fn select(&mut self, layer: &SelectLayer) {
        self.checked("select").select(layer);
    }

    fn compressed_attention(&mut self, layer: &CompressedLayer) {
        self.checked("compressed_attention").compressed_attention(layer);
    }

    fn delta_net(&mut self, layer: &DeltaLayer) {
        self.checked("delta_net").delta_net(layer);
    }

    fn channel_delta(&mut self, layer: &ChannelDeltaLayer) {
        self.checked("channel_delta").channel_delta(layer);
    }

    fn state_space(&mut self, layer: &StateSpaceLayer) {
        self.checked("state_space").state_space(layer);
    }

    fn collapse(&mut self, layer: &StreamLayer) {
        self.checked("collapse").collapse(layer);
    }

    fn embed_ngrams(&mut self, table: &NgramTable, out: Tensor) {
        self.checked("embed_ngrams").embed_ngrams(table, out);
    }

    fn add_ngrams(&mut self, layer: &NgramLayer) {
        self.checked("add_ngrams").add_ngrams(layer);
    }

    fn mlp(&mut self, x: Tensor, norm: Norm, mlp: &Mlp, residual: Tensor) {
        self.checked("mlp").mlp(x, norm, mlp, residual);
    }

    fn elementwise(&mut self, operation: &Elementwise) {
        self.checked("elementwise").elementwise(operation);
    }

    fn mixture(&mut self, x: Tensor, moe: MoeId, residual: Tensor) {
        self.checked("mixture").mixture(x, moe, residual);
    }

    fn logits(&mut self, x: Tensor, norm: Option<Norm>, head: MatrixId, softcap: Option<f32>) {
        self.checked("logits").logits(x, norm, head, softcap);
    }

    fn mixture_but_experts(&mut self, x: Tensor, moe: MoeId, normed: Tensor, residual: Tensor) -> Routing {
        self.checked("mixture_but_experts").mixture_but_experts(x, moe, normed, residual)
    }
}
