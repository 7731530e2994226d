//! `sluice chat` on a pseudo-terminal, at whose other end the test types and reads. It never announces a paste (no bracketed paste), like serial lines, old multiplexers and
//! scripts.

use crate::support;

use std::fs;
use std::io::{Read, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, ExitStatus};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use pty_process::blocking::{Command, Pty, open};
use rustix::termios::{LocalModes, tcgetattr};
use support::*;

/// A limit; a test that hangs ends with what it saw.
const PATIENCE: Duration = Duration::from_secs(120);

/// A terminal with a chat on it.
struct Terminal {
    pty: Arc<Pty>,
    child: Child,
    screen: Arc<(Mutex<Vec<u8>>, Condvar)>,
    /// Everything before this has been waited for already.
    seen: usize,
}

impl Terminal {
    /// Starts a chat with the demo model, and waits for its prompt.
    fn chat(demo: &str, args: &[&str]) -> Terminal {
        let (pty, pts) = open().unwrap();
        pty.resize(pty_process::Size::new(50, 200)).unwrap();
        let home = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap().keep();
        let mut command = Command::new(env!("CARGO_BIN_EXE_sluice")).arg("chat").arg(demo).args(args);
        for name in ["XDG_CACHE_HOME", "XDG_STATE_HOME", "SLUICE_DEMO"] {
            command = command.env_remove(name);
        }
        let child = command.env("HOME", home).env("TERM", "xterm").spawn(pts).unwrap();
        let (pty, screen) = (Arc::new(pty), Arc::new((Mutex::new(Vec::new()), Condvar::new())));
        thread::spawn({
            let (pty, screen) = (Arc::clone(&pty), Arc::clone(&screen));
            move || {
                let mut bytes = [0; 4096];
                // An error when the program is gone.
                while let Ok(n @ 1..) = (&*pty).read(&mut bytes) {
                    screen.0.lock().unwrap().extend_from_slice(&bytes[..n]);
                    screen.1.notify_all();
                }
            }
        });
        let mut terminal = Terminal { pty, child, screen, seen: 0 };
        terminal.waits_for("> ");
        terminal
    }

    /// Types everything at once, like a paste, from a thread of its own: the terminal may accept only a part at a time.
    fn types(&self, text: impl Into<Vec<u8>>) {
        let (pty, text) = (Arc::clone(&self.pty), text.into());
        thread::spawn(move || (&*pty).write_all(&text));
    }

    /// Waits until this is on the screen, after everything waited for before.
    #[track_caller]
    fn waits_for(&mut self, text: &str) {
        let (begun, (lock, changed)) = (Instant::now(), &*self.screen);
        let mut screen = lock.lock().unwrap();
        loop {
            let new = &screen[self.seen..];
            if let Some(at) = new.windows(text.len()).position(|w| w == text.as_bytes()) {
                self.seen += at + text.len();
                return;
            }
            assert!(begun.elapsed() < PATIENCE, "no {text:?} in {:?}", String::from_utf8_lossy(new));
            screen = changed.wait_timeout(screen, Duration::from_millis(100)).unwrap().0;
        }
    }

    /// Waits until the line is accepted and some of its answer is there.
    #[track_caller]
    fn waits_for_an_answer(&mut self) {
        self.waits_for("\x1b[?2004l\r\n");
        self.waits_for(" ");
    }

    /// Waits until the program ends.
    fn ends(&mut self) -> ExitStatus {
        let begun = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(begun.elapsed() < PATIENCE, "goes on: {:?}", self.text());
            thread::sleep(Duration::from_millis(10));
        }
    }

    fn text(&self) -> String {
        String::from_utf8_lossy(&self.screen.0.lock().unwrap()).into_owned()
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The user's messages in a saved conversation.
fn said(path: &Path) -> Vec<String> {
    let list: serde_json::Value = serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap();
    let of_user = list.as_array().unwrap().iter().filter(|m| m["role"] == "user");
    of_user.map(|m| m["content"].as_str().unwrap().to_owned()).collect()
}

const SHORT: &[&str] = &["--temperature", "0", "-n", "1"];
/// The answer ends only with the context.
const LONG: &[&str] = &["--raw", "--temperature", "0", "--repetition-penalty", "1.3"];

#[test]
fn every_line_of_a_paste_is_a_message() {
    let Some(demo) = demo() else { return };
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("chat.json");
    let mut terminal = Terminal::chat(&demo, SHORT);
    // More than the terminal's own editor holds, and more than one read returns.
    let lines: Vec<String> = (0..60).map(|i| format!("line {i} {}", "is very long ".repeat(12).trim_end())).collect();
    assert!(lines.concat().len() > 9000);
    terminal.types(format!("{}\r/save {}\r/exit\r", lines.join("\r"), text(&file)));
    assert!(terminal.ends().success());
    assert_eq!(said(&file), lines);
}

#[test]
fn lines_typed_while_an_answer_is_given_are_read_after_it() {
    let Some(demo) = demo() else { return };
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("chat.json");
    let mut terminal = Terminal::chat(&demo, &["--raw", "--temperature", "0", "-n", "200"]);
    terminal.types("Once upon a time there was a\r");
    terminal.waits_for_an_answer();
    terminal.types(format!("and then\rand so\r/save {}\r/exit\r", text(&file)));
    assert!(terminal.ends().success());
    assert_eq!(said(&file), ["Once upon a time there was a", "and then", "and so"]);
}

#[test]
fn a_byte_that_is_no_utf8_costs_itself_alone() {
    let Some(demo) = demo() else { return };
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("chat.json");
    let mut terminal = Terminal::chat(&demo, SHORT);
    terminal.types("First\r");
    terminal.waits_for("> ");
    terminal.types(b"Hello wor\xff".as_slice());
    terminal.waits_for("UTF-8");
    terminal.waits_for("Hello wor");
    terminal.types(format!("ld\r/save {}\r/exit\r", text(&file)));
    assert!(terminal.ends().success());
    assert_eq!(said(&file), ["First", "Hello world"]);
}

#[test]
fn ctrl_c_at_an_empty_prompt_leaves_the_second_time() {
    let Some(demo) = demo() else { return };
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("chat.json");
    let mut terminal = Terminal::chat(&demo, SHORT);
    terminal.types("\x03");
    terminal.waits_for("Ctrl-C again");
    // Any key in between cancels it; a line is cleared first.
    terminal.types("Hello\r");
    terminal.waits_for("> ");
    terminal.waits_for("> ");
    terminal.types("\x03");
    terminal.waits_for("Ctrl-C again");
    terminal.types("away");
    terminal.waits_for("away");
    terminal.types("\x03");
    terminal.waits_for("> ");
    terminal.types(format!("/save {}\r", text(&file)));
    terminal.waits_for("saved to");
    assert_eq!(said(&file), ["Hello"]);
    terminal.waits_for("> ");
    terminal.types("\x03");
    terminal.waits_for("Ctrl-C again");
    terminal.types("\x03");
    assert!(terminal.ends().success());
}

#[test]
fn ctrl_c_stops_an_answer_and_the_terminal_is_left_as_it_was() {
    let Some(demo) = demo() else { return };
    let mut terminal = Terminal::chat(&demo, LONG);
    terminal.types("Once upon a time there was a\r");
    terminal.waits_for_an_answer();
    terminal.types("\x03");
    terminal.waits_for("[stopped]");
    terminal.waits_for("> ");
    terminal.types("/exit\r");
    assert!(terminal.ends().success());
    let modes = tcgetattr(&*terminal.pty).unwrap().local_modes;
    assert!(modes.contains(LocalModes::ICANON | LocalModes::ECHO | LocalModes::ISIG), "{modes:?}");
}

#[test]
fn whatever_ends_a_conversation_leaves_the_terminal_as_it_was() {
    let Some(demo) = demo() else { return };
    for (signal, name) in [(15, "-TERM"), (1, "-HUP"), (3, "-QUIT")] {
        for answers in [false, true] {
            let mut terminal = Terminal::chat(&demo, LONG);
            if answers {
                terminal.types("Once upon a time there was a\r");
                terminal.waits_for_an_answer();
            }
            let modes = || tcgetattr(&*terminal.pty).unwrap().local_modes;
            assert!(!modes().contains(LocalModes::ECHO), "{name}: {:?}", modes());
            let id = terminal.child.id().to_string();
            assert!(std::process::Command::new("kill").args([name, &id]).status().unwrap().success());
            let status = terminal.ends();
            assert_eq!(status.signal(), Some(signal), "{status:?}");
            let modes = tcgetattr(&*terminal.pty).unwrap().local_modes;
            assert!(modes.contains(LocalModes::ICANON | LocalModes::ECHO | LocalModes::ISIG), "{name}: {modes:?}");
        }
    }
}

#[test]
fn a_pipe_is_neither_loaded_nor_waited_for() {
    let Some(demo) = demo() else { return };
    let dir = tempfile::tempdir().unwrap();
    let pipe = dir.path().join("pipe");
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let mut terminal = Terminal::chat(&demo, SHORT);
    terminal.types(format!("/load {}\r", text(&pipe)));
    terminal.waits_for("not a regular file");
    terminal.types(format!("/save {}\r", text(&pipe)));
    terminal.waits_for("nobody has it open");
    terminal.types("/load /dev/zero\r");
    terminal.waits_for("not a regular file");
    terminal.types("/bye\r");
    assert!(terminal.ends().success());
}

#[test]
fn escape_sequences_of_a_conversation_are_spelled_out() {
    let Some(demo) = demo() else { return };
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("a \x1b[35m b.json");
    fs::write(&file, serde_json::json!([{"role": "user", "content": "red \x1b[31m\u{9b}31m text"}]).to_string())
        .unwrap();
    let link = dir.path().join("link.json");
    std::os::unix::fs::symlink(&file, &link).unwrap();
    let mut terminal = Terminal::chat(&demo, SHORT);
    terminal.types(format!("/load {}\r", text(&link)));
    terminal.waits_for("1 messages loaded");
    terminal.types("/undo\r");
    terminal.waits_for(r"[taken back: red \u{1b}[31m\u{9b}31m text]");
    terminal.types("/exit\r");
    assert!(terminal.ends().success());
    assert!(!terminal.text().contains("\x1b[31m") && !terminal.text().contains('\u{9b}'));
}
