//! `run` and `serve` on models that are still arriving: the same answers, before all of it is here, and what becomes of them if the rest is wrong or does not come.

use crate::support;

use std::collections::BTreeMap;
use std::fs;
use std::io::Read;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use sluice_store::{Dtype, TensorPlan, Writer};
use support::hub::Place;
use support::server::Server;
use support::*;

const HIDDEN: usize = 128;
const VOCABULARY: usize = 16384;
const LIMIT: Duration = Duration::from_secs(120);

/// A Qwen3 of two layers in bf16 that speaks the demo model's tokens, some 55 MB: a mixture of 128 experts, or with `experts` 0 a dense model. `None` without a demo model.
fn model(experts: usize) -> Option<tempfile::TempDir> {
    let (demo, folder) = (demo()?, tempfile::tempdir().unwrap());
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        fs::copy(Path::new(&demo).join(name), folder.path().join(name)).unwrap();
    }
    let wide = if experts == 0 { 256 * 128 } else { 256 };
    let mut config = json!({
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": HIDDEN, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": wide, "vocab_size": VOCABULARY, "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6, "rope_theta": 1e4, "tie_word_embeddings": true, "hidden_act": "silu", "torch_dtype": "bfloat16",
    });
    if experts > 0 {
        config["model_type"] = "qwen3_moe".into();
        config["architectures"] = json!(["Qwen3MoeForCausalLM"]);
        config["num_experts"] = experts.into();
        config["num_experts_per_tok"] = 2.into();
        config["moe_intermediate_size"] = wide.into();
        config["norm_topk_prob"] = true.into();
    }
    fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    let mut plan = Vec::new();
    let mut add = |name: String, shape: &[usize]| {
        plan.push(TensorPlan { name, dtype: Dtype::BF16, shape: shape.to_vec() });
    };
    add("model.embed_tokens.weight".into(), &[VOCABULARY, HIDDEN]);
    for layer in 0..2 {
        let mut add = |name: &str, shape: &[usize]| add(format!("model.layers.{layer}.{name}"), shape);
        add("input_layernorm.weight", &[HIDDEN]);
        for expert in 0..experts.max(1) {
            let name = if experts > 0 { format!("mlp.experts.{expert}") } else { "mlp".to_owned() };
            add(&format!("{name}.gate_proj.weight"), &[wide, HIDDEN]);
            add(&format!("{name}.up_proj.weight"), &[wide, HIDDEN]);
            add(&format!("{name}.down_proj.weight"), &[HIDDEN, wide]);
        }
        if experts > 0 {
            add("mlp.gate.weight", &[experts, HIDDEN]);
        }
        add("post_attention_layernorm.weight", &[HIDDEN]);
        for (name, rows, columns) in
            [("q_proj", 128, HIDDEN), ("k_proj", 64, HIDDEN), ("v_proj", 64, HIDDEN), ("o_proj", HIDDEN, 128)]
        {
            add(&format!("self_attn.{name}.weight"), &[rows, columns]);
        }
        add("self_attn.q_norm.weight", &[32]);
        add("self_attn.k_norm.weight", &[32]);
    }
    add("model.norm.weight".into(), &[HIDDEN]);
    let mut random = fastrand::Rng::with_seed(7);
    let mut writer = Writer::create(&folder.path().join("model.safetensors"), &plan, &BTreeMap::new()).unwrap();
    for tensor in &plan {
        let count: usize = tensor.shape.iter().product();
        let values = (0..count).map(|_| half::bf16::from_f32(0.2 * (random.f32() - 0.5)));
        let bytes: Vec<u8> = values.flat_map(half::bf16::to_le_bytes).collect();
        writer.append(&tensor.name, &bytes).unwrap();
    }
    writer.finish().unwrap();
    Some(folder)
}

/// A hub with such a model, `org/m`, and its folder.
struct Case {
    place: Place,
    folder: tempfile::TempDir,
    bytes: u64,
}

impl Case {
    fn new(experts: usize) -> Option<Case> {
        let (place, folder) = (Place::new(), model(experts)?);
        place.add_folder("org/m", folder.path());
        let bytes = ["model.safetensors", "tokenizer.json"].map(|f| fs::metadata(folder.path().join(f)).unwrap().len());
        Some(Case { place, folder, bytes: bytes.iter().sum() })
    }

    /// Asks a model by name, or the folder.
    fn command(&self, model: &str, flags: &[&str]) -> Command {
        let mut command = self.place.sluice(&["run", model, "hi", "--raw", "-n", "12", "--temperature", "0"]);
        command.args(flags);
        command
    }

    /// The answer of the complete files.
    fn expected(&self, flags: &[&str]) -> String {
        success(self.command(&text(self.folder.path()), flags).output().unwrap())
    }

    /// Lets the hub send so many percent of all bytes from now on, and not at once: what nobody asks for would come before what somebody asks for when the program has
    /// started.
    fn hold(&self, percent: u64) {
        let until = self.place.hub.sent() + self.bytes * percent / 100;
        self.place.hub.faults(|f| (f.hold_after, f.bandwidth) = (Some(until), Some(4_000_000)));
    }

    fn go_on(&self) {
        self.place.hub.faults(|f| (f.hold_after, f.bandwidth) = (None, None));
    }

    fn blobs(&self) -> Vec<String> {
        let blobs = fs::read_dir(self.place.cache().join("models--org--m/blobs")).into_iter().flatten();
        blobs.map(|e| e.unwrap().file_name().into_string().unwrap()).filter(|name| name.len() >= 64).collect()
    }
}

/// A program whose first output has come.
struct Begun {
    child: Child,
    first: Vec<u8>,
}

/// Starts a program and waits for its first output.
fn begun(mut command: Command) -> Begun {
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut out = child.stdout.take().unwrap();
    let (sender, receiver) = std::sync::mpsc::channel();
    thread::spawn(move || {
        let mut first = [0; 1];
        let n = out.read(&mut first).unwrap();
        let _ = sender.send((out, first[..n].to_vec()));
    });
    match receiver.recv_timeout(LIMIT) {
        Ok((out, first)) => {
            child.stdout = Some(out);
            Begun { child, first }
        }
        Err(_) => {
            child.kill().unwrap();
            panic!("no output: {}", stderr(&child.wait_with_output().unwrap()));
        }
    }
}

impl Begun {
    fn end(self) -> Output {
        let mut output = self.child.wait_with_output().unwrap();
        output.stdout.splice(0..0, self.first);
        output
    }
}

#[test]
fn a_mixture_answers_when_a_quarter_of_it_is_here() {
    let Some(case) = Case::new(128) else { return };
    for flags in [
        &["--experts", "slots", "--expert-budget", "12M"][..],
        &["--experts", "pagecache", "--load", "direct", "--lookahead", "off"],
    ] {
        let expected = case.expected(flags);
        let _ = fs::remove_dir_all(case.place.cache());
        let sent = case.place.hub.sent();
        case.hold(25);
        let begun = begun(case.command("org/m", flags));
        case.go_on();
        let output = begun.end();
        let said = stderr(&output);
        assert!(said.contains("computing begins while it arrives"), "{said}");
        assert_eq!(success(output), expected, "{flags:?}");
        assert_eq!(case.blobs().iter().filter(|name| !name.contains("sluice")).count(), 2, "{flags:?}");
        // What was asked for twice, and answers that nobody waited for, are a small part.
        let extra = case.place.hub.sent() - sent;
        assert!(extra < case.bytes * 105 / 100, "{extra} of {} bytes were sent, {flags:?}", case.bytes);
    }
    // Now it is here, and nobody is asked.
    case.place.hub.requests();
    assert_eq!(success(case.command("org/m", &[]).output().unwrap()), case.expected(&[]));
    assert!(case.place.hub.requests().is_empty());
}

#[test]
fn a_dense_model_answers_as_from_its_complete_files_through_a_bad_network() {
    let Some(case) = Case::new(0) else { return };
    let expected = case.expected(&["--json"]);
    let answer = |output: Output| {
        let answer = json(output);
        (answer["tokens"].clone(), answer["stats"]["download"].clone())
    };
    let (tokens, download) = answer(case.command(&text(case.folder.path()), &["--json"]).output().unwrap());
    assert!(expected.contains(&tokens[0].to_string()) && download.is_null());
    case.place.hub.faults(|f| (f.cut_after, f.bandwidth) = (Some(900_000), Some(60_000_000)));
    let (found, download) = answer(case.command("org/m", &["--json"]).output().unwrap());
    assert_eq!(found, tokens);
    let [bytes, at_first] = ["bytes", "at_first_token"].map(|key| download[key].as_u64().unwrap());
    assert!(at_first <= bytes && at_first > bytes / 2, "{download}");
    // And one that is fetched whole first.
    fs::remove_dir_all(case.place.cache()).unwrap();
    case.place.hub.faults(|f| (f.cut_after, f.bandwidth) = (None, None));
    let waited = case.command("org/m", &["--json", "--wait-for-download"]).output().unwrap();
    assert!(!stderr(&waited).contains("while it arrives"), "{}", stderr(&waited));
    assert_eq!(answer(waited), (tokens, Value::Null));
}

const SLOTS: &[&str] = &["--experts", "slots", "--expert-budget", "12M"];

#[test]
fn wrong_bytes_are_told_and_nothing_of_them_stays() {
    let Some(case) = Case::new(128) else { return };
    case.hold(40);
    let begun = begun(case.command("org/m", SLOTS));
    case.place.hub.faults(|f| f.wrong_bytes = 1);
    case.go_on();
    let output = begun.end();
    let said = stderr(&output);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains("what arrived is not what the hub announced") && said.contains("do not use it"), "{said}");
    // Small blobs, at most; nothing of the wrong one.
    assert!(case.blobs().len() <= 1, "{:?}", case.blobs());
    // What a prompt cache would keep is computed from checked bytes alone.
    let cache = tempfile::tempdir().unwrap();
    let kept = format!("--prompt-cache={}", cache.path().display());
    let waited = case.command("org/m", &[&kept]).output().unwrap();
    assert!(stderr(&waited).contains("--prompt-cache: fetched whole before"), "{}", stderr(&waited));
    assert_eq!(success(case.command("org/m", SLOTS).output().unwrap()), case.expected(SLOTS));
}

#[test]
fn a_transfer_that_fails_ends_the_answer_with_its_own_error() {
    let Some(case) = Case::new(128) else { return };
    // Less than the embeddings: no token can be computed from it.
    case.hold(6);
    let mut child = case.command("org/m", SLOTS).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let begun = Instant::now();
    while case.place.hub.sent() < case.bytes * 6 / 100 && begun.elapsed() < LIMIT {
        thread::sleep(Duration::from_millis(10));
    }
    assert!(child.try_wait().unwrap().is_none());
    // A pause that nobody waits for, and no answer that was begun before goes on.
    case.place.hub.faults(|f| (f.bytes_status, f.ends) = (Some((503, u32::MAX, Some(100_000))), true));
    case.go_on();
    let output = child.wait_with_output().unwrap();
    let said = stderr(&output);
    assert!(output.status.code() == Some(2) && output.stdout.is_empty(), "{said}");
    assert!(said.lines().last().is_some_and(|line| line.contains("503") && line.contains("is kept")), "{said}");
    assert!(begun.elapsed() < LIMIT);
    case.place.hub.faults(|f| (f.bytes_status, f.ends) = (None, false));
    assert_eq!(success(case.command("org/m", SLOTS).output().unwrap()), case.expected(SLOTS));
}

#[test]
fn after_a_kill_the_next_start_goes_on() {
    let Some(case) = Case::new(128) else { return };
    case.hold(50);
    let mut killed = begun(case.command("org/m", SLOTS));
    killed.child.kill().unwrap();
    killed.child.wait().unwrap();
    case.hold(10);
    // The second one may wait for the same model, as a third does.
    let second = begun(case.command("org/m", SLOTS));
    let third = case.command("org/m", SLOTS).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    case.go_on();
    let (second, third) = (second.end(), third.wait_with_output().unwrap());
    let expected = case.expected(SLOTS);
    assert_eq!((success(second), success(third)), (expected.clone(), expected));
    let all = case.place.hub.sent();
    assert!(all < case.bytes * 115 / 100, "{all} of {} bytes were sent", case.bytes);
    // No folder of a process that has ended stays once another begins.
    let left = fs::read_dir(case.place.cache().join(".locks/.sluice")).unwrap().count();
    assert!(left <= 1, "{left} folders");
}

#[test]
fn ctrl_c_ends_the_answer_and_the_transfer() {
    let Some(case) = Case::new(128) else { return };
    case.hold(50);
    let begun = begun(case.command("org/m", SLOTS));
    thread::sleep(Duration::from_millis(300));
    let pid = begun.child.id().to_string();
    assert!(Command::new("kill").args(["-INT", &pid]).status().unwrap().success());
    let output = begun.end();
    assert_eq!(output.status.code(), Some(130), "{}", stderr(&output));
    case.go_on();
    assert_eq!(success(case.command("org/m", SLOTS).output().unwrap()), case.expected(SLOTS));
}

#[test]
fn a_server_answers_while_its_model_arrives() {
    let Some(case) = Case::new(128) else { return };
    let request = json!({"prompt": "hi", "max_tokens": 8, "temperature": 0});
    let serve = |model: &str| case.place.sluice(&[&["serve", model, "--port", "0"][..], SLOTS].concat());
    let server = Server::of(serve(&text(case.folder.path())));
    let expected = server.complete(request.clone())["choices"][0]["text"].clone();
    drop(server);
    // Experts are also read into free slots.
    case.hold(75);
    let server = Server::of(serve("org/m"));
    assert_eq!(server.complete(request.clone())["choices"][0]["text"], expected);
    assert_eq!(case.blobs().iter().filter(|name| name.contains("sluice")).count(), 2);
    case.go_on();
    let begun = Instant::now();
    while case.blobs().iter().any(|name| name.contains("sluice")) {
        assert!(begun.elapsed() < LIMIT, "it does not come to an end");
        thread::sleep(Duration::from_millis(50));
    }
    assert_eq!(server.complete(request)["choices"][0]["text"], expected);
}
