//! The layers that models are put together from: each is made of its description and the weights of its module, and owns its scratch.

mod attention;
mod delta_net;
mod feed_forward;

pub use attention::{Attention, AttentionScratch};
pub use delta_net::{DeltaNet, DeltaScratch};
pub use feed_forward::FeedForward;
