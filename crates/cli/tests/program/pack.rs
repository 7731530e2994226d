//! `sluice pack` writes the requested model.

use crate::support;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use serde_json::{Value, json};
use sluice_kernels::Isa;
use sluice_kernels::format::Float;
use sluice_kernels::quantize::{Rounding, quantize};
use sluice_store::{Checkpoint, Dtype};
use support::packing::*;
use support::*;

#[test]
fn modules_hold_what_direct_quantisation_gives() {
    let (input, original) = (tiny(false), tensors(true));
    for (bits, group) in [(2u8, 32u16), (3, 64), (4, 64), (5, 128), (6, 64), (8, 32)] {
        let out = tempfile::tempdir().unwrap();
        pack(input.path(), out.path(), &["--bits", &bits.to_string(), "--group-size", &group.to_string()]);
        let packed = Checkpoint::open(out.path()).unwrap();
        let mut quantised = 0;
        for (name, (shape, values)) in &original {
            // 1. Its name and its rows in MLX's layout
            let short = name.strip_prefix("model.").unwrap();
            let (expert, short) = match short.split_once(".experts.") {
                Some((module, rest)) => {
                    let (expert, part) = rest.split_once('.').unwrap();
                    (expert.parse().unwrap(), format!("{module}.switch_mlp.{part}"))
                }
                None => (0, short.to_owned()),
            };
            let out = packed.tensor(&format!("language_model.model.{short}")).unwrap_or_else(|| panic!("{short}"));
            let module = out.name.strip_suffix(".weight").unwrap_or("").to_owned();
            let cols = *shape.last().unwrap();
            let is_router = module.ends_with("mlp.gate") || module.ends_with("shared_expert_gate");
            if shape.len() != 2 || !cols.is_multiple_of(group as usize) {
                assert!(packed.tensor(&format!("{module}.scales")).is_none(), "{module}");
                continue;
            }
            // 2. The same bytes
            let (bits, group) = if is_router { (8, 64) } else { (bits, group) };
            let groups = values.len() / group as usize;
            let mut data = vec![0; values.len() / 8 * bits as usize];
            let (mut scales, mut biases) = (vec![0; 2 * groups], vec![0; 2 * groups]);
            quantize(
                Isa::GENERIC,
                Rounding::Mlx,
                values,
                bits,
                group,
                Float::Bf16,
                &mut data,
                &mut scales,
                &mut biases,
            );
            for (leaf, bytes) in [("weight", data), ("scales", scales), ("biases", biases)] {
                let stored = packed.tensor(&format!("{module}.{leaf}")).unwrap();
                let of_expert = expert * bytes.len()..(expert + 1) * bytes.len();
                assert!(stored.bytes[of_expert] == bytes[..], "{module}.{leaf} at {bits} bits");
            }
            quantised += 1;
        }
        let rows_of_64 = if group == 128 { 2 * (1 + EXPERTS) } else { 0 };
        assert_eq!(quantised, 1 + 5 + 4 + 2 * (5 + 3 * EXPERTS) - rows_of_64);
        // 3. Norms are one more, in f32; the convolution's axis is last
        let (_, norm) = &original["model.norm.weight"];
        let stored = packed.tensor("language_model.model.norm.weight").unwrap();
        let values = stored.bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap()));
        assert!(stored.dtype == Dtype::F32 && values.eq(norm.iter().map(|w| w + 1.0)));
        let conv = packed.tensor("language_model.model.layers.0.linear_attn.conv1d.weight").unwrap();
        assert_eq!((conv.shape, conv.dtype), (vec![192, 4, 1], Dtype::BF16));
    }
}

#[test]
fn conversion_alone_changes_no_bit_of_a_logit() {
    let names = "qwen3 qwen3_rope qwen3_window qwen3_moe qwen3_moe_stacked qwen3_next qwen3_next_stacked qwen3_5 qwen3_5_vl \
                 qwen3_5_moe qwen3_5_moe_split qwen3_5_moe_vl mlx_qwen3 mlx_qwen3_next_plain mlx_qwen3_5_moe \
                 gemma4 gemma4_moe gemma4_per_layer gemma4_unified";
    for name in names.split_whitespace() {
        let out = tempfile::tempdir().unwrap();
        let input = golden(name);
        pack(Path::new(&input), out.path(), &["--set", "*=none"]);
        assert_eq!(logits(Path::new(&input)), logits(out.path()), "{name}");
    }
    // Where experts are directly in a layer, MLX's stack of them has another name. A bundle has them in pages, too.
    let (stack, bundle) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let input = golden("gemma4_moe");
    pack(Path::new(&input), stack.path(), &["--set", "*=none"]);
    let name = "language_model.model.layers.0.experts.switch_glu.up_proj.weight";
    assert!(Checkpoint::open(stack.path()).unwrap().tensor(name).is_some());
    pack(Path::new(&input), bundle.path(), &["--set", "*=none", "--layout", "bundle"]);
    assert_eq!(logits(Path::new(&input)), logits(bundle.path()));
}

#[test]
fn experts_are_the_same_stacked_or_single_and_in_any_number_of_threads() {
    let packed = |single: bool, options: &[&str]| {
        let (input, out) = (tiny(single), tempfile::tempdir().unwrap());
        pack(input.path(), out.path(), &[&["--search"], options].concat());
        fs::read(out.path().join("model.safetensors")).unwrap()
    };
    let stacked = packed(false, &["--threads", "3"]);
    let tensors = |bytes: &[u8]| sluice_store::safetensors::Header::from_bytes(bytes).unwrap().tensors;
    let single = packed(true, &["--threads", "1"]);
    let by_name = |bytes: &[u8]| -> BTreeMap<String, Vec<u8>> {
        let cut = |t: sluice_store::safetensors::Entry| {
            (t.name, bytes[t.range.start as usize..t.range.end as usize].to_vec())
        };
        tensors(bytes).into_iter().map(cut).collect()
    };
    assert!(by_name(&stacked) == by_name(&single));
}

#[test]
fn widths_that_were_asked_for_are_recorded_and_read_back() {
    let (input, out) = (tiny(false), tempfile::tempdir().unwrap());
    let set =
        ["*.mlp.experts.*=2:32", "embed_tokens=6", "layers.1.self_attn.*=none", "*.switch_mlp.down_proj=3", "*.gate=4"];
    let options: Vec<&str> = set.iter().flat_map(|s| ["--set", s]).collect();
    pack(input.path(), out.path(), &options);
    let config = config(out.path());
    let of = |module: &str| config["quantization"][format!("language_model.model.{module}")].clone();
    assert_eq!((&config["quantization"]["bits"], &config["quantization"]["group_size"]), (&json!(4), &json!(64)));
    assert_eq!(config["quantization"]["mode"], "affine");
    assert_eq!(config["quantization_config"], config["quantization"]);
    assert_eq!(of("embed_tokens"), json!({"group_size": 64, "bits": 6}));
    assert_eq!(of("layers.0.mlp.switch_mlp.up_proj"), json!({"group_size": 32, "bits": 2}));
    assert_eq!(of("layers.1.mlp.switch_mlp.down_proj"), json!({"group_size": 64, "bits": 3}));
    assert_eq!(of("layers.1.self_attn.q_proj"), json!(false));
    // Modules with the default format need no entry.
    assert_eq!((of("layers.0.mlp.gate"), of("layers.0.linear_attn.out_proj")), (Value::Null, Value::Null));
    assert_eq!(of("layers.0.mlp.shared_expert_gate"), json!({"group_size": 64, "bits": 8}));
    // For mlx_lm.
    assert_eq!((&config["model_type"], &config["full_attention_interval"]), (&json!("qwen3_5_moe"), &json!(2)));
    assert_eq!(logits(out.path()).as_array().unwrap().len(), 11);

    let refused = support::output(&["pack", &text(input.path()), &text(&out.path().join("x")), "--set", "layer.*=4"]);
    assert_refused(&refused, &["--set", "no module matches", "layer.*"]);
    let refused = support::output(&["pack", &text(input.path()), "x", "--set", "layers.*=7"]);
    assert!(!refused.status.success() && stderr(&refused).contains("expected 2, 3, 4, 5, 6 or 8"));
}

#[test]
fn what_is_packed_already_stays_as_it_is() {
    let (input, once, twice) = (tiny(false), tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    pack(input.path(), once.path(), &["--set", "*.mlp.experts.*=3", "--set", "*.out_proj=none"]);
    pack(once.path(), twice.path(), &["--bits", "8", "--set", "*.mlp.experts.*=6", "--set", "*.out_proj=none"]);
    let bytes = |folder: &Path| fs::read(folder.join("model.safetensors")).unwrap();
    assert!(bytes(once.path()) == bytes(twice.path()));
    assert_eq!(config(once.path()), config(twice.path()));

    // Float modules of an MLX checkpoint are quantised and each is named, since the input's default is different.
    let rest = tempfile::tempdir().unwrap();
    pack(once.path(), rest.path(), &["--bits", "8"]);
    let config = config(rest.path());
    assert_eq!(config["quantization"]["bits"], 4);
    let module = "language_model.model.layers.0.linear_attn.out_proj";
    assert_eq!(config["quantization"][module], json!({"group_size": 64, "bits": 8}));
    let (before, after) = (Checkpoint::open(once.path()).unwrap(), Checkpoint::open(rest.path()).unwrap());
    for t in before.tensors().iter().filter(|t| !t.name.starts_with(module)) {
        assert!(after.tensor(&t.name).unwrap().bytes[..] == t.bytes[..], "{}", t.name);
    }
    assert_eq!(after.tensor(&format!("{module}.scales")).unwrap().shape, [HIDDEN, 2]);
    assert_eq!(logits(rest.path()).as_array().unwrap().len(), 11);
}

#[test]
fn large_models_are_divided_and_indexed() {
    let (input, one, many) = (tiny(false), tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    fs::write(input.path().join("tokenizer.json"), "{}").unwrap();
    fs::write(input.path().join("heldout.txt"), "not part of a model").unwrap();
    pack(input.path(), one.path(), &[]);
    pack(input.path(), many.path(), &["--shard-bytes", "20000"]);
    assert_eq!(files(one.path()), ["config.json", "model.safetensors", "tokenizer.json"]);
    let names = files(many.path());
    assert!(names.contains(&"model.safetensors.index.json".to_owned()), "{names:?}");
    assert!(names.iter().any(|n| n.starts_with("model-00003-of-")), "{names:?}");
    assert!(!names.contains(&"model.safetensors".to_owned()));
    assert_eq!(logits(one.path()), logits(many.path()));

    // Packed over a sharded model, nothing of it is left.
    pack(input.path(), many.path(), &["--force"]);
    assert_eq!(files(many.path()), files(one.path()));
}

#[test]
fn a_value_that_is_not_finite_is_named_and_nothing_is_kept() {
    let input = tempfile::tempdir().unwrap();
    let mut all = tensors(false);
    all.get_mut("model.layers.1.mlp.experts.down_proj").unwrap().1[77] = f32::NAN;
    write_checkpoint(input.path(), &all);
    let out = tempfile::tempdir().unwrap();
    let folder = out.path().join("packed");
    let failed = support::output(&["pack", &text(input.path()), &text(&folder)]);
    assert_eq!(failed.status.code(), Some(2));
    assert!(stderr(&failed).contains("model.layers.1.mlp.experts.down_proj") && stderr(&failed).contains("not finite"));
    assert!(!folder.exists());
}
