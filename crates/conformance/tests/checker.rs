//! A backend that is made outside of the backend's crate: models run on it, it sees that they keep to the order of calls, and its records are steps that
//! another backend goes through to the same bits.

mod support;

use std::panic::{AssertUnwindSafe, catch_unwind};

use sluice_backend::{
    Activations, AttentionMode, Backend, Caches, Capacity, KvLayout, KvType, MatrixId, MemoryClass, Operations,
    Resources, SequenceInput, StepInputs, Wanted,
};
use sluice_conformance::{Candidate, Checker, FAMILIES, Family, check};
use sluice_engine::{Cpu, Engine, Isa, MemoryClass as Class, Options, Placement};
use support::*;

const FOLDERS: [&str; 15] = [
    "qwen3",
    "qwen3_window",
    "qwen3_moe",
    "qwen3_next",
    "nemotron_h_moe",
    "nemotron_h_latent",
    "kimi_linear",
    "kimi_k3",
    "glm5_next",
    "deepseek_v4",
    "qwen4_exp",
    "deepseek_v32",
    "mlx_qwen3_widths",
    "mlx_qwen3_next",
    "mlx_qwen3_5_moe",
];

fn options() -> Options {
    Options {
        threads: 2,
        max_context: Some(200),
        max_sequences: 3,
        chunk: Some(24),
        block_tokens: 16,
        experts: Placement::Mapped,
        ..Options::for_this_machine().unwrap()
    }
}

#[test]
fn steps_of_models_replay_on_another_backend_to_the_same_bits() {
    for name in FOLDERS {
        let mut plain = Engine::open(&folder(name), options()).unwrap();
        let wanted = answers(&mut plain, &[50, 9, 30], 12, |_| ());
        let (mut engine, log) = checked(name, options());
        // Each third step is recorded: of prompts, of single tokens, of both.
        let mut steps = 0;
        let got = answers(&mut engine, &[50, 9, 30], 12, |_| {
            steps += 1;
            log.lock().unwrap().record = steps % 3 == 0;
        });
        assert_eq!(got, wanted, "{name}");
        assert_eq!(engine.reserved_scratch(), plain.reserved_scratch(), "{name}: the same is set aside");
        // Small tensors of a file that is not in the page cache are copied.
        let weights = |e: &mut Engine| e.memory(Class::WeightsMapped) + e.memory(Class::WeightsCopied);
        assert_eq!(weights(&mut engine), weights(&mut plain), "{name}: weights");
        for class in [Class::Kv, Class::State, Class::Experts] {
            assert_eq!(engine.memory(class), plain.memory(class), "{name}: {class:?}");
        }
        let recordings = std::mem::take(&mut log.lock().unwrap().recordings);
        assert!(recordings.len() >= 4, "{name}: {} steps recorded", recordings.len());
        for (i, recording) in recordings.iter().enumerate() {
            assert!(recording.operations.len() > 4 && recording.before != recording.after, "{name}: step {i}");
            for (isa, threads) in [(Isa::GENERIC, 1), (*Isa::supported().last().unwrap(), 3)] {
                let fresh = Cpu::new(isa, threads, Activations::Int8).unwrap();
                recording.replay(Box::new(fresh)).unwrap_or_else(|e| panic!("{name}, step {i}, {isa}: {e}"));
            }
        }
        // A replay compares what operations compute, not only their order.
        let mut other = recordings[1].clone();
        other.before = Default::default();
        let replayed = other.replay(Box::new(Cpu::new(Isa::GENERIC, 1, Activations::Int8).unwrap()));
        assert!(replayed.is_err(), "{name}: a step from empty caches is another one");
    }
}

#[test]
fn a_checker_is_held_to_the_generic_cpu_like_any_backend() {
    let best = *Isa::supported().last().unwrap();
    let checker = Candidate::new("a checker", move |setup| {
        Ok(Box::new(Checker::new(Box::new(Cpu::new(best, 2, setup.activations)?))))
    });
    for family in FAMILIES {
        check(&Family { cases: 4, ..**family }, std::slice::from_ref(&checker));
    }
}

/// A step of one token on a checker, in which `wrong` does something.
fn in_a_step(wrong: impl FnOnce(&mut Checker, &StepInputs)) -> String {
    let mut checker = Checker::new(Box::new(Cpu::new(Isa::GENERIC, 1, Activations::F32).unwrap()));
    let mut inputs = StepInputs::new(&[], Capacity { tokens: 1, sequences: 1, blocks: 0 });
    let tables: &[Vec<u32>] = &[];
    inputs.push(&SequenceInput { tokens: &[0], position: 0, state: 0, tables, wanted: Wanted::Last });
    let panic = catch_unwind(AssertUnwindSafe(|| wrong(&mut checker, &inputs))).unwrap_err();
    panic.downcast_ref::<String>().cloned().unwrap_or_else(|| panic.downcast_ref::<&str>().unwrap().to_string())
}

#[test]
fn who_breaks_the_order_of_calls_is_told_so() {
    let all = [
        in_a_step(|c, inputs| {
            let t = c.alloc(MemoryClass::Scratch, 1, 4).unwrap();
            c.begin(inputs);
            c.download(t, &mut [0.0; 4]);
        }),
        in_a_step(|c, inputs| {
            c.begin(inputs);
            c.begin(inputs);
        }),
        in_a_step(|c, _| {
            let t = c.alloc(MemoryClass::Scratch, 1, 4).unwrap();
            c.embed(MatrixId::new(1000), t);
        }),
        in_a_step(|c, inputs| {
            let t = c.alloc(MemoryClass::Scratch, 1, 4).unwrap();
            c.begin(inputs);
            c.embed(MatrixId::new(1000), t);
        }),
        in_a_step(|c, _| {
            let t = c.alloc(MemoryClass::Scratch, 2, 4).unwrap();
            c.upload(&[0.0; 8], sluice_backend::Tensor { offset: 4, ..t });
        }),
        in_a_step(|c, _| {
            let (kv_type, mode) = (KvType::F32, AttentionMode::F32);
            let layout =
                KvLayout { layers: 1, kv_heads: 1, k_dim: 8, v_dim: 8, kv_type, mode, block_tokens: 4, every: 1 };
            let pool = c.alloc_kv(layout, 4).unwrap();
            c.commit_kv(&pool, 2).unwrap();
            c.copy_blocks(&pool, &[(0, 2)]);
        }),
        in_a_step(|c, inputs| {
            c.begin(inputs);
            let left = c.end();
            c.begin(inputs);
            c.read_logits(left.logits);
        }),
    ];
    let wanted = [
        "download inside of a step",
        "begin inside of a step",
        "embed outside of a step",
        "matrix 1000 was never made",
        "reaches beyond a buffer of 8",
        "block 2 of 2 that are committed",
        "read_logits inside of a step",
    ];
    for (got, wanted) in all.iter().zip(wanted) {
        assert!(got.contains(wanted), "{got}, not {wanted}");
    }
}
