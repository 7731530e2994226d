//! Every command that would use a bundle refuses one that does not match its manifest, in one line that names the manifest.

use crate::support;

use std::fs;
use std::path::Path;

use serde_json::{Value, json};
use support::*;

fn bundle() -> tempfile::TempDir {
    let out = tempfile::tempdir().unwrap();
    let golden = golden("qwen3_5_moe");
    success(output(&["pack", &golden, &text(out.path()), "--set", "*=none", "--layout", "bundle"]));
    out
}

fn logits(folder: &Path, options: &[&str]) -> std::process::Output {
    output(&[&["eval", "logits", &text(folder), "--tokens", "1,2,3", "--json"], options].concat())
}

/// Experts in memory and experts on disk: the same manifest describes both.
const WAYS: [&[&str]; 3] = [&[], &["--experts", "slots"], &["--load", "pread"]];

#[track_caller]
fn assert_all_refuse(folder: &Path, parts: &[&str]) {
    for way in WAYS {
        assert_refused(&logits(folder, way), parts);
    }
    assert_refused(&output(&["run", &text(folder), "--raw", "Hello"]), parts);
    assert_refused(&output(&["inspect", &text(folder)]), parts);
}

#[test]
fn a_sound_bundle_runs_every_way() {
    let folder = bundle();
    let plain = json(logits(folder.path(), &[]));
    for way in WAYS {
        assert_eq!(json(logits(folder.path(), way))["logits"], plain["logits"], "{way:?}");
    }
}

#[test]
fn a_missing_malformed_or_wrong_manifest_is_refused() {
    let folder = bundle();
    let path = folder.path().join("bundle.json");
    let sound = fs::read(&path).unwrap();
    fs::remove_file(&path).unwrap();
    assert_all_refuse(folder.path(), &[&text(&path), "missing"]);
    fs::write(&path, &sound[..sound.len() / 2]).unwrap();
    assert_all_refuse(folder.path(), &[&text(&path), "malformed manifest"]);
    let mut wrong: Value = serde_json::from_slice(&sound).unwrap();
    let stride = wrong["experts"]["0"]["stride"].as_u64().unwrap();
    wrong["experts"]["0"]["count"] = json!(wrong["experts"]["0"]["count"].as_u64().unwrap() / 2);
    wrong["experts"]["0"]["stride"] = json!(2 * stride);
    fs::write(&path, wrong.to_string()).unwrap();
    assert_all_refuse(folder.path(), &[&text(&path), "experts-00.safetensors"]);
    fs::write(&path, sound).unwrap();
    json(logits(folder.path(), &[]));
}
