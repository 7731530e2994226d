//! Direct reads through io_uring: one thread keeps a queue of requests full. A file that will not be read directly is read through the
//! page cache by the same ring.

use std::io;
use std::os::fd::AsRawFd;
use std::thread;
use std::time::Duration;

use io_uring::{IoUring, Probe, opcode, squeue, types};

use super::read::{ALIGNMENT, ReadFile, refuses_direct, resume_at};
use super::sink::{ChunkSink, Lent, Next, Reader};

/// A chunk in flight.
struct Flight {
    lent: Lent,
    /// Bytes that are there.
    done: usize,
    /// Where the request in flight begins.
    from: usize,
    direct: bool,
    /// What to drop from the page cache afterwards.
    trace: Vec<(u64, u64)>,
}

/// An io_uring and its incomplete requests. The kernel may write to their memory until they complete, even after the ring is closed. So dropping this waits for
/// all of them, after errors and panics too.
struct Ring {
    uring: IoUring,
    /// Requests pushed and not answered.
    in_flight: usize,
}

impl Ring {
    fn push(&mut self, entry: &squeue::Entry) {
        // SAFETY: the memory is lent until the request's answer is taken, which `Ring` sees to, and files outlive the ring. There is room: at
        // most as many requests as entries are in flight, and the kernel takes all that were pushed at each submission.
        unsafe { self.uring.submission().push(entry) }.expect("as many entries as requests");
        self.in_flight += 1;
    }

    /// Submits what was pushed and waits for a completion, for a short time at most.
    fn submit_and_wait(&mut self) -> io::Result<()> {
        match self.uring.submit_and_wait(1) {
            Err(e) if ![libc::EINTR, libc::EAGAIN, libc::EBUSY].contains(&e.raw_os_error().unwrap_or(0)) => Err(e),
            _ => Ok(()),
        }
    }

    /// Completions: request and result.
    fn answers(&mut self) -> Vec<(usize, i32)> {
        let done: Vec<_> = self.uring.completion().map(|c| (c.user_data() as usize, c.result())).collect();
        self.in_flight -= done.len();
        done
    }

    /// Waits for all submitted requests without entering the ring, since entering may be what is refused. Requests that were pushed and not submitted must
    /// never be, so the ring must not be entered afterwards.
    fn drain(&mut self) -> Vec<(usize, i32)> {
        let mut all = self.answers();
        while self.in_flight > self.uring.submission().len() {
            // Any system call lets the kernel deliver completions to this thread.
            thread::sleep(Duration::from_micros(200));
            all.append(&mut self.answers());
        }
        all
    }
}

struct Requests<'a> {
    files: &'a [&'a ReadFile],
    sink: &'a dyn ChunkSink,
    ring: Ring,
    /// The sink's memory is registered.
    fixed: bool,
    flights: Vec<Option<Flight>>,
}

/// Reads what `sink` wants of `files` until nothing is left, with at most `depth` requests in flight.
///
/// # Errors
/// Why io_uring was refused, at the start or later. All chunks that were taken from the sink have then been given back.
pub(crate) fn read(files: &[&ReadFile], sink: &dyn ChunkSink, depth: usize) -> Result<(), String> {
    let refused = |e: io::Error| format!("no io_uring ({e}); direct reads by threads instead");
    let depth = depth.clamp(1, 1024);
    // 1. A ring. One thread submits and waits: completions need not interrupt it.
    let entries = depth.next_power_of_two() as u32;
    let uring = IoUring::builder().setup_coop_taskrun().setup_single_issuer().build(entries);
    let uring = match uring {
        // Kernels before 6.0 lack these flags.
        Err(e) if e.raw_os_error() == Some(libc::EINVAL) => IoUring::new(entries),
        other => other,
    }
    .map_err(refused)?;
    let mut probe = Probe::new();
    let known = uring.submitter().register_probe(&mut probe).is_ok() && probe.is_supported(opcode::Read::CODE);
    if !known {
        return Err(refused(io::ErrorKind::Unsupported.into()));
    }
    // 2. Registered memory, where the limit of locked memory allows.
    let buffers = sink.fixed();
    let fixed = !buffers.is_empty() && {
        let vecs: Vec<libc::iovec> =
            buffers.iter().map(|&(start, len)| libc::iovec { iov_base: start.cast(), iov_len: len }).collect();
        // SAFETY: the sink's memory outlives the ring, which is dropped before this function returns.
        unsafe { uring.submitter().register_buffers(&vecs) }.is_ok()
    };
    // 3. Requests until nothing is left.
    let ring = Ring { uring, in_flight: 0 };
    let mut requests = Requests { files, sink, ring, fixed, flights: (0..depth).map(|_| None).collect() };
    loop {
        while requests.ring.in_flight < depth {
            match sink.next(Reader::Direct, requests.ring.in_flight == 0) {
                Next::Read(lent) => requests.begin(lent),
                Next::Later | Next::Done => break,
            }
        }
        if requests.ring.in_flight == 0 {
            return Ok(());
        }
        if let Err(e) = requests.ring.submit_and_wait() {
            requests.put_back();
            return Err(refused(e));
        }
        for (slot, result) in requests.ring.answers() {
            if requests.answered(slot, result) {
                requests.request(slot);
            }
        }
    }
}

impl Requests<'_> {
    fn begin(&mut self, lent: Lent) {
        let slot = self.flights.iter().position(Option::is_none).expect("as many flights as requests");
        self.flights[slot] = Some(Flight { lent, done: 0, from: 0, direct: false, trace: Vec::new() });
        self.request(slot);
    }

    /// Asks for what a flight lacks.
    fn request(&mut self, slot: usize) {
        let flight = self.flights[slot].as_mut().expect("in flight");
        let (chunk, file) = (flight.lent.chunk, self.files[flight.lent.chunk.file]);
        let direct = file.direct();
        if direct.is_none() && flight.trace.is_empty() {
            flight.trace = file.trace(chunk.offset, chunk.len as u64);
        }
        flight.direct = direct.is_some();
        flight.from = resume_at(flight.done, flight.direct);
        let room = if flight.direct { chunk.len.next_multiple_of(ALIGNMENT) } else { chunk.len };
        let fd = types::Fd(direct.unwrap_or(&file.buffered).as_raw_fd());
        // SAFETY: inside the memory that was lent, of which `from` bytes are there.
        let memory = unsafe { flight.lent.memory.add(flight.from) };
        let (len, offset) = ((room - flight.from) as u32, chunk.offset + flight.from as u64);
        let entry = if self.fixed {
            opcode::ReadFixed::new(fd, memory, len, flight.lent.buffer as u16).offset(offset).build()
        } else {
            opcode::Read::new(fd, memory, len).offset(offset).build()
        };
        self.ring.push(&entry.user_data(slot as u64));
    }

    /// Handles a completed request. Returns whether the chunk needs another one.
    fn answered(&mut self, slot: usize, result: i32) -> bool {
        let flight = self.flights[slot].as_mut().expect("in flight");
        let (chunk, file) = (flight.lent.chunk, self.files[flight.lent.chunk.file]);
        let error = if result < 0 {
            let e = io::Error::from_raw_os_error(-result);
            match -result {
                libc::EINTR | libc::EAGAIN => return true,
                _ if flight.direct && refuses_direct(&e) => {
                    self.sink.note(file.refuse_direct(&format!("refused at read: {e}")));
                    return true;
                }
                _ => Some(file.error(chunk.offset + flight.done as u64, Some(e))),
            }
        } else {
            let reached = flight.from + result as usize;
            if reached > flight.done {
                flight.done = reached;
                if reached < chunk.len {
                    return true;
                }
                None
            } else {
                // Nothing more came: the file ends here.
                Some(file.error(chunk.offset + flight.done as u64, None))
            }
        };
        let flight = self.flights[slot].take().expect("in flight");
        file.wipe(&flight.trace);
        match error {
            None => self.sink.filled(flight.lent),
            Some(error) => self.sink.failed(flight.lent, error),
        }
        false
    }

    /// Gives back chunks that the ring will not read. Waits for submitted requests first; chunks that these complete count as read.
    fn put_back(&mut self) {
        for (slot, result) in self.ring.drain() {
            self.answered(slot, result);
        }
        for flight in self.flights.iter_mut().filter_map(Option::take) {
            self.files[flight.lent.chunk.file].wipe(&flight.trace);
            self.sink.put_back(flight.lent);
        }
    }
}

impl Drop for Requests<'_> {
    /// Where this finds anything, a sink has panicked.
    fn drop(&mut self) {
        self.ring.drain();
        for lent in self.flights.iter_mut().filter_map(Option::take).map(|f| f.lent) {
            let broken_off = io::Error::other("the reading broke off");
            let error = self.files[lent.chunk.file].error(lent.chunk.offset, Some(broken_off));
            self.sink.failed(lent, error);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::sink::Chunk;
    use super::*;
    use crate::error::Error;
    use crate::map::{Buffer, Map};
    use std::fs::File;
    use std::io::Write;
    use std::os::fd::FromRawFd;
    use std::path::Path;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::{Mutex, mpsc};

    /// From here on this thread is refused `io_uring_enter`, by the kernel itself.
    fn refuse_enter() {
        let jump = |code: u32, k: u32, jt: u8, jf: u8| libc::sock_filter { code: code as u16, jt, jf, k };
        let mut filter = [
            // The call's number, the first field of what a filter sees.
            jump(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
            jump(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, libc::SYS_io_uring_enter as u32, 0, 1),
            jump(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ERRNO | libc::EPERM as u32, 0, 0),
            jump(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW, 0, 0),
        ];
        let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
        // SAFETY: a whole program; both calls are about this thread alone.
        unsafe {
            assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
            let mode = libc::SECCOMP_SET_MODE_FILTER;
            assert_eq!(
                libc::syscall(libc::SYS_seccomp, mode, 0, &raw const program),
                0,
                "{}",
                io::Error::last_os_error()
            );
        }
    }

    /// Lends a page of a file, which is there at once, and one of a pipe, which somebody has yet to write to; then ends as the test says.
    struct TwoPages<'a> {
        memory: Map,
        left: Mutex<Vec<Chunk>>,
        /// What to do when the first page has come and nothing is left.
        then: &'a (dyn Fn() + Sync),
        /// The pipe's page was given back, and how.
        given_back: AtomicBool,
        how: Mutex<&'static str>,
    }

    impl TwoPages<'_> {
        fn give_back(&self, lent: &Lent, how: &'static str) {
            if lent.chunk.file == 1 {
                self.given_back.store(true, Ordering::SeqCst);
                *self.how.lock().unwrap() = how;
            }
        }
    }

    // SAFETY: each page is lent once, and the memory lives as long as the sink.
    unsafe impl ChunkSink for TwoPages<'_> {
        fn next(&self, _: Reader, _: bool) -> Next {
            let Some(chunk) = self.left.lock().unwrap().pop() else {
                (self.then)();
                return Next::Done;
            };
            // SAFETY: one of two pages.
            let memory = unsafe { self.memory.start().add(chunk.file * 4096) };
            Next::Read(Lent { chunk, memory, buffer: 0 })
        }

        fn filled(&self, lent: Lent) {
            self.give_back(&lent, "filled");
        }

        fn failed(&self, lent: Lent, _: Error) {
            self.give_back(&lent, "failed");
        }

        fn put_back(&self, lent: Lent) {
            self.give_back(&lent, "put back");
        }

        fn note(&self, _: String) {}
    }

    /// Reads both pages with `then` in between; what came of it, and how the pipe's page was given back. Asserts that it was not before the
    /// kernel was done with it. `None`, said aloud, where there is no io_uring.
    fn with_a_read_in_flight(then: &(dyn Fn() + Sync)) -> Option<(thread::Result<Result<(), String>>, &'static str)> {
        if let Err(e) = IoUring::new(2) {
            eprintln!("SKIPPED: no io_uring ({e})");
            return None;
        }
        let mut plain = tempfile::tempfile().unwrap();
        plain.write_all(&[7; 4096]).unwrap();
        let mut ends = [0; 2];
        // SAFETY: room for two descriptors, which are ours from there on.
        let (pipe, mut writer) = unsafe {
            assert_eq!(libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC), 0);
            (File::from_raw_fd(ends[0]), File::from_raw_fd(ends[1]))
        };
        let files = [plain, pipe].map(|file| ReadFile::new(Path::new("x"), file).unwrap());
        let (refused, told) = mpsc::channel();
        let refused = Mutex::new(refused);
        let then = || {
            refused.lock().unwrap().send(()).unwrap();
            then();
        };
        let chunks = [1, 0].map(|file| Chunk { file, offset: 0, len: 4096 });
        let sink = TwoPages {
            memory: Buffer::zeroed(8192).unwrap().into_map(),
            left: Mutex::new(chunks.into()),
            then: &then,
            given_back: AtomicBool::new(false),
            how: Mutex::new(""),
        };
        let done = thread::scope(|scope| {
            // A thread of its own: the filter stays with it.
            let reader = scope.spawn(|| read(&[&files[0], &files[1]], &sink, 2));
            told.recv().unwrap();
            // A reader that wrongly does not wait has time here to give the page back.
            thread::sleep(Duration::from_millis(300));
            let early = sink.given_back.load(Ordering::SeqCst);
            writer.write_all(&[9; 4096]).unwrap();
            let done = reader.join();
            assert!(!early, "the page was given back while the kernel could still write to it");
            done
        });
        assert!(sink.given_back.load(Ordering::SeqCst));
        // SAFETY: nobody writes to it any more.
        assert_eq!(unsafe { sink.memory.slice(0..8192) }, [[7; 4096], [9; 4096]].concat());
        let how = *sink.how.lock().unwrap();
        Some((done, how))
    }

    #[test]
    fn a_ring_that_is_refused_later_keeps_memory_until_the_kernel_is_done_with_it() {
        let Some((done, how)) = with_a_read_in_flight(&refuse_enter) else { return };
        let said = done.unwrap().unwrap_err();
        assert!(said.contains("no io_uring (Operation not permitted"), "{said}");
        assert_eq!(how, "filled");
    }

    #[test]
    fn a_panic_of_the_sink_keeps_memory_until_the_kernel_is_done_with_it() {
        let Some((done, how)) = with_a_read_in_flight(&|| panic!("the sink's")) else { return };
        assert_eq!(done.unwrap_err().downcast_ref::<&str>(), Some(&"the sink's"));
        assert_eq!(how, "failed");
    }
}
