//! How much memory keys and values take. Groups with a window keep no more than sequences see, and as much again of prefixes.

use sluice_backend::KvLayout;

/// Blocks that groups with windows keep for prefixes, for each that sequences can hold.
const PREFIXES: usize = 1;

/// The memory of blocks, in bytes.
#[derive(Clone, Debug, Default)]
pub(crate) struct KvNeed {
    /// A block of all groups that see everything, and what grows with them.
    full: u64,
    /// Groups with a window, those with the fewest blocks first.
    windowed: Vec<Windowed>,
}

#[derive(Clone, Copy, Debug)]
struct Windowed {
    block: u64,
    /// It never needs more.
    most: u64,
}

impl KvNeed {
    /// Blocks of `bytes`, all of groups that see everything.
    pub fn full(bytes: u64) -> KvNeed {
        KvNeed { full: bytes, windowed: Vec::new() }
    }

    /// The need of groups with these layouts, and of `more` bytes that each block takes beside them. `most`: [`most_blocks`] of each group with a window.
    pub fn of(layouts: &[KvLayout], most: &[Option<usize>], more: usize) -> KvNeed {
        let all = || layouts.iter().map(|l| l.block_bytes() as u64).zip(most);
        let full: u64 = all().filter(|(_, most)| most.is_none()).map(|(bytes, _)| bytes).sum();
        let mut windowed: Vec<Windowed> =
            all().filter_map(|(block, most)| Some(Windowed { block, most: (*most)? as u64 })).collect();
        windowed.sort_by_key(|w| w.most);
        KvNeed { full: full + more as u64, windowed }
    }

    /// What so many blocks of positions take.
    pub fn bytes(&self, blocks: u64) -> u64 {
        let windowed = self.windowed.iter().map(|w| w.block.saturating_mul(blocks.min(w.most)));
        windowed.fold(self.full.saturating_mul(blocks), u64::saturating_add)
    }

    /// The most blocks of positions that take no more than so many bytes; unlimited if they take nothing.
    pub fn within(&self, bytes: u64) -> u64 {
        let (mut left, mut each) = (bytes, self.full + self.windowed.iter().map(|w| w.block).sum::<u64>());
        for w in &self.windowed {
            if left.checked_div(each).is_some_and(|blocks| blocks < w.most) {
                break;
            }
            left -= w.block * w.most;
            each -= w.block;
        }
        left.checked_div(each).unwrap_or(u64::MAX)
    }
}

/// Blocks that a group with a window ever needs: what `sequences` sequences see in steps of up to `step` tokens, and prefixes.
pub(crate) fn most_blocks(window: usize, block_tokens: usize, step: usize, sequences: usize) -> usize {
    let one = (window + step).div_ceil(block_tokens) + 1;
    one.saturating_mul(sequences).saturating_mul(1 + PREFIXES)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_take_no_more_than_they_see() {
        assert_eq!(most_blocks(128, 32, 512, 4), 2 * 4 * 21);
        let need =
            KvNeed { full: 10, windowed: vec![Windowed { block: 30, most: 100 }, Windowed { block: 5, most: 400 }] };
        assert_eq!([1, 100, 101, 1000].map(|blocks| need.bytes(blocks)), [45, 4500, 4515, 10_000 + 3000 + 2000]);
    }

    #[test]
    fn what_fits_takes_no_more_and_one_more_block_would() {
        let needs = [
            KvNeed::full(7),
            KvNeed { full: 10, windowed: vec![Windowed { block: 30, most: 100 }, Windowed { block: 5, most: 400 }] },
            KvNeed { full: 1, windowed: vec![Windowed { block: 3, most: 0 }] },
        ];
        for need in needs {
            for bytes in (0..20_000).step_by(13) {
                let blocks = need.within(bytes);
                assert!(need.bytes(blocks) <= bytes && need.bytes(blocks + 1) > bytes, "{need:?}: {bytes}");
            }
        }
        // Windows alone, and nothing at all.
        let windows = KvNeed { full: 0, windowed: vec![Windowed { block: 3, most: 10 }] };
        assert_eq!([29, 30, 1000].map(|bytes| windows.within(bytes)), [9, u64::MAX, u64::MAX]);
        assert_eq!(KvNeed::default().within(0), u64::MAX);
    }
}
