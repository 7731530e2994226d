//! The texts themselves, and a key for what is made of them.

use anyhow::Result;
use xxhash_rust::xxh3::Xxh3;

use super::super::metadata::{Array, Metadata, Value};
use super::json::{self, Rules};
use super::keys::{ARCHITECTURE, EOS, MODEL, PRE, TEMPLATE};
use super::special::Special;
use super::vocabulary::{Kind, Vocabulary};
use super::{pre_tokenizer, templates};

/// Increase it with every change of what is made of metadata: caches are keyed by it.
const VERSION: u32 = 1;

/// The whole text of a `tokenizer.json`, which a few files carry.
const ORIGINAL: &str = "tokenizer.huggingface.json";

/// The text of the file `name` of a Hugging Face folder; `None` where metadata says nothing of what would be in it.
///
/// # Errors
/// Metadata that contradicts itself, or names rules that are not known. The message names the file and the key.
pub fn text_file(metadata: &Metadata, name: &str) -> Result<Option<String>> {
    match name {
        "tokenizer.json" if !has_tokenizer(metadata) => Ok(None),
        "tokenizer.json" => tokenizer_json(metadata).map(Some),
        "tokenizer_config.json" => templates::tokenizer_config(metadata).map(Some),
        "generation_config.json" => templates::generation_config(metadata).map(Some),
        _ => Ok(None),
    }
}

/// Whether metadata has a tokenizer.
pub fn has_tokenizer(metadata: &Metadata) -> bool {
    Vocabulary::is_in(metadata) || metadata.get(ORIGINAL).is_some()
}

/// The key that says most of what is in file `name`, for messages.
pub fn main_key(name: &str) -> Option<&'static str> {
    Some(match name {
        "tokenizer.json" => MODEL,
        "tokenizer_config.json" => TEMPLATE,
        "generation_config.json" => EOS,
        _ => return None,
    })
}

/// The tokenizer as the text of a `tokenizer.json`: vocabulary, merges, added tokens, and the rules around them.
///
/// # Errors
/// As for [`text_file`].
pub fn tokenizer_json(metadata: &Metadata) -> Result<String> {
    if let Some(original) = metadata.string(ORIGINAL)? {
        return Ok(original.to_owned());
    }
    let vocabulary = Vocabulary::whole(metadata)?;
    let special = Special::read(metadata, &vocabulary)?;
    let rules = match vocabulary.kind {
        Kind::ByteLevel => Rules::byte_level(pre_tokenizer::named(metadata)?),
        Kind::Pieces | Kind::MergedPieces => Rules::of_pieces(metadata, vocabulary.kind)?,
    };
    json::write(metadata, &vocabulary, &special, &rules)
}

/// What cuts text into tokens, for people: the kind of vocabulary and the name of its rule. `None`: there is no tokenizer.
pub fn tokenizer_name(metadata: &Metadata) -> Option<String> {
    let name = |key| metadata.string(key).ok().flatten();
    Some(match (name(MODEL)?, name(PRE)) {
        (model @ "gpt2", Some(pre)) => format!("{model}, {pre}"),
        (model, _) => model.to_owned(),
    })
}

/// A hash of everything that [`tokenizer_json`] reads, far cheaper than the text itself: a key for caches of what is made of it.
pub fn fingerprint(metadata: &Metadata) -> u128 {
    let mut hash = Xxh3::new();
    hash.update(&VERSION.to_le_bytes());
    for (key, value) in metadata.iter().filter(|(key, _)| key.starts_with("tokenizer.") || *key == ARCHITECTURE) {
        update(&mut hash, key.as_bytes());
        hash_value(&mut hash, value);
    }
    hash.digest128()
}

/// Bytes with their length before them, so that no two lists of them are the same to the hash.
fn update(hash: &mut Xxh3, bytes: &[u8]) {
    hash.update(&(bytes.len() as u64).to_le_bytes());
    hash.update(bytes);
}

fn hash_value(hash: &mut Xxh3, value: &Value) {
    let mut numbers = |kind: u8, bytes: Vec<u8>| {
        hash.update(&[kind]);
        update(hash, &bytes);
    };
    match value {
        Value::Unsigned(x) => numbers(0, x.to_le_bytes().into()),
        Value::Signed(x) => numbers(1, x.to_le_bytes().into()),
        Value::Float(x) => numbers(2, x.to_le_bytes().into()),
        Value::Bool(x) => numbers(3, vec![u8::from(*x)]),
        Value::String(x) => numbers(4, x.to_vec()),
        Value::Array(Array::U8(v)) => numbers(5, v.clone()),
        Value::Array(Array::F32(v)) => numbers(6, v.iter().flat_map(|x| x.to_le_bytes()).collect()),
        Value::Array(Array::F64(v)) => numbers(7, v.iter().flat_map(|x| x.to_le_bytes()).collect()),
        Value::Array(Array::String(v)) => {
            numbers(8, (v.len() as u64).to_le_bytes().into());
            v.iter().for_each(|string| update(hash, string));
        }
        Value::Array(Array::Nested(count)) => numbers(9, (*count as u64).to_le_bytes().into()),
        Value::Array(other) => match other.integers() {
            Some(v) => numbers(10, v.iter().flat_map(|x| x.to_le_bytes()).collect()),
            // Numbers above `i64::MAX`, which no key of a tokenizer has and no reader accepts.
            None => numbers(11, (other.len() as u64).to_le_bytes().into()),
        },
    }
}
