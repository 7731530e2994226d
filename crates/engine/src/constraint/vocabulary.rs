//! The tokenizer's vocabulary for llguidance.

use std::sync::Arc;

use anyhow::{Result, ensure};
use toktrie::{INVALID_TOKEN, TokRxInfo, TokTrie, TokenId, TokenizerEnv};

use crate::text::Tokenizer;

/// Tokens as bytes, and the tokenizer for texts that a grammar forces.
pub struct Vocabulary {
    tokenizer: Arc<Tokenizer>,
    trie: TokTrie,
}

impl Vocabulary {
    /// For a tokenizer, and the tokens that end an answer.
    ///
    /// # Errors
    /// A tokenizer that is not byte-level.
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

/// The bytes of a token. A control token is its name after a marker that no text has.
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

    /// The tokenizer's tokens, if they give exactly these bytes, since it may normalise them. Otherwise the longest tokens.
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
