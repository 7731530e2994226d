//! Hostile model folders: templates that take forever, pipes and devices instead of files, invalid numbers. Each is reported in one line that names the file, and `inspect`
//! refuses what `run` refuses.

use crate::support;

use std::fs;
use std::os::unix::fs::{FileExt, symlink};
use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};
use sluice_store::safetensors::Header;
use support::*;

/// The demo model by links, except for `name`, which the test makes.
fn demo_without(name: &str) -> Option<tempfile::TempDir> {
    let (demo, dir) = (demo()?, tempfile::tempdir().unwrap());
    for entry in fs::read_dir(demo).unwrap() {
        let entry = entry.unwrap();
        if entry.file_name() != name {
            symlink(entry.path(), dir.path().join(entry.file_name())).unwrap();
        }
    }
    Some(dir)
}

fn answer(folder: &Path) -> std::process::Output {
    output(&["run", &text(folder), "Hi", "--max-tokens", "2", "--seed", "1"])
}

#[test]
fn templates_that_want_all_memory_or_time_are_errors() {
    let Some(dir) = demo_without("chat_template.jinja") else { return };
    let path = dir.path().join("chat_template.jinja");
    let doubled = |how: &str| format!("{{% set ns = namespace(s='x') %}}{{% for i in range(60) %}}{how}{{% endfor %}}");
    let nested = "{% set ns = namespace(x=[1], y=[1]) %}{% for a in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}{% endfor %}";
    for source in [
        "{% set a = 'x' * 1000000 %}{{ a | replace('x', a) }}".to_owned(),
        "{{ ('x' * 1000000).replace('x', 'y' * 1000000) }}".to_owned(),
        "{{ ('x\n' * 10000) | indent(100000000) }}".to_owned(),
        "{{ '%4000000000d' | format(1) }}".to_owned(),
        "{{ range(100000) | join('x' * 100000) }}".to_owned(),
        "{{ [1] | batch(4000000000, 0) | list | length }}".to_owned(),
        doubled("{% set ns.s = ns.s ~ ns.s %}"),
        doubled("{% set ns.s = ns.s + ns.s %}"),
        doubled("{% set t %}{{ ns.s }}{{ ns.s }}{% endset %}{% set ns.s = t %}"),
        "{% set ns = namespace(s=[1]) %}{% for i in range(60) %}{% set ns.s = (ns.s + ns.s) | list %}{% endfor %}"
            .to_owned(),
        // Without a loop, before it even runs: the compiler folds constants.
        format!("{{% set a = 'x' * 1000 %}}{}", "{% set a = a ~ a %}".repeat(60)),
        format!("{{{{ {} }}}}", vec!["'x' * 90000000"; 200].join(" ~ ")),
        // Its ten seconds of processor time are waited for.
        format!("{nested}{{{{ ns.x == ns.y }}}}"),
    ] {
        fs::write(&path, &source).unwrap();
        assert_refused(&answer(dir.path()), &["chat_template.jinja: chat template"]);
    }
    // Questions that can be answered still have the same answers.
    fs::write(&path, "{{ messages[0].content }}").unwrap();
    let plain = success(output(&["run", &text(dir.path()), "Hi", "--max-tokens", "2", "--seed", "1", "--raw"]));
    assert_eq!(success(answer(dir.path())), plain);
}

#[test]
fn a_tokenizer_that_its_library_panics_at_is_an_error() {
    let Some(dir) = demo_without("tokenizer.json") else { return };
    let mut tokenizer: Value =
        serde_json::from_slice(&fs::read(Path::new(&demo().unwrap()).join("tokenizer.json")).unwrap()).unwrap();
    tokenizer["normalizer"] = json!({"type": "Replace", "pattern": {"String": ""}, "content": "b"});
    fs::write(dir.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
    assert_refused(&answer(dir.path()), &["tokenizer.json", "library"]);
}

#[test]
fn pipes_devices_and_endless_files_are_refused() {
    for name in
        ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"]
    {
        let Some(dir) = demo_without(name) else { return };
        let path = dir.path().join(name);
        for make in ["mkfifo", "/dev/zero", "/dev/null", "mkdir", "large"] {
            match make {
                "mkfifo" | "mkdir" => assert!(Command::new(make).arg(&path).status().unwrap().success()),
                "large" => fs::File::create(&path).unwrap().set_len(1 << 40).unwrap(),
                device => symlink(device, &path).unwrap(),
            }
            let why = if make == "large" { "above the limit" } else { "not a regular file" };
            for command in [&["run"][..], &["inspect"]] {
                let prompt: &[&str] = if command == ["run"] { &["Hi", "--max-tokens", "1"] } else { &[] };
                let out = output(&[command, &[&text(dir.path())], prompt].concat());
                if name == "generation_config.json" {
                    // These are only defaults.
                    let said = stderr(&out);
                    assert!(out.status.success() && said.contains(&text(&path)) && said.contains(why), "{said}");
                } else {
                    assert_refused(&out, &[&text(&path), why]);
                }
            }
            if make == "mkdir" { fs::remove_dir(&path).unwrap() } else { fs::remove_file(&path).unwrap() }
        }
    }
}

#[test]
fn inspect_refuses_what_run_refuses_and_both_name_the_key() {
    let yarn = |factor: Value| json!({"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": 64});
    for (model, key, value) in [
        ("qwen3", "rms_norm_eps", json!(-1)),
        ("qwen3", "rms_norm_eps", json!("1e-6")),
        ("qwen3", "rope_theta", json!(0)),
        ("qwen3", "rope_scaling", yarn(json!(0))),
        ("qwen3", "rope_scaling", yarn(json!(-2))),
        ("qwen3", "hidden_act", json!("gelu")),
        ("qwen3", "num_attention_heads", json!(16777216)),
        ("qwen3", "num_key_value_heads", json!(3)),
        ("qwen3", "vocab_size", json!(7)),
        ("qwen3", "num_hidden_layers", json!(16777216)),
        ("qwen3", "layer_types", json!(["full_attention"])),
        ("qwen3_moe", "num_experts_per_tok", json!(1000)),
        ("qwen3_moe", "norm_topk_prob", json!("yes")),
        ("qwen3_5_moe", "moe_intermediate_size", json!(1)),
        ("qwen3_next", "linear_num_value_heads", json!(16777216)),
        ("qwen3_next", "linear_conv_kernel_dim", json!(0)),
        ("mlx_qwen3", "quantization", json!({"bits": 8, "group_size": 64})),
    ] {
        let dir = copy_of(model);
        let path = dir.path().join("config.json");
        let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        let part = if config["text_config"].is_object() { &mut config["text_config"] } else { &mut config };
        part.as_object_mut().unwrap().remove("rope_parameters");
        part[key] = value.clone();
        fs::write(&path, config.to_string()).unwrap();
        let folder = text(dir.path());
        let outs = [output(&["eval", "logits", &folder, "--tokens", "1,2,3"]), output(&["inspect", &folder])];
        for out in &outs {
            assert_refused(out, &[&folder]);
        }
        assert_eq!(stderr(&outs[0]), stderr(&outs[1]), "{model} {key} {value}");
    }
}

#[test]
fn sampling_defaults_without_a_meaning_cost_a_line_that_names_file_and_key() {
    let Some(dir) = demo_without("generation_config.json") else { return };
    let path = dir.path().join("generation_config.json");
    for (key, value) in [("temperature", "-1"), ("top_p", "0"), ("top_k", "-2"), ("repetition_penalty", "0")] {
        fs::write(&path, format!("{{\"{key}\": {value}}}")).unwrap();
        for out in [answer(dir.path()), output(&["inspect", &text(dir.path())])] {
            let said = stderr(&out);
            assert!(
                out.status.success() && [&text(&path), key, value].iter().all(|part| said.contains(part)),
                "{said}"
            );
        }
    }
    fs::write(&path, "{\"top_k\": 3,,}").unwrap();
    let out = answer(dir.path());
    assert!(out.status.success() && stderr(&out).contains("generation_config.json"), "{}", stderr(&out));
    fs::write(&path, "{\"top_k\": -1}").unwrap();
    success(answer(dir.path()));
}

#[test]
fn logits_that_are_not_numbers_are_never_printed() {
    let dir = copy_of("qwen3");
    // If every byte is 255, every floating-point type reads NaN.
    let mut found = false;
    for entry in fs::read_dir(dir.path()).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|e| e != "safetensors") {
            continue;
        }
        let file = fs::File::options().read(true).write(true).open(&path).unwrap();
        let header = Header::read(&file, file.metadata().unwrap().len(), &path).unwrap();
        for t in header.tensors.iter().filter(|t| t.name == "model.norm.weight") {
            file.write_all_at(&vec![255; (t.range.end - t.range.start) as usize], t.range.start).unwrap();
            found = true;
        }
    }
    assert!(found);
    for more in [&[][..], &["--json"], &["--all"]] {
        let out = output(&[&["eval", "logits", &text(dir.path()), "--tokens", "1,2,3"], more].concat());
        assert_refused(&out, &["NaN"]);
        assert!(!stdout(&out).contains("NaN"));
    }
}
