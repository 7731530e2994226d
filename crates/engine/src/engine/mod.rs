//! The engine: a model, its caches, and the sequences that share them.
//!
//! - [`open`]: opening a checkpoint within the memory that there is
//! - [`conversation`]: starting, cancelling and truncating sequences
//! - [`stepping`]: [`Engine::step`], which takes running sequences forward together
//! - [`drafting`]: tokens that are computed before it is known whether they come
//! - [`follower`]: opening the smaller model that drafts some of them
//! - [`feeding`]: computing given tokens, for their logits
//! - [`stage`]: some layers of a model, for a machine that has no others
//! - [`status`]: memory, settings and measurements
//! - [`lower_tiers`]: the prompt cache on disk and the tier in host memory

mod conversation;
mod drafting;
mod feeding;
mod follower;
mod lower_tiers;
pub(crate) mod open;
pub(crate) mod role;
mod sequence_table;
pub(crate) mod stage;
mod status;
mod stepping;

use std::ops::Range;

use sluice_backend::{KvLayout, Routed};
use sluice_cache::KvCache;
use sluice_model::Description;
use sluice_store::Loading;

use crate::constraint::Masks;
use crate::options::Options;
use crate::sampling::batch::{BatchSampler, Draw};
use crate::schedule::plan::Plan;
use crate::schedule::scheduler::Scheduler;
use crate::schedule::sequence::Event;
use crate::setup::device_share::DeviceUse;
use crate::setup::placement::PlacementChoice;
use crate::step::runner::Runner;
use crate::tiers::Tiers;
use drafting::{Drafting, EngineParts};
use sequence_table::SequenceTable;

/// A model with its caches and sequences.
///
/// ```
/// use sluice_engine::{Engine, Event, Generation, Options};
/// use sluice_engine::text::ModelText;
/// # let folder = std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/demo"));
///
/// // `folder` has config.json, tokenizer.json and *.safetensors.
/// let text = ModelText::load(folder, None)?;
/// let mut engine = Engine::open(folder, Options::for_this_machine()?)?;
///
/// let prompt = text.tokenizer.encode("Once upon a time", true)?;
/// let id = engine.add_sequence();
/// let generation = Generation { max_tokens: 8, stop_ids: text.stop_ids.clone(), ..Generation::default() };
/// engine.start(id, &prompt, generation)?;
///
/// let mut answer = Vec::new();
/// while !engine.is_idle() {
///     for event in engine.step()? {
///         if let Event::Token { token, .. } = event {
///             answer.push(*token);
///         }
///     }
/// }
/// println!("{}", text.tokenizer.decode(&answer, true)?);
/// # assert!(!answer.is_empty());
/// # anyhow::Ok(())
/// ```
pub struct Engine {
    runner: Runner,
    /// How weights are read. Dropped after the runner, whose backend may wait for them.
    loading: Option<Loading>,
    model: Description,
    options: Options,
    setup: Setup,
    cache: KvCache,
    /// Layouts of blocks: `[groups]`.
    layouts: Vec<KvLayout>,
    tiers: Tiers,
    scheduler: Scheduler,
    plan: Plan,
    sampling: StepSampling,
    /// Drafts, if there are any.
    drafting: Option<Drafting>,
    sequences: SequenceTable,
    events: EventQueue,
    /// Steps so far.
    steps: u64,
    /// Tokens that went through the model so far.
    computed: u64,
    /// Recorded choices of routers, until they are taken.
    routed: Vec<Routed>,
}

/// What was decided when the engine was opened.
struct Setup {
    placed: PlacementChoice,
    max_context: usize,
    /// Bytes reserved for the scratch memory of steps.
    scratch: u64,
    /// Bytes of mapped weights that do not fit beside everything else.
    squeezed: u64,
    /// Where memory and copies of weights were placed on NUMA nodes, if that was asked for.
    numa: Vec<String>,
    /// The share of a device's memory.
    device: Option<DeviceUse>,
    /// Parts of the checkpoint that were left out.
    skipped: Vec<String>,
    /// Rows of the pool of states that are there for drafts, if the model has recurrent layers.
    draft_states: Option<Range<u32>>,
    /// Bytes that weights, states, scratch and all blocks take together, if all of them are used.
    claimed: u64,
}

impl Engine {
    /// The drafts, and the parts that drafters may use between two steps.
    fn drafting(&mut self) -> Option<(&mut Drafting, &mut Plan, EngineParts<'_>)> {
        let Engine { drafting, plan, sequences, runner, cache, model, .. } = self;
        let parts = EngineParts { sequences: &mut sequences.list, runner, cache, vocabulary: model.vocabulary };
        Some((drafting.as_mut()?, plan, parts))
    }
}

/// What choosing the tokens of a step needs. Kept between steps, so that a step allocates nothing.
struct StepSampling {
    sampler: BatchSampler,
    masks: Masks,
    /// Sequences whose next token is due.
    draws: Vec<Draw>,
    /// Sequences that ended in this step.
    ended: Vec<usize>,
}

/// Events for the caller.
#[derive(Default)]
struct EventQueue {
    /// What happened between steps.
    pending: Vec<Event>,
    /// What the last step did.
    last_step: Vec<Event>,
}
