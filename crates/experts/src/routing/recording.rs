//! The experts that routers chose for a text, as `eval routing --trace-out` writes them and `plan --trace` reads them.
//!
//! | bytes | |
//! |---|---|
//! | 0..16 | `sluice routing 1` |
//! | 16..32 | layers with experts, experts of each, experts per token, tokens: u32, little-endian |
//! | 32.. | token by token, layer by layer, the experts in ascending order: the first one, then by how much each is more than the one before, in LEB128 |
//!
//! An expert takes one byte where it differs from the one before by less than 128.

use super::simulate::Trace;
use crate::error::Error;

/// How such a file begins, with the version of the format.
const MAGIC: &[u8; 16] = b"sluice routing 1";
const HEADER: usize = MAGIC.len() + 4 * size_of::<u32>();

/// Bytes that such a file may have: half a million tokens of the largest models.
pub const MAX_RECORDING: u64 = 256 << 20;

/// The most experts that a layer of a recording has, and the most layers. A bound for what a file can make its reader allocate, far above any model.
const MOST: usize = 1 << 16;

/// What routers chose for the tokens of a text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Recording {
    /// Experts of a layer.
    pub experts: usize,
    /// Experts per token.
    pub k: usize,
    /// By layer, of those that have experts: `[tokens, k]`, ascending within a token.
    pub layers: Vec<Vec<u32>>,
}

impl Recording {
    /// How many tokens the text has.
    pub fn tokens(&self) -> usize {
        self.layers.first().map_or(0, |l| l.len() / self.k)
    }

    /// By token: the experts of one layer.
    pub fn by_token(&self, layer: usize) -> impl DoubleEndedIterator<Item = &[u32]> + ExactSizeIterator {
        self.layers[layer].chunks_exact(self.k)
    }

    /// `[experts]` uses of a layer's experts.
    pub fn uses(&self, layer: usize) -> Vec<u64> {
        let mut uses = vec![0; self.experts];
        self.layers[layer].iter().for_each(|e| uses[*e as usize] += 1);
        uses
    }

    /// Token by token, as decoding goes: each visits layer after layer.
    pub fn trace(&self) -> Trace {
        self.trace_of(self.tokens())
    }

    /// The first so many tokens.
    pub fn trace_of(&self, tokens: usize) -> Trace {
        let mut trace = Trace::new(&vec![self.experts; self.layers.len()]);
        let each = vec![1; self.k];
        for token in 0..tokens {
            for (layer, chosen) in self.layers.iter().enumerate() {
                trace.push(layer, &chosen[token * self.k..(token + 1) * self.k], &each);
            }
        }
        trace
    }

    /// The file's bytes.
    pub fn to_bytes(&self) -> Vec<u8> {
        let tokens = self.tokens();
        let mut bytes = Vec::with_capacity(HEADER + tokens * self.layers.len() * self.k);
        bytes.extend_from_slice(MAGIC);
        for n in [self.layers.len(), self.experts, self.k, tokens] {
            bytes.extend_from_slice(&(n as u32).to_le_bytes());
        }
        for token in 0..tokens {
            for chosen in &self.layers {
                let mut before = 0;
                for &expert in &chosen[token * self.k..(token + 1) * self.k] {
                    push_leb128(&mut bytes, expert - before);
                    before = expert;
                }
            }
        }
        bytes
    }

    /// Reads what [`Recording::to_bytes`] wrote.
    ///
    /// # Errors
    /// [`Error::BadRecording`]: another kind of file or version, sizes that no model has, fewer or more bytes than the sizes say, an expert
    /// that comes twice or that the layer does not have. No more memory is taken than a few times the bytes.
    pub fn parse(bytes: &[u8]) -> Result<Recording, Error> {
        let wrong = |why: String| Error::BadRecording { why };
        // 1. the header
        let Some((header, mut rest)) = bytes.split_at_checked(HEADER).filter(|(header, _)| header.starts_with(MAGIC))
        else {
            let other = bytes.starts_with(&MAGIC[..MAGIC.len() - 1]);
            let why = if other { "another version of such a file" } else { "not a file of `eval routing --trace-out`" };
            return Err(wrong(why.into()));
        };
        let mut numbers = header[MAGIC.len()..].chunks_exact(4);
        let mut number = || numbers.next().map_or(0, |n| u32::from_le_bytes([n[0], n[1], n[2], n[3]])) as usize;
        let [layers, experts, k, tokens] = std::array::from_fn(|_| number());
        if layers == 0 || layers > MOST || experts > MOST || k == 0 || k > experts || tokens == 0 {
            return Err(wrong(format!("{tokens} tokens with {k} of {experts} experts in {layers} layers")));
        }
        // Each expert takes a byte at least.
        if (layers as u64 * k as u64).checked_mul(tokens as u64).is_none_or(|uses| uses > rest.len() as u64) {
            return Err(wrong("shorter than its header says".into()));
        }
        // 2. what each token chose
        let mut found = vec![Vec::with_capacity(tokens * k); layers];
        for token in 0..tokens {
            for (layer, chosen) in found.iter_mut().enumerate() {
                let mut before = None;
                for _ in 0..k {
                    let more = read_leb128(&mut rest).ok_or_else(|| wrong("it ends amid a token's experts".into()))?;
                    let expert = before.unwrap_or(0) + u64::from(more);
                    let place = || format!("token {token}, layer {layer}: expert {expert}");
                    if before.is_some() && more == 0 {
                        return Err(wrong(format!("{} twice", place())));
                    }
                    if expert >= experts as u64 {
                        return Err(wrong(format!("{}, but there are {experts}", place())));
                    }
                    chosen.push(expert as u32);
                    before = Some(expert);
                }
            }
        }
        if !rest.is_empty() {
            return Err(wrong(format!("{} bytes more than its header says", rest.len())));
        }
        Ok(Recording { experts, k, layers: found })
    }
}

fn push_leb128(bytes: &mut Vec<u8>, mut n: u32) {
    while n >= 0x80 {
        bytes.push(n as u8 | 0x80);
        n >>= 7;
    }
    bytes.push(n as u8);
}

/// `None` where the bytes end, and for more than 21 bits: no expert needs them.
fn read_leb128(bytes: &mut &[u8]) -> Option<u32> {
    let mut n = 0;
    for shift in [0, 7, 14] {
        let (byte, rest) = bytes.split_first()?;
        *bytes = rest;
        n |= u32::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Some(n);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn small() -> Recording {
        Recording { experts: 300, k: 3, layers: vec![vec![0, 1, 299, 2, 130, 131], vec![5, 6, 7, 0, 128, 256]] }
    }

    fn why(bytes: &[u8]) -> String {
        Recording::parse(bytes).unwrap_err().to_string()
    }

    #[test]
    fn a_recording_is_read_as_it_was_written() {
        let recording = small();
        let bytes = recording.to_bytes();
        // A byte each, and one more for each step of 128 and above: 299 after 1, 130 after 2, 128 after 0, 256 after 128.
        assert_eq!(bytes.len(), HEADER + 12 + 4);
        assert_eq!(Recording::parse(&bytes).unwrap(), recording);
        let visits: Vec<_> = recording.trace().visits().map(|(layer, wanted, _)| (layer, wanted.to_vec())).collect();
        let expected = [(0, vec![0, 1, 299]), (1, vec![5, 6, 7]), (0, vec![2, 130, 131]), (1, vec![0, 128, 256])];
        assert_eq!(visits, expected);
        assert_eq!(recording.trace_of(1).visits().count(), 2);
    }

    #[test]
    fn hostile_recordings_are_errors() {
        let good = small().to_bytes();
        assert!(why(b"{}").contains("--trace-out"));
        assert!(why(b"").contains("--trace-out"));
        let mut later = good.clone();
        later[15] = b'2';
        assert!(why(&later).contains("version"));
        assert!(why(&good[..good.len() - 1]).contains("ends amid"));
        assert!(why(&good[..HEADER + 3]).contains("shorter"));
        assert!(why(&[&good[..], &[0]].concat()).contains("1 bytes more"));
        // Sizes: none, more experts per token than there are, and what would be 2^92 bytes.
        let sized = |sizes: [u32; 4]| {
            let header = sizes.iter().flat_map(|n| n.to_le_bytes());
            [MAGIC.as_slice(), &header.collect::<Vec<u8>>(), &good[HEADER..]].concat()
        };
        for sizes in [[0, 300, 3, 2], [2, 300, 0, 2], [2, 2, 3, 2], [2, 300, 3, 0], [u32::MAX; 4]] {
            assert!(why(&sized(sizes)).contains("tokens with"), "{sizes:?}");
        }
        assert!(why(&sized([65536, 65536, 65536, u32::MAX])).contains("shorter"));
        assert!(why(&sized([2, 299, 3, 2])).contains("expert 299, but there are 299"));
        // A file with the same expert twice, and one with a number that does not end.
        let mut twice = good.clone();
        twice[HEADER + 1] = 0;
        assert!(why(&twice).contains("expert 0 twice"));
        let mut endless = good.clone();
        endless[HEADER..HEADER + 4].fill(0xff);
        assert!(why(&endless).contains("ends amid"));
    }

    proptest! {
        #[test]
        fn any_recording_survives_its_file(
            tokens in proptest::collection::vec(proptest::collection::btree_set(0u32..20_000, 2), 2..20),
        ) {
            let all: Vec<u32> = tokens.iter().flatten().copied().collect();
            let half = all.len() / 4 * 2;
            let recording = Recording { experts: 20_000, k: 2, layers: vec![all[..half].to_vec(), all[half..2 * half].to_vec()] };
            prop_assert_eq!(Recording::parse(&recording.to_bytes()).unwrap(), recording);
        }
    }
}
