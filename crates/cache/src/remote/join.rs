//! The secret that all replicas of a store share. Hashes of prompts are keyed with it, so a replica without it finds nothing. It is an object like the file `secret` of a
//! folder, sealed if there is a key. The first replica makes it of its own folder's.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::calls::{Bound, End};
use super::handle::{Remote, lock};
use super::names::{self, SECRET};
use super::store::StoreError;
use crate::disk::{Error, FileKey, SecretFile};

/// A start waits for the store this long.
const PATIENCE: Duration = Duration::from_secs(5);
/// Bytes of a model's name, at most.
pub(super) const MOST_NAME: usize = 256;

/// Why a store cannot be shared.
#[derive(Debug, thiserror::Error)]
pub enum JoinError {
    /// It does not answer, or not as it should. It is tried again later.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// Its secret cannot be used: the key is wrong or missing.
    #[error(transparent)]
    Secret(#[from] Error),
}

/// What a store says of its secret.
#[derive(Clone, Debug)]
pub enum SharedSecret {
    /// Nobody has made one.
    None,
    /// The object, and the secret in it.
    Some(SecretFile),
}

impl Remote {
    /// Runs one call with a deadline.
    fn one<T: Send + 'static>(
        self: &Arc<Self>,
        call: impl Fn(&Remote, Duration) -> Result<T, StoreError> + Send + Sync + 'static,
    ) -> Result<T, StoreError> {
        let bound = Bound { until: Instant::now() + PATIENCE, stall: PATIENCE };
        let mut result = Err(StoreError::Timeout);
        let end = self.each(
            vec![()],
            1,
            bound,
            move |remote, (), patience| call(remote, patience),
            |_, done| {
                result = done;
                true
            },
        );
        debug_assert!(end != End::Stopped);
        result
    }

    /// Reads the store's secret. Takes five seconds at most.
    ///
    /// # Errors
    /// A store that does not answer; a secret that this key does not open.
    pub fn secret(self: &Arc<Self>, key: Option<&FileKey>) -> Result<SharedSecret, JoinError> {
        let found = self.one(|remote, patience| remote.store.get(SECRET, SecretFile::BYTES as u64, patience));
        self.after_read(&found);
        match found? {
            None => Ok(SharedSecret::None),
            Some(bytes) => Ok(SharedSecret::Some(SecretFile::open(&bytes, key)?)),
        }
    }

    /// Offers a folder's secret to a store that has none. Returns the secret that the store has then: another replica may have been faster.
    ///
    /// # Errors
    /// Those of [`Remote::secret`].
    pub fn offer_secret(self: &Arc<Self>, own: &SecretFile, key: Option<&FileKey>) -> Result<SharedSecret, JoinError> {
        let bytes = own.bytes().to_vec();
        let made = self.one(move |remote, patience| remote.store.create(SECRET, &bytes, patience));
        self.after_write(&made);
        made?;
        self.secret(key)
    }

    /// This replica has the store's secret. Returns whether it had it before.
    pub fn set_joined(&self) -> bool {
        self.joined.swap(true, Ordering::Relaxed)
    }

    /// From now on the store says this name for a model, for people.
    pub fn note_model(&self, model: u64, name: &str) {
        let end = name.char_indices().map(|(i, _)| i).take_while(|i| *i <= MOST_NAME).last().unwrap_or(0);
        let name = if name.len() <= MOST_NAME { name } else { &name[..end] };
        *lock(&self.uploads.model) = Some((names::model(model), name.to_owned()));
    }
}
