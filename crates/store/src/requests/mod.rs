//! Reads parts of files while a model is used, with many requests in flight. The computing thread uses io_uring; if that is refused, there are threads. A
//! request is repeated or continued until it is complete or has finally failed, and is handed back once.

mod files;
mod flight;
mod request;
mod ring;
mod threads;

use std::io;
use std::sync::Arc;

pub use files::StreamedFiles;
use flight::Flight;
pub use request::{Completion, MAX_REQUEST, ReadFaults, ReadRequest};
use ring::Ring;
pub use ring::SPIN;
use threads::Threads;

use crate::load::Source;

/// How requests are read.
#[derive(Clone, Debug)]
pub struct RequestOptions {
    /// Past the page cache, where the file system allows.
    pub direct: bool,
    /// Requests in flight at most.
    pub depth: usize,
    /// Through io_uring, where the system has it.
    pub io_uring: bool,
    /// Threads that read where it does not.
    pub threads: usize,
    /// Faults that a test injects.
    pub faults: Option<Arc<dyn ReadFaults>>,
}

/// Requests in flight. [`Requests`] reads files; tests have disks whose results they choose.
pub trait ReadQueue: Send {
    /// Adds a request; [`ReadQueue::submit`] begins with it.
    ///
    /// # Safety
    /// The memory stays valid and untouched until the request is handed back, and outlives the queue.
    unsafe fn push(&mut self, request: ReadRequest);

    /// Begins with what was pushed.
    fn submit(&mut self);

    /// Hands back requests that are complete; with `wait` at least one, if any is in flight.
    fn reap(&mut self, wait: bool, each: &mut dyn FnMut(Completion));

    /// Requests that were pushed and not handed back.
    fn in_flight(&self) -> usize;

    /// What reading fell back on, a clause each.
    fn notes(&self) -> &[String];

    /// Whether requests go through io_uring.
    fn is_ring(&self) -> bool;
}

/// Requests of files.
pub struct Requests {
    files: Vec<Arc<Source>>,
    direct: bool,
    in_flight: usize,
    notes: Vec<String>,
    reader: Reader,
}

enum Reader {
    Ring(Box<Ring>),
    Threads(Threads),
}

impl Requests {
    /// Opens `files` to be read as `options` says.
    ///
    /// # Errors
    /// When no thread can be started.
    pub fn new(files: StreamedFiles, options: &RequestOptions) -> io::Result<Requests> {
        let files = files.into_sources();
        let mut notes = Vec::new();
        if options.direct {
            notes.extend(files.iter().filter_map(|f| f.file.open_direct()));
        }
        let faults = options.faults.clone();
        let reader = match options.io_uring.then(|| Ring::new(options.depth, faults.clone())) {
            Some(Ok(ring)) => Reader::Ring(Box::new(ring)),
            refused => {
                let why = refused.map(|r| r.err().expect("no ring"));
                notes.extend(why.map(|e| format!("no io_uring ({e}); experts are read by threads instead")));
                Reader::Threads(Threads::new(&files, options.threads, faults)?)
            }
        };
        Ok(Requests { files, direct: options.direct, in_flight: 0, notes, reader })
    }

    /// Hands back what is complete by now.
    fn collect(&mut self, each: &mut dyn FnMut(Completion)) {
        let in_flight = &mut self.in_flight;
        let counted = |done| {
            *in_flight -= 1;
            each(done);
        };
        match &mut self.reader {
            Reader::Threads(threads) => threads.collect(&mut self.notes, counted),
            Reader::Ring(ring) => ring.collect(&self.files, &mut self.notes, counted),
        }
    }
}

impl ReadQueue for Requests {
    unsafe fn push(&mut self, request: ReadRequest) {
        self.in_flight += 1;
        let direct = self.direct && self.files[request.file as usize].file.direct().is_some();
        let flight = Flight::new(request, direct);
        match &mut self.reader {
            Reader::Ring(ring) => ring.push(flight),
            Reader::Threads(threads) => threads.push(flight),
        }
    }

    fn submit(&mut self) {
        match &mut self.reader {
            Reader::Ring(ring) => ring.enter(&self.files, 0),
            Reader::Threads(threads) => threads.submit(),
        }
    }

    fn reap(&mut self, wait: bool, each: &mut dyn FnMut(Completion)) {
        let before = self.in_flight;
        while self.in_flight > 0 {
            self.collect(each);
            if self.in_flight < before || !wait {
                return;
            }
            match &mut self.reader {
                Reader::Ring(ring) => ring.wait(&self.files),
                Reader::Threads(threads) => threads.wait(),
            }
        }
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }

    fn notes(&self) -> &[String] {
        &self.notes
    }

    fn is_ring(&self) -> bool {
        matches!(self.reader, Reader::Ring(_))
    }
}

impl Drop for Requests {
    fn drop(&mut self) {
        // The kernel must be done with the memory.
        while self.in_flight > 0 {
            self.reap(true, &mut |_| ());
        }
    }
}
