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
    pub len: usize,
    /// From the slot's start; a multiple of [`ALIGNMENT`].
    pub at: usize,
}

impl Extent {
    /// Bytes that it takes in the slot.
    fn room(&self) -> usize {
        self.len.next_multiple_of(ALIGNMENT)
    }
}

/// An array of an expert: the file's number, where it lies in the file, and which of the expert's arrays it is.
type Part = (u32, Range<u64>, usize);

/// The experts of a layer.
#[derive(Clone, Debug, Default)]
pub(super) struct LayerLayout {
    extents: Vec<Extent>,
    /// For each expert where its extents end.
    ends: Vec<usize>,
    /// For each expert and array, where it lies in the slot. Sizes come from files that may be hostile, and sparse: nothing is counted in 32 bits.
    parts: Vec<Range<usize>>,
    arrays: usize,
    /// Bytes that an expert takes in a slot, at most.
    pub room: usize,
    /// Bytes of the arrays of all experts.
    pub bytes: u64,
    /// Which slots its experts go to.
    pub class: usize,
}

impl LayerLayout {
    /// The layer's experts, each the same number of arrays, as views of files that are being loaded. Files are numbered by their place in `files`.
    ///
    /// # Panics
    /// When an array is not a view of such a file.
    pub fn new(experts: impl Iterator<Item = Vec<Bytes>>, files: &mut Vec<Arc<Source>>) -> LayerLayout {
        let mut layer = LayerLayout::default();
        for arrays in experts {
            let parts = arrays.iter().enumerate().filter(|(_, b)| !b.is_empty()).map(|(array, bytes)| {
                let (source, range) = bytes.source().expect("experts are streamed from files that are being loaded");
                let file = files.iter().position(|f| Arc::ptr_eq(f, source)).unwrap_or_else(|| {
                    files.push(Arc::clone(source));
                    files.len() - 1
                });
                (file as u32, range.start as u64..range.end as u64, array)
            });
            layer.add(arrays.len(), parts.collect());
        }
        layer
    }

    /// Adds an expert of `arrays` arrays, of which those that are not empty lie in files.
    pub fn add(&mut self, arrays: usize, mut places: Vec<Part>) {
        self.arrays = arrays;
        // 1. in file order
        places.sort_by_key(|(file, range, _)| (*file, range.start));
        // 2. pages, each read once
        let first = self.extents.len();
        let parts = self.parts.len();
        self.parts.resize(parts + arrays, 0..0);
        for (file, range, array) in places {
            let len = (range.end - range.start) as usize;
            self.bytes += len as u64;
            let page = range.start / ALIGNMENT as u64 * ALIGNMENT as u64;
            let extent = match self.extents[first..].last_mut() {
                Some(e) if e.file == file && page <= e.offset + e.room() as u64 => {
                    e.len = e.len.max((range.end - e.offset) as usize);
                    e
                }
                last => {
                    let at = last.map_or(0, |e| e.at + e.room());
                    self.extents.push(Extent { file, offset: page, len: (range.end - page) as usize, at });
                    self.extents.last_mut().expect("just pushed")
                }
            };
            let start = extent.at + (range.start - extent.offset) as usize;
            self.parts[parts + array] = start..start + len;
        }
        let end = self.extents[first..].last().map_or(0, |e| e.at + e.room());
        self.room = self.room.max(end);
        self.ends.push(self.extents.len());
    }

    /// What it takes in memory to know where they lie.
    pub fn table_bytes(&self) -> usize {
        size_of_val(&*self.extents) + size_of_val(&*self.ends) + size_of_val(&*self.parts)
    }

    /// How many experts there are.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    pub fn extents(&self, expert: usize) -> &[Extent] {
        let from = expert.checked_sub(1).map_or(0, |before| self.ends[before]);
        &self.extents[from..self.ends[expert]]
    }

    /// Where array `array` of an expert lies in its slot.
    pub fn part(&self, expert: usize, array: usize) -> Range<usize> {
        self.parts[expert * self.arrays + array].clone()
    }
}

/// Divides layers among classes of slots of one size each, and returns the sizes: sizes that differ by a sixteenth at most share the larger.
pub(super) fn classes(layers: &mut [LayerLayout]) -> Vec<usize> {
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

#[cfg(test)]
mod tests {
    use super::*;

    /// A sparse file may say that an expert is larger than any memory.
    #[test]
    fn experts_beyond_four_gibibytes_are_laid_out_without_overlap() {
        let gib = 1u64 << 30;
        for sizes in [[5 * gib, 3, 6 * gib], [4 * gib - 4096, 4096, 4096], [1 << 40, 1 << 41, 7]] {
            let mut layer = LayerLayout::default();
            let mut at = 100;
            let mut places = Vec::new();
            for (array, size) in sizes.into_iter().enumerate() {
                places.push((0, at..at + size, array));
                at += size + 3 * ALIGNMENT as u64;
            }
            layer.add(3, places.clone());
            let mut end = 0;
            for (array, (_, place, _)) in places.iter().enumerate() {
                let part = layer.part(0, array);
                assert_eq!(part.len() as u64, place.end - place.start);
                assert_eq!(part.start % ALIGNMENT, place.start as usize % ALIGNMENT);
                assert!(part.start >= end && part.end <= layer.room, "{part:?} in {}", layer.room);
                end = part.end;
            }
            let read: u64 = layer.extents(0).iter().map(|e| e.len as u64).sum();
            assert!(read >= sizes.iter().sum::<u64>() && read <= layer.room as u64);
            assert!(layer.extents(0).iter().all(|e| e.at + e.len <= layer.room));
        }
    }
}
