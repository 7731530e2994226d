//! Disks that fill up, fail or go away under the prompt cache of a running server: answers are the same as without a cache, one line reports the problem, and a metric shows
//! it.

use crate::support;

use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::json;
use support::server::Server;
use support::{demo, shim, sluice, text};

/// Prompts with nothing in common: together they leave more than three megabytes.
fn prompts() -> Vec<String> {
    let animals = ["fox", "crow", "wolf", "mouse", "lion", "bear", "frog", "hen", "goat", "owl", "cat", "dog"];
    let about = |animal: &str| {
        format!("The {animal} and the others. ") + &format!("One day the {animal} met a {animal}. ").repeat(30)
    };
    animals.iter().map(|animal| about(animal)).collect()
}

fn answers(server: &Server) -> Vec<String> {
    let ask = |prompt: &String| {
        let answer = server.complete(json!({"prompt": prompt, "max_tokens": 12, "temperature": 0}));
        answer["choices"][0]["text"].as_str().unwrap().to_owned()
    };
    prompts().iter().map(ask).collect()
}

fn flags(folder: &Path) -> [String; 5] {
    let cache = format!("--prompt-cache={}", text(folder));
    ["--prompt-cache-bytes=200M", "--prompt-cache-min-tokens=16", "--port=0", "--no-request-log", &cache]
        .map(Into::into)
}

fn serve(folder: &Path) -> Option<Server> {
    let mut command = sluice(&["serve", &demo()?]);
    command.args(flags(folder));
    Some(Server::of(command))
}

fn plain() -> Option<Vec<String>> {
    Server::start(&["--no-prefix-cache"]).map(|server| answers(&server))
}

/// Messages about the prompt cache: one line.
fn warning(server: &Server) -> String {
    server.wait_until("a warning", |s| s.lines.lock().unwrap().iter().any(|l| l.contains("prompt cache")));
    let lines = server.lines.lock().unwrap().clone();
    let (of_it, others): (Vec<_>, Vec<_>) = lines.into_iter().partition(|l| l.contains("prompt cache"));
    assert_eq!((of_it.len(), others.len()), (1, 0), "{of_it:?} {others:?}");
    of_it.into_iter().next().unwrap()
}

/// Runs a program whose arguments end in `end` with a disk of three megabytes at `folder`. `None`, with a note, if this user may not mount one.
fn on_a_small_disk(folder: &Path) -> Option<Command> {
    let script = format!("mount -t tmpfs -o size=3m none '{}' && exec \"$@\"", text(folder));
    let command = |program: &str| {
        let mut command = Command::new("unshare");
        command.args(["--mount", "--map-root-user", "sh", "-c", &script, "sh", program]);
        command
    };
    if !command("true").output().is_ok_and(|o| o.status.success()) {
        eprintln!("SKIPPED: this user may not mount a disk of its own");
        return None;
    }
    Some(command(env!("CARGO_BIN_EXE_sluice")))
}

#[test]
fn a_full_disk_is_said_once_and_done_with_what_fits() {
    let Some(plain) = plain() else { return };
    let home = tempfile::tempdir().unwrap();
    let folder = home.path().join("disk");
    fs::create_dir(&folder).unwrap();
    let Some(mut command) = on_a_small_disk(&folder) else { return };
    command.args(["serve", &demo().unwrap()]).args(flags(&folder.join("cache")));
    let server = Server::of(command);
    for _ in 0..3 {
        assert_eq!(answers(&server), plain);
    }
    let line = warning(&server);
    assert!(line.contains("full") || line.contains("No space left"), "{line}");
    assert!(server.metric("sluice:prompt_cache_bytes") <= 3e6);
    // What cannot be saved is not the client's fault.
    let (status, error) = save_session(&server);
    let message = error["error"]["message"].as_str().unwrap();
    assert!([503, 507].contains(&status) && !message.contains('/'), "{status}: {error}");
}

fn save_session(server: &Server) -> (u16, serde_json::Value) {
    server.post("/v1/sessions", &json!({"name": "a", "prompt": "Once upon a time there was a fox. ".repeat(60)}))
}

#[test]
fn a_session_without_room_is_a_fault_of_the_server_and_says_what_is_full() {
    let Some(model) = demo() else { return };
    let home = tempfile::tempdir().unwrap();
    let mut command = sluice(&["serve", &model, "--prompt-cache-daily-bytes=50K"]);
    command.args(flags(&home.path().join("cache")));
    let server = Server::of(command);
    let (status, error) = save_session(&server);
    let message = error["error"]["message"].as_str().unwrap();
    assert!(status == 507 && message.contains("has no room for the session"), "{status}: {error}");
    assert_eq!(error["error"]["code"], "insufficient_storage");
    assert!(server.get("/v1/sessions").1.contains("\"data\":[]"));
}

#[test]
fn a_disk_that_cannot_be_read_costs_what_lay_there() {
    let Some(plain) = plain() else { return };
    let home = tempfile::tempdir().unwrap();
    let (folder, broken) = (home.path().join("cache"), home.path().join("broken"));
    let Some(server) = serve(&folder) else { return };
    answers(&server);
    let stopped = Command::new("kill").arg(server.child.id().to_string()).status().unwrap();
    let mut server = server;
    assert!(stopped.success() && server.child.wait().unwrap().success());
    let begin = || {
        let mut command = sluice(&["serve", &demo().unwrap()]);
        command.args(flags(&folder)).env("LD_PRELOAD", shim()).env("FAULT", "slab-eio").env("FAULT_URING", "1");
        command.env("FAULT_FILE", &broken);
        Server::of(command)
    };
    // 1. With working reads, what was stored is found
    let server = begin();
    assert_eq!(answers(&server), plain);
    assert!(server.metric("sluice:prompt_cache_read_bytes") > 0.0);
    assert!(server.lines.lock().unwrap().is_empty());
    drop(server);
    // 2. With failing reads, it is computed
    fs::write(&broken, "").unwrap();
    let server = begin();
    assert_eq!(answers(&server), plain);
    let line = warning(&server);
    assert!(line.contains("cannot be read") || line.contains("Input/output error"), "{line}");
}

#[test]
fn a_folder_that_goes_away_is_done_without() {
    let Some(plain) = plain() else { return };
    let home = tempfile::tempdir().unwrap();
    let folder = home.path().join("cache");
    let Some(server) = serve(&folder) else { return };
    assert_eq!(answers(&server), plain);
    fs::remove_dir_all(&folder).unwrap();
    assert_eq!(answers(&server), plain);
    assert_eq!(answers(&server), plain);
    assert_eq!(server.get("/health").0, 200);
    let said = server.lines.lock().unwrap().clone();
    assert!(said.len() <= 1, "{said:?}");
}
