//! Which entry lies in which slots: the database, in transactions that are whole or not at all.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

use redb::{
    Database, Durability, ReadOnlyTable, ReadableDatabase, ReadableTable, ReadableTableMetadata, TableDefinition,
    WriteTransaction,
};

use sluice_store::catch_panic;

use super::pages::{Backend, Pages};
use super::slot::{STATE, VERSION};
use super::storage::Storage;
use crate::prefix::BlockHash;

/// An entry's name: fingerprint of its model, and hash of all tokens up to its end.
pub type Key = (u64, BlockHash);

/// One of the slots of a slab.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Place {
    pub slab: u32,
    pub slot: u32,
}

/// What is known of an entry, and where its parts lie.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    pub before: BlockHash,
    /// Position of its first token, and how many it has.
    pub position: u32,
    pub tokens: u32,
    /// When it was used last: by a count that goes on over restarts.
    pub used: u64,
    /// How often it was found.
    pub hits: u32,
    /// (Number of the part, its bytes, its place)
    pub parts: Vec<(u32, u64, Place)>,
}

impl Entry {
    pub fn has_state(&self) -> bool {
        self.parts.iter().any(|(part, ..)| *part == STATE)
    }
}

/// A file of slots.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Slab {
    pub slot_bytes: u64,
    /// For each slot whether it is taken.
    pub taken: Vec<bool>,
}

impl Slab {
    pub fn bytes(&self) -> u64 {
        self.slot_bytes.saturating_mul(self.taken.len() as u64)
    }
}

type Bytes = &'static [u8];
const ENTRIES: TableDefinition<(u64, BlockHash), Bytes> = TableDefinition::new("entries");
/// (Last use, how deep from the end, key): those to be evicted first are in front.
const BY_USE: TableDefinition<(u64, u32, u64, BlockHash), ()> = TableDefinition::new("by use");
/// (Model, hash of the entry before, tokens, own hash): a prompt may end within an entry, or an entry within a block, where no hash can be guessed.
const FOLLOWING: TableDefinition<(u64, BlockHash, u32, BlockHash), ()> = TableDefinition::new("following");
const SLABS: TableDefinition<u32, Bytes> = TableDefinition::new("slabs");
const META: TableDefinition<&str, u64> = TableDefinition::new("meta");
const MODELS: TableDefinition<u64, Bytes> = TableDefinition::new("models");
/// (Model, what the first entry follows, name): who gives another salt has other names.
const SESSIONS: TableDefinition<(u64, BlockHash, &str), Bytes> = TableDefinition::new("sessions");

pub const NAME: &str = "index.redb";

/// What is known of a model, for people.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Model {
    pub name: String,
    pub path: String,
    /// How many requests found something of it.
    pub hits: u64,
    /// When the last of them did: seconds since 1970.
    pub used: u64,
}

/// A chain that has a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Session {
    /// Its last entry.
    pub end: BlockHash,
    /// Tokens up to there.
    pub tokens: u32,
    /// When it was named: seconds since 1970.
    pub created: u64,
}

/// Which one it is.
pub struct Named {
    pub model: u64,
    /// What its first entry follows.
    pub root: BlockHash,
    pub name: String,
    pub session: Session,
}

/// The database in a file of ours.
pub struct Index {
    /// `None` once it is closed.
    database: Option<Database>,
    pages: Arc<Pages>,
}

impl Drop for Index {
    fn drop(&mut self) {
        // It writes once more. What goes wrong with that, or with the mark, has the next run look through the index.
        if catch_panic(|| drop(self.database.take())).is_ok() {
            let _ = self.pages.mark();
        }
    }
}

/// Anything that goes wrong with it.
pub type Error = Box<redb::Error>;

/// Whether an error means that the file is no index, rather than that the disk did not do what it was asked for.
pub fn is_broken(e: &redb::Error) -> bool {
    match e {
        redb::Error::Io(e) => {
            [io::ErrorKind::InvalidData, io::ErrorKind::UnexpectedEof, io::ErrorKind::FileTooLarge].contains(&e.kind())
        }
        redb::Error::PreviousIo | redb::Error::LockPoisoned(_) => false,
        _ => true,
    }
}

fn own(e: impl Into<redb::Error>) -> Error {
    Box::new(e.into())
}

/// A database whose bytes were changed by somebody else panics here and there; to us that is a file that is no index.
fn guarded<T>(what: impl FnOnce() -> Result<T, Error>) -> Result<T, Error> {
    catch_panic(what)
        .unwrap_or_else(|_| Err(own(redb::StorageError::Corrupted("its pages contradict each other".into()))))
}

impl Index {
    /// What a table says as it was made durable last; one that was never written to says nothing.
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
            // All sums of its pages, of which there are a few megabytes: whoever follows wrong ones may never come back.
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

    /// Something went wrong: the next run looks through the index.
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

    /// Entries of a model, the one that was used last first, and the beginning of a chain before its end; so many at most.
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

    /// All entries, in no order that means anything.
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
            // After a crash nothing has to be looked through.
            transaction.set_quick_repair(true);
            let done = what(&mut Changes { transaction: &transaction })?;
            transaction.commit().map_err(own)?;
            Ok(done)
        })
    }
}

/// A transaction under way.
pub struct Changes<'a> {
    transaction: &'a WriteTransaction,
}

impl Changes<'_> {
    /// # Errors
    /// The file's.
    pub fn set_meta(&mut self, name: &str, value: u64) -> Result<(), Error> {
        let mut table = self.transaction.open_table(META).map_err(own)?;
        table.insert(name, value).map_err(own)?;
        Ok(())
    }

    /// Names an entry, or names it anew with another time of use.
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

    /// An entry, if it is there, was used at a time, and found some times more.
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

    /// Something of a model was found so many times more, the last time now.
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

    /// Entries, the one that was not used for longest first, and the end of a chain before its beginning, for as long as `wanted` says so.
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

fn use_key(key: &Key, entry: &Entry) -> (u64, u32, u64, BlockHash) {
    // Parts of blocks end where whole ones do not: the end counts, not the beginning.
    (entry.used, u32::MAX - (entry.position + entry.tokens), key.0, key.1)
}

fn following_key(key: &Key, entry: &Entry) -> (u64, BlockHash, u32, BlockHash) {
    (key.0, entry.before, entry.tokens, key.1)
}

fn encode(entry: &Entry) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(40 + 20 * entry.parts.len());
    bytes.extend(entry.before);
    bytes.extend(entry.position.to_le_bytes());
    bytes.extend(entry.tokens.to_le_bytes());
    bytes.extend(entry.used.to_le_bytes());
    bytes.extend(entry.hits.to_le_bytes());
    for (part, len, place) in &entry.parts {
        bytes.extend(part.to_le_bytes());
        bytes.extend(len.to_le_bytes());
        bytes.extend(place.slab.to_le_bytes());
        bytes.extend(place.slot.to_le_bytes());
    }
    bytes
}

/// `None` for what is no entry: then it is a miss.
fn decode(bytes: &[u8]) -> Option<Entry> {
    let (head, parts) = bytes.split_at_checked(36)?;
    let u32_at = |b: &[u8], at: usize| Some(u32::from_le_bytes(b.get(at..at + 4)?.try_into().ok()?));
    let u64_at = |b: &[u8], at: usize| Some(u64::from_le_bytes(b.get(at..at + 8)?.try_into().ok()?));
    let part = |b: &[u8]| {
        let place = Place { slab: u32_at(b, 12)?, slot: u32_at(b, 16)? };
        Some((u32_at(b, 0)?, u64_at(b, 4)?, place))
    };
    Some(Entry {
        before: head[..16].try_into().ok()?,
        position: u32_at(head, 16)?,
        tokens: u32_at(head, 20)?,
        used: u64_at(head, 24)?,
        hits: u32_at(head, 32)?,
        parts: parts.chunks(20).map(part).collect::<Option<_>>()?,
    })
}

fn encode_model(model: &Model) -> Vec<u8> {
    let mut bytes = model.hits.to_le_bytes().to_vec();
    bytes.extend(model.used.to_le_bytes());
    bytes.extend((model.name.len() as u32).to_le_bytes());
    bytes.extend(model.name.as_bytes());
    bytes.extend(model.path.as_bytes());
    bytes
}

fn decode_model(bytes: &[u8]) -> Option<Model> {
    let (head, text) = bytes.split_at_checked(20)?;
    let name = u32::from_le_bytes(head[16..].try_into().ok()?) as usize;
    let (name, path) = text.split_at_checked(name)?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let number = |bytes: &[u8]| Some(u64::from_le_bytes(bytes.try_into().ok()?));
    Some(Model { name: text(name), path: text(path), hits: number(&head[..8])?, used: number(&head[8..16])? })
}

fn encode_session(session: &Session) -> Vec<u8> {
    let mut bytes = session.end.to_vec();
    bytes.extend(session.tokens.to_le_bytes());
    bytes.extend(session.created.to_le_bytes());
    bytes
}

fn decode_session(bytes: &[u8]) -> Option<Session> {
    let bytes: &[u8; 28] = bytes.try_into().ok()?;
    Some(Session {
        end: bytes[..16].try_into().ok()?,
        tokens: u32::from_le_bytes(bytes[16..20].try_into().ok()?),
        created: u64::from_le_bytes(bytes[20..].try_into().ok()?),
    })
}

fn encode_slab(slab: &Slab) -> Vec<u8> {
    let mut bytes = slab.slot_bytes.to_le_bytes().to_vec();
    bytes.extend((slab.taken.len() as u32).to_le_bytes());
    bytes.extend(slab.taken.chunks(8).map(|eight| eight.iter().rev().fold(0, |byte, on| byte << 1 | u8::from(*on))));
    bytes
}

fn decode_slab(bytes: &[u8]) -> Option<Slab> {
    let slot_bytes = u64::from_le_bytes(bytes.get(..8)?.try_into().ok()?);
    let slots = u32::from_le_bytes(bytes.get(8..12)?.try_into().ok()?) as usize;
    let bits = bytes.get(12..).filter(|bits| bits.len() == slots.div_ceil(8))?;
    Some(Slab { slot_bytes, taken: (0..slots).map(|i| bits[i / 8] >> (i % 8) & 1 == 1).collect() })
}
