//! What a model's folder may contain, and what is reported if its files disagree.

use crate::support;

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use serde_json::{Value, json};
use sluice_store::Checkpoint;
use support::packing::pack;
use support::*;

/// The logits of a model for a few tokens, and the messages meanwhile.
fn logits(folder: &Path) -> (Value, String) {
    let out = output(&["eval", "logits", &text(folder), "--tokens", "1,2,3,4,5", "--activations", "f32", "--json"]);
    let said = stderr(&out);
    let mut found = json(out);
    found.as_object_mut().unwrap().remove("model");
    (found, said)
}

fn config(folder: &Path) -> Value {
    serde_json::from_slice(&fs::read(folder.join("config.json")).unwrap()).unwrap()
}

fn change_config(folder: &Path, change: impl FnOnce(&mut Value)) {
    let mut found = config(folder);
    change(&mut found);
    fs::write(folder.join("config.json"), found.to_string()).unwrap();
}

#[test]
fn a_head_that_is_not_the_embedding_is_used_said_and_packed() {
    let (untied, _) = logits(Path::new(&golden("llama_untied")));
    let dir = copy_of("llama_untied");
    change_config(dir.path(), |config| config["tie_word_embeddings"] = true.into());
    let (found, said) = logits(dir.path());
    assert_eq!(found, untied);
    assert!(said.contains("lm_head.weight is not the embedding"), "{said}");
    assert!(stderr(&output(&["inspect", &text(dir.path())])).contains("lm_head.weight is not the embedding"));
    let out = tempfile::tempdir().unwrap();
    pack(dir.path(), out.path(), &["--bits", "none"]);
    assert_eq!(config(out.path())["tie_word_embeddings"], false);
    let (packed, said) = logits(out.path());
    assert_eq!(packed, untied);
    assert!(!said.contains("lm_head"), "{said}");
}

#[test]
fn one_matrix_under_the_name_of_the_head_is_packed_under_that_of_the_embedding() {
    let model = golden("llama_shared");
    let out = tempfile::tempdir().unwrap();
    pack(Path::new(&model), out.path(), &["--bits", "none"]);
    let packed = Checkpoint::open(out.path()).unwrap();
    assert!(packed.tensor("model.embed_tokens.weight").is_some() && packed.tensor("lm_head.weight").is_none());
    assert_eq!(config(out.path())["tie_word_embeddings"], true);
    assert_eq!(logits(out.path()).0, logits(Path::new(&model)).0);
}

#[test]
fn what_lies_beside_the_weights_is_named() {
    let dir = copy_of("llama");
    let (clean, said) = logits(dir.path());
    assert!(!said.contains("adapter") && !said.contains("not read"), "{said}");
    fs::write(dir.path().join("adapter_config.json"), "{}").unwrap();
    let index = json!({"weight_map": {"model.norm.weight": "model-00001-of-00001.safetensors"}});
    fs::write(dir.path().join("model.safetensors.index.json"), index.to_string()).unwrap();
    let (found, said) = logits(dir.path());
    assert_eq!(found, clean);
    assert!(said.contains("adapter_config.json") && said.contains("model.safetensors.index.json"), "{said}");
    fs::remove_file(dir.path().join("config.json")).unwrap();
    assert_refused(&output(&["inspect", &text(dir.path())]), &["adapter_config.json"]);
}

/// The layout of the hub's own programs: files are links, and a reference names the snapshot.
#[test]
fn a_model_of_the_hubs_cache_is_found_wherever_a_folder_is_taken() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("models--org--tiny");
    let snapshot = folder.join("snapshots/0123abcd");
    for made in ["refs", "blobs", "snapshots/0123abcd", "snapshots/ffff"] {
        fs::create_dir_all(folder.join(made)).unwrap();
    }
    for (number, entry) in fs::read_dir(golden("llama_untied")).unwrap().enumerate() {
        let path = entry.unwrap().path();
        fs::copy(&path, folder.join(format!("blobs/{number}"))).unwrap();
        symlink(format!("../../blobs/{number}"), snapshot.join(path.file_name().unwrap())).unwrap();
    }
    fs::write(folder.join("refs/main"), "0123abcd").unwrap();
    assert_eq!(logits(&folder).0, logits(&snapshot).0);
    let named = text(&folder);
    assert!(success(output(&["inspect", &named])).contains("llama"));
    let plan = |model: &str| json(output(&["plan", model, "--disk-bandwidth", "1GB", "--memory", "1GB", "--json"]));
    assert_eq!(plan(&named)["resident"], plan(&text(&snapshot))["resident"]);
    let out = tempfile::tempdir().unwrap();
    pack(&folder, out.path(), &["--bits", "none"]);
    assert_eq!(logits(out.path()).0, logits(&snapshot).0);
    fs::write(folder.join("refs/main"), "dead").unwrap();
    assert_refused(&output(&["inspect", &named]), &["refs/main", "dead"]);
}

/// For a checkpoint of floats, a plan is about those floats, not about what they might be packed to.
#[test]
fn a_plan_describes_the_folder_that_it_is_of() {
    for (name, bits) in
        [("llama", "16 bits"), ("qwen3_moe", "16 bits"), ("qwen3_5_moe", "32 bits"), ("llama_shared", "16 bits")]
    {
        let model = golden(name);
        let args = ["plan", &model, "--disk-bandwidth", "1GB", "--memory", "1GB"];
        let (plan, stored) =
            (json(output(&[&args[..], &["--json"]].concat())), json(output(&["inspect", &model, "--json"])));
        assert_eq!(plan["resident"], stored["bytes"]["resident"], "{name}");
        assert_eq!(plan["experts"], stored["bytes"]["experts"], "{name}");
        assert!(success(output(&args)).contains(bits), "{name}");
    }
    // An explicit flag wins over what the folder has.
    let four = |model: &str| {
        json(output(&["plan", model, "--bits", "4", "--disk-bandwidth", "1GB", "--memory", "1GB", "--json"]))["resident"].as_u64()
    };
    let stored = json(output(&["inspect", &golden("llama"), "--json"]))["bytes"]["resident"].as_u64();
    assert!(four(&golden("llama")) < stored);
}

#[test]
fn the_context_that_a_model_was_made_for_is_what_yarn_makes_of_it() {
    let dir = copy_of("llama");
    change_config(dir.path(), |config| {
        config["max_position_embeddings"] = 64.into();
        config["rope_scaling"] = json!({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64});
    });
    assert_eq!(json(output(&["inspect", &text(dir.path()), "--json"]))["max_context"], 128);
    let said = |context: &str| {
        let out = output(&["eval", "logits", &text(dir.path()), "--tokens", "1,2", "--max-context", context]);
        assert!(out.status.success(), "{}", stderr(&out));
        stderr(&out)
    };
    assert!(!said("128").contains("was made for"), "{}", said("128"));
    assert!(said("200").contains("a context of 200 tokens is more than the 128 that this model was made for"));
}
