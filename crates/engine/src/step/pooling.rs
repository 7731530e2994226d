//! Embeddings: one vector from a prompt's final hidden states.

/// How an embedding is made of the final hidden states of a prompt's tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pooling {
    /// The state of the last token.
    Last,
    /// The mean of all states.
    Mean,
}

/// An embedding in the making. Sums are f64, in ascending position, so that the division of the prompt into steps does not matter.
#[derive(Debug)]
pub(crate) struct Pooled {
    pooling: Pooling,
    /// Tokens of the prompt.
    tokens: usize,
    /// The position whose state is added next.
    next: usize,
    /// `[hidden]`
    sum: Vec<f64>,
}

impl Pooled {
    /// For a prompt of `tokens` tokens, and states of `hidden` values.
    pub fn new(pooling: Pooling, tokens: usize, hidden: usize) -> Pooled {
        let next = if pooling == Pooling::Last { tokens - 1 } else { 0 };
        Pooled { pooling, tokens, next, sum: vec![0.0; hidden] }
    }

    /// The position whose state is added next. States that are computed again after a preemption are skipped.
    pub fn next(&self) -> usize {
        self.next
    }

    /// Adds the state at that position: `[hidden]`.
    pub fn add(&mut self, state: &[f32]) {
        self.sum.iter_mut().zip(state).for_each(|(sum, x)| *sum += f64::from(*x));
        self.next += 1;
    }

    /// The embedding: `[hidden]`; `None` while states are missing.
    pub fn value(&self) -> Option<Vec<f32>> {
        let count = if self.pooling == Pooling::Last { 1.0 } else { self.tokens as f64 };
        (self.next == self.tokens).then(|| self.sum.iter().map(|sum| (sum / count) as f32).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_become_their_mean_or_the_last() {
        let states = [[1.0, 0.1], [2.0, 0.2], [4.5, 0.4]];
        let mut mean = Pooled::new(Pooling::Mean, 3, 2);
        for (position, state) in states.iter().enumerate() {
            assert_eq!((mean.next(), mean.value()), (position, None));
            mean.add(state);
        }
        let tenths = (f64::from(0.1f32) + f64::from(0.2f32) + f64::from(0.4f32)) / 3.0;
        assert_eq!(mean.value(), Some(vec![2.5, tenths as f32]));
        let mut last = Pooled::new(Pooling::Last, 3, 2);
        assert_eq!(last.next(), 2);
        last.add(&states[2]);
        assert_eq!(last.value(), Some(vec![4.5, 0.4]));
    }
}
