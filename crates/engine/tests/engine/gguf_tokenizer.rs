//! Tokenizers made of GGUF metadata: they give the ids of the models' own tokenizers, and what is wrong with metadata is said by key.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use serde_json::Value as Json;
use sluice_engine::text::{ModelText, Origin, Tokenizer};
use sluice_model::source::TextFiles;
use sluice_model::source::gguf::tokenizer::{MetadataFiles, tokenizer_json};
use sluice_model::source::gguf::{Array, Header, Metadata, Value};

const TOKENS: &str = "tokenizer.ggml.tokens";
const TYPES: &str = "tokenizer.ggml.token_type";
const SCORES: &str = "tokenizer.ggml.scores";

// Types of tokens.
const NORMAL: i32 = 1;
const UNKNOWN: i32 = 2;
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;
const UNUSED: i32 = 5;
const BYTE: i32 = 6;

fn text(text: &str) -> Value {
    Value::String(text.as_bytes().into())
}

fn strings<'a>(all: impl IntoIterator<Item = &'a str>) -> Value {
    Value::Array(Array::String(all.into_iter().map(str::as_bytes).collect()))
}

fn metadata(entries: impl IntoIterator<Item = (&'static str, Value)>) -> Metadata {
    let mut metadata = Metadata::new(Path::new("small.gguf"));
    for (key, value) in entries {
        metadata.insert(key, value).unwrap();
    }
    metadata
}

/// The same with a key changed, or left out.
fn with(base: &Metadata, key: &str, value: Option<Value>) -> Metadata {
    let mut metadata = Metadata::new(base.path());
    for (known, old) in base.iter().filter(|(known, _)| *known != key) {
        metadata.insert(known, old.clone()).unwrap();
    }
    if let Some(value) = value {
        metadata.insert(key, value).unwrap();
    }
    metadata
}

/// A SentencePiece vocabulary: bytes, characters, a few pieces, and added tokens.
fn pieces(architecture: &str) -> Metadata {
    let mut tokens: Vec<(String, f32, i32)> =
        [("<unk>", UNKNOWN), ("<s>", CONTROL), ("</s>", CONTROL)].map(|(t, kind)| (t.to_owned(), 0.0, kind)).to_vec();
    tokens.extend((0..=255).map(|byte| (format!("<0x{byte:02X}>"), 0.0, BYTE)));
    let pieces = [
        "▁▁",
        "▁▁▁",
        "▁▁▁▁",
        "▁a",
        "ab",
        "▁ab",
        "aa",
        "aaa",
        "aaaa",
        "ba",
        "abab",
        "é▁",
        "日本",
        "▁",
        "a",
        "b",
        "é",
        "日",
        "本",
    ];
    tokens.extend(pieces.iter().zip(0..).map(|(piece, rank)| ((*piece).to_owned(), -(rank as f32), NORMAL)));
    tokens.push(("<tag>".into(), -1000.0, USER_DEFINED));
    tokens.push(("<|im_end|>".into(), -1000.0, CONTROL));
    let padding = tokens.len();
    tokens.extend((padding..padding + 3).map(|id| (format!("[PAD{id}]"), -1000.0, UNUSED)));
    metadata([
        ("general.architecture", text(architecture)),
        ("tokenizer.ggml.model", text("llama")),
        (TOKENS, strings(tokens.iter().map(|(token, ..)| token.as_str()))),
        (SCORES, Value::Array(Array::F32(tokens.iter().map(|(_, score, _)| *score).collect()))),
        (TYPES, Value::Array(Array::I32(tokens.iter().map(|(.., kind)| *kind).collect()))),
    ])
}

/// A byte-level vocabulary: GPT-2's alphabet, a few words, and added tokens.
fn byte_level(pre: &str) -> Metadata {
    let printable = (0x21..=0x7E).chain(0xA1..=0xAC).chain(0xAE..=0xFF).chain(0x100..=0x143);
    let mut tokens: Vec<String> = printable.filter_map(char::from_u32).map(String::from).collect();
    assert_eq!(tokens.len(), 256);
    let merges = ["h e", "l l", "he ll", "hell o", "Ġ w", "1 2", "12 3", "Ã ©"];
    tokens.extend(merges.map(|merge| merge.replace(' ', "")));
    let types = vec![NORMAL; tokens.len()].into_iter().chain([CONTROL, CONTROL, USER_DEFINED]);
    let types = Value::Array(Array::I32(types.collect()));
    tokens.extend(["<|endoftext|>", "<|im_end|>", "<tool>"].map(str::to_owned));
    metadata([
        ("general.architecture", text("llama")),
        ("tokenizer.ggml.model", text("gpt2")),
        ("tokenizer.ggml.pre", text(pre)),
        (TOKENS, strings(tokens.iter().map(String::as_str))),
        (TYPES, types),
        ("tokenizer.ggml.merges", strings(merges)),
        ("tokenizer.ggml.bos_token_id", Value::Unsigned(264)),
        ("tokenizer.ggml.eos_token_id", Value::Unsigned(264)),
    ])
}

fn tokenizer(metadata: &Metadata) -> Tokenizer {
    Tokenizer::load(MetadataFiles(metadata), None).unwrap()
}

fn error(metadata: &Metadata) -> String {
    format!("{:#}", Tokenizer::load(MetadataFiles(metadata), None).err().expect("an error"))
}

fn words(tokenizer: &Tokenizer, text: &str) -> Vec<String> {
    tokenizer.encode(text, false).unwrap().iter().map(|id| tokenizer.token(*id).unwrap()).collect()
}

#[test]
fn pieces_merge_by_score_and_missing_characters_become_bytes() {
    let found = tokenizer(&pieces("llama"));
    assert_eq!(words(&found, "ab aab"), ["▁ab", "▁a", "ab"]);
    assert_eq!(words(&found, "日本x語"), ["▁", "日本", "<0x78>", "<0xE8>", "<0xAA>", "<0x9E>"]);
    // A space before each text between added tokens; none inside of these.
    assert_eq!(words(&found, "a<tag>a</s>"), ["▁a", "<tag>", "▁a", "</s>"]);
    let ids = found.encode("ab é日語", true).unwrap();
    assert_eq!(found.token(ids[0]).unwrap(), "<s>");
    assert_eq!(found.decode(&ids, true).unwrap(), "ab é日語");
    // Padding is no token.
    assert_eq!((found.vocab_size(), found.id("[PAD280]")), (280, None));

    let trimmed = with(&pieces("llama"), "tokenizer.ggml.remove_extra_whitespaces", Some(Value::Bool(true)));
    assert_eq!(words(&tokenizer(&trimmed), "  ab   ab▁▁ "), ["▁ab", "▁ab"]);
    assert_eq!(words(&found, " ab"), ["▁▁", "ab"]);

    let bare = with(&pieces("llama"), "tokenizer.ggml.add_space_prefix", Some(Value::Bool(false)));
    let bare = with(&bare, "tokenizer.ggml.add_bos_token", Some(Value::Bool(false)));
    let found = tokenizer(&bare);
    assert_eq!(words(&found, "ab aab"), ["ab", "▁a", "ab"]);
    assert_eq!(found.encode(" a", true).unwrap(), found.encode(" a", false).unwrap());
    assert_eq!(found.decode(&found.encode(" a", false).unwrap(), false).unwrap(), " a");
}

#[test]
fn ties_are_ordered_as_the_families_own_files_order_them() {
    // Of two ways to make the same piece: by the ids of the halves, or the longer left half first.
    let merges = |architecture: &str| {
        let json: Json = serde_json::from_str(&tokenizer_json(&pieces(architecture)).unwrap()).unwrap();
        let merges = json["model"]["merges"].as_array().unwrap().clone();
        let of = |piece: &str| {
            let of_piece = |m: &&Json| format!("{}{}", m[0].as_str().unwrap(), m[1].as_str().unwrap()) == piece;
            merges.iter().filter(of_piece).map(|m| m[0].as_str().unwrap().to_owned()).collect::<Vec<_>>()
        };
        (of("▁▁▁▁"), of("aaaa"))
    };
    assert_eq!(
        merges("llama"),
        (vec!["▁▁".into(), "▁▁▁".into(), "▁".into()], vec!["aa".into(), "aaa".into(), "a".into()])
    );
    assert_eq!(
        merges("gemma3"),
        (vec!["▁▁▁".into(), "▁▁".into(), "▁".into()], vec!["aaa".into(), "aa".into(), "a".into()])
    );
}

#[test]
fn gemmas_spaces_and_scores_are_its_own_again() {
    // Converters write runs of spaces as spaces, and give added tokens a score of -1000.
    let mut json = tokens_of(&pieces("gemma3"));
    let at = json.iter().position(|(token, ..)| token == "▁▁▁").unwrap();
    json[at] = ("   ".into(), -1000.0, USER_DEFINED);
    let changed = replace_tokens(&pieces("gemma3"), &json);
    let changed = with(&changed, "tokenizer.ggml.add_space_prefix", Some(Value::Bool(false)));
    let found = tokenizer(&changed);
    assert_eq!(found.id("▁▁▁"), Some(at as u32));
    assert_eq!(words(&found, "a   a"), ["a", "▁▁▁", "a"]);
    assert_eq!(found.decode(&found.encode("a   a", false).unwrap(), false).unwrap(), "a   a");
}

fn tokens_of(metadata: &Metadata) -> Vec<(String, f32, i32)> {
    let tokens = metadata.strings(TOKENS).unwrap().unwrap();
    let (scores, types) = (metadata.floats(SCORES).unwrap().unwrap(), metadata.integers(TYPES).unwrap().unwrap());
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    tokens.iter().zip(scores).zip(types).map(|((t, score), kind)| (text(t), score, kind as i32)).collect()
}

fn replace_tokens(metadata: &Metadata, tokens: &[(String, f32, i32)]) -> Metadata {
    let changed = with(metadata, TOKENS, Some(strings(tokens.iter().map(|(token, ..)| token.as_str()))));
    let scores = Value::Array(Array::F32(tokens.iter().map(|(_, score, _)| *score).collect()));
    let changed = with(&changed, SCORES, Some(scores));
    with(&changed, TYPES, Some(Value::Array(Array::I32(tokens.iter().map(|(.., kind)| *kind).collect()))))
}

/// Random texts over characters that a vocabulary has and lacks.
fn random_texts() -> impl Iterator<Item = String> {
    let mut rng = fastrand::Rng::with_seed(3);
    let pieces = ["a", "b", "a", "b", " ", "  ", "é", "日", "本", "語", "\n", "<tag>", "</s>", "▁", "x", "\u{0}"];
    (0..3000).map(move |_| (0..rng.usize(..24)).map(|_| pieces[rng.usize(..pieces.len())]).collect())
}

#[test]
fn compiled_pieces_give_the_librarys_ids() {
    for architecture in ["llama", "gemma3"] {
        let metadata = pieces(architecture);
        // Without the bytes of 語 and of U+0000 the unknown token stands for them.
        let mut fewer = tokens_of(&metadata);
        fewer.retain(|(token, ..)| token != "<0xAA>" && token != "<0x00>");
        for metadata in [replace_tokens(&metadata, &fewer), metadata] {
            let json = tokenizer_json(&metadata).unwrap();
            let library = tokenizers::Tokenizer::from_bytes(&json).unwrap();
            let own = tokenizer(&metadata);
            assert_eq!(own.origin(), Origin::Compiled { saved: false });
            for text in random_texts() {
                let ids = own.encode(&text, true).unwrap();
                assert_eq!(ids, library.encode(text.as_str(), true).unwrap().get_ids(), "{text:?}");
                assert_eq!(own.decode(&ids, false).unwrap(), library.decode(&ids, false).unwrap());
            }
        }
    }
}

#[test]
fn every_known_rule_cuts_text_into_words_and_loses_nothing() {
    let message = error(&byte_level("some-new-model"));
    let what = "key \"tokenizer.ggml.pre\" is \"some-new-model\", a rule that is not known (known are ";
    let (start, known) = message.split_once(what).unwrap_or_else(|| panic!("{message}"));
    assert!(start.starts_with("small.gguf: "), "{message}");
    let known = known.trim_end_matches(')');
    let names: Vec<&str> = known.split(", ").collect();
    assert!(names.len() > 50 && names.contains(&"qwen35") && names.contains(&"llama-bpe"), "{names:?}");
    let text = "hello  world, it's 12345 HELLO\n\n  x\u{301}é 日本語 हिन्दी\t(…) \r\n<tool>hello<|im_end|> end  ";
    for name in names {
        let found = tokenizer(&byte_level(name));
        let ids = found.encode(text, false).unwrap();
        assert_eq!(found.decode(&ids, false).unwrap(), text, "{name}");
        assert!(ids.contains(&found.id("hello").unwrap()) && ids.contains(&266), "{name}");
    }
    // Digits: one by one, or three at most.
    assert_eq!(words(&tokenizer(&byte_level("smollm")), "1234"), ["1", "2", "3", "4"]);
    assert_eq!(words(&tokenizer(&byte_level("llama-bpe")), "1234"), ["123", "4"]);
    assert_eq!(words(&tokenizer(&byte_level("gpt-2")), " world"), ["Ġw", "o", "r", "l", "d"]);
    // Only some compose characters.
    assert_eq!(words(&tokenizer(&byte_level("qwen2")), "e\u{301}"), ["Ã©"]);
    assert_eq!(words(&tokenizer(&byte_level("llama-bpe")), "e\u{301}").len(), 3);
}

#[test]
fn beginnings_are_added_by_default_where_the_family_does() {
    for (pre, begins) in [("llama-bpe", true), ("tekken", true), ("qwen2", false), ("gpt-2", false)] {
        assert_eq!(tokenizer(&byte_level(pre)).encode("x", true).unwrap().len(), 1 + usize::from(begins), "{pre}");
    }
    let both = with(&byte_level("gpt-2"), "tokenizer.ggml.add_bos_token", Some(Value::Bool(true)));
    let both = with(&both, "tokenizer.ggml.add_eos_token", Some(Value::Bool(true)));
    assert_eq!(tokenizer(&both).encode("x", true).unwrap(), [264, 87, 264]);
}

#[test]
fn templates_stop_tokens_and_suggestions_come_from_metadata() {
    let mut base = byte_level("qwen2");
    assert!(ModelText::load(MetadataFiles(&base), None).unwrap().template.is_none());
    base.insert("tokenizer.chat_template", text("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}")).unwrap();
    base.insert("general.sampling.temp", Value::Float(f64::from(0.7f32))).unwrap();
    base.insert("general.sampling.top_k", Value::Signed(20)).unwrap();
    let found = ModelText::load(MetadataFiles(&base), None).unwrap();
    assert_eq!(found.stop_ids, [264, 265]);
    assert_eq!((found.defaults.temperature, found.defaults.top_k), (Some(0.7), Some(20)));
    let hello = serde_json::json!([{"role": "user", "content": "hello"}]);
    let render = |found: &ModelText, tools: Option<&Json>| {
        found.template.as_ref().unwrap().render(&hello, tools, true, &serde_json::Map::new()).unwrap()
    };
    assert_eq!(render(&found, None), "<|endoftext|>hello<|endoftext|>");
    base.insert("tokenizer.chat_template.tool_use", text("tools: {{ tools | length }}")).unwrap();
    base.insert("tokenizer.chat_templates", strings(["tool_use"])).unwrap();
    let found = ModelText::load(MetadataFiles(&base), None).unwrap();
    assert_eq!(render(&found, None), "<|endoftext|>hello<|endoftext|>");
    assert_eq!(render(&found, Some(&serde_json::json!([{}, {}]))), "tools: 2");
    // What is wrong with a template is said by its key.
    let wrong = with(&byte_level("qwen2"), "tokenizer.chat_template", Some(text("{% for %}")));
    let message = format!("{:#}", ModelText::load(MetadataFiles(&wrong), None).err().unwrap());
    assert!(message.starts_with("small.gguf: tokenizer.chat_template: chat template: "), "{message}");
}

#[test]
fn a_file_without_a_vocabulary_has_the_rest_of_its_texts() {
    let mut base = with(&byte_level("qwen2"), "tokenizer.ggml.model", Some(text("no_vocab")));
    base.insert("general.sampling.top_k", Value::Signed(20)).unwrap();
    assert!(!MetadataFiles(&base).has("tokenizer.json"));
    let read =
        |name: &str| -> Json { serde_json::from_slice(&MetadataFiles(&base).read(name, 1 << 20).unwrap()).unwrap() };
    assert_eq!(read("generation_config.json"), serde_json::json!({"top_k": 20}));
    assert_eq!(read("tokenizer_config.json"), serde_json::json!({}));
}

#[test]
fn broken_metadata_is_named_by_file_and_key() {
    let (pieces, bytes) = (pieces("llama"), byte_level("gpt-2"));
    let numbers = |count| Value::Array(Array::I32(vec![1; count]));
    let long = "a".repeat(40_000);
    for (base, key, value, why) in [
        (&bytes, "tokenizer.ggml.model", Some(text("rwkv")), "\"rwkv\", a kind of tokenizer that is not supported"),
        (&bytes, TOKENS, None, "is missing"),
        (&bytes, TOKENS, Some(numbers(3)), "is not an array of strings"),
        (&bytes, TOKENS, Some(strings([])), "has 0 tokens"),
        (&bytes, TOKENS, Some(Value::Array(Array::String([&b"\xFF"[..]].into_iter().collect()))), "no UTF-8: 0"),
        (&bytes, TYPES, Some(numbers(3)), "has 3 entries for 267 tokens"),
        (&bytes, "tokenizer.ggml.merges", None, "is missing"),
        (&bytes, "tokenizer.ggml.merges", Some(strings(["h e", "hello"])), "no two tokens in merge 1: \"hello\""),
        (&bytes, "tokenizer.ggml.add_bos_token", Some(Value::Unsigned(1)), "is not true or false"),
        (&pieces, SCORES, None, "is missing"),
        (&pieces, SCORES, Some(Value::Array(Array::F32(vec![0.0; 4]))), "has 4 entries for 283 tokens"),
        (&pieces, "tokenizer.ggml.precompiled_charsmap", Some(Value::Array(Array::U8(vec![9; 9]))), "no compiled map"),
    ] {
        let message = error(&with(base, key, value));
        assert!(message.contains(&format!("key {key:?}")) && message.contains(why), "{message}");
        assert!(message.starts_with("small.gguf: "), "{message}");
    }
    let mut twice = tokens_of(&pieces);
    twice[5].0 = "ab".into();
    assert!(error(&replace_tokens(&pieces, &twice)).contains("has the token \"ab\" twice, as 5 and 263"));
    twice[5].0 = long;
    assert!(error(&replace_tokens(&pieces, &twice)).contains("too long"));
    // A merge into a token that is not there.
    let merges = with(&bytes, "tokenizer.ggml.merges", Some(strings(["h e", "x y"])));
    assert!(error(&merges).contains("\"xy\", which is not in the vocabulary"));
}

#[test]
fn every_key_of_the_tokenizer_counts_for_its_cached_image() {
    let base = pieces("llama");
    let key = |metadata: &Metadata| MetadataFiles(metadata).fingerprint("tokenizer.json").unwrap();
    let mut keys = vec![key(&base)];
    let mut tokens = tokens_of(&base);
    tokens[270].1 -= 1.0;
    keys.push(key(&replace_tokens(&base, &tokens)));
    tokens[270].2 = USER_DEFINED;
    keys.push(key(&replace_tokens(&base, &tokens)));
    tokens[270].0.push('x');
    keys.push(key(&replace_tokens(&base, &tokens)));
    // The same bytes, cut in another way.
    let moved = tokens[271].0.remove(0);
    tokens[270].0.push(moved);
    keys.push(key(&replace_tokens(&base, &tokens)));
    for (name, value) in [
        ("tokenizer.ggml.add_space_prefix", Value::Bool(false)),
        ("tokenizer.ggml.add_space_prefix", Value::Unsigned(0)),
        ("tokenizer.ggml.bos_token_id", Value::Unsigned(0)),
        ("general.architecture", text("gemma")),
    ] {
        keys.push(key(&with(&base, name, Some(value))));
    }
    let count = keys.len();
    keys.sort_unstable();
    keys.dedup();
    assert_eq!(keys.len(), count);
    assert_eq!(key(&base), key(&with(&base, "general.name", Some(text("another")))));

    let cache = tempfile::tempdir().unwrap();
    let load = |metadata: &Metadata| Tokenizer::load(MetadataFiles(metadata), Some(cache.path())).unwrap();
    assert_eq!(load(&base).origin(), Origin::Compiled { saved: true });
    assert_eq!(load(&base).origin(), Origin::Cached);
    let bare = with(&base, "tokenizer.ggml.add_space_prefix", Some(Value::Bool(false)));
    assert_eq!(load(&bare).origin(), Origin::Compiled { saved: true });
    assert_eq!(words(&load(&bare), "ab"), ["ab"]);
    assert_eq!(words(&load(&base), "ab"), ["▁ab"]);
}

/// Metadata of a real model in `SLUICE_REAL_MODELS` or `target/real-models`.
fn real(name: &str) -> Option<Metadata> {
    let folder = std::env::var_os("SLUICE_REAL_MODELS").map(PathBuf::from);
    let folder = folder.unwrap_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/real-models"));
    let path = folder.join(name);
    let Ok(file) = File::open(&path) else {
        eprintln!("SKIPPED: no {} (scripts/real-models fetches it)", path.display());
        return None;
    };
    Some(Header::read(&file, file.metadata().unwrap().len(), &path).unwrap().metadata)
}

/// Knuth's generator, as in `make_gguf_tokens.py`.
struct Lcg(u64);

impl Lcg {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) % n
    }
}

#[rustfmt::skip]
const BLOCKS: [(u32, u32); 23] = [
    (0x20, 0x7E), (0x20, 0x7E), (0, 0x1F), (0x7F, 0xFF), (0x100, 0x24F), (0x300, 0x36F), (0x370, 0x3FF), (0x400, 0x4FF), (0x590, 0x6FF),
    (0x900, 0x9FF), (0xE00, 0xE7F), (0x1100, 0x11FF), (0x1E00, 0x1EFF), (0x2000, 0x218F), (0x2500, 0x25FF), (0x3000, 0x30FF), (0x4E00, 0x9FFF),
    (0xAC00, 0xD7A3), (0xFB00, 0xFDFF), (0xFE00, 0xFFFD), (0x1F300, 0x1FAFF), (0x10000, 0x1FFFF), (0xE0000, 0x10FFFF),
];

#[rustfmt::skip]
const WORDS: [&str; 35] = [
    " ", " ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", " \n \n", "don't", "I'LL", "12345", "<|im_start|>", "<|im_end|>", "<|im_", "<eos>", "<bos>", "<start_of_turn>",
    "</s>", "<table>", "\u{2581}", "\u{2581}\u{2581}", "<0x0A>", "hello", " world", " the", "ing", "----", "...", "!?", "日本語", "العربية", "हिन्दी", "e\u{301}", "👩\u{200d}🚀",
];

fn generated(size: usize) -> String {
    let mut rng = Lcg(1);
    let mut text = String::new();
    while text.len() < size {
        if rng.below(2) == 0 {
            let word = WORDS[rng.below(WORDS.len() as u64) as usize];
            text.push_str(&word.repeat(1 + rng.below(3) as usize));
        } else {
            let (low, high) = BLOCKS[rng.below(BLOCKS.len() as u64) as usize];
            for _ in 0..rng.below(6) {
                text.push(char::from_u32(low + rng.below(u64::from(high - low + 1)) as u32).unwrap());
            }
        }
    }
    text
}

fn fnv(bytes: impl IntoIterator<Item = u8>) -> String {
    let digest = |sum: u64, byte| (sum ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
    format!("{:016x}", bytes.into_iter().fold(0xcbf2_9ce4_8422_2325, digest))
}

#[test]
fn real_models_give_the_ids_of_their_own_tokenizers() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/text/gguf_tokens.json");
    let golden: Json = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    let text = generated(1_000_000);
    assert_eq!(
        (golden["generated"]["bytes"].as_u64(), golden["generated"]["fnv"].as_str()),
        (Some(text.len() as u64), Some(&*fnv(text.bytes())))
    );
    let models = golden["models"].as_object().unwrap();
    assert_eq!(models.len(), 3);
    for (name, expected) in models {
        let Some(metadata) = real(name) else { continue };
        let cache = tempfile::tempdir().unwrap();
        let load = || Tokenizer::load(MetadataFiles(&metadata), Some(cache.path())).unwrap();
        assert_eq!(load().origin(), Origin::Compiled { saved: true });
        let tokenizer = load();
        assert_eq!(tokenizer.origin(), Origin::Cached);

        // 1. short texts, as ids
        for (text, ids) in golden["texts"].as_array().unwrap().iter().zip(expected["cases"].as_array().unwrap()) {
            let text = text.as_str().unwrap();
            assert_eq!(&serde_json::json!(tokenizer.encode(text, true).unwrap()), ids, "{name}: {text:?}");
        }
        // 2. a long one and back, as hashes
        let ids = tokenizer.encode(&text, true).unwrap();
        assert_eq!(ids.len() as u64, expected["tokens"].as_u64().unwrap(), "{name}");
        assert_eq!(fnv(ids.iter().flat_map(|id| id.to_le_bytes())), expected["ids"], "{name}");
        assert_eq!(fnv(tokenizer.decode(&ids, false).unwrap().bytes()), expected["text"], "{name}");
        // 3. ids in any order: parts of characters beside each other
        let mut rng = Lcg(2);
        let size = tokenizer.vocab_size() as u64;
        let mut draw = || if rng.below(2) == 1 { rng.below(size) } else { rng.below(600) };
        let drawn: Vec<u32> = (0..20_000).map(|_| draw() as u32).collect();
        assert_eq!(drawn.len() as u64, expected["drawn"].as_u64().unwrap(), "{name}");
        assert_eq!(fnv(tokenizer.decode(&drawn, false).unwrap().bytes()), expected["drawn_text"], "{name}");
    }
}

/// For measurements: the ids of the text in `SLUICE_TOKENIZE`, a file, beside it, and times.
#[test]
#[ignore = "a tool"]
fn tokenize() {
    let path = PathBuf::from(std::env::var_os("SLUICE_TOKENIZE").expect("a file"));
    let text = fs::read_to_string(&path).unwrap();
    let cache = tempfile::tempdir().unwrap();
    for name in
        ["SmolLM2-135M-Instruct.Q4_1.gguf", "gemma-3-270m.Q4_K_M.gguf", "qwen2.5-coder-0.5b-instruct.Q4_K_M.gguf"]
    {
        let begun = std::time::Instant::now();
        let Some(metadata) = real(name) else { continue };
        let header = begun.elapsed();
        let timed = |what: &str| {
            let begun = std::time::Instant::now();
            let tokenizer = Tokenizer::load(MetadataFiles(&metadata), Some(cache.path())).unwrap();
            println!("{name}: header {header:?}, {what} {:?}", begun.elapsed());
            tokenizer
        };
        timed("compiled");
        let tokenizer = timed("cached");
        let begun = std::time::Instant::now();
        let ids = tokenizer.encode(&text, true).unwrap();
        println!("{name}: {} bytes to {} ids in {:?}", text.len(), ids.len(), begun.elapsed());
        let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        fs::write(path.with_extension(format!("{}.ids", name.split(['-', '.']).next().unwrap())), bytes).unwrap();
    }
}
