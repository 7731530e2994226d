//! A byte-pair vocabulary as one block of bytes that is ready to use: token texts, merges, and hash tables over both.
//!
//! Compiling `tokenizer.json` into it takes as long as parsing that file does; reading it back is a file read and a checksum. A
//! cached image is hostile input like any file: [`Image::open`] checks its shape once, every access is bounds-checked all the same, and
//! whatever is wrong with it only means that it is compiled again.
//!
//! Layout, all numbers little-endian u32 unless said otherwise:
//!
//! | part | content |
//! |---|---|
//! | header, 64 bytes | magic, version, flags, counts, XXH3-128 of the source, XXH3-64 of all that follows the header, 0 or the unknown token + 1 |
//! | ends `[tokens]` | where each token's text ends in `texts` |
//! | token slots `[2^k]` | 0, or an id + 1: open addressing by the text's XXH3-64 |
//! | merges `[merges, 3]` | left id, right id, id of the two together; a merge's index is its rank |
//! | merge slots `[2^k]` | 0, or a rank + 1: open addressing by the pair |
//! | texts | UTF-8 |
//! | rest | `tokenizer.json` without its model, JSON |

use anyhow::{Result, anyhow, bail, ensure};
use std::borrow::Cow;
use std::ops::Range;
use xxhash_rust::xxh3::xxh3_64;

const MAGIC: &[u8; 8] = b"SLUICETK";
/// Increase it with every change of the layout or of the compiler.
const VERSION: u32 = 2;
const HEADER: usize = 64;
const IGNORE_MERGES: u32 = 1;
const TO_BYTES: u32 = 2;
const FUSE: u32 = 4;

/// What characters that are not in the vocabulary become.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Fallback {
    /// The tokens of their bytes, `<0x00>` to `<0xFF>`, if these are there.
    pub to_bytes: bool,
    /// Else this token; without one they are left out.
    pub unknown: Option<u32>,
    /// Whether several in a row become one unknown token.
    pub fuse: bool,
}

/// The input of an image.
pub(super) struct Vocabulary<'a> {
    /// Text of the token with each id.
    pub tokens: Vec<&'a str>,
    /// By rank.
    pub merges: &'a [(Cow<'a, str>, Cow<'a, str>)],
    /// Whether a word that is a token is used without merges.
    pub ignore_merges: bool,
    pub fallback: Fallback,
    /// `tokenizer.json` without its model.
    pub rest: &'a str,
}

/// A compiled vocabulary.
pub(super) struct Image {
    bytes: Vec<u8>,
    ignore_merges: bool,
    fallback: Fallback,
    tokens: usize,
    ends: Range<usize>,
    token_slots: Range<usize>,
    merges: Range<usize>,
    merge_slots: Range<usize>,
    texts: Range<usize>,
    rest: Range<usize>,
}

impl Image {
    /// # Errors
    /// Merges of or into tokens that the vocabulary lacks; a vocabulary too large for 32-bit numbers.
    pub fn compile(vocabulary: &Vocabulary, source: u128) -> Result<Self> {
        let Vocabulary { tokens, merges, ignore_merges, fallback, rest } = vocabulary;
        let size = |n: usize| u32::try_from(n).map_err(|_| anyhow!("a vocabulary of more than 4 GiB"));
        let (token_count, merge_count) = (size(tokens.len())?, size(merges.len())?);
        let (token_room, merge_room) = (slots_for(token_count), slots_for(merge_count));

        // 1. texts, and a hash table of them
        let mut texts = String::new();
        let mut ends = Vec::with_capacity(tokens.len());
        let mut token_slots = vec![0u32; token_room];
        for (text, id) in tokens.iter().zip(1..) {
            texts.push_str(text);
            ends.push(size(texts.len())?);
            insert(&mut token_slots, text_slot(text, token_room), id);
        }

        // 2. merges by rank, and a hash table of them; the later merge of a pair counts
        let id = |text: &str| {
            let is_it = |id: u32| tokens[id as usize] == text;
            find(|slot| token_slots[slot], token_room, text_slot(text, token_room), is_it)
                .ok_or_else(|| anyhow!("a merge needs the token {text:?}, which is not in the vocabulary"))
        };
        let mut table = Vec::with_capacity(3 * merges.len());
        let mut both = String::new();
        for (left, right) in *merges {
            both.clear();
            both.extend([left.as_ref(), right.as_ref()]);
            table.extend([id(left)?, id(right)?, id(&both)?]);
        }
        let mut merge_slots = vec![0u32; merge_room];
        for rank in (0..merge_count).rev() {
            let pair = |rank: u32| &table[3 * rank as usize..3 * rank as usize + 2];
            let first = pair_slot(pair(rank)[0], pair(rank)[1], merge_room);
            if find(|slot| merge_slots[slot], merge_room, first, |other| pair(other) == pair(rank)).is_none() {
                insert(&mut merge_slots, first, rank + 1);
            }
        }

        // 3. one block
        let mut bytes = vec![0; HEADER];
        for part in [&ends, &token_slots, &table, &merge_slots] {
            bytes.extend(part.iter().flat_map(|x| x.to_le_bytes()));
        }
        bytes.extend_from_slice(texts.as_bytes());
        bytes.extend_from_slice(rest.as_bytes());
        let flags = [(*ignore_merges, IGNORE_MERGES), (fallback.to_bytes, TO_BYTES), (fallback.fuse, FUSE)];
        let flags = flags.iter().filter(|(set, _)| *set).map(|(_, flag)| flag).sum();
        let counts = [VERSION, flags, token_count, merge_count, size(texts.len())?, size(rest.len())?];
        let checksum = xxh3_64(&bytes[HEADER..]);
        let mut header = MAGIC.to_vec();
        header.extend(counts.iter().flat_map(|x| x.to_le_bytes()));
        header.extend_from_slice(&source.to_le_bytes());
        header.extend_from_slice(&checksum.to_le_bytes());
        header.extend(fallback.unknown.map_or(0, |id| id + 1).to_le_bytes());
        bytes[..header.len()].copy_from_slice(&header);
        Self::open(bytes, source)
    }

    /// An image of the `tokenizer.json` that has this hash.
    ///
    /// # Errors
    /// Anything else: another version, another file's image, a truncated or damaged one.
    pub fn open(bytes: Vec<u8>, source: u128) -> Result<Self> {
        let header = bytes.get(..HEADER).ok_or_else(|| anyhow!("no header"))?;
        let number = |at: usize| u32_at(header, at / 4);
        ensure!(header.starts_with(MAGIC) && number(8) == VERSION, "another format");
        ensure!(header[32..48] == source.to_le_bytes(), "another tokenizer.json");
        let [tokens, merges, texts, rest] = [16, 20, 24, 28].map(|at| number(at) as usize);

        // The offsets of all parts. Counts are 32-bit, so sums do not overflow 64 bits.
        let mut at = HEADER;
        let mut part = |len: usize| {
            at += len;
            at - len..at
        };
        let image = Self {
            ignore_merges: number(12) & IGNORE_MERGES != 0,
            fallback: Fallback {
                to_bytes: number(12) & TO_BYTES != 0,
                unknown: number(56).checked_sub(1),
                fuse: number(12) & FUSE != 0,
            },
            tokens,
            ends: part(4 * tokens),
            token_slots: part(4 * slots_for(tokens as u32)),
            merges: part(12 * merges),
            merge_slots: part(4 * slots_for(merges as u32)),
            texts: part(texts),
            rest: part(rest),
            bytes,
        };
        ensure!(image.rest.end == image.bytes.len(), "{} bytes, expected {}", image.bytes.len(), image.rest.end);
        let checksum = xxh3_64(&image.bytes[HEADER..]);
        ensure!(image.bytes[48..56] == checksum.to_le_bytes(), "checksum mismatch");
        ensure!(image.fallback.unknown.is_none_or(|id| (id as usize) < tokens), "an unknown token that is not there");
        // An invalid token would be an index outside the model's embedding later.
        if (0..merges).any(|rank| u32_at(&image.bytes[image.merges.clone()], 3 * rank + 2) as usize >= tokens) {
            bail!("a merge into a token that is not there");
        }
        Ok(image)
    }

    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Number of tokens. All ids are below it.
    pub fn len(&self) -> usize {
        self.tokens
    }

    pub fn ignores_merges(&self) -> bool {
        self.ignore_merges
    }

    pub fn fallback(&self) -> Fallback {
        self.fallback
    }

    /// `tokenizer.json` without its model.
    pub fn rest(&self) -> &[u8] {
        &self.bytes[self.rest.clone()]
    }

    /// A token's text.
    pub fn text(&self, id: u32) -> Option<&str> {
        std::str::from_utf8(self.text_bytes(id)?).ok()
    }

    fn text_bytes(&self, id: u32) -> Option<&[u8]> {
        let id = id as usize;
        let ends = &self.bytes[self.ends.clone()];
        if id >= self.tokens {
            return None;
        }
        let start = if id == 0 { 0 } else { u32_at(ends, id - 1) as usize };
        self.bytes[self.texts.clone()].get(start..u32_at(ends, id) as usize)
    }

    /// The token with this text.
    pub fn id(&self, text: &str) -> Option<u32> {
        let slots = &self.bytes[self.token_slots.clone()];
        probe(slots, |room| text_slot(text, room), |id| self.text_bytes(id) == Some(text.as_bytes()))
    }

    /// The merge of two tokens: its rank, and the token that it gives.
    pub fn merge(&self, left: u32, right: u32) -> Option<(u32, u32)> {
        let slots = &self.bytes[self.merge_slots.clone()];
        let merges = &self.bytes[self.merges.clone()];
        let part = |rank: u32, i: usize| u32_at(merges, 3 * rank as usize + i);
        let rank = probe(
            slots,
            |room| pair_slot(left, right, room),
            |rank| (3 * rank as usize + 3) * 4 <= merges.len() && part(rank, 0) == left && part(rank, 1) == right,
        )?;
        Some((rank, part(rank, 2)))
    }
}

/// The `i`-th number of `bytes`.
fn u32_at(bytes: &[u8], i: usize) -> u32 {
    let mut number = [0; 4];
    number.copy_from_slice(&bytes[4 * i..4 * i + 4]);
    u32::from_le_bytes(number)
}

/// Slots of an open-addressing table: a power of two, at most half full.
fn slots_for(entries: u32) -> usize {
    (2 * entries as usize + 1).next_power_of_two()
}

fn text_slot(text: &str, room: usize) -> usize {
    xxh3_64(text.as_bytes()) as usize & (room - 1)
}

fn pair_slot(left: u32, right: u32, room: usize) -> usize {
    // Fibonacci hashing: the upper bits of the product are the well-mixed ones.
    let product = (u64::from(left) << 32 | u64::from(right)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    (product ^ product >> 32) as usize & (room - 1)
}

fn insert(slots: &mut [u32], mut slot: usize, value: u32) {
    while slots[slot] != 0 {
        slot = (slot + 1) & (slots.len() - 1);
    }
    slots[slot] = value;
}

/// Looks into the slots (a power of two of them, read by `slot`) from `first` on, until `found` accepts an entry or a slot is empty.
fn find(slot: impl Fn(usize) -> u32, room: usize, first: usize, found: impl Fn(u32) -> bool) -> Option<u32> {
    (0..room).map(|step| slot((first + step) & (room - 1))).take_while(|x| *x != 0).map(|x| x - 1).find(|x| found(*x))
}

/// The same with slots in bytes.
fn probe(slots: &[u8], first: impl Fn(usize) -> usize, found: impl Fn(u32) -> bool) -> Option<u32> {
    let room = slots.len() / 4;
    find(|slot| u32_at(slots, slot), room, first(room), found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn merges() -> Vec<(Cow<'static, str>, Cow<'static, str>)> {
        [("a", "b"), ("ab", "c"), ("a", "b")].map(|(a, b)| (a.into(), b.into())).to_vec()
    }

    fn small() -> Image {
        let vocabulary = Vocabulary {
            tokens: vec!["a", "b", "c", "ab", "abc", "é"],
            merges: &merges(),
            ignore_merges: true,
            fallback: Fallback { to_bytes: true, unknown: Some(5), fuse: true },
            rest: "{}",
        };
        Image::compile(&vocabulary, 7).unwrap()
    }

    #[test]
    fn everything_compiled_is_found_again() {
        let image = Image::open(small().bytes, 7).unwrap();
        assert_eq!((image.len(), image.ignores_merges(), image.rest()), (6, true, &b"{}"[..]));
        assert_eq!(image.fallback(), Fallback { to_bytes: true, unknown: Some(5), fuse: true });
        for (id, text) in ["a", "b", "c", "ab", "abc", "é"].iter().enumerate() {
            assert_eq!((image.text(id as u32), image.id(text)), (Some(*text), Some(id as u32)));
        }
        assert_eq!((image.text(6), image.id("x"), image.id("")), (None, None, None));
        assert_eq!(image.merge(0, 1), Some((2, 3)), "the later of two equal merges counts");
        assert_eq!(image.merge(3, 2), Some((1, 4)));
        assert_eq!((image.merge(1, 0), image.merge(9, 9)), (None, None));
    }

    #[test]
    fn merges_outside_the_vocabulary_are_errors() {
        for merge in [("a", "x"), ("x", "a"), ("b", "a")] {
            let merges = [(merge.0.into(), merge.1.into())];
            let fallback = Fallback::default();
            let tokens = vec!["a", "b"];
            let vocabulary = Vocabulary { tokens, merges: &merges, ignore_merges: false, fallback, rest: "" };
            assert!(Image::compile(&vocabulary, 0).is_err());
        }
    }

    #[test]
    fn images_of_other_files_and_damaged_ones_are_refused() {
        let good = small().bytes;
        assert!(Image::open(good.clone(), 8).is_err());
        for len in 0..good.len() {
            assert!(Image::open(good[..len].to_vec(), 7).is_err(), "cut to {len}");
        }
        for i in 0..good.len() * 8 {
            let mut bad = good.clone();
            bad[i / 8] ^= 1 << (i % 8);
            // Bits 480..512 of the header are spare; neither flags nor the unknown token touch the shape.
            assert!(Image::open(bad, 7).is_err() || (448..512).contains(&i) || (96..128).contains(&i), "bit {i}");
        }
    }

    proptest! {
        // An image made to pass the checksum may give nonsense, but never panics.
        #[test]
        fn forged_images_do_not_panic(at in 0usize..200, with in prop::collection::vec(any::<u8>(), 1..40)) {
            let mut bytes = small().bytes;
            for (i, byte) in with.iter().enumerate() {
                let n = bytes.len();
                bytes[HEADER + (at + i) % (n - HEADER)] = *byte;
            }
            let checksum = xxh3_64(&bytes[HEADER..]);
            bytes[48..56].copy_from_slice(&checksum.to_le_bytes());
            if let Ok(image) = Image::open(bytes, 7) {
                for id in (0..10).chain([u32::MAX]) {
                    image.text(id);
                    for other in (0..10).chain([u32::MAX]) {
                        image.merge(id, other);
                    }
                }
                for text in ["", "a", "b", "ab", "abc", "é", "zz"] {
                    image.id(text);
                }
            }
        }
    }
}
