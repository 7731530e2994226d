//! Checkpoints as their producers quantise them (`tests/golden/quantized`): values are exactly those that a file defines, logits those of transformers on these values, and
//! how the work is divided changes no bit.

mod values;

use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use sluice_engine::{Activations, Engine, Isa, KvType, Options, Placement};
use sluice_store::{Checkpoint, Dtype, LoadMode, Tensor, TensorPlan, Writer};
use tempfile::TempDir;

use crate::support::{folder, logits};

const ACTIVATIONS: [Activations; 4] = [Activations::F32, Activations::Bf16, Activations::Int8, Activations::Int11];

struct Case {
    name: String,
    folder: PathBuf,
    range: f32,
}

fn cases() -> (Vec<u32>, Vec<Case>) {
    let index = std::fs::read(folder("quantized/cases.json")).unwrap();
    let index: Value = serde_json::from_slice(&index).unwrap();
    let tokens = index["tokens"].as_array().unwrap().iter().map(|t| t.as_u64().unwrap() as u32).collect();
    let case = |case: &Value| {
        let name = case["name"].as_str().unwrap();
        let range = case["range"].as_f64().unwrap() as f32;
        Case { name: name.to_owned(), folder: folder("quantized").join(name), range }
    };
    let cases: Vec<Case> = index["cases"].as_array().unwrap().iter().map(case).collect();
    assert!(cases.len() >= 20, "only {} cases found", cases.len());
    (tokens, cases)
}

fn options(activations: Activations) -> Options {
    Options {
        activations,
        kv_type: Some(KvType::F32),
        max_context: Some(64),
        threads: 2,
        ..Options::for_this_machine().unwrap()
    }
}

fn bits(path: &Path, options: Options, tokens: &[u32], pieces: &[usize]) -> Vec<u32> {
    logits(&mut Engine::open(path, options).unwrap(), tokens, pieces)
}

/// A copy of the folder with some tensors changed.
fn changed(from: &Path, change: impl Fn(&mut Vec<(TensorPlan, Vec<u8>)>)) -> TempDir {
    let to = tempfile::tempdir().unwrap();
    std::fs::copy(from.join("config.json"), to.path().join("config.json")).unwrap();
    let checkpoint = Checkpoint::open(from).unwrap();
    let tensor = |t: &Tensor| {
        let plan = TensorPlan { name: t.name.to_string(), dtype: t.dtype, shape: t.shape.clone() };
        (plan, t.bytes.to_vec())
    };
    let mut tensors = checkpoint.tensors().iter().map(tensor).collect();
    change(&mut tensors);
    let plans: Vec<TensorPlan> = tensors.iter().map(|(plan, _)| plan.clone()).collect();
    let mut writer = Writer::create(&to.path().join("model.safetensors"), &plans, &Default::default()).unwrap();
    tensors.iter().for_each(|(plan, bytes)| writer.append(&plan.name, bytes).unwrap());
    writer.finish().unwrap();
    to
}

#[test]
fn logits_are_those_of_transformers_on_the_dequantised_weights() {
    let (tokens, cases) = cases();
    for Case { name, folder, range } in cases {
        let wanted = std::fs::read(folder.join("logits.f32")).unwrap();
        let wanted: Vec<f32> = wanted.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
        let found = bits(&folder, options(Activations::F32), &tokens, &[10, 1]);
        assert_eq!(found.len(), wanted.len(), "{name}");
        let difference = |(a, b): (&u32, &f32)| (f32::from_bits(*a) - b).abs();
        let worst = found.iter().zip(&wanted).map(difference).fold(0.0, f32::max) / range;
        println!("{name:20} {worst:.1e} of the range from transformers");
        assert!(worst < 5e-6, "{name}: {worst} of the range away from transformers");
    }
}

#[test]
fn the_values_that_a_file_defines_are_computed_with() {
    let (tokens, cases) = cases();
    // Columns in another order are other sums of the same values, which `model/tests/quantized.rs` compares.
    for Case { name, folder, .. } in cases.into_iter().filter(|case| !case.name.contains("act_order")) {
        let plain = values::dequantised(&folder);
        let wanted = bits(plain.path(), options(Activations::F32), &tokens, &[16]);
        let found = bits(&folder, options(Activations::F32), &tokens, &[16]);
        assert!(found == wanted, "{name}: other bits than with its values as f32");
    }
}

#[test]
fn chunks_threads_and_instruction_sets_give_the_same_bits() {
    let (tokens, cases) = cases();
    for Case { name, folder, .. } in cases {
        for activations in ACTIVATIONS {
            let of = |isa, threads, pieces: &[usize]| {
                bits(&folder, Options { isa, threads, ..options(activations) }, &tokens, pieces)
            };
            let wanted = of(*Isa::supported().last().unwrap(), 1, &[16]);
            assert!(wanted.iter().all(|x| f32::from_bits(*x).is_finite()), "{name} {activations:?}");
            for isa in Isa::supported() {
                for (threads, pieces) in [(1, &[1][..]), (2, &[7, 1]), (3, &[16])] {
                    let found = of(isa, threads, pieces);
                    assert!(found == wanted, "{name} {activations:?}: {isa}, {threads} threads, pieces {pieces:?}");
                }
            }
        }
    }
}

#[test]
fn readers_and_places_of_experts_give_the_same_bits() {
    let (tokens, cases) = cases();
    let mut streamed = 0;
    for Case { name, folder, .. } in cases {
        let wanted = bits(&folder, options(Activations::F32), &tokens, &[16]);
        for mode in [LoadMode::Mmap, LoadMode::Pread, LoadMode::Direct] {
            let mut options = options(Activations::F32);
            options.load.mode = mode;
            assert!(bits(&folder, options, &tokens, &[16]) == wanted, "{name}: {mode:?}");
        }
        for experts in [Placement::Slots, Placement::PageCache].into_iter().filter(|_| name.ends_with("experts")) {
            let options = Options { experts, ..options(Activations::F32) };
            if name.starts_with("gptq") || name.contains("act_order") {
                let why = refusal(&folder, options);
                assert!(why.contains("model.layers.0.mlp.experts.0.gate_proj.weight: experts"), "{why}");
                assert!(why.contains("cannot stay on disk"), "{why}");
                continue;
            }
            assert!(bits(&folder, options, &tokens, &[16]) == wanted, "{name}: {experts:?}");
            streamed += 1;
        }
    }
    assert_eq!(streamed, 6);
}

fn refusal(path: &Path, options: Options) -> String {
    match Engine::open(path, options) {
        Ok(_) => "accepted".into(),
        Err(e) => format!("{e:#}"),
    }
}

#[test]
fn tensors_that_do_not_fit_are_refused_by_their_names() {
    const GATE: &str = "model.layers.0.mlp.gate_proj";
    type Change = fn(&mut TensorPlan, &mut Vec<u8>);
    let flat: Change = |plan, _| plan.shape = vec![plan.shape.iter().product()];
    let beyond: Change = |_, bytes| bytes[0] = 3;
    let moved: Change = |_, bytes| bytes[0] = 1;
    let infinite: Change = |_, bytes| bytes[..2].copy_from_slice(&[0x80, 0x7f]);
    // Case, the tensor after its module's name, what becomes of it (`None`: it is gone), and words of the error.
    let all: [(&str, &str, Option<Change>, &str); 18] = [
        ("fp8_blocks", "weight_scale_inv", None, "F8_E4M3 without scales"),
        ("fp8_blocks", "weight_scale_inv", Some(flat), "no scales of [160, 160] in blocks of 128 x 128"),
        ("fp8_blocks", "weight", Some(flat), "[25600], the config asks for [160, 160]"),
        ("fp8_channels", "weight_scale", Some(|plan, _| plan.dtype = Dtype::I16), "I16 are no scales"),
        ("w4a16", "weight_scale", None, "no tensor"),
        ("w4a16", "weight_scale", Some(flat), "expected scales of 160 rows"),
        ("w4a16", "weight_packed", Some(flat), "no packed matrix of 160 x 96"),
        ("w4a16", "weight_scale", Some(infinite), "not exact"),
        ("w4a16_asymmetric", "weight_zero_point", None, "`symmetric`"),
        ("w4a16_asymmetric", "weight_zero_point", Some(flat), "no zero points of 160 rows and 3 groups"),
        ("awq", "qzeros", None, "no tensor"),
        ("awq", "scales", Some(flat), "does not fit 160 x 96"),
        ("gptq", "qweight", Some(flat), "does not fit 160 x 96"),
        ("gptq", "g_idx", Some(beyond), "column 0 is of group 3 of 3"),
        ("gptq", "g_idx", Some(moved), "groups of different sizes"),
        ("nvfp4", "weight_global_scale", None, "without one of the whole matrix"),
        ("nvfp4", "weight_scale", Some(flat), "the config asks for [160, 6]"),
        ("mlx_mxfp8", "scales", Some(flat), "the config asks for [160, 3]"),
    ];
    for (case, leaf, change, wanted) in all {
        let name = format!("{GATE}.{leaf}");
        let folder = changed(&folder("quantized").join(case), |tensors| {
            let place = tensors.iter().position(|(plan, _)| plan.name == name).unwrap();
            match change {
                Some(change) => {
                    let (plan, bytes) = &mut tensors[place];
                    change(plan, bytes);
                }
                None => _ = tensors.remove(place),
            }
        });
        let why = refusal(folder.path(), options(Activations::F32));
        assert!(why.contains(wanted) && why.contains(GATE), "{case} {leaf}: {why}");
    }
}

#[test]
fn methods_that_are_not_read_are_refused_by_their_names() {
    let folder = changed(&folder("quantized/awq"), |_| {});
    let path = folder.path().join("config.json");
    let mut config: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    for (method, wanted) in [
        (json!({"quant_method": "bitsandbytes"}), "bitsandbytes"),
        (json!({"quant_method": "awq", "version": "gemv"}), "gemv"),
        (json!({"quant_method": "fp8"}), "neither of AWQ nor of GPTQ"),
    ] {
        config["quantization_config"] = method;
        std::fs::write(&path, config.to_string()).unwrap();
        let why = refusal(folder.path(), options(Activations::F32));
        assert!(why.contains(wanted), "{why}");
    }
}
