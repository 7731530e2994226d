//! An allocator that counts while told to, for tests of what may not allocate. Included by path: a global allocator belongs to one test binary.

use std::alloc::{GlobalAlloc, Layout, System};
use std::backtrace::Backtrace;
use std::cell::Cell;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// The system's allocator, counting while told to.
struct Counting;

static COUNTING: AtomicBool = AtomicBool::new(false);
static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);
/// Where the first was made.
static FIRST: Mutex<Option<Backtrace>> = Mutex::new(None);

thread_local! {
    /// Whether this thread is noting where it is, which allocates too.
    static NOTING: Cell<bool> = const { Cell::new(false) };
}

fn count() {
    if COUNTING.load(Ordering::Relaxed) && !NOTING.get() && ALLOCATIONS.fetch_add(1, Ordering::Relaxed) == 0 {
        NOTING.set(true);
        *FIRST.lock().unwrap() = Some(Backtrace::force_capture());
        NOTING.set(false);
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

/// How often any thread asks for memory while `work` runs; where it first did is printed.
pub fn allocations(work: impl FnOnce()) -> usize {
    ALLOCATIONS.store(0, Ordering::Relaxed);
    COUNTING.store(true, Ordering::Relaxed);
    work();
    COUNTING.store(false, Ordering::Relaxed);
    if let Some(first) = FIRST.lock().unwrap().take() {
        println!("the first allocation:\n{first}");
    }
    ALLOCATIONS.load(Ordering::Relaxed)
}
