//! Choices of the user that change what a model is.

use crate::description::LayerRange;

/// How to load a model.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// The most tokens that one step takes.
    pub max_tokens: usize,
    /// The most positions that will be used; `None`: the model's own maximum. Some rotary scalings depend on it.
    pub context: Option<usize>,
    /// Experts per token instead of the router's own number. Changes the model's output.
    pub experts_per_token: Option<usize>,
    /// Whether the head that predicts one token more is loaded, if the checkpoint has one. It changes no output.
    pub mtp: bool,
    /// Only these layers; `None`: all.
    pub layers: Option<LayerRange>,
}

impl Default for Options {
    /// The model's own values and one token per step: enough to inspect it.
    fn default() -> Options {
        Options { max_tokens: 1, context: None, experts_per_token: None, mtp: false, layers: None }
    }
}
