//! MTP heads (multi-token prediction): their output beside the reference's, and their drafts.

use std::path::Path;

use serde_json::Value;
use sluice_backend::{Backend, Capacity, SequenceInput, StepInputs, Wanted};
use sluice_engine::sampling::SamplingParams;
use sluice_engine::{
    Activations, AttentionMode, Checkpoint, Config, Cpu, DraftOptions, DrafterChoice, Engine, Generation, Isa, KvType,
    ModelTensors, Options,
};

use super::drafts::{always, cases, compare, crowd, options};
use super::support::folder;

/// Checkpoints that have such a head in a file beside them.
const MODELS: [&str; 4] = ["qwen3_5", "qwen3_5_moe", "glm4_moe", "deepseek_v3"];

/// A folder with a checkpoint and its head. Without an index and a `model.safetensors`, all of its files are read.
fn with_head(name: &str) -> tempfile::TempDir {
    let made = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(folder(name)).unwrap().flatten() {
        let file = entry.file_name().into_string().unwrap();
        if file == "config.json" || file.ends_with(".safetensors") {
            std::fs::copy(entry.path(), made.path().join(file.replace("model.", "weights."))).unwrap();
        }
    }
    std::fs::copy(folder("mtp").join(format!("{name}.safetensors")), made.path().join("mtp.safetensors")).unwrap();
    made
}

/// A block of the cache.
const BLOCK: usize = 16;

/// The head's logits for all tokens and for the chain behind them, by the steps that an engine takes.
fn logits(path: &Path, tokens: &[u32], chain: &[u32], pieces: &[usize]) -> Vec<f32> {
    let mut cpu = Cpu::new(Isa::from_env().unwrap(), 2, Activations::F32).unwrap();
    let config = Config::open(path).unwrap();
    let tensors = ModelTensors::of_safetensors(Checkpoint::open(path).unwrap(), config);
    let model =
        sluice_model::Options { max_tokens: 64, context: Some(128), mtp: true, ..sluice_model::Options::default() };
    let loaded = sluice_model::load(&tensors, &mut cpu, &model).unwrap();
    let (description, decoder) = (loaded.description, loaded.decoder);
    let backend: &mut dyn Backend = &mut cpu;
    let groups = description.groups();
    for group in &groups {
        let pool = backend.alloc_kv(group.layout(KvType::F32, AttentionMode::F32, BLOCK), 8).unwrap();
        backend.commit_kv(&pool, 8).unwrap();
    }
    if description.state_len() > 0 {
        backend.alloc_states(1, description.state_len()).unwrap();
    }
    let tables = vec![(0..8).collect::<Vec<u32>>(); groups.len()];
    let mut inputs = StepInputs::new(&vec![BLOCK; groups.len()], Capacity { tokens: 64, sequences: 1, blocks: 8 });
    let mut begin = |tokens: &[u32], position: usize| {
        inputs.clear();
        inputs.push(&SequenceInput { tokens, position, state: 0, tables: &tables, wanted: Wanted::All });
        inputs.clone()
    };
    let hidden = description.hidden;
    let (mut found, mut position, mut before) = (Vec::new(), 0, vec![0.0; hidden]);
    let mut sizes = pieces.iter().copied().cycle();
    while position < tokens.len() {
        let piece = &tokens[position..tokens.len().min(position + sizes.next().unwrap())];
        // 1. The model, whose states are those of the next tokens' entries
        let inputs = begin(piece, position);
        backend.begin(&inputs);
        decoder.step(backend, &inputs);
        backend.end();
        let mut states = vec![0.0; piece.len() * hidden];
        decoder.hidden(backend, 0..piece.len(), &mut states);
        // 2. The head
        before.extend_from_slice(&states);
        let next = before.split_off(piece.len() * hidden);
        backend.upload(&before, decoder.mtp_states().first_rows(piece.len()));
        before = next;
        backend.begin(&inputs);
        decoder.mtp_step(backend, &inputs);
        let outcome = backend.end();
        found.extend_from_slice(backend.read_logits(outcome.logits));
        position += piece.len();
        if position == tokens.len() {
            decoder.mtp_hidden(backend, piece.len() - 1..piece.len(), &mut before);
        }
    }
    for token in &chain[..chain.len() - 1] {
        backend.upload(&before, decoder.mtp_states().first_rows(1));
        let inputs = begin(&[*token], position);
        backend.begin(&inputs);
        decoder.mtp_step(backend, &inputs);
        let outcome = backend.end();
        found.extend_from_slice(backend.read_logits(outcome.logits));
        decoder.mtp_hidden(backend, 0..1, &mut before);
        position += 1;
    }
    found
}

#[test]
fn heads_put_out_what_the_reference_does() {
    let all: Value = serde_json::from_slice(&std::fs::read(folder("mtp/cases.json")).unwrap()).unwrap();
    for case in all.as_array().unwrap() {
        let (name, range) = (case["name"].as_str().unwrap(), case["range"].as_f64().unwrap() as f32);
        let ids = |key: &str| -> Vec<u32> {
            case[key].as_array().unwrap().iter().map(|t| t.as_u64().unwrap() as u32).collect()
        };
        let bytes = std::fs::read(folder("mtp").join(format!("{name}.f32"))).unwrap();
        let wanted: Vec<f32> = bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
        let (made, tokens, chain) = (with_head(name), ids("tokens"), ids("chain"));
        let found = logits(made.path(), &tokens, &chain, &[64]);
        let difference = found.iter().zip(&wanted).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max) / range;
        println!("{name}: {difference:.1e} of the range");
        assert!(found.len() == wanted.len() && difference < 1e-5, "{name}: {difference}");
        // The prompt in other pieces gives the same bits.
        for pieces in [&[1][..], &[7, 3], &[16]] {
            assert!(logits(made.path(), &tokens, &chain, pieces) == found, "{name}, {pieces:?}");
        }
    }
}

#[test]
fn a_head_changes_nothing_that_a_caller_sees() {
    for name in MODELS {
        let made = with_head(name);
        for drafter in [DrafterChoice::Mtp, DrafterChoice::Auto] {
            let drafts = DraftOptions { drafter, ..always(4) };
            compare(made.path(), &Options { drafts, ..options() }, "mtp", 0..cases(12));
        }
    }
}

#[test]
fn sequences_that_share_steps_and_too_little_memory_keep_their_text() {
    for name in MODELS {
        for drafter in [DrafterChoice::Mtp, DrafterChoice::Auto] {
            crowd(with_head(name).path(), None, drafter, 0..cases(4));
        }
    }
}

#[test]
fn what_a_head_drafts_does_not_depend_on_how_a_prompt_was_computed() {
    for name in MODELS {
        let made = with_head(name);
        let mut counts = Vec::new();
        for (chunk, threads) in [(64, 1), (9, 2), (24, 3)] {
            let drafts = DraftOptions { drafter: DrafterChoice::Mtp, ..always(3) };
            let options = Options { drafts, chunk: Some(chunk), threads, ..options() };
            let mut engine = Engine::open(made.path(), options).unwrap();
            let sampling = SamplingParams { temperature: 0.3, seed: 9, ..SamplingParams::default() };
            let id = engine.add_sequence();
            let generation = Generation { sampling, max_tokens: 100, ..Generation::default() };
            engine.start(id, &(1..60).collect::<Vec<u32>>(), generation).unwrap();
            while !engine.is_idle() {
                engine.step().unwrap();
            }
            counts.push(engine.draft_stats());
        }
        assert!(counts[0][0].counts.drafted > 50, "{name}: {counts:?}");
        assert!(counts[0] == counts[1] && counts[0] == counts[2], "{name}: {counts:?}");
    }
}

#[test]
fn a_checkpoint_without_a_whole_head_drafts_with_none() {
    let open = |name: &str, drafter| {
        Engine::open(&folder(name), Options { drafts: DraftOptions { drafter, ..always(4) }, ..options() })
    };
    for name in ["qwen3", "qwen3_5_vl"] {
        let refused = format!("{:#}", open(name, DrafterChoice::Mtp).map(|_| ()).unwrap_err());
        assert!(refused.contains("no head that predicts one token more"), "{refused}");
        let engine = open(name, DrafterChoice::Auto).unwrap();
        assert!(engine.draft_stats().iter().all(|d| d.drafter == "ngram"));
    }
    // Without drafts it is a part that is left out.
    let made = with_head("qwen3_5");
    let plain = Engine::open(made.path(), options()).unwrap();
    assert_eq!(plain.skipped(), ["mtp"]);
    let drafts = DraftOptions { drafter: DrafterChoice::Mtp, ..always(4) };
    let drafting = Engine::open(made.path(), Options { drafts, ..options() }).unwrap();
    assert_eq!((drafting.skipped(), drafting.draft_stats()[0].drafter), (&[][..], "mtp"));
}
