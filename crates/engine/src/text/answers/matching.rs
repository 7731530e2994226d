//! Whether a text that is still arriving begins with something.

use super::tools::ParameterType;

/// Whether a text matches, as far as it has come.
pub(super) enum Match<T> {
    Yes(T),
    No,
    /// The text is too short to tell.
    Partial,
}

/// The beginning of a parameter.
pub(super) struct ParameterHead<'a> {
    pub name: &'a str,
    /// Bytes of it.
    pub len: usize,
    /// Its type, if the model says it.
    pub kind: Option<ParameterType>,
}

impl<'a> Match<(&'a str, usize)> {
    /// The beginning of a parameter of which the model does not say the type.
    pub fn untyped(self) -> Match<ParameterHead<'a>> {
        match self {
            Match::Yes((name, len)) => Match::Yes(ParameterHead { name, len, kind: None }),
            Match::No => Match::No,
            Match::Partial => Match::Partial,
        }
    }
}
