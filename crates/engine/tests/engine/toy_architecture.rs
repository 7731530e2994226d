//! An architecture is one file and a line in a list, also where it is none of Llama's kin. A toy (`architectures/toy.rs`) runs through the engine, and its logits are
//! those of the plain loops below.

#[path = "architectures/toy.rs"]
mod toy;

use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::Once;

use serde_json::{Value, json};
use sluice_engine::{Activations, Engine, KvType, Options};
use sluice_model::{Config, WeightKind, describe};
use sluice_store::{Dtype, TensorPlan, Writer};
use tempfile::TempDir;

const HIDDEN: usize = 32;
const LAYERS: usize = 3;
const VOCABULARY: usize = 48;
const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const HEAD_DIM: usize = 8;
const V_DIM: usize = 16;
const WINDOW: usize = 3;
const SOFTCAP: f64 = 2.0;
const EXPERTS: usize = 8;
const K: usize = 2;
const GROUPS: usize = 4;
const TOP_GROUPS: usize = 2;
const SCALE: f64 = 2.5;
const EPS: f64 = 1e-6;

fn config(model_type: &str) -> Value {
    json!({
        "model_type": model_type, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "vocab_size": VOCABULARY,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "value_head_dim": V_DIM,
        "max_position_embeddings": 64, "rms_norm_eps": EPS, "sliding_window": WINDOW,
        "attn_logit_softcapping": SOFTCAP, "intermediate_size": 24, "moe_intermediate_size": 16,
        "num_experts": EXPERTS, "num_experts_per_tok": K, "n_group": GROUPS, "topk_group": TOP_GROUPS,
        "routed_scaling_factor": SCALE, "shared_expert_intermediate_size": 12,
    })
}

type Tensors = HashMap<String, Vec<f32>>;

fn register() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| sluice_model::register(toy::ARCHITECTURES));
}

/// A checkpoint of random weights in a folder: what the description asks for, and biases.
fn write(folder: &Path) -> Tensors {
    let text = config("toy").to_string();
    let parsed = Config::parse("config.json".into(), text.as_bytes()).unwrap();
    let description = describe(&parsed, &Default::default()).unwrap();
    let mut random = fastrand::Rng::with_seed(47);
    let (mut plans, mut tensors) = (Vec::new(), Tensors::new());
    let mut add = |name: String, shape: Vec<usize>, around: f32, spread: f32| {
        let name = name.replace("mlp.shared_expert.", "mlp.shared_experts.").replace("mlp.gate.", "mlp.router.");
        let values = (0..shape.iter().product()).map(|_| around + spread * (random.f32() - 0.5)).collect();
        tensors.insert(name.clone(), values);
        plans.push(TensorPlan { name, dtype: Dtype::F32, shape });
    };
    for w in description.weights() {
        let head = if w.part == "lm_head" { "" } else { "model." };
        let module = format!("{head}{}", w.name());
        match w.kind {
            WeightKind::Norm { .. } => add(format!("{module}.weight"), vec![w.cols], 1.0, 0.4),
            WeightKind::Vector => add(module, vec![w.cols], 0.0, 2.0),
            WeightKind::Convolution => unreachable!(),
            WeightKind::Matrix if w.count > 1 => {
                for e in 0..w.count {
                    let single = module.replace(".experts.", &format!(".experts.{e}."));
                    add(format!("{single}.weight"), vec![w.rows, w.cols], 0.0, 0.8);
                }
            }
            WeightKind::Matrix => {
                add(format!("{module}.weight"), vec![w.rows, w.cols], 0.0, 0.8);
                if w.biased && !w.part.contains("shared_expert") && !w.name().starts_with("layers.0.mlp") {
                    add(format!("{module}.bias"), vec![w.rows], 0.0, 1.0);
                }
            }
        }
    }
    let mut writer = Writer::create(&folder.join("model.safetensors"), &plans, &BTreeMap::new()).unwrap();
    for plan in &plans {
        let bytes: Vec<u8> = tensors[&plan.name].iter().flat_map(|x| x.to_le_bytes()).collect();
        writer.append(&plan.name, &bytes).unwrap();
    }
    writer.finish().unwrap();
    std::fs::write(folder.join("config.json"), text).unwrap();
    tensors
}

/// The model in plain loops, with parts of it left out by name.
struct Reference<'a> {
    tensors: &'a Tensors,
    without: &'a str,
}

impl Reference<'_> {
    fn values(&self, name: &str) -> Vec<f64> {
        let found = self.tensors.get(name).unwrap_or_else(|| panic!("no {name}"));
        found.iter().map(|x| f64::from(*x)).collect()
    }

    fn has(&self, part: &str) -> bool {
        self.without != part
    }

    /// `W x`, with the bias where there is one.
    fn product(&self, module: &str, x: &[f64]) -> Vec<f64> {
        let w = self.values(&format!("{module}.weight"));
        let dot = |row: &[f64]| row.iter().zip(x).map(|(a, b)| a * b).sum::<f64>();
        let mut out: Vec<f64> = w.chunks_exact(x.len()).map(dot).collect();
        let bias = format!("{module}.bias");
        if self.tensors.contains_key(&bias) && self.has("biases") {
            out.iter_mut().zip(self.values(&bias)).for_each(|(y, b)| *y += b);
        }
        out
    }

    fn norm(&self, name: &str, x: &[f64]) -> Vec<f64> {
        let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
        let w = self.values(&format!("{name}.weight"));
        x.iter().zip(w).map(|(x, w)| x / (mean + EPS).sqrt() * w).collect()
    }

    fn gated(&self, module: &str, x: &[f64]) -> Vec<f64> {
        let (gate, up) =
            (self.product(&format!("{module}.gate_proj"), x), self.product(&format!("{module}.up_proj"), x));
        let hidden: Vec<f64> = gate.iter().zip(up).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect();
        self.product(&format!("{module}.down_proj"), &hidden)
    }

    fn attention(&self, layer: usize, rows: &[Vec<f64>]) -> Vec<Vec<f64>> {
        let module = |part: &str| format!("model.layers.{layer}.self_attn.{part}");
        let turned = |mut x: Vec<f64>, position: usize| {
            for head in x.chunks_exact_mut(HEAD_DIM) {
                for i in 0..HEAD_DIM / 2 {
                    let angle = position as f64 * 10000f64.powf(-((2 * i) as f64) / HEAD_DIM as f64);
                    let (a, b) = (head[i], head[i + HEAD_DIM / 2]);
                    head[i] = a * angle.cos() - b * angle.sin();
                    head[i + HEAD_DIM / 2] = b * angle.cos() + a * angle.sin();
                }
            }
            x
        };
        let project = |part: &str| -> Vec<Vec<f64>> { rows.iter().map(|x| self.product(&module(part), x)).collect() };
        let rotated = |part: &str| -> Vec<Vec<f64>> {
            project(part).into_iter().enumerate().map(|(t, x)| turned(x, t)).collect()
        };
        let (q, k, v) = (rotated("q_proj"), rotated("k_proj"), project("v_proj"));
        let sinks = self.values(&module("sinks"));
        let window = if layer.is_multiple_of(2) && self.has("windows") { WINDOW } else { rows.len() };
        let mut out = Vec::new();
        for t in 0..rows.len() {
            let mut mixed = vec![0.0; HEADS * V_DIM];
            for h in 0..HEADS {
                let kv = h / (HEADS / KV_HEADS);
                let seen = (t + 1).saturating_sub(window)..t + 1;
                let score = |j: usize| {
                    let (q, k) = (&q[t][h * HEAD_DIM..][..HEAD_DIM], &k[j][kv * HEAD_DIM..][..HEAD_DIM]);
                    let s = q.iter().zip(k).map(|(a, b)| a * b).sum::<f64>() / (HEAD_DIM as f64).sqrt();
                    if self.has("softcap") { SOFTCAP * (s / SOFTCAP).tanh() } else { s }
                };
                let weights: Vec<f64> = seen.clone().map(|j| score(j).exp()).collect();
                let sink = if self.has("sinks") { sinks[h].exp() } else { 0.0 };
                let sum = weights.iter().sum::<f64>() + sink;
                for (j, weight) in seen.zip(&weights) {
                    for d in 0..V_DIM {
                        mixed[h * V_DIM + d] += weight / sum * v[j][kv * V_DIM + d];
                    }
                }
            }
            out.push(self.product(&module("o_proj"), &mixed));
        }
        out
    }

    fn mixture(&self, layer: usize, x: &[f64]) -> Vec<f64> {
        let module = |part: &str| format!("model.layers.{layer}.mlp.{part}");
        let logits = self.product(&module("router"), x);
        let scores: Vec<f64> = logits.iter().map(|l| 1.0 / (1.0 + (-l).exp())).collect();
        let correction = self.values(&module("router.e_score_correction_bias"));
        let by: Vec<f64> = match self.has("correction") {
            true => scores.iter().zip(correction).map(|(s, b)| s + b).collect(),
            false => scores.clone(),
        };
        let best = |of: &dyn Fn(usize) -> f64, among: Vec<usize>, n: usize| {
            let mut among = among;
            among.sort_by(|a, b| of(*b).total_cmp(&of(*a)));
            among.truncate(n);
            among
        };
        let size = EXPERTS / GROUPS;
        let rank = |g: usize| {
            let two = best(&|e| by[e], (g * size..(g + 1) * size).collect(), 2);
            two.iter().map(|e| by[*e]).sum::<f64>()
        };
        let top = if self.has("groups") { TOP_GROUPS } else { GROUPS };
        let groups = best(&rank, (0..GROUPS).collect(), top);
        let among = groups.iter().flat_map(|g| g * size..(g + 1) * size).collect();
        let chosen = best(&|e| by[e], among, K);
        let sum: f64 = chosen.iter().map(|e| scores[*e]).sum();
        let mut out = if self.has("shared") { self.gated(&module("shared_experts"), x) } else { vec![0.0; HIDDEN] };
        for e in chosen {
            let weight = scores[e] / sum * if self.has("scale") { SCALE } else { 1.0 };
            let y = self.gated(&module(&format!("experts.{e}")), x);
            out.iter_mut().zip(y).for_each(|(o, y)| *o += weight * y);
        }
        out
    }

    /// `[tokens, vocabulary]`
    fn logits(&self, tokens: &[u32]) -> Vec<f64> {
        let embedding = self.values("model.embed_tokens.weight");
        let mut x: Vec<Vec<f64>> =
            tokens.iter().map(|t| embedding[*t as usize * HIDDEN..][..HIDDEN].to_vec()).collect();
        let add = |x: &mut [Vec<f64>], y: Vec<Vec<f64>>| {
            x.iter_mut().zip(y).for_each(|(x, y)| x.iter_mut().zip(y).for_each(|(x, y)| *x += y));
        };
        for layer in 0..LAYERS {
            let normed = |x: &[Vec<f64>], part: &str| -> Vec<Vec<f64>> {
                x.iter().map(|x| self.norm(&format!("model.layers.{layer}.{part}"), x)).collect()
            };
            let mixed = self.attention(layer, &normed(&x, "input_layernorm"));
            add(&mut x, mixed);
            let inner = normed(&x, "post_attention_layernorm");
            let second = inner.iter().map(|x| match layer {
                0 => self.gated("model.layers.0.mlp", x),
                _ => self.mixture(layer, x),
            });
            add(&mut x, second.collect());
        }
        x.iter().flat_map(|x| self.product("lm_head", &self.norm("model.norm", x))).collect()
    }
}

fn options() -> Options {
    Options {
        activations: Activations::F32,
        kv_type: Some(KvType::F32),
        max_context: Some(32),
        threads: 2,
        ..Options::for_this_machine().unwrap()
    }
}

/// The greatest difference, of the range of logits.
fn difference(ours: &[f32], reference: &[f64]) -> f64 {
    assert_eq!(ours.len(), reference.len());
    let range = reference.iter().copied().fold(f64::MIN, f64::max) - reference.iter().copied().fold(f64::MAX, f64::min);
    ours.iter().zip(reference).map(|(a, b)| (f64::from(*a) - b).abs()).fold(0.0, f64::max) / range
}

#[test]
fn a_toy_of_one_file_runs_with_all_that_its_description_says() {
    register();
    let folder = TempDir::new().unwrap();
    let tensors = write(folder.path());
    let mut engine = Engine::open(folder.path(), options()).unwrap();
    assert!(engine.skipped().is_empty(), "{:?}", engine.skipped());
    let tokens: Vec<u32> = (0..12).map(|i| (i * 7 + 3) % VOCABULARY as u32).collect();
    let mut ours = Vec::new();
    let id = engine.add_sequence();
    // A prompt, and then single tokens.
    let (prompt, steps) = tokens.split_at(8);
    for part in std::iter::once(prompt).chain(steps.chunks(1)) {
        let keep = |_, logits: &[f32]| {
            ours.extend_from_slice(logits);
            Ok(())
        };
        engine.feed(id, part, true, keep).unwrap();
    }
    let of = |without| difference(&ours, &Reference { tensors: &tensors, without }.logits(&tokens));
    assert!(of("") < 1e-4, "{} of the range away", of(""));
    for part in ["biases", "sinks", "softcap", "windows", "correction", "groups", "scale", "shared"] {
        assert!(of(part) > 1e-2, "{part} does not matter: {} of the range away", of(part));
    }
}

#[test]
fn what_no_operation_computes_is_refused_by_name() {
    register();
    let folder = TempDir::new().unwrap();
    write(folder.path());
    for (model_type, what) in [
        ("toy_latent", "layer 1 has latent attention"),
        ("toy_scales", "layer 1 has a router with scales of experts and without a softmax of all"),
        ("toy_softmax_groups", "layer 1 has a softmax router with a correction bias"),
    ] {
        std::fs::write(folder.path().join("config.json"), config(model_type).to_string()).unwrap();
        let error = format!("{:#}", Engine::open(folder.path(), options()).err().unwrap());
        assert!(error.contains(what) && error.contains("no operation"), "{model_type}: {error}");
    }
}
