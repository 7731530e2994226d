//! Hyper-connections and attention residuals: several residual streams in place of one.

use sluice_backend::{MOST_ATTENDED, MOST_STREAMS};

/// Several residual streams: each half of a layer takes a mixture of them and adds to all.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StreamsDescription {
    /// How many there are, in the end.
    pub count: usize,
    /// What a half takes and adds.
    pub mixing: StreamMixing,
}

/// What halves of layers take of residual streams, and what they add to them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum StreamMixing {
    /// Streams exchange their contents around each half (Xie et al. 2026; GLM-5.3, DeepSeek-V4).
    Exchanged {
        /// Added to the weights of a mixture, and to sums that they are divided by.
        eps: f64,
        /// How often what streams exchange is divided by the sums of its rows and columns.
        rounds: usize,
        /// Behind the last layer they become one by a mixture of their own, and not by their mean.
        has_head: bool,
    },
    /// Each element of each normed stream has a gate, of a projection of small rank; so has what the head takes (Qwen4-Exp).
    Gated {
        /// Elements between both matrices of the gates.
        rank: usize,
    },
    /// Each half takes a mixture of all streams by a softmax of their scores, and adds to the last of them. More of them begin on the way (Kimi-K3).
    Attended {
        /// One more begins with what the mixer of every so-manieth layer puts out, from the first layer on.
        every: usize,
        /// What makes scores is one vector of the norm's weights and the projection's, multiplied (GGUF).
        fused: bool,
    },
}

impl StreamsDescription {
    /// Whether streams have gates.
    pub fn is_gated(self) -> bool {
        matches!(self.mixing, StreamMixing::Gated { .. })
    }

    /// Those that are attended to, of so many layers.
    pub fn attended(every: usize, layers: usize) -> StreamsDescription {
        StreamsDescription { count: layers.div_ceil(every) + 1, mixing: StreamMixing::Attended { every, fused: false } }
    }

    /// Says that what makes scores is one vector, where a norm and a projection are stored as their products.
    pub(crate) fn fuse_scores(&mut self) {
        if let StreamMixing::Attended { fused, .. } = &mut self.mixing {
            *fused = true;
        }
    }

    /// The most that there may be.
    pub fn most(self) -> usize {
        if matches!(self.mixing, StreamMixing::Attended { .. }) { MOST_ATTENDED } else { MOST_STREAMS }
    }

    /// Logits of a mixture where streams exchange their contents.
    pub fn logits(&self) -> usize {
        (2 + self.count) * self.count
    }
}
