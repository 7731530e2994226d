//! `tokenizer_config.json` and `generation_config.json`: chat templates, special tokens by name, the tokens that end an answer, and what the file suggests
//! for sampling.

use anyhow::Result;
use serde_json::{Map, Number, Value as Json, json};

use super::super::metadata::Metadata;
use super::keys::TEMPLATE;
use super::special::Special;
use super::vocabulary::Vocabulary;

/// Suggestions for sampling, and their names in `generation_config.json`.
const SAMPLING: [(&str, &str); 4] = [
    ("general.sampling.temp", "temperature"),
    ("general.sampling.top_p", "top_p"),
    ("general.sampling.min_p", "min_p"),
    ("general.sampling.penalty_repeat", "repetition_penalty"),
];
const TOP_K: &str = "general.sampling.top_k";

/// Names of special tokens, whether they are added, and the chat templates.
///
/// # Errors
/// As for [`text_file`](super::text_file).
pub(super) fn tokenizer_config(metadata: &Metadata) -> Result<String> {
    let mut config = Map::new();
    if Vocabulary::is_in(metadata) {
        let vocabulary = Vocabulary::tokens(metadata)?;
        let special = Special::read(metadata, &vocabulary)?;
        let names = [
            ("bos_token", special.bos),
            ("eos_token", special.eos),
            ("unk_token", special.unknown),
            ("pad_token", special.padding),
        ];
        for (name, id) in names {
            config.insert(name.into(), id.map(|id| vocabulary.tokens[id as usize].as_ref()).into());
        }
        config.insert("add_bos_token".into(), special.add_bos.into());
        config.insert("add_eos_token".into(), special.add_eos.into());
    }
    let templates = templates(metadata)?;
    match &templates[..] {
        [] => {}
        [("default", text)] => _ = config.insert("chat_template".into(), (*text).into()),
        several => {
            let list = several.iter().map(|(name, text)| json!({"name": name, "template": text})).collect();
            config.insert("chat_template".into(), Json::Array(list));
        }
    }
    Ok(Json::Object(config).to_string())
}

/// Names and texts.
fn templates(metadata: &Metadata) -> Result<Vec<(&str, &str)>> {
    let mut templates = Vec::new();
    for (key, _) in metadata.iter() {
        let name = match key.strip_prefix(TEMPLATE) {
            Some("") => "default",
            Some(name) => match name.strip_prefix('.') {
                Some(name) if !name.is_empty() => name,
                _ => continue,
            },
            None => continue,
        };
        if let Some(text) = metadata.string(key)?.filter(|text| !text.is_empty()) {
            templates.push((name, text));
        }
    }
    Ok(templates)
}

/// Tokens that end an answer, and suggestions for sampling.
///
/// # Errors
/// As for [`text_file`](super::text_file).
pub(super) fn generation_config(metadata: &Metadata) -> Result<String> {
    let mut config = Map::new();
    if Vocabulary::is_in(metadata) {
        let vocabulary = Vocabulary::tokens(metadata)?;
        let special = Special::read(metadata, &vocabulary)?;
        config.insert("bos_token_id".into(), special.bos.into());
        config.insert("pad_token_id".into(), special.padding.into());
        config.insert("eos_token_id".into(), special.ends.into());
    }
    for (key, name) in SAMPLING {
        if let Some(number) = metadata.float(key)?.and_then(shortest) {
            config.insert(name.into(), number.into());
        }
    }
    if let Some(top_k) = metadata.unsigned(TOP_K)? {
        config.insert("top_k".into(), top_k.into());
    }
    Ok(Json::Object(config).to_string())
}

/// The shortest number that is the same f32, which is what the file was made of: 0.7 instead of 0.699999988079071.
fn shortest(number: f64) -> Option<Number> {
    (number as f32).to_string().parse().ok().and_then(Number::from_f64)
}
