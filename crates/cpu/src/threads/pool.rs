//! A fork-join pool for work of microseconds.
//!
//! The caller is one of the threads. A job is a number of tasks. Each thread starts with a run of neighbouring tasks, because neighbours mostly
//! read neighbouring memory. A thread that is done steals from the end of another's run, so that a slow or descheduled thread only does
//! fewer tasks. A helper that has not woken by the time all tasks are taken is locked out; nobody waits for it. Idle helpers
//! spin for a moment, since the next layer's work comes within microseconds or when a read completes, and then sleep. Unused helpers
//! (`Pool::use_threads`) sleep at once.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::time::Duration;

use super::threading::{
    Arc, AtomicBool, AtomicU64, Builder, Idle, JoinHandle, Mutex, Ordering, Thread, ThreadNumber, UnsafeCell, fence,
    park, spin_loop, yield_now,
};

/// How long an idle helper spins before it sleeps, where work comes from memory.
const SPIN: Duration = Duration::from_micros(60);
/// Polls before the processor is yielded.
const LOOKS: u32 = 10_000;

type Job<'a> = &'a (dyn Fn(usize, usize) + Sync);

/// The current job. The owner writes it and helpers read it, so it has its own cache line (and the neighbour, which is prefetched with it).
#[repr(align(128))]
struct Call {
    /// The job's epoch, and its number of threads (low 16 bits). The first threads take part.
    state: AtomicU64,
    job: UnsafeCell<Option<Job<'static>>>,
}

impl Call {
    /// Epoch and threads.
    fn look(&self, order: Ordering) -> (u64, usize) {
        let now = self.state.load(order);
        (now >> 16, (now & 0xffff) as usize)
    }
}

/// The last job that a helper entered or was locked out of: its epoch, and whether the helper is inside (lowest bit). On its own cache line, so
/// that helpers do not slow each other down.
#[repr(align(128))]
struct Presence(AtomicU64);

const INSIDE: u64 = 1;

impl Presence {
    /// The helper enters the job, unless it is closed.
    fn enter(&self, epoch: u64) -> bool {
        let now = self.0.load(Ordering::Relaxed);
        now >> 1 < epoch
            && self.0.compare_exchange(now, epoch << 1 | INSIDE, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    fn leave(&self, epoch: u64) {
        self.0.store(epoch << 1, Ordering::Release);
    }

    /// The owner closes the job to a helper that has not come.
    fn close(&self, epoch: u64) {
        let now = self.0.load(Ordering::Relaxed);
        if now >> 1 != epoch {
            // Else it has come meanwhile.
            let _ = self.0.compare_exchange(now, epoch << 1, Ordering::AcqRel, Ordering::Relaxed);
        }
    }

    fn has_left(&self, epoch: u64) -> bool {
        self.0.load(Ordering::Acquire) == epoch << 1
    }
}

struct Shared {
    call: Call,
    /// One for each helper.
    presences: Vec<Presence>,
    /// The remaining tasks of each thread's run.
    runs: Vec<Run>,
    /// The payload of the first helper that panicked in the current job.
    panicked: AtomicBool,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    sleeping: Vec<AtomicBool>,
    /// The kernel's numbers of the helpers.
    numbers: Vec<ThreadNumber>,
    /// Nanoseconds that an idle helper spins.
    spin: AtomicU64,
    stop: AtomicBool,
}

// SAFETY: the job is written only by the thread that owns the pool, while no helper is inside a job (each that was called has left or was locked out), and
// read only by helpers that entered after it was published by the call's state.
unsafe impl Sync for Shared {}
// SAFETY: as above; a job is `Sync`.
unsafe impl Send for Shared {}

/// Tasks `start..end` in one word, start in the low half; a cache line (and its neighbour, which is fetched along) to itself.
#[repr(align(128))]
struct Run(AtomicU64);

impl Run {
    fn set(&self, start: usize, end: usize) {
        self.0.store((end as u64) << 32 | start as u64, Ordering::Relaxed);
    }

    /// The first task, or the last.
    fn take(&self, last: bool) -> Option<usize> {
        let taken = self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |run| {
            let (start, end) = (run & u32::MAX as u64, run >> 32);
            (start < end).then(|| if last { (end - 1) << 32 | start } else { run + 1 })
        });
        taken.ok().map(|run| if last { (run >> 32) as usize - 1 } else { (run & u32::MAX as u64) as usize })
    }
}

/// Threads that share jobs.
pub struct Pool {
    shared: Arc<Shared>,
    /// Threads that take part in jobs, the caller's among them.
    used: usize,
    helpers: Vec<(Thread, Option<JoinHandle<()>>)>,
}

impl Pool {
    /// A pool of `threads` threads, the caller's among them.
    ///
    /// # Errors
    /// When the system refuses a thread; those that were started end.
    pub fn new(threads: usize) -> std::io::Result<Pool> {
        assert!(threads <= u16::MAX as usize, "the number of threads is part of a word");
        let count = threads.max(1) - 1;
        let shared = Arc::new(Shared {
            call: Call { state: AtomicU64::new(0), job: UnsafeCell::new(None) },
            presences: (0..count).map(|_| Presence(AtomicU64::new(0))).collect(),
            runs: (0..=count).map(|_| Run(AtomicU64::new(0))).collect(),
            panicked: AtomicBool::new(false),
            panic: Mutex::new(None),
            sleeping: (0..count).map(|_| AtomicBool::new(false)).collect(),
            numbers: (0..count).map(|_| ThreadNumber::default()).collect(),
            spin: AtomicU64::new(SPIN.as_nanos() as u64),
            stop: AtomicBool::new(false),
        });
        let mut pool = Pool { shared, used: count + 1, helpers: Vec::with_capacity(count) };
        for i in 0..count {
            let shared = pool.shared.clone();
            let name = format!("sluice-{}", i + 1);
            let handle = Builder::new().name(name).spawn(move || help(&shared, i))?;
            pool.helpers.push((handle.thread().clone(), Some(handle)));
        }
        Ok(pool)
    }

    /// Threads, the caller's among them.
    pub fn threads(&self) -> usize {
        self.helpers.len() + 1
    }

    /// The kernel's number of thread `thread` of the pool, from 1 on; `None` where it has not started yet.
    pub fn number(&self, thread: usize) -> Option<i32> {
        self.shared.numbers[thread - 1].get()
    }

    /// The same, but waits until the thread has started.
    pub fn wait_for_number(&self, thread: usize) -> i32 {
        loop {
            match self.number(thread) {
                Some(number) => return number,
                None => yield_now(),
            }
        }
    }

    /// From now on only the first `n` threads run jobs (at least one, at most all). The others sleep.
    pub fn use_threads(&mut self, n: usize) {
        self.used = n.clamp(1, self.threads());
    }

    /// Sets how long idle helpers spin before they sleep.
    pub fn set_spin(&self, spin: Duration) {
        self.shared.spin.store(spin.as_nanos() as u64, Ordering::Relaxed);
    }

    /// Runs `job(task, thread)` for every task below `tasks`; `thread` is below [`Pool::threads`] and no two calls with the same one
    /// overlap. Returns when all are done. `&mut` because one job runs at a time.
    ///
    /// # Panics
    /// When `job` does: with the caller's own panic, or else with that of the first helper. The pool can be used again.
    pub fn run(&mut self, tasks: usize, job: &(dyn Fn(usize, usize) + Sync)) {
        let (s, threads) = (&*self.shared, self.used);
        if threads == 1 || tasks <= 1 {
            (0..tasks).for_each(|task| job(task, 0));
            return;
        }
        assert!(tasks <= u32::MAX as usize, "a run is two halves of a word");
        // 1. Publish. No helper is inside: each has left the last job, or was locked out.
        for (i, run) in s.runs[..threads].iter().enumerate() {
            run.set(tasks * i / threads, tasks * (i + 1) / threads);
        }
        // SAFETY: the lifetime is widened only until step 3, which returns after the last helper that entered has left.
        let lasting = unsafe { std::mem::transmute::<Job<'_>, Job<'static>>(job) };
        // SAFETY: nobody else touches it while no helper is inside.
        s.call.job.with_mut(|job| unsafe { *job = Some(lasting) });
        let epoch = s.call.look(Ordering::Relaxed).0 + 1;
        s.call.state.store(epoch << 16 | threads as u64, Ordering::Release);
        // See `sleep`.
        fence(Ordering::SeqCst);
        for (i, (thread, _)) in self.helpers[..threads - 1].iter().enumerate() {
            if s.sleeping[i].load(Ordering::Relaxed) {
                thread.unpark();
            }
        }
        // 2. Take tasks like a helper.
        let own = catch_unwind(AssertUnwindSafe(|| take_tasks(&s.runs[..threads], job, 0)));
        // 3. Lock out the helpers that have not entered, then wait for the others.
        let called = &s.presences[..threads - 1];
        called.iter().for_each(|helper| helper.close(epoch));
        let mut spins = 0u32;
        for helper in called {
            while !helper.has_left(epoch) {
                spins = spins.saturating_add(1);
                if spins < LOOKS { spin_loop() } else { yield_now() }
            }
        }
        // 4. Resume a panic of any thread. Take both payloads, so that the next job starts clean.
        let mut panic = own.err();
        if s.panicked.load(Ordering::Relaxed) {
            s.panicked.store(false, Ordering::Relaxed);
            let helpers = s.panic.lock().unwrap_or_else(|e| e.into_inner()).take();
            panic = panic.or(helpers);
        }
        if let Some(panic) = panic {
            resume_unwind(panic);
        }
    }
}

/// `runs`: of the threads that take part.
fn take_tasks(runs: &[Run], job: Job, thread: usize) {
    while let Some(task) = runs[thread].take(false) {
        job(task, thread);
    }
    for other in (1..runs.len()).map(|i| &runs[(thread + i) % runs.len()]) {
        while let Some(task) = other.take(true) {
            job(task, thread);
        }
    }
}

fn help(s: &Shared, index: usize) {
    s.numbers[index].set();
    let mut seen = 0;
    while let Some((epoch, threads)) = next_job(s, index, seen) {
        seen = epoch;
        // 1. Enter if it is still open.
        if !s.presences[index].enter(epoch) {
            continue;
        }
        // 2. Work, and say that we left.
        // SAFETY: we entered, so the owner does not touch `job` until we have left.
        let job = s.call.job.with(|job| unsafe { *job }).expect("an open job is published");
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| take_tasks(&s.runs[..threads], job, index + 1))) {
            let mut first = s.panic.lock().unwrap_or_else(|e| e.into_inner());
            match *first {
                None => *first = Some(panic),
                // Dropping the payload of a panic may panic too, and then this helper would never leave the job.
                Some(_) => std::mem::forget(panic),
            }
            s.panicked.store(true, Ordering::Relaxed);
        }
        s.presences[index].leave(epoch);
    }
}

/// Waits until there is another job than the one of epoch `seen` that this helper is called to, and gives its epoch and how many threads it is for:
/// spins, then sleeps; sleeps at once where the last job was not for it. `None`: the pool ends.
fn next_job(s: &Shared, index: usize, seen: u64) -> Option<(u64, usize)> {
    let mut idle = Idle::begin();
    loop {
        if s.stop.load(Ordering::Relaxed) {
            return None;
        }
        let (epoch, threads) = s.call.look(Ordering::Acquire);
        let called = index + 1 < threads;
        if called && epoch != seen {
            return Some((epoch, threads));
        }
        if called && !idle.is_longer_than(|| Duration::from_nanos(s.spin.load(Ordering::Relaxed))) {
            spin_loop();
            continue;
        }
        sleep(s, index, seen);
        idle = Idle::begin();
    }
}

/// Parks unless there is something to do. The owner first publishes a job, and then looks which helpers sleep. A helper first marks itself as asleep, and then
/// looks for a job. With a fence between the two on each side, one sees the other, so no wakeup is lost. `stop` needs no fence: its setter unparks all helpers
/// without looking.
fn sleep(s: &Shared, index: usize, seen: u64) {
    s.sleeping[index].store(true, Ordering::Relaxed);
    fence(Ordering::SeqCst);
    let (epoch, threads) = s.call.look(Ordering::Relaxed);
    let called = index + 1 < threads && epoch != seen;
    if !called && !s.stop.load(Ordering::Relaxed) {
        park();
    }
    s.sleeping[index].store(false, Ordering::Relaxed);
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        for (thread, handle) in &mut self.helpers {
            thread.unpark();
            let _ = handle.take().expect("joined once").join();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;

    #[test]
    fn every_task_runs_once_on_one_of_the_threads() {
        for threads in [1, 2, 5] {
            let mut pool = Pool::new(threads).unwrap();
            for round in 0..2000 {
                let n = round % 37;
                let hits: Vec<AtomicUsize> = (0..n).map(|_| AtomicUsize::new(0)).collect();
                pool.run(n, &|task, thread| {
                    assert!(thread < threads);
                    hits[task].fetch_add(1, Ordering::Relaxed);
                });
                assert!(hits.iter().all(|h| h.load(Ordering::Relaxed) == 1));
                if round % 500 == 0 {
                    std::thread::sleep(2 * SPIN);
                }
            }
        }
    }

    #[test]
    fn threads_that_are_left_out_run_nothing() {
        let mut pool = Pool::new(5).unwrap();
        for round in 0..2000 {
            let used = [5, 2, 3, 1, 4][round % 5];
            pool.use_threads(used);
            let hits: Vec<AtomicUsize> = (0..round % 37).map(|_| AtomicUsize::new(0)).collect();
            pool.run(hits.len(), &|task, thread| {
                assert!(thread < used);
                hits[task].fetch_add(1, Ordering::Relaxed);
            });
            assert!(hits.iter().all(|h| h.load(Ordering::Relaxed) == 1));
            if round % 500 == 0 {
                std::thread::sleep(2 * SPIN);
            }
        }
        // As many as there are, whatever is asked for, and they wake: each waits for all others.
        pool.use_threads(9);
        let all = std::sync::Barrier::new(5);
        pool.run(5, &|_, _| _ = all.wait());
    }

    #[test]
    fn a_panic_in_a_task_reaches_the_caller_and_the_pool_lives() {
        let mut pool = Pool::new(3).unwrap();
        for bad in 0..20 {
            let caught = catch_unwind(AssertUnwindSafe(|| pool.run(20, &|task, _| assert_ne!(task, bad))));
            assert!(caught.is_err());
        }
        assert_eq!(sum_of_tasks(&mut pool), 45);
    }

    fn sum_of_tasks(pool: &mut Pool) -> usize {
        let sum = AtomicUsize::new(0);
        pool.run(10, &|task, _| {
            sum.fetch_add(task, Ordering::Relaxed);
        });
        sum.into_inner()
    }

    #[test]
    fn a_pool_whose_caller_and_helper_both_panicked_runs_the_next_job() {
        let mut pool = Pool::new(2).unwrap();
        // Both are inside before either panics.
        let both = std::sync::Barrier::new(2);
        let job = |_: usize, thread: usize| {
            both.wait();
            panic!("thread {thread}");
        };
        let caught = catch_unwind(AssertUnwindSafe(|| pool.run(2, &job))).unwrap_err();
        assert_eq!(caught.downcast_ref::<String>().unwrap(), "thread 0");
        assert_eq!(sum_of_tasks(&mut pool), 45);
    }

    #[test]
    fn a_helpers_panic_reaches_the_caller_in_its_own_words() {
        let mut pool = Pool::new(2).unwrap();
        let both = std::sync::Barrier::new(2);
        let job = |_: usize, thread: usize| {
            both.wait();
            assert_eq!(thread, 0, "the helper's words");
        };
        let caught = catch_unwind(AssertUnwindSafe(|| pool.run(2, &job))).unwrap_err();
        assert!(caught.downcast_ref::<String>().unwrap().contains("the helper's words"));
        assert_eq!(sum_of_tasks(&mut pool), 45);
    }

    #[test]
    fn a_panic_whose_payload_panics_when_it_is_dropped_does_not_hang_the_caller() {
        struct Bomb;
        impl Drop for Bomb {
            fn drop(&mut self) {
                if !std::thread::panicking() {
                    panic!("dropped");
                }
            }
        }
        let mut pool = Pool::new(3).unwrap();
        let all = std::sync::Barrier::new(3);
        let job = |_: usize, thread: usize| {
            all.wait();
            if thread > 0 {
                std::panic::panic_any(Bomb);
            }
        };
        std::mem::forget(catch_unwind(AssertUnwindSafe(|| pool.run(3, &job))).unwrap_err());
        assert_eq!(sum_of_tasks(&mut pool), 45);
    }
}
