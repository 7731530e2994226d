//! Our tokenizer's tokens as llguidance wants them: their bytes, and what a text that must come is made of.

use std::sync::Arc;

use anyhow::{Result, ensure};
use toktrie::{INVALID_TOKEN, TokRxInfo, TokTrie, TokenId, TokenizerEnv};

use crate::text::Tokenizer;

pub struct Vocabulary {
    tokenizer: Arc<Tokenizer>,
    trie: TokTrie,
}

impl Vocabulary {
    /// `stops` end an answer.
    ///
    /// # Errors
    /// A tokenizer whose tokens are no runs of bytes.
    pub fn new(tokenizer: &Arc<Tokenizer>, stops: &[u32]) -> Result<Vocabulary> {
        ensure!(
            tokenizer.is_byte_level(),
            "answers of a given form need a byte-level tokenizer, and this model has another"
        );
        let count = tokenizer.vocab_size();
        let words: Vec<Vec<u8>> = (0..count as u32).map(|id| word(tokenizer, id)).collect();
        let stops: Vec<u32> = stops.iter().copied().filter(|id| (*id as usize) < count).collect();
        let first = stops.first().copied().unwrap_or(INVALID_TOKEN);
        let mut trie = TokTrie::from(&TokRxInfo::new(count as u32, first), &words);
        if stops.len() > 1 {
            trie = trie.with_eos_tokens(&stops);
        }
        Ok(Vocabulary { tokenizer: Arc::clone(tokenizer), trie })
    }
}

/// A control token is no text: its name behind a mark that no text has.
fn word(tokenizer: &Tokenizer, id: u32) -> Vec<u8> {
    let mut bytes = tokenizer.bytes(id).unwrap_or_default();
    if !bytes.is_empty() && tokenizer.is_control(id) {
        bytes.insert(0, TokTrie::SPECIAL_TOKEN_MARKER);
    }
    bytes
}

impl TokenizerEnv for Vocabulary {
    fn tok_trie(&self) -> &TokTrie {
        &self.trie
    }

    /// As the tokenizer cuts it where that gives these very bytes (it may normalise them), else by the longest tokens.
    fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<TokenId> {
        let exact = |tokens: &Vec<u32>| {
            let of = tokens.iter().flat_map(|id| self.tokenizer.bytes(*id).unwrap_or_default());
            of.eq(bytes.iter().copied()) && !tokens.iter().any(|id| self.tokenizer.is_control(*id))
        };
        let text = std::str::from_utf8(bytes).ok();
        let tokens = text.and_then(|text| self.tokenizer.encode(text, false).ok()).filter(exact);
        tokens.unwrap_or_else(|| self.trie.greedy_tokenize(bytes))
    }
}
