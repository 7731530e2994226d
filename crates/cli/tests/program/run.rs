//! `sluice run` on the demo model.

use crate::support;

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
    // Prompt and pipe together, with a blank line in between.
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
fn where_memory_and_threads_are_put_is_said_and_changes_no_answer() {
    let Some(demo) = demo() else { return };
    let plain = run(&[&demo, "Hi"]);
    assert!(!stderr(&plain).contains("numa"), "{}", stderr(&plain));
    for how in ["spread", "isolate", "replicate", "distribute", "bind", "mirror"] {
        let with = run(&[&demo, "Hi", "--numa", how]);
        assert_eq!(success(with.clone()), success(plain.clone()), "{how}");
        // With one node there is nothing to do, and the kernel may refuse.
        let said = stderr(&with);
        assert!(said.contains("numa: one node") || said.contains("numa: memory"), "{how}: {said}");
    }
}

#[test]
fn figures_go_to_standard_error() {
    let Some(demo) = demo() else { return };
    let plain = run(&[&demo, "Hi"]);
    let with = run(&[&demo, "Hi", "--stats", "--profile"]);
    assert_eq!(plain.stdout, with.stdout);
    let lines = stderr(&with);
    let numerics = format!("numerics {}", sluice_engine::NUMERICS_VERSION);
    let parts = ["tokens/s", "weights mapped", "scratch", "peak", "seed", &numerics, "finish", "delta_net", "GB/s"];
    for part in parts {
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

/// A slow answer that ends only with the context.
fn endless(args: &[&str]) -> std::process::Command {
    let demo = demo().unwrap();
    let question = ["run", &demo, "Once upon a time", "--raw", "--temp", "0", "--ignore-eos"];
    let mut command = sluice(&[&question, args].concat());
    command.env("SLUICE_ISA", "generic").stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn press_ctrl_c(child: &std::process::Child) {
    let id = child.id().to_string();
    assert!(std::process::Command::new("kill").args(["-INT", &id]).status().unwrap().success());
}

#[test]
fn ctrl_c_with_stats_prints_the_figures_of_what_there_is() {
    if demo().is_none() {
        return;
    }
    let mut child = endless(&["--stats"]).spawn().unwrap();
    let mut some = [0; 8];
    child.stdout.as_mut().unwrap().read_exact(&mut some).unwrap();
    press_ctrl_c(&child);
    let out = child.wait_with_output().unwrap();
    assert_eq!(out.status.code(), Some(130));
    let figures = stderr(&out);
    for part in ["generation", "tokens/s", "finish      cancelled"] {
        assert!(figures.contains(part), "{part} is not in: {figures}");
    }
}

#[test]
fn ctrl_c_with_json_prints_the_object_of_what_there_is() {
    if demo().is_none() {
        return;
    }
    // If it is too early, the model is still loading and there is nothing yet.
    let mut wait = std::time::Duration::from_millis(50);
    let found: serde_json::Value = loop {
        let child = endless(&["--json"]).spawn().unwrap();
        std::thread::sleep(wait);
        press_ctrl_c(&child);
        let out = child.wait_with_output().unwrap();
        // Before the handler is installed, the signal itself ends the process.
        assert!(matches!(out.status.code(), Some(130) | None), "{}", stdout(&out));
        if !out.stdout.is_empty() {
            break serde_json::from_slice(&out.stdout).unwrap();
        }
        wait *= 2;
    };
    assert_eq!(found["finish_reason"], "cancelled");
    assert_eq!(found["stats"]["generation"]["tokens"], found["tokens"].as_array().unwrap().len());
}

#[test]
fn flags_of_other_programs_do_the_same_here() {
    let Some(demo) = demo() else { return };
    let ask = |args: &[&str]| json(output(&[&["run", "--json"], args].concat()));
    let ours = ask(&[&demo, "A story", "-n", "6", "--seed", "3", "--temperature", "0.7", "--threads", "1"]);
    let theirs = ask(&["-m", &demo, "-p", "A story", "--n-predict", "6", "-s", "3", "--temp", "0.7", "-t", "1"]);
    assert_eq!(ours["tokens"], theirs["tokens"]);
    assert_eq!(theirs["stats"]["threads"], 1);
    assert_eq!(
        ask(&[&demo, "--prompt", "A story", "-n", "6", "--seed", "3", "--temp", "0.7"])["tokens"],
        ours["tokens"]
    );
    for context in [["-c", "40"], ["--ctx-size", "40"]] {
        let full = ask(&[&[demo.as_str(), "A story", "-n", "-1", "--ignore-eos"][..], &context].concat());
        assert_eq!((&full["finish_reason"], &full["stats"]["context"]["max"]), (&"context_full".into(), &40.into()));
    }
    assert_eq!(ask(&[&demo, "Hi", "-n", "1", "-c", "0"])["stats"]["context"]["max"], 4096);
    let seed = |json: serde_json::Value| json["stats"]["seed"].as_u64().unwrap();
    let fresh = || seed(ask(&[&demo, "Hi", "-n", "1", "--seed", "-1"]));
    assert_ne!(fresh(), fresh());
    // Beyond the model's own end, if it has one.
    let stops = ask(&[&demo, "What is 3 + 4?", "--temp", "0", "-n", "60"]);
    let goes_on = ask(&[&demo, "What is 3 + 4?", "--temp", "0", "-n", "60", "--ignore-eos"]);
    assert_eq!((&stops["finish_reason"], &goes_on["finish_reason"]), (&"stop".into(), &"length".into()));
}

#[test]
fn a_prompt_of_several_words_is_told_to_be_quoted() {
    let Some(demo) = demo() else { return };
    assert_refused(&output(&["run", "Hello", "world"]), &["sluice run \"Hello world\""]);
    assert_refused(&output(&["run", "Hello", "dear", "world"]), &["sluice run \"Hello dear world\""]);
    assert_refused(&output(&["run", &demo, "Hello", "world"]), &[&format!("sluice run {demo} \"Hello world\"")]);
    assert_refused(&output(&["run", "-m", &demo, "Hello", "world"]), &["\"Hello world\""]);
    assert_refused(&output(&["run", "-m", &demo, "-p", "Hello", "world"]), &["--prompt", "world"]);
}
