//! The layers of models. Each is made from its description and the weights of its module.

mod attended;
mod attention;
mod channel_delta;
mod compressed;
mod delta_net;
mod feed_forward;
mod latent;
mod latent_experts;
mod ngrams;
mod ordered;
mod per_layer;
mod state_space;
mod streams;

pub use attention::{Attention, AttentionScratch};
pub use channel_delta::{ChannelDelta, ChannelDeltaScratch};
pub use compressed::{CompressedAttention, CompressedScratch};
pub use delta_net::{DeltaNet, DeltaScratch};
pub use feed_forward::{FeedForward, FeedForwardScratch};
pub use latent::{LatentAttention, LatentScratch};
pub use ngrams::{NgramScratch, Ngrams};
pub use per_layer::{PerLayer, PerLayerBlock};
pub use state_space::{StateSpace, StateSpaceScratch};
pub use streams::{LastMixture, StreamBlock, Streams};
