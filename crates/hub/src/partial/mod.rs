//! A blob that is still arriving, in several places at once: `BLOB.sluice.incomplete` has its final length from the start, and `BLOB.sluice.progress` says which
//! bytes of it are there (`record.rs`). Neither name is one of `huggingface_hub`'s, which takes a file's length for what is there.
//!
//! Usually blocks are filled in order. Whoever reads the blob meanwhile asks for the parts that it needs first.

mod asks;
mod blob;
mod claim;
mod record;
#[cfg(test)]
mod tests;

pub use asks::Urgency;
pub use blob::{Partial, sync_folder};
pub use claim::Claim;
pub use record::{INCOMPLETE, discard, progress};
