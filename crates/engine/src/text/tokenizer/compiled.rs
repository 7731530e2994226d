//! Compiles the vocabulary of a `tokenizer.json`, or reads its image from a cache folder.
//!
//! Byte-pair models are compiled, byte-level ones and those of SentencePiece's kind, if they have no dropout, prefixes or suffixes, and their ids no gaps. The
//! library handles all others, after checks that it does not do itself.

use super::image::{Fallback, Image, Vocabulary};
use anyhow::{Context, Result, bail};
use serde::Deserialize;
use serde::de::{Deserializer, Error, SeqAccess, Visitor};
use serde_json::{Value, json};
use sluice_model::source::TextFiles;
use sluice_store::read_small;
use std::borrow::{Borrow, Cow};
use std::collections::HashMap;
use std::fmt;
use std::fs::DirBuilder;
use std::io::{Read, Seek, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use xxhash_rust::xxh3::{Xxh3Default, xxh3_128};

/// Bytes of a `tokenizer.json`, at most. The largest known ones have an eighth of that. An image is smaller than its file.
const MAX_TOKENIZER: u64 = 256 << 20;
const MAX_IMAGE: u64 = 2 * MAX_TOKENIZER;

/// Where a tokenizer's vocabulary came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// Read by the library: not a plain byte-pair model.
    Library,
    /// Compiled now. `saved`: the image is in the cache for the next time.
    Compiled { saved: bool },
    /// A compiled image from the cache.
    Cached,
}

/// A `tokenizer.json` in its fastest form.
pub(super) enum Compiled {
    Image(Image, Origin),
    /// Not compiled: the file's bytes.
    Json(Vec<u8>),
}

/// Reads the file, or its image in `cache`. If the image is missing or damaged, writes a new one.
///
/// # Errors
/// A file that cannot be read or is not JSON, or whose model contradicts itself. Problems with the cache are no errors.
pub(super) fn open(files: &dyn TextFiles, name: &str, cache: Option<&Path>) -> Result<Compiled> {
    let cached = |cache: &Path, source| {
        let bytes = read_small(&image_path(cache, source), MAX_IMAGE).ok()?;
        Some(Compiled::Image(Image::open(bytes, source).ok()?, Origin::Cached))
    };
    // 1. an image of a text that need not be made
    let known = files.fingerprint(name);
    if let (Some(cache), Some(source)) = (cache, known)
        && let Some(image) = cached(cache, source)
    {
        return Ok(image);
    }

    // 2. an image of this very file
    let mut file = files.open(name, MAX_TOKENIZER)?;
    if let (Some(cache), None) = (cache, known) {
        let source = hash((&mut file).take(MAX_TOKENIZER))?;
        if let Some(image) = cached(cache, source) {
            return Ok(image);
        }
        file.rewind()?;
    }

    // 3. the file itself
    let mut bytes = Vec::new();
    file.take(MAX_TOKENIZER).read_to_end(&mut bytes)?;
    let source = known.unwrap_or_else(|| xxh3_128(&bytes));
    Ok(match compile(&bytes, source)? {
        Some(image) => {
            let saved = cache.is_some_and(|cache| save(cache, source, image.bytes()).is_ok());
            Compiled::Image(image, Origin::Compiled { saved })
        }
        None => Compiled::Json(bytes),
    })
}

/// The same for the text of a file.
pub(super) fn parse(json: &[u8]) -> Result<Compiled> {
    Ok(match compile(json, xxh3_128(json))? {
        Some(image) => Compiled::Image(image, Origin::Compiled { saved: false }),
        None => Compiled::Json(json.to_vec()),
    })
}

/// XXH3-128 of a file, without a copy of it in memory.
fn hash(mut file: impl Read) -> Result<u128> {
    let mut state = Xxh3Default::new();
    let mut buffer = vec![0; 256 << 10];
    loop {
        match file.read(&mut buffer) {
            Ok(0) => return Ok(state.digest128()),
            Ok(n) => state.update(&buffer[..n]),
            Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e.into()),
        }
    }
}

fn image_path(cache: &Path, source: u128) -> PathBuf {
    cache.join(format!("{source:032x}.tok"))
}

/// Puts the image in place in one step, so that nobody ever reads half of it.
fn save(cache: &Path, source: u128, image: &[u8]) -> Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(cache)?;
    // A temporary file is made with mode 0600.
    let mut file = tempfile::NamedTempFile::new_in(cache)?;
    file.write_all(image)?;
    file.persist(image_path(cache, source))?;
    Ok(())
}

/// `tokenizer.json` with a byte-pair model.
#[derive(Deserialize)]
struct TokenizerJson<'a> {
    #[serde(default)]
    added_tokens: Value,
    #[serde(default)]
    normalizer: Value,
    #[serde(default)]
    pre_tokenizer: Value,
    #[serde(default)]
    post_processor: Value,
    #[serde(default)]
    decoder: Value,
    #[serde(borrow)]
    model: BpeJson<'a>,
}

#[derive(Deserialize)]
struct BpeJson<'a> {
    #[serde(rename = "type")]
    kind: String,
    dropout: Option<f32>,
    unk_token: Option<String>,
    continuing_subword_prefix: Option<String>,
    end_of_word_suffix: Option<String>,
    byte_fallback: Option<bool>,
    fuse_unk: Option<bool>,
    ignore_merges: Option<bool>,
    #[serde(borrow)]
    vocab: HashMap<Text<'a>, u32>,
    #[serde(borrow)]
    merges: Vec<Merge<'a>>,
}

/// A string, borrowed from the file where it has no escapes: there are a million of them.
#[derive(PartialEq, Eq, Hash)]
struct Text<'a>(Cow<'a, str>);

impl Borrow<str> for Text<'_> {
    fn borrow(&self) -> &str {
        &self.0
    }
}

impl<'de: 'a, 'a> Deserialize<'de> for Text<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Either;
        impl<'de> Visitor<'de> for Either {
            type Value = Text<'de>;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("a string")
            }

            fn visit_borrowed_str<E: Error>(self, text: &'de str) -> Result<Text<'de>, E> {
                Ok(Text(Cow::Borrowed(text)))
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<Text<'de>, E> {
                Ok(Text(Cow::Owned(text.to_owned())))
            }
        }
        deserializer.deserialize_str(Either)
    }
}

/// `["a", "b"]`, or `"a b"` in older files.
enum Merge<'a> {
    Pair(Cow<'a, str>, Cow<'a, str>),
    /// `#version: 0.2`, the first line of the files that those were made from.
    Comment,
}

impl<'de: 'a, 'a> Deserialize<'de> for Merge<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Either;
        impl<'de> Visitor<'de> for Either {
            type Value = Merge<'de>;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("a merge: two tokens")
            }

            fn visit_str<E: Error>(self, line: &str) -> Result<Merge<'de>, E> {
                match line.split_once(' ') {
                    _ if line.starts_with("#version") => Ok(Merge::Comment),
                    Some((a, b)) if !b.contains(' ') => Ok(Merge::Pair(a.to_owned().into(), b.to_owned().into())),
                    _ => Err(E::custom(format!("a merge is two tokens, found {line:?}"))),
                }
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut pair: A) -> Result<Merge<'de>, A::Error> {
                let mut next = |n: usize| {
                    let text = pair.next_element::<Text<'de>>()?;
                    text.map(|text| text.0).ok_or_else(|| A::Error::invalid_length(n, &"two tokens"))
                };
                Ok(Merge::Pair(next(0)?, next(1)?))
            }
        }
        deserializer.deserialize_any(Either)
    }
}

/// `None` where the model is not one that we compile.
fn compile(bytes: &[u8], source: u128) -> Result<Option<Image>> {
    // A model of another kind has other fields: the library says what is wrong with it, if anything is.
    let Ok(file) = serde_json::from_slice::<TokenizerJson>(bytes) else { return Ok(None) };
    let TokenizerJson { added_tokens, normalizer, pre_tokenizer, post_processor, decoder, model } = file;
    if model.kind != "BPE" {
        return Ok(None);
    }
    let merges: Vec<(Cow<str>, Cow<str>)> = model
        .merges
        .into_iter()
        .filter_map(|merge| match merge {
            Merge::Pair(a, b) => Some((a, b)),
            Merge::Comment => None,
        })
        .collect();

    // 1. is it one that we compile?
    let prefix = model.continuing_subword_prefix.unwrap_or_default();
    let mut tokens = vec![None; model.vocab.len()];
    for (text, id) in &model.vocab {
        if let Some(token) = tokens.get_mut(*id as usize) {
            *token = Some(&*text.0);
        }
    }
    let dense: Option<Vec<&str>> = tokens.into_iter().collect();
    let unknown = model.unk_token.as_ref().map(|token| model.vocab.get(token.as_str()).copied());
    let plain = model.dropout.is_none_or(|p| p == 0.0)
        && prefix.is_empty()
        && model.end_of_word_suffix.is_none_or(|suffix| suffix.is_empty())
        // An unknown token that is not there is an error of the library's, when a text needs it.
        && unknown != Some(None);
    let (true, Some(tokens)) = (plain, dense) else {
        // The library takes for granted that the prefix is there to be cut off, and that a merged token is no longer than the longest one.
        for (a, b) in &merges {
            let both = b.get(prefix.len()..).map(|b| format!("{a}{b}"));
            if !both.is_some_and(|both| model.vocab.contains_key(both.as_str())) {
                bail!("the merge of {a:?} and {b:?} gives no token of the vocabulary");
            }
        }
        return Ok(None);
    };

    // 2. the image, with the rest of the file in it
    let added_tokens = if added_tokens.is_null() { json!([]) } else { added_tokens };
    let rest = json!({
        "added_tokens": added_tokens, "normalizer": normalizer, "pre_tokenizer": pre_tokenizer,
        "post_processor": post_processor, "decoder": decoder,
    })
    .to_string();
    let fallback = Fallback {
        to_bytes: model.byte_fallback == Some(true),
        unknown: unknown.flatten(),
        fuse: model.fuse_unk == Some(true),
    };
    let ignore_merges = model.ignore_merges == Some(true);
    let vocabulary = Vocabulary { tokens, merges: &merges, ignore_merges, fallback, rest: &rest };
    Image::compile(&vocabulary, source).map(Some).context("model")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    fn demo() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/demo/tokenizer.json")
    }

    fn open_file(path: &Path, cache: Option<&Path>) -> Result<Compiled> {
        open(&path.parent().unwrap(), path.file_name().unwrap().to_str().unwrap(), cache)
    }

    fn origin(path: &Path, cache: Option<&Path>) -> Origin {
        match open_file(path, cache).unwrap() {
            Compiled::Image(_, origin) => origin,
            Compiled::Json(_) => Origin::Library,
        }
    }

    /// A file with this model and nothing else.
    fn model(fields: &str) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().unwrap();
        let text = format!("{{\"model\": {{\"type\": \"BPE\", {fields}}}}}");
        fs::write(file.path(), text).unwrap();
        file
    }

    #[test]
    fn image_is_kept_privately_and_used_again() {
        let dir = tempfile::tempdir().unwrap();
        let cache = dir.path().join("sluice/tokenizers");
        assert_eq!(origin(&demo(), None), Origin::Compiled { saved: false });
        assert_eq!(origin(&demo(), Some(&cache)), Origin::Compiled { saved: true });
        assert_eq!(origin(&demo(), Some(&cache)), Origin::Cached);
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        let files: Vec<_> = fs::read_dir(&cache).unwrap().map(|f| f.unwrap().path()).collect();
        assert_eq!((files.len(), mode(&files[0]), mode(&cache)), (1, 0o600, 0o700));
    }

    #[test]
    fn damaged_images_and_a_cache_that_cannot_be_written_are_no_trouble() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(origin(&demo(), Some(dir.path())), Origin::Compiled { saved: true });
        let image = fs::read_dir(dir.path()).unwrap().next().unwrap().unwrap().path();
        let good = fs::read(&image).unwrap();
        for bad in [&good[..good.len() / 2], &b"x"[..], &[0; 4096]] {
            fs::write(&image, bad).unwrap();
            assert_eq!(origin(&demo(), Some(dir.path())), Origin::Compiled { saved: true });
            assert!(fs::read(&image).unwrap() == good);
        }
        assert_eq!(origin(&demo(), Some(&image)), Origin::Compiled { saved: false });
    }

    #[test]
    fn models_with_rules_of_their_own_are_the_librarys() {
        let plain = r##""vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["#version: 0.2", "a b"]"##;
        assert_eq!(origin(model(plain).path(), None), Origin::Compiled { saved: false });
        for option in [r#""unk_token": "a""#, r#""byte_fallback": true"#, r#""unk_token": "a", "fuse_unk": true"#] {
            let compiled = Origin::Compiled { saved: false };
            assert_eq!(origin(model(&format!("{option}, {plain}")).path(), None), compiled, "{option}");
        }
        for option in [r#""dropout": 0.1"#, r#""unk_token": "x""#, r#""end_of_word_suffix": "</w>""#] {
            assert_eq!(origin(model(&format!("{option}, {plain}")).path(), None), Origin::Library, "{option}");
        }
        let gap = r#""vocab": {"a": 0, "b": 1, "ab": 3}, "merges": [["a", "b"]]"#;
        assert_eq!(origin(model(gap).path(), None), Origin::Library);
    }

    #[test]
    fn merges_that_the_library_would_panic_at_are_errors() {
        for fields in [
            r#""vocab": {"a": 0, "b": 1}, "merges": [["a", "b"]]"#,
            r###""continuing_subword_prefix": "##", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]"###,
            r#""unk_token": "a", "vocab": {"aaa": 0, "a": 1}, "merges": [["aaa", "aaa"]]"#,
        ] {
            assert!(open_file(model(fields).path(), None).is_err(), "{fields}");
        }
    }
}
