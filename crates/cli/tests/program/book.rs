//! The commands of the book do what its text says: each page's are run in turn, by a shell, with a hub that has the models which the page names.

use crate::support;

use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use sluice_test_hub::Content;
use support::hub::Place;
use support::*;

/// A shell's `sluice` that goes on when a server is ready, and ends servers with the page.
const PREAMBLE: &str = r#"
set -eu
servers=
trap 'for server in $servers; do kill $server; wait $server || true; done' EXIT
sluice() {
  if [ "$1" != serve ]; then command sluice "$@"; return; fi
  command sluice "$@" &
  server=$!
  servers="$servers $server"
  until curl -sf -o nothing "http://localhost:$SLUICE_PORT/health"; do kill -0 $server; sleep 0.05; done
}
"#;

fn pages() -> PathBuf {
    root().join("docs/book/src")
}

/// The blocks of a page that are marked as a shell's.
fn commands(page: &str) -> String {
    let text = fs::read_to_string(pages().join(page)).unwrap();
    let (mut commands, mut is_inside) = (String::new(), false);
    for line in text.lines() {
        match line.trim() {
            "```sh" => is_inside = true,
            "```" => is_inside = false,
            command if is_inside => commands += &format!("{command}\n"),
            _ => {}
        }
    }
    commands
}

/// A hub with what pages name, under the demo model's bytes.
fn place(demo: &str) -> Place {
    let place = Place::new();
    for repo in ["Qwen/Qwen3-0.6B", "Qwen/Qwen3-30B-A3B"] {
        place.add_folder(repo, Path::new(demo));
    }
    place.hub.commit("unsloth/Qwen3-8B-GGUF", &[("Qwen3-8B-Q4_K_M.gguf", Content::random(1, 100_000))]);
    place
}

/// Runs the commands of a page, and returns what they print.
fn run(page: &str) -> Option<String> {
    let demo = demo()?;
    if !Command::new("curl").arg("--version").output().is_ok_and(|o| o.status.success()) {
        eprintln!("SKIPPED: no curl");
        return None;
    }
    let place = place(&demo);
    let folder = tempfile::tempdir().unwrap();
    // Agents that say that they were started.
    let programs = folder.path().join("bin");
    fs::create_dir(&programs).unwrap();
    for agent in ["claude", "codex"] {
        let path = programs.join(agent);
        fs::write(&path, format!("#!/bin/sh\necho {agent} was started\n")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    }
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_sluice"), programs.join("sluice")).unwrap();
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port().to_string();
    let script = format!("{PREAMBLE}{}", commands(page).replace("8080", &port));
    // The environment of a command of this place, and its own home.
    let like = place.sluice(&[]);
    let mut shell = Command::new("sh");
    for (name, value) in like.get_envs() {
        match value {
            Some(value) => shell.env(name, value),
            None => shell.env_remove(name),
        };
    }
    let path = format!("{}:{}", programs.display(), std::env::var("PATH").unwrap());
    shell.env("PATH", path).env("HOME", folder.path()).env("SLUICE_PORT", &port).current_dir(folder.path());
    let output = shell.args(["-c", &script]).stdin(std::process::Stdio::null()).output().unwrap();
    assert!(output.status.success(), "{page}: {}\n{}", stdout(&output), stderr(&output));
    Some(stdout(&output) + &stderr(&output))
}

/// Whether a page's commands print all of this.
fn prints(page: &str, parts: &[&str]) {
    let Some(printed) = run(page) else { return };
    for part in parts {
        assert!(printed.contains(part), "{page}: {part:?} is not in:\n{printed}");
    }
}

#[test]
fn start() {
    prints("start.md", &["Qwen/Qwen3-0.6B: fetching", "listening on", "\"finish_reason\"", "as the hub announced"]);
}

#[test]
fn choose() {
    prints("choose.md", &["processor", "tokens/s", "unsloth/Qwen3-8B-GGUF:Q4_K_M", "qwen3_5_moe"]);
}

#[test]
fn larger_than_memory() {
    prints("larger-than-memory.md", &["experts", "finish"]);
}

#[test]
fn agents() {
    prints("agents.md", &["claude was started", "codex was started", "ANTHROPIC_BASE_URL"]);
}

#[test]
fn team() {
    prints("team.md", &["Qwen3-0.6B", "vllm:num_requests_running"]);
}

#[test]
fn prompt_cache() {
    prints("prompt-cache.md", &["finish", "listening on"]);
}

#[test]
fn gpu() {
    prints("gpu.md", &["processor"]);
}

#[test]
fn troubleshooting() {
    prints("troubleshooting.md", &["generic", "sluice 0"]);
}

#[test]
fn each_page_is_listed_and_each_that_has_commands_is_run() {
    let summary = fs::read_to_string(pages().join("SUMMARY.md")).unwrap();
    let own = include_str!("book.rs");
    for entry in fs::read_dir(pages()).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        assert!(name == "SUMMARY.md" || summary.contains(&format!("({name})")), "{name} is not in SUMMARY.md");
        assert!(commands(&name).is_empty() || own.contains(&format!("prints(\"{name}\"")), "{name} is not run");
    }
}
