//! Readers that wait for each request: maps that are populated, buffered reads, and direct reads where io_uring is refused.

use super::read::{ReadFile, refuses_direct};
use super::sink::{ChunkSink, Lent, Next, Reader};

/// Reads what `sink` wants of `files`, one chunk after the other, until nothing is left. Several threads may do this side by side.
pub(crate) fn read(files: &[&ReadFile], sink: &dyn ChunkSink, reader: Reader) {
    loop {
        match sink.next(reader, true) {
            Next::Read(lent) => read_chunk(files[lent.chunk.file], sink, lent),
            Next::Later => {}
            Next::Done => return,
        }
    }
}

/// Reads one chunk to the end.
pub(crate) fn read_chunk(file: &ReadFile, sink: &dyn ChunkSink, lent: Lent) {
    let (offset, len) = (lent.chunk.offset, lent.chunk.len);
    if let Some(direct) = file.direct() {
        // SAFETY: the sink lent this memory, which has room for whole pages.
        match unsafe { file.read_direct(direct, lent.memory, offset, len) } {
            Ok(()) => return sink.filled(lent),
            Err((_, Some(e))) if refuses_direct(&e) => sink.note(file.refuse_direct(&format!("refused at read: {e}"))),
            Err((at, cause)) => return sink.failed(lent, file.error(at, cause)),
        }
    }
    // SAFETY: the sink lent this memory.
    match unsafe { file.read_leaving_no_trace(lent.memory, offset, len) } {
        Ok(()) => sink.filled(lent),
        Err((at, cause)) => sink.failed(lent, file.error(at, cause)),
    }
}
