//! `sluice pack` writes the model that was asked for, or nothing.

mod support;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use sluice_kernels::Isa;
use sluice_kernels::affine::unpack;
use sluice_kernels::matmul::Float;
use sluice_kernels::quantize::{Rounding, quantize};
use sluice_store::{Checkpoint, Dtype, TensorPlan, Writer};
use support::*;

const HIDDEN: usize = 128;
const WIDTH: usize = 64;
const EXPERTS: usize = 3;
const VOCABULARY: usize = 96;

/// A Qwen3.5-MoE of two layers with rows long enough to quantise: its tensors by name, random bf16. `single`: a tensor for each expert.
fn tensors(single: bool) -> BTreeMap<String, (Vec<usize>, Vec<f32>)> {
    let mut all = BTreeMap::new();
    let mut add = |name: String, shape: &[usize]| {
        // The values depend on the name alone.
        let mut state = name.bytes().fold(99u64, |h, b| (h ^ b as u64).wrapping_mul(0x100000001b3));
        let mut next = || {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            half::bf16::from_f32((state >> 40) as f32 / (1 << 24) as f32 * 0.4 - 0.2).to_f32()
        };
        let values = (0..shape.iter().product()).map(|_| next()).collect();
        all.insert(name, (shape.to_vec(), values));
    };
    add("model.embed_tokens.weight".into(), &[VOCABULARY, HIDDEN]);
    add("model.norm.weight".into(), &[HIDDEN]);
    for layer in 0..2 {
        let mut add = |name: &str, shape: &[usize]| add(format!("model.layers.{layer}.{name}"), shape);
        add("input_layernorm.weight", &[HIDDEN]);
        add("post_attention_layernorm.weight", &[HIDDEN]);
        if layer == 0 {
            add("linear_attn.A_log", &[4]);
            add("linear_attn.dt_bias", &[4]);
            add("linear_attn.conv1d.weight", &[192, 1, 4]);
            add("linear_attn.norm.weight", &[32]);
            add("linear_attn.in_proj_qkv.weight", &[192, HIDDEN]);
            add("linear_attn.in_proj_z.weight", &[128, HIDDEN]);
            add("linear_attn.in_proj_a.weight", &[4, HIDDEN]);
            add("linear_attn.in_proj_b.weight", &[4, HIDDEN]);
            add("linear_attn.out_proj.weight", &[HIDDEN, 128]);
        } else {
            add("self_attn.q_proj.weight", &[256, HIDDEN]);
            add("self_attn.k_proj.weight", &[64, HIDDEN]);
            add("self_attn.v_proj.weight", &[64, HIDDEN]);
            add("self_attn.o_proj.weight", &[HIDDEN, 128]);
            add("self_attn.q_norm.weight", &[32]);
            add("self_attn.k_norm.weight", &[32]);
        }
        add("mlp.gate.weight", &[EXPERTS, HIDDEN]);
        add("mlp.shared_expert.gate_proj.weight", &[WIDTH, HIDDEN]);
        add("mlp.shared_expert.up_proj.weight", &[WIDTH, HIDDEN]);
        add("mlp.shared_expert.down_proj.weight", &[HIDDEN, WIDTH]);
        add("mlp.shared_expert_gate.weight", &[1, HIDDEN]);
        for e in 0..EXPERTS {
            add(&format!("mlp.experts.{e}.gate_proj.weight"), &[WIDTH, HIDDEN]);
            add(&format!("mlp.experts.{e}.up_proj.weight"), &[WIDTH, HIDDEN]);
            add(&format!("mlp.experts.{e}.down_proj.weight"), &[HIDDEN, WIDTH]);
        }
    }
    if !single {
        for layer in 0..2 {
            let (mut gate_up, mut down) = (Vec::new(), Vec::new());
            for e in 0..EXPERTS {
                let mut take = |part: &str| all.remove(&format!("model.layers.{layer}.mlp.experts.{e}.{part}.weight"));
                gate_up.extend(take("gate_proj").unwrap().1);
                gate_up.extend(take("up_proj").unwrap().1);
                down.extend(take("down_proj").unwrap().1);
            }
            let name = |part: &str| format!("model.layers.{layer}.mlp.experts.{part}");
            all.insert(name("gate_up_proj"), (vec![EXPERTS, 2 * WIDTH, HIDDEN], gate_up));
            all.insert(name("down_proj"), (vec![EXPERTS, HIDDEN, WIDTH], down));
        }
    }
    all
}

fn write_checkpoint(folder: &Path, tensors: &BTreeMap<String, (Vec<usize>, Vec<f32>)>) {
    let plan = |(name, (shape, _)): (&String, &(Vec<usize>, _))| TensorPlan {
        name: name.clone(),
        dtype: Dtype::BF16,
        shape: shape.clone(),
    };
    let plan: Vec<TensorPlan> = tensors.iter().map(plan).collect();
    let mut writer = Writer::create(&folder.join("model.safetensors"), &plan, &BTreeMap::new()).unwrap();
    for (name, (_, values)) in tensors {
        let bytes: Vec<u8> = values.iter().flat_map(|v| half::bf16::from_f32(*v).to_le_bytes()).collect();
        writer.append(name, &bytes).unwrap();
    }
    writer.finish().unwrap();
    let config = json!({
        "model_type": "qwen3_5_moe_text", "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "hidden_act": "silu",
        "moe_intermediate_size": WIDTH, "shared_expert_intermediate_size": WIDTH, "num_experts": EXPERTS,
        "num_experts_per_tok": 2, "layer_types": ["linear_attention", "full_attention"], "rms_norm_eps": 1e-6,
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_value_head_dim": 32, "tie_word_embeddings": true, "max_position_embeddings": 512,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default", "partial_rotary_factor": 0.5},
    });
    fs::write(folder.join("config.json"), config.to_string()).unwrap();
}

fn tiny(single: bool) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    write_checkpoint(folder.path(), &tensors(single));
    folder
}

fn pack(input: &Path, output: &Path, options: &[&str]) -> String {
    success(support::output(&[&["pack", &text(input), &text(output)], options].concat()))
}

fn config(folder: &Path) -> Value {
    serde_json::from_slice(&fs::read(folder.join("config.json")).unwrap()).unwrap()
}

fn logits(folder: &Path) -> Value {
    let tokens = "5,17,91,3,44,60,2,8,33,71,12";
    json(support::output(&[
        "eval",
        "logits",
        &text(folder),
        "--tokens",
        tokens,
        "--activations",
        "f32",
        "--all",
        "--json",
    ]))["logits"]
        .take()
}

fn files(folder: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        fs::read_dir(folder).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn modules_hold_what_direct_quantisation_gives() {
    let (input, original) = (tiny(false), tensors(true));
    for (bits, group) in [(2u8, 32u16), (3, 64), (4, 64), (5, 128), (6, 64), (8, 32)] {
        let out = tempfile::tempdir().unwrap();
        pack(input.path(), out.path(), &["--bits", &bits.to_string(), "--group-size", &group.to_string()]);
        let packed = Checkpoint::open(out.path()).unwrap();
        let mut quantised = 0;
        for (name, (shape, values)) in &original {
            // 1. its name at MLX, and its rows there
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
            // 2. the same bytes
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
        // 3. norms are one more, in f32; the convolution's axis is last
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
                 qwen3_5_moe qwen3_5_moe_split qwen3_5_moe_vl mlx_qwen3 mlx_qwen3_next_plain mlx_qwen3_5_moe";
    for name in names.split_whitespace() {
        let out = tempfile::tempdir().unwrap();
        let input = golden(name);
        pack(Path::new(&input), out.path(), &["--set", "*=none"]);
        assert_eq!(logits(Path::new(&input)), logits(out.path()), "{name}");
    }
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
    // Those that are as the default has them need no entry.
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

    // The float modules of an MLX checkpoint are quantised, and each is named, since the input's default is another.
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

    // Over a divided model, nothing of it is left.
    pack(input.path(), many.path(), &["--force"]);
    assert_eq!(files(many.path()), files(one.path()));
}

#[test]
fn a_folder_that_holds_something_is_refused() {
    let (input, out) = (tiny(false), tempfile::tempdir().unwrap());
    fs::write(out.path().join("notes.txt"), "mine").unwrap();
    let refused = support::output(&["pack", &text(input.path()), &text(out.path())]);
    assert_refused(&refused, &["not empty", "--force", &text(out.path())]);
    assert_eq!(files(out.path()), ["notes.txt"]);
    let itself = support::output(&["pack", &text(input.path()), &text(input.path()), "--force"]);
    assert_refused(&itself, &["the same folder"]);
    let file = support::output(&["pack", &text(input.path()), &text(&out.path().join("notes.txt"))]);
    assert_refused(&file, &["not a folder"]);
    assert_refused(&support::output(&["pack", &text(out.path()), &text(&out.path().join("x"))]), &["safetensors"]);
    pack(input.path(), out.path(), &["--force"]);
    assert_eq!(files(out.path()), ["config.json", "model.safetensors", "notes.txt"]);
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

/// Every tensor by name, experts by number, padding left out.
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
        // Back again: a bundle is an input like any other.
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
    // One wrong bit is found.
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
    // What stands in the file is what MLX would make of the 4-bit values.
    let source = tensor(four.path(), "mlp.switch_mlp.up_proj.weight");
    let part = |leaf: &str| tensor(four.path(), &format!("mlp.switch_mlp.up_proj.{leaf}"));
    let (scales, biases) = (part("scales"), part("biases"));
    let value =
        |t: &sluice_store::Tensor, i: usize| half::bf16::from_le_bytes([t.bytes[2 * i], t.bytes[2 * i + 1]]).to_f32();
    let row = WIDTH + 5; // row 5 of expert 1
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

/// What rounding to 4 bits in groups of 64 costs these values, as MLX does it: the root of the mean square, and of the values' own.
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
    // The table has a line for each projection, and another model is refused.
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

#[test]
fn layers_can_be_packed_in_several_runs() {
    let (input, whole, parts) = (tiny(false), tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let options = ["--experts-bits", "2", "--layout", "bundle"];
    pack(input.path(), whole.path(), &options);
    let first = pack(input.path(), parts.path(), &[&options[..], &["--layers", "1"]].concat());
    assert!(first.contains("1 of 3 files are still to be packed"), "{first}");
    assert!(!parts.path().join("config.json").exists());
    // Another packing does not go on with this one's files.
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

/// Calibrated layer by layer in runs of their own, as in one run: what the packed layers before do to a layer is found again. With any number of threads.
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

/// A checkpoint whose layers' files take a while.
fn slow_to_pack() -> tempfile::TempDir {
    let input = tempfile::tempdir().unwrap();
    let mut all = tensors(false);
    let experts = 600;
    for layer in 0..2 {
        for (part, rows, cols) in [("gate_up_proj", 2 * WIDTH, HIDDEN), ("down_proj", HIDDEN, WIDTH)] {
            let t = all.get_mut(&format!("model.layers.{layer}.mlp.experts.{part}")).unwrap();
            *t = (vec![experts, rows, cols], t.1.iter().copied().cycle().take(experts * rows * cols).collect());
        }
        let router = all.get_mut(&format!("model.layers.{layer}.mlp.gate.weight")).unwrap();
        *router = (vec![experts, HIDDEN], router.1.iter().copied().cycle().take(experts * HIDDEN).collect());
    }
    write_checkpoint(input.path(), &all);
    let mut c = config(input.path());
    c["num_experts"] = json!(experts);
    fs::write(input.path().join("config.json"), c.to_string()).unwrap();
    input
}

/// Waits until a pack has `file` under way, with those before it whole.
fn until_it_writes(pack: &mut Child, folder: &Path, file: &str) {
    let begin = Instant::now();
    let temporary = |name: &String| name.starts_with(&format!(".{file}.")) && name.contains(".tmp-");
    while !(folder.is_dir() && files(folder).iter().any(temporary)) && pack.try_wait().unwrap().is_none() {
        assert!(begin.elapsed() < Duration::from_secs(60), "{file} is not begun");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn signal(name: &str, process: u32) {
    assert!(Command::new("kill").args([name, &process.to_string()]).status().unwrap().success());
}

#[test]
fn killed_it_goes_on_and_ends_with_the_same_bytes() {
    let input = slow_to_pack();
    let options = ["--experts-bits", "2", "--layout", "bundle", "--search", "--threads", "1"];
    let whole = tempfile::tempdir().unwrap();
    pack(input.path(), whole.path(), &options);
    let out = tempfile::tempdir().unwrap();
    let (from, to) = (text(input.path()), text(out.path()));
    let arguments = [&["pack", &from, &to][..], &options].concat();
    for (how, file) in [("-KILL", "experts-00.safetensors"), ("-INT", "experts-01.safetensors")] {
        let mut child = sluice(&arguments).stderr(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        until_it_writes(&mut child, out.path(), file);
        signal(how, child.id());
        let ended = child.wait_with_output().unwrap();
        assert!(!ended.status.success(), "it ended before it was killed");
        assert!(!out.path().join("config.json").exists());
        if how == "-INT" {
            assert!(stderr(&ended).contains("the same command goes on"), "{}", stderr(&ended));
        }
    }
    let last = support::output(&arguments);
    // Ctrl-C may come when the file that it was meant for is whole.
    let goes_on = |n: usize| stderr(&last).contains(&format!("goes on: {n} of 3 files are whole"));
    assert!(goes_on(2) || goes_on(3), "{}", stderr(&last));
    success(last);
    assert_eq!(files(out.path()), files(whole.path()));
    for name in files(whole.path()) {
        assert!(fs::read(whole.path().join(&name)).unwrap() == fs::read(out.path().join(&name)).unwrap(), "{name}");
    }
}

#[test]
fn interrupted_it_leaves_nothing() {
    let input = tempfile::tempdir().unwrap();
    let mut all = tensors(false);
    let embedding = all.get_mut("model.embed_tokens.weight").unwrap();
    let rows = 200_000;
    *embedding = (vec![rows, HIDDEN], embedding.1.iter().copied().cycle().take(rows * HIDDEN).collect());
    write_checkpoint(input.path(), &all);

    let out = tempfile::tempdir().unwrap();
    let folder = out.path().join("packed");
    let options = ["pack", &text(input.path()), &text(&folder), "--search", "--threads", "1"];
    let child = sluice(&options).stderr(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let begin = Instant::now();
    let is_written = || fs::read_dir(&folder).is_ok_and(|mut d| d.next().is_some());
    while !is_written() {
        assert!(begin.elapsed() < Duration::from_secs(60), "nothing is written");
        std::thread::sleep(Duration::from_millis(5));
    }
    // Already there, but not under a name that anybody reads.
    assert!(files(&folder).iter().all(|name| name.starts_with('.')), "{:?}", files(&folder));
    Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    let ended = child.wait_with_output().unwrap();
    assert_eq!(ended.status.code(), Some(130), "{}", stderr(&ended));
    assert!(stderr(&ended).contains("interrupted"), "{}", stderr(&ended));
    assert!(!folder.exists());
}

/// The same bundle packed by two at once would be a mixture of both.
#[test]
fn a_second_pack_to_the_same_folder_is_refused_while_the_first_writes() {
    let (input, out) = (slow_to_pack(), tempfile::tempdir().unwrap());
    let folder = out.path().join("packed");
    let options = ["--experts-bits", "2", "--layout", "bundle", "--search", "--threads", "1"];
    let arguments: Vec<String> = ["pack", &text(input.path()), &text(&folder)].map(str::to_owned).to_vec();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).chain(options).collect();
    let mut first = sluice(&arguments).stderr(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    until_it_writes(&mut first, &folder, "experts-00.safetensors");
    // Stopped, so that it holds the folder for as long as this takes.
    signal("-STOP", first.id());
    let before = files(&folder);
    for more in [&[][..], &["--force"]] {
        let second = support::output(&[&arguments[..], more].concat());
        assert_refused(&second, &[&text(&folder), "another pack is writing"]);
        assert_eq!(files(&folder), before, "{more:?}");
    }
    // By another name of the same folder.
    let link = out.path().join("link");
    std::os::unix::fs::symlink(&folder, &link).unwrap();
    let by_link = support::output(&[&["pack", &text(input.path()), &text(&link)][..], &options].concat());
    assert_refused(&by_link, &["another pack is writing"]);

    // Killed, it holds nothing any more, and the next goes on.
    signal("-KILL", first.id());
    first.wait().unwrap();
    success(support::output(&arguments));
    assert!(folder.join("config.json").exists());
    assert!(!files(&folder).iter().any(|name| name.starts_with('.')), "{:?}", files(&folder));
}

#[test]
fn a_pack_that_is_refused_leaves_no_folder_behind() {
    let (input, out) = (tiny(false), tempfile::tempdir().unwrap());
    let deep = out.path().join("a/b/c");
    let refused = support::output(&["pack", &text(input.path()), &text(&deep), "--set", "layer.*=4"]);
    assert_refused(&refused, &["no module matches"]);
    let refused = support::output(&["pack", &text(out.path()), &text(&deep)]);
    assert_refused(&refused, &["safetensors"]);
    assert_eq!(files(out.path()), [""; 0]);
}

/// What a pack says it needs is what it takes: room for headers as long as these headers are, not for those of the largest model.
#[test]
fn what_a_pack_needs_is_what_it_writes() {
    let input = tiny(false);
    for options in [&["--bits", "4"][..], &["--layout", "bundle"], &["--shard-bytes", "20000"]] {
        let out = tempfile::tempdir().unwrap();
        let said = support::output(&[&["pack", &text(input.path()), &text(out.path())], options].concat());
        let line = stderr(&said);
        success(said);
        let figure =
            line.split(" = ").nth(1).and_then(|rest| rest.split(';').next()).unwrap_or_else(|| panic!("{line}"));
        let (number, unit) = figure.split_once(' ').unwrap();
        let unit = match unit {
            "B" => 1.0,
            "kB" => 1e3,
            "MB" => 1e6,
            _ => panic!("{line}"),
        };
        let needed = number.parse::<f64>().unwrap() * unit;
        let written: u64 = files(out.path()).iter().map(|f| fs::metadata(out.path().join(f)).unwrap().len()).sum();
        let written = written as f64;
        assert!(written <= needed * 1.001 && needed < written + 100e3, "{line}: {written} bytes were written");
    }
}
