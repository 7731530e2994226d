//! A backend of another crate than the CPU's: it has handles of its own, checks what it is asked against what it was given before, records steps, and has
//! a backend inside do the work.
//!
//! It panics where whoever drives it breaks the order of calls (`begin`, operations, `end`; nothing made, written or read back in between), uses what was
//! never made, or reaches beyond what was allocated or committed.

mod inner;
mod log;
mod names;
mod recording;

use std::collections::HashSet;
use std::sync::{Arc, Mutex, MutexGuard};

use anyhow::Result;
use sluice_backend::{
    AttentionLayer, Backend, BufferId, Capacity, DeltaLayer, DeviceMemory, DeviceSampling, ExpertOptions, Failed,
    KvLayout, KvPool, Linear, Logits, Lookahead, MatrixId, MatrixSource, MemoryClass, MemoryUse, Mlp, Moe, MoeId, Norm,
    Outcome, Profile, Projection, RotaryFrequencies, RotaryId, Routing, StepInputs, StepScratch, Streamed, Tensor,
};
use sluice_store::{Bytes, Loading};

use inner::Inner;
pub use log::{Log, Spoil, Spoilt};
use names::{MatrixName, Names, PoolName};
pub use recording::{Caches, Made, Operation, Recording};

/// A step under way.
struct Step {
    inputs: StepInputs,
    operations: Vec<Operation>,
    before: Caches,
    /// It is only gone through to see what it would need.
    is_sizing: bool,
    last_moe: Option<usize>,
}

/// See the module.
pub struct Checker<'a> {
    inner: Inner<'a>,
    names: Names,
    log: Arc<Mutex<Log>>,
    step: Option<Step>,
    /// What the last step left.
    left: Option<Logits>,
    not_numbers: Vec<usize>,
    /// Logits with rows that are not numbers.
    spoilt: Vec<f32>,
}

impl Checker<'_> {
    pub fn new(inner: Box<dyn Backend>) -> Checker<'static> {
        Checker {
            inner: Inner::Own(inner),
            names: Names::default(),
            log: Arc::default(),
            step: None,
            left: None,
            not_numbers: Vec::new(),
            spoilt: Vec::new(),
        }
    }

    /// To look at while somebody else owns the checker.
    pub fn log(&self) -> Arc<Mutex<Log>> {
        Arc::clone(&self.log)
    }

    fn locked(&self) -> MutexGuard<'_, Log> {
        self.log.lock().unwrap_or_else(|e| e.into_inner())
    }

    fn made(&self, made: Made) {
        self.locked().made.push(made);
    }

    /// What may not happen inside of a step.
    fn outside(&self, what: &str) {
        assert!(self.step.is_none(), "{what} inside of a step");
    }

    fn step(&mut self, what: &'static str) -> &mut Step {
        self.step.as_mut().unwrap_or_else(|| panic!("{what} outside of a step"))
    }

    fn tokens(&self, what: &str) -> usize {
        let step = self.step.as_ref().unwrap_or_else(|| panic!("{what} outside of a step"));
        step.inputs.tokens().len()
    }

    /// Has the backend inside do what was asked, and notes it.
    fn asked(&mut self, operation: Operation) {
        let mut done = operation.clone();
        if let Some(fault) = self.locked().fault {
            fault(&mut done);
        }
        let (n, b) = (&self.names, &mut *self.inner);
        match &done {
            Operation::Embed { table, out } => b.embed(n.matrix(*table).inner, n.tensor(*out)),
            Operation::Project { x, norm, projections } => {
                let projections: Vec<_> = projections.iter().map(|p| n.projection(p, x.rows, x.cols)).collect();
                b.project(n.tensor(*x), norm.map(|norm| n.norm(norm)), &projections);
            }
            Operation::ProjectAdd { x, linear, out } => {
                b.project_add(n.tensor(*x), &n.linear_of(linear, out.cols, x.cols), n.tensor(*out));
            }
            Operation::Attention(layer) => b.attention(&n.attention(layer)),
            Operation::DeltaNet(layer) => b.delta_net(&n.delta(layer)),
            Operation::Mlp { x, norm, mlp, residual } => {
                b.mlp(n.tensor(*x), n.norm(*norm), &n.mlp(mlp, x.cols), n.tensor(*residual));
            }
            Operation::Mixture { x, moe, residual } => {
                let moe = n.moes.get(moe.number(), "mixture").0;
                b.mixture(n.tensor(*x), moe, n.tensor(*residual));
            }
            Operation::Logits { x, norm, head } => b.logits(n.tensor(*x), n.norm(*norm), n.matrix(*head).inner),
        }
        self.step(operation.name()).operations.push(operation);
    }

    /// The pool of a cache group, as it was given out.
    fn pool_of(&self, group: usize) -> KvPool {
        self.names.pools.all()[group].outer
    }

    /// A pool inside, of which `block` is committed.
    fn block_of(&self, pool: &KvPool, block: u32) -> KvPool {
        let name = self.names.pool(pool);
        assert!((block as usize) < name.committed, "block {block} of {} that are committed", name.committed);
        name.inner
    }

    fn state(&self, row: u32) {
        let (rows, _) = self.names.states.expect("a pool of states");
        assert!((row as usize) < rows, "state {row} of {rows}");
    }

    /// What the caches hold that a step uses.
    pub(crate) fn caches(&mut self, inputs: &StepInputs) -> Caches {
        let mut caches = Caches::default();
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

    /// Rows of a step are spoilt as the log says.
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

impl Backend for Checker<'_> {
    fn alloc(&mut self, class: MemoryClass, rows: usize, cols: usize) -> Result<Tensor> {
        self.outside("alloc");
        let t = self.inner.alloc(class, rows, cols)?;
        assert_eq!((t.offset, t.rows, t.cols, t.stride), (0, rows, cols, cols), "a new buffer is dense");
        let buffer = BufferId::new(self.names.buffers.add((t.buffer, rows * cols)));
        self.made(Made::Alloc { class, rows, cols });
        Ok(Tensor { buffer, ..t })
    }

    fn upload(&mut self, values: &[f32], to: Tensor) {
        self.outside("upload");
        assert_eq!(values.len(), to.rows * to.cols, "values for {to:?}");
        self.inner.upload(values, self.names.tensor(to));
        self.made(Made::Upload { values: values.to_vec(), to });
    }

    fn download(&mut self, t: Tensor, out: &mut [f32]) {
        self.outside("download");
        self.inner.download(self.names.tensor(t), out);
    }

    fn matrix(&mut self, source: MatrixSource) -> Result<MatrixId> {
        self.outside("matrix");
        let (rows, cols) = (source.rows, source.cols);
        let inner = self.inner.matrix(source.clone())?;
        self.made(Made::Matrix(source));
        Ok(MatrixId::new(self.names.matrices.add(MatrixName { inner, rows, cols })))
    }

    fn rotary(&mut self, frequencies: &RotaryFrequencies, positions: usize) -> Result<RotaryId> {
        self.outside("rotary");
        let inner = self.inner.rotary(frequencies, positions)?;
        self.made(Made::Rotary { frequencies: frequencies.clone(), positions });
        Ok(RotaryId::new(self.names.rotaries.add((inner, positions))))
    }

    fn moe(&mut self, moe: Moe, follows: Option<MoeId>) -> Result<MoeId> {
        self.outside("moe");
        let before = follows.map(|id| self.names.moes.get(id.number(), "mixture").0);
        let inner = self.inner.moe(self.names.moe(&moe), before)?;
        self.made(Made::Moe { moe: Box::new(moe.clone()), follows });
        Ok(MoeId::new(self.names.moes.add((inner, moe))))
    }

    fn stream_experts(&mut self, options: &ExpertOptions, lookahead: Lookahead) -> Result<()> {
        self.outside("stream_experts");
        self.inner.stream_experts(options, lookahead)
    }

    fn step_scratch(
        &self,
        layouts: &[KvLayout],
        inputs: &StepInputs,
        streamed: bool,
        step: &mut dyn FnMut(&mut dyn Backend),
    ) -> StepScratch {
        self.outside("step_scratch");
        self.inner.step_scratch(layouts, inputs, streamed, &mut |sizing| {
            let under_way = Step {
                inputs: inputs.clone(),
                operations: Vec::new(),
                before: Caches::default(),
                is_sizing: true,
                last_moe: None,
            };
            let mut lent = Checker {
                inner: Inner::Lent(sizing),
                names: self.names.clone(),
                log: Arc::default(),
                step: Some(under_way),
                left: None,
                not_numbers: Vec::new(),
                spoilt: Vec::new(),
            };
            step(&mut lent);
        })
    }

    fn device_memory(&self) -> Option<DeviceMemory> {
        self.inner.device_memory()
    }

    fn read_weights(&mut self, loading: &Loading, order: &[&Bytes]) -> Result<()> {
        self.outside("read_weights");
        self.inner.read_weights(loading, order)
    }

    fn weight_copies(&self) -> usize {
        self.inner.weight_copies()
    }

    fn replicate_weights(&mut self, loading: Option<&Loading>) -> Option<String> {
        self.outside("replicate_weights");
        self.inner.replicate_weights(loading)
    }

    fn copy_weights(&mut self) -> bool {
        self.outside("copy_weights");
        self.inner.copy_weights()
    }

    fn limit_steps(&mut self, tokens: usize, rows: usize) {
        self.outside("limit_steps");
        assert!(tokens <= rows, "{tokens} tokens in scratch of {rows} rows");
        self.inner.limit_steps(tokens, rows);
    }

    fn profile(&mut self, on: bool) {
        self.outside("profile");
        self.inner.profile(on);
    }

    fn record_routing(&mut self) {
        self.outside("record_routing");
        self.inner.record_routing();
    }

    fn alloc_kv(&mut self, layout: KvLayout, blocks: usize) -> Result<KvPool> {
        self.outside("alloc_kv");
        let inner = self.inner.alloc_kv(layout, blocks)?;
        assert_eq!(inner.layout, layout, "a pool's layout");
        let number = self.names.pools.add(PoolName { inner, outer: inner, blocks, committed: 0 });
        let outer = KvPool { buffer: BufferId::new(number), layout };
        self.names.pools.get_mut(number, "pool").outer = outer;
        self.made(Made::AllocKv { layout, blocks });
        Ok(outer)
    }

    fn commit_kv(&mut self, pool: &KvPool, blocks: usize) -> Result<()> {
        self.outside("commit_kv");
        let name = *self.names.pool(pool);
        assert!(blocks <= name.blocks, "{blocks} blocks of a pool of {}", name.blocks);
        self.inner.commit_kv(&name.inner, blocks)?;
        if blocks > name.committed {
            self.names.pools.get_mut(pool.buffer.number(), "pool").committed = blocks;
            self.made(Made::CommitKv { pool: *pool, blocks });
        }
        Ok(())
    }

    fn copy_blocks(&mut self, pool: &KvPool, pairs: &[(u32, u32)]) {
        self.outside("copy_blocks");
        let mut inner = self.names.pool(pool).inner;
        for block in pairs.iter().flat_map(|(from, to)| [from, to]) {
            inner = self.block_of(pool, *block);
        }
        self.inner.copy_blocks(&inner, pairs);
    }

    fn read_block(&mut self, pool: &KvPool, block: u32, out: &mut [u8]) {
        self.outside("read_block");
        let inner = self.block_of(pool, block);
        self.inner.read_block(&inner, block, out);
    }

    fn write_block(&mut self, pool: &KvPool, block: u32, bytes: &[u8]) {
        self.outside("write_block");
        let inner = self.block_of(pool, block);
        self.inner.write_block(&inner, block, bytes);
    }

    fn alloc_states(&mut self, rows: usize, len: usize) -> Result<()> {
        self.outside("alloc_states");
        self.inner.alloc_states(rows, len)?;
        self.names.states = Some((rows, len));
        self.made(Made::AllocStates { rows, len });
        Ok(())
    }

    fn copy_state(&mut self, from: u32, to: u32) {
        self.outside("copy_state");
        [from, to].into_iter().for_each(|row| self.state(row));
        self.inner.copy_state(from, to);
    }

    fn zero_state(&mut self, row: u32) {
        self.outside("zero_state");
        self.state(row);
        self.inner.zero_state(row);
    }

    fn read_state(&mut self, row: u32, out: &mut [f32]) {
        self.outside("read_state");
        self.state(row);
        self.inner.read_state(row, out);
    }

    fn write_state(&mut self, row: u32, state: &[f32]) {
        self.outside("write_state");
        self.state(row);
        self.inner.write_state(row, state);
    }

    fn begin(&mut self, inputs: &StepInputs) {
        self.outside("begin");
        let Capacity { tokens, sequences, .. } = inputs.capacity();
        assert!(inputs.tokens().len() <= tokens && inputs.sequences() <= sequences, "more than the inputs' capacity");
        let record = self.locked().record;
        let before = if record { self.caches(inputs) } else { Caches::default() };
        self.left = None;
        self.not_numbers.clear();
        let inputs = inputs.clone();
        self.inner.begin(&inputs);
        self.step = Some(Step { inputs, operations: Vec::new(), before, is_sizing: false, last_moe: None });
    }

    fn embed(&mut self, table: MatrixId, out: Tensor) {
        let matrix = self.names.matrix(table);
        assert_eq!(matrix.cols, out.cols, "columns of an embedding");
        assert!(out.rows >= self.tokens("embed"), "a row for each token");
        let tokens = self.step("embed").inputs.tokens();
        assert!(tokens.iter().all(|t| (*t as usize) < matrix.rows), "a token outside of the embedding");
        self.asked(Operation::Embed { table, out });
    }

    fn project(&mut self, x: Tensor, norm: Option<Norm>, projections: &[Projection]) {
        assert_eq!(x.rows, self.tokens("project"), "a row for each token");
        assert!(norm.is_none_or(|n| n.weight.cols == x.cols), "a norm over {} columns", x.cols);
        self.asked(Operation::Project { x, norm, projections: projections.to_vec() });
    }

    fn project_add(&mut self, x: Tensor, linear: &Linear, out: Tensor) {
        assert_eq!(x.rows, self.tokens("project_add"), "a row for each token");
        assert!(out.rows >= x.rows, "an output of {} rows for {} tokens", out.rows, x.rows);
        self.asked(Operation::ProjectAdd { x, linear: linear.clone(), out });
    }

    fn attention(&mut self, layer: &AttentionLayer) {
        let tokens = self.tokens("attention");
        let step = self.step.as_ref().expect("a step");
        let AttentionLayer { q, k, v, out, heads, group, .. } = *layer;
        assert!([q, k, v, out].iter().all(|t| t.rows >= tokens), "a row for each token");
        if !step.is_sizing {
            // 1. Shapes
            let pool = self.names.pools.all().get(group).expect("a cache group");
            let KvLayout { kv_heads, k_dim, v_dim, block_tokens, layers, .. } = pool.outer.layout;
            let width = if layer.gated { 2 * k_dim } else { k_dim };
            assert_eq!((q.cols, k.cols), (heads * width, kv_heads * k_dim), "columns of q and k");
            assert_eq!((v.cols, out.cols), (kv_heads * v_dim, heads * v_dim), "columns of v and the output");
            assert!(heads.is_multiple_of(kv_heads) && layer.layer < layers, "heads and layers of a group");
            // 2. Where keys and values go, and where they come from
            let inputs = &step.inputs;
            let mut taken = HashSet::new();
            for slot in inputs.slots(group) {
                assert!((*slot as usize) < pool.committed * block_tokens, "slot {slot} is not committed");
                assert!(taken.insert(*slot), "slot {slot} has two tokens");
            }
            for s in 0..inputs.sequences() {
                let (rows, first) = (inputs.rows(s), inputs.position(s));
                let seen = layer.window.map_or(0, |w| (first + 1).saturating_sub(w)) / block_tokens;
                let last = (first + rows.len() - 1) / block_tokens;
                let blocks = &inputs.table(group, s)[seen..=last];
                assert!(blocks.iter().all(|b| (*b as usize) < pool.committed), "a block that is not committed");
            }
            let positions = self.names.rotaries.get(layer.rotary.number(), "rotary embedding").1;
            assert!(inputs.reach() <= positions, "position {} of {positions}", inputs.reach() - 1);
        }
        self.asked(Operation::Attention(layer.clone()));
    }

    fn delta_net(&mut self, layer: &DeltaLayer) {
        let tokens = self.tokens("delta_net");
        let step = self.step.as_ref().expect("a step");
        let DeltaLayer { shape, qkv, z, b, a, out, .. } = *layer;
        let values = shape.value_heads * shape.value_dim;
        assert!([qkv, z, b, a, out].iter().all(|t| t.rows >= tokens), "a row for each token");
        assert_eq!((qkv.cols, z.cols, out.cols), (shape.channels(), values, values), "columns of a delta rule");
        let (rows, len) = self.names.states.expect("a pool of states");
        assert!((layer.layer + 1) * shape.state_len() <= len, "layer {} of states of {len}", layer.layer);
        if !step.is_sizing {
            let states: HashSet<usize> = (0..step.inputs.sequences()).map(|s| step.inputs.state(s)).collect();
            assert!(states.len() == step.inputs.sequences() && states.iter().all(|s| *s < rows), "a state each");
        }
        self.asked(Operation::DeltaNet(layer.clone()));
    }

    fn mlp(&mut self, x: Tensor, norm: Norm, mlp: &Mlp, residual: Tensor) {
        assert_eq!(x.rows, self.tokens("mlp"), "a row for each token");
        assert!(norm.weight.cols == x.cols && residual.cols == x.cols && residual.rows >= x.rows, "shapes alike");
        self.asked(Operation::Mlp { x, norm, mlp: mlp.clone(), residual });
    }

    fn mixture(&mut self, x: Tensor, moe: MoeId, residual: Tensor) {
        assert_eq!(x.rows, self.tokens("mixture"), "a row for each token");
        let (_, known) = self.names.moes.get(moe.number(), "mixture");
        assert!(x.cols == known.experts.hidden() && residual.cols == x.cols, "shapes alike");
        assert_eq!(residual.rows, x.rows, "a row for each token");
        let before = self.step("mixture").last_moe.replace(moe.number());
        assert!(before.is_none_or(|b| b < moe.number()), "mixtures in the order in which they were made known");
        self.asked(Operation::Mixture { x, moe, residual });
    }

    fn logits(&mut self, x: Tensor, norm: Norm, head: MatrixId) {
        assert_eq!(x.rows, self.tokens("logits"), "a row for each token");
        let matrix = self.names.matrix(head);
        assert!(matrix.cols == x.cols && norm.weight.cols == x.cols, "columns of the head");
        let step = self.step("logits");
        assert!(!step.inputs.wanted().is_empty(), "logits that nobody wants");
        let before = step.operations.iter().any(|o| matches!(o, Operation::Logits { .. }));
        assert!(!before, "logits once in a step");
        self.asked(Operation::Logits { x, norm, head });
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

    fn drawing(&mut self) -> Option<&mut dyn DeviceSampling> {
        self.outside("drawing");
        if self.not_numbers.is_empty() { self.inner.drawing() } else { None }
    }

    fn threads(&self) -> usize {
        self.inner.threads()
    }

    fn take_profile(&mut self) -> Profile {
        self.outside("take_profile");
        self.inner.take_profile()
    }

    fn fill_experts(&mut self) -> bool {
        self.outside("fill_experts");
        self.inner.fill_experts()
    }

    fn take_streamed(&mut self) -> Option<Streamed> {
        self.outside("take_streamed");
        self.inner.take_streamed()
    }

    fn notes(&self) -> Vec<String> {
        self.inner.notes()
    }

    fn memory(&mut self) -> Vec<MemoryUse> {
        self.outside("memory");
        self.inner.memory()
    }

    fn mixture_but_experts(&mut self, x: Tensor, moe: MoeId, normed: Tensor, residual: Tensor) -> Routing {
        assert_eq!(x.rows, self.tokens("mixture_but_experts"), "a row for each token");
        let inner = self.names.moes.get(moe.number(), "mixture").0;
        let [x, normed, residual] = [x, normed, residual].map(|t| self.names.tensor(t));
        self.inner.mixture_but_experts(x, inner, normed, residual)
    }
}
