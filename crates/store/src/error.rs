//! What can go wrong with files, each in one line that names the file and, where there is one, the tensor and the offset.

use std::io;
use std::path::{Path, PathBuf};

use crate::header_error::HeaderError;
use crate::quote::quoted;

/// An error of this crate. Its `Display` is complete: causes are part of the line, not a chain.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs)] // Of fields: the messages say what they are.
pub enum Error {
    /// Nothing is at the path that was given.
    #[error("{}: no such folder", .path.display())]
    NotFound { path: PathBuf },
    /// The path that was given is something else than a folder; `hint` says what to give instead.
    #[error("{}: not a folder{hint}", .path.display())]
    NotAFolder { path: PathBuf, hint: String },
    /// The folder holds no safetensors; `hint` names what it holds instead, if that is a known format.
    #[error("{}: no model.safetensors, model.safetensors.index.json or other *.safetensors in this folder{hint}", .folder.display())]
    NoWeights { folder: PathBuf, hint: String },
    /// The operating system refused; `doing` is the verb ("open", "read", "map", ...).
    #[error("{}: cannot {doing}: {cause}", .path.display())]
    Io { path: PathBuf, doing: &'static str, cause: io::Error },
    /// A folder, a pipe or a device stands where a file should be.
    #[error("{}: not a regular file", .path.display())]
    NotAFile { path: PathBuf },
    /// A file that should be small is not.
    #[error("{}: above the limit of {limit} bytes for such a file", .path.display())]
    TooLarge { path: PathBuf, limit: u64 },
    /// `model.safetensors.index.json` is not what it should be.
    #[error("{}: {why}", .path.display())]
    BadIndex { path: PathBuf, why: String },
    /// The index names something else than a plain file of its folder.
    #[error("{}: tensor {} is said to be in {}, which is not a file name in this folder", .path.display(), quoted(.tensor), quoted(.file))]
    EscapingName { path: PathBuf, tensor: String, file: String },
    /// A file of the set is missing; `why` says how we know of it.
    #[error("{}: {why}", .path.display())]
    MissingShard { path: PathBuf, why: &'static str },
    /// The index promises a tensor that its file does not hold.
    #[error("{}: holds no tensor {}, which the index says is in it", .path.display(), quoted(.tensor))]
    MissingTensor { path: PathBuf, tensor: String },
    /// Two files hold a tensor of the same name and no index says which is meant.
    #[error("{}: tensor {} is also in {}", .path.display(), quoted(.tensor), quoted(.other))]
    DuplicateTensor { path: PathBuf, tensor: String, other: String },
    /// The header of a safetensors file is not to be trusted, or does not fit its file.
    #[error("{}: {problem}", .path.display())]
    Header { path: PathBuf, problem: HeaderError },
    /// A file of another format than safetensors was refused; `why` names the file, and the key or tensor.
    #[error("{why}")]
    Refused { why: String },
    /// A part of a file could not be read. `tensor` is the one that the offset (in the file) lies in.
    #[error("{}: cannot read{} at offset {offset}: {cause}", .path.display(), of_tensor(.tensor))]
    Read { path: PathBuf, tensor: Option<String>, offset: u64, cause: io::Error },
    /// The bytes of a file that was arriving did not come, or are wrong.
    #[error("{}: {why}", .path.display())]
    NotArrived { path: PathBuf, why: String },
    /// A file ended before what its header promised, though it was long enough when it was opened.
    #[error("{}: truncated while it was in use: it had {len} bytes, and ends{} at offset {offset}", .path.display(), of_tensor(.tensor))]
    Shrunk { path: PathBuf, tensor: Option<String>, offset: u64, len: u64 },
    /// A file was written to, or another one put in its place, while it was in use.
    #[error("{}: changed or replaced while it was in use", .path.display())]
    Replaced { path: PathBuf },
    /// The disk is too full: `needed` bytes for this file, `free` bytes available to this user.
    #[error("{}: no space left: needs {needed} bytes, {free} are free", .path.display())]
    NoSpace { path: PathBuf, needed: u64, free: u64 },
    /// A writer was given a tensor's bytes before or after its turn.
    #[error("{}: bytes for tensor {} were written when {expected} was due", .path.display(), quoted(.tensor))]
    OutOfOrder { path: PathBuf, tensor: String, expected: String },
    /// A writer was given more bytes than the tensor has.
    #[error("{}: tensor {} has {size} bytes, and more were written", .path.display(), quoted(.tensor))]
    TooManyBytes { path: PathBuf, tensor: String, size: u64 },
    /// A writer was finished before its last tensor was complete.
    #[error("{}: tensor {} is incomplete: {missing} of its {size} bytes were not written", .path.display(), quoted(.tensor))]
    Incomplete { path: PathBuf, tensor: String, missing: u64, size: u64 },
    /// A writer was given bytes for a place behind the last tensor.
    #[error("{}: {len} bytes at data offset {offset} reach beyond the data's {data_len}", .path.display())]
    BeyondData { path: PathBuf, offset: u64, len: u64, data_len: u64 },
    /// A writer that takes bytes at their places was finished before all were there (or some came twice).
    #[error("{}: {written} of {data_len} bytes of data were written", .path.display())]
    Unfilled { path: PathBuf, written: u64, data_len: u64 },
    /// The manifest of a bundle is not what it should be, or does not fit its files.
    #[error("{}: {why}", .path.display())]
    BadManifest { path: PathBuf, why: String },
    /// A file's bytes are not those that were written.
    #[error("{}: damaged: XXH3 {found} instead of {expected}", .path.display())]
    Damaged { path: PathBuf, found: String, expected: String },
    /// A writer was used on after a failed write.
    #[error("{}: abandoned after a failed write", .path.display())]
    Abandoned { path: PathBuf },
}

impl Error {
    /// For `map_err`: an operating-system error while `doing` something to `path`.
    pub(crate) fn io(path: &Path, doing: &'static str) -> impl FnOnce(io::Error) -> Error {
        move |cause| Error::Io { path: path.to_owned(), doing, cause }
    }
}

/// ` tensor "name"`, or nothing.
fn of_tensor(tensor: &Option<String>) -> String {
    tensor.as_ref().map_or(String::new(), |name| format!(" in tensor {}", quoted(name)))
}
