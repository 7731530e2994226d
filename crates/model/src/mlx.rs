//! How `mlx_lm` wants a model: what stands in front of its tensors' names, and what its config must say. An architecture's own file says so, since `mlx_lm` has
//! its own conventions for each.

use serde_json::{Value, json};

use crate::config::Config;

/// How `mlx_lm` wants a model of an architecture.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Mlx {
    /// In front of all names of tensors (see [`Mlx::full`]): `language_model.` where it takes the text model for a part of a multimodal one.
    pub prefix: &'static str,
    /// Keys of the text model's config that it needs, for configs that say the same in another way.
    pub keys: Vec<(&'static str, Value)>,
    /// It cannot run the model's layers in their order.
    pub refuses_order: bool,
}

impl Mlx {
    /// Its name for what the text model calls `short`.
    pub fn full(&self, short: &str) -> String {
        let body = if short.split('.').next() == Some("lm_head") { "" } else { "model." };
        format!("{}{body}{short}", self.prefix)
    }

    /// A convention with those keys that the config lacks.
    pub(crate) fn new(config: &Config, prefix: &'static str, keys: Vec<(&'static str, Option<Value>)>) -> Mlx {
        let missing = |(key, value): (&'static str, Option<Value>)| Some((key, value?));
        let keys = keys.into_iter().filter_map(missing).filter(|(key, _)| config.get(key).is_none()).collect();
        Mlx { prefix, keys, refuses_order: false }
    }

    /// What it is told of the order of attention and recurrent layers, by layer whether it is attention: that every n-th is, which is all that it knows.
    pub(crate) fn ordered(mut self, config: &Config, is_attention: &[bool]) -> Mlx {
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

/// `rope_theta` and `rope_scaling` of a config that holds both in `rope_parameters`, for models that `mlx_lm` reads in the older style only.
pub(crate) fn rotary_keys(config: &Config) -> [(&'static str, Option<Value>); 2] {
    let rope = config.get("rope_parameters");
    let theta = rope.and_then(|r| r.get("rope_theta")).cloned().unwrap_or(json!(10000.0));
    let scaled = rope.filter(|r| r.get("rope_type").is_some_and(|kind| kind != "default"));
    [("rope_theta", Some(theta)), ("rope_scaling", scaled.cloned())]
}

/// What `mlx_lm` insists on for Qwen's mixtures and newer checkpoints say otherwise or leave to a default; `partial`: of a head that is rotated, where that is a
/// key of the architecture.
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
