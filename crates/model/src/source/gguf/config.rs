//! Hugging Face's config keys, made from metadata.

use std::collections::HashMap;

use anyhow::{Result, ensure};
use serde_json::{Map, Value as Json, json};

use super::header::TensorInfo;
use super::keys::Keys;
use super::metadata::{Metadata, Value};
use super::positions::{self, Factors};
use super::{family, hybrids, latent, streams};

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
    Gemma2,
    Gemma3,
    Gemma4,
    GptOss,
    Mistral3,
    Phi3,
    Granite,
    GraniteMoe,
    GraniteHybrid,
    NemotronH,
    NemotronHMoe,
    SmolLm3,
    Olmo2,
    MiniMaxM2,
    Glm4,
    Glm4Moe,
    DeepSeek2,
    DeepSeek32,
    GlmDsa,
    Mistral4,
    KimiLinear,
    KimiK3,
    Glm5Next,
    DeepSeek4,
    Qwen4Exp,
}

use Architecture::{
    DeepSeek2, DeepSeek4, DeepSeek32, Gemma2, Gemma3, Gemma4, Glm4, Glm4Moe, Glm5Next, GlmDsa, GptOss, Granite,
    GraniteHybrid, GraniteMoe, KimiK3, KimiLinear, Llama, MiniMaxM2, Mistral3, Mistral4, NemotronH, NemotronHMoe,
    Olmo2, Phi3, Qwen2, Qwen3, Qwen3Moe, Qwen3Next, Qwen4Exp, Qwen35, Qwen35Moe, SmolLm3,
};

/// Each with its name in files, and the `model_type` of its config.
const ALL: [(Architecture, &str, &str); 32] = [
    (Llama, "llama", "llama"),
    (Qwen2, "qwen2", "qwen2"),
    (Qwen3, "qwen3", "qwen3"),
    (Qwen3Moe, "qwen3moe", "qwen3_moe"),
    (Qwen3Next, "qwen3next", "qwen3_next"),
    (Qwen35, "qwen35", "qwen3_5_text"),
    (Qwen35Moe, "qwen35moe", "qwen3_5_moe_text"),
    (Gemma2, "gemma2", "gemma2"),
    (Gemma3, "gemma3", "gemma3_text"),
    (Gemma4, "gemma4", "gemma4_text"),
    (GptOss, "gpt-oss", "gpt_oss"),
    (Mistral3, "mistral3", "mistral"),
    (Phi3, "phi3", "phi3"),
    (Granite, "granite", "granite"),
    (GraniteMoe, "granitemoe", "granitemoehybrid"),
    (GraniteHybrid, "granitehybrid", "granitemoehybrid"),
    (NemotronH, "nemotron_h", "nemotron_h"),
    (NemotronHMoe, "nemotron_h_moe", "nemotron_h"),
    (SmolLm3, "smollm3", "smollm3"),
    (Olmo2, "olmo2", "olmo2"),
    (MiniMaxM2, "minimax-m2", "minimax_m2"),
    (Glm4, "glm4", "glm4"),
    (Glm4Moe, "glm4moe", "glm4_moe"),
    // And Kimi-K2, and GLM-4.7-Flash.
    (DeepSeek2, "deepseek2", "deepseek_v3"),
    (DeepSeek32, "deepseek32", "deepseek_v32"),
    (GlmDsa, "glm-dsa", "glm_moe_dsa"),
    (Mistral4, "mistral4", "mistral4"),
    (KimiLinear, "kimi-linear", "kimi_linear"),
    (KimiK3, "kimi-k3", "kimi_k3"),
    (Glm5Next, "glm5-next", "glm5_next"),
    (DeepSeek4, "deepseek4", "deepseek_v4"),
    (Qwen4Exp, "qwen4exp", "qwen4_exp_text"),
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

    /// What is said of this architecture.
    pub fn keys<'a>(self, metadata: &'a Metadata, tensors: &'a HashMap<&'a str, &'a TensorInfo>) -> Keys<'a> {
        Keys { metadata, prefix: self.entry().0, tensors }
    }

    fn is_hybrid(self) -> bool {
        matches!(self, Qwen3Next | Qwen35 | Qwen35Moe | Qwen4Exp)
    }

    /// Whether llama.cpp's converter moves rows of q and k so that rotated pairs are beside each other.
    pub fn moves_pairs(self) -> bool {
        matches!(self, Llama | Mistral3 | Granite | GraniteMoe | GraniteHybrid | SmolLm3)
    }

    /// Whether gate and up are rows of one matrix, and q, k and v.
    pub fn joins(self) -> (bool, bool) {
        (matches!(self, Phi3 | Glm4), self == Phi3)
    }

    /// Whether gate and up of dense parts and of shared experts are matrices of their own, which are one elsewhere.
    pub fn divides_joined(self) -> bool {
        matches!(self, GraniteMoe | GraniteHybrid)
    }

    /// Whether attention is latent: its sizes have keys of their own.
    fn is_latent(self) -> bool {
        matches!(self, DeepSeek2 | DeepSeek32 | GlmDsa | Mistral4 | KimiLinear | KimiK3 | Glm5Next)
    }

    /// Whether a part of a head may be rotated.
    fn may_rotate_parts(self) -> bool {
        self.is_hybrid() || matches!(self, Phi3 | MiniMaxM2 | Glm4 | Glm4Moe)
    }

    /// Whether llama.cpp's converter tiles the value heads of its recurrent layers.
    pub fn tiles_value_heads(self) -> bool {
        matches!(self, Qwen35 | Qwen35Moe | Qwen4Exp)
    }
}

/// The config of the model with these tensors. `factors`: the tables of rotary factors.
///
/// # Errors
/// Keys that are missing, contradictory or not supported. The message names the file and the key.
pub fn json(
    architecture: Architecture,
    metadata: &Metadata,
    tensors: &HashMap<&str, &TensorInfo>,
    factors: &Factors,
) -> Result<Json> {
    let keys = architecture.keys(metadata, tensors);
    let mut config = Map::new();
    let mut set = |key: &str, value: Json| config.insert(key.to_owned(), value);

    // 1. sizes
    let embedding = keys.tensor("token_embd.weight")?;
    let (heads, hidden) = (keys.size("attention.head_count")?, keys.size("embedding_length")?);
    let head_dim = match keys.size_if("attention.key_length")? {
        Some(length) => length,
        None => hidden.checked_div(heads).ok_or_else(|| keys.wrong("attention.head_count", "is 0"))?,
    };
    if !architecture.is_latent() && keys.size_if("attention.value_length")?.is_some_and(|length| length != head_dim) {
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
    // Gemma 4's differ from layer to layer: see below.
    if architecture != Gemma4 {
        set("num_key_value_heads", json!(keys.size_if("attention.head_count_kv")?.unwrap_or(heads)));
    }
    set("head_dim", json!(head_dim));
    set("max_position_embeddings", json!(keys.size("context_length")?));
    set("tie_word_embeddings", json!(!keys.has("output.weight")));
    if let Some(eps) = keys.float_if("attention.layer_norm_rms_epsilon")? {
        set("rms_norm_eps", json!(eps));
    }
    if architecture != Gemma4
        && let Some(width) = keys.size_if("feed_forward_length")?.filter(|&width| width > 0)
    {
        set("intermediate_size", json!(width));
    }
    if matches!(architecture, Llama | Granite | GraniteMoe | SmolLm3 | Glm4 | Glm4Moe) {
        set("attention_bias", json!(keys.has("blk.0.attn_q.bias")));
    }
    for (key, name) in [("eos_token_id", "eos"), ("bos_token_id", "bos"), ("pad_token_id", "padding")] {
        if let Some(id) = metadata.unsigned(&format!("tokenizer.ggml.{name}_token_id"))? {
            set(key, json!(id));
        }
    }
    // 2. positions
    let theta = keys.float_if("rope.freq_base")?.unwrap_or(10_000.0);
    set("rope_theta", json!(theta));
    // Its table says which part of a head is rotated.
    let none = Factors::default();
    let mut rope = positions::scaling(&keys, if architecture == Gemma4 { &none } else { factors })?;
    let rotated = keys.size_if("rope.dimension_count")?.unwrap_or(head_dim);
    if architecture.is_latent() || architecture == DeepSeek4 {
        // A size of its own; see below.
    } else if architecture.may_rotate_parts() {
        let part = rotated as f64 / head_dim.max(1) as f64;
        set("partial_rotary_factor", json!(part));
        if let Some(rope) = &mut rope {
            rope.insert("partial_rotary_factor".into(), json!(part));
        }
    } else if rotated != head_dim && !matches!(architecture, NemotronH | NemotronHMoe) {
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
        Llama if keys.size_if("expert_count")?.is_some_and(|count| count > 0) => family::mixtral(&keys, &mut more)?,
        Llama | Qwen2 | Qwen3 | SmolLm3 => ensure_dense(&keys)?,
        Phi3 => {
            ensure_dense(&keys)?;
            if let Some(window) = keys.size_if("attention.sliding_window")?.filter(|&window| window > 0) {
                more.insert("sliding_window".into(), json!(window));
            }
        }
        Mistral3 => {
            ensure_dense(&keys)?;
            family::mistral3(&keys, theta, &mut more)?;
        }
        Granite => {
            ensure_dense(&keys)?;
            family::granite(&keys, &mut more)?;
        }
        GraniteMoe | GraniteHybrid => hybrids::granite(&keys, layers, &mut more)?,
        NemotronH | NemotronHMoe => hybrids::nemotron(&keys, layers, &mut more)?,
        Olmo2 => family::olmo(&keys, layers, &mut more)?,
        MiniMaxM2 => family::minimax(&keys, &mut more)?,
        Glm4 => {
            ensure_dense(&keys)?;
            let sections = keys.key("rope.dimension_sections");
            ensure!(metadata.get(&sections).is_none(), metadata.wrong(&sections, "is there: that of images"));
        }
        Glm4Moe => family::glm4_moe(&keys, &mut more)?,
        DeepSeek2 | Mistral4 => {
            latent::deepseek(&keys, (heads, rotated), config.get_mut("rope_scaling"), &mut more)?;
        }
        DeepSeek32 | GlmDsa => {
            latent::deepseek(&keys, (heads, rotated), config.get_mut("rope_scaling"), &mut more)?;
            latent::indexer(&keys, layers, &mut more)?;
        }
        KimiLinear => latent::kimi(&keys, layers, (heads, rotated), &mut more)?,
        KimiK3 => latent::kimi_k3(&keys, layers, (heads, rotated), &mut more)?,
        Qwen3Moe => mixture(&keys, &mut more)?,
        Glm5Next => streams::glm(&keys, layers, (heads, rotated), &mut more)?,
        DeepSeek4 => streams::deepseek(&keys, layers, rotated, &mut more)?,
        Qwen3Next | Qwen35Moe | Qwen4Exp => {
            mixture(&keys, &mut more)?;
            more.insert(
                "shared_expert_intermediate_size".into(),
                json!(keys.size("expert_shared_feed_forward_length")?),
            );
            recurrent(&keys, layers, &mut more)?;
            if architecture == Qwen4Exp {
                streams::qwen(&keys, &mut more)?;
            }
        }
        Qwen35 => recurrent(&keys, layers, &mut more)?,
        Gemma2 | Gemma3 => gemma(&keys, (architecture, layers), (heads, hidden, head_dim), &mut more)?,
        Gemma4 => family::gemma4(&keys, (layers, heads, head_dim), theta, factors.all.as_deref(), &mut more)?,
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
    (architecture, layers): (Architecture, u64),
    (heads, hidden, head_dim): (u64, u64, u64),
    more: &mut Map<String, Json>,
) -> Result<()> {
    /// Layers of the 27B models, the ones whose scores are scaled by something else than the size of heads; no key says so.
    const LAYERS_OF_27B: [(Architecture, u64); 2] = [(Gemma2, 46), (Gemma3, 62)];
    let mut set = |key: &str, value: Json| more.insert(key.to_owned(), value);
    let is_27b = LAYERS_OF_27B.contains(&(architecture, layers));
    set("hidden_activation", json!("gelu_pytorch_tanh"));
    set("query_pre_attn_scalar", json!(if is_27b { hidden / heads.max(1) } else { head_dim }));
    set("rope_local_base_freq", json!(keys.float_if("rope.freq_base_swa")?.unwrap_or(10_000.0)));
    if let Some(window) = keys.size_if("attention.sliding_window")?.filter(|&window| window > 0) {
        set("sliding_window", json!(window));
    }
    const PATTERN: &str = "attention.sliding_window_pattern";
    match keys.metadata.get(&keys.key(PATTERN)) {
        Some(Value::Array(_)) => {
            let windowed = keys.metadata.integers(&keys.key(PATTERN))?.unwrap_or_default();
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
