//! GatedDeltaNet layers.

use anyhow::{Result, ensure};
use sluice_backend::DeltaShape;

use crate::config::Config;

/// A layer of Kimi Delta Attention: a delta rule with a decay for each channel of its keys.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ChannelDeltaDescription {
    /// Heads and their sizes: as many of keys as of values.
    pub shape: DeltaShape,
    /// The lowest logarithm of a decay, where decays come of a sigmoid (GLM-5.3) and not of a softplus.
    pub bound: Option<f32>,
    /// Gates are a projection of the input, and not of a small vector (Kimi-K3).
    pub full_gate: bool,
}

impl ChannelDeltaDescription {
    /// Elements of all keys.
    pub fn keys(&self) -> usize {
        self.shape.value_heads * self.shape.key_dim
    }

    /// Elements of all values.
    pub fn values(&self) -> usize {
        self.shape.value_heads * self.shape.value_dim
    }

    /// Elements of what decays and gates are projections of.
    pub fn rank(&self) -> usize {
        self.shape.key_dim
    }
}

/// How a checkpoint stores the input projections of GatedDeltaNet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProjectionLayout {
    /// `in_proj_qkvz` and `in_proj_ba`, interleaved by key head: q, k, then its value heads' v and z; b and a alike (Qwen3-Next).
    ByKeyHead,
    /// `in_proj_qkv`, `in_proj_z`, `in_proj_b`, `in_proj_a` (Qwen3.5).
    Separate,
    /// `in_proj_qkv` and `in_proj_z` by themselves, `in_proj_ba` interleaved by key head (Qwen3-Next in GGUF).
    PairsByKeyHead,
}

/// A GatedDeltaNet layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeltaDescription {
    /// Heads and their sizes.
    pub shape: DeltaShape,
    /// Which of the projections are stored as one.
    pub layout: ProjectionLayout,
    /// The output's gate is a sigmoid, and not SiLU (Qwen4-Exp).
    pub sigmoid_gate: bool,
}

impl DeltaDescription {
    /// The layer that Qwen's configs describe.
    ///
    /// # Errors
    /// A key that is missing or wrong.
    pub fn read(config: &Config, layout: ProjectionLayout) -> Result<DeltaDescription> {
        let shape = DeltaShape {
            key_heads: config.size("linear_num_key_heads")?,
            value_heads: config.size("linear_num_value_heads")?,
            key_dim: config.size("linear_key_head_dim")?,
            value_dim: config.size("linear_value_head_dim")?,
            taps: config.size_or("linear_conv_kernel_dim", 4)?,
            tiled: false,
        };
        config.product("`linear_num_key_heads` and `linear_key_head_dim`", &[shape.key_heads, shape.key_dim])?;
        config.product(
            "`linear_num_value_heads`, `linear_key_head_dim` and `linear_value_head_dim`",
            &[shape.value_heads, shape.key_dim, shape.value_dim],
        )?;
        let (path, keys, values) = (config.path().display(), shape.key_heads, shape.value_heads);
        ensure!(values.is_multiple_of(keys), "{path}: {values} linear value heads cannot share {keys} key heads");
        Ok(DeltaDescription { shape, layout, sigmoid_gate: false })
    }

    /// Columns of its output.
    pub fn values(&self) -> usize {
        self.shape.value_heads * self.shape.value_dim
    }
}
