//! Text in, text out: tokenizer and chat template, sequences and their caches, the step that takes all of them forward, the sampler.
#![forbid(unsafe_code)]

mod budget;
mod chunk_budget;
mod constraint;
mod draw;
mod engine;
mod hot_experts;
mod options;
mod placement;
mod pooling;
mod prompt_cache;
mod runner;
pub mod sampler;
mod sampling;
mod scheduler;
mod sequence;
mod spill;
pub mod text;

pub use budget::{AdmittedMemory, refused_by_device};
pub use constraint::{Called, Constraint, Demand, GrammarFormat, unknown_formats};
pub use engine::{DeviceUse, Engine, MakeBackend, cpu};
pub use hot_experts::HotExperts;
pub use options::{Options, Placement};
pub use placement::Placed;
pub use pooling::Pooling;
pub use prompt_cache::{LoadedSession, PromptCacheOptions, PromptCacheStatus, ReadAhead, Saved, Session, Sessions};
pub use sequence::{Event, Finish, Generation, SequenceId};
pub use sluice_backend::{
    Activations, AttentionMode, Backend, Device, ExpertOptions, ExpertStats, Isa, KvType, Lookahead, MemoryClass,
    NUMERICS_VERSION, Phase, PhaseRow, Profile, Routed, Streamed,
};
pub use sluice_cpu::{Cpu, Numa, Processors};
pub use sluice_model::{Config, Description};
pub use sluice_store::experts::{Policy, ReadFaults};
pub use sluice_store::{Checkpoint, FileReport, LoadMode, LoadOptions, LoadProgress, Loading};
pub use spill::Spilled;
