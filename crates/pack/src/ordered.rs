//! A parallel map that keeps the order: jobs run on all cores, results are taken in the order of the jobs, and only a few jobs are in progress at a time.

use std::collections::VecDeque;
use std::sync::Mutex;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use anyhow::{Result, anyhow};

/// Does `work` on each job with `threads` threads and hands the results to `take`, on the calling thread, in the order of the jobs.
/// At most `4 * threads` jobs are begun and not yet taken. The first error stops everything.
pub fn ordered<J: Send, R: Send>(
    threads: usize,
    jobs: impl Iterator<Item = J>,
    work: impl Fn(&J) -> Result<R> + Sync,
    mut take: impl FnMut(J, R) -> Result<()>,
) -> Result<()> {
    let window = 4 * threads;
    let (hand_out, jobs_in) = sync_channel::<(J, SyncSender<(J, Result<R>)>)>(window);
    let jobs_in: Mutex<Receiver<_>> = Mutex::new(jobs_in);
    let next = || jobs_in.lock().ok()?.recv().ok();
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while let Some((job, reply)) = next() {
                    let result = work(&job);
                    // After an error nobody receives.
                    let _ = reply.send((job, result));
                }
            });
        }
        // Moved in: returning early closes the channel, which ends the workers.
        let hand_out = hand_out;
        let mut waiting: VecDeque<Receiver<(J, Result<R>)>> = VecDeque::with_capacity(window);
        let mut take_first = |waiting: &mut VecDeque<Receiver<(J, Result<R>)>>| {
            let Some(first) = waiting.pop_front() else { return Ok(()) };
            let (job, result) = first.recv().map_err(|_| anyhow!("a worker thread ended early"))?;
            take(job, result?)
        };
        for job in jobs {
            if waiting.len() == window {
                take_first(&mut waiting)?;
            }
            let (reply, result) = sync_channel(1);
            hand_out.send((job, reply)).map_err(|_| anyhow!("all worker threads ended early"))?;
            waiting.push_back(result);
        }
        while !waiting.is_empty() {
            take_first(&mut waiting)?;
        }
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::ensure;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn results_come_in_order_and_few_at_a_time() {
        let (begun, mut taken) = (AtomicUsize::new(0), 0);
        let work = |i: &usize| {
            begun.fetch_add(1, Ordering::SeqCst);
            std::thread::sleep(std::time::Duration::from_micros((i * 7 % 13 * 20) as u64));
            Ok(i * 2)
        };
        ordered(3, 0..500, work, |job, result| {
            assert_eq!((job, result), (taken, 2 * taken));
            assert!(begun.load(Ordering::SeqCst) <= taken + 12 + 1);
            taken += 1;
            Ok(())
        })
        .unwrap();
        assert_eq!(taken, 500);
    }

    #[test]
    fn the_first_error_ends_it() {
        for threads in [1, 4] {
            let work = |i: &usize| {
                ensure!(*i != 20, "twenty");
                Ok(*i)
            };
            let error = ordered(threads, 0..1000, work, |_, _| Ok(())).unwrap_err();
            assert_eq!(error.to_string(), "twenty");
            let stop = |_, i| {
                ensure!(i != 5usize, "five");
                Ok(())
            };
            assert_eq!(ordered(threads, 0..1000, work, stop).unwrap_err().to_string(), "five");
        }
    }
}
