//! Proposed tokens, and who proposes them.

/// The kinds of drafters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DrafterKind {
    /// Look-up of the newest tokens in what the sequence has seen.
    Ngram,
    /// A smaller model with the same vocabulary.
    Model,
    /// The checkpoint's own head that predicts one token more.
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
    /// In the order in which they would come.
    pub tokens: Vec<u32>,
    /// By token: the class of its likelihood, below [`super::acceptance::CLASSES`], whose acceptance is learnt.
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

/// The class of a token that a model finds so likely.
pub(crate) fn class_of_probability(probability: f64) -> usize {
    const BELOW: [f64; 7] = [0.3, 0.45, 0.6, 0.7, 0.8, 0.9, 0.97];
    BELOW.iter().take_while(|limit| probability >= **limit).count()
}
