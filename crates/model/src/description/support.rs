//! What a description may say that no operation computes. This is the one place that refuses it: whatever passes here, loading passes on to the
//! backend.

use anyhow::{Result, ensure};
use sluice_backend::MOST_POOLED;

use super::attention::{AttentionDescription, AttentionVariant};
use super::experts::{ExpertActivation, MoeDescription, RouterScoring};
use super::{
    DenseActivation, Description, FeedForwardDescription, IndexDescription, LayerDescription, MixerDescription,
    StreamsDescription, ValueSource,
};

impl Description {
    /// Refuses a variant that is described and that no operation computes.
    ///
    /// # Errors
    /// Names the variant and the first layer that has it.
    pub fn check_operations(&self) -> Result<()> {
        for (number, layer) in self.layers.iter().enumerate() {
            // What a block takes of gated streams was normed before.
            let gated = self.streams.is_some_and(StreamsDescription::is_gated);
            let unnormed = (!self.input_norms && !gated).then(|| "no norm of its input".to_owned());
            let unsupported = match &layer.mixer {
                MixerDescription::Attention(_) if unnormed.is_some() && !self.output_norms => unnormed.clone(),
                MixerDescription::Attention(a) if a.variant != AttentionVariant::Grouped && self.output_norms => {
                    Some("latent attention with norms of outputs".to_owned())
                }
                MixerDescription::Attention(attention) => attention.unsupported(self.rotary_dim(attention)),
                MixerDescription::DeltaNet(_) => unnormed.clone(),
                MixerDescription::ChannelDelta(_) | MixerDescription::StateSpace(_) if gated => {
                    Some("no norm of its input".to_owned())
                }
                MixerDescription::ChannelDelta(_) => unnormed.clone(),
                MixerDescription::StateSpace(_) if self.output_norms => {
                    Some("a norm of what Mamba-2 puts out".to_owned())
                }
                MixerDescription::StateSpace(_) => unnormed.clone(),
                MixerDescription::None => None,
            };
            let one_block = layer.is_one_block() && (self.output_norms || !self.input_norms);
            let unsupported =
                unsupported.or_else(|| one_block.then(|| "one half, and other norms than of its input".into()));
            let states = self.recurrent_layers().next().and_then(MixerDescription::state_len);
            let other = layer.mixer.state_len().is_some_and(|own| Some(own) != states);
            let unsupported = unsupported.or_else(|| other.then(|| "a recurrent state of another size".to_owned()));
            let before = &self.layers[..number];
            let unsupported = unsupported.or_else(|| match &layer.mixer {
                MixerDescription::Attention(a) if a.takes_selection() && !before.iter().any(selects) => {
                    Some("what an indexer before it has selected, and there is none".into())
                }
                MixerDescription::Attention(a) if a.shared => a.unshared(before),
                _ => None,
            });
            let unsupported = unsupported.or_else(|| match &layer.feed_forward {
                FeedForwardDescription::Dense { activation: DenseActivation::SquaredRelu, joined: true, .. } => {
                    Some("gate and up in one matrix, and no gate".into())
                }
                FeedForwardDescription::Dense { .. } | FeedForwardDescription::None => None,
                FeedForwardDescription::Moe(moe) if !moe.activation.is_gated() && moe.biased => {
                    Some("experts with biases and without gates".into())
                }
                FeedForwardDescription::Moe(moe) => moe.unsupported().or(unnormed),
                FeedForwardDescription::Beside { .. } if !self.output_norms => {
                    Some("a dense part and a mixture side by side, without norms of what they put out".into())
                }
                FeedForwardDescription::Beside { moe, .. } => moe.unsupported().or(unnormed),
            });
            let streams = self.streams.filter(|streams| {
                let plain = self.input_norms != streams.is_gated()
                    && !self.output_norms
                    && self.per_layer.is_none()
                    && !self.layer_scales
                    && (!streams.is_gated() || !matches!(layer.feed_forward, FeedForwardDescription::Dense { .. }));
                !plain || layer.is_one_block() || streams.count > streams.most()
            });
            let unsupported =
                unsupported.or_else(|| streams.map(|of| format!("{} residual streams around it", of.count)));
            let ngrams = self.ngrams.as_ref().filter(|of| of.hash(number).is_some() && !gated);
            let unsupported = unsupported.or_else(|| ngrams.map(|_| "n-grams, and no gated streams around it".into()));
            let what = unsupported.as_deref().unwrap_or_default();
            let architecture = self.architecture;
            ensure!(what.is_empty(), "{architecture}: layer {number} has {what}, which no operation computes");
        }
        Ok(())
    }
}

impl Description {
    /// Elements of a layer's heads that are rotated.
    pub(crate) fn rotary_dim(&self, attention: &AttentionDescription) -> usize {
        let of_windows = self.window_rotary.as_ref().filter(|_| attention.has_window_rotary());
        2 * of_windows.unwrap_or(&self.rotary).inv_freq.len()
    }
}

/// Whether a layer has an indexer of its own.
fn selects(layer: &LayerDescription) -> bool {
    layer.mixer.attention().is_some_and(|attention| attention.index_group().is_some())
}

impl AttentionDescription {
    /// Whether what it sees is what another layer's indexer has selected.
    fn takes_selection(&self) -> bool {
        self.index.is_some_and(|index| index.shared)
    }

    /// Why this layer cannot share the keys and values of an earlier one, if it cannot. `before`: all earlier layers.
    fn unshared(&self, before: &[LayerDescription]) -> Option<String> {
        let own = self.cache_group();
        let stores = |layer: &LayerDescription| match &layer.mixer {
            MixerDescription::Attention(a) => !a.shared && a.cache_group().is_like(&own),
            _ => false,
        };
        (!before.iter().any(stores)).then(|| "keys and values of a layer before it, and there is none like it".into())
    }

    fn unsupported(&self, rotary_dim: usize) -> Option<String> {
        if let AttentionVariant::Compressed(of) = self.variant {
            return self.unsupported_compressed(&of, rotary_dim);
        }
        if let AttentionVariant::Latent(latent) = self.variant {
            let more = [
                (self.gated, "gates"),
                (self.normed, "norms of heads"),
                (
                    !self.rotated || latent.rotary_dim != rotary_dim,
                    "other elements rotated than those that all heads share",
                ),
                (self.window.is_some(), "a window"),
                (self.softcap.is_some(), "a soft cap"),
                (self.sinks, "sinks"),
                (self.index.is_some() && latent.q_rank.is_none(), "an indexer, and queries straight from the input"),
                (
                    self.index.is_some_and(|index| !index.has_pools_that_fit()),
                    "an indexer of pools that do not divide what it selects, or are too large",
                ),
            ];
            let found = more.into_iter().find(|(is_there, _)| *is_there);
            return found.map(|(_, what)| format!("latent attention with {what}"));
        }
        if let Some(index) = self.index {
            let more = [
                (index.pool.is_none_or(|size| !MOST_POOLED.is_multiple_of(size)), "other pools than whole parts of 64"),
                (!index.has_pools_that_fit(), "pools that do not divide what it selects"),
                (index.head_dim < rotary_dim, "keys of fewer elements than are rotated"),
                (index.shared, "none of its own"),
                (index.adjacent_pairs || self.adjacent_pairs, "pairs beside each other"),
                (
                    !self.rotated || self.window.is_some() || self.shared,
                    "a window, no positions, or keys of another layer",
                ),
            ];
            if let Some((_, what)) = more.into_iter().find(|(is_there, _)| *is_there) {
                return Some(format!("grouped attention, an indexer, and {what}"));
            }
        }
        let has_own_values = self.values == ValueSource::Projected;
        let more = [
            (self.joined && (self.shared || !has_own_values), "q, k and v in one matrix, and none of its own"),
            (!has_own_values && self.v_dim != self.head_dim, "values that are keys of another size"),
            (self.shared && self.whole_norms, "norms over all of k that another layer has"),
        ];
        if let Some((_, what)) = more.into_iter().find(|(is_there, _)| *is_there) {
            return Some(what.into());
        }
        if self.gated && self.v_dim != self.head_dim {
            return Some("gated attention with values of another size than queries".into());
        }
        // Runs of pairs are moved, over whole heads.
        if self.adjacent_pairs && !self.head_dim.is_multiple_of(rotary_dim) {
            return Some(format!("pairs beside each other in {rotary_dim} of {} elements", self.head_dim));
        }
        (self.window == Some(0)).then(|| "a window of no positions".into())
    }
}

impl IndexDescription {
    /// Whether pools divide what it selects, and are not too large.
    fn has_pools_that_fit(&self) -> bool {
        self.pool.is_none_or(|size| (1..=MOST_POOLED).contains(&size) && self.top.is_multiple_of(size))
    }
}

impl MoeDescription {
    fn unsupported(&self) -> Option<String> {
        if let ExpertActivation::ClampedSwiGlu { alpha, added, .. } = self.activation
            && self.shared.is_some()
            && (alpha, added) != (1.0, 0.0)
        {
            return Some("a shared expert beside experts with another activation than its own".into());
        }
        let has_shared_apart = self.shared.is_some() && DenseActivation::of_shared(self.activation).is_some();
        if self.latent.is_some() && (self.biased || !has_shared_apart) {
            return Some("experts behind a projection, and biases, or no shared expert behind them".into());
        }
        if let RouterScoring::ByToken { tokens } = self.router.scoring {
            let wrong = tokens == 0 || self.router.k > self.count || self.router.correction_bias;
            return wrong.then(|| "experts by the token's number, and none or a choice among them".into());
        }
        let scoring = self.router.scoring(Vec::new());
        scoring.and_then(|scoring| scoring.check(self.count)).err()
    }
}
