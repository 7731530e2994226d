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
    let plain = run(&["--draft", "off"]);
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
fn guesses_are_made_by_default_where_there_is_memory_to_spare() {
    let Some(demo) = demo() else { return };
    let run = |args: &[&str]| {
        let fixed = ["run", &demo, "Tell me about a fox.", "-n", "20", "--temperature", "0", "--json"];
        output(&[&fixed, args].concat())
    };
    let by_default = json(run(&[]));
    assert!(by_default["stats"]["drafts"]["ngram"].is_object(), "{by_default}");
    let (least, _) = figure(&run(&["--memory-budget", "10M"]), "--memory-budget ");
    for tight in [&["--memory-budget", &least][..], &["--experts", "slots"]] {
        let found = json(run(tight));
        assert!(found["stats"]["drafts"].is_null(), "{found}");
        assert_eq!(found["tokens"], by_default["tokens"]);
    }
}

#[test]
fn a_trained_mtp_head_changes_no_token_and_is_often_right() {
    let Some(demo) = demo() else { return };
    let with_head = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/demo-mtp");
    for temperature in ["0", "0.8"] {
        let run = |model: &str, draft: &str| {
            let how = ["-n", "60", "--temperature", temperature, "--seed", "4", "--draft", draft, "--json"];
            json(output(&[&["run", model, "Tell me about a fox."], &how[..]].concat()))
        };
        let (plain, drafted) = (run(&demo, "off"), run(with_head, "mtp"));
        assert_eq!((&drafted["tokens"], &drafted["text"]), (&plain["tokens"], &plain["text"]), "{temperature}");
    }
    // At a fixed width, since the governor gives up what does not pay.
    let how =
        ["--draft", "mtp", "--widths", "1", "--tokens", "60", "--rounds", "1", "--prompt", "100,200,300", "--json"];
    let found = json(output(&[&["bench", "drafts", with_head], &how[..]].concat()));
    let [drafted, right] = ["draft_tokens", "accepted_tokens"].map(|name| found[name].as_u64().unwrap());
    assert!(drafted > 20 && 3 * right > drafted, "{found}");
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
fn a_model_with_a_shorter_context_says_where_its_guesses_end() {
    let Some(demo) = demo() else { return };
    let dir = tempfile::tempdir().unwrap();
    copied(&demo, dir.path(), |name, bytes| match name {
        "config.json" => {
            let mut config: serde_json::Value = serde_json::from_slice(&bytes).unwrap();
            config["max_position_embeddings"] = 96.into();
            config.to_string().into_bytes()
        }
        _ => bytes,
    });
    let short = text(dir.path());
    let said = |args: &[&str]| stderr(&output(&[&["run", &demo, "Hello", "-n", "2"], args].concat()));
    let note = "--draft-model: its context is 96 tokens of 200; behind them it guesses nothing";
    assert!(said(&["--draft-model", &short, "--max-context", "200"]).contains(note));
    assert!(!said(&["--draft-model", &short, "--max-context", "90"]).contains("guesses nothing"));
    assert!(!said(&["--draft-model", &demo]).contains("guesses nothing"));
}

#[test]
fn bench_compares_widths_and_finds_nothing_computed_again() {
    let Some(demo) = demo() else { return };
    let lines = |args: &[&str]| -> Vec<serde_json::Value> {
        let fixed = ["bench", "drafts", &demo, "--rounds", "1", "--json"];
        let printed = success(output(&[&fixed, args].concat()));
        printed.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    };
    let found = lines(&["--draft-model", &demo, "--widths", "off,3,auto", "--tokens", "40"]);
    assert_eq!(found.iter().map(|l| l["width"].as_str().unwrap()).collect::<Vec<_>>(), ["off", "3", "auto"]);
    assert_eq!((&found[0]["draft_tokens"], &found[0]["computed_tokens"]), (&0.into(), &(32 + 39).into()));
    assert!(found[1]["accepted_tokens"].as_u64().unwrap() > 20, "{found:?}");
    for line in &found {
        assert!(line["computed_again"] == 0 && line["tokens_per_second"]["median"].as_f64().unwrap() > 0.0, "{line}");
    }
    let kept = lines(&["--kept-states", "--widths", "1,4", "--tokens", "2"]);
    assert_eq!(kept.iter().map(|l| l["drafted"].as_u64().unwrap()).collect::<Vec<_>>(), [1, 4]);
    assert!(kept[1]["kept_bytes"].as_u64().unwrap() == 4 * kept[0]["kept_bytes"].as_u64().unwrap(), "{kept:?}");
    let refused = error(&["bench", "drafts", &demo, "--widths", "33"]);
    assert!(refused.contains("off, auto, or a number from 1 to 32"), "{refused}");
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
