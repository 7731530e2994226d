//! Which layers have a window.

use anyhow::{Result, bail, ensure};

use crate::config::Config;

/// Kinds of layers, as `layer_types` names them.
pub(crate) const WINDOWED: &str = "sliding_attention";
pub(crate) const FULL: &str = "full_attention";

/// Each layer's window: by `layer_types`, or where the config has no such list, by `otherwise`, which says it for the layer of a number.
///
/// # Errors
/// A list of another length, another kind of layer, and a layer with a window where `window` is `None`.
pub(crate) fn layer_windows(
    config: &Config,
    count: usize,
    window: Option<usize>,
    otherwise: impl Fn(usize) -> bool,
) -> Result<Vec<Option<usize>>> {
    let Some(types) = config.strings("layer_types")? else {
        return Ok((0..count).map(|layer| window.filter(|_| otherwise(layer))).collect());
    };
    let path = config.path().display();
    ensure!(types.len() == count, "{path}: {} layer_types for {count} layers", types.len());
    types
        .into_iter()
        .map(|kind| match (kind, window) {
            (FULL, _) => Ok(None),
            (WINDOWED, Some(window)) => Ok(Some(window)),
            (WINDOWED, None) => bail!("{path}: {WINDOWED} layers, but no sliding_window"),
            (other, _) => bail!("{path}: layer type {other:?} is not known here"),
        })
        .collect()
}
