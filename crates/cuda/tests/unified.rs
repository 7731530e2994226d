//! Whole models on a device that reads weights and experts where the host has them: the bits of one that has copies, and no weight twice. The device is emulated, as one that
//! takes the host's addresses, as one that takes what is locked for it, and as one with memory of its own. `SLUICE_GPU=N` takes a real one, whatever it is.

mod emulated;
mod logits;

use std::collections::BTreeMap;
use std::ffi::{c_char, c_int, c_long, c_void};
use std::path::{Path, PathBuf};

use logits::logits;
use sluice_backend::{Activations, MemoryClass, MemoryUse, Unified};
use sluice_cuda::{Cuda, HostOffload};
use sluice_engine::{Device, Engine, LoadMode, Options, Placement};
use sluice_store::{Checkpoint, TensorPlan, Writer};
use tempfile::TempDir;

const MIXTURE: &str = "mlx_qwen3_moe_asking";
/// The kinds of devices, as `EMULATED_UNIFIED` of `emulated/driver.cpp` has them; none has memory of its own.
const KINDS: [Option<&str>; 3] = [Some("pages"), Some("locked"), None];

/// The device under test.
fn device() -> Option<u32> {
    let asked = std::env::var("SLUICE_GPU").ok()?;
    Some(asked.parse().expect("SLUICE_GPU: a number"))
}

#[test]
fn where_the_device_is_emulated() {
    if device().is_some() {
        return;
    }
    for kind in KINDS {
        let Some(mut tests) = emulated::this_program() else { return };
        tests.args(["--skip", "where_the_device_is_emulated", "--test-threads", "1"]).env("SLUICE_GPU", "0");
        tests.env_remove("EMULATED_UNIFIED").envs(kind.map(|kind| ("EMULATED_UNIFIED", kind)));
        let output = tests.output().expect("this program runs");
        assert!(output.status.success(), "{kind:?}: {}", String::from_utf8_lossy(&output.stdout));
    }
}

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden").join(name)
}

/// A golden model whose tensors begin at multiples of 16 bytes, or 8 bytes behind one. The last ends with the file and, where sizes allow it, with a page: a kernel must not
/// read beyond.
fn rewritten(name: &str, behind: u64) -> TempDir {
    let to = tempfile::tempdir().unwrap();
    std::fs::copy(golden(name).join("config.json"), to.path().join("config.json")).unwrap();
    let from = Checkpoint::open(&golden(name)).unwrap();
    let mut tensors: Vec<_> = from.tensors().iter().collect();
    tensors.sort_by_key(|t| (t.bytes.len() % 16 != 0, t.shape.len() > 1));
    let plan: Vec<TensorPlan> = tensors
        .iter()
        .map(|t| TensorPlan { name: t.name.to_string(), dtype: t.dtype, shape: t.shape.clone() })
        .collect();
    let bytes: u64 = tensors.iter().map(|t| t.bytes.len() as u64).sum();
    let metadata = |pad: usize| BTreeMap::from([("pad".to_owned(), "-".repeat(pad))]);
    let len = |pad: usize| Writer::file_len(&plan, &metadata(pad), 8).unwrap();
    let begins_well = |pad: &usize| (len(*pad) - bytes) % 16 == behind;
    let ends_well = |pad: &usize| begins_well(pad) && len(*pad).is_multiple_of(4096);
    let pad = (0..5000).find(ends_well).or_else(|| (0..100).find(begins_well)).expect("some padding");
    let mut writer = Writer::create(&to.path().join("model.safetensors"), &plan, &metadata(pad)).unwrap();
    for tensor in tensors {
        writer.append(&tensor.name, &tensor.bytes).unwrap();
    }
    writer.finish().unwrap();
    to
}

fn options(activations: Activations, chunk: usize) -> Options {
    Options {
        activations,
        chunk: Some(chunk),
        max_context: Some(96),
        threads: 2,
        ..Options::for_this_machine().unwrap()
    }
}

fn on(folder: &Path, unified: Unified, options: Options) -> anyhow::Result<Engine> {
    let host = HostOffload { isa: options.isa, threads: 2, always: false };
    let number = device().expect("a device");
    let make = |o: &Options| -> anyhow::Result<Box<dyn sluice_engine::Backend>> {
        Ok(Box::new(Cuda::new(number, o.activations)?.with_unified(o.unified).with_host_experts(host)))
    };
    Engine::open_on(folder, Options { unified, ..options }, &make)
}

/// What reads in place here: an integrated device does by itself, as some emulated ones do; others are told to.
fn unified() -> Unified {
    if std::env::var_os("EMULATED_UNIFIED").is_some() { Unified::Auto } else { Unified::On }
}

/// Bytes of a class on the host and on the device.
fn held(engine: &mut Engine, class: MemoryClass) -> [usize; 2] {
    let uses = engine.memory_uses();
    let of = |is_host: bool| {
        let is = |m: &&MemoryUse| m.class == class && (m.device == Device::Host) == is_host;
        uses.iter().filter(is).map(|m| m.bytes).sum()
    };
    [of(true), of(false)]
}

/// Weights on the host, mapped and copied, and on the device.
fn weights(engine: &mut Engine) -> [usize; 3] {
    let [mapped, none] = held(engine, MemoryClass::WeightsMapped);
    let [read, copied] = held(engine, MemoryClass::WeightsCopied);
    assert_eq!(none, 0, "a device maps no files");
    [mapped, read, copied]
}

#[test]
fn weights_are_read_where_the_host_has_them() {
    if device().is_none() {
        return;
    }
    let all = [Activations::Int8, Activations::F32, Activations::Bf16, Activations::Int11];
    let models = [
        ("llama", 4),
        ("mlx_qwen3", 4),
        ("qwen3_moe", 1),
        ("gpt_oss", 1),
        ("quantized/fp8_blocks", 1),
        ("mlx_qwen3_5_moe", 1),
    ];
    for (name, modes) in models {
        let folder = rewritten(name, 0);
        for activations in all.into_iter().take(modes) {
            let wanted = logits(&mut Engine::open(folder.path(), options(activations, 64)).unwrap());
            let ways = [LoadMode::Mmap, LoadMode::Pread, LoadMode::Direct];
            for load in ways.into_iter().take(if activations == Activations::Int8 { 3 } else { 1 }) {
                let case = format!("{name}, {activations:?}, {load:?}");
                let options = |chunk| {
                    let mut options = options(activations, chunk);
                    options.load.mode = load;
                    options
                };
                let mut copied = on(folder.path(), Unified::Off, options(64)).unwrap();
                assert!(logits(&mut copied) == wanted, "{case}: copies");
                let [_, made, all] = weights(&mut copied);
                drop(copied);
                for chunk in [1, 17] {
                    let mut shared = on(folder.path(), unified(), options(chunk)).unwrap();
                    assert!(logits(&mut shared) == wanted, "{case}: {chunk} at once");
                    let fallbacks = shared.fallbacks();
                    assert!(!fallbacks.iter().any(|why| why.contains("lock")), "{case}: {fallbacks:?}");
                    let [mapped, read, own] = weights(&mut shared);
                    // Each weight is in one place, but for what was made of some where a device does not read that there.
                    let sum = mapped + read + own;
                    assert!((all..=made + all).contains(&sum), "{case}: {mapped} + {read} + {own} of {made} + {all}");
                    assert_eq!(mapped > 0, load == LoadMode::Mmap, "{case}");
                    // Vectors are widened.
                    let reads_all = made == 0 || std::env::var("EMULATED_UNIFIED").is_ok_and(|kind| kind == "pages");
                    assert!(!reads_all || 4 * own < all, "{case}: {own} of {all} are copied");
                    let used = shared.device().unwrap();
                    assert!(used.shared && used.budget > 0, "{case}");
                }
            }
        }
    }
}

#[test]
fn what_kernels_cannot_take_as_it_is_is_copied() {
    if device().is_none() {
        return;
    }
    // Misplaced, and in blocks.
    let misplaced = rewritten("llama", 8);
    for folder in [misplaced.path(), &golden("quantized/mxfp4")] {
        for load in [LoadMode::Mmap, LoadMode::Pread] {
            let mut options = options(Activations::Int8, 16);
            options.load.mode = load;
            let wanted = logits(&mut Engine::open(folder, options.clone()).unwrap());
            let mut copied = on(folder, Unified::Off, options.clone()).unwrap();
            assert!(logits(&mut copied) == wanted);
            let all: usize = weights(&mut copied).iter().sum();
            drop(copied);
            let mut shared = on(folder, unified(), options).unwrap();
            assert!(logits(&mut shared) == wanted, "{folder:?}, {load:?}");
            let [mapped, read, own] = weights(&mut shared);
            assert_eq!(mapped + read + own, all, "{folder:?}, {load:?}");
            assert!(folder != misplaced.path() || mapped + read == 0, "{mapped} and {read} bytes begin elsewhere");
            let says = shared.fallbacks().iter().any(|why| why.contains("begin at no multiple of 16 bytes"));
            assert_eq!(says, folder == misplaced.path(), "{:?}", shared.fallbacks());
        }
    }
}

/// The smallest limit that a refusal names.
fn least(refused: anyhow::Result<Engine>, flag: &str) -> u64 {
    let refused = format!("{:#}", refused.err().expect("too little"));
    let (_, figure) = refused.rsplit_once(flag).unwrap_or_else(|| panic!("{flag}: {refused}"));
    (figure.split_once('M').unwrap().0.trim().parse::<f64>().unwrap() * 1e6) as u64
}

#[test]
fn experts_are_read_in_the_hosts_slots() {
    if device().is_none() {
        return;
    }
    let folder = rewritten(MIXTURE, 0);
    let wanted = logits(&mut Engine::open(folder.path(), options(Activations::Int8, 64)).unwrap());
    let slots = Placement::Slots;
    for (chunk, experts) in [(1, slots), (7, slots), (64, slots), (7, Placement::PageCache)] {
        let open = |unified, budget| {
            let options = Options { experts, memory_budget: budget, ..options(Activations::Int8, chunk) };
            on(folder.path(), unified, options)
        };
        let least = least(open(unified(), Some(1 << 20)), "--memory-budget ");
        for budget in [least, least + 100_000, least + (1 << 30)] {
            let case = format!("{chunk} at once, {experts:?}, {budget} bytes of {least}");
            let mut shared = open(unified(), Some(budget)).unwrap_or_else(|e| panic!("{case}: {e:#}"));
            // More than once: the second time experts are found.
            for turn in 0..2 {
                assert!(logits(&mut shared) == wanted, "{case}, turn {turn}");
            }
            let streamed = shared.take_streamed().expect("streamed experts");
            assert_eq!(
                (streamed.stats.uploads, streamed.stats.uploaded_bytes, streamed.device_slots),
                (0, 0, None),
                "{case}"
            );
            assert!(streamed.stats.reads > 0, "{case}");
            let [slots, tables] = held(&mut shared, MemoryClass::Experts);
            assert!(10 * tables < slots, "{case}: {tables} bytes of experts on the device, {slots} in slots");
            let all: usize = shared.memory_uses().iter().map(|m| m.bytes).sum();
            assert!(all as u64 <= budget, "{case}: {all} bytes");
        }
    }
}

#[test]
fn experts_that_are_copied_count_once() {
    if device().is_none() {
        return;
    }
    // They begin anywhere, or are in blocks.
    let misplaced = rewritten(MIXTURE, 8);
    for folder in [misplaced.path(), &golden("quantized/nvfp4_experts")] {
        let wanted = logits(&mut Engine::open(folder, options(Activations::Int8, 64)).unwrap());
        for chunk in [1, 64] {
            let open = |budget| {
                let experts = Placement::Slots;
                on(folder, unified(), Options { experts, memory_budget: budget, ..options(Activations::Int8, chunk) })
            };
            let least = least(open(Some(1 << 20)), "--memory-budget ");
            for budget in [least, least + 200_000] {
                let mut shared = open(Some(budget)).unwrap();
                for turn in 0..2 {
                    assert!(logits(&mut shared) == wanted, "{folder:?}, {chunk} at once, {budget}, turn {turn}");
                }
                let all: usize = shared.memory_uses().iter().map(|m| m.bytes).sum();
                assert!(all as u64 <= budget, "{folder:?}: {all} bytes of {budget}");
            }
        }
    }
}

/// Its layers have experts of many sizes.
#[test]
fn the_demo_opens_within_the_smallest_budget() {
    if device().is_none() {
        return;
    }
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/demo");
    let open = |budget| {
        let experts = Placement::Slots;
        on(&demo, unified(), Options { experts, memory_budget: Some(budget), ..options(Activations::Int8, 16) })
    };
    let least = least(open(1 << 20), "--memory-budget ");
    for budget in [least, least + 2_000_000] {
        let mut shared = open(budget).unwrap_or_else(|e| panic!("{budget} bytes of {least}: {e:#}"));
        let all: usize = shared.memory_uses().iter().map(|m| m.bytes).sum();
        assert!(all as u64 <= budget, "{all} bytes of {budget}");
    }
}

#[test]
fn one_budget_is_for_both() {
    if device().is_none() {
        return;
    }
    let folder = rewritten("llama", 0);
    let wanted = logits(&mut Engine::open(folder.path(), options(Activations::Int8, 16)).unwrap());
    let open = |unified, memory_budget, device_memory| {
        let mut options = Options { memory_budget, device_memory, ..options(Activations::Int8, 16) };
        // As the program sets it: the budget, or what the machine has available.
        options.load.copy_budget = memory_budget.or(Some(4 << 30));
        on(folder.path(), unified, options)
    };
    // A megabyte holds everything that the host has of a model on a device, but not the device's part.
    for flag in ["--memory-budget ", "--gpu-memory "] {
        let with = |bytes| match flag {
            "--memory-budget " => open(unified(), Some(bytes), None),
            _ => open(unified(), None, Some(bytes)),
        };
        let least = least(with(1 << 20), flag);
        let mut engine = with(least).unwrap();
        assert!(logits(&mut engine) == wanted);
        let all: usize = engine.memory_uses().iter().map(|m| m.bytes).sum();
        assert!(all as u64 <= least, "{flag}: {all} bytes of {least}");
        assert!(engine.device().unwrap().budget <= least);
    }
}

unsafe extern "C" {
    fn dlopen(name: *const c_char, flags: c_int) -> *mut c_void;
    fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
}

/// Has the emulated driver refuse the next allocation or lock. Whether it can.
fn refuse_next() -> bool {
    if device().is_none() || !sluice_cuda::describe(0).unwrap().starts_with("Emulated") {
        return false;
    }
    // SAFETY: strings that end with a zero, and a function of this type in `emulated/driver.cpp`.
    unsafe {
        let symbol = dlsym(dlopen(c"libcuda.so".as_ptr(), 2), c"emulated_fail".as_ptr());
        let fail = std::mem::transmute::<*mut c_void, unsafe extern "C" fn(c_long) -> c_long>(symbol);
        fail(0);
    }
    true
}

#[test]
fn weights_that_the_driver_does_not_lock_are_copied() {
    if device().is_none() {
        return;
    }
    let folder = rewritten("mlx_qwen3", 0);
    let wanted = logits(&mut Engine::open(folder.path(), options(Activations::Int8, 16)).unwrap());
    let mut engine = on(folder.path(), unified(), options(Activations::Int8, 16)).unwrap();
    if std::env::var("EMULATED_UNIFIED").is_ok_and(|kind| kind == "pages") || !refuse_next() {
        return;
    }
    assert!(logits(&mut engine) == wanted);
    let fallbacks = engine.fallbacks().join("; ");
    assert!(
        fallbacks.contains("weights are copied to the device: ") && fallbacks.contains("does not lock"),
        "{fallbacks}"
    );
    let [mapped, _, own] = weights(&mut engine);
    assert!(mapped == 0 && own > 0);
}
