//! Requests in flight: many at once through io_uring, by the thread that computes, or by threads where io_uring is refused. A request is repeated
//! or continued until it is complete or has failed for good; its caller is told once.

use std::collections::VecDeque;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use io_uring::{IoUring, Probe, opcode, squeue, types};

use super::ExpertOptions;
use crate::error::Error;
use crate::load::{ALIGNMENT, Source, go_on_at, refuses_direct};

/// Requests that the kernel knows of at most.
const KNOWN: usize = 128;
/// How long a waiting thread polls for a completion before it sleeps: waking a sleeping core takes long, in a virtual machine above all.
pub const SPIN: Duration = Duration::from_millis(3);
/// Requests that there is room for from the beginning, so that usually nothing is allocated later.
const QUEUED: usize = 1024;
/// How often a read that the disk fails is tried again.
const RETRIES: u8 = 2;
/// Bytes that one read asks for at most: the kernel moves no more than 2 GiB less a page at once.
pub(super) const MOST: usize = 1 << 30;

/// What happens to reads in tests: a disk that fails, stops short or is late, whichever way it is read.
pub trait ReadFaults: std::fmt::Debug + Send + Sync {
    /// A request for `memory.len()` bytes of a file from `offset` on is over and `came` of it. What is returned counts instead; `None`: it is not over
    /// yet, and will be asked about again. Memory that is not covered by what is returned may be overwritten.
    fn meet(
        &self,
        file: &std::path::Path,
        offset: u64,
        memory: &mut [u8],
        came: io::Result<usize>,
    ) -> Option<io::Result<usize>>;
}

/// A part of a file and where it goes.
#[derive(Clone, Copy, Debug)]
pub(super) struct ExpertRead {
    pub file: u32,
    /// A multiple of [`ALIGNMENT`].
    pub offset: u64,
    /// At most [`MOST`].
    pub len: usize,
    /// Aligned to [`ALIGNMENT`], with room for whole pages.
    pub memory: *mut u8,
    /// The caller's.
    pub tag: u32,
}

// SAFETY: the memory is lent to whoever holds this, and to nobody else, until the read is over.
unsafe impl Send for ExpertRead {}

/// What came of a read.
pub(super) struct Done {
    pub tag: u32,
    pub error: Option<Error>,
}

/// A read with its progress.
#[derive(Clone, Copy)]
struct Flight {
    read: ExpertRead,
    done: usize,
    from: usize,
    direct: bool,
    failures: u8,
    /// No other follows in its lane.
    last: bool,
}

pub(super) struct Requests {
    files: Vec<Arc<Source>>,
    /// Past the page cache, where the file system allows.
    direct: bool,
    in_flight: usize,
    notes: Vec<String>,
    by: By,
}

enum By {
    Ring(Box<Ring>),
    Threads(Threads),
    #[cfg(test)]
    Scripted(Box<dyn Disk>),
}

/// A disk whose results a test chooses, read by read.
#[cfg(test)]
pub(super) trait Disk: Send {
    fn push(&mut self, read: ExpertRead);
    /// Ends some reads, with `wait` at least one.
    fn reap(&mut self, wait: bool, each: &mut dyn FnMut(Done));
}

/// Requests in lanes: a disk works on all its requests at once, so with many in flight none completes soon. So few are in flight, and the kernel starts the next
/// request of a lane (they are linked) when the one before it is complete, without the computing thread having to poll.
struct Ring {
    ring: IoUring,
    /// By slot: what the kernel knows of.
    flights: Vec<Option<Flight>>,
    free: Vec<u32>,
    waiting: VecDeque<Flight>,
    lanes: usize,
    /// Lanes that are in use.
    used: usize,
    faults: Option<Arc<dyn ReadFaults>>,
    /// Over, and said by `faults` not to be.
    late: Vec<(Flight, io::Result<usize>)>,
}

impl Requests {
    #[cfg(test)]
    pub fn scripted(disk: Box<dyn Disk>) -> Requests {
        Requests { files: Vec::new(), direct: false, in_flight: 0, notes: Vec::new(), by: By::Scripted(disk) }
    }

    /// Requests of `files` with at most `depth` requests in flight, past the page cache if they are to be `direct`.
    pub fn new(files: Vec<Arc<Source>>, direct: bool, depth: usize, options: &ExpertOptions) -> io::Result<Requests> {
        let mut notes = Vec::new();
        if direct {
            notes.extend(files.iter().filter_map(|f| f.file.open_direct()));
        }
        let known = depth.clamp(KNOWN, 1024).next_power_of_two();
        let faults = options.faults.clone();
        let by = match options.io_uring.then(|| ring(known as u32)) {
            Some(Ok(ring)) => By::Ring(Box::new(Ring {
                ring,
                flights: vec![None; known],
                free: (0..known as u32).rev().collect(),
                waiting: VecDeque::with_capacity(QUEUED),
                lanes: depth.clamp(1, known),
                used: 0,
                faults,
                late: Vec::new(),
            })),
            refused => {
                let why = refused.map(|r| r.err().expect("no ring"));
                notes.extend(why.map(|e| format!("no io_uring ({e}); experts are read by threads instead")));
                By::Threads(Threads::new(&files, options.threads, faults)?)
            }
        };
        Ok(Requests { files, direct, in_flight: 0, notes, by })
    }

    /// Requests that were begun and not yet handed back by [`Requests::reap`].
    pub fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// What was fallen back on.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    pub fn is_ring(&self) -> bool {
        matches!(self.by, By::Ring(_))
    }

    /// Adds a read; [`Requests::submit`] begins with it.
    ///
    /// # Safety
    /// The memory stays valid and untouched until the read was handed back, and the reads are dropped before it.
    pub unsafe fn push(&mut self, read: ExpertRead) {
        self.in_flight += 1;
        #[cfg(test)]
        if let By::Scripted(disk) = &mut self.by {
            return disk.push(read);
        }
        let direct = self.direct && self.files[read.file as usize].file.direct().is_some();
        let flight = Flight { read, done: 0, from: 0, direct, failures: 0, last: true };
        match &mut self.by {
            By::Ring(ring) => ring.waiting.push_back(flight),
            By::Threads(threads) => threads.shared.lock().waiting.push_back(flight),
            #[cfg(test)]
            By::Scripted(_) => unreachable!(),
        }
    }

    /// Begins with what was pushed.
    pub fn submit(&mut self) {
        match &mut self.by {
            By::Ring(ring) => ring.enter(&self.files, 0),
            By::Threads(threads) => threads.shared.work.notify_all(),
            #[cfg(test)]
            By::Scripted(_) => {}
        }
    }

    /// Hands back reads that are over; with `wait` at least one, if any is in flight.
    pub fn reap(&mut self, wait: bool, mut each: impl FnMut(Done)) {
        let before = self.in_flight;
        while self.in_flight > 0 {
            self.collect(&mut each);
            if self.in_flight < before || !wait {
                return;
            }
            match &mut self.by {
                By::Ring(ring) => ring.wait(&self.files),
                By::Threads(threads) => threads.wait(),
                #[cfg(test)]
                By::Scripted(disk) => disk.reap(true, &mut |done| {
                    self.in_flight -= 1;
                    each(done);
                }),
            }
        }
    }

    /// Hands back what is over by now.
    fn collect(&mut self, each: &mut impl FnMut(Done)) {
        match &mut self.by {
            By::Threads(threads) => {
                let mut queue = threads.shared.lock();
                self.notes.append(&mut queue.notes);
                self.in_flight -= queue.over.len();
                queue.over.drain(..).for_each(each);
            }
            By::Ring(ring) => {
                ring.collect(&self.files, &mut self.notes, |done| {
                    self.in_flight -= 1;
                    each(done);
                });
            }
            #[cfg(test)]
            By::Scripted(disk) => disk.reap(false, &mut |done| {
                self.in_flight -= 1;
                each(done);
            }),
        }
    }
}

impl Ring {
    /// Moves what waits into lanes that are free, and waits for `wanted` completions.
    fn enter(&mut self, files: &[Arc<Source>], wanted: usize) {
        let lanes = self.waiting.len().min(self.free.len()).min(self.lanes - self.used);
        // Lanes that are in use now have their share left when they are over.
        let count = self.waiting.len().min(self.free.len()).min(lanes * self.waiting.len().div_ceil(self.lanes));
        // One lane after the other, each with every n-th read.
        for lane in 0..lanes {
            for i in (lane..count).step_by(lanes) {
                let slot = self.free.pop().expect("counted");
                let flight = Flight { last: i + lanes >= count, ..self.waiting[i] };
                let entry = request(files, &flight, slot);
                // Whether a read succeeds or fails, the next one begins.
                let entry = if flight.last { entry } else { entry.flags(squeue::Flags::IO_HARDLINK) };
                // SAFETY: the memory is lent until the completion is taken, and files live as long as the ring.
                unsafe { self.ring.submission().push(&entry) }.expect("as many entries as slots, all submitted before");
                self.flights[slot as usize] = Some(flight);
            }
        }
        self.waiting.drain(..count);
        self.used += lanes;
        loop {
            match self.ring.submit_and_wait(wanted) {
                Ok(_) if self.ring.submission().is_empty() => return,
                Ok(_) => {}
                Err(e) if e.raw_os_error() == Some(libc::EINTR) => {}
                // The kernel is short of resources: completions have to be taken first.
                Err(e) if [libc::EAGAIN, libc::EBUSY].contains(&e.raw_os_error().unwrap_or(0)) => return,
                // The kernel would go on writing for submitted requests: nothing can be handed back.
                Err(e) => panic!("io_uring_enter: {e}"),
            }
        }
    }

    /// Waits for a completion: polls for a while, then sleeps.
    fn wait(&mut self, files: &[Arc<Source>]) {
        if !self.late.is_empty() {
            return;
        }
        let begun = Instant::now();
        while self.ring.completion().is_empty() && begun.elapsed() < SPIN {
            std::hint::spin_loop();
        }
        if self.ring.completion().is_empty() {
            self.enter(files, 1);
        }
    }

    /// Hands back completed reads, and begins with queued ones.
    fn collect(&mut self, files: &[Arc<Source>], notes: &mut Vec<String>, mut each: impl FnMut(Done)) {
        for (mut flight, came) in std::mem::take(&mut self.late) {
            self.over(&mut flight, came, files, notes, &mut each);
        }
        loop {
            let Some(completion) = self.ring.completion().next() else { break };
            let slot = completion.user_data() as u32;
            let mut flight = self.flights[slot as usize].take().expect("in flight");
            self.free.push(slot);
            self.used -= usize::from(flight.last);
            let came = match completion.result() {
                n if n >= 0 => Ok(n as usize),
                e => Err(io::Error::from_raw_os_error(-e)),
            };
            self.over(&mut flight, came, files, notes, &mut each);
        }
        if !self.waiting.is_empty() && self.used < self.lanes {
            self.enter(files, 0);
        }
    }

    /// A request of a flight is over.
    fn over(
        &mut self,
        flight: &mut Flight,
        came: io::Result<usize>,
        files: &[Arc<Source>],
        notes: &mut Vec<String>,
        each: &mut impl FnMut(Done),
    ) {
        let came = match &self.faults {
            None => came,
            Some(faults) => match meet(&**faults, files, flight, came) {
                Ok(came) => came,
                Err(later) => return self.late.push((*flight, later)),
            },
        };
        match settle(files, flight, came, notes) {
            Some(done) => each(done),
            None => self.waiting.push_front(*flight),
        }
    }
}

/// What a test makes of a request; `Err`: it is not over yet.
fn meet(
    faults: &dyn ReadFaults,
    files: &[Arc<Source>],
    flight: &Flight,
    came: io::Result<usize>,
) -> Result<io::Result<usize>, io::Result<usize>> {
    let read = &flight.read;
    let again = match &came {
        Ok(n) => Ok(*n),
        Err(e) => Err(io::Error::from_raw_os_error(e.raw_os_error().unwrap_or(libc::EIO))),
    };
    // SAFETY: memory that was lent, and that the request which is over was about: nobody else uses it.
    let memory = unsafe { std::slice::from_raw_parts_mut(read.memory.add(flight.from), room(flight) - flight.from) };
    faults.meet(&files[read.file as usize].file.path, read.offset + flight.from as u64, memory, came).ok_or(again)
}

impl Drop for Requests {
    fn drop(&mut self) {
        // The kernel must be done with the memory.
        while self.in_flight > 0 {
            self.reap(true, |_| ());
        }
    }
}

fn ring(entries: u32) -> io::Result<IoUring> {
    let mut ring = IoUring::new(entries)?;
    let mut probe = Probe::new();
    ring.submitter().register_probe(&mut probe)?;
    if !probe.is_supported(opcode::Read::CODE) {
        return Err(io::ErrorKind::Unsupported.into());
    }
    // A sandbox may allow the ring and not its use.
    // SAFETY: a request without memory, and an empty queue.
    unsafe { ring.submission().push(&opcode::Nop::new().build()) }.expect("room for one");
    ring.submit_and_wait(1)?;
    ring.completion().for_each(drop);
    Ok(ring)
}

/// Bytes that a read asks for in all.
fn room(flight: &Flight) -> usize {
    let len = flight.read.len;
    if flight.direct { len.next_multiple_of(ALIGNMENT) } else { len }
}

fn request(files: &[Arc<Source>], flight: &Flight, slot: u32) -> squeue::Entry {
    let read = &flight.read;
    let file = &files[read.file as usize].file;
    let direct = file.direct().filter(|_| flight.direct);
    // SAFETY: inside the memory that was lent, of which `from` bytes are there.
    let memory = unsafe { read.memory.add(flight.from) };
    let entry = opcode::Read::new(
        types::Fd(direct.unwrap_or(&file.buffered).as_raw_fd()),
        memory,
        (room(flight) - flight.from) as u32,
    );
    let entry = entry.offset(read.offset + flight.from as u64).build().user_data(u64::from(slot));
    // A buffered read that finds its pages is copied by whoever submits it, one after the other: workers of the kernel do it side by side.
    if direct.is_none() { entry.flags(squeue::Flags::ASYNC) } else { entry }
}

/// What came of a request of a flight; `None`: there is more to ask for.
fn settle(
    files: &[Arc<Source>],
    flight: &mut Flight,
    came: io::Result<usize>,
    notes: &mut Vec<String>,
) -> Option<Done> {
    let ExpertRead { tag, len, offset, file, .. } = flight.read;
    let source = &files[file as usize];
    let failed =
        |at: usize, cause| Some(Done { tag, error: Some(source.naming(source.file.error(offset + at as u64, cause))) });
    match came {
        Ok(n) => {
            let reached = flight.from + n;
            if reached <= flight.done {
                return failed(flight.done, None);
            }
            flight.done = reached;
            flight.from = go_on_at(reached, flight.direct);
            (reached >= len).then_some(Done { tag, error: None })
        }
        Err(e) if [libc::EINTR, libc::EAGAIN, libc::ECANCELED].contains(&e.raw_os_error().unwrap_or(0)) => None,
        Err(e) if flight.direct && refuses_direct(&e) => {
            let note = source.file.refuse_direct(&format!("refused at read: {e}"));
            if !notes.contains(&note) {
                notes.push(note);
            }
            flight.direct = false;
            None
        }
        Err(_) if flight.failures < RETRIES => {
            flight.failures += 1;
            None
        }
        Err(e) => failed(flight.done, Some(e)),
    }
}

/// Readers that wait for each request.
struct Threads {
    shared: Arc<Shared>,
    running: Vec<JoinHandle<()>>,
}

struct Shared {
    queue: Mutex<Queue>,
    work: Condvar,
    done: Condvar,
}

struct Queue {
    waiting: VecDeque<Flight>,
    over: Vec<Done>,
    notes: Vec<String>,
    stopped: bool,
}

// SAFETY: the memory of the reads in it is lent to whoever takes them out.
unsafe impl Send for Flight {}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(|e| e.into_inner())
    }

    fn read(&self, files: &[Arc<Source>], faults: Option<&dyn ReadFaults>) {
        let mut queue = self.lock();
        loop {
            let Some(mut flight) = queue.waiting.pop_front() else {
                if queue.stopped {
                    return;
                }
                queue = self.work.wait(queue).unwrap_or_else(|e| e.into_inner());
                continue;
            };
            drop(queue);
            let mut notes = Vec::new();
            let done = loop {
                let mut came = read_once(files, &flight);
                if let Some(faults) = faults {
                    came = loop {
                        match meet(faults, files, &flight, came) {
                            Ok(came) => break came,
                            Err(later) => came = later,
                        }
                        std::thread::yield_now();
                    };
                }
                if let Some(done) = settle(files, &mut flight, came, &mut notes) {
                    break done;
                }
            };
            queue = self.lock();
            let unknown = notes.into_iter().filter(|n| !queue.notes.contains(n)).collect::<Vec<_>>();
            queue.notes.extend(unknown);
            queue.over.push(done);
            self.done.notify_all();
        }
    }
}

fn read_once(files: &[Arc<Source>], flight: &Flight) -> io::Result<usize> {
    let file = &files[flight.read.file as usize].file;
    let fd = file.direct().filter(|_| flight.direct).unwrap_or(&file.buffered).as_raw_fd();
    let offset = flight.read.offset + flight.from as u64;
    // SAFETY: inside the memory that was lent, of which `from` bytes are there.
    let n = unsafe {
        let start = flight.read.memory.add(flight.from);
        let vec = libc::iovec { iov_base: start.cast(), iov_len: room(flight) - flight.from };
        libc::preadv(fd, &raw const vec, 1, offset as libc::off_t)
    };
    if n < 0 { Err(io::Error::last_os_error()) } else { Ok(n as usize) }
}

impl Threads {
    fn new(files: &[Arc<Source>], threads: usize, faults: Option<Arc<dyn ReadFaults>>) -> io::Result<Threads> {
        let (waiting, over) = (VecDeque::with_capacity(QUEUED), Vec::with_capacity(QUEUED));
        let queue = Mutex::new(Queue { waiting, over, notes: Vec::new(), stopped: false });
        let shared = Arc::new(Shared { queue, work: Condvar::new(), done: Condvar::new() });
        let mut running = Vec::new();
        for _ in 0..threads.max(1) {
            let (shared, files, faults) = (Arc::clone(&shared), files.to_vec(), faults.clone());
            let read = move || shared.read(&files, faults.as_deref());
            running.push(std::thread::Builder::new().name("sluice-experts".into()).spawn(read)?);
        }
        Ok(Threads { shared, running })
    }

    /// Waits until something is over.
    fn wait(&self) {
        let mut queue = self.shared.lock();
        while queue.over.is_empty() {
            queue = self.shared.done.wait(queue).unwrap_or_else(|e| e.into_inner());
        }
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.shared.lock().stopped = true;
        self.shared.work.notify_all();
        self.running.drain(..).for_each(|handle| drop(handle.join()));
    }
}
