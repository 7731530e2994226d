//! Experts that do not all stay on the device: each is in the device's memory, in locked memory of the host, or on disk, by the store's policy.
//!
//! At a layer, the host learns what the router chose: for a step of one token from a request of the device beside everything that is enqueued already ([`requests`]),
//! otherwise before the layer's experts are enqueued. Experts that the device has are used in place. All others are copied from the host's memory as they arrive there, in a
//! stream of their own, to buffers that the layer's table points to ([`fetch`]). When the host next waits for the device, these copies and everything computed with them are
//! done. Then the experts that are worth it stay, each in exchange for one that is copied back, and the other buffers can be taken again; until they are, their experts are
//! found there and not copied again ([`settle`]). While many tokens are at a layer, the experts of the next layer that as many tokens are likely to need are copied. A layer
//! whose experts all stay on the device needs none of this.

mod fetch;
mod requests;
mod settle;

use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::sync::Arc;

use anyhow::{Error, Result};
use sluice_backend::{Activations, ExpertOptions, Experts, Failed, Lookahead, Moe, Streamed};
use sluice_experts::{ExpertPool, ExpertStats, FetchId, PinnedExpert, SlotClass, TierMove};
use sluice_store::{Bytes, Memory as _};

use crate::blocks::{BlockCopies, BlockRows};
use crate::device::copies::CopyStream;
use crate::device::event::SyncEvent;
use crate::device::memory::DeviceBuffer;
use crate::device::pinned::RegisteredMemory;
use crate::device::shared::SharedMemory;
use crate::device::stream::Gpu;
use crate::device::sys::{Address, DriverError};
use crate::moe::expert_pool::{self, BufferPool, BufferState, Division};
use crate::moe::experts::{Operand, operands};
use crate::moe::host_split::{HostOffload, HostShare, HostSplit, MAX_PAIRS, SharedHostExperts};
use crate::moe::layout::{EXPERT_ARRAYS, ExpertLayout};
use crate::moe::mailbox::Mailbox;
use crate::moe::tables::{ExpertTables, bytes_of_layer};
use crate::parameters::{self as p, PROJECTIONS};
use crate::weights::{ARRAYS, Weights};

/// Device memory that is left to the driver and its graphs if no budget is given.
pub const RESERVE: u64 = 512 << 20;
/// The kind of a matrix that no kernel multiplies with.
const KIND_NONE: u32 = u32::MAX;

/// A layer of experts.
struct StreamedLayer {
    experts: Experts,
    /// `[experts]`
    blocks: Vec<ExpertBlocks>,
    /// The experts that the last large step needed.
    history: Option<LayerHistory>,
    /// All of its experts stay on the device, and its published table says so.
    is_complete: bool,
    /// The table has the slots of all of its experts, which stay in them.
    is_written: bool,
}

/// The experts that a step of many tokens needed of a layer.
struct LayerHistory {
    tokens: usize,
    /// `[experts]`: how many of the tokens chose each.
    uses: Vec<u32>,
}

impl LayerHistory {
    /// Whether at least one of `tokens` tokens is likely to choose an expert. One that no token chose counts as if half a token had.
    fn is_likely(&self, expert: usize, tokens: usize) -> bool {
        (2 * self.uses[expert] as usize + 1) * tokens >= 2 * self.tokens
    }
}

/// What the tokens of a layer need.
struct NeededExperts {
    /// Ascending.
    experts: Vec<u32>,
    /// How many tokens need each.
    tokens: Vec<u32>,
}

impl NeededExperts {
    /// `chosen`: experts of a layer that has `count`; several tokens may have chosen the same.
    fn new(count: usize, chosen: &[u32]) -> NeededExperts {
        let mut tokens = vec![0u32; count];
        chosen.iter().for_each(|&e| tokens[e as usize] += 1);
        let experts: Vec<u32> = (0..count as u32).filter(|e| tokens[*e as usize] > 0).collect();
        let tokens = experts.iter().map(|e| tokens[*e as usize]).collect();
        NeededExperts { experts, tokens }
    }
}

/// The layer that is being computed, until the host next waits.
struct ActiveLayer {
    layer: usize,
    fetch: FetchId,
    /// Tokens of the step, if they are enough to predict others.
    tokens: Option<usize>,
    /// It needs most of its experts.
    needs_most: bool,
    /// Positions in the fetch whose slots of the host are held.
    held: Vec<usize>,
    /// Experts that were copied without the fetch, with their slots.
    pinned: Vec<PinnedExpert>,
    /// The host's part.
    host: HostShare,
}

impl ActiveLayer {
    /// The arrays of the experts that the host computes, by position and array, and their bytes in all.
    fn host_arrays<'a>(&'a self, store: &'a ExpertPool) -> (impl Fn(usize, usize) -> &'a [u8], usize) {
        let array = |i: usize, n: usize| store.array(self.fetch, self.host.positions[i], n);
        let all = || (0..self.host.positions.len()).flat_map(|i| (0..EXPERT_ARRAYS).map(move |n| (i, n)));
        (array, all().map(|(i, n)| array(i, n).len()).sum())
    }
}

/// An expert that is being copied back to the host.
struct Demotion {
    moved: TierMove,
    buffer: u32,
    done: SyncEvent,
}

/// Streams experts to a device.
pub struct ExpertStreaming {
    // Dropped first: what waits for the host goes on, and the streams wait for their copies.
    mailbox: Mailbox,
    up: CopyStream,
    down: CopyStream,
    /// Where some experts have blocks.
    blocks: Option<BlockCopies>,
    /// The host's slots, where the device computes with the experts in them. Then it has no buffers, and nothing is copied. Dropped before their memory.
    slots: Option<SharedMemory>,
    store: ExpertPool,
    mode: Activations,
    /// The buffers of each class of layers: their memory, and what is in them.
    divisions: Vec<Division>,
    memory: Vec<DeviceBuffer>,
    pool: BufferPool,
    layers: Vec<StreamedLayer>,
    tables: ExpertTables,
    uploaded: SyncEvent,
    active: Option<ActiveLayer>,
    /// Experts that are copied before their layer, with their buffers.
    prefetched: Vec<(u32, PinnedExpert)>,
    demotions: Vec<Demotion>,
    /// The device has requested nothing since it was idle, so changed tables may be published.
    is_idle: bool,
    /// Events to be used again.
    spare_events: Vec<SyncEvent>,
    split: Option<HostSplit>,
    reads_ahead: bool,
    is_locked: bool,
    stats: ExpertStats,
    /// Rows whose experts could not be read, and why the first of them could not.
    failed_rows: Vec<u32>,
    error: Option<Arc<sluice_store::Error>>,
}

/// Bytes of the tables of these mixtures.
fn bytes_of_tables<'a>(mixtures: impl Iterator<Item = &'a Moe>) -> u64 {
    mixtures.map(|moe| bytes_of_layer(moe.experts.count) as u64).sum()
}

/// The least bytes with which these mixtures can be streamed: buffers for all experts of the widest layer, unless they are read in the host's slots, and all tables.
pub fn min_bytes<'a>(weights: &Weights, mixtures: impl Iterator<Item = &'a Moe> + Clone) -> u64 {
    let tables = bytes_of_tables(mixtures.clone());
    if are_in_place(weights, mixtures.clone()) {
        return tables;
    }
    let all = || mixtures.clone().map(|moe| (0..moe.experts.count).map(|e| arrays_of(weights, &moe.experts, e)));
    // Files that nothing loads cannot be streamed.
    if all().flatten().flatten().any(|bytes| bytes.is_of_file() && !bytes.belongs_to_load()) {
        return tables;
    }
    let classes = grown(&ExpertPool::classes_of(all()), growth(weights, mixtures.clone()));
    tables + expert_pool::divide(&classes, 0).iter().map(Division::bytes).sum::<u64>()
}

/// The arrays of an expert, those of one projection after the other's.
fn arrays_of(weights: &Weights, experts: &Experts, expert: usize) -> Vec<Bytes> {
    let of = |o: Operand| weights.all[o.weight].rows_bytes(o.row..o.row + o.rows);
    operands(experts, expert).into_iter().flat_map(of).collect()
}

/// Whether the device can compute with these mixtures' experts in the host's slots, so that none is copied.
pub fn are_in_place<'a>(weights: &Weights, mixtures: impl Iterator<Item = &'a Moe> + Clone) -> bool {
    let is_in_place = |experts: &Experts, e: usize| {
        operands(experts, e).into_iter().all(|o| weights.all[o.weight].is_in_place_from(o.row))
    };
    let mut all = mixtures.flat_map(|moe| (0..moe.experts.count).map(move |e| (&moe.experts, e)));
    weights.in_place.is_some() && all.all(|(experts, e)| is_in_place(experts, e))
}

/// The rows of an expert's projections that have blocks.
type ExpertBlocks = [Option<BlockRows>; PROJECTIONS];

fn blocks_of(weights: &Weights, experts: &Experts, expert: usize) -> ExpertBlocks {
    operands(experts, expert).map(|o| weights.all[o.weight].block_rows(o.rows))
}

/// How many times larger an expert may be on the device than on the host.
fn growth<'a>(weights: &Weights, mixtures: impl Iterator<Item = &'a Moe>) -> f64 {
    let of_expert = |(experts, e): (&Experts, usize)| {
        let [mut file, mut own] = [0, 0];
        for o in operands(experts, e) {
            let weight = &weights.all[o.weight];
            file += weight.bytes_per_array(o.rows).iter().sum::<usize>();
            own += o.rows * weight.bytes_per_row();
        }
        own as f64 / file.max(1) as f64
    };
    let all = mixtures.flat_map(|moe| (0..moe.experts.count).map(move |e| (&moe.experts, e)));
    all.map(of_expert).fold(1.0, f64::max)
}

/// What these slots of the host are on the device.
fn grown(classes: &[SlotClass], growth: f64) -> Vec<SlotClass> {
    let bytes = |c: &SlotClass| ((c.bytes + c.kept) as f64 * growth).ceil() as usize;
    classes.iter().map(|c| SlotClass { bytes: bytes(c), kept: 0, ..*c }).collect()
}

impl ExpertStreaming {
    /// Opens the tiers of these mixtures' experts. `computes`: the host's threads that another device has made, or `None`; then they are made and left there.
    ///
    /// # Errors
    /// If the budgets are too small, memory is missing, or a file cannot be read.
    pub fn open<'a>(
        gpu: &Gpu,
        weights: &mut Weights,
        mixtures: impl Iterator<Item = &'a Moe> + Clone,
        options: &ExpertOptions,
        (lookahead, mode, host): (Lookahead, Activations, Option<HostOffload>),
        computes: &mut Option<SharedHostExperts>,
    ) -> Result<ExpertStreaming> {
        let in_place = are_in_place(weights, mixtures.clone());
        // All experts of a layer are computed at once. In the host's slots all have to be there.
        let at_once = |m: &Moe| if in_place { m.experts.count } else { m.scoring.k() };
        let at_once = mixtures.clone().map(at_once).max().unwrap_or(0);
        let growth = growth(weights, mixtures.clone());
        // 1. The host's tiers
        let left = || gpu.device.memory().map_or(0, |(free, _)| (free as u64).saturating_sub(RESERVE));
        let budget = options.device_budget.unwrap_or_else(left).saturating_sub(bytes_of_tables(mixtures.clone()));
        let divide = |classes: &[SlotClass]| match in_place {
            true => vec![Division { stride: 0, slots: 0, transient: 0 }; classes.len()],
            false => expert_pool::divide(&grown(classes, growth), budget),
        };
        let faster = |classes: &[SlotClass]| divide(classes).iter().map(|d| d.slots).collect();
        let slots = RefCell::new(Vec::new());
        let is_locked = Cell::new(true);
        let mut lend = |bytes: usize| -> std::io::Result<Box<dyn sluice_store::Memory>> {
            if in_place {
                let memory = sluice_store::host_memory(bytes)?;
                slots.borrow_mut().push(memory.start() as usize..memory.start() as usize + memory.len());
                return Ok(memory);
            }
            let memory = RegisteredMemory::new(&gpu.device, bytes)?;
            is_locked.set(is_locked.get() && (memory.is_locked || memory.is_empty()));
            Ok(Box::new(memory))
        };
        let sources = mixtures.clone().map(|m| (0..m.experts.count).map(|e| arrays_of(weights, &m.experts, e)));
        let store = ExpertPool::open(sources, at_once, options, &mut lend, &faster)?;
        let slots = in_place.then(|| SharedMemory::new(&gpu.device, slots.take(), false)).transpose()?;
        for moe in mixtures.clone() {
            for expert in 0..moe.experts.count {
                operands(&moe.experts, expert).iter().for_each(|o| weights.all[o.weight].elsewhere = true);
            }
        }
        // It would wait for the same memory.
        let host = host.filter(|_| !in_place);
        let split = host.map(|host| HostSplit::new(gpu, host, mode, weights, computes)).transpose()?;
        // 2. The device's buffers. They are zeroed, because a kernel may multiply with one before an expert is there if the host computes that expert.
        let divisions = divide(&store.slot_classes());
        let memory = divisions.iter().map(|division| DeviceBuffer::zeroed(gpu, division.bytes() as usize, "experts"));
        let memory = memory.collect::<Result<_>>()?;
        let classes = mixtures.clone().enumerate().map(|(layer, moe)| (store.class_of_layer(layer), moe.experts.count));
        let pool = BufferPool::new(&divisions, classes);
        let layer = |moe: &Moe| StreamedLayer {
            blocks: (0..moe.experts.count).map(|e| blocks_of(weights, &moe.experts, e)).collect(),
            experts: moe.experts.clone(),
            history: None,
            is_complete: false,
            is_written: false,
        };
        let layers: Vec<StreamedLayer> = mixtures.clone().map(layer).collect();
        let in_blocks = layers.iter().flat_map(|layer| &layer.blocks).flatten().flatten();
        let block_copies = BlockCopies::new(gpu, in_blocks)?;
        let host_width = mixtures.clone().map(|moe| moe.experts.hidden()).max().filter(|_| split.is_some());
        // The driver must not have to load a kernel while the device waits for the host.
        gpu.device.load_kernels()?;
        let mut streaming = ExpertStreaming {
            mailbox: Mailbox::new(gpu, mixtures.clone().count(), host_width.unwrap_or(0))?,
            up: CopyStream::new(&gpu.device)?,
            down: CopyStream::new(&gpu.device)?,
            tables: ExpertTables::new(gpu, mixtures.clone().map(|moe| moe.experts.count))?,
            uploaded: SyncEvent::new(&gpu.device)?,
            store,
            mode,
            slots,
            divisions,
            memory,
            pool,
            layers,
            blocks: block_copies,
            active: None,
            prefetched: Vec::new(),
            demotions: Vec::new(),
            is_idle: true,
            spare_events: Vec::new(),
            split,
            reads_ahead: lookahead != Lookahead::Off,
            is_locked: is_locked.get(),
            stats: ExpertStats::default(),
            failed_rows: Vec::new(),
            error: None,
        };
        // Every entry of a table points to memory: the device may multiply with the entry of an expert that the host computes, whatever is there.
        for layer in 0..streaming.layers.len() {
            for expert in 0..streaming.layers[layer].experts.count {
                let at = streaming.address(layer, 0);
                streaming.write_table(weights, layer, expert, at, &streaming.layout(layer, expert));
            }
        }
        // Copies do not wait for the zeros.
        gpu.wait(gpu.wait_permit()?)?;
        Ok(streaming)
    }

    /// Where the host wants the normed input of `pairs` pairs, `bytes` long, to compute some of a layer's experts; `None` if it computes none.
    pub fn host_input(&mut self, gpu: &Gpu, pairs: usize, bytes: usize) -> Result<Option<&mut [u8]>> {
        let split = self.split.as_mut().filter(|_| pairs <= MAX_PAIRS);
        split.map(|split| split.input(gpu, bytes)).transpose()
    }

    /// The address of a layer's table, if all of its experts stay on the device.
    pub fn complete_table(&self, layer: usize) -> Option<Address> {
        self.layers[layer].is_complete.then(|| self.tables.at(layer))
    }

    /// The address of a buffer. Where there are none: that of the first of the host's slots.
    fn address(&self, layer: usize, buffer: u32) -> Address {
        let class = self.store.class_of_layer(layer);
        if let Some(slots) = &self.slots {
            return slots.address(self.store.memory_of_class(class));
        }
        self.memory[class].at + u64::from(buffer) * self.divisions[class].stride as u64
    }

    /// The places of an expert's arrays in a buffer.
    fn layout(&self, layer: usize, expert: usize) -> ExpertLayout {
        let parts: [_; EXPERT_ARRAYS] = std::array::from_fn(|array| self.store.array_range(layer, expert, array));
        if self.slots.is_some() {
            return ExpertLayout::in_place(&parts);
        }
        let kept = std::array::from_fn(|array| self.store.kept(layer, expert, array).map_or(0, |bytes| bytes.len()));
        ExpertLayout::new(&parts, &kept, &self.layers[layer].blocks[expert])
    }

    /// Enqueues the copy of an expert, by its layer and number, to a buffer at `at`. `slot`: bytes of its slot.
    ///
    /// # Safety
    /// Nothing else uses the buffer; the slot stays as it is until the copies are done.
    unsafe fn upload<'a>(
        &'a self,
        (layer, expert): (usize, usize),
        at: Address,
        layout: &ExpertLayout,
        slot: impl Fn(Range<usize>) -> &'a [u8],
    ) -> Result<(), DriverError> {
        let kept = |array: usize| self.store.kept(layer, expert, array);
        for (from, to) in &layout.copies {
            // SAFETY: as the caller vouches.
            unsafe { self.up.write(at + *to as u64, slot(from.clone()))? };
        }
        for (rows, first, arrays, to) in &layout.blocks {
            let copies = self.blocks.as_ref().expect("some experts have blocks");
            let of = |i: usize| kept(first + i).map_or_else(|| slot(arrays[i].clone()), |bytes| &bytes[..]);
            // SAFETY: as the caller vouches.
            unsafe { copies.write(&self.up, rows, at + *to as u64, [of(0), of(1)])? };
        }
        for (array, to) in &layout.kept {
            let bytes = kept(*array).expect("the layout has it");
            // SAFETY: as the caller vouches; what is kept stays for as long as the pool.
            unsafe { self.up.write(at + *to as u64, bytes)? };
        }
        Ok(())
    }

    /// Points an expert's entries of the table to the buffer, or the slot, at this address.
    fn write_table(&mut self, weights: &Weights, layer: usize, expert: usize, at: Address, layout: &ExpertLayout) {
        for (projection, operand) in operands(&self.layers[layer].experts, expert).into_iter().enumerate() {
            let arrays: [Address; ARRAYS] =
                std::array::from_fn(|i| at + layout.offsets[projection * ARRAYS + i] as u64);
            let matrix = weights.all[operand.weight].described(arrays, self.mode);
            self.tables.set(layer, projection, expert, matrix);
        }
    }

    /// Notes that an expert is being copied to a buffer.
    fn publish(&mut self, weights: &Weights, layer: usize, expert: usize, buffer: u32, layout: &ExpertLayout) {
        self.stats.uploads += 1;
        self.stats.uploaded_bytes += layout.bytes as u64;
        self.write_table(weights, layer, expert, self.address(layer, buffer), layout);
    }

    /// Marks an expert's entries of the table so that no kernel multiplies with them until it is published again.
    fn unpublish(&mut self, weights: &Weights, layer: usize, expert: usize) {
        let at = [self.address(layer, 0); ARRAYS];
        for (projection, operand) in operands(&self.layers[layer].experts, expert).into_iter().enumerate() {
            let none = p::Matrix { kind: KIND_NONE, ..weights.all[operand.weight].described(at, self.mode) };
            self.tables.set(layer, projection, expert, none);
        }
    }

    /// A buffer for an expert. If none is available, the device must not go on before demotions are done. There are enough for all experts that one layer can need.
    fn take_buffer(&mut self, layer: usize, expert: usize, state: BufferState) -> Result<u32> {
        if self.pool.available(layer) == 0 {
            self.down.wait()?;
            self.finish_demotions();
            self.pool.cache_retiring();
        }
        let score = |layer, expert| self.store.long_term_score(layer, expert);
        let buffer = self.pool.take((layer, expert as u32), state, score);
        Ok(buffer.expect("buffers for all of a layer's experts"))
    }

    /// Whether an expert could not be read in this step.
    pub fn has_failed(&self) -> bool {
        self.error.is_some()
    }

    /// The rows of the step that were lost, ascending, and why; `None` if there are none.
    pub fn take_failure(&mut self) -> Option<Failed> {
        let error = self.error.take()?;
        let mut rows = std::mem::take(&mut self.failed_rows);
        rows.sort_unstable();
        rows.dedup();
        Some(Failed { rows, why: Arc::new(Error::from(error)) })
    }

    /// Statistics since the last call.
    pub fn take_stats(&mut self) -> Streamed {
        let mut stats = std::mem::take(&mut self.stats);
        stats.add(&self.store.take_stats());
        Streamed {
            stats,
            reader: self.store.reader(),
            notes: self.notes(),
            slots: self.store.slots(),
            device_slots: self.slots.is_none().then(|| self.store.fast_slots()),
            file_bytes: self.store.file_bytes(),
            looks_ahead: false,
        }
    }

    /// What a user should know.
    pub fn notes(&self) -> Vec<String> {
        let slow = "the driver does not lock the memory for experts: copies of them to the device are slow";
        let slow = (!self.is_locked).then(|| slow.to_owned());
        self.store.notes().iter().cloned().chain(slow).collect()
    }

    pub fn host_bytes(&self) -> usize {
        self.store.bytes() + self.tables.bytes()
    }

    pub fn device_bytes(&self) -> usize {
        self.memory.iter().map(|memory| memory.bytes).sum::<usize>() + self.tables.bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_token_needed_is_likely_for_as_many() {
        let history = LayerHistory { tokens: 1000, uses: vec![0, 1, 10, 1000] };
        let likely = |tokens| (0..4).map(|e| history.is_likely(e, tokens)).collect::<Vec<_>>();
        assert_eq!(likely(1000), [false, true, true, true]);
        // One of many more tokens may need what none of fewer needed.
        assert_eq!(likely(2000), [true; 4]);
        assert_eq!(likely(100), [false, false, true, true]);
    }
}
