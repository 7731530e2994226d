//! Tokens, their types and scores, checked against each other.

use std::borrow::Cow;
use std::collections::HashMap;
use std::collections::hash_map::Entry;

use anyhow::{Result, anyhow};

use super::super::metadata::Metadata;
use super::keys::{ARCHITECTURE, MODEL};

const TOKENS: &str = "tokenizer.ggml.tokens";
const TYPES: &str = "tokenizer.ggml.token_type";
const SCORES: &str = "tokenizer.ggml.scores";
const MERGES: &str = "tokenizer.ggml.merges";

/// The score that converters give to every added token, instead of its own.
const SCORE_OF_ADDED: f32 = -1000.0;

/// SentencePiece's space.
pub(super) const SPACE: &str = "\u{2581}";

/// What tokens are made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// `gpt2`: bytes, written in GPT-2's alphabet, with merges.
    ByteLevel,
    /// `llama`: SentencePiece's pieces, whose scores say in which order they merge.
    Pieces,
    /// `gemma4`: pieces with merges.
    MergedPieces,
}

/// What a token is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TokenType {
    Normal,
    Unknown,
    Control,
    UserDefined,
    Unused,
    Byte,
}

/// A vocabulary. Ids are positions.
pub(super) struct Vocabulary<'a> {
    pub kind: Kind,
    /// Whether it is of Gemma's family, whose `tokenizer.json` is made in its own way.
    pub is_gemma: bool,
    pub tokens: Vec<Cow<'a, str>>,
    /// One for each token.
    pub types: Vec<TokenType>,
    /// One for each token, if `kind` is [`Kind::Pieces`] and the whole vocabulary was read.
    pub scores: Vec<f32>,
    /// By rank; empty if `kind` is [`Kind::Pieces`], or only the tokens were read.
    pub merges: Vec<(&'a str, &'a str)>,
}

impl<'a> Vocabulary<'a> {
    /// The tokens alone, without scores and merges.
    ///
    /// # Errors
    /// Keys that are missing, of another type or length, or hold no UTF-8; another kind of vocabulary.
    pub fn tokens(metadata: &'a Metadata) -> Result<Vocabulary<'a>> {
        let mut vocabulary = Vocabulary::read(metadata)?;
        vocabulary.repair();
        Ok(vocabulary)
    }

    /// All of it.
    ///
    /// # Errors
    /// As for [`Vocabulary::tokens`].
    pub fn whole(metadata: &'a Metadata) -> Result<Vocabulary<'a>> {
        let mut vocabulary = Vocabulary::read(metadata)?;
        if vocabulary.kind == Kind::Pieces {
            vocabulary.read_scores(metadata)?;
        } else {
            vocabulary.read_merges(metadata)?;
        }
        vocabulary.repair();
        Ok(vocabulary)
    }

    /// Whether metadata has one. `no_vocab` says that there is none.
    pub fn is_in(metadata: &Metadata) -> bool {
        metadata.get(MODEL).is_some() && metadata.string(MODEL).ok().flatten() != Some("no_vocab")
    }

    fn read(metadata: &'a Metadata) -> Result<Vocabulary<'a>> {
        // 1. which kind
        let kind = match metadata.string(MODEL)?.ok_or_else(|| metadata.wrong(MODEL, "is missing"))? {
            "gpt2" => Kind::ByteLevel,
            "llama" => Kind::Pieces,
            "gemma4" => Kind::MergedPieces,
            other => {
                let known =
                    format!("is {other:?}, a kind of tokenizer that is not supported (gpt2, llama, gemma4 are)");
                return Err(metadata.wrong(MODEL, &known));
            }
        };
        let is_gemma = metadata.string(ARCHITECTURE)?.is_some_and(|name| name.starts_with("gemma"));

        // 2. tokens and their types
        let strings = metadata.strings(TOKENS)?.ok_or_else(|| metadata.wrong(TOKENS, "is missing"))?;
        let mut tokens = Vec::with_capacity(strings.len());
        for (id, bytes) in strings.iter().enumerate() {
            let text = std::str::from_utf8(bytes)
                .map_err(|_| metadata.wrong(TOKENS, &format!("has a token that is no UTF-8: {id}")))?;
            // Ids are positions, so an empty one needs some name.
            tokens.push(if text.is_empty() { Cow::Owned(format!("[EMPTY_{id}]")) } else { Cow::Borrowed(text) });
        }
        let count = tokens.len();
        if count == 0 || u32::try_from(count).is_err() {
            return Err(metadata.wrong(TOKENS, &format!("has {count} tokens")));
        }
        let mut types = match metadata.integers(TYPES)? {
            None => vec![TokenType::Normal; count],
            Some(numbers) => numbers.into_iter().map(token_type).collect(),
        };
        types.truncate(count);
        same_length(metadata, TYPES, types.len(), count)?;
        Ok(Vocabulary { kind, is_gemma, tokens, types, scores: Vec::new(), merges: Vec::new() })
    }

    fn read_scores(&mut self, metadata: &Metadata) -> Result<()> {
        self.scores = metadata.floats(SCORES)?.ok_or_else(|| metadata.wrong(SCORES, "is missing"))?;
        self.scores.truncate(self.tokens.len());
        same_length(metadata, SCORES, self.scores.len(), self.tokens.len())
    }

    fn read_merges(&mut self, metadata: &'a Metadata) -> Result<()> {
        let lines = metadata.strings(MERGES)?.ok_or_else(|| metadata.wrong(MERGES, "is missing"))?;
        for (rank, line) in lines.iter().enumerate() {
            // A token may begin with a space.
            let split = |line: &'a str| {
                let first = line.chars().next()?.len_utf8();
                let at = first + line[first..].find(' ')?;
                Some((&line[..at], &line[at + 1..])).filter(|(_, right)| !right.is_empty())
            };
            let merge = std::str::from_utf8(line).ok().and_then(split);
            self.merges.push(merge.ok_or_else(|| {
                let shown = String::from_utf8_lossy(line);
                metadata.wrong(MERGES, &format!("has no two tokens in merge {rank}: {shown:?}"))
            })?);
        }
        Ok(())
    }

    /// Undoes what converters change.
    fn repair(&mut self) {
        self.drop_padding();
        if self.is_gemma && self.kind == Kind::Pieces {
            self.respell_gemma();
        }
    }

    /// Converters fill a vocabulary up to the rows of the embedding. The model's own tokenizer does not know these tokens.
    fn drop_padding(&mut self) {
        let kept = self.types.iter().rposition(|kind| *kind != TokenType::Unused).map_or(0, |last| last + 1);
        let is_padding = |id: usize| self.tokens[id].as_ref() == format!("[PAD{id}]");
        let last = (kept..self.tokens.len()).rev().take_while(|&id| is_padding(id)).last();
        let len = last.unwrap_or(self.tokens.len());
        self.tokens.truncate(len);
        self.types.truncate(len);
        self.scores.truncate(len.min(self.scores.len()));
    }

    /// Gives Gemma's added tokens back what converters took: runs of spaces are written as spaces, and scores are lost. In Gemma's own vocabulary these tokens
    /// have the best score, zero. A tab without a token of its own is the token of its byte.
    fn respell_gemma(&mut self) {
        for token in &mut self.tokens {
            if token.len() > 1 && token.bytes().all(|byte| byte == b' ') {
                *token = Cow::Owned(SPACE.repeat(token.len()));
            }
        }
        for (score, kind) in self.scores.iter_mut().zip(&self.types) {
            if *kind != TokenType::Normal && *score == SCORE_OF_ADDED {
                *score = 0.0;
            }
        }
        if !self.tokens.iter().any(|token| token == "\t")
            && let Some(tab) = self.tokens.iter_mut().find(|token| *token == "<0x09>")
        {
            *tab = Cow::Borrowed("\t");
        }
    }

    /// Ids by text.
    ///
    /// # Errors
    /// Two tokens with the same text.
    pub fn ids(&self, metadata: &Metadata) -> Result<HashMap<&str, u32>> {
        let mut ids = HashMap::with_capacity(self.tokens.len());
        for (token, id) in self.tokens.iter().zip(0..) {
            match ids.entry(token.as_ref()) {
                Entry::Vacant(free) => _ = free.insert(id),
                Entry::Occupied(other) => return Err(twice(metadata, token, *other.get(), id)),
            }
        }
        Ok(ids)
    }
}

fn twice(metadata: &Metadata, token: &str, first: u32, second: u32) -> anyhow::Error {
    metadata.wrong(TOKENS, &format!("has the token {token:?} twice, as {first} and {second}"))
}

fn token_type(number: i64) -> TokenType {
    match number {
        2 => TokenType::Unknown,
        3 => TokenType::Control,
        4 => TokenType::UserDefined,
        5 => TokenType::Unused,
        6 => TokenType::Byte,
        _ => TokenType::Normal,
    }
}

fn same_length(metadata: &Metadata, key: &str, found: usize, tokens: usize) -> Result<()> {
    if found == tokens {
        return Ok(());
    }
    Err(anyhow!(metadata.wrong(key, &format!("has {found} entries for {tokens} tokens"))))
}
