//! Names for chains of entries. Named entries are evicted after all others.

use std::collections::HashSet;
use std::sync::Arc;

use super::index::{Key, Named, Session};
use super::{DiskCache, Error};
use crate::prefix::BlockHash;

/// Names of one model, at most: the index must have room for their rows.
pub const MOST_SESSIONS: usize = 1024;
/// Bytes of a name, at most.
pub const MOST_NAME: usize = 64;

impl DiskCache {
    /// Names the chain that ends with `end`; a chain with the same root that had this name loses it. `None` if a part
    /// of the chain is missing, or there are too many names.
    ///
    /// # Errors
    /// The index's: then nothing more should be asked of this cache.
    ///
    /// # Panics
    /// When the name is longer than [`MOST_NAME`].
    pub fn name_session(&mut self, model: u64, name: &str, end: BlockHash) -> Result<Option<Session>, Error> {
        assert!(name.len() <= MOST_NAME);
        self.attempt(|c| {
            c.remove_doomed()?;
            // 1. Check that it is complete, from its end to its beginning
            let (mut tokens, mut follows) = (None, None);
            let mut hash = end;
            let root = loop {
                let Some(entry) = c.lookups.find(&(model, hash))? else { return Ok(None) };
                // Positions must fall, so that a circle in an index that was tampered with comes to an end.
                let behind = entry.position.checked_add(entry.tokens);
                if entry.tokens == 0 || behind.is_none() || follows.is_some_and(|next| behind != Some(next)) {
                    return Ok(None);
                }
                tokens = tokens.or(behind);
                follows = Some(entry.position);
                hash = entry.before;
                if entry.position == 0 {
                    break hash;
                }
            };
            let mut known = c.index.sessions()?;
            known.retain(|n| n.model == model);
            if known.len() >= MOST_SESSIONS && !known.iter().any(|n| n.root == root && n.name == name) {
                return Ok(None);
            }
            // 2. Write its name
            let session = Session { end, tokens: tokens.unwrap_or(0), created: super::now() };
            c.index.change(|change| change.put_session(model, root, name, &session))?;
            c.named = None;
            Ok(Some(session))
        })
    }

    /// Removes the name of a chain with this root, and returns whether there was one. Its entries are then evicted
    /// like others.
    ///
    /// # Errors
    /// The index's: then nothing more should be asked of this cache.
    pub fn forget_session(&mut self, model: u64, root: BlockHash, name: &str) -> Result<bool, Error> {
        self.attempt(|c| {
            c.named = None;
            Ok(c.index.change(|change| change.remove_session(model, root, name))?)
        })
    }

    /// All entries of named chains.
    pub(super) fn named(&mut self) -> Result<Arc<HashSet<Key>>, Error> {
        if let Some(named) = &self.named {
            return Ok(Arc::clone(named));
        }
        let mut named = HashSet::new();
        for Named { model, session, .. } in self.index.sessions()? {
            let mut key = (model, session.end);
            while !named.contains(&key)
                && let Some(entry) = self.index.entry(&key)?
            {
                named.insert(key);
                key.1 = entry.before;
            }
        }
        let named = Arc::new(named);
        self.named = Some(Arc::clone(&named));
        Ok(named)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::super::{NewEntry, Settings};
    use super::*;
    use crate::prefix::block_hash;

    /// Stores a chain of so many blocks in one batch, and returns their hashes.
    fn store(cache: &mut DiskCache, salt: u8, blocks: u32) -> Vec<BlockHash> {
        let secret = cache.secret();
        let tokens: Vec<Vec<u32>> = (0..blocks).map(|i| (8 * i..8 * i + 8).collect()).collect();
        let mut path = vec![[salt; 16]];
        for tokens in &tokens {
            path.push(block_hash(&secret, &path[path.len() - 1], tokens));
        }
        let part = vec![salt; 60_000];
        let parts: &[(u32, &[u8])] = &[(0, &part)];
        let new = |i: usize| NewEntry {
            hash: path[i + 1],
            before: path[i],
            position: 8 * i as u32,
            tokens: &tokens[i],
            parts,
        };
        cache.store(5, &(0..blocks as usize).map(new).collect::<Vec<_>>()).unwrap();
        path.split_off(1)
    }

    #[test]
    fn a_circle_in_an_index_that_was_edited_is_no_chain() {
        let dir = tempfile::tempdir().unwrap();
        let settings = Settings { quota: Some(16 << 20), ..Settings::default() };
        let mut cache = DiskCache::open_folder(dir.path(), settings).unwrap();
        let chain = store(&mut cache, 1, 4);
        // The first entry follows the last one, and is said to lie behind it; so do entries that are said to have no tokens.
        for (position, tokens) in [(32, 8), (8, 8), (0u32.wrapping_sub(8), 8), (32, 0)] {
            let key = (5, chain[0]);
            let entry = cache.find(&key).unwrap().unwrap();
            let circle = super::super::Entry { before: chain[3], position, tokens, ..entry.clone() };
            cache.index.change(|change| change.put(&key, &circle)).unwrap();
            assert_eq!(cache.name_session(5, "a circle", chain[3]).unwrap(), None);
            assert_eq!(cache.lookups().chain(&key, &mut HashMap::new(), || true).unwrap(), None);
            cache.index.change(|change| change.put(&key, &entry)).unwrap();
        }
        assert!(cache.name_session(5, "a line", chain[3]).unwrap().is_some());
    }

    #[test]
    fn what_has_a_name_is_there_after_a_restart_and_goes_last() {
        let dir = tempfile::tempdir().unwrap();
        let open =
            || DiskCache::open_folder(dir.path(), Settings { quota: Some(16 << 20), ..Settings::default() }).unwrap();
        let mut cache = open();
        let named = store(&mut cache, 1, 20);
        let session = cache.name_session(5, "a fox", named[19]).unwrap().unwrap();
        assert_eq!((session.tokens, session.end), (160, named[19]));
        assert_eq!(cache.name_session(5, "nothing", [9; 16]).unwrap(), None);
        drop(cache);
        let mut cache = open();
        assert_eq!(cache.lookups().sessions(5, [1; 16]).unwrap(), [("a fox".to_owned(), session)]);
        for (model, root) in [(6, [1; 16]), (5, [2; 16])] {
            assert!(cache.lookups().sessions(model, root).unwrap().is_empty());
            assert!(!cache.forget_session(model, root, "a fox").unwrap());
        }
        // 1. Others come until there is no room, and more than once
        for salt in 2..20 {
            store(&mut cache, salt, 20);
        }
        assert!(cache.counts().evicted > 150);
        let chain = cache.lookups().chain(&(5, named[19]), &mut HashMap::new(), || true).unwrap().unwrap();
        assert_eq!(chain.tokens, (0..160).collect::<Vec<u32>>());
        // 2. Without its name it goes like all others
        assert!(
            cache.forget_session(5, [1; 16], "a fox").unwrap() && !cache.forget_session(5, [1; 16], "a fox").unwrap()
        );
        for salt in 20..32 {
            store(&mut cache, salt, 20);
        }
        assert_eq!(cache.find(&(5, named[19])).unwrap(), None);
        // 3. Names alone do not keep others out
        for salt in 32..44 {
            let path = store(&mut cache, salt, 20);
            assert!(cache.name_session(5, &salt.to_string(), path[19]).unwrap().is_some());
        }
        assert_eq!(cache.inconsistencies().unwrap(), Vec::<String>::new());
    }
}
