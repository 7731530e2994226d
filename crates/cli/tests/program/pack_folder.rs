//! The output folder of `sluice pack` has a complete model or none, however a packing ends and whoever else packs.

use crate::support;

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::json;
use support::packing::*;
use support::*;

#[test]
fn a_folder_that_holds_something_is_refused() {
    let (input, out) = (tiny(false), tempfile::tempdir().unwrap());
    fs::write(out.path().join("notes.txt"), "mine").unwrap();
    let refused = support::output(&["pack", &text(input.path()), &text(out.path())]);
    assert_refused(&refused, &["not empty", "--force", &text(out.path())]);
    assert_eq!(files(out.path()), ["notes.txt"]);
    let itself = support::output(&["pack", &text(input.path()), &text(input.path()), "--force"]);
    assert_refused(&itself, &["the same folder"]);
    let file = support::output(&["pack", &text(input.path()), &text(&out.path().join("notes.txt"))]);
    assert_refused(&file, &["not a folder"]);
    assert_refused(&support::output(&["pack", &text(out.path()), &text(&out.path().join("x"))]), &["safetensors"]);
    pack(input.path(), out.path(), &["--force"]);
    assert_eq!(files(out.path()), ["config.json", "model.safetensors", "notes.txt"]);
}

/// A checkpoint whose layers' files take a while.
fn slow_to_pack() -> tempfile::TempDir {
    let input = tempfile::tempdir().unwrap();
    let mut all = tensors(false);
    let experts = 600;
    for layer in 0..2 {
        for (part, rows, cols) in [("gate_up_proj", 2 * WIDTH, HIDDEN), ("down_proj", HIDDEN, WIDTH)] {
            let t = all.get_mut(&format!("model.layers.{layer}.mlp.experts.{part}")).unwrap();
            *t = (vec![experts, rows, cols], t.1.iter().copied().cycle().take(experts * rows * cols).collect());
        }
        let router = all.get_mut(&format!("model.layers.{layer}.mlp.gate.weight")).unwrap();
        *router = (vec![experts, HIDDEN], router.1.iter().copied().cycle().take(experts * HIDDEN).collect());
    }
    write_checkpoint(input.path(), &all);
    let mut c = config(input.path());
    c["num_experts"] = json!(experts);
    fs::write(input.path().join("config.json"), c.to_string()).unwrap();
    input
}

/// Waits until a packing is writing `file`, with all files before it complete.
fn until_it_writes(pack: &mut Child, folder: &Path, file: &str) {
    let begin = Instant::now();
    let temporary = |name: &String| name.starts_with(&format!(".{file}.")) && name.contains(".tmp-");
    while !(folder.is_dir() && files(folder).iter().any(temporary)) && pack.try_wait().unwrap().is_none() {
        assert!(begin.elapsed() < Duration::from_secs(600), "{file} is not begun");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn signal(name: &str, process: u32) {
    assert!(Command::new("kill").args([name, &process.to_string()]).status().unwrap().success());
}

#[test]
fn killed_it_goes_on_and_ends_with_the_same_bytes() {
    let input = slow_to_pack();
    let options = ["--experts-bits", "2", "--layout", "bundle", "--search", "--threads", "1"];
    let whole = tempfile::tempdir().unwrap();
    pack(input.path(), whole.path(), &options);
    let out = tempfile::tempdir().unwrap();
    let (from, to) = (text(input.path()), text(out.path()));
    let arguments = [&["pack", &from, &to][..], &options].concat();
    for (how, file) in [("-KILL", "experts-00.safetensors"), ("-INT", "experts-01.safetensors")] {
        let mut child = sluice(&arguments).stderr(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        until_it_writes(&mut child, out.path(), file);
        signal(how, child.id());
        let ended = child.wait_with_output().unwrap();
        assert!(!ended.status.success(), "it ended before it was killed");
        assert!(!out.path().join("config.json").exists());
        if how == "-INT" {
            assert!(stderr(&ended).contains("the same command goes on"), "{}", stderr(&ended));
        }
    }
    let last = support::output(&arguments);
    // Ctrl-C may arrive after its file is complete.
    let goes_on = |n: usize| stderr(&last).contains(&format!("goes on: {n} of 3 files are whole"));
    assert!(goes_on(2) || goes_on(3), "{}", stderr(&last));
    success(last);
    assert_eq!(files(out.path()), files(whole.path()));
    for name in files(whole.path()) {
        assert!(fs::read(whole.path().join(&name)).unwrap() == fs::read(out.path().join(&name)).unwrap(), "{name}");
    }
}

/// Whichever file a killed packing was about to rename into place.
#[test]
fn a_pack_goes_on_and_cleans_up_after_one_that_was_killed() {
    let (input, whole) = (tiny(false), tempfile::tempdir().unwrap());
    fs::write(input.path().join("tokenizer.json"), "{}").unwrap();
    let options = ["--experts-bits", "2", "--layout", "bundle"];
    pack(input.path(), whole.path(), &options);
    for file in [
        "resident.safetensors",
        ".sluice-pack.json",
        "experts-01.safetensors",
        "bundle.json",
        "tokenizer.json",
        "config.json",
    ] {
        let out = tempfile::tempdir().unwrap();
        let mut command = sluice(&[&["pack", &text(input.path()), &text(out.path())][..], &options].concat());
        let killed = command.env("LD_PRELOAD", shim()).env("FAULT", "kill-rename").env("FAULT_FILE", file).output();
        assert_eq!(killed.unwrap().status.signal(), Some(9), "{file}");
        let left = files(out.path());
        assert!(left.iter().any(|name| name.starts_with(&format!(".{file}.tmp-"))), "{file}: {left:?}");
        assert!(!left.iter().any(|name| name == "config.json"), "{file}: {left:?}");
        // Somebody else's file, which a packing must not remove.
        let other = out.path().join(".notes.txt.tmp-0123456789abcdef");
        fs::write(&other, "mine").unwrap();
        let refused = support::output(&["pack", &text(input.path()), &text(out.path()), "--set", "layer.*=4"]);
        assert!(!refused.status.success(), "{file}");
        assert!(!files(out.path()).iter().any(|name| name.starts_with(&format!(".{file}.tmp-"))), "{file}");
        fs::remove_file(&other).unwrap();
        pack(input.path(), out.path(), &options);
        assert_eq!(files(out.path()), files(whole.path()), "{file}");
        for name in files(whole.path()) {
            assert!(fs::read(whole.path().join(&name)).unwrap() == fs::read(out.path().join(&name)).unwrap(), "{name}");
        }
    }
}

/// What replaces a small file is read within limits, and never waited for.
#[test]
fn pipes_and_devices_in_the_place_of_small_files_are_refused() {
    let input = tiny(false);
    let out = tempfile::tempdir().unwrap();
    let run = |more: &[&str]| {
        support::output(&[&["pack", &text(input.path()), &text(&out.path().join("x"))][..], more].concat())
    };
    let pipe = text(&out.path().join("pipe"));
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    for place in ["/dev/zero", &pipe] {
        assert_refused(&run(&["--recipe", place]), &[place, "not a regular file"]);
        let more = ["--layout", "bundle", "--calibration", place];
        assert_refused(&run(&more), &[place, "not a regular file"]);
    }
    let config = input.path().join("config.json");
    fs::remove_file(&config).unwrap();
    std::os::unix::fs::symlink("/dev/zero", &config).unwrap();
    assert_refused(&run(&[]), &[&text(&config), "not a regular file"]);
}

#[test]
fn interrupted_it_leaves_nothing() {
    let input = tempfile::tempdir().unwrap();
    let mut all = tensors(false);
    let embedding = all.get_mut("model.embed_tokens.weight").unwrap();
    let rows = 200_000;
    *embedding = (vec![rows, HIDDEN], embedding.1.iter().copied().cycle().take(rows * HIDDEN).collect());
    write_checkpoint(input.path(), &all);

    let out = tempfile::tempdir().unwrap();
    let folder = out.path().join("packed");
    let options = ["pack", &text(input.path()), &text(&folder), "--search", "--threads", "1"];
    let child = sluice(&options).stderr(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let begin = Instant::now();
    let is_written = || fs::read_dir(&folder).is_ok_and(|mut d| d.next().is_some());
    while !is_written() {
        assert!(begin.elapsed() < Duration::from_secs(60), "nothing is written");
        std::thread::sleep(Duration::from_millis(5));
    }
    // It exists, but under a name that nobody reads.
    assert!(files(&folder).iter().all(|name| name.starts_with('.')), "{:?}", files(&folder));
    Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    let ended = child.wait_with_output().unwrap();
    assert_eq!(ended.status.code(), Some(130), "{}", stderr(&ended));
    assert!(stderr(&ended).contains("interrupted"), "{}", stderr(&ended));
    assert!(!folder.exists());
}

/// Two packings of the same bundle at once would mix.
#[test]
fn a_second_pack_to_the_same_folder_is_refused_while_the_first_writes() {
    let (input, out) = (slow_to_pack(), tempfile::tempdir().unwrap());
    let folder = out.path().join("packed");
    let options = ["--experts-bits", "2", "--layout", "bundle", "--search", "--threads", "1"];
    let arguments: Vec<String> = ["pack", &text(input.path()), &text(&folder)].map(str::to_owned).to_vec();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).chain(options).collect();
    let mut first = sluice(&arguments).stderr(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    until_it_writes(&mut first, &folder, "experts-00.safetensors");
    // Stopped, so that it holds the folder during this test.
    signal("-STOP", first.id());
    let before = files(&folder);
    for more in [&[][..], &["--force"]] {
        let second = support::output(&[&arguments[..], more].concat());
        assert_refused(&second, &[&text(&folder), "another pack is writing"]);
        assert_eq!(files(&folder), before, "{more:?}");
    }
    // Another name of the same folder.
    let link = out.path().join("link");
    std::os::unix::fs::symlink(&folder, &link).unwrap();
    let by_link = support::output(&[&["pack", &text(input.path()), &text(&link)][..], &options].concat());
    assert_refused(&by_link, &["another pack is writing"]);

    // When it is killed, its lock is gone and the next packing continues.
    signal("-KILL", first.id());
    first.wait().unwrap();
    success(support::output(&arguments));
    assert!(folder.join("config.json").exists());
    assert!(!files(&folder).iter().any(|name| name.starts_with('.')), "{:?}", files(&folder));
}

#[test]
fn a_pack_that_is_refused_leaves_no_folder_behind() {
    let (input, out) = (tiny(false), tempfile::tempdir().unwrap());
    let deep = out.path().join("a/b/c");
    let refused = support::output(&["pack", &text(input.path()), &text(&deep), "--set", "layer.*=4"]);
    assert_refused(&refused, &["no module matches"]);
    let refused = support::output(&["pack", &text(out.path()), &text(&deep)]);
    assert_refused(&refused, &["safetensors"]);
    assert_eq!(files(out.path()), [""; 0]);
}

/// The space that a packing asks for is the space that it takes: room for headers of this length, not of the largest possible.
#[test]
fn what_a_pack_needs_is_what_it_writes() {
    let input = tiny(false);
    for options in [&["--bits", "4"][..], &["--layout", "bundle"], &["--shard-bytes", "20000"]] {
        let out = tempfile::tempdir().unwrap();
        let said = support::output(&[&["pack", &text(input.path()), &text(out.path())], options].concat());
        let line = stderr(&said);
        success(said);
        let figure =
            line.split(" = ").nth(1).and_then(|rest| rest.split(';').next()).unwrap_or_else(|| panic!("{line}"));
        let (number, unit) = figure.split_once(' ').unwrap();
        let unit = match unit {
            "B" => 1.0,
            "kB" => 1e3,
            "MB" => 1e6,
            _ => panic!("{line}"),
        };
        let needed = number.parse::<f64>().unwrap() * unit;
        let written: u64 = files(out.path()).iter().map(|f| fs::metadata(out.path().join(f)).unwrap().len()).sum();
        let written = written as f64;
        assert!(written <= needed * 1.001 && needed < written + 100e3, "{line}: {written} bytes were written");
    }
}
