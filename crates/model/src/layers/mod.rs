//! The layers that architectures are put together from.

mod attention;
mod delta_net;
mod feed_forward;

pub use attention::{Attention, AttentionShape};
pub use delta_net::{DeltaNet, ProjectionLayout, shape as delta_shape};
pub use feed_forward::{FeedForward, Moe};
