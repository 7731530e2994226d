//! What can go wrong between a name and its files. Each message is one line that says what to do next.

use std::io;
use std::path::{Path, PathBuf};

/// The result of this crate's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a model could not be found or fetched.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// What was given is not a name of the hub's; the message says what is.
    #[error("{0}")]
    Name(String),
    /// The network was not asked, because `HF_HUB_OFFLINE` says so.
    #[error("{name}: not in {cache}, and HF_HUB_OFFLINE is set", cache = .cache.display())]
    Offline {
        /// The model.
        name: String,
        /// The cache that was looked in.
        cache: PathBuf,
    },
    /// No answer after several tries.
    #[error("{host} cannot be reached: {cause}; try again, what is there is kept")]
    Unreachable {
        /// The server.
        host: String,
        /// What the last try ended with.
        cause: String,
    },
    /// The server answers, but not now: 429 and 5xx.
    #[error("{host}: {status} {reason}; try again later, what is there is kept")]
    Busy {
        /// The server.
        host: String,
        /// The status of the last answer.
        status: u16,
        /// What the status means.
        reason: String,
    },
    /// No such repository, revision or file, or one that this user may not see.
    #[error("{0}")]
    NotFound(String),
    /// Gated or private, and the token does not open it.
    #[error("{0}")]
    Denied(String),
    /// The repository has nothing that can be run, or not the quantisation that was asked for.
    #[error("{0}")]
    NoChoice(String),
    /// An answer that no hub gives.
    #[error("{url}: {what}")]
    Answer {
        /// The address, without signatures.
        url: String,
        /// What is wrong with it.
        what: String,
    },
    /// Bytes arrived that are not those of the file; they are thrown away.
    #[error(
        "{file}: what arrived is not what the hub announced ({kind} {found}, not {expected}); nothing of it is kept"
    )]
    Corrupt {
        /// The file's name in the repository.
        file: String,
        /// `SHA-256` or `git SHA-1`.
        kind: &'static str,
        /// The checksum of what arrived.
        found: String,
        /// The checksum that the hub announced.
        expected: String,
    },
    /// The disk has too little room.
    #[error("{folder}: {needed} more bytes are needed and {free} are free: `sluice rm`, or HF_HUB_CACHE for another disk", folder = .folder.display())]
    Space {
        /// The cache.
        folder: PathBuf,
        /// Bytes that the missing files take.
        needed: u64,
        /// Bytes that are free.
        free: u64,
    },
    /// A file of the cache could not be read or written.
    #[error("{path}: {cause}", path = .path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// What the system said.
        cause: io::Error,
    },
    /// The caller's [`Watch`](crate::Watch) wanted it to stop.
    #[error("stopped; what has arrived is kept, the same command goes on from there")]
    Stopped,
}

impl Error {
    /// What happened, without what to do: there will be another try.
    pub(crate) fn brief(&self) -> String {
        match self {
            Error::Unreachable { host, cause } => format!("{host}: {cause}"),
            Error::Busy { host, status, reason } => format!("{host}: {status} {reason}"),
            other => other.to_string(),
        }
    }

    /// Whether the hub could not be asked, so that what lies in the cache has to do.
    pub fn is_absence(&self) -> bool {
        matches!(self, Error::Offline { .. } | Error::Unreachable { .. } | Error::Busy { .. })
    }
}

/// Names the file in an error of the system.
pub(crate) trait Naming<T> {
    fn naming(self, path: &Path) -> Result<T>;
}

impl<T> Naming<T> for io::Result<T> {
    fn naming(self, path: &Path) -> Result<T> {
        self.map_err(|cause| Error::Io { path: path.to_owned(), cause })
    }
}

impl<T> Naming<T> for rustix::io::Result<T> {
    fn naming(self, path: &Path) -> Result<T> {
        self.map_err(|cause| Error::Io { path: path.to_owned(), cause: cause.into() })
    }
}
