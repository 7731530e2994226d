//! What a description may say that no operation computes. This is the one place that refuses it: whatever passes here, loading passes on to the
//! backend.

use anyhow::{Result, ensure};

use super::attention::{AttentionDescription, AttentionVariant};
use super::experts::{ExpertActivation, MoeDescription};
use super::{Description, FeedForwardDescription, MixerDescription};

impl Description {
    /// Refuses a variant that is described and that no operation computes.
    ///
    /// # Errors
    /// Names the variant and the first layer that has it.
    pub fn check_operations(&self) -> Result<()> {
        for (number, layer) in self.layers.iter().enumerate() {
            let unsupported = match &layer.mixer {
                MixerDescription::Attention(attention) => attention.unsupported(),
                MixerDescription::DeltaNet(_) => None,
            };
            let unsupported = unsupported.or_else(|| match &layer.feed_forward {
                FeedForwardDescription::Dense { .. } => None,
                FeedForwardDescription::Moe(moe) => moe.unsupported(),
            });
            let what = unsupported.as_deref().unwrap_or_default();
            let architecture = self.architecture;
            ensure!(what.is_empty(), "{architecture}: layer {number} has {what}, which no operation computes");
        }
        Ok(())
    }
}

impl AttentionDescription {
    fn unsupported(&self) -> Option<String> {
        if let AttentionVariant::Latent(_) = self.variant {
            return Some("latent attention".into());
        }
        if self.gated && self.v_dim != self.head_dim {
            return Some("gated attention with values of another size than queries".into());
        }
        (self.window == Some(0)).then(|| "a window of no positions".into())
    }
}

impl MoeDescription {
    fn unsupported(&self) -> Option<String> {
        if self.activation == ExpertActivation::GeGlu {
            return Some("experts with GELU".into());
        }
        let scoring = self.router.scoring(Vec::new());
        scoring.and_then(|scoring| scoring.check(self.count)).err()
    }
}
