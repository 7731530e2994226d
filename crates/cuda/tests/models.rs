//! Whole models on the GPU have the CPU's logits, bit for bit. Without a GPU most tests pass and print that they were skipped. `SLUICE_GPU=N` requires a device, and `SLUICE_MODELS=FOLDER:FOLDER` takes other models than the golden ones.

#[path = "models/drafts.rs"]
mod drafts;
mod emulated;
#[path = "models/tables.rs"]
mod tables;

use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard};

use sluice_backend::{Activations, KvType};
use sluice_cuda::{Cuda, HostOffload, Pipeline};
use sluice_engine::sampling::{Logprobs, SamplingParams};
use sluice_engine::{Device, Engine, Event, Generation, Options, Placement, Pooling};

const MODELS: [&str; 52] = [
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "glm5_next",
    "deepseek_v4",
    "qwen4_exp",
    "mistral4",
    "gemma4",
    "gemma4_moe",
    "gemma4_per_layer",
    "glm4",
    "glm4_moe",
    "gpt_oss",
    "gpt_oss_mxfp4",
    "granite",
    "granitemoehybrid",
    "granitemoehybrid_mamba",
    "kimi_linear",
    "kimi_k3",
    "nemotron_h",
    "nemotron_h_moe",
    "nemotron_h_latent",
    "minimax_m2",
    "ministral3",
    "olmo3",
    "phi3",
    "smollm3",
    "llama",
    "llama_untied",
    "mlx_llama_widths",
    "mlx_qwen3",
    "mlx_qwen3_5",
    "mlx_qwen3_5_moe",
    "mlx_qwen3_moe",
    "mlx_qwen3_moe_asking",
    "mlx_qwen3_next",
    "mlx_qwen3_next_plain",
    "mlx_qwen3_widths",
    "qwen3",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_5_moe_split",
    "qwen3_5_moe_vl",
    "qwen3_5_vl",
    "qwen3_moe",
    "qwen3_moe_stacked",
    "qwen3_next",
    "qwen3_next_stacked",
    "qwen3_rope",
    "qwen3_window",
];
const MODES: [Activations; 4] = [Activations::F32, Activations::Bf16, Activations::Int8, Activations::Int11];

/// Held by the test that uses the device: while it waits for the host in the middle of a step, no other test may wait for it.
static TURN: Mutex<()> = Mutex::new(());

/// The device, and the lock that lets this test use it.
fn device() -> Option<(u32, MutexGuard<'static, ()>)> {
    let turn = TURN.lock().unwrap_or_else(|e| e.into_inner());
    let asked: Option<u32> = std::env::var("SLUICE_GPU").ok().map(|n| n.parse().expect("SLUICE_GPU: a number"));
    match sluice_cuda::describe(asked.unwrap_or(0)) {
        Ok(_) => Some((asked.unwrap_or(0), turn)),
        Err(why) if asked.is_none() => {
            eprintln!("left out: {why:#}");
            None
        }
        Err(why) => panic!("SLUICE_GPU: {why:#}"),
    }
}

/// What no test of single operations shows is tried where there is no GPU, too.
#[test]
fn where_the_device_is_emulated() {
    if std::env::var_os("SLUICE_GPU").is_some() {
        return;
    }
    let Some(mut tests) = emulated::this_program() else { return };
    let output = tests.args(["tables_on_disk", "--test-threads", "1"]).env("SLUICE_GPU", "0").output();
    let output = output.expect("this program runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
}

/// The golden models, or those of `SLUICE_MODELS`.
fn folders() -> Vec<PathBuf> {
    if let Ok(named) = std::env::var("SLUICE_MODELS") {
        return std::env::split_paths(&named).collect();
    }
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden");
    MODELS.iter().map(|name| golden.join(name)).collect()
}

fn options(activations: Activations, kv_type: Option<KvType>, chunk: usize) -> Options {
    let all = std::thread::available_parallelism().map_or(1, usize::from);
    Options {
        activations,
        kv_type,
        chunk: Some(chunk),
        threads: if std::env::var_os("SLUICE_MODELS").is_some() { all.min(16) } else { 2 },
        max_context: Some(400),
        max_sequences: 3,
        ..Options::for_this_machine().unwrap()
    }
}

/// The device alone, as two devices, and with the next one if there is one.
fn device_lists(device: u32) -> Vec<Vec<u32>> {
    let mut lists = vec![vec![device], vec![device, device]];
    match sluice_cuda::count() {
        Ok(count) if count > 1 => lists.push(vec![device, (device + 1) % count]),
        _ => eprintln!("left out: two devices, where there is one"),
    }
    lists
}

/// The model on these devices, or on the CPU if there are none.
fn on_all(devices: &[u32], folder: &Path, options: Options) -> Engine {
    let opened = match devices {
        [] => Engine::open(folder, options),
        [number] => Engine::open_on(folder, options, &|o| Ok(Box::new(Cuda::new(*number, o.activations)?))),
        all => Engine::open_on(folder, options, &|o| Ok(Box::new(Pipeline::new(all, o.activations, o.threads)?))),
    };
    opened.unwrap_or_else(|e| panic!("{}: {e:#}", folder.display()))
}

fn on(device: Option<u32>, folder: &Path, options: Options) -> Engine {
    on_all(device.as_slice(), folder, options)
}

fn logits(engine: &mut Engine, tokens: &[u32]) -> Vec<u32> {
    let mut bits = Vec::new();
    let each = |_: usize, row: &[f32]| {
        bits.extend(row.iter().map(|x| x.to_bits()));
        Ok(())
    };
    engine.score(tokens, true, each).unwrap();
    bits
}

fn prompt(engine: &Engine, n: usize, seed: u64) -> Vec<u32> {
    let vocabulary = engine.model().vocabulary as u64;
    (0..n as u64)
        .map(|i| ((i + 1).wrapping_mul(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1) >> 33) % vocabulary)
        .map(|t| t as u32)
        .collect()
}

/// Tokens with their log-probabilities, if these were requested.
type Answer = Vec<(u32, Option<Logprobs>)>;

/// Answers to prompts of different lengths in the same steps, each at its temperature: from all tokens, from a few, with penalties, and from so many that all logits come to the host.
fn answers(engine: &mut Engine) -> Vec<Answer> {
    let with = SamplingParams::default;
    let ways = [
        with(),
        SamplingParams { top_k: 4, top_p: 0.9, ..with() },
        SamplingParams { top_k: 20, presence_penalty: 1.0, repetition_penalty: 1.1, ..with() },
        SamplingParams { top_p: 0.7, ..with() },
        SamplingParams { min_p: 0.2, ..with() },
        SamplingParams { top_k: 250, ..with() },
    ];
    ways.iter().flat_map(|way| answers_of(engine, way)).collect()
}

fn answers_of(engine: &mut Engine, way: &SamplingParams) -> Vec<Answer> {
    let ids: Vec<_> = [(1, 1.0, None), (40, 0.0, Some(0)), (150, 0.6, Some(3))]
        .into_iter()
        .map(|(n, temperature, logprobs)| {
            let prompt = prompt(engine, n, n as u64);
            let id = engine.add_sequence();
            let sampling = SamplingParams { temperature, seed: 3, ..way.clone() };
            let generation = Generation { sampling, max_tokens: 8, logprobs, ..Generation::default() };
            engine.start(id, &prompt, generation).unwrap();
            id
        })
        .collect();
    let mut answers = vec![Vec::new(); ids.len()];
    while !engine.is_idle() {
        for event in engine.step().unwrap().to_vec() {
            if let Event::Token { id, token } = event {
                let logprobs = engine.take_logprobs(id);
                answers[ids.iter().position(|i| *i == id).unwrap()].push((token, logprobs));
            }
        }
    }
    answers
}

#[test]
fn every_logit_has_the_cpus_bits_in_every_mode() {
    let Some((device, _turn)) = device() else { return };
    for folder in folders() {
        for mode in MODES {
            for kv_type in [None, Some(KvType::F16), Some(KvType::Int8), Some(KvType::Int16)] {
                let mut cpu = on(None, &folder, options(mode, kv_type, 64));
                let tokens = prompt(&cpu, 300, 7);
                let wanted = logits(&mut cpu, &tokens);
                for devices in device_lists(device) {
                    let mut gpu = on_all(&devices, &folder, options(mode, kv_type, 37));
                    let got = logits(&mut gpu, &tokens);
                    let differ = got.iter().zip(&wanted).filter(|(a, b)| a != b).count();
                    let (of, model) = (wanted.len(), folder.display());
                    assert_eq!(of, got.len());
                    assert_eq!(differ, 0, "{model}, {mode:?}, {kv_type:?}, {devices:?}: of {of} logits");
                }
            }
        }
    }
}

/// GGUF files of real models, whose matrices have several types of blocks. They are too large for a device that is emulated.
const REAL: [&str; 3] =
    ["SmolLM2-135M-Instruct.Q4_1.gguf", "gemma-3-270m.Q4_K_M.gguf", "qwen2.5-coder-0.5b-instruct.Q4_K_M.gguf"];

#[test]
fn real_models_in_blocks_have_the_cpus_bits() {
    let Some((device, _turn)) = device() else { return };
    let root = || Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/real-models");
    let folder = std::env::var_os("SLUICE_REAL_MODELS").map_or_else(root, PathBuf::from);
    let is_emulated = sluice_cuda::describe(device).is_ok_and(|name| name.starts_with("Emulated"));
    for path in REAL.map(|name| folder.join(name)) {
        if is_emulated || !path.exists() {
            eprintln!("SKIPPED: {}", path.display());
            continue;
        }
        for mode in MODES {
            let mut cpu = on(None, &path, options(mode, None, 64));
            let tokens = prompt(&cpu, 150, 7);
            let wanted = logits(&mut cpu, &tokens);
            // Tiles of many tokens and of few, and tokens one at a time.
            for chunk in [100, 7, 1] {
                let got = logits(&mut on(Some(device), &path, options(mode, None, chunk)), &tokens);
                let differ = got.iter().zip(&wanted).filter(|(a, b)| a != b).count();
                assert_eq!((wanted.len(), differ), (got.len(), 0), "{}, {mode:?}, {chunk}", path.display());
            }
        }
    }
}

#[test]
fn tokens_one_at_a_time_have_the_cpus_bits() {
    let Some((device, _turn)) = device() else { return };
    for folder in folders() {
        for mode in MODES {
            let mut cpu = on(None, &folder, options(mode, None, 64));
            let mut gpu = on(Some(device), &folder, options(mode, None, 1));
            let tokens = prompt(&cpu, 60, 9);
            let (wanted, got) = (logits(&mut cpu, &tokens), logits(&mut gpu, &tokens));
            let differ = got.iter().zip(&wanted).filter(|(a, b)| a != b).count();
            assert_eq!((wanted.len(), differ), (got.len(), 0), "{}, {mode:?}", folder.display());
        }
    }
}

#[test]
fn concurrent_sequences_have_the_cpus_answers() {
    let Some((device, _turn)) = device() else { return };
    for folder in folders() {
        for mode in MODES {
            let options = options(mode, None, 48);
            let wanted = answers(&mut on(None, &folder, options.clone()));
            for devices in device_lists(device) {
                let got = answers(&mut on_all(&devices, &folder, options.clone()));
                assert_eq!(got, wanted, "{}, {mode:?}, {devices:?}", folder.display());
            }
        }
    }
}

/// Embeddings of prompts of different lengths, pooled by the last token and by the mean, while another sequence generates.
fn embeddings(engine: &mut Engine) -> Vec<Vec<u32>> {
    let asked = [(1, Pooling::Last), (150, Pooling::Mean), (90, Pooling::Last), (90, Pooling::Mean)];
    let ids = asked.map(|(n, pooling)| {
        let prompt = prompt(engine, n, n as u64);
        let id = engine.add_sequence();
        engine.start(id, &prompt, Generation { pooling: Some(pooling), ..Generation::default() }).unwrap();
        id
    });
    let (other, said) = (engine.add_sequence(), prompt(engine, 20, 5));
    engine.start(other, &said, Generation { max_tokens: 12, ..Generation::default() }).unwrap();
    while !engine.is_idle() {
        engine.step().unwrap();
    }
    ids.map(|id| engine.take_embedding(id).unwrap().into_iter().map(f32::to_bits).collect()).to_vec()
}

#[test]
fn embeddings_have_the_cpus_bits() {
    let Some((device, _turn)) = device() else { return };
    for folder in folders() {
        for mode in MODES {
            let wanted = embeddings(&mut on(None, &folder, options(mode, None, 64)));
            for devices in device_lists(device) {
                let got = embeddings(&mut on_all(&devices, &folder, options(mode, None, 37)));
                assert!(got == wanted, "{}, {mode:?}, {devices:?}", folder.display());
            }
        }
    }
}

#[test]
fn experts_on_disk_change_no_logit() {
    let Some((device, _turn)) = device() else { return };
    for folder in folders() {
        // The unquantised checkpoint stores experts by columns, and those are not streamed.
        let by_columns = folder.ends_with("gpt_oss");
        if by_columns || on(None, &folder, options(Activations::Int8, None, 64)).model().experts().is_none() {
            continue;
        }
        for experts in [Placement::Slots, Placement::PageCache] {
            let mut cpu = on(None, &folder, options(Activations::Int8, None, 64));
            let tokens = prompt(&cpu, 100, 9);
            let wanted = logits(&mut cpu, &tokens);
            for devices in device_lists(device) {
                let options = Options { experts, ..options(Activations::Int8, None, 37) };
                let mut gpu = on_all(&devices, &folder, options);
                assert!(logits(&mut gpu, &tokens) == wanted, "{}, {experts:?}, {devices:?}", folder.display());
            }
        }
    }
}

#[test]
fn a_memory_budget_is_kept_and_changes_no_logit() {
    let Some((device, _turn)) = device() else { return };
    for name in [
        "gemma4_moe",
        "gpt_oss_mxfp4",
        "nemotron_h_moe",
        "mlx_qwen3_moe",
        "qwen3_moe",
        "mlx_qwen3_5_moe",
        "qwen3_5_moe_split",
        "mlx_qwen3_next",
        "qwen3",
    ] {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden").join(name);
        let mut cpu = on(None, &folder, options(Activations::Int8, None, 64));
        let tokens = prompt(&cpu, 100, 9);
        let wanted = logits(&mut cpu, &tokens);
        let open = |bytes: u64| {
            let options = Options { device_memory: Some(bytes), ..options(Activations::Int8, None, 37) };
            let host = HostOffload { isa: options.isa, threads: 2, always: true };
            Engine::open_on(&folder, options, &|o| {
                Ok(Box::new(Cuda::new(device, o.activations)?.with_host_experts(host)))
            })
        };
        // 1. Too small a budget is refused, with the bytes of each part and the smallest budget
        let refused = format!("{:#}", open(1 << 20).err().expect("a megabyte is too little"));
        for part in ["weights", "scratch", "keys and values", "the smallest that would do is --gpu-memory "] {
            assert!(refused.contains(part), "{part}: {refused}");
        }
        assert_eq!(refused.contains("experts"), name != "qwen3", "{refused}");
        let smallest = smallest(&refused);
        // 2. With that budget or more, logits are unchanged and no more memory is used
        for more in [0, 100_000, 1 << 20, 1 << 30] {
            let mut gpu = open(smallest + more).unwrap_or_else(|e| panic!("{name} + {more}: {e:#}"));
            assert!(logits(&mut gpu, &tokens) == wanted, "{name} with {more} more");
            let own = gpu.device().unwrap();
            let uses = gpu.memory_uses();
            let used: usize = uses.iter().filter(|m| m.device == own.device).map(|m| m.bytes).sum();
            assert!(used as u64 <= smallest + more, "{name}: {used} of {smallest} + {more}: {uses:?}");
        }
    }
}

/// The smallest sufficient budget, from the text of a refusal.
fn smallest(refused: &str) -> u64 {
    let figure = refused.rsplit_once("--gpu-memory ").unwrap().1.split_once('M').unwrap().0;
    (figure.parse::<f64>().unwrap() * 1e6) as u64
}

#[test]
fn experts_in_tiers_of_several_devices_change_no_logit() {
    let Some((device, _turn)) = device() else { return };
    for name in ["gpt_oss_mxfp4", "qwen3_moe", "mlx_qwen3_5_moe", "mlx_qwen3_next"] {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden").join(name);
        let mut cpu = on(None, &folder, options(Activations::Int8, None, 64));
        let tokens = prompt(&cpu, 25, 9);
        let wanted = logits(&mut cpu, &tokens);
        for devices in device_lists(device).into_iter().filter(|devices| devices.len() > 1) {
            // Single tokens, which request experts in the middle of a step, and several.
            for chunk in [1, 11] {
                let open = |bytes: u64| {
                    let (experts, device_memory) = (Placement::Slots, Some(bytes));
                    let options = Options { experts, device_memory, ..options(Activations::Int8, None, chunk) };
                    let host = HostOffload { isa: options.isa, threads: 2, always: bytes.is_multiple_of(2) };
                    let make = |o: &Options| Pipeline::new(&devices, o.activations, o.threads);
                    Engine::open_on(&folder, options, &|o| Ok(Box::new(make(o)?.with_host_experts(host))))
                };
                let refused = format!("{:#}", open(1 << 20).err().expect("a megabyte is too little"));
                assert!(refused.contains("experts"), "{refused}");
                let least = smallest(&refused);
                for more in [0, 1, 1 << 20] {
                    let mut gpu = open(least + more).unwrap_or_else(|e| panic!("{name} + {more}: {e:#}"));
                    assert!(logits(&mut gpu, &tokens) == wanted, "{name}, {devices:?}, {chunk} at once, {more} more");
                    let streamed = gpu.take_streamed().expect("experts are streamed");
                    assert!(streamed.stats.wanted > 0, "{streamed:?}");
                    for own in &devices {
                        let uses = gpu.memory_uses();
                        let here = uses.iter().filter(|m| m.device == Device::Accelerator(*own));
                        let used: usize = here.map(|m| m.bytes).sum();
                        let times = devices.iter().filter(|d| *d == own).count() as u64;
                        assert!(used as u64 <= times * (least + more), "{name}: {used} of {least} + {more}: {uses:?}");
                    }
                }
            }
        }
    }
}

#[test]
fn a_missing_device_is_reported_in_one_line() {
    for ordinal in [u32::MAX, 4000] {
        let refused = format!("{:#}", Cuda::new(ordinal, Activations::Int8).err().expect("no such device"));
        assert!(!refused.contains('\n') && refused.len() < 200, "{refused}");
        let known = ["no CUDA driver", "no device cuda:", "no CUDA device", "driver is too old", "does not start"];
        assert!(known.iter().any(|part| refused.contains(part)), "{refused}");
    }
}

/// The tokens of a greedy answer, and how many of its prompt were cached.
fn greedy(engine: &mut Engine, prompt: &[u32]) -> (Vec<u32>, usize) {
    let id = engine.add_sequence();
    let sampling = SamplingParams { temperature: 0.0, ..SamplingParams::default() };
    engine.start(id, prompt, Generation { sampling, max_tokens: 4, ..Generation::default() }).unwrap();
    let mut said = Vec::new();
    while !engine.is_idle() {
        let tokens = engine.step().unwrap().iter().filter_map(|event| match event {
            Event::Token { token, .. } => Some(*token),
            _ => None,
        });
        said.extend(tokens);
    }
    let adopted = engine.reused_tokens(id).unwrap();
    engine.remove_sequence(id);
    (said, adopted)
}

#[test]
fn evicted_keys_and_values_are_restored() {
    let Some((device, _turn)) = device() else { return };
    for name in ["qwen3", "qwen3_window", "qwen3_next"] {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden").join(name);
        let small = Options { kv_tokens: Some(400), max_sequences: 1, ..options(Activations::Int8, None, 64) };
        let mut cpu = on(None, &folder, Options { prefix_cache: false, ..small.clone() });
        let prompts: Vec<Vec<u32>> = (1..4).map(|seed| prompt(&cpu, 300, seed)).collect();
        let wanted: Vec<Vec<u32>> = prompts.iter().map(|prompt| greedy(&mut cpu, prompt).0).collect();
        for devices in device_lists(device) {
            let spilling = Options { snapshots: 2, kv_spill: 64 << 20, ..small.clone() };
            let mut gpu = on_all(&devices, &folder, spilling);
            for (prompt, answer) in prompts.iter().zip(&wanted) {
                assert_eq!(&greedy(&mut gpu, prompt).0, answer, "{name}, {devices:?}");
            }
            for (prompt, answer) in prompts.iter().zip(&wanted) {
                let further = [&prompt[..], answer, &[1, 2, 3]].concat();
                let (said, adopted) = greedy(&mut gpu, &further);
                assert_eq!(said, greedy(&mut cpu, &further).0, "{name}, {devices:?}");
                assert!(adopted >= 288, "{name}, {devices:?}: {adopted}");
            }
            let status = gpu.host_tier().unwrap();
            assert!(status.returned_tokens >= 2 * 288, "{name}, {devices:?}: {status:?}");
        }
    }
}
