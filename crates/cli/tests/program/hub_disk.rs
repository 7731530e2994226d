//! A full disk: a small file system that only the program sees. It takes root to make one.

use crate::support;

use std::fs;
use std::process::{Command, Output};
use std::time::Duration;

use sluice_test_hub::Content;
use support::hub::Place;
use support::*;

/// Runs a script whose `$DISK` is a file system of so many bytes, and `$SLUICE pull` this program. `None`, with a note, if none can be mounted.
fn on_a_disk_of(place: &Place, bytes: usize, script: &str) -> Option<Output> {
    let disk = tempfile::tempdir().unwrap();
    let mount = format!("mount -t tmpfs -o size={bytes} none \"$DISK\" 2>/dev/null || exit 77\n{script}");
    let program = place.sluice(&[]);
    let mut command = Command::new("unshare");
    command.args(["-m", "--propagation", "private", "sh", "-c", &mount]);
    for (name, value) in program.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    let output =
        command.env("DISK", disk.path()).env("SLUICE", program.get_program()).env("HF_HOME", disk.path()).output();
    match output {
        Ok(output) if output.status.code() != Some(77) && !stderr(&output).contains("unshare:") => Some(output),
        _ => {
            eprintln!("SKIPPED: no file system can be mounted here");
            None
        }
    }
}

#[test]
fn a_model_that_does_not_fit_is_refused_before_anything_is_fetched() {
    let place = Place::new();
    place.hub.commit("org/big", &[("m-Q8_0.gguf", Content::random(3, 12 << 20))]);
    let script = "\"$SLUICE\" pull org/big; code=$?; find \"$DISK\" -name '*.sluice.*' >&2; exit $code";
    let Some(output) = on_a_disk_of(&place, 8 << 20, script) else { return };
    let said = stderr(&output);
    assert_eq!(output.status.code(), Some(2), "{said}");
    let last = said.lines().last().unwrap();
    assert!(last.contains("12.6 MB more are needed") && last.contains("HF_HUB_CACHE"), "{said}");
    assert!(!place.hub.requests().iter().any(|r| r.is_for_bytes));
}

#[test]
fn room_that_was_reserved_is_there_when_others_fill_the_disk() {
    let place = Place::new();
    let content = Content::random(3, 12 << 20);
    place.hub.commit("org/big", &[("m-Q8_0.gguf", content.clone())]);
    place.hub.faults(|f| f.slow = Some(Duration::from_millis(40)));
    let script = "\"$SLUICE\" pull org/big & pid=$!
        for i in $(seq 500); do ls \"$DISK\"/hub/*/blobs/*.incomplete >/dev/null 2>&1 && break; sleep 0.01; done; sleep 0.2
        dd if=/dev/zero of=\"$DISK\"/others bs=1M 2>/dev/null && echo \"the disk did not become full\" >&2
        wait $pid || exit 1
        cat \"$DISK\"/hub/*/snapshots/*/m-Q8_0.gguf";
    let Some(output) = on_a_disk_of(&place, 20 << 20, script) else { return };
    assert!(output.status.success() && !stderr(&output).contains("did not become full"), "{}", stderr(&output));
    assert!(output.stdout == content.bytes());
    assert!(fs::read_dir(place.home.path()).unwrap().next().is_none());
}
