//! `sluice launch`: an agent is told of the server by variables and flags alone; a server of its own ends with it. The agent is a stand-in that records what it is told, and talks
//! with the server.

use crate::support;

use std::fs;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::thread::{self, sleep};
use std::time::{Duration, Instant};

use serde_json::Value;
use support::server::Server;
use support::*;

/// Asks the server in its dialect, and ends as no other program does.
const STAND_IN: &str = r#"#!/bin/bash
env > "$RECORD/env"
printf '%s\n' "$@" > "$RECORD/arguments"
ask() {
  local url=${1#http://} body=$3
  exec 3<>"/dev/tcp/${url%:*}/${url#*:}"
  printf 'POST %s HTTP/1.0\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s' "$2" "${#body}" "$body" >&3
  cat <&3 > "$RECORD/answer"
}
hello='"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4'
if [ -n "$ANTHROPIC_BASE_URL" ]; then
  ask "$ANTHROPIC_BASE_URL" /v1/messages "{\"model\": \"$ANTHROPIC_MODEL\", $hello}"
elif [ -n "$OPENAI_BASE_URL" ]; then
  ask "${OPENAI_BASE_URL%/v1}" /v1/chat/completions "{\"model\": \"$OPENAI_MODEL\", $hello}"
fi
[ -z "$WAIT" ] || { touch "$RECORD/waits"; sleep 20; }
exit 7
"#;

/// A home, a PATH with one agent, and what the agent records.
struct Place {
    home: tempfile::TempDir,
    port: u16,
}

impl Place {
    fn with(agent: &str) -> Place {
        let home = tempfile::tempdir().unwrap();
        fs::create_dir(home.path().join("bin")).unwrap();
        fs::create_dir(home.path().join("record")).unwrap();
        let program = home.path().join("bin").join(agent);
        fs::write(&program, STAND_IN).unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        // Free a moment ago.
        let port = TcpListener::bind(("127.0.0.1", 0)).unwrap().local_addr().unwrap().port();
        Place { home, port }
    }

    fn launch(&self, args: &[&str]) -> Command {
        // Before what is the agent's.
        let port = self.port.to_string();
        let port = if args.contains(&"--port") { vec![] } else { vec!["--port", &port] };
        let mut command = sluice(&["launch"]);
        command.args(port).args(args).env("HOME", self.home.path()).env("RECORD", self.record());
        let path = std::env::var("PATH").unwrap();
        command.env("PATH", format!("{}:{path}", self.home.path().join("bin").display()));
        for name in ["ANTHROPIC_BASE_URL", "ANTHROPIC_MODEL", "OPENAI_BASE_URL", "OPENAI_MODEL"] {
            command.env_remove(name);
        }
        command
    }

    fn record(&self) -> std::path::PathBuf {
        self.home.path().join("record")
    }

    fn recorded(&self, name: &str) -> String {
        fs::read_to_string(self.record().join(name)).unwrap()
    }

    fn variable(&self, name: &str) -> Option<String> {
        let all = self.recorded("env");
        all.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('=')).map(str::to_owned)
    }

    /// What the server answered the agent.
    fn answer(&self) -> Value {
        let text = self.recorded("answer");
        let (head, body) = text.split_once("\r\n\r\n").unwrap_or_else(|| panic!("{text}"));
        assert!(head.contains(" 200 "), "{text}");
        serde_json::from_str(body).unwrap()
    }

    fn is_served(&self) -> bool {
        TcpStream::connect(("127.0.0.1", self.port)).is_ok()
    }
}

fn ended_with(output: &Output, code: i32) {
    assert_eq!(output.status.code(), Some(code), "{}", stderr(output));
}

#[test]
fn an_agent_gets_a_server_of_its_own_which_ends_with_it() {
    let (Some(demo), place) = (demo(), Place::with("claude")) else { return };
    let mut command =
        place.launch(&["claude", &demo, "--serve", "--max-context 2048 --parallel 2", "--", "-p", "two words"]);
    command.env("ANTHROPIC_API_KEY", "somebody's");
    let output = command.output().unwrap();
    ended_with(&output, 7);
    assert_eq!(place.answer()["type"], "message");
    assert_eq!(place.recorded("arguments"), "-p\ntwo words\n");
    assert_eq!(place.variable("ANTHROPIC_BASE_URL"), Some(format!("http://127.0.0.1:{}", place.port)));
    assert_eq!(place.variable("CLAUDE_CODE_MAX_CONTEXT_TOKENS").as_deref(), Some("2048"));
    assert_eq!(place.variable("ANTHROPIC_API_KEY"), None);
    let name = place.variable("ANTHROPIC_MODEL").unwrap();
    assert!(Path::new(&demo).ends_with(&name), "{name}");
    assert!(!place.is_served(), "{}", stderr(&output));
    // Nothing but what is the program's own.
    let mut left: Vec<String> =
        fs::read_dir(place.home.path()).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    left.sort();
    assert_eq!(left, [".cache", ".local", "bin", "record"]);
}

#[test]
fn a_server_that_answers_is_taken_and_left_running() {
    let place = Place::with("qwen");
    let Some(server) = Server::start(&[]) else { return };
    let port = server.address.rsplit(':').next().unwrap().to_owned();
    let output = place.launch(&["qwen", "--port", &port]).output().unwrap();
    ended_with(&output, 7);
    assert!(stderr(&output).contains("which runs already"), "{}", stderr(&output));
    assert_eq!(place.answer()["object"], "chat.completion");
    assert_eq!(place.recorded("arguments"), "--auth-type\nopenai\n");
    assert_eq!(server.get("/health").0, 200);
    // A model that it does not have is no reason to take another.
    let output = place.launch(&["qwen", "org/other", "--port", &port]).output().unwrap();
    assert_refused(&output, &["and not org/other", "--port"]);
}

#[test]
fn a_server_with_keys_is_asked_with_the_users() {
    let place = Place::with("claude");
    let mut command = sluice(&["serve", "--port", "0"]);
    let Some(demo) = demo() else { return };
    command.arg(demo).env("SLUICE_API_KEY", "a-key-of-mine");
    let server = Server::of(command);
    let port = server.address.rsplit(':').next().unwrap().to_owned();
    assert_refused(&place.launch(&["claude", "--port", &port]).output().unwrap(), &["wants a key", "SLUICE_API_KEY"]);
    let printed = success(
        place.launch(&["claude", "--port", &port, "--print"]).env("SLUICE_API_KEY", "a-key-of-mine").output().unwrap(),
    );
    assert!(printed.contains("export ANTHROPIC_AUTH_TOKEN=a-key-of-mine\n"), "{printed}");
}

#[test]
fn settings_are_printed_for_a_shell_and_nothing_is_started() {
    let place = Place::with("nobody");
    for (agent, part) in [
        ("claude", "export ANTHROPIC_BASE_URL=@\n"),
        ("codex", "model_providers.sluice={name = \"sluice\", base_url = \"@/v1\", wire_api = \"responses\"}"),
        ("opencode", "\"baseURL\":\"@/v1\""),
        ("qwen", "export OPENAI_BASE_URL=@/v1\n"),
        ("goose", "export OPENAI_HOST=@\n"),
        ("copilot", "export COPILOT_PROVIDER_BASE_URL=@/v1\n"),
        ("aider", "export AIDER_MODEL=openai/org/name\n"),
    ] {
        let printed = success(place.launch(&[agent, "org/name", "--print"]).output().unwrap());
        let part = part.replace('@', &format!("http://127.0.0.1:{}", place.port));
        assert!(printed.contains(&part) && printed.contains("org/name"), "{agent}: {part} in {printed}");
        assert!(printed.lines().last().unwrap().starts_with(agent), "{printed}");
        // A shell can read it.
        let mut shell = Command::new("bash").arg("-n").stdin(Stdio::piped()).spawn().unwrap();
        shell.stdin.take().unwrap().write_all(printed.as_bytes()).unwrap();
        assert!(shell.wait().unwrap().success(), "{printed}");
    }
    assert!(!place.is_served());
}

#[test]
fn what_is_missing_or_in_the_way_is_said_before_anything_starts() {
    let place = Place::with("qwen");
    let mut command = place.launch(&["codex"]);
    command.env("PATH", place.home.path().join("bin"));
    assert_refused(&command.output().unwrap(), &["codex is not installed", "npm install -g @openai/codex"]);
    assert_refused(&place.launch(&["qwen", "/no/such/model"]).output().unwrap(), &["/no/such/model", "no such folder"]);
    // All of them, with where they are.
    let mut command = place.launch(&[]);
    command.env("PATH", place.home.path().join("bin"));
    let listed = success(command.output().unwrap());
    assert!(listed.contains("npm install -g @anthropic-ai/claude-code"), "{listed}");
    assert!(listed.lines().any(|line| line.starts_with("qwen") && line.ends_with("/bin/qwen")), "{listed}");
    // Another program on the port.
    let other = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let port = other.local_addr().unwrap().port().to_string();
    thread::spawn(move || {
        let (mut stream, _) = other.accept().unwrap();
        let _ = stream.read(&mut [0; 1000]);
        let _ = stream.write_all(b"HTTP/1.0 404 Not Found\r\n\r\n");
    });
    assert_refused(&place.launch(&["qwen", "--port", &port]).output().unwrap(), &["another program", "--port"]);
    assert!(!place.record().join("env").exists());
}

#[test]
fn a_server_that_does_not_start_says_why() {
    let place = Place::with("qwen");
    let model = golden("qwen3");
    let output = place.launch(&["qwen", &model, "--serve", "--no-such-flag"]).output().unwrap();
    let said = stderr(&output);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains("the server did not start"), "{said}");
    assert!(!place.record().join("env").exists());
}

#[test]
fn the_server_ends_when_launch_is_killed() {
    let (Some(demo), place) = (demo(), Place::with("claude")) else { return };
    let mut child = place.launch(&["claude", &demo]).env("WAIT", "1").stderr(Stdio::null()).spawn().unwrap();
    let begun = Instant::now();
    let until = |what: &str, holds: &dyn Fn() -> bool| {
        while !holds() {
            assert!(begun.elapsed() < Duration::from_secs(60), "never: {what}");
            sleep(Duration::from_millis(20));
        }
    };
    until("the agent runs", &|| place.record().join("waits").exists());
    assert!(place.is_served());
    child.kill().unwrap();
    child.wait().unwrap();
    until("the server has ended", &|| !place.is_served());
}
