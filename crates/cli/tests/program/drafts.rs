//! `--draft` and `--draft-model` of `sluice run`: the same answer, and errors that name what is wrong.

use crate::support;

use std::fs;
use std::path::Path;

use support::*;

/// Copies the files of a model to a folder, each changed by `change(name, bytes)`.
fn copied(model: &str, to: &Path, change: impl Fn(&str, Vec<u8>) -> Vec<u8>) {
    for entry in fs::read_dir(model).unwrap().flatten() {
        let name = entry.file_name().into_string().unwrap();
        fs::write(to.join(&name), change(&name, fs::read(entry.path()).unwrap())).unwrap();
    }
}

/// The error message of a run that fails.
fn error(args: &[&str]) -> String {
    let failed = output(args);
    assert!(!failed.status.success(), "{args:?}");
    stderr(&failed)
}

#[test]
fn a_model_that_drafts_for_itself_changes_no_token() {
    let Some(demo) = demo() else { return };
    let run = |args: &[&str]| {
        let fixed = ["run", &demo, "Tell me about a fox.", "-n", "80", "--temperature", "0.8", "--seed", "4", "--json"];
        json(output(&[&fixed, args].concat()))
    };
    let plain = run(&[]);
    assert!(plain["stats"]["drafts"].is_null(), "{plain}");
    for args in [&["--draft-model", &demo][..], &["--draft", &demo], &["--draft", "auto", "--draft-model", &demo]] {
        let found = run(args);
        assert_eq!((&found["tokens"], &found["text"]), (&plain["tokens"], &plain["text"]), "{args:?}");
        let drafts = found["stats"]["drafts"].as_object().unwrap();
        assert!(drafts.contains_key("ngram") && drafts.contains_key("model"), "{drafts:?}");
    }
    // `--draft off` wins.
    assert!(run(&["--draft", "off", "--draft-model", &demo])["stats"]["drafts"].is_null());
}

#[test]
fn a_model_of_another_vocabulary_is_refused_by_the_token_that_differs() {
    let Some(demo) = demo() else { return };
    let dir = tempfile::tempdir().unwrap();
    copied(&demo, dir.path(), |name, bytes| match name {
        "tokenizer.json" | "tokenizer_config.json" => {
            String::from_utf8(bytes).unwrap().replace("<|im_end|>", "<|finished|>").into_bytes()
        }
        _ => bytes,
    });
    let other = text(dir.path());
    let refused = error(&["run", &demo, "Hello", "-n", "2", "--draft-model", &other]);
    let wanted =
        format!("--draft-model {other}: another vocabulary: token 2 is \"<|finished|>\" there and \"<|im_end|>\" here");
    assert!(refused.contains(&wanted), "{refused}");
}

#[test]
fn what_cannot_draft_is_named() {
    let Some(demo) = demo() else { return };
    let run = |args: &[&str]| error(&[&["run", &demo, "Hello", "-n", "2"], args].concat());
    assert!(run(&["--draft-model", "no/such/folder"]).contains("no/such/folder"));
    assert!(
        run(&["--draft", &demo, "--draft-model", &demo]).contains("--draft names a model, and so does --draft-model")
    );
    let mtp = run(&["--draft", "mtp"]);
    assert!(mtp.contains("the checkpoint has no head that predicts one token more"), "{mtp}");
}
