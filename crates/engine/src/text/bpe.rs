//! Byte-pair encoding over a compiled [`Image`]: the same tokens as the library's own model gives, with nothing to parse before the first.

use super::image::Image;
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use tokenizers::{Result, Token};

/// Characters below this have their token looked up once, at the start: the byte-level alphabet lies there.
const ALPHABET: u32 = 0x180;

/// A byte-pair model.
pub(super) struct Bpe {
    image: Image,
    alphabet: Vec<Option<u32>>,
}

/// A part of a word, in a list linked in both directions.
struct Symbol {
    token: u32,
    /// Length in bytes; 0 once it was merged into the one before it.
    len: usize,
    before: usize,
    after: usize,
}

const NONE: usize = usize::MAX;

impl Bpe {
    pub fn new(image: Image) -> Self {
        let mut buffer = [0; 4];
        let alphabet = (0..ALPHABET).map(|c| image.id(char::from_u32(c)?.encode_utf8(&mut buffer))).collect();
        Self { image, alphabet }
    }

    /// The characters of `word` as tokens. One that the vocabulary lacks is left out, as the library does without an unknown token.
    fn symbols(&self, word: &str) -> Vec<Symbol> {
        let mut symbols: Vec<Symbol> = Vec::with_capacity(word.len());
        let mut buffer = [0; 4];
        for c in word.chars() {
            let token = match self.alphabet.get(c as usize) {
                Some(token) => *token,
                None => self.image.id(c.encode_utf8(&mut buffer)),
            };
            if let Some(token) = token {
                let i = symbols.len();
                symbols.push(Symbol { token, len: c.len_utf8(), before: i.wrapping_sub(1), after: i + 1 });
            }
        }
        if let Some(last) = symbols.last_mut() {
            last.after = NONE;
        }
        symbols
    }

    /// Carries out the merges: always the one of lowest rank, of equals the leftmost.
    fn merge_all(&self, symbols: &mut [Symbol]) {
        // (rank, position, token of the two together)
        let mut queue: BinaryHeap<Reverse<(u32, usize, u32)>> = BinaryHeap::with_capacity(symbols.len());
        let offer = |queue: &mut BinaryHeap<_>, symbols: &[Symbol], at: usize| {
            let after = symbols[at].after;
            if after != NONE
                && let Some((rank, token)) = self.image.merge(symbols[at].token, symbols[after].token)
            {
                queue.push(Reverse((rank, at, token)));
            }
        };
        for at in 0..symbols.len() {
            offer(&mut queue, symbols, at);
        }
        while let Some(Reverse((rank, at, token))) = queue.pop() {
            // An entry may be older than a merge of one of its two.
            let after = symbols[at].after;
            if symbols[at].len == 0
                || after == NONE
                || self.image.merge(symbols[at].token, symbols[after].token) != Some((rank, token))
            {
                continue;
            }
            let beyond = symbols[after].after;
            symbols[at].token = token;
            symbols[at].len += std::mem::take(&mut symbols[after].len);
            symbols[at].after = beyond;
            if beyond != NONE {
                symbols[beyond].before = at;
            }
            if symbols[at].before != NONE {
                offer(&mut queue, symbols, symbols[at].before);
            }
            offer(&mut queue, symbols, at);
        }
    }

    /// The tokens of one word of the pre-tokeniser's.
    pub fn tokenize(&self, word: &str) -> Result<Vec<Token>> {
        // Nobody reads a token's text on the way to ids, so it is left empty.
        let token = |id: u32, start: usize, len: usize| Token::new(id, String::new(), (start, start + len));
        if self.image.ignores_merges()
            && let Some(id) = self.image.id(word)
        {
            return Ok(vec![token(id, 0, word.len())]);
        }
        let mut symbols = self.symbols(word);
        self.merge_all(&mut symbols);
        let mut start = 0;
        let left = symbols.iter().filter(|symbol| symbol.len > 0);
        Ok(left
            .map(|symbol| {
                start += symbol.len;
                token(symbol.token, start - symbol.len, symbol.len)
            })
            .collect())
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
