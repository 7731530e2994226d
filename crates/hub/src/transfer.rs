//! Fetches blobs over several connections at once, in segments, and goes on where an earlier try ended.
//!
//! - Workers take segments in order, so that the bytes without a gap grow. A connection that ends too early costs what is in its buffer; the next try asks for the rest.
//! - One thread sums the bytes as they arrive, reading them back from the page cache. A blob gets its name only when its sum is right and its bytes are on the disk.
//! - One thread syncs what is there every second, which also keeps the last sync short.
//!
//! While somebody computes with what arrives (`in_use`), workers serve what is asked for before what is next in order. Requests in order are short then, so that a
//! connection is soon free, and few, so that what is waited for has the bandwidth. Wrong bytes are not fetched again: they may have been used.
//!
//! Threads that wait for a silent connection are left behind when the transfer stops: they write nothing more.

use std::io::Read;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};

use crate::client::{Answer, Client, Failure};
use crate::digest::Digest;
use crate::error::{Error, Result};
use crate::lock::Lock;
use crate::partial::{self, Claim, Partial, Urgency};
use crate::url::Url;
use crate::watch::{Event, Watch};

/// Bytes that a connection collects before it writes them, and that are summed at once: few enough to stay in a core's cache meanwhile.
const BUFFER: usize = 256 << 10;
/// The longest time that bytes stay in that buffer.
const FLUSH: Duration = Duration::from_millis(200);
const SYNC: Duration = Duration::from_secs(1);
const POLL: Duration = Duration::from_millis(5);
/// How often a caller hears of progress.
const REPORT: Duration = Duration::from_millis(100);
/// Wrong bytes are fetched once more.
const ATTEMPTS: u32 = 2;
/// While the blob is in use: about how long a request takes, and the bytes of it.
const SHORT: Duration = Duration::from_millis(200);
const SHORT_BYTES: (u64, u64) = (512 << 10, 3 << 20);
/// So long after somebody waited for bytes, he is likely to wait again.
const DEMAND: Duration = Duration::from_secs(1);

/// A blob to fetch.
pub struct Job {
    /// The file's name, for messages.
    pub file: String,
    /// The repository's name, for messages.
    pub repo: String,
    /// The hub's address of the file.
    pub url: Url,
    /// What its bytes must sum to.
    pub digest: Digest,
    /// Where it belongs.
    pub blob: PathBuf,
    /// What is there of it.
    pub partial: Arc<Partial>,
    /// Held until it is whole.
    pub lock: Mutex<Option<Lock>>,
    /// Where the hub's redirects led, until that no longer works.
    pub source: Mutex<Option<Url>>,
    /// Held by the one connection of a server that sends whole files only.
    pub whole: Mutex<()>,
    /// The server sends whole files only.
    pub has_no_ranges: AtomicBool,
}

struct Shared {
    client: Arc<Client>,
    jobs: Vec<Job>,
    finished: AtomicUsize,
    is_stopped: AtomicBool,
    error: Mutex<Option<Error>>,
    /// A server asked all connections to wait until then.
    pause: Mutex<Option<Instant>>,
    notes: Mutex<Vec<String>>,
    /// Somebody computes with what arrives.
    in_use: bool,
    /// When somebody waited for bytes last.
    demand: Mutex<Option<Instant>>,
    /// Workers that fetch what is next in order.
    in_order: AtomicUsize,
    /// Workers that fetch what somebody waits for.
    waited_for: AtomicUsize,
}

/// Blocks of a job; with the one connection of a server that sends whole files only.
type Claimed<'a> = (&'a Job, Option<MutexGuard<'a, ()>>, Claim<'a>);

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|e| e.into_inner())
}

/// Fetches all jobs. `finished` is called on this thread for each blob that has got its name, in order. `before`: bytes that other files of the model have. `in_use`: somebody
/// computes with what arrives.
///
/// # Errors
/// The first that no further try would mend. What has arrived is kept.
pub fn fetch(
    client: Arc<Client>,
    jobs: Vec<Job>,
    before: u64,
    in_use: bool,
    watch: &dyn Watch,
    finished: &mut dyn FnMut(&Job) -> Result<()>,
) -> Result<()> {
    let all = before + jobs.iter().map(|job| job.partial.size()).sum::<u64>();
    let connections = client.settings().connections.max(1);
    let shared = Arc::new(Shared {
        client,
        jobs,
        finished: AtomicUsize::new(0),
        is_stopped: AtomicBool::new(false),
        error: Mutex::new(None),
        pause: Mutex::new(None),
        notes: Mutex::new(Vec::new()),
        in_use,
        demand: Mutex::new(None),
        in_order: AtomicUsize::new(0),
        waited_for: AtomicUsize::new(0),
    });
    let spawn = |name: &str, work: fn(&Shared)| {
        let own = Arc::clone(&shared);
        thread::Builder::new().name(name.to_owned()).spawn(move || work(&own))
    };
    let begun = (0..connections)
        .map(|_| spawn("fetch", Shared::work))
        .chain([spawn("sum", Shared::sum), spawn("sync", Shared::sync)]);
    let threads: Vec<_> = begun.filter_map(std::io::Result::ok).collect();
    let (mut told, mut reported) = (0, Instant::now());
    let outcome = loop {
        locked(&shared.notes).drain(..).for_each(|note| watch.event(Event::Note(note)));
        // Looked at before the rest, since whoever ends says why before.
        let is_dead = threads.is_empty() || threads.iter().any(|thread| thread.is_finished());
        let count = shared.finished.load(Ordering::Acquire);
        let linked = shared.jobs[told..count].iter().try_for_each(&mut *finished);
        told = count;
        if let Err(e) = linked {
            break Err(e);
        }
        if let Some(e) = locked(&shared.error).take() {
            break Err(e);
        }
        if count == shared.jobs.len() {
            watch.event(Event::Progress { done: all, all });
            break Ok(());
        }
        if watch.is_stopped() {
            break Err(Error::Stopped);
        }
        if is_dead {
            let cause = std::io::Error::other("a thread that fetches has ended");
            break Err(Error::Io { path: shared.jobs[count].blob.clone(), cause });
        }
        if reported.elapsed() >= REPORT {
            reported = Instant::now();
            let done = before + shared.jobs.iter().map(|job| job.partial.written()).sum::<u64>();
            watch.event(Event::Progress { done, all });
        }
        thread::sleep(POLL);
    };
    shared.is_stopped.store(true, Ordering::Release);
    // Threads see that within one read; those of a silent connection are not waited for.
    let patience = Instant::now() + Duration::from_secs(1);
    while threads.iter().any(|t| !t.is_finished()) && Instant::now() < patience {
        thread::sleep(POLL);
    }
    if let Err(why) = &outcome {
        for job in &shared.jobs[told..] {
            job.partial.give_up(&why.to_string());
            let _ = job.partial.sync();
            locked(&job.lock).take();
        }
    }
    outcome
}

impl Shared {
    fn fail(&self, error: Error) {
        locked(&self.error).get_or_insert(error);
        self.is_stopped.store(true, Ordering::Release);
    }

    fn is_over(&self) -> bool {
        self.is_stopped.load(Ordering::Acquire) || self.finished.load(Ordering::Acquire) == self.jobs.len()
    }

    fn unfinished(&self) -> &[Job] {
        &self.jobs[self.finished.load(Ordering::Acquire)..]
    }

    /// Waits, unless the transfer is over before.
    fn wait(&self, until: Instant) {
        while Instant::now() < until && !self.is_over() {
            thread::sleep(Duration::from_millis(20));
        }
    }

    /// Fetches segments until all blobs have their names.
    fn work(&self) {
        let (mut failures, mut rate) = (0, 0.0);
        while !self.is_over() {
            let paused = *locked(&self.pause);
            if let Some(until) = paused {
                self.wait(until);
            }
            let claimed = self.claim(rate);
            let Some((job, _whole, claim)) = claimed else {
                thread::sleep(POLL);
                continue;
            };
            let (before, begun, urgency) = (job.partial.written(), Instant::now(), claim.urgency());
            let (begin, end) = claim.range();
            let done = self.segment(job, claim);
            match urgency {
                Some(Urgency::Now) => {
                    self.waited_for.fetch_sub(1, Ordering::AcqRel);
                    *locked(&self.demand) = Some(Instant::now());
                }
                Some(Urgency::Soon) => {}
                None => drop(self.in_order.fetch_sub(1, Ordering::AcqRel)),
            }
            match done {
                Ok(()) => {
                    failures = 0;
                    // What is smaller tells of the way there and back.
                    if end - begin >= SHORT_BYTES.0 {
                        rate = (end - begin) as f64 / begun.elapsed().as_secs_f64().max(1e-3);
                    }
                }
                Err(Failure::Final(e)) => return self.fail(e),
                Err(Failure::Again(e, asked)) => {
                    failures = if job.partial.written() > before { 1 } else { failures + 1 };
                    if failures >= self.client.settings().tries {
                        return self.fail(e);
                    }
                    let pause = self.client.pause(failures, asked);
                    if let Some(asked) = asked.filter(|asked| !asked.is_zero()) {
                        let until = Instant::now() + asked;
                        locked(&self.pause).replace(until);
                        locked(&self.notes).push(format!(
                            "{}: waiting {} s, as the server asks",
                            e.brief(),
                            asked.as_secs()
                        ));
                    }
                    self.wait(Instant::now() + pause);
                }
            }
        }
    }

    /// The blocks that a worker fetches next; `rate`: its connection's last.
    fn claim(&self, rate: f64) -> Option<Claimed<'_>> {
        let (least, longest) = SHORT_BYTES;
        let short = ((rate * SHORT.as_secs_f64()) as u64).clamp(least, longest);
        let has_ranges = |job: &&Job| !job.has_no_ranges.load(Ordering::Acquire);
        for urgency in [Urgency::Now, Urgency::Soon] {
            let mut jobs = self.unfinished().iter().filter(has_ranges).filter(|_| self.in_use);
            if let Some(found) = jobs.find_map(|job| Some((job, None, job.partial.claim_asked(urgency, short)?))) {
                if urgency == Urgency::Now {
                    self.waited_for.fetch_add(1, Ordering::AcqRel);
                }
                return Some(found);
            }
        }
        let is_wanted = locked(&self.demand).is_some_and(|last| last.elapsed() < DEMAND);
        // While somebody waits, all of the network is his.
        if self.waited_for.load(Ordering::Acquire) > 0 {
            return None;
        }
        let most = if is_wanted { (self.client.settings().connections / 8).max(1) } else { usize::MAX };
        if self.in_order.fetch_add(1, Ordering::AcqRel) < most {
            let found = self.unfinished().iter().find_map(|job| {
                let whole = job.has_no_ranges.load(Ordering::Acquire).then(|| job.whole.try_lock());
                let bytes = if self.in_use { short } else { job.partial.usual_request() };
                match whole {
                    Some(Err(_)) => None,
                    whole => Some((job, whole.and_then(Result::ok), job.partial.claim(bytes)?)),
                }
            });
            if found.is_some() {
                return found;
            }
        }
        self.in_order.fetch_sub(1, Ordering::AcqRel);
        None
    }

    /// Fetches what is missing of one segment, or of all from it on if the server sends no ranges.
    fn segment(&self, job: &Job, claim: Claim) -> Result<(), Failure> {
        let (begin, end) = claim.range();
        let known = locked(&job.source).clone();
        let answer = self.client.get(known.as_ref().unwrap_or(&job.url), Some((begin, end)))?;
        match answer.status {
            206 => {
                let given =
                    answer.headers.get("content-range").and_then(|value| value.to_str().ok()).and_then(content_range);
                let size = job.partial.size();
                if !is_answer_to(given, begin, end, size) {
                    locked(&job.source).take();
                    let what = format!(
                        "asked for bytes {begin} to {} of {size}, got {:?}",
                        end - 1,
                        answer.headers.get("content-range")
                    );
                    return Err(Failure::Again(Error::Answer { url: answer.url.shown(), what }, None));
                }
                *locked(&job.source) = Some(answer.url.clone());
                self.copy(answer, claim, 0, false)
            }
            200 => {
                // The whole file from its beginning: one connection is enough, and what is there is skipped.
                if job.has_no_ranges.swap(true, Ordering::AcqRel) || begin == 0 {
                    return self.copy(answer, claim, begin, true);
                }
                Err(Failure::Again(
                    Error::Answer { url: answer.url.shown(), what: "sends whole files only".to_owned() },
                    Some(Duration::ZERO),
                ))
            }
            // A signed address lasts for a while only; the hub has a new one.
            400..=499 if known.is_some() && !self.client.is_hub(&answer.url) => {
                locked(&job.source).take();
                let what = format!("status {}", answer.status);
                Err(Failure::Again(Error::Answer { url: answer.url.shown(), what }, None))
            }
            416 => {
                let what = format!(
                    "has no bytes {begin} to {} of {}, which the hub announced as {} bytes",
                    end - 1,
                    job.file,
                    job.partial.size()
                );
                Err(Error::Answer { url: answer.url.shown(), what }.into())
            }
            _ if self.client.is_hub(&answer.url) => Err(self.client.refused(answer, &job.repo, &job.file)),
            _ => match self.client.refused(answer, &job.repo, &job.file) {
                // Another host's refusal says nothing about the repository.
                Failure::Final(e @ (Error::NotFound(_) | Error::Denied(_))) => Err(Failure::Again(e, None)),
                other => Err(other),
            },
        }
    }

    /// Writes a body into the segment, after skipping bytes of it; with `goes_on` also into those after it.
    fn copy(&self, answer: Answer, mut claim: Claim, mut skip: u64, goes_on: bool) -> Result<(), Failure> {
        let url = answer.url;
        let mut body = answer.body.into_reader();
        let mut buffer = vec![0; BUFFER];
        let (mut filled, mut flushed) = (0, Instant::now());
        loop {
            if self.is_stopped.load(Ordering::Acquire) {
                return Ok(());
            }
            let (at, end) = claim.range();
            let left = (end - at) as usize - filled;
            let wanted = if skip > 0 { (BUFFER as u64).min(skip) as usize } else { BUFFER.min(filled + left) };
            let read = body.read(&mut buffer[filled..wanted]);
            let n = match &read {
                Ok(n) => *n,
                Err(_) => 0,
            };
            if skip > 0 {
                skip -= n as u64;
            } else {
                filled += n;
            }
            let is_whole = skip == 0 && (end - at) as usize == filled;
            if filled == BUFFER || is_whole || n == 0 || flushed.elapsed() > FLUSH {
                if self.is_stopped.load(Ordering::Acquire) {
                    return Ok(());
                }
                claim.write(&buffer[..filled])?;
                (filled, flushed) = (0, Instant::now());
            }
            if is_whole {
                if !goes_on {
                    // Reads the end of the body, so that the connection can be used again.
                    let _ = body.read(&mut buffer[..1]);
                    return Ok(());
                }
                let Some(next) = claim.next() else { return Ok(()) };
                skip = next.range().0 - end;
                claim = next;
            } else if n == 0 {
                let cause = read.err().map_or("the connection ended too early".to_owned(), |e| e.to_string());
                return Err(self.client.unreachable(&url, &cause));
            }
        }
    }

    /// Sums blobs in order as they arrive, and gives them their names.
    fn sum(&self) {
        for job in &self.jobs {
            match self.sum_of(job) {
                Ok(true) => {
                    locked(&job.lock).take();
                    self.finished.fetch_add(1, Ordering::AcqRel);
                }
                Ok(false) => return,
                Err(e) => return self.fail(e),
            }
        }
    }

    /// Whether the blob is whole and has its name; `false` if the transfer stopped before.
    fn sum_of(&self, job: &Job) -> Result<bool> {
        let size = job.partial.size();
        let mut buffer = vec![0; BUFFER];
        let mut found = String::new();
        for _ in 0..if self.in_use { 1 } else { ATTEMPTS } {
            let (mut sum, mut at) = (job.digest.sum(size), 0);
            while at < size {
                let ready = job.partial.frontier() - at;
                let n = ready.min(BUFFER as u64) as usize;
                // Small pieces only at the end: each takes a call.
                if n < BUFFER && at + ready < size {
                    if self.is_stopped.load(Ordering::Acquire) {
                        return Ok(false);
                    }
                    thread::sleep(POLL);
                    continue;
                }
                job.partial.read(&mut buffer[..n], at)?;
                sum.update(&buffer[..n]);
                at += n as u64;
                if self.is_stopped.load(Ordering::Acquire) {
                    return Ok(false);
                }
            }
            found = sum.finish();
            if found == job.digest.hex() {
                job.partial.finish(&job.blob)?;
                return Ok(true);
            }
            if !self.in_use {
                locked(&self.notes).push(format!("{}: wrong bytes arrived; once more from the beginning", job.file));
                locked(&job.source).take();
                job.partial.reset()?;
            }
        }
        partial::discard(&job.blob);
        let (kind, expected) = (job.digest.name(), job.digest.hex().to_owned());
        Err(Error::Corrupt { file: job.file.clone(), kind, found, expected })
    }

    fn sync(&self) {
        while !self.is_over() {
            self.wait(Instant::now() + SYNC);
            for job in self.unfinished() {
                if let Err(e) = job.partial.sync() {
                    return self.fail(e);
                }
            }
        }
    }
}

/// Whether a range is the answer to a request for `[begin, end)` of `size` bytes. It may be shorter.
pub fn is_answer_to(given: Option<(u64, u64, Option<u64>)>, begin: u64, end: u64, size: u64) -> bool {
    given.is_some_and(|(first, last, all)| {
        first == begin && (first..end).contains(&last) && all.is_none_or(|all| all == size)
    })
}

/// `bytes 0-99/1000`: the first, the last and the number of all.
pub fn content_range(text: &str) -> Option<(u64, u64, Option<u64>)> {
    let (range, all) = text.strip_prefix("bytes ")?.split_once('/')?;
    let (first, last) = range.split_once('-')?;
    let all = if all == "*" { None } else { Some(all.parse().ok()?) };
    Some((first.parse().ok()?, last.parse().ok()?, all))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_read() {
        assert_eq!(content_range("bytes 0-99/1000"), Some((0, 99, Some(1000))));
        assert_eq!(content_range("bytes 5-9/*"), Some((5, 9, None)));
        for wrong in ["", "bytes */1000", "bytes 0-/1", "0-99/1000", "bytes -1-5/7"] {
            assert_eq!(content_range(wrong), None, "{wrong}");
        }
    }
}
