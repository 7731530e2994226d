//! Special tokens: which begin and end a text, which end an answer, and which are added ones.

use anyhow::Result;

use super::super::metadata::Metadata;
use super::keys::EOS;
use super::pre_tokenizer;
use super::vocabulary::{Kind, TokenType, Vocabulary};

const BOS: &str = "tokenizer.ggml.bos_token_id";
const EOT: &str = "tokenizer.ggml.eot_token_id";
const EOM: &str = "tokenizer.ggml.eom_token_id";
const UNKNOWN: &str = "tokenizer.ggml.unknown_token_id";
const PADDING: &str = "tokenizer.ggml.padding_token_id";
const ADD_BOS: &str = "tokenizer.ggml.add_bos_token";
const ADD_EOS: &str = "tokenizer.ggml.add_eos_token";

/// Control tokens that end an answer in the families that have them. Files name one end at most, of a text or of a turn, but chats need both.
const ENDS: [&str; 14] = [
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<end_of_turn>",
    "<turn|>",
    "<|tool_response>",
    "<end_of_utterance>",
    "<EOT>",
    "<\u{FF5C}end\u{2581}of\u{2581}sentence\u{FF5C}>",
];

/// The special tokens of a vocabulary. Ids outside it are left out, as llama.cpp does: a few converted files have such padding.
pub(super) struct Special {
    pub bos: Option<u32>,
    pub eos: Option<u32>,
    pub unknown: Option<u32>,
    pub padding: Option<u32>,
    /// Whether a text begins with `bos`, unless its template says so itself.
    pub add_bos: bool,
    /// Whether a text ends with `eos`.
    pub add_eos: bool,
    /// What ends an answer, ascending.
    pub ends: Vec<u32>,
}

impl Special {
    /// # Errors
    /// Keys of another type.
    pub fn read(metadata: &Metadata, vocabulary: &Vocabulary) -> Result<Special> {
        let count = vocabulary.tokens.len() as u64;
        let id = |key: &str, default: Option<u64>| {
            let named = metadata.unsigned(key)?.filter(|id| *id < count).or(default.filter(|id| *id < count));
            anyhow::Ok(named.map(|id| id as u32))
        };
        // Old SentencePiece files leave these out.
        let of_pieces = |id: u64| Some(id).filter(|_| vocabulary.kind == Kind::Pieces);
        let (bos, eos) = (id(BOS, of_pieces(1))?, id(EOS, of_pieces(2))?);
        let (unknown, padding) = (id(UNKNOWN, of_pieces(0))?, id(PADDING, None)?);

        // 1. what is put around a text
        let add_bos = match vocabulary.kind {
            Kind::ByteLevel => metadata.flag(ADD_BOS)?.unwrap_or(pre_tokenizer::named(metadata)?.adds_bos),
            Kind::Pieces => metadata.flag(ADD_BOS)?.unwrap_or(true),
            // The flag is wrong in files of this kind: without it the model does not continue a text. Its template writes the token itself.
            Kind::MergedPieces => true,
        };
        let add_eos = metadata.flag(ADD_EOS)?.unwrap_or(false);

        // 2. what ends an answer
        let mut ends: Vec<u32> = [eos, id(EOT, None)?, id(EOM, None)?].into_iter().flatten().collect();
        let found = (0..count as u32).filter(|&id| {
            vocabulary.types[id as usize] != TokenType::UserDefined
                && ENDS.contains(&vocabulary.tokens[id as usize].as_ref())
        });
        ends.extend(found);
        // gpt-oss ends each part of an answer with <|end|>, and goes on.
        let is = |id: u32, text: &str| vocabulary.tokens[id as usize] == text;
        let has = |text: &str| ends.iter().any(|id| is(*id, text));
        if has("<|return|>") && has("<|call|>") {
            ends.retain(|id| !is(*id, "<|end|>") || Some(*id) == eos);
        }
        ends.sort_unstable();
        ends.dedup();
        Ok(Special { bos, eos, unknown, padding, add_bos, add_eos, ends })
    }

    /// Added tokens, which are found in a text before anything else: their ids, and whether they are special (left out of a text that is shown).
    pub fn added(&self, vocabulary: &Vocabulary) -> Vec<(u32, bool)> {
        let named = [self.bos, self.eos, self.unknown, self.padding];
        let kind_of = |id: u32| match vocabulary.types[id as usize] {
            TokenType::Control | TokenType::Unknown => Some(true),
            // A file without types, or with wrong ones.
            TokenType::Normal if named.contains(&Some(id)) || self.ends.contains(&id) => Some(true),
            TokenType::UserDefined => Some(false),
            TokenType::Normal | TokenType::Unused | TokenType::Byte => None,
        };
        (0..vocabulary.tokens.len() as u32).filter_map(|id| Some((id, kind_of(id)?))).collect()
    }
}
