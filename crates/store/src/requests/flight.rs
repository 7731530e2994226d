//! A request with its progress: the bytes of each read, and whether another read is needed.

use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use super::request::{Completion, ReadFaults, ReadRequest};
use crate::load::{ALIGNMENT, Source, refuses_direct, resume_at};

/// How often a failed read is repeated.
const RETRIES: u8 = 2;

/// A request that is not complete yet.
#[derive(Clone, Copy)]
pub(super) struct Flight {
    pub request: ReadRequest,
    /// Bytes that are there.
    done: usize,
    /// Where the next read begins: at `done`, or, of direct reads, at the page boundary before it.
    from: usize,
    pub direct: bool,
    failures: u8,
}

// SAFETY: its memory is lent to whoever holds it, and to nobody else, until the request is complete.
unsafe impl Send for Flight {}

impl Flight {
    /// A request without any read yet; `direct`: past the page cache.
    pub fn new(request: ReadRequest, direct: bool) -> Flight {
        Flight { request, done: 0, from: 0, direct, failures: 0 }
    }

    /// The offset in the file at which the next read begins.
    pub fn offset(&self) -> u64 {
        self.request.offset + self.from as u64
    }

    /// Where in memory the next read goes, and how many bytes it asks for: whole pages where it is direct.
    pub fn memory(&self) -> (*mut u8, usize) {
        let len = self.request.len;
        let all = if self.direct { len.next_multiple_of(ALIGNMENT) } else { len };
        // SAFETY: inside the memory that was lent, of which `from` bytes are there.
        (unsafe { self.request.memory.add(self.from) }, all - self.from)
    }

    /// Reads once, and waits for it.
    ///
    /// # Errors
    /// The system's.
    pub fn read_once(&self, files: &[Arc<Source>]) -> io::Result<usize> {
        let file = &files[self.request.file as usize].file;
        let fd = file.direct().filter(|_| self.direct).unwrap_or(&file.buffered).as_raw_fd();
        let (start, len) = self.memory();
        let vec = libc::iovec { iov_base: start.cast(), iov_len: len };
        // SAFETY: memory that was lent.
        let n = unsafe { libc::preadv(fd, &raw const vec, 1, self.offset() as libc::off_t) };
        if n < 0 { Err(io::Error::last_os_error()) } else { Ok(n as usize) }
    }

    /// Lets a test change the outcome of a read.
    ///
    /// # Errors
    /// The outcome, if the test delays the read.
    pub fn intercept(
        &self,
        faults: &dyn ReadFaults,
        files: &[Arc<Source>],
        outcome: io::Result<usize>,
    ) -> Result<io::Result<usize>, io::Result<usize>> {
        let later = match &outcome {
            Ok(n) => Ok(*n),
            Err(e) => Err(io::Error::from_raw_os_error(e.raw_os_error().unwrap_or(libc::EIO))),
        };
        let (start, len) = self.memory();
        // SAFETY: memory that was lent, and that the read which has ended was about: nobody else uses it.
        let memory = unsafe { std::slice::from_raw_parts_mut(start, len) };
        faults.intercept(&files[self.request.file as usize].file.path, self.offset(), memory, outcome).ok_or(later)
    }

    /// Counts the bytes of a read. `None` if another read is needed.
    pub fn advance(
        &mut self,
        files: &[Arc<Source>],
        outcome: io::Result<usize>,
        notes: &mut Vec<String>,
    ) -> Option<Completion> {
        let ReadRequest { tag, len, offset, file, .. } = self.request;
        let source = &files[file as usize];
        let failed = |at: usize, cause| {
            let error = source.naming(source.file.error(offset + at as u64, cause));
            Some(Completion { tag, error: Some(error) })
        };
        match outcome {
            Ok(n) => {
                let reached = self.from + n;
                if reached <= self.done {
                    return failed(self.done, None);
                }
                self.done = reached;
                self.from = resume_at(reached, self.direct);
                (reached >= len).then_some(Completion { tag, error: None })
            }
            Err(e) if [libc::EINTR, libc::EAGAIN, libc::ECANCELED].contains(&e.raw_os_error().unwrap_or(0)) => None,
            Err(e) if self.direct && refuses_direct(&e) => {
                let note = source.file.refuse_direct(&format!("refused at read: {e}"));
                if !notes.contains(&note) {
                    notes.push(note);
                }
                self.direct = false;
                None
            }
            Err(_) if self.failures < RETRIES => {
                self.failures += 1;
                None
            }
            Err(e) => failed(self.done, Some(e)),
        }
    }
}
