//! The prompt cache that replicas share: entries of the cache on disk, as objects of a store. An object is a slot as it is on disk, with its checksum or its seal, and
//! its name is made of the entry's keyed hash. So a replica that never saw a prompt finds what another has computed, and believes it only after the same checks as on disk.
//!
//! Nothing here is on the way of a step. Every call has a deadline, also where a store does not keep its own, and a store that fails again and again is not asked for a
//! while. `docs/prompt-cache.md` says more.

mod breaker;
mod calls;
mod contents;
mod fetch;
mod find;
mod folder;
mod handle;
mod join;
mod names;
mod queue;
mod store;
mod upload;

pub use contents::{StoreContents, StoredModel};
pub use fetch::{FETCHING, WantedObject};
pub use find::{FindInStore, InStore};
pub use folder::FolderStore;
pub use handle::{Remote, RemoteStatus};
pub use join::{JoinError, SharedSecret};
pub use names::PartName;
pub use store::{ObjectStore, StoreError};
