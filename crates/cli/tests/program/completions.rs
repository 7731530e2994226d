//! Completions and manual pages are made by the program from its own flags, and are read by those that they are for.

use crate::support;

use std::collections::BTreeSet;
use std::fs;
use std::process::Command;

use support::*;

#[test]
fn completions_name_commands_and_flags_and_bash_reads_them() {
    for (shell, begins) in [("bash", "_sluice()"), ("zsh", "#compdef sluice"), ("fish", "#")] {
        let text = success(output(&["completions", shell]));
        assert!(text.starts_with(begins), "{shell}: {}", &text[..200]);
        for word in ["self-test", "launch", "max-tokens", "memory-budget"] {
            assert!(text.contains(word), "{shell}: {word}");
        }
    }
    let file = tempfile::NamedTempFile::new().unwrap();
    fs::write(file.path(), success(output(&["completions", "bash"]))).unwrap();
    // What a user gets who types `sluice self` and Tab.
    let script = format!(
        "source {} && COMP_WORDS=(sluice self) COMP_CWORD=1 && _sluice sluice self sluice && echo \"${{COMPREPLY[@]}}\"",
        file.path().display()
    );
    let done = Command::new("bash").args(["-c", &script]).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&done.stdout).trim(), "self-test", "{}", stderr(&done));
    assert_eq!(output(&["completions", "tcsh"]).status.code(), Some(2));
}

#[test]
fn every_command_has_a_manual_page() {
    let folder = tempfile::tempdir().unwrap();
    let pages = folder.path().join("man1");
    success(output(&["manuals", &text(&pages)]));
    let found: BTreeSet<String> =
        fs::read_dir(&pages).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    let help = success(output(&["--help"]));
    let commands = help.lines().take_while(|line| !line.starts_with("Options:")).filter(|line| line.starts_with("  "));
    let names: Vec<&str> = commands.filter_map(|line| line.split_whitespace().next()).collect();
    assert!(names.len() > 12, "{help}");
    for name in names {
        assert!(found.contains(&format!("sluice-{name}.1")), "{name}: {found:?}");
    }
    assert!(found.contains("sluice.1") && found.contains("sluice-bench-serve.1"), "{found:?}");
    assert!(!found.iter().any(|page| page.contains("manuals")), "{found:?}");
    let page = fs::read_to_string(pages.join("sluice-serve.1")).unwrap();
    assert!(page.contains(".TH") && page.contains("parallel"), "{page}");
    if Command::new("groff").arg("--version").output().is_err() {
        eprintln!("SKIPPED: no groff here");
        return;
    }
    let set = Command::new("groff").args(["-man", "-Tutf8", "-ww"]).arg(pages.join("sluice-run.1")).output().unwrap();
    assert!(set.status.success() && stdout(&set).contains("Answer one prompt"), "{}", stderr(&set));
}
