//! The operations of the backend on several GPUs.

use anyhow::Result;
use sluice_backend::{
    AttentionLayer, Backend, BufferId, ChannelDeltaLayer, CompressLayer, CompressedLayer, DeltaLayer, Device,
    DeviceMemory, DeviceSampling, Elementwise, ExpertOptions, IndexLayer, KvLayout, LatentLayer, Linear, Logits,
    Lookahead, MatrixId, MatrixSource, MemoryClass, MemoryUse, Mlp, Moe, MoeId, NgramLayer, NgramTable, Norm,
    Operations, Outcome, Phase, Profile, Projection, Resources, RotaryFrequencies, RotaryId, Routing, RowOptions,
    RowStats, SelectLayer, StateSpaceLayer, StepInputs, StepScratch, StreamLayer, Streamed, Tensor,
};
use sluice_experts::Error;
use sluice_store::{Bytes, Loading};

use crate::cuda::Cuda;
use crate::loading;
use crate::multi::coherence::{BufferCoherence, Region};
use crate::multi::partition::{OperationKey, Partition};
use crate::multi::pipeline::{AssignedMixture, Pipeline};
use crate::multi::touched::touched;
use crate::plan::scratch::ScratchPlanner;

impl Resources for Pipeline {
    fn alloc(&mut self, class: MemoryClass, rows: usize, cols: usize) -> Result<Tensor> {
        let tensors = self.devices.iter_mut().map(|d| d.alloc(class, rows, cols)).collect::<Result<Vec<Tensor>>>()?;
        // The devices' pools of states are buffers too.
        let buffer = BufferId::new(self.buffers.len());
        assert!(tensors.iter().all(|t| t.buffer == buffer), "buffers have the same numbers on all devices");
        self.buffers.push((BufferCoherence::everywhere(self.count()), rows * cols));
        Ok(tensors[0])
    }

    fn upload(&mut self, values: &[f32], to: Tensor) {
        let mut transfers = Vec::new();
        let count = self.count();
        self.buffers[to.buffer.number()].0.make_equal(count, &mut transfers);
        self.enqueue_transfers(to.buffer, &mut transfers);
        self.devices.iter_mut().for_each(|device| device.upload(values, to));
    }

    fn download(&mut self, t: Tensor, out: &mut [f32]) {
        let mut transfers = Vec::new();
        self.buffers[t.buffer.number()].0.read(0, Region::of(t), &mut transfers);
        self.enqueue_transfers(t.buffer, &mut transfers);
        self.devices[0].download(t, out);
    }

    fn matrix(&mut self, source: MatrixSource) -> Result<MatrixId> {
        let ids = self.devices.iter_mut().map(|d| d.matrix(source.clone())).collect::<Result<Vec<_>>>()?;
        Ok(ids[0])
    }

    fn rotary(&mut self, frequencies: &RotaryFrequencies, positions: usize) -> Result<RotaryId> {
        let ids = self.devices.iter_mut().map(|d| d.rotary(frequencies, positions)).collect::<Result<Vec<_>>>()?;
        Ok(ids[0])
    }

    fn moe(&mut self, moe: Moe, follows: Option<MoeId>) -> Result<MoeId> {
        self.mixtures.push(AssignedMixture { moe, follows, at: None });
        Ok(MoeId::new(self.mixtures.len() - 1))
    }

    /// Each device has tiers of its own for the experts of its layers: slots in its memory, and a part of the host's slots in proportion to their bytes.
    fn stream_experts(&mut self, options: &ExpertOptions, lookahead: Lookahead) -> Result<()> {
        self.assign()?;
        let with_experts: Vec<usize> =
            (0..self.count()).filter(|d| self.devices[*d].mixtures.registered().next().is_some()).collect();
        // 1. The host's memory that each needs, and what is left
        let (mut min, mut widest) = (vec![0; self.count()], 0);
        if options.budget < u64::MAX {
            let none = ExpertOptions { budget: 0, ..options.clone() };
            for device in &with_experts {
                match self.devices[*device].stream_experts(&none, Lookahead::Off).map_err(|e| e.downcast()) {
                    Err(Ok(Error::ExpertBudget { needed, experts, .. })) => {
                        (min[*device], widest) = (needed, widest.max(experts));
                    }
                    Err(Ok(e)) => return Err(e.into()),
                    Err(Err(e)) => return Err(e),
                    Ok(()) => {}
                }
            }
        }
        let needed: u64 = min.iter().sum();
        let Some(spare) = options.budget.checked_sub(needed) else {
            return Err(Error::ExpertBudget { budget: options.budget, needed, experts: widest }.into());
        };
        // 2. The tiers of each
        let bytes: Vec<u64> = self.devices.iter().map(Cuda::bytes_of_experts).collect();
        let all = bytes.iter().sum::<u64>().max(1);
        let mut computes = None;
        for device in with_experts {
            let own = u128::from(spare) * u128::from(bytes[device]) / u128::from(all);
            let budget = if options.budget == u64::MAX { u64::MAX } else { min[device] + own as u64 };
            let here = |(layer, expert): &(usize, usize)| {
                let (at, id) = self.mixtures.get(*layer)?.at?;
                (at == device).then_some((id.number(), *expert))
            };
            let pinned = options.pinned.iter().filter_map(here).collect();
            let cuda = &mut self.devices[device];
            cuda.computes = computes;
            cuda.stream_experts(&ExpertOptions { budget, pinned, ..options.clone() }, lookahead)?;
            computes = cuda.computes.clone();
        }
        Ok(())
    }

    /// The first device has it until it is known which one looks it up.
    fn stream_table(&mut self, table: MatrixId, options: &RowOptions) -> Result<()> {
        self.devices.iter_mut().for_each(|device| device.context.weights.all[table.number()].by_rows = true);
        self.devices[0].stream_table(table, options)
    }

    /// As above.
    fn stream_ngrams(&mut self, table: &NgramTable, options: &RowOptions) -> Result<()> {
        for device in &mut self.devices {
            table.parts.iter().for_each(|part| device.context.weights.all[part.number()].by_rows = true);
        }
        self.devices[0].stream_ngrams(table, options)
    }

    fn fill_experts(&mut self) -> bool {
        let mut more = false;
        self.devices.iter_mut().for_each(|device| more |= device.fill_experts());
        more
    }

    /// The scratch of the device that needs most.
    fn step_scratch(
        &self,
        layouts: &[KvLayout],
        inputs: &StepInputs,
        _: bool,
        step: &mut dyn FnMut(&mut dyn Operations),
    ) -> StepScratch {
        let first = &self.devices[0];
        let moes = self.mixtures.iter().map(|m| &m.moe).collect();
        let mut planner = ScratchPlanner::new(&first.context, moes, layouts, inputs);
        step(&mut planner);
        let of = (self.count(), self.sum(|device| device.free));
        self.partition.get_or_init(|| Partition::new(&planner.operations, &first.context.weights.all, layouts, of));
        let angles: Vec<usize> = first.context.rotary.iter().map(|table| 8 * table.half()).collect();
        planner.scratch(&angles)
    }

    /// For each figure, that of the device with the least room.
    fn device_memory(&self) -> Option<DeviceMemory> {
        let own: Vec<DeviceMemory> = self.devices.iter().filter_map(Resources::device_memory).collect();
        let partition = self.partition.get();
        let copied = self.devices[0].context.bytes_of_class(MemoryClass::WeightsCopied) as u64;
        let [rest, least_experts] = partition.map_or([0; 2], |partition| self.max_bytes(partition));
        Some(DeviceMemory {
            free: own.iter().map(|m| m.free).min()?,
            reserve: own.iter().map(|m| m.reserve).max()?,
            weights: partition.map_or(own[0].weights, |partition| partition.max_weights + copied),
            block: partition.map(|partition| partition.max_block),
            // If experts are streamed, the weights that remain are the most that a device has of others.
            experts: partition.map_or(0, |partition| partition.max_weights - rest),
            least_experts,
            shared: false,
            experts_in_place: false,
            taken_by_experts: own.iter().map(|m| m.taken_by_experts).max()?,
            ..own[0]
        })
    }

    fn limit_steps(&mut self, _: usize, _: usize) {}

    fn profile(&mut self, on: bool) {
        self.devices.iter_mut().for_each(|device| device.profile(on));
    }

    fn record_routing(&mut self) {
        self.devices.iter_mut().for_each(Resources::record_routing);
    }

    fn read_weights(&mut self, loading: &Loading, _: &[&Bytes]) -> Result<()> {
        self.assign()?;
        let mut new = Vec::new();
        for device in &mut self.devices {
            new.extend(device.context.weights.place(&device.context.gpu)?);
        }
        let coming = loading::begin(loading, new, &[])?;
        self.devices.iter_mut().for_each(|device| device.context.weights.expect(coming.clone()));
        Ok(())
    }
}

impl Operations for Pipeline {
    fn embed(&mut self, table: MatrixId, out: Tensor) {
        let home = self.home(OperationKey::Embed(table.number()));
        let tokens = self.devices[0].context.inputs.tokens().len();
        self.prepare(home, &[], &[out.first_rows(tokens)]).embed(table, out);
    }

    fn project(&mut self, x: Tensor, norm: Option<Norm>, projections: &[Projection]) {
        let home = self.home(OperationKey::project(projections));
        let biases = projections.iter().flat_map(|p| Pipeline::bias_of(&p.linear));
        let reads: Vec<Tensor> = [x].into_iter().chain(norm.map(|n| n.weight)).chain(biases).collect();
        let writes: Vec<Tensor> = projections.iter().map(|p| p.out.first_rows(x.rows)).collect();
        self.prepare(home, &reads, &writes).project(x, norm, projections);
    }

    fn project_add(&mut self, x: Tensor, linear: &Linear, out: Tensor) {
        let home = self.home(OperationKey::Add(linear.matrix.number()));
        let rows = out.first_rows(x.rows);
        let reads: Vec<Tensor> = [x, rows].into_iter().chain(Pipeline::bias_of(linear)).collect();
        self.prepare(home, &reads, &[rows]).project_add(x, linear, out);
    }

    fn attention(&mut self, layer: &AttentionLayer) {
        let home = self.home(OperationKey::Attention(layer.group, layer.layer));
        let tokens = self.devices[0].context.inputs.tokens().len();
        let [q, k, v, out] = [layer.q, layer.k, layer.v, layer.out].map(|t| t.first_rows(tokens));
        let norms = [layer.q_norm, layer.k_norm].into_iter().flatten().map(|n| n.weight);
        let reads: Vec<Tensor> = [q, k, v].into_iter().chain(norms).chain(layer.sinks).collect();
        let there = self.groups[layer.group].layers[layer.layer].1;
        self.prepare(home, &reads, &[q, k, v, out]).attention(&AttentionLayer { layer: there, ..layer.clone() });
    }

    fn latent_attention(&mut self, layer: &LatentLayer) {
        let home = self.home(OperationKey::Attention(layer.group, layer.layer));
        let tokens = self.devices[0].context.inputs.tokens().len();
        let [q, kv, out] = [layer.q, layer.kv, layer.out].map(|t| t.first_rows(tokens));
        let there = self.groups[layer.group].layers[layer.layer].1;
        self.prepare(home, &[q, kv, layer.norm.weight], &[q, kv, out])
            .latent_attention(&LatentLayer { layer: there, ..layer.clone() });
    }

    fn index(&mut self, layer: &IndexLayer) {
        self.select_positions(layer);
    }

    fn compress(&mut self, layer: &CompressLayer) {
        self.make_entries(layer);
    }

    fn select(&mut self, layer: &SelectLayer) {
        self.select_entries(layer);
    }

    fn compressed_attention(&mut self, layer: &CompressedLayer) {
        self.attend_compressed(layer);
    }

    fn delta_net(&mut self, layer: &DeltaLayer) {
        let [qkv, z, b, a, out] = [layer.qkv, layer.z, layer.b, layer.a, layer.out];
        let weights = [layer.conv, layer.decay, layer.dt_bias, layer.norm.weight];
        self.prepare_recurrent((layer.layer, layer.shape.state_len()), &[qkv, z, b, a], &weights, out).delta_net(layer);
    }

    fn channel_delta(&mut self, layer: &ChannelDeltaLayer) {
        let [qkv, z, b, f, out] = [layer.qkv, layer.z, layer.b, layer.f, layer.out];
        let weights = [layer.conv, layer.rates, layer.dt_bias, layer.norm.weight];
        self.prepare_recurrent((layer.layer, layer.shape.state_len()), &[qkv, z, b, f], &weights, out)
            .channel_delta(layer);
    }

    fn state_space(&mut self, layer: &StateSpaceLayer) {
        let StateSpaceLayer { xbc, z, dt, out, .. } = *layer;
        let weights = [layer.conv, layer.decay, layer.dt_bias, layer.skip, layer.norm.weight];
        let weights: Vec<Tensor> = weights.into_iter().chain(layer.conv_bias).collect();
        self.prepare_recurrent((layer.layer, layer.shape.state_len()), &[xbc, z, dt], &weights, out).state_space(layer);
    }

    fn collapse(&mut self, layer: &StreamLayer) {
        let home = self.home(OperationKey::Collapse(layer.mix.matrix.number()));
        let tokens = self.devices[0].context.inputs.tokens().len();
        let [streams, weights, out] = [layer.streams, layer.weights, layer.out].map(|t| t.first_rows(tokens));
        self.prepare(home, &[streams, layer.norm.weight, layer.bias], &[weights, out]).collapse(layer);
    }

    fn embed_ngrams(&mut self, table: &NgramTable, out: Tensor) {
        let home = self.home(OperationKey::Embed(table.parts[0].number()));
        let tokens = self.devices[0].context.inputs.tokens().len();
        self.prepare(home, &[], &[out.first_rows(tokens)]).embed_ngrams(table, out);
    }

    fn add_ngrams(&mut self, layer: &NgramLayer) {
        let home = self.home(OperationKey::Ngrams(layer.state_at));
        let tokens = self.devices[0].context.inputs.tokens().len();
        self.note_state(layer.state_at..layer.state_at + layer.state_len(), home);
        let rows = [layer.keys, layer.queries, layer.value, layer.streams].map(|t| t.first_rows(tokens));
        let reads = [&rows[..], &[layer.norm.weight, layer.conv]].concat();
        self.prepare(home, &reads, &[rows[3]]).add_ngrams(layer);
    }

    fn mlp(&mut self, x: Tensor, norm: Norm, mlp: &Mlp, residual: Tensor) {
        let home = self.home(OperationKey::Mlp(mlp.gate.matrix.number()));
        let rows = residual.first_rows(x.rows);
        let biases = [&mlp.gate, &mlp.up, &mlp.down].into_iter().flat_map(Pipeline::bias_of);
        let reads: Vec<Tensor> = [x, rows, norm.weight].into_iter().chain(biases).collect();
        self.prepare(home, &reads, &[rows]).mlp(x, norm, mlp, residual);
    }

    fn mixture(&mut self, x: Tensor, moe: MoeId, residual: Tensor) {
        let Some((home, own)) = self.mixture_at(moe) else { return };
        let reads = [&[x, residual], &self.vectors_of(moe, x.rows)[..]].concat();
        let device = self.prepare(home, &reads, &[residual]);
        let mut waits = false;
        device.enqueue(|device| {
            waits = device.mixtures.waits_in(&device.context, x, own, residual)?;
            Ok(())
        });
        if waits {
            self.answer_all();
        }
        self.devices[home].mixture(x, own, residual);
    }

    fn mixture_but_experts(&mut self, x: Tensor, moe: MoeId, normed: Tensor, residual: Tensor) -> Routing {
        let Some((home, own)) = self.mixture_at(moe) else { return Routing::default() };
        let reads = [&[x, normed, residual], &self.vectors_of(moe, x.rows)[..]].concat();
        self.prepare(home, &reads, &[normed, residual]);
        self.answer_all();
        self.devices[home].mixture_but_experts(x, own, normed, residual)
    }

    /// Where the operation before it ran.
    fn elementwise(&mut self, operation: &Elementwise) {
        let tokens = self.devices[0].context.inputs.tokens().len();
        let (reads, writes) = touched(operation);
        let first = |t: Tensor| if t.rows >= tokens { t.first_rows(tokens) } else { t };
        let reads: Vec<Tensor> = reads.into_iter().map(first).collect();
        self.prepare(self.current, &reads, &[first(writes)]).elementwise(operation);
    }

    fn logits(&mut self, x: Tensor, norm: Option<Norm>, head: MatrixId, softcap: Option<f32>) {
        let home = self.home(OperationKey::Logits(head.number()));
        self.head = home;
        let reads: Vec<Tensor> = std::iter::once(x).chain(norm.map(|norm| norm.weight)).collect();
        self.prepare(home, &reads, &[]).logits(x, norm, head, softcap);
    }
}

impl Backend for Pipeline {
    fn keeps_states(&self) -> bool {
        true
    }

    /// Which device has an operation is known from a whole step alone.
    fn takes_other_steps(&self) -> bool {
        false
    }

    fn begin(&mut self, inputs: &StepInputs) {
        let assigned = self.assign();
        self.devices[0].enqueue(|_| assigned);
        self.devices.iter_mut().for_each(|device| device.begin(inputs));
        (self.current, self.head) = (0, 0);
    }

    fn end(&mut self) -> Outcome {
        // Each may request experts, and the first may wait for the last.
        self.devices.iter_mut().for_each(|device| device.enqueue(Cuda::end_launches));
        let mut all = Outcome::default();
        for (number, device) in self.devices.iter_mut().enumerate() {
            let outcome = device.end();
            if number == self.head {
                all.logits = outcome.logits;
            }
            let mixtures: Vec<usize> =
                (0..self.mixtures.len()).filter(|m| self.mixtures[*m].at.is_some_and(|(at, _)| at == number)).collect();
            let routed = outcome.routed.into_iter().map(|mut routed| {
                routed.layer = mixtures[routed.layer];
                routed
            });
            all.routed.extend(routed);
            // The same rows fail once.
            for failed in outcome.failed {
                if all.failed.iter().all(|known| known.rows != failed.rows) {
                    all.failed.push(failed);
                }
            }
            all.synchronisations += outcome.synchronisations;
        }
        all
    }

    fn read_logits(&mut self, logits: Logits) -> &[f32] {
        self.devices[self.head].read_logits(logits)
    }

    fn each_logits(&mut self, logits: Logits, each: &(dyn Fn(usize, usize, &[f32]) + Sync)) {
        self.devices[self.head].each_logits(logits, each);
    }

    fn device_sampling(&mut self) -> Option<&mut dyn DeviceSampling> {
        self.devices[self.head].device_sampling()
    }

    fn threads(&self) -> usize {
        self.devices[self.head].threads()
    }

    fn take_profile(&mut self) -> Profile {
        let mut all = Profile::default();
        for profile in self.devices.iter_mut().map(Backend::take_profile) {
            Phase::ALL.into_iter().for_each(|phase| all.add_row(phase, profile.row(phase)));
        }
        all
    }

    fn take_streamed(&mut self) -> Option<Streamed> {
        let mut all = self.devices.iter_mut().filter_map(Backend::take_streamed);
        let first = all.next()?;
        Some(all.fold(first, |mut sum, other| {
            sum.beside(&other);
            sum
        }))
    }

    fn table_stats(&self) -> Option<RowStats> {
        self.devices.iter().filter_map(Backend::table_stats).reduce(|a, b| a + b)
    }

    fn notes(&self) -> Vec<String> {
        let mut notes: Vec<String> = self.devices.iter().flat_map(Backend::notes).collect();
        notes.dedup();
        notes
    }

    fn memory(&mut self) -> Vec<MemoryUse> {
        let of = |(number, device): (usize, &mut Cuda)| {
            let [rows, _] = device.tables.bytes();
            device.memory().into_iter().map(move |m| match (m.class, m.device) {
                // All know the same matrices, of which the host has one copy. Rows of a table are kept for one device.
                (MemoryClass::WeightsCopied, Device::Host) if number > 0 => MemoryUse { bytes: rows, ..m },
                _ => m,
            })
        };
        self.devices.iter_mut().enumerate().flat_map(of).collect()
    }
}
