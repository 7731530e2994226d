//! `config.json` of the packed folder: the input's, with `quantization` as `mlx_lm.convert` writes it and the few keys that
//! `mlx_lm` insists on where newer checkpoints say the same in another way.

use std::path::Path;

use anyhow::{Result, anyhow};
use serde_json::{Map, Value, json};

use super::plan::Plan;
use super::rules::{Rules, Width};

/// The text of the new config. `folder` is the input's.
pub fn packed(folder: &Path, plan: &Plan, rules: &Rules) -> Result<String> {
    let path = folder.join("config.json");
    let text = std::fs::read(&path).map_err(|e| anyhow!("{}: {e}", path.display()))?;
    let root: Value = serde_json::from_slice(&text).map_err(|e| anyhow!("{}: not JSON: {e}", path.display()))?;
    let Value::Object(mut root) = root else { return Err(anyhow!("{}: not a JSON object", path.display())) };
    root.shift_remove("_name_or_path");
    // Its tensors stay behind.
    root.shift_remove("vision_config");
    for_mlx(&mut root);
    quantization(&mut root, plan, rules);
    Ok(serde_json::to_string_pretty(&root)? + "\n")
}

/// Says how modules are quantised: a default for all that have scales, and those that differ by name.
fn quantization(root: &mut Map<String, Value>, plan: &Plan, rules: &Rules) {
    let given = root.shift_remove("quantization").or_else(|| root.shift_remove("quantization_config"));
    root.shift_remove("quantization_config");
    if !plan.quantizes && plan.copied == 0 {
        return;
    }
    let (bits, group, mode) = match &given {
        Some(Value::Object(q)) => (q.get("bits").cloned(), q.get("group_size").cloned(), q.get("mode").cloned()),
        _ => (None, None, None),
    };
    let mut all = Map::new();
    all.insert("group_size".into(), group.unwrap_or(json!(rules.group)));
    all.insert("bits".into(), bits.unwrap_or(json!(rules.bits)));
    all.insert("mode".into(), mode.unwrap_or(json!("affine")));
    for (module, width) in &plan.overrides {
        let entry = match width {
            Width::Affine { bits, group } => json!({"group_size": group, "bits": bits}),
            Width::Plain => json!(false),
        };
        all.insert(module.clone(), entry);
    }
    root.insert("quantization".into(), Value::Object(all.clone()));
    // Where Hugging Face's model pages look.
    root.insert("quantization_config".into(), Value::Object(all));
}

/// Adds what `mlx_lm` reads under another key, or at another level.
fn for_mlx(root: &mut Map<String, Value>) {
    let root_tied = root.get("tie_word_embeddings").cloned();
    let flat = !root.get("text_config").is_some_and(Value::is_object);
    // A text model of its own is, for `mlx_lm`, the whole without `text_config`.
    if let Some(Value::String(kind)) = root.get_mut("model_type").filter(|_| flat) {
        kind.truncate(kind.strip_suffix("_text").unwrap_or(kind).len());
    }
    let family = root.get("model_type").and_then(Value::as_str).unwrap_or_default().to_owned();
    let text = match root.get_mut("text_config") {
        Some(Value::Object(text)) => text,
        _ => root,
    };
    let get = |text: &Map<String, Value>, key: &str| text.get(key).filter(|v| !v.is_null()).cloned();
    let interval = get(text, "layer_types").and_then(|types| attention_interval(&types));
    let mut wanted = vec![
        ("tie_word_embeddings", Some(root_tied.unwrap_or(json!(false)))),
        ("full_attention_interval", interval.map(|n| json!(n))),
    ];
    if matches!(family.as_str(), "qwen3_moe" | "qwen3_next") {
        let is_next = family == "qwen3_next";
        let rope = get(text, "rope_parameters");
        let of_rope = |key: &str| rope.as_ref().and_then(|r| r.get(key)).cloned();
        let scaled = of_rope("rope_type").is_some_and(|kind| kind != "default");
        let number = |key: &str| get(text, key).and_then(|v| v.as_u64());
        let head_dim = number("hidden_size").zip(number("num_attention_heads").filter(|&n| n > 0));
        wanted.extend([
            ("num_experts", get(text, "num_local_experts")),
            ("rope_theta", of_rope("rope_theta").or(Some(json!(10000.0)))),
            ("rope_scaling", rope.clone().filter(|_| scaled)),
            ("partial_rotary_factor", of_rope("partial_rotary_factor").or(Some(json!(0.25))).filter(|_| is_next)),
            ("head_dim", head_dim.map(|(hidden, heads)| json!(hidden / heads))),
            ("mlp_only_layers", Some(json!([]))),
            ("decoder_sparse_step", Some(json!(1))),
            ("norm_topk_prob", Some(json!(is_next))),
        ]);
    }
    for (key, value) in wanted {
        if let (None, Some(value)) = (get(text, key), value) {
            text.insert(key.to_owned(), value);
        }
    }
}

/// n, where every n-th of `types` is full attention and the others are linear.
fn attention_interval(types: &Value) -> Option<usize> {
    let full: Vec<bool> = types.as_array()?.iter().map(|t| t == "full_attention").collect();
    let linear = types.as_array()?.iter().any(|t| t == "linear_attention");
    let interval = full.iter().position(|&f| f)? + 1;
    let regular = full.iter().enumerate().all(|(i, &f)| f == (i + 1).is_multiple_of(interval));
    (linear && regular).then_some(interval)
}

/// Whether `mlx_lm` can run layers in this order: it knows only every n-th layer with attention.
pub fn mlx_knows_layers(config: &sluice_model::Config) -> bool {
    config.get("layer_types").is_none_or(|types| {
        let linear = types.as_array().is_some_and(|t| t.iter().any(|t| t == "linear_attention"));
        !linear || attention_interval(types).is_some()
    })
}
