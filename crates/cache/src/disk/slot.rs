//! What lies in a slot: the bytes of a part, and behind them a page that says whose they are. `docs/cache-format.md` has the table.

use xxhash_rust::xxh3::Xxh3;

use crate::prefix::BlockHash;

/// Slots begin and end at multiples of this, so that they can be read past the page cache.
pub const PAGE: usize = 4096;
/// What a folder of another version holds is not looked at.
pub const VERSION: u32 = 1;
/// The part that is a recurrent state; others are numbers of cache groups.
pub const STATE: u32 = 255;
/// Tokens of an entry at most: those that fit on the page.
pub const MOST_TOKENS: usize = (PAGE - HEAD) / 4;

const MAGIC: [u8; 8] = *b"SLUICEKV";
const HEAD: usize = 80;
const SUM: std::ops::Range<usize> = 72..80;

/// What a slot is to hold: all of it is compared when it is read.
#[derive(Clone, Copy, Debug)]
pub struct Label<'a> {
    pub part: u32,
    pub bytes: u64,
    pub model: u64,
    pub hash: BlockHash,
    pub before: BlockHash,
    /// Position of the first of `tokens`.
    pub position: u32,
    pub tokens: &'a [u32],
}

/// Bytes of a slot for a part of so many.
pub fn slot_bytes(part: u64) -> u64 {
    part.next_multiple_of(PAGE as u64) + PAGE as u64
}

/// The page behind a part.
///
/// # Panics
/// When there are more tokens than fit.
pub fn page(label: &Label, part: &[u8]) -> [u8; PAGE] {
    assert!(label.tokens.len() <= MOST_TOKENS && part.len() as u64 == label.bytes);
    let mut page = [0; PAGE];
    let mut at = 0;
    let mut put = |bytes: &[u8]| {
        page[at..at + bytes.len()].copy_from_slice(bytes);
        at += bytes.len();
    };
    put(&MAGIC);
    put(&VERSION.to_le_bytes());
    put(&label.part.to_le_bytes());
    put(&label.bytes.to_le_bytes());
    put(&label.model.to_le_bytes());
    put(&label.hash);
    put(&label.before);
    put(&label.position.to_le_bytes());
    put(&(label.tokens.len() as u32).to_le_bytes());
    // The sum comes last.
    put(&[0; 8]);
    label.tokens.iter().for_each(|t| put(&t.to_le_bytes()));
    let sum = sum(part, &page);
    page[SUM].copy_from_slice(&sum.to_le_bytes());
    page
}

/// Whether a slot's bytes and page are what `label` says, to the last bit.
pub fn matches(label: &Label, part: &[u8], found: &[u8]) -> bool {
    part.len() as u64 == label.bytes && label.tokens.len() <= MOST_TOKENS && found == page(label, part)
}

/// Of a part and its page, whose field for the sum is zero.
fn sum(part: &[u8], page: &[u8; PAGE]) -> u64 {
    let mut hasher = Xxh3::new();
    hasher.update(part);
    hasher.update(page);
    hasher.digest()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_bit_that_flips_is_seen() {
        let tokens = [5, 6, 7];
        let label =
            Label { part: 1, bytes: 100, model: 9, hash: [1; 16], before: [2; 16], position: 64, tokens: &tokens };
        let part = [3; 100];
        let good = page(&label, &part);
        assert!(matches(&label, &part, &good));
        for bit in 0..8 * PAGE {
            let mut bad = good;
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(!matches(&label, &part, &bad), "bit {bit}");
        }
        for bit in 0..8 * part.len() {
            let mut bad = part;
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(!matches(&label, &bad, &good), "bit {bit}");
        }
        for other in [
            Label { part: 2, ..label },
            Label { model: 8, ..label },
            Label { hash: [0; 16], ..label },
            Label { before: [0; 16], ..label },
            Label { position: 0, ..label },
            Label { tokens: &[5, 6], ..label },
            Label { tokens: &[5, 6, 8], ..label },
        ] {
            assert!(!matches(&other, &part, &good));
        }
    }
}
