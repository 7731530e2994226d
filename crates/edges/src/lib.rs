//! Every place where Sluice reads what others wrote, as a function of bytes that must not panic, hang or take much memory whatever they are, and that checks what the
//! rest of the program relies on. `fuzz/` calls them with what a fuzzer thinks up, `tests/replay.rs` with the seeds and with random changes of them.
#![forbid(unsafe_code)]

use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use serde_json::{Map, json};
use sluice_backend::{Activations, Cpu, Isa};
use sluice_cache::disk::{self, FileKey, Label, MOST_TOKENS};
use sluice_engine::text::{ChatTemplate, Detokenizer, Tokenizer, parse_messages};
use sluice_engine::{Checkpoint, Config, Engine, Options, Pins};
use sluice_store::bundle::{Manifest, PAGE};
use sluice_store::experts::Recording;
use sluice_store::safetensors::Header;

/// An edge: its name, which is that of its folder of seeds, and what reads there.
pub type Edge = (&'static str, fn(&[u8]));

pub const EDGES: [Edge; 12] = [
    ("safetensors", safetensors),
    ("index", index),
    ("config", config),
    ("manifest", manifest),
    ("tokenizer", tokenizer),
    ("template", template),
    ("chat", chat),
    ("pins", pins),
    ("recording", recording),
    ("disks", disks),
    ("slot", slot),
    ("key", key),
];

/// The repository's root.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// A whole safetensors file: tensors cover its data, each as long as its shape says.
fn safetensors(bytes: &[u8]) {
    let Ok(header) = Header::from_bytes(bytes) else { return };
    let mut at = header.tensors.first().map_or(bytes.len() as u64, |t| t.range.start);
    for t in &header.tensors {
        assert_eq!(t.range.start, at);
        assert_eq!(t.range.end - t.range.start, (t.shape.iter().product::<usize>() * t.dtype.size()) as u64);
        at = t.range.end;
    }
    assert_eq!(at, bytes.len() as u64);
}

/// `model.safetensors.index.json`: no file lies outside the folder.
fn index(bytes: &[u8]) {
    let Ok((files, tensors)) = sluice_store::check_index(bytes) else { return };
    assert!(tensors > 0 && files.iter().all(|f| Path::new(f).file_name().is_some_and(|name| name == f.as_str())));
}

/// `config.json` and quantisation, beside the weights of tiny models. A model that is accepted computes, or says why not.
fn config(bytes: &[u8]) {
    static MODELS: OnceLock<Vec<Checkpoint>> = OnceLock::new();
    let names = ["qwen3", "qwen3_rope", "qwen3_moe", "qwen3_next", "qwen3_5_moe", "mlx_qwen3_widths"];
    let models = MODELS.get_or_init(|| {
        names.iter().map(|n| Checkpoint::open(&root().join("tests/golden").join(n)).expect("a golden model")).collect()
    });
    let Ok(config) = Config::parse("config.json".into(), bytes) else { return };
    for checkpoint in models {
        let mut backend = Cpu::new(Isa::GENERIC, 1, Activations::F32).expect("a backend");
        let Ok(spec) = sluice_model::check(checkpoint, &config, &mut backend) else { continue };
        let context = spec.max_context.min(64);
        let options = Options {
            threads: 1,
            max_context: Some(context),
            chunk: Some(4),
            isa: Isa::GENERIC,
            activations: Activations::F32,
            ..Options::for_this_machine().expect("options")
        };
        let Ok(mut engine) = Engine::load(checkpoint, &config, options) else { continue };
        let tokens: Vec<u32> = [1, 2, 3].into_iter().filter(|t| *t < spec.vocabulary as u32).take(context).collect();
        let _ = engine.score(&tokens, true, |_, logits| {
            assert!(logits.iter().all(|x| x.is_finite()));
            Ok(())
        });
    }
}

/// `bundle.json`: experts lie within their files.
fn manifest(bytes: &[u8]) {
    let Ok(manifest) = Manifest::parse(bytes) else { return };
    for layer in manifest.experts.values() {
        assert!(layer.base.is_multiple_of(PAGE) && layer.stride.is_multiple_of(PAGE) && layer.used() <= layer.stride);
        assert!(layer.base + layer.count as u64 * layer.stride <= manifest.files[&layer.file].bytes);
    }
}

/// `tokenizer.json`: text to ids and back, all at once and one by one.
fn tokenizer(bytes: &[u8]) {
    let Ok(tokenizer) = Tokenizer::parse(bytes) else { return };
    let tokenizer = Arc::new(tokenizer);
    for text in ["", "a", "Hello  world, it's 12:34 \u{e9}\u{301}\u{1F680}\n\t<|im_end|> ab ba"] {
        let encoded = [tokenizer.encode(text, true), tokenizer.encode_plain(text)];
        for ids in encoded.into_iter().flatten() {
            let _ = tokenizer.decode(&ids, false);
            let mut stream = Detokenizer::new(tokenizer.clone(), true);
            ids.iter().take(64).for_each(|id| _ = stream.push(*id));
            let _ = stream.flush();
            ids.iter().take(64).for_each(|id| _ = (tokenizer.token(*id), tokenizer.is_special(*id)));
        }
    }
}

/// A chat template, in this process: what it may take is the business of the process that it runs in, and is tested there.
fn template(bytes: &[u8]) {
    let Ok(source) = std::str::from_utf8(bytes) else { return };
    let Ok(template) = ChatTemplate::parse(source) else { return };
    let messages = json!([
        {"role": "system", "content": "S"},
        {"role": "user", "content": "Hi \u{e9}"},
        {"role": "assistant", "content": [{"type": "text", "text": "x"}], "tool_calls": [{"name": "f", "arguments": {"a": 1.5}}]},
        {"role": "user", "content": "<think>a</think>\nb"},
    ]);
    let tools = json!([{"type": "function", "function": {"name": "f", "parameters": {"a": [1, null, true]}}}]);
    let extra = Map::from_iter([("enable_thinking".to_owned(), json!(false))]);
    let _ = template.render(&messages, Some(&tools), true, &extra);
}

/// A saved conversation.
fn chat(bytes: &[u8]) {
    let Ok(messages) = parse_messages(bytes) else { return };
    assert!(messages.iter().all(|m| ["system", "user", "assistant"].contains(&m.role.as_str())));
}

/// A file of experts to pin.
fn pins(bytes: &[u8]) {
    let Ok(pins) = Pins::parse(bytes) else { return };
    assert!(pins.hottest.iter().all(|(layer, expert, _)| *layer < pins.layers && *expert < pins.experts));
    Pins::parse(pins.to_text().as_bytes()).expect("what was written is read");
}

/// Recorded routing.
fn recording(bytes: &[u8]) {
    let Ok(recording) = Recording::parse(bytes) else { return };
    for layer in 0..recording.layers.len() {
        assert_eq!(recording.by_token(layer).len(), recording.tokens());
        let ascending = |chosen: &[u32]| chosen.windows(2).all(|w| w[0] < w[1]);
        assert!(
            recording
                .by_token(layer)
                .all(|chosen| ascending(chosen) && chosen[recording.k - 1] < recording.experts as u32)
        );
    }
    // A number may have been written in more bytes than it needs: the same recording, then, in fewer.
    let again = recording.to_bytes();
    assert!(again.len() <= bytes.len());
    assert_eq!(Recording::parse(&again).expect("what was written is read"), recording);
}

/// The memory of disks.
fn disks(bytes: &[u8]) {
    let possible = |x: f64| x.is_finite() && x > 0.0;
    let speeds = sluice_store::load::remembered_speeds(bytes);
    assert!(speeds.iter().all(|s| possible(s.mapped) && s.direct.is_none_or(possible)));
}

/// A slot of the prompt cache: what it says of itself lies within it, and what is believed is what would have been written.
fn slot(bytes: &[u8]) {
    let Some((label, tokens)) = disk::label_of(bytes) else { return };
    assert!(label.bytes <= bytes.len() as u64 && tokens.len() <= MOST_TOKENS);
    let label = Label { tokens: &tokens, ..label };
    for summed in [true, false] {
        if disk::holds(&label, summed, bytes) && bytes.len() as u64 == disk::slot_bytes(label.bytes) {
            let part = &bytes[..label.bytes as usize];
            let mut again = vec![1; bytes.len()];
            disk::fill(&label, part, summed, &mut again);
            assert!(again.starts_with(part) && again.ends_with(&bytes[bytes.len() - disk::PAGE..]));
        }
    }
}

/// The file with the key of an encrypted cache.
fn key(bytes: &[u8]) {
    let is_key = FileKey::parse(bytes).is_some();
    let digits = bytes.trim_ascii();
    assert_eq!(is_key, bytes.len() == 32 || digits.len() == 64 && digits.iter().all(u8::is_ascii_hexdigit));
}
