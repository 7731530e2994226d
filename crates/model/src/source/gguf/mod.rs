//! GGUF: a model in one file, or in a set of split files. Reference: the GGUF specification of ggml.
//!
//! A file is a header, typed metadata by key (configuration and tokenizer), a table of tensors, and their bytes. It comes from strangers: [`header`] checks
//! every count, size and offset against the file before memory is taken for it, and everything else relies on that.

mod cursor;
mod header;
mod metadata;
mod tensor_type;
pub mod tokenizer;

pub use header::{Header, TensorInfo};
pub use metadata::{Array, Metadata, Strings, Value};
pub use tensor_type::TensorType;
