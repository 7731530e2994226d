//! The checkpoint's tokenizer: `tokenizer.json`, as the Hugging Face library reads it.
//!
//! Normaliser, pre-tokeniser, added tokens, post-processor and decoder are the library's. Truncation and padding are left out, as the Python stack does for
//! chats. The vocabulary of a plain byte-pair model, which is nearly all of the file, is compiled into an image ([`image`]) that a cache folder keeps. Other
//! models are the library's.

mod bpe;
mod bytes;
mod compiled;
mod image;
pub(in crate::text) mod special;

use super::guard::guarded;
use super::prompt::Prompt;
use anyhow::{Context, Result, anyhow, ensure};
use bpe::Bpe;
use compiled::Compiled;
pub use compiled::Origin;
use serde::Deserialize;
use serde_json::Value;
use sluice_model::source::TextFiles;
use special::{Listed, SpecialTokens};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use tokenizers::models::bpe::BpeTrainer;
use tokenizers::{
    AddedToken, DecoderWrapper, Encoding, Model, ModelWrapper, Normalizer, NormalizerWrapper, OffsetType,
    PostProcessorWrapper, PreTokenizedString, PreTokenizer, PreTokenizerWrapper, Token, TokenizerBuilder,
    TokenizerImpl,
};

type Library = TokenizerImpl<AnyModel, NormalizerWrapper, PreTokenizerWrapper, PostProcessorWrapper, DecoderWrapper>;

/// Text to token ids and back.
///
/// ```
/// use sluice_engine::text::Tokenizer;
/// # let folder = std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/demo"));
///
/// let tokenizer = Tokenizer::load(folder, None)?;
/// let ids = tokenizer.encode("<|im_start|>user\nHello<|im_end|>", false)?;
/// assert_eq!(tokenizer.decode(&ids, true)?, "user\nHello");
/// // Without control tokens, whatever the text spells:
/// let plain = tokenizer.encode_plain("<|im_end|>")?;
/// assert!(plain.iter().all(|id| !tokenizer.is_special(*id)));
/// # anyhow::Ok(())
/// ```
pub struct Tokenizer {
    library: Library,
    vocab_size: usize,
    /// Whether the decoder is the byte-level one: then a token is a run of bytes, whatever its neighbours are.
    byte_level: bool,
    /// Names of control tokens, sorted.
    control: Vec<String>,
    origin: Origin,
    /// Its path, for messages.
    file: PathBuf,
    /// A token of text and what it is alone, where decoders look at neighbours; found when it is needed.
    anchor: OnceLock<Option<(u32, String)>>,
}

/// Into how many bytes the rules of a `tokenizer.json` may turn one byte of text, one rule after the other. Rules in use reach 3.
const MAX_GROWTH: u64 = 4096;

/// The file with a tokenizer, as the library writes it.
const FILE: &str = "tokenizer.json";

const LIBRARY: &str = "the tokenizers library";

/// The rest of the library's pipeline, for normalised text that is split at its added tokens.
fn encode_pieces(library: &Library, mut pieces: PreTokenizedString) -> tokenizers::Result<Encoding> {
    if let Some(pre_tokenizer) = library.get_pre_tokenizer() {
        pre_tokenizer.pre_tokenize(&mut pieces)?;
    }
    pieces.tokenize(|piece| library.get_model().tokenize(piece.get()))?;
    pieces.into_encoding(None, 0, OffsetType::None)
}

impl Tokenizer {
    /// Reads `tokenizer.json`, and what the files beside it say of added tokens. `cache` is a folder for compiled images, made if need be (0700); without one nothing is
    /// written. An image that is damaged, or of another version, is compiled again.
    ///
    /// # Errors
    /// A missing or broken file. The message names it, and the place in it.
    pub fn load(files: impl TextFiles, cache: Option<&Path>) -> Result<Self> {
        let path = files.locate(FILE);
        let special = SpecialTokens::load(&files)?;
        guarded(LIBRARY, || Self::open(&path, compiled::open(&files, FILE, cache)?, &special)).map_err(|e| {
            // What the store says names the file.
            if e.is::<sluice_store::Error>() { e } else { e.context(path.display().to_string()) }
        })
    }

    /// Reads the text of a `tokenizer.json`.
    ///
    /// # Errors
    /// Those of [`Tokenizer::load`], without a path.
    pub fn parse(json: &[u8]) -> Result<Self> {
        let nothing = SpecialTokens::default();
        guarded(LIBRARY, || Self::open(Path::new(FILE), compiled::parse(json)?, &nothing))
    }

    fn open(path: &Path, found: Compiled, special: &SpecialTokens) -> Result<Self> {
        match found {
            Compiled::Image(image, origin) => {
                let parts = Parts::read(image.rest())?;
                Self::build(path, parts, special, AnyModel::Image(Bpe::new(image)), origin)
            }
            Compiled::Json(bytes) => {
                #[derive(Deserialize)]
                struct File {
                    model: ModelWrapper,
                }
                let file: File = serde_json::from_slice(&bytes)?;
                let model = AnyModel::Library(file.model);
                Self::build(path, Parts::read(&bytes)?, special, model, Origin::Library)
            }
        }
    }

    fn build(path: &Path, parts: Parts, special: &SpecialTokens, model: AnyModel, origin: Origin) -> Result<Self> {
        let byte_level = matches!(parts.decoder, Some(DecoderWrapper::ByteLevel(_)));
        let mut library: Library = TokenizerBuilder::new()
            .with_model(model)
            .with_normalizer(parts.normalizer)
            .with_pre_tokenizer(parts.pre_tokenizer)
            .with_post_processor(parts.post_processor)
            .with_decoder(parts.decoder)
            .build()
            .map_err(|e| anyhow!(e))?;
        let missing = special.missing_from(&parts.added_tokens);
        library.add_tokens(parts.added_tokens.into_iter().map(|listed| listed.token)).map_err(|e| anyhow!(e))?;
        if !missing.is_empty() {
            library.add_tokens(missing).map_err(|e| anyhow!(e))?;
        }
        let added = library.get_added_vocabulary();
        let is_control = |t: &&AddedToken| {
            let is_written = |begin: &str, end: &str| t.content.starts_with(begin) && t.content.ends_with(end);
            // DeepSeek's are written with a wider sign.
            added.is_special_token(&t.content)
                || is_written("<|", "|>")
                || is_written("<｜", "｜>")
                || is_written("｜", "｜")
        };
        let mut control: Vec<String> =
            added.get_added_tokens_decoder().values().filter(is_control).map(|t| t.content.clone()).collect();
        control.sort_unstable();
        let vocab_size = library.get_vocab_size(true);
        let (file, anchor) = (path.to_owned(), OnceLock::new());
        Ok(Self { library, vocab_size, byte_level, control, origin, file, anchor })
    }

    /// Where the vocabulary came from.
    pub fn origin(&self) -> Origin {
        self.origin
    }

    /// The ids of `text`. Special and added tokens in it become their ids, as in the Python stack: templates rely on it. `add_special` lets the post-processor
    /// add its own, for example a beginning-of-sequence token. A rendered template has them already.
    ///
    /// # Errors
    /// What the library cannot encode.
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>> {
        self.with_library(|library| Ok(library.encode_fast(text, add_special)?.get_ids().to_vec()))
    }

    /// The ids of a prompt. Control tokens that messages spell stay text. Everything else is as in [`encode`](Self::encode).
    ///
    /// # Errors
    /// Those of [`Tokenizer::encode`].
    pub fn encode_prompt(&self, prompt: &Prompt, add_special: bool) -> Result<Vec<u32>> {
        if prompt.is_plain() {
            return self.encode(prompt.text(), add_special);
        }
        let (text, stand_ins) = prompt.disguised(&self.control)?;
        self.with_library(|library| {
            let vocabulary = library.get_added_vocabulary();
            let mut pieces = vocabulary.extract_and_normalize(library.get_normalizer(), &text);
            pieces.normalize(|piece| {
                piece.map(|c| stand_ins.original(c));
                Ok(())
            })?;
            let encoding = encode_pieces(library, pieces)?;
            Ok(library.post_process(encoding, None, add_special)?.get_ids().to_vec())
        })
    }

    /// Names of control tokens, which steer the model and are no text: `<|im_end|>` and the like.
    pub fn control_tokens(&self) -> &[String] {
        &self.control
    }

    /// The ids of `text` without special or added tokens: a `<|im_end|>` that a user types stays plain text.
    ///
    /// # Errors
    /// Those of [`Tokenizer::encode`].
    pub fn encode_plain(&self, text: &str) -> Result<Vec<u32>> {
        self.with_library(|library| {
            let mut pieces = PreTokenizedString::from(text);
            if let Some(normalizer) = library.get_normalizer() {
                pieces.normalize(|piece| normalizer.normalize(piece))?;
            }
            Ok(encode_pieces(library, pieces)?.get_ids().to_vec())
        })
    }

    /// Calls the library. Its errors and panics become errors that name the file.
    fn with_library<T>(&self, call: impl FnOnce(&Library) -> tokenizers::Result<T>) -> Result<T> {
        guarded(LIBRARY, || call(&self.library).map_err(|e| anyhow!(e)))
            .with_context(|| self.file.display().to_string())
    }

    /// The text of `ids`, with or without special tokens. Unknown ids are left out, and invalid UTF-8 becomes U+FFFD.
    ///
    /// # Errors
    /// When the decoder fails.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String> {
        self.with_library(|library| library.decode(ids, skip_special))
    }

    /// The token `id` as the vocabulary writes it (byte-level characters, not text).
    pub fn token(&self, id: u32) -> Option<String> {
        self.library.id_to_token(id)
    }

    /// The id of a token written as in the vocabulary, or of a special token.
    pub fn id(&self, token: &str) -> Option<u32> {
        self.library.token_to_id(token)
    }

    /// Number of tokens, added ones included. A model's embedding may have more rows than this.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// The first token that another tokenizer has with the same id and that is not this one's: (id, here, there). Ids that only one of them has do not count.
    pub fn difference(&self, other: &Tokenizer) -> Option<(u32, String, String)> {
        let ids = self.vocab_size.max(other.vocab_size) as u32;
        (0..ids).find_map(|id| {
            let (here, there) = (self.token(id)?, other.token(id)?);
            (here != there).then_some((id, here, there))
        })
    }

    /// Whether `id` is a special token, one that `skip_special` leaves out.
    pub fn is_special(&self, id: u32) -> bool {
        self.token(id).is_some_and(|token| self.library.get_added_vocabulary().is_special_token(&token))
    }

    /// Whether `id` is a control token.
    pub(crate) fn is_control(&self, id: u32) -> bool {
        self.token(id).is_some_and(|token| {
            self.control.binary_search(&token).is_ok() || self.library.get_added_vocabulary().is_special_token(&token)
        })
    }

    /// Whether a token is always the same run of bytes, whatever its neighbours are.
    pub fn is_byte_level(&self) -> bool {
        self.byte_level
    }
}

/// `tokenizer.json` without its model, and without the parts that are not used.
#[derive(Deserialize)]
struct Parts {
    #[serde(default)]
    added_tokens: Vec<Listed>,
    normalizer: Option<NormalizerWrapper>,
    pre_tokenizer: Option<PreTokenizerWrapper>,
    post_processor: Option<PostProcessorWrapper>,
    decoder: Option<DecoderWrapper>,
}

impl Parts {
    fn read(json: &[u8]) -> Result<Parts> {
        #[derive(Deserialize)]
        struct Rules {
            #[serde(default)]
            normalizer: Value,
            #[serde(default)]
            decoder: Value,
        }
        let Rules { normalizer, decoder } = serde_json::from_slice(json)?;
        for (name, rule) in [("normalizer", normalizer), ("decoder", decoder)] {
            let growth = growth(&rule);
            ensure!(
                growth <= MAX_GROWTH,
                "{name}: makes up to {growth} bytes of one, {MAX_GROWTH} at most are accepted"
            );
        }
        Ok(serde_json::from_slice(json)?)
    }
}

/// Into how many bytes a normaliser or decoder, with those inside it, may turn one byte, not counting Unicode's own forms. Replacements in a row multiply.
fn growth(rule: &Value) -> u64 {
    match rule {
        Value::Array(list) => list.iter().fold(1, |n, inner| n.saturating_mul(growth(inner))),
        Value::Object(fields) if fields.get("type").and_then(Value::as_str) == Some("Replace") => {
            let length = |text: &Value| text.as_str().map_or(0, str::len) as u64;
            // An expression may match a single byte, or the empty text before each.
            let found = length(&rule["pattern"]["String"]).max(1);
            (length(&rule["content"]) + 1).div_ceil(found).max(1)
        }
        Value::Object(fields) => fields.values().fold(1, |n, inner| n.saturating_mul(growth(inner))),
        _ => 1,
    }
}

/// The model of the library's pipeline: a compiled one, or the library's.
enum AnyModel {
    Image(Bpe),
    Library(ModelWrapper),
}

impl Model for AnyModel {
    type Trainer = BpeTrainer;

    fn tokenize(&self, word: &str) -> tokenizers::Result<Vec<Token>> {
        match self {
            Self::Image(bpe) => bpe.tokenize(word),
            Self::Library(model) => model.tokenize(word),
        }
    }

    fn token_to_id(&self, token: &str) -> Option<u32> {
        match self {
            Self::Image(bpe) => bpe.token_to_id(token),
            Self::Library(model) => model.token_to_id(token),
        }
    }

    fn id_to_token(&self, id: u32) -> Option<String> {
        match self {
            Self::Image(bpe) => bpe.id_to_token(id),
            Self::Library(model) => model.id_to_token(id),
        }
    }

    fn get_vocab_size(&self) -> usize {
        match self {
            Self::Image(bpe) => bpe.vocab_size(),
            Self::Library(model) => model.get_vocab_size(),
        }
    }

    // The rest of the trait is for training.

    fn get_vocab(&self) -> HashMap<String, u32> {
        HashMap::new()
    }

    fn save(&self, _: &Path, _: Option<&str>) -> tokenizers::Result<Vec<PathBuf>> {
        Err("a tokenizer that runs is not saved".into())
    }

    fn get_trainer(&self) -> BpeTrainer {
        BpeTrainer::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn demo() -> Tokenizer {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/demo");
        Tokenizer::load(&folder, None).unwrap()
    }

    #[test]
    fn special_tokens_are_parsed_in_encode_and_not_in_encode_plain() {
        let tokenizer = demo();
        let text = "<|im_start|>user\nHi<|im_end|>";
        let ids = tokenizer.encode(text, false).unwrap();
        assert_eq!((ids[0], *ids.last().unwrap()), (1, 2));
        assert_eq!(tokenizer.decode(&ids, false).unwrap(), text);
        assert_eq!(tokenizer.decode(&ids, true).unwrap(), "user\nHi");
        let plain = tokenizer.encode_plain(text).unwrap();
        assert!(plain.iter().all(|id| !tokenizer.is_special(*id)));
        assert_eq!(tokenizer.decode(&plain, false).unwrap(), text);
    }

    /// A tokenizer of two tokens with these further fields.
    fn with(fields: &str) -> Result<Tokenizer> {
        Tokenizer::parse(
            format!(r#"{{"model": {{"type": "BPE", "vocab": {{"a": 0, "b": 1}}, "merges": []}}, {fields}}}"#)
                .as_bytes(),
        )
    }

    #[test]
    fn what_the_library_panics_at_is_an_error_that_names_the_file() {
        for fields in [
            r#""normalizer": {"type": "Replace", "pattern": {"String": ""}, "content": "b"}"#,
            r#""normalizer": {"type": "Replace", "pattern": {"Regex": "x*"}, "content": "b"}"#,
        ] {
            let tokenizer = with(fields).unwrap();
            for text in ["ab", "aéb", ""] {
                for result in [tokenizer.encode(text, false), tokenizer.encode_plain(text)] {
                    if let Err(e) = result {
                        let error = format!("{e:#}");
                        assert!(error.starts_with("tokenizer.json: the tokenizers library cannot"), "{error}");
                    }
                }
            }
        }
    }

    #[test]
    fn rules_that_blow_texts_up_are_refused() {
        let replace =
            |n| format!(r#"{{"type": "Replace", "pattern": {{"String": "a"}}, "content": "{}"}}"#, "a".repeat(n));
        let sequence =
            |n: usize| format!(r#"{{"type": "Sequence", "normalizers": [{}]}}"#, vec![replace(100); n].join(", "));
        with(&format!(r#""normalizer": {}"#, sequence(1))).unwrap();
        for fields in [format!(r#""normalizer": {}"#, sequence(2)), format!(r#""decoder": {}"#, replace(5000))] {
            let error = with(&fields).err().unwrap().to_string();
            assert!(error.contains("bytes of one"), "{error}");
        }
    }

    #[test]
    fn tokens_that_are_part_of_a_character_have_its_bytes() {
        let tokenizer = demo();
        let text = "naïve 日本 👩‍🚀 <|im_end|>";
        let ids = tokenizer.encode(text, false).unwrap();
        let is_part = |id: &u32| std::str::from_utf8(&tokenizer.raw_bytes(*id)).is_err();
        assert!(ids.iter().any(is_part), "no token is a part of a character");
        let bytes: Vec<u8> = ids.iter().flat_map(|id| tokenizer.raw_bytes(*id)).collect();
        assert_eq!(bytes, text.as_bytes());
        assert_eq!(tokenizer.raw_bytes(u32::MAX), b"");

        // As SentencePiece has it, and the same names without a decoder for them.
        let pieces = |decoder: &str| {
            let json = format!(
                r#"{{"decoder": {decoder}, "model": {{"type": "BPE", "byte_fallback": true, "merges": [],
                    "vocab": {{"<0xC3>": 0, "<0xA9>": 1, "é": 2, "<0x4>": 3, "<0xG0>": 4, "<0x41>": 5}}}}}}"#
            );
            let tokenizer = Tokenizer::parse(json.as_bytes()).unwrap();
            (0..6).map(|id| tokenizer.raw_bytes(id)).collect::<Vec<_>>()
        };
        let fallback = r#"{"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]}"#;
        let expected: [&[u8]; 6] = [&[0xC3], &[0xA9], "é".as_bytes(), b"<0x4>", b"<0xG0>", b"A"];
        assert_eq!(pieces(fallback), expected);
        // A space before the first word is cut off a text, but belongs to the token.
        let stripped = r#"{"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"}, {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]}"#;
        let json = format!(
            r#"{{"decoder": {stripped}, "model": {{"type": "BPE", "byte_fallback": true, "merges": [],
                "vocab": {{"<0xC3>": 0, "▁": 1, "▁the": 2, "a": 3}}}}}}"#
        );
        let tokenizer = Tokenizer::parse(json.as_bytes()).unwrap();
        assert_eq!(tokenizer.decode(&[2, 2], false).unwrap(), "the the");
        assert_eq!([0, 1, 2, 3].map(|id| tokenizer.raw_bytes(id)), [&[0xC3][..], b" ", b" the", b"a"]);

        let names: [&[u8]; 6] = [b"<0xC3>", b"<0xA9>", "é".as_bytes(), b"<0x4>", b"<0xG0>", b"<0x41>"];
        assert_eq!(pieces(r#"{"type": "Fuse"}"#), names);
    }

    #[test]
    fn tokens_have_names() {
        let tokenizer = demo();
        assert_eq!(tokenizer.vocab_size(), 16384);
        assert_eq!(tokenizer.id("<|im_end|>"), Some(2));
        assert_eq!(tokenizer.token(2).as_deref(), Some("<|im_end|>"));
        assert_eq!((tokenizer.token(16384), tokenizer.id("no such token")), (None, None));
    }

    #[test]
    fn missing_and_broken_files_are_named() {
        let dir = tempfile::tempdir().unwrap();
        let error = format!("{:#}", Tokenizer::load(dir.path(), None).err().unwrap());
        assert!(error.contains("tokenizer.json") && error.contains("No such file"), "{error}");
        fs::write(dir.path().join("tokenizer.json"), "{\n\"model\": oops}").unwrap();
        let error = format!("{:#}", Tokenizer::load(dir.path(), None).err().unwrap());
        assert!(error.contains("tokenizer.json") && error.contains("line 2"), "{error}");
        fs::write(dir.path().join("tokenizer.json"), "{}").unwrap();
        let error = format!("{:#}", Tokenizer::load(dir.path(), None).err().unwrap());
        assert!(error.contains("missing field `model`"), "{error}");
    }
}
