//! Several GPUs as one: each carries out a run of a step's operations, with the weights, keys and values, and states of that run; the residual stream goes from one
//! to the next.
//!
//! A device is a backend of its own (`Cuda`), with all buffers and only some of the matrices. What an operation reads is brought to the device that carries it out, in
//! the devices' own streams, so that the host waits for nothing but the end of a step. Where the operations of a step are not known beforehand, as in tests of single
//! ones, every device has every matrix and they take turns.

use std::cell::OnceCell;
use std::collections::BTreeSet;
use std::ops::Range;

use anyhow::{Result, ensure};
use sluice_backend::{
    Activations, AttentionLayer, Backend, BufferId, Caches, DeltaLayer, DeviceMemory, DeviceSampling, ExpertOptions,
    KvLayout, KvPool, Linear, Logits, Lookahead, MatrixId, MatrixSource, MemoryClass, MemoryUse, Mlp, Moe, MoeId, Norm,
    Operations, Outcome, Phase, Profile, Projection, Resources, RotaryFrequencies, RotaryId, Routing, StepInputs,
    StepScratch, Streamed, Tensor,
};
use sluice_experts::Error;
use sluice_store::{Bytes, Loading};

use crate::backend::{Cuda, by_experts, runs};
use crate::coherence::{CoherentRange, Region, Transfer, What};
use crate::host_split::Host;
use crate::loading;
use crate::sizing::ScratchPlanner;
use crate::split::{Key, Split};
use crate::streaming::least_bytes;
use crate::streams::Point;
use crate::weights::Weights;

/// A mixture, and the device and its number there once that is decided.
struct Mixture {
    moe: Moe,
    follows: Option<MoeId>,
    at: Option<(usize, MoeId)>,
}

/// The blocks of a cache group.
struct Group {
    layout: KvLayout,
    /// Of each layer: the device, and which of the layers there it is.
    layers: Vec<(usize, usize)>,
    /// On each device.
    pools: Vec<KvPool>,
}

/// GPUs that take a model's layers one after the other.
pub struct Pipeline {
    pub(crate) devices: Vec<Cuda>,
    /// Where each is when another begins to wait for it.
    points: Vec<Point>,
    buffers: Vec<(CoherentRange, usize)>,
    mixtures: Vec<Mixture>,
    groups: Vec<Group>,
    /// Of recurrent layers that steps came to: which elements of a state, and on which device.
    states: Vec<(Range<usize>, usize)>,
    split: OnceCell<Split>,
    /// Whose turn it is, where there is no split.
    turn: usize,
    current: usize,
    /// Which device has the logits.
    head: usize,
    scratch: Vec<Transfer>,
    bytes: Vec<u8>,
    /// Every device knows which matrices it has.
    dealt: bool,
}

impl Pipeline {
    /// These devices, one after the other; one that is named twice counts as two, each with half of its memory. So many `threads` of the host look at logits.
    ///
    /// # Errors
    /// In one line, where one of them is not there or cannot be used, or there are none or more than 64.
    pub fn new(ordinals: &[u32], mode: Activations, threads: usize) -> Result<Pipeline> {
        ensure!(!ordinals.is_empty() && ordinals.len() <= 64, "{} devices: 1 to 64 can be used", ordinals.len());
        let mut devices = ordinals.iter().map(|n| Cuda::new(*n, mode)).collect::<Result<Vec<Cuda>>>()?;
        for (device, ordinal) in devices.iter_mut().zip(ordinals) {
            device.draw_with(threads);
            device.free /= ordinals.iter().filter(|n| *n == ordinal).count() as u64;
        }
        for (i, device) in devices.iter().enumerate() {
            let others = devices.iter().zip(ordinals).filter(|(_, ordinal)| **ordinal != ordinals[i]);
            others.for_each(|(other, _)| device.gpu.reach(&other.gpu));
        }
        // What one asks concerns all: they wait for one another.
        let asked = devices[0].gpu.asked.clone();
        devices.iter_mut().for_each(|device| device.gpu.asked = asked.clone());
        let points = devices.iter().map(|device| Point::new(&device.gpu)).collect::<Result<_, _>>()?;
        Ok(Pipeline {
            devices,
            points,
            buffers: Vec::new(),
            mixtures: Vec::new(),
            groups: Vec::new(),
            states: Vec::new(),
            split: OnceCell::new(),
            turn: 0,
            current: 0,
            head: 0,
            scratch: Vec::new(),
            bytes: Vec::new(),
            dealt: false,
        })
    }

    /// As [`Cuda::beside`].
    pub fn beside(mut self, host: Host) -> Pipeline {
        self.devices.iter_mut().for_each(|device| device.host = Some(host));
        self
    }

    /// As [`Cuda::holding`].
    pub fn holding(mut self, launches: usize) -> Pipeline {
        self.devices.iter_mut().for_each(|device| device.gpu.most_held = launches);
        self
    }

    /// Answers all that any device asks.
    fn answer_all(&mut self) {
        // The first may have to wait for the last, and each asks for experts.
        self.devices.iter_mut().for_each(|device| device.enqueue(Cuda::answer_now));
    }

    fn count(&self) -> usize {
        self.devices.len()
    }

    /// Who carries an operation out.
    fn home(&mut self, key: Key) -> usize {
        match (self.split.get(), key) {
            (Some(split), key) => split.home(key).expect("steps have the operations that they were said to have"),
            (None, Key::Attention(group, layer)) => self.groups[group].layers[layer].0,
            (None, Key::Delta(layer)) => layer % self.count(),
            (None, Key::Mixture(_)) => self.count() - 1,
            (None, _) => {
                self.turn += 1;
                self.turn % self.count()
            }
        }
    }

    /// Copies what an operation needs to where it needs it. A device that others copy from goes on once they have.
    fn carry_out(&mut self, buffer: BufferId, transfers: &mut Vec<Transfer>) {
        for Transfer { from, to, what } in transfers.drain(..) {
            let cols = self.buffers[buffer.number()].1;
            let t = match what {
                What::Region(Region { offset, rows, cols, stride }) => Tensor { buffer, offset, rows, cols, stride },
                What::Whole => Tensor { buffer, offset: 0, rows: 1, cols, stride: cols },
            };
            let Ok([source, target]) = self.devices.get_disjoint_mut([from, to]) else { unreachable!("two devices") };
            let (at, there) = (source.place(t), target.place(t));
            let points = [&self.points[from], &self.points[to]];
            let source = &*source;
            target.enqueue(|target| {
                target.gpu.follow(&source.gpu, points[0])?;
                for ((from, elements), (to, _)) in runs(t, at).zip(runs(t, there)) {
                    // SAFETY: the tensor was checked against both buffers, and all that the source does with it is waited for.
                    unsafe { target.gpu.receive(to, (&source.gpu, from), 4 * elements.len())? };
                }
                source.gpu.follow(&target.gpu, points[1])?;
                Ok(())
            });
        }
    }

    /// Has everything that an operation reads brought to `device`, and what it writes known to be there alone.
    fn on(&mut self, device: usize, reads: &[Tensor], writes: &[Tensor]) -> &mut Cuda {
        if self.devices.iter().any(|device| device.gpu.is_full()) {
            self.answer_all();
        }
        if device != self.current {
            let before = &mut self.devices[self.current];
            before.enqueue(|own| Ok(own.gpu.end_step()?));
        }
        let mut transfers = std::mem::take(&mut self.scratch);
        let mut came = device != self.current;
        for (tensors, written) in [(reads, false), (writes, true)] {
            for t in tensors {
                let held = &mut self.buffers[t.buffer.number()].0;
                match written {
                    false => held.read(device, Region::of(*t), &mut transfers),
                    true => held.write(device, Region::of(*t), &mut transfers),
                }
                came |= !transfers.is_empty();
                self.carry_out(t.buffer, &mut transfers);
            }
        }
        self.scratch = transfers;
        self.current = device;
        if came {
            // Copies are no launches: what comes next is gathered anew.
            self.devices[device].gpu.gather();
            self.devices[device].encoded.left_of = None;
        }
        &mut self.devices[device]
    }

    /// Decides which device has what of everything that was made known.
    fn settle(&mut self) -> Result<()> {
        if let Some(split) = self.split.get().filter(|_| !self.dealt) {
            self.dealt = true;
            for (matrix, on) in split.weights.iter().enumerate() {
                for (number, device) in self.devices.iter_mut().enumerate() {
                    device.weights.all[matrix].elsewhere = !on.contains(&number);
                }
            }
        }
        for number in 0..self.mixtures.len() {
            if self.mixtures[number].at.is_some() {
                continue;
            }
            let home = self.home(Key::Mixture(number));
            let Mixture { moe, follows, .. } = &self.mixtures[number];
            let before = follows.and_then(|f| self.mixtures[f.number()].at).filter(|(at, _)| *at == home);
            let id = self.devices[home].moe(moe.clone(), before.map(|(_, id)| id))?;
            self.mixtures[number].at = Some((home, id));
        }
        Ok(())
    }

    /// Where a mixture is; `None` where its device had no room for it, and the step has failed.
    fn mixture_at(&self, moe: MoeId) -> Option<(usize, MoeId)> {
        self.mixtures[moe.number()].at
    }

    /// What a norm or a bias reads.
    fn of_linear(linear: &Linear) -> impl Iterator<Item = Tensor> {
        linear.bias.into_iter()
    }

    fn sum(&self, of: impl Fn(&Cuda) -> u64) -> u64 {
        self.devices.iter().map(of).sum()
    }

    /// Bytes of all weights but experts, and of the least buffers for these, each of the device that has most.
    fn most(&self, split: &Split) -> [u64; 2] {
        let weights = &self.devices[0].weights;
        let by_experts = by_experts(weights, self.mixtures.iter().map(|mixture| &mixture.moe));
        let mut most = [0; 2];
        for device in 0..self.count() {
            let own = weights.all.iter().zip(&split.weights).zip(&by_experts);
            let rest = own.filter(|((_, on), by_experts)| on.contains(&device) && !**by_experts);
            let rest: u64 = rest.map(|((weight, _), _)| Weights::padded(weight) as u64).sum();
            let here = |(number, _): &(usize, &Mixture)| split.home(Key::Mixture(*number)) == Some(device);
            let mixtures = self.mixtures.iter().enumerate().filter(here).map(|(_, mixture)| &mixture.moe);
            most = [most[0].max(rest), most[1].max(least_bytes(weights, mixtures))];
        }
        most
    }

    /// Copies one of the layers of a block between the block as a whole and its part on the device that has that layer.
    fn layers(group: &Group, device: usize) -> impl Iterator<Item = (Range<usize>, Range<usize>)> {
        let len = group.layout.layer_bytes();
        let own = group.layers.iter().enumerate().filter(move |(_, (at, _))| *at == device);
        own.map(move |(layer, (_, there))| (layer * len..(layer + 1) * len, there * len..(there + 1) * len))
    }
}

impl Drop for Pipeline {
    fn drop(&mut self) {
        // They go one after the other, and each waits for what it has under way.
        self.devices.iter_mut().for_each(|device| device.mixtures.ask_no_more());
    }
}

impl Resources for Pipeline {
    fn alloc(&mut self, class: MemoryClass, rows: usize, cols: usize) -> Result<Tensor> {
        let tensors = self.devices.iter_mut().map(|d| d.alloc(class, rows, cols)).collect::<Result<Vec<Tensor>>>()?;
        // States are in buffers of the devices too, which nobody else knows.
        let buffer = BufferId::new(self.buffers.len());
        assert!(tensors.iter().all(|t| t.buffer == buffer), "buffers have the same numbers on all devices");
        self.buffers.push((CoherentRange::everywhere(self.count()), rows * cols));
        Ok(tensors[0])
    }

    fn upload(&mut self, values: &[f32], to: Tensor) {
        let mut transfers = Vec::new();
        let count = self.count();
        self.buffers[to.buffer.number()].0.spread(count, &mut transfers);
        self.carry_out(to.buffer, &mut transfers);
        self.devices.iter_mut().for_each(|device| device.upload(values, to));
    }

    fn download(&mut self, t: Tensor, out: &mut [f32]) {
        let mut transfers = Vec::new();
        self.buffers[t.buffer.number()].0.read(0, Region::of(t), &mut transfers);
        self.carry_out(t.buffer, &mut transfers);
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
        self.mixtures.push(Mixture { moe, follows, at: None });
        Ok(MoeId::new(self.mixtures.len() - 1))
    }

    /// Each device has tiers of its own, for the experts of its layers: slots in its own memory, and by their bytes a part of those in the host's.
    fn stream_experts(&mut self, options: &ExpertOptions, lookahead: Lookahead) -> Result<()> {
        self.settle()?;
        let with: Vec<usize> =
            (0..self.count()).filter(|d| self.devices[*d].mixtures.registered().next().is_some()).collect();
        // 1. What each needs of the host's memory, and what there is beyond that
        let (mut least, mut widest) = (vec![0; self.count()], 0);
        if options.budget < u64::MAX {
            let none = ExpertOptions { budget: 0, ..options.clone() };
            for device in &with {
                match self.devices[*device].stream_experts(&none, Lookahead::Off).map_err(|e| e.downcast()) {
                    Err(Ok(Error::ExpertBudget { needed, experts, .. })) => {
                        (least[*device], widest) = (needed, widest.max(experts));
                    }
                    Err(Ok(e)) => return Err(e.into()),
                    Err(Err(e)) => return Err(e),
                    Ok(()) => {}
                }
            }
        }
        let needed: u64 = least.iter().sum();
        let Some(spare) = options.budget.checked_sub(needed) else {
            return Err(Error::ExpertBudget { budget: options.budget, needed, experts: widest }.into());
        };
        // 2. All of them
        let bytes: Vec<u64> = self.devices.iter().map(Cuda::bytes_of_experts).collect();
        let all = bytes.iter().sum::<u64>().max(1);
        let mut computes = None;
        for device in with {
            let own = u128::from(spare) * u128::from(bytes[device]) / u128::from(all);
            let budget = if options.budget == u64::MAX { u64::MAX } else { least[device] + own as u64 };
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

    fn fill_experts(&mut self) -> bool {
        let mut more = false;
        self.devices.iter_mut().for_each(|device| more |= device.fill_experts());
        more
    }

    /// What the device that needs most needs.
    fn step_scratch(
        &self,
        layouts: &[KvLayout],
        inputs: &StepInputs,
        _: bool,
        step: &mut dyn FnMut(&mut dyn Operations),
    ) -> StepScratch {
        let first = &self.devices[0];
        let moes = self.mixtures.iter().map(|m| &m.moe).collect();
        let mut sizing = ScratchPlanner::new(first.mode, (&first.weights.all, moes), layouts, inputs);
        step(&mut sizing);
        let of = (self.count(), self.sum(|device| device.free));
        self.split.get_or_init(|| Split::new(&sizing.parts, &first.weights.all, layouts, of));
        let angles: Vec<usize> = first.rotary.iter().map(|table| 8 * table.half()).collect();
        sizing.scratch(&angles)
    }

    /// Of the device that is the tightest in each.
    fn device_memory(&self) -> Option<DeviceMemory> {
        let own: Vec<DeviceMemory> = self.devices.iter().filter_map(Resources::device_memory).collect();
        let split = self.split.get();
        let copied = self.devices[0].buffers_of(MemoryClass::WeightsCopied) as u64;
        let [rest, least_experts] = split.map_or([0; 2], |split| self.most(split));
        Some(DeviceMemory {
            free: own.iter().map(|m| m.free).min()?,
            reserve: own.iter().map(|m| m.reserve).max()?,
            weights: split.map_or(own[0].weights, |split| split.most_weights + copied),
            block: split.map(|split| split.most_block),
            // What is left of the weights where experts are streamed is what most of all others take.
            experts: split.map_or(0, |split| split.most_weights - rest),
            least_experts,
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
        self.settle()?;
        let mut new = Vec::new();
        for device in &mut self.devices {
            new.extend(device.weights.place(&device.gpu)?);
        }
        let coming = loading::begin(loading, new)?;
        self.devices.iter_mut().for_each(|device| device.weights.expect(coming.clone()));
        Ok(())
    }
}

impl Caches for Pipeline {
    fn alloc_kv(&mut self, layout: KvLayout, blocks: usize) -> Result<KvPool> {
        let number = self.groups.len();
        let mut counts = vec![0; self.count()];
        let mut layers = Vec::with_capacity(layout.layers);
        for layer in 0..layout.layers {
            let device = self.split.get().map_or((number + layer) % self.count(), |split| split.kv(number, layer));
            layers.push((device, counts[device]));
            counts[device] += 1;
        }
        let own = self.devices.iter_mut().zip(counts);
        let pools = own.map(|(device, layers)| device.alloc_kv(KvLayout { layers, ..layout }, blocks));
        let pools = pools.collect::<Result<Vec<KvPool>>>()?;
        self.groups.push(Group { layout, layers, pools });
        Ok(KvPool { buffer: BufferId::new(number), layout })
    }

    fn commit_kv(&mut self, pool: &KvPool, blocks: usize) -> Result<()> {
        let pools = &self.groups[pool.buffer.number()].pools;
        self.devices.iter_mut().zip(pools).try_for_each(|(device, pool)| device.commit_kv(pool, blocks))
    }

    fn copy_blocks(&mut self, pool: &KvPool, pairs: &[(u32, u32)]) {
        let pools = &self.groups[pool.buffer.number()].pools;
        self.devices.iter_mut().zip(pools).for_each(|(device, pool)| device.copy_blocks(pool, pairs));
    }

    fn lend_memory(&mut self, bytes: usize) -> std::io::Result<Box<dyn sluice_store::Memory>> {
        // Locked for all of them.
        self.devices[0].lend_memory(bytes)
    }

    fn read_block(&mut self, pool: &KvPool, block: u32, out: &mut [u8]) {
        let group = &self.groups[pool.buffer.number()];
        assert_eq!(out.len(), group.layout.block_bytes());
        // What fills it up to whole pages.
        out.fill(0);
        for (number, (device, pool)) in self.devices.iter_mut().zip(&group.pools).enumerate() {
            self.bytes.resize(pool.layout.block_bytes(), 0);
            device.read_block(pool, block, &mut self.bytes);
            for (all, own) in Pipeline::layers(group, number) {
                out[all].copy_from_slice(&self.bytes[own]);
            }
        }
    }

    fn write_block(&mut self, pool: &KvPool, block: u32, bytes: &[u8]) {
        let group = &self.groups[pool.buffer.number()];
        assert_eq!(bytes.len(), group.layout.block_bytes());
        for (number, (device, pool)) in self.devices.iter_mut().zip(&group.pools).enumerate() {
            self.bytes.clear();
            self.bytes.resize(pool.layout.block_bytes(), 0);
            for (all, own) in Pipeline::layers(group, number) {
                self.bytes[own].copy_from_slice(&bytes[all]);
            }
            device.write_block(pool, block, &self.bytes);
        }
    }

    /// Each device has room for all of a state.
    fn alloc_states(&mut self, rows: usize, len: usize) -> Result<()> {
        self.devices.iter_mut().try_for_each(|device| device.alloc_states(rows, len))?;
        self.buffers.push((CoherentRange::everywhere(self.count()), rows * len));
        Ok(())
    }

    fn copy_state(&mut self, from: u32, to: u32) {
        self.devices.iter_mut().for_each(|device| device.copy_state(from, to));
    }

    fn zero_state(&mut self, row: u32) {
        self.devices.iter_mut().for_each(|device| device.zero_state(row));
    }

    fn read_state(&mut self, row: u32, out: &mut [f32]) {
        self.devices[0].read_state(row, out);
        let others: BTreeSet<usize> = self.states.iter().map(|(_, at)| *at).filter(|at| *at > 0).collect();
        let mut state = vec![0.0; out.len()];
        for device in others {
            self.devices[device].read_state(row, &mut state);
            for (range, _) in self.states.iter().filter(|(_, at)| *at == device) {
                out[range.clone()].copy_from_slice(&state[range.clone()]);
            }
        }
    }

    fn write_state(&mut self, row: u32, state: &[f32]) {
        self.devices.iter_mut().for_each(|device| device.write_state(row, state));
    }
}

impl Operations for Pipeline {
    fn embed(&mut self, table: MatrixId, out: Tensor) {
        let home = self.home(Key::Embed(table.number()));
        let tokens = self.devices[0].inputs.tokens().len();
        self.on(home, &[], &[out.first_rows(tokens)]).embed(table, out);
    }

    fn project(&mut self, x: Tensor, norm: Option<Norm>, projections: &[Projection]) {
        let home = self.home(Key::project(projections));
        let biases = projections.iter().flat_map(|p| Pipeline::of_linear(&p.linear));
        let reads: Vec<Tensor> = [x].into_iter().chain(norm.map(|n| n.weight)).chain(biases).collect();
        let writes: Vec<Tensor> = projections.iter().map(|p| p.out.first_rows(x.rows)).collect();
        self.on(home, &reads, &writes).project(x, norm, projections);
    }

    fn project_add(&mut self, x: Tensor, linear: &Linear, out: Tensor) {
        let home = self.home(Key::Add(linear.matrix.number()));
        let rows = out.first_rows(x.rows);
        let reads: Vec<Tensor> = [x, rows].into_iter().chain(Pipeline::of_linear(linear)).collect();
        self.on(home, &reads, &[rows]).project_add(x, linear, out);
    }

    fn attention(&mut self, layer: &AttentionLayer) {
        let home = self.home(Key::Attention(layer.group, layer.layer));
        let tokens = self.devices[0].inputs.tokens().len();
        let [q, k, v, out] = [layer.q, layer.k, layer.v, layer.out].map(|t| t.first_rows(tokens));
        let norms = [layer.q_norm, layer.k_norm].into_iter().flatten().map(|n| n.weight);
        let reads: Vec<Tensor> = [q, k, v].into_iter().chain(norms).chain(layer.sinks).collect();
        let there = self.groups[layer.group].layers[layer.layer].1;
        self.on(home, &reads, &[q, k, v, out]).attention(&AttentionLayer { layer: there, ..layer.clone() });
    }

    fn delta_net(&mut self, layer: &DeltaLayer) {
        let home = self.home(Key::Delta(layer.layer));
        let tokens = self.devices[0].inputs.tokens().len();
        let [qkv, z, b, a, out] = [layer.qkv, layer.z, layer.b, layer.a, layer.out].map(|t| t.first_rows(tokens));
        let reads = [qkv, z, b, a, layer.conv, layer.a_log, layer.dt_bias, layer.norm.weight];
        let len = layer.shape.state_len();
        let range = layer.layer * len..(layer.layer + 1) * len;
        if !self.states.iter().any(|(own, _)| *own == range) {
            self.states.push((range, home));
        }
        self.on(home, &reads, &[out]).delta_net(layer);
    }

    fn mlp(&mut self, x: Tensor, norm: Norm, mlp: &Mlp, residual: Tensor) {
        let home = self.home(Key::Mlp(mlp.gate.matrix.number()));
        let rows = residual.first_rows(x.rows);
        let biases = [&mlp.gate, &mlp.up, &mlp.down].into_iter().flat_map(Pipeline::of_linear);
        let reads: Vec<Tensor> = [x, rows, norm.weight].into_iter().chain(biases).collect();
        self.on(home, &reads, &[rows]).mlp(x, norm, mlp, residual);
    }

    fn mixture(&mut self, x: Tensor, moe: MoeId, residual: Tensor) {
        let Some((home, own)) = self.mixture_at(moe) else { return };
        let weight = self.mixtures[moe.number()].moe.norm.weight;
        let device = self.on(home, &[x, residual, weight], &[residual]);
        let mut waits = false;
        device.enqueue(|device| {
            waits = device.waits_in(x, own, residual)?;
            Ok(())
        });
        if waits {
            self.answer_all();
        }
        self.devices[home].mixture(x, own, residual);
    }

    fn mixture_but_experts(&mut self, x: Tensor, moe: MoeId, normed: Tensor, residual: Tensor) -> Routing {
        let Some((home, own)) = self.mixture_at(moe) else { return Routing::default() };
        let weight = self.mixtures[moe.number()].moe.norm.weight;
        self.on(home, &[x, normed, residual, weight], &[normed, residual]);
        self.answer_all();
        self.devices[home].mixture_but_experts(x, own, normed, residual)
    }

    fn logits(&mut self, x: Tensor, norm: Norm, head: MatrixId) {
        let home = self.home(Key::Logits(head.number()));
        self.head = home;
        self.on(home, &[x, norm.weight], &[]).logits(x, norm, head);
    }
}

impl Backend for Pipeline {
    fn begin(&mut self, inputs: &StepInputs) {
        let settled = self.settle();
        self.devices[0].enqueue(|_| settled);
        self.devices.iter_mut().for_each(|device| device.begin(inputs));
        (self.current, self.head) = (0, 0);
    }

    fn end(&mut self) -> Outcome {
        // The first may have to wait for the last, and each asks for experts.
        self.devices.iter_mut().for_each(|device| device.enqueue(Cuda::carry_out));
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
            // What fails the same rows is one failure.
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

    fn drawing(&mut self) -> Option<&mut dyn DeviceSampling> {
        self.devices[self.head].drawing()
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

    fn notes(&self) -> Vec<String> {
        let mut notes: Vec<String> = self.devices.iter().flat_map(Backend::notes).collect();
        notes.dedup();
        notes
    }

    fn memory(&mut self) -> Vec<MemoryUse> {
        self.devices.iter_mut().flat_map(Backend::memory).collect()
    }
}
