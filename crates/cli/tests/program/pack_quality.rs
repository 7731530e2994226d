//! What packing does to weights, and what a calibration measures.

use crate::support;

use std::fs;
use std::path::Path;

use serde_json::Value;
use sluice_kernels::Isa;
use sluice_kernels::affine::unpack;
use sluice_kernels::format::Float;
use sluice_kernels::quantize::{Rounding, quantize};
use support::packing::*;
use support::*;

/// The error of rounding these values to 4 bits in groups of 64, as MLX does: its root mean square, and that of the values.
fn rounding_error(values: &[f32]) -> (f64, f64) {
    let groups = values.len() / 64;
    let (mut data, mut scales, mut biases) = (vec![0; values.len() / 2], vec![0; 2 * groups], vec![0; 2 * groups]);
    quantize(Isa::GENERIC, Rounding::Mlx, values, 4, 64, Float::Bf16, &mut data, &mut scales, &mut biases);
    let mut q = vec![0; values.len()];
    unpack(4, &data, &mut q);
    let stored = |bytes: &[u8], i: usize| half::bf16::from_le_bytes([bytes[2 * i], bytes[2 * i + 1]]).to_f64();
    let error =
        |(i, x): (usize, &f32)| f64::from(*x) - (f64::from(q[i]) * stored(&scales, i / 64) + stored(&biases, i / 64));
    let root = |sum: f64| (sum / values.len() as f64).sqrt();
    let squares = |x: &f32| f64::from(*x).powi(2);
    (root(values.iter().enumerate().map(|p| error(p).powi(2)).sum()), root(values.iter().map(squares).sum()))
}

#[test]
fn quality_is_the_error_of_each_layer_and_projection() {
    let (input, packed) = (tiny(false), tempfile::tempdir().unwrap());
    pack(input.path(), packed.path(), &["--bits", "4"]);
    let (packed, original) = (text(packed.path()), text(input.path()));
    let found = json(support::output(&["inspect", &packed, "--quality", &original, "--json"]));
    let row = |layer: usize, module: &str| -> Value {
        let rows = found["quality"].as_array().unwrap();
        let is_it = |r: &&Value| r["layer"] == layer && r["module"].as_str().unwrap().contains(module);
        rows.iter().find(is_it).unwrap_or_else(|| panic!("{layer} {module}: {found:#}")).clone()
    };
    // A matrix, and a projection of all experts.
    let all = tensors(true);
    let experts: Vec<f32> =
        (0..EXPERTS).flat_map(|e| all[&format!("model.layers.1.mlp.experts.{e}.up_proj.weight")].1.clone()).collect();
    let cases = [
        (0, "linear_attn.out_proj", &all["model.layers.0.linear_attn.out_proj.weight"].1),
        (1, "experts.up_proj", &experts),
    ];
    for (layer, module, values) in cases {
        let (row, (rmse, rms)) = (row(layer, module), rounding_error(values));
        assert_eq!(row["weights"], values.len(), "{module}");
        let near = |found: &Value, wanted: f64| (found.as_f64().unwrap() / wanted - 1.0).abs() < 1e-4;
        assert!(near(&row["rmse"], rmse) && near(&row["of_rms"], rmse / rms), "{row}: {rmse} of {rms}");
    }
    // The table has a line for each projection; another model is refused.
    let table = success(support::output(&["inspect", &packed, "--quality", &original]));
    assert!(table.lines().next().unwrap().starts_with("RMSE of layers"), "{table}");
    assert_eq!(table.lines().filter(|l| l.contains("experts.up_proj")).count(), 1, "{table}");
    let other = tempfile::tempdir().unwrap();
    let mut half = tensors(false);
    half.retain(|name, _| !name.contains("layers.1.self_attn"));
    write_checkpoint(other.path(), &half);
    let said = support::output(&["inspect", &packed, "--quality", &text(other.path())]);
    assert!(!said.status.success() && stderr(&said).contains("no tensor"), "{}", stderr(&said));
}

/// Calibrating layer by layer in separate runs equals one run: the effect of packed layers on later ones is reproduced, with any number of threads.
#[test]
fn a_calibration_goes_on_where_it_was() {
    let Some(demo) = demo() else { return };
    let folder = tempfile::tempdir().unwrap();
    let calibration = folder.path().join("text.txt");
    let words = "Once upon a time there was a little fox who lived by the river and counted stones, one, two, three. ";
    fs::write(&calibration, words.repeat(60)).unwrap();
    let calibration = text(&calibration);
    let (one, two) = (folder.path().join("one"), folder.path().join("two"));
    let options = ["--bits", "none", "--experts-bits", "2", "--layout", "bundle", "--calibration", &calibration];
    let run = |out: &Path, layers: &str, threads: &str| {
        let more = ["--calibration-tokens", "1024", "--layers", layers, "--threads", threads];
        support::output(&[&["pack", &demo, &text(out)][..], &options, &more].concat())
    };
    let said = run(&one, "0-1", "2");
    assert!(stderr(&said).contains("saw fewer than 512 tokens"), "{}", stderr(&said));
    success(said);
    let refused = run(&two, "1-1", "2");
    let why = stderr(&refused);
    assert_eq!(refused.status.code(), Some(2), "{why}");
    assert!(why.contains("experts-00.safetensors is not packed yet") && why.contains("in order"), "{why}");
    success(run(&two, "0-0", "1"));
    success(run(&two, "1-1", "2"));
    for file in ["experts-00.safetensors", "experts-01.safetensors", "resident.safetensors"] {
        assert!(fs::read(one.join(file)).unwrap() == fs::read(two.join(file)).unwrap(), "{file}");
    }
    let short = folder.path().join("short.txt");
    fs::write(&short, "Too short.").unwrap();
    let short = text(&short);
    let refused = support::output(&[
        "pack",
        &demo,
        &text(&folder.path().join("x")),
        "--experts-bits",
        "2",
        "--calibration",
        &short,
    ]);
    assert_eq!(refused.status.code(), Some(2));
    assert!(stderr(&refused).contains("short.txt") && stderr(&refused).contains("too short for a calibration"));
}
