//! Why the header of a safetensors file was refused.

use crate::dtype::Dtype;
use crate::quote::quoted;

/// Bytes of JSON that a header may have, as in the reference implementation.
pub const MAX_HEADER: u64 = 100_000_000;
/// Dimensions that a tensor may have: what NumPy and PyTorch can represent.
pub const MAX_DIMS: usize = 64;

/// Why a header was refused. Ranges and offsets in messages count from the start of the data section, as in the header.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs)] // Of fields: the messages say what they are.
pub enum HeaderError {
    /// Not even the length of the header is there.
    #[error("truncated: {len} bytes, too short for a safetensors file")]
    TooShort { len: u64 },
    /// A pointer file of `git lfs`, in the place of the weights.
    #[error("a Git LFS pointer, not the weights themselves; fetch them with `git lfs pull`")]
    LfsPointer,
    /// The first 8 bytes give a length above [`MAX_HEADER`]; most often this is another format.
    #[error("not a safetensors file: header length of {header} bytes is above the limit of {MAX_HEADER}")]
    TooLarge { header: u64 },
    /// The file ends inside its header.
    #[error("truncated: header of {header} bytes, but the file has {len} in all")]
    HeaderBeyondFile { header: u64, len: u64 },
    /// The header is no JSON object, or does not begin with its brace.
    #[error("not a safetensors file: the header does not begin with '{{'")]
    NotAnObject,
    /// The header is not valid JSON (or UTF-8) outside of a tensor's entry.
    #[error("malformed header: {why}")]
    Json { why: String },
    /// `__metadata__` is not a map from strings to strings, or occurs twice, or has a key twice.
    #[error("malformed header: __metadata__: {why}")]
    Metadata { why: String },
    /// A tensor's entry lacks a field, has one twice, or one of the wrong type (a negative size, three offsets, ...).
    #[error("tensor {}: malformed entry: {why}", quoted(.tensor))]
    Entry { tensor: String, why: String },
    /// Two entries have the same name.
    #[error("tensor {}: named twice in the header", quoted(.tensor))]
    DuplicateName { tensor: String },
    /// A dtype that this reader does not know.
    #[error("tensor {}: unknown dtype {}", quoted(.tensor), quoted(.dtype))]
    UnknownDtype { tensor: String, dtype: String },
    /// More than [`MAX_DIMS`] dimensions.
    #[error("tensor {}: more than {MAX_DIMS} dimensions", quoted(.tensor))]
    TooManyDims { tensor: String },
    /// The product of shape and element size, or an offset, does not fit 64 bits.
    #[error("tensor {}: size overflows", quoted(.tensor))]
    Overflow { tensor: String },
    /// The range ends before it begins.
    #[error("tensor {}: data offsets {start}..{end} are reversed", quoted(.tensor))]
    Reversed { tensor: String, start: u64, end: u64 },
    /// The range is not as long as shape and dtype say.
    #[error(
        "tensor {}: {dtype} {shape:?} takes {expected} bytes, but data offsets {start}..{end} hold {}",
        quoted(.tensor), .end - .start
    )]
    WrongSize { tensor: String, dtype: Dtype, shape: Vec<usize>, expected: u64, start: u64, end: u64 },
    /// The range begins inside another tensor.
    #[error("tensor {}: data offset {start} lies inside tensor {}", quoted(.tensor), quoted(.other))]
    Overlap { tensor: String, other: String, start: u64 },
    /// Bytes before this tensor belong to none.
    #[error("tensor {}: data offset {start} leaves a hole after {previous_end}", quoted(.tensor))]
    Hole { tensor: String, start: u64, previous_end: u64 },
    /// The file ends before this tensor does.
    #[error(
        "truncated: tensor {} ends at data offset {end}, but the file's data ends at {len} ({} bytes missing)",
        quoted(.tensor), .end - .len
    )]
    Truncated { tensor: String, end: u64, len: u64 },
    /// Bytes after the last tensor belong to none.
    #[error("{extra} bytes after the last tensor belong to no tensor")]
    TrailingBytes { extra: u64 },
}
