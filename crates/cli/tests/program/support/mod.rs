//! Runs the shipped program, and makes folders for it.

pub mod dialects;
pub mod group;
pub mod hub;
pub mod packing;
pub mod server;

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::OnceLock;

/// Variables that a test passes on to the program: what computes it. Any other could be a setting (`SLUICE_PORT` for `--port`).
const PASSED_ON: [&str; 3] = ["SLUICE_ISA", "SLUICE_GPU", "SLUICE_CUDA_KERNELS"];

/// The program with a home of its own, without a demo model unless the test names one, without settings of whoever runs
/// the tests, and without the network.
pub fn sluice(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sluice"));
    command.args(args).stdin(Stdio::null()).env("HOME", env!("CARGO_TARGET_TMPDIR"));
    for name in ["XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME"].iter().chain(&hub::VARIABLES) {
        command.env_remove(name);
    }
    let settings = std::env::vars_os().filter_map(|(name, _)| name.into_string().ok());
    for name in settings.filter(|name| name.starts_with("SLUICE_") && !PASSED_ON.contains(&name.as_str())) {
        command.env_remove(name);
    }
    command.env("HF_HUB_OFFLINE", "1");
    command
}

/// Runs it to the end.
pub fn output(args: &[&str]) -> Output {
    sluice(args).output().unwrap()
}

/// Runs it to the end with `input` piped in.
pub fn piped(mut command: Command, input: &str) -> Output {
    let child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let mut child = child.unwrap();
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    child.wait_with_output().unwrap()
}

pub fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

pub fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

/// Its output, after checking that it succeeded.
pub fn success(output: Output) -> String {
    assert!(output.status.success(), "{:?}: {}", output.status, stderr(&output));
    stdout(&output)
}

/// The JSON object that it printed.
pub fn json(output: Output) -> serde_json::Value {
    serde_json::from_str(&success(output)).unwrap()
}

/// Checks for exit code 2 and one line on standard error that begins with `sluice: ` and contains all of `parts`.
#[track_caller]
pub fn assert_refused(output: &Output, parts: &[&str]) {
    let line = stderr(output);
    assert_eq!(output.status.code(), Some(2), "{line}");
    assert!(line.starts_with("sluice: ") && line.trim_end().lines().count() == 1, "{line}");
    assert!(!line.contains("please report"), "{line}");
    for part in parts {
        assert!(line.contains(part), "{part:?} is not in: {line}");
    }
}

/// The smallest sufficient figure for `flag` (or for a group, without one) in a refusal, such as `36.1M`, and its bytes.
#[track_caller]
pub fn figure(refused: &Output, flag: &str) -> (String, u64) {
    let after = format!("the smallest that would do is {flag}");
    assert_refused(refused, &["is too little", &after]);
    figure_in(&stderr(refused), flag)
}

/// The same in a text that may have other lines.
#[track_caller]
pub fn figure_in(said: &str, flag: &str) -> (String, u64) {
    let after = format!("the smallest that would do is {flag}");
    let figure = said.split(&after).nth(1).expect(said).split([',', ' ', ':', '\n']).next().unwrap().to_owned();
    let number: f64 = figure.strip_suffix('M').unwrap().parse().unwrap();
    (figure, (number * 1e6) as u64)
}

/// Prose with some variety, in case there is no held-out text.
pub fn prose() -> String {
    let names = ["the cat", "a small boat", "my brother", "the old king", "nobody"];
    let deeds =
        ["ran to the river", "asked 3 + 4", "slept under a tree", "told a story about the moon", "was very hungry"];
    (0..60).map(|i| format!("Then {} {}, and it was day {i}. ", names[i % 5], deeds[(i * i + i / 7) % 5])).collect()
}

pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

/// A tiny checkpoint of `tests/golden`, without a tokenizer.
pub fn golden(name: &str) -> String {
    root().join("tests/golden").join(name).display().to_string()
}

/// The demo model: the one that ships, or the checkpoint that it is packed from. `None`, with a note, if both are missing.
pub fn demo() -> Option<String> {
    let places = [root().join("models/demo"), root().join("../shared/demo-model")];
    let found = places.into_iter().find(|p| p.join("config.json").is_file());
    if found.is_none() {
        eprintln!("SKIPPED: no demo model");
    }
    found.map(|p| p.canonicalize().unwrap().display().to_string())
}

/// The demo model with another chat template, and with these special tokens instead of unused ones.
pub fn demo_with(template: &str, special: &[&str]) -> Option<tempfile::TempDir> {
    let (demo, folder) = (PathBuf::from(demo()?), tempfile::tempdir().unwrap());
    for entry in fs::read_dir(&demo).unwrap() {
        let entry = entry.unwrap();
        if entry.file_name() != "tokenizer.json" {
            std::os::unix::fs::symlink(entry.path(), folder.path().join(entry.file_name())).unwrap();
        }
    }
    let mut text = fs::read_to_string(demo.join("tokenizer.json")).unwrap();
    for (i, name) in special.iter().enumerate() {
        text = text.replace(&format!("<|reserved_{i}|>"), name);
    }
    fs::write(folder.path().join("tokenizer.json"), text).unwrap();
    fs::write(folder.path().join("chat_template.jinja"), template).unwrap();
    Some(folder)
}

/// Writes a safetensors file with this header and this many zero bytes.
pub fn write_safetensors(path: &Path, header: &str, data: usize) {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.resize(bytes.len() + data, 0);
    fs::write(path, bytes).unwrap();
}

/// A copy of a golden checkpoint that a test may break.
pub fn copy_of(golden_name: &str) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(golden(golden_name)).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), dir.path().join(entry.file_name())).unwrap();
    }
    dir
}

pub fn text(path: &Path) -> String {
    path.to_str().unwrap().to_owned()
}

/// `faults.c`, compiled once; it is preloaded between a program and the system.
pub fn shim() -> &'static Path {
    static SHIM: OnceLock<PathBuf> = OnceLock::new();
    SHIM.get_or_init(|| {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
        // Another process may compile it at the same time: write it completely, then rename it.
        let begun = tempfile::NamedTempFile::new_in(folder).unwrap().into_temp_path();
        let library = folder.join("faults.so");
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/program/faults.c");
        let mut cc = Command::new("cc");
        cc.args(["-shared", "-fPIC", "-O1", "-w", "-o"]).arg(&begun).arg(source).arg("-ldl");
        assert!(cc.status().unwrap().success());
        begun.persist(&library).unwrap();
        library
    })
}

/// A line of another process's `/proc/PID/status`, in bytes.
pub fn memory_of(process: u32, line: &str) -> u64 {
    let status = fs::read_to_string(format!("/proc/{process}/status")).unwrap();
    let line = status.lines().find_map(|l| l.strip_prefix(line)?.strip_prefix(':')).unwrap();
    line.trim().strip_suffix("kB").unwrap().trim().parse::<u64>().unwrap() * 1024
}
