//! What the shared cache asks of an object store. The cloud's stores are in the crate `sluice-objects`; a folder is in [`super::FolderStore`].

use std::fmt;
use std::time::Duration;

/// Why a store did not do what it was asked for. The messages name no credentials.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StoreError {
    /// It did not answer in time.
    #[error("no answer in time")]
    Timeout,
    /// It refuses these credentials, or what they may do.
    #[error("access denied ({0})")]
    Denied(String),
    /// An object is larger than it may be.
    #[error("an object of {0} bytes, which is larger than any that Sluice writes")]
    TooLarge(u64),
    /// Anything else.
    #[error("{0}")]
    Failed(String),
}

/// Objects by name. Names are made of letters, digits, `.`, `-` and `/`. Calls block and come from any thread. A call should not take longer than its `patience`;
/// callers go on without it if it does.
pub trait ObjectStore: Send + Sync + fmt::Debug {
    /// Where it is, for people: no credentials.
    fn url(&self) -> &str;

    /// The bytes of an object; `None` if there is none.
    ///
    /// # Errors
    /// An object of more than `max` bytes; the store's.
    fn get(&self, name: &str, max: u64, patience: Duration) -> Result<Option<Vec<u8>>, StoreError>;

    /// The size of an object; `None` if there is none.
    ///
    /// # Errors
    /// The store's.
    fn size(&self, name: &str, patience: Duration) -> Result<Option<u64>, StoreError>;

    /// Stores an object, in place of one with this name. Nobody sees a part of it.
    ///
    /// # Errors
    /// The store's.
    fn put(&self, name: &str, bytes: &[u8], patience: Duration) -> Result<(), StoreError>;

    /// Stores an object unless there is one with this name. Returns whether it did.
    ///
    /// # Errors
    /// The store's.
    fn create(&self, name: &str, bytes: &[u8], patience: Duration) -> Result<bool, StoreError>;

    /// Hands names and sizes of the objects in a folder and those below it to `take`, until that returns false.
    ///
    /// # Errors
    /// The store's.
    fn list(&self, folder: &str, patience: Duration, take: &mut dyn FnMut(&str, u64) -> bool)
    -> Result<(), StoreError>;
}
