//! Threads that read a request each and wait for it: where io_uring is refused.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;

use super::flight::Flight;
use super::request::{Completion, ReadFaults};
use crate::load::Source;

/// Requests that there is room for from the beginning, so that usually nothing is allocated later.
const CAPACITY: usize = 1024;

/// Threads that take requests from a queue.
pub(super) struct Threads {
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
    complete: Vec<Completion>,
    notes: Vec<String>,
    stopped: bool,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Reads one request after the other, until the queue is stopped.
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
                let mut outcome = flight.read_once(files);
                if let Some(faults) = faults {
                    outcome = loop {
                        match flight.intercept(faults, files, outcome) {
                            Ok(outcome) => break outcome,
                            Err(later) => outcome = later,
                        }
                        std::thread::yield_now();
                    };
                }
                if let Some(done) = flight.advance(files, outcome, &mut notes) {
                    break done;
                }
            };
            queue = self.lock();
            let unknown = notes.into_iter().filter(|n| !queue.notes.contains(n)).collect::<Vec<_>>();
            queue.notes.extend(unknown);
            queue.complete.push(done);
            self.done.notify_all();
        }
    }
}

impl Threads {
    /// Starts `threads` threads.
    ///
    /// # Errors
    /// When the system starts none.
    pub fn new(files: &[Arc<Source>], threads: usize, faults: Option<Arc<dyn ReadFaults>>) -> io::Result<Threads> {
        let (waiting, complete) = (VecDeque::with_capacity(CAPACITY), Vec::with_capacity(CAPACITY));
        let queue = Mutex::new(Queue { waiting, complete, notes: Vec::new(), stopped: false });
        let shared = Arc::new(Shared { queue, work: Condvar::new(), done: Condvar::new() });
        let mut running = Vec::new();
        for _ in 0..threads.max(1) {
            let (shared, files, faults) = (Arc::clone(&shared), files.to_vec(), faults.clone());
            let read = move || shared.read(&files, faults.as_deref());
            running.push(std::thread::Builder::new().name("sluice-experts".into()).spawn(read)?);
        }
        Ok(Threads { shared, running })
    }

    pub fn push(&self, flight: Flight) {
        self.shared.lock().waiting.push_back(flight);
    }

    /// Wakes the threads.
    pub fn submit(&self) {
        self.shared.work.notify_all();
    }

    /// Waits until a request is complete.
    pub fn wait(&self) {
        let mut queue = self.shared.lock();
        while queue.complete.is_empty() {
            queue = self.shared.done.wait(queue).unwrap_or_else(|e| e.into_inner());
        }
    }

    /// Hands back what is complete by now.
    pub fn collect(&self, notes: &mut Vec<String>, mut each: impl FnMut(Completion)) {
        let mut queue = self.shared.lock();
        notes.append(&mut queue.notes);
        queue.complete.drain(..).for_each(&mut each);
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.shared.lock().stopped = true;
        self.shared.work.notify_all();
        self.running.drain(..).for_each(|handle| drop(handle.join()));
    }
}
