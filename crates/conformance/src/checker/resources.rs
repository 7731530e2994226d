//! Checks of handles and caches, and of when they may be used.

use anyhow::Result;
use sluice_backend::{
    BufferId, Caches, DeviceMemory, ExpertOptions, KvLayout, KvPool, Lookahead, MatrixId, MatrixSource, MemoryClass,
    Moe, MoeId, NgramTable, Operations, Resources, RotaryFrequencies, RotaryId, RowOptions, StepInputs, StepScratch,
    Tensor,
};
use sluice_store::{Bytes, Loading};

use super::Checker;
use super::names::{MatrixName, PoolName};
use super::operations::{CheckedStep, Step};
use super::recording::{CacheContents, Made};

impl Checker {
    /// The inner pool. Panics if `block` is not committed.
    fn block_of(&self, pool: &KvPool, block: u32) -> KvPool {
        let name = self.names.pool(pool);
        assert!((block as usize) < name.committed, "block {block} of {} that are committed", name.committed);
        name.inner
    }

    fn state(&self, row: u32) {
        let (rows, _) = self.names.states.expect("a pool of states");
        assert!((row as usize) < rows, "state {row} of {rows}");
    }
}

impl Resources for Checker {
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

    fn stream_table(&mut self, table: MatrixId, options: &RowOptions) -> Result<()> {
        self.outside("stream_table");
        let table = self.names.matrix(table).inner;
        self.inner.stream_table(table, options)
    }

    fn stream_ngrams(&mut self, table: &NgramTable, options: &RowOptions) -> Result<()> {
        self.outside("stream_ngrams");
        self.inner.stream_ngrams(&self.names.ngram_table(table), options)
    }

    fn step_scratch(
        &self,
        layouts: &[KvLayout],
        inputs: &StepInputs,
        streamed: bool,
        step: &mut dyn FnMut(&mut dyn Operations),
    ) -> StepScratch {
        self.outside("step_scratch");
        self.inner.step_scratch(layouts, inputs, streamed, &mut |planner| {
            let mut checked = Step::new(inputs.clone(), CacheContents::default());
            checked.is_sizing = true;
            step(&mut CheckedStep { names: &self.names, step: &mut checked, fault: None, inner: planner });
        })
    }

    fn device_memory(&self) -> Option<DeviceMemory> {
        self.inner.device_memory()
    }

    fn read_in_place(&self, streamed: bool) -> Vec<Bytes> {
        self.inner.read_in_place(streamed)
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

    fn fill_experts(&mut self) -> bool {
        self.outside("fill_experts");
        self.inner.fill_experts()
    }
}

impl Caches for Checker {
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
}
