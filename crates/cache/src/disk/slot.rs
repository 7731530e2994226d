//! The contents of a slot: the bytes of a part, and behind them a page that identifies them. `docs/cache-format.md`
//! has the table.

use xxhash_rust::xxh3::Xxh3;

use crate::prefix::BlockHash;

/// Slots begin and end at multiples of this, so that they can be read past the page cache.
pub const PAGE: usize = 4096;
/// The version of the format. Folders of other versions are cleared.
pub const VERSION: u32 = 2;
/// The number of the part that is a recurrent state. Other parts have the numbers of cache groups.
pub const STATE: u32 = 255;
/// Bytes at the end of each page for what an encrypted slot needs in the clear.
pub const TAIL: usize = 64;
/// Tokens of an entry, at most: those that fit on the page.
pub const MOST_TOKENS: usize = (PAGE - HEAD - TAIL) / 4;

const MAGIC: [u8; 8] = *b"SLUICEKV";
const HEAD: usize = 80;
const SUM: std::ops::Range<usize> = 72..80;

/// Identifies the contents of a slot. All of it is compared when the slot is read.
#[derive(Clone, Copy, Debug)]
pub struct Label<'a> {
    /// Number of the cache group, or [`STATE`].
    pub part: u32,
    /// Bytes of the part.
    pub bytes: u64,
    /// Fingerprint of the model.
    pub model: u64,
    /// Hash of all tokens up to the end of the entry.
    pub hash: BlockHash,
    /// Hash of the entry before it.
    pub before: BlockHash,
    /// Position of the first of `tokens`.
    pub position: u32,
    /// Tokens of the entry.
    pub tokens: &'a [u32],
}

/// Bytes of a slot for a part of `part` bytes.
pub fn slot_bytes(part: u64) -> u64 {
    // An index that was tampered with may say anything.
    part.checked_next_multiple_of(PAGE as u64).map_or(u64::MAX, |n| n.saturating_add(PAGE as u64))
}

/// Fills a slot with a part and the page behind it. With `summed` the page has a checksum of both; an encrypted slot
/// needs none.
///
/// # Panics
/// When there are more tokens than fit, or the slot is not as long as the part wants it.
pub fn fill(label: &Label, part: &[u8], summed: bool, slot: &mut [u8]) {
    assert!(label.tokens.len() <= MOST_TOKENS && part.len() as u64 == label.bytes);
    assert!(slot.len() as u64 == slot_bytes(label.bytes));
    let (body, end) = slot.split_at_mut(slot.len() - PAGE);
    body[..part.len()].copy_from_slice(part);
    body[part.len()..].fill(0);
    end.copy_from_slice(&page(label, part, summed));
}

fn page(label: &Label, part: &[u8], summed: bool) -> [u8; PAGE] {
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
    // The checksum is filled in last.
    put(&[0; 8]);
    label.tokens.iter().for_each(|t| put(&t.to_le_bytes()));
    if summed {
        let sum = sum(part, &page);
        page[SUM].copy_from_slice(&sum.to_le_bytes());
    }
    page
}

/// Whether a slot holds exactly what `label` says.
pub fn holds(label: &Label, summed: bool, slot: &[u8]) -> bool {
    // Lengths come from an index that anybody may have changed.
    let Some(body) = slot.len().checked_sub(PAGE).filter(|body| label.bytes <= *body as u64) else { return false };
    label.tokens.len() <= MOST_TOKENS && slot[body..] == page(label, &slot[..label.bytes as usize], summed)
}

/// The label and the tokens that a slot claims to have; `None` for what is no slot. [`holds`] says whether that is
/// true.
pub fn label_of(slot: &[u8]) -> Option<(Label<'static>, Vec<u32>)> {
    let (body, page) = slot.split_at_checked(slot.len().checked_sub(PAGE)?)?;
    let u32_at = |at: usize| Some(u32::from_le_bytes(page.get(at..at + 4)?.try_into().ok()?));
    let u64_at = |at: usize| Some(u64::from_le_bytes(page.get(at..at + 8)?.try_into().ok()?));
    let (bytes, tokens) = (u64_at(16)?, u32_at(68)? as usize);
    if page[..8] != MAGIC || u32_at(8)? != VERSION || bytes > body.len() as u64 || tokens > MOST_TOKENS {
        return None;
    }
    let label = Label {
        part: u32_at(12)?,
        bytes,
        model: u64_at(24)?,
        hash: page[32..48].try_into().ok()?,
        before: page[48..64].try_into().ok()?,
        position: u32_at(64)?,
        tokens: &[],
    };
    Some((label, (0..tokens).map(|i| u32_at(HEAD + 4 * i)).collect::<Option<_>>()?))
}

/// The tokens that a page claims to have; `None` for what is no such page. Their hash says whether they are right.
pub fn tokens_of(page: &[u8]) -> Option<Vec<u32>> {
    let u32_at = |at: usize| Some(u32::from_le_bytes(page.get(at..at + 4)?.try_into().ok()?));
    let tokens = u32_at(68)? as usize;
    let is_one = page.len() == PAGE && page[..8] == MAGIC && u32_at(8)? == VERSION && tokens <= MOST_TOKENS;
    if is_one { (0..tokens).map(|i| u32_at(HEAD + 4 * i)).collect() } else { None }
}

/// The checksum of a part and its page, whose field for the checksum is zero.
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
        let mut slot = vec![9; slot_bytes(100) as usize];
        fill(&label, &part, true, &mut slot);
        assert!(holds(&label, true, &slot));
        // What lies between the part and its page is nobody's.
        for bit in (0..8 * 100).chain(8 * PAGE..8 * slot.len()) {
            slot[bit / 8] ^= 1 << (bit % 8);
            assert!(!holds(&label, true, &slot), "bit {bit}");
            slot[bit / 8] ^= 1 << (bit % 8);
        }
        for other in [
            Label { part: 2, ..label },
            Label { bytes: 99, ..label },
            Label { bytes: u64::MAX, ..label },
            Label { model: 8, ..label },
            Label { hash: [0; 16], ..label },
            Label { before: [0; 16], ..label },
            Label { position: 0, ..label },
            Label { tokens: &[5, 6], ..label },
            Label { tokens: &[5, 6, 8], ..label },
        ] {
            assert!(!holds(&other, true, &slot));
        }
        assert!(!holds(&label, true, &slot[..100]));
    }

    #[test]
    fn a_slot_says_of_itself_what_it_was_filled_with() {
        let tokens: Vec<u32> = (0..MOST_TOKENS as u32).collect();
        let label =
            Label { part: 1, bytes: 100, model: 9, hash: [1; 16], before: [2; 16], position: 64, tokens: &tokens };
        let mut slot = vec![9; slot_bytes(100) as usize];
        fill(&label, &[3; 100], true, &mut slot);
        let (found, its) = label_of(&slot).unwrap();
        assert_eq!(its, tokens);
        assert!(holds(&Label { tokens: &its, ..found }, true, &slot));
        assert!(label_of(&slot[..slot.len() - 1]).is_none() && label_of(&[]).is_none());
    }
    #[test]
    fn whatever_lies_in_a_slot_is_read_without_harm() {
        let tokens: Vec<u32> = (0..20).collect();
        let label =
            Label { part: 1, bytes: 100, model: 9, hash: [1; 16], before: [2; 16], position: 64, tokens: &tokens };
        let mut random = fastrand::Rng::with_seed(1);
        for _ in 0..20_000 {
            let mut slot = vec![0; slot_bytes(100) as usize];
            fill(&label, &[3; 100], true, &mut slot);
            for _ in 0..random.usize(1..20) {
                // Mostly where lengths stand.
                let span = if random.bool() { HEAD } else { PAGE };
                let at = slot.len() - PAGE + random.usize(..span);
                slot[at] = random.u8(..);
            }
            if random.u8(..4) == 0 {
                slot.truncate(random.usize(..=slot.len()));
            }
            if let Some((found, its)) = label_of(&slot) {
                assert!(its.len() <= MOST_TOKENS && found.bytes <= slot.len() as u64);
                assert!(!holds(&Label { tokens: &its, ..found }, true, &slot) || found.bytes == 100);
            }
            let bytes = if random.bool() { random.u64(..) } else { random.u64(..10_000) };
            assert!(bytes == 100 || !holds(&Label { bytes, ..label }, true, &slot));
        }
    }
}
