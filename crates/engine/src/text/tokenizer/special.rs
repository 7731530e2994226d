//! Special and added tokens from the files beside `tokenizer.json`, combined as in transformers.
//!
//! `tokenizer_config.json` names special tokens and may list added ones (`added_tokens_decoder`). Without that list, `special_tokens_map.json` and
//! `added_tokens.json` of older checkpoints are read too, and the map's names take precedence.

use crate::text::files::read_json;
use anyhow::{Context, Result, bail};
use serde::Deserialize;
use serde_json::{Map, Value};
use sluice_model::source::TextFiles;
use std::collections::{BTreeMap, HashMap, HashSet};
use tokenizers::AddedToken;

const CONFIG: &str = "tokenizer_config.json";
const MAP: &str = "special_tokens_map.json";
const ADDED: &str = "added_tokens.json";

/// The names that every tokenizer may give to tokens.
const NAMES: [&str; 7] = ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];
const EXTRA: &str = "extra_special_tokens";
const OLDER_EXTRA: &str = "additional_special_tokens";
const DECODER: &str = "added_tokens_decoder";

/// An added token as `tokenizer.json` lists it.
#[derive(Clone, Deserialize)]
pub(in crate::text) struct Listed {
    #[serde(default)]
    pub id: i64,
    #[serde(flatten)]
    pub token: AddedToken,
}

/// The tokens of the files beside `tokenizer.json`.
#[derive(Default)]
pub(in crate::text) struct SpecialTokens {
    /// Tokens by name, in the order in which they are added.
    named: Vec<(String, AddedToken)>,
    /// Special tokens without a name.
    extra: Vec<AddedToken>,
    /// `added_tokens_decoder`. `None`: what `tokenizer.json` and the older files list counts.
    decoder: Option<BTreeMap<i64, AddedToken>>,
    /// `added_tokens.json`.
    older: Vec<(i64, AddedToken)>,
}

impl SpecialTokens {
    /// Reads a checkpoint's files. Each of them may be missing.
    ///
    /// # Errors
    /// A file that cannot be read, or an invalid token. The message names the file and the key.
    pub fn load(files: &dyn TextFiles) -> Result<Self> {
        let object = |name: &str| match read_json(files, name)? {
            None => Ok(Map::new()),
            Some(Value::Object(fields)) => Ok(fields),
            Some(_) => bail!("{}: not a JSON object", files.locate(name).display()),
        };
        let config = object(CONFIG)?;
        let (map, added) = match config.get(DECODER) {
            None | Some(Value::Null) => (object(MAP)?, object(ADDED)?),
            Some(_) => (Map::new(), Map::new()),
        };
        Self::gather(files, config, map, &added)
    }

    fn gather(
        files: &dyn TextFiles,
        mut config: Map<String, Value>,
        map: Map<String, Value>,
        added: &Map<String, Value>,
    ) -> Result<Self> {
        let in_map: HashSet<String> = map.keys().cloned().collect();
        let place = |name: &str| {
            let file = files.locate(if in_map.contains(name) { MAP } else { CONFIG });
            format!("{}: {name}", file.display())
        };

        // 1. the configuration: the older name of extra tokens counts where the newer one has none, and tokens may have names of the model's own
        if config.get(EXTRA).is_none_or(is_empty)
            && let Some(older) = config.shift_remove(OLDER_EXTRA)
        {
            config.insert(EXTRA.into(), older);
        }
        let mut own = Map::new();
        config.retain(|name, value| {
            let is_own = is_own_name(name) && value.is_string();
            if is_own {
                own.insert(name.clone(), value.clone());
            }
            !is_own
        });
        let take_named = |config: &mut Map<String, Value>, own: &mut Map<String, Value>| {
            if let Some(Value::Object(named)) = config.get_mut(EXTRA) {
                own.append(named);
                config.shift_remove(EXTRA);
            }
        };
        take_named(&mut config, &mut own);

        // 2. the older map over it
        for (name, mut value) in map {
            match &mut value {
                Value::Object(token) if name != EXTRA => {
                    token.insert("special".into(), true.into());
                    token.insert("__type".into(), "AddedToken".into());
                }
                Value::Array(more) if name == EXTRA => {
                    for token in more.iter_mut().filter_map(Value::as_object_mut) {
                        token.insert("special".into(), true.into());
                    }
                    let mut all = config.get(EXTRA).and_then(Value::as_array).cloned().unwrap_or_default();
                    more.retain(|token| !all.contains(token));
                    all.append(more);
                    *more = all;
                }
                _ => {}
            }
            config.insert(name, value);
        }
        take_named(&mut config, &mut own);

        // 3. tokens with names
        let mut tokens = Self::default();
        let mut named = |name: &str, value: &Value| {
            if !value.is_null() {
                tokens.named.push((name.to_owned(), token(value).with_context(|| place(name))?));
            }
            anyhow::Ok(())
        };
        for name in NAMES {
            named(name, own.get(name).or(config.get(name)).unwrap_or(&Value::Null))?;
        }
        let is_token = |value: &Value| value.is_string() || value["__type"] == "AddedToken";
        let others = config.iter().filter(|(name, value)| is_own_name(name) && is_token(value));
        for (name, value) in others.clone() {
            named(name, own.get(name).unwrap_or(value))?;
        }
        let seen: HashSet<&String> = others.map(|(name, _)| name).collect();
        for (name, value) in own.iter().filter(|(name, _)| !NAMES.contains(&name.as_str()) && !seen.contains(name)) {
            named(name, value)?;
        }

        // 4. tokens without
        let (name, extra) = match config.get(EXTRA) {
            None => (OLDER_EXTRA, config.get(OLDER_EXTRA)),
            extra => (EXTRA, extra),
        };
        match extra {
            None | Some(Value::Null) => {}
            Some(Value::Array(list)) => {
                tokens.extra = list.iter().map(token).collect::<Result<_>>().with_context(|| place(name))?;
            }
            Some(_) => bail!("{}: not a list of tokens", place(name)),
        }
        match config.get(DECODER) {
            None | Some(Value::Null) => {}
            Some(Value::Object(list)) => {
                let entry = |(id, value): (&String, &Value)| anyhow::Ok((id.trim().parse()?, listed(value)?));
                let entries =
                    list.iter().map(|pair| entry(pair).with_context(|| format!("{}: {}", place(DECODER), pair.0)));
                tokens.decoder = Some(entries.collect::<Result<_>>()?);
            }
            Some(_) => bail!("{}: not an object of tokens by their ids", place(DECODER)),
        }
        let is_special = |content: &str| {
            tokens.named.iter().any(|(name, token)| NAMES.contains(&name.as_str()) && token.content == content)
                || (name == EXTRA && tokens.extra.iter().any(|token| token.content == content))
        };
        for (content, id) in added {
            let wrong = || format!("{}: {content:?} has no whole number as its id", files.locate(ADDED).display());
            let token = AddedToken::from(content.as_str(), is_special(content));
            tokens.older.push((id.as_i64().with_context(wrong)?, token));
        }
        Ok(tokens)
    }

    /// The token with this name.
    pub fn named(&self, name: &str) -> Option<&str> {
        self.named.iter().find(|(given, _)| given == name).map(|(_, token)| token.content.as_str())
    }

    /// All names and their tokens, as templates get them.
    pub fn names(&self) -> Map<String, Value> {
        self.named.iter().map(|(name, token)| (name.clone(), token.content.clone().into())).collect()
    }

    /// The tokens to add, in this order, to a tokenizer whose file lists `own`: those that it lacks, and those whose properties differ. Their ids are those of the
    /// vocabulary, or the next free ones. Ids in the files only define the order.
    pub fn missing_from(&self, own: &[Listed]) -> Vec<AddedToken> {
        // 1. listed tokens that the file lacks, or has with other properties
        let of_file: HashMap<&str, &AddedToken> = own.iter().map(|l| (l.token.content.as_str(), &l.token)).collect();
        let listed: BTreeMap<i64, &AddedToken> = match &self.decoder {
            Some(decoder) => decoder.iter().map(|(id, token)| (*id, token)).collect(),
            None => {
                let older = self.older.iter().map(|(id, token)| (*id, token));
                older.chain(own.iter().map(|l| (l.id, &l.token))).collect()
            }
        };
        let differs = |token: &&AddedToken| of_file.get(token.content.as_str()) != Some(token);
        let mut more: Vec<AddedToken> = listed.into_values().filter(differs).cloned().collect();

        // 2. special ones that are in neither
        let there: HashSet<String> =
            of_file.keys().map(|t| (*t).to_owned()).chain(more.iter().map(|t| t.content.clone())).collect();
        for token in self.named.iter().map(|(_, token)| token).chain(&self.extra) {
            if !there.contains(&token.content) && !more.contains(token) {
                more.push(token.clone());
            }
        }

        // 3. a name makes a token special
        let names: HashSet<&str> = self.named.iter().map(|(_, token)| token.content.as_str()).collect();
        for token in &mut more {
            token.special |= names.contains(token.content.as_str());
        }
        more
    }
}

/// Whether a key of the configuration is a model's own name for a token.
fn is_own_name(name: &str) -> bool {
    name.ends_with("_token") && !NAMES.contains(&name)
}

fn is_empty(value: &Value) -> bool {
    match value {
        Value::Array(list) => list.is_empty(),
        Value::Object(fields) => fields.is_empty(),
        other => other.is_null(),
    }
}

/// A special token in a configuration: its text, or an object.
fn token(value: &Value) -> Result<AddedToken> {
    match value {
        Value::String(text) => Ok(AddedToken::from(text.as_str(), true)),
        other => listed(other),
    }
}

/// An added token with its properties. Missing ones have the library's defaults.
fn listed(value: &Value) -> Result<AddedToken> {
    let Some(content) = value["content"].as_str() else {
        bail!("not a token, which is a text or an object with its content")
    };
    let is = |property: &str| value[property].as_bool();
    let token = AddedToken::from(content, is("special").unwrap_or(false));
    let normalized = is("normalized").unwrap_or(token.normalized);
    let [single_word, lstrip, rstrip] = ["single_word", "lstrip", "rstrip"].map(|p| is(p).unwrap_or(false));
    Ok(AddedToken { single_word, lstrip, rstrip, normalized, ..token })
}
