//! Direct reads through io_uring: one thread keeps a queue of requests full. A file that will not be read directly is read through the
//! page cache by the same ring.

use std::io;
use std::os::fd::AsRawFd;

use io_uring::{IoUring, Probe, opcode, squeue, types};

use super::read::{ALIGNMENT, ReadFile, go_on_at, refuses_direct};
use super::sink::{ChunkSink, Lent, Next, Reader};

/// A chunk under way.
struct Flight {
    lent: Lent,
    /// Bytes that are there.
    done: usize,
    /// Where the request under way began.
    from: usize,
    direct: bool,
    /// What to drop from the page cache afterwards.
    trace: Vec<(u64, u64)>,
}

struct Requests<'a> {
    files: &'a [&'a ReadFile],
    sink: &'a dyn ChunkSink,
    /// The sink's memory is registered.
    fixed: bool,
    flights: Vec<Option<Flight>>,
}

/// Reads what `sink` wants of `files` until nothing is left, with at most `depth` requests under way.
///
/// # Errors
/// Where io_uring is refused, in words; then nothing has been taken from the sink that was not put back.
pub(crate) fn read(files: &[&ReadFile], sink: &dyn ChunkSink, depth: usize) -> Result<(), String> {
    let refused = |e: io::Error| format!("no io_uring ({e}); direct reads by threads instead");
    let depth = depth.clamp(1, 1024);
    // 1. A ring. One thread submits and waits: completions need not interrupt it.
    let entries = depth.next_power_of_two() as u32;
    let ring = IoUring::builder().setup_coop_taskrun().setup_single_issuer().build(entries);
    let mut ring = match ring {
        // Kernels before 6.0 do not know the one or the other.
        Err(e) if e.raw_os_error() == Some(libc::EINVAL) => IoUring::new(entries),
        other => other,
    }
    .map_err(refused)?;
    let mut probe = Probe::new();
    let known = ring.submitter().register_probe(&mut probe).is_ok() && probe.is_supported(opcode::Read::CODE);
    if !known {
        return Err(refused(io::ErrorKind::Unsupported.into()));
    }
    // 2. Registered memory, where the limit of locked memory allows.
    let buffers = sink.fixed();
    let fixed = !buffers.is_empty() && {
        let vecs: Vec<libc::iovec> =
            buffers.iter().map(|&(start, len)| libc::iovec { iov_base: start.cast(), iov_len: len }).collect();
        // SAFETY: the sink's memory outlives the ring, which is dropped before this function returns.
        unsafe { ring.submitter().register_buffers(&vecs) }.is_ok()
    };
    // 3. Requests until nothing is left.
    let mut requests = Requests { files, sink, fixed, flights: (0..depth).map(|_| None).collect() };
    let mut under_way = 0;
    let mut answered = false;
    loop {
        while under_way < depth {
            match sink.next(Reader::Direct, under_way == 0) {
                Next::Read(lent) => {
                    let slot = requests.flights.iter().position(Option::is_none).expect("one is free");
                    let entry = requests.begin(slot, lent);
                    push(&mut ring, &entry);
                    under_way += 1;
                }
                Next::Later => break,
                Next::Done => break,
            }
        }
        if under_way == 0 {
            return Ok(());
        }
        match ring.submit_and_wait(1) {
            Ok(_) => {}
            Err(e) if [libc::EINTR, libc::EAGAIN, libc::EBUSY].contains(&e.raw_os_error().unwrap_or(0)) => {}
            Err(e) => {
                // Refused at the first call: nothing is under way in the kernel. Later: what is under way may still be written to.
                let mut left = requests.flights.iter_mut().filter_map(Option::take);
                if answered {
                    left.for_each(|f| sink.failed(f.lent, requests.files[0].error(0, Some(copy(&e)))));
                    return Ok(());
                }
                left.by_ref().for_each(|f| sink.put_back(f.lent));
                return Err(refused(e));
            }
        }
        let done: Vec<(usize, i32)> = ring.completion().map(|c| (c.user_data() as usize, c.result())).collect();
        for (slot, result) in done {
            answered = true;
            match requests.complete(slot, result) {
                Some(entry) => push(&mut ring, &entry),
                None => under_way -= 1,
            }
        }
    }
}

fn copy(e: &io::Error) -> io::Error {
    e.raw_os_error().map_or_else(|| e.kind().into(), io::Error::from_raw_os_error)
}

fn push(ring: &mut IoUring, entry: &squeue::Entry) {
    // SAFETY: the memory is lent until the request's completion is taken, and files outlive the ring. There is room: at most as many
    // requests as entries are under way, and the kernel takes all that were pushed at each submission.
    unsafe { ring.submission().push(entry) }.expect("as many entries as requests");
}

impl Requests<'_> {
    fn begin(&mut self, slot: usize, lent: Lent) -> squeue::Entry {
        self.flights[slot] = Some(Flight { lent, done: 0, from: 0, direct: false, trace: Vec::new() });
        self.request(slot)
    }

    /// The request for what a flight lacks.
    fn request(&mut self, slot: usize) -> squeue::Entry {
        let flight = self.flights[slot].as_mut().expect("under way");
        let (chunk, file) = (flight.lent.chunk, self.files[flight.lent.chunk.file]);
        let direct = file.direct();
        if direct.is_none() && flight.trace.is_empty() {
            flight.trace = file.trace(chunk.offset, chunk.len as u64);
        }
        flight.direct = direct.is_some();
        flight.from = go_on_at(flight.done, flight.direct);
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
        entry.user_data(slot as u64)
    }

    /// What came of a request; another one, where the chunk is not whole yet.
    fn complete(&mut self, slot: usize, result: i32) -> Option<squeue::Entry> {
        let flight = self.flights[slot].as_mut().expect("under way");
        let (chunk, file) = (flight.lent.chunk, self.files[flight.lent.chunk.file]);
        let error = if result < 0 {
            let e = io::Error::from_raw_os_error(-result);
            match -result {
                libc::EINTR | libc::EAGAIN => return Some(self.request(slot)),
                _ if flight.direct && refuses_direct(&e) => {
                    self.sink.note(file.refuse_direct(&format!("refused at read: {e}")));
                    return Some(self.request(slot));
                }
                _ => Some(file.error(chunk.offset + flight.done as u64, Some(e))),
            }
        } else {
            let reached = flight.from + result as usize;
            if reached > flight.done {
                flight.done = reached;
                if reached < chunk.len {
                    return Some(self.request(slot));
                }
                None
            } else {
                // Nothing more came: the file ends here.
                Some(file.error(chunk.offset + flight.done as u64, None))
            }
        };
        let flight = self.flights[slot].take().expect("under way");
        file.wipe(&flight.trace);
        match error {
            None => self.sink.filled(flight.lent),
            Some(error) => self.sink.failed(flight.lent, error),
        }
        None
    }
}
