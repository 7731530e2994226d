//! Every parser of untrusted input, as a function of bytes. Whatever the bytes are, a target must not panic, hang or
//! take much memory, and it checks what the rest of the program relies on. A fuzzer runs the targets through `fuzz/`;
//! `tests/replay.rs` runs them with the seeds and random changes of these.
#![forbid(unsafe_code)]

use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use serde_json::{Map, Value, json};
use sluice_backend::{Activations, Isa};
use sluice_cache::disk::{self, FileKey, Label, MOST_TOKENS};
use sluice_cpu::Cpu;
use sluice_engine::text::{
    AnswerParser, Calls, ChatTemplate, Detokenizer, DsmlBlock, ModelText, Opened, Piece, Style, Tokenizer, Tools,
    parse_messages,
};
use sluice_engine::{
    Checkpoint, Config, Constraint, ConstraintSpec, Engine, GrammarFormat, HotExperts, ModelTensors, Options,
};
use sluice_experts::Recording;
use sluice_model::source::{self, MatrixShape, gguf};
use sluice_store::bundle::{Manifest, PAGE};
use sluice_store::safetensors::Header;
use sluice_store::{Dtype, TensorPlan, Writer};

/// A target: its name, which is also that of its folder of seeds, and the function that reads.
pub type FuzzTarget = (&'static str, fn(&[u8]));

pub const TARGETS: [FuzzTarget; 18] = [
    ("safetensors", safetensors),
    ("gguf", gguf),
    ("quantized", quantized),
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
    ("answer", answer),
    ("hub", sluice_hub::read_answer),
    ("request", request),
    ("grammar", grammar),
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

/// A GGUF file: tensors are within it and apart, each as long as its shape says; what its metadata says is a model, or is refused with a reason.
fn gguf(bytes: &[u8]) {
    // 1. The header
    let Ok(header) = gguf::Header::from_bytes(bytes, Path::new("model.gguf")) else { return };
    let mut at = 0;
    for t in &header.tensors {
        assert!(t.range.start >= at && t.range.end <= bytes.len() as u64);
        let elements: usize = t.shape.iter().product();
        assert_eq!(t.range.end - t.range.start, (elements / t.kind.elements * t.kind.bytes) as u64);
        at = t.range.end;
    }
    // 2. The tokenizer
    if let Ok(tokenizer) = Tokenizer::load(gguf::tokenizer::MetadataFiles(&header.metadata), None) {
        tokenize(tokenizer);
    }
    // 3. The model
    let name = format!("sluice-fuzz-{}-{:?}.gguf", std::process::id(), std::thread::current().id());
    let path = std::env::temp_dir().join(name);
    std::fs::write(&path, bytes).expect("a temporary file");
    if let Ok(source) = source::open(&path) {
        for name in ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"] {
            let _ = source.read(name, 1 << 26);
        }
        let tensors = source.tensors().expect("files that were just opened");
        let mut backend = Cpu::new(Isa::GENERIC, 1, Activations::F32).expect("a backend");
        let _ = sluice_model::check(&tensors, &mut backend);
    }
    std::fs::remove_file(&path).expect("a temporary file");
}

/// A quantised matrix: its `quantization_config`, and types and shapes of its tensors by what follows the module's name. It is refused, or its planes have the lengths of
/// their format, whether values are read or not.
fn quantized(bytes: &[u8]) {
    let Ok(Value::Object(given)) = serde_json::from_slice::<Value>(bytes) else { return };
    let size = |v: &Value| v.as_u64().and_then(|n| usize::try_from(n).ok());
    let sizes = |v: Option<&Value>| v?.as_array()?.iter().map(size).collect::<Option<Vec<usize>>>();
    let plan = |(leaf, t): (&String, &Value)| {
        let (dtype, shape) = (Dtype::from_name(t.get(0)?.as_str()?)?, sizes(t.get(1))?);
        let plan = TensorPlan { name: format!("model.layers.0.mlp.up_proj{leaf}"), dtype, shape };
        plan.size().is_some_and(|n| n < 1 << 16).then_some(plan)
    };
    let tensors = given.get("tensors").and_then(Value::as_object);
    let plans: Vec<TensorPlan> = tensors.into_iter().flatten().filter_map(plan).collect();
    let Some([rows, cols]) = sizes(given.get("shape")).as_deref().and_then(|s| <[usize; 2]>::try_from(s).ok()) else {
        return;
    };
    if plans.is_empty() || !(1..=1 << 24).contains(&rows) || !(1..=1 << 24).contains(&cols) {
        return;
    }
    let name = format!("sluice-fuzz-{}-{:?}", std::process::id(), std::thread::current().id());
    let folder = std::env::temp_dir().join(name);
    std::fs::create_dir_all(&folder).expect("a temporary folder");
    let mut writer = Writer::create(&folder.join("model.safetensors"), &plans, &Default::default()).expect("a file");
    for plan in &plans {
        let values: Vec<u8> = (0..plan.size().expect("checked above")).map(|i| (i * 37 % 251) as u8).collect();
        writer.append(&plan.name, &values).expect("a tensor");
    }
    writer.finish().expect("a file");
    let config = json!({"model_type": "llama", "quantization_config": given.get("config")}).to_string();
    let config = Config::parse("config.json".into(), config.as_bytes()).expect("an object");
    let checkpoint = Checkpoint::open(&folder).expect("what was just written");
    let tensors = ModelTensors::of_safetensors(checkpoint, config);
    for t in tensors.checkpoint().tensors() {
        let _ = (tensors.layout().stored(t), tensors.layout().format(tensors.checkpoint(), t));
    }
    let shape = MatrixShape { leading: &[], rows, cols };
    let of = |reads| tensors.ordered_matrix("model.layers.0.mlp.up_proj.weight", shape, reads);
    if let Ok(read) = of(true) {
        let planned = of(false).expect("what is read is planned, too");
        assert_eq!(planned.order, read.order);
        let (planned, read) = (planned.matrix, read.matrix);
        assert_eq!(planned.format, read.format);
        let planes = read.format.planes(cols).expect("a format of these columns");
        assert_eq!(read.planes.len(), planes.len());
        for (plane, (read, planned)) in planes.iter().zip(read.planes.iter().zip(&planned.planes)) {
            assert_eq!((read.len(), planned.len()), (rows * plane.row_bytes, rows * plane.row_bytes));
        }
    }
    drop(tensors);
    std::fs::remove_dir_all(&folder).expect("a temporary folder");
}

/// `model.safetensors.index.json`: no file is outside the folder.
fn index(bytes: &[u8]) {
    let Ok((files, tensors)) = sluice_store::check_index(bytes) else { return };
    assert!(tensors > 0 && files.iter().all(|f| Path::new(f).file_name().is_some_and(|name| name == f.as_str())));
}

/// `config.json` and quantisation, with the weights of tiny models. A model that is accepted computes, or is refused
/// with a reason.
fn config(bytes: &[u8]) {
    static MODELS: OnceLock<Vec<Arc<Checkpoint>>> = OnceLock::new();
    let names = [
        "qwen3",
        "qwen3_rope",
        "qwen3_moe",
        "qwen3_next",
        "qwen3_5_moe",
        "gpt_oss_mxfp4",
        "mlx_qwen3_widths",
        "glm4_moe",
        "deepseek_v3",
        "ministral3",
        "olmo3",
        "gemma4_moe",
        "gemma4_per_layer",
        "quantized/fp8_experts",
        "quantized/w4a16_asymmetric",
        "quantized/gptq",
        "quantized/nvfp4",
    ];
    let models = MODELS.get_or_init(|| {
        let open = |name: &&str| Checkpoint::open(&root().join("tests/golden").join(name)).expect("a golden model");
        names.iter().map(|name| Arc::new(open(name))).collect()
    });
    let Ok(config) = Config::parse("config.json".into(), bytes) else { return };
    let config = Arc::new(config);
    for checkpoint in models {
        let tensors = ModelTensors::of_safetensors(Arc::clone(checkpoint), Arc::clone(&config));
        let mut backend = Cpu::new(Isa::GENERIC, 1, Activations::F32).expect("a backend");
        let Ok(spec) = sluice_model::check(&tensors, &mut backend) else { continue };
        let context = spec.max_context.min(64);
        let options = Options {
            threads: 1,
            max_context: Some(context),
            chunk: Some(4),
            isa: Isa::GENERIC,
            activations: Activations::F32,
            ..Options::for_this_machine().expect("options")
        };
        let Ok(mut engine) = Engine::load(&tensors, options) else { continue };
        let tokens: Vec<u32> = [1, 2, 3].into_iter().filter(|t| *t < spec.vocabulary as u32).take(context).collect();
        let _ = engine.score(&tokens, true, |_, logits| {
            assert!(logits.iter().all(|x| x.is_finite()));
            Ok(())
        });
    }
}

/// `bundle.json`: experts are within their files.
fn manifest(bytes: &[u8]) {
    let Ok(manifest) = Manifest::parse(bytes) else { return };
    for layer in manifest.experts.values() {
        assert!(layer.base.is_multiple_of(PAGE) && layer.stride.is_multiple_of(PAGE) && layer.used() <= layer.stride);
        assert!(layer.base + layer.count as u64 * layer.stride <= manifest.files[&layer.file].bytes);
    }
}

/// `tokenizer.json`: text to ids and back, at once and id by id.
fn tokenizer(bytes: &[u8]) {
    if let Ok(tokenizer) = Tokenizer::parse(bytes) {
        tokenize(tokenizer);
    }
}

fn tokenize(tokenizer: Tokenizer) {
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

/// A chat template, in this process. Its limits are those of the process that it normally runs in, and are tested
/// there.
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
    let Ok(pins) = HotExperts::parse(bytes) else { return };
    assert!(pins.hottest.iter().all(|(layer, expert, _)| *layer < pins.layers && *expert < pins.experts));
    HotExperts::parse(pins.to_text().as_bytes()).expect("what was written is read");
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
    // A number may take more bytes in the file than it needs: then the same recording takes fewer.
    let again = recording.to_bytes();
    assert!(again.len() <= bytes.len());
    assert_eq!(Recording::parse(&again).expect("what was written is read"), recording);
}

/// The file that remembers the speeds of disks.
fn disks(bytes: &[u8]) {
    let possible = |x: f64| x.is_finite() && x > 0.0;
    let speeds = sluice_store::load::remembered_speeds(bytes);
    assert!(speeds.iter().all(|s| possible(s.mapped) && s.direct.is_none_or(possible)));
}

/// A slot of the prompt cache: its label fits the slot, and a slot that is accepted is what would have been written.
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

/// The demo model's tokenizer and template.
fn demo() -> &'static ModelText {
    static DEMO: OnceLock<ModelText> = OnceLock::new();
    DEMO.get_or_init(|| ModelText::load(root().join("models/demo"), None).expect("the demo model"))
}

/// Joins neighbouring pieces of the same kind: how an answer was cut must not matter.
fn joined(all: Vec<Piece>) -> Vec<Piece> {
    let mut joined: Vec<Piece> = Vec::new();
    for piece in all {
        match (joined.last_mut(), piece) {
            (Some(Piece::Text(text)), Piece::Text(more)) | (Some(Piece::Thought(text)), Piece::Thought(more)) => {
                *text += &more
            }
            (Some(Piece::Arguments { json, .. }), Piece::Arguments { json: more, .. }) => *json += &more,
            (_, Piece::Text(empty) | Piece::Thought(empty)) if empty.is_empty() => {}
            (_, piece) => joined.push(piece),
        }
    }
    joined
}

fn unspaced(text: &str) -> String {
    text.chars().filter(|c| !c.is_whitespace()).collect()
}

/// Two bytes, which choose the model family's style and how the answer is cut, and then the answer. However it is cut
/// it means the same. All that is no call is reported, in order, and the arguments of a call are the beginning of a
/// JSON object.
fn answer(bytes: &[u8]) {
    let Some(([family, cut], text)) = bytes.split_first_chunk() else { return };
    let text = String::from_utf8_lossy(text);
    let bit = |n: u8| family >> n & 1 == 1;
    let is_harmony = bit(6);
    // A bit that harmony does not need chooses among the others.
    let calls = match is_harmony {
        true => Some(if bit(7) { Calls::Xtml } else { Calls::Harmony }),
        false if bit(7) => [Some(Calls::Keys), Some(Calls::Invokes), Some(Calls::Mistral), Some(Calls::List)]
            [usize::from(family >> 1 & 3)],
        false => [Some(Calls::Json), Some(Calls::Xml), None, Some(Calls::Dsml(DsmlBlock::Tools))]
            [usize::from(family >> 1 & 3)],
    };
    let style = Style { thoughts: bit(0), calls, native: true, preserves: false };
    let opened = [Opened::No, Opened::Yes { line: true }, Opened::Closed, Opened::Yes { line: false }]
        [usize::from(family >> 3 & 3)];
    let parameters = json!({"properties": {"s": {"type": "string"}, "b": {"type": "boolean"}, "n": {"type": ["number", "null"]}, "l": {"type": "array"}}});
    let tools = json!([{"type": "function", "function": {"name": "f", "parameters": parameters}}]);
    let tools = (!bit(5)).then(|| Arc::new(Tools::new(&tools)));
    let parser = || AnswerParser::new(style, tools.clone(), opened);
    // 1. Whole, and in pieces
    let mut whole = parser();
    let mut all = whole.push(&text);
    all.extend(whole.finish());
    let all = joined(all);
    let (mut cuts, mut pieces, mut rest, mut state) = (parser(), Vec::new(), &*text, u32::from(*cut) | 1);
    while let Some(last) = rest.chars().next_back() {
        state = state.wrapping_mul(0x9E37_79B1);
        let most = rest.len() - last.len_utf8();
        let at = (1 + (state >> 28) as usize * usize::from(cut % 4)).min(most.max(1));
        let at = (at..=rest.len()).find(|at| rest.is_char_boundary(*at)).unwrap_or(rest.len());
        let (piece, behind) = rest.split_at(at);
        pieces.extend(cuts.push(piece));
        rest = behind;
    }
    pieces.extend(cuts.finish());
    assert_eq!(joined(pieces), all, "in pieces");
    assert_eq!(cuts.calls(), whole.calls());
    // 2. Arguments are the beginning of JSON
    for piece in &all {
        if let Piece::Arguments { json, .. } = piece
            && let Err(e) = serde_json::from_str::<Map<String, Value>>(json)
        {
            // Lone surrogates, and numbers that no f64 holds, are left to the reader of the arguments.
            let odd = json.contains("\\u") || json.contains(['e', 'E']) || json.len() > 300;
            assert!(e.is_eof() || odd, "{e}: {json}");
        }
    }
    // 3. All else is reported. In the harmony format and XTML markup stands around everything.
    if is_harmony {
        return;
    }
    let is_call = |piece: &Piece| matches!(piece, Piece::Call { .. } | Piece::Arguments { .. });
    let said = |piece: &Piece| match piece {
        Piece::Text(text) | Piece::Thought(text) => unspaced(text),
        _ => String::new(),
    };
    if !all.iter().any(is_call) {
        let mut expected = text.to_string();
        let [think, thought] =
            if calls == Some(Calls::Mistral) { ["[THINK]", "[/THINK]"] } else { ["<think>", "</think>"] };
        let mut thinks = matches!(opened, Opened::Yes { .. });
        if matches!(opened, Opened::No) && style.thoughts && expected.trim_start().starts_with(think) {
            expected = expected.replacen(think, "", 1);
            thinks = true;
        }
        if thinks {
            expected = expected.replacen(thought, "", 1);
        }
        assert_eq!(all.iter().map(said).collect::<String>(), unspaced(&expected));
    }
    let (source, mut from) = (unspaced(&text), 0);
    for said in all.iter().map(said).filter(|said| !said.is_empty()) {
        let at = source[from..].find(&said).unwrap_or_else(|| panic!("{said:?} was not said"));
        from += at + said.len();
    }
}

/// A line with the path, and then a request: it goes through its dialect, the template and the tokenizer. Nothing that
/// a client sends is a fault of the server.
fn request(bytes: &[u8]) {
    let Some(line) = bytes.iter().position(|b| *b == b'\n') else { return };
    let Ok(path) = std::str::from_utf8(&bytes[..line]) else { return };
    match sluice_server::check_request(demo(), path, &bytes[line + 1..], 4096) {
        Ok(tokens) => assert!(tokens < 4096),
        Err((status, why)) => assert!((400..500).contains(&status) && !why.is_empty(), "{status}: {why}"),
    }
}

/// The format of an answer: a JSON schema, or, behind `r` or `l`, a regular expression or a grammar. It is compiled
/// within its limits, or refused with a reason.
fn grammar(bytes: &[u8]) {
    let form = match bytes.split_first() {
        Some((b'r', rest)) => GrammarFormat::Regex(String::from_utf8_lossy(rest).into_owned()),
        Some((b'l', rest)) => GrammarFormat::Lark(String::from_utf8_lossy(rest).into_owned()),
        _ => match serde_json::from_slice(bytes) {
            Ok(schema) => GrammarFormat::Schema(schema),
            Err(_) => return,
        },
    };
    match Constraint::new(demo(), &ConstraintSpec { format: form, ..ConstraintSpec::default() }, Opened::No) {
        Ok(constraint) => {
            let constraint = constraint.expect("a form");
            for answer in ["", "{}", "{\"a\": [1, \"b\", null]}", "ab"] {
                let _ = constraint.allows(demo(), answer);
            }
        }
        Err(e) => assert!(!e.to_string().is_empty()),
    }
}
