//! Mamba-2 layers.

use anyhow::{Result, ensure};
use serde_json::Value;
use sluice_backend::StateSpaceShape;

use crate::config::Config;

/// A Mamba-2 layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StateSpaceDescription {
    /// Heads and sizes.
    pub shape: StateSpaceShape,
    /// Both projections have biases.
    pub biased: bool,
    /// The convolution has one.
    pub conv_biased: bool,
    /// Added to the mean square in the norm of each group.
    pub norm_eps: f64,
}

/// What a family's configs call what they say of such layers, and its defaults.
pub(crate) struct StateSpaceKeys {
    /// Heads, elements of a head, groups, elements of a state, taps.
    pub sizes: [(&'static str, Option<usize>); 5],
    /// Biases of both projections, and of the convolution.
    pub biases: [(&'static str, bool); 2],
    /// The epsilon of norms.
    pub norm_eps: (&'static str, f64),
}

impl StateSpaceDescription {
    /// The layer that a config describes by these keys.
    ///
    /// # Errors
    /// A key that is missing or wrong.
    pub(crate) fn read(config: &Config, keys: &StateSpaceKeys) -> Result<StateSpaceDescription> {
        let mut sizes = [0; 5];
        for (size, (key, default)) in sizes.iter_mut().zip(keys.sizes) {
            *size = match default {
                Some(default) => config.size_or(key, default)?,
                None => config.size(key)?,
            };
        }
        let [heads, head_dim, groups, state, taps] = sizes;
        let [of_heads, of_head, of_groups, of_state, _] = keys.sizes.map(|(key, _)| key);
        let path = config.path().display();
        config.product(&format!("`{of_heads}`, `{of_head}` and `{of_state}`"), &[heads, head_dim, state])?;
        config.product(&format!("`{of_groups}` and `{of_state}`"), &[groups, state])?;
        ensure!(heads.is_multiple_of(groups), "{path}: {heads} Mamba heads cannot share {groups} groups");
        check_limits(config)?;
        let [biased, conv_biased] = keys.biases;
        let (key, default) = keys.norm_eps;
        Ok(StateSpaceDescription {
            shape: StateSpaceShape { heads, head_dim, groups, state, taps },
            biased: config.flag_or(biased.0, biased.1)?,
            conv_biased: config.flag_or(conv_biased.0, conv_biased.1)?,
            norm_eps: config.float_or(key, default, |x| (0.0..=1.0).contains(&x), "a number from 0 to 1")?,
        })
    }
}

/// Refuses bounds of time steps but none: 0 and infinity. Python writes the second as no JSON, and newer versions of the reference as an object. The reference obeys others in prompts alone, not at
/// single tokens.
fn check_limits(config: &Config) -> Result<()> {
    const KEY: &str = "time_step_limit";
    let Some(found) = config.get(KEY) else { return Ok(()) };
    let is_infinite = |v: &Value| v.is_null() || v.get("__float__").and_then(Value::as_str) == Some("Infinity");
    let none = matches!(found.as_array().map(Vec::as_slice), Some([least, most]) if least.as_f64() == Some(0.0) && is_infinite(most));
    ensure!(none, "{}: `{KEY}` is {found}: bounds of time steps are not supported", config.path().display());
    Ok(())
}
