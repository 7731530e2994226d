//! The pool of threads under a model checker: its own source, with loom's threads and atomics in place of the standard library's. loom tries
//! the orders in which the steps of threads can interleave, and what relaxed loads may see, and ends with an error where a job is
//! touched by two sides at once, where a wakeup is lost (every thread sleeps), and where an assertion here fails.

use std::sync::atomic::{AtomicUsize, Ordering};

/// What `src/threads/threading.rs` is outside of the checker.
mod threading {
    pub use loom::cell::UnsafeCell;
    pub use loom::hint::spin_loop;
    pub use loom::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
    pub use loom::sync::{Arc, Mutex};
    pub use loom::thread::{Builder, JoinHandle, Thread, park, yield_now};

    /// The kernel knows nothing of these threads.
    #[derive(Default)]
    pub struct ThreadNumber {}

    impl ThreadNumber {
        pub fn set(&self) {}

        pub fn get(&self) -> Option<i32> {
            None
        }
    }

    /// There are no clocks here: a helper that found nothing once goes to sleep, so that sleeping is tried everywhere.
    pub struct Idle;

    impl Idle {
        pub fn begin() -> Idle {
            Idle
        }

        pub fn is_longer_than(&mut self, _: impl Fn() -> std::time::Duration) -> bool {
            true
        }
    }
}

#[path = "../src/threads/pool.rs"]
#[allow(dead_code)]
mod pool;

use pool::Pool;

/// Runs jobs with these numbers of tasks and threads, one after the other, and checks that each task ran once, on one of the threads. It tries every order of steps in which
/// threads that could go on are stopped at most `preemptions` times. Returns the number of orders.
fn check(threads: usize, jobs: &'static [(usize, usize)], preemptions: usize) -> usize {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(preemptions);
    // Counters that are not loom's add no steps to try.
    let orders = std::sync::Arc::new(AtomicUsize::new(0));
    let tried = orders.clone();
    model.check(move || {
        tried.fetch_add(1, Ordering::Relaxed);
        let mut pool = Pool::new(threads).unwrap();
        for &(tasks, used) in jobs {
            pool.use_threads(used);
            let runs: Vec<AtomicUsize> = (0..tasks).map(|_| AtomicUsize::new(0)).collect();
            pool.run(tasks, &|task, thread| {
                assert!(thread < used);
                runs[task].fetch_add(1, Ordering::Relaxed);
            });
            assert!(runs.iter().all(|n| n.load(Ordering::Relaxed) == 1));
        }
    });
    orders.load(Ordering::Relaxed)
}

/// The first task waits for the second, which is the helper's: a helper that is not woken would leave both asleep. `left_out`: behind a job that the
/// helper had no part in.
fn check_that_a_helper_wakes(left_out: bool, preemptions: usize) {
    use loom::sync::{Condvar, Mutex};
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(preemptions);
    model.check(move || {
        let mut pool = Pool::new(2).unwrap();
        if left_out {
            pool.use_threads(1);
            pool.run(2, &|_, thread| assert_eq!(thread, 0));
            pool.use_threads(2);
        }
        let (came, told) = (Mutex::new(false), Condvar::new());
        pool.run(2, &|task, _| {
            let mut came = came.lock().unwrap();
            if task == 1 {
                *came = true;
                told.notify_all();
            }
            while !*came {
                came = told.wait(came).unwrap();
            }
        });
    });
}

fn main() {
    if ["ASAN_OPTIONS", "TSAN_OPTIONS"].iter().any(|name| std::env::var_os(name).is_some()) {
        println!("SKIPPED: sanitizers know nothing of the checker's stacks");
        return;
    }
    let orders = [
        check(2, &[(2, 2)], 4),
        // What one job leaves behind meets the next, and a helper that is late for it.
        check(2, &[(2, 2), (2, 2)], 2),
        check(2, &[(2, 2), (2, 2), (2, 2)], 1),
        check(3, &[(3, 3)], 1),
        // A helper that is left out meets jobs of others, and its own again.
        check(2, &[(2, 1), (2, 2)], 2),
        check(2, &[(2, 2), (2, 1), (2, 2)], 1),
        check(3, &[(2, 2), (3, 3)], 1),
        check(3, &[(3, 3), (2, 2)], 1),
    ];
    check_that_a_helper_wakes(false, 2);
    check_that_a_helper_wakes(true, 2);
    println!("{} orders of steps, and each task ran once in each", orders.iter().sum::<usize>());
}
