//! Experts that are read from disk when needed, in the shipped program: the same bits as mapped ones. Whatever the system refuses or breaks leads to another way of reading,
//! which is reported, or to an error that names the file.

use crate::support;

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;
use support::*;

/// Logits of a model whose experts are placed by these flags.
fn logits(folder: &str, flags: &[&str], fault: Option<(&str, &str)>, no_ring: bool) -> Output {
    command(folder, flags, fault, no_ring).output().unwrap()
}

fn command(folder: &str, flags: &[&str], fault: Option<(&str, &str)>, no_ring: bool) -> Command {
    let tokens: Vec<String> = (0..40).map(|i| (i * 37 % 250).to_string()).collect();
    let tokens = tokens.join(",");
    let mut command = sluice(&["eval", "logits", folder, "--tokens", &tokens, "--chunk", "1", "--json", "-v"]);
    command.args(flags);
    if let Some((fault, at)) = fault {
        command.env("LD_PRELOAD", shim()).env("FAULT", fault).env("FAULT_AT", at);
        if no_ring {
            command.env("FAULT_URING", "none");
        }
    }
    command
}

const SLOTS: &[&str] = &["--experts", "slots", "--load", "mmap"];

#[test]
fn experts_come_from_disk_with_the_same_bits_however_it_answers() {
    // On a disk, since golden files may be where direct reads are refused.
    let dir = copy_of("mlx_qwen3_moe");
    let folder = text(dir.path());
    let expected = success(logits(&folder, &["--experts", "mapped"], None, false));
    for flags in
        [SLOTS, &["--experts", "pagecache"], &["--experts", "slots", "--lookahead", "on", "--expert-request", "4096"]]
    {
        assert!(success(logits(&folder, flags, None, false)) == expected, "{flags:?}");
    }
    for (fault, no_ring, said) in [
        ("open-einval", false, "no direct reads (refused at open"),
        ("uring-enosys", false, "no io_uring"),
        ("uring-eperm", false, "no io_uring"),
        ("uring-enter", false, "no io_uring"),
        ("ring-einval", false, "no direct reads (refused at read"),
        ("ring-short", false, ""),
        ("read-einval", true, "no direct reads (refused at read"),
        ("short", true, "no io_uring"),
        ("eintr", true, "no io_uring"),
    ] {
        // With two in flight at once, the others are linked behind them.
        for flags in [SLOTS, &[SLOTS, &["--expert-depth", "2"]].concat()] {
            let found = logits(&folder, flags, Some((fault, "0")), no_ring);
            assert!(stderr(&found).contains(said), "{fault}: {}", stderr(&found));
            assert!(success(found) == expected, "{fault}, {flags:?}");
        }
    }
}

#[test]
fn a_disk_that_fails_ends_the_request_with_file_tensor_and_offset() {
    let dir = copy_of("mlx_qwen3_moe");
    let folder = text(dir.path());
    // In the middle of the experts of some layer.
    let lines = success(output(&["inspect", &folder, "--tensors", "--json"]));
    let tensors: Value = serde_json::from_str(&lines).unwrap();
    let found = tensors["tensors"]
        .as_array()
        .unwrap()
        .iter()
        .find(|t| t["name"].as_str().is_some_and(|n| n.contains("layers.2.mlp.switch_mlp.up_proj.weight")));
    let tensor = found.expect("a layer with experts");
    let at = (tensor["offset"].as_u64().unwrap() + tensor["bytes"].as_u64().unwrap() / 2).to_string();
    let linked = [SLOTS, &["--expert-depth", "2"]].concat();
    for (fault, no_ring, flags) in [("ring-eio", false, SLOTS), ("ring-eio", false, &linked), ("eio", true, SLOTS)] {
        let found = logits(&folder, flags, Some((fault, &at)), no_ring);
        assert!(!found.status.success(), "{fault}");
        let said = stderr(&found);
        for part in ["model.safetensors", "tensor \"", "at offset ", "Input/output error"] {
            assert!(said.contains(part), "{fault}: {part:?} is not in {said}");
        }
    }
}

#[test]
fn where_direct_reads_are_refused_the_page_cache_is_the_cache() {
    let dir = copy_of("mlx_qwen3_moe");
    let folder = text(dir.path());
    // Less memory than the folder has weights, most of which no model uses: `auto` streams.
    let others = fs::File::create(dir.path().join("others.safetensors")).unwrap();
    others.set_len(400 << 20).unwrap();
    let flags = ["--memory-budget", "256M", "--experts", "auto"];
    let expected = success(logits(&folder, &["--experts", "mapped"], None, false));
    // A disk without recorded speeds, until the first run. That run's choice depends on the disk's speed; a refusal does not.
    let memory = tempfile::tempdir().unwrap();
    for (fault, said) in [(None, "experts: "), (Some(("open-einval", "0")), "experts: pagecache: ")] {
        let found = command(&folder, &flags, fault, false).env("XDG_CACHE_HOME", memory.path()).output().unwrap();
        assert!(stderr(&found).contains(said), "{fault:?}: {}", stderr(&found));
        assert!(success(found) == expected, "{fault:?}");
    }
}

#[test]
fn statistics_tell_what_streaming_took() {
    let Some(demo) = demo() else { return };
    let flags =
        ["--experts", "slots", "--expert-budget", "12M", "--max-tokens", "12", "--seed", "1", "--temperature", "0"];
    let ask = |more: &[&str]| output(&[&["run", &demo, "Once"][..], &flags, more].concat());
    let answer: Value = serde_json::from_str(&success(ask(&["--json"]))).unwrap();
    let figures = &answer["stats"];
    let experts = &figures["experts"];
    assert_eq!(experts["placement"], "slots");
    let number = |name: &str| experts[name].as_f64().unwrap();
    assert!(number("wanted") > 0.0 && number("hits") < number("wanted"), "{experts}");
    assert!(number("read_bytes") > 0.0 && number("read_bytes_per_second") > 0.0, "{experts}");
    assert!(number("slots") < number("experts") && figures["memory"]["experts"].as_f64().unwrap() <= 12e6, "{figures}");
    let plain: Value = serde_json::from_str(&success(output(&[
        "run",
        &demo,
        "Once",
        "--max-tokens",
        "12",
        "--temperature",
        "0",
        "--json",
    ])))
    .unwrap();
    assert_eq!(plain["stats"]["experts"]["placement"], "mapped");
    assert_eq!(plain["text"], answer["text"]);
    assert!(stderr(&ask(&["--stats"])).contains("in slots"));
}

#[test]
fn what_cannot_be_is_said() {
    let folder = golden("qwen3");
    let wrong = output(&["eval", "logits", &folder, "--tokens", "1", "--experts", "slots"]);
    assert!(!wrong.status.success() && stderr(&wrong).contains("no experts"), "{}", stderr(&wrong));
    let moe = golden("mlx_qwen3_moe");
    let small = output(&["eval", "logits", &moe, "--tokens", "1", "--experts", "slots", "--expert-budget", "4096"]);
    assert!(!small.status.success() && stderr(&small).contains("too few for experts"), "{}", stderr(&small));
    let pin = Path::new(&moe).join("config.json");
    let wrong = output(&["eval", "logits", &moe, "--tokens", "1", "--experts", "slots", "--pin", &text(&pin)]);
    assert!(!wrong.status.success() && stderr(&wrong).contains("missing field `layers`"), "{}", stderr(&wrong));
}
