//! A golden hash of logits: when arithmetic changes, this fails until `NUMERICS_VERSION` is raised and the hashes are recorded anew
//! (`UPDATE_NUMERICS=1 cargo test --release -p sluice-engine --test numerics`).

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use sluice_engine::{Activations, Engine, NUMERICS_VERSION, Options};

const MODES: [(&str, Activations); 3] =
    [("f32", Activations::F32), ("bf16", Activations::Bf16), ("int8", Activations::Int8)];
const FOLDERS: [&str; 5] = ["qwen3_rope", "qwen3_moe", "mlx_qwen3_widths", "mlx_qwen3_next", "mlx_qwen3_5_moe"];

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden")
}

#[test]
fn the_bits_of_the_logits_belong_to_the_numerics_version() {
    let mut hashes = BTreeMap::new();
    hashes.insert("version".to_string(), NUMERICS_VERSION.to_string());
    for folder in FOLDERS {
        for (mode, activations) in MODES {
            let options = Options { activations, max_context: Some(160), ..Options::for_this_machine().unwrap() };
            let mut engine = Engine::open(&golden().join(folder), options).unwrap();
            let tokens: Vec<u32> = (0..140).map(|i| i * 37 % engine.model().vocabulary as u32).collect();
            let mut bytes = Vec::new();
            engine
                .score(&tokens, true, |_, row| {
                    bytes.extend(row.iter().flat_map(|x| x.to_le_bytes()));
                    Ok(())
                })
                .unwrap();
            let hash = xxhash_rust::xxh3::xxh3_64(&bytes);
            hashes.insert(format!("{folder} {mode}"), format!("{hash:016x}"));
        }
    }
    let path = golden().join("numerics.json");
    if std::env::var_os("UPDATE_NUMERICS").is_some() {
        std::fs::write(&path, serde_json::to_string_pretty(&hashes).unwrap() + "\n").unwrap();
    }
    let recorded: BTreeMap<String, String> = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    assert_eq!(hashes, recorded, "arithmetic changed: raise NUMERICS_VERSION and record the hashes anew");
}
