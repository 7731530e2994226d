//! Promise 2: once a few steps have sized the scratch, a step allocates nothing.

use std::alloc::{GlobalAlloc, Layout, System};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use sluice_engine::{Activations, Engine, Generation, Options, Placement, sampler::SamplingParams};

/// The system's allocator, counting while told to.
struct Counting;

static COUNTING: AtomicBool = AtomicBool::new(false);
static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

fn count() {
    if COUNTING.load(Ordering::Relaxed) {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
    }
}

// SAFETY: every call goes to the system's allocator as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller's.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, p: *mut u8, layout: Layout) {
        // SAFETY: the caller's.
        unsafe { System.dealloc(p, layout) }
    }
    unsafe fn realloc(&self, p: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count();
        // SAFETY: the caller's.
        unsafe { System.realloc(p, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn a_step_allocates_nothing() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden");
    for folder in ["qwen3", "qwen3_window", "qwen3_moe", "qwen3_next", "mlx_qwen3_widths", "mlx_qwen3_5_moe"] {
        let streamed = [Placement::Mapped, Placement::Slots, Placement::PageCache].map(|p| (Activations::Int8, p));
        let mapped = [Activations::F32, Activations::Bf16].map(|a| (a, Placement::Mapped));
        for (activations, experts) in mapped.into_iter().chain(streamed) {
            if experts != Placement::Mapped && !(folder.contains("moe") || folder.contains("next")) {
                continue;
            }
            let options = Options {
                activations,
                experts,
                threads: 2,
                chunk: Some(32),
                max_context: Some(400),
                ..Options::for_this_machine().unwrap()
            };
            let mut engine = Engine::open(&golden.join(folder), options).unwrap();
            let vocabulary = engine.spec().vocabulary as u32;
            let sampling = SamplingParams { temperature: 0.8, top_k: 20, top_p: 0.9, ..SamplingParams::default() };
            let generation = Generation { sampling, max_tokens: 1000, stop_ids: vec![] };
            let id = engine.add_sequence().unwrap();
            let prompt: Vec<u32> = (0..150).map(|i| i * 31 % vocabulary).collect();
            engine.start(id, &prompt, generation).unwrap();
            // A whole chunk, the rest of the prompt, single tokens.
            for _ in 0..12 {
                engine.step().unwrap();
            }
            // Threads that the system starts late allocate as they start.
            std::thread::sleep(std::time::Duration::from_millis(200));
            ALLOCATIONS.store(0, Ordering::Relaxed);
            COUNTING.store(true, Ordering::Relaxed);
            for _ in 0..200 {
                engine.step().unwrap();
            }
            COUNTING.store(false, Ordering::Relaxed);
            let made = ALLOCATIONS.load(Ordering::Relaxed);
            assert_eq!(made, 0, "{folder} {activations:?} {experts:?}: {made} allocations in 200 steps");
        }
    }
}
