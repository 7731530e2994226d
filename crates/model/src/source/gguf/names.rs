//! Names: what GGUF calls the weights that the model calls by Hugging Face's names.

use std::collections::BTreeSet;

/// Parts of a layer: the model's name and GGUF's.
const PARTS: &[(&str, &str)] = &[
    // Before the router, whose name it continues.
    ("mlp.gate.e_score_correction_bias", "exp_probs_b.bias"),
    ("input_layernorm", "attn_norm"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"),
    ("self_attn.q_a_proj", "attn_q_a"),
    ("self_attn.q_a_layernorm", "attn_q_a_norm"),
    ("self_attn.q_b_proj", "attn_q_b"),
    ("self_attn.kv_a_proj_with_mqa", "attn_kv_a_mqa"),
    ("self_attn.kv_a_layernorm", "attn_kv_a_norm"),
    ("self_attn.kv_b_proj", "attn_kv_b"),
    ("self_attn.embed_q", "attn_k_b"),
    ("self_attn.unembed_out", "attn_v_b"),
    ("self_attn.indexer.wq_b", "indexer.attn_q_b"),
    ("self_attn.indexer.wk", "indexer.attn_k"),
    ("self_attn.indexer.weights_proj", "indexer.proj"),
    ("self_attn.indexer.k_norm", "indexer.k_norm"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
    ("mlp.gate", "ffn_gate_inp"),
    // What gpt-oss calls it.
    ("mlp.router", "ffn_gate_inp"),
    ("mlp.shared_expert.gate_proj", "ffn_gate_shexp"),
    ("mlp.shared_expert.up_proj", "ffn_up_shexp"),
    ("mlp.shared_expert.down_proj", "ffn_down_shexp"),
    ("mlp.shared_expert_gate", "ffn_gate_inp_shexp"),
    ("mlp.latent_down_proj", "ffn_latent_down"),
    ("mlp.latent_up_proj", "ffn_latent_up"),
    ("mlp.experts.gate_proj", "ffn_gate_exps"),
    ("mlp.experts.up_proj", "ffn_up_exps"),
    ("mlp.experts.down_proj", "ffn_down_exps"),
    ("mlp.experts.gate_up_proj", "ffn_gate_up_exps"),
    ("eh_proj", "nextn.eh_proj"),
    ("enorm", "nextn.enorm"),
    ("hnorm", "nextn.hnorm"),
    ("shared_head.norm", "nextn.shared_head_norm"),
    ("linear_attn.in_proj_qkvz", "ssm_in"),
    ("linear_attn.in_proj_qkv", "attn_qkv"),
    ("linear_attn.in_proj_z", "attn_gate"),
    ("linear_attn.in_proj_ba", "ssm_ba"),
    ("linear_attn.in_proj_b", "ssm_beta"),
    ("linear_attn.in_proj_a", "ssm_alpha"),
    ("linear_attn.conv1d", "ssm_conv1d"),
    ("linear_attn.A_log", "ssm_a"),
    ("linear_attn.norm", "ssm_norm"),
    ("linear_attn.out_proj", "ssm_out"),
    ("post_feedforward_layernorm_1", "post_ffw_norm_1"),
    ("pre_feedforward_layernorm_2", "pre_ffw_norm_2"),
    ("post_feedforward_layernorm_2", "post_ffw_norm_2"),
    ("per_layer_input_gate", "inp_gate"),
    ("per_layer_projection", "proj"),
    ("post_per_layer_input_norm", "post_norm"),
];

/// Parts of Mamba-2 layers, which share names with those of other recurrent layers.
const MAMBA: &[(&str, &str)] = &[
    ("mamba.in_proj", "ssm_in"),
    ("mamba.conv1d", "ssm_conv1d"),
    ("mamba.A_log", "ssm_a"),
    ("mamba.D", "ssm_d"),
    ("mamba.dt_bias", "ssm_dt.bias"),
    ("mamba.norm", "ssm_norm"),
    ("mamba.out_proj", "ssm_out"),
];

/// Parts of Kimi Delta Attention, which is in place of attention.
const CHANNEL_DELTA: &[(&str, &str)] = &[
    ("self_attn.q_conv1d", "ssm_conv1d_q"),
    ("self_attn.k_conv1d", "ssm_conv1d_k"),
    ("self_attn.v_conv1d", "ssm_conv1d_v"),
    ("self_attn.f_a_proj", "ssm_f_a"),
    ("self_attn.f_b_proj", "ssm_f_b"),
    ("self_attn.g_a_proj", "ssm_g_a"),
    ("self_attn.g_b_proj", "ssm_g_b"),
    ("self_attn.b_proj", "ssm_beta"),
    ("self_attn.A_log", "ssm_a"),
    ("self_attn.dt_bias", "ssm_dt.bias"),
    ("self_attn.o_norm", "ssm_norm"),
];

/// Kimi-K3: gates of full rank, streams that are attended to, experts behind a projection.
const KIMI_K3: &[(&str, &str)] = &[
    ("self_attn.g_proj", "ssm_g"),
    ("self_attention_res_score", "attn_res_score"),
    ("mlp_res_score", "ffn_res_score"),
    ("mlp.latent_down_proj", "ffn_routed_down"),
    ("mlp.latent_norm", "ffn_routed_norm"),
    ("mlp.latent_up_proj", "ffn_routed_up"),
];

/// The gate of latent attention, which has the same name in the model as that of other layers.
const LATENT_GATE: (&str, &str) = ("self_attn.g_proj", "attn_gate");

/// Streams that exchange what they have (DeepSeek-V4, GLM-5.3): vectors, whose whole names differ.
const STREAMS: &[(&str, &str)] = &[
    ("hc_attn_fn", "hc_attn_fn.weight"),
    ("hc_attn_base", "hc_attn_base.weight"),
    ("hc_attn_scale", "hc_attn_scale.weight"),
    ("hc_ffn_fn", "hc_ffn_fn.weight"),
    ("hc_ffn_base", "hc_ffn_base.weight"),
    ("hc_ffn_scale", "hc_ffn_scale.weight"),
];

/// What weighs keys within a pool (GLM-5.3).
const POOLS: &[(&str, &str)] = &[
    ("self_attn.indexer.index_kpool_compress_ape", "indexer_compressor_ape.weight"),
    ("self_attn.indexer.index_kpool_compress_gate", "indexer_compressor_gate.weight"),
];

/// Compressed attention (DeepSeek-V4).
const COMPRESSED: &[(&str, &str)] = &[
    ("self_attn.wq_a", "attn_q_a"),
    ("self_attn.q_norm", "attn_q_a_norm"),
    ("self_attn.wq_b", "attn_q_b"),
    ("self_attn.wkv", "attn_kv"),
    ("self_attn.norm", "attn_kv_a_norm"),
    ("self_attn.wo_a", "attn_output_a"),
    ("self_attn.wo_b", "attn_output_b"),
    ("self_attn.attn_sink", "attn_sinks.weight"),
    ("self_attn.compressor.wkv", "attn_compressor_kv"),
    ("self_attn.compressor.wgate", "attn_compressor_gate"),
    ("self_attn.compressor.ape", "attn_compressor_ape.weight"),
    ("self_attn.compressor.norm", "attn_compressor_norm"),
    ("self_attn.indexer.compressor.wkv", "indexer_compressor_kv"),
    ("self_attn.indexer.compressor.wgate", "indexer_compressor_gate"),
    ("self_attn.indexer.compressor.ape", "indexer_compressor_ape.weight"),
    ("self_attn.indexer.compressor.norm", "indexer_compressor_norm"),
    ("mlp.gate.tid2eid", "ffn_gate_tid2eid.weight"),
];

/// Streams with gates, their indexers and n-grams (Qwen4-Exp).
const GATED_STREAMS: &[(&str, &str)] = &[
    ("attn_hyper_connection.hc_norm", "hc_attn_norm"),
    ("attn_hyper_connection.input_mix_weight_down", "hc_attn_down"),
    ("attn_hyper_connection.input_mix_weight_up", "hc_attn_up"),
    ("attn_hyper_connection.block_inject_weight", "hc_attn_inject"),
    ("mlp_hyper_connection.hc_norm", "hc_ffn_norm"),
    ("mlp_hyper_connection.input_mix_weight_down", "hc_ffn_down"),
    ("mlp_hyper_connection.input_mix_weight_up", "hc_ffn_up"),
    ("mlp_hyper_connection.block_inject_weight", "hc_ffn_inject"),
    ("self_attn.indexer.q_proj", "indexer.q_proj"),
    ("self_attn.indexer.k_proj", "indexer.k_proj"),
    ("self_attn.indexer.q_layernorm", "indexer.q_norm"),
    ("self_attn.indexer.k_layernorm", "indexer.k_norm"),
    ("ple.key_proj", "ple_key"),
    ("ple.value_proj", "ple_value"),
    ("ple.norm_key", "ple_norm_key"),
    ("ple.norm_query", "ple_norm_query"),
    ("ple.norm_conv", "ple_norm_conv"),
    ("ple.conv1d", "ple_conv1d"),
];

/// The table of n-grams, which has a layer for the model and none in files, where its name is that of Gemma's embeddings for each layer.
const NGRAMS: (&str, &str) = ("ple.ple_embedding.ngram_embedding", "per_layer_token_embd");

/// What is outside of layers.
const OUTSIDE: [(&str, &str); 13] = [
    ("embed_tokens", "token_embd"),
    ("norm", "output_norm"),
    ("lm_head", "output"),
    ("embed_tokens_per_layer", "per_layer_token_embd"),
    ("per_layer_model_projection", "per_layer_model_proj"),
    ("per_layer_projection_norm", "per_layer_proj_norm"),
    ("hc_head_fn", "output_hc_fn.weight"),
    ("hc_head_base", "output_hc_base.weight"),
    ("hc_head_scale", "output_hc_scale.weight"),
    ("hyper_connection_mixer.hc_norm", "output_hc_norm"),
    ("hyper_connection_mixer.input_mix_weight_down", "output_hc_down"),
    ("hyper_connection_mixer.input_mix_weight_up", "output_hc_up"),
    ("output_attn_res_score", "output_res_score"),
];

/// Tables that are stored beside weights: what rotary frequencies are divided by, in any context (Llama 3), in long and in short ones (Phi-3).
pub const ROPE_FACTORS: &str = "rope_freqs.weight";
pub const LONG_ROPE_FACTORS: &str = "rope_factors_long.weight";
pub const SHORT_ROPE_FACTORS: &str = "rope_factors_short.weight";

/// Parts that some architectures have in place of others.
const JOINED_QKV: (&str, &str) = ("self_attn.qkv_proj", "attn_qkv");
const JOINED_GATE_UP: (&str, &str) = ("mlp.gate_up_proj", "ffn_up");

/// Vectors whose whole names differ: the model's and GGUF's.
const VECTORS: [(&str, &str); 2] =
    [("self_attn.sinks", "attn_sinks.weight"), ("layer_scalar", "layer_output_scale.weight")];
/// Those of routers that have a mixture's dense part beside them (Gemma 4). Elsewhere such names are scales of matrices.
const ROUTER_VECTORS: [(&str, &str); 2] =
    [("mlp.router_scale", "ffn_gate_inp.scale"), ("mlp.expert_scales", "ffn_down_exps.scale")];

/// What `model.` checkpoints call tables that can be computed.
const COMPUTED: &str = "rotary_emb.inv_freq";

/// The names of one file's tensors.
#[derive(Clone, Debug)]
pub struct Names {
    /// The norms that architectures disagree on: the model's name and GGUF's.
    norms: &'static [(&'static str, &'static str)],
    /// Parts that stand for others here.
    joined: Vec<(&'static str, &'static str)>,
    /// Parts that share names with those of other architectures.
    own: Vec<(&'static str, &'static str)>,
    /// The layer of the table of n-grams.
    ngram_layer: Option<u64>,
    /// Layers with latent attention.
    latent: BTreeSet<u64>,
    /// The name of the bias of the decay, which Ollama shortens.
    dt_bias: &'static str,
    /// A dense part is beside each mixture.
    beside: bool,
}

impl Names {
    /// `has`: whether the first layers have a tensor of that part. `sandwich`: there are norms before and after both halves of a layer. `joined`:
    /// whether gate and up are in one matrix, and q, k and v.
    pub fn new(sandwich: bool, joined: (bool, bool), has: impl Fn(&str) -> bool) -> Names {
        let norms: &[(&str, &str)] = match sandwich {
            true => &[
                ("post_attention_layernorm", "post_attention_norm"),
                ("pre_feedforward_layernorm", "ffn_norm"),
                ("post_feedforward_layernorm", "post_ffw_norm"),
            ],
            false if has("post_attention_norm.weight") => &[("post_attention_layernorm", "post_attention_norm")],
            false => &[("post_attention_layernorm", "ffn_norm")],
        };
        let of = |is_joined: bool, part| is_joined.then_some(part);
        let joined = [of(joined.0, JOINED_GATE_UP), of(joined.1, JOINED_QKV)].into_iter().flatten().collect();
        let dt_bias = if has("ssm_dt") { "ssm_dt" } else { "ssm_dt.bias" };
        let own = [
            (has("ssm_d") && has("ssm_in.weight"), MAMBA),
            (has("ssm_f_a.weight"), CHANNEL_DELTA),
            (has("ssm_g.weight"), KIMI_K3),
            (has("hc_attn_fn.weight"), STREAMS),
            (has("indexer_compressor_ape.weight") && !has("attn_kv.weight"), POOLS),
            (has("attn_kv.weight"), COMPRESSED),
            (has("hc_attn_down.weight"), GATED_STREAMS),
        ];
        let own = own.into_iter().filter(|(is_there, _)| *is_there).flat_map(|(_, parts)| parts).copied().collect();
        let beside = sandwich && has("post_ffw_norm_1.weight");
        Names { norms, joined, own, ngram_layer: None, latent: BTreeSet::new(), dt_bias, beside }
    }

    /// With the table of n-grams of such a layer.
    pub fn with_ngrams(self, ngram_layer: Option<u64>) -> Names {
        Names { ngram_layer, ..self }
    }

    /// With latent attention in these layers.
    pub fn with_latent(self, latent: BTreeSet<u64>) -> Names {
        Names { latent, ..self }
    }

    fn is_latent(&self, layer: &str) -> bool {
        layer.parse().is_ok_and(|layer| self.latent.contains(&layer))
    }

    fn parts(&self) -> impl Iterator<Item = (&'static str, &'static str)> + '_ {
        self.norms.iter().chain(&self.joined).chain(PARTS).copied()
    }

    fn vectors(&self) -> impl Iterator<Item = (&'static str, &'static str)> {
        let more = if self.beside { &ROUTER_VECTORS[..] } else { &[] };
        VECTORS.iter().chain(more).copied()
    }

    /// GGUF's name for the model's tensor or module `short`.
    pub fn full(&self, short: &str) -> String {
        let Some((layer, rest)) = short.strip_prefix("layers.").and_then(|rest| rest.split_once('.')) else {
            return renamed(short, OUTSIDE.into_iter()).unwrap_or_else(|| short.to_owned());
        };
        if Some(layer) == self.ngram_layer.map(|own| own.to_string()).as_deref()
            && let Some(name) = renamed(rest, std::iter::once(NGRAMS))
        {
            return name;
        }
        let gate = renamed(rest, std::iter::once(LATENT_GATE)).filter(|_| self.is_latent(layer));
        if let Some(part) = gate.or_else(|| renamed(rest, self.own.iter().copied())) {
            return format!("blk.{layer}.{part}");
        }
        if rest == "linear_attn.dt_bias" {
            return format!("blk.{layer}.{}", self.dt_bias);
        }
        if let Some((_, theirs)) = self.vectors().find(|(ours, _)| *ours == rest) {
            return format!("blk.{layer}.{theirs}");
        }
        // An expert of its own: its number is behind the projection's name.
        if let Some((expert, projection)) = rest.strip_prefix("mlp.experts.").and_then(|rest| rest.split_once('.'))
            && expert.bytes().all(|b| b.is_ascii_digit())
        {
            let (projection, leaf) = projection.split_once('.').unwrap_or((projection, ""));
            if let Some(kind) = projection.strip_suffix("_proj") {
                let dot = if leaf.is_empty() { "" } else { "." };
                return format!("blk.{layer}.ffn_{kind}.{expert}{dot}{leaf}");
            }
        }
        let part = renamed(rest, self.parts()).unwrap_or_else(|| rest.to_owned());
        format!("blk.{layer}.{part}")
    }

    /// The model's name for a tensor of the file; `None` for one of another part.
    pub fn short(&self, name: &str) -> Option<String> {
        if [ROPE_FACTORS, LONG_ROPE_FACTORS, SHORT_ROPE_FACTORS].contains(&name) {
            return Some(format!("layers.{COMPUTED}"));
        }
        let turned = |(ours, theirs): (&'static str, &'static str)| (theirs, ours);
        let Some((layer, rest)) = name.strip_prefix("blk.").and_then(|rest| rest.split_once('.')) else {
            if let Some((layer, part)) = self.ngram_layer.zip(renamed(name, std::iter::once(turned(NGRAMS)))) {
                return Some(format!("layers.{layer}.{part}"));
            }
            return renamed(name, OUTSIDE.into_iter().map(turned));
        };
        let gate = renamed(rest, std::iter::once(turned(LATENT_GATE))).filter(|_| self.is_latent(layer));
        if let Some(part) = gate.or_else(|| renamed(rest, self.own.iter().copied().map(turned))) {
            return Some(format!("layers.{layer}.{part}"));
        }
        if rest == self.dt_bias {
            return Some(format!("layers.{layer}.linear_attn.dt_bias"));
        }
        if let Some((ours, _)) = self.vectors().find(|(_, theirs)| *theirs == rest) {
            return Some(format!("layers.{layer}.{ours}"));
        }
        let own = rest.strip_prefix("ffn_").and_then(|rest| rest.split_once('.'));
        if let Some((kind, (expert, leaf))) = own.and_then(|(kind, rest)| Some((kind, rest.split_once('.')?)))
            && expert.bytes().all(|b| b.is_ascii_digit())
        {
            return Some(format!("layers.{layer}.mlp.experts.{expert}.{kind}_proj.{leaf}"));
        }
        // Parts that the model does not have keep their names, so that messages show them.
        let part = renamed(rest, self.parts().map(turned)).unwrap_or_else(|| rest.to_owned());
        Some(format!("layers.{layer}.{part}"))
    }
}

/// `name` with the module that it begins with replaced; `None` if it begins with none of them.
fn renamed(name: &str, modules: impl Iterator<Item = (&'static str, &'static str)>) -> Option<String> {
    let rest = |from: &str| name.strip_prefix(from).filter(|rest| rest.is_empty() || rest.starts_with('.'));
    let mut found = modules.filter_map(|(from, to)| Some((from, format!("{to}{}", rest(from)?))));
    // Where a module's name continues another's with a dot, it is the first of them.
    found.next().map(|(_, name)| name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_map_both_ways() {
        let names = Names::new(false, (false, false), |_| false);
        for (ours, theirs) in [
            ("embed_tokens.weight", "token_embd.weight"),
            ("norm.weight", "output_norm.weight"),
            ("lm_head.weight", "output.weight"),
            ("layers.0.self_attn.q_proj.weight", "blk.0.attn_q.weight"),
            ("layers.0.self_attn.q_norm.weight", "blk.0.attn_q_norm.weight"),
            ("layers.12.self_attn.k_proj.bias", "blk.12.attn_k.bias"),
            ("layers.3.post_attention_layernorm.weight", "blk.3.ffn_norm.weight"),
            ("layers.3.mlp.gate.weight", "blk.3.ffn_gate_inp.weight"),
            ("layers.3.mlp.gate_proj.weight", "blk.3.ffn_gate.weight"),
            ("layers.3.mlp.experts.gate_proj.weight", "blk.3.ffn_gate_exps.weight"),
            ("layers.3.mlp.experts.17.down_proj.weight", "blk.3.ffn_down.17.weight"),
            ("layers.3.mlp.gate.e_score_correction_bias", "blk.3.exp_probs_b.bias"),
            ("layers.3.mlp.shared_expert_gate.weight", "blk.3.ffn_gate_inp_shexp.weight"),
            ("layers.3.linear_attn.A_log", "blk.3.ssm_a"),
            ("layers.3.linear_attn.dt_bias", "blk.3.ssm_dt.bias"),
            ("layers.3.self_attn.sinks", "blk.3.attn_sinks.weight"),
            ("layers.3.mlp.experts.up_proj.bias", "blk.3.ffn_up_exps.bias"),
            ("layers.3.linear_attn.in_proj_qkv.weight", "blk.3.attn_qkv.weight"),
        ] {
            assert_eq!(names.full(ours), theirs);
            assert_eq!(names.short(theirs).as_deref(), Some(ours));
        }
        assert_eq!(names.full("layers.3.mlp.router.bias"), "blk.3.ffn_gate_inp.bias");
        let gemma = Names::new(true, (false, false), |_| true);
        assert_eq!(gemma.full("layers.1.pre_feedforward_layernorm.weight"), "blk.1.ffn_norm.weight");
        assert_eq!(gemma.full("layers.1.post_attention_layernorm.weight"), "blk.1.post_attention_norm.weight");
        for (ours, theirs) in [
            ("layers.1.layer_scalar", "blk.1.layer_output_scale.weight"),
            ("layers.1.mlp.router_scale", "blk.1.ffn_gate_inp.scale"),
            ("layers.1.mlp.expert_scales", "blk.1.ffn_down_exps.scale"),
            ("layers.1.post_feedforward_layernorm_1.weight", "blk.1.post_ffw_norm_1.weight"),
            ("layers.1.post_per_layer_input_norm.weight", "blk.1.post_norm.weight"),
            ("layers.1.per_layer_projection.weight", "blk.1.proj.weight"),
            ("embed_tokens_per_layer.weight", "per_layer_token_embd.weight"),
            ("per_layer_projection_norm.weight", "per_layer_proj_norm.weight"),
        ] {
            assert_eq!((&*gemma.full(ours), gemma.short(theirs).as_deref()), (theirs, Some(ours)));
        }
        let phi = Names::new(false, (true, true), |_| false);
        for (ours, theirs) in [
            ("layers.1.self_attn.qkv_proj.weight", "blk.1.attn_qkv.weight"),
            ("layers.1.mlp.gate_up_proj.weight", "blk.1.ffn_up.weight"),
        ] {
            assert_eq!((&*phi.full(ours), phi.short(theirs).as_deref()), (theirs, Some(ours)));
        }
        let mamba = Names::new(false, (false, false), |part| part.starts_with("ssm_d") || part == "ssm_in.weight");
        for (ours, theirs) in [
            ("layers.3.mamba.in_proj.weight", "blk.3.ssm_in.weight"),
            ("layers.3.mamba.conv1d.bias", "blk.3.ssm_conv1d.bias"),
            ("layers.3.mamba.A_log", "blk.3.ssm_a"),
            ("layers.3.mamba.D", "blk.3.ssm_d"),
            ("layers.3.mamba.dt_bias", "blk.3.ssm_dt.bias"),
            ("layers.3.mamba.norm.weight", "blk.3.ssm_norm.weight"),
        ] {
            assert_eq!((&*mamba.full(ours), mamba.short(theirs).as_deref()), (theirs, Some(ours)));
        }
        let delta = Names::new(false, (false, false), |part| part == "ssm_f_a.weight");
        for (ours, theirs) in [
            ("layers.3.self_attn.A_log", "blk.3.ssm_a"),
            ("layers.3.self_attn.dt_bias", "blk.3.ssm_dt.bias"),
            ("layers.3.self_attn.o_norm.weight", "blk.3.ssm_norm.weight"),
            ("layers.3.self_attn.q_conv1d.weight", "blk.3.ssm_conv1d_q.weight"),
            ("layers.3.self_attn.b_proj.weight", "blk.3.ssm_beta.weight"),
            ("layers.3.self_attn.q_proj.weight", "blk.3.attn_q.weight"),
        ] {
            assert_eq!((&*delta.full(ours), delta.short(theirs).as_deref()), (theirs, Some(ours)));
        }
        let kimi = |part: &str| ["ssm_f_a.weight", "ssm_g.weight"].contains(&part);
        let kimi = Names::new(false, (false, false), kimi).with_latent(BTreeSet::from([3]));
        for (ours, theirs) in [
            ("layers.2.self_attn.g_proj.weight", "blk.2.ssm_g.weight"),
            ("layers.3.self_attn.g_proj.weight", "blk.3.attn_gate.weight"),
            ("layers.2.mlp_res_score.weight", "blk.2.ffn_res_score.weight"),
            ("layers.2.mlp.latent_norm.weight", "blk.2.ffn_routed_norm.weight"),
            ("layers.2.self_attn.b_proj.weight", "blk.2.ssm_beta.weight"),
            ("output_attn_res_score.weight", "output_res_score.weight"),
        ] {
            assert_eq!((&*kimi.full(ours), kimi.short(theirs).as_deref()), (theirs, Some(ours)));
        }
        let compressed = ["hc_attn_fn.weight", "attn_kv.weight", "indexer_compressor_ape.weight"];
        let compressed = Names::new(false, (false, false), |part| compressed.contains(&part));
        for (ours, theirs) in [
            ("layers.3.self_attn.q_norm.weight", "blk.3.attn_q_a_norm.weight"),
            ("layers.3.self_attn.norm.weight", "blk.3.attn_kv_a_norm.weight"),
            ("layers.3.self_attn.attn_sink", "blk.3.attn_sinks.weight"),
            ("layers.3.self_attn.indexer.compressor.ape", "blk.3.indexer_compressor_ape.weight"),
            ("layers.3.self_attn.indexer.wq_b.weight", "blk.3.indexer.attn_q_b.weight"),
            ("layers.3.mlp.gate.tid2eid", "blk.3.ffn_gate_tid2eid.weight"),
            ("layers.3.hc_ffn_scale", "blk.3.hc_ffn_scale.weight"),
            ("hc_head_fn", "output_hc_fn.weight"),
        ] {
            assert_eq!((&*compressed.full(ours), compressed.short(theirs).as_deref()), (theirs, Some(ours)));
        }
        let gated = Names::new(false, (false, false), |part| part == "hc_attn_down.weight").with_ngrams(Some(3));
        for (ours, theirs) in [
            ("layers.1.mlp_hyper_connection.hc_norm.weight", "blk.1.hc_ffn_norm.weight"),
            ("layers.1.self_attn.indexer.k_layernorm.weight", "blk.1.indexer.k_norm.weight"),
            ("layers.3.ple.ple_embedding.ngram_embedding.weight", "per_layer_token_embd.weight"),
            ("layers.3.ple.conv1d.weight", "blk.3.ple_conv1d.weight"),
            ("hyper_connection_mixer.input_mix_weight_up.weight", "output_hc_up.weight"),
        ] {
            assert_eq!((&*gated.full(ours), gated.short(theirs).as_deref()), (theirs, Some(ours)));
        }
        let ollama = Names::new(false, (false, false), |part| part != "ssm_d");
        assert_eq!(ollama.full("layers.0.linear_attn.dt_bias"), "blk.0.ssm_dt");
        assert_eq!(ollama.short("blk.0.ssm_dt").as_deref(), Some("layers.0.linear_attn.dt_bias"));
        assert_eq!(ollama.full("layers.1.post_attention_layernorm.weight"), "blk.1.post_attention_norm.weight");
        assert_eq!(names.short("v.blk.0.attn_q.weight"), None);
        assert_eq!(names.short("blk.4.nextn.eh_proj.weight").as_deref(), Some("layers.4.eh_proj.weight"));
    }
}
