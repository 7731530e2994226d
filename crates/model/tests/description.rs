//! What a config alone says of a model is what its checkpoint holds.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use sluice_backend::{Activations, Cpu, Isa};
use sluice_model::{Belongs, Config, Description, Leaf, Names, Options, WeightClass, WeightKind, describe};
use sluice_store::{Checkpoint, Dtype, TensorPlan, Writer};

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden")
}

fn open(name: &str) -> (Description, Checkpoint) {
    let folder = golden().join(name);
    let description = describe(&Config::open(&folder).unwrap(), &Options::default()).unwrap();
    (description, Checkpoint::open(&folder).unwrap())
}

/// Every weight is there under the name that the description has for it, with its elements, and every tensor that is no weight is left out.
#[test]
fn names_and_shapes_are_those_of_every_checkpoint() {
    let folders = std::fs::read_dir(golden()).unwrap().map(|e| e.unwrap().path());
    let mut seen = 0;
    for folder in folders.filter(|f| f.join("config.json").exists()) {
        let name = folder.file_name().unwrap().to_str().unwrap();
        let (description, checkpoint) = open(name);
        let names = Names::of(&checkpoint).unwrap();
        let mut found = BTreeSet::new();
        for t in checkpoint.tensors() {
            let m = match names.belongs(&description, &t.name) {
                Belongs::Text(meaning) => meaning,
                Belongs::LeftOut(part) => {
                    assert!(["visual", "vision_tower", "mtp"].contains(&part), "{name}: {}", t.name);
                    continue;
                }
                Belongs::Computed => panic!("{name}: {}", t.name),
            };
            if !matches!(m.leaf, Leaf::Bare | Leaf::Weight) {
                assert_ne!(m.leaf, Leaf::Other, "{name}: {}", t.name);
                continue;
            }
            let rows = |w: sluice_model::WeightDescription| if m.expert.is_some() { w.rows } else { w.count * w.rows };
            let elements = (rows(m.weight) + m.with.map_or(0, rows)) * m.weight.cols;
            let stored: usize = t.shape.iter().product();
            if t.dtype == Dtype::U32 {
                assert!(m.weight.kind == WeightKind::Matrix && stored < elements, "{name}: {}", t.name);
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
    assert!(seen >= 19, "only {seen} checkpoints");
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
fn what_no_layer_has_is_left_out_and_named_once() {
    let (d, checkpoint) = open("qwen3_5_vl");
    let names = Names::of(&checkpoint).unwrap();
    let text = |short: &str| format!("model.language_model.{short}");
    let left_out = |name: String| match names.belongs(&d, &name) {
        Belongs::LeftOut(part) => part.to_owned(),
        other => panic!("{name}: {other:?}"),
    };
    assert_eq!(left_out(text("layers.1.indexer.weight")), "indexer.weight");
    assert_eq!(left_out(text("layers.40.mlp.gate_proj.weight")), "layers.40");
    assert_eq!(left_out(text("layers.x.mlp")), "layers.x");
    assert_eq!(left_out("model.visual.blocks.0.attn.qkv.weight".into()), "visual");
    assert_eq!(left_out("mtp.layers.0.mlp.experts.0.up_proj.weight".into()), "mtp");
    assert_eq!(names.belongs(&d, &text("layers.1.self_attn.rotary_emb.inv_freq")), Belongs::Computed);
}

/// Operations add no bias between gate and up: a checkpoint that has one is another model.
#[test]
fn a_bias_of_a_feed_forward_layer_is_refused_by_name() {
    let (_, checkpoint) = open("qwen3_window");
    let dir = tempfile::tempdir().unwrap();
    let bias = "model.layers.1.mlp.up_proj.bias";
    let tensors = checkpoint.tensors();
    let mut plan: Vec<TensorPlan> = tensors
        .iter()
        .map(|t| TensorPlan { name: t.name.to_string(), dtype: t.dtype, shape: t.shape.clone() })
        .collect();
    plan.push(TensorPlan { name: bias.to_owned(), dtype: Dtype::F16, shape: vec![60] });
    let mut writer = Writer::create(&dir.path().join("model.safetensors"), &plan, &BTreeMap::new()).unwrap();
    tensors.iter().for_each(|t| writer.append(&t.name, &t.bytes).unwrap());
    writer.append(bias, &[0; 120]).unwrap();
    writer.finish().unwrap();
    let config = Config::open(&golden().join("qwen3_window")).unwrap();
    let mut backend = Cpu::new(Isa::GENERIC, 1, Activations::F32).unwrap();
    let error = sluice_model::check(&Checkpoint::open(dir.path()).unwrap(), &config, &mut backend).unwrap_err();
    assert!(format!("{error:#}").contains(bias), "{error:#}");
}
