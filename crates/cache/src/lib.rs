//! Which block holds which tokens: bookkeeping by number, no arithmetic and no bytes.
//!
//! A sequence is its block tables, one for each cache group, and its row of recurrent states; a block belongs to as many sequences as its count says and
//! goes back to the pool with the last of them.
#![forbid(unsafe_code)]

pub mod disk;
mod kv_cache;
mod pool;
mod prefix;
mod sharing;
mod storing;
mod table;

pub use kv_cache::{Adopted, Chore, Evicted, Group, Held, KvCache, NoRoom, Prefixes};
pub use pool::BlockPool;
pub use prefix::{BlockHash, block_hash};
pub use storing::{Filling, Kept, Leaving, Present, Wanted};
pub use table::BlockTable;
