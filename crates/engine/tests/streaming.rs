//! Experts that are read from disk when tokens want them: the same bits as mapped ones, whatever is kept, guessed or read in pieces.

mod support;

use std::fs::{self, OpenOptions};

use proptest::prelude::*;
use sluice_engine::sampler::SamplingParams;
use sluice_engine::{
    Activations, Checkpoint, Engine, Event, ExpertOptions, Finish, Generation, Lookahead, MemoryClass, Options,
    Placement, Policy,
};
use sluice_store::{Tensor, TensorPlan, Writer};
use support::*;

/// A mixture of each kind: stacked and single tensors, Hugging Face's and MLX's, with recurrent layers and without.
const FOLDERS: [&str; 7] = [
    "qwen3_moe",
    "qwen3_moe_stacked",
    "qwen3_next",
    "qwen3_5_moe",
    "mlx_qwen3_moe",
    "mlx_qwen3_next",
    "mlx_qwen3_5_moe",
];

fn mapped() -> Options {
    Options { threads: 2, max_context: Some(400), experts: Placement::Mapped, ..Options::for_this_machine().unwrap() }
}

fn streamed(placement: Placement) -> Options {
    Options { experts: placement, ..mapped() }
}

/// Bytes of a slot.
fn slot_bytes(name: &str) -> u64 {
    let mut engine = Engine::open(&folder(name), streamed(Placement::Slots)).unwrap();
    let slots = engine.take_streamed().unwrap().slots;
    assert_eq!(slots.0, slots.1, "all experts fit");
    engine.memory(MemoryClass::Experts) as u64 / slots.0 as u64
}

/// Bytes that a token's experts take at least, as the refusal of less says.
fn least_bytes(name: &str) -> u64 {
    let options = Options { expert_budget: Some(1), ..streamed(Placement::Slots) };
    let error = format!("{:#}", Engine::open(&folder(name), options).err().unwrap());
    error.rsplit("which takes ").next().unwrap().parse().unwrap()
}

#[test]
fn streamed_experts_give_the_bits_of_mapped_ones() {
    for name in FOLDERS {
        let mut reference = Engine::open(&folder(name), mapped()).unwrap();
        let prompt = tokens(&reference, 170, 7);
        let wanted = logits(&mut reference, &prompt, &[170]);
        let (one, least) = (slot_bytes(name), least_bytes(name));
        for placement in [Placement::Slots, Placement::PageCache] {
            for more in [0, 3, u64::MAX / one / 2] {
                let options = Options { expert_budget: Some(least + more * one), ..streamed(placement) };
                let mut engine = Engine::open(&folder(name), options).unwrap();
                for pieces in [&[170][..], &[1], &[140, 1], &[64, 7]] {
                    let got = logits(&mut engine, &prompt, pieces);
                    assert!(got == wanted, "{name} {placement:?}, {more} more slots, pieces {pieces:?}");
                }
                let stats = engine.take_streamed().unwrap().stats;
                assert!(stats.wanted > 0 && stats.read_bytes > 0, "{stats:?}");
                let all_fit = placement == Placement::Slots && more > 1 << 20;
                assert!(!all_fit || stats.hits > stats.wanted / 2, "{stats:?}");
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn whatever_is_kept_or_guessed_the_bits_are_the_same(
        name in prop::sample::select(&FOLDERS[..]),
        placement in prop::sample::select(&[Placement::Slots, Placement::PageCache][..]),
        policy in prop::sample::select(&Policy::ALL[..]),
        lookahead in prop::sample::select(&[Lookahead::Off, Lookahead::On, Lookahead::Auto][..]),
        activations in prop::sample::select(&[Activations::F32, Activations::Bf16, Activations::Int8][..]),
        more_slots in 0u64..40,
        pages in 1usize..5,
        depth in 1usize..20,
        pinned in prop::collection::vec((0usize..4, 0usize..16), 0..6),
        pieces in prop::collection::vec(1usize..90, 1..12),
        seed in any::<u64>(),
    ) {
        let mut reference = Engine::open(&folder(name), Options { activations, ..mapped() }).unwrap();
        let prompt = tokens(&reference, 120, seed);
        let wanted = logits(&mut reference, &prompt, &[120]);
        let options = Options {
            activations,
            lookahead,
            expert_budget: Some(least_bytes(name) + more_slots * slot_bytes(name)),
            expert_options: ExpertOptions { policy, request: pages * 4096, depth: Some(depth), pinned, ..ExpertOptions::default() },
            ..streamed(placement)
        };
        let mut engine = Engine::open(&folder(name), options).unwrap();
        prop_assert!(logits(&mut engine, &prompt, &pieces) == wanted);
    }
}

#[test]
fn too_small_a_budget_is_refused_with_what_is_needed() {
    let options = Options { expert_budget: Some(5000), ..streamed(Placement::Slots) };
    let error = format!("{:#}", Engine::open(&folder("qwen3_moe"), options).err().unwrap());
    assert!(error.contains("5000 bytes are too few for experts"), "{error}");
    let error = format!("{:#}", Engine::open(&folder("qwen3"), streamed(Placement::Slots)).err().unwrap());
    assert!(error.contains("this model has no experts"), "{error}");
}

#[test]
fn what_does_not_fit_is_streamed_unasked() {
    let options = |budget| Options { memory_budget: Some(budget), experts: Placement::Auto, ..mapped() };
    let engine = Engine::open(&folder("qwen3_moe"), options(1 << 30)).unwrap();
    assert_eq!(engine.placed().placement, Placement::Mapped, "{}", engine.placed().reason);
    let bytes = fs::metadata(folder("qwen3_moe").join("model.safetensors")).unwrap().len();
    let error = Engine::open(&folder("qwen3_moe"), options(bytes)).err().unwrap();
    // This model is smaller than the program: the arithmetic says so.
    assert!(format!("{error:#}").contains("experts"), "{error:#}");
}

/// A copy of a golden model with its experts at the end of the file, and where they begin.
fn copy_of(name: &str) -> (tempfile::TempDir, u64) {
    let to = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    fs::copy(folder(name).join("config.json"), to.path().join("config.json")).unwrap();
    let checkpoint = Checkpoint::open(&folder(name)).unwrap();
    let is_expert = |t: &Tensor| t.name.contains(".switch_mlp.") || t.name.contains(".mlp.experts.");
    let mut tensors: Vec<_> = checkpoint.tensors().iter().collect();
    tensors.sort_by_key(|t| is_expert(t));
    let plan = |t: &&Tensor| TensorPlan { name: t.name.to_string(), dtype: t.dtype, shape: t.shape.clone() };
    let plans: Vec<TensorPlan> = tensors.iter().map(plan).collect();
    let mut writer = Writer::create(&to.path().join("model.safetensors"), &plans, checkpoint.metadata()).unwrap();
    tensors.iter().for_each(|t| writer.append(&t.name, &t.bytes).unwrap());
    writer.finish().unwrap();
    let first = tensors.iter().find(|t| is_expert(t)).unwrap();
    let begin = Checkpoint::open(to.path()).unwrap().place(&first.name).unwrap().1;
    (to, begin)
}

#[test]
fn experts_that_cannot_be_read_end_their_own_request_only() {
    for name in ["qwen3_moe", "mlx_qwen3_next"] {
        let (model, experts_begin) = copy_of(name);
        let file = model.path().join("model.safetensors");
        let whole = fs::read(&file).unwrap();
        let options = Options {
            max_sequences: 2,
            expert_budget: Some(least_bytes(name)),
            lookahead: Lookahead::Off,
            ..streamed(Placement::Slots)
        };
        let sampling = SamplingParams { temperature: 0.0, ..SamplingParams::default() };
        let generation = Generation { sampling, max_tokens: 30, stop_ids: vec![] };
        let mut engine = Engine::open(model.path(), options).unwrap();
        let prompt = tokens(&engine, 9, 3);
        let answer = |engine: &mut Engine| {
            let id = engine.add_sequence().unwrap();
            engine.start(id, &prompt, generation.clone()).unwrap();
            let (mut answer, mut end) = (Vec::new(), None);
            while !engine.is_idle() {
                for event in engine.step().unwrap() {
                    match event {
                        Event::Token { token, .. } => answer.push(*token),
                        Event::Finished { reason, .. } => end = Some(*reason),
                        Event::Prefill { .. } => {}
                    }
                }
            }
            engine.remove_sequence(id);
            (answer, end.unwrap())
        };
        let (wanted, end) = answer(&mut engine);
        assert_eq!(end, Finish::Length, "{name}");
        // The file loses its end: nearly all experts.
        OpenOptions::new().write(true).open(&file).unwrap().set_len(experts_begin + 4096).unwrap();
        let (_, end) = answer(&mut engine);
        assert_eq!(end, Finish::Failed, "{name}");
        let failure = engine.take_failure().unwrap().to_string();
        assert!(failure.contains("model.safetensors") && failure.contains("truncated"), "{failure}");
        // It comes back: the same engine goes on as if nothing had been.
        let restored = OpenOptions::new().write(true).open(&file).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&restored, &whole, 0).unwrap();
        let (again, end) = answer(&mut engine);
        assert_eq!((again, end), (wanted, Finish::Length), "{name}");
    }
}
