//! Reads parts of files while a model is used, with many requests in flight. The computing thread uses io_uring; if that is refused, there are threads. A
//! request is repeated or continued until it is complete or has finally failed, and is handed back once.

mod files;
mod flight;
mod request;
#[cfg_attr(not(target_os = "linux"), path = "no_ring.rs")]
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

use crate::arriving::LOOK_AGAIN;
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
    /// Requests of those in flight whose bytes are still arriving in their files.
    arriving: Vec<ReadRequest>,
    /// Requests of those in flight whose bytes will never be there.
    failed: Vec<Completion>,
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
        let (arriving, failed) = (Vec::new(), Vec::new());
        Ok(Requests { files, direct: options.direct, in_flight: 0, arriving, failed, notes, reader })
    }

    /// Begins with requests whose bytes have arrived.
    fn look_for_arrived(&mut self) {
        if self.arriving.is_empty() {
            return;
        }
        let before = self.arriving.len();
        for request in std::mem::take(&mut self.arriving) {
            self.begin(request);
        }
        if self.arriving.len() < before {
            self.submit();
        }
    }

    /// Queues a request, if its bytes are there.
    fn begin(&mut self, request: ReadRequest) {
        let source = &self.files[request.file as usize];
        let is_arriving = source.file.is_arriving();
        if is_arriving {
            match source.file.has(&(request.offset..request.offset + request.len as u64)) {
                Ok(true) => {}
                Ok(false) => return self.arriving.push(request),
                Err(e) => {
                    let error = Some(source.naming(e));
                    return self.failed.push(Completion { tag: request.tag, error });
                }
            }
        }
        // What has just arrived is in the page cache, and perhaps not on the disk.
        let direct = self.direct && !is_arriving && source.file.direct().is_some();
        let flight = Flight::new(request, direct);
        match &mut self.reader {
            Reader::Ring(ring) => ring.push(flight),
            Reader::Threads(threads) => threads.push(flight),
        }
    }

    /// Hands back what is complete by now.
    fn collect(&mut self, each: &mut dyn FnMut(Completion)) {
        self.look_for_arrived();
        let in_flight = &mut self.in_flight;
        let mut counted = |done| {
            *in_flight -= 1;
            each(done);
        };
        self.failed.drain(..).for_each(&mut counted);
        match &mut self.reader {
            Reader::Threads(threads) => threads.collect(&mut self.notes, counted),
            Reader::Ring(ring) => ring.collect(&self.files, &mut self.notes, counted),
        }
    }
}

impl ReadQueue for Requests {
    unsafe fn push(&mut self, request: ReadRequest) {
        self.in_flight += 1;
        let arriving = self.arriving.len();
        self.begin(request);
        if self.arriving.len() > arriving {
            let part = request.offset..request.offset + request.len as u64;
            self.files[request.file as usize].file.ask(&part, true);
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
            if self.in_flight == self.arriving.len() + self.failed.len() {
                if self.failed.is_empty() {
                    std::thread::sleep(LOOK_AGAIN);
                }
                continue;
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
        // The kernel must be done with the memory; it knows nothing of these.
        self.in_flight -= self.arriving.len();
        self.arriving.clear();
        while self.in_flight > 0 {
            self.reap(true, &mut |_| ());
        }
    }
}
