//! Files to bytes. A checkpoint is opened, its headers are checked once, and its tensors are handed out as views of the mapped files, or of memory that one of
//! the readers in `load` fills; new files are written under temporary names and renamed. This crate does not know what the bytes mean: no model, no
//! quantisation, no arithmetic.
#![warn(missing_docs)]

pub mod arriving;
mod atomic;
pub mod bundle;
mod bytes;
mod catch_panic;
mod checkpoint;
mod dtype;
mod error;
mod fault;
mod header_error;
mod index;
pub mod load;
mod map;
mod memory;
mod page_cache;
mod platform;
mod quote;
pub mod requests;
pub mod safetensors;
mod small;
mod stamp;
mod sums;
mod write;

pub use atomic::{AtomicFile, check_space, free_space};
pub use bundle::xxh3_of;
pub use bytes::Bytes;
pub use catch_panic::catch_panic;
pub use checkpoint::{Checkpoint, Tensor};
pub use dtype::Dtype;
pub use error::Error;
#[doc(hidden)]
pub use index::check_index;
pub use index::{shard_name, write_index};
pub use load::{FileReport, LoadError, LoadMode, LoadOptions, LoadProgress, Loading};
pub use map::Buffer;
pub use memory::{Memory, ReusedMemory, Turn, host_memory, page_size, return_freed};
pub use page_cache::{drop_cached, resident_bytes};
pub use small::{MAX_SETTINGS, open_folder, open_regular, open_small, read_named, read_small};
pub use stamp::Stamp;
pub use sums::{lower_priority, sum_file};
pub use write::{TensorPlan, Writer};
