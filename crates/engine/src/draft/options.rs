//! Options of drafts.

/// Who drafts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DrafterChoice {
    /// Nothing is drafted.
    #[default]
    Off,
    /// The best that there is for the model.
    Auto,
    /// Look-up of the newest tokens in what the sequence has seen.
    Ngram,
    /// A smaller model: see [`crate::Options::draft_model`].
    Model,
    /// The checkpoint's MTP head (multi-token prediction).
    Mtp,
}

/// Whether and how tokens are drafted. Changes speed, never a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DraftOptions {
    /// Who drafts.
    pub drafter: DrafterChoice,
    /// Tokens that are drafted for a sequence in a step, at most.
    pub tokens: usize,
    /// Whether measured times decide how many of them are computed. Otherwise all are.
    pub governed: bool,
    /// Whether drafts take only memory that is to spare: none are made where experts are read from disk, or where the model fits in memory only without them.
    pub only_spare_memory: bool,
}

impl DraftOptions {
    /// The same, without drafts.
    pub(crate) fn off(self) -> DraftOptions {
        DraftOptions { drafter: DrafterChoice::Off, ..self }
    }

    /// The most tokens that a step with so many sequences drafts.
    pub(crate) fn rows(&self, sequences: usize) -> usize {
        match self.drafter {
            DrafterChoice::Off => 0,
            _ => self.tokens.saturating_mul(sequences).min(super::MAX_STEP_DRAFTS),
        }
    }
}

impl Default for DraftOptions {
    fn default() -> DraftOptions {
        DraftOptions { drafter: DrafterChoice::Off, tokens: 16, governed: true, only_spare_memory: false }
    }
}
