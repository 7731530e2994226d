//! What a description may say that no operation computes. This is the one place that refuses it: whatever passes here, loading passes on to the
//! backend.

use anyhow::{Result, ensure};

use super::attention::{AttentionDescription, AttentionVariant};
use super::experts::MoeDescription;
use super::{Description, FeedForwardDescription, LayerDescription, MixerDescription, ValueSource};

impl Description {
    /// Refuses a variant that is described and that no operation computes.
    ///
    /// # Errors
    /// Names the variant and the first layer that has it.
    pub fn check_operations(&self) -> Result<()> {
        for (number, layer) in self.layers.iter().enumerate() {
            let unnormed = (!self.input_norms).then(|| "no norm of its input".to_owned());
            let unsupported = match &layer.mixer {
                MixerDescription::Attention(_) if !self.input_norms && !self.output_norms => unnormed.clone(),
                MixerDescription::Attention(a) if a.variant != AttentionVariant::Grouped && self.output_norms => {
                    Some("latent attention with norms of outputs".to_owned())
                }
                MixerDescription::Attention(attention) => attention.unsupported(self.rotary_dim(attention)),
                MixerDescription::DeltaNet(_) => unnormed.clone(),
            };
            let before = &self.layers[..number];
            let unsupported = unsupported.or_else(|| match &layer.mixer {
                MixerDescription::Attention(a) if a.shared => a.unshared(before),
                _ => None,
            });
            let unsupported = unsupported.or_else(|| match &layer.feed_forward {
                FeedForwardDescription::Dense { .. } => None,
                FeedForwardDescription::Moe(moe) => moe.unsupported().or(unnormed),
                FeedForwardDescription::Beside { .. } if !self.output_norms => {
                    Some("a dense part and a mixture side by side, without norms of what they put out".into())
                }
                FeedForwardDescription::Beside { moe, .. } => moe.unsupported().or(unnormed),
            });
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
        let of_windows = self.window_rotary.as_ref().filter(|_| attention.window.is_some());
        2 * of_windows.unwrap_or(&self.rotary).inv_freq.len()
    }
}

impl AttentionDescription {
    /// Why this layer cannot share the keys and values of an earlier one, if it cannot. `before`: all earlier layers.
    fn unshared(&self, before: &[LayerDescription]) -> Option<String> {
        let own = self.cache_group();
        let stores = |layer: &LayerDescription| match &layer.mixer {
            MixerDescription::Attention(a) => !a.shared && a.cache_group().is_like(&own),
            MixerDescription::DeltaNet(_) => false,
        };
        (!before.iter().any(stores)).then(|| "keys and values of a layer before it, and there is none like it".into())
    }

    fn unsupported(&self, rotary_dim: usize) -> Option<String> {
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
            ];
            let found = more.into_iter().find(|(is_there, _)| *is_there);
            return found.map(|(_, what)| format!("latent attention with {what}"));
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

impl MoeDescription {
    fn unsupported(&self) -> Option<String> {
        let scoring = self.router.scoring(Vec::new());
        scoring.and_then(|scoring| scoring.check(self.count)).err()
    }
}
