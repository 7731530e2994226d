//! A GGUF file packs to the tensors that the safetensors it was made of pack to.

#[path = "../../engine/tests/engine/gguf/convert.rs"]
mod convert;
#[path = "../../../tests/gguf.rs"]
mod writer;

use std::fs;
use std::path::Path;

use sluice_pack::{Event, Layout, Outcome, PackOptions, Rounding, Rules, Watch, pack};
use sluice_store::Checkpoint;

struct Silent;

impl Watch for Silent {
    fn event(&self, _: Event) {}

    fn is_stopped(&self) -> bool {
        false
    }
}

fn packed(from: &Path, to: &Path) -> Result<Checkpoint, String> {
    let options = PackOptions {
        rules: Rules::new(8, 32, Vec::new()),
        layout: Layout::Mlx,
        layers: None,
        rounding: Rounding::Mlx,
        calibration: None,
        verify: true,
        force: false,
        threads: 2,
        shard_bytes: 1 << 30,
    };
    match pack(from, to, &options, &Silent).map_err(|e| format!("{e:#}"))? {
        Outcome::Whole(_) => Ok(Checkpoint::open(to).unwrap()),
        Outcome::Partly { .. } => unreachable!("all layers were asked for"),
    }
}

#[test]
fn a_file_packs_to_what_its_folder_packs_to() {
    for name in ["llama", "qwen3_moe", "mixtral", "glm4_moe", "glm4", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"]
    {
        let (dir, model) = (tempfile::tempdir().unwrap(), convert::model(name).plain());
        let at = |name: &str| dir.path().join(name);
        fs::create_dir(at("folder")).unwrap();
        model.write_safetensors(&at("folder"));
        fs::write(at("model.gguf"), model.gguf().bytes()).unwrap();
        let wanted = packed(&at("folder"), &at("of-folder")).unwrap();
        let found = packed(&at("model.gguf"), &at("of-file")).unwrap();
        assert!(wanted.tensors().len() > 30, "{}", wanted.tensors().len());
        assert_eq!(found.tensors().len(), wanted.tensors().len(), "{name}");
        for t in wanted.tensors() {
            let other = found.tensor(&t.name).unwrap_or_else(|| panic!("{name}: no {}", t.name));
            assert_eq!((&other.shape, other.dtype), (&t.shape, t.dtype), "{name}: {}", t.name);
            assert!(other.bytes[..] == t.bytes[..], "{name}: {} differs", t.name);
        }
    }
}

#[test]
fn recurrent_layers_whose_rates_nobody_turns_back_are_refused() {
    for name in ["kimi_linear", "kimi_k3", "nemotron_h"] {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        fs::write(at("model.gguf"), convert::model(name).plain().gguf().bytes()).unwrap();
        let error = packed(&at("model.gguf"), &at("of-file")).expect_err("refused");
        assert!(error.contains("ssm_a") && error.contains("cannot be packed from GGUF"), "{name}: {error}");
    }
}
