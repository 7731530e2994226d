//! The cache of keys and values: which block holds which tokens. Bookkeeping by number; no arithmetic, and, but for
//! `disk`, no bytes.
//!
//! A sequence has a block table for each cache group, and a row of recurrent states. A block is reference-counted: it
//! may belong to several sequences, and goes back to the pool with the last of them.
#![forbid(unsafe_code)]
#![warn(missing_docs)]

pub mod disk;
mod kv_cache;
mod offload;
mod pool;
mod prefix;
pub mod remote;
mod second_tier;
mod sharing;
mod table;

pub use kv_cache::{BlockOp, Evicted, Group, KvCache, OutOfBlocks, PrefixOptions, ReusedPrefix, SequenceBlocks};
pub use offload::{MemoryMatch, OffloadPath, RestoreSpan, RestoreTarget};
pub use pool::BlockPool;
pub use prefix::{BlockHash, block_hash};
pub use second_tier::EvictedNode;
pub use table::BlockTable;
