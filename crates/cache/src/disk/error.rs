//! What can go wrong with the prompt cache.

use std::io;
use std::path::PathBuf;

/// An error of the prompt cache. Nothing that was computed depends on it.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // The messages say what each is.
pub enum Error {
    #[error("{doing} the prompt cache")]
    Io {
        doing: &'static str,
        #[source]
        cause: io::Error,
    },
    #[error("{}: cannot {doing} the folder of the prompt cache", path.display())]
    Folder {
        path: PathBuf,
        doing: &'static str,
        #[source]
        cause: io::Error,
    },
    /// Another process owns the folder; this one runs without a cache.
    #[error("{}: the prompt cache is in use by another process", path.display())]
    InUse { path: PathBuf },
    #[error("{}: neither empty nor a prompt cache; name a folder of its own", path.display())]
    NotACache { path: PathBuf },
    #[error("{}: no prompt cache", path.display())]
    NoCache { path: PathBuf },
    #[error("the index of the prompt cache")]
    Index(#[source] Box<redb::Error>),
    #[error("a quota of {quota} bytes is too little for a prompt cache; {least} would do")]
    Quota { quota: u64, least: u64 },
    #[error(
        "a twentieth of what is free on the disk, {quota} bytes, is too little for a prompt cache; {least} would do (--prompt-cache-bytes says how many it may take)"
    )]
    LittleFree { quota: u64, least: u64 },
    #[error("{}: no key for the prompt cache", path.display())]
    KeyFile {
        path: PathBuf,
        #[source]
        cause: io::Error,
    },
    #[error("the prompt cache was encrypted with another key")]
    WrongKey,
    #[error("the prompt cache is encrypted: give the file with its key")]
    KeyWanted,
    #[error("the prompt cache is not encrypted: clear it, or name another folder, to begin an encrypted one")]
    NotEncrypted,
    #[error("its secret is not what was written")]
    DamagedSecret,
    /// Clearing it would lose what somebody saved.
    #[error("the prompt cache has saved sessions and a secret of its own, not that of the store: name another folder")]
    OtherSecret,
    #[error("the prompt cache is off since an earlier error")]
    Disabled,
}

impl From<Box<redb::Error>> for Error {
    fn from(e: Box<redb::Error>) -> Error {
        Error::Index(e)
    }
}

pub(super) fn io(doing: &'static str) -> impl Fn(io::Error) -> Error {
    move |cause| Error::Io { doing, cause }
}
