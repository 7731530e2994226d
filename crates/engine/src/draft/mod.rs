//! Drafts: tokens that probably come next, computed in one step with the token before them.
//!
//! A step gives a row of logits for each of them. The sampler draws position by position, exactly as without drafts, and stops where a drawn token is not the
//! drafted one. What was computed beyond is cut. So drafts decide how many tokens a step gives, and never which.

mod acceptance;
mod drafter;
mod governor;
mod ngram;
mod options;
mod stats;

pub(crate) use acceptance::Acceptance;
pub(crate) use drafter::{Draft, Drafter};
pub(crate) use governor::{Candidate, Governor};
pub(crate) use ngram::{BYTES_PER_TOKEN, Ngram};
pub use options::{DraftOptions, DrafterChoice};
pub use stats::{DraftCounts, DraftStats};

/// Drafted tokens of a step at most, of all sequences together. Scratch memory is set aside for their logits.
pub(crate) const MAX_STEP_DRAFTS: usize = 32;

/// Bytes of recurrent states within drafts that are kept during a step, at most: one for each drafted token.
pub(crate) const MAX_STATE_BYTES: usize = 256 << 20;

/// What a sequence has of drafts.
pub(crate) struct SequenceDrafts {
    pub drafter: Box<dyn Drafter>,
    /// What the drafter proposes behind the sequence's tokens.
    pub draft: Draft,
    /// How often its proposals came true.
    pub acceptance: Acceptance,
    /// Counts since the generation was started.
    pub counts: DraftCounts,
}

impl SequenceDrafts {
    pub fn new(drafter: Box<dyn Drafter>, most: usize, prior: &Acceptance) -> SequenceDrafts {
        let draft = Draft::with_capacity(most);
        SequenceDrafts { drafter, draft, acceptance: prior.clone(), counts: DraftCounts::default() }
    }

    /// How many tokens of the draft's beginning are `tokens`, the sequence's newest.
    pub fn agreed(&self, tokens: &[u32]) -> usize {
        self.draft.tokens.iter().zip(tokens).take_while(|(drafted, came)| drafted == came).count()
    }
}
