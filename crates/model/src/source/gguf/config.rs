//! Hugging Face's config keys, made from metadata.

use std::collections::HashMap;

use anyhow::{Result, anyhow, bail, ensure};
use serde_json::{Map, Value as Json, json};

use super::header::TensorInfo;
use super::metadata::{Metadata, Value};

/// The architectures whose metadata is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Architecture {
    Llama,
    Qwen2,
    Qwen3,
    Qwen3Moe,
    Qwen3Next,
    Qwen35,
    Qwen35Moe,
    Gemma3,
    GptOss,
}

use Architecture::{Gemma3, GptOss, Llama, Qwen2, Qwen3, Qwen3Moe, Qwen3Next, Qwen35, Qwen35Moe};

/// Each with its name in files, and the `model_type` of its config.
const ALL: [(Architecture, &str, &str); 9] = [
    (Llama, "llama", "llama"),
    (Qwen2, "qwen2", "qwen2"),
    (Qwen3, "qwen3", "qwen3"),
    (Qwen3Moe, "qwen3moe", "qwen3_moe"),
    (Qwen3Next, "qwen3next", "qwen3_next"),
    (Qwen35, "qwen35", "qwen3_5_text"),
    (Qwen35Moe, "qwen35moe", "qwen3_5_moe_text"),
    (Gemma3, "gemma3", "gemma3_text"),
    (GptOss, "gpt-oss", "gpt_oss"),
];

const ARCHITECTURE: &str = "general.architecture";

impl Architecture {
    /// The architecture that the metadata names.
    ///
    /// # Errors
    /// None, or one that is not supported: the message lists those that are.
    pub fn of(metadata: &Metadata) -> Result<Architecture> {
        let name = metadata.string(ARCHITECTURE)?.ok_or_else(|| metadata.wrong(ARCHITECTURE, "is missing"))?;
        match ALL.into_iter().find(|(_, known, _)| *known == name) {
            Some((architecture, ..)) => Ok(architecture),
            None => {
                let all = ALL.map(|(_, name, _)| name).join(", ");
                Err(metadata.wrong(ARCHITECTURE, &format!("is {name:?}, which is not supported (supported are {all})")))
            }
        }
    }

    fn entry(self) -> (&'static str, &'static str) {
        let (_, name, model_type) = ALL.into_iter().find(|(known, ..)| *known == self).expect("in the list");
        (name, model_type)
    }

    /// The key that is `name` for this architecture.
    pub fn key(self, name: &str) -> String {
        format!("{}.{name}", self.entry().0)
    }

    fn is_hybrid(self) -> bool {
        matches!(self, Qwen3Next | Qwen35 | Qwen35Moe)
    }

    /// Whether llama.cpp's converter tiles the value heads of its recurrent layers.
    pub fn tiles_value_heads(self) -> bool {
        matches!(self, Qwen35 | Qwen35Moe)
    }
}

/// Metadata of one architecture.
struct Keys<'a> {
    metadata: &'a Metadata,
    architecture: Architecture,
    tensors: &'a HashMap<&'a str, &'a TensorInfo>,
}

impl Keys<'_> {
    fn wrong(&self, name: &str, what: &str) -> anyhow::Error {
        self.metadata.wrong(&self.architecture.key(name), what)
    }

    /// A count or size, if it is there. Where the key has a value for each layer, those above 0 must be equal.
    fn size_if(&self, name: &str) -> Result<Option<u64>> {
        let key = self.architecture.key(name);
        if !matches!(self.metadata.get(&key), Some(Value::Array(_))) {
            return self.metadata.unsigned(&key);
        }
        let each = self.metadata.integers(&key)?.unwrap_or_default();
        let mut above = each.iter().copied().filter(|&n| n != 0);
        let first = above.next().unwrap_or(0);
        if above.any(|n| n != first) {
            return Err(self.wrong(name, "differs from layer to layer, which is not supported"));
        }
        u64::try_from(first).map(Some).map_err(|_| self.wrong(name, "has numbers below 0"))
    }

    fn size(&self, name: &str) -> Result<u64> {
        self.size_if(name)?.ok_or_else(|| self.wrong(name, "is missing"))
    }

    fn float_if(&self, name: &str) -> Result<Option<f64>> {
        self.metadata.float(&self.architecture.key(name))
    }

    fn string_if(&self, name: &str) -> Result<Option<&str>> {
        self.metadata.string(&self.architecture.key(name))
    }

    fn tensor(&self, name: &str) -> Result<&TensorInfo> {
        let found = self.tensors.get(name).copied();
        found.ok_or_else(|| anyhow!("{}: no tensor {name:?}", self.metadata.path().display()))
    }

    fn has(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }
}

/// The config of the model with these tensors. `factors`: of the table of rotary factors, if there is one.
///
/// # Errors
/// Keys that are missing, contradictory or not supported. The message names the file and the key.
pub fn json(
    architecture: Architecture,
    metadata: &Metadata,
    tensors: &HashMap<&str, &TensorInfo>,
    factors: Option<&[f32]>,
) -> Result<Json> {
    let keys = Keys { metadata, architecture, tensors };
    let mut config = Map::new();
    let mut set = |key: &str, value: Json| config.insert(key.to_owned(), value);

    // 1. sizes
    let embedding = keys.tensor("token_embd.weight")?;
    let (heads, hidden) = (keys.size("attention.head_count")?, keys.size("embedding_length")?);
    let head_dim = match keys.size_if("attention.key_length")? {
        Some(length) => length,
        None => hidden.checked_div(heads).ok_or_else(|| keys.wrong("attention.head_count", "is 0"))?,
    };
    if keys.size_if("attention.value_length")?.is_some_and(|length| length != head_dim) {
        return Err(keys.wrong("attention.value_length", "differs from that of keys, which is not supported"));
    }
    let nextn = keys.size_if("nextn_predict_layers")?.unwrap_or(0);
    let blocks = keys.size("block_count")?;
    // Blocks that predict further tokens are counted, and are no layers.
    let layers = blocks.checked_sub(nextn).filter(|&n| (1..=1 << 16).contains(&n));
    let layers = layers
        .ok_or_else(|| keys.wrong("block_count", &format!("is {blocks}, of which {nextn} predict further tokens")))?;
    set("model_type", json!(architecture.entry().1));
    set("vocab_size", json!(embedding.shape.first()));
    set("hidden_size", json!(hidden));
    set("num_hidden_layers", json!(layers));
    set("num_attention_heads", json!(heads));
    set("num_key_value_heads", json!(keys.size_if("attention.head_count_kv")?.unwrap_or(heads)));
    set("head_dim", json!(head_dim));
    set("max_position_embeddings", json!(keys.size("context_length")?));
    set("tie_word_embeddings", json!(!keys.has("output.weight")));
    if let Some(eps) = keys.float_if("attention.layer_norm_rms_epsilon")? {
        set("rms_norm_eps", json!(eps));
    }
    if let Some(width) = keys.size_if("feed_forward_length")?.filter(|&width| width > 0) {
        set("intermediate_size", json!(width));
    }
    if architecture == Llama && keys.has("blk.0.attn_q.bias") {
        set("attention_bias", json!(true));
    }
    for (key, name) in [("eos_token_id", "eos"), ("bos_token_id", "bos"), ("pad_token_id", "padding")] {
        if let Some(id) = metadata.unsigned(&format!("tokenizer.ggml.{name}_token_id"))? {
            set(key, json!(id));
        }
    }
    // 2. positions
    let theta = keys.float_if("rope.freq_base")?.unwrap_or(10_000.0);
    set("rope_theta", json!(theta));
    let mut rope = scaling(&keys, factors)?;
    let rotated = keys.size_if("rope.dimension_count")?.unwrap_or(head_dim);
    if architecture.is_hybrid() {
        let part = rotated as f64 / head_dim.max(1) as f64;
        set("partial_rotary_factor", json!(part));
        if let Some(rope) = &mut rope {
            rope.insert("partial_rotary_factor".into(), json!(part));
        }
    } else if rotated != head_dim {
        return Err(keys
            .wrong("rope.dimension_count", &format!("is {rotated} for heads of {head_dim}, which is not supported")));
    }
    if let Some(rope) = rope.as_mut().filter(|rope| architecture == GptOss && rope["rope_type"] == "yarn") {
        // No key says so.
        rope.insert("truncate".into(), json!(false));
    }
    if let Some(mut rope) = rope {
        rope.insert("rope_theta".into(), json!(theta));
        set("rope_scaling", Json::Object(rope));
    }
    // 3. what only some have
    let mut more = Map::new();
    match architecture {
        Llama | Qwen2 | Qwen3 => {
            ensure_dense(&keys)?;
        }
        Qwen3Moe => mixture(&keys, &mut more)?,
        Qwen3Next | Qwen35Moe => {
            mixture(&keys, &mut more)?;
            more.insert(
                "shared_expert_intermediate_size".into(),
                json!(keys.size("expert_shared_feed_forward_length")?),
            );
            recurrent(&keys, layers, &mut more)?;
        }
        Qwen35 => recurrent(&keys, layers, &mut more)?,
        Gemma3 => gemma(&keys, (layers, heads, hidden, head_dim), &mut more)?,
        GptOss => gpt_oss(&keys, &mut more)?,
    }
    config.extend(more);
    Ok(Json::Object(config))
}

fn ensure_dense(keys: &Keys) -> Result<()> {
    match keys.size_if("expert_count")? {
        None | Some(0) => Ok(()),
        Some(count) => {
            Err(keys.wrong("expert_count", &format!("is {count}: this architecture with experts is not supported")))
        }
    }
}

/// Scaling of positions, in the keys of `rope_scaling`.
fn scaling(keys: &Keys, factors: Option<&[f32]>) -> Result<Option<Map<String, Json>>> {
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
    if let Some(factors) = factors {
        ensure!(
            rope.is_empty(),
            "{}: a table of rotary factors beside another scaling",
            keys.metadata.path().display()
        );
        // Llama 3's scaling, computed beforehand: each frequency is divided by a number of its own.
        rope.insert("rope_type".into(), json!("longrope"));
        rope.insert("attention_factor".into(), json!(1.0));
        rope.insert("short_factor".into(), json!(factors));
        rope.insert("long_factor".into(), json!(factors));
    }
    Ok(Some(rope).filter(|rope| !rope.is_empty()))
}

fn mixture(keys: &Keys, more: &mut Map<String, Json>) -> Result<()> {
    let mut set = |key: &str, value: Json| more.insert(key.to_owned(), value);
    set("num_experts", json!(keys.size("expert_count")?));
    set("num_experts_per_tok", json!(keys.size("expert_used_count")?));
    set("moe_intermediate_size", json!(keys.size("expert_feed_forward_length")?));
    // llama.cpp divides by the sum for all of these.
    set("norm_topk_prob", json!(true));
    if let Some(other) = keys.size_if("expert_gating_func")?.filter(|&softmax| softmax > 1) {
        return Err(keys.wrong("expert_gating_func", &format!("is {other}, which is not supported (1 is, a softmax)")));
    }
    if let Some(other) = keys.float_if("expert_weights_scale")?.filter(|&scale| scale != 0.0 && scale != 1.0) {
        return Err(keys.wrong("expert_weights_scale", &format!("is {other}, which is not supported")));
    }
    Ok(())
}

fn gpt_oss(keys: &Keys, more: &mut Map<String, Json>) -> Result<()> {
    /// llama.cpp's number for a softmax of the chosen.
    const SOFTMAX_OF_CHOSEN: u64 = 3;
    let mut set = |key: &str, value: Json| more.insert(key.to_owned(), value);
    set("num_local_experts", json!(keys.size("expert_count")?));
    set("num_experts_per_tok", json!(keys.size("expert_used_count")?));
    set("intermediate_size", json!(keys.size("expert_feed_forward_length")?));
    if let Some(window) = keys.size_if("attention.sliding_window")?.filter(|&window| window > 0) {
        set("sliding_window", json!(window));
    }
    match keys.size_if("expert_gating_func")? {
        None | Some(0 | SOFTMAX_OF_CHOSEN) => Ok(()),
        Some(other) => Err(keys.wrong("expert_gating_func", &format!("is {other}, which is not gpt-oss's"))),
    }
}

fn recurrent(keys: &Keys, layers: u64, more: &mut Map<String, Json>) -> Result<()> {
    let mut set = |key: &str, value: Json| more.insert(key.to_owned(), value);
    let (value_heads, values) = (keys.size("ssm.time_step_rank")?, keys.size("ssm.inner_size")?);
    let value_dim = values.checked_div(value_heads).filter(|dim| dim * value_heads == values);
    let value_dim = value_dim.ok_or_else(|| {
        keys.wrong("ssm.inner_size", &format!("is {values}, not a multiple of its {value_heads} heads"))
    })?;
    set("linear_num_key_heads", json!(keys.size("ssm.group_count")?));
    set("linear_num_value_heads", json!(value_heads));
    set("linear_key_head_dim", json!(keys.size("ssm.state_size")?));
    set("linear_value_head_dim", json!(value_dim));
    set("linear_conv_kernel_dim", json!(keys.size("ssm.conv_kernel")?));
    // The tensors say which layer is which, whatever keys a converter writes.
    let kind = |layer| match keys.has(&format!("blk.{layer}.ssm_a")) {
        true => "linear_attention",
        false => "full_attention",
    };
    set("layer_types", (0..layers).map(kind).collect());
    Ok(())
}

fn gemma(
    keys: &Keys,
    (layers, heads, hidden, head_dim): (u64, u64, u64, u64),
    more: &mut Map<String, Json>,
) -> Result<()> {
    /// Layers of the 27B model, the one whose scores are scaled by something else than the size of heads; no key says so.
    const LAYERS_OF_27B: u64 = 62;
    let mut set = |key: &str, value: Json| more.insert(key.to_owned(), value);
    set("hidden_activation", json!("gelu_pytorch_tanh"));
    set("query_pre_attn_scalar", json!(if layers == LAYERS_OF_27B { hidden / heads.max(1) } else { head_dim }));
    set("rope_local_base_freq", json!(keys.float_if("rope.freq_base_swa")?.unwrap_or(10_000.0)));
    if let Some(window) = keys.size_if("attention.sliding_window")?.filter(|&window| window > 0) {
        set("sliding_window", json!(window));
    }
    const PATTERN: &str = "attention.sliding_window_pattern";
    match keys.metadata.get(&keys.architecture.key(PATTERN)) {
        Some(Value::Array(_)) => {
            let windowed = keys.metadata.integers(&keys.architecture.key(PATTERN))?.unwrap_or_default();
            if (windowed.len() as u64) < layers {
                return Err(keys.wrong(PATTERN, &format!("has {} values for {layers} layers", windowed.len())));
            }
            let kind = |&windowed: &i64| if windowed != 0 { "sliding_attention" } else { "full_attention" };
            set("layer_types", windowed.iter().take(layers as usize).map(kind).collect());
        }
        Some(_) => {
            set("sliding_window_pattern", json!(keys.size(PATTERN)?));
        }
        None => {}
    }
    for (key, name) in
        [("final_logit_softcapping", "final_logit_softcapping"), ("attn_logit_softcapping", "attn_logit_softcapping")]
    {
        if let Some(cap) = keys.float_if(name)?.filter(|&cap| cap != 0.0) {
            set(key, json!(cap));
        }
    }
    Ok(())
}
