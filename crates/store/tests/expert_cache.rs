//! Visits and evictions of the expert cache allocate nothing, from the first.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use sluice_store::experts::{ExpertCache, Policy};

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
fn a_visit_allocates_nothing() {
    const LAYERS: usize = 6;
    const EXPERTS: u32 = 64;
    let mut state = 1u64;
    let mut random = move |of: u32| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as u32 % of
    };
    for policy in Policy::ALL {
        let mut cache = ExpertCache::new(&[EXPERTS as usize; LAYERS], 100, policy, &[(1, 7), (3, 0)]);
        let (mut wanted, mut tokens, mut held) =
            (Vec::with_capacity(64), Vec::with_capacity(64), Vec::with_capacity(64));
        COUNTING.store(true, Ordering::Relaxed);
        for token in 0..300 {
            for layer in 0..LAYERS {
                // Mostly one token, at times many; low numbers are hotter.
                let (uses, most) = if token % 50 == 0 { (48, 20) } else { (8, 1) };
                wanted.clear();
                while wanted.len() < uses {
                    let below = 1 + random(EXPERTS);
                    let expert = random(below);
                    if !wanted.contains(&expert) {
                        wanted.push(expert);
                    }
                }
                tokens.clear();
                tokens.extend(wanted.iter().map(|_| 1 + random(most)));
                cache.visit(layer, &wanted, &tokens);
                held.clear();
                held.extend(wanted.iter().filter_map(|e| cache.slot(layer, *e as usize)));
                held.iter().for_each(|slot| cache.lock(*slot));
                for expert in &wanted {
                    if cache.slot(layer, *expert as usize).is_none() {
                        held.push(cache.place(layer, *expert as usize).unwrap());
                    }
                }
                held.iter().for_each(|slot| cache.unlock(*slot));
            }
        }
        COUNTING.store(false, Ordering::Relaxed);
        assert_eq!(ALLOCATIONS.load(Ordering::Relaxed), 0, "{policy:?}");
    }
}
