//! A golden hash of logits: when arithmetic changes, this fails until `NUMERICS_VERSION` is raised and the hashes are recorded anew
//! (`UPDATE_NUMERICS=1 cargo test --profile quick --workspace --test engine numerics`).

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use sluice_engine::{Activations, AttentionMode, Engine, KvType, NUMERICS_VERSION, Options};

const F32: (&str, Activations) = ("f32", Activations::F32);
const BF16: (&str, Activations) = ("bf16", Activations::Bf16);
const INT8: (&str, Activations) = ("int8", Activations::Int8);
const INT11: (&str, Activations) = ("int11", Activations::Int11);

/// Checkpoints, and the precisions that differ in them: without quantised weights int8 is bf16.
const CASES: [(&str, &[(&str, Activations)]); 20] = [
    ("gemma4_moe", &[F32]),
    ("gemma4_per_layer", &[F32]),
    ("ministral3", &[F32]),
    ("olmo3", &[F32]),
    ("glm4_moe", &[F32]),
    ("deepseek_v3", &[F32, BF16]),
    ("deepseek_v32", &[F32]),
    ("nemotron_h_moe", &[F32, BF16]),
    ("nemotron_h_latent", &[F32, BF16]),
    ("kimi_linear", &[F32]),
    ("kimi_k3", &[F32, BF16, INT8]),
    ("glm5_next", &[F32, BF16]),
    ("deepseek_v4", &[F32, BF16]),
    ("qwen4_exp", &[F32, BF16]),
    ("qwen3_rope", &[F32, INT11, BF16]),
    ("qwen3_moe", &[F32, BF16]),
    ("gpt_oss_mxfp4", &[F32, INT11, BF16, INT8]),
    ("mlx_qwen3_widths", &[F32, INT11, BF16, INT8]),
    ("mlx_qwen3_next", &[F32, BF16, INT8]),
    ("mlx_qwen3_5_moe", &[F32, BF16, INT8]),
];

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden")
}

/// The hash of all logits of 140 tokens.
fn hash(folder: &str, activations: Activations, kv_type: Option<KvType>, attention: AttentionMode) -> String {
    let defaults = Options::for_this_machine().unwrap();
    let options = Options { activations, kv_type, attention, max_context: Some(160), ..defaults };
    let mut engine = Engine::open(&golden().join(folder), options).unwrap();
    let tokens: Vec<u32> = (0..140).map(|i| i * 37 % engine.model().vocabulary as u32).collect();
    let mut bytes = Vec::new();
    engine
        .score(&tokens, true, |_, row| {
            bytes.extend(row.iter().flat_map(|x| x.to_le_bytes()));
            Ok(())
        })
        .unwrap();
    format!("{:016x}", xxhash_rust::xxh3::xxh3_64(&bytes))
}

#[test]
fn the_bits_of_the_logits_belong_to_the_numerics_version() {
    let mut hashes = BTreeMap::new();
    hashes.insert("version".to_string(), NUMERICS_VERSION.to_string());
    for (folder, modes) in CASES {
        for &(mode, activations) in modes {
            hashes.insert(format!("{folder} {mode}"), hash(folder, activations, None, AttentionMode::F32));
        }
        let &(mode, activations) = modes.last().unwrap();
        let eight = Some(KvType::Int8);
        hashes.insert(format!("{folder} {mode} kv int8"), hash(folder, activations, eight, AttentionMode::F32));
        for (name, attention) in [("int8", AttentionMode::Int8), ("int16", AttentionMode::Int16)] {
            hashes.insert(format!("{folder} {mode} attention {name}"), hash(folder, activations, None, attention));
        }
    }
    let path = golden().join("numerics.json");
    if std::env::var_os("UPDATE_NUMERICS").is_some() {
        std::fs::write(&path, serde_json::to_string_pretty(&hashes).unwrap() + "\n").unwrap();
    }
    let recorded: BTreeMap<String, String> = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    assert_eq!(hashes, recorded, "arithmetic changed: raise NUMERICS_VERSION and record the hashes anew");
    // A case whose bits are another's shows nothing.
    let mut seen = BTreeMap::new();
    for (case, hash) in &hashes {
        if let Some(other) = seen.insert(hash, case) {
            panic!("{case} and {other} have the same logits");
        }
    }
}
