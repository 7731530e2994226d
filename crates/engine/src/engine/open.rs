//! How an engine is set up: what is in memory and what stays on disk, within which budget.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use sluice_backend::{
    Activations, Backend, Capacity, Cpu, ExpertOptions, Float, Isa, KvLayout, KvPool, KvType, Lookahead, MemoryClass,
    Outcome, StepInputs,
};
use sluice_cache::BlockPool;
use sluice_model::Config;
use sluice_store::experts::Keep;
use sluice_store::{Checkpoint, LoadOptions, Loading};

use super::Engine;
use crate::budget::Need;
use crate::placement::{self, Placed, Placement};

/// How an engine is set up.
#[derive(Clone, Debug)]
pub struct Options {
    pub isa: Isa,
    pub threads: usize,
    pub activations: Activations,
    /// Element type of cached keys and values; `None`: f32 with f32 activations, else the type that the checkpoint works in.
    pub kv_type: Option<KvType>,
    /// Positions that a sequence may have; `None`: the model's own maximum.
    pub max_context: Option<usize>,
    /// Sequences at once.
    pub max_sequences: usize,
    /// Tokens that one step takes at most: the length of a prefill chunk. `None`: 512, or more where each expert of a chunk is read from disk.
    pub chunk: Option<usize>,
    /// Tokens in a block of the cache.
    pub block_tokens: usize,
    /// Changes the model's output: see `sluice_model::Options`.
    pub experts_per_token: Option<usize>,
    pub profile: bool,
    /// How the weights come into memory; changes no result.
    pub load: LoadOptions,
    /// Tokens whose keys and values are resident from the start, of each sequence; `Some(usize::MAX)`: of the whole context. Beyond them
    /// memory is committed in steps, as it is without any. Changes no result.
    pub kv_reserve: Option<usize>,
    /// Bytes that weights, keys and values, states, experts and scratch may take together.
    pub memory_budget: Option<u64>,
    /// Where the experts of a mixture live; changes no result.
    pub experts: Placement,
    /// Bytes of memory for experts that are read when tokens want them. `None`: what the memory budget, or else the machine, leaves.
    pub expert_budget: Option<u64>,
    /// How such experts are read and kept; where and within how many bytes is decided by the two above.
    pub expert_options: ExpertOptions,
    pub lookahead: Lookahead,
}

/// Tokens of a chunk.
const CHUNK: usize = 512;
/// What a process takes beside all that is accounted: its program, tokenizer, headers, tables of pages.
const PROGRAM: usize = 64 << 20;
/// Positions whose keys and values have room before experts take what is left.
const USUAL_CONTEXT: usize = 8192;

impl Options {
    /// The defaults of this machine: all cores, its fastest instruction set.
    pub fn for_this_machine() -> Result<Options> {
        Ok(Options {
            isa: Isa::from_env()?,
            threads: std::thread::available_parallelism().map_or(1, |n| n.get()),
            activations: Activations::Int8,
            kv_type: None,
            max_context: None,
            max_sequences: 1,
            chunk: None,
            block_tokens: 32,
            experts_per_token: None,
            profile: false,
            load: LoadOptions::default(),
            kv_reserve: None,
            memory_budget: None,
            experts: Placement::Auto,
            expert_budget: None,
            expert_options: ExpertOptions::default(),
            lookahead: Lookahead::Auto,
        })
    }
}

impl Engine {
    /// Loads the checkpoint in `folder`. Returns before the weights are read: a step waits for those it comes to.
    ///
    /// # Errors
    /// A file that is missing, broken or not supported; the message names it. What goes wrong later is an error of a step.
    pub fn open(folder: &Path, options: Options) -> Result<Engine> {
        // The config first: a folder that holds something else altogether is best told by it.
        ensure!(folder.exists(), "{}: no such folder", folder.display());
        ensure!(folder.is_dir(), "{}: not a folder (a model is a folder with config.json)", folder.display());
        let config = Config::open(folder)?;
        sluice_model::check_supported(&config)?;
        let placed = placement::decide(folder, &config, &options)?;
        let mut load = options.load.clone();
        if placed.placement != Placement::Mapped {
            load.left = Some(sluice_model::is_of_experts);
        }
        let (checkpoint, loading) = sluice_store::load::open(folder, &load)?;
        Engine::build(&checkpoint, Some(loading), &config, options, placed)
    }

    /// An engine for an opened checkpoint, whose weights are used as they are.
    pub fn load(checkpoint: &Checkpoint, config: &Config, options: Options) -> Result<Engine> {
        let placed = Placed { placement: Placement::Mapped, reason: "opened elsewhere".into() };
        Engine::build(checkpoint, None, config, options, placed)
    }

    fn build(
        checkpoint: &Checkpoint,
        loading: Option<Loading>,
        config: &Config,
        options: Options,
        placed: Placed,
    ) -> Result<Engine> {
        let streamed = placed.placement != Placement::Mapped;
        let room = options.memory_budget.or(options.load.room.map(|room| room - room / 16));
        let chunk = match options.chunk {
            Some(chunk) => chunk,
            None if streamed => placement::chunk(config, options.experts_per_token, room)?,
            None => CHUNK,
        };
        let positive = chunk > 0 && options.max_sequences > 0 && options.block_tokens > 0;
        ensure!(positive, "chunk, sequences and block size must not be zero");
        let largest = chunk.max(options.block_tokens).max(options.max_context.unwrap_or(0));
        ensure!(largest <= 1 << 24, "{largest} is too many tokens");
        let mut backend: Box<dyn Backend> = Box::new(Cpu::new(options.isa, options.threads, options.activations)?);
        if options.profile {
            backend.start_profile();
        }
        let model_options = sluice_model::Options {
            max_tokens: chunk,
            context: options.max_context,
            experts_per_token: options.experts_per_token,
        };
        let loaded = sluice_model::load(checkpoint, config, &mut *backend, &model_options)?;
        let (model, decoder) = (loaded.description, loaded.decoder);
        let max_context = options.max_context.unwrap_or(model.max_context);
        ensure!(max_context > 0, "the context must hold at least one token");
        let kv_type = options.kv_type.unwrap_or(match (options.activations, loaded.working_type) {
            (Activations::F32, _) | (_, Float::F32) => KvType::F32,
            (_, Float::F16) => KvType::F16,
            (_, Float::Bf16) => KvType::Bf16,
        });
        let layouts: Vec<KvLayout> = model.groups().iter().map(|g| g.layout(kv_type, options.block_tokens)).collect();
        let block_tokens = options.block_tokens;
        let recurrent = model.state_len() > 0;
        if recurrent {
            backend.alloc_states(options.max_sequences, model.state_len())?;
        }
        let memory = |backend: &mut dyn Backend, class| -> usize {
            backend.memory().iter().filter(|m| m.class == class).map(|m| m.bytes).sum()
        };
        // 1. Experts that stay on disk: the rest of the memory is theirs
        let by_experts: usize = loaded.order.iter().filter(|used| used.by_experts).map(|used| used.bytes.len()).sum();
        // What a step takes beside what is set up by now, and the program.
        let mut beside = 0;
        if streamed {
            let k = model.experts().map_or(1, |(_, k)| k);
            let block: usize = layouts.iter().map(KvLayout::block_bytes).sum::<usize>() * options.max_sequences;
            let context = max_context.min(options.max_context.unwrap_or(USUAL_CONTEXT));
            let weights = memory(&mut *backend, MemoryClass::WeightsMapped) + memory(&mut *backend, MemoryClass::WeightsCopied);
            beside = placement::step_scratch(config, chunk, k)? + PROGRAM;
            let others = (weights - by_experts
                + memory(&mut *backend, MemoryClass::State)
                + memory(&mut *backend, MemoryClass::Scratch)
                + context.div_ceil(block_tokens) * block
                + beside) as u64;
            let budget = options.expert_budget.unwrap_or_else(|| room.map_or(u64::MAX, |r| r.saturating_sub(others)));
            let keep = if placed.placement == Placement::PageCache { Keep::PageCache } else { Keep::Slots };
            let expert_options = ExpertOptions { keep, budget, ..options.expert_options.clone() };
            let opened = backend.stream_experts(&expert_options, options.lookahead);
            opened.with_context(|| {
                let gb = |n: u64| format!("{:.2} GB", n as f64 / 1e9);
                format!("weights, keys and values of {context} tokens, scratch and the program take {}", gb(others))
            })?;
        }
        // 2. What the budget has room for, before anything is read
        let reserved = options.kv_reserve.map_or(0, |tokens| tokens.min(max_context));
        let max_context = match options.memory_budget {
            None => max_context,
            Some(budget) => {
                let block: usize = layouts.iter().map(KvLayout::block_bytes).sum();
                let need = Need {
                    weights: memory(&mut *backend, MemoryClass::WeightsMapped) + memory(&mut *backend, MemoryClass::WeightsCopied),
                    state: memory(&mut *backend, MemoryClass::State),
                    scratch: memory(&mut *backend, MemoryClass::Scratch) + beside,
                    experts: memory(&mut *backend, MemoryClass::Experts),
                    block: block * options.max_sequences,
                    block_tokens,
                    reserved,
                };
                need.context_within(budget)?.min(max_context)
            }
        };
        // 3. Weights are read while the rest is set up, and while the first steps run
        if let Some(loading) = &loading {
            loading.start(loaded.order.iter().filter(|used| !(streamed && used.by_experts)).map(|used| &used.bytes));
        }
        // 4. The caches
        let blocks = max_context.div_ceil(block_tokens) * options.max_sequences;
        let kv: Vec<KvPool> = layouts.iter().map(|l| backend.alloc_kv(*l, blocks)).collect::<Result<_>>()?;
        let resident = reserved.div_ceil(block_tokens) * options.max_sequences;
        kv.iter().try_for_each(|pool| backend.commit_kv(pool, resident))?;
        let block_counts: Vec<usize> = layouts.iter().map(|l| l.block_tokens).collect();
        let capacity = Capacity { tokens: chunk, sequences: options.max_sequences, blocks };
        Ok(Engine {
            backend,
            loading,
            model,
            kv,
            recurrent,
            inputs: StepInputs::new(&block_counts, capacity),
            routed: Vec::new(),
            outcome: Outcome::default(),
            pools: layouts.iter().map(|_| BlockPool::new(blocks)).collect(),
            layouts,
            state_slots: BlockPool::new(options.max_sequences),
            sequences: Vec::new(),
            next_id: 0,
            max_context,
            skipped: loaded.skipped,
            decoder,
            options,
            chunk,
            placed,
            failure: None,
            failed: Vec::new(),
            takers: Vec::new(),
            events: Vec::new(),
        })
    }
}
