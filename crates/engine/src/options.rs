//! What an engine is asked for.

use anyhow::Result;
use sluice_backend::{Activations, AttentionMode, ExpertOptions, Isa, KvType, Lookahead};
use sluice_cpu::{Numa, Processors, default_threads};
use sluice_store::LoadOptions;

use crate::budget::AdmittedMemory;
use crate::prompt_cache::PromptCacheOptions;

/// How an engine is set up.
#[derive(Clone, Debug)]
pub struct Options {
    pub isa: Isa,
    pub threads: usize,
    /// On machines of several nodes of memory: where threads run, where the thread that opens the engine, and those that it starts, take memory from, and
    /// whether each node has a copy of the weights.
    pub numa: Numa,
    /// Those that there are for that.
    pub processors: Processors,
    pub activations: Activations,
    /// Element type of cached keys and values; `None`: f32 with f32 activations, else the type that the checkpoint works in.
    pub kv_type: Option<KvType>,
    /// How attention works on them; on integers they are of eight bits, and no other type may be asked for. Changes the model's output.
    pub attention: AttentionMode,
    /// Positions that a sequence may have; `None`: the model's own maximum.
    pub max_context: Option<usize>,
    /// Sequences that take part in a step at most. There may be more: they wait for their turn.
    pub max_sequences: usize,
    /// Positions of all sequences together whose keys and values there is room for; `None`: of as many full contexts as there are sequences in a step.
    pub kv_tokens: Option<usize>,
    /// Tokens that one step takes at most: the length of a prefill chunk. `None`: 512, or 2,048 where each expert of a chunk is read from disk or a device computes; fewer
    /// where memory is short.
    pub chunk: Option<usize>,
    /// Whether what sequences compute stays in memory for those that begin alike. Changes no result.
    pub prefix_cache: bool,
    /// Recurrent states that are kept for that, beside those of the sequences of a step, where a memory limit leaves room for them.
    pub snapshots: usize,
    /// Whether and where it is kept on disk too, for later starts. Changes no result.
    pub prompt_cache: Option<PromptCacheOptions>,
    /// Bytes of this machine's memory for what is kept for those that begin alike and the caches have no room for any more: of use where a device computes in memory of its own.
    /// Changes no result.
    pub kv_spill: u64,
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
    /// Bytes that the program, weights, keys and values, states, experts and scratch may take together.
    pub memory_budget: Option<u64>,
    /// Bytes of its own memory that a device may take, where one computes. `None`: what is free there, less a reserve.
    pub device_memory: Option<u64>,
    /// Asked once the model is known, for what the process holds by then and what its control group allows. `None`: nothing, and all.
    pub held: Option<fn() -> AdmittedMemory>,
    /// Bytes that the caller comes to hold beside, for connections and the like: part of the budget.
    pub beside: u64,
    /// Where the experts of a mixture live; changes no result.
    pub experts: Placement,
    /// Bytes of memory for experts that are read when tokens want them. `None`: what the memory budget, or else the machine, leaves.
    pub expert_budget: Option<u64>,
    /// How such experts are read and kept; where and within how many bytes is decided by the two above.
    pub expert_options: ExpertOptions,
    pub lookahead: Lookahead,
}

impl Options {
    /// The defaults of this machine: all cores that this process may use, its fastest instruction set.
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
            prompt_cache: None,
            kv_spill: 0,
            block_tokens: 32,
            experts_per_token: None,
            profile: false,
            load: LoadOptions::default(),
            kv_reserve: None,
            memory_budget: None,
            device_memory: None,
            held: None,
            beside: 0,
            experts: Placement::Auto,
            expert_budget: None,
            expert_options: ExpertOptions::default(),
            lookahead: Lookahead::Auto,
        })
    }

    /// What of these the model is made by, for steps of at most `max_tokens` tokens.
    pub(crate) fn model(&self, max_tokens: usize) -> sluice_model::Options {
        let Options { max_context: context, experts_per_token, .. } = *self;
        sluice_model::Options { max_tokens, context, experts_per_token }
    }
}

/// Where experts live.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Placement {
    /// Mapped where all weights fit in memory, else in slots, or in the page cache where the disk does not read past it well.
    #[default]
    Auto,
    /// Mapped like all other weights; the kernel drops and rereads pages that do not fit.
    Mapped,
    /// Read when tokens want them, through the page cache, which is the only cache.
    PageCache,
    /// Read past the page cache into slots of ours.
    Slots,
}

impl Placement {
    pub fn name(self) -> &'static str {
        match self {
            Placement::Auto => "auto",
            Placement::Mapped => "mapped",
            Placement::PageCache => "pagecache",
            Placement::Slots => "slots",
        }
    }
}
