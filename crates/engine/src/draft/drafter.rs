//! What a drafter is.

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

/// Proposes what may follow the tokens of one sequence. A proposal may be anything: it changes speed alone.
pub(crate) trait Drafter: Send + Sync {
    /// Its name in reports.
    fn name(&self) -> &'static str;
    /// Writes at most `most` tokens behind `tokens` to `draft`, which is empty. `tokens` are the sequence's: those of the last call, and more.
    fn propose(&mut self, tokens: &[u32], most: usize, draft: &mut Draft);
}
