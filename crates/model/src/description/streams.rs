//! Hyper-connections: several residual streams in place of one.

/// Several residual streams (Xie et al. 2026): each half of a layer takes a mixture of them and adds to all.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StreamsDescription {
    /// How many there are.
    pub count: usize,
    /// Added to the weights of a mixture, and to sums that they are divided by.
    pub eps: f64,
    /// How often what streams exchange is divided by the sums of its rows and columns.
    pub rounds: usize,
    /// Behind the last layer they become one by a mixture of their own, and not by their mean.
    pub has_head: bool,
}

impl StreamsDescription {
    /// Logits of a mixture.
    pub fn logits(&self) -> usize {
        (2 + self.count) * self.count
    }
}
