//! What the CPU keeps for a model: buffers, weights, mixtures and caches.

use anyhow::{Context, Result, anyhow, ensure};
use sluice_backend::{
    BufferId, Caches, ExpertOptions, KvLayout, KvPool, Lookahead, MatrixId, MatrixSource, MemoryClass, Moe, MoeId,
    NgramTable, Operations, Profile, Resources, RotaryFrequencies, RotaryId, RowOptions, StepInputs, StepScratch,
    Tensor,
};
use sluice_store::Loading;

use crate::cpu::Cpu;
use crate::memory::{Buffer, RotaryTable, Weight};
use crate::numa::affinity::CoreBinding;
use crate::scratch::ScratchPlanner;

/// Floats of a state that a thread copies at once.
const PIECE: usize = 1 << 17;

impl Resources for Cpu {
    fn alloc(&mut self, class: MemoryClass, rows: usize, cols: usize) -> Result<Tensor> {
        let id = BufferId::new(self.buffers.len());
        self.buffers.push(Buffer::zeroed(class, rows * cols * size_of::<f32>())?);
        Ok(Tensor { buffer: id, offset: 0, rows, cols, stride: cols })
    }

    fn upload(&mut self, values: &[f32], to: Tensor) {
        assert_eq!(values.len(), to.rows * to.cols);
        let place = self.place(to);
        for (row, values) in values.chunks_exact(to.cols.max(1)).enumerate() {
            // SAFETY: `&mut self`: no operation is running.
            unsafe { place.get_mut(row, 0..to.cols) }.copy_from_slice(values);
        }
    }

    fn download(&mut self, t: Tensor, out: &mut [f32]) {
        assert_eq!(out.len(), t.rows * t.cols);
        let place = self.place(t);
        for (row, out) in out.chunks_exact_mut(t.cols.max(1)).enumerate() {
            // SAFETY: `&mut self`: no operation is running.
            out.copy_from_slice(unsafe { place.get(row, 0..t.cols) });
        }
    }

    fn matrix(&mut self, source: MatrixSource) -> Result<MatrixId> {
        ensure!(source.rows > 0 && source.cols > 0, "an empty matrix");
        self.weights.push(Weight::new(source)?);
        Ok(MatrixId::new(self.weights.len() - 1))
    }

    fn rotary(&mut self, frequencies: &RotaryFrequencies, positions: usize) -> Result<RotaryId> {
        self.rotary.push(RotaryTable::new(frequencies, positions)?);
        Ok(RotaryId::new(self.rotary.len() - 1))
    }

    fn moe(&mut self, moe: Moe, follows: Option<MoeId>) -> Result<MoeId> {
        moe.experts.interleaved().map_err(|what| anyhow!("{what} are not supported"))?;
        Ok(self.mixture.register(moe, follows))
    }

    fn stream_experts(&mut self, options: &ExpertOptions, lookahead: Lookahead) -> Result<()> {
        self.mixture.stream(&mut self.weights, options, lookahead)?;
        // Helpers keep spinning, so that they are ready when a read completes.
        self.pool.set_spin(sluice_store::requests::SPIN);
        Ok(())
    }

    fn stream_table(&mut self, table: MatrixId, options: &RowOptions) -> Result<()> {
        let weight = &mut self.weights[table.number()];
        weight.streamed = true;
        self.tables.stream(table, weight.source(), options)
    }

    fn stream_ngrams(&mut self, table: &NgramTable, options: &RowOptions) -> Result<()> {
        table.parts.iter().for_each(|part| self.weights[part.number()].streamed = true);
        let weights = &self.weights;
        self.tables.stream_ngrams(table, |part| weights[part.number()].source(), options)
    }

    fn weight_copies(&self) -> usize {
        self.replicas.as_ref().map_or(1, |replicas| replicas.nodes().len())
    }

    fn replicate_weights(&mut self, loading: Option<&Loading>) -> Option<String> {
        self.replicas.as_mut().map(|replicas| replicas.begin(loading))
    }

    fn copy_weights(&mut self) -> bool {
        self.binding.iter_mut().for_each(CoreBinding::take);
        let copied = self.copy_portion();
        self.binding.iter_mut().for_each(CoreBinding::leave);
        copied
    }

    fn profile(&mut self, on: bool) {
        self.profile = on.then(Profile::default);
    }

    fn record_routing(&mut self) {
        self.mixture.record_routing();
    }

    fn step_scratch(
        &self,
        layouts: &[KvLayout],
        inputs: &StepInputs,
        streamed: bool,
        step: &mut dyn FnMut(&mut dyn Operations),
    ) -> StepScratch {
        let mut sizing = ScratchPlanner::new(self, layouts, inputs, streamed);
        step(&mut sizing);
        sizing.scratch()
    }

    fn limit_steps(&mut self, tokens: usize, rows: usize) {
        for buffer in self.buffers.iter_mut().filter(|b| b.class == MemoryClass::Scratch) {
            buffer.committed = buffer.bytes / rows.max(1) * tokens;
        }
    }

    fn fill_experts(&mut self) -> bool {
        self.mixture.streaming_mut().is_some_and(|streaming| streaming.store.warm_up())
    }
}

impl Caches for Cpu {
    fn alloc_kv(&mut self, layout: KvLayout, blocks: usize) -> Result<KvPool> {
        let id = BufferId::new(self.buffers.len());
        let bytes =
            layout.block_bytes().checked_mul(blocks).context("the KV cache is larger than the address space")?;
        self.buffers.push(Buffer::reserved(MemoryClass::Kv, bytes)?);
        self.kv.push(KvPool { buffer: id, layout });
        Ok(KvPool { buffer: id, layout })
    }

    fn commit_kv(&mut self, pool: &KvPool, blocks: usize) -> Result<()> {
        self.buffers[pool.buffer.number()].commit(blocks * pool.layout.block_bytes(), &mut self.pool)
    }

    fn copy_blocks(&mut self, pool: &KvPool, pairs: &[(u32, u32)]) {
        let len = pool.layout.block_bytes();
        let bytes = self.buffers[pool.buffer.number()].as_bytes_mut();
        for &(from, to) in pairs {
            bytes.copy_within(from as usize * len..(from as usize + 1) * len, to as usize * len);
        }
    }

    fn read_block(&mut self, pool: &KvPool, block: u32, out: &mut [u8]) {
        out.copy_from_slice(self.block(pool, block));
    }

    fn write_block(&mut self, pool: &KvPool, block: u32, bytes: &[u8]) {
        self.block(pool, block).copy_from_slice(bytes);
    }

    fn alloc_states(&mut self, rows: usize, len: usize) -> Result<()> {
        ensure!(self.states.is_none(), "a pool of states is there");
        self.states = Some(self.alloc(MemoryClass::State, rows, len)?);
        Ok(())
    }

    fn copy_state(&mut self, from: u32, to: u32) {
        if from == to {
            return;
        }
        let (from, to) = (self.state(from), self.state(to));
        self.pool.run(to.cols.div_ceil(PIECE), &|piece, _| {
            let cols = piece * PIECE..((piece + 1) * PIECE).min(to.cols);
            // SAFETY: `&mut self`: no operation is running; two rows, and of each this piece.
            unsafe { to.part(0..1, cols.clone()).stream_from(from.part(0..1, cols)) };
        });
    }

    fn zero_state(&mut self, row: u32) {
        let state = self.state(row);
        // SAFETY: `&mut self`: no operation is running.
        unsafe { state.get_mut(0, 0..state.cols) }.fill(0.0);
    }

    fn read_state(&mut self, row: u32, out: &mut [f32]) {
        let state = self.state(row);
        // SAFETY: `&mut self`: no operation is running.
        out.copy_from_slice(unsafe { state.get(0, 0..state.cols) });
    }

    fn write_state(&mut self, row: u32, from: &[f32]) {
        let state = self.state(row);
        assert_eq!(from.len(), state.cols);
        self.pool.run(from.len().div_ceil(PIECE), &|piece, _| {
            let cols = piece * PIECE..((piece + 1) * PIECE).min(from.len());
            // SAFETY: `&mut self`: no operation is running; this piece is this task's alone.
            unsafe { state.get_mut(0, cols.clone()) }.copy_from_slice(&from[cols]);
        });
    }
}
