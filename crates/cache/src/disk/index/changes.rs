//! Changes of the index, which become durable together or not at all.

use redb::{ReadableTable, ReadableTableMetadata, WriteTransaction};

use super::error::{Error, own};
use super::rows::{
    BY_USE, ENTRIES, Entry, FOLLOWING, Key, META, MODELS, Model, SESSIONS, SLABS, Session, Slab, decode, decode_model,
    encode, encode_model, encode_session, encode_slab, following_key, use_key,
};
use crate::prefix::BlockHash;

/// A transaction under way.
pub struct Changes<'a> {
    pub(super) transaction: &'a WriteTransaction,
}

impl Changes<'_> {
    /// # Errors
    /// The file's.
    pub fn set_meta(&mut self, name: &str, value: u64) -> Result<(), Error> {
        let mut table = self.transaction.open_table(META).map_err(own)?;
        table.insert(name, value).map_err(own)?;
        Ok(())
    }

    /// Adds an entry, or replaces it with another time of use.
    ///
    /// # Errors
    /// The file's.
    pub fn put(&mut self, key: &Key, entry: &Entry) -> Result<(), Error> {
        self.remove(key)?;
        let mut table = self.transaction.open_table(ENTRIES).map_err(own)?;
        table.insert(key, encode(entry).as_slice()).map_err(own)?;
        let mut by_use = self.transaction.open_table(BY_USE).map_err(own)?;
        by_use.insert(use_key(key, entry), ()).map_err(own)?;
        let mut following = self.transaction.open_table(FOLLOWING).map_err(own)?;
        following.insert(following_key(key, entry), ()).map_err(own)?;
        Ok(())
    }

    /// Notes that an entry, if it exists, was used at a time, and found some more times.
    ///
    /// # Errors
    /// The file's.
    pub fn used(&mut self, key: &Key, used: u64, hits: u32) -> Result<(), Error> {
        let Some(mut entry) = self.get(key)? else { return Ok(()) };
        (entry.used, entry.hits) = (entry.used.max(used), entry.hits.saturating_add(hits));
        self.put(key, &entry)
    }

    /// # Errors
    /// The file's.
    fn change_model(&mut self, model: u64, change: impl FnOnce(&mut Model)) -> Result<(), Error> {
        let mut table = self.transaction.open_table(MODELS).map_err(own)?;
        let mut known = table.get(model).map_err(own)?.and_then(|v| decode_model(v.value())).unwrap_or_default();
        change(&mut known);
        table.insert(model, encode_model(&known).as_slice()).map_err(own)?;
        Ok(())
    }

    /// # Errors
    /// The file's.
    pub fn name_model(&mut self, model: u64, name: &str, path: &str) -> Result<(), Error> {
        self.change_model(model, |m| (m.name, m.path) = (name.to_owned(), path.to_owned()))
    }

    /// Notes that entries of a model were found some more times, the last time now.
    ///
    /// # Errors
    /// The file's.
    pub fn model_used(&mut self, model: u64, now: u64, hits: u64) -> Result<(), Error> {
        self.change_model(model, |m| (m.used, m.hits) = (now, m.hits.saturating_add(hits)))
    }

    /// # Errors
    /// The file's.
    pub fn remove(&mut self, key: &Key) -> Result<Option<Entry>, Error> {
        let mut table = self.transaction.open_table(ENTRIES).map_err(own)?;
        let entry = table.remove(key).map_err(own)?.and_then(|v| decode(v.value()));
        if let Some(entry) = &entry {
            let mut by_use = self.transaction.open_table(BY_USE).map_err(own)?;
            by_use.remove(use_key(key, entry)).map_err(own)?;
            let mut following = self.transaction.open_table(FOLLOWING).map_err(own)?;
            following.remove(following_key(key, entry)).map_err(own)?;
        }
        Ok(entry)
    }

    /// # Errors
    /// The file's.
    pub fn get(&mut self, key: &Key) -> Result<Option<Entry>, Error> {
        let table = self.transaction.open_table(ENTRIES).map_err(own)?;
        let found = table.get(key).map_err(own)?.and_then(|v| decode(v.value()));
        Ok(found)
    }

    /// Entries, the least recently used first, and the end of a chain before its beginning, as long as `wanted` returns true.
    ///
    /// # Errors
    /// The file's.
    pub fn oldest(&mut self, mut wanted: impl FnMut(&Key) -> bool) -> Result<(), Error> {
        let by_use = self.transaction.open_table(BY_USE).map_err(own)?;
        for row in by_use.iter().map_err(own)? {
            let (key, _) = row.map_err(own)?;
            let (_, _, model, hash) = key.value();
            if !wanted(&(model, hash)) {
                break;
            }
        }
        Ok(())
    }

    /// How many entries there are.
    ///
    /// # Errors
    /// The file's.
    pub fn len(&mut self) -> Result<u64, Error> {
        self.transaction.open_table(ENTRIES).map_err(own)?.len().map_err(own)
    }

    /// # Errors
    /// The file's.
    pub fn put_session(&mut self, model: u64, root: BlockHash, name: &str, session: &Session) -> Result<(), Error> {
        let mut table = self.transaction.open_table(SESSIONS).map_err(own)?;
        table.insert((model, root, name), encode_session(session).as_slice()).map_err(own)?;
        Ok(())
    }

    /// Whether there was one.
    ///
    /// # Errors
    /// The file's.
    pub fn remove_session(&mut self, model: u64, root: BlockHash, name: &str) -> Result<bool, Error> {
        let mut table = self.transaction.open_table(SESSIONS).map_err(own)?;
        let there = table.remove((model, root, name)).map_err(own)?.is_some();
        Ok(there)
    }

    /// # Errors
    /// The file's.
    pub fn put_slab(&mut self, id: u32, slab: &Slab) -> Result<(), Error> {
        let mut table = self.transaction.open_table(SLABS).map_err(own)?;
        table.insert(id, encode_slab(slab).as_slice()).map_err(own)?;
        Ok(())
    }

    /// # Errors
    /// The file's.
    pub fn remove_slab(&mut self, id: u32) -> Result<(), Error> {
        let mut table = self.transaction.open_table(SLABS).map_err(own)?;
        table.remove(id).map_err(own)?;
        Ok(())
    }
}
