//! `sluice inspect` agrees with what the engine does.

use crate::support;

use std::fs::File;
use std::path::Path;
use std::time::{Duration, Instant};

use sluice_engine::{Activations, Engine, KvType, MemoryClass, Options};
use support::*;

#[test]
fn sizes_are_those_of_the_engine() {
    for name in ["qwen3", "qwen3_next", "qwen3_5_moe", "qwen3_moe_stacked", "mlx_qwen3_next", "mlx_qwen3", "qwen3_5_vl"]
    {
        let model = golden(name);
        let found = json(output(&["inspect", &model, "--json"]));
        let mut options = Options::for_this_machine().unwrap();
        (options.activations, options.kv_type) = (Activations::F32, Some(KvType::Bf16));
        (options.max_context, options.block_tokens) = (Some(64), 64);
        let mut engine = Engine::open(Path::new(&model), options).unwrap();
        let model = engine.model().clone();
        assert_eq!(found["layers"]["all"], model.layers.len(), "{name}");
        assert_eq!(found["vocabulary"], model.vocabulary, "{name}");
        assert_eq!(found["max_context"], model.max_context, "{name}");
        assert_eq!(found["bytes_per_token"]["state"], 4 * model.state_len(), "{name}");
        let per_position: usize = model.groups().iter().map(|g| g.layers * g.kv_heads * (g.k_dim + g.v_dim)).sum();
        assert_eq!(found["bytes_per_token"]["kv"]["bf16"], 2 * per_position, "{name}");
        let experts = model.experts().map(|(count, k)| serde_json::json!({"count": count, "per_token": k}));
        assert_eq!(found["experts"], serde_json::Value::from(experts), "{name}");
        let left_out: Vec<&str> = engine.skipped().iter().map(String::as_str).collect();
        assert_eq!(found["left_out"], serde_json::json!(left_out), "{name}");
        assert_eq!(found["supported"], true);
        // Matrices are used where they are mapped; vectors are copied and widened.
        let stored = found["bytes"]["resident"].as_u64().unwrap() + found["bytes"]["experts"].as_u64().unwrap();
        assert!(engine.memory(MemoryClass::WeightsMapped) as u64 <= stored, "{name}");
    }
}

#[test]
fn forms_of_quantised_checkpoints_are_named() {
    for (name, parameters, wanted) in [
        ("fp8_blocks", 118_304, "FP8 (e4m3) in blocks of 128 x 128"),
        ("fp8_modelopt", 71_008, "FP8 (e4m3), by ModelOpt"),
        ("w4a16", 71_008, "INT4, by compressed-tensors"),
        ("w8a16_channels", 71_008, "INT8, by compressed-tensors"),
        ("awq", 71_008, "INT4, by AWQ"),
        ("gptq_v2", 71_008, "INT8, by GPTQ"),
        ("nvfp4", 71_008, "NVFP4, by compressed-tensors"),
        ("mxfp4", 71_008, "MXFP4, by compressed-tensors"),
        ("mlx_mxfp8", 71_008, "MXFP8"),
    ] {
        let model = golden(&format!("quantized/{name}"));
        let found = json(output(&["inspect", &model, "--json"]));
        assert_eq!(found["quantization"]["form"], wanted, "{name}");
        assert_eq!(found["parameters"]["all"], parameters, "{name}");
        assert_eq!(found["supported"], true, "{name}");
        let shown = success(output(&["inspect", &model]));
        assert!(shown.contains(&format!("quantised   {wanted}\n")), "{shown}");
        let planned = json(output(&["plan", &model, "--disk-bandwidth", "1GB", "--context", "64", "--json"]));
        assert!(planned["resident"].as_u64().unwrap() > 0, "{name}");
    }
}

#[test]
fn an_unsupported_architecture_is_shown_and_said_to_be_one() {
    let dir = copy_of("qwen3");
    let path = dir.path().join("config.json");
    let config = std::fs::read_to_string(&path).unwrap().replace("\"qwen3\"", "\"mamba\"");
    std::fs::write(&path, config).unwrap();
    assert!(success(output(&["inspect", &text(dir.path())])).contains("NOT SUPPORTED"));
}

#[test]
fn every_tensor_is_listed_with_its_place() {
    let model = golden("qwen3");
    let listed = success(output(&["inspect", &model, "--tensors"]));
    assert!(listed.contains("model.layers.0.self_attn.q_proj.weight") && listed.contains("-of-00003.safetensors @"));
    let found = json(output(&["inspect", &model, "--tensors", "--json"]));
    let tensors = found["tensors"].as_array().unwrap();
    let bytes: u64 = tensors.iter().map(|t| t["bytes"].as_u64().unwrap()).sum();
    assert!(bytes > 0 && bytes < found["file_bytes"].as_u64().unwrap());
}

#[test]
fn a_checkpoint_of_200_gb_is_answered_for_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let (experts, hidden, inner, layers) = (512u64, 4096u64, 1024u64, 16u64);
    let config = serde_json::json!({
        "model_type": "qwen3_moe", "hidden_size": hidden, "num_hidden_layers": layers, "vocab_size": 1000, "num_experts": experts,
        "num_experts_per_tok": 10, "max_position_embeddings": 32768, "num_attention_heads": 32, "num_key_value_heads": 2,
        "head_dim": 128, "moe_intermediate_size": inner, "tie_word_embeddings": true,
    });
    std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    let (mut header, mut at) = (serde_json::Map::new(), 0u64);
    let mut tensor = |name: String, shape: &[u64]| {
        let end = at + 2 * shape.iter().product::<u64>();
        header.insert(name, serde_json::json!({"dtype": "BF16", "shape": shape, "data_offsets": [at, end]}));
        at = end;
    };
    tensor("model.embed_tokens.weight".into(), &[1000, hidden]);
    tensor("model.norm.weight".into(), &[hidden]);
    for l in 0..layers {
        for (name, shape) in [
            ("self_attn.q_proj.weight", &[4096, hidden][..]),
            ("self_attn.k_proj.weight", &[256, hidden]),
            ("self_attn.v_proj.weight", &[256, hidden]),
            ("self_attn.o_proj.weight", &[hidden, 4096]),
            ("self_attn.q_norm.weight", &[128]),
            ("self_attn.k_norm.weight", &[128]),
            ("input_layernorm.weight", &[hidden]),
            ("post_attention_layernorm.weight", &[hidden]),
            ("mlp.gate.weight", &[experts, hidden]),
        ] {
            tensor(format!("model.layers.{l}.{name}"), shape);
        }
        tensor(format!("model.layers.{l}.mlp.experts.gate_up_proj"), &[experts, 2 * inner, hidden]);
        tensor(format!("model.layers.{l}.mlp.experts.down_proj"), &[experts, hidden, inner]);
    }
    let path = dir.path().join("model.safetensors");
    let header = serde_json::Value::Object(header).to_string();
    write_safetensors(&path, &header, 0);
    // Sparse files: nothing of them may be read anyway.
    File::options().write(true).open(&path).unwrap().set_len(8 + header.len() as u64 + at).unwrap();
    let begun = Instant::now();
    let found = json(output(&["inspect", &text(dir.path()), "--json"]));
    // Reading so many zeros takes a minute.
    assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
    assert!(found["file_bytes"].as_u64().unwrap() > 200_000_000_000);
    assert_eq!(found["bytes"]["per_expert"]["low"], 2 * 3 * hidden * inner);
    let per_token = found["bytes_per_token"]["weights"].as_u64().unwrap();
    // Per layer: queries and outputs, keys and values, norms, router, ten experts. Besides them the head, which is also the embedding, one row of it, and the last norm.
    let layer = (2 * 4096 + 2 * 256) * hidden + 2 * 128 + 2 * hidden + experts * hidden + 10 * 3 * hidden * inner;
    assert_eq!(per_token, 2 * (1000 * hidden + 2 * hidden + layers * layer));
    assert_ne!(found["memory"]["fits"], "full_context");
}

#[test]
fn escape_sequences_of_a_checkpoint_are_spelled_out() {
    let dir = copy_of("qwen3_moe_stacked");
    let path = dir.path().join("model.safetensors");
    let bytes = std::fs::read(&path).unwrap();
    let len = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let mut header: serde_json::Map<String, serde_json::Value> = serde_json::from_slice(&bytes[8..8 + len]).unwrap();
    let end = (bytes.len() - 8 - len) as u64;
    let name = "vision.\x1b[31m\u{9b}2Jred";
    let place = serde_json::json!({"dtype": "U8", "shape": [4], "data_offsets": [end, end + 4]});
    header.insert(name.to_owned(), place);
    let header = serde_json::to_vec(&header).unwrap();
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header);
    file.extend(&bytes[8 + len..]);
    file.extend([0; 4]);
    std::fs::write(&path, file).unwrap();
    let folder = text(dir.path());
    let plain = |out: &str| !out.chars().any(|c| c.is_control() && c != '\n');
    for args in [&["inspect", &folder][..], &["inspect", &folder, "--tensors"]] {
        let out = success(output(args));
        assert!(out.contains(r"vision.\u{1b}[31m\u{9b}2Jred") && plain(&out), "{out:?}");
    }
    let out = success(output(&["inspect", &folder, "--tensors", "--json"]));
    assert!(plain(&out), "{out:?}");
    let found: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert!(found["tensors"].as_array().unwrap().iter().any(|t| t["name"] == name));

    let config = dir.path().join("config.json");
    let text = std::fs::read_to_string(&config).unwrap().replace("\"qwen3_moe\"", "\"\\u001b[31mqwen\"");
    std::fs::write(&config, text).unwrap();
    let out = output(&["inspect", &folder]);
    assert!(plain(&stdout(&out)) && plain(&stderr(&out)), "{out:?}");
}
