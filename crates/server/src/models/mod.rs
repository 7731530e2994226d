//! Models: which are offered, which one is in memory, and the thread that runs its engine.

pub mod facts;
pub mod lease;
pub mod list;
pub mod loaded;
pub mod manager;
pub mod runtime;
