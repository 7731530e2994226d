//! What a step is to do.

/// A sequence that takes part in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ScheduledSequence {
    /// Its index among all sequences.
    pub sequence: usize,
    /// How many of its next tokens are computed.
    pub tokens: usize,
    /// How many drafted tokens are computed behind them, each with a row of logits.
    pub drafts: usize,
    /// Rows of the pool of states from this one on keep the states after each token but the last, if the model has recurrent layers.
    pub kept_states: Option<u32>,
    /// After the step: how many of the drafted tokens could be computed.
    pub computed_drafts: usize,
}

/// The sequences of a step, and how far each has got after it. Kept between steps, so that planning allocates nothing.
#[derive(Default)]
pub(crate) struct Plan {
    /// Sequences that generate come first, then those that compute prompts.
    pub scheduled: Vec<ScheduledSequence>,
    /// How many of `scheduled` generate.
    pub generating: usize,
    /// Running sequences that could do something but are not part of the step.
    pub waiting: usize,
    /// Sequences for which there is no memory although all others were preempted.
    pub stuck: Vec<usize>,
    /// After the step: whether each has reached the end of its tokens, so that it has logits. `[scheduled]`
    pub ends: Vec<bool>,
}

impl Plan {
    pub fn clear(&mut self) {
        self.scheduled.clear();
        self.generating = 0;
        self.waiting = 0;
        self.stuck.clear();
        self.ends.clear();
    }

    /// Whether the step has drafted tokens.
    pub fn has_drafts(&self) -> bool {
        self.scheduled.iter().any(|t| t.drafts > 0)
    }
}
