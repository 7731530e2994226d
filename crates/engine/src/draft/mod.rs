//! Drafts: tokens that probably come next, computed in one step with the token before them.
//!
//! A step gives a row of logits for each of them. The sampler draws position by position, exactly as without drafts, and stops where a drawn token is not the
//! drafted one. What was computed beyond is cut. So drafts decide how many tokens a step gives, and never which.

mod acceptance;
mod costs;
mod governor;
mod ngram;
mod options;
mod proposal;
mod stats;

pub(crate) use acceptance::Acceptance;
pub(crate) use costs::DraftCosts;
pub(crate) use governor::{Candidate, Governor};
pub(crate) use ngram::{BYTES_PER_TOKEN, Ngram};
pub use options::{DraftOptions, DrafterChoice};
pub(crate) use proposal::{Draft, DrafterKind, class_of_probability};
pub use stats::{DraftCounts, DraftStats};

/// Drafted tokens of a step at most, of all sequences together. Scratch memory is set aside for their logits.
pub(crate) const MAX_STEP_DRAFTS: usize = 32;

/// Bytes of recurrent states within drafts that are kept during a step, at most: one for each drafted token.
pub(crate) const MAX_STATE_BYTES: usize = 256 << 20;

/// A drafter that was wrong gets a second trial: its chance rises to [`SECOND_TRIAL`] over so many steps in which nobody asks it.
const FORGIVEN: f64 = 400.0;
const SECOND_TRIAL: f64 = 0.5;

/// A sequence's draft, and what is known of the drafters.
pub(crate) struct SequenceDrafts {
    /// What is proposed behind the sequence's tokens.
    pub draft: Draft,
    /// Who proposed it.
    pub by: DrafterKind,
    /// How often the proposals of each kind of drafter came true. `[DrafterKind::COUNT]`
    pub acceptance: [Acceptance; DrafterKind::COUNT],
    /// Steps since a drafter that computes its proposals was asked.
    pub unasked: u32,
    /// Counts since the generation was started.
    pub counts: DraftCounts,
}

impl SequenceDrafts {
    pub fn new(most: usize, prior: &[Acceptance; DrafterKind::COUNT]) -> SequenceDrafts {
        let acceptance = prior.each_ref().map(Acceptance::as_guesses);
        let draft = Draft::with_capacity(most);
        SequenceDrafts { draft, by: DrafterKind::Ngram, acceptance, unasked: 0, counts: DraftCounts::default() }
    }

    /// How many tokens of the draft's beginning are `tokens`, the sequence's newest.
    pub fn agreed(&self, tokens: &[u32]) -> usize {
        self.draft.tokens.iter().zip(tokens).take_while(|(drafted, came)| drafted == came).count()
    }

    /// The chance that a token of this drafter comes true, whatever its class. It rises again while the drafter is not asked, so that it gets another trial.
    pub fn usual_chance(&self, kind: DrafterKind) -> f64 {
        let known = self.acceptance[kind as usize].usual_chance();
        known + (SECOND_TRIAL - known).max(0.0) * (f64::from(self.unasked) / FORGIVEN).min(1.0)
    }

    /// What may be hoped for of this drafter instead.
    pub fn hopeful_chance(&self, kind: DrafterKind) -> f64 {
        self.acceptance[kind as usize].hopeful_chance().max(self.usual_chance(kind))
    }

    /// The chance that one token more and all of the draft come true, before it is known how likely its drafter finds it.
    pub fn next_chance(&self) -> f64 {
        self.chances().last().unwrap_or(1.0) * self.acceptance[self.by as usize].usual_chance()
    }

    /// For each token of the draft, the chance that it comes true, and all tokens before it.
    pub fn chances(&self) -> impl Iterator<Item = f64> {
        let acceptance = &self.acceptance[self.by as usize];
        self.draft.classes.iter().scan(1.0, |chance, class| {
            *chance *= acceptance.chance(*class);
            Some(*chance)
        })
    }
}
