//! Where the arrays of an expert are in a buffer of the device.

use std::ops::Range;

use crate::blocks::BlockRows;
use crate::device::memory::ALIGNMENT;
use crate::parameters::PROJECTIONS;
use crate::weights::{ARRAYS, WORD};

/// Arrays of an expert: those of each projection.
pub const EXPERT_ARRAYS: usize = PROJECTIONS * ARRAYS;

/// The places of an expert's arrays in a buffer, and how they get there from its slot in the host's memory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ExpertLayout {
    /// The offset of each array in the buffer.
    pub offsets: [usize; EXPERT_ARRAYS],
    /// The copies: bytes of the slot, and their offset in the buffer.
    pub copies: Vec<(Range<usize>, usize)>,
    /// Arrays in blocks, which are rearranged on their way: the first of them, bytes of the slot, and the offset of their rows in the buffer.
    pub blocks: Vec<(BlockRows, usize, [Range<usize>; 2], usize)>,
    /// Arrays that are in no slot, but for those in blocks, and their offset in the buffer.
    pub kept: Vec<(usize, usize)>,
    /// Bytes that are copied.
    pub bytes: usize,
}

impl ExpertLayout {
    /// The layout of an expert whose arrays have these places in its slot, and some of them, so many bytes, in no slot. `rows`: projections in blocks.
    pub fn new(
        parts: &[Range<usize>; EXPERT_ARRAYS],
        kept: &[usize; EXPERT_ARRAYS],
        rows: &[Option<BlockRows>; PROJECTIONS],
    ) -> ExpertLayout {
        let (mut layout, mut end) = match rows.iter().all(Option::is_none) {
            true => ExpertLayout::of_slot(parts),
            false => ExpertLayout::with_blocks(parts, rows),
        };
        for (array, bytes) in kept.iter().enumerate().filter(|(array, n)| **n > 0 && rows[array / ARRAYS].is_none()) {
            end = end.next_multiple_of(ALIGNMENT);
            layout.offsets[array] = end;
            layout.kept.push((array, end));
            end += bytes;
        }
        let copied = layout.copies.iter().map(|(from, _)| from.len());
        let in_blocks = layout.blocks.iter().flat_map(|(_, _, arrays, _)| arrays).map(Range::len);
        layout.bytes = copied.chain(in_blocks).chain(kept.iter().copied()).sum();
        layout
    }

    /// The layout of an expert that the device reads in its slot.
    pub fn in_place(parts: &[Range<usize>; EXPERT_ARRAYS]) -> ExpertLayout {
        ExpertLayout { offsets: std::array::from_fn(|i| parts[i].start), ..ExpertLayout::default() }
    }

    /// The same of arrays in a slot, and where the last ends. If one shift aligns all of them, the whole expert is one copy; otherwise each array is one.
    fn of_slot(parts: &[Range<usize>; EXPERT_ARRAYS]) -> (ExpertLayout, usize) {
        let there = || parts.iter().filter(|p| !p.is_empty());
        let Some(largest) = there().max_by_key(|p| (p.len(), std::cmp::Reverse(p.start))) else {
            return (ExpertLayout::default(), 0);
        };
        let shift = largest.start.next_multiple_of(ALIGNMENT) - largest.start;
        if there().all(|p| (p.start + shift).is_multiple_of(WORD)) {
            let from = there().map(|p| p.start).min().unwrap_or(0);
            let to = there().map(|p| p.end).max().unwrap_or(0);
            let offsets = std::array::from_fn(|i| if parts[i].is_empty() { 0 } else { parts[i].start + shift });
            let copies = vec![(from..to, from + shift)];
            return (ExpertLayout { offsets, copies, ..ExpertLayout::default() }, to + shift);
        }
        let (mut layout, mut end) = (ExpertLayout::default(), 0);
        for (at, part) in layout.offsets.iter_mut().zip(parts).filter(|(_, part)| !part.is_empty()) {
            *at = end;
            layout.copies.push((part.clone(), end));
            end += part.len().next_multiple_of(ALIGNMENT);
        }
        (layout, end)
    }

    /// The same where projections may have blocks.
    fn with_blocks(
        parts: &[Range<usize>; EXPERT_ARRAYS],
        rows: &[Option<BlockRows>; PROJECTIONS],
    ) -> (ExpertLayout, usize) {
        let (mut layout, mut end) = (ExpertLayout::default(), 0);
        for (projection, rows) in rows.iter().enumerate() {
            let own = projection * ARRAYS..(projection + 1) * ARRAYS;
            if let Some(rows) = rows {
                layout.offsets[own.start] = end;
                layout.blocks.push((*rows, own.start, [0, 1].map(|array| parts[own.start + array].clone()), end));
                end += rows.own_bytes().next_multiple_of(ALIGNMENT);
                continue;
            }
            for array in own.filter(|array| !parts[*array].is_empty()) {
                layout.offsets[array] = end;
                layout.copies.push((parts[array].clone(), end));
                end += parts[array].len().next_multiple_of(ALIGNMENT);
            }
        }
        (layout, end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::moe::expert_pool::stride;

    fn parts(starts: [usize; EXPERT_ARRAYS], lens: [usize; EXPERT_ARRAYS]) -> [Range<usize>; EXPERT_ARRAYS] {
        std::array::from_fn(|i| starts[i]..starts[i] + lens[i])
    }

    fn of_slot(parts: &[Range<usize>; EXPERT_ARRAYS]) -> ExpertLayout {
        ExpertLayout::new(parts, &[0; EXPERT_ARRAYS], &[None; PROJECTIONS])
    }

    #[test]
    fn an_expert_is_one_copy_if_one_shift_aligns_its_arrays() {
        // As stacked tensors behind a header of 8 bytes modulo 16.
        let starts =
            [0, 5000, 10_000, 20_000, 25_000, 30_000, 40_000, 45_000, 50_000].map(|at: usize| at / 16 * 16 + 8);
        let lens = [4000, 500, 500, 4000, 500, 500, 4000, 500, 500];
        let layout = of_slot(&parts(starts, lens));
        assert_eq!(layout.copies, [(8..50_000 + 508, 256)]);
        assert!(layout.offsets.iter().all(|at| at % 16 == 0) && layout.offsets[0] == 256);
        // From two files.
        let mut apart = starts;
        apart[4] += 2;
        let layout = of_slot(&parts(apart, lens));
        assert_eq!((layout.copies.len(), layout.bytes), (9, lens.iter().sum()));
        assert!(layout.offsets.iter().all(|at| at % ALIGNMENT == 0));
        // Floats have elements alone.
        let layout = of_slot(&parts(starts, [4000, 0, 0, 4000, 0, 0, 4000, 0, 0]));
        assert_eq!((layout.copies.len(), layout.offsets[1]), (1, 0));
    }

    #[test]
    fn any_expert_fits_its_buffer() {
        let mut random = fastrand::Rng::with_seed(5);
        for _ in 0..2000 {
            let (mut end, step) = (0, [1, 2, 16][random.usize(..3)]);
            let parts: [Range<usize>; EXPERT_ARRAYS] = std::array::from_fn(|_| {
                let start = end + random.usize(..300) / step * step;
                end = start + if random.u8(..4) == 0 { 0 } else { (1 + random.usize(..3000)) / step * step };
                start..end
            });
            // Some of them are kept elsewhere.
            let kept = [0; EXPERT_ARRAYS].map(|_| if random.u8(..3) == 0 { random.usize(1..3000) } else { 0 });
            let parts: [Range<usize>; EXPERT_ARRAYS] =
                std::array::from_fn(|i| if kept[i] > 0 { 0..0 } else { parts[i].clone() });
            let layout = ExpertLayout::new(&parts, &kept, &[None; PROJECTIONS]);
            let stride = stride(end.next_multiple_of(4096) + kept.iter().sum::<usize>());
            let mut ends: Vec<(usize, usize)> = layout.copies.iter().map(|(from, to)| (*to, to + from.len())).collect();
            ends.extend(layout.kept.iter().map(|(array, at)| (*at, at + kept[*array])));
            ends.sort_unstable();
            assert!(ends.windows(2).all(|two| two[0].1 <= two[1].0), "copies overlap: {ends:?}");
            let all: Vec<usize> = (0..EXPERT_ARRAYS).filter(|array| kept[*array] > 0).collect();
            assert_eq!(layout.kept.iter().map(|(array, _)| *array).collect::<Vec<_>>(), all);
            assert!(layout.kept.iter().all(|(array, at)| {
                at.is_multiple_of(ALIGNMENT) && layout.offsets[*array] == *at && at + kept[*array] <= stride
            }));
            for (array, part) in parts.iter().enumerate().filter(|(_, p)| !p.is_empty()) {
                assert!(layout.offsets[array].is_multiple_of(WORD) && layout.offsets[array] + part.len() <= stride);
                // It is copied to the offset that the layout gives.
                let copied = |(from, to): &(Range<usize>, usize)| {
                    from.start <= part.start
                        && part.end <= from.end
                        && layout.offsets[array] == to + part.start - from.start
                };
                assert!(layout.copies.iter().any(copied));
            }
            assert!(layout.copies.iter().all(|(from, to)| to + from.len() <= stride));
        }
    }
}
