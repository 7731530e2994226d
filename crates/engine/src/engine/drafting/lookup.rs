//! The n-gram drafter: an index for each sequence, in which its siblings look, too.

use sluice_cache::BlockHash;

use super::drafter::{DraftRequest, DraftWork, Drafter, EngineParts};
use crate::draft::{DrafterKind, Ngram};
use crate::schedule::sequence::{Sequence, SequenceId};

/// Siblings are sequences whose prompts begin with the same tokens, so many at least.
const COMMON: usize = 32;
/// A look-up goes through so many of them, the newest.
const MOST_SIBLINGS: usize = 8;
/// A match of so many tokens in the own text needs no other.
const CERTAIN: usize = 16;

/// What a sequence has seen.
struct Seen {
    id: SequenceId,
    /// The root and the beginning of its prompt; `None`: it has no siblings. Those with other roots must not see each other's texts.
    family: Option<(BlockHash, [u32; COMMON])>,
    index: Ngram,
}

/// Drafts by look-up, which takes no time to speak of.
#[derive(Default)]
pub(super) struct Lookup {
    /// Newest last.
    seen: Vec<Seen>,
}

impl Drafter for Lookup {
    fn kind(&self) -> DrafterKind {
        DrafterKind::Ngram
    }

    fn begin(&mut self, s: &Sequence, prediction: &[u32], most: usize) {
        self.end(s.id);
        // No answer is longer.
        let prediction = &prediction[..prediction.len().min(most - s.tokens.len())];
        let beginning = s.tokens.first_chunk().filter(|_| s.shares);
        let family = beginning.map(|tokens| (s.root, *tokens));
        self.seen.push(Seen { id: s.id, family, index: Ngram::new(&s.tokens, prediction, most) });
    }

    fn end(&mut self, id: SequenceId) {
        self.seen.retain(|seen| seen.id != id);
    }

    fn behind(&self, s: &Sequence) -> Option<usize> {
        self.seen.iter().any(|seen| seen.id == s.id).then_some(0)
    }

    fn propose(&mut self, asked: &[DraftRequest], parts: &mut EngineParts) -> DraftWork {
        for ask in asked {
            let s = &mut parts.sequences[ask.sequence];
            let (Some(at), Some(drafts)) = (self.seen.iter().position(|seen| seen.id == s.id), &mut s.drafts) else {
                continue;
            };
            let mut known = self.seen[at].index.propose(&s.tokens, ask.most, &mut drafts.draft);
            drafts.by = DrafterKind::Ngram;
            let own = &self.seen[at];
            if own.family.is_none() {
                continue;
            }
            let siblings = self.seen.iter().rev().filter(|seen| seen.id != own.id && seen.family == own.family);
            for sibling in siblings.take(MOST_SIBLINGS) {
                if known >= CERTAIN {
                    break;
                }
                known = sibling.index.propose_for(&s.tokens, ask.most, known, &mut drafts.draft);
            }
        }
        DraftWork::default()
    }
}
