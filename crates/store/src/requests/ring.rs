//! Requests through io_uring, submitted and reaped by the thread that computes.
//!
//! A disk works on all its requests at once, so with many in flight each takes long. So only a few are in flight, in lanes of linked requests: the kernel
//! starts the next request of a lane when the one before it is complete, and the computing thread need not poll.

use std::collections::VecDeque;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use io_uring::{IoUring, Probe, opcode, squeue, types};

use super::flight::Flight;
use super::request::{Completion, ReadFaults};
use crate::load::Source;

/// Requests that the kernel knows of at least.
const MIN_ENTRIES: usize = 128;
/// How long a waiting thread polls before it sleeps: waking a sleeping core takes long, especially in a virtual machine.
pub const SPIN: Duration = Duration::from_millis(3);
/// Requests that there is room for at first, so that usually nothing is allocated later.
const CAPACITY: usize = 1024;

/// A ring with its lanes.
pub(super) struct Ring {
    ring: IoUring,
    /// For each entry, the request that the kernel has.
    flights: Vec<Option<Entry>>,
    free: Vec<u32>,
    waiting: VecDeque<Flight>,
    lanes: usize,
    /// Lanes that are in use.
    used: usize,
    faults: Option<Arc<dyn ReadFaults>>,
    /// Complete, but delayed by `faults`.
    late: Vec<(Flight, io::Result<usize>)>,
}

#[derive(Clone, Copy)]
struct Entry {
    flight: Flight,
    /// No other follows in its lane.
    last: bool,
}

impl Ring {
    /// At most `depth` requests in flight.
    ///
    /// # Errors
    /// Where the system has no io_uring, or refuses it.
    pub fn new(depth: usize, faults: Option<Arc<dyn ReadFaults>>) -> io::Result<Ring> {
        let entries = depth.clamp(MIN_ENTRIES, 1024).next_power_of_two();
        Ok(Ring {
            ring: set_up(entries as u32)?,
            flights: vec![None; entries],
            free: (0..entries as u32).rev().collect(),
            waiting: VecDeque::with_capacity(CAPACITY),
            lanes: depth.clamp(1, entries),
            used: 0,
            faults,
            late: Vec::new(),
        })
    }

    pub fn push(&mut self, flight: Flight) {
        self.waiting.push_back(flight);
    }

    /// Moves waiting requests into free lanes, and waits for `wanted` completions.
    pub fn enter(&mut self, files: &[Arc<Source>], wanted: usize) {
        let lanes = self.waiting.len().min(self.free.len()).min(self.lanes - self.used);
        // The other waiting requests are left to the lanes in use.
        let count = self.waiting.len().min(self.free.len()).min(lanes * self.waiting.len().div_ceil(self.lanes));
        // One lane after the other, each with every n-th request.
        for lane in 0..lanes {
            for i in (lane..count).step_by(lanes) {
                let number = self.free.pop().expect("counted");
                let entry = Entry { flight: self.waiting[i], last: i + lanes >= count };
                let request = submission(files, &entry.flight, number);
                // Whether a read succeeds or fails, the next one begins.
                let request = if entry.last { request } else { request.flags(squeue::Flags::IO_HARDLINK) };
                // SAFETY: the memory is lent until the completion is taken, and files live as long as the ring.
                unsafe { self.ring.submission().push(&request) }.expect("as many entries as flights, all submitted");
                self.flights[number as usize] = Some(entry);
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
                // The kernel may still write for submitted requests, so nothing can be handed back.
                Err(e) => panic!("io_uring_enter: {e}"),
            }
        }
    }

    /// Waits for a completion: polls for a while, then sleeps.
    pub fn wait(&mut self, files: &[Arc<Source>]) {
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

    /// Hands back complete requests, and starts waiting ones.
    pub fn collect(&mut self, files: &[Arc<Source>], notes: &mut Vec<String>, mut each: impl FnMut(Completion)) {
        for (flight, outcome) in std::mem::take(&mut self.late) {
            self.ended(flight, outcome, files, notes, &mut each);
        }
        loop {
            let Some(completion) = self.ring.completion().next() else { break };
            let number = completion.user_data() as u32;
            let Entry { flight, last } = self.flights[number as usize].take().expect("in flight");
            self.free.push(number);
            self.used -= usize::from(last);
            let outcome = match completion.result() {
                n if n >= 0 => Ok(n as usize),
                e => Err(io::Error::from_raw_os_error(-e)),
            };
            self.ended(flight, outcome, files, notes, &mut each);
        }
        if !self.waiting.is_empty() && self.used < self.lanes {
            self.enter(files, 0);
        }
    }

    /// One read of a request has ended.
    fn ended(
        &mut self,
        mut flight: Flight,
        outcome: io::Result<usize>,
        files: &[Arc<Source>],
        notes: &mut Vec<String>,
        each: &mut impl FnMut(Completion),
    ) {
        let outcome = match &self.faults {
            None => outcome,
            Some(faults) => match flight.intercept(&**faults, files, outcome) {
                Ok(outcome) => outcome,
                Err(later) => return self.late.push((flight, later)),
            },
        };
        match flight.advance(files, outcome, notes) {
            Some(done) => each(done),
            None => self.waiting.push_front(flight),
        }
    }
}

fn set_up(entries: u32) -> io::Result<IoUring> {
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

fn submission(files: &[Arc<Source>], flight: &Flight, number: u32) -> squeue::Entry {
    let file = &files[flight.request.file as usize].file;
    let direct = file.direct().filter(|_| flight.direct);
    let (memory, len) = flight.memory();
    let fd = types::Fd(direct.unwrap_or(&file.buffered).as_raw_fd());
    let entry = opcode::Read::new(fd, memory, len as u32).offset(flight.offset()).build().user_data(u64::from(number));
    // The submitting thread would copy cached pages itself, one request after the other. Kernel workers do it in parallel.
    if direct.is_none() { entry.flags(squeue::Flags::ASYNC) } else { entry }
}
