//! How a model lies on disk. Loading, inspecting, planning, packing and serving know a model through three things only:
//!
//! - [`ModelSource`]: what a path names. It has the config, the text files, the tensors and what of them goes into a fingerprint.
//! - [`ModelTensors`]: its tensors with their headers read, as views of files.
//! - [`TensorLayout`]: which tensor holds which weight of the model, and in what format.
//!
//! A new file format implements the first and the last, and gets a line in `detect.rs`.

mod by_columns;
mod detect;
mod folder;
pub mod gguf;
mod hugging_face;
mod layout;
mod mlx;
mod model_source;
mod prefixes;
mod quantized;
mod safetensors;
mod tensors;
mod text_files;

pub use detect::{gguf_files, gguf_name, is_gguf, is_model, open, open_with_tensors};
pub use folder::SafetensorsFolder;
pub use gguf::GgufModel;
pub(crate) use layout::float_type;
pub use layout::{Assembled, ExpertStorage, MatrixShape, TensorLayout};
pub use model_source::ModelSource;
pub use tensors::{Belongs, ModelTensors, OnDisk};
pub use text_files::{TextFile, TextFiles, is_missing};
