//! Where an expert lies on disk, and where its arrays come to lie in a slot. Reads are whole pages of the file, as direct reads must be, so an array
//! lies in its slot at the offset that it has in its page; arrays that share pages or follow each other are one read.

use std::ops::Range;
use std::sync::Arc;

use crate::bytes::Bytes;
use crate::load::{ALIGNMENT, Source};

/// A run of whole pages of a file that is read at once, and where in the slot it goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Extent {
    pub file: u32,
    /// A multiple of [`ALIGNMENT`].
    pub offset: u64,
    /// To the end of the last array in it: the last page may reach beyond the file's end.
    pub len: u32,
    /// From the slot's start; a multiple of [`ALIGNMENT`].
    pub at: u32,
}

impl Extent {
    /// Bytes that it takes in the slot.
    fn room(&self) -> usize {
        (self.len as usize).next_multiple_of(ALIGNMENT)
    }
}

/// The experts of a layer.
#[derive(Debug, Default)]
pub(super) struct Layer {
    extents: Vec<Extent>,
    /// For each expert where its extents end.
    ends: Vec<u32>,
    /// For each expert and array, where it lies in the slot.
    parts: Vec<Range<u32>>,
    arrays: usize,
    /// Bytes that an expert takes in a slot, at most.
    pub room: usize,
    /// Bytes of the arrays of all experts.
    pub bytes: u64,
    /// Which slots its experts go to.
    pub class: usize,
}

impl Layer {
    /// The layer's experts, each the same number of arrays, as views of files that are being loaded. Files are numbered by their place in `files`.
    ///
    /// # Panics
    /// When an array is not a view of such a file.
    pub fn new(experts: impl Iterator<Item = Vec<Bytes>>, files: &mut Vec<Arc<Source>>) -> Layer {
        let mut layer = Layer::default();
        for arrays in experts {
            layer.arrays = arrays.len();
            layer.add(&arrays, files);
        }
        layer
    }

    fn add(&mut self, arrays: &[Bytes], files: &mut Vec<Arc<Source>>) {
        // 1. in file order
        let mut places: Vec<(u32, Range<usize>, usize)> = Vec::with_capacity(arrays.len());
        for (i, bytes) in arrays.iter().enumerate().filter(|(_, b)| !b.is_empty()) {
            let (source, range) = bytes.source().expect("experts are streamed from files that are being loaded");
            let file = files.iter().position(|f| Arc::ptr_eq(f, source)).unwrap_or_else(|| {
                files.push(Arc::clone(source));
                files.len() - 1
            });
            places.push((file as u32, range, i));
            self.bytes += bytes.len() as u64;
        }
        places.sort_by_key(|(file, range, _)| (*file, range.start));
        // 2. pages, each read once
        let first = self.extents.len();
        let parts = self.parts.len();
        self.parts.resize(parts + arrays.len(), 0..0);
        for (file, range, array) in places {
            let page = range.start / ALIGNMENT * ALIGNMENT;
            let next = |e: &Extent| e.at + e.room() as u32;
            let last = self.extents[first..].last_mut();
            let extent = match last {
                Some(e) if e.file == file && page as u64 <= e.offset + e.room() as u64 => {
                    e.len = e.len.max((range.end as u64 - e.offset) as u32);
                    e
                }
                last => {
                    let at = last.map_or(0, |e| next(e));
                    self.extents.push(Extent { file, offset: page as u64, len: (range.end - page) as u32, at });
                    self.extents.last_mut().expect("just pushed")
                }
            };
            let start = extent.at + (range.start as u64 - extent.offset) as u32;
            self.parts[parts + array] = start..start + range.len() as u32;
        }
        let end = self.extents[first..].last().map_or(0, |e| e.at as usize + e.room());
        self.room = self.room.max(end);
        self.ends.push(self.extents.len() as u32);
    }

    /// How many experts there are.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    pub fn extents(&self, expert: usize) -> &[Extent] {
        let from = expert.checked_sub(1).map_or(0, |before| self.ends[before]);
        &self.extents[from as usize..self.ends[expert] as usize]
    }

    /// Where array `array` of an expert lies in its slot.
    pub fn part(&self, expert: usize, array: usize) -> Range<usize> {
        let Range { start, end } = self.parts[expert * self.arrays + array];
        start as usize..end as usize
    }
}

/// Divides layers among classes of slots of one size each, and returns the sizes: sizes that differ by a sixteenth at most share the larger.
pub(super) fn classes(layers: &mut [Layer]) -> Vec<usize> {
    let mut sizes: Vec<usize> = layers.iter().map(|l| l.room).collect();
    sizes.sort_unstable_by(|a, b| b.cmp(a));
    let mut classes: Vec<usize> = Vec::new();
    for size in sizes {
        if classes.last().is_none_or(|&c| c - size > c / 16) {
            classes.push(size);
        }
    }
    for layer in layers {
        layer.class = classes.iter().rposition(|&c| c >= layer.room).expect("the largest is a class");
    }
    classes
}
