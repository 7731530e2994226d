//! `sluice pack --layout bundle`: the same model, with each expert in one aligned run.

use crate::support;

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;

use serde_json::json;
use sluice_kernels::Isa;
use sluice_kernels::format::Float;
use sluice_kernels::quantize::{Rounding, quantize};
use sluice_store::Checkpoint;
use support::packing::*;
use support::*;

/// Every tensor by name, experts by number, without padding.
fn by_expert(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut all = BTreeMap::new();
    for t in Checkpoint::open(folder).unwrap().tensors() {
        match t.name.split_once(".switch_mlp.") {
            Some((module, part)) => {
                let each = t.bytes.len() / t.shape[0];
                for (e, bytes) in t.bytes.chunks_exact(each).enumerate() {
                    all.insert(format!("{module}.experts.{e}.{part}"), bytes.to_vec());
                }
            }
            None if t.name.ends_with(".padding") => assert!(t.bytes.iter().all(|b| *b == 0)),
            None => drop(all.insert(t.name.to_string(), t.bytes.to_vec())),
        }
    }
    all
}

#[test]
fn a_bundle_is_the_same_model_bit_for_bit() {
    for (single, options) in [
        (false, &["--bits", "4", "--experts-bits", "2"][..]),
        (true, &["--bits", "none", "--experts-bits", "3", "--search"]),
        (false, &["--set", "*=none"]),
        (true, &["--experts-bits", "2", "--set", "layers.{1-1}.mlp.experts.down_proj=6:32"]),
    ] {
        let (input, mlx, bundle) = (tiny(single), tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        pack(input.path(), mlx.path(), options);
        pack(input.path(), bundle.path(), &[options, &["--layout", "bundle", "--verify"]].concat());
        assert!(by_expert(mlx.path()) == by_expert(bundle.path()), "{options:?}");
        assert_eq!(logits(mlx.path()), logits(bundle.path()), "{options:?}");
        let names = files(bundle.path());
        let wanted =
            ["bundle.json", "config.json", "experts-00.safetensors", "experts-01.safetensors", "resident.safetensors"];
        assert_eq!(names, wanted);
        // And back: a bundle is a valid input.
        let back = tempfile::tempdir().unwrap();
        pack(bundle.path(), back.path(), &["--set", "*=none"]);
        assert!(by_expert(back.path()) == by_expert(mlx.path()), "{options:?}");
        success(support::output(&["inspect", &text(bundle.path()), "--verify"]));
    }
}

#[test]
fn experts_lie_in_pages_where_the_manifest_says() {
    let (input, out) = (tiny(false), tempfile::tempdir().unwrap());
    pack(input.path(), out.path(), &["--experts-bits", "2", "--layout", "bundle"]);
    let manifest = sluice_store::bundle::Manifest::read(out.path()).unwrap().unwrap();
    let checkpoint = Checkpoint::open(out.path()).unwrap();
    assert_eq!(manifest.experts.len(), 2);
    for (layer, e) in &manifest.experts {
        assert_eq!((e.base % 4096, e.stride % 4096, e.count), (0, 0, EXPERTS));
        let order: Vec<&str> = e.parts.iter().map(|p| p.name.as_str()).collect();
        let projections = ["gate_proj", "up_proj", "down_proj"];
        let wanted: Vec<String> =
            projections.iter().flat_map(|p| ["weight", "scales", "biases"].map(|l| format!("{p}.{l}"))).collect();
        assert_eq!(order, wanted);
        let file = fs::read(out.path().join(&e.file)).unwrap();
        for number in 0..e.count {
            for part in &e.parts {
                let name = format!("language_model.model.layers.{layer}.mlp.experts.{number}.{}", part.name);
                let t = checkpoint.tensor(&name).unwrap();
                let at = (e.base + number as u64 * e.stride + part.offset) as usize;
                assert_eq!((t.shape.clone(), t.dtype.name()), (part.shape.clone(), part.dtype.as_str()));
                assert!(file[at..at + part.bytes as usize] == t.bytes[..], "{name}");
            }
        }
    }
    // One wrong bit is detected.
    let path = out.path().join("experts-01.safetensors");
    let mut bytes = fs::read(&path).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    fs::write(&path, bytes).unwrap();
    assert_refused(
        &support::output(&["inspect", &text(out.path()), "--verify"]),
        &["experts-01.safetensors", "damaged"],
    );
}

/// The published layout of an expert of Qwen3.5-397B-A17B at 2 bits: offset and bytes of each part.
#[test]
fn an_expert_of_the_397b_has_the_published_layout() {
    let (hidden, width, experts) = (4096, 1024, 2);
    let input = tempfile::tempdir().unwrap();
    let mut all: BTreeMap<String, Vec<usize>> = [
        ("model.embed_tokens.weight", vec![64, hidden]),
        ("model.norm.weight", vec![hidden]),
        ("model.layers.0.input_layernorm.weight", vec![hidden]),
        ("model.layers.0.post_attention_layernorm.weight", vec![hidden]),
        ("model.layers.0.mlp.gate.weight", vec![experts, hidden]),
        ("model.layers.0.mlp.experts.gate_up_proj", vec![experts, 2 * width, hidden]),
        ("model.layers.0.mlp.experts.down_proj", vec![experts, hidden, width]),
    ]
    .into_iter()
    .map(|(name, shape)| (name.to_owned(), shape))
    .collect();
    for (part, shape) in
        [("q_proj", [128, hidden]), ("k_proj", [64, hidden]), ("v_proj", [64, hidden]), ("o_proj", [hidden, 64])]
    {
        all.insert(format!("model.layers.0.self_attn.{part}.weight"), shape.to_vec());
    }
    for norm in ["q_norm", "k_norm"] {
        all.insert(format!("model.layers.0.self_attn.{norm}.weight"), vec![32]);
    }
    let mut state = 1u64;
    let tensors = all.into_iter().map(|(name, shape)| {
        let mut next = || {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 40) as f32 / (1 << 24) as f32 * 0.04 - 0.02
        };
        let values = (0..shape.iter().product()).map(|_| next()).collect();
        (name, (shape, values))
    });
    write_checkpoint(input.path(), &tensors.collect());
    let mut c = config(input.path());
    (c["num_hidden_layers"], c["hidden_size"], c["num_experts"]) = (json!(1), json!(hidden), json!(experts));
    (c["moe_intermediate_size"], c["layer_types"]) = (json!(width), json!(["full_attention"]));
    fs::write(input.path().join("config.json"), c.to_string()).unwrap();
    let out = tempfile::tempdir().unwrap();
    pack(input.path(), out.path(), &["--bits", "none", "--experts-bits", "2", "--layout", "bundle"]);

    let layer = &sluice_store::bundle::Manifest::read(out.path()).unwrap().unwrap().experts[&0];
    assert_eq!((layer.used(), layer.stride), (3_932_160, 3_932_160));
    let found: Vec<(&str, u64, u64, &[usize])> =
        layer.parts.iter().map(|p| (p.name.as_str(), p.offset, p.bytes, p.shape.as_slice())).collect();
    let wanted: [(&str, u64, u64, &[usize]); 9] = [
        ("gate_proj.weight", 0, 1_048_576, &[1024, 256]),
        ("gate_proj.scales", 1_048_576, 131_072, &[1024, 64]),
        ("gate_proj.biases", 1_179_648, 131_072, &[1024, 64]),
        ("up_proj.weight", 1_310_720, 1_048_576, &[1024, 256]),
        ("up_proj.scales", 2_359_296, 131_072, &[1024, 64]),
        ("up_proj.biases", 2_490_368, 131_072, &[1024, 64]),
        ("down_proj.weight", 2_621_440, 1_048_576, &[4096, 64]),
        ("down_proj.scales", 3_670_016, 131_072, &[4096, 16]),
        ("down_proj.biases", 3_801_088, 131_072, &[4096, 16]),
    ];
    assert_eq!(found, wanted);
    let bytes = fs::metadata(out.path().join(&layer.file)).unwrap().len();
    assert_eq!(bytes, layer.base + experts as u64 * layer.stride);
}

#[test]
fn packed_experts_can_have_fewer_bits_but_not_more() {
    let (input, four, two) = (tiny(false), tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    pack(input.path(), four.path(), &["--bits", "4"]);
    pack(four.path(), two.path(), &["--experts-bits", "2", "--layout", "bundle"]);
    let tensor = |folder: &Path, name: &str| {
        Checkpoint::open(folder).unwrap().tensor(&format!("language_model.model.layers.0.{name}")).unwrap()
    };
    assert_eq!(tensor(two.path(), "mlp.experts.1.up_proj.weight").shape, [WIDTH, HIDDEN / 16]);
    // The others are as they were.
    let attention = "linear_attn.out_proj.weight";
    assert!(tensor(two.path(), attention).bytes[..] == tensor(four.path(), attention).bytes[..]);
    assert_eq!(logits(two.path()).as_array().unwrap().len(), 11);
    // The file has what MLX would make of the 4-bit values.
    let source = tensor(four.path(), "mlp.switch_mlp.up_proj.weight");
    let part = |leaf: &str| tensor(four.path(), &format!("mlp.switch_mlp.up_proj.{leaf}"));
    let (scales, biases) = (part("scales"), part("biases"));
    let value =
        |t: &sluice_store::Tensor, i: usize| half::bf16::from_le_bytes([t.bytes[2 * i], t.bytes[2 * i + 1]]).to_f32();
    let row = WIDTH + 5; // Row 5 of expert 1.
    let plain: Vec<f32> = (0..HIDDEN)
        .map(|c| {
            let q = source.bytes[row * HIDDEN / 2 + c / 2] >> (4 * (c % 2)) & 15;
            let group = row * HIDDEN / 64 + c / 64;
            q as f32 * value(&scales, group) + value(&biases, group)
        })
        .collect();
    let mut wanted = vec![0; HIDDEN / 4];
    quantize(Isa::GENERIC, Rounding::Mlx, &plain, 2, 64, Float::Bf16, &mut wanted, &mut [0; 4], &mut [0; 4]);
    let found = tensor(two.path(), "mlp.experts.1.up_proj.weight");
    assert!(found.bytes[5 * HIDDEN / 4..6 * HIDDEN / 4] == wanted[..]);

    let back = tempfile::tempdir().unwrap();
    let said = support::output(&["pack", &text(two.path()), &text(back.path()), "--experts-bits", "4"]);
    assert!(said.status.success() && stderr(&said).contains("fewer bits that they have"), "{}", stderr(&said));
    assert!(by_expert(back.path()) == by_expert(two.path()));
}

#[test]
fn layers_can_be_packed_in_several_runs() {
    let (input, whole, parts) = (tiny(false), tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let options = ["--experts-bits", "2", "--layout", "bundle"];
    pack(input.path(), whole.path(), &options);
    let first = pack(input.path(), parts.path(), &[&options[..], &["--layers", "1"]].concat());
    assert!(first.contains("1 of 3 files are still to be packed"), "{first}");
    assert!(!parts.path().join("config.json").exists());
    // A different packing does not resume with this one's files.
    let other = support::output(&["pack", &text(input.path()), &text(parts.path()), "--layout", "bundle"]);
    assert_refused(&other, &["unfinished packing of another kind", "--force"]);
    pack(input.path(), parts.path(), &[&options[..], &["--layers", "0-0"]].concat());
    assert_eq!(files(parts.path()), files(whole.path()));
    for name in files(whole.path()) {
        assert!(fs::read(whole.path().join(&name)).unwrap() == fs::read(parts.path().join(&name)).unwrap(), "{name}");
    }
    assert_refused(
        &support::output(&["pack", &text(input.path()), &text(&parts.path().join("x")), "--layers", "0-1"]),
        &["--layers", "bundle"],
    );
}

#[test]
fn no_packing_goes_on_with_an_input_whose_bytes_have_changed() {
    let (input, parts) = (tiny(false), tempfile::tempdir().unwrap());
    let options = ["--experts-bits", "2", "--layout", "bundle", "--layers"];
    pack(input.path(), parts.path(), &[&options[..], &["1"]].concat());
    // One bit of the last tensor, with the modification time restored.
    let name = Checkpoint::open(input.path()).unwrap().file_sizes()[0].0.clone();
    let file = fs::File::options().read(true).write(true).open(input.path().join(name)).unwrap();
    let before = file.metadata().unwrap();
    let mut last = [0];
    file.read_exact_at(&mut last, before.len() - 1).unwrap();
    file.write_all_at(&[last[0] ^ 1], before.len() - 1).unwrap();
    file.set_modified(before.modified().unwrap()).unwrap();
    let both = [text(input.path()), text(parts.path())];
    let again = support::output(&[&["pack", both[0].as_str(), both[1].as_str()][..], &options[..], &["0-0"]].concat());
    assert_refused(&again, &["unfinished packing of another kind or input", "--force"]);
}
