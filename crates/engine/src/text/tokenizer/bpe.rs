//! Byte-pair encoding over a compiled [`Image`]. It gives the same tokens as the library's model, and has nothing to parse at the start.

use super::image::Image;
use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::sync::Mutex;
use tokenizers::{Result, Token};

/// The tokens of characters below this are looked up once, at the start. It covers the byte-level alphabet.
const ALPHABET: u32 = 0x180;
/// Words whose tokens are cached, at most.
const MEMORY: usize = 10_000;
/// Bytes of a word that is cached, at most.
const MEMORABLE: usize = 64;

/// A byte-pair model.
pub(super) struct Bpe {
    image: Image,
    alphabet: Vec<Option<u32>>,
    /// The token of each byte, if bytes stand for characters that are not in the vocabulary.
    bytes: Option<Vec<Option<u32>>>,
    /// A cache: word -> tokens. A thread that finds it locked does without.
    memory: Mutex<HashMap<Box<str>, Box<[Part]>>>,
}

/// A token of a word, and its length in bytes.
type Part = (u32, u32);

/// A part of a word during merging, in a doubly linked list.
struct Symbol {
    token: u32,
    /// Length in bytes; 0 after it was merged into the one before it.
    len: u32,
    before: u32,
    after: u32,
}

const NONE: u32 = u32::MAX;

/// A merge that was possible when it was queued. Ordered by rank, then from the left.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Offer {
    rank: u32,
    at: u32,
    left: u32,
    right: u32,
    /// The merged token.
    token: u32,
}

impl Bpe {
    pub fn new(image: Image) -> Self {
        let mut buffer = [0; 4];
        let alphabet = (0..ALPHABET).map(|c| image.id(char::from_u32(c)?.encode_utf8(&mut buffer))).collect();
        let bytes = (0..=u8::MAX).map(|byte| image.id(&format!("<0x{byte:02X}>"))).collect();
        let bytes = Some(bytes).filter(|_| image.fallback().to_bytes);
        Self { image, alphabet, bytes, memory: Mutex::default() }
    }

    /// The tokens of one word of the pre-tokeniser.
    pub fn tokenize(&self, word: &str) -> Result<Vec<Token>> {
        if word.len() > MEMORABLE {
            return Ok(tokens(&self.parts(word)?));
        }
        if let Ok(memory) = self.memory.try_lock()
            && let Some(parts) = memory.get(word)
        {
            return Ok(tokens(parts));
        }
        let parts = self.parts(word)?;
        let tokens = tokens(&parts);
        if let Ok(mut memory) = self.memory.try_lock()
            && memory.len() < MEMORY
        {
            memory.insert(word.into(), parts.into());
        }
        Ok(tokens)
    }

    fn parts(&self, word: &str) -> Result<Vec<Part>> {
        if self.image.ignores_merges()
            && let Some(id) = self.image.id(word)
        {
            return Ok(vec![(id, u32::try_from(word.len())?)]);
        }
        let mut symbols = self.symbols(word)?;
        self.merge_all(&mut symbols);
        Ok(symbols.iter().filter(|s| s.len > 0).map(|s| (s.token, s.len)).collect())
    }

    /// The characters of `word` as tokens. Characters that the vocabulary lacks become bytes, or the unknown token, or are left out, as in the library.
    fn symbols(&self, word: &str) -> Result<Vec<Symbol>> {
        u32::try_from(word.len())?; // so that positions and lengths fit
        let mut symbols: Vec<Symbol> = Vec::with_capacity(word.len());
        let mut push = |token: u32, len: u32| {
            let i = symbols.len() as u32;
            symbols.push(Symbol { token, len, before: i.wrapping_sub(1), after: i + 1 });
        };
        let fallback = self.image.fallback();
        // An unknown token that may grow. As in the library, bytes do not end it.
        let mut unknown: Option<(u32, u32)> = None;
        let mut buffer = [0; 4];
        for c in word.chars() {
            let token = match self.alphabet.get(c as usize) {
                Some(token) => *token,
                None => self.image.id(c.encode_utf8(&mut buffer)),
            };
            let len = c.len_utf8() as u32;
            if let Some(token) = token {
                if let Some((token, len)) = unknown.take() {
                    push(token, len);
                }
                push(token, len);
            } else if let Some(tokens) = self.bytes_of(c) {
                tokens.into_iter().for_each(|token| push(token, 1));
            } else if let Some(token) = fallback.unknown {
                match &mut unknown {
                    Some((_, whole)) if fallback.fuse => *whole += len,
                    last => {
                        if let Some((token, len)) = last.replace((token, len)) {
                            push(token, len);
                        }
                    }
                }
            }
        }
        if let Some((token, len)) = unknown {
            push(token, len);
        }
        if let Some(last) = symbols.last_mut() {
            last.after = NONE;
        }
        Ok(symbols)
    }

    /// The tokens of a character's bytes, if all of them are there.
    fn bytes_of(&self, c: char) -> Option<Vec<u32>> {
        let tokens = self.bytes.as_ref()?;
        c.encode_utf8(&mut [0; 4]).bytes().map(|byte| tokens[usize::from(byte)]).collect()
    }

    /// Applies merges: always the one with the lowest rank, and the leftmost of equal ones.
    fn merge_all(&self, symbols: &mut [Symbol]) {
        let offer = |symbols: &[Symbol], at: u32| {
            let (left, after) = (symbols[at as usize].token, symbols[at as usize].after);
            if after == NONE {
                return None;
            }
            let right = symbols[after as usize].token;
            let (rank, token) = self.image.merge(left, right)?;
            Some(Reverse(Offer { rank, at, left, right, token }))
        };
        let mut queue: BinaryHeap<_> = (0..symbols.len() as u32).filter_map(|at| offer(symbols, at)).collect();
        while let Some(Reverse(Offer { at, left, right, token, .. })) = queue.pop() {
            let symbol = &symbols[at as usize];
            let after = symbol.after;
            // Either of them may have been merged with another token since.
            if symbol.len == 0 || symbol.token != left || after == NONE || symbols[after as usize].token != right {
                continue;
            }
            let (before, beyond) = (symbol.before, symbols[after as usize].after);
            let len = std::mem::take(&mut symbols[after as usize].len);
            let symbol = &mut symbols[at as usize];
            (symbol.token, symbol.len, symbol.after) = (token, symbol.len + len, beyond);
            if beyond != NONE {
                symbols[beyond as usize].before = at;
            }
            if before != NONE {
                queue.extend(offer(symbols, before));
            }
            queue.extend(offer(symbols, at));
        }
    }

    pub fn token_to_id(&self, token: &str) -> Option<u32> {
        self.image.id(token)
    }

    pub fn id_to_token(&self, id: u32) -> Option<String> {
        self.image.text(id).map(str::to_owned)
    }

    pub fn vocab_size(&self) -> usize {
        self.image.len()
    }
}

/// The parts as tokens of the library. Their texts are not needed for ids and stay empty.
fn tokens(parts: &[Part]) -> Vec<Token> {
    let mut end = 0;
    let token = |(id, len): &Part| {
        let start = end;
        end += *len as usize;
        Token::new(*id, String::new(), (start, end))
    };
    parts.iter().map(token).collect()
}
