//! The primitives of the thread pool. `tests/pool_model.rs` replaces them by a model checker's.

use std::sync::atomic::AtomicI32;
use std::time::{Duration, Instant};

pub use std::hint::spin_loop;
pub use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
pub use std::sync::{Arc, Mutex};
pub use std::thread::{Builder, JoinHandle, Thread, park, yield_now};

/// The standard library's cell with the checker's interface.
pub struct UnsafeCell<T>(std::cell::UnsafeCell<T>);

impl<T> UnsafeCell<T> {
    pub fn new(value: T) -> UnsafeCell<T> {
        UnsafeCell(std::cell::UnsafeCell::new(value))
    }

    pub fn with<R>(&self, f: impl FnOnce(*const T) -> R) -> R {
        f(self.0.get())
    }

    pub fn with_mut<R>(&self, f: impl FnOnce(*mut T) -> R) -> R {
        f(self.0.get())
    }
}

/// How long a helper has found nothing to do.
pub struct Idle {
    since: Instant,
    looks: u32,
}

impl Idle {
    pub fn begin() -> Idle {
        Idle { since: Instant::now(), looks: 0 }
    }

    /// Called each time that the helper finds nothing. Reads the clock only now and then.
    pub fn is_longer_than(&mut self, limit: impl Fn() -> Duration) -> bool {
        self.looks = self.looks.wrapping_add(1);
        self.looks.is_multiple_of(64) && self.since.elapsed() >= limit()
    }
}

/// The kernel's number of a thread, set by the thread itself.
#[derive(Default)]
pub struct ThreadNumber(AtomicI32);

impl ThreadNumber {
    /// Called by the thread.
    pub fn set(&self) {
        self.0.store(own_number(), Ordering::Release);
    }

    pub fn get(&self) -> Option<i32> {
        Some(self.0.load(Ordering::Acquire)).filter(|n| *n != 0)
    }
}

/// The system's number of the calling thread.
pub fn own_number() -> i32 {
    crate::platform::thread_number()
}
