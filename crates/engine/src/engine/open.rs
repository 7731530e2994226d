//! Setting an engine up: what is in memory and what stays on disk, within which budget.

use std::collections::HashSet;
use std::hash::{BuildHasher, RandomState};
use std::path::Path;
use std::time::Duration;

use anyhow::{Result, ensure};
use sluice_backend::{
    Activations, AttentionMode, Backend, Capacity, Device, ExpertOptions, Float, KvLayout, KvPool, KvType, Lookahead,
    MemoryClass, SequenceInput, StepInputs, StepScratch, Wanted,
};
use sluice_cache::{Group, KvCache, Prefixes};
use sluice_cpu::Cpu;
use sluice_model::{CacheKind, Config, Decoder};
use sluice_store::experts::Keep;
use sluice_store::load::ReadAhead;
use sluice_store::{Bytes, Checkpoint, Error, LoadOptions, Loading};

use super::Engine;
use super::device::DeviceShare;
use crate::budget::{self, AdmittedMemory, Division, Limit, LimitOf, Need, Refusal, StreamedNeed, refused_by_device};
use crate::constraint::Masks;
use crate::options::{Options, Placement};
use crate::placement::{self, Placed};
use crate::prompt_cache::{self, Choices, Identity, PromptCache, Shape};
use crate::runner::Runner;
use crate::sampling::Sampling;
use crate::scheduler::{Plan, Scheduler};
use crate::spill::Spill;

/// Makes the backend of an engine with these options.
pub type MakeBackend<'a> = &'a dyn Fn(&Options) -> Result<Box<dyn Backend>>;

/// The CPU for an engine with these options.
///
/// # Errors
/// When the system refuses a thread, or a processor for one.
pub fn cpu(options: &Options) -> Result<Box<dyn Backend>> {
    let mut cpu = Cpu::new(options.isa, options.threads, options.activations)?;
    cpu.bind(&options.processors, options.numa)?;
    Ok(Box::new(cpu))
}

impl Engine {
    /// Loads the checkpoint in `folder`. Returns before the weights are read: a step waits for those it comes to.
    ///
    /// # Errors
    /// A file that is missing, broken or not supported; the message names it. What goes wrong later is an error of a step.
    pub fn open(folder: &Path, options: Options) -> Result<Engine> {
        Engine::open_on(folder, options, &cpu)
    }

    /// [`Engine::open`] on the backend that `make` makes; what does not fit may be opened twice.
    ///
    /// # Errors
    /// Those of [`Engine::open`] and of `make`.
    pub fn open_on(folder: &Path, mut options: Options, make: MakeBackend) -> Result<Engine> {
        // The config first: a folder that holds something else altogether is best told by it.
        ensure!(folder.exists(), "{}: no such folder", folder.display());
        ensure!(folder.is_dir(), "{}: not a folder (a model is a folder with config.json)", folder.display());
        let config = Config::open(folder)?;
        let model = sluice_model::describe(&config, &options.model(1))?;
        // Before anything takes memory, or starts a thread that does.
        let numa = options.processors.place_memory(options.numa);
        let state = (model.state_len() * size_of::<f32>()) as u64;
        options.beside += options.prompt_cache.as_ref().map_or(0, |_| prompt_cache::memory(state));
        options.beside += options.kv_spill;
        let mut ahead = options.load.ahead.then(|| ReadAhead::begin(folder, &options.load));
        let mut first = Some(make(&options)?);
        let device = first.as_ref().is_some_and(|backend| backend.device_memory().is_some());
        let placed = placement::decide(folder, &model, &options, device)?;
        let mut load = options.load.clone();
        if device {
            // Nothing of it stays in the host's memory, and who reads from the page cache copies as well.
            load = LoadOptions { room: None, threads: load.threads.max(options.threads.min(READERS)), ..load };
        }
        let mut open = |placed: Placed| {
            let (checkpoint, loading) = sluice_store::load::open_but(folder, &load, |checkpoint| {
                let streams = placed.placement != Placement::Mapped;
                if streams { sluice_model::expert_tensors(&model, checkpoint) } else { HashSet::new() }
            })?;
            let backend = first.take().map_or_else(|| make(&options), Ok)?;
            Engine::build(&checkpoint, Some((loading, folder)), &config, options.clone(), placed, backend)
        };
        let may_stream = options.experts == Placement::Auto && model.experts().is_some();
        let mapped = placed.placement == Placement::Mapped;
        ahead = ahead.filter(|_| mapped);
        let opened = match open(placed) {
            // Weights alone would fit, but not with all that a step needs.
            Err(refused) if may_stream && mapped && refused.is::<Refusal>() => {
                let by_device = refused_by_device(&refused);
                // What stays on disk goes past the page cache.
                drop(ahead.take());
                let streamed = open(placement::instead_of_mapped(folder, &options, by_device));
                streamed.map_err(|e| if smallest(&e) < smallest(&refused) { e } else { refused })
            }
            opened => opened,
        };
        opened.map(|mut engine| {
            engine.numa.splice(0..0, numa);
            engine
        })
    }

    /// An engine for an opened checkpoint, whose weights are used as they are.
    pub fn load(checkpoint: &Checkpoint, config: &Config, options: Options) -> Result<Engine> {
        let placed = Placed { placement: Placement::Mapped, reason: "opened elsewhere".into() };
        let backend = cpu(&options)?;
        Engine::build(checkpoint, None, config, options, placed, backend)
    }

    fn build(
        checkpoint: &Checkpoint,
        from: Option<(Loading, &Path)>,
        config: &Config,
        options: Options,
        placed: Placed,
        mut backend: Box<dyn Backend>,
    ) -> Result<Engine> {
        let (loading, folder) = from.map_or((None, None), |(loading, folder)| (Some(loading), Some(folder)));
        let streamed = placed.placement != Placement::Mapped;
        let chunks = budget::chunks(options.chunk, streamed || backend.device_memory().is_some());
        let longest = chunks[0];
        let positive = longest > 0 && options.max_sequences > 0 && options.block_tokens > 0;
        ensure!(positive, "chunk, sequences and block size must not be zero");
        let largest = longest.max(options.block_tokens).max(options.max_context.unwrap_or(0));
        ensure!(largest <= 1 << 24, "{largest} is too many tokens");
        if options.profile {
            backend.profile(true);
        }
        let loaded = sluice_model::load(checkpoint, config, &mut *backend, &options.model(longest))?;
        let (model, decoder) = (loaded.description, loaded.decoder);
        let max_context = options.max_context.unwrap_or(model.max_context);
        let max_context_asked = max_context;
        ensure!(max_context > 0, "the context must hold at least one token");
        let kv_type = options.kv_type.unwrap_or(match (options.attention, options.activations, loaded.working_type) {
            (AttentionMode::Int8, ..) => KvType::Int8,
            (_, Activations::F32, _) | (_, _, Float::F32) => KvType::F32,
            (_, _, Float::F16) => KvType::F16,
            (_, _, Float::Bf16) => KvType::Bf16,
        });
        ensure!(
            options.attention == AttentionMode::F32 || kv_type == KvType::Int8,
            "attention on integers needs keys and values of eight bits: ask for these (--kv-type int8) or for no type"
        );
        let block_tokens = options.block_tokens;
        let groups = model.groups();
        let layouts: Vec<KvLayout> =
            groups.iter().map(|g| g.layout(kv_type, options.attention, block_tokens)).collect();
        let own = backend.device_memory();
        let states = match model.state_len() {
            0 => 0,
            len => options.max_sequences + snapshots(&options, own.map(|own| own.free), len),
        };
        if states > 0 {
            backend.alloc_states(states, model.state_len())?;
        }
        // 1. What there is to divide, and among what: the host's memory, and a device's that computes in its own
        let computes_in = own.map_or(Device::Host, |own| own.device);
        let tensors = held_on(&mut *backend, MemoryClass::Scratch, computes_in);
        let (mut scratch, mut per_block) = (Vec::with_capacity(chunks.len()), 0);
        let mut device_scratch = Vec::new();
        for &chunk in &chunks {
            let need = step_scratch(&*backend, &decoder, &layouts, chunk, options.max_sequences, streamed);
            let sampling = options.threads * model.vocabulary * SAMPLING;
            // What a device has allocated it keeps, however short steps are.
            if own.is_some() {
                device_scratch.push((chunk, (tensors + need.fixed) as u64));
            }
            let own_part = if own.is_some() { 0 } else { tensors / longest * chunk + need.fixed };
            scratch.push((chunk, (own_part + sampling) as u64));
            per_block = (need.per_128_positions * block_tokens).div_ceil(128);
        }
        let by_experts: usize = loaded.order.iter().filter(|used| used.by_experts).map(|used| used.bytes.len()).sum();
        let on_disk = if streamed { Some(streamed_need(&mut *backend, by_experts, &options)?) } else { None };
        let wanted = || loaded.order.iter().filter(|used| !(streamed && used.by_experts)).map(|used| &used.bytes);
        let [mapped, copied] = match (&loading, own) {
            // On their way to a device they pass through a few buffers.
            (Some(loading), Some(_)) => [0, loading.bytes_to_deliver()],
            _ => weights_in_memory(&mut *backend, loaded.order.iter().map(|u| &u.bytes), wanted(), loading.as_ref()),
        };
        let block: usize = layouts.iter().map(KvLayout::block_bytes).sum();
        let in_cache = block + per_block;
        // A backend of several devices has dealt the layers by what a step showed it.
        let own = backend.device_memory();
        let mut need = Need {
            mapped,
            copied,
            state: held(&mut *backend, MemoryClass::State) as u64,
            scratch,
            block: (if own.is_some() { 0 } else { in_cache } + block_tokens * TOKEN) as u64,
            sequences: options.max_sequences,
            block_tokens,
            reserved: options.kv_reserve.map_or(0, |tokens| tokens.min(max_context)),
            max_context,
            context_asked: options.max_context.is_some(),
            streamed: on_disk,
            has_experts: model.experts().is_some(),
        };
        // 2. How much each class of memory gets
        let (hard, division) = settled(|| {
            let hard = hard_limits(&options);
            let mut limits = hard.clone();
            // What others may take as well is no reason to refuse what was asked for.
            if streamed && options.expert_budget.is_none() {
                limits.extend(machine_limit(&options, &hard));
            }
            let division = need.divide(&limits);
            (hard, division)
        })?;
        let mut numa = Vec::new();
        let nodes = backend.weight_copies();
        if nodes > 1 {
            let limits = [&hard[..], machine_limit(&options, &hard).as_slice()].concat();
            match need.replicated(nodes, &limits, division.scratch) {
                Ok(replicated) => {
                    need = replicated;
                    numa.extend(backend.replicate_weights(loading.as_ref()));
                }
                Err(why) => numa.push(format!("numa: weights are spread, and not copied for each node: {why}")),
            }
        }
        let mut own = match own {
            None => None,
            Some(own) => {
                let in_cache = own.block.unwrap_or(block) + per_block;
                Some(DeviceShare::new(own, &need, (device_scratch, in_cache as u64), &options, &mut *backend)?)
            }
        };
        let chunk = division.chunk.min(own.as_ref().map_or(usize::MAX, |own| own.division.chunk));
        backend.limit_steps(chunk, longest);
        if streamed {
            let keep = if placed.placement == Placement::PageCache { Keep::PageCache } else { Keep::Slots };
            let budget = options.expert_budget.unwrap_or(u64::MAX).min(division.experts);
            let device_budget = own.as_ref().map(|own| own.division.experts);
            let expert_options = ExpertOptions { keep, budget, device_budget, ..options.expert_options.clone() };
            backend.stream_experts(&expert_options, options.lookahead)?;
        }
        let experts = held(&mut *backend, MemoryClass::Experts) as u64;
        // All sequences share what there is, as each needs it.
        let mut pool = max_context.saturating_mul(options.max_sequences);
        for limit in &hard {
            pool = pool.min(need.positions_within(limit, division.scratch, experts)?);
        }
        if let Some(own) = &mut own {
            own.experts = backend.device_memory().map_or(0, |own| own.taken_by_experts);
            pool = pool.min(own.positions()?);
        }
        let max_context = max_context.min(pool);
        let reserved = need.reserved.min(max_context);
        let squeezed = division.squeezed;
        // 3. Weights are read while the rest is set up, and while the first steps run
        if let Some(loading) = &loading {
            backend.read_weights(loading, &wanted().collect::<Vec<_>>())?;
        }
        // 4. The caches
        let per_sequence = max_context.div_ceil(block_tokens);
        let blocks = options.kv_tokens.unwrap_or(pool).div_ceil(block_tokens);
        let kv: Vec<KvPool> = layouts.iter().map(|l| backend.alloc_kv(*l, blocks)).collect::<Result<_>>()?;
        let resident = (reserved.div_ceil(block_tokens) * options.max_sequences).min(blocks);
        kv.iter().try_for_each(|pool| backend.commit_kv(pool, resident))?;
        let group = |kind| match kind {
            CacheKind::Full => Group { block_tokens, window: None, blocks },
            CacheKind::Window(n) => Group { block_tokens, window: Some(n), blocks },
        };
        let cached: Vec<Group> = groups.iter().map(|g| group(g.kind)).collect();
        let mut disk_notes = Vec::new();
        let disk = match (&options.prompt_cache, folder.zip(loading.as_ref())) {
            (Some(asked), Some((folder, loading))) if options.prefix_cache => {
                let choices = Choices {
                    activations: options.activations,
                    kv_type,
                    attention: options.attention,
                    experts_per_token: options.experts_per_token,
                    context: max_context_asked,
                    block_tokens,
                };
                let shape = Shape::new(&cached, &layouts, model.state_len());
                let opened = Identity::read(folder, &choices, loading.opened(), asked.sums.as_deref())
                    .and_then(|model| PromptCache::open(asked, model, folder, loading.progress(), shape));
                match opened {
                    Ok(opened) => Some(opened),
                    Err(e) => match prompt_cache::to_blame(&e) {
                        Some(flag) => return Err(e.context(flag)),
                        None => {
                            disk_notes.push(format!("without the prompt cache: {e:#}"));
                            None
                        }
                    },
                }
            }
            (Some(_), Some(_)) => {
                disk_notes.push("without the prompt cache: nothing is shared between requests".into());
                None
            }
            _ => None,
        };
        let key = disk.as_ref().map_or_else(secret, |(_, secret)| *secret);
        let prefixes = options.prefix_cache.then_some(Prefixes { key, snapshots: states });
        let max_sequences = options.max_sequences;
        let mut cache = KvCache::new(&cached, states, prefixes);
        let disk = disk.map(|(disk, _)| disk);
        let spills = options.prefix_cache && options.kv_spill > 0;
        if let Some(fewest) = disk.as_ref().map(PromptCache::min_tokens).or(spills.then_some(block_tokens)) {
            cache.keep_elsewhere(fewest);
        }
        let capacity =
            Capacity { tokens: chunk, sequences: options.max_sequences, blocks: per_sequence * options.max_sequences };
        let spill = spills.then(|| Spill::new(Shape::new(&cached, &layouts, model.state_len()), options.kv_spill));
        let sampling = Sampling::new(options.isa, backend.threads(), model.vocabulary, options.max_sequences);
        Ok(Engine {
            runner: Runner::new(backend, decoder, kv, capacity, spill),
            loading,
            model,
            cache,
            layouts,
            scheduler: Scheduler::new(chunk, max_sequences, if streamed { STREAMED_PROMPT } else { PROMPT }),
            sampling,
            masks: Masks::default(),
            disk,
            disk_notes,
            sequences: Vec::new(),
            next_id: 0,
            next_turn: 0,
            steps: 0,
            options,
            placed,
            scratch: division.scratch,
            squeezed,
            numa,
            device: own.map(|own| own.used()),
            max_context,
            skipped: loaded.skipped,
            failures: Vec::new(),
            routed: Vec::new(),
            plan: Plan::default(),
            draws: Vec::new(),
            resting: Vec::with_capacity(max_sequences),
            pending: Vec::new(),
            events: Vec::new(),
        })
    }
}

/// A number that nobody else knows.
fn secret() -> [u8; 32] {
    // Hashers of std are keyed by the system's random numbers.
    let mut key = [0; 32];
    for part in key.chunks_exact_mut(8) {
        part.copy_from_slice(&RandomState::new().hash_one(()).to_le_bytes());
    }
    key
}

/// States of `len` f32 that are kept beside those of a step's sequences: as many as was asked for, where they take no more than a part of what there is.
fn snapshots(options: &Options, device: Option<u64>, len: usize) -> usize {
    let least = match device {
        Some(free) => options.device_memory.map_or(free, |asked| asked.min(free)),
        None => hard_limits(options).iter().map(|l| l.bytes).chain(options.load.room).min().unwrap_or(u64::MAX),
    };
    options.snapshots.min((least / SNAPSHOTS / (4 * len as u64)) as usize)
}

/// Bytes of a class in the host's memory.
fn held(backend: &mut dyn Backend, class: MemoryClass) -> usize {
    held_on(backend, class, Device::Host)
}

/// Bytes of a class on a device.
pub(super) fn held_on(backend: &mut dyn Backend, class: MemoryClass, device: Device) -> usize {
    backend.memory().iter().filter(|m| m.class == class && m.device == device).map(|m| m.bytes).sum()
}

/// Tokens of prompts beside sequences that generate, in a step at least. Behind 4,000 tokens each of them takes a fifth of a step of seven, so that sixteen make it four times as long;
/// but keys and values are read for a few as for many, and with four a prompt takes more than twice its time. Where each expert is read from disk, fewer would read nearly as much.
const PROMPT: usize = 8;
const STREAMED_PROMPT: usize = 256;
/// The part of a memory limit, or of what is free, that states may take which are kept for prompts to come.
const SNAPSHOTS: u64 = 16;
/// Bytes of what sampling keeps, for each thread and token of the vocabulary.
const SAMPLING: usize = 16;
/// Threads that read what a device computes with, at most.
const READERS: usize = 16;
/// Bytes that a sequence keeps of each of its tokens beside keys and values.
const TOKEN: usize = 32;

/// The smallest limit that would do, as a refusal has it.
fn smallest(error: &anyhow::Error) -> u64 {
    error.downcast_ref::<Refusal>().map_or(0, |refusal| refusal.smallest)
}

/// How long the counters of a control group may be behind what is true, and how often they are looked at meanwhile: the kernel gathers them from
/// processors every two seconds or so, and until then counts pages of files, which it could take back, as memory that it could not.
const BEHIND: Duration = Duration::from_millis(4400);
const LOOKS: u32 = 4;

/// What `divide` makes of limits; where a control group's is too small, what it makes of it once the group's counters are true.
fn settled(divide: impl Fn() -> (Vec<Limit>, Result<Division, Refusal>)) -> Result<(Vec<Limit>, Division), Refusal> {
    let mut smallest: Option<Refusal> = None;
    for look in 0..=LOOKS {
        let (hard, division) = divide();
        match division {
            Ok(division) => return Ok((hard, division)),
            Err(refusal) if hard.iter().any(|l| l.of == LimitOf::ControlGroup) && look < LOOKS => {
                smallest = Some(smallest.filter(|s| s.smallest <= refusal.smallest).unwrap_or(refusal));
                std::thread::sleep(BEHIND / LOOKS);
            }
            Err(refusal) => return Err(smallest.filter(|s| s.smallest <= refusal.smallest).unwrap_or(refusal)),
        }
    }
    unreachable!("the last look returns")
}

/// The limits that must hold whatever others do.
fn hard_limits(options: &Options) -> Vec<Limit> {
    let held = options.held.map_or(AdmittedMemory { program: 0, group: None }, |held| held());
    let budget = options.memory_budget.map(|bytes| Limit {
        of: LimitOf::MemoryBudget,
        bytes,
        taken: held.program + options.beside,
    });
    let group =
        held.group.map(|(bytes, taken)| Limit { of: LimitOf::ControlGroup, bytes, taken: taken + options.beside });
    budget.into_iter().chain(group).collect()
}

/// What the machine has left, where that is less than the limits that must hold leave.
fn machine_limit(options: &Options, hard: &[Limit]) -> Option<Limit> {
    let room = options.load.room.filter(|room| hard.iter().all(|l| l.bytes.saturating_sub(l.taken) > *room))?;
    Some(Limit { of: LimitOf::Machine, bytes: room - room / 16, taken: 0 })
}

/// Bytes that weights take, mapped and copied: matrices as they are read, of `all` those that are `wanted`, and vectors.
fn weights_in_memory<'a>(
    backend: &mut dyn Backend,
    all: impl Iterator<Item = &'a Bytes>,
    wanted: impl Iterator<Item = &'a Bytes>,
    loading: Option<&Loading>,
) -> [u64; 2] {
    let mut bytes = [MemoryClass::WeightsMapped, MemoryClass::WeightsCopied].map(|class| held(backend, class) as u64);
    let Some(loading) = loading else { return bytes };
    for view in all {
        let class = &mut bytes[usize::from(!view.is_mapped())];
        *class = class.saturating_sub(view.len() as u64);
    }
    let [mapped, copied] = loading.bytes_in_memory(wanted);
    [bytes[0] + mapped, bytes[1] + copied]
}

/// What a step of `chunk` tokens needs beside its tensors, whichever sequences they are of.
fn step_scratch(
    backend: &dyn Backend,
    decoder: &Decoder,
    layouts: &[KvLayout],
    chunk: usize,
    max_sequences: usize,
    streamed: bool,
) -> StepScratch {
    // As many sequences as take part, of which the first has all tokens that are left.
    let sequences = max_sequences.min(chunk);
    let capacity = Capacity { tokens: chunk, sequences, blocks: 0 };
    let mut inputs = StepInputs::new(&[], capacity);
    for i in 0..sequences {
        let tokens = vec![0; if i == 0 { chunk + 1 - sequences } else { 1 }];
        let tables: &[Vec<u32>] = &[];
        inputs.push(&SequenceInput { tokens: &tokens, position: 0, state: 0, tables, wanted: Wanted::Last });
    }
    backend.step_scratch(layouts, &inputs, streamed, &mut |sizing| decoder.step(sizing, &inputs))
}

/// What experts need that stay on disk.
fn streamed_need(backend: &mut dyn Backend, by_experts: usize, options: &Options) -> Result<StreamedNeed> {
    // Nothing is too little for any: what the least is, the store says.
    let none = ExpertOptions { budget: 0, ..ExpertOptions::default() };
    let least = match backend.stream_experts(&none, Lookahead::Off) {
        Ok(()) => 0,
        Err(e) => match e.downcast_ref::<Error>() {
            Some(&Error::ExpertBudget { needed, experts, .. }) => {
                if let Some(budget) = options.expert_budget.filter(|asked| *asked < needed) {
                    let refused = anyhow::Error::new(Error::ExpertBudget { budget, needed, experts });
                    return Err(refused.context(budget::expert_budget_refusal(budget, needed)));
                }
                needed
            }
            _ => return Err(e),
        },
    };
    let asked = options.expert_budget.map_or(0, |asked| asked.min(by_experts as u64));
    Ok(StreamedNeed { least, asked })
}
