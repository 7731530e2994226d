//! What can go wrong with experts, each in one line.

/// An error of this crate. Its `Display` is complete: causes are part of the line, not a chain.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs)] // Of fields: the messages say what they are.
pub enum Error {
    /// The budget holds fewer experts than a token wants of a layer at once; all are bytes but `experts`.
    #[error("{budget} bytes are too few for experts: a token wants {experts} of a layer at once, which takes {needed}")]
    ExpertBudget { budget: u64, needed: u64, experts: usize },
    /// A file of recorded routing that is none. The caller knows which file.
    #[error("{why}")]
    BadRecording { why: String },
    /// A file cannot be read, or there is no memory.
    #[error(transparent)]
    Store(#[from] sluice_store::Error),
}
