//! Opening a pool: its budget is divided among slots of each size.

use std::path::Path;

use sluice_store::load::ALIGNMENT;
use sluice_store::requests::{MAX_REQUEST, ReadQueue, RequestOptions, Requests, StreamedFiles};
use sluice_store::{Bytes, Memory};

use super::fetch::Fetch;
use super::prediction::Prediction;
use super::reads::Reads;
use super::slots::{Slot, SlotClass, SlotGuard, SlotState};
use super::warmup_order::WarmupOrder;
use super::{ClassPool, ExpertPool};
use crate::error::Error;
use crate::layout::{self, LayerLayout};
use crate::options::{ExpertOptions, ExpertStats, Keep};
use crate::policy::Forecast;
use crate::residency::Residency;

/// Bytes that requests in flight ask for: enough to keep a disk busy, and no more. A disk works on all requests at once, so with more each completes later.
const IN_FLIGHT: usize = 40 << 20;
/// How many requests that may be.
const DEPTHS: std::ops::RangeInclusive<usize> = 8..=128;
/// Slots that experts pass through where the page cache keeps them.
const TRANSIENT_SLOTS: usize = 48;
/// Fetches that there is room for from the beginning.
const FETCHES: usize = 4;

/// How many slots of each class a faster tier has.
pub(super) type Faster<'a> = dyn Fn(&[SlotClass]) -> Vec<usize> + 'a;
/// Memory for so many bytes.
pub(super) type Lend<'a> = dyn FnMut(usize) -> std::io::Result<Box<dyn Memory>> + 'a;

impl ExpertPool {
    /// Sets up slots for the experts of some layers. Each expert is the views of its arrays, the same number for all experts of a layer. A token wants at most
    /// `most` experts of a layer. `lend` gives memory for so many bytes, once for each class of slots; `faster` says how many slots of each class a faster tier
    /// has, whose memory is somebody else's.
    ///
    /// # Errors
    /// When the budget is too small for a layer's `most` experts at once, or there is no memory.
    ///
    /// # Panics
    /// When an array is a view of a file that is not being loaded.
    pub fn open<E: Iterator<Item = Vec<Bytes>>>(
        layers: impl Iterator<Item = E>,
        most: usize,
        options: &ExpertOptions,
        lend: &mut Lend,
        faster: &Faster,
    ) -> Result<ExpertPool, Error> {
        let mut files = StreamedFiles::default();
        let layers: Vec<LayerLayout> = layers.map(|experts| LayerLayout::new(experts, &mut files)).collect();
        let path = files.first().unwrap_or(Path::new("")).to_owned();
        let how = RequestOptions {
            direct: options.keep == Keep::Slots,
            depth: options.depth.unwrap_or_else(|| usual_depth(&layers, request_bytes(options))),
            io_uring: options.io_uring,
            threads: options.threads,
            faults: options.faults.clone(),
        };
        let queue = Requests::new(files, &how).map_err(no_memory(&path))?;
        ExpertPool::with_queue(layers, Box::new(queue), most, options, (lend, faster), &path)
    }

    /// The classes of slots that [`ExpertPool::open`] would make for these experts.
    ///
    /// # Panics
    /// As that.
    pub fn classes_of<E: Iterator<Item = Vec<Bytes>>>(layers: impl Iterator<Item = E>) -> Vec<SlotClass> {
        let mut files = StreamedFiles::default();
        let mut layers: Vec<LayerLayout> = layers.map(|experts| LayerLayout::new(experts, &mut files)).collect();
        slot_classes(&mut layers)
    }

    /// As [`ExpertPool::open`], of layers that `queue` reads; `path` is for messages.
    ///
    /// # Errors
    /// Those of [`ExpertPool::open`].
    ///
    /// # Panics
    /// When `lend` gives less memory than it was asked for.
    pub fn with_queue(
        mut layers: Vec<LayerLayout>,
        queue: Box<dyn ReadQueue>,
        most: usize,
        options: &ExpertOptions,
        (lend, faster): (&mut Lend, &Faster),
        path: &Path,
    ) -> Result<ExpertPool, Error> {
        let slot_classes = slot_classes(&mut layers);
        let sizes: Vec<usize> = slot_classes.iter().map(|class| class.bytes).collect();
        // 1. The budget: each class gets what a token needs, and a part of the rest by the bytes of its experts
        let of_class = |number: usize| -> Vec<usize> {
            layers.iter().map(|l| if l.class == number { l.len() } else { 0 }).collect()
        };
        let least = |number: usize| most.min(slot_classes[number].widest);
        let needed = sizes.iter().enumerate().map(|(c, size)| (least(c) as u64).saturating_mul(*size as u64));
        let counts: Vec<usize> = layers.iter().map(LayerLayout::len).collect();
        let faster = faster(&slot_classes);
        // Experts on their way to the faster tier have slots here first.
        let through: usize = (0..sizes.len()).filter(|c| faster[*c] > 0).map(least).sum();
        let per_expert = Residency::BYTES_PER_EXPERT + size_of::<Slot>() + Reads::bytes(1);
        let tables = per_expert * (counts.iter().sum::<usize>() + through)
            + layers.iter().map(LayerLayout::table_bytes).sum::<usize>();
        let needed = needed.fold(tables as u64, u64::saturating_add);
        if needed > options.budget {
            return Err(Error::ExpertBudget { budget: options.budget, needed, experts: most });
        }
        let bytes = |number: usize| class_bytes(&layers, number, sizes[number]);
        let all = (0..sizes.len()).map(bytes).fold(0, u64::saturating_add);
        let spare = options.budget - needed;
        // A number for each pair of a layer's experts, if these leave most of the memory to slots.
        let pairs = Forecast::pair_bytes(&counts);
        let paired = pairs <= spare / 4;
        let spare = if paired { spare - pairs } else { spare };
        // 2. Slots
        let mut classes = Vec::with_capacity(sizes.len());
        let mut slots: Vec<Slot> = Vec::new();
        let mut prediction = Prediction::new();
        for (number, &slot_bytes) in sizes.iter().enumerate() {
            let experts = of_class(number);
            let count: usize = experts.iter().sum();
            let rest = u128::from(spare) * u128::from(bytes(number));
            // Experts that are in no file take no slot's bytes.
            let more = if slot_bytes == 0 { u64::MAX } else { (rest / u128::from(all)) as u64 / slot_bytes as u64 };
            let fast = faster[number].min(count);
            // An expert in the faster tier takes no slot here, but is read into one first.
            let enough = (count - fast).saturating_add(least(number)).min(count);
            let n = (least(number) as u64).saturating_add(more).min(enough as u64) as usize;
            let n = if options.keep == Keep::PageCache { n.min(TRANSIENT_SLOTS.max(2 * most)) } else { n };
            let pinned: Vec<(usize, usize)> =
                options.pinned.iter().copied().filter(|&(l, e)| experts.get(l).is_some_and(|n| e < *n)).collect();
            // Half of the slots must stay free for others, and as many as are needed at once.
            let pinned = &pinned[..pinned.len().min(n / 2).min(n - least(number))];
            if options.keep == Keep::Slots {
                prediction.queue.extend(pinned.iter().map(|&(layer, expert)| (layer as u32, expert as u32)));
            }
            let first = slots.len() as u32;
            let memory = lend(n.saturating_mul(slot_bytes)).map_err(no_memory(path))?;
            assert!(memory.len() >= n * slot_bytes, "less memory than was asked for");
            slots.extend((0..fast).map(|_| Slot::new(SlotState::Elsewhere)));
            slots.extend((0..n).map(|i| {
                // SAFETY: each slot is a part of its own of the class's memory, which the pool keeps for longer than its reads.
                let guard = unsafe {
                    SlotGuard::new(first + (fast + i) as u32, memory.start().add(i * slot_bytes), slot_bytes)
                };
                Slot::new(SlotState::Ready(guard))
            }));
            let pairs = if paired { pairs } else { 0 };
            let tiers = [fast, n];
            let tiers = if fast > 0 { &tiers[..] } else { &tiers[1..] };
            let residency = Residency::with_pairs(&experts, tiers, options.policy, pinned, pairs);
            classes.push(ClassPool { memory, residency, first, fast: fast as u32, experts: count as u32 });
        }
        let widest = counts.into_iter().max().unwrap_or(0);
        let warmup_order = WarmupOrder::new(&layers, classes.len(), most);
        let mut pool = ExpertPool {
            reads: Reads::new(queue, request_bytes(options), slots.len()),
            layers,
            classes,
            slot_classes,
            slots,
            keep: options.keep,
            fetches: (0..FETCHES).map(|_| Fetch::with_capacity(widest)).collect(),
            begun: 0,
            prediction,
            warmup_order,
            stats: ExpertStats::default(),
            reading_since: None,
            finished: Vec::with_capacity(1024),
        };
        pool.read_ahead();
        Ok(pool)
    }
}

fn no_memory(path: &Path) -> impl Fn(std::io::Error) -> Error {
    let path = path.to_owned();
    move |cause| sluice_store::Error::Io { path: path.clone(), doing: "find memory for experts of", cause }.into()
}

/// Bytes that one request asks for at most: whole pages, at least one, and no more than the kernel moves at once.
pub(super) fn request_bytes(options: &ExpertOptions) -> usize {
    options.request.clamp(1, MAX_REQUEST).next_multiple_of(ALIGNMENT)
}

/// The number of requests that together ask for [`IN_FLIGHT`] bytes of these experts, where one asks for `request` bytes at most.
fn usual_depth(layers: &[LayerLayout], request: usize) -> usize {
    let of_expert = |l: &LayerLayout| l.extents(0).iter().map(|e| e.len.div_ceil(request)).sum::<usize>();
    let (bytes, reads) = layers
        .iter()
        .filter(|l| !l.is_empty())
        .fold((0, 0), |(bytes, reads), l| (bytes + l.bytes as usize / l.len(), reads + of_expert(l)));
    (IN_FLIGHT / (bytes / reads.max(1)).max(1)).clamp(*DEPTHS.start(), *DEPTHS.end())
}

/// Divides layers among classes of slots.
fn slot_classes(layers: &mut [LayerLayout]) -> Vec<SlotClass> {
    let sizes = layout::classes(layers);
    let class = |(number, &bytes): (usize, &usize)| {
        let of_class = || layers.iter().filter(|l| l.class == number);
        SlotClass {
            bytes,
            kept: of_class().map(|l| l.kept_bytes).max().unwrap_or(0),
            experts: of_class().map(LayerLayout::len).sum(),
            widest: of_class().map(LayerLayout::len).max().unwrap_or(0),
        }
    };
    sizes.iter().enumerate().map(class).collect()
}

/// Bytes of slots for all experts of a class.
fn class_bytes(layers: &[LayerLayout], class: usize, slot_bytes: usize) -> u64 {
    let of_layer = |l: &LayerLayout| (l.len() as u64).saturating_mul(slot_bytes as u64);
    layers.iter().filter(|l| l.class == class).map(of_layer).fold(0, u64::saturating_add)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_never_larger_than_the_kernel_moves_at_once() {
        for asked in [0, 1, 4097, 4 << 30, usize::MAX] {
            let request = request_bytes(&ExpertOptions { request: asked, ..ExpertOptions::default() });
            assert!(
                (ALIGNMENT..=MAX_REQUEST).contains(&request) && request.is_multiple_of(ALIGNMENT),
                "{asked}: {request}"
            );
        }
    }
}
