//! Where readers write. They ask a [`ChunkSink`] for the next chunk and its memory, and give it back when it is full, in any order. A load's images are one
//! sink, [`super::Staging`] is another.

use crate::error::Error;

/// A part of a file that is read at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// Which of the reader's files.
    pub file: usize,
    /// In the file; a multiple of the request's size.
    pub offset: u64,
    /// Bytes wanted; the last chunk of a file may be shorter than the others, and of any length.
    pub len: usize,
}

/// A chunk with the memory that it is to be read into.
#[derive(Debug)]
pub(crate) struct Lent {
    pub chunk: Chunk,
    /// Page-aligned, with room for `chunk.len` rounded up to whole pages.
    pub(crate) memory: *mut u8,
    /// Which of [`ChunkSink::fixed`] it lies in.
    pub(crate) buffer: usize,
}

// SAFETY: the memory is lent to whoever holds this and to nobody else.
unsafe impl Send for Lent {}

/// What a sink has for a reader.
#[derive(Debug)]
pub(crate) enum Next {
    Read(Lent),
    /// All memory is lent: ask again when some of it has been given back.
    Later,
    /// Nothing is left to read.
    Done,
}

/// Says which chunks are wanted, in which order, and lends memory for them, as far as it has any.
///
/// # Safety
/// Memory that is lent stays valid and is touched by nobody else until it is given back by `filled` or `failed`.
pub(crate) unsafe trait ChunkSink: Send + Sync {
    /// The next chunk of a file that this kind of reader reads. With `block`, waits instead of answering [`Next::Later`]. After [`Next::Done`] a reader does
    /// not ask again.
    fn next(&self, reader: Reader, block: bool) -> Next;
    /// The chunk is there, all of it.
    fn filled(&self, lent: Lent);
    /// The chunk cannot be read.
    fn failed(&self, lent: Lent, error: Error);
    /// The chunk has not been read and another reader may try.
    #[cfg_attr(not(target_os = "linux"), allow(dead_code))]
    fn put_back(&self, lent: Lent);
    /// Something was fallen back on.
    fn note(&self, note: String);
    /// (Start, bytes) of each buffer, if there are few that are reused: worth registering with the kernel.
    #[cfg_attr(not(target_os = "linux"), allow(dead_code))]
    fn fixed(&self) -> Vec<(*mut u8, usize)> {
        Vec::new()
    }
}

/// Which kind of reader asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reader {
    /// Threads that wait for each request: maps and buffered reads.
    Threads,
    /// Direct reads.
    Direct,
}
