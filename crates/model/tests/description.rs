//! What a config alone says of a model is what its checkpoint holds.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use sluice_backend::{Activations, Isa};
use sluice_cpu::Cpu;
use sluice_model::{
    Belongs, Config, Description, Leaf, ModelTensors, Options, WeightClass, WeightKind, describe, describe_stored,
    source,
};
use sluice_store::{Checkpoint, Dtype, TensorPlan, Writer};

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden")
}

fn open(name: &str) -> (Description, ModelTensors) {
    let source = source::open(&golden().join(name)).unwrap();
    (describe(source.config(), &Options::default()).unwrap(), source.tensors().unwrap())
}

/// Every weight is there under the name that the description has for it, with its elements, and every tensor that is no weight is left out.
#[test]
fn names_and_shapes_are_those_of_every_checkpoint() {
    let folders = std::fs::read_dir(golden()).unwrap().map(|e| e.unwrap().path());
    let mut seen = 0;
    for folder in folders.filter(|f| f.join("config.json").exists()) {
        let name = folder.file_name().unwrap().to_str().unwrap();
        let (description, tensors) = open(name);
        let checkpoint = tensors.checkpoint();
        let mut found = BTreeSet::new();
        for t in checkpoint.tensors() {
            let Some(values) = tensors.layout().values_of(&t.name) else { continue };
            let m = match tensors.belongs(&description, &values) {
                Belongs::Text(meaning) => meaning,
                Belongs::LeftOut(part) => {
                    let known = [
                        "visual",
                        "vision_tower",
                        "vision_embedder",
                        "multi_modal_projector",
                        "mtp",
                        "audio_tower",
                        "embed_vision",
                        "embed_audio",
                    ];
                    assert!(known.contains(&&*part), "{name}: {}", t.name);
                    continue;
                }
                // Integers that n-grams are hashed with.
                Belongs::Computed if t.dtype == Dtype::I64 => continue,
                Belongs::Computed => panic!("{name}: {}", t.name),
            };
            if !matches!(m.leaf, Leaf::Bare | Leaf::Weight) {
                assert_ne!(m.leaf, Leaf::Other, "{name}: {}", t.name);
                continue;
            }
            let rows = |w: sluice_model::WeightDescription| if m.expert.is_some() { w.rows } else { w.count * w.rows };
            let elements = (rows(m.weight) + m.with.map_or(0, rows)) * m.weight.cols;
            // Numbers of four bits, two in a byte.
            let packed = if t.dtype == Dtype::U8 { 2 } else { 1 };
            let stored: usize = packed * t.shape.iter().product::<usize>();
            if t.dtype == Dtype::U32 {
                assert!(m.weight.kind == WeightKind::Matrix && stored < elements, "{name}: {}", t.name);
            } else if name == "kimi_k3" && t.name.ends_with("A_log") {
                // Padded: those of heads come first.
                assert!(stored > elements, "{name}: {}", t.name);
            } else {
                assert_eq!(stored, elements, "{name}: {}", t.name);
            }
            found.extend([Some(m.weight), m.with].into_iter().flatten().map(|w| (w.name(), m.expert)));
        }
        for w in description.weights() {
            let experts = if found.contains(&(w.name(), None)) { 1 } else { w.count };
            let is_there = |e: usize| found.contains(&(w.name(), if experts == 1 { None } else { Some(e) }));
            assert!((0..experts).all(is_there), "{name} lacks {}", w.name());
        }
        seen += 1;
    }
    assert!(seen >= 33, "only {seen} checkpoints");
}

#[test]
fn experts_mean_the_same_in_each_of_their_spellings() {
    let (d, _) = open("qwen3_5_moe");
    let of = |short: &str| {
        let m = d.meaning(short).unwrap_or_else(|| panic!("{short}"));
        (m.weight.name(), m.expert, m.leaf)
    };
    let up = || "layers.1.mlp.experts.up_proj".to_owned();
    assert_eq!(of("layers.1.mlp.experts.3.up_proj.weight"), (up(), Some(3), Leaf::Weight));
    assert_eq!(of("layers.1.mlp.experts.3.up_proj.scales"), (up(), Some(3), Leaf::Scales));
    assert_eq!(of("layers.1.mlp.switch_mlp.up_proj.biases"), (up(), None, Leaf::Biases));
    let both = d.meaning("layers.1.mlp.experts.gate_up_proj").unwrap();
    assert_eq!((both.weight.projection(), both.with.unwrap().name(), both.leaf), ("gate_proj", up(), Leaf::Bare));
    assert_eq!(of("layers.1.mlp.experts.7.padding").2, Leaf::Padding);
    // A shared expert and a router are none.
    for (short, class) in [
        ("layers.1.mlp.shared_expert.up_proj.weight", WeightClass::SharedExpert),
        ("layers.1.mlp.shared_expert_gate.weight", WeightClass::Router),
        ("layers.1.mlp.gate.weight", WeightClass::Router),
        ("lm_head.weight", WeightClass::Head),
    ] {
        assert_eq!(d.meaning(short).unwrap().weight.class, class, "{short}");
    }
}

#[test]
fn a_name_in_the_spelling_of_mlx_means_the_weight_it_was_made_of() {
    for name in
        ["qwen3_5_moe", "deepseek_v3", "gpt_oss", "gemma4_moe", "gemma4_per_layer", "nemotron_h_moe", "granitemoe"]
    {
        let (d, _) = open(name);
        for w in d.weights() {
            let spelled = d.mlx_name(&w);
            let meant = d.meaning(&format!("{spelled}.weight")).unwrap_or_else(|| panic!("{name}: {spelled}"));
            assert_eq!((meant.weight.name(), meant.expert), (w.name(), None), "{name}: {spelled}");
        }
    }
    let (d, _) = open("gemma4_moe");
    let down = d.weights().find(|w| w.name() == "layers.0.mlp.experts.down_proj").unwrap();
    assert_eq!(d.mlx_name(&down), "layers.0.experts.switch_glu.down_proj");
}

#[test]
fn what_no_layer_has_is_left_out_and_named_once() {
    let (d, tensors) = open("qwen3_5_vl");
    let text = |short: &str| format!("model.language_model.{short}");
    let left_out = |name: String| match tensors.belongs(&d, &name) {
        Belongs::LeftOut(part) => part,
        other => panic!("{name}: {other:?}"),
    };
    assert_eq!(left_out(text("layers.1.indexer.weight")), "indexer.weight");
    assert_eq!(left_out(text("layers.40.mlp.gate_proj.weight")), "layers.40");
    assert_eq!(left_out(text("layers.x.mlp")), "layers.x");
    assert_eq!(left_out("model.visual.blocks.0.attn.qkv.weight".into()), "visual");
    assert_eq!(left_out("mtp.layers.0.mlp.experts.0.up_proj.weight".into()), "mtp");
    assert_eq!(tensors.belongs(&d, &text("layers.1.self_attn.rotary_emb.inv_freq")), Belongs::Computed);
}

/// A copy of a golden checkpoint of one file, its tensors and its config changed.
struct Edited {
    dir: tempfile::TempDir,
    tensors: Vec<(TensorPlan, Vec<u8>)>,
    config: serde_json::Value,
}

impl Edited {
    fn of(name: &str) -> Edited {
        let checkpoint = Checkpoint::open(&golden().join(name)).unwrap();
        let plan =
            |t: &sluice_store::Tensor| TensorPlan { name: t.name.to_string(), dtype: t.dtype, shape: t.shape.clone() };
        let tensors = checkpoint.tensors().iter().map(|t| (plan(t), t.bytes.to_vec())).collect();
        let config = std::fs::read(golden().join(name).join("config.json")).unwrap();
        Edited { dir: tempfile::tempdir().unwrap(), tensors, config: serde_json::from_slice(&config).unwrap() }
    }

    fn tensor(&mut self, name: &str) -> &mut (TensorPlan, Vec<u8>) {
        self.tensors.iter_mut().find(|(t, _)| t.name == name).unwrap_or_else(|| panic!("no {name}"))
    }

    /// Adds a tensor that is another one under a new name.
    fn add_copy(&mut self, of: &str, name: &str) -> &mut Vec<u8> {
        let (plan, bytes) = self.tensor(of).clone();
        self.tensors.push((TensorPlan { name: name.to_owned(), ..plan }, bytes));
        &mut self.tensors.last_mut().unwrap().1
    }

    fn add(&mut self, name: &str, dtype: Dtype, shape: &[usize]) {
        let plan = TensorPlan { name: name.to_owned(), dtype, shape: shape.to_vec() };
        let bytes = vec![0; plan.size().unwrap() as usize];
        self.tensors.push((plan, bytes));
    }

    fn open(&self) -> ModelTensors {
        let plan: Vec<TensorPlan> = self.tensors.iter().map(|(t, _)| t.clone()).collect();
        let path = self.dir.path().join("model.safetensors");
        let mut writer = Writer::create(&path, &plan, &BTreeMap::new()).unwrap();
        self.tensors.iter().for_each(|(t, bytes)| writer.append(&t.name, bytes).unwrap());
        writer.finish().unwrap();
        let config = Config::parse("config.json".into(), self.config.to_string().as_bytes()).unwrap();
        ModelTensors::of_safetensors(Checkpoint::open(self.dir.path()).unwrap(), config)
    }

    fn describe(&self) -> anyhow::Result<Description> {
        describe_stored(&self.open(), &Options::default())
    }

    fn left_out(&self) -> Vec<String> {
        let tensors = self.open();
        tensors.left_out(&describe_stored(&tensors, &Options::default()).unwrap())
    }

    fn check(&self) -> anyhow::Result<Description> {
        sluice_model::check(&self.open(), &mut Cpu::new(Isa::GENERIC, 1, Activations::F32).unwrap())
    }
}

const EMBEDDING: &str = "model.embed_tokens.weight";

/// What the config says of the head is believed where the files do not say otherwise.
#[test]
fn a_stored_head_counts_unless_it_is_the_embedding_to_the_last_bit() {
    let as_said = Edited::of("llama");
    let found = as_said.describe().unwrap();
    assert!(found.tied && found.notes.is_empty(), "{:?}", found.notes);

    let mut same = Edited::of("llama");
    same.add_copy(EMBEDDING, "lm_head.weight");
    let found = same.check().unwrap();
    assert!(found.tied && found.notes.is_empty(), "{:?}", found.notes);
    assert_eq!(same.left_out(), ["lm_head (the embedding once more)"]);

    let mut other = Edited::of("llama");
    *other.add_copy(EMBEDDING, "lm_head.weight").last_mut().unwrap() ^= 1;
    let found = other.check().unwrap();
    assert!(!found.tied && found.weights().any(|w| w.class == WeightClass::Head));
    assert!(found.notes.len() == 1 && found.notes[0].contains("lm_head.weight"), "{:?}", found.notes);
    assert_eq!(other.left_out(), [""; 0]);

    // A head of another type is another one, whatever its numbers are.
    let mut wide = Edited::of("llama");
    let shape = wide.tensor(EMBEDDING).0.shape.clone();
    wide.add("lm_head.weight", Dtype::F32, &shape);
    assert!(!wide.check().unwrap().tied);
}

#[test]
fn a_quantised_head_is_compared_with_its_scales() {
    let mut same = Edited::of("mlx_qwen3");
    same.config["tie_word_embeddings"] = true.into();
    same.tensors.retain(|(t, _)| !t.name.starts_with("lm_head"));
    for leaf in ["weight", "scales", "biases"] {
        same.add_copy(&format!("model.embed_tokens.{leaf}"), &format!("lm_head.{leaf}"));
    }
    assert!(same.check().unwrap().tied);
    *same.tensor("lm_head.biases").1.first_mut().unwrap() ^= 1;
    assert!(!same.check().unwrap().tied);
}

#[test]
fn one_matrix_may_bear_the_name_of_the_head() {
    let mut edited = Edited::of("llama");
    edited.tensor(EMBEDDING).0.name = "lm_head.weight".into();
    let found = edited.check().unwrap();
    assert!(found.tied && found.notes.is_empty(), "{:?}", found.notes);
    assert_eq!(edited.left_out(), [""; 0]);
    edited.config["tie_word_embeddings"] = false.into();
    let error = format!("{:#}", edited.check().unwrap_err());
    assert!(error.contains(EMBEDDING) && error.contains("tie_word_embeddings"), "{error}");
}

#[test]
fn a_multimodal_config_may_contradict_itself_about_the_head() {
    for (root, text) in [(true, false), (false, true)] {
        let mut edited = Edited::of("qwen3_5_vl");
        edited.config["tie_word_embeddings"] = root.into();
        edited.config["text_config"]["tie_word_embeddings"] = text.into();
        // No head is stored: it can only be the embedding.
        assert!(edited.check().unwrap().tied, "{root} {text}");
        *edited.add_copy("model.language_model.embed_tokens.weight", "lm_head.weight").first_mut().unwrap() ^= 1;
        assert!(!edited.check().unwrap().tied, "{root} {text}");
    }
}

/// As in the reference: a bias that the config does not ask for is not the model's. It is named.
#[test]
fn biases_count_where_the_config_has_them() {
    let mut edited = Edited::of("llama");
    edited.add("model.layers.0.self_attn.q_proj.bias", Dtype::BF16, &[96]);
    edited.add("lm_head.bias", Dtype::BF16, &[256]);
    edited.check().unwrap();
    assert_eq!(edited.left_out(), ["self_attn.q_proj.bias", "lm_head.bias"]);
    edited.config["attention_bias"] = true.into();
    edited.check().unwrap();
    assert_eq!(edited.left_out(), ["lm_head.bias"]);
    let mut experts = Edited::of("qwen3_moe");
    for e in 0..9 {
        experts.add(&format!("model.layers.0.mlp.experts.{e}.up_proj.bias"), Dtype::BF16, &[20]);
    }
    experts.check().unwrap();
    assert_eq!(experts.left_out(), ["biases of experts"]);
}

#[test]
fn what_a_config_says_and_nobody_follows_is_noted() {
    let mut edited = Edited::of("qwen3_5_vl");
    let epsilon = edited.config["text_config"].as_object_mut().unwrap().remove("rms_norm_eps").unwrap();
    edited.config["rms_norm_eps"] = epsilon;
    let found = edited.describe().unwrap();
    assert_eq!(found.eps, 1e-6);
    assert!(found.notes.len() == 1 && found.notes[0].contains("`rms_norm_eps`"), "{:?}", found.notes);
    let mut edited = Edited::of("llama");
    edited.config["partial_rotary_factor"] = 0.5.into();
    edited.config["rope_scaling"] = serde_json::Value::Null;
    let found = edited.describe().unwrap();
    assert_eq!(found.rotary.inv_freq.len(), 8);
    assert!(found.notes.len() == 1 && found.notes[0].contains("partial_rotary_factor"), "{:?}", found.notes);
}

/// The context is what YaRN makes of the trained one, where that is more than `max_position_embeddings`.
#[test]
fn yarn_extends_the_context() {
    let mut edited = Edited::of("llama");
    edited.config["max_position_embeddings"] = 40960.into();
    let scaling = serde_json::json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768});
    edited.config["rope_scaling"] = scaling;
    assert_eq!(edited.describe().unwrap().max_context, 131072);
    edited.config["max_position_embeddings"] = 262144.into();
    assert_eq!(edited.describe().unwrap().max_context, 262144);
}

/// Operations add no bias between gate and up: a checkpoint that has one is another model.
#[test]
fn a_bias_of_a_feed_forward_layer_is_refused_by_name() {
    let mut edited = Edited::of("qwen3_window");
    let bias = "model.layers.1.mlp.up_proj.bias";
    edited.add(bias, Dtype::F16, &[60]);
    let error = edited.check().unwrap_err();
    assert!(format!("{error:#}").contains(bias), "{error:#}");
}
