//! Any problem with a folder or a flag is reported in one line that names it, with exit code 2 and without a panic.

use crate::support;

use std::fs::{self, OpenOptions};
use std::path::Path;

use support::*;

const LOGITS: &[&str] = &["eval", "logits", "--tokens", "1,2,3"];

fn logits(folder: &Path) -> std::process::Output {
    output(&[LOGITS, &[&text(folder)]].concat())
}

#[test]
fn a_wrong_path_is_named() {
    let nowhere = "/no/such/model";
    for args in [&["run", nowhere, "hi"][..], &["run", nowhere], &["chat", nowhere], &["inspect", nowhere]] {
        assert_refused(&output(args), &[nowhere, "no such folder or file"]);
    }
    assert_refused(&output(&["eval", "ppl", nowhere, "--text", "x"]), &[nowhere]);
    assert_refused(&output(&["eval", "logits", nowhere, "--tokens", "1"]), &[nowhere]);
}

#[test]
fn a_file_is_not_a_model() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("model.gguf");
    fs::write(&file, "GGUF").unwrap();
    assert_refused(&output(&["run", &text(&file), "hi"]), &["model.gguf"]);
    assert_refused(&output(&["inspect", &text(&file)]), &["model.gguf", "end of the file"]);
    assert_refused(&output(&["run", "", "hi"]), &["name is empty"]);
    assert_refused(&logits(dir.path()), &["model.gguf", "end of the file"]);
    fs::remove_file(&file).unwrap();
    assert_refused(&logits(dir.path()), &["config.json"]);
}

#[test]
fn a_config_that_is_no_config_is_named() {
    let dir = copy_of("qwen3");
    for (config, part) in [("not json", "not JSON"), ("[]", "not a JSON object"), ("{}", "model_type")] {
        fs::write(dir.path().join("config.json"), config).unwrap();
        assert_refused(&logits(dir.path()), &["config.json", part]);
        assert_refused(&output(&["inspect", &text(dir.path())]), &["config.json"]);
    }
}

#[test]
fn another_architecture_is_named_with_those_that_are_supported() {
    let dir = copy_of("qwen3");
    let config = fs::read_to_string(dir.path().join("config.json")).unwrap();
    let other = config.replace("\"qwen3\"", "\"mamba\"");
    assert_ne!(config, other);
    fs::write(dir.path().join("config.json"), other).unwrap();
    assert_refused(&logits(dir.path()), &["config.json", "\"mamba\"", "qwen3_5_moe"]);
}

#[test]
fn a_missing_shard_is_named() {
    let dir = copy_of("qwen3");
    fs::remove_file(dir.path().join("model-00002-of-00003.safetensors")).unwrap();
    assert_refused(&logits(dir.path()), &["model-00002-of-00003.safetensors"]);
    assert_refused(&output(&["inspect", &text(dir.path())]), &["model-00002-of-00003.safetensors"]);
}

#[test]
fn a_truncated_file_is_named() {
    let dir = copy_of("qwen3");
    let path = dir.path().join("model-00003-of-00003.safetensors");
    let file = OpenOptions::new().write(true).open(&path).unwrap();
    for len in [file.metadata().unwrap().len() - 1, 100, 7, 0] {
        file.set_len(len).unwrap();
        assert_refused(&logits(dir.path()), &["model-00003-of-00003.safetensors", "truncated"]);
    }
}

#[test]
fn a_header_that_lies_is_named_with_its_tensor() {
    let dir = copy_of("qwen3_moe_stacked");
    let path = dir.path().join("model.safetensors");
    let entry = |dtype: &str, shape: &str, offsets: &str| {
        format!(
            "{{\"model.norm.weight\": {{\"dtype\": \"{dtype}\", \"shape\": {shape}, \"data_offsets\": {offsets}}}}}"
        )
    };
    for (header, part) in [
        (entry("F32", "[4]", "[0, 12]"), "model.norm.weight"),
        (entry("F32", "[4]", "[4, 20]"), "model.norm.weight"),
        (entry("F32", "[18446744073709551615, 2]", "[0, 16]"), "overflows"),
        (entry("Q9", "[4]", "[0, 16]"), "Q9"),
        (entry("F32", "[4]", "[0, 16]"), "embed_tokens"),
        ("{".to_owned(), "malformed"),
    ] {
        write_safetensors(&path, &header, 16);
        assert_refused(&logits(dir.path()), &[&text(dir.path()), part]);
    }
}

#[test]
fn a_wrong_shape_names_tensor_and_folder() {
    let dir = copy_of("qwen3_moe_stacked");
    let config: serde_json::Value =
        serde_json::from_str(&fs::read_to_string(dir.path().join("config.json")).unwrap()).unwrap();
    for (key, value) in [("head_dim", 1), ("num_experts", 1 << 20), ("vocab_size", 7), ("num_hidden_layers", 100)] {
        let mut wrong = config.clone();
        wrong[key] = value.into();
        fs::write(dir.path().join("config.json"), wrong.to_string()).unwrap();
        assert_refused(&logits(dir.path()), &[&text(dir.path())]);
    }
}

#[test]
fn a_missing_or_broken_tokenizer_is_named() {
    let dir = copy_of("qwen3");
    assert_refused(&output(&["run", &text(dir.path()), "hi"]), &["tokenizer.json"]);
    assert_refused(&output(&["chat", &text(dir.path())]), &["tokenizer.json"]);
    fs::write(dir.path().join("tokenizer.json"), "{").unwrap();
    assert_refused(&output(&["run", &text(dir.path()), "hi"]), &["tokenizer.json"]);
}

#[test]
fn tokens_outside_the_vocabulary_are_refused() {
    let model = golden("qwen3");
    assert_refused(&output(&["eval", "logits", &model, "--tokens", "1,99999"]), &["99999", "vocabulary"]);
}

#[test]
fn flags_that_make_no_sense_are_refused_by_name() {
    let model = golden("qwen3");
    for (args, part) in [
        (&["run", "--no-such-flag", "hi"][..], "--no-such-flag"),
        (&["run", "--threads", "0", "hi"], "--threads"),
        (&["run", "--threads", "100000", "hi"], "--threads"),
        (&["run", "--max-context", "18446744073709551615", "hi"], "--max-context"),
        (&["run", "--activations", "int4", "hi"], "--activations"),
        (&["run", "--template-arg", "a=b", "hi"], "--template-arg"),
        (&["eval", "logits", &model], "--tokens"),
        (&["eval", "logits", &model, "--tokens", "1,x"], "--tokens"),
        (&["walk"], "walk"),
    ] {
        let out = output(args);
        assert_eq!(out.status.code(), Some(2));
        assert!(stderr(&out).contains(part), "{part} is not in: {}", stderr(&out));
    }
}

#[test]
fn a_number_of_experts_is_checked_against_the_model() {
    let logits = |model: &str, k| output(&[LOGITS, &[&golden(model), "--experts-per-token", k]].concat());
    assert_refused(&logits("qwen3", "2"), &["qwen3", "no experts"]);
    assert_refused(&logits("qwen3_5_moe", "1000"), &["qwen3_5_moe", "1000"]);
    success(logits("qwen3_5_moe", "1"));
}

#[test]
fn an_instruction_set_that_is_not_there_is_refused() {
    let out = sluice(&[LOGITS, &[&golden("qwen3")]].concat()).env("SLUICE_ISA", "sse9").output().unwrap();
    assert_refused(&out, &["SLUICE_ISA", "sse9"]);
}

#[test]
fn without_a_prompt_it_is_said_how() {
    assert_refused(&output(&["run", "--raw"]), &["no prompt"]);
}

#[test]
fn a_demo_model_that_is_not_there_is_said_with_what_was_tried() {
    // A copy of the program outside of the repository finds no demo model.
    let dir = tempfile::tempdir().unwrap();
    let program = dir.path().join("sluice");
    fs::copy(env!("CARGO_BIN_EXE_sluice"), &program).unwrap();
    let start = || {
        let mut command = std::process::Command::new(&program);
        command.args(["run", "hi"]).current_dir(dir.path()).env_remove("SLUICE_DEMO").env("HOME", dir.path());
        command.stdin(std::process::Stdio::null()).output()
    };
    // While another test forks, its child may still hold the copy open for writing: "text file busy".
    let busy = |e: &std::io::Error| e.kind() == std::io::ErrorKind::ExecutableFileBusy;
    let mut out = start();
    while out.as_ref().is_err_and(busy) {
        std::thread::sleep(std::time::Duration::from_millis(10));
        out = start();
    }
    let out = out.unwrap();
    assert_refused(&out, &["demo model", "SLUICE_DEMO", "models/demo", "share/sluice/demo"]);
    let out = sluice(&["run", "hi"]).env("SLUICE_DEMO", "/no/demo").output().unwrap();
    assert_refused(&out, &["/no/demo", "no such folder"]);
}

#[test]
fn whoever_has_seen_enough_of_the_output_is_no_mistake() {
    let Some(demo) = demo() else { return };
    let flags = ["--tokens", "4", "--rounds", "1", "--context", "8", "--no-roofline"];
    let mut child = sluice(&[&["bench", "decode", &demo][..], &flags].concat());
    let mut child = child.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped()).spawn().unwrap();
    drop(child.stdout.take());
    let done = child.wait_with_output().unwrap();
    assert!(done.status.success() && !stderr(&done).contains("mistake"), "{}", stderr(&done));
}

#[test]
fn version_names_numerics_and_instruction_set() {
    let out = success(sluice(&["--version"]).env("SLUICE_ISA", "generic").output().unwrap());
    let numerics = format!("numerics {}", sluice_engine::NUMERICS_VERSION);
    assert!(out.starts_with("sluice 0.") && out.contains(&numerics) && out.contains("generic"), "{out}");
}

#[test]
fn a_device_that_cannot_be_used_is_named() {
    let model = golden("qwen3");
    for device in ["cuda:4000", "cuda:4294967295"] {
        let refused = output(&[LOGITS, &[&model, "--device", device]].concat());
        assert_refused(&refused, &[&format!("--device {device}")]);
    }
    for device in ["gpu", "cuda:", "cuda:x", "cpu:1", ""] {
        let refused = output(&[LOGITS, &[&model, "--device", device]].concat());
        assert_eq!(refused.status.code(), Some(2));
        assert!(stderr(&refused).contains("expected auto, cpu, cuda, cuda:N or cuda:N,N"), "{}", stderr(&refused));
    }
}

#[test]
fn attention_on_integers_takes_keys_and_values_of_as_many_bits_alone() {
    let model = golden("qwen3");
    let with = |mode: &str, flags: &[&str]| output(&[LOGITS, &[&model, "--json", "--attention", mode], flags].concat());
    for (mode, others) in [("int8", ["f32", "bf16", "f16", "int16"]), ("int16", ["f32", "bf16", "f16", "int8"])] {
        for kv_type in others {
            assert_refused(&with(mode, &["--kv-type", kv_type]), &["attention on integers", "--kv-type"]);
        }
        // The defaults if no type is given.
        assert_eq!(success(with(mode, &[])), success(with(mode, &["--kv-type", mode])));
    }
}

#[test]
fn where_there_is_no_device_auto_is_the_cpu_and_says_why() {
    let model = golden("qwen3");
    let [cpu, auto] = ["cpu", "auto"].map(|device| output(&[LOGITS, &["--json", &model, "--device", device]].concat()));
    let said = stderr(&auto);
    assert!(said.contains("device: cpu: ") || said.contains("device: cuda:0, "), "{said}");
    assert_eq!(success(auto), success(cpu));
}
