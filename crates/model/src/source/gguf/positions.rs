//! What metadata says of positions: how they are scaled.

use anyhow::{Result, bail, ensure};
use serde_json::{Map, Value as Json, json};

use super::keys::Keys;

/// The tables of rotary factors that a file has.
#[derive(Debug, Default)]
pub struct Factors {
    /// For all contexts.
    pub all: Option<Vec<f32>>,
    /// For contexts beyond the original one.
    pub long: Option<Vec<f32>>,
    /// For others.
    pub short: Option<Vec<f32>>,
}

/// Scaling of positions, in the keys of `rope_scaling`.
pub fn scaling(keys: &Keys, factors: &Factors) -> Result<Option<Map<String, Json>>> {
    let factor = match keys.float_if("rope.scaling.factor")? {
        Some(factor) => Some(factor),
        None => keys.float_if("rope.scale_linear")?,
    };
    let factor = factor.filter(|&f| f != 0.0 && f != 1.0);
    let kind = keys.string_if("rope.scaling.type")?.unwrap_or("linear");
    let mut rope = Map::new();
    let mut set = |key: &str, value: Json| rope.insert(key.to_owned(), value);
    match (kind, factor) {
        ("none", _) | ("linear", None) => {}
        // Its tables are tensors.
        ("longrope", _) if factors.long.is_some() => {}
        ("linear", Some(factor)) => {
            set("rope_type", json!("linear"));
            set("factor", json!(factor));
        }
        ("yarn", factor) => {
            let factor = factor.unwrap_or(1.0);
            set("rope_type", json!("yarn"));
            set("factor", json!(factor));
            if let Some(original) = keys.size_if("rope.scaling.original_context_length")? {
                set("original_max_position_embeddings", json!(original));
            }
            for (ours, theirs) in [("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")] {
                if let Some(beta) = keys.float_if(&format!("rope.scaling.{theirs}"))? {
                    set(ours, json!(beta));
                }
            }
            let scaled = match keys.float_if("rope.scaling.yarn_attn_factor")? {
                Some(scaled) => Some(scaled),
                None => keys.float_if("rope.scaling.attn_factor")?,
            };
            if let Some(scaled) = scaled.filter(|&s| s != 1.0) {
                let own = if factor <= 1.0 { 1.0 } else { 0.1 * libm::log(factor) + 1.0 };
                set("attention_factor", json!(scaled * own));
            }
        }
        (kind, _) => bail!(
            keys.wrong("rope.scaling.type", &format!("is {kind:?}, which is not supported (none, linear, yarn are)"))
        ),
    }
    // Llama 3's scaling, computed beforehand: each frequency is divided by a number of its own. LongRoPE has a table for long contexts, too.
    let tables = match (&factors.all, &factors.long, &factors.short) {
        (Some(all), _, _) => Some((all, all, 1.0)),
        (None, Some(long), Some(short)) => {
            Some((long, short, keys.float_if("rope.scaling.attn_factor")?.unwrap_or(1.0)))
        }
        _ => None,
    };
    if let Some((long, short, attention_factor)) = tables {
        ensure!(
            rope.is_empty(),
            "{}: a table of rotary factors beside another scaling",
            keys.metadata.path().display()
        );
        rope.insert("rope_type".into(), json!("longrope"));
        rope.insert("attention_factor".into(), json!(attention_factor));
        rope.insert("short_factor".into(), json!(short));
        rope.insert("long_factor".into(), json!(long));
        if let Some(original) = keys.size_if("rope.scaling.original_context_length")? {
            rope.insert("original_max_position_embeddings".into(), json!(original));
        }
    }
    Ok(Some(rope).filter(|rope| !rope.is_empty()))
}
