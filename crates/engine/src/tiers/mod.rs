//! The tiers below the caches: keys, values and states in host memory and on disk. [`Tiers`] owns both.
//!
//! Nodes that the caches evict go to the tiers. When a prompt's prefix is in one of them, its blocks are restored instead of being computed again.
//! Tiers move bytes through [`block_io::BlockIo`] and know nothing of models, devices or steps.

pub(crate) mod block_io;
pub(crate) mod disk;
pub(crate) mod host;
pub(crate) mod restore;
pub(crate) mod shape;
mod stack;

pub(crate) use stack::Tiers;
