//! Counts of drafts.

/// How much was drafted, and how much of it came true.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DraftCounts {
    /// Drafts that were computed.
    pub drafts: u64,
    /// Tokens of these.
    pub drafted: u64,
    /// Tokens that were drawn as drafted.
    pub accepted: u64,
}

impl DraftCounts {
    /// Counts a draft.
    pub(crate) fn add(&mut self, drafted: usize, accepted: usize) {
        self.drafts += 1;
        self.drafted += drafted as u64;
        self.accepted += accepted as u64;
    }

    /// The counts of both.
    pub fn plus(&self, other: DraftCounts) -> DraftCounts {
        DraftCounts {
            drafts: self.drafts + other.drafts,
            drafted: self.drafted + other.drafted,
            accepted: self.accepted + other.accepted,
        }
    }

    /// What was counted since `before`.
    pub fn since(&self, before: DraftCounts) -> DraftCounts {
        DraftCounts {
            drafts: self.drafts - before.drafts,
            drafted: self.drafted - before.drafted,
            accepted: self.accepted - before.accepted,
        }
    }
}

/// Counts of one drafter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DraftStats {
    /// Its name: `ngram`, `model` or `mtp`.
    pub drafter: &'static str,
    /// What it drafted since the engine was opened.
    pub counts: DraftCounts,
}
