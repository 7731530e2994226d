//! Where an expert is on disk, and where its arrays are in a slot. Reads are whole pages of the file, as direct reads must be, so an array has the same offset
//! within a page in its slot as in its file. Arrays that share pages or follow each other are one read. Arrays that are in no file stay where they are.

use std::collections::HashMap;
use std::ops::Range;

use sluice_store::Bytes;
use sluice_store::load::ALIGNMENT;
use sluice_store::requests::StreamedFiles;

/// A run of whole pages of a file that is read at once, and where in the slot it goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Extent {
    /// The file's number.
    pub file: u32,
    /// Offset in the file: a multiple of [`ALIGNMENT`].
    pub offset: u64,
    /// Bytes to the end of the last array in it: the last page may reach beyond the file's end.
    pub len: usize,
    /// Offset in the slot: a multiple of [`ALIGNMENT`].
    pub at: usize,
}

impl Extent {
    /// Bytes that it takes in the slot: whole pages.
    fn slot_bytes(&self) -> usize {
        self.len.next_multiple_of(ALIGNMENT)
    }
}

/// The experts of a layer, all of as many arrays: where these are on disk, and in slots.
#[derive(Clone, Debug, Default)]
pub struct LayerLayout {
    extents: Vec<Extent>,
    /// By expert: one beyond its last extent.
    ends: Vec<usize>,
    /// By expert and array: the array's bytes in the slot. Sizes come from files that may be hostile, and sparse: nothing is counted in 32 bits.
    arrays_in_slot: Vec<Range<usize>>,
    /// Arrays of each expert.
    arrays: usize,
    /// By expert and array: those that are in no file.
    kept: HashMap<(usize, usize), Bytes>,
    /// Bytes of those of an expert, at most.
    pub(crate) kept_bytes: usize,
    /// Bytes that an expert takes in a slot, at most.
    pub(crate) slot_bytes: usize,
    /// Bytes of the arrays of all experts.
    pub(crate) bytes: u64,
    /// Which class of slots its experts take.
    pub(crate) class: usize,
}

impl LayerLayout {
    /// A layer whose experts are lists of arrays, views of files that are being loaded, or of memory. Files get their numbers from `files`.
    ///
    /// # Panics
    /// When an array is a view of a file that is not being loaded.
    pub fn new(experts: impl Iterator<Item = Vec<Bytes>>, files: &mut StreamedFiles) -> LayerLayout {
        let mut layer = LayerLayout::default();
        for (expert, arrays) in experts.enumerate() {
            let there = arrays.iter().enumerate().filter(|(_, bytes)| !bytes.is_empty());
            let (of_files, kept): (Vec<_>, Vec<_>) = there.partition(|(_, bytes)| bytes.is_of_file());
            let parts = of_files.into_iter().map(|(array, bytes)| {
                let (file, range) = files.locate(bytes);
                (file, range, array)
            });
            layer.add(arrays.len(), parts.collect());
            layer.kept_bytes = layer.kept_bytes.max(kept.iter().map(|(_, bytes)| bytes.len()).sum());
            layer.kept.extend(kept.into_iter().map(|(array, bytes)| ((expert, array), bytes.clone())));
        }
        layer
    }

    /// Adds an expert of `arrays` arrays. `parts`: of each that is not empty the file's number, its bytes in the file, and which of the arrays it is.
    pub fn add(&mut self, arrays: usize, mut parts: Vec<(u32, Range<u64>, usize)>) {
        self.arrays = arrays;
        // 1. In file order
        parts.sort_by_key(|(file, range, _)| (*file, range.start));
        // 2. Pages, each read once
        let first = self.extents.len();
        let first_array = self.arrays_in_slot.len();
        self.arrays_in_slot.resize(first_array + arrays, 0..0);
        for (file, range, array) in parts {
            let len = (range.end - range.start) as usize;
            self.bytes += len as u64;
            let page = range.start / ALIGNMENT as u64 * ALIGNMENT as u64;
            let extent = match self.extents[first..].last_mut() {
                Some(e) if e.file == file && page <= e.offset + e.slot_bytes() as u64 => {
                    e.len = e.len.max((range.end - e.offset) as usize);
                    e
                }
                last => {
                    let at = last.map_or(0, |e| e.at + e.slot_bytes());
                    self.extents.push(Extent { file, offset: page, len: (range.end - page) as usize, at });
                    self.extents.last_mut().expect("just pushed")
                }
            };
            let start = extent.at + (range.start - extent.offset) as usize;
            self.arrays_in_slot[first_array + array] = start..start + len;
        }
        let end = self.extents[first..].last().map_or(0, |e| e.at + e.slot_bytes());
        self.slot_bytes = self.slot_bytes.max(end);
        self.ends.push(self.extents.len());
    }

    /// Bytes of these tables themselves.
    pub(crate) fn table_bytes(&self) -> usize {
        size_of_val(&*self.extents) + size_of_val(&*self.ends) + size_of_val(&*self.arrays_in_slot)
    }

    /// How many experts there are.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Whether there is no expert.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// The extents that are read for an expert.
    pub(crate) fn extents(&self, expert: usize) -> &[Extent] {
        let from = expert.checked_sub(1).map_or(0, |before| self.ends[before]);
        &self.extents[from..self.ends[expert]]
    }

    /// An expert's array that is in no file, and so in no slot.
    pub(crate) fn kept(&self, expert: usize, array: usize) -> Option<&Bytes> {
        if self.kept.is_empty() { None } else { self.kept.get(&(expert, array)) }
    }

    /// The bytes of an expert's array in its slot.
    pub(crate) fn part(&self, expert: usize, array: usize) -> Range<usize> {
        self.arrays_in_slot[expert * self.arrays + array].clone()
    }
}

/// Divides layers among classes of slots of one size each, and returns the sizes: sizes that differ by a sixteenth at most share the larger.
pub(crate) fn classes(layers: &mut [LayerLayout]) -> Vec<usize> {
    let mut sizes: Vec<usize> = layers.iter().map(|l| l.slot_bytes).collect();
    sizes.sort_unstable_by(|a, b| b.cmp(a));
    let mut classes: Vec<usize> = Vec::new();
    for size in sizes {
        if classes.last().is_none_or(|&c| c - size > c / 16) {
            classes.push(size);
        }
    }
    for layer in layers {
        layer.class = classes.iter().rposition(|&c| c >= layer.slot_bytes).expect("the largest is a class");
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
            let mut parts = Vec::new();
            for (array, size) in sizes.into_iter().enumerate() {
                parts.push((0, at..at + size, array));
                at += size + 3 * ALIGNMENT as u64;
            }
            layer.add(3, parts.clone());
            let mut end = 0;
            for (array, (_, place, _)) in parts.iter().enumerate() {
                let part = layer.part(0, array);
                assert_eq!(part.len() as u64, place.end - place.start);
                assert_eq!(part.start % ALIGNMENT, place.start as usize % ALIGNMENT);
                assert!(part.start >= end && part.end <= layer.slot_bytes, "{part:?} in {}", layer.slot_bytes);
                end = part.end;
            }
            let read: u64 = layer.extents(0).iter().map(|e| e.len as u64).sum();
            assert!(read >= sizes.iter().sum::<u64>() && read <= layer.slot_bytes as u64);
            assert!(layer.extents(0).iter().all(|e| e.at + e.len <= layer.slot_bytes));
        }
    }
}
