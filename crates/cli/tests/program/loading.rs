//! Ways of reading weights in the shipped program: all give the same bits. Whatever the system refuses or breaks leads to another way of reading, which is reported, or to
//! an error that names the file. Faults come from `faults.c`, which is preloaded between the program and the system, or from the system itself.

use crate::support;

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Output};

use support::*;

const TOKENS: &[&str] = &["--tokens", "1,2,3,4,5", "--json"];

fn logits(folder: &Path, load: &str) -> Command {
    let mut command = sluice(&["eval", "logits", &text(folder), "--load", load, "-v"]);
    command.args(TOKENS);
    command
}

fn with_fault(folder: &Path, load: &str, fault: &str, at: u64) -> Output {
    let mut command = logits(folder, load);
    command.env("LD_PRELOAD", shim()).env("FAULT", fault).env("FAULT_AT", at.to_string());
    command.env("FAULT_FILE", folder.join("model.safetensors"));
    command.output().unwrap()
}

/// A model of some megabytes on a disk: the demo, or zeros in the shape of a golden model without a demo.
fn model() -> Option<tempfile::TempDir> {
    let demo = demo()?;
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    for name in ["config.json", "model.safetensors"] {
        fs::copy(Path::new(&demo).join(name), dir.path().join(name)).unwrap();
    }
    Some(dir)
}

/// Drops the weights from the page cache, so that a map has to read them.
fn make_cold(folder: &Path) {
    let file = fs::File::open(folder.join("model.safetensors")).unwrap();
    file.sync_all().unwrap();
    sluice_store::drop_cached(&file, 0, 0).unwrap();
}

#[test]
fn every_way_of_loading_gives_the_same_bits() {
    for name in ["qwen3", "qwen3_moe", "qwen3_next", "mlx_qwen3_widths"] {
        let folder = golden(name);
        let expected = success(logits(Path::new(&folder), "mmap").output().unwrap());
        for load in ["auto", "pread", "direct"] {
            let found = logits(Path::new(&folder), load).output().unwrap();
            assert!(success(found) == expected, "{name} {load}");
        }
    }
}

#[test]
fn what_is_refused_is_done_in_another_way_that_is_named() {
    let Some(dir) = model() else { return };
    let expected = success(logits(dir.path(), "mmap").output().unwrap());
    let cases = [
        ("direct", "open-einval", "no direct reads (refused at open"),
        ("direct", "uring-enosys", "no io_uring"),
        ("direct", "uring-eperm", "no io_uring"),
        ("direct", "uring-enter", "no io_uring"),
        ("direct", "uring-later", "no io_uring"),
        ("direct", "ring-einval", "no direct reads (refused at read"),
        ("direct", "ring-short", ""),
        ("direct", "short", ""),
        ("direct", "eintr", ""),
        ("pread", "short", ""),
        ("pread", "eintr", ""),
        ("mmap", "short", ""),
        ("mmap", "eintr", ""),
    ];
    for (load, fault, said) in cases {
        make_cold(dir.path());
        let found = with_fault(dir.path(), load, fault, 0);
        assert!(stderr(&found).contains(said), "{load} {fault}: {}", stderr(&found));
        assert!(success(found) == expected, "{load} {fault}");
    }
}

#[test]
fn threads_that_read_directly_take_refusals_and_short_reads_too() {
    let Some(dir) = model() else { return };
    let expected = success(logits(dir.path(), "mmap").output().unwrap());
    for (fault, said) in [
        ("read-einval", "no direct reads (refused at read"),
        ("read-eopnotsupp", "no direct reads (refused at read"),
        ("short", "no io_uring"),
        ("eintr", "no io_uring"),
    ] {
        let mut command = logits(dir.path(), "direct");
        command.env("LD_PRELOAD", shim()).env("FAULT", fault).env("FAULT_URING", "none");
        let found = command.output().unwrap();
        assert!(stderr(&found).contains(said), "{fault}: {}", stderr(&found));
        assert!(success(found) == expected, "{fault}");
    }
}

#[test]
fn a_disk_that_fails_is_an_error_with_file_tensor_and_offset() {
    let Some(dir) = model() else { return };
    let path = text(&dir.path().join("model.safetensors"));
    for (load, fault) in [("pread", "eio"), ("direct", "ring-eio")] {
        make_cold(dir.path());
        let found = with_fault(dir.path(), load, fault, 12_345_678);
        assert_refused_verbosely(&found, &[&path, "tensor \"", "at offset ", "Input/output error"]);
    }
}

#[test]
fn a_file_that_is_cut_while_it_is_read_is_an_error_with_tensor_and_offset() {
    for (load, fault) in [("pread", "truncate"), ("direct", "truncate")] {
        let Some(dir) = model() else { return };
        let path = text(&dir.path().join("model.safetensors"));
        let mut command = logits(dir.path(), load);
        command.env("LD_PRELOAD", shim()).env("FAULT", fault).env("FAULT_AT", "29500000").env("FAULT_URING", "none");
        let found = command.env("FAULT_FILE", &path).output().unwrap();
        assert_refused_verbosely(&found, &[&path, "truncated while it was in use", "tensor \"", "at offset 29500000"]);
    }
}

#[test]
fn a_file_that_changes_between_its_header_and_its_bytes_is_an_error() {
    for load in ["mmap", "pread", "direct"] {
        for (fault, said) in [
            ("header-cut", "truncated while it was in use"),
            ("header-touch", "changed or replaced while it was in use"),
        ] {
            let Some(dir) = model() else { return };
            let path = text(&dir.path().join("model.safetensors"));
            let found = with_fault(dir.path(), load, fault, 29_500_000);
            assert_refused_verbosely(&found, &[&path, said]);
        }
    }
}

/// Like `assert_refused`, with notes before the error.
#[track_caller]
fn assert_refused_verbosely(output: &Output, parts: &[&str]) {
    let all = stderr(output);
    assert_eq!(output.status.code(), Some(2), "{all}");
    let last = all.trim_end().lines().last().unwrap_or("");
    assert!(!all.contains("please report"), "{all}");
    for part in parts {
        assert!(last.contains(part), "{part:?} is not in: {last}");
    }
}

#[test]
fn a_file_system_in_memory_is_read_directly_or_says_why_not() {
    let shm = Path::new("/dev/shm");
    let Ok(dir) = tempfile::tempdir_in(shm) else {
        eprintln!("SKIPPED: nothing can be written to /dev/shm");
        return;
    };
    for entry in fs::read_dir(golden("qwen3")).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), dir.path().join(entry.file_name())).unwrap();
    }
    let expected = success(logits(dir.path(), "mmap").output().unwrap());
    for load in ["auto", "pread", "direct"] {
        assert!(success(logits(dir.path(), load).output().unwrap()) == expected, "{load}");
    }
}

#[test]
fn an_ordinary_user_with_little_lockable_memory_can_read_directly() {
    let Some(dir) = model() else { return };
    let expected = success(logits(dir.path(), "mmap").output().unwrap());
    let mut command = Command::new("sh");
    let args = format!(
        "ulimit -l 64; exec '{}' eval logits '{}' --load direct --tokens 1,2,3,4,5 --json",
        env!("CARGO_BIN_EXE_sluice"),
        dir.path().display()
    );
    command.args(["-c", &args]).env("HOME", "/nonexistent").env_remove("XDG_CACHE_HOME");
    if fs::metadata("/proc/self").is_ok_and(|m| std::os::unix::fs::MetadataExt::uid(&m) == 0) {
        // Root may lock as much memory as it likes.
        fs::set_permissions(dir.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        let reaches = Command::new("test").args(["-r", &text(dir.path())]).uid(65534).gid(65534).status();
        if !reaches.is_ok_and(|s| s.success()) {
            eprintln!("SKIPPED: another user cannot reach the build's folder");
            return;
        }
        command.uid(65534).gid(65534);
    }
    assert!(success(command.output().unwrap()) == expected);
}

#[test]
fn weights_beyond_the_memory_budget_are_refused_with_the_arithmetic() {
    let folder = golden("qwen3");
    let found = output(&["eval", "logits", &folder, "--tokens", "1,2,3", "--memory-budget", "100k"]);
    assert_refused(
        &found,
        &["--memory-budget of 100.0 kB is too little", "program", "mapped weights", "scratch", "=", "`sluice pack`"],
    );
    let with = |budget: &str, kv: &str| {
        output(&["eval", "logits", &folder, "--tokens", "1,2,3", "--memory-budget", budget, "--kv", kv])
    };
    success(with("8G", "reserve"));
    let wrong = output(&["run", &folder, "x", "--memory-budget", "8X"]);
    assert!(wrong.status.code() == Some(2) && stderr(&wrong).contains("8X"));
}

#[test]
fn reserved_keys_and_values_change_no_bit_and_grow_past_their_end() {
    let folder = golden("qwen3");
    let many: Vec<String> = (0..200).map(|i| (i % 90).to_string()).collect();
    let many = many.join(",");
    let with = |kv: &str| success(output(&["eval", "logits", &folder, "--tokens", &many, "--json", "--kv", kv]));
    let expected = with("dynamic");
    for kv in ["reserve", "reserve=32", "reserve=1"] {
        assert!(with(kv) == expected, "{kv}");
    }
}

#[test]
fn verbose_says_how_each_file_is_read() {
    let folder = golden("qwen3");
    let found = logits(Path::new(&folder), "pread").output().unwrap();
    assert!(
        stderr(&found).contains("model-00001-of-00003.safetensors: ") && stderr(&found).contains("pread: asked for")
    );
    let found = logits(Path::new(&folder), "auto").output().unwrap();
    assert!(stderr(&found).contains("mmap: small"), "{}", stderr(&found));
}

#[test]
fn loads_and_allocations_can_be_measured() {
    let Some(dir) = model() else { return };
    let folder = text(dir.path());
    let lines = success(output(&["bench", "load", &folder, "--rounds", "1", "--tokens", "2", "--json"]));
    let rows: Vec<serde_json::Value> = lines.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    assert_eq!(rows.len(), 8);
    for row in &rows {
        assert!(row["load_seconds"]["median"].as_f64().unwrap() > 0.0, "{row}");
        assert!(row["load_peak_memory"]["median"].as_f64().unwrap() > 1e6, "{row}");
    }
    let lines =
        success(output(&["bench", "kv", &folder, "--rounds", "1", "--tokens", "4", "--reserve", "64", "--json"]));
    let rows: Vec<serde_json::Value> = lines.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    assert_eq!(rows[1]["kv"], "reserve=64");
    assert_eq!(rows[1]["kv_growth"]["high"], 0.0);
}

#[test]
fn a_truncated_file_in_use_ends_the_answer_and_not_the_process() {
    let Some(dir) = model() else { return };
    let demo = demo().unwrap();
    for name in ["tokenizer.json", "tokenizer_config.json", "generation_config.json"] {
        fs::copy(Path::new(&demo).join(name), dir.path().join(name)).unwrap();
    }
    let mut command = sluice(&["chat", &text(dir.path()), "--load", "mmap", "--max-tokens", "4"]);
    use std::process::Stdio;
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut input = child.stdin.take().unwrap();
    // Once it has answered, its file is truncated.
    input.write_all(b"Hello\n").unwrap();
    let mut answer = [0];
    std::io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut answer).unwrap();
    std::thread::sleep(std::time::Duration::from_millis(200));
    OpenOptions::new().write(true).open(dir.path().join("model.safetensors")).unwrap().set_len(1 << 20).unwrap();
    input.write_all(b"And now?\nAnd again?\n").unwrap();
    drop(input);
    let ended = child.wait_with_output().unwrap();
    let said = stderr(&ended);
    assert!(ended.status.success(), "{:?}: {said}", ended.status);
    // Both later questions fail, and on a slow machine the first answer too, if it is still running.
    let times = said.matches("truncated while it was in use").count();
    assert!(times == 2 || times == 3, "{said}");
}
