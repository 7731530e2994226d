//! From logits to tokens: sampling parameters, the sampler of one sequence, and the sampling of all sequences of a step.

pub(crate) mod batch;
mod candidates;
pub(crate) mod device_draws;
pub(crate) mod draft_sampler;
mod filters;
mod params;
mod processor;
mod random;
mod sampler;

pub use params::{History, ParamError, SamplingParams};
pub use processor::{LogitsProcessor, ProcessorFailed};
pub use sampler::{Logprobs, Mask, SampleError, Sampler};
