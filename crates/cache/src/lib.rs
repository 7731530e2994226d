//! Which block holds which tokens: bookkeeping by number, no arithmetic and no bytes.
//!
//! A sequence is its block tables, one for each cache group, and its row of recurrent states; a block belongs to as many sequences as its count says and
//! goes back to the pool with the last of them.
#![forbid(unsafe_code)]

pub mod disk;
mod kv_cache;
mod offload;
mod pool;
mod prefix;
mod second_tier;
mod sharing;
mod table;

pub use kv_cache::{BlockOp, Evicted, Group, KvCache, NoRoom, Prefixes, ReusedPrefix, SequenceBlocks};
pub use offload::{Kept, Present, RestoreTarget, Wanted};
pub use pool::BlockPool;
pub use prefix::{BlockHash, block_hash};
pub use second_tier::EvictedNode;
pub use table::BlockTable;
