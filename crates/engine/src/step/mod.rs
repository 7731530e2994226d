//! One step of the model: inputs from sequences, the forward pass, and the blocks it works on.

mod block_memory;
pub(crate) mod pooling;
pub(crate) mod runner;
