//! Logits that a caller changes before a token is chosen.

use std::fmt::Debug;

/// Changes the logits of a sequence, before penalties, constraints and everything else of [`super::SamplingParams`].
///
/// It is called on a backend's threads, for several sequences at once, and once for each token that is chosen. Log-probabilities are of the logits before it.
pub trait LogitsProcessor: Debug + Send + Sync {
    /// `tokens`: the sequence's, prompt and answer. `logits`: `[vocabulary]`; -inf rules a token out.
    ///
    /// # Errors
    /// Any error ends the generation with [`super::SampleError::Processor`]. Whoever made the processor keeps the reason.
    fn process(&self, tokens: &[u32], logits: &mut [f32]) -> Result<(), ProcessorFailed>;
}

/// A processor could not do its work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessorFailed;
