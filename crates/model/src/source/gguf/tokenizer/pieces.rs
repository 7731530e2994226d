//! The merges of a SentencePiece vocabulary.
//!
//! SentencePiece merges the pair whose piece has the best score. A `tokenizer.json` says the same with a list: each way to make a piece of two others, the
//! best piece first. Ways with equal scores are ordered as the models' own files order them, because that decides how runs of one character are cut.

use std::cmp::Reverse;
use std::collections::HashMap;

use anyhow::Result;

use super::super::metadata::Metadata;
use super::vocabulary::Vocabulary;

/// Steps that finding merges may take: the sum of the squares of all lengths. The largest known vocabularies take a fortieth of it.
const MAX_STEPS: u64 = 1 << 30;

/// A way to make a piece.
struct Way {
    /// Ids of its halves.
    halves: (u32, u32),
    /// Their lengths in characters.
    chars: (u32, u32),
    score: f32,
    piece: u32,
    /// Bytes of the left half.
    at: u32,
}

/// All merges, by rank.
///
/// # Errors
/// Pieces that are too long.
pub(super) fn merges<'v>(
    metadata: &Metadata,
    vocabulary: &'v Vocabulary,
    ids: &HashMap<&str, u32>,
) -> Result<Vec<(&'v str, &'v str)>> {
    let steps =
        vocabulary.tokens.iter().fold(0u64, |n, token| n.saturating_add((token.len() as u64).saturating_pow(2)));
    if steps > MAX_STEPS {
        return Err(metadata.wrong("tokenizer.ggml.tokens", "has pieces that are too long to find their merges"));
    }
    let mut ways = Vec::new();
    for (piece, id) in vocabulary.tokens.iter().zip(0..) {
        let begin = ways.len();
        // -0 and 0 are the same score.
        let score = vocabulary.scores[id as usize] + 0.0;
        let length = piece.chars().count() as u32;
        for ((at, _), before) in piece.char_indices().zip(0..).skip(1) {
            let (left, right) = piece.split_at(at);
            if let Some(&left) = ids.get(left)
                && let Some(&right) = ids.get(right)
            {
                let chars = (before, length - before);
                ways.push(Way { halves: (left, right), chars, score, piece: id, at: at as u32 });
            }
        }
        ways[begin..].sort_by_key(|way| way.halves);
    }
    // Both are stable, and keep the order of pieces.
    if vocabulary.is_gemma {
        ways.sort_by(|a, b| b.score.total_cmp(&a.score).then_with(|| Reverse(a.chars).cmp(&Reverse(b.chars))));
    } else {
        ways.sort_by(|a, b| b.score.total_cmp(&a.score));
    }
    let halves = |way: &Way| vocabulary.tokens[way.piece as usize].split_at(way.at as usize);
    Ok(ways.iter().map(halves).collect())
}
