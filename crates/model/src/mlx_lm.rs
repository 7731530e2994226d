//! What `mlx_lm` expects of a packed model: a prefix of tensor names, and keys of the config. It differs by architecture, so each architecture's file says it.

use serde_json::{Value, json};

use crate::config::Config;

/// What `mlx_lm` expects of an architecture's models.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct MlxLm {
    /// The prefix of all tensor names (see [`MlxLm::full`]): `language_model.` where it expects the text part of a multimodal model.
    pub prefix: &'static str,
    /// Keys that it needs in the text model's config and that this config spells another way.
    pub keys: Vec<(&'static str, Value)>,
    /// It cannot run this model's order of layers.
    pub refuses_order: bool,
}

impl MlxLm {
    /// Its name for what the text model calls `short`.
    pub fn full(&self, short: &str) -> String {
        let body = if matches!(short.split('.').next(), Some("lm_head" | "mtp")) { "" } else { "model." };
        format!("{}{body}{short}", self.prefix)
    }

    /// With those of `keys` that the config lacks.
    pub(crate) fn new(config: &Config, prefix: &'static str, keys: Vec<(&'static str, Option<Value>)>) -> MlxLm {
        let missing = |(key, value): (&'static str, Option<Value>)| Some((key, value?));
        let keys = keys.into_iter().filter_map(missing).filter(|(key, _)| config.get(key).is_none()).collect();
        MlxLm { prefix, keys, refuses_order: false }
    }

    /// Adds the order of attention and recurrent layers. `mlx_lm` can only run models whose every n-th layer is attention.
    pub(crate) fn ordered(mut self, config: &Config, is_attention: &[bool]) -> MlxLm {
        let Some(_) = config.get("layer_types") else { return self };
        let interval = is_attention.iter().position(|&a| a).map(|first| first + 1);
        let regular = |n: &usize| is_attention.iter().enumerate().all(|(i, &a)| a == (i + 1).is_multiple_of(*n));
        match interval.filter(regular) {
            Some(n) if config.get("full_attention_interval").is_none() => {
                self.keys.insert(0, ("full_attention_interval", json!(n)));
            }
            Some(_) => {}
            None => self.refuses_order = true,
        }
        self
    }
}

/// `rope_theta` and `rope_scaling` from `rope_parameters`, for architectures whose newer style `mlx_lm` does not read.
pub(crate) fn rotary_keys(config: &Config) -> [(&'static str, Option<Value>); 2] {
    let rope = config.get("rope_parameters");
    let theta = rope.and_then(|r| r.get("rope_theta")).cloned().unwrap_or(json!(10000.0));
    let scaled = rope.filter(|r| r.get("rope_type").is_some_and(|kind| kind != "default"));
    [("rope_theta", Some(theta)), ("rope_scaling", scaled.cloned())]
}

/// Keys that `mlx_lm` requires for Qwen's mixtures and that newer checkpoints spell another way or leave out. `partial`: the rotated part of a head, if the
/// architecture has such a key.
pub(crate) fn mixture_keys(
    config: &Config,
    partial: Option<f64>,
    renormalise: bool,
) -> Vec<(&'static str, Option<Value>)> {
    let number = |key: &str| config.get(key).and_then(Value::as_u64);
    let head_dim = number("hidden_size").zip(number("num_attention_heads").filter(|&n| n > 0));
    let given = config.get("rope_parameters").and_then(|r| r.get("partial_rotary_factor"));
    let mut keys = vec![("num_experts", config.get("num_local_experts").cloned())];
    keys.extend(rotary_keys(config));
    keys.extend([
        ("partial_rotary_factor", partial.map(|default| given.cloned().unwrap_or(json!(default)))),
        ("head_dim", head_dim.map(|(hidden, heads)| json!(hidden / heads))),
        ("mlp_only_layers", Some(json!([]))),
        ("decoder_sparse_step", Some(json!(1))),
        ("norm_topk_prob", Some(json!(renormalise))),
    ]);
    keys
}
