//! Calls to the store: several at once, and for a bounded time. A call that hangs keeps its thread and nothing else.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use super::handle::{Remote, lock};

/// Calls under way at once, at most, those that hang included.
const MOST_CALLS: usize = 512;

/// Ends a count of calls under way.
struct Counted(Arc<Remote>);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.calls.fetch_sub(1, Ordering::Relaxed);
    }
}

/// How several calls ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// All results were taken.
    Done,
    /// The receiver wanted no more.
    Stopped,
    /// The time was over.
    Late,
}

/// How long results are waited for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bound {
    /// For all of them.
    pub until: Instant,
    /// For the next one.
    pub stall: Duration,
}

impl Bound {
    fn left(&self) -> Duration {
        self.until.saturating_duration_since(Instant::now()).min(self.stall)
    }
}

impl Remote {
    /// Runs `work` for each job, on up to `threads` threads, and hands the results to `take` on this thread, in any order, with the job's number. At most `threads`
    /// results wait to be taken. Ends when all are taken, when `take` returns false, or when the time is over; jobs that have not begun then do not.
    pub(super) fn each<J, T>(
        self: &Arc<Self>,
        jobs: Vec<J>,
        threads: usize,
        bound: Bound,
        work: impl Fn(&Remote, J, Duration) -> T + Send + Sync + 'static,
        mut take: impl FnMut(usize, T) -> bool,
    ) -> End
    where
        J: Send + 'static,
        T: Send + 'static,
    {
        let count = jobs.len();
        let jobs = Arc::new(Mutex::new(jobs.into_iter().enumerate()));
        let (work, is_over) = (Arc::new(work), Arc::new(AtomicBool::new(false)));
        let (sender, results) = sync_channel(threads.max(1));
        for _ in 0..threads.min(count) {
            if self.calls.fetch_add(1, Ordering::Relaxed) >= MOST_CALLS {
                self.calls.fetch_sub(1, Ordering::Relaxed);
                break;
            }
            let counted = Counted(Arc::clone(self));
            let (jobs, work, is_over, sender) =
                (Arc::clone(&jobs), Arc::clone(&work), Arc::clone(&is_over), sender.clone());
            let run = move || {
                while !is_over.load(Ordering::Relaxed) {
                    let Some((i, job)) = lock(&jobs).next() else { return };
                    let patience = bound.until.saturating_duration_since(Instant::now());
                    if patience.is_zero() || sender.send((i, work(&counted.0, job, patience))).is_err() {
                        return;
                    }
                }
            };
            // Without a thread there is one result less at a time.
            let _ = thread::Builder::new().name("prompt-store".into()).spawn(run);
        }
        drop(sender);
        let mut taken = 0;
        let end = loop {
            if taken == count {
                break End::Done;
            }
            match results.recv_timeout(bound.left()) {
                Ok((i, result)) => {
                    taken += 1;
                    if !take(i, result) {
                        break End::Stopped;
                    }
                }
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => break End::Late,
            }
        };
        is_over.store(true, Ordering::Relaxed);
        end
    }
}
