//! Feed-forward layers of one or many experts.

mod activation;
pub mod experts;
mod gather;
mod offload;
mod run;
mod stream;
mod trial;

pub use offload::{HostExperts, OffloadedExpert};
pub use run::HostMixture;
pub use stream::{MAX_KEPT_BYTES, Streaming};
