//! A model gives the same logits from a GGUF file as from safetensors: to the bit where the file has the same rows, closely where it has them in another order.
//! Random tiny models of every architecture are written both ways, the GGUF file as llama.cpp's converter does.

mod convert;
#[path = "../../../../../tests/gguf.rs"]
mod writer;

use std::path::Path;
use std::sync::Arc;

use convert::{Model, model};
use sluice_engine::{Activations, Engine, KvType, ModelSource, Options, Placement, TablePlacement, source};
use tempfile::TempDir;

/// Tokens of every run.
const TOKENS: [u32; 40] = [
    5, 17, 42, 1, 9, 33, 60, 2, 8, 25, 44, 61, 3, 3, 12, 50, 7, 29, 31, 18, 40, 22, 6, 11, 55, 47, 13, 4, 38, 26, 63,
    10, 36, 14, 58, 20, 45, 0, 27, 16,
];

fn options(activations: Activations) -> Options {
    Options {
        activations,
        kv_type: Some(KvType::F32),
        max_context: Some(64),
        threads: 2,
        ..Options::for_this_machine().unwrap()
    }
}

/// Logits of all tokens, and what the engine left out of the files.
fn logits(path: &Path, activations: Activations) -> (Vec<f32>, Vec<String>) {
    logits_with(path, options(activations))
}

fn logits_with(path: &Path, options: Options) -> (Vec<f32>, Vec<String>) {
    let source: Arc<dyn ModelSource> = source::open(path).unwrap();
    let mut engine = Engine::open_source(&source, options, &sluice_engine::cpu).unwrap();
    let (id, mut rows) = (engine.add_sequence(), Vec::new());
    for chunk in [&TOKENS[..30], &TOKENS[30..31], &TOKENS[31..]] {
        let keep = |_, logits: &[f32]| {
            rows.extend_from_slice(logits);
            Ok(())
        };
        engine.feed(id, chunk, true, keep).unwrap();
    }
    (rows, engine.skipped().to_vec())
}

fn bits(logits: &[f32]) -> Vec<u32> {
    logits.iter().map(|x| x.to_bits()).collect()
}

/// The greatest difference, relative to the range of `wanted`.
fn difference(found: &[f32], wanted: &[f32]) -> f32 {
    assert_eq!(found.len(), wanted.len());
    let range = wanted.iter().fold(f32::MIN, |a, &b| a.max(b)) - wanted.iter().fold(f32::MAX, |a, &b| a.min(b));
    assert!(range > 0.1, "logits that say nothing: {range}");
    found.iter().zip(wanted).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max) / range
}

/// The model as a folder and as a file, which `change` may alter first.
fn written(model: &Model, change: impl FnOnce(&mut writer::Gguf)) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("folder");
    std::fs::create_dir(&folder).unwrap();
    model.write_safetensors(&folder);
    let mut file = model.gguf();
    change(&mut file);
    std::fs::write(dir.path().join("model.gguf"), file.bytes()).unwrap();
    dir
}

fn compare(name: &str, dir: &TempDir, exact: bool) {
    compare_within(name, dir, if exact { 0.0 } else { 1e-5 });
}

/// The same with the most that logits may differ by, relative to their range; 0: in no bit.
fn compare_within(name: &str, dir: &TempDir, most: f32) {
    let (wanted, _) = logits(&dir.path().join("folder"), Activations::F32);
    let (found, skipped) = logits(&dir.path().join("model.gguf"), Activations::F32);
    assert!(skipped.is_empty(), "{name}: {skipped:?}");
    if most == 0.0 {
        assert!(bits(&found) == bits(&wanted), "{name}: {} of the range", difference(&found, &wanted));
    } else {
        let worst = difference(&found, &wanted);
        assert!(worst < most, "{name}: {worst} of the range");
    }
}

#[test]
fn every_architecture_gives_the_logits_of_its_folder() {
    for name in convert::ARCHITECTURES {
        let model = model(name);
        // Value heads in another order are summed in another order, and so are latents whose matrices are apart.
        let moved = ["qwen3_5", "qwen4", "deepseek_v32", "mistral4", "kimi_linear", "glm5_next"];
        let exact = !moved.iter().any(|moved| name.starts_with(moved));
        compare(name, &written(&model, |_| {}), exact);
    }
}

#[test]
fn latents_may_have_a_stack_of_matrices_for_keys_and_one_for_values() {
    // Sums run over columns then, instead of rows.
    let model = model("deepseek_v3").split();
    compare("deepseek_v3, split", &written(&model, |_| {}), false);
    // Scores of streams are sums of large numbers here, and few bits of them make a difference.
    compare_within("kimi_k3, split", &written(&convert::model("kimi_k3").split(), |_| {}), 5e-5);
}

#[test]
fn chunks_and_threads_change_no_bit() {
    let models = [
        "llama",
        "gemma3_text",
        "gemma4_text",
        "qwen3_5_moe_text",
        "gpt_oss",
        "deepseek_v3",
        "glm5_next",
        "deepseek_v4",
        "qwen4_exp_text",
    ]
    .map(|name| (name, model(name)));
    let split = [("deepseek_v3, split", model("deepseek_v3").split()), ("kimi_k3, split", model("kimi_k3").split())];
    for (name, model) in models.into_iter().chain(split) {
        let dir = written(&model, |_| {});
        let path = dir.path().join("model.gguf");
        for activations in [Activations::F32, Activations::Int8] {
            let (whole, _) = logits(&path, activations);
            let source: Arc<dyn ModelSource> = source::open(&path).unwrap();
            let one = Options { threads: 1, ..options(activations) };
            let mut engine = Engine::open_source(&source, one, &sluice_engine::cpu).unwrap();
            let (id, mut rows) = (engine.add_sequence(), Vec::new());
            for token in TOKENS {
                let keep = |_, logits: &[f32]| {
                    rows.extend_from_slice(logits);
                    Ok(())
                };
                engine.feed(id, &[token], true, keep).unwrap();
            }
            assert!(bits(&rows) == bits(&whole), "{name} {activations:?}");
        }
    }
}

#[test]
fn experts_stream_from_the_file() {
    for (name, storage) in [
        ("qwen3_moe", convert::Experts::Stacked),
        ("qwen3_moe", convert::Experts::Merged),
        ("qwen3_5_moe_text", convert::Experts::Single),
        ("gpt_oss", convert::Experts::Stacked),
        ("gemma4_text", convert::Experts::Merged),
        ("kimi_linear", convert::Experts::Stacked),
        ("kimi_k3", convert::Experts::Stacked),
        ("deepseek_v4", convert::Experts::Stacked),
        ("qwen4_exp_text", convert::Experts::Stacked),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("model.gguf");
        std::fs::write(&path, model(name).gguf_with(storage).bytes()).unwrap();
        let (wanted, _) = logits(&path, Activations::F32);
        for placement in [Placement::Slots, Placement::PageCache] {
            let (found, _) = logits_with(&path, Options { experts: placement, ..options(Activations::F32) });
            assert!(bits(&found) == bits(&wanted), "{name} {storage:?} {placement:?}");
        }
    }
}

#[test]
fn rows_of_tables_are_read_from_the_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    // Of n-grams also in blocks (Q8_0): a row is one, of a scale and 32 integers.
    let mut blocks = model("qwen4_exp_text").gguf_without("per_layer_token_embd.weight");
    let row = |row: u8| (0..32).map(move |i: u8| i.wrapping_mul(37).wrapping_add(row));
    let bytes = (0..convert::streams::NGRAM_ROWS).flat_map(|i| [0x00, 0x20].into_iter().chain(row(i as u8))).collect();
    blocks.tensor("per_layer_token_embd.weight", &[convert::streams::NGRAM_ROWS, 32], 8, bytes);
    for file in [model("gemma4_text").gguf(), model("qwen4_exp_text").gguf(), blocks] {
        std::fs::write(&path, file.bytes()).unwrap();
        let on = |tables| Options { tables, table_budget: Some(1), ..options(Activations::F32) };
        let (wanted, _) = logits_with(&path, on(TablePlacement::Memory));
        let (found, _) = logits_with(&path, on(TablePlacement::Disk));
        assert!(bits(&found) == bits(&wanted));
    }
}

#[test]
fn vectors_may_be_in_blocks() {
    // Multiples of 1/64, which is the scale of all blocks (Q8_0).
    let (model, name) = (model("deepseek_v4"), "blk.1.attn_compressor_ape.weight");
    let block = |values: &[f32]| -> Vec<u8> {
        let integers = values.iter().map(|x| ((x * 64.0) as i8).cast_unsigned());
        [0x00, 0x24].into_iter().chain(integers).collect()
    };
    let blocks = model.values(1, "self_attn.compressor.ape").chunks_exact(32).flat_map(block).collect();
    let dir = written(&model, |file| {
        *file = model.gguf_without(name);
        file.tensor(name, &[4, 32], 8, blocks);
    });
    compare("in blocks", &dir, true);
}

#[test]
fn experts_may_be_merged_or_single() {
    let model = model("qwen3_moe");
    for storage in [convert::Experts::Merged, convert::Experts::Single] {
        let dir = written(&model, |file| *file = model.gguf_with(storage));
        compare(&format!("{storage:?}"), &dir, true);
    }
}

#[test]
fn other_converters_files_are_read() {
    // Ollama shortens the name of the decay's bias, and keeps images' tensors in the file; blocks that predict further tokens are counted.
    let plain = model("qwen3_5_text");
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    std::fs::write(&path, plain.gguf().bytes()).unwrap();
    let (wanted, _) = logits(&path, Activations::F32);
    let file = plain.gguf_of_ollama();
    std::fs::write(&path, file.bytes()).unwrap();
    let (found, skipped) = logits(&path, Activations::F32);
    assert!(bits(&found) == bits(&wanted));
    assert!(skipped.iter().any(|part| part == "v") && skipped.iter().any(|part| part == "layers.3"), "{skipped:?}");
}

#[test]
fn any_alignment_and_the_older_version_give_the_same() {
    let model = model("qwen2");
    for (alignment, version) in [(8, 2), (1, 3), (4096, 3)] {
        let dir = written(&model, |file| (file.alignment, file.version) = (alignment, version));
        compare(&format!("alignment {alignment}"), &dir, true);
    }
}

#[test]
fn a_split_model_is_opened_by_any_of_its_parts() {
    let model = model("llama");
    let dir = written(&model, |_| {});
    let (wanted, _) = logits(&dir.path().join("folder"), Activations::F32);
    let parts = tempfile::tempdir().unwrap();
    let name = |n: usize| parts.path().join(format!("tiny-{n:05}-of-00003.gguf"));
    for number in 0..3 {
        std::fs::write(name(number + 1), model.gguf().part(number, 3).bytes()).unwrap();
    }
    for path in [name(1), name(3), parts.path().to_owned()] {
        assert!(bits(&logits(&path, Activations::F32).0) == bits(&wanted), "{}", path.display());
    }
    let refused = |what: &str| {
        let error = format!("{:#}", source::open(&name(2)).err().expect("refused"));
        assert!(error.contains(what), "{error}");
    };
    // A part that is doubled, one of another model, and one that is not there.
    let third = std::fs::read(name(3)).unwrap();
    std::fs::copy(name(1), name(3)).unwrap();
    refused("tiny-00003-of-00003.gguf: not part 3 of 3");
    std::fs::write(name(3), convert::model("qwen2").gguf().part(2, 3).bytes()).unwrap();
    refused("split.tensors.count");
    std::fs::write(name(3), third).unwrap();
    source::open(&name(2)).unwrap();
    std::fs::remove_file(name(3)).unwrap();
    refused("tiny-00003-of-00003.gguf: part of a split model that is not there");
    // A part under another name.
    std::fs::rename(name(2), parts.path().join("renamed.gguf")).unwrap();
    let error = format!("{:#}", source::open(&parts.path().join("renamed.gguf")).err().expect("refused"));
    assert!(error.contains("part 2 of 3") && error.contains("NAME-00002-of-00003.gguf"), "{error}");
}

#[test]
fn a_folder_with_several_models_lists_them() {
    let dir = tempfile::tempdir().unwrap();
    let bytes = model("qwen2").gguf().bytes();
    std::fs::write(dir.path().join("a.gguf"), &bytes).unwrap();
    source::open(dir.path()).unwrap();
    std::fs::write(dir.path().join("mmproj-a.gguf"), "").unwrap();
    source::open(dir.path()).unwrap();
    std::fs::write(dir.path().join("b.gguf"), &bytes).unwrap();
    let error = format!("{:#}", source::open(dir.path()).err().expect("refused"));
    assert!(error.contains("a.gguf") && error.contains("b.gguf") && error.contains("name the file"), "{error}");
    // Its beginning tells what it is, not its name.
    std::fs::rename(dir.path().join("b.gguf"), dir.path().join("b.bin")).unwrap();
    source::open(&dir.path().join("b.bin")).unwrap();
}

#[test]
fn what_is_not_supported_is_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    let refused = |file: writer::Gguf, parts: &[&str]| {
        std::fs::write(&path, file.bytes()).unwrap();
        let opened = source::open(&path)
            .and_then(|source| Engine::open_source(&source, options(Activations::F32), &sluice_engine::cpu).map(drop));
        let error = format!("{:#}", opened.expect_err("refused"));
        for part in parts {
            assert!(error.contains(part), "{error} lacks {part}");
        }
    };
    refused(writer::Gguf::new("mamba"), &["model.gguf", "general.architecture", "mamba", "qwen35moe"]);
    let with = |change: &dyn Fn(&mut writer::Gguf)| {
        let mut file = model("qwen2").gguf();
        change(&mut file);
        file
    };
    refused(
        with(&|f| {
            f.u32("qwen2.expert_count", 8);
        }),
        &["qwen2.expert_count"],
    );
    refused(
        with(&|f| {
            f.string("qwen2.rope.scaling.type", "spiral");
        }),
        &["qwen2.rope.scaling.type", "spiral"],
    );
    refused(
        with(&|f| {
            f.u32("qwen2.rope.dimension_count", 4);
        }),
        &["qwen2.rope.dimension_count"],
    );
    // A type that no kernel reads.
    let mut ternary = model("qwen2").gguf_without("blk.1.ffn_down.weight");
    ternary.tensor("blk.1.ffn_down.weight", &[32, 256], 34, vec![0; 32 * 54]);
    refused(ternary, &["blk.1.ffn_down.weight", "TQ1_0"]);
    refused(model("qwen2").gguf_without("blk.1.ffn_down.weight"), &["no tensor", "blk.1.ffn_down.weight"]);
}
