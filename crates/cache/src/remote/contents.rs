//! What a store holds, for people.

use std::collections::BTreeMap;
use std::time::Duration;

use super::join::MOST_NAME;
use super::names::{self, FORMAT, PartName, SECRET};
use super::store::{ObjectStore, StoreError};
use crate::disk::STATE;

/// A model's objects in a store.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StoredModel {
    /// Its name; empty if nobody said it.
    pub name: String,
    /// Entries: blocks of tokens, or parts of one.
    pub entries: u64,
    /// Tokens of all entries.
    pub tokens: u64,
    /// Entries with a recurrent state.
    pub states: u64,
    /// Objects.
    pub objects: u64,
    /// Bytes of them.
    pub bytes: u64,
}

/// What a store holds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StoreContents {
    /// By fingerprint.
    pub models: BTreeMap<u64, StoredModel>,
    /// Whether replicas share a secret there.
    pub has_secret: bool,
    /// Objects with names that Sluice does not give.
    pub others: u64,
    /// There are more objects than were looked at.
    pub is_cut: bool,
}

impl StoreContents {
    /// Lists a store, of which `most` objects are looked at.
    ///
    /// # Errors
    /// The store's.
    pub fn list(store: &dyn ObjectStore, most: u64, patience: Duration) -> Result<StoreContents, StoreError> {
        let mut contents = StoreContents::default();
        let mut named = Vec::new();
        let (mut count, mut last) = (0, None);
        store.list(FORMAT, patience, &mut |name, size| {
            count += 1;
            if count > most {
                contents.is_cut = true;
                return false;
            }
            if let Some(part) = PartName::parse(name) {
                let model = contents.models.entry(part.model).or_default();
                model.objects += 1;
                model.bytes += size;
                model.states += u64::from(part.part == STATE);
                // Parts of an entry follow each other.
                if last != Some(part.hash) {
                    last = Some(part.hash);
                    model.entries += 1;
                    model.tokens += u64::from(part.tokens);
                }
            } else if let Some(model) = names::parse_model(name) {
                named.push(model);
            } else if name == SECRET {
                contents.has_secret = true;
            } else {
                contents.others += 1;
            }
            true
        })?;
        for model in named {
            let name = store.get(&names::model(model), 4 * MOST_NAME as u64, patience)?;
            contents.models.entry(model).or_default().name =
                String::from_utf8_lossy(&name.unwrap_or_default()).into_owned();
        }
        Ok(contents)
    }
}
