//! Several GPUs as one: each runs some consecutive operations of a step and has their weights, keys and values, and states. The residual stream is passed from one to the next.
//!
//! A device is a backend of its own ([`Cuda`]) with all buffers and some of the matrices. What an operation reads is copied to the device that runs it, in the devices' own
//! streams, so the host waits only for the end of a step. If the operations of a step are not known beforehand, as in tests of single ones, every device has every matrix and
//! they take turns.

use std::cell::OnceCell;
use std::ops::Range;

use anyhow::{Result, ensure};
use sluice_backend::{Activations, BufferId, KvLayout, KvPool, Linear, Moe, MoeId, Resources, Tensor};

use crate::cuda::Cuda;
use crate::device::event::SyncEvent;
use crate::moe::experts::is_of_experts;
use crate::moe::host_split::HostOffload;
use crate::moe::offload::min_bytes;
use crate::multi::coherence::{BufferCoherence, Region, Transfer, TransferPart};
use crate::multi::partition::{OperationKey, Partition};
use crate::ops::context::contiguous_pieces;
use crate::weights::Weights;

/// A mixture; once it was assigned, its device and its number there.
pub(super) struct AssignedMixture {
    pub(super) moe: Moe,
    pub(super) follows: Option<MoeId>,
    pub(super) at: Option<(usize, MoeId)>,
}

/// The blocks of a cache group.
pub(super) struct KvGroup {
    pub(super) layout: KvLayout,
    /// The device of each layer, and its number among the layers there.
    pub(super) layers: Vec<(usize, usize)>,
    /// The pool of each device.
    pub(super) pools: Vec<KvPool>,
}

/// GPUs that compute a model's layers one after the other.
pub struct Pipeline {
    pub(crate) devices: Vec<Cuda>,
    /// An event of each device, for others to wait for.
    pub(super) events: Vec<SyncEvent>,
    /// Coherence and elements of each buffer.
    pub(super) buffers: Vec<(BufferCoherence, usize)>,
    pub(super) mixtures: Vec<AssignedMixture>,
    pub(super) groups: Vec<KvGroup>,
    /// Recurrent layers that steps came to: their elements of a state, and the device.
    pub(super) states: Vec<(Range<usize>, usize)>,
    pub(super) partition: OnceCell<Partition>,
    /// The device whose turn it is, if there is no partition.
    pub(super) turn: usize,
    /// The device of the last operation.
    pub(super) current: usize,
    /// The device of the logits.
    pub(super) head: usize,
    /// Scratch for transfers and for a block.
    pub(super) transfers: Vec<Transfer>,
    pub(super) bytes: Vec<u8>,
    /// Every device knows which matrices it has.
    pub(super) is_assigned: bool,
}

impl Pipeline {
    /// Opens these devices. One that is named twice counts as two, each with half of its memory. `threads`: threads of the host that read logits.
    ///
    /// # Errors
    /// One line if a device is missing or cannot be used, or there are none or more than 64.
    pub fn new(ordinals: &[u32], mode: Activations, threads: usize) -> Result<Pipeline> {
        ensure!(!ordinals.is_empty() && ordinals.len() <= 64, "{} devices: 1 to 64 can be used", ordinals.len());
        let mut devices = ordinals.iter().map(|n| Cuda::new(*n, mode)).collect::<Result<Vec<Cuda>>>()?;
        for (device, ordinal) in devices.iter_mut().zip(ordinals) {
            device.set_sampling_threads(threads);
            device.free /= ordinals.iter().filter(|n| *n == ordinal).count() as u64;
        }
        for (i, device) in devices.iter().enumerate() {
            let others = devices.iter().zip(ordinals).filter(|(_, ordinal)| **ordinal != ordinals[i]);
            others.for_each(|(other, _)| device.context.gpu.reach(&other.context.gpu));
        }
        // They share open requests, because they wait for one another.
        let requests = devices[0].context.gpu.requests.clone();
        devices.iter_mut().for_each(|device| device.context.gpu.requests = requests.clone());
        let events =
            devices.iter().map(|device| SyncEvent::new(&device.context.gpu.device)).collect::<Result<_, _>>()?;
        Ok(Pipeline {
            devices,
            events,
            buffers: Vec::new(),
            mixtures: Vec::new(),
            groups: Vec::new(),
            states: Vec::new(),
            partition: OnceCell::new(),
            turn: 0,
            current: 0,
            head: 0,
            transfers: Vec::new(),
            bytes: Vec::new(),
            is_assigned: false,
        })
    }

    /// As [`Cuda::with_host_experts`].
    pub fn with_host_experts(mut self, host: HostOffload) -> Pipeline {
        self.devices.iter_mut().for_each(|device| device.host = Some(host));
        self
    }

    /// As [`Cuda::with_max_held_launches`].
    pub fn with_max_held_launches(mut self, launches: usize) -> Pipeline {
        self.devices.iter_mut().for_each(|device| device.context.gpu.max_held_launches = launches);
        self
    }

    /// Answers the requests of all devices.
    pub(super) fn answer_all(&mut self) {
        // Each may request experts, and the first may wait for the last.
        self.devices.iter_mut().for_each(|device| device.enqueue(Cuda::answer));
    }

    pub(super) fn count(&self) -> usize {
        self.devices.len()
    }

    /// The device of an operation.
    pub(super) fn home(&mut self, key: OperationKey) -> usize {
        match (self.partition.get(), key) {
            (Some(partition), key) => {
                partition.home(key).expect("steps have the operations that they were planned with")
            }
            (None, OperationKey::Attention(group, layer)) => self.groups[group].layers[layer].0,
            // Always the same device, since it has the states.
            (None, OperationKey::Recurrent(at) | OperationKey::Ngrams(at)) => at % self.count(),
            (None, OperationKey::Mixture(_)) => self.count() - 1,
            // It has the tables that are on disk.
            (None, OperationKey::Embed(_)) => 0,
            (None, _) => {
                self.turn += 1;
                self.turn % self.count()
            }
        }
    }

    /// Enqueues transfers. The device that is copied from goes on once the copy is done.
    pub(super) fn enqueue_transfers(&mut self, buffer: BufferId, transfers: &mut Vec<Transfer>) {
        for Transfer { from, to, what } in transfers.drain(..) {
            let cols = self.buffers[buffer.number()].1;
            let t = match what {
                TransferPart::Region(Region { offset, rows, cols, stride }) => {
                    Tensor { buffer, offset, rows, cols, stride }
                }
                TransferPart::Whole => Tensor { buffer, offset: 0, rows: 1, cols, stride: cols },
            };
            let Ok([source, target]) = self.devices.get_disjoint_mut([from, to]) else { unreachable!("two devices") };
            let (at, there) = (source.context.place(t), target.context.place(t));
            let events = [&self.events[from], &self.events[to]];
            let source = &*source;
            target.enqueue(|target| {
                target.context.gpu.wait_for_stream(&source.context.gpu, events[0])?;
                for ((from, elements), (to, _)) in contiguous_pieces(t, at).zip(contiguous_pieces(t, there)) {
                    // SAFETY: the tensor was checked against both buffers, and the target waits for the source.
                    unsafe { target.context.gpu.receive(to, (&source.context.gpu, from), 4 * elements.len())? };
                }
                source.context.gpu.wait_for_stream(&target.context.gpu, events[1])?;
                Ok(())
            });
        }
    }

    /// Prepares a recurrent layer where its states are. `layer`: its number, and the elements of its state; `reads`: activations, which may have more rows than the step.
    pub(super) fn prepare_recurrent(
        &mut self,
        (layer, len): (usize, usize),
        reads: &[Tensor],
        weights: &[Tensor],
        out: Tensor,
    ) -> &mut Cuda {
        let home = self.home(OperationKey::Recurrent(layer));
        let tokens = self.devices[0].context.inputs.tokens().len();
        self.note_state(layer * len..(layer + 1) * len, home);
        let reads: Vec<Tensor> = reads.iter().map(|t| t.first_rows(tokens)).chain(weights.iter().copied()).collect();
        self.prepare(home, &reads, &[out.first_rows(tokens)])
    }

    /// Takes down which device has this part of states.
    pub(super) fn note_state(&mut self, range: Range<usize>, home: usize) {
        if !self.states.iter().any(|(own, _)| *own == range) {
            self.states.push((range, home));
        }
    }

    /// Prepares an operation on `device`: copies there what it reads and notes what it writes. Returns the device.
    pub(super) fn prepare(&mut self, device: usize, reads: &[Tensor], writes: &[Tensor]) -> &mut Cuda {
        if self.devices.iter().any(|device| device.context.gpu.is_full()) {
            self.answer_all();
        }
        if device != self.current {
            let before = &mut self.devices[self.current];
            before.enqueue(|own| Ok(own.context.gpu.end_step()?));
        }
        let mut transfers = std::mem::take(&mut self.transfers);
        let mut has_moved = device != self.current;
        for (tensors, written) in [(reads, false), (writes, true)] {
            for t in tensors {
                let coherence = &mut self.buffers[t.buffer.number()].0;
                match written {
                    false => coherence.read(device, Region::of(*t), &mut transfers),
                    true => coherence.write(device, Region::of(*t), &mut transfers),
                }
                has_moved |= !transfers.is_empty();
                self.enqueue_transfers(t.buffer, &mut transfers);
            }
        }
        self.transfers = transfers;
        self.current = device;
        if has_moved {
            // Copies are no launches, so recording starts again.
            self.devices[device].context.gpu.restart_recording();
            self.devices[device].encoded.encoded_from = None;
        }
        &mut self.devices[device]
    }

    /// Assigns everything that was registered to devices.
    pub(super) fn assign(&mut self) -> Result<()> {
        if let Some(partition) = self.partition.get().filter(|_| !self.is_assigned) {
            self.is_assigned = true;
            for (matrix, on) in partition.weights.iter().enumerate() {
                for (number, device) in self.devices.iter_mut().enumerate() {
                    device.context.weights.all[matrix].elsewhere = !on.contains(&number);
                }
            }
            let (first, others) = self.devices.split_first_mut().expect("at least one device");
            for table in first.tables.ids() {
                if let Some(home) = partition.home(OperationKey::Embed(table.number())).filter(|home| *home > 0) {
                    others[home - 1].tables.take(table, &mut first.tables);
                }
            }
        }
        for number in 0..self.mixtures.len() {
            if self.mixtures[number].at.is_some() {
                continue;
            }
            let home = self.home(OperationKey::Mixture(number));
            let AssignedMixture { moe, follows, .. } = &self.mixtures[number];
            let before = follows.and_then(|f| self.mixtures[f.number()].at).filter(|(at, _)| *at == home);
            let id = self.devices[home].moe(moe.clone(), before.map(|(_, id)| id))?;
            self.mixtures[number].at = Some((home, id));
        }
        Ok(())
    }

    /// The device of a mixture and its number there. `None` if the device had no memory for it; then the step has failed.
    pub(super) fn mixture_at(&self, moe: MoeId) -> Option<(usize, MoeId)> {
        self.mixtures[moe.number()].at
    }

    /// The tensors that a mixture of so many tokens reads beside its input.
    pub(super) fn vectors_of(&self, moe: MoeId, tokens: usize) -> Vec<Tensor> {
        let Moe { norm, router_norm, latent, router, experts, shared, .. } = &self.mixtures[moe.number()].moe;
        let gate = shared.iter().flat_map(|shared| &shared.gate);
        let biases = experts.biases.iter().flat_map(|of| [of.gate, of.up, of.down]);
        let linears = std::iter::once(router).chain(gate).flat_map(Pipeline::bias_of);
        let norms = norm.iter().chain(router_norm).map(|norm| norm.weight);
        let latent = latent.map(|t| t.first_rows(tokens));
        norms.chain(linears).chain(biases).chain(experts.order).chain(latent).collect()
    }

    /// The tensors that a linear reads beside its input.
    pub(super) fn bias_of(linear: &Linear) -> impl Iterator<Item = Tensor> {
        linear.bias.into_iter()
    }

    pub(super) fn sum(&self, of: impl Fn(&Cuda) -> u64) -> u64 {
        self.devices.iter().map(of).sum()
    }

    /// Bytes of all weights except experts, and of the smallest buffers for experts, each of the device that has most.
    pub(super) fn max_bytes(&self, partition: &Partition) -> [u64; 2] {
        let weights = &self.devices[0].context.weights;
        let of_experts = is_of_experts(weights, self.mixtures.iter().map(|mixture| &mixture.moe));
        let mut max = [0; 2];
        for device in 0..self.count() {
            let own = weights.all.iter().zip(&partition.weights).zip(&of_experts);
            let rest = own.filter(|((_, on), of_experts)| on.contains(&device) && !**of_experts);
            let rest: u64 = rest.map(|((weight, _), _)| Weights::padded(weight) as u64).sum();
            let here = |(number, _): &(usize, &AssignedMixture)| {
                partition.home(OperationKey::Mixture(*number)) == Some(device)
            };
            let mixtures = self.mixtures.iter().enumerate().filter(here).map(|(_, mixture)| &mixture.moe);
            max = [max[0].max(rest), max[1].max(min_bytes(weights, mixtures))];
        }
        max
    }

    /// For each layer that a device has of a group: its bytes in a whole block, and in the device's part of the block.
    pub(super) fn layer_ranges(group: &KvGroup, device: usize) -> impl Iterator<Item = (Range<usize>, Range<usize>)> {
        let len = group.layout.layer_bytes();
        let own = group.layers.iter().enumerate().filter(move |(_, (at, _))| *at == device);
        own.map(move |(layer, (_, there))| (layer * len..(layer + 1) * len, there * len..(there + 1) * len))
    }
}

impl Drop for Pipeline {
    fn drop(&mut self) {
        // They are dropped one after the other, and each waits for its work under way.
        self.devices.iter_mut().for_each(|device| device.mixtures.cancel());
    }
}
