//! A tiny mixture, and packing it.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use serde_json::{Value, json};
use sluice_store::{Dtype, TensorPlan, Writer};

use super::{json, output, success, text};

pub const HIDDEN: usize = 128;
pub const WIDTH: usize = 64;
pub const EXPERTS: usize = 3;
pub const VOCABULARY: usize = 96;

/// A Qwen3.5-MoE of two layers with rows long enough to quantise: tensors by name, random bf16. `single`: one tensor per expert.
pub fn tensors(single: bool) -> BTreeMap<String, (Vec<usize>, Vec<f32>)> {
    let mut all = BTreeMap::new();
    let mut add = |name: String, shape: &[usize]| {
        // The values depend only on the name.
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

pub fn write_checkpoint(folder: &Path, tensors: &BTreeMap<String, (Vec<usize>, Vec<f32>)>) {
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

pub fn tiny(single: bool) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    write_checkpoint(folder.path(), &tensors(single));
    folder
}

pub fn pack(input: &Path, to: &Path, options: &[&str]) -> String {
    success(output(&[&["pack", &text(input), &text(to)], options].concat()))
}

pub fn config(folder: &Path) -> Value {
    serde_json::from_slice(&fs::read(folder.join("config.json")).unwrap()).unwrap()
}

pub fn logits(folder: &Path) -> Value {
    let tokens = "5,17,91,3,44,60,2,8,33,71,12";
    json(output(&[
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

pub fn files(folder: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        fs::read_dir(folder).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}
