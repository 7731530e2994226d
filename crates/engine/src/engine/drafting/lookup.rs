//! The n-gram drafter: an index for each sequence.

use std::collections::HashMap;

use super::drafter::{DraftRequest, DraftWork, Drafter, EngineParts};
use crate::draft::{DrafterKind, Ngram};
use crate::schedule::sequence::{Sequence, SequenceId};

/// Drafts by look-up, which takes no time to speak of.
#[derive(Default)]
pub(super) struct Lookup {
    indices: HashMap<SequenceId, Ngram>,
}

impl Drafter for Lookup {
    fn kind(&self) -> DrafterKind {
        DrafterKind::Ngram
    }

    fn begin(&mut self, s: &Sequence, prediction: &[u32], most: usize) {
        // No answer is longer.
        let prediction = &prediction[..prediction.len().min(most - s.tokens.len())];
        self.indices.insert(s.id, Ngram::new(&s.tokens, prediction, most));
    }

    fn end(&mut self, id: SequenceId) {
        self.indices.remove(&id);
    }

    fn behind(&self, s: &Sequence) -> Option<usize> {
        self.indices.contains_key(&s.id).then_some(0)
    }

    fn propose(&mut self, asked: &[DraftRequest], parts: &mut EngineParts) -> DraftWork {
        for ask in asked {
            let s = &mut parts.sequences[ask.sequence];
            if let (Some(index), Some(drafts)) = (self.indices.get_mut(&s.id), &mut s.drafts) {
                index.propose(&s.tokens, ask.most, &mut drafts.draft);
                drafts.by = DrafterKind::Ngram;
            }
        }
        DraftWork::default()
    }
}
