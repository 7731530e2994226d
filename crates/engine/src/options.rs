//! Options of an engine.

use std::path::PathBuf;

use anyhow::Result;
use sluice_backend::{Activations, AttentionMode, ExpertOptions, Float, Isa, KvType, Lookahead, Unified};
use sluice_cpu::{Numa, Processors, default_threads};
use sluice_model::LayerRange;
use sluice_store::LoadOptions;

use crate::draft::{DraftOptions, DrafterChoice};
use crate::setup::budget::AdmittedMemory;
use crate::tiers::disk::options::PromptCacheOptions;

/// How an engine is set up. No option changes the output unless it says so.
///
/// ```
/// use sluice_engine::Options;
///
/// let options = Options {
///     max_context: Some(4096),
///     max_sequences: 8,
///     memory_budget: Some(2 << 30),
///     ..Options::for_this_machine()?
/// };
/// # assert!(options.threads > 0 && options.prefix_cache);
/// # anyhow::Ok(())
/// ```
#[derive(Clone, Debug)]
pub struct Options {
    /// The instruction set of the CPU's kernels.
    pub isa: Isa,
    /// Threads that compute.
    pub threads: usize,
    /// On machines with several NUMA nodes: where threads run, where the thread that opens the engine, and those that it starts, take memory from, and whether
    /// each node has a copy of the weights.
    pub numa: Numa,
    /// The processors to choose from.
    pub processors: Processors,
    /// How activations are rounded before products. Changes the output.
    pub activations: Activations,
    /// Element type of cached keys and values. Changes the output. `None`: f32 with f32 activations, else the type that the checkpoint works in.
    pub kv_type: Option<KvType>,
    /// How attention computes. On integers, keys and values have as many bits, and no other type may be asked for. Changes the output.
    pub attention: AttentionMode,
    /// Positions that a sequence may have; `None`: the model's own maximum.
    pub max_context: Option<usize>,
    /// Sequences of a step, at most. If there are more, they take turns.
    pub max_sequences: usize,
    /// Positions of all sequences together that keys and values have room for; `None`: a full context for each sequence of a step.
    pub kv_tokens: Option<usize>,
    /// Tokens of a step, at most: the length of a prefill chunk. `None`: 512, or 2,048 if experts are read from disk or a device computes; fewer if memory is
    /// short.
    pub chunk: Option<usize>,
    /// Whether what sequences compute stays in memory for others with the same beginning.
    pub prefix_cache: bool,
    /// Recurrent states that the prefix cache keeps, if the memory limit has room for them.
    pub snapshots: usize,
    /// Only these layers of the model, for a [`crate::Stage`].
    pub layers: Option<LayerRange>,
    /// Keeps the prefix cache on disk too, for later starts.
    pub prompt_cache: Option<PromptCacheOptions>,
    /// Bytes of host memory for blocks that the prefix cache has no room for. Of use if a device computes in memory of its own.
    pub kv_spill: u64,
    /// Tokens in a block of the cache.
    pub block_tokens: usize,
    /// Experts that each token uses; `None`: as many as the model says. Changes the output: see `sluice_model::Options`.
    pub experts_per_token: Option<usize>,
    /// Whether and how tokens are drafted.
    pub drafts: DraftOptions,
    /// A smaller model with the same vocabulary that drafts: its folder or file. It gets a quarter of the memory limit at most.
    pub draft_model: Option<PathBuf>,
    /// Measures time and work by phase from the start: see [`crate::Engine::profile`].
    pub profile: bool,
    /// How the weights come into memory.
    pub load: LoadOptions,
    /// Tokens of each sequence whose keys and values are resident from the start; `Some(usize::MAX)`: the whole context. Beyond them, memory is committed as it
    /// is needed.
    pub kv_reserve: Option<usize>,
    /// Bytes that the program, weights, keys and values, states, experts and scratch may take together.
    pub memory_budget: Option<u64>,
    /// Bytes of its own memory that a device may take. `None`: what is free there, less a reserve.
    pub device_memory: Option<u64>,
    /// Whether a device reads weights and experts where the host has them. Then `memory_budget` is for both.
    pub unified: Unified,
    /// Called once the model is known: returns what the process holds by then, and what its control group allows. `None`: it holds nothing, and has no limit.
    pub admitted: Option<fn() -> AdmittedMemory>,
    /// Bytes that the caller needs itself, for connections and the like. They are part of the budget.
    pub caller_memory: u64,
    /// Where the experts of a mixture are stored.
    pub experts: Placement,
    /// Bytes of memory for experts that are read when tokens use them. `None`: what the memory budget, or else the machine, leaves.
    pub expert_budget: Option<u64>,
    /// How such experts are read and kept. [`Options::experts`] and [`Options::expert_budget`] take precedence.
    pub expert_options: ExpertOptions,
    /// Which experts are read before tokens use them.
    pub lookahead: Lookahead,
    /// Where tables of which a token uses one row are.
    pub tables: TablePlacement,
    /// Bytes of memory for rows of such tables that stay on disk. `None`: 128 MB, or a part of the memory limit if that is less.
    pub table_budget: Option<u64>,
}

impl Options {
    /// The defaults for this machine: all cores that this process may use, and its fastest instruction set.
    ///
    /// # Errors
    /// When `SLUICE_ISA` names an instruction set that this machine lacks.
    pub fn for_this_machine() -> Result<Options> {
        Ok(Options {
            isa: Isa::from_env()?,
            threads: default_threads(Numa::Off),
            numa: Numa::Off,
            processors: Processors::here(),
            activations: Activations::Int8,
            kv_type: None,
            attention: AttentionMode::F32,
            max_context: None,
            max_sequences: 1,
            kv_tokens: None,
            chunk: None,
            prefix_cache: true,
            snapshots: 0,
            layers: None,
            prompt_cache: None,
            kv_spill: 0,
            block_tokens: 32,
            experts_per_token: None,
            drafts: DraftOptions::default(),
            draft_model: None,
            profile: false,
            load: LoadOptions::default(),
            kv_reserve: None,
            memory_budget: None,
            device_memory: None,
            unified: Unified::Auto,
            admitted: None,
            caller_memory: 0,
            experts: Placement::Auto,
            expert_budget: None,
            expert_options: ExpertOptions::default(),
            lookahead: Lookahead::Auto,
            tables: TablePlacement::Auto,
            table_budget: None,
        })
    }

    /// How attention computes: as asked, or in the only mode that the keys and values asked for have.
    pub fn attention_mode(&self) -> AttentionMode {
        match (self.attention, self.kv_type) {
            (AttentionMode::F32, Some(KvType::Int16)) => AttentionMode::Int16,
            (asked, _) => asked,
        }
    }

    /// The type of keys and values: as asked, or what suits attention, activations and the type that weights are computed with.
    pub(crate) fn kv_type_beside(&self, working: Float) -> KvType {
        self.kv_type.unwrap_or(match (self.attention_mode(), self.activations, working) {
            (AttentionMode::Int8, ..) => KvType::Int8,
            (AttentionMode::Int16, ..) => KvType::Int16,
            (_, Activations::F32, _) | (_, _, Float::F32) => KvType::F32,
            (_, _, Float::F16) => KvType::F16,
            (_, _, Float::Bf16) => KvType::Bf16,
        })
    }

    /// The model's options, for steps of at most `max_tokens` tokens.
    pub(crate) fn model(&self, max_tokens: usize) -> sluice_model::Options {
        let Options { max_context: context, experts_per_token, .. } = *self;
        let mtp = matches!(self.drafts.drafter, DrafterChoice::Auto | DrafterChoice::Mtp);
        sluice_model::Options { max_tokens, context, experts_per_token, mtp, layers: self.layers }
    }
}

/// Where tables of which a token uses one row are, such as embeddings for each layer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TablePlacement {
    /// On disk if they are large and the CPU computes, else in memory.
    #[default]
    Auto,
    /// In memory, like all other weights.
    Memory,
    /// On disk: rows are read when tokens use them, while the first layer is computed.
    Disk,
}

/// Where the experts of a mixture are stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Placement {
    /// Mapped if all weights fit in memory. Else in slots, or in the page cache if the disk's direct reads are slow.
    #[default]
    Auto,
    /// Mapped like all other weights. The kernel drops pages that do not fit and reads them again.
    Mapped,
    /// Read when tokens use them, through the page cache, which is the only cache.
    PageCache,
    /// Read directly, not through the page cache, into slots of the engine.
    Slots,
}

impl Placement {
    /// Its name as flags have it: `auto`, `mapped`, ...
    pub fn name(self) -> &'static str {
        match self {
            Placement::Auto => "auto",
            Placement::Mapped => "mapped",
            Placement::PageCache => "pagecache",
            Placement::Slots => "slots",
        }
    }
}
