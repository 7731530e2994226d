//! What a prompt cache is asked for, and what it reports.

use std::path::PathBuf;
use std::sync::Arc;

use sluice_cache::disk::Error;
use sluice_cache::remote::{ObjectStore, RemoteStatus};

/// How a prompt cache on disk is set up.
#[derive(Clone, Debug)]
pub struct PromptCacheOptions {
    /// The folder of its files. One process can use it at a time.
    pub folder: PathBuf,
    /// Bytes that its files may take together; `None`: a twentieth of what is free on the disk.
    pub quota: Option<u64>,
    /// Bytes that may be written per day (UTC); `None`: no limit.
    pub daily_limit: Option<u64>,
    /// PrefixOptions of fewer tokens are neither written nor looked up.
    pub min_tokens: usize,
    /// A file with the key that everything is encrypted with; `None`: no encryption.
    pub key_file: Option<PathBuf>,
    /// A file that remembers sums of weights, so that a later start need not read the weights to identify the model.
    pub sums_file: Option<PathBuf>,
    /// Up to this many bytes of weights without a remembered sum are summed during the start. More of them are summed in the background, and the
    /// engine serves without the prompt cache meanwhile.
    pub sum_at_start: u64,
    /// A store that replicas share: what is written to the folder is stored there too, and what is not in the folder is looked for there.
    pub store: Option<Arc<dyn ObjectStore>>,
}

impl PromptCacheOptions {
    /// A good value for [`PromptCacheOptions::sum_at_start`]: some hundredths of a second.
    pub const SUM_AT_START: u64 = 64 << 20;
}

/// Contents of the prompt cache, and counters since the start.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PromptCacheStatus {
    /// The folder of its files.
    pub folder: PathBuf,
    /// Bytes that its files may take.
    pub quota: u64,
    /// Bytes that its files take.
    pub bytes: u64,
    /// Entries of all models. An entry has the tokens of a block or fewer.
    pub entries: u64,
    /// Entries that were written.
    pub stored: u64,
    /// Bytes that were written.
    pub written_bytes: u64,
    /// Entries that were not written, because too much was queued.
    pub dropped: u64,
    /// Bytes that were read for prompts.
    pub read_bytes: u64,
    /// Tokens that were prefetched.
    pub prefetched: u64,
    /// Entries that were damaged or unreadable. Their tokens were computed instead.
    pub wrong: u64,
    /// PrefixOptions that were not read, because computing them was faster.
    pub skipped_slow: u64,
    /// Bytes of weights that are summed, and that have to be before the cache is used; `None` once they are.
    pub summing: Option<(u64, u64)>,
    /// Why the cache is not used any more.
    pub broken: Option<String>,
    /// The store that replicas share, if there is one.
    pub store: Option<RemoteStatus>,
}

/// The flag that caused an error of opening, if the engine should not start without the cache.
pub(crate) fn flag_at_fault(e: &anyhow::Error) -> Option<&'static str> {
    match e.downcast_ref::<Error>()? {
        Error::Quota { .. } => Some("--prompt-cache-bytes"),
        Error::KeyFile { .. } | Error::WrongKey | Error::KeyWanted | Error::NotEncrypted => {
            Some("--prompt-cache-key-file")
        }
        Error::NotACache { .. } | Error::NoCache { .. } => Some("--prompt-cache"),
        Error::DamagedSecret | Error::OtherSecret => Some("--prompt-cache-store"),
        Error::LittleFree { .. }
        | Error::Io { .. }
        | Error::Folder { .. }
        | Error::InUse { .. }
        | Error::Index(_)
        | Error::Disabled => None,
    }
}
