//! All families, and a test for each.

use crate::family::Family;
use crate::operations::*;

/// One test for each family of cases, over a `Vec<Candidate>`.
#[macro_export]
macro_rules! tests {
    ($candidates:expr) => {
        $crate::tests! { @families each $candidates }
    };
    // The one list of families.
    (@families $what:ident $($candidates:expr)?) => {
        $crate::tests! { @$what $($candidates)?;
            buffers_hold_what_was_written BUFFERS;
            caches_hold_what_was_written CACHES;
            embeddings_agree_with_the_generic_cpu EMBEDDINGS;
            projections_agree_with_the_generic_cpu PROJECTIONS;
            interleaved_heads_agree_with_the_generic_cpu INTERLEAVED_HEADS;
            long_rows_agree_with_the_generic_cpu LONG_ROWS;
            large_tiles_agree_with_the_generic_cpu LARGE_TILES;
            floats_of_sixteen_bits_agree_with_the_generic_cpu SIXTEEN_BITS;
            some_tokens_agree_with_the_generic_cpu SOME_TOKENS;
            blocks_agree_with_the_generic_cpu BLOCKS;
            mixtures_of_blocks_agree_with_the_generic_cpu MIXTURES_OF_BLOCKS;
            dense_layers_agree_with_the_generic_cpu DENSE_LAYERS;
            elementwise_operations_agree_with_the_generic_cpu ELEMENTWISE;
            attention_agrees_with_the_generic_cpu ATTENTION;
            attention_over_shared_prefixes_agrees_with_the_generic_cpu SHARED_PREFIXES;
            attention_behind_deep_contexts_agrees_with_the_generic_cpu DEEP_CONTEXTS;
            latent_attention_agrees_with_the_generic_cpu LATENT_ATTENTION;
            sparse_indexers_agree_with_the_generic_cpu SPARSE_INDEXERS;
            compressed_attention_agrees_with_the_generic_cpu COMPRESSED_ATTENTION;
            delta_rules_agree_with_the_generic_cpu DELTA_RULES;
            delta_rules_of_one_token_agree_with_the_generic_cpu DELTA_RULES_OF_ONE_TOKEN;
            delta_rules_by_channels_agree_with_the_generic_cpu CHANNEL_DELTAS;
            state_spaces_agree_with_the_generic_cpu STATE_SPACES;
            ungated_mixtures_agree_with_the_generic_cpu UNGATED_MIXTURES;
            latent_mixtures_agree_with_the_generic_cpu LATENT_MIXTURES;
            mixtures_agree_with_the_generic_cpu MIXTURES;
            mixtures_of_one_token_agree_with_the_generic_cpu MIXTURES_OF_ONE_TOKEN;
            mixtures_of_few_tokens_agree_with_the_generic_cpu MIXTURES_OF_FEW_TOKENS;
            mixtures_of_many_tokens_agree_with_the_generic_cpu MIXTURES_OF_MANY_TOKENS;
            clamped_mixtures_agree_with_the_generic_cpu CLAMPED_MIXTURES;
            mixtures_with_routers_of_their_own_agree_with_the_generic_cpu MIXTURES_WITH_ROUTERS_OF_THEIR_OWN;
            ordered_mixtures_agree_with_the_generic_cpu ORDERED_MIXTURES;
            streamed_mixtures_agree_with_the_generic_cpu STREAMED_MIXTURES;
            streamed_ordered_mixtures_agree_with_the_generic_cpu STREAMED_ORDERED_MIXTURES;
            streamed_clamped_mixtures_agree_with_the_generic_cpu STREAMED_CLAMPED_MIXTURES;
            streamed_ungated_mixtures_agree_with_the_generic_cpu STREAMED_UNGATED_MIXTURES;
            streamed_latent_mixtures_agree_with_the_generic_cpu STREAMED_LATENT_MIXTURES;
            experts_that_cannot_be_read_fail_their_own_rows_only FAILED_ROWS;
            residual_streams_agree_with_the_generic_cpu STREAMS;
            gated_streams_agree_with_the_generic_cpu GATED_STREAMS;
            attended_streams_agree_with_the_generic_cpu ATTENDED_STREAMS;
            n_grams_agree_with_the_generic_cpu NGRAMS;
            selected_attention_agrees_with_the_generic_cpu SELECTED_ATTENTION;
            logits_agree_with_the_generic_cpu LOGITS;
            whole_steps_agree_with_the_generic_cpu WHOLE_STEPS;
        }
    };
    (@list; $($test:ident $family:ident;)*) => {
        &[$(&$family),*]
    };
    (@each $candidates:expr; $($test:ident $family:ident;)*) => {
        $(
            #[test]
            fn $test() {
                $crate::check(&$crate::$family, &$candidates);
            }
        )*
    };
}

/// Every family.
pub const FAMILIES: &[&Family] = tests! { @families list };
