//! Opens an engine: decides what is in memory and what stays on disk, and divides the memory among them.

use std::hash::{BuildHasher, RandomState};
use std::path::Path;
use std::sync::Arc;

use anyhow::{Result, ensure};
use sluice_backend::{AttentionMode, Backend, Capacity, Device, ExpertOptions, KvLayout, KvPool, MemoryClass};
use sluice_cache::{Group, KvCache, PrefixOptions};
use sluice_cpu::Cpu;
use sluice_experts::Keep;
use sluice_model::{ModelSource, ModelTensors, OnDisk, RowTable, Used, UsedBy};
use sluice_store::load::ReadAhead;
use sluice_store::{LoadOptions, Loading};

use super::drafting::{Drafter, Drafting, MtpHead};
use super::role::{MakeBackend, Role};
use super::sequence_table::SequenceTable;
use super::{Engine, EventQueue, Setup, StepSampling, follower};
use crate::constraint::Masks;
use crate::draft::{BYTES_PER_TOKEN, DraftOptions, DrafterChoice, MAX_STEP_DRAFTS};
use crate::options::{Options, Placement};
use crate::sampling::batch::BatchSampler;
use crate::sampling::draft_sampler::DraftSampler;
use crate::schedule::plan::Plan;
use crate::schedule::scheduler::Scheduler;
use crate::setup::budget::{self, Need, Refusal, refused_by_device};
use crate::setup::device_share::{DeviceShare, shared_experts, shared_use};
use crate::setup::kv_need::{KvNeed, most_blocks};
use crate::setup::limits::{divide_with_retries, hard_limits, machine_limit, shared_limits};
use crate::setup::needs::{self, held, held_on, snapshots, step_scratch, streamed_need, weights_in_memory};
use crate::setup::placement::{self, PlacementChoice};
use crate::setup::tables;
use crate::step::runner::Runner;
use crate::tiers::Tiers;
use crate::tiers::disk::fingerprint::{BitOptions, ModelIdentity};
use crate::tiers::disk::tier::DiskTier;
use crate::tiers::disk::{limits, options as prompt_cache};
use crate::tiers::host::tier::HostTier;
use crate::tiers::shape::CacheShape;

/// Prompt tokens in a step beside sequences that generate, at least. After 4,000 tokens, each of them takes a fifth of a step of seven, so that sixteen make it
/// four times as long. But keys and values are read once for all of them, and with four a prompt takes more than twice its time.
const MIN_CHUNK: usize = 8;
/// The same if each expert is read from disk: fewer tokens would read nearly as much.
const MIN_CHUNK_STREAMED: usize = 256;
/// Bytes of what sampling keeps, for each thread and token of the vocabulary.
const SAMPLING_BYTES: usize = 16;
/// Threads that read weights for a device, at most.
const MAX_READERS: usize = 16;
/// Bytes that a sequence keeps for each of its tokens beside keys and values.
const TOKEN_BYTES: usize = 32;

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
    /// Opens the checkpoint in `folder` on the CPU. Returns before the weights are read: a step waits for those that it needs.
    ///
    /// # Errors
    /// A file that is missing, broken or not supported; the message names it. Errors of reading weights are errors of a step.
    pub fn open(folder: &Path, options: Options) -> Result<Engine> {
        Engine::open_on(folder, options, &cpu)
    }

    /// [`Engine::open`] on the backend that `make` makes. It may be called twice, if the model does not fit at first.
    ///
    /// # Errors
    /// Those of [`Engine::open`] and of `make`.
    pub fn open_on(folder: &Path, options: Options, make: MakeBackend) -> Result<Engine> {
        Engine::open_source(&sluice_model::source::open(folder)?, options, make)
    }

    /// [`Engine::open_on`] for a model source that is open already.
    ///
    /// # Errors
    /// Those of [`Engine::open_on`].
    pub fn open_source(source: &Arc<dyn ModelSource>, mut options: Options, make: MakeBackend) -> Result<Engine> {
        let follower = follower::open(source, &mut options, make)?;
        let mut engine = Engine::open_as(Role::Answers, source, options, make)?;
        engine.begin_drafting(follower.into_iter().collect());
        Ok(engine)
    }

    /// [`Engine::open_source`], without drafts.
    pub(super) fn open_as(
        role: Role,
        source: &Arc<dyn ModelSource>,
        mut options: Options,
        make: MakeBackend,
    ) -> Result<Engine> {
        let model = sluice_model::describe(source.config(), &options.model(1))?;
        let model = match options.layers {
            Some(layers) => model.cut(layers)?,
            None => model,
        };
        // Before anything takes memory, or starts a thread that does.
        let numa = options.processors.place_memory(options.numa);
        let state = (model.state_len() * size_of::<f32>()) as u64;
        options.caller_memory +=
            options.prompt_cache.as_ref().map_or(0, |cache| limits::max_memory(state, cache.store.is_some()));
        options.caller_memory += options.kv_spill;
        let mut ahead = options.load.ahead.then(|| {
            let source = Arc::clone(source);
            ReadAhead::begin(move || source.open_checkpoint(), &options.load)
        });
        let mut first = Some(make(&options)?);
        let own = first.as_ref().and_then(|backend| backend.device_memory());
        let device = own.is_some_and(|own| !own.shared);
        if let Some(own) = own.filter(|_| role == Role::Follows) {
            options.device_memory = Some(options.device_memory.unwrap_or(own.free).min(own.free) / follower::PART);
        }
        let placed = placement::decide(&**source, &model, &options, device)?;
        let tables = tables::stay_on_disk(&model, &options, own.as_ref().map(|own| own.free));
        let mut load = options.load.clone();
        if own.is_some() {
            // With memory of its own, nothing stays in the host's. Reads from the page cache copy, too, so more threads are faster.
            let copy_budget = load.copy_budget.filter(|_| !device);
            load = LoadOptions { copy_budget, threads: load.threads.max(options.threads.min(MAX_READERS)), ..load };
        }
        let mut open = |placed: PlacementChoice, drafts: DraftOptions| {
            let options = Options { drafts, ..options.clone() };
            let on_disk = OnDisk { model: &model, experts: placed.placement != Placement::Mapped, tables };
            let (tensors, loading) = source.load(&load, Some(on_disk))?;
            let backend = first.take().map_or_else(|| make(&options), Ok)?;
            Engine::build(role, &tensors, Some((loading, &**source)), options, (placed, tables), backend)
        };
        let may_stream = options.experts == Placement::Auto && model.experts().is_some();
        let mapped = placed.placement == Placement::Mapped;
        ahead = ahead.filter(|_| mapped);
        let spare = options.drafts.only_spare_memory;
        let drafts = if spare { options.drafts.off() } else { options.drafts };
        let opened = match open(placed.clone(), if mapped { options.drafts } else { drafts }) {
            Err(refused) if spare && mapped && refused.is::<Refusal>() => open(placed, drafts),
            opened => opened,
        };
        let opened = match opened {
            // The weights alone would fit, but not with everything that a step needs.
            Err(refused) if may_stream && mapped && refused.is::<Refusal>() => {
                let by_device = refused_by_device(&refused);
                // Experts that stay on disk are not read through the page cache.
                drop(ahead.take());
                let streamed = open(placement::instead_of_mapped(&**source, &options, by_device), drafts);
                streamed.map_err(|e| if smallest_limit(&e) < smallest_limit(&refused) { e } else { refused })
            }
            opened => opened,
        };
        opened.map(|mut engine| {
            engine.setup.numa.splice(0..0, numa);
            engine
        })
    }

    /// An engine on the CPU for tensors that the caller has opened. They are used where they are mapped.
    ///
    /// # Errors
    /// A model that is not supported, or does not fit the limits.
    pub fn load(tensors: &ModelTensors, options: Options) -> Result<Engine> {
        let placed = PlacementChoice { placement: Placement::Mapped, reason: "opened elsewhere".into() };
        let backend = cpu(&options)?;
        let mut engine = Engine::build(Role::Answers, tensors, None, options, (placed, false), backend)?;
        engine.begin_drafting(Vec::new());
        Ok(engine)
    }

    /// Drafts from here on, if the options say so. `others`: drafters that compute what they propose.
    fn begin_drafting(&mut self, mut others: Vec<Box<dyn Drafter>>) {
        if self.runner.has_mtp() {
            let (isa, threads, sequences) =
                (self.options.isa, self.runner.backend.threads(), self.options.max_sequences);
            let sampler = DraftSampler::new(isa, threads, self.model.vocabulary, MAX_STEP_DRAFTS);
            let head = MtpHead::new(sampler, self.runner.hidden_len(), self.scheduler.max_tokens, sequences);
            others.push(Box::new(head));
        }
        let states = self.setup.draft_states.clone();
        self.drafting = Drafting::new(&self.options, self.scheduler.max_tokens, states, others);
    }

    fn build(
        role: Role,
        tensors: &ModelTensors,
        from: Option<(Loading, &dyn ModelSource)>,
        options: Options,
        (placed, tables_on_disk): (PlacementChoice, bool),
        mut backend: Box<dyn Backend>,
    ) -> Result<Engine> {
        let (loading, source) = from.map_or((None, None), |(loading, source)| (Some(loading), Some(source)));
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
        // An MTP head's step is apart from the model's. Streamed experts and several devices do not support that. What it gains on a device is not measured, so there
        // it is asked for by name.
        let may_predict = role == Role::Answers && !streamed && backend.takes_other_steps();
        let may_predict =
            may_predict && (backend.device_memory().is_none() || options.drafts.drafter == DrafterChoice::Mtp);
        let of_model = options.model(longest);
        let of_model = sluice_model::Options { mtp: of_model.mtp && may_predict, ..of_model };
        let loaded = sluice_model::load(tensors, &mut *backend, &of_model)?;
        if options.drafts.drafter == DrafterChoice::Mtp {
            let where_to = "it runs on the CPU and on one GPU, with experts in memory";
            ensure!(may_predict, "a head that predicts one token more cannot draft here: {where_to}");
            ensure!(loaded.decoder.has_mtp(), "the checkpoint has no head that predicts one token more");
        }
        if let Some(made) = loaded.made_experts.filter(|_| streamed) {
            // A device takes experts from memory, too.
            ensure!(!made.whole || backend.device_memory().is_some(), made.cannot_stay_on_disk());
        }
        if tables_on_disk {
            let row_options = tables::row_options(&options, loaded.tables.len());
            loaded.tables.iter().try_for_each(|table| match table {
                RowTable::Tokens(table) => backend.stream_table(*table, &row_options),
                RowTable::Ngrams(table) => backend.stream_ngrams(table, &row_options),
            })?;
        }
        let (model, decoder) = (loaded.description, loaded.decoder);
        let max_context = options.max_context.unwrap_or(model.max_context);
        let max_context_asked = max_context;
        ensure!(max_context > 0, "the context must hold at least one token");
        let attention = options.attention_mode();
        let kv_type = options.kv_type_beside(loaded.working_type);
        ensure!(
            attention.takes(kv_type),
            "attention on integers needs keys and values of as many bits: ask for --attention and --kv-type of one size, or for no --kv-type"
        );
        let block_tokens = options.block_tokens;
        let groups = model.groups();
        let layouts: Vec<KvLayout> = groups.iter().map(|g| g.layout(kv_type, attention, block_tokens)).collect();
        let longest_key = layouts.iter().map(|l| l.k_dim).max().unwrap_or(0);
        ensure!(
            attention != AttentionMode::Int16 || longest_key <= AttentionMode::LONGEST_INT16,
            "attention int16 takes keys of at most {} elements, not {longest_key}",
            AttentionMode::LONGEST_INT16
        );
        let own = backend.device_memory();
        // A device that computes in the host's memory is counted there.
        let (shared, apart) = (own.filter(|own| own.shared), own.filter(|own| !own.shared));
        let states = match model.state_len() {
            0 => 0,
            len => options.max_sequences + snapshots(&options, apart.map(|own| own.free), len),
        };
        // Behind the rows that the caches know.
        let draft_rows = match role {
            _ if states == 0 => 0,
            Role::Answers => Drafting::state_rows(&options, model.state_len(), &*backend),
            // The state that each sequence goes back to.
            Role::Follows => options.max_sequences,
        };
        if states > 0 {
            backend.alloc_states(states + draft_rows, model.state_len())?;
        }
        // 1. What the model needs: of the host's memory, and of a device's own
        let computes_in = own.map_or(Device::Host, |own| own.device);
        let tensors = held_on(&mut *backend, MemoryClass::Scratch, computes_in);
        let (mut scratch, mut per_block) = (Vec::with_capacity(chunks.len()), 0);
        let mut device_scratch = Vec::new();
        for &chunk in &chunks {
            let need = step_scratch(&*backend, &decoder, &layouts, chunk, &options, streamed);
            // Drafts of an MTP head are drawn by samplers of their own.
            let samplers = options.threads * (1 + usize::from(decoder.has_mtp()));
            let sampling = samplers * model.vocabulary * SAMPLING_BYTES;
            // A device keeps its tensors at full length, however short steps are.
            let taken = need.fixed + if own.is_some() { tensors } else { tensors / longest * chunk };
            device_scratch.push((chunk, taken as u64));
            scratch.push((chunk, (sampling + if apart.is_some() { 0 } else { taken }) as u64));
            per_block = (need.per_128_positions * block_tokens).div_ceil(128);
        }
        let by_experts: usize =
            loaded.order.iter().filter(|used| used.by == UsedBy::Experts).map(|used| used.bytes.len()).sum();
        let on_disk = if streamed { Some(streamed_need(&mut *backend, by_experts, &options)?) } else { None };
        let stays = |used: &Used| match used.by {
            UsedBy::All => false,
            UsedBy::Experts => streamed,
            UsedBy::Rows => tables_on_disk,
        };
        let wanted = || loaded.order.iter().filter(|used| !stays(used)).map(|used| &used.bytes);
        let is_table = |used: &Used| used.by == UsedBy::Rows && tables_on_disk;
        let registered = || loaded.order.iter().filter(|used| !is_table(used)).map(|used| &used.bytes);
        let [mapped, copied] = match (&loading, own) {
            // On their way to a device weights pass through a few buffers; what was made of them stays.
            (Some(loading), Some(own)) => needs::device_weights(&mut *backend, &own, wanted(), (loading, streamed)),
            _ => weights_in_memory(&mut *backend, registered(), wanted(), loading.as_ref()),
        };
        let most_of = |window| most_blocks(window, block_tokens, longest, options.max_sequences);
        let most: Vec<Option<usize>> = groups.iter().map(|g| g.window().map(most_of)).collect();
        let per_token = TOKEN_BYTES + if options.drafts.rows(1) > 0 { 2 * BYTES_PER_TOKEN } else { 0 };
        // By now a backend of several devices has split the layers among them, by what the step above needs.
        let own = backend.device_memory();
        let mut need = Need {
            mapped,
            copied,
            state: needs::states_in_memory(&mut *backend, shared),
            scratch,
            kv: match apart {
                Some(_) => KvNeed::full((block_tokens * per_token) as u64),
                None => KvNeed::of(&layouts, &most, per_block + block_tokens * per_token),
            },
            sequences: options.max_sequences,
            block_tokens,
            reserved: options.kv_reserve.map_or(0, |tokens| tokens.min(max_context)),
            max_context,
            context_asked: options.max_context.is_some(),
            streamed: on_disk,
            has_experts: model.experts().is_some(),
        };
        // 2. How much each class of memory gets
        let (hard, division) = divide_with_retries(|| {
            let mut hard = hard_limits(&options);
            shared.iter().for_each(|own| hard.extend(shared_limits(&options, own, &hard.clone())));
            let mut limits = hard.clone();
            // Other processes may take it as well, so it is no reason to refuse what was asked for.
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
        let mut own = match own.filter(|own| !own.shared) {
            None => None,
            Some(own) => {
                let kv = match own.block {
                    Some(block) => KvNeed::full((block + per_block) as u64),
                    None => KvNeed::of(&layouts, &most, per_block),
                };
                Some(DeviceShare::new(own, &need, (device_scratch, kv), &options, &mut *backend)?)
            }
        };
        let chunk = division.chunk.min(own.as_ref().map_or(usize::MAX, |own| own.division.chunk));
        backend.limit_steps(chunk, longest);
        if streamed {
            let keep = if placed.placement == Placement::PageCache { Keep::PageCache } else { Keep::Slots };
            let budget = options.expert_budget.unwrap_or(u64::MAX).min(division.experts);
            let (budget, device_budget) = match shared {
                None => (budget, own.as_ref().map(|own| own.division.experts)),
                Some(shared) => shared_experts(&shared, budget, on_disk.map_or(0, |need| need.least)),
            };
            let expert_options = ExpertOptions { keep, budget, device_budget, ..options.expert_options.clone() };
            backend.stream_experts(&expert_options, options.lookahead)?;
        }
        let on_device = shared.and_then(|_| backend.device_memory()).map_or(0, |own| own.taken_by_experts);
        let experts = held(&mut *backend, MemoryClass::Experts) as u64 + on_device;
        // All sequences share one pool of positions.
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
        // Where memory is limited, groups with a window have as many blocks as were counted.
        let counted = options.kv_tokens.is_none() && (own.is_some() || !hard.is_empty());
        let window_blocks = |most: Option<usize>| most.filter(|_| counted).map_or(blocks, |most| most.min(blocks));
        let cached: Vec<Group> = std::iter::zip(&groups, &most)
            .map(|(g, most)| Group { block_tokens, window: g.window(), blocks: window_blocks(*most) })
            .collect();
        let pools = layouts.iter().zip(&cached);
        let kv: Vec<KvPool> = pools.map(|(l, group)| backend.alloc_kv(*l, group.blocks)).collect::<Result<_>>()?;
        let resident = reserved.div_ceil(block_tokens) * options.max_sequences;
        kv.iter().zip(&cached).try_for_each(|(pool, group)| backend.commit_kv(pool, resident.min(group.blocks)))?;
        let shape = CacheShape::new(&cached, &layouts, model.state_len());
        let mut notes = Vec::new();
        let disk = match (&options.prompt_cache, source.zip(loading.as_ref())) {
            (Some(asked), Some((source, loading))) if options.prefix_cache => {
                let bit_options = BitOptions {
                    activations: options.activations,
                    kv_type,
                    attention,
                    experts_per_token: options.experts_per_token,
                    context: max_context_asked,
                    block_tokens,
                };
                let opened = ModelIdentity::read(source, &bit_options, loading.opened(), asked.sums_file.as_deref())
                    .and_then(|model| DiskTier::open(asked, model, source.path(), loading.progress(), shape.clone()));
                match opened {
                    Ok(opened) => Some(opened),
                    Err(e) => match prompt_cache::flag_at_fault(&e) {
                        Some(flag) => return Err(e.context(flag)),
                        None => {
                            notes.push(format!("without the prompt cache: {e:#}"));
                            None
                        }
                    },
                }
            }
            (Some(_), Some(_)) => {
                notes.push("without the prompt cache: nothing is shared between requests".into());
                None
            }
            _ => None,
        };
        let key = disk.as_ref().map_or_else(random_key, |(_, secret)| *secret);
        let prefixes = options.prefix_cache.then_some(PrefixOptions { key, snapshots: states });
        let max_sequences = options.max_sequences;
        let mut cache = KvCache::new(&cached, states, prefixes);
        let disk = disk.map(|(disk, _)| disk);
        let spills = options.prefix_cache && options.kv_spill > 0;
        if let Some(min_tokens) = disk.as_ref().map(DiskTier::min_tokens).or(spills.then_some(block_tokens)) {
            cache.enable_offload(min_tokens);
        }
        let capacity =
            Capacity { tokens: chunk, sequences: options.max_sequences, blocks: per_sequence * options.max_sequences };
        let host = spills.then(|| HostTier::new(shape, options.kv_spill));
        let first = states as u32;
        let draft_states = (model.state_len() > 0).then_some(first..first + draft_rows as u32);
        let sampler = BatchSampler::new(options.isa, backend.threads(), model.vocabulary, max_sequences);
        Ok(Engine {
            runner: Runner::new(backend, decoder, kv, capacity),
            loading,
            model,
            options,
            setup: Setup {
                placed,
                max_context,
                scratch: division.scratch,
                squeezed,
                numa,
                device: shared
                    .map(|shared| shared_use(shared, &hard, division.scratch))
                    .or_else(|| own.map(|own| own.used())),
                skipped: loaded.skipped,
                draft_states,
                claimed: need.mapped
                    + need.copied
                    + need.state
                    + division.scratch
                    + experts
                    + need.kv.bytes(blocks as u64),
            },
            cache,
            layouts,
            tiers: Tiers::new(host, disk, notes),
            scheduler: Scheduler::new(chunk, max_sequences, if streamed { MIN_CHUNK_STREAMED } else { MIN_CHUNK }),
            plan: Plan::default(),
            sampling: StepSampling {
                sampler,
                masks: Masks::default(),
                draws: Vec::new(),
                ended: Vec::with_capacity(max_sequences),
            },
            drafting: None,
            sequences: SequenceTable::default(),
            events: EventQueue::default(),
            steps: 0,
            computed: 0,
            routed: Vec::new(),
        })
    }
}

/// A random key for block hashes.
fn random_key() -> [u8; 32] {
    // The hashers of std get their keys from the system's random numbers.
    let mut key = [0; 32];
    for part in key.chunks_exact_mut(8) {
        part.copy_from_slice(&RandomState::new().hash_one(()).to_le_bytes());
    }
    key
}

/// The smallest limit that would do, according to a refusal.
fn smallest_limit(error: &anyhow::Error) -> u64 {
    error.downcast_ref::<Refusal>().map_or(0, |refusal| refusal.smallest)
}
