//! The index: which entry has which slots. A database whose transactions happen as a whole or not at all.

mod changes;
mod error;
mod rows;

use std::collections::BTreeMap;
use std::sync::Arc;

use redb::{
    Database, Durability, ReadOnlyTable, ReadableDatabase, ReadableTable, ReadableTableMetadata, TableDefinition,
};

use sluice_store::catch_panic;

use super::pages::{Backend, Pages};
use super::slot::VERSION;
use super::storage::Storage;
use crate::prefix::BlockHash;
use changes::Changes;
pub use error::{Error, is_broken};
use error::{guarded, own};
use rows::{
    BY_USE, ENTRIES, FOLLOWING, META, MODELS, SESSIONS, SLABS, decode, decode_model, decode_session, decode_slab,
};
pub use rows::{Entry, Key, Model, Named, Place, Session, Slab};

/// The name of its file.
pub const NAME: &str = "index.redb";

/// The database in a file of ours.
pub struct Index {
    /// `None` once it is closed.
    database: Option<Database>,
    pages: Arc<Pages>,
}

impl Drop for Index {
    fn drop(&mut self) {
        // The database writes once more. If that fails, or the mark does, the next run checks the whole index.
        if catch_panic(|| drop(self.database.take())).is_ok() {
            let _ = self.pages.mark();
        }
    }
}

impl Index {
    /// Reads the last durable state of a table; the default if the table was never written.
    fn read<K: redb::Key + 'static, V: redb::Value + 'static, T: Default>(
        &self,
        table: TableDefinition<K, V>,
        what: impl FnOnce(ReadOnlyTable<K, V>) -> Result<T, Error>,
    ) -> Result<T, Error> {
        guarded(|| {
            let read = self.database().begin_read().map_err(own)?;
            match read.open_table(table) {
                Ok(table) => what(table),
                Err(redb::TableError::TableDoesNotExist(_)) => Ok(T::default()),
                Err(e) => Err(own(e)),
            }
        })
    }

    /// Opens the database, or makes it. Its file never has more than `most` bytes, unless it has them now.
    ///
    /// # Errors
    /// A file that is none; the file's own.
    pub fn open(storage: Arc<dyn Storage>, most: u64) -> Result<Index, Error> {
        let pages = Arc::new(Pages::open(storage, NAME, most).map_err(own)?);
        let opened = guarded(|| Index::opened(Arc::clone(&pages)));
        if opened.is_err() {
            let _ = pages.abandon();
        }
        opened
    }

    fn opened(pages: Arc<Pages>) -> Result<Index, Error> {
        let clean = pages.is_clean();
        let backend = Backend(Arc::clone(&pages));
        let mut database = redb::Builder::new().set_cache_size(1 << 20).create_with_backend(backend).map_err(own)?;
        if !clean {
            // Checks the checksums of all pages, a few megabytes: the database may never come back from following a
            // damaged one.
            database.check_integrity().map_err(own)?;
        }
        let index = Index { database: Some(database), pages };
        let version = index.meta("version")?;
        if version.is_some_and(|v| v != u64::from(VERSION)) {
            return Err(own(redb::StorageError::Corrupted("another version".into())));
        }
        if version.is_none() {
            index.change(|c| c.set_meta("version", VERSION.into()))?;
        }
        Ok(index)
    }

    fn database(&self) -> &Database {
        self.database.as_ref().expect("open until it is dropped")
    }

    /// After an error: makes the next run check the whole index.
    pub fn abandon(&self) {
        let _ = self.pages.abandon();
    }

    /// How many entries there are.
    ///
    /// # Errors
    /// The file's.
    pub fn len(&self) -> Result<u64, Error> {
        self.read(ENTRIES, |table| table.len().map_err(own))
    }

    /// What is known of models, by fingerprint.
    ///
    /// # Errors
    /// The file's.
    pub fn models(&self) -> Result<BTreeMap<u64, Model>, Error> {
        self.read(MODELS, |table| {
            let mut all = BTreeMap::new();
            for row in table.iter().map_err(own)? {
                let (model, value) = row.map_err(own)?;
                all.extend(decode_model(value.value()).map(|m| (model.value(), m)));
            }
            Ok(all)
        })
    }

    /// A number by name.
    ///
    /// # Errors
    /// The file's.
    pub fn meta(&self, name: &str) -> Result<Option<u64>, Error> {
        self.read(META, |table| Ok(table.get(name).map_err(own)?.map(|v| v.value())))
    }

    /// # Errors
    /// The file's.
    pub fn entry(&self, key: &Key) -> Result<Option<Entry>, Error> {
        self.read(ENTRIES, |table| Ok(table.get(key).map_err(own)?.and_then(|v| decode(v.value()))))
    }

    /// Entries that follow the one with the hash `before`: how many tokens each has, the most first, and its hash.
    ///
    /// # Errors
    /// The file's.
    pub fn following(&self, model: u64, before: BlockHash) -> Result<Vec<(u32, BlockHash)>, Error> {
        self.read(FOLLOWING, |table| {
            let range = (model, before, 0, [0; 16])..=(model, before, u32::MAX, [255; 16]);
            let mut all = Vec::new();
            for row in table.range(range).map_err(own)?.rev() {
                let (_, _, tokens, hash) = row.map_err(own)?.0.value();
                all.push((tokens, hash));
            }
            Ok(all)
        })
    }

    /// At most so many entries of a model, the most recently used first, and the beginning of a chain before its end.
    ///
    /// # Errors
    /// The file's.
    pub fn newest(&self, model: u64, most: usize) -> Result<Vec<BlockHash>, Error> {
        self.read(BY_USE, |table| {
            let mut all = Vec::new();
            for row in table.iter().map_err(own)?.rev() {
                let (_, _, of, hash) = row.map_err(own)?.0.value();
                if all.len() >= most {
                    break;
                }
                all.extend((of == model).then_some(hash));
            }
            Ok(all)
        })
    }

    /// All chains that have a name.
    ///
    /// # Errors
    /// The file's.
    pub fn sessions(&self) -> Result<Vec<Named>, Error> {
        self.read(SESSIONS, |table| {
            let mut all = Vec::new();
            for row in table.iter().map_err(own)? {
                let (key, value) = row.map_err(own)?;
                let (model, root, name) = key.value();
                let named = |session| Named { model, root, name: name.to_owned(), session };
                all.extend(decode_session(value.value()).map(named));
            }
            Ok(all)
        })
    }

    /// All entries, in any order.
    ///
    /// # Errors
    /// The file's.
    pub fn entries(&self) -> Result<Vec<(Key, Entry)>, Error> {
        self.read(ENTRIES, |table| {
            let mut all = Vec::new();
            for row in table.iter().map_err(own)? {
                let (key, value) = row.map_err(own)?;
                all.extend(decode(value.value()).map(|entry| (key.value(), entry)));
            }
            Ok(all)
        })
    }

    /// # Errors
    /// The file's.
    pub fn slabs(&self) -> Result<Vec<(u32, Slab)>, Error> {
        self.read(SLABS, |table| {
            let mut all = Vec::new();
            for row in table.iter().map_err(own)? {
                let (id, value) = row.map_err(own)?;
                all.extend(decode_slab(value.value()).map(|slab| (id.value(), slab)));
            }
            Ok(all)
        })
    }

    /// Changes that become durable together, or not at all.
    ///
    /// # Errors
    /// The file's, and those of `what`: then nothing has changed.
    pub fn change<T>(&self, what: impl FnOnce(&mut Changes) -> Result<T, Error>) -> Result<T, Error> {
        guarded(|| {
            let mut transaction = self.database().begin_write().map_err(own)?;
            transaction.set_durability(Durability::Immediate).map_err(own)?;
            // So nothing has to be searched after a crash.
            transaction.set_quick_repair(true);
            let done = what(&mut Changes { transaction: &transaction })?;
            transaction.commit().map_err(own)?;
            Ok(done)
        })
    }
}
