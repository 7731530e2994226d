//! What the metadata of families with Mamba-2 layers, and of Granite's mixtures, says. Their tensors tell which layer is which, and most widths.

use anyhow::{Result, anyhow};
use serde_json::{Map, Value as Json, json};

use super::family;
use super::keys::Keys;

type Config = Map<String, Json>;

/// Whether a layer has a tensor.
fn has(keys: &Keys, layer: u64, part: &str) -> bool {
    keys.has(&format!("blk.{layer}.{part}"))
}

/// The rows of each matrix of the first tensor `part`, if any of the layers has it.
fn rows(keys: &Keys, layers: u64, part: &str) -> Result<Option<usize>> {
    let Some(layer) = (0..layers).find(|&layer| has(keys, layer, part)) else { return Ok(None) };
    let tensor = keys.tensor(&format!("blk.{layer}.{part}"))?;
    let at = tensor.shape.len().checked_sub(2);
    let found = at.map(|at| tensor.shape[at]);
    let path = keys.metadata.path().display();
    found.map(Some).ok_or_else(|| anyhow!("{path}: tensor {:?} has shape {:?}", tensor.name, tensor.shape))
}

/// The sizes of Mamba-2: heads, elements of a head, groups, elements of a state, taps.
fn state_space(keys: &Keys) -> Result<[u64; 5]> {
    let (heads, inner) = (keys.size("ssm.time_step_rank")?, keys.size("ssm.inner_size")?);
    let head_dim = inner.checked_div(heads).filter(|dim| dim * heads == inner);
    let wrong = || keys.wrong("ssm.inner_size", &format!("is {inner}, not a multiple of its {heads} heads"));
    let head_dim = head_dim.ok_or_else(wrong)?;
    Ok([heads, head_dim, keys.size("ssm.group_count")?, keys.size("ssm.state_size")?, keys.size("ssm.conv_kernel")?])
}

/// Nemotron-H and Nemotron 3.
pub fn nemotron(keys: &Keys, layers: u64, config: &mut Config) -> Result<()> {
    let kind = |layer: u64| -> Result<Json> {
        let kinds = [
            ("ssm_in.weight", "linear_attention"),
            ("attn_q.weight", "full_attention"),
            ("ffn_gate_inp.weight", "moe"),
            ("ffn_up.weight", "mlp"),
        ];
        let found = kinds.into_iter().find(|(part, _)| has(keys, layer, part)).map(|(_, kind)| json!(kind));
        found.ok_or_else(|| anyhow!("{}: layer {layer} has no block that is known", keys.metadata.path().display()))
    };
    config.insert("layers_block_type".into(), (0..layers).map(kind).collect::<Result<_>>()?);
    if (0..layers).any(|layer| has(keys, layer, "ssm_in.weight")) {
        let sizes = state_space(keys)?;
        let names = ["mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel"];
        names.into_iter().zip(sizes).for_each(|(name, size)| drop(config.insert(name.into(), json!(size))));
    }
    let mamba = (0..layers).find(|&layer| has(keys, layer, "ssm_in.weight"));
    let mamba_has = |part: &str| mamba.is_some_and(|layer| has(keys, layer, part));
    config.insert("use_bias".into(), json!(mamba_has("ssm_in.bias")));
    config.insert("use_conv_bias".into(), json!(mamba_has("ssm_conv1d.bias")));
    if let Some(eps) = keys.float_if("attention.layer_norm_rms_epsilon")? {
        config.insert("layer_norm_epsilon".into(), json!(eps));
    }
    if let Some(width) = rows(keys, layers, "ffn_up.weight")? {
        config.insert("intermediate_size".into(), json!(width));
    }
    let Some(width) = rows(keys, layers, "ffn_up_exps.weight")? else { return Ok(()) };
    family::mixture_with_shared(keys, config)?;
    if let Some(size) = keys.size_if("moe_latent_size")?.filter(|size| *size > 0) {
        config.insert("moe_latent_size".into(), json!(size));
    }
    config.insert("moe_intermediate_size".into(), json!(width));
    let shared = rows(keys, layers, "ffn_up_shexp.weight")?;
    config.insert("moe_shared_expert_intermediate_size".into(), json!(shared));
    Ok(())
}

/// Granite's mixtures, and Granite 4.
pub fn granite(keys: &Keys, layers: u64, config: &mut Config) -> Result<()> {
    family::granite(keys, config)?;
    let experts = keys.size_if("expert_count")?.unwrap_or(0);
    let (shared, routed) = (rows(keys, layers, "ffn_up_shexp.weight")?, rows(keys, layers, "ffn_up_exps.weight")?);
    let mamba = (0..layers).find(|&layer| has(keys, layer, "ssm_in.weight"));
    if experts > 0 {
        config.insert("num_experts_per_tok".into(), json!(keys.size("expert_used_count")?));
        config.insert("intermediate_size".into(), json!(routed));
    }
    config.insert("num_local_experts".into(), json!(experts));
    if mamba.is_none() && shared.is_none() && experts > 0 {
        config.insert("model_type".into(), json!("granitemoe"));
        return Ok(());
    }
    let width = if experts > 0 { shared } else { rows(keys, layers, "ffn_up.weight")? };
    config.insert("shared_intermediate_size".into(), json!(width));
    let kind = |layer| if has(keys, layer, "ssm_in.weight") { "mamba" } else { "attention" };
    config.insert("layer_types".into(), (0..layers).map(kind).collect());
    config.entry("position_embedding_type").or_insert(json!("rope"));
    if let Some(layer) = mamba {
        let sizes = state_space(keys)?;
        let hidden = keys.size("embedding_length")?;
        let inner = sizes[0] * sizes[1];
        let expand = inner.checked_div(hidden).filter(|expand| expand * hidden == inner);
        let wrong = || keys.wrong("ssm.inner_size", &format!("is {inner}, not a multiple of {hidden}"));
        config.insert("mamba_expand".into(), json!(expand.ok_or_else(wrong)?));
        let names = ["mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv"];
        names.into_iter().zip(sizes).for_each(|(name, size)| drop(config.insert(name.into(), json!(size))));
        config.insert("mamba_conv_bias".into(), json!(has(keys, layer, "ssm_conv1d.bias")));
        config.insert("mamba_proj_bias".into(), json!(has(keys, layer, "ssm_in.bias")));
    }
    Ok(())
}
