//! Which layers of a model there are, where it is divided.

/// Layers of a model: from this one to before that one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerRange {
    /// The first.
    pub from: usize,
    /// The one behind the last.
    pub to: usize,
}

/// Which part of a model a description is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cut {
    /// The layers that are left.
    pub layers: LayerRange,
    /// Layers of the whole model.
    pub all: usize,
}
