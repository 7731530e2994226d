//! The cases, one file for each kind of layer.

mod attention;
mod buffers;
mod channel_delta;
mod compressed;
mod delta_rule;
mod dense;
mod elementwise;
mod index;
mod latent;
mod latent_mixture;
mod mixture;
mod state_space;
mod streamed;
mod streams;
mod whole_step;

use crate::family::Family;

pub const BUFFERS: Family = Family { name: "buffers", cases: 20, run: buffers::buffers };
pub const CACHES: Family = Family { name: "caches", cases: 20, run: buffers::caches };
pub const EMBEDDINGS: Family = Family { name: "embeddings", cases: 40, run: dense::embeddings };
pub const PROJECTIONS: Family = Family { name: "projections", cases: 120, run: dense::projections };
pub const INTERLEAVED_HEADS: Family = Family { name: "interleaved heads", cases: 60, run: dense::interleaved_heads };
pub const LONG_ROWS: Family = Family { name: "long rows", cases: 16, run: dense::long_rows };
pub const LARGE_TILES: Family = Family { name: "large tiles", cases: 16, run: dense::large_tiles };
pub const SIXTEEN_BITS: Family = Family { name: "sixteen bits", cases: 24, run: dense::sixteen_bits };
pub const SOME_TOKENS: Family = Family { name: "some tokens", cases: 40, run: dense::some_tokens };
pub const BLOCKS: Family = Family { name: "blocks", cases: 105, run: dense::blocks };
pub const MIXTURES_OF_BLOCKS: Family =
    Family { name: "mixtures of blocks", cases: 16, run: mixture::mixtures_of_blocks };
pub const DENSE_LAYERS: Family = Family { name: "dense layers", cases: 60, run: dense::dense_layers };
pub const ELEMENTWISE: Family = Family { name: "elementwise", cases: 40, run: elementwise::elementwise };
pub const ATTENTION: Family = Family { name: "attention", cases: 60, run: attention::attention };
pub const DEEP_CONTEXTS: Family = Family { name: "deep contexts", cases: 40, run: attention::deep_contexts };
pub const SHARED_PREFIXES: Family = Family { name: "shared prefixes", cases: 40, run: attention::shared_prefixes };
pub const LATENT_ATTENTION: Family = Family { name: "latent attention", cases: 60, run: latent::latent_attention };
pub const SPARSE_INDEXERS: Family = Family { name: "sparse indexers", cases: 60, run: index::sparse_indexers };
pub const COMPRESSED_ATTENTION: Family =
    Family { name: "compressed attention", cases: 60, run: compressed::compressed_attention };
pub const DELTA_RULES: Family = Family { name: "delta rules", cases: 60, run: delta_rule::delta_rules };
pub const DELTA_RULES_OF_ONE_TOKEN: Family =
    Family { name: "delta rules of one token", cases: 60, run: delta_rule::delta_rules_of_one_token };
pub const CHANNEL_DELTAS: Family =
    Family { name: "delta rules by channels", cases: 60, run: channel_delta::channel_deltas };
pub const STATE_SPACES: Family = Family { name: "state spaces", cases: 60, run: state_space::state_spaces };
pub const UNGATED_MIXTURES: Family = Family { name: "ungated mixtures", cases: 40, run: mixture::ungated };
pub const LATENT_MIXTURES: Family = Family { name: "latent mixtures", cases: 40, run: latent_mixture::mapped };
pub const STREAMED_LATENT_MIXTURES: Family =
    Family { name: "streamed latent mixtures", cases: 20, run: latent_mixture::streamed };
pub const MIXTURES: Family = Family { name: "mixtures", cases: 20, run: mixture::mixtures };
pub const MIXTURES_OF_ONE_TOKEN: Family =
    Family { name: "mixtures of one token", cases: 40, run: mixture::mixtures_of_one_token };
pub const MIXTURES_OF_FEW_TOKENS: Family =
    Family { name: "mixtures of few tokens", cases: 40, run: mixture::mixtures_of_few_tokens };
pub const MIXTURES_OF_MANY_TOKENS: Family =
    Family { name: "mixtures of many tokens", cases: 6, run: mixture::mixtures_of_many_tokens };
pub const CLAMPED_MIXTURES: Family = Family { name: "clamped mixtures", cases: 40, run: mixture::clamped };
pub const MIXTURES_WITH_ROUTERS_OF_THEIR_OWN: Family =
    Family { name: "mixtures with routers of their own", cases: 40, run: mixture::with_routers_of_their_own };
pub const ORDERED_MIXTURES: Family = Family { name: "ordered mixtures", cases: 20, run: mixture::ordered };
pub const STREAMED_ORDERED_MIXTURES: Family =
    Family { name: "streamed ordered mixtures", cases: 20, run: streamed::ordered };
pub const STREAMED_CLAMPED_MIXTURES: Family =
    Family { name: "streamed clamped mixtures", cases: 12, run: streamed::clamped };
pub const STREAMED_UNGATED_MIXTURES: Family =
    Family { name: "streamed ungated mixtures", cases: 20, run: streamed::ungated };
pub const STREAMED_MIXTURES: Family = Family { name: "streamed mixtures", cases: 30, run: streamed::streamed };
pub const FAILED_ROWS: Family = Family { name: "failed rows", cases: 20, run: streamed::failed_rows };
pub const STREAMS: Family = Family { name: "residual streams", cases: 60, run: streams::streams };
pub const GATED_STREAMS: Family = Family { name: "gated streams", cases: 60, run: streams::gated_streams };
pub const ATTENDED_STREAMS: Family = Family { name: "attended streams", cases: 60, run: streams::attended_streams };
pub const NGRAMS: Family = Family { name: "n-grams", cases: 60, run: streams::ngrams };
pub const SELECTED_ATTENTION: Family = Family { name: "selected attention", cases: 60, run: index::selected_attention };
pub const LOGITS: Family = Family { name: "logits", cases: 40, run: dense::logits };
pub const WHOLE_STEPS: Family = Family { name: "whole steps", cases: 30, run: whole_step::whole_steps };
