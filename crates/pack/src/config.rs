//! `config.json` of the packed folder: the input's, with `quantization` as `mlx_lm.convert` writes it, and keys that `mlx_lm` requires and newer checkpoints
//! spell another way.

use anyhow::Result;
use serde_json::{Map, Value, json};
use sluice_model::{Config, Description};

use crate::conversion::Conversion;
use crate::rules::{Rules, Width};

/// The text of the new config.
///
/// # Errors
/// Never in practice: what was read as JSON can be written.
pub fn packed(input: &Config, description: &Description, conversion: &Conversion, rules: &Rules) -> Result<String> {
    let mut root = input.root().clone();
    root.shift_remove("_name_or_path");
    // Its tensors are not packed.
    root.shift_remove("vision_config");
    for_mlx(&mut root, description);
    quantization(&mut root, conversion, rules);
    Ok(serde_json::to_string_pretty(&root)? + "\n")
}

/// Writes how modules are quantised: a default, and exceptions by name.
fn quantization(root: &mut Map<String, Value>, conversion: &Conversion, rules: &Rules) {
    let given = root.shift_remove("quantization").or_else(|| root.shift_remove("quantization_config"));
    root.shift_remove("quantization_config");
    if let Some(Value::Object(text)) = root.get_mut("text_config") {
        text.shift_remove("quantization_config");
    }
    // Another producer's `quantization_config` says nothing about the output.
    let given = given.filter(|q| q.get("quant_method").is_none());
    if !conversion.quantizes && conversion.copied == 0 {
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
    for (module, width) in &conversion.overrides {
        let entry = match width {
            Width::Affine { bits, group } => json!({"group_size": group, "bits": bits}),
            Width::Mxfp4 => json!({"group_size": 32, "bits": 4, "mode": "mxfp4"}),
            Width::Plain => json!(false),
        };
        all.insert(module.clone(), entry);
    }
    root.insert("quantization".into(), Value::Object(all.clone()));
    // Where Hugging Face's model pages look.
    root.insert("quantization_config".into(), Value::Object(all));
}

/// Adds keys that `mlx_lm` expects under another name or at another level.
fn for_mlx(root: &mut Map<String, Value>, description: &Description) {
    // Both places say what the files say: readers follow one or the other.
    let tied = json!(description.tied);
    if let Some(at_root) = root.get_mut("tie_word_embeddings") {
        *at_root = tied.clone();
    }
    let flat = !root.get("text_config").is_some_and(Value::is_object);
    // For `mlx_lm`, a config without `text_config` is a text model's.
    if let Some(kind) = root.get_mut("model_type").filter(|_| flat) {
        *kind = json!(description.architecture);
    }
    let text = match root.get_mut("text_config") {
        Some(Value::Object(text)) => text,
        _ => root,
    };
    text.insert("tie_word_embeddings".to_owned(), tied);
    for (key, value) in &description.mlx.keys {
        if text.get(*key).is_none_or(Value::is_null) {
            text.insert((*key).to_owned(), value.clone());
        }
    }
}
