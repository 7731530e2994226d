//! What a step is to do.

/// A sequence that takes part in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ScheduledSequence {
    /// Its index among all sequences.
    pub sequence: usize,
    /// How many of its next tokens are computed.
    pub tokens: usize,
}

/// The sequences of a step, and how far each has got after it. Kept between steps, so that planning allocates nothing.
#[derive(Default)]
pub(crate) struct Plan {
    /// Those that generate come first, then those that compute prompts.
    pub scheduled: Vec<ScheduledSequence>,
    /// How many of `scheduled` generate.
    pub generating: usize,
    /// Sequences for which there is no memory although all others were preempted.
    pub stuck: Vec<usize>,
    /// After the step: whether each has reached the end of its tokens, so that it has logits. `[scheduled]`
    pub ends: Vec<bool>,
}

impl Plan {
    pub(super) fn clear(&mut self) {
        self.scheduled.clear();
        self.generating = 0;
        self.stuck.clear();
        self.ends.clear();
    }
}
