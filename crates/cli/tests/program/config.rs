//! Settings: flags win over variables, variables over the file, and a command's own section over the rest of the file. Errors name the setting.

use crate::support;

use std::process::{Command, Output};

use support::*;

/// Logits of a golden model, which need only a folder; settings themselves apply to `run`.
fn run(folder: &str, flags: &[&str]) -> Command {
    let mut command = sluice(&["run", folder, "Once upon a time", "--raw", "--temperature", "0", "--json"]);
    command.args(flags);
    command
}

fn tokens(output: Output) -> u64 {
    json(output)["stats"]["generation"]["tokens"].as_u64().unwrap()
}

#[test]
fn flags_win_over_variables_and_these_over_the_file() {
    let Some(demo) = demo() else { return };
    let home = tempfile::tempdir().unwrap();
    std::fs::create_dir(home.path().join("sluice")).unwrap();
    std::fs::write(
        home.path().join("sluice/config.toml"),
        "max-tokens = 2\n[run]\nmax_tokens = 3\nignore-eos = true\n[serve]\nport = 1",
    )
    .unwrap();
    let with = |flags: &[&str], variable: Option<&str>| {
        let mut command = run(&demo, flags);
        command.env("XDG_CONFIG_HOME", home.path());
        variable.map(|v| command.env("SLUICE_MAX_TOKENS", v));
        tokens(command.output().unwrap())
    };
    assert_eq!(with(&[], None), 3);
    assert_eq!(with(&[], Some("4")), 4);
    assert_eq!(with(&["--max-tokens", "5"], Some("4")), 5);
}

#[test]
fn what_is_wrong_with_a_setting_is_said_by_name() {
    let folder = golden("qwen3");
    let home = tempfile::tempdir().unwrap();
    let path = home.path().join("my.toml");
    for (text, part) in [
        ("prot = 1", "--prot"),
        ("[serve]\nmax-tokens = 1", "`sluice serve` has no flag --max-tokens"),
        ("a = [", "line 1"),
        ("threads = 'many'", "many"),
    ] {
        std::fs::write(&path, text).unwrap();
        let refused = run(&folder, &["--config", path.to_str().unwrap()]).output().unwrap();
        assert_refused(&refused, &["my.toml", part]);
    }
    let refused = run(&folder, &[]).env("SLUICE_THREADS", "many").output().unwrap();
    assert_refused(&refused, &["SLUICE_", "many"]);
    let refused = run(&folder, &["--config", "/none.toml"]).output().unwrap();
    assert_refused(&refused, &["/none.toml"]);
}

#[test]
fn a_model_that_a_setting_names_is_the_one_where_none_is_named() {
    let refused = sluice(&["serve"]).env("SLUICE_MODEL", "/no/such/model").output().unwrap();
    assert_refused(&refused, &["/no/such/model"]);
    let refused = sluice(&["serve", "/another"]).env("SLUICE_MODEL", "/no/such/model").output().unwrap();
    assert_refused(&refused, &["/another"]);
}
