//! GGUF: a model in one file, or in a set of split files. Reference: the GGUF specification of ggml, and llama.cpp's converter for names and layouts.
//!
//! A file is a header, typed metadata by key (configuration and tokenizer), a table of tensors, and their bytes. It comes from strangers: [`header`] checks
//! every count, size and offset against the file before memory is taken for it, and everything else relies on that.

mod config;
mod cursor;
mod family;
mod header;
mod hybrids;
mod keys;
mod latent;
mod layout;
mod metadata;
mod model;
mod names;
mod parts;
mod positions;
mod streams;
mod tensor_type;
pub mod tokenizer;

pub use header::{Header, MAGIC, TensorInfo};
pub use metadata::{Array, Metadata, Strings, Value};
pub use model::GgufModel;
pub(super) use parts::{models_in, name_of};
pub use tensor_type::TensorType;
