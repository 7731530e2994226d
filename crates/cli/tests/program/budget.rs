//! Memory limits of the shipped program. A refusal names the limit and the smallest figure that suffices, and that figure does suffice. Memory use stays below the limit,
//! in control groups too.

use crate::support;

use std::path::Path;
use std::process::{Command, Output};

use support::group::Group;
use support::*;

/// This much less than the smallest sufficient figure is too little: memory use differs by about a megabyte from start to start.
const STEP: u64 = 4 << 20;

/// The prompt for models without a tokenizer.
fn logits(folder: &str, flags: &[&str]) -> Command {
    let mut command = sluice(&["eval", "logits", folder, "--tokens", "1,2,3,4,5,6,7", "--json"]);
    command.args(flags);
    command
}

/// The prompt for the demo: enough tokens for many experts.
fn story(folder: &str, flags: &[&str]) -> Command {
    let mut command =
        sluice(&["run", folder, "Once upon a time", "--max-tokens", "20", "--temperature", "0", "--json"]);
    command.args(flags);
    command
}

/// The checkpoint that the demo is packed from. `None`, with a note, if it is missing.
fn unpacked_demo() -> Option<String> {
    let place = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/demo-model");
    let found = place.canonicalize().ok().map(|p| text(&p));
    if found.is_none() {
        eprintln!("SKIPPED: no demo model in bf16");
    }
    found
}

/// Text or logits of an answer, without statistics.
fn answer(output: Output) -> serde_json::Value {
    let mut answer = json(output);
    answer.as_object_mut().unwrap().remove("stats");
    answer
}

#[test]
fn a_refused_memory_budget_says_which_one_would_do() {
    let cases = [
        ("qwen3", &[][..]),
        ("qwen3_moe", &[]),
        ("mlx_qwen3_moe", &["--experts", "slots"]),
        ("mlx_qwen3_next", &["--experts", "pagecache"]),
    ];
    for (name, flags) in cases {
        let folder = golden(name);
        let with = |budget: &str| logits(&folder, &[flags, &["--memory-budget", budget]].concat()).output().unwrap();
        let expected = success(logits(&folder, flags).output().unwrap());
        let (enough, bytes) = figure(&with("1M"), "--memory-budget ");
        assert!(success(with(&enough)) == expected, "{name} {flags:?}");
        let (again, _) = figure(&with(&(bytes - STEP).to_string()), "--memory-budget ");
        assert!(
            (again.strip_suffix('M').unwrap().parse::<f64>().unwrap() - bytes as f64 / 1e6).abs() < 2.0,
            "{again} after {enough}"
        );
    }
}

#[test]
fn the_demo_runs_within_the_smallest_budget_and_holds_no_more() {
    let Some(demo) = demo() else { return };
    let expected = answer(story(&demo, &[]).output().unwrap());
    let with = |budget: &str| story(&demo, &["--memory-budget", budget]).output().unwrap();
    let (enough, bytes) = figure(&with("10M"), "--memory-budget ");
    assert_refused(
        &with(&(bytes - STEP).to_string()),
        &["--memory-budget of", "program", "mapped weights", "scratch", "state", "keys and values", "experts", "="],
    );
    let more = [4, 16].map(|more| format!("{:.1}M", bytes as f64 / 1e6 + f64::from(more)));
    for budget in [&enough, &more[0], &more[1]] {
        let found = json(with(budget));
        let peak = found["stats"]["memory"]["peak_rss"].as_f64().unwrap();
        let limit = budget.strip_suffix('M').unwrap().parse::<f64>().unwrap() * 1e6;
        assert!(peak <= limit, "{peak} held, {budget} allowed");
        assert_eq!(found["text"], expected["text"], "{budget}");
    }
}

#[test]
fn an_expert_budget_has_its_own_figure_and_stays_within_the_memory_budget() {
    let folder = golden("mlx_qwen3_moe");
    let with = |flags: &[&str]| logits(&folder, &[&["--experts", "slots"], flags].concat()).output().unwrap();
    let expected = success(with(&[]));
    let (enough, bytes) = figure(&with(&["--expert-budget", "4096"]), "--expert-budget ");
    assert!(success(with(&["--expert-budget", &enough])) == expected);
    assert_refused(&with(&["--expert-budget", &(bytes - 100_000).to_string()]), &["--expert-budget of"]);

    let Some(demo) = demo() else { return };
    let with = |flags: &[&str]| story(&demo, flags).output().unwrap();
    let (_, least) = figure(&with(&["--memory-budget", "10M"]), "--memory-budget ");
    let total = (least + 6_000_000).to_string();
    let asked = with(&["--memory-budget", &total, "--expert-budget", "18M"]);
    let (larger, _) = figure(&asked, "--memory-budget ");
    success(with(&["--memory-budget", &larger, "--expert-budget", "18M"]));
    let said = stderr(&asked);
    let most = said.split("or --expert-budget ").nth(1).expect(&said).split(' ').next().unwrap();
    let bytes = (most.strip_suffix('M').unwrap().parse::<f64>().unwrap() * 1e6) as u64;
    let found = json(with(&["--memory-budget", &total, "--expert-budget", most]));
    assert!(found["stats"]["memory"]["experts"].as_u64().unwrap() <= bytes + STEP, "{found}");
    assert_refused(
        &with(&["--memory-budget", &total, "--expert-budget", &(bytes + STEP).to_string()]),
        &["--memory-budget of"],
    );
}

#[test]
fn mixtures_hold_less_than_their_budget_in_a_control_group() {
    let folders = ["qwen3_moe", "mlx_qwen3_next", "mlx_qwen3_5_moe"].map(golden);
    for folder in &folders {
        let (enough, bytes) = figure(&logits(folder, &["--memory-budget", "1M"]).output().unwrap(), "--memory-budget ");
        let Some(group) = Group::new(None) else { return };
        let mut run = logits(folder, &["--memory-budget", &enough, "--experts", "auto"]);
        // Run once outside the group first: pages of the program are charged to whoever reads them first.
        success(run.output().unwrap());
        success(group.run(&run));
        assert!(group.peak() <= bytes, "{folder}: {} at the peak, {enough} allowed", group.peak());
    }
    let Some(demo) = demo() else { return };
    let (_, least) = figure(&story(&demo, &["--memory-budget", "10M"]).output().unwrap(), "--memory-budget ");
    for budget in [least + 2_000_000, least + 9_000_000] {
        let Some(group) = Group::new(None) else { return };
        let mut run = story(&demo, &["--memory-budget", &budget.to_string(), "--experts", "slots"]);
        success(run.output().unwrap());
        success(group.run(&run));
        assert!(group.peak() <= budget, "{} at the peak, {budget} allowed", group.peak());
        // The same with no memory beyond that.
        let Some(group) = Group::new(Some(budget)) else { return };
        success(group.run(&story(&demo, &["--memory-budget", &budget.to_string()])));
    }
}

/// Runs in a group with just enough memory, up to three times: on a busy machine the kernel may count late, or kill instead of waiting for pages. The promise is only
/// that it can run.
fn tried(group: &Group, command: &Command) -> Output {
    let mut found = group.run(command);
    for _ in 0..2 {
        if !found.status.success() {
            found = group.run(command);
        }
    }
    found
}

#[test]
fn a_control_group_is_a_limit_that_is_named_and_has_a_figure() {
    for demo in [demo(), unpacked_demo()].into_iter().flatten() {
        // Once outside: pages of a program that was just built are charged to whoever reads them first.
        let text = answer(story(&demo, &[]).output().unwrap())["text"].clone();
        let Some(tight) = Group::new(Some(14_000_000)) else { return };
        let refused = tight.run(&story(&demo, &[]));
        assert_refused(
            &refused,
            &["the memory control group's limit of", "program", "pages of files", "scratch", "experts", "="],
        );
        let (_, bytes) = figure(&refused, "");
        let Some(enough) = Group::new(Some(bytes)) else { return };
        let found = answer(tried(&enough, &story(&demo, &[])));
        assert_eq!(found["text"], text);
        let Some(less) = Group::new(Some(bytes - STEP)) else { return };
        assert_refused(&less.run(&story(&demo, &[])), &["the memory control group's limit of"]);
    }
}

#[test]
fn a_hundred_megabytes_of_demo_run_in_little_more_than_a_quarter_of_that() {
    let Some(demo) = unpacked_demo() else { return };
    success(story(&demo, &[]).output().unwrap());
    let Some(group) = Group::new(Some(29_000_000)) else { return };
    let found = json(tried(&group, &story(&demo, &[])));
    assert_eq!(found["stats"]["experts"]["placement"], "slots");
    // A budget for experts beyond the group's memory is refused before it is taken.
    let Some(group) = Group::new(Some(31_000_000)) else { return };
    assert_refused(
        &group.run(&story(&demo, &["--expert-budget", "18M"])),
        &["the memory control group's limit of 31.0 MB", "or --expert-budget "],
    );
}
