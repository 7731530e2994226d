//! Proposed tokens, and who proposes them.

/// The kinds of drafters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DrafterKind {
    /// Look-up of the newest tokens in what the sequence has seen.
    Ngram,
    /// A smaller model with the same vocabulary.
    Model,
    /// The checkpoint's own MTP head (multi-token prediction).
    Mtp,
}

impl DrafterKind {
    /// How many there are.
    pub const COUNT: usize = 3;

    /// Its name in reports.
    pub fn name(self) -> &'static str {
        match self {
            DrafterKind::Ngram => "ngram",
            DrafterKind::Model => "model",
            DrafterKind::Mtp => "mtp",
        }
    }
}

/// Proposed tokens.
#[derive(Debug, Default)]
pub(crate) struct Draft {
    /// In their order behind the sequence's tokens.
    pub tokens: Vec<u32>,
    /// For each token, how likely its drafter finds it: a class below [`super::acceptance::CLASSES`]. Acceptance is learnt by class.
    pub classes: Vec<u8>,
}

impl Draft {
    pub fn with_capacity(tokens: usize) -> Draft {
        Draft { tokens: Vec::with_capacity(tokens), classes: Vec::with_capacity(tokens) }
    }

    pub fn clear(&mut self) {
        self.tokens.clear();
        self.classes.clear();
    }

    pub fn push(&mut self, token: u32, class: usize) {
        self.tokens.push(token);
        self.classes.push(class as u8);
    }
}

/// The class of a token that has this probability for its drafter.
pub(crate) fn class_of_probability(probability: f64) -> usize {
    const BELOW: [f64; 7] = [0.3, 0.45, 0.6, 0.7, 0.8, 0.9, 0.97];
    BELOW.iter().take_while(|limit| probability >= **limit).count()
}
