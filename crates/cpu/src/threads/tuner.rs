//! Tunes the number of threads of short steps, on busy machines and on machines with more threads than help.
//!
//! A step of a few tokens is hundreds of rounds of some ten microseconds, and each round waits for its last thread. If more threads want to
//! run than there are processors, one of ours is usually descheduled for milliseconds, and its round waits. With fewer threads than free processors,
//! each keeps its own. The kernel counts how long each thread was ready to run and waited for a processor. If that is much, half of the threads are tried,
//! and kept if steps get faster; after a while twice as many are tried again. On an idle machine, fewer are tried only if there are very many: some of them
//! saturate memory, and a round waits for all.

use std::fs::File;
use std::io::{Cursor, Write};
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use super::threading::own_number;
use crate::threads::Pool;

/// The most tokens of a short step.
pub const SHORT: usize = 8;

/// The least time and number of short steps in one measurement.
const SPAN: Duration = Duration::from_millis(50);
const STEPS: u32 = 4;
/// The share of its threads' time that is spent waiting for processors on a busy machine, at least.
const CROWDED: f64 = 0.05;
/// Consecutive busy measurements before fewer threads are tried. One is not enough: it may be another engine that tries more threads.
const IN_TURN: u32 = 3;
/// Fewer threads are kept if a step takes at most this share of its time before.
const GAIN: f64 = 0.9;
/// With at least so many threads, half of them may be faster on an idle machine.
const MANY: usize = 32;
/// Measurements between two tries, at first and at most. Doubled by each try that changes nothing.
const REST: u32 = 16;
const LONGEST_REST: u32 = 128;

/// A reading of the clock and of the kernel's counters.
#[derive(Clone, Copy, Debug)]
pub struct Reading {
    /// Since any instant.
    pub at: Duration,
    /// The total time that all threads in use have waited for processors.
    pub waited: Duration,
}

/// Decides the number of threads. Knows neither clock nor kernel.
#[derive(Debug)]
pub struct ThreadTuner {
    threads: usize,
    used: usize,
    /// The start of the current measurement.
    since: Option<Reading>,
    steps: u32,
    time: Duration,
    /// Steps and their time, of all measurements since the last try.
    seen: (u32, Duration),
    /// Consecutive measurements of a busy machine.
    crowded: u32,
    /// Measurements until the next try, and their initial number.
    rest: u32,
    last_rest: u32,
    /// The number of threads before it was changed, and the seconds of a step then.
    before: Option<(usize, f64)>,
    /// The last try was of more threads, or there was none.
    tried_more: bool,
}

impl ThreadTuner {
    pub fn new(threads: usize) -> ThreadTuner {
        ThreadTuner {
            threads,
            used: threads,
            since: None,
            steps: 0,
            time: Duration::ZERO,
            seen: (0, Duration::ZERO),
            crowded: 0,
            rest: 0,
            last_rest: REST,
            before: None,
            tried_more: true,
        }
    }

    /// Threads for the next short step.
    pub fn chosen(&self) -> usize {
        self.used
    }

    /// Counts a short step. `read` reads the counters of the first `n` threads when a measurement begins and ends. `None`: the kernel does not count.
    pub fn step(&mut self, took: Duration, read: impl FnOnce(usize) -> Option<Reading>) {
        if self.threads == 1 {
            return;
        }
        let Some(since) = self.since else {
            self.begin(read(self.used));
            return;
        };
        self.steps += 1;
        self.time += took;
        if self.time < SPAN || self.steps < STEPS {
            return;
        }
        let used = self.used;
        let now = read(used);
        if let Some(now) = now {
            let all = now.at.saturating_sub(since.at);
            // Else there was more than these steps: a long one, or nothing to do.
            if all < 2 * self.time {
                let watched = self.used.min(Waits::MOST);
                let waited = now.waited.saturating_sub(since.waited);
                self.judge(waited.as_secs_f64() / (all.as_secs_f64() * watched as f64));
            }
        }
        // The counters of another number of threads are others.
        self.begin(now.filter(|_| self.used == used));
    }

    fn begin(&mut self, reading: Option<Reading>) {
        self.since = reading;
        (self.steps, self.time) = (0, Duration::ZERO);
    }

    /// Ends a measurement in which threads waited for `share` of their time.
    fn judge(&mut self, share: f64) {
        self.seen = (self.seen.0 + self.steps, self.seen.1 + self.time);
        let is_crowded = share > CROWDED;
        self.crowded = if is_crowded { self.crowded + 1 } else { 0 };
        self.rest = self.rest.saturating_sub(1);
        let took = self.seen.1.as_secs_f64() / f64::from(self.seen.0);
        // Perhaps: more and fewer are tried by turns.
        let too_many = !is_crowded && self.used >= MANY && (self.tried_more || self.used == self.threads);
        match self.before.take() {
            // Fewer were tried, and are kept where they are quicker.
            Some((more, before)) if more > self.used => {
                let kept = took < GAIN * before;
                self.set(if kept { self.used } else { more });
                self.wait(if kept { REST } else { 2 * self.last_rest });
            }
            // More were tried, and are kept where they are quicker.
            Some((fewer, before)) => {
                let kept = took < before;
                self.set(if kept { self.used } else { fewer });
                self.wait(if kept { 0 } else { 2 * self.last_rest });
            }
            None if self.rest > 0 => {}
            None if self.crowded >= IN_TURN && self.used > 1 || too_many => self.try_with(self.used.div_ceil(2), took),
            None if !is_crowded && self.used < self.threads => self.try_with((2 * self.used).min(self.threads), took),
            None if !is_crowded => self.wait(0),
            None => {}
        }
    }

    fn try_with(&mut self, threads: usize, took: f64) {
        (self.before, self.tried_more) = (Some((self.used, took)), threads > self.used);
        self.set(threads);
    }

    fn set(&mut self, threads: usize) {
        self.used = threads;
        self.crowded = 0;
        self.seen = (0, Duration::ZERO);
    }

    fn wait(&mut self, looks: u32) {
        self.rest = looks.min(LONGEST_REST);
        self.last_rest = self.rest.max(REST);
    }
}

/// The kernel's counters of a pool's threads.
#[derive(Debug)]
pub struct Waits {
    /// One file for each thread, with the thread's number: the calling thread's first, then the helpers'. Opened at first use.
    files: Vec<Option<(i32, File)>>,
    /// Since when readings count.
    start: Instant,
    /// The kernel does not count; do not try again.
    missing: bool,
}

impl Waits {
    /// The first so many threads are measured: each needs a file that is held open.
    const MOST: usize = 16;

    pub fn new(threads: usize) -> Waits {
        let files = (0..threads.min(Waits::MOST)).map(|_| None).collect();
        Waits { files, start: Instant::now(), missing: false }
    }

    /// The counters of the first `used` threads of the pool, the calling thread being its first. `None`: the kernel does not count.
    pub fn read(&mut self, pool: &Pool, used: usize) -> Option<Reading> {
        if self.missing {
            return None;
        }
        let mut waited = Duration::ZERO;
        for (thread, file) in self.files.iter_mut().take(used).enumerate() {
            // A helper that has not started yet is not waited for.
            let Some(number) = (if thread == 0 { Some(own_number()) } else { pool.number(thread) }) else { continue };
            if file.as_ref().is_none_or(|(opened, _)| *opened != number) {
                *file = open(number).map(|file| (number, file));
            }
            match file.as_ref().and_then(|(_, file)| waited_by(file)) {
                Some(one) => waited += one,
                None => {
                    self.missing = true;
                    return None;
                }
            }
        }
        Some(Reading { at: self.start.elapsed(), waited })
    }
}

/// The counters of this process's thread. Allocates nothing.
fn open(number: i32) -> Option<File> {
    let mut path = [0; 64];
    let mut to = Cursor::new(&mut path[..]);
    write!(to, "/proc/self/task/{number}/schedstat").ok()?;
    let len = to.position() as usize;
    File::open(std::str::from_utf8(&path[..len]).ok()?).ok()
}

fn waited_by(file: &File) -> Option<Duration> {
    let mut text = [0; 96];
    let len = file.read_at(&mut text, 0).ok()?;
    parse(std::str::from_utf8(&text[..len]).ok()?)
}

/// `schedstat`: nanoseconds on a processor, nanoseconds ready and waiting for one, time slices. A kernel that does not count says zeros.
fn parse(text: &str) -> Option<Duration> {
    text.split_ascii_whitespace().nth(1)?.parse().ok().map(Duration::from_nanos)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Lives `seconds` of short steps: `machine(threads)` is the seconds of a step and the share of its time that each thread waits. Returns the share of
    /// the time that each number of threads was used, and how often counters were read.
    fn live(tuner: &mut ThreadTuner, seconds: f64, machine: impl Fn(usize) -> (f64, f64)) -> (Vec<f64>, usize) {
        let (mut now, mut waited, mut reads) = (0.0, 0.0, 0);
        let mut with = vec![0.0; tuner.threads + 1];
        while now < seconds {
            let used = tuner.chosen();
            let (took, share) = machine(used);
            now += took;
            waited += share * took * used as f64;
            with[used] += took / seconds;
            tuner.step(Duration::from_secs_f64(took), |n| {
                assert_eq!(n, used);
                reads += 1;
                Some(Reading { at: Duration::from_secs_f64(now), waited: Duration::from_secs_f64(waited) })
            });
        }
        (with, reads)
    }

    /// Sixteen processors, eight of which somebody else keeps busy.
    fn beside_eight(threads: usize) -> (f64, f64) {
        if threads > 8 { (0.010, 0.25) } else { (0.004 * 8.0 / threads as f64, 0.0) }
    }

    fn alone(threads: usize) -> (f64, f64) {
        (0.003 * 16.0 / threads as f64, 0.002)
    }

    #[test]
    fn alone_all_threads_are_used_and_counters_are_read_rarely() {
        let mut tuner = ThreadTuner::new(16);
        let (with, reads) = live(&mut tuner, 60.0, alone);
        assert!(with[16] > 0.9999, "{with:?}");
        assert!(reads <= 60 * 20, "{reads}");
    }

    #[test]
    fn beside_others_half_of_the_threads_are_used_until_the_others_are_gone() {
        let mut tuner = ThreadTuner::new(16);
        let (with, _) = live(&mut tuner, 0.3, beside_eight);
        assert!(with[16] < 0.8 && tuner.chosen() == 8, "{with:?}");
        let (with, _) = live(&mut tuner, 60.0, beside_eight);
        assert!(with[8] > 0.97, "{with:?}");
        live(&mut tuner, 7.0, alone);
        assert_eq!(tuner.chosen(), 16);
        let (with, _) = live(&mut tuner, 60.0, alone);
        assert!(with[16] > 0.9999, "{with:?}");
    }

    #[test]
    fn a_quarter_of_the_threads_where_a_half_is_too_many() {
        let mut tuner = ThreadTuner::new(16);
        let beside_twelve = |threads| if threads > 4 { (0.001 * threads as f64, 0.4) } else { (0.006, 0.01) };
        let (with, _) = live(&mut tuner, 60.0, beside_twelve);
        assert!(with[4] > 0.9 && tuner.chosen() == 4, "{with:?}");
    }

    #[test]
    fn where_fewer_are_not_quicker_all_are_used_but_for_a_try_now_and_then() {
        let mut tuner = ThreadTuner::new(2);
        let (with, _) = live(&mut tuner, 60.0, |threads| (0.02, if threads == 2 { 0.3 } else { 0.2 }));
        assert!(with[2] > 0.97 && with[1] > 0.0, "{with:?}");
    }

    /// 64 processors whose memory 24 keep busy: rounds take longer with each thread.
    fn of_many(threads: usize) -> (f64, f64) {
        (0.060 / threads.min(24) as f64 + 0.00002 * threads as f64, 0.001)
    }

    #[test]
    fn of_very_many_half_are_used_where_they_are_quicker() {
        let mut tuner = ThreadTuner::new(64);
        let (with, _) = live(&mut tuner, 0.3, of_many);
        assert!(tuner.chosen() == 32, "{with:?}");
        let (with, _) = live(&mut tuner, 60.0, of_many);
        assert!(with[32] > 0.97, "{with:?}");
        let mut tuner = ThreadTuner::new(128);
        let (with, _) = live(&mut tuner, 60.0, of_many);
        assert!(with[32] > 0.9, "{with:?}");
    }

    #[test]
    fn very_many_are_used_where_they_are_quicker() {
        let mut tuner = ThreadTuner::new(64);
        let (with, _) = live(&mut tuner, 60.0, alone);
        assert!(with[64] > 0.97, "{with:?}");
    }

    #[test]
    fn one_look_at_a_crowd_is_no_crowd() {
        let mut tuner = ThreadTuner::new(16);
        for _ in 0..50 {
            live(&mut tuner, 0.1, beside_eight);
            tuner.since = None;
            let (with, _) = live(&mut tuner, 0.2, alone);
            tuner.since = None;
            assert!(with[16] > 0.99, "{with:?}");
        }
    }

    #[test]
    fn what_was_waited_between_steps_is_not_judged() {
        let mut tuner = ThreadTuner::new(16);
        let mut now = Duration::ZERO;
        for _ in 0..10_000 {
            // A long step of others between any two, in which all threads wait.
            now += Duration::from_millis(100);
            tuner.step(Duration::from_millis(4), |_| Some(Reading { at: now, waited: now * 8 }));
            assert_eq!(tuner.chosen(), 16);
        }
    }

    #[test]
    fn two_engines_on_the_same_processors_share_them() {
        let mut engines = [ThreadTuner::new(16), ThreadTuner::new(16)];
        let (mut now, mut next, mut waited) = (0.0, [0.0, 0.0013], [0.0; 2]);
        let mut with_all = [0.0; 2];
        while now < 60.0 {
            let i = usize::from(next[1] < next[0]);
            now = next[i];
            let threads = engines.each_ref().map(ThreadTuner::chosen);
            let over = (threads[0] + threads[1]) as f64 / 16.0;
            let took = if over > 1.0 { 0.010 } else { 0.048 / threads[i] as f64 };
            next[i] += took;
            waited[i] += (1.0 - 1.0 / over).max(0.0) * took * threads[i] as f64;
            with_all[i] += if threads[i] == 16 { took } else { 0.0 };
            let reading = Reading { at: Duration::from_secs_f64(next[i]), waited: Duration::from_secs_f64(waited[i]) };
            engines[i].step(Duration::from_secs_f64(took), |_| Some(reading));
        }
        assert_eq!(engines.each_ref().map(ThreadTuner::chosen), [8, 8]);
        assert!(with_all.iter().all(|t| *t < 0.05 * now), "{with_all:?}");
    }

    #[test]
    fn where_nobody_counts_all_threads_are_used() {
        let mut tuner = ThreadTuner::new(16);
        for _ in 0..1000 {
            tuner.step(Duration::from_millis(4), |_| None);
            assert_eq!(tuner.chosen(), 16);
        }
    }

    #[test]
    fn counters_are_the_second_number() {
        assert_eq!(parse("545705 54998 1\n"), Some(Duration::from_nanos(54998)));
        for text in ["", "12", "1 x 2", "1 -2 3"] {
            assert_eq!(parse(text), None, "{text}");
        }
    }

    #[test]
    fn the_kernel_counts_the_threads_of_a_pool() {
        let mut pool = Pool::new(3).unwrap();
        // Each task waits for all, so that every thread has started.
        let all = std::sync::Barrier::new(3);
        pool.run(3, &|_, _| _ = all.wait());
        let mut waits = Waits::new(3);
        let Some(first) = waits.read(&pool, 3) else {
            println!("SKIPPED: this kernel has no schedstat");
            return;
        };
        assert_eq!(waits.files.iter().flatten().map(|f| f.0).collect::<std::collections::HashSet<_>>().len(), 3);
        let reborrow = waits.read(&pool, 3).unwrap();
        assert!(reborrow.at > first.at && reborrow.waited >= first.waited);
        // Another thread takes the pool: its own counters are read.
        std::thread::scope(|scope| {
            scope.spawn(|| {
                waits.read(&pool, 1).unwrap();
                assert_eq!(waits.files[0].as_ref().unwrap().0, own_number());
            });
        });
    }
}
