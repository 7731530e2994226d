//! `sluice doctor` says what this machine is and what would help, leaves nothing behind, and needs nothing to be there.

use crate::support;

use std::fs;
use std::process::Command;

use serde_json::Value;
use support::group::Group;
use support::*;

/// The program in a home of its own, where nothing is yet.
fn at_home(home: &tempfile::TempDir, args: &[&str]) -> std::process::Command {
    let mut command = sluice(args);
    command.env("HOME", home.path());
    command
}

#[test]
fn the_doctor_looks_at_everything_and_leaves_nothing_behind() {
    let home = tempfile::tempdir().unwrap();
    let found: Value = json(at_home(&home, &["doctor", "--json"]).output().unwrap());
    let version = success(output(&["--version"]));
    assert_eq!(format!("sluice {}", found["version"].as_str().unwrap()), version.trim());
    let sets = found["processor"]["instruction_sets"].as_array().unwrap();
    let of_arm = cfg!(target_arch = "aarch64");
    let wanted: &[&str] = if of_arm { &["neon", "dotprod", "i8mm"] } else { &["avx2", "avxvnni", "avx512", "amx"] };
    assert_eq!(sets.iter().map(|set| set["name"].as_str().unwrap()).collect::<Vec<_>>(), wanted);
    assert!(found["processor"]["threads"].as_u64().unwrap() >= 1, "{found}");
    assert!(found["memory"]["total"].as_u64() >= found["memory"]["available"].as_u64(), "{found}");
    assert!(found["memory"]["bandwidth"].as_f64().unwrap() > 1e8, "{found}");
    let [disk] = &found["disks"].as_array().unwrap()[..] else { panic!("{found}") };
    match disk["unmeasured"].as_str() {
        Some(why) => eprintln!("SKIPPED: the disk was not measured: {why}"),
        None => {
            let speed = &disk["speed"];
            assert!(speed["bytes_per_second"].as_f64().unwrap() > 1e6, "{found}");
            assert!(speed["small_request_seconds"].as_f64().unwrap() > 0.0, "{found}");
            assert!(speed["measured_with"].as_str().unwrap().contains("temporary"), "{found}");
        }
    }
    let folders = found["folders"].as_array().unwrap();
    let models = folders.iter().find(|folder| folder["what"] == "models").unwrap();
    assert_eq!(models["path"], home.path().join(".cache/huggingface/hub").display().to_string());
    assert_eq!((models["exists"].as_bool(), models["bytes"].as_u64()), (Some(false), Some(0)));
    assert!(models["free"].as_u64().unwrap() > 0);
    assert_eq!(fs::read_dir(home.path()).unwrap().count(), 0);
}

#[test]
fn its_lines_name_each_part_and_advice_comes_last() {
    let home = tempfile::tempdir().unwrap();
    fs::create_dir_all(home.path().join(".cache/huggingface/hub")).unwrap();
    fs::write(home.path().join(".cache/huggingface/hub/weights"), vec![7; 3 << 20]).unwrap();
    let mut command = at_home(&home, &["doctor", "--no-measure"]);
    // What is slower than it could be is said.
    command.env("SLUICE_ISA", "generic");
    let text = success(command.output().unwrap());
    for name in ["sluice", "processor", "memory", "gpu", "limits", "disk", "models", "prompt cache", "settings"] {
        assert!(text.lines().any(|line| line.starts_with(name)), "{name}: {text}");
    }
    assert!(text.contains("~/.cache/huggingface/hub: 3.1 MB"), "{text}");
    assert!(!text.contains("measured"), "{text}");
    let found: Value = json(at_home(&home, &["doctor", "--no-measure", "--json"]).output().unwrap());
    let has_more =
        found["processor"]["instruction_sets"].as_array().unwrap().iter().any(|set| set["is_supported"] == true);
    if has_more {
        assert!(text.split("What would help:").nth(1).unwrap().contains("unset SLUICE_ISA"), "{text}");
    } else {
        eprintln!("SKIPPED: this processor has only the generic instruction set");
    }
}

#[test]
fn without_a_home_it_still_looks() {
    let mut command = sluice(&["doctor", "--no-measure", "--json"]);
    command.env_remove("HOME");
    let found: Value = json(command.output().unwrap());
    assert!(found["processor"]["threads"].as_u64().unwrap() >= 1);
    assert_eq!(found["folders"].as_array().unwrap().len(), 0);
}

/// The remedy for what was found.
#[track_caller]
fn remedy<'a>(found: &'a Value, what: &str) -> &'a str {
    let advice = found["advice"].as_array().unwrap();
    let one = advice.iter().find(|one| one["found"].as_str().unwrap().contains(what));
    one.unwrap_or_else(|| panic!("{what}: {advice:?}"))["remedy"].as_str().unwrap()
}

#[test]
fn limits_of_a_process_are_found_with_a_remedy() {
    let command = sluice(&["doctor", "--no-measure", "--json"]);
    let mut limited = Command::new("sh");
    limited.args(["-c", "ulimit -n 100 && exec \"$@\"", "sh"]).arg(command.get_program()).args(command.get_args());
    let found = json(limited.output().unwrap());
    assert_eq!(found["limits"]["nofile"], 100);
    assert!(remedy(&found, "only 100 files may be open").contains("LimitNOFILE"));
}

#[test]
fn a_control_groups_limit_is_found_and_nothing_is_measured_in_too_little_memory() {
    let Some(group) = Group::new(Some(300_000_000)) else { return };
    let found = json(group.run(&sluice(&["doctor", "--json"])));
    let limit = found["memory"]["group_limit"].as_u64().unwrap();
    assert!((299_000_000..=300_000_000).contains(&limit), "{found}");
    assert!(found["memory"]["bandwidth"].is_null(), "{found}");
    assert!(remedy(&found, "limits memory to 300.0 MB").contains("docker run --memory"));
}
