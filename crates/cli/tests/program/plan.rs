//! `sluice plan`: its estimates for a model's experts, with recorded routing and without.

use crate::support;

use std::fs;

use support::*;

/// A plan of `model` as JSON, without measuring a disk.
fn plan(model: &str, args: &[&str]) -> serde_json::Value {
    json(output(&[&["plan", model, "--disk-bandwidth", "1GB", "--context", "64", "--json"], args].concat()))
}

/// The memory that fits the fraction `part` of the experts.
fn memory(model: &str, part: f64) -> String {
    let all = plan(model, &["--memory", "100GB"]);
    let number = |key: &str| all[key].as_f64().unwrap();
    // Half an expert more, so that rounding does not lose one.
    let bytes = number("resident") + number("cache") + part * number("experts") + 0.5 * number("per_expert");
    (bytes as u64).to_string()
}

#[test]
fn a_recorded_text_is_served_as_eval_routing_says() {
    let Some(demo) = demo() else { return };
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| text(&dir.path().join(name));
    fs::write(path("text"), prose()).unwrap();
    let (text_path, trace_path) = (path("text"), path("trace"));
    let recorded = ["--text", &text_path, "--tokens", "200", "--trace-out", &trace_path, "--json"];
    let routing = json(output(&[&["eval", "routing", &demo], &recorded[..]].concat()));
    // About a byte for each of 8 experts in each of 8 layers.
    assert!((200 * 64..200 * 70).contains(&fs::metadata(path("trace")).unwrap().len()));

    // 1. One tier: the misses with the same number of slots
    let trace = ["--trace", trace_path.as_str()];
    let half = memory(&demo, 0.5);
    let found = plan(&demo, &[&trace[..], &["--memory", &half]].concat());
    let whole = &found["simulated"]["from_empty"];
    assert_eq!((&whole["tiers"][0]["slots"], &whole["tokens"]), (&256.into(), &200.into()));
    let pool = routing["pools"].as_array().unwrap().iter().find(|p| p["slots"] == 256).unwrap();
    let misses = pool["misses"]["scan"].as_f64().unwrap();
    assert_eq!(whole["misses_per_token"].as_f64().unwrap(), misses / 200.0);
    let per_expert = found["per_expert"].as_f64().unwrap();
    assert_eq!(whole["bytes_from_disk_per_token"].as_f64().unwrap(), misses / 200.0 * per_expert);

    // 2. Once slots are full, with more of a token's experts in memory: the expected value
    let settled = &found["simulated"]["settled"];
    let (disk, rate) = (settled["disk"].as_f64().unwrap(), found["expected_hit_rate"].as_f64().unwrap());
    assert!(disk < whole["disk"].as_f64().unwrap() && (1.0 - disk - rate).abs() < 1e-9, "{found}");
    let expected = found["tokens"].as_array().unwrap().iter().find(|row| row["hit_rate"] == rate).unwrap();
    let bytes = settled["bytes_from_disk_per_token"].as_f64().unwrap();
    assert!((expected["bytes_from_disk"].as_f64().unwrap() - bytes).abs() < 1.0, "{found}");

    // 3. Two tiers: each serves what eval routing says for an eighth above three eighths
    let number = |key: &str| found[key].as_f64().unwrap();
    // Besides what every token reads, and space for a layer's 64 experts to pass through.
    let gpu = number("resident") + number("cache") + (64.0 + 64.5) * per_expert;
    let (gpu, below) = ((gpu as u64).to_string(), ((192.5 * per_expert) as u64).to_string());
    let found = plan(&demo, &[&trace[..], &["--memory", &below, "--gpu-memory", &gpu]].concat());
    let tiers = &found["simulated"]["from_empty"]["tiers"];
    let sizes = (&tiers[0]["slots"], &tiers[1]["slots"]);
    assert_eq!(sizes, (&64.into(), &192.into()));
    let same = routing["tiers"].as_array().unwrap().iter().find(|t| t["slots"]["fast"] == 64).unwrap();
    assert_eq!((&tiers[0]["served"], &tiers[1]["served"]), (&same["served"]["fast"], &same["served"]["slow"]));

    let served = found["simulated"]["settled"]["tiers"][0]["served"].as_f64().unwrap();
    assert_eq!(found["gpu"]["served"].as_f64().unwrap(), served);
    let copied = found["gpu"]["copied_bytes_per_token"].as_f64().unwrap();
    assert!((copied - 64.0 * per_expert * (1.0 - served)).abs() < 1.0, "{found}");

    // 4. As text
    let args = ["plan", &demo, "--disk-bandwidth", "1GB", "--context", "64", "--memory", &half];
    let out = success(output(&[&args[..], &trace].concat()));
    assert!(out.contains("simulated: policy scan, second half of 200 recorded tokens"), "{out}");
    assert!(out.contains("memory (256 experts)") && out.contains("read a token"), "{out}");
    let out = success(output(&args));
    assert!(out.contains("no trace of `eval routing --trace-out`") && !out.contains("simulated"), "{out}");
}

#[test]
fn memory_that_holds_all_experts_or_not_one_token_s_needs_no_trace() {
    let Some(demo) = demo() else { return };
    let dir = tempfile::tempdir().unwrap();
    let (text_path, trace) = (text(&dir.path().join("text")), text(&dir.path().join("trace")));
    fs::write(&text_path, prose()).unwrap();
    success(output(&["eval", "routing", &demo, "--text", &text_path, "--tokens", "40", "--trace-out", &trace]));
    let rate = |part: f64| {
        let found = plan(&demo, &["--trace", &trace, "--memory", &memory(&demo, part)]);
        (found["expected_hit_rate"].as_f64().unwrap(), found["simulated"].is_null())
    };
    assert_eq!(rate(1.0), (1.0, false));
    // Seven slots, when a token needs eight at once.
    assert_eq!(rate(7.0 / 512.0), (0.0, true));
}

#[test]
fn a_trace_that_is_damaged_or_of_another_model_is_refused() {
    let Some(demo) = demo() else { return };
    let dir = tempfile::tempdir().unwrap();
    let (text_path, trace) = (text(&dir.path().join("text")), text(&dir.path().join("trace")));
    fs::write(&text_path, prose()).unwrap();
    success(output(&["eval", "routing", &demo, "--text", &text_path, "--tokens", "40", "--trace-out", &trace]));
    let refused = |model: &str, args: &[&str], parts: &[&str]| {
        let args = [&["plan", model, "--memory", "1GB", "--disk-bandwidth", "1GB", "--trace", &trace], args].concat();
        assert_refused(&output(&args), parts);
    };
    refused("qwen3-30b-a3b", &[], &["trace", "8 layers with 8 of 64", "48 layers with 8 of 128"]);
    refused(&demo, &["--experts-per-token", "4"], &["8 of 64", "4 of 64"]);
    refused(&golden("qwen3"), &[], &["trace", "no experts"]);
    let bytes = fs::read(&trace).unwrap();
    fs::write(&trace, &bytes[..bytes.len() - 1]).unwrap();
    refused(&demo, &[], &["trace", "shorter than its header says"]);
    fs::write(&trace, b"{}").unwrap();
    refused(&demo, &[], &["trace", "--trace-out"]);
    assert_refused(&output(&["plan", &demo, "--trace", "/nowhere"]), &["/nowhere"]);
}

#[test]
fn a_head_that_predicts_one_token_more_is_part_of_the_plan() {
    let head = |model: &str| plan(model, &["--memory", "100GB", "--bits", "4"])["mtp"].clone();
    // Half of a layer's attention, 256 experts and the shared one, at eight bits.
    let found = head("deepseek-v3");
    let parameters = found["parameters"].as_u64().unwrap();
    assert!((11.0e9..12.0e9).contains(&(parameters as f64)), "{found}");
    assert_eq!((&found["bits"], &found["kv_bytes_per_token"]), (&8.into(), &(2 * 576).into()));
    assert!(found["bytes"].as_u64().unwrap() > parameters);
    assert!(head("glm-4.5-air")["parameters"].as_u64().unwrap() > 1_000_000_000);
    assert!(head("kimi-k2").is_null() && head("mixtral-8x7b").is_null());
}

#[test]
fn machines_share_all_layers_and_nobody_has_more_than_it_must() {
    let args = ["--memory", "64GB", "--memory-bandwidth", "60GB"];
    let one = plan("qwen3-30b-a3b", &args);
    let found = plan("qwen3-30b-a3b", &[&args[..], &["--machines", "4"]].concat());
    let machines = found["machines"]["machines"].as_array().unwrap();
    assert_eq!(machines.len(), 4);
    let number = |m: &serde_json::Value, key: &str| m[key].as_u64().unwrap();
    assert_eq!((number(&machines[0], "first"), number(&machines[3], "end")), (0, 48));
    assert!(machines.windows(2).all(|m| m[0]["end"] == m[1]["first"]));
    for key in ["resident", "experts"] {
        let sum: u64 = machines.iter().map(|m| number(m, key)).sum();
        assert_eq!(sum, one[key].as_u64().unwrap(), "{key}");
    }
    let bytes = machines.iter().map(|m| number(m, "resident") + number(m, "experts"));
    let all = one["resident"].as_u64().unwrap() + one["experts"].as_u64().unwrap();
    assert!(bytes.max().unwrap() < all * 3 / 10);
    let speed = |key: &str| found["machines"][key].as_f64().unwrap();
    assert!(speed("tokens_per_second_busy") > 2.5 * speed("tokens_per_second_alone"));
}
