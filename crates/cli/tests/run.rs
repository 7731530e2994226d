//! `sluice run` on the demo model.

mod support;

use std::io::Read;
use std::process::Stdio;

use support::*;

const GREEDY: &[&str] = &["--temperature", "0", "-n", "12"];

fn run(args: &[&str]) -> std::process::Output {
    output(&[&["run"], args, GREEDY].concat())
}

#[test]
fn the_prompt_comes_by_word_by_flag_or_by_pipe_and_the_answer_is_the_same() {
    let Some(demo) = demo() else { return };
    let expected = success(run(&[&demo, "What is 3 + 4?"]));
    assert!(!expected.trim().is_empty() && expected.ends_with('\n'));
    assert_eq!(success(run(&["-m", &demo, "What is 3 + 4?"])), expected);
    let pipe = |args: &[&str], input| success(piped(sluice(&[&["run"], args, GREEDY].concat()), input));
    assert_eq!(pipe(&[&demo], "What is 3 + 4?\n"), expected);
    assert_eq!(pipe(&["--model", &demo], "What is 3 + 4?"), expected);
    let named = |args: &[&str]| sluice(&[&["run"], args, GREEDY].concat());
    let mut command = named(&["What is 3 + 4?"]);
    assert_eq!(success(command.env("SLUICE_DEMO", &demo).output().unwrap()), expected);
    let mut command = named(&[]);
    command.env("SLUICE_DEMO", &demo);
    assert_eq!(success(piped(command, "What is 3 + 4?\n")), expected);
    // Prompt and pipe together: a blank line in between.
    assert_eq!(pipe(&[&demo, "Tell me:"], "why?\n"), success(run(&[&demo, "Tell me:\n\nwhy?"])));
}

#[test]
fn the_chat_template_and_the_system_message_make_a_difference() {
    let Some(demo) = demo() else { return };
    let tokens =
        |args: &[&str]| json(run(&[&[demo.as_str(), "Hello", "--json"], args].concat()))["prompt_tokens"].as_u64();
    let (plain, raw, system) =
        (tokens(&[]).unwrap(), tokens(&["--raw"]).unwrap(), tokens(&["--system", "Be kind."]).unwrap());
    assert!(raw < plain && plain < system, "{raw} {plain} {system}");
    let written = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n";
    let by_hand = json(run(&[&demo, written, "--raw", "--json"]));
    assert_eq!(by_hand["text"], json(run(&[&demo, "Hello", "--json"]))["text"]);
}

#[test]
fn json_is_one_object_with_all_figures() {
    let Some(demo) = demo() else { return };
    let found =
        json(output(&["run", &demo, "Once upon a time", "--raw", "-n", "5", "--seed", "7", "--json", "--profile"]));
    assert_eq!(found["tokens"].as_array().unwrap().len(), 5);
    assert_eq!(found["finish_reason"], "length");
    let stats = &found["stats"];
    assert_eq!((&stats["seed"], &stats["generation"]["tokens"]), (&7.into(), &5.into()));
    assert_eq!(stats["prompt"]["tokens"], found["prompt_tokens"]);
    let memory = ["weights_mapped", "weights_copied", "kv", "state", "scratch", "peak_rss", "rss_anon", "rss_file"];
    assert!(memory.iter().all(|name| stats["memory"][name].as_u64().unwrap() > 0), "{stats}");
    let first = stats["first_token_seconds"].as_object().unwrap();
    assert!(first["from_start"].as_f64() > first["from_request"].as_f64());
    for name in ["threads", "isa", "activations", "numerics_version", "load_seconds"] {
        assert!(!stats[name].is_null(), "{name}");
    }
    let profile = &stats["profile"]["generation"];
    assert!(profile["experts"]["weight_bytes"].as_u64().unwrap() > 0, "{profile}");
}

#[test]
fn figures_go_to_standard_error() {
    let Some(demo) = demo() else { return };
    let plain = run(&[&demo, "Hi"]);
    let with = run(&[&demo, "Hi", "--stats", "--profile"]);
    assert_eq!(plain.stdout, with.stdout);
    let lines = stderr(&with);
    for part in ["tokens/s", "weights mapped", "scratch", "peak", "seed", "numerics 2", "finish", "delta_net", "GB/s"] {
        assert!(lines.contains(part), "{part} is not in: {lines}");
    }
}

#[test]
fn a_seed_repeats_an_answer() {
    let Some(demo) = demo() else { return };
    let ask = |seed: &[&str]| json(output(&[&["run", &demo, "A story", "-n", "20", "--json"], seed].concat()));
    let first = ask(&[]);
    let seed = first["stats"]["seed"].to_string();
    assert_eq!(ask(&["--seed", &seed])["tokens"], first["tokens"]);
    assert_eq!(ask(&["--seed", &seed, "--threads", "1", "--chunk", "1"])["tokens"], first["tokens"]);
}

#[test]
fn a_stop_string_ends_the_answer_before_it() {
    let Some(demo) = demo() else { return };
    let raw = |stop: &[&str]| {
        json(output(
            &[&["run", &demo, "Once upon a time", "--raw", "--temperature", "0", "-n", "40", "--json"], stop].concat(),
        ))
    };
    let whole = raw(&[])["text"].as_str().unwrap().to_owned();
    let word = whole.split(' ').nth(6).unwrap();
    let cut = raw(&["--stop", "no such text", "--stop", word]);
    assert_eq!(cut["finish_reason"], "stop_string");
    assert_eq!(cut["text"], whole[..whole.find(word).unwrap()]);
}

#[test]
fn a_model_without_a_template_gets_the_text_as_it_is() {
    let Some(demo) = demo() else { return };
    let dir = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(&demo).unwrap() {
        let entry = entry.unwrap();
        if entry.file_name() != "tokenizer_config.json" {
            std::os::unix::fs::symlink(entry.path(), dir.path().join(entry.file_name())).unwrap();
        }
    }
    let out = run(&[&text(dir.path()), "Once upon a time"]);
    assert!(stderr(&out).contains("no chat template"), "{}", stderr(&out));
    assert_eq!(success(out), success(run(&[&demo, "Once upon a time", "--raw"])));
}

#[test]
fn a_prompt_longer_than_the_context_is_refused() {
    let Some(demo) = demo() else { return };
    let long = "word ".repeat(100);
    assert_refused(&run(&[&demo, &long, "--max-context", "50"]), &["context of 50", "--max-context"]);
    let full =
        json(output(&["run", &demo, "Once upon", "--raw", "--max-context", "16", "--json", "--temperature", "0"]));
    assert_eq!(full["finish_reason"], "context_full");
    assert_eq!(full["stats"]["context"], serde_json::json!({"tokens": 16, "max": 16}));
}

#[test]
fn sampling_flags_out_of_range_are_refused() {
    let Some(demo) = demo() else { return };
    for (flag, value) in [("--temperature", "-1"), ("--top-p", "0"), ("--min-p", "2"), ("--presence-penalty", "-3")] {
        assert_refused(&output(&["run", &demo, "Hi", flag, value]), &[&flag[2..].replace('-', "_"), value]);
    }
}

#[test]
fn a_reader_that_goes_away_ends_it_quietly() {
    let Some(demo) = demo() else { return };
    let mut command = sluice(&["run", &demo, "Once upon a time", "--raw", "-n", "400"]);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut some = [0; 8];
    child.stdout.take().unwrap().read_exact(&mut some).unwrap();
    let out = child.wait_with_output().unwrap();
    assert!(out.status.success() && out.stderr.is_empty(), "{:?} {}", out.status, stderr(&out));
}

#[test]
fn ctrl_c_leaves_at_once_with_130() {
    let Some(demo) = demo() else { return };
    let mut command = sluice(&["run", &demo, "Once upon a time", "--raw"]);
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
    let mut some = [0; 8];
    child.stdout.as_mut().unwrap().read_exact(&mut some).unwrap();
    let id = child.id().to_string();
    assert!(std::process::Command::new("kill").args(["-INT", &id]).status().unwrap().success());
    assert_eq!(child.wait().unwrap().code(), Some(130));
}
