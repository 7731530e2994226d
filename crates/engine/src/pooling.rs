//! One vector of a prompt's final hidden states.

/// What is made of the final hidden states of a prompt's tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pooling {
    /// That of the last token.
    Last,
    /// Their mean.
    Mean,
}

/// A vector in the making. Sums are of f64, in ascending position, so that it does not matter how the prompt was divided among steps.
#[derive(Debug)]
pub struct Pooled {
    pooling: Pooling,
    /// Tokens of the prompt.
    tokens: usize,
    /// The position whose state is added next.
    next: usize,
    sum: Vec<f64>,
}

impl Pooled {
    pub fn new(pooling: Pooling, tokens: usize, hidden: usize) -> Pooled {
        let next = if pooling == Pooling::Last { tokens - 1 } else { 0 };
        Pooled { pooling, tokens, next, sum: vec![0.0; hidden] }
    }

    /// The position whose state is wanted next. What was computed again after a preemption is not.
    pub fn next(&self) -> usize {
        self.next
    }

    /// Takes the state at that position.
    pub fn add(&mut self, state: &[f32]) {
        self.sum.iter_mut().zip(state).for_each(|(sum, x)| *sum += f64::from(*x));
        self.next += 1;
    }

    /// The vector; `None` as long as states are missing.
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
