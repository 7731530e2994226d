//! The tables of the index, the types of their rows, and how rows are encoded.

use redb::TableDefinition;

use super::super::slot::STATE;
use crate::prefix::BlockHash;

/// An entry's name: fingerprint of its model, and hash of all tokens up to its end.
pub type Key = (u64, BlockHash);

/// A slot of a slab.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Place {
    /// Number of the slab.
    pub slab: u32,
    /// Number of the slot in it.
    pub slot: u32,
}

impl Place {
    /// The place of a part that is in a store and not on disk.
    pub const IN_STORE: Place = Place { slab: u32::MAX, slot: u32::MAX };
}

/// An entry: where its parts are, and how it was used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Hash of the entry before it.
    pub before: BlockHash,
    /// Position of its first token, and how many it has.
    pub position: u32,
    /// How many tokens it has.
    pub tokens: u32,
    /// When it was used last, by a clock of uses that goes on over restarts.
    pub used: u64,
    /// How often it was found.
    pub hits: u32,
    /// (Number of the part, its bytes, its slot)
    pub parts: Vec<(u32, u64, Place)>,
}

impl Entry {
    /// Whether a recurrent state is among its parts.
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

/// A model, for people.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Model {
    /// Its name.
    pub name: String,
    /// Its folder.
    pub path: String,
    /// How many requests found an entry of it.
    pub hits: u64,
    /// When the last of them did: seconds since 1970.
    pub used: u64,
}

/// A named chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Session {
    /// Its last entry.
    pub end: BlockHash,
    /// Tokens up to there.
    pub tokens: u32,
    /// When it was named: seconds since 1970.
    pub created: u64,
}

/// A named chain with its name.
pub struct Named {
    pub model: u64,
    /// What its first entry follows.
    pub root: BlockHash,
    pub name: String,
    pub session: Session,
}

pub type Bytes = &'static [u8];
pub const ENTRIES: TableDefinition<(u64, BlockHash), Bytes> = TableDefinition::new("entries");
/// (Last use, depth from the end, key): the first rows are evicted first.
pub const BY_USE: TableDefinition<(u64, u32, u64, BlockHash), ()> = TableDefinition::new("by use");
/// (Model, hash of the entry before, tokens, own hash): a prompt may end within an entry, or an entry within a block, where no hash can be guessed.
pub const FOLLOWING: TableDefinition<(u64, BlockHash, u32, BlockHash), ()> = TableDefinition::new("following");
pub const SLABS: TableDefinition<u32, Bytes> = TableDefinition::new("slabs");
pub const META: TableDefinition<&str, u64> = TableDefinition::new("meta");
pub const MODELS: TableDefinition<u64, Bytes> = TableDefinition::new("models");
/// (Model, root, name): each salt has its own root, and so its own names.
pub const SESSIONS: TableDefinition<(u64, BlockHash, &str), Bytes> = TableDefinition::new("sessions");

pub fn use_key(key: &Key, entry: &Entry) -> (u64, u32, u64, BlockHash) {
    // Parts of blocks end where whole ones do not: the end counts, not the beginning.
    (entry.used, u32::MAX - (entry.position + entry.tokens), key.0, key.1)
}

pub fn following_key(key: &Key, entry: &Entry) -> (u64, BlockHash, u32, BlockHash) {
    (key.0, entry.before, entry.tokens, key.1)
}

pub fn encode(entry: &Entry) -> Vec<u8> {
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

/// `None` if the bytes are no entry: that counts as a miss.
pub fn decode(bytes: &[u8]) -> Option<Entry> {
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

pub fn encode_model(model: &Model) -> Vec<u8> {
    let mut bytes = model.hits.to_le_bytes().to_vec();
    bytes.extend(model.used.to_le_bytes());
    bytes.extend((model.name.len() as u32).to_le_bytes());
    bytes.extend(model.name.as_bytes());
    bytes.extend(model.path.as_bytes());
    bytes
}

pub fn decode_model(bytes: &[u8]) -> Option<Model> {
    let (head, text) = bytes.split_at_checked(20)?;
    let name = u32::from_le_bytes(head[16..].try_into().ok()?) as usize;
    let (name, path) = text.split_at_checked(name)?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let number = |bytes: &[u8]| Some(u64::from_le_bytes(bytes.try_into().ok()?));
    Some(Model { name: text(name), path: text(path), hits: number(&head[..8])?, used: number(&head[8..16])? })
}

pub fn encode_session(session: &Session) -> Vec<u8> {
    let mut bytes = session.end.to_vec();
    bytes.extend(session.tokens.to_le_bytes());
    bytes.extend(session.created.to_le_bytes());
    bytes
}

pub fn decode_session(bytes: &[u8]) -> Option<Session> {
    let bytes: &[u8; 28] = bytes.try_into().ok()?;
    Some(Session {
        end: bytes[..16].try_into().ok()?,
        tokens: u32::from_le_bytes(bytes[16..20].try_into().ok()?),
        created: u64::from_le_bytes(bytes[20..].try_into().ok()?),
    })
}

pub fn encode_slab(slab: &Slab) -> Vec<u8> {
    let mut bytes = slab.slot_bytes.to_le_bytes().to_vec();
    bytes.extend((slab.taken.len() as u32).to_le_bytes());
    bytes.extend(slab.taken.chunks(8).map(|eight| eight.iter().rev().fold(0, |byte, on| byte << 1 | u8::from(*on))));
    bytes
}

pub fn decode_slab(bytes: &[u8]) -> Option<Slab> {
    let slot_bytes = u64::from_le_bytes(bytes.get(..8)?.try_into().ok()?);
    let slots = u32::from_le_bytes(bytes.get(8..12)?.try_into().ok()?) as usize;
    let bits = bytes.get(12..).filter(|bits| bits.len() == slots.div_ceil(8))?;
    Some(Slab { slot_bytes, taken: (0..slots).map(|i| bits[i / 8] >> (i % 8) & 1 == 1).collect() })
}
