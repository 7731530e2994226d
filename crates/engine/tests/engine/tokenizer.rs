//! Token ids equal to the library's, for every way of loading and for text of every kind.

use serde_json::Value;
use sluice_engine::text::{ChatTemplate, Origin, Tokenizer};
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// A vocabulary that is compiled, with what the demo's lacks: GPT-2's splitting, words that are tokens without merges, added tokens of all kinds,
/// and tokens put around the text.
fn awkward(folder: &Path) {
    let mut file: Value =
        serde_json::from_slice(&fs::read(root().join("models/demo/tokenizer.json")).unwrap()).unwrap();
    file["model"]["ignore_merges"] = true.into();
    file["normalizer"] = serde_json::json!({"type": "Sequence", "normalizers": [
        {"type": "NFKC"}, {"type": "Replace", "pattern": {"String": "  "}, "content": " "}
    ]});
    file["pre_tokenizer"] =
        serde_json::json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true});
    file["post_processor"] = serde_json::json!({
        "type": "TemplateProcessing", "pair": [],
        "single": [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "special_tokens": {"<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}},
    });
    let added = file["added_tokens"].as_array_mut().unwrap();
    for (id, content, single_word, lstrip, rstrip, normalized, special) in [
        (16384, "<think>", false, false, false, false, false),
        (16385, "Story", true, true, true, true, false),
        (16386, "été", false, false, true, true, false),
        (16387, "<mask>", false, true, false, false, true),
    ] {
        added.push(serde_json::json!({
            "id": id, "content": content, "single_word": single_word, "lstrip": lstrip, "rstrip": rstrip,
            "normalized": normalized, "special": special,
        }));
    }
    fs::write(folder.join("tokenizer.json"), file.to_string()).unwrap();
}

/// A long mixed text: our own sources, and generated characters of many scripts between words, digits, blanks and special tokens.
fn sample() -> String {
    let mut text = String::new();
    let mut folders = vec![root().join("crates"), root().join("docs"), root().join("tests/golden/text")];
    while let Some(folder) = folders.pop() {
        let mut paths: Vec<PathBuf> = fs::read_dir(folder).into_iter().flatten().map(|f| f.unwrap().path()).collect();
        paths.sort();
        for path in paths {
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|e| e == "rs" || e == "md" || e == "py") {
                text.push_str(&fs::read_to_string(path).unwrap());
            }
        }
    }
    let scripts: [(u32, u32); 22] = [
        (0x20, 0x7E),
        (0, 0x1F),
        (0x7F, 0xFF),
        (0x100, 0x24F),
        (0x300, 0x36F),
        (0x370, 0x3FF),
        (0x400, 0x4FF),
        (0x590, 0x5FF),
        (0x600, 0x6FF),
        (0x900, 0x97F),
        (0xE00, 0xE7F),
        (0x1100, 0x11FF),
        (0x1E00, 0x1EFF),
        (0x2000, 0x206F),
        (0x2070, 0x218F),
        (0x3000, 0x30FF),
        (0x4E00, 0x9FFF),
        (0xAC00, 0xD7A3),
        (0xFB00, 0xFDFF),
        (0xFE00, 0xFFFD),
        (0x1F300, 0x1FAFF),
        (0, 0x10FFFF),
    ];
    let words = [
        " ",
        "  ",
        "\n",
        "\r\n",
        "\t",
        " \n \n",
        "don't",
        "I'LL",
        "x's",
        "12345",
        "3.14",
        "<|im_start|>",
        "<|im_end|>",
        "<|im_",
        "été",
        "e\u{301}",
        "<think>",
        "Story",
        " Story ",
        "<mask>",
        "\u{1F469}\u{200D}\u{1F680}",
        "\u{FEFF}",
        "hello",
        " world",
        "     ",
        "...",
        "!?",
    ];
    let mut rng = fastrand::Rng::with_seed(1);
    let mut next = |n: u64| rng.u64(..n);
    text.truncate(text.floor_char_boundary(150_000));
    for _ in 0..20_000 {
        if next(3) == 0 {
            text.push_str(words[next(words.len() as u64) as usize]);
        } else {
            let (low, high) = scripts[next(scripts.len() as u64) as usize];
            for _ in 0..next(6) {
                text.extend(char::from_u32(low + next(u64::from(high - low) + 1) as u32));
            }
        }
    }
    text
}

/// Compares every way of loading with the library on the whole sample, at once and line by line.
fn compare(folder: &Path) {
    let library = tokenizers::Tokenizer::from_file(folder.join("tokenizer.json")).unwrap();
    let cache = tempfile::tempdir().unwrap();
    let compiled = Tokenizer::load(folder, Some(cache.path())).unwrap();
    let cached = Tokenizer::load(folder, Some(cache.path())).unwrap();
    assert_eq!((compiled.origin(), cached.origin()), (Origin::Compiled { saved: true }, Origin::Cached));

    for id in 0..library.get_vocab_size(true) as u32 + 2 {
        let token = library.id_to_token(id);
        assert_eq!(cached.token(id), token);
        if let Some(token) = token {
            assert_eq!(cached.id(&token), library.token_to_id(&token));
        }
    }
    let sample = sample();
    assert!(sample.len() > 200_000);
    let whole = library.encode(sample.as_str(), true).unwrap();
    for tokenizer in [&compiled, &cached] {
        assert_eq!(tokenizer.vocab_size(), library.get_vocab_size(true));
        let ids = tokenizer.encode(&sample, true).unwrap();
        assert!(ids == whole.get_ids());
        assert!(tokenizer.decode(&ids, true).unwrap() == library.decode(&ids, true).unwrap());
    }
    for text in sample.split_inclusive('\n').chain(["", " "]) {
        let ids = cached.encode(text, false).unwrap();
        assert!(ids == library.encode(text, false).unwrap().get_ids(), "{text:?}");
        assert_eq!(cached.decode(&ids, false).unwrap(), library.decode(&ids, false).unwrap());
    }
}

#[test]
fn demo_tokens_are_the_librarys() {
    compare(&root().join("models/demo"));
}

#[test]
fn tokens_with_unusual_options_are_the_librarys() {
    let folder = tempfile::tempdir().unwrap();
    awkward(folder.path());
    compare(folder.path());
}

/// Any other tokenizer: `SLUICE_TOKENIZER=folder cargo test --release -p sluice-engine --test tokenizer -- --ignored`.
#[test]
#[ignore = "needs a tokenizer of your own"]
fn tokens_of_a_given_tokenizer_are_the_librarys() {
    compare(Path::new(&std::env::var("SLUICE_TOKENIZER").expect("SLUICE_TOKENIZER names a folder")));
}

/// The Python package splits words with another regular-expression library (Oniguruma): `tests/golden/text/make_tokens.py` wrote its ids.
#[test]
fn demo_tokens_are_pythons() {
    let golden = fs::read(root().join("tests/golden/text/tokens.json")).unwrap();
    let golden: Vec<(String, Vec<u32>)> = serde_json::from_slice(&golden).unwrap();
    let tokenizer = Tokenizer::load(root().join("models/demo"), None).unwrap();
    let mut wrong = String::new();
    for (text, expected) in &golden {
        let ids = tokenizer.encode(text, false).unwrap();
        if ids != *expected {
            writeln!(wrong, "{text:?}: found {ids:?}, expected {expected:?}").unwrap();
        }
    }
    assert!(wrong.is_empty(), "{wrong}");
}

/// Special and added tokens that stand beside `tokenizer.json`: `tests/golden/text/make_added.py` wrote what transformers makes of them.
#[test]
fn tokens_of_the_files_beside_are_those_of_transformers() {
    let golden = fs::read(root().join("tests/golden/text/added.json")).unwrap();
    let golden: Value = serde_json::from_slice(&golden).unwrap();
    let mut wrong = String::new();
    for case in golden["cases"].as_array().unwrap() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, value: &Value| fs::write(folder.path().join(name), value.to_string()).unwrap();
        write("tokenizer.json", &golden["tokenizer"]);
        for (name, value) in case["files"].as_object().unwrap() {
            write(name, value);
        }
        fs::write(folder.path().join("chat_template.jinja"), golden["template"].as_str().unwrap()).unwrap();

        let tokenizer = Tokenizer::load(folder.path(), None).unwrap();
        let mut differs = |what: &str, found: &Value, expected: &Value| {
            if found != expected {
                writeln!(wrong, "{}: {what}: found {found}, expected {expected}", case["name"]).unwrap();
            }
        };
        let added: serde_json::Map<String, Value> = case["added"].as_object().unwrap().clone();
        let found = added.keys().map(|token| (token.clone(), tokenizer.id(token).into())).collect();
        differs("added", &Value::Object(found), &case["added"]);
        let whole = golden["tokenizer"]["model"]["vocab"].as_object().unwrap().len() + added.len();
        differs("size", &tokenizer.vocab_size().into(), &whole.into());
        for (i, text) in golden["texts"].as_array().unwrap().iter().enumerate() {
            let ids = tokenizer.encode(text.as_str().unwrap(), false).unwrap();
            differs("ids", &ids.clone().into(), &case["ids"][i]);
            differs("text", &tokenizer.decode(&ids, true).unwrap().into(), &case["skipping"][i]);
        }
        let template = ChatTemplate::load(folder.path()).unwrap().unwrap();
        let messages = serde_json::json!([{"role": "user", "content": ""}]);
        let names = template.render(&messages, None, false, &serde_json::Map::new()).unwrap();
        differs("names", &names.into(), &case["names"]);
    }
    assert!(wrong.is_empty(), "{wrong}");
}

#[test]
fn wrong_tokens_beside_the_tokenizer_name_their_file_and_key() {
    let folder = tempfile::tempdir().unwrap();
    fs::copy(root().join("models/demo/tokenizer.json"), folder.path().join("tokenizer.json")).unwrap();
    for (file, content, words) in [
        ("tokenizer_config.json", r#"{"bos_token": 5}"#, "tokenizer_config.json: bos_token: not a token"),
        (
            "tokenizer_config.json",
            r#"{"added_tokens_decoder": {"x": "y"}}"#,
            "tokenizer_config.json: added_tokens_decoder: x",
        ),
        (
            "tokenizer_config.json",
            r#"{"extra_special_tokens": "x"}"#,
            "tokenizer_config.json: extra_special_tokens: not a list",
        ),
        ("special_tokens_map.json", r#"{"eos_token": ["x"]}"#, "special_tokens_map.json: eos_token: not a token"),
        ("special_tokens_map.json", "[]", "special_tokens_map.json: not a JSON object"),
        ("added_tokens.json", r#"{"<x>": "y"}"#, "added_tokens.json: \"<x>\" has no whole number"),
    ] {
        fs::write(folder.path().join(file), content).unwrap();
        let error = format!("{:#}", Tokenizer::load(folder.path(), None).err().unwrap());
        assert!(error.contains(words), "{error}");
        fs::remove_file(folder.path().join(file)).unwrap();
    }
}
