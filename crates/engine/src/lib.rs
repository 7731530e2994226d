//! Text in, text out: tokenizer and chat template, sequences and their caches, the step that takes all of them forward, the sampler.
#![forbid(unsafe_code)]

mod budget;
mod constraint;
mod draw;
mod engine;
mod options;
mod pace;
mod pins;
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

pub use budget::{Held, refused_by_device};
pub use constraint::{Called, Constraint, Demand, Form, unknown_formats};
pub use engine::{DeviceUse, Engine, MakeBackend, cpu};
pub use options::{Options, Placement};
pub use pins::Pins;
pub use placement::Placed;
pub use pooling::Pooling;
pub use prompt_cache::{LoadedSession, PromptCacheOptions, PromptCacheStatus, ReadAhead, Saved, Session, Sessions};
pub use sequence::{Event, Finish, Generation, SequenceId};
pub use sluice_backend::{
    Activations, AttentionMode, Backend, Cpu, Device, ExpertOptions, ExpertStats, Isa, KvType, Lookahead, MemoryClass,
    NUMERICS_VERSION, Numa, Phase, PhaseRow, Processors, Profile, Routed, Streamed,
};
pub use sluice_model::{Config, Description};
pub use sluice_store::experts::{Policy, ReadFaults};
pub use sluice_store::{Checkpoint, FileReport, LoadMode, LoadOptions, LoadProgress, Loading};
pub use spill::Spilled;
