//! `sluice eval` against the reference's values.

use crate::support;

use std::fs;

use support::*;

/// Tokens and logits `[rows, vocab]` of a golden case.
fn reference(name: &str) -> (Vec<String>, Vec<f32>, usize) {
    let cases: serde_json::Value = serde_json::from_str(&fs::read_to_string(golden("cases.json")).unwrap()).unwrap();
    let case = cases["cases"].as_array().unwrap().iter().find(|c| c["name"] == name).unwrap();
    let tokens = case["tokens"].as_array().unwrap().iter().map(|t| t.to_string()).collect();
    let bytes = fs::read(golden(case["logits"].as_str().unwrap())).unwrap();
    let logits = bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
    (tokens, logits, case["vocab"].as_u64().unwrap() as usize)
}

fn rows(out: std::process::Output) -> Vec<Vec<f32>> {
    let value = json(out);
    let row = |r: &serde_json::Value| r.as_array().unwrap().iter().map(|x| x.as_f64().unwrap() as f32).collect();
    value["logits"].as_array().unwrap().iter().map(row).collect()
}

#[test]
fn logits_of_all_positions_are_the_references() {
    for name in ["qwen3", "qwen3_next", "qwen3_5_moe"] {
        let (tokens, expected, vocab) = reference(name);
        let tokens = tokens.join(",");
        let model = golden(name);
        let args = ["eval", "logits", &model, "--tokens", &tokens, "--json", "--activations", "f32"];
        let all = rows(output(&[&args[..], &["--all"]].concat()));
        let (low, high) = expected.iter().fold((f32::MAX, f32::MIN), |(l, h), x| (l.min(*x), h.max(*x)));
        assert_eq!(all.len() * vocab, expected.len(), "{name}");
        let differences = all.iter().flatten().zip(&expected).map(|(a, b)| (a - b).abs());
        let worst = differences.fold(0.0, f32::max) / (high - low);
        assert!(worst < 2e-4, "{name}: {worst}");

        // The last row alone has the same bits, with any chunk size and number of threads.
        let last = rows(output(&[&args[..], &["--chunk", "7", "--threads", "1"]].concat()));
        assert_eq!(last.len(), 1);
        let bits = |row: &[f32]| row.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&last[0]), bits(all.last().unwrap()), "{name}");
    }
}

#[test]
fn logits_for_people_are_the_best_few() {
    let out = success(output(&["eval", "logits", &golden("qwen3"), "--tokens", "1,2,3", "--all"]));
    assert_eq!(out.lines().count(), 3, "{out}");
}

#[test]
fn perplexity_follows_the_references_convention() {
    let Some(demo) = demo() else { return };
    let heldout = format!("{demo}/heldout.txt");
    let text = if fs::exists(&heldout).unwrap() { heldout } else { golden("../../../shared/demo-model/heldout.txt") };
    if !fs::exists(&text).unwrap() {
        eprintln!("SKIPPED: no held-out text");
        return;
    }
    let reference: serde_json::Value =
        serde_json::from_str(&fs::read_to_string(golden("demo-ppl.json")).unwrap()).unwrap();
    let expected = reference["experts"]["8"]["nats_first_8_windows"].as_f64().unwrap();
    let found = json(output(&["eval", "ppl", &demo, "--text", &text, "--windows", "8", "--json"]));
    assert_eq!(found["tokens"], 8 * 511);
    assert_eq!(found["text_tokens"], reference["tokens"]);
    // Quantised, the demo's perplexity may be 2 % worse: 0.02 nats.
    let nats = found["nats_per_token"].as_f64().unwrap();
    assert!((nats - expected).abs() < 0.02, "{nats} instead of {expected}");
    assert!((found["perplexity"].as_f64().unwrap() - nats.exp()).abs() < 1e-9);
}

#[test]
fn a_short_last_window_counts_from_two_tokens_on() {
    let Some(demo) = demo() else { return };
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("text");
    let ppl = |text: &str| {
        fs::write(&path, text).unwrap();
        output(&["eval", "ppl", &demo, "--text", path.to_str().unwrap(), "--window", "4", "--json"])
    };
    // Special tokens are one token each.
    let found = json(ppl(&"<|endoftext|>".repeat(6)));
    assert_eq!((&found["windows"], &found["tokens"]), (&2.into(), &4.into()));
    let found = json(ppl(&"<|endoftext|>".repeat(5)));
    assert_eq!((&found["windows"], &found["tokens"]), (&1.into(), &3.into()));
    assert_refused(&ppl("<|endoftext|>"), &["too short"]);
    fs::write(&path, b"\xff\xfe").unwrap();
    assert_refused(&output(&["eval", "ppl", &demo, "--text", path.to_str().unwrap()]), &["text", "utf-8"]);
}

#[test]
fn routing_is_recorded_and_its_figures_agree() {
    let Some(demo) = demo() else { return };
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| text(&dir.path().join(name));
    fs::write(path("text"), prose()).unwrap();
    let args = ["eval", "routing", &demo, "--text", &path("text"), "--tokens", "300"];
    let files = ["--csv", &path("csv"), "--svg", &path("all.svg"), "--pin-out", &path("pins")];
    let found = json(output(&[&args[..], &files, &["--json"]].concat()));
    let (layers, experts, k) = (8, 64, 8);
    assert_eq!((&found["tokens"], &found["layers"], &found["experts"]), (&300.into(), &layers.into(), &experts.into()));
    assert_eq!(found["experts_per_token"], k);

    // 1. Every token used k experts of every layer
    let uses = found["uses"].as_array().unwrap();
    for layer in uses {
        let layer: Vec<u64> = layer.as_array().unwrap().iter().map(|n| n.as_u64().unwrap()).collect();
        assert_eq!((layer.len(), layer.iter().sum::<u64>()), (experts, 300 * k as u64));
    }
    // 2. Shares are valid; a cache for all of a layer's experts misses each only once
    let share = |value: &serde_json::Value| (0.0..=1.0).contains(&value.as_f64().unwrap());
    assert!(share(&found["diversity"]["30"]["mean"]) && share(&found["overlap"]["mean"]));
    assert!(found["diversity"]["30"]["mean"].as_f64() > found["diversity"]["3"]["mean"].as_f64());
    assert!(found["lru_hits"]["32"]["mean"].as_f64() > found["lru_hits"]["16"]["mean"].as_f64());
    // 3. Nothing beats the optimum
    let pools = found["pools"].as_array().unwrap();
    assert!(pools.len() > 5);
    for pool in pools {
        let misses = |policy: &str| pool["misses"][policy].as_u64().unwrap();
        for policy in ["lru", "lfu", "scan"] {
            assert!(misses(policy) >= misses("belady") && misses(policy) <= 300 * (layers * k) as u64, "{pool}");
        }
    }
    // 4. The files agree
    let csv = fs::read_to_string(path("csv")).unwrap();
    let (first, half) = (csv.lines().next().unwrap(), experts * layers / 2);
    assert_eq!(first, "statistic,layer,series,x,value");
    assert!(csv.lines().all(|l| l.split(',').count() == 5));
    let pool = pools.iter().find(|p| p["slots"] == half).unwrap();
    assert!(csv.contains(&format!("\nmisses,all,belady,{half},{}\n", pool["misses"]["belady"])));
    let drawn = fs::read_to_string(path("all.svg")).unwrap();
    assert!(drawn.starts_with("<svg ") && drawn.contains("Misses by policy and size") && drawn.contains("belady"));
    let pins: serde_json::Value = serde_json::from_str(&fs::read_to_string(path("pins")).unwrap()).unwrap();
    let hottest = pins["hottest"].as_array().unwrap();
    assert!(hottest.windows(2).all(|w| w[0][2].as_f64() >= w[1][2].as_f64()));
    let (layer, expert) = (hottest[0][0].as_u64().unwrap() as usize, hottest[0][1].as_u64().unwrap() as usize);
    let most = uses.iter().flat_map(|l| l.as_array().unwrap()).map(|n| n.as_u64().unwrap()).max();
    assert_eq!(uses[layer][expert].as_u64(), most);

    // 5. Routing does not depend on chunks and threads
    let again = json(output(&[&args[..], &["--json", "--chunk", "7", "--threads", "1"]].concat()));
    assert_eq!(again, found);
    // 6. Tables for people, and a folder of images
    let out = success(output(&[&args[..], &["--svg", &path("images")]].concat()));
    assert!(out.contains("belady") && out.contains("layer before"), "{out}");
    assert_eq!(fs::read_dir(path("images")).unwrap().count(), 6);
}

#[test]
fn routing_is_refused_where_there_is_none() {
    let dir = tempfile::tempdir().unwrap();
    let path = text(&dir.path().join("text"));
    fs::write(&path, "too short").unwrap();
    assert_refused(&output(&["eval", "routing", &golden("qwen3"), "--text", &path]), &["qwen3", "no experts"]);
    let Some(demo) = demo() else { return };
    assert_refused(&output(&["eval", "routing", &demo, "--text", &path]), &["text: too short", "tokens"]);
    assert_refused(&output(&["eval", "routing", &demo, "--text", "/nowhere"]), &["/nowhere"]);
}
