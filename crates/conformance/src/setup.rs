//! What a backend is made for.

use sluice_backend::{Activations, Capacity};

/// The case for which a backend is made.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    pub activations: Activations,
    /// The case's seed, for what may differ from case to case, such as the number of threads.
    pub seed: u64,
    /// The largest step of any case.
    pub capacity: Capacity,
}

/// No case has larger steps.
pub const CAPACITY: Capacity = Capacity { tokens: 512, sequences: 48, blocks: 8192 };
