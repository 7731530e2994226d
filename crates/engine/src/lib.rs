//! Text in, text out: tokenizer and chat template, sequences and their caches, steps of the model, sampling.
//!
//! - [`Engine`] opens a model and generates; [`Options`] say how.
//! - [`text`] turns messages into prompts and tokens into text.
//! - [`sampling`] chooses tokens; a [`Constraint`] restricts them.
#![forbid(unsafe_code)]

mod constraint;
mod draft;
mod engine;
mod hot_experts;
mod options;
pub mod sampling;
mod schedule;
mod setup;
mod step;
pub mod text;
mod tiers;

pub use constraint::{Constraint, ConstraintSpec, GrammarFormat, ToolCallRules, unknown_formats};
pub use draft::{DraftCounts, DraftOptions, DraftStats, DrafterChoice};
pub use engine::Engine;
pub use engine::open::cpu;
pub use engine::role::MakeBackend;
pub use engine::stage::{Stage, StageOutput, StagePiece, StageWanted};
pub use hot_experts::HotExperts;
pub use options::{Options, Placement, TablePlacement};
pub use schedule::sequence::{Event, Finish, Generation, SequenceId};
pub use setup::budget::{AdmittedMemory, refused_by_device};
pub use setup::device_share::DeviceUse;
pub use setup::placement::PlacementChoice;
pub use sluice_backend::{
    Activations, AttentionMode, Backend, Device, ExpertOptions, ExpertStats, Isa, KvType, Lookahead, MemoryClass,
    NUMERICS_VERSION, Phase, PhaseRow, Profile, Routed, RowStats, Streamed, Unified,
};
pub use sluice_cpu::{Cpu, Numa, Processors};
pub use sluice_experts::{Policy, ReadFaults};
pub use sluice_model::{Config, Description, ModelSource, ModelTensors, source};
pub use sluice_store::{Checkpoint, FileReport, LoadMode, LoadOptions, LoadProgress, Loading};
pub use step::pooling::Pooling;
pub use tiers::disk::options::{PromptCacheOptions, PromptCacheStatus};
pub use tiers::disk::sessions::{LoadedSession, ReadAhead, Saved, Session, SessionError, Sessions};
pub use tiers::host::tier::HostTierStatus;
