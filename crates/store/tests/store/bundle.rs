//! A bundle is opened by its manifest: whatever contradicts it is an error that names it, and what it does not list is no part of the model.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use serde_json::{Value, json};
use sluice_store::bundle::{self, BundlePart, ExpertLayer, FileEntry, MANIFEST, Manifest, PAGE, RESIDENT};
use sluice_store::{Checkpoint, Dtype, LoadOptions, TensorPlan, Writer, load, xxh3_of};
use tempfile::TempDir;

const EXPERTS: usize = 3;
const PARTS: [(&str, Dtype, &[usize]); 2] =
    [("gate_proj.weight", Dtype::U32, &[8, 16]), ("gate_proj.scales", Dtype::BF16, &[8, 2])];
/// Bytes of both parts.
const USED: usize = 512 + 32;

fn plan(name: &str, dtype: Dtype, shape: &[usize]) -> TensorPlan {
    TensorPlan { name: name.into(), dtype, shape: shape.to_vec() }
}

/// Writes layer `layer`'s experts as `sluice pack` does, and says what the manifest is to say of them.
fn write_experts(folder: &Path, layer: usize) -> ExpertLayer {
    let name = bundle::experts_name(layer);
    let mut tensors = Vec::new();
    for e in 0..EXPERTS {
        let at = format!("model.layers.{layer}.mlp.experts.{e}");
        tensors.extend(PARTS.iter().map(|(part, dtype, shape)| plan(&format!("{at}.{part}"), *dtype, shape)));
        tensors.push(plan(&format!("{at}.padding"), Dtype::U8, &[PAGE as usize - USED]));
    }
    let mut writer = Writer::aligned(&folder.join(&name), &tensors, &BTreeMap::new(), PAGE as usize).unwrap();
    let base = writer.data_start();
    for t in &tensors {
        writer.append(&t.name, &vec![7; t.size().unwrap() as usize]).unwrap();
    }
    writer.finish().unwrap();
    let mut offset = 0;
    let parts = PARTS.iter().map(|(part, dtype, shape)| {
        let bytes = (shape.iter().product::<usize>() * dtype.size()) as u64;
        offset += bytes;
        BundlePart {
            name: (*part).into(),
            dtype: dtype.name().into(),
            shape: shape.to_vec(),
            offset: offset - bytes,
            bytes,
        }
    });
    ExpertLayer { file: name, base, stride: PAGE, count: EXPERTS, parts: parts.collect() }
}

/// A bundle of two layers.
fn bundle() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let resident = [plan("model.norm.weight", Dtype::BF16, &[16])];
    let mut writer = Writer::create(&folder.path().join(RESIDENT), &resident, &BTreeMap::new()).unwrap();
    writer.append("model.norm.weight", &[1; 32]).unwrap();
    writer.finish().unwrap();
    let experts: BTreeMap<usize, ExpertLayer> = (0..2).map(|l| (l, write_experts(folder.path(), l))).collect();
    let names = experts.values().map(|e| e.file.clone()).chain([RESIDENT.to_owned()]);
    let entry = |name: String| {
        let path = folder.path().join(&name);
        let entry = FileEntry { bytes: fs::metadata(&path).unwrap().len(), xxh3: xxh3_of(&path, &mut |_| {}).unwrap() };
        (name, entry)
    };
    Manifest { version: 1, files: names.map(entry).collect(), experts }.write(folder.path()).unwrap();
    folder
}

/// Both ways of opening give the same one line, which has all of `parts`.
#[track_caller]
fn assert_refused(folder: &Path, parts: &[&str]) {
    let message = Checkpoint::open(folder).map(|_| ()).expect_err("a bundle that should be refused").to_string();
    let loaded = load::open(folder, &LoadOptions::default()).map(|_| ()).expect_err("refused by the other").to_string();
    assert!(message == loaded && !message.contains('\n'), "{message} / {loaded}");
    for part in parts {
        assert!(message.contains(part), "{part:?} is not in: {message}");
    }
}

fn edit(folder: &Path, change: impl FnOnce(&mut Value)) {
    let path = folder.join(MANIFEST);
    let mut manifest: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    change(&mut manifest);
    fs::write(path, manifest.to_string()).unwrap();
}

#[test]
fn a_sound_bundle_is_opened() {
    let folder = bundle();
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    assert_eq!(checkpoint.tensors().len(), 1 + 2 * EXPERTS * 3);
    assert_eq!(checkpoint.file_sizes().len(), 3);
}

#[test]
fn a_bundle_without_its_manifest_is_refused() {
    let folder = bundle();
    fs::remove_file(folder.path().join(MANIFEST)).unwrap();
    assert_refused(folder.path(), &[MANIFEST, "missing", ".safetensors is part of a bundle"]);
    // Nor are a layer's experts alone a model.
    fs::remove_file(folder.path().join(RESIDENT)).unwrap();
    assert_refused(folder.path(), &[MANIFEST, "missing", "experts-00.safetensors"]);
}

#[test]
fn a_malformed_manifest_is_refused() {
    let folder = bundle();
    for (text, why) in [
        ("", "malformed manifest"),
        ("{\"version\": 1", "malformed manifest"),
        ("[]", "malformed manifest"),
        (r#"{"version": 1, "files": {}, "experts": {}}"#, RESIDENT),
        (r#"{"version": 3, "files": {}, "experts": {}}"#, "version 3"),
    ] {
        fs::write(folder.path().join(MANIFEST), text).unwrap();
        assert_refused(folder.path(), &[MANIFEST, why]);
    }
    fs::remove_file(folder.path().join(MANIFEST)).unwrap();
    fs::create_dir(folder.path().join(MANIFEST)).unwrap();
    assert_refused(folder.path(), &[MANIFEST, "not a regular file"]);
}

#[test]
fn a_manifest_that_does_not_match_its_files_is_refused() {
    type Change = fn(&mut Value);
    let cases: [(Change, &str); 12] = [
        (|m| m["files"]["experts-01.safetensors"]["bytes"] = json!(4096), "experts-01.safetensors"),
        (|m| m["files"]["resident.safetensors"]["bytes"] = json!(1), "resident.safetensors has"),
        (|m| m["experts"]["0"]["base"] = json!(0), "experts-00.safetensors: tensor \"model.layers.0.mlp.experts.0"),
        (|m| m["experts"]["0"]["count"] = json!(2), "experts-00.safetensors: 9 tensors"),
        (|m| m["experts"]["0"]["parts"][0]["shape"] = json!([16, 8]), "gate_proj.weight"),
        (|m| m["experts"]["0"]["parts"][0]["dtype"] = json!("F32"), "gate_proj.weight"),
        (|m| m["experts"]["0"]["parts"][0]["name"] = json!("up_proj.weight"), "up_proj.weight"),
        (|m| drop(m["experts"]["0"]["parts"].as_array_mut().unwrap().pop()), "experts-00.safetensors: 9 tensors"),
        // The layers' files, exchanged.
        (
            |m| {
                m["experts"]["0"]["file"] = json!("experts-01.safetensors");
                m["experts"]["1"]["file"] = json!("experts-00.safetensors");
            },
            "not of layer",
        ),
        (|m| m["experts"]["1"]["file"] = json!("experts-00.safetensors"), "experts-00.safetensors"),
        (|m| drop(m["experts"].as_object_mut().unwrap().remove("1")), "experts-01.safetensors"),
        (|m| drop(m["files"].as_object_mut().unwrap().remove(RESIDENT)), RESIDENT),
    ];
    for (change, why) in cases {
        let folder = bundle();
        edit(folder.path(), change);
        assert_refused(folder.path(), &[MANIFEST, why]);
    }
    // A stride that fits the file's bytes, with half of the experts.
    let folder = bundle();
    edit(folder.path(), |m| {
        m["experts"]["0"]["stride"] = json!(2 * PAGE);
        m["experts"]["0"]["count"] = json!(1);
    });
    assert_refused(folder.path(), &[MANIFEST, "experts-00.safetensors"]);
}

#[test]
fn a_listed_file_that_is_gone_or_another_is_refused() {
    let folder = bundle();
    fs::remove_file(folder.path().join("experts-01.safetensors")).unwrap();
    assert_refused(folder.path(), &["experts-01.safetensors", "named by the manifest"]);
    // Of the same length, but another layer's.
    fs::copy(folder.path().join("experts-00.safetensors"), folder.path().join("experts-01.safetensors")).unwrap();
    assert_refused(folder.path(), &[MANIFEST, "experts-01.safetensors", "not of layer 1"]);
}

#[test]
fn what_the_manifest_does_not_list_is_no_part_of_the_model() {
    let folder = bundle();
    fs::write(folder.path().join("stray.safetensors"), "no weights at all").unwrap();
    assert_eq!(Checkpoint::open(folder.path()).unwrap().file_sizes().len(), 3);
}

/// Another program's file of that name, beside a model that needs none.
#[test]
fn a_strangers_bundle_json_beside_an_ordinary_model_does_no_harm() {
    let folder = tempfile::tempdir().unwrap();
    let tensors = [plan("model.norm.weight", Dtype::BF16, &[16])];
    let mut writer = Writer::create(&folder.path().join("model.safetensors"), &tensors, &BTreeMap::new()).unwrap();
    writer.append("model.norm.weight", &[1; 32]).unwrap();
    writer.finish().unwrap();
    fs::write(folder.path().join(MANIFEST), "{\"scripts\": []}").unwrap();
    assert_eq!(Checkpoint::open(folder.path()).unwrap().tensors().len(), 1);
    // Two models in one folder, on the other hand, are one too many.
    let whole = bundle();
    fs::copy(folder.path().join("model.safetensors"), whole.path().join("model.safetensors")).unwrap();
    assert_refused(whole.path(), &[MANIFEST, "model.safetensors", "two models"]);
}
