//! A load whose bytes go to a consumer, such as an upload to a device. Chunks stay in one of a few buffers until the consumer has taken them.

use std::fmt;
use std::io;
use std::ops::Range;
use std::sync::Arc;

use super::source::Source;
use crate::bytes::Bytes;
use crate::memory::Memory;

/// A part of a view that was read: see [`super::Loading::deliver`].
pub struct Piece<'a> {
    /// Which of the views that were asked for.
    pub view: usize,
    /// Offset of the piece in the view.
    pub offset: usize,
    /// The bytes of the piece.
    pub bytes: &'a [u8],
}

type Take = Box<dyn Fn(&[Piece]) -> io::Result<()> + Send + Sync>;

/// What is delivered, and the consumer that takes it.
pub(crate) struct Delivery {
    /// By view: its bytes in its file.
    ranges: Vec<Range<usize>>,
    /// For each source and chunk, the views that have a part in it.
    views: Vec<Vec<Vec<usize>>>,
    take: Take,
}

impl Delivery {
    /// A delivery of these views. Also returns the views that belong to none of the sources.
    pub fn new(sources: &[Arc<Source>], views: &[&Bytes], take: Take) -> (Delivery, Vec<usize>) {
        let chunks = |s: &Arc<Source>| s.chunks(&(0..s.file.len as usize)).len();
        let mut delivery = Delivery {
            ranges: Vec::with_capacity(views.len()),
            views: sources.iter().map(|s| vec![Vec::new(); chunks(s)]).collect(),
            take,
        };
        let mut others = Vec::new();
        for (view, bytes) in views.iter().enumerate() {
            let of = |source| sources.iter().position(|s| Arc::ptr_eq(s, source));
            let Some((number, range)) = bytes.source().and_then(|(s, range)| Some((of(s)?, range))) else {
                delivery.ranges.push(0..0);
                others.push(view);
                continue;
            };
            sources[number].chunks(&range).for_each(|chunk| delivery.views[number][chunk].push(view));
            delivery.ranges.push(range);
        }
        (delivery, others)
    }

    /// Hands `bytes`, a chunk of a source that begins at `offset` in its file, to the consumer.
    pub fn hand_over(&self, source: usize, chunk: usize, offset: usize, bytes: &[u8]) -> io::Result<()> {
        let piece = |view: &usize| {
            let of = &self.ranges[*view];
            let (from, to) = (of.start.max(offset), of.end.min(offset + bytes.len()));
            Piece { view: *view, offset: from - of.start, bytes: &bytes[from - offset..to - offset] }
        };
        (self.take)(&self.views[source][chunk].iter().map(piece).collect::<Vec<_>>())
    }
}

impl fmt::Debug for Delivery {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "Delivery({} views)", self.ranges.len())
    }
}

/// The buffers of a delivery.
#[derive(Default)]
pub(crate) struct Buffers {
    memory: Option<Box<dyn Memory>>,
    size: usize,
    free: Vec<usize>,
}

impl Buffers {
    /// `count` of `size` bytes, in memory that `lend` gives.
    pub fn new(
        count: usize,
        size: usize,
        lend: &mut dyn FnMut(usize) -> io::Result<Box<dyn Memory>>,
    ) -> io::Result<Buffers> {
        let memory = lend(count.checked_mul(size).ok_or(io::ErrorKind::OutOfMemory)?)?;
        assert!(memory.len() >= count * size, "less memory than was asked for");
        Ok(Buffers { memory: Some(memory), size, free: (0..count).rev().collect() })
    }

    pub fn are_all_lent(&self) -> bool {
        self.free.is_empty()
    }

    /// Lends a free buffer; also returns its number.
    pub fn lend(&mut self) -> Option<(*mut u8, usize)> {
        let memory = self.memory.as_ref()?;
        let number = self.free.pop()?;
        // SAFETY: buffer `number` lies inside the memory.
        Some((unsafe { memory.start().add(number * self.size) }, number))
    }

    pub fn give_back(&mut self, number: usize) {
        self.free.push(number);
    }
}

impl fmt::Debug for Buffers {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "Buffers({} of {} bytes free)", self.free.len(), self.size)
    }
}
