//! Random tiny models, as safetensors and as llama.cpp's converter would write them. Other crates' tests include this file, too.
#![allow(dead_code)]

#[path = "families.rs"]
mod families;
#[path = "folder.rs"]
mod folder;
#[path = "latent.rs"]
mod latent;
#[path = "streams.rs"]
pub mod streams;

use serde_json::Value;
use sluice_model::{Config, Description, WeightDescription, WeightKind, describe};

use super::writer::{self, BF16, F16, F32, Gguf};

/// The `model_type`s that are written.
pub const ARCHITECTURES: [&str; 32] = [
    "llama",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "gemma2",
    "gemma3_text",
    "gemma4_text",
    "mixtral",
    "ministral3",
    "phi3",
    "granite",
    "granitemoe",
    "granitemoehybrid",
    "nemotron_h",
    "smollm3",
    "olmo3",
    "minimax_m2",
    "glm4",
    "glm4_moe",
    "deepseek_v3",
    "deepseek_v32",
    "glm_moe_dsa",
    "mistral4",
    "kimi_linear",
    "kimi_k3",
    "glm5_next",
    "deepseek_v4",
    "qwen4_exp_text",
    "gpt_oss",
];

/// How the file has the experts of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Experts {
    Stacked,
    Merged,
    Single,
}

/// A weight and its values; of experts one after the other.
struct Weight {
    description: WeightDescription,
    values: Vec<f32>,
    bias: Option<Vec<f32>>,
}

/// A model of random weights, each of which every floating-point type has.
pub struct Model {
    config: Value,
    description: Description,
    weights: Vec<Weight>,
    /// Types of matrices, which take turns.
    kinds: [u32; 3],
    /// Keys and values of latent attention have a stack of matrices each.
    splits: bool,
}

/// The random model of an architecture.
pub fn model(model_type: &str) -> Model {
    let config = families::config(model_type);
    let parsed = Config::parse("config.json".into(), config.to_string().as_bytes()).unwrap();
    let description = describe(&parsed, &Default::default()).unwrap();
    let mut random = fastrand::Rng::with_seed(48);
    // Multiples of 1/64 up to 2: every type has them.
    let mut draw = |count: usize, around: f32, spread: f32| -> Vec<f32> {
        (0..count).map(|_| around + ((random.f32() - 0.5) * spread * 64.0).round() / 64.0).collect()
    };
    let weights = description.weights().map(|w| {
        let values = match w.kind {
            WeightKind::Norm { centred } => draw(w.cols, if centred { 0.0 } else { 1.0 }, 0.5),
            // Experts of each token's number.
            WeightKind::Vector if w.part == "mlp.gate.tid2eid" => {
                (0..w.rows * w.cols).map(|i| ((i / w.cols + i % w.cols) % 6) as f32).collect()
            }
            WeightKind::Vector => draw(w.rows * w.cols, -0.5, 2.0),
            WeightKind::Convolution => draw(w.rows * w.cols, 0.2, 1.0),
            WeightKind::Matrix => draw(w.elements() as usize, 0.0, 1.0),
        };
        let parts = ["self_attn", "mamba.conv1d"];
        let has_bias = w.biased && (parts.iter().any(|part| w.part.starts_with(part)) || model_type == "gpt_oss");
        let count = if matches!(w.kind, WeightKind::Norm { .. }) { w.cols } else { w.count * w.rows };
        Weight { description: w, values, bias: has_bias.then(|| draw(count, 0.0, 1.0)) }
    });
    let weights = weights.collect();
    let splits = ["deepseek_v32", "mistral4", "kimi_linear", "glm5_next"].contains(&model_type);
    Model { config, description, weights, kinds: [F32, F16, BF16], splits }
}

impl Model {
    /// The same without biases, and with matrices of f32 alone.
    pub fn plain(mut self) -> Model {
        self.config.as_object_mut().unwrap().remove("attention_bias");
        self.weights.iter_mut().for_each(|w| w.bias = None);
        self.kinds = [F32; 3];
        self
    }

    /// The same as newer files have latent attention.
    pub fn split(self) -> Model {
        Model { splits: true, ..self }
    }

    fn model_type(&self) -> &str {
        self.config["model_type"].as_str().unwrap()
    }

    fn size(&self, key: &str) -> usize {
        self.config[key].as_u64().unwrap() as usize
    }

    /// The values of `part` in a layer.
    pub fn values(&self, layer: usize, part: &str) -> &[f32] {
        let is_it = |w: &&Weight| w.description.layer == Some(layer) && w.description.part == part;
        &self.weights.iter().find(is_it).unwrap().values
    }

    fn has(&self, layer: Option<usize>, part: &str) -> bool {
        self.weights.iter().any(|w| w.description.layer == layer && w.description.part == part)
    }

    /// As a GGUF file with stacked experts.
    pub fn gguf(&self) -> Gguf {
        self.gguf_with(Experts::Stacked)
    }

    /// The keys alone.
    fn keys(&self, blocks: usize) -> Gguf {
        let architecture = match self.model_type() {
            "qwen3_moe" => "qwen3moe",
            "qwen3_next" => "qwen3next",
            "qwen3_5_text" => "qwen35",
            "qwen3_5_moe_text" => "qwen35moe",
            "gemma3_text" => "gemma3",
            "gemma4_text" => "gemma4",
            "mixtral" => "llama",
            "ministral3" => "mistral3",
            "olmo3" => "olmo2",
            "minimax_m2" => "minimax-m2",
            "glm4_moe" => "glm4moe",
            "deepseek_v3" => "deepseek2",
            "deepseek_v32" => "deepseek32",
            "glm_moe_dsa" => "glm-dsa",
            "kimi_linear" => "kimi-linear",
            "kimi_k3" => "kimi-k3",
            "glm5_next" => "glm5-next",
            "deepseek_v4" => "deepseek4",
            "qwen4_exp_text" => "qwen4exp",
            "gpt_oss" => "gpt-oss",
            "granitemoehybrid" => "granitehybrid",
            "nemotron_h" => "nemotron_h_moe",
            plain => plain,
        };
        let mut file = Gguf::new(architecture);
        let key = |name: &str| format!("{architecture}.{name}");
        for (name, ours) in [
            ("embedding_length", "hidden_size"),
            ("context_length", "max_position_embeddings"),
            ("attention.head_count", "num_attention_heads"),
            ("attention.key_length", "head_dim"),
            ("attention.value_length", "head_dim"),
            ("feed_forward_length", "intermediate_size"),
        ] {
            // Gemma 4's heads are those of layers without a window, and its widths differ.
            let ours = if architecture == "gemma4" { ours.replace("head_dim", "global_head_dim") } else { ours.into() };
            let differs = ["gemma4", "nemotron_h_moe"].contains(&architecture) && ours == "intermediate_size";
            if !differs {
                file.u32(&key(name), self.size(&ours) as u32);
            }
        }
        file.u32(&key("block_count"), blocks as u32);
        let number = |key: &str| self.config[key].as_f64().unwrap() as f32;
        file.f32(&key("attention.layer_norm_rms_epsilon"), number("rms_norm_eps"));
        file.f32(&key("rope.freq_base"), number("rope_theta"));
        let is_hybrid = self.weights.iter().any(|w| w.description.part == "linear_attn.A_log");
        let kv_heads = self.size("num_key_value_heads") as u32;
        if is_hybrid {
            // None on recurrent layers.
            let each: Vec<i32> = (0..blocks).map(|i| if i % 2 == 1 { kv_heads as i32 } else { 0 }).collect();
            file.i32s(&key("attention.head_count_kv"), &each);
            let (heads, dim) = (self.size("linear_num_value_heads"), self.size("linear_value_head_dim"));
            file.u32(&key("ssm.time_step_rank"), heads as u32).u32(&key("ssm.inner_size"), (heads * dim) as u32);
            file.u32(&key("ssm.group_count"), self.size("linear_num_key_heads") as u32);
            file.u32(&key("ssm.state_size"), self.size("linear_key_head_dim") as u32);
            file.u32(&key("ssm.conv_kernel"), self.size("linear_conv_kernel_dim") as u32);
            file.u32(&key("rope.dimension_count"), (self.size("head_dim") / 2) as u32);
        } else if !["gemma4", "nemotron_h_moe", "granitehybrid", "kimi-k3"].contains(&architecture) {
            file.u32(&key("attention.head_count_kv"), kv_heads);
        }
        if !latent::keys(&self.config, &mut file, &key)
            && !streams::keys(&self.config, &self.description, &mut file, &key)
        {
            families::keys(&self.config, &mut file, &key);
        }
        if self.splits {
            file.u32(&key("attention.key_length_mla"), self.size("head_dim") as u32);
            file.u32(&key("attention.value_length_mla"), self.size("v_head_dim") as u32);
        }
        if self.config.get("num_experts_per_tok").is_some()
            && self.config.get("num_experts").is_some()
            && self.weights.iter().any(|w| w.description.count > 1)
        {
            file.u32(&key("expert_count"), self.size("num_experts") as u32);
            file.u32(&key("expert_used_count"), self.size("num_experts_per_tok") as u32);
            file.u32(&key("expert_feed_forward_length"), self.size("moe_intermediate_size") as u32);
            let shared = self.size("shared_expert_intermediate_size") as u32;
            file.u32(&key("expert_shared_feed_forward_length"), shared);
        }
        if architecture == "gemma3" {
            file.u32(&key("attention.sliding_window"), self.size("sliding_window") as u32);
            file.u32(&key("attention.sliding_window_pattern"), self.size("sliding_window_pattern") as u32);
        }
        file
    }

    /// As a GGUF file.
    pub fn gguf_with(&self, experts: Experts) -> Gguf {
        let mut file = self.keys(self.size("num_hidden_layers"));
        for weight in &self.weights {
            self.add(&mut file, weight, experts);
        }
        file
    }

    /// As a GGUF file without a tensor.
    pub fn gguf_without(&self, name: &str) -> Gguf {
        let mut file = self.keys(self.size("num_hidden_layers"));
        for weight in &self.weights {
            let mut own = self.keys(1);
            self.add(&mut own, weight, Experts::Stacked);
            if !own.has(name) {
                self.add(&mut file, weight, Experts::Stacked);
            }
        }
        file
    }

    /// As Ollama would write it: with tensors for images, a block that predicts further tokens, and another name.
    pub fn gguf_of_ollama(&self) -> Gguf {
        let layers = self.size("num_hidden_layers");
        let mut file = self.keys(layers + 1);
        file.u32("qwen35.nextn_predict_layers", 1);
        file.floats("v.blk.0.attn_q.weight", &[2, 2], F32, &[0.0; 4]);
        file.floats("v.patch_embd.weight", &[2, 2], F32, &[0.0; 4]);
        for weight in &self.weights {
            if weight.description.part == "linear_attn.dt_bias" {
                let name = format!("blk.{}.ssm_dt", weight.description.layer.unwrap());
                file.floats(&name, &[weight.values.len()], F32, &self.tiled(&weight.values, 1));
            } else {
                self.add(&mut file, weight, Experts::Stacked);
            }
        }
        file.floats(&format!("blk.{layers}.attn_norm.weight"), &[2], F32, &[0.0; 2]);
        file.floats(&format!("blk.{layers}.nextn.eh_proj.weight"), &[2, 2], F32, &[0.0; 4]);
        file
    }

    /// Value heads of `each` elements in the converter's order: the first head of every key head, then the second ones.
    fn tiled(&self, values: &[f32], each: usize) -> Vec<f32> {
        let (keys, heads) = (self.size("linear_num_key_heads"), self.size("linear_num_value_heads"));
        let ratio = heads / keys;
        let grouped: Vec<&[f32]> = values.chunks_exact(each).collect();
        assert_eq!(grouped.len(), heads);
        (0..heads).flat_map(|head| grouped[head % keys * ratio + head / keys]).copied().collect()
    }

    fn add(&self, file: &mut Gguf, weight: &Weight, experts: Experts) {
        let Weight { description: w, values, bias } = weight;
        let is_tiled = ["qwen3_5", "qwen4"].iter().any(|kind| self.model_type().starts_with(kind));
        let is_tiled = is_tiled && w.part.starts_with("linear_attn.");
        let part = match w.part {
            "post_attention_layernorm"
                if ["gemma2", "gemma3_text", "gemma4_text", "olmo3", "glm4", "glm4_moe", "gpt_oss"]
                    .contains(&self.model_type()) =>
            {
                "post_attention_norm"
            }
            "post_attention_layernorm" if self.weights.iter().any(|w| w.description.part == "linear_attn.A_log") => {
                "post_attention_norm"
            }
            // The gates of both kinds of layers have one name in checkpoints.
            "self_attn.g_proj" if self.has(w.layer, "self_attn.A_log") => "ssm_g",
            other => families::part(other, self.model_type()),
        };
        let layer = w.layer.filter(|_| part != "per_layer_token_embd");
        let name = layer.map_or_else(|| part.to_owned(), |layer| format!("blk.{layer}.{part}"));
        // The embedding's type decides how its scale is rounded.
        let kind = if part == "token_embd" { F32 } else { self.kinds[(w.layer.unwrap_or(1) + part.len()) % 3] };
        let head_dim = self.size("head_dim");
        let moves = ["llama", "mixtral", "ministral3", "granite", "granitemoe", "granitemoehybrid", "smollm3"];
        let moves = moves.contains(&self.model_type());
        let moved = moves && ["self_attn.q_proj", "self_attn.k_proj"].contains(&w.part);
        if let Some(bias) = bias {
            let bias = if moved { beside(bias, head_dim, 1) } else { bias.clone() };
            let shape = if w.count > 1 { vec![w.count, w.rows] } else { vec![bias.len()] };
            file.floats(&format!("{name}.bias"), &shape, F32, &bias);
        }
        let values = values.clone();
        match (w.kind, w.part) {
            // With the axes that llama.cpp wants.
            (_, "mamba.A_log") => {
                file.floats(&name, &[w.cols, 1], F32, &sluice_backend::decay_rates(&values));
            }
            (_, "mamba.D") => {
                file.floats(&name, &[w.cols, 1], F32, &values);
            }
            (_, "mamba.norm") => {
                let groups = self.config.get("n_groups").or_else(|| self.config.get("mamba_n_groups"));
                let groups = groups.unwrap().as_u64().unwrap() as usize;
                file.floats(&format!("{name}.weight"), &[groups, w.cols / groups], F32, &values);
            }
            (_, "self_attn.A_log") => {
                let shape = if self.model_type() == "kimi_k3" { vec![w.cols] } else { vec![1, 1, w.cols, 1] };
                file.floats(&name, &shape, F32, &sluice_backend::decay_rates(&values));
            }
            // Norm and projection are one vector of products.
            (_, part) if part.ends_with("_res_proj") => {}
            (_, part) if part.ends_with("_res_norm") => {
                let by = part.replace("_norm", "_proj");
                let is_other = |o: &&Weight| o.description.layer == w.layer && o.description.part == by;
                let by = &self.weights.iter().find(is_other).unwrap().values;
                let products: Vec<f32> = values.iter().zip(by).map(|(a, b)| a * b).collect();
                file.floats(&format!("{name}.weight"), &[w.cols], F32, &products);
            }
            (WeightKind::Convolution, "self_attn.q_conv1d" | "self_attn.k_conv1d" | "self_attn.v_conv1d") => {
                file.floats(&format!("{name}.weight"), &[1, w.rows, 1, w.cols], F32, &values);
            }
            (_, "mlp.gate.tid2eid") => {
                let numbers = values.iter().flat_map(|x| (*x as i32).to_le_bytes()).collect();
                file.tensor(&name, &[w.rows, w.cols], writer::I32, numbers);
            }
            (WeightKind::Vector, _) if w.rows > 1 => {
                file.floats(&name, &[w.rows, w.cols], F32, &values);
            }
            (_, "self_attn.indexer.index_qk_proj") => {
                let keys = self.size("indexer_head_dim");
                let (q, k) = values.split_at((w.rows - keys) * w.cols);
                file.floats(&format!("{name}.weight"), &[w.rows - keys, w.cols], kind, q);
                file.floats(&format!("{}.weight", name.replace("q_proj", "k_proj")), &[keys, w.cols], kind, k);
            }
            (_, "mlp.shared_expert.gate_up_proj") => {
                let (gate, up) = values.split_at(values.len() / 2);
                let shape = [w.rows / 2, w.cols];
                file.floats(&format!("{}.weight", name.replace("ffn_up", "ffn_gate")), &shape, kind, gate);
                file.floats(&format!("{name}.weight"), &shape, kind, up);
            }
            (WeightKind::Norm { centred }, _) => {
                let values: Vec<f32> = values.iter().map(|x| if centred { x + 1.0 } else { *x }).collect();
                file.floats(&format!("{name}.weight"), &[w.cols], F32, &values);
            }
            (_, "linear_attn.A_log") => {
                let rates = sluice_backend::decay_rates(&values);
                let rates = if is_tiled { self.tiled(&rates, 1) } else { rates };
                file.floats(&name, &[w.cols], F32, &rates);
            }
            (WeightKind::Vector, _) => {
                let values = if is_tiled { self.tiled(&values, 1) } else { values };
                file.floats(&name, &[w.cols], F32, &values);
            }
            (WeightKind::Convolution, _) => {
                let values = if is_tiled { self.tiled_after_keys(&values, w.cols) } else { values };
                file.floats(&format!("{name}.weight"), &[w.rows, w.cols], F32, &values);
            }
            (WeightKind::Matrix, _) if w.count > 1 => self.add_experts(file, weight, &name, kind, experts),
            (WeightKind::Matrix, "mlp.shared_expert_gate") => {
                file.floats(&format!("{name}.weight"), &[w.cols], kind, &values);
            }
            (WeightKind::Matrix, "linear_attn.in_proj_qkvz") => self.add_qkvz(file, weight, kind),
            (WeightKind::Matrix, "self_attn.kv_b_proj") if self.splits => self.add_split(file, weight, kind),
            (WeightKind::Matrix, part) => {
                let dim = if is_tiled { self.size("linear_value_head_dim") } else { 0 };
                let values = match part {
                    _ if moved => beside(&values, head_dim, w.cols),
                    "linear_attn.in_proj_qkv" if is_tiled => self.tiled_after_keys(&values, w.cols),
                    "linear_attn.in_proj_z" if is_tiled => self.tiled(&values, dim * w.cols),
                    "linear_attn.in_proj_b" | "linear_attn.in_proj_a" if is_tiled => self.tiled(&values, w.cols),
                    // Its columns.
                    "linear_attn.out_proj" if is_tiled => {
                        values.chunks_exact(w.cols).flat_map(|row| self.tiled(row, dim)).collect()
                    }
                    _ => values,
                };
                file.floats(&format!("{name}.weight"), &[w.rows, w.cols], kind, &values);
            }
        }
    }

    /// Rows (or channels) of `cols` elements, of which those of values come after those of queries and keys.
    fn tiled_after_keys(&self, values: &[f32], cols: usize) -> Vec<f32> {
        let keys = 2 * self.size("linear_num_key_heads") * self.size("linear_key_head_dim") * cols;
        let (before, after) = values.split_at(keys);
        [before, &self.tiled(after, self.size("linear_value_head_dim") * cols)].concat()
    }

    /// Qwen3-Next's projection, which the converter takes apart: q, k and v of all heads in one tensor, z in another.
    fn add_qkvz(&self, file: &mut Gguf, weight: &Weight, kind: u32) {
        let w = &weight.description;
        let (heads, k) = (self.size("linear_num_key_heads"), self.size("linear_key_head_dim"));
        let v = self.size("linear_num_value_heads") / heads * self.size("linear_value_head_dim");
        let rows: Vec<&[f32]> = weight.values.chunks_exact(w.cols).collect();
        let per_head: Vec<&[&[f32]]> = rows.chunks_exact(2 * k + 2 * v).collect();
        let of = |from: usize, len: usize| -> Vec<f32> {
            per_head.iter().flat_map(|rows| rows[from..from + len].concat()).collect()
        };
        let qkv = [of(0, k), of(k, k), of(2 * k, v)].concat();
        let layer = w.layer.unwrap();
        file.floats(&format!("blk.{layer}.attn_qkv.weight"), &[heads * (2 * k + v), w.cols], kind, &qkv);
        file.floats(&format!("blk.{layer}.attn_gate.weight"), &[heads * v, w.cols], kind, &of(2 * k + v, v));
    }

    /// The projection of keys and values of latent attention: that of keys transposed, that of values as it is, of each head.
    fn add_split(&self, file: &mut Gguf, weight: &Weight, kind: u32) {
        let (w, heads, plain) = (&weight.description, self.size("num_attention_heads"), self.size("qk_nope_head_dim"));
        let (v, rank, layer) = (self.size("v_head_dim"), w.cols, w.layer.unwrap());
        let (mut keys, mut values) = (Vec::new(), Vec::new());
        for head in weight.values.chunks_exact((plain + v) * rank) {
            keys.extend((0..rank * plain).map(|i| head[i % plain * rank + i / plain]));
            values.extend_from_slice(&head[plain * rank..]);
        }
        file.floats(&format!("blk.{layer}.attn_k_b.weight"), &[heads, rank, plain], kind, &keys);
        file.floats(&format!("blk.{layer}.attn_v_b.weight"), &[heads, v, rank], kind, &values);
    }

    fn add_experts(&self, file: &mut Gguf, weight: &Weight, name: &str, kind: u32, experts: Experts) {
        let w = &weight.description;
        match experts {
            Experts::Single => {
                for (e, own) in weight.values.chunks_exact(w.rows * w.cols).enumerate() {
                    let single = name.replace("_exps", &format!(".{e}"));
                    file.floats(&format!("{single}.weight"), &[w.rows, w.cols], kind, own);
                }
            }
            Experts::Merged if w.part == "mlp.experts.gate_proj" => {
                let is_up = |o: &&Weight| o.description.layer == w.layer && o.description.part == "mlp.experts.up_proj";
                let up = self.weights.iter().find(is_up).unwrap();
                let pair = |own: &[f32], other: &[f32]| [own, other].concat();
                let one = w.rows * w.cols;
                let both = weight.values.chunks_exact(one).zip(up.values.chunks_exact(one));
                let both: Vec<f32> = both.flat_map(|(gate, up)| pair(gate, up)).collect();
                let name = name.replace("gate_exps", "gate_up_exps");
                file.floats(&format!("{name}.weight"), &[w.count, 2 * w.rows, w.cols], kind, &both);
            }
            Experts::Merged if w.part == "mlp.experts.up_proj" => {}
            Experts::Merged | Experts::Stacked => {
                file.floats(&format!("{name}.weight"), &[w.count, w.rows, w.cols], kind, &weight.values);
            }
        }
    }
}

/// Rows of `cols` elements in the order of GGUF's `llama`, where the two rows that are rotated together are neighbours: within a head, row i goes to 2i, and row i + half a head to 2i + 1.
fn beside(values: &[f32], head: usize, cols: usize) -> Vec<f32> {
    let mut out = values.to_vec();
    for (from, to) in values.chunks_exact(head * cols).zip(out.chunks_exact_mut(head * cols)) {
        for row in 0..head {
            let place = if row < head / 2 { 2 * row } else { 2 * (row - head / 2) + 1 };
            to[place * cols..(place + 1) * cols].copy_from_slice(&from[row * cols..(row + 1) * cols]);
        }
    }
    out
}
