//! Checkpoints as their producers quantise them are packed to MLX's layout: integers with scales and zero points as they are, others by their values.

use std::path::{Path, PathBuf};

use sluice_engine::{Activations, Engine, KvType, Options, Placement};
use sluice_pack::{Event, Layout, Outcome, PackOptions, Rounding, Rules, Watch, pack};

struct Silent;

impl Watch for Silent {
    fn event(&self, _: Event) {}

    fn is_stopped(&self) -> bool {
        false
    }
}

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/quantized").join(name)
}

/// Packs everything but the embedding and routers to 8 bits in groups of 32.
fn packed(from: &Path, to: &Path, layout: Layout) -> Result<(), String> {
    let has_router = from.ends_with("fp8_experts") || from.ends_with("w4a16_experts");
    packed_by(from, to, layout, &["*embed_tokens=none", "*mlp.gate=none"][..if has_router { 2 } else { 1 }])
}

/// Packs to 8 bits in groups of 32 what no rule is for.
fn packed_by(from: &Path, to: &Path, layout: Layout, rules: &[&str]) -> Result<(), String> {
    let options = PackOptions {
        rules: Rules::new(8, 32, rules.iter().map(|rule| rule.parse().unwrap()).collect()),
        layout,
        layers: None,
        rounding: Rounding::Mlx,
        calibration: None,
        verify: true,
        force: false,
        threads: 2,
        shard_bytes: 1 << 30,
    };
    match pack(from, to, &options, &Silent).map_err(|e| format!("{e:#}"))? {
        Outcome::Whole(_) => Ok(()),
        Outcome::Partly { .. } => unreachable!("all layers were asked for"),
    }
}

fn options() -> Options {
    Options {
        activations: Activations::F32,
        kv_type: Some(KvType::F32),
        max_context: Some(64),
        threads: 2,
        ..Options::for_this_machine().unwrap()
    }
}

fn logits(folder: &Path) -> Vec<f32> {
    logits_with(folder, options())
}

fn logits_with(folder: &Path, options: Options) -> Vec<f32> {
    let mut engine = Engine::open(folder, options).unwrap();
    let (id, mut rows) = (engine.add_sequence(), Vec::new());
    let keep = |_, logits: &[f32]| {
        rows.extend_from_slice(logits);
        Ok(())
    };
    engine.feed(id, &[5, 17, 42, 1, 9, 33, 60, 2], true, keep).unwrap();
    rows
}

#[test]
fn integers_are_packed_as_they_are_and_numbers_by_their_values() {
    for (name, exact) in [
        ("w4a16", true),
        ("w4a16_asymmetric", true),
        ("w8a16_channels", true),
        ("w4a16_experts", true),
        ("awq", true),
        ("gptq", true),
        ("gptq_v2", true),
        ("fp8_blocks", false),
        ("fp8_channels", false),
        ("fp8_experts", false),
        ("nvfp4_modelopt", false),
        ("mxfp4", false),
    ] {
        let wanted = logits(&golden(name));
        for layout in [Layout::Mlx, Layout::Bundle] {
            if layout == Layout::Bundle && !name.ends_with("experts") {
                continue;
            }
            let out = tempfile::tempdir().unwrap();
            let folder = out.path().join("packed");
            packed(&golden(name), &folder, layout).unwrap();
            let found = logits(&folder);
            let range = wanted.iter().fold(f32::MIN, |a, &b| a.max(b)) - wanted.iter().fold(f32::MAX, |a, &b| a.min(b));
            let worst = found.iter().zip(&wanted).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max) / range;
            assert!(if exact { found == wanted } else { worst < 0.03 }, "{name} {layout:?}: {worst} of the range");
        }
    }
}

/// Of gpt-oss the experts stay MXFP4, with the rows of gate and up apart, and biases and all else as they are; so the packed model is the same to the bit.
#[test]
fn experts_of_gpt_oss_stay_as_they_are() {
    let of_gpt_oss = |name: &str| golden("..").join(name);
    let from = of_gpt_oss("gpt_oss_mxfp4");
    let wanted = logits(&from);
    for layout in [Layout::Mlx, Layout::Bundle] {
        for (rules, exact) in [(&["*=none"][..], true), (&["*=none", "*switch_mlp*=8"], false)] {
            let out = tempfile::tempdir().unwrap();
            let folder = out.path().join("packed");
            packed_by(&from, &folder, layout, rules).unwrap();
            let found = logits(&folder);
            let range = wanted.iter().fold(f32::MIN, |a, &b| a.max(b)) - wanted.iter().fold(f32::MAX, |a, &b| a.min(b));
            let worst = found.iter().zip(&wanted).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max) / range;
            assert!(if exact { found == wanted } else { worst < 0.03 }, "{layout:?} {rules:?}: {worst} of the range");
            let streamed = Options { experts: Placement::Slots, ..options() };
            assert!(logits_with(&folder, streamed) == found, "{layout:?} {rules:?}, streamed");
        }
    }
    let out = tempfile::tempdir().unwrap();
    let why = packed_by(&of_gpt_oss("gpt_oss"), &out.path().join("packed"), Layout::Mlx, &[]).unwrap_err();
    assert!(why.contains("stored by columns") && why.contains("experts.down_proj"), "{why}");
}

#[test]
fn what_cannot_be_packed_is_named() {
    let out = tempfile::tempdir().unwrap();
    for (name, wanted) in
        [("nvfp4_experts", "in another form than other experts"), ("mlx_mxfp4", "cannot be packed again")]
    {
        let why = packed(&golden(name), &out.path().join(name), Layout::Mlx).unwrap_err();
        assert!(why.contains(wanted) && why.contains("model.layers.0"), "{why}");
    }
}
