//! The operations of the backend on one GPU.

#[cfg(feature = "tuning")]
use std::{cell::Cell, time::Instant};

use anyhow::{Result, bail};
use sluice_backend::{
    AttentionLayer, Backend, Best, BufferId, ChannelDeltaLayer, CompressLayer, CompressedLayer, DeltaLayer, Device,
    DeviceMemory, DeviceSampling, Elementwise, ExpertOptions, Failed, HeadRows, IndexLayer, KvLayout, LatentLayer,
    Linear, Logits, Lookahead, MatrixId, MatrixSource, MemoryClass, MemoryUse, Mlp, Moe, MoeId, NgramLayer, NgramTable,
    Norm, Operations, Outcome, Phase, Profile, Projection, Ranked, Resources, RotaryFrequencies, RotaryId, Routing,
    RowOptions, RowStats, Scaled, SelectLayer, StateSpaceLayer, StepInputs, StepScratch, StreamLayer, Streamed, Tensor,
    Top,
};
use sluice_cpu::Pool as Threads;
use sluice_store::{Bytes, Loading};

use crate::cuda::{Cuda, expect_device};
use crate::device::memory::{DeviceBuffer, bytes_of, bytes_of_mut};
use crate::loading;
use crate::moe::experts::is_of_experts;
use crate::moe::offload::{ExpertStreaming, RESERVE, are_in_place, min_bytes};
use crate::ops::compressed;
use crate::ops::context::{Buffer, Context, contiguous_pieces};
use crate::ops::elementwise::{elementwise, phase_of, soft_cap};
use crate::ops::logits::embed;
use crate::ops::matmul::{project, project_add};
use crate::ops::rotary::RotaryTable;
use crate::ops::streams::collapse;
use crate::parameters::number;
use crate::plan::profile::{Profiler, work_of_mixture};
use crate::plan::scratch::ScratchPlanner;
use crate::weights::{Weight, Weights};

#[cfg(feature = "tuning")]
thread_local! {
    static BEGAN: Cell<Option<Instant>> = const { Cell::new(None) };
}

impl Resources for Cuda {
    fn alloc(&mut self, class: MemoryClass, rows: usize, cols: usize) -> Result<Tensor> {
        let elements = rows * cols;
        let memory = DeviceBuffer::zeroed(&self.context.gpu, 4 * elements, class.name())?;
        let id = BufferId::new(self.context.buffers.len());
        self.context.buffers.push(Buffer { class, memory, elements });
        Ok(Tensor { buffer: id, offset: 0, rows, cols, stride: cols })
    }

    fn upload(&mut self, values: &[f32], to: Tensor) {
        assert_eq!(values.len(), to.rows * to.cols);
        self.encoded.encoded_from = None;
        for (at, range) in contiguous_pieces(to, self.context.place(to)) {
            // SAFETY: the tensor was checked against its buffer; waited for below.
            expect_device(unsafe { self.context.gpu.write_async(at, bytes_of(&values[range])) });
        }
        expect_device(self.wait());
    }

    fn download(&mut self, t: Tensor, out: &mut [f32]) {
        assert_eq!(out.len(), t.rows * t.cols);
        for (at, range) in contiguous_pieces(t, self.context.place(t)) {
            // SAFETY: the tensor was checked against its buffer; waited for below.
            expect_device(unsafe { self.context.gpu.read_async(at, bytes_of_mut(&mut out[range])) });
        }
        expect_device(self.wait());
    }

    fn matrix(&mut self, source: MatrixSource) -> Result<MatrixId> {
        self.context.weights.add(Weight::new(source)?);
        Ok(MatrixId::new(self.context.weights.all.len() - 1))
    }

    fn rotary(&mut self, frequencies: &RotaryFrequencies, positions: usize) -> Result<RotaryId> {
        self.context.rotary.push(RotaryTable::new(&self.context.gpu, frequencies, positions)?);
        Ok(RotaryId::new(self.context.rotary.len() - 1))
    }

    fn moe(&mut self, moe: Moe, follows: Option<MoeId>) -> Result<MoeId> {
        self.mixtures.register(&self.context, moe, follows)
    }

    /// Single tokens are not predicted. In steps of many tokens, the experts of the next layer that as many tokens are likely to need are prefetched.
    fn stream_experts(&mut self, options: &ExpertOptions, lookahead: Lookahead) -> Result<()> {
        let how = (lookahead, self.context.mode, self.host);
        let Context { gpu, weights, .. } = &mut self.context;
        let mixtures = self.mixtures.registered();
        let streaming = ExpertStreaming::open(gpu, weights, mixtures, options, how, &mut self.computes)?;
        self.mixtures.stream(streaming);
        Ok(())
    }

    fn stream_table(&mut self, table: MatrixId, options: &RowOptions) -> Result<()> {
        if self.threads.is_none() {
            self.threads = Some(Threads::new(1)?);
        }
        let weight = &mut self.context.weights.all[table.number()];
        weight.by_rows = true;
        self.tables.stream(table, weight.source(), options)
    }

    fn stream_ngrams(&mut self, table: &NgramTable, options: &RowOptions) -> Result<()> {
        if self.threads.is_none() {
            self.threads = Some(Threads::new(1)?);
        }
        let weights = &mut self.context.weights.all;
        table.parts.iter().for_each(|part| weights[part.number()].by_rows = true);
        self.tables.stream_ngrams(table, |part| weights[part.number()].source(), options)
    }

    fn step_scratch(
        &self,
        layouts: &[KvLayout],
        inputs: &StepInputs,
        _: bool,
        step: &mut dyn FnMut(&mut dyn Operations),
    ) -> StepScratch {
        let moes = self.mixtures.registered().collect();
        let mut planner = ScratchPlanner::new(&self.context, moes, layouts, inputs);
        step(&mut planner);
        let angles: Vec<usize> = self.context.rotary.iter().map(|table| 8 * table.half()).collect();
        planner.scratch(&angles)
    }

    fn device_memory(&self) -> Option<DeviceMemory> {
        let weights = &self.context.weights;
        let all: u64 = weights.all.iter().map(|weight| Weights::padded(weight) as u64).sum();
        let experts_in_place = are_in_place(weights, self.mixtures.registered());
        Some(DeviceMemory {
            device: Device::Accelerator(self.context.gpu.device.ordinal),
            free: self.free,
            reserve: RESERVE.min(self.free / 16),
            shared: weights.in_place.is_some(),
            weights: all + self.context.bytes_of_class(MemoryClass::WeightsCopied) as u64,
            experts: self.bytes_of_experts(),
            block: None,
            least_experts: min_bytes(weights, self.mixtures.registered()),
            experts_in_place,
            taken_by_experts: self.mixtures.bytes().1 as u64,
        })
    }

    /// Nothing to do: the memory of longer steps was allocated when they were planned.
    fn limit_steps(&mut self, _: usize, _: usize) {}

    fn profile(&mut self, on: bool) {
        self.profiler = on.then(Profiler::default);
        self.mixtures.is_profiled = on;
    }

    fn record_routing(&mut self) {
        self.mixtures.record_routing();
    }

    fn read_in_place(&self, streamed: bool) -> Vec<Bytes> {
        let weights = &self.context.weights;
        let of_experts = is_of_experts(weights, self.mixtures.registered());
        let all = weights.all.iter().zip(of_experts).filter(|(w, of_experts)| !(w.by_rows || streamed && *of_experts));
        all.flat_map(|(weight, _)| weight.read_in_place().cloned()).collect()
    }

    fn read_weights(&mut self, loading: &Loading, _: &[&Bytes]) -> Result<()> {
        let Context { weights, gpu, .. } = &mut self.context;
        let new = weights.place(gpu)?.into_iter().collect();
        weights.expect(loading::begin(loading, new, &weights.stays())?);
        Ok(())
    }

    fn fill_experts(&mut self) -> bool {
        let mut more = false;
        self.enqueue(|own| {
            if let Some(streaming) = own.mixtures.streaming_mut() {
                more = streaming.fill(&own.context.weights)?;
            }
            Ok(())
        });
        more
    }
}

impl Operations for Cuda {
    fn embed(&mut self, table: MatrixId, out: Tensor) {
        let (weight, tokens) = (&self.context.weights.all[table.number()], self.context.inputs.tokens());
        let (rows, cols) = (weight.rows(), weight.cols());
        assert!(out.rows >= tokens.len() && out.cols == cols, "rows of {cols} into {out:?}");
        assert!(tokens.iter().all(|t| (*t as usize) < rows), "a token beyond {rows}");
        let linear = Linear { matrix: table, rows: 0..tokens.len().min(rows), bias: None };
        self.enqueue_phase(Phase::Embed, &[&linear], 0, |own| match own.tables.has(table) {
            true => own.embed_from_disk(table, out),
            false => embed(&own.context, table, out),
        });
    }

    fn project(&mut self, x: Tensor, norm: Option<Norm>, projections: &[Projection]) {
        let used: Vec<&Linear> = projections.iter().map(|p| &p.linear).collect();
        self.enqueue_phase(Phase::Project, &used, x.rows, |own| {
            project(&own.context, x, norm.as_ref(), projections, &mut own.encoded)
        });
    }

    fn project_add(&mut self, x: Tensor, linear: &Linear, out: Tensor) {
        assert!(out.rows >= x.rows && out.cols == linear.rows.len(), "{:?} into {out:?}", linear.rows);
        self.enqueue_phase(Phase::Project, &[linear], x.rows, |own| {
            project_add(&own.context, x, linear, out, &mut own.encoded)
        });
    }

    fn attention(&mut self, layer: &AttentionLayer) {
        self.enqueue_phase(Phase::Attention, &[], 0, |own| {
            let selected = own.index.selected.filter(|_| layer.selected);
            own.attention.run(&own.context, (layer, selected), &mut own.encoded)
        });
    }

    fn latent_attention(&mut self, layer: &LatentLayer) {
        let all = |rows: HeadRows, heads: usize| Linear { matrix: rows.matrix, rows: 0..heads * rows.rows, bias: None };
        let used = [layer.keys.rows(), layer.values].map(|rows| all(rows, layer.heads));
        let used: Vec<&Linear> = used.iter().collect();
        let tokens = self.context.inputs.tokens().len();
        self.enqueue_phase(Phase::Attention, &used, tokens, |own| {
            own.encoded.encoded_from = None;
            let selected = own.index.selected.filter(|_| layer.selected);
            own.latent.run(&own.context, &mut own.attention, layer, selected)
        });
    }

    fn index(&mut self, layer: &IndexLayer) {
        self.encoded.encoded_from = None;
        self.enqueue_phase(Phase::Attention, &[], 0, |own| own.index.run(&own.context, layer));
    }

    fn compress(&mut self, layer: &CompressLayer) {
        self.encoded.encoded_from = None;
        self.enqueue_phase(Phase::Attention, &[], 0, |own| compressed::compress(&own.context, layer));
    }

    fn select(&mut self, layer: &SelectLayer) {
        self.encoded.encoded_from = None;
        self.enqueue_phase(Phase::Attention, &[], 0, |own| own.index.run_entries(&own.context, layer));
    }

    fn compressed_attention(&mut self, layer: &CompressedLayer) {
        self.encoded.encoded_from = None;
        self.enqueue_phase(Phase::Attention, &[], 0, |own| compressed::attend(&own.context, layer, own.index.entries));
    }

    fn delta_net(&mut self, layer: &DeltaLayer) {
        self.enqueue_phase(Phase::DeltaNet, &[], 0, |own| own.delta.run(&own.context, layer));
    }

    fn channel_delta(&mut self, layer: &ChannelDeltaLayer) {
        self.enqueue_phase(Phase::DeltaNet, &[], 0, |own| own.delta.run_by_channel(&own.context, layer));
    }

    fn state_space(&mut self, layer: &StateSpaceLayer) {
        self.enqueue_phase(Phase::StateSpace, &[], 0, |own| own.state_space.run(&own.context, layer));
    }

    fn collapse(&mut self, layer: &StreamLayer) {
        let tokens = self.context.inputs.tokens().len();
        self.enqueue_phase(Phase::Project, &[&layer.mix], tokens, |own| {
            collapse(&own.context, layer, &mut own.encoded)
        });
    }

    fn embed_ngrams(&mut self, table: &NgramTable, out: Tensor) {
        let (first, tokens) = (table.parts[0], self.context.inputs.tokens().len());
        assert!(out.rows >= tokens && out.cols == table.hash.heads() * table.cols, "rows of n-grams into {out:?}");
        self.enqueue_phase(Phase::Embed, &[], 0, |own| match own.tables.has(first) {
            true => own.embed_from_disk(first, out),
            false => bail!("tables of n-grams stay on disk on a device"),
        });
    }

    fn add_ngrams(&mut self, layer: &NgramLayer) {
        self.encoded.encoded_from = None;
        self.enqueue_phase(Phase::DeltaNet, &[], 0, |own| own.ngrams.run(&own.context, layer));
    }

    fn mlp(&mut self, x: Tensor, norm: Norm, mlp: &Mlp, residual: Tensor) {
        let Mlp { gate, up, down } = mlp;
        assert!(residual.rows >= x.rows && residual.cols == down.rows.len(), "{:?} into {residual:?}", down.rows);
        self.enqueue_phase(Phase::Mlp, &[gate, up, down], x.rows, |own| {
            own.mlp.run(&own.context, x, &norm, mlp, residual, &mut own.encoded)
        });
    }

    fn mixture(&mut self, x: Tensor, moe: MoeId, residual: Tensor) {
        let number = moe.number();
        let width = self.mixtures.moe(number).experts.hidden();
        assert_eq!((x.rows, width), (residual.rows, residual.cols), "as much comes out as experts put out");
        let work = |own: &Cuda| work_of_mixture(&own.context.weights.all, own.mixtures.moe(number), x.rows);
        self.enqueue_profiled(Phase::Experts, work, |own| own.mixtures.run(&own.context, x, number, residual));
    }

    fn mixture_but_experts(&mut self, x: Tensor, moe: MoeId, normed: Tensor, residual: Tensor) -> Routing {
        let mut routing = Routing::default();
        self.encoded.encoded_from = None;
        self.enqueue(|own| {
            routing = own.mixtures.run_without_experts(&own.context, x, moe.number(), normed, residual)?;
            Ok(())
        });
        routing
    }

    fn elementwise(&mut self, operation: &Elementwise) {
        self.encoded.encoded_from = None;
        self.enqueue_phase(phase_of(operation), &[], 0, |own| elementwise(&own.context, operation));
    }

    fn logits(&mut self, x: Tensor, norm: Option<Norm>, head: MatrixId, softcap: Option<f32>) {
        let (vocabulary, rows) = (self.context.weights.all[head.number()].rows(), self.context.inputs.wanted().len());
        assert!(
            self.context.inputs.wanted().last().is_none_or(|last| (*last as usize) < x.rows),
            "a row that is not there"
        );
        if rows == 0 {
            self.logits.set_empty(vocabulary);
            return;
        }
        let linear = Linear { matrix: head, rows: 0..vocabulary, bias: None };
        self.enqueue_phase(Phase::Head, &[&linear], rows, |own| {
            own.logits.run(&own.context, x, norm.as_ref(), &linear, &mut own.encoded)?;
            if let Some(cap) = softcap {
                // SAFETY: the head has written this many logits.
                unsafe { soft_cap(&own.context.gpu, own.logits.at(), (rows, vocabulary), cap)? };
            }
            own.sampling.find_tops(&own.context.gpu, own.logits.at(), own.logits.shape)
        });
    }
}

impl Backend for Cuda {
    fn keeps_states(&self) -> bool {
        true
    }

    fn begin(&mut self, inputs: &StepInputs) {
        #[cfg(feature = "tuning")]
        BEGAN.set(Some(Instant::now()));
        // Reuses what earlier steps allocated.
        self.context.inputs.clone_from(inputs);
        // Reads begin now, and are waited for where a row is used.
        self.tables.begin(inputs);
        self.logits.reset();
        self.encoded.encoded_from = None;
        self.sampling.reset();
        self.enqueue(|own| {
            own.context.weights.bring(&own.context.gpu)?;
            own.mixtures.write_tables(&own.context)?;
            let Context { gpu, rotary, inputs, step, kv, .. } = &mut own.context;
            rotary.iter_mut().try_for_each(|table| table.fill(gpu, inputs.positions()))?;
            step.begin(gpu, inputs, kv.len())?;
            gpu.begin_step();
            Ok(())
        });
    }

    fn end(&mut self) -> Outcome {
        #[cfg(feature = "tuning")]
        let recorded = Instant::now();
        self.enqueue(|own| {
            own.end_launches()?;
            own.logits.reserve_copy(&own.context)?;
            own.sampling.copy_tops(&own.context.gpu)?;
            own.wait()?;
            own.profiler.as_mut().map_or(Ok(()), Profiler::end)
        });
        #[cfg(feature = "tuning")]
        if std::env::var_os("SLUICE_CUDA_TIMES").is_some() {
            let before = BEGAN.get().map_or(0, |began| recorded.duration_since(began).as_micros());
            eprintln!("step: {before} us recording, {} us running", recorded.elapsed().as_micros());
        }
        // Even if the step failed, nothing uses its experts any more.
        self.mixtures.cancel();
        let settled = self.wait().and_then(|()| self.mixtures.settle(&self.context));
        self.enqueue(|_| settled);
        let (mut failed, routed, synchronisations) = self.mixtures.end();
        failed.extend(self.tables.take_failed());
        if let Some(why) = self.error.take() {
            let rows = (0..number(self.context.inputs.tokens().len())).collect();
            failed = vec![Failed { rows, why }];
        }
        Outcome { logits: self.logits.shape, failed, routed, synchronisations }
    }

    fn read_logits(&mut self, logits: Logits) -> &[f32] {
        assert_eq!(logits, self.logits.shape, "logits of the last step");
        expect_device(self.logits.read(&self.context))
    }

    fn each_logits(&mut self, logits: Logits, each: &(dyn Fn(usize, usize, &[f32]) + Sync)) {
        let mut threads = self.threads.take();
        let (all, vocabulary) = (self.read_logits(logits), logits.vocabulary);
        let one = |row: usize, thread| each(row, thread, &all[row * vocabulary..(row + 1) * vocabulary]);
        match &mut threads {
            Some(threads) => threads.run(logits.rows, &one),
            None => (0..logits.rows).for_each(|row| one(row, 0)),
        }
        self.threads = threads;
    }

    fn device_sampling(&mut self) -> Option<&mut dyn DeviceSampling> {
        Some(self)
    }

    fn threads(&self) -> usize {
        self.threads.as_ref().map_or(1, Threads::threads)
    }

    fn take_profile(&mut self) -> Profile {
        self.profiler.as_mut().map(|profiler| std::mem::take(&mut profiler.profile)).unwrap_or_default()
    }

    fn take_streamed(&mut self) -> Option<Streamed> {
        self.mixtures.streaming_mut().map(ExpertStreaming::take_stats)
    }

    fn table_stats(&self) -> Option<RowStats> {
        self.tables.stats()
    }

    fn notes(&self) -> Vec<String> {
        let mut notes = self.mixtures.streaming().map_or(Vec::new(), ExpertStreaming::notes);
        notes.extend(self.tables.notes().cloned());
        notes.extend(self.context.weights.note());
        if !self.context.gpu.device.reserves && !self.context.kv.is_empty() {
            notes.push(format!(
                "{} cannot reserve addresses: keys and values take all their memory at once",
                self.context.gpu.device.name
            ));
        }
        notes
    }

    fn memory(&mut self) -> Vec<MemoryUse> {
        let device = Device::Accelerator(self.context.gpu.device.ordinal);
        let of = |class| self.context.bytes_of_class(class);
        let (mixture_scratch, experts) = self.mixtures.bytes();
        let scratch = self.encoded.bytes()
            + self.mlp.bytes()
            + self.logits.device_bytes()
            + self.sampling.bytes()
            + self.delta.bytes()
            + self.state_space.bytes()
            + self.attention.bytes()
            + self.latent.bytes()
            + self.index.bytes()
            + self.ngrams.bytes()
            + mixture_scratch;
        let (step, pinned) = self.context.step.bytes();
        let rotary: usize = self.context.rotary.iter().map(|t| t.memory.committed).sum();
        let kv = self.context.kv.iter().map(|pool| pool.memory.committed).sum();
        let on_device = |class| match class {
            MemoryClass::WeightsMapped => 0,
            MemoryClass::WeightsCopied => of(class) + self.context.weights.bytes(),
            MemoryClass::Kv => kv,
            MemoryClass::State => of(class),
            MemoryClass::Experts => experts,
            MemoryClass::Scratch => of(class) + scratch + step + rotary,
        };
        let [rows, widened] = self.tables.bytes();
        let [mapped, read] = self.context.weights.bytes_in_place();
        let on_host = |class| match class {
            MemoryClass::WeightsMapped => mapped,
            MemoryClass::WeightsCopied => self.context.weights.made_bytes() + read + rows,
            MemoryClass::Experts => self.mixtures.streaming().map_or(0, ExpertStreaming::host_bytes),
            MemoryClass::Scratch => pinned + widened + self.logits.host_bytes() + self.sampling.host_bytes(),
            _ => 0,
        };
        let uses = |class| {
            let host = MemoryUse { class, device: Device::Host, bytes: on_host(class) };
            [MemoryUse { class, device, bytes: on_device(class) }, host]
        };
        MemoryClass::ALL.into_iter().flat_map(uses).collect()
    }
}

impl DeviceSampling for Cuda {
    fn tops(&mut self, logits: Logits) -> Option<&[Top]> {
        assert_eq!(logits, self.logits.shape, "logits of the last step");
        self.sampling.tops()
    }

    fn best(&mut self, logits: Logits, of: &[Ranked]) -> &[Best] {
        assert_eq!(logits, self.logits.shape, "logits of the last step");
        expect_device(self.sampling.best(&self.context.gpu, (self.logits.at(), logits), of))
    }

    fn sums(&mut self, logits: Logits, of: &[Scaled]) -> &[u64] {
        assert_eq!(logits, self.logits.shape, "logits of the last step");
        expect_device(self.sampling.sums(&self.context.gpu, (self.logits.at(), logits), of))
    }

    fn blocks(&mut self, logits: Logits, of: &[(usize, usize)]) -> &[f32] {
        assert_eq!(logits, self.logits.shape, "logits of the last step");
        expect_device(self.sampling.blocks(&self.context.gpu, (self.logits.at(), logits), of))
    }
}
