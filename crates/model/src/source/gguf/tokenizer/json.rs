//! Writes a `tokenizer.json`.

use anyhow::{Result, ensure};
use serde_json::{Value as Json, json};

use super::super::metadata::{Array, Metadata, Value};
use super::pieces;
use super::pre_tokenizer::PreTokenizer;
use super::special::Special;
use super::vocabulary::{Kind, SPACE, Vocabulary};

const SPACE_PREFIX: &str = "tokenizer.ggml.add_space_prefix";
const EXTRA_SPACES: &str = "tokenizer.ggml.remove_extra_whitespaces";
const CHARACTERS: &str = "tokenizer.ggml.precompiled_charsmap";

/// Bytes that a character map may make of one place in a text.
const MAX_REPLACEMENT: usize = 1024;

/// The rules around a model, as `tokenizer.json` writes them.
pub(super) struct Rules {
    normalizer: Json,
    pre_tokenizer: Json,
    decoder: Json,
    ignore_merges: bool,
}

impl Rules {
    /// Those of a byte-level vocabulary.
    pub fn byte_level(pre_tokenizer: &PreTokenizer) -> Rules {
        Rules {
            normalizer: if pre_tokenizer.nfc { json!({"type": "NFC"}) } else { Json::Null },
            pre_tokenizer: pre_tokenizer.to_json(),
            decoder: json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false}),
            ignore_merges: pre_tokenizer.ignore_merges,
        }
    }

    /// Those of SentencePiece: no words, spaces as characters, bytes for what has no piece.
    ///
    /// # Errors
    /// Keys of another type, and a map of characters that blows texts up.
    pub fn of_pieces(metadata: &Metadata, kind: Kind) -> Result<Rules> {
        let mut normalizers = Vec::new();
        if let Some(map) = character_map(metadata)? {
            normalizers.push(json!({"type": "Precompiled", "precompiled_charsmap": base64(map)}));
        }
        if metadata.flag(EXTRA_SPACES)?.unwrap_or(false) {
            // At the end SentencePiece takes its own sign for a space.
            let ends = format!("^ +|[ {SPACE}]+$");
            normalizers.push(json!({"type": "Replace", "pattern": {"Regex": ends}, "content": ""}));
            normalizers.push(json!({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}));
        }
        let prefix = metadata.flag(SPACE_PREFIX)?.unwrap_or(true) && kind == Kind::Pieces;
        if prefix {
            normalizers.push(json!({"type": "Prepend", "prepend": SPACE}));
        }
        normalizers.push(json!({"type": "Replace", "pattern": {"String": " "}, "content": SPACE}));
        let mut decoders = vec![
            json!({"type": "Replace", "pattern": {"String": SPACE}, "content": " "}),
            json!({"type": "ByteFallback"}),
            json!({"type": "Fuse"}),
        ];
        if prefix {
            decoders.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
        }
        Ok(Rules {
            normalizer: json!({"type": "Sequence", "normalizers": normalizers}),
            pre_tokenizer: Json::Null,
            decoder: json!({"type": "Sequence", "decoders": decoders}),
            ignore_merges: false,
        })
    }
}

/// SentencePiece's compiled map of characters: a trie, and the texts that replace what it finds, each with a zero at the end.
fn character_map(metadata: &Metadata) -> Result<Option<Vec<u8>>> {
    let map: Vec<u8> = match metadata.get(CHARACTERS) {
        None => return Ok(None),
        Some(Value::Array(Array::U8(map))) => map.clone(),
        Some(Value::Array(Array::I8(map))) => map.iter().map(|byte| byte.cast_unsigned()).collect(),
        Some(_) => return Err(metadata.wrong(CHARACTERS, "is no array of bytes")),
    };
    let trie = map.get(..4).map_or(0, |size| u32::from_le_bytes([size[0], size[1], size[2], size[3]]) as usize);
    let Some(texts) = map.get(4..).and_then(|rest| rest.get(trie..)).filter(|_| trie >= 4 && trie.is_multiple_of(4))
    else {
        return Err(metadata.wrong(CHARACTERS, "is no compiled map of characters"));
    };
    let longest = texts.split(|byte| *byte == 0).map(<[u8]>::len).max().unwrap_or(0);
    ensure!(
        longest <= MAX_REPLACEMENT,
        metadata.wrong(CHARACTERS, &format!("replaces a character by {longest} bytes; {MAX_REPLACEMENT} are accepted"))
    );
    Ok(Some(map))
}

/// The whole text. A vocabulary of 262,144 tokens has 33 MB of it, so that the large parts are written without a tree of values.
///
/// # Errors
/// Tokens with the same text; pieces that are too long.
pub(super) fn write(metadata: &Metadata, vocabulary: &Vocabulary, special: &Special, rules: &Rules) -> Result<String> {
    let text = |id: u32| vocabulary.tokens[id as usize].as_ref();
    let ids = vocabulary.ids(metadata)?;
    let found;
    let merges = match vocabulary.kind {
        Kind::Pieces => {
            found = pieces::merges(metadata, vocabulary, &ids)?;
            &found
        }
        Kind::ByteLevel | Kind::MergedPieces => &vocabulary.merges,
    };
    let added = special.added(vocabulary).into_iter().map(|(id, special)| {
        json!({"id": id, "content": text(id), "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": special})
    });
    let has_bytes = vocabulary.kind != Kind::ByteLevel;
    let unknown = special.unknown.filter(|_| has_bytes).map(text);

    // 1. the small parts
    let rest = json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": added.collect::<Vec<_>>(),
        "normalizer": rules.normalizer, "pre_tokenizer": rules.pre_tokenizer,
        "post_processor": post_processor(vocabulary, special), "decoder": rules.decoder,
    });
    let model = json!({
        "type": "BPE", "dropout": null, "unk_token": unknown, "continuing_subword_prefix": null, "end_of_word_suffix": null,
        "fuse_unk": has_bytes, "byte_fallback": has_bytes, "ignore_merges": rules.ignore_merges,
    });

    // 2. the large ones, as the last fields
    let mut json = open_object(&rest);
    json.extend_from_slice(b"\"model\":");
    json.extend(open_object(&model));
    json.extend_from_slice(b"\"vocab\":{");
    for (token, id) in vocabulary.tokens.iter().zip(0u32..) {
        string(&mut json, token)?;
        json.extend_from_slice(format!(":{id},").as_bytes());
    }
    close(&mut json, b"},\"merges\":[");
    for (left, right) in merges {
        json.push(b'[');
        string(&mut json, left)?;
        json.push(b',');
        string(&mut json, right)?;
        json.extend_from_slice(b"],");
    }
    close(&mut json, b"]}}");
    Ok(String::from_utf8(json)?)
}

fn string(json: &mut Vec<u8>, text: &str) -> Result<()> {
    Ok(serde_json::to_writer(json, text)?)
}

/// An object without its end, for further fields.
fn open_object(fields: &Json) -> Vec<u8> {
    let mut json = fields.to_string().into_bytes();
    json.pop();
    json.push(b',');
    json
}

/// Ends a list that may have a comma too many.
fn close(json: &mut Vec<u8>, end: &[u8]) {
    if json.last() == Some(&b',') {
        json.pop();
    }
    json.extend_from_slice(end);
}

/// Puts tokens around a text, if the model is used to it.
fn post_processor(vocabulary: &Vocabulary, special: &Special) -> Json {
    let (before, after) = (special.bos.filter(|_| special.add_bos), special.eos.filter(|_| special.add_eos));
    if before.is_none() && after.is_none() {
        return Json::Null;
    }
    let text = |id: u32| vocabulary.tokens[id as usize].as_ref();
    let token = |id: u32| json!({"SpecialToken": {"id": text(id), "type_id": 0}});
    let around = |name: &str| {
        let sequence = json!({"Sequence": {"id": name, "type_id": 0}});
        before.map(token).into_iter().chain([sequence]).chain(after.map(token)).collect::<Vec<_>>()
    };
    let definition = |id: u32| (text(id).to_owned(), json!({"id": text(id), "ids": [id], "tokens": [text(id)]}));
    let tokens: serde_json::Map<String, Json> = before.into_iter().chain(after).map(definition).collect();
    let pair = [around("A"), around("B")].concat();
    json!({"type": "TemplateProcessing", "single": around("A"), "pair": pair, "special_tokens": tokens})
}

/// Base64 with padding.
fn base64(bytes: Vec<u8>) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for chunk in bytes.chunks(3) {
        let at = |i: usize| u32::from(chunk.get(i).copied().unwrap_or(0));
        let bits = at(0) << 16 | at(1) << 8 | at(2);
        for digit in 0..4 {
            let value = bits >> (18 - 6 * digit) & 63;
            text.push(if digit <= chunk.len() { DIGITS[value as usize].into() } else { '=' });
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::base64;

    #[test]
    fn base64_is_that_of_the_standard() {
        for (bytes, text) in [("", ""), ("f", "Zg=="), ("fo", "Zm8="), ("foo", "Zm9v"), ("foobar", "Zm9vYmFy")] {
            assert_eq!(base64(bytes.into()), text);
        }
    }
}
